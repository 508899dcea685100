"""Graders that compare texts: exact, text."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unicodedata import normalize

from holdfast.graders.expected import Patterns, expected_texts, one_of, share, texts_to_find
from holdfast.graders.types import InstantGrader, Verdict
from holdfast.spec.text_grader_schema import ExactGrader, TextGrader

if TYPE_CHECKING:
    from holdfast.graders.types import Case
    from holdfast.spec.eval import Origin


class Exact(InstantGrader):
    """Scores 1 when the whole answer equals an expected text."""

    schema = ExactGrader
    block: ExactGrader

    def check(self, case: Case) -> Verdict:
        """Compare the texts, normalized as the block says."""
        texts = expected_texts(self.block.expected, case.sample.fields)
        answer = normalize("NFC", case.text(self.block))
        if self.block.strip:
            texts, answer = [text.strip() for text in texts], answer.strip()
        if self.block.ignore_case:
            texts, answer = [text.casefold() for text in texts], answer.casefold()
        return Verdict(1.0) if answer in texts else Verdict(0.0, f"expected {one_of(texts)}")


class Text(InstantGrader):
    """Scores the share of texts and patterns that the answer contains, or lacks, as it should."""

    schema = TextGrader
    block: TextGrader

    def __init__(self, block: TextGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._match = Patterns(block.regex_match, block.dialect)
        self._not_match = Patterns(block.regex_not_match, block.dialect)

    def check(self, case: Case) -> Verdict:
        """Check each text and each pattern."""
        block, fields, answer = self.block, case.sample.fields, case.text(self.block)
        exact = normalize("NFC", answer)
        folded = exact.casefold()
        failures: list[str] = []
        count = 0
        for contains, not_contains, contains_any, text, fold in (
            (block.contains, block.not_contains, block.contains_any, folded, str.casefold),
            (block.contains_cs, block.not_contains_cs, block.contains_any_cs, exact, str),
        ):
            required, forbidden, alternative = (
                texts_to_find(parts, fields) for parts in (contains, not_contains, contains_any)
            )
            count += len(required) + len(forbidden) + bool(alternative)
            failures += [f"lacks {part!r}" for part in required if fold(part) not in text]
            failures += [f"contains {part!r}" for part in forbidden if fold(part) in text]
            if alternative and not any(fold(part) in text for part in alternative):
                failures.append(f"has none of {', '.join(map(repr, alternative))}")
        match, not_match = self._match.for_row(fields), self._not_match.for_row(fields)
        count += len(match) + len(not_match)
        failures += [f"does not match {p.pattern!r}" for p in match if not p.search(answer)]
        failures += [f"matches {p.pattern!r}" for p in not_match if p.search(answer)]
        return share(count, failures)
