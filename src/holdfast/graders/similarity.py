"""How alike two texts are. Needs the extra `similarity`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rapidfuzz import fuzz
from rapidfuzz.distance import JaroWinkler, Levenshtein

from holdfast.errors import AttemptError
from holdfast.graders.checks import Check, rendered
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
        """Compare the answer with the expected one."""
        wanted, got = rendered(self.block.expected, case.sample.fields).strip(), case.said(self.block).strip()
        if not wanted:
            raise AttemptError("grader", "the expected text is empty for this row", retry=False)
        if self.block.ignore_case:
            wanted, got = wanted.casefold(), got.casefold()
        method = self.block.method
        score = _PERCENT[method](wanted, got) / 100 if method in _PERCENT else _SHARE[method](wanted, got)
        return Verdict(float(score), f"{score:.0%} alike")
