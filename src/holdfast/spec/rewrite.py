"""Changes YAML files and preserves the rest of their text: comments, order, quotes and line ends.

A change is made twice, in the data and in the text. The new text is used only if it parses to the new data; otherwise
(a shared anchor, for example) nothing is changed, and the user is asked to edit the file.
"""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.errors import ConfigError, Problem
from holdfast.spec.document import parse_document

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.spec.document import Document, Location

_PLAIN_ANYWHERE = re.compile(r"[\w./][\w./*?@%+~-]*")
"""texts that need no quotes, also between braces"""

Edit = tuple[int, int, str]
"""start, end, and the replacement"""


class Change(msgspec.Struct, frozen=True):
    """A change at a key."""

    location: Location
    """the key, as the file spells it before any change"""
    message: str
    """for the user; empty for the second half of a change"""


class Rename(Change, frozen=True):
    """The key gets another name."""

    to: str


class Assign(Change, frozen=True):
    """The key gets another text as its value."""

    value: str


class Wrap(Change, frozen=True):
    """The key's text becomes a mapping of one key to it."""

    key: str


class Add(Change, frozen=True):
    """Another key with a text is put before the key."""

    key: str
    value: str


def rewrite(text: str, document: Document, changes: Sequence[Change]) -> str:
    """Return the text with the changes; raise ConfigError where they cannot be made safely."""
    from ruamel.yaml import YAML

    assert document.path is not None
    expected = _change_data(document, changes)
    tree = YAML(typ="rt").compose(text)
    edits = {edit for change in changes for edit in _edits(text, tree, change)}
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    try:
        data = parse_document(text, document.path).data
    except ConfigError:
        data = {}
    if data != expected:
        problems = [Problem(document.where(change.location), change.message) for change in changes if change.message]
        raise ConfigError(problems, remedy="This file cannot be rewritten safely: edit it by hand.")
    return text


def _change_data(document: Document, changes: Sequence[Change]) -> dict[str, Any]:
    """Return the data with the changes: values first, while keys still have their names."""
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
                    raise ConfigError(
                        [Problem(where, f"was renamed to {to}, which the file already has")], remedy="Keep one of them."
                    )
                block[to] = block.pop(key)
            case Assign(value=value):
                block[key] = value
            case Wrap(key=inner):
                block[key] = {inner: block[key]}
            case Add(key=other, value=value):
                block[other] = value
    return data


def _edits(text: str, tree: Any, change: Change) -> Iterator[Edit]:
    nodes = _find(tree, change.location)
    if nodes is None:
        return  # merged in from another place, where it is changed too
    block, key, value = nodes
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
            is_plain = value.style in ('"', "'") or _PLAIN_ANYWHERE.fullmatch(written)
            scalar = written if is_plain else msgspec.json.encode(value.value).decode()
            yield first, last, f"{{{quote}{inner}{quote}: {scalar}}}" + (line_end if written.endswith("\n") else "")
        case Add(key=other, value=new):
            after = ", " if block.flow_style else line_end + " " * key.start_mark.column
            yield start, start, f"{quote}{other}{quote}: {_scalar(new, quote)}{after}"


def _scalar(value: str, style: str | None) -> str:
    """Return a text in the quotes of its surroundings; always in quotes where it would read as a number."""
    quote = style if style in ('"', "'") else "" if value[0].isalpha() else '"'
    return f"{quote}{value}{quote}"


def _find(tree: Any, location: Location) -> tuple[Any, Any, Any] | None:
    """Return the nodes of the mapping, the key and the value at a location, with their places in the text."""
    node, nodes = tree, None
    for part in location:
        if isinstance(part, int):
            node = node.value[part]
            continue
        pair = next((pair for pair in node.value if pair[0].value == part), None)
        if pair is None:
            return None
        nodes = (node, *pair)
        node = pair[1]
    return nodes
