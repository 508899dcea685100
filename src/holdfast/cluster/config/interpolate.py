"""`${run.env.host}`, `${oc.env:VAR,default}` and `???`: what stands for something else, replaced by what it stands for.

OmegaConf does it, by its own grammar. Here is what it does not do: every problem at once and each at its place, an
environment that is handed in, and no `None/evaluations` where a path was built on something nobody has set.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.cluster.config.provenance import DEFAULT, Tree, leaves
from holdfast.errors import ConfigError, Problem, UsageError
from holdfast.spec.document import Location, dotted
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
    """The values with nothing left to look up, and what should be said about them."""

    tree: Tree
    notices: tuple[str, ...]
    used: frozenset[str] = frozenset()
    """the keys that were looked up"""


def interpolate(tree: Tree, environ: Mapping[str, str], profile: Profile | None) -> Interpolated:
    """Replace every reference. Raises ConfigError with all that is missing or cannot be looked up."""
    problems = list(_refused(tree))
    if problems:
        raise ConfigError(problems)
    made = Tree(copy.deepcopy(tree.data), dict(tree.origins))
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
                if not whole and not preview and name not in map(dotted, missing):
                    problems.append(Problem(tree.where(location), _not_set(name, text, profile)))
            made.put(location, value, _origin(tree, location, text))
    problems.extend(_lacking(tree, place) for place in missing)
    if problems:
        raise ConfigError(problems)
    asked = [name for name in unset if name.startswith("run.env.")]
    notices = [f"no profile is given, so {', '.join(asked)} has no value: name one with --run or --batch"]
    used = frozenset(name for _, text in references for name in _NAMES.findall(text))
    return Interpolated(made, tuple(notices if profile is None and asked else ()), used)


def _lacking(tree: Tree, location: Location) -> Problem:
    """What nobody has said yet, and where to write it: beside the rest, where only a group of ours asks for it."""
    name, asked = dotted(location), tree.origin(location)
    remedy = f"write it, or {name}=… on the command line"
    if not asked.startswith(DEFAULT):
        return Problem(tree.where(location), f"must be given: {remedy}")
    group = asked.removeprefix(DEFAULT).rstrip(")")
    return Problem(": ".join(filter(None, (tree.origin(()), name))), f"must be given, {group} needs it: {remedy}")


def escaped(text: str) -> str:
    """A text that means itself when it is read again."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", text)


@dataclass(frozen=True)
class _Unset:
    """A reference to a key that has no value."""

    name: str


class _Lookup:
    """OmegaConf over the whole tree. What is null is missing to it, so that it never becomes part of a text."""

    def __init__(self, tree: Tree, environ: Mapping[str, str], problems: list[Problem]) -> None:
        try:
            from omegaconf import OmegaConf
        except ImportError as error:
            raise UsageError(
                "configurations for clusters need OmegaConf",
                remedy="pip install omegaconf",
            ) from error
        self.tree, self.problems = tree, problems
        data = copy.deepcopy(tree.data)
        for location, value in leaves(data):
            if value is None:
                _set(data, location, MANDATORY)
            elif isinstance(value, str) and "${" in value:
                text = _VARIABLE.sub(_from_environment, value)
                _set(data, location, text if self.readable(location, text) else "")
        data[_ENVIRONMENT] = {name: escaped(value) for name, value in environ.items()}
        self.config = OmegaConf.create(data)

    def readable(self, location: Location, text: str) -> bool:
        from omegaconf import OmegaConf
        from omegaconf.errors import GrammarParseError

        try:
            OmegaConf.create([text])
        except GrammarParseError as error:
            said = str(error).splitlines()[0]
            self.problems.append(Problem(self.tree.where(location), f"cannot be read: {said}. {_ESCAPE}"))
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
            except OmegaConfBaseException as error:
                self.problems.append(Problem(self.tree.where(location), self.explain(str(error).splitlines()[0], text)))
                return None
        return node

    def explain(self, said: str, text: str) -> str:
        key = re.search(r"Interpolation key '(.*?)' not found", said)
        if key and key[1].startswith(_ENVIRONMENT):
            name = key[1].removeprefix(f"{_ENVIRONMENT}.")
            return f"the environment variable {name} is not set: set it, or write ${{oc.env:{name},default}}"
        if key:
            known = [dotted(location) for location in self.tree.origins] + [
                f"run.env.{name}" for name in self.tree.get("run", "env") or {}
            ]
            return f"{text}: there is no key {key[1]!r}{suggest(key[1], known)}. {_ESCAPE}"
        kind = re.search(r"Unsupported interpolation type (\S+)", said)
        if kind:
            return f"{text}: nothing is known of {kind[1]!r}; there are oc.env and oc.select. {_ESCAPE}"
        return said.partition("while resolving interpolation: ")[2].strip("\"'") or said


_ENVIRONMENT = "_environment_"
"""the key under which variables are looked up. OmegaConf's own oc.env, which reads this
process's environment, is not used"""
_VARIABLE = re.compile(r"(?<!\\)\$\{\s*oc\.env\s*:\s*([A-Za-z_]\w*)\s*([,}])")
_NAMES = re.compile(r"\$\{(?:oc\.select:)?([\w-]+(?:\.[\w-]+)+)")
_ESCAPE = r"(A shell's own variable is written \${NAME} or $NAME.)"


def _from_environment(match: re.Match[str]) -> str:
    """`${oc.env:NAME}` as a reference to what was handed in, and `${oc.env:NAME,default}` as a choice."""
    name = f"{_ENVIRONMENT}.{match[1]}"
    return f"${{{name}}}" if match[2] == "}" else f"${{oc.select:{name},"


def _refused(tree: Tree) -> Iterator[Problem]:
    """References that are not followed at all."""
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
                said = "would write the value into files; write host:"
                yield Problem(
                    tree.where(location), f"${{oc.env:{name}}} {said}{name}, which stays a name until it is used"
                )
            elif looks_secret(name):
                said = "would write a secret into files and process lists; pass it as an environment variable"
                yield Problem(tree.where(location), f"${{oc.env:{name}}} {said} (env_vars: {{{name}: host:{name}}})")


def _not_set(name: str, text: str, profile: Profile | None) -> str:
    said = f"{text} needs {name}, which has no value"
    if name.startswith("run.env.") and profile is not None:
        return f"{said}: write {name.removeprefix('run.env.')} into [{profile.name}] ({profile.place}) or into run.env"
    return said


def _origin(tree: Tree, location: Location, text: str) -> str:
    """Where the text stands, and where what it stands for was written."""
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
