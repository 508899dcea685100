"""Changes of a YAML file that leave the rest of its text as it is: comments, order, quotes and line ends.

A change is made twice, in the data and in the text. The text is only taken if it reads as the data say; where it does
not (an anchor that others share, say), nothing is changed and a person is asked to do it.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError, Problem
from holdfast.spec.document import parse_document

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.spec.document import Document, Location

_PLAIN_ANYWHERE = re.compile(r"[\w./][\w./*?@%+~-]*")
"""texts that need no quotes, also between braces"""

Edit = tuple[int, int, str]
"""from, to, and what stands there instead"""


@dataclass(frozen=True)
class Change:
    """Something to change at a key."""

    location: Location
    """the key, as the file spells it before any change"""
    said: str
    """in words; empty for the second half of a change"""


@dataclass(frozen=True)
class Rename(Change):
    """The key gets another name."""

    to: str


@dataclass(frozen=True)
class Assign(Change):
    """The key gets another text as its value."""

    value: str


@dataclass(frozen=True)
class Wrap(Change):
    """The key's text becomes a mapping of one key to it."""

    key: str


@dataclass(frozen=True)
class Add(Change):
    """Another key with a text is put before the key."""

    key: str
    value: str


def rewrite(text: str, document: Document, changes: Sequence[Change]) -> str:
    """The text with the changes made; ConfigError where that is not possible without a person."""
    from ruamel.yaml import YAML

    assert document.path is not None
    wanted = _changed(document, changes)
    tree = YAML(typ="rt").compose(text)
    edits = {edit for change in changes for edit in _edits(text, tree, change)}
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    try:
        reads = parse_document(text, document.path).data
    except ConfigError:
        reads = {}
    if reads != wanted:
        problems = [Problem(document.where(change.location), change.said) for change in changes if change.said]
        raise ConfigError(problems, remedy="The way this file is written does not let it be changed safely: edit it.")
    return text


def _changed(document: Document, changes: Sequence[Change]) -> dict[str, Any]:
    """The data with the changes made: values first, while keys still have their names."""
    data = copy.deepcopy(document.data)
    for change in sorted(changes, key=lambda change: isinstance(change, Rename)):
        block: Any = data
        for part in change.location[:-1]:
            block = block[part]
        key = change.location[-1]
        match change:
            case Rename(to=to):
                if to in block:
                    where = document.where(change.location)
                    raise ConfigError([Problem(where, f"is now {to}, which is there too")], remedy="Keep one of them.")
                block[to] = block.pop(key)
            case Assign(value=value):
                block[key] = value
            case Wrap(key=inner):
                block[key] = {inner: block[key]}
            case Add(key=other, value=value):
                block[other] = value
    return data


def _edits(text: str, tree: Any, change: Change) -> Iterator[Edit]:
    found = _find(tree, change.location)
    if found is None:
        return  # merged in from elsewhere, where it is changed too
    block, key, value = found
    quote = text[key.start_mark.index] if text[key.start_mark.index] in "\"'" else ""
    line_end = "\r\n" if "\r\n" in text else "\n"
    start, end = key.start_mark.index, key.end_mark.index
    first, last = value.start_mark.index, value.end_mark.index
    written = text[first:last]
    match change:
        case Rename(to=to):
            yield start, end, f"{quote}{to}{quote}"
        case Assign(value=new):
            yield first, last, _scalar(new, value.style)
        case Wrap(key=inner):
            kept = value.style in ('"', "'") or _PLAIN_ANYWHERE.fullmatch(written)
            scalar = written if kept else json.dumps(value.value, ensure_ascii=False)
            yield first, last, f"{{{quote}{inner}{quote}: {scalar}}}" + (line_end if written.endswith("\n") else "")
        case Add(key=other, value=new):
            after = ", " if block.flow_style else line_end + " " * key.start_mark.column
            yield start, start, f"{quote}{other}{quote}: {_scalar(new, quote)}{after}"


def _scalar(value: str, style: str | None) -> str:
    """A text in the quotes of what is beside or before it; in quotes anyhow where it would read as a number."""
    quote = style if style in ('"', "'") else "" if value[0].isalpha() else '"'
    return f"{quote}{value}{quote}"


def _find(tree: Any, location: Location) -> tuple[Any, Any, Any] | None:
    """The nodes of the mapping, the key and the value at a location, which know where in the text they stand."""
    node, found = tree, None
    for part in location:
        if isinstance(part, int):
            node = node.value[part]
            continue
        pair = next((pair for pair in node.value if pair[0].value == part), None)
        if pair is None:
            return None
        found = (node, *pair)
        node = pair[1]
    return found
