"""Run as a script: match patterns that could take for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.graders.answering import answer_questions
from holdfast.spec.regex import Request, compile_regex

if TYPE_CHECKING:
    from collections.abc import Callable


def answer(question: dict[str, Any], _: Callable[[str], None]) -> dict[str, Any]:
    """Return where the match ends."""
    asked = Request(**question)
    pattern = compile_regex(asked.source, ignore_case=asked.ignore_case, dialect=asked.dialect)
    return {"end": pattern.match_to_the_end(asked.operation, asked.text)}


if __name__ == "__main__":
    answer_questions(answer)
