"""Expected values of a row, as graders compare them: one text, or a list of alternatives."""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, Any, Final
from unicodedata import is_normalized, normalize

from holdfast.spec.template import RENDER_ERRORS, template

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST: Final = 10_000
"""with more alternatives there is a mistake, or a generator without an end"""
_MAKES_VALUES: Final = re.compile(r"[(|\[%]")
"""calls, filters, lists and statements, which may make a list even of a text"""


class NotComparable(ValueError):
    """A row's value that no answer can be compared with; the message describes it."""


def alternatives(written: Any, fields: Mapping[str, Any], *, composed: bool = True) -> list[str]:
    """Return the texts that a value of an eval file stands for: of a list, or a template for one, each element.

    They are in Unicode's composed form (NFC), in which answers are compared, or else as written. Raises NotComparable,
    or one of RENDER_ERRORS, for a value that cannot be compared: null, an object, an empty list.
    """
    parts = written if isinstance(written, list | tuple) else [written]
    values = [template(part).value(fields, strict=True) if isinstance(part, str) else part for part in parts]
    if len(values) == 1 and type(values[0]) is str:  # the common case
        return _spellings(values[0], "is ", composed=composed)
    expected: list[str] = []
    for value in values:
        if isinstance(value, list | tuple) or hasattr(value, "__next__"):
            elements = list(islice(value, _MOST + 1))
            if not elements:
                raise NotComparable("is an empty list for this row")
            if len(elements) > _MOST:
                raise NotComparable(f"is a list of more than {_MOST:,} texts")
            for element in elements:
                expected += _spellings(element, "has an element that is ", composed=composed)
        else:
            expected += _spellings(value, "is ", composed=composed)
    if not expected:
        raise NotComparable("is an empty list for this row")
    return list(dict.fromkeys(expected))


def _spellings(value: Any, lead: str, *, composed: bool) -> list[str]:
    if isinstance(value, bool):
        return ["true", "True"] if value else ["false", "False"]
    if isinstance(value, str):
        return [normalize("NFC", value) if composed else value]
    if isinstance(value, int | float):
        return [str(value)]
    kind = {type(None): "null", dict: "an object", list: "a list"}.get(type(value), f"of type {type(value).__name__}")
    raise NotComparable(f"{lead}{kind} for this row: there is nothing to compare with")


def reads_as_before(written: Any, fields: Mapping[str, Any]) -> bool:
    """Return True where a value gives the same single text as before lists were supported, so that verdicts hold."""
    if not isinstance(written, str):
        return not isinstance(written, bool | list | tuple)
    compiled = template(written)
    if _is_plain(compiled.lone_field(fields)):
        return True
    parts = (written, *(fields.get(name) for name in compiled.names))
    if not _MAKES_VALUES.search(written) and all(map(_is_plain, parts)):
        return True
    try:
        return alternatives(written, fields) == [compiled.render(fields)]
    except (*RENDER_ERRORS, RecursionError):
        return False


def _is_plain(value: Any) -> bool:
    return type(value) in (int, float) or (type(value) is str and (value.isascii() or is_normalized("NFC", value)))
