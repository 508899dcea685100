"""Expected values of a row, as graders compare them: one text, or a list of alternatives."""

from __future__ import annotations

from decimal import Decimal
from itertools import islice
from typing import TYPE_CHECKING, Any, Final
from unicodedata import normalize

from holdfast.spec.template import escape_value, is_template, pattern_template, template

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST: Final = 10_000
"""with more alternatives there is a mistake, or a generator without an end"""


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
        if _is_several(value):
            for element in _elements(value):
                expected += _spellings(element, "has an element that is ", composed=composed)
        else:
            expected += _spellings(value, "is ", composed=composed)
    if not expected:
        raise NotComparable("is an empty list for this row")
    return list(dict.fromkeys(expected))


def _is_several(value: Any) -> bool:
    return isinstance(value, list | tuple) or hasattr(value, "__next__")


def _elements(value: Any) -> list[Any]:
    elements = list(islice(value, _MOST + 1))
    if not elements:
        raise NotComparable("is an empty list for this row")
    if len(elements) > _MOST:
        raise NotComparable(f"is a list of more than {_MOST:,} texts")
    return elements


def _spellings(value: Any, lead: str, *, composed: bool) -> list[str]:
    if isinstance(value, bool):
        return ["true", "True"] if value else ["false", "False"]
    if isinstance(value, str):
        return [normalize("NFC", value) if composed else value]
    if isinstance(value, float) and composed:
        return _spelled(value)
    if isinstance(value, int | float):
        return [str(value)]
    kind = {type(None): "null", dict: "an object", list: "a list"}.get(type(value), f"of type {type(value).__name__}")
    raise NotComparable(f"{lead}{kind} for this row: there is nothing to compare with")


def _spelled(value: float) -> list[str]:
    """Return a number as Python writes it; one with an exponent also as others do: `1e16` and `10000000000000000`."""
    text = repr(value)
    mantissa, mark, exponent = text.partition("e")
    if not mark:
        return [text]
    return list(dict.fromkeys([text, f"{mantissa}e{int(exponent)}", f"{Decimal(text):f}"]))


def names(written: str, fields: Mapping[str, Any]) -> list[str]:
    """Return the names that a text of an eval file stands for: of a template for a list, each element in its order.

    Raises as `alternatives` does, and for an empty name.
    """
    if not is_template(written):
        return [written]
    value = template(written).value(fields, strict=True)
    elements = _elements(value) if _is_several(value) else [value]
    for element in elements:
        if isinstance(element, bool) or not isinstance(element, str | int | float) or element == "":
            raise NotComparable(f"gives {element!r:.80} for this row, which is no name or text")
    return [str(element) for element in elements]


def patterns(source: str, fields: Mapping[str, Any]) -> list[str]:
    """Return the patterns that a text of an eval file stands for: of a template for a list, one for each element.

    Raises as `alternatives` does, and for an empty pattern, which is found in every text.
    """
    if not is_template(source):
        return [source]
    value = pattern_template(source).value(fields, strict=True)
    if isinstance(value, str):
        sources = [value]
    else:
        try:
            sources = [escape_value(element) for element in (_elements(value) if _is_several(value) else [value])]
        except TypeError as error:
            raise NotComparable(f"gives no pattern for this row: {error}") from error
    if "" in sources:
        raise NotComparable("gives an empty pattern for this row, which is found in every text")
    return sources
