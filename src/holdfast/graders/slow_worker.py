"""Run as a script: match patterns and compare texts that could take forever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.graders.worker_loop import answer_questions

if TYPE_CHECKING:
    from collections.abc import Callable


def answer(question: dict[str, Any], _: Callable[[str], None]) -> dict[str, Any]:
    """Do what a request asks for."""
    if question.pop("kind") == "TextPair":
        from holdfast.graders.similarity import TextPair, similarity

        return {"answer": similarity(TextPair(**question))}
    from holdfast.spec.regex import Match, compile_regex

    match = Match(**question)
    pattern = compile_regex(match.source, ignore_case=match.ignore_case, dialect=match.dialect)
    return {"answer": pattern.match_to_the_end(match.operation, match.text, match.number)}


if __name__ == "__main__":
    answer_questions(answer)
