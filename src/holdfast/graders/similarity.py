"""How alike two texts are. Needs the extra `similarity`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rapidfuzz import fuzz
from rapidfuzz.distance import JaroWinkler, Levenshtein

from holdfast.errors import AttemptError
from holdfast.graders.checks import Check, expected_texts
from holdfast.graders.types import Verdict

if TYPE_CHECKING:
    from holdfast.graders.types import Case
    from holdfast.spec.grader_fields import SimilarityGrader

_PERCENT: dict[str, Any] = {
    "ratio": fuzz.ratio,
    "partial": fuzz.partial_ratio,
    "token_sort": fuzz.token_sort_ratio,
    "token_set": fuzz.token_set_ratio,
}
_SHARE: dict[str, Any] = {
    "levenshtein": Levenshtein.normalized_similarity,
    "jaro_winkler": JaroWinkler.normalized_similarity,
}


class Similarity(Check):
    """The score is the similarity, 0 to 1."""

    def __init__(self, block: SimilarityGrader, fingerprint: str) -> None:
        super().__init__(fingerprint)
        self.block = block

    def check(self, case: Case) -> Verdict:
        """Compare the answer with the expected texts; the most similar one counts."""
        texts = [text.strip() for text in expected_texts(self.block.expected, case.sample.fields)]
        answer = case.said(self.block).strip()
        if "" in texts:
            raise AttemptError("grader", "the expected text is empty for this row", retry=False)
        if self.block.ignore_case:
            texts, answer = [text.casefold() for text in texts], answer.casefold()
        score = max(self._alike(text, answer) for text in texts)
        return Verdict(score, f"{score:.0%} alike")

    def _alike(self, expected: str, answer: str) -> float:
        method = self.block.method
        if method in _PERCENT:
            return float(_PERCENT[method](expected, answer) / 100)
        return float(_SHARE[method](expected, answer))
