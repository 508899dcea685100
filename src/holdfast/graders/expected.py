"""Expected values of a row, as graders compare them: one text, or alternatives; and how feedback shows them."""

from __future__ import annotations

from decimal import Decimal
from itertools import islice
from typing import TYPE_CHECKING, Any, Final
from unicodedata import normalize

from holdfast.errors import AttemptError
from holdfast.graders.types import Verdict
from holdfast.spec.regex import compile_regex
from holdfast.spec.template import RENDER_ERRORS, fill_in, is_template, pattern_template, template

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.spec.regex import Dialect, Regex


_MOST: Final = 10_000
"""more alternatives are a mistake, or an endless generator"""


class NotComparable(ValueError):
    """A row's value that answers cannot be compared with; the message describes it."""


class _Rendering:
    """Turns problems with a row's values into an error of its grade."""

    def __init__(self, written: Any) -> None:
        self._written = written

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, NotComparable):
            raise AttemptError("grader", f"{self._written!r} {error}", retry=False) from error
        if isinstance(error, RENDER_ERRORS):
            raise AttemptError("grader", f"cannot render {self._written!r}: {error}", retry=False) from error


def render_text(value: Any, fields: dict[str, Any]) -> str:
    """Render a template over the row, or return a plain value as text."""
    if not isinstance(value, str):
        return str(value)
    try:
        return template(value).render(fields)
    except RENDER_ERRORS as error:
        raise AttemptError("grader", f"cannot render {value!r}: {error}", retry=False) from error


def expected_texts(written: Any, fields: dict[str, Any], *, composed: bool = True) -> list[str]:
    """Return the accepted texts, never the repr of a list or an object."""
    with _Rendering(written):
        return alternatives(written, fields, composed=composed)


def expected_names(written: str, fields: dict[str, Any]) -> list[str]:
    """Return the names that a text stands for; a template may give several, but no empty one."""
    with _Rendering(written):
        return names(written, fields)


def expected_value(written: Any, fields: dict[str, Any]) -> Any:
    """Return a JSON value with its templates filled in."""
    with _Rendering(written):
        return fill_in(written, fields, strict=True)


def texts_to_find(parts: Sequence[str], fields: dict[str, Any]) -> list[str]:
    """Return non-empty texts to look for; a template that gives a list stands for each of its elements."""
    expanded: list[str] = []
    for part in parts:
        texts = expected_texts(part, fields)
        if is_template(part) and not all(map(str.strip, texts)):
            raise AttemptError(
                "grader", f"{part!r} renders to empty text for this row, which matches every answer", retry=False
            )
        expanded += texts
    return expanded


class Patterns:
    """A grader's regular expressions, some of which may be templates over the row."""

    def __init__(self, sources: Sequence[str], dialect: Dialect) -> None:
        self._sources, self._dialect = sources, dialect
        self._fixed = None if any(map(is_template, sources)) else self._compile({})

    def for_row(self, fields: dict[str, Any]) -> list[Regex]:
        """Return the expressions for a row. A template that gives a list stands for each of its elements."""
        return self._compile(fields) if self._fixed is None else self._fixed

    def _compile(self, fields: dict[str, Any]) -> list[Regex]:
        compiled: list[Regex] = []
        for source in self._sources:
            with _Rendering(source):  # a row may give an invalid pattern
                compiled += [compile_regex(pattern, dialect=self._dialect) for pattern in patterns(source, fields)]
        return compiled


def one_of(texts: list[str]) -> str:
    """Format expected texts for feedback: the only one, or the first few."""
    quoted = [repr(text[:200]) for text in texts[:5]]
    more = f" and {len(texts) - 5} more" if len(texts) > 5 else ""
    return quoted[0] if len(texts) == 1 else f"one of {', '.join(quoted)}{more}"


def share(count: int, failures: list[str], details: Any = None) -> Verdict:
    """Return the share of checks that hold as the score, and the failures as the feedback."""
    return Verdict((count - len(failures)) / count, "; ".join(failures), details)


def alternatives(written: Any, fields: Mapping[str, Any], *, composed: bool = True) -> list[str]:
    """Return the texts that a value of an eval file stands for: each element of a list, or of a template for a list.

    They are in Unicode's composed form (NFC), like the answers they are compared with, unless `composed` is false.
    Raises NotComparable, or one of RENDER_ERRORS, for a value that cannot be compared: null, an object, an empty list.
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
    """Return the spellings of a number: Python's, and with an exponent also `1e16` and `10000000000000000`."""
    text = repr(value)
    mantissa, mark, exponent = text.partition("e")
    if not mark:
        return [text]
    return list(dict.fromkeys([text, f"{mantissa}e{int(exponent)}", f"{Decimal(text):f}"]))


def names(written: str, fields: Mapping[str, Any]) -> list[str]:
    """Return the names that a text of an eval file stands for: each element, in order, of a template for a list.

    Raises as `alternatives` does, and for an empty name.
    """
    if not is_template(written):
        return [written]
    value = template(written).value(fields, strict=True)
    elements = _elements(value) if _is_several(value) else [value]
    for element in elements:
        if isinstance(element, bool) or not isinstance(element, str | int | float) or element == "":
            raise NotComparable(f"gives {element!r:.80} for this row, which is not a name or text")
    return [str(element) for element in elements]


def patterns(source: str, fields: Mapping[str, Any]) -> list[str]:
    """Return the patterns that a text of an eval file stands for: one for each element of a template for a list.

    Raises as `alternatives` does, and for an empty pattern, which every text matches.
    """
    if not is_template(source):
        return [source]
    value = pattern_template(source).value(fields, strict=True)
    if isinstance(value, str):
        sources = [value]
    else:
        from holdfast.spec.template import escape_value  # after Jinja2, which such templates need

        try:
            sources = [escape_value(element) for element in (_elements(value) if _is_several(value) else [value])]
        except TypeError as error:
            raise NotComparable(f"gives no pattern for this row: {error}") from error
    if "" in sources:
        raise NotComparable("gives an empty pattern for this row, which every text matches")
    return sources
