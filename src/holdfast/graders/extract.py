"""The grader `extract`: the filters and the exact match of lm-evaluation-harness, with its results to the letter."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Final

from holdfast.graders.expected import expected_texts, one_of
from holdfast.graders.types import InstantGrader, Verdict
from holdfast.spec.benchmark_grader_schema import ExtractGrader, RegexFilter
from holdfast.spec.regex import compile_regex

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.graders.types import Case

_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)
_DIGITS: Final = str.maketrans("", "", string.digits)
_CHANGES: Final[dict[str, Callable[[str], str]]] = {
    "remove_whitespace": str.strip,
    "lowercase": str.lower,
    "uppercase": str.upper,
}


class Extract(InstantGrader):
    """Scores 1 when the extracted answer equals an expected text."""

    schema = ExtractGrader
    block: ExtractGrader

    def check(self, case: Case) -> Verdict:
        """Apply the filters, and compare what is left."""
        texts = expected_texts(self.block.expected, case.sample.fields, composed=False)
        answers = self._filter(case.text(self.block))
        accepted = {self._simplify(text) for text in texts}
        hits = [self._simplify(answer) in accepted for answer in answers]
        share = sum(hits) / len(hits) if hits else 0.0
        score = share if len(texts) == 1 else float(any(hits))
        shown = answers[0] if len(answers) == 1 else answers
        feedback = "" if score == 1 else f"extracted {shown!r:.200}, expected {one_of(texts)}"
        return Verdict(score, feedback, {"extracted": shown})

    def _filter(self, text: str) -> list[str]:
        """Return what the filters make of an answer.

        Filters look at a list of replies, here of one. As in lm-eval, `take_first` leaves the text itself in its place,
        of which later filters see the characters, each as a reply of its own.
        """
        replies: list[str] | str = [text]
        for step in self.block.filters:
            if isinstance(step, RegexFilter):
                replies = [_match(step, reply) for reply in replies]
            elif step == "take_first":
                replies = replies[0] if replies else ""
            else:
                replies = [_CHANGES[step](reply) for reply in replies]
        return [replies] if isinstance(replies, str) else replies

    def _simplify(self, text: str) -> str:
        for pattern in self.block.ignore:
            text = compile_regex(pattern).remove(text)
        if self.block.ignore_case:
            text = text.lower()
        if self.block.ignore_punctuation:
            text = text.translate(_PUNCTUATION)
        return text.translate(_DIGITS) if self.block.ignore_numbers else text


def _match(step: RegexFilter, text: str) -> str:
    groups = compile_regex(step.regex).find(text, step.group)
    if groups is None:
        return step.fallback
    match = groups[0] if len(groups) == 1 else next(filter(None, groups), step.fallback)
    return match.strip()
