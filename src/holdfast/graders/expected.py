"""Expected values as graders need them: rendered for a row, and shown in feedback."""

from __future__ import annotations

from typing import Any

from holdfast.errors import AttemptError
from holdfast.graders.types import Verdict
from holdfast.spec.expected import NotComparable, alternatives
from holdfast.spec.template import RENDER_ERRORS, template


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
    try:
        return alternatives(written, fields, composed=composed)
    except NotComparable as error:
        raise AttemptError("grader", f"{written!r} {error}", retry=False) from error
    except RENDER_ERRORS as error:
        raise AttemptError("grader", f"cannot render {written!r}: {error}", retry=False) from error


def one_of(texts: list[str]) -> str:
    """Format expected texts for a feedback: the only one, or the first few."""
    quoted = [repr(text[:200]) for text in texts[:5]]
    more = f" and {len(texts) - 5} more" if len(texts) > 5 else ""
    return quoted[0] if len(texts) == 1 else f"one of {', '.join(quoted)}{more}"


def share(count: int, failures: list[str], details: Any = None) -> Verdict:
    """Return the share of checks that hold as the score, and the failures as the feedback."""
    return Verdict((count - len(failures)) / count, "; ".join(failures), details)
