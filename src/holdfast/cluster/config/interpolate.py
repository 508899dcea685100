"""Resolve `${run.env.host}`, `${oc.env:VAR,default}` and `???`, with OmegaConf.

Unlike OmegaConf alone, this reports all problems at once with their places, takes the environment as an argument, and
never makes `None/evaluations` of a path that contains an unset value.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.cluster.config.provenance import DEFAULT, Tree, leaves
from holdfast.errors import ConfigError, Problem, UsageError
from holdfast.spec.document import Location, format_location
from holdfast.spec.redact import looks_secret
from holdfast.spec.validation import suggest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.cluster.config.profiles import Profile

MANDATORY = "???"
NOT_HERE = {
    "art": "names an artifact, and Holdfast has none: write the path itself",
    "manifest": "names an artifact, and Holdfast has none: write the path itself",
    "auto_mount": "is not supported: check the code out and name its folder under mounts",
}


@dataclass(frozen=True)
class Interpolated:
    """The resolved values, with notices."""

    tree: Tree
    notices: tuple[str, ...]
    used: frozenset[str] = frozenset()
    """the keys that other values refer to, and those around them"""


def interpolate(tree: Tree, environ: Mapping[str, str], profile: Profile | None) -> Interpolated:
    """Resolve every reference. Raises ConfigError with everything that is missing or cannot be resolved."""
    problems = list(_refused(tree))
    if problems:
        raise ConfigError(problems)
    resolved = Tree(copy.deepcopy(tree.data), dict(tree.origins))
    missing = [location for location, value in leaves(tree.data) if value == MANDATORY]
    references = [
        (location, value) for location, value in leaves(tree.data) if isinstance(value, str) and "${" in value
    ]
    unset: dict[str, None] = {}
    if references:
        look_up = _Lookup(tree, environ, problems)
        for location, text in references:
            value = look_up.resolve(location, text)
            if isinstance(value, _Unset):
                name, value = value.name, None
                unset[name] = None
                whole = re.fullmatch(r"\$\{[^${}]*\}", text)
                preview = profile is None and name.startswith("run.")
                if not whole and not preview and name not in map(format_location, missing):
                    problems.append(Problem(tree.where(location), _not_set(name, text, profile)))
            resolved.put(location, value, _origin(tree, location, text))
    problems.extend(_missing_value(tree, place) for place in missing)
    if problems:
        raise ConfigError(problems)
    names = [name for name in unset if name.startswith("run.env.")]
    notices = [f"without a profile these are unknown: {', '.join(names)}; name one with --run or --batch"]
    used = frozenset(
        ".".join(parts[:depth])
        for _, text in references
        for parts in (name.split(".") for name in _NAMES.findall(text))
        for depth in range(1, len(parts) + 1)
    )
    return Interpolated(resolved, tuple(notices if profile is None and names else ()), used)


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


_ENVIRONMENT = "_environment_"
"""the key under which variables are looked up. OmegaConf's own oc.env, which reads this
process's environment, is not used"""
_VARIABLE = re.compile(r"(?<!\\)\$\{\s*oc\.env\s*:\s*([A-Za-z_]\w*)\s*([,}])")
_NAMES = re.compile(r"\$\{(?:oc\.select:)?([\w-]+(?:\.[\w-]+)*)")
_ESCAPE = r"(A shell's own variable is written \${NAME} or $NAME.)"


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


def _not_set(name: str, text: str, profile: Profile | None) -> str:
    message = f"{text} needs {name}, which has no value"
    if name.startswith("run.env.") and profile is not None:
        return (
            f"{message}: write {name.removeprefix('run.env.')} into [{profile.name}] ({profile.place}) or into run.env"
        )
    return message


def _origin(tree: Tree, location: Location, text: str) -> str:
    """Return the origin of a text, and those of the values it refers to."""
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
