"""Expected values as graders need them: rendered for a row, and shown in feedback."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from holdfast.errors import AttemptError
from holdfast.graders.types import Verdict
from holdfast.spec.expected import NotComparable, alternatives, names, patterns
from holdfast.spec.regex import compile_regex
from holdfast.spec.template import RENDER_ERRORS, fill_in, is_template, template

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.spec.regex import Dialect, Regex


@contextmanager
def _rendering(written: Any) -> Iterator[None]:
    """Turn what is wrong with a row's values into an error of its grade."""
    try:
        yield
    except NotComparable as error:
        raise AttemptError("grader", f"{written!r} {error}", retry=False) from error
    except RENDER_ERRORS as error:
        raise AttemptError("grader", f"cannot render {written!r}: {error}", retry=False) from error


def render_text(value: Any, fields: dict[str, Any]) -> str:
    """Render a template over the row, or return a plain value as text."""
    if not isinstance(value, str):
        return str(value)
    try:
        return template(value).render(fields)
    except RENDER_ERRORS as error:
        raise AttemptError("grader", f"cannot render {value!r}: {error}", retry=False) from error


def expected_texts(written: Any, fields: dict[str, Any], *, composed: bool = True) -> list[str]:
    """Return the expected texts, of which the answer should be one; never the repr of a list or an object."""
    with _rendering(written):
        return alternatives(written, fields, composed=composed)


def expected_names(written: str, fields: dict[str, Any]) -> list[str]:
    """Return the names that a text stands for, of which a template may give several; never an empty one."""
    with _rendering(written):
        return names(written, fields)


def expected_value(written: Any, fields: dict[str, Any]) -> Any:
    """Return a JSON value with its templates filled in."""
    with _rendering(written):
        return fill_in(written, fields, strict=True)


def texts_to_find(parts: Sequence[str], fields: dict[str, Any]) -> list[str]:
    """Return texts to look for, none of them empty; a template that gives a list stands for each of its elements."""
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
    """Regular expressions of a grader, of which some may be templates over the row."""

    def __init__(self, sources: Sequence[str], dialect: Dialect) -> None:
        self._sources, self._dialect = sources, dialect
        self._fixed = None if any(map(is_template, sources)) else self._compile({})

    def for_row(self, fields: dict[str, Any]) -> list[Regex]:
        """Return the expressions for a row. A template that gives a list stands for each of its elements."""
        return self._compile(fields) if self._fixed is None else self._fixed

    def _compile(self, fields: dict[str, Any]) -> list[Regex]:
        compiled: list[Regex] = []
        for source in self._sources:
            with _rendering(source):  # a pattern of the row may be invalid
                compiled += [compile_regex(pattern, dialect=self._dialect) for pattern in patterns(source, fields)]
        return compiled


def one_of(texts: list[str]) -> str:
    """Format expected texts for a feedback: the only one, or the first few."""
    quoted = [repr(text[:200]) for text in texts[:5]]
    more = f" and {len(texts) - 5} more" if len(texts) > 5 else ""
    return quoted[0] if len(texts) == 1 else f"one of {', '.join(quoted)}{more}"


def share(count: int, failures: list[str], details: Any = None) -> Verdict:
    """Return the share of checks that hold as the score, and the failures as the feedback."""
    return Verdict((count - len(failures)) / count, "; ".join(failures), details)
