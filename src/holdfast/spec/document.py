"""YAML 1.2 with positions, so that a problem can be named by file and line, and values as people write them.

JSON is YAML. Values are durations and sizes such as `5m` and `64MB`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Location = tuple[str | int, ...]


def format_location(location: Sequence[str | int]) -> str:
    """Return a location as users write it: `graders[0].type`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


@dataclass(frozen=True)
class Document:
    """A mapping from a file or from Python, and the line of each of its keys."""

    data: dict[str, Any]
    path: Path | None = None
    lines: dict[Location, int] | None = None
    elsewhere: Mapping[Location, tuple[Document, Location]] = field(default_factory=dict)
    """the origins of parts that come from another file, or from another place in this one"""
    notices: tuple[str, ...] = ()
    """warnings for the user"""

    def where(self, location: Location) -> str:
        """Return `file:line: key`, with the line of the nearest key that has one."""
        for end in range(len(location), 0, -1):
            if (origin := self.elsewhere.get(location[:end])) is not None:
                return origin[0].where((*origin[1], *location[end:]))
        name = format_location(location)
        if self.path is None:
            return name
        nearest = location
        while nearest and (self.lines is None or nearest not in self.lines):
            nearest = nearest[:-1]
        line = self.lines.get(nearest) if self.lines else None
        place = f"{self.path}:{line}" if line else str(self.path)
        return f"{place}: {name}" if name else place


def read_document(path: Path) -> Document:
    """Read a YAML file whose top is a mapping."""
    return parse_document(read_text(path), path)


def read_text(path: Path) -> str:
    """Read a text file without changing its line ends."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(
            [Problem(str(path), "no such file")], remedy="`holdfast init` writes an eval to start from."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error}")]) from error


def file_inside(folder: Path, name: str, where: str) -> bytes:
    """Read a file in the eval's folder; `where` names the place in the eval file for messages."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ConfigError([Problem(where, f"{name} is outside the eval file's folder")])
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            [Problem(where, f"{path} cannot be read: {error.strerror or error}")],
            remedy="Paths are relative to the eval file's folder.",
        ) from error


def parse_document(
    text: str, path: Path, shape: str = "an eval file is a mapping of keys such as name, dataset, target, prompt"
) -> Document:
    """Parse a YAML mapping. Error messages name `path`, and describe the expected mapping with `shape`."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        tree = YAML(typ="rt").load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = " ".join(str(error.problem or error.context or "not valid YAML").split())
        written = "".join(text.splitlines()[mark.line : mark.line + 1]) if mark else ""
        braces = "Between { and } write ??? in quotes, or put its key on a line of its own."
        remedy = braces if "???" in written else None
        raise ConfigError([Problem(place, f"not valid YAML: {problem}")], remedy=remedy) from error
    except YAMLError as error:
        raise ConfigError([Problem(str(path), f"not valid YAML: {error}")]) from error
    if not isinstance(tree, dict):
        raise ConfigError([Problem(str(path), shape)])
    lines: dict[Location, int] = {}
    try:
        document = Document(_plain(tree, (), lines), path, lines)
    except UnicodeDecodeError as error:
        raise ConfigError(
            [Problem(str(path), "contains half of a surrogate pair, which is not a character")]
        ) from error
    version = tree.get("schemaVersion")
    if isinstance(version, float) and getattr(version, "_width", 0) > len(str(float(version))):
        message = f'without quotes this is the number {float(version)}; a version is text: write it as "1.10"'
        raise ConfigError([Problem(document.where(("schemaVersion",)), message)])
    return document


def read_value(text: str) -> Any:
    """Parse a value in YAML."""
    from ruamel.yaml import YAML

    return _plain(YAML(typ="rt").load(text), (), {})


def _plain(node: Any, location: Location, lines: dict[Location, int]) -> Any:
    """Convert ruamel's values to plain Python values, and record the line of every key and item."""
    positions: Any = getattr(node, "lc", None)
    if isinstance(node, dict):
        for key in node:
            line = positions.key(key)[0] + 1 if key in (positions.data or {}) else 0
            lines[(*location, _joined(str(key)))] = line
        return {(name := _joined(str(key))): _plain(node[key], (*location, name), lines) for key in node}
    if isinstance(node, list):
        for number in range(len(node)):
            lines[(*location, number)] = positions.item(number)[0] + 1
        return [_plain(value, (*location, number), lines) for number, value in enumerate(node)]
    if isinstance(node, str):
        return _joined(node)
    for kind in (bool, int, float):
        if isinstance(node, kind):
            return kind(node)
    if node is None:
        return None
    return str(node)  # a date or another tagged scalar: as it was written


def _joined(text: str) -> str:
    """Join surrogate pairs: JSON's `\\ud83d\\ude00` is one character, which YAML leaves in two halves."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    return str(text)


_DURATION = r"(?:(\d+(?:\.\d+)?)h)?\s*(?:(\d+(?:\.\d+)?)m(?:in)?)?\s*(?:(\d+(?:\.\d+)?)s)?"


def parse_duration(value: Any) -> Any:
    """Seconds from `90`, `90s`, `5m`, `2h` or `1h30m`."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    match = re.fullmatch(_DURATION, text)
    if not text or match is None:
        raise ValueError("a duration such as 90, 90s, 5m or 1h30m")
    hours, minutes, seconds = (float(group or 0) for group in match.groups())
    return hours * 3600 + minutes * 60 + seconds


def parse_size(value: Any) -> Any:
    """Bytes from `65536`, `64MB`, `1.5 GB` or `512 KiB`."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", value.strip().lower())
    if match is None:
        raise ValueError("a size such as 65536, 64MB or 1.5GB")
    number, unit, binary = match.groups()
    return round(float(number) * (1024 if binary else 1000) ** " kmgt".index(unit or " "))
