"""Nested values that remember where each of them was written: merged, resolved, and rendered.

A configuration has layers: defaults, files, a profile, the command line. Merging keeps the place of the winning layer
for every key, so that messages and the compiled configuration can name it.

`interpolate` resolves `${run.env.host}`, `${oc.env:VAR,default}` and `???` with OmegaConf. Unlike OmegaConf itself, it
reports all problems at once with their places, takes the environment as an argument, and never makes `None/evaluations`
of a path that contains an unset value.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError, Problem, UsageError, suggest
from holdfast.spec.document import Document, Location, format_location
from holdfast.spec.redact import looks_secret

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

COMMAND_LINE = "command line"
DEFAULT = "default ("
"""how the places of values from built-in groups begin"""
MANDATORY = "???"
NOT_HERE = {
    "art": "names an artifact, which Holdfast does not have: write the path itself",
    "manifest": "names an artifact, which Holdfast does not have: write the path itself",
    "auto_mount": "is not supported: check the code out and name its folder under mounts",
}
"""resolvers of other tools"""
TITLE = "Compiled Configuration"
ORDER = ("run", "execution", "deployment", "auxiliary_deployments", "target", "env_vars", "evaluation", "export")
_ENVIRONMENT = "_environment_"
"""the key under which variables are looked up. OmegaConf's own oc.env, which reads this
process's environment, is not used"""
_VARIABLE = re.compile(r"(?<!\\)\$\{\s*oc\.env\s*:\s*([A-Za-z_]\w*)\s*([,}])")
_WHOLE = re.compile(r"\$\{[^${}]*\}")
"""a text that is only one reference"""
_NAMES = re.compile(r"\$\{(?:oc\.select:)?([\w-]+(?:\.[\w-]+)*)")
_ESCAPE = r"(A shell's own variable is written \${NAME} or $NAME.)"
_PLAIN = re.compile(r"[A-Za-z/_][\w/.+@%-]*(?: [\w/.+@%-]+)*|host:\w+|runtime:\w+")
_WORDS = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")


@dataclass
class Tree:
    """Values, and for each key, item and leaf its origin: `file:line`, `command line`, `default (…)`."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[Location, str] = field(default_factory=dict)

    def get(self, *location: str | int) -> Any:
        """Return the value at a location, or None."""
        node: Any = self.data
        for part in location:
            if isinstance(node, dict):
                node = node.get(part)
            elif isinstance(node, list) and isinstance(part, int) and part < len(node):
                node = node[part]
            else:
                return None
        return node

    def origin(self, location: Location) -> str:
        """Return the place at which a value was written; if that is unknown, the place of a value around it."""
        while location and location not in self.origins:
            location = location[:-1]
        return self.origins.get(location, "")

    def where(self, location: Location) -> str:
        """Return `file:line: key`, with which messages begin."""
        place, name = self.origin(location), format_location(location)
        return f"{place}: {name}" if place and name else place or name

    def put(self, location: Location, value: Any, origin: str) -> None:
        """Set a value with one origin. Missing mappings are created; a name in a list becomes a mapping."""
        node: Any = self.data
        for depth, part in enumerate(location[:-1]):
            if isinstance(node, dict) and not isinstance(node.get(str(part)), dict | list):
                self._forget(location[: depth + 1])
                node[str(part)] = {}
                self.origins[location[: depth + 1]] = origin
            elif isinstance(node, list) and isinstance(part, int) and not isinstance(node[part], dict | list):
                self.origins[(*location[: depth + 1], "name")] = self.origin(location[: depth + 1])
                node[part] = {"name": node[part]}
            node = node[part]
        self._forget(location)
        node[location[-1]] = copy.deepcopy(value)
        for inner, _ in walk(value, location):
            self.origins[inner] = origin

    def remove(self, location: Location) -> None:
        """Remove a value."""
        node = self.get(*location[:-1])
        del node[location[-1]]
        self._forget(location)

    def over(self, base: Tree) -> Tree:
        """Merge this over `base`: mappings are merged, everything else is replaced. Neither tree changes."""
        merged = Tree(
            copy.deepcopy(base.data), {**base.origins, **({(): self.origins[()]} if () in self.origins else {})}
        )
        _merge(merged, self, ())
        return merged

    def at(self, package: tuple[str, ...]) -> Tree:
        """Return the tree under a key, as the file of a group is under the group's name."""
        data: dict[str, Any] = copy.deepcopy(self.data)
        for part in reversed(package):
            data = {part: data}
        return Tree(data, {(*package, *location): origin for location, origin in self.origins.items()})

    def below(self, location: Location) -> Tree:
        """Return the subtree at a location."""
        inner = self.get(*location)
        depth = len(location)
        origins = {place[depth:]: origin for place, origin in self.origins.items() if place[:depth] == location}
        return Tree(copy.deepcopy(inner) if isinstance(inner, dict) else {}, origins)

    def _forget(self, location: Location) -> None:
        for place in [place for place in self.origins if place[: len(location)] == location]:
            del self.origins[place]


def tree_of(document: Document, name: str, *, lines: bool = True) -> Tree:
    """Return the values of a file with their lines, or only with the name of the file."""
    numbers = document.lines if lines and document.lines else {}
    origins: dict[Location, str] = {}
    for location, _ in walk(document.data, ()):
        if not location:
            continue
        nearest = location
        while nearest and not numbers.get(nearest):
            nearest = nearest[:-1]
        origins[location] = f"{name}:{numbers[nearest]}" if nearest else name
    return Tree(copy.deepcopy(document.data), origins)


def walk(value: Any, location: Location) -> Iterator[tuple[Location, Any]]:
    """Yield every value with its location, containers before their contents."""
    yield location, value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield from walk(below, (*location, key))


def leaves(value: Any, location: Location = ()) -> Iterator[tuple[Location, Any]]:
    """Yield the values that contain no others."""
    return ((place, inner) for place, inner in walk(value, location) if not isinstance(inner, dict | list) or not inner)


def _merge(merged: Tree, top: Tree, location: Location) -> None:
    for key, value in top.get(*location).items():
        place = (*location, key)
        if isinstance(value, dict) and isinstance(merged.get(*place), dict):
            _merge(merged, top, place)
            continue
        merged.put(place, value, top.origin(place))
        for inner, _ in walk(value, place):
            merged.origins[inner] = top.origin(inner)


@dataclass(frozen=True)
class Resolved:
    """A configuration without references, with the origin of each value."""

    tree: Tree
    notices: tuple[str, ...]
    used: frozenset[str] = frozenset()
    """keys that other values refer to: `deployment` and `deployment.port` for `${deployment.port}`"""


def interpolate(tree: Tree, environ: Mapping[str, str], profile: str | None) -> Resolved:
    """Resolve every reference. Raises ConfigError with everything that is missing or cannot be resolved.

    `profile` is the profile as messages name it; None for a preview without one.
    """
    problems = list(_refused(tree))
    if problems:
        raise ConfigError(problems)
    resolved = Tree(copy.deepcopy(tree.data), dict(tree.origins))
    missing = [location for location, value in leaves(tree.data) if value == MANDATORY]
    references = [
        (location, value) for location, value in leaves(tree.data) if isinstance(value, str) and "${" in value
    ]
    unset: dict[str, None] = {}
    look_up = _Lookup(tree, environ, problems) if references else None
    for location, text in references:
        assert look_up is not None
        value = look_up.resolve(location, text)
        if isinstance(value, _Unset):
            name, value = value.name, None
            unset[name] = None
            is_preview = profile is None and name.startswith("run.")
            if not is_preview and not _WHOLE.fullmatch(text) and name not in map(format_location, missing):
                problems.append(Problem(tree.where(location), _not_set(name, text, profile)))
        resolved.put(location, value, _origin(tree, location, text))
    problems.extend(_missing_value(tree, place) for place in missing)
    if problems:
        raise ConfigError(problems)
    names = [name for name in unset if name.startswith("run.env.")] if profile is None else []
    notice = f"without a profile these are unknown: {', '.join(names)}; name one with --run or --batch"
    return Resolved(resolved, (notice,) if names else (), frozenset(_keys_in(text for _, text in references)))


def _keys_in(texts: Iterable[str]) -> Iterator[str]:
    """Yield the keys that texts refer to, and those around them."""
    for name in (name for text in texts for name in _NAMES.findall(text)):
        parts = name.split(".")
        yield from (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))


def _missing_value(tree: Tree, location: Location) -> Problem:
    """Return the problem of a `???`, at the user's file if a built-in group requires the value."""
    name, origin = format_location(location), tree.origin(location)
    remedy = f"write it, or {name}=… on the command line"
    if not origin.startswith(DEFAULT):
        return Problem(tree.where(location), f"must be given: {remedy}")
    group = origin.removeprefix(DEFAULT).rstrip(")")
    return Problem(": ".join(filter(None, (tree.origin(()), name))), f"must be given, {group} needs it: {remedy}")


def escape(text: str) -> str:
    """Escape references in a text, so that it is read as it is."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", text)


@dataclass(frozen=True)
class _Unset:
    """A reference to a key that has no value."""

    name: str


class _Lookup:
    """OmegaConf over the whole tree. Null values count as missing, so that they never become part of a text."""

    def __init__(self, tree: Tree, environ: Mapping[str, str], problems: list[Problem]) -> None:
        try:
            from omegaconf import OmegaConf
        except ImportError as error:
            raise UsageError(
                "configurations for clusters need OmegaConf",
                remedy="pip install omegaconf",
            ) from error
        from omegaconf.errors import GrammarParseError

        self.tree, self.problems = tree, problems
        data, variables = copy.deepcopy(tree.data), set[str]()
        for location, value in leaves(data):
            if value is None:
                _set(data, location, MANDATORY)
            elif isinstance(value, str) and "${" in value:
                variables.update(name for name, _ in _VARIABLE.findall(value))
                _set(data, location, _VARIABLE.sub(_from_environment, value))
        data[_ENVIRONMENT] = {name: escape(environ[name]) for name in variables if name in environ}
        try:
            self.config = OmegaConf.create(data)
        except GrammarParseError:
            for location, value in leaves(data):
                if isinstance(value, str) and "${" in value and not self.readable(location, value):
                    _set(data, location, "")
            self.config = OmegaConf.create(data)

    def readable(self, location: Location, text: str) -> bool:
        from omegaconf import OmegaConf
        from omegaconf.errors import GrammarParseError

        try:
            OmegaConf.create([text])
        except GrammarParseError as error:
            message = str(error).splitlines()[0]
            self.problems.append(Problem(self.tree.where(location), f"cannot be parsed: {message}. {_ESCAPE}"))
            return False
        return True

    def resolve(self, location: Location, text: str) -> Any:
        from omegaconf import DictConfig, ListConfig, OmegaConf
        from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

        node: Any = self.config
        try:
            for part in location:
                node = node[part]
        except InterpolationToMissingValueError as error:
            name = re.search(r"Missing mandatory value: (\S+)", str(error))
            return _Unset(name[1] if name else text)
        except OmegaConfBaseException as error:
            self.problems.append(Problem(self.tree.where(location), self.explain(str(error).splitlines()[0], text)))
            return None
        if isinstance(node, DictConfig | ListConfig):
            try:
                return OmegaConf.to_container(node, resolve=True)
            except RecursionError:
                self.problems.append(Problem(self.tree.where(location), f"{text} contains itself"))
                return None
            except OmegaConfBaseException as error:
                self.problems.append(Problem(self.tree.where(location), self.explain(str(error).splitlines()[0], text)))
                return None
        return node

    def explain(self, message: str, text: str) -> str:
        key = re.search(r"Interpolation key '(.*?)' not found", message)
        if key and key[1].startswith(_ENVIRONMENT):
            name = key[1].removeprefix(f"{_ENVIRONMENT}.")
            return f"the environment variable {name} is not set: set it, or write ${{oc.env:{name},default}}"
        if key:
            names = [format_location(location) for location in self.tree.origins] + [
                f"run.env.{name}" for name in self.tree.get("run", "env") or {}
            ]
            return f"{text}: there is no key {key[1]!r}{suggest(key[1], names)}. {_ESCAPE}"
        kind = re.search(r"Unsupported interpolation type (\S+)", message)
        if kind:
            return f"{text}: unknown resolver {kind[1]!r}; there are oc.env and oc.select. {_ESCAPE}"
        return message.partition("while resolving interpolation: ")[2].strip("\"'") or message


def _from_environment(match: re.Match[str]) -> str:
    """Rewrite `${oc.env:NAME}` to a reference, and `${oc.env:NAME,default}` to a choice."""
    name = f"{_ENVIRONMENT}.{match[1]}"
    return f"${{{name}}}" if match[2] == "}" else f"${{oc.select:{name},"


def _refused(tree: Tree) -> Iterator[Problem]:
    """Yield problems of references that are not supported."""
    for location, text in leaves(tree.data):
        if not isinstance(text, str) or "${" not in text:
            continue
        for kind in re.findall(r"(?<!\\)\$\{\s*(\w+):", text):
            if kind in NOT_HERE:
                yield Problem(tree.where(location), f"{text} {NOT_HERE[kind]}")
        if "oc.env" in _VARIABLE.sub("", text):
            yield Problem(tree.where(location), f"{text}: the variable's name is written out, as in ${{oc.env:NAME}}")
        for name, _ in _VARIABLE.findall(text):
            if "env_vars" in location:
                message = f"would write the value into files; write host:{name}, which is resolved only in the job"
                yield Problem(tree.where(location), f"${{oc.env:{name}}} {message}")
            elif looks_secret(name):
                message = "would write a secret into files and process lists; pass it as an environment variable"
                yield Problem(tree.where(location), f"${{oc.env:{name}}} {message} (env_vars: {{{name}: host:{name}}})")


def _not_set(name: str, text: str, profile: str | None) -> str:
    message = f"{text} needs {name}, which has no value"
    if name.startswith("run.env.") and profile is not None:
        return f"{message}: write {name.removeprefix('run.env.')} into {profile} or into run.env"
    return message


def _origin(tree: Tree, location: Location, text: str) -> str:
    """Return the origins of a text and of the values that it refers to."""
    sources = [f"${name}" for name, _ in _VARIABLE.findall(text)]
    for name in _NAMES.findall(text):
        place = tree.origins.get(tuple(name.split(".")), "")
        if place and place not in sources:
            sources.append(place)
    return " ← ".join([tree.origin(location), *sources])


def _set(data: Any, location: Location, value: Any) -> None:
    for part in location[:-1]:
        data = data[part]
    data[location[-1]] = value


def compiled_yaml(tree: Tree) -> str:
    """Return a compiled configuration as YAML that can be run again, with the origin of each value as a comment.

    It contains no secrets: variables appear by their names.
    """
    tree = Tree(_without_unset(tree.data), tree.origins)
    shown: list[str] = []
    for name in sorted(tree.data, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
        lines = list(_lines(tree, {name: tree.data[name]}, (), 0))
        width = min(max((len(text) for text, place in lines if place), default=0), 60)
        shown += [f"{text:<{width}}  # {place}" if place else text for text, place in lines]
    return "\n".join(shown) + "\n"


def _without_unset(data: dict[str, Any]) -> dict[str, Any]:
    """Leave out the keys of `run` that are not set."""
    run = {}
    for key, block in data.get("run", {}).items():
        kept = {name: value for name, value in block.items() if value is not None} if isinstance(block, dict) else block
        if kept not in ({}, None):
            run[key] = kept
    if isinstance(run.get("env"), dict) and "container_image" in run["env"]:
        run["env"].pop("container", None)
    rest = {key: value for key, value in data.items() if key != "run"}
    return {"run": run, **rest} if run else rest


def _lines(tree: Tree, node: Any, location: Location, depth: int) -> Iterator[tuple[str, str]]:
    """Yield lines of YAML, each with the place of its value."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in pairs:
        place = (*location, key)
        lead = "  " * depth + (f"{_scalar(key)}:" if isinstance(key, str) else "-")
        if isinstance(value, dict | list) and value:
            if isinstance(key, int) and isinstance(value, dict):
                inner = list(_lines(tree, value, place, depth + 1))
                first, origin = inner[0]
                yield "  " * depth + "- " + first.lstrip(), origin
                yield from inner[1:]
            else:
                yield lead, ""
                yield from _lines(tree, value, place, depth + 1)
        else:
            yield f"{lead} {_scalar(value)}", tree.origin(place)


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    text = escape(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return json.dumps(text, ensure_ascii=False)
