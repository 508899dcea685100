"""How alike two texts are. Needs the extra `similarity`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unicodedata import normalize

from rapidfuzz import fuzz
from rapidfuzz.distance import JaroWinkler, Levenshtein

from holdfast.errors import AttemptError
from holdfast.graders.text import Check, expected_texts
from holdfast.graders.types import Verdict
from holdfast.spec.slow import answer_to

if TYPE_CHECKING:
    from holdfast.graders.types import Case
    from holdfast.spec.grader_schema import SimilarityGrader

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


_STEPS: Final = 20_000_000
"""how much is compared here: the product of the lengths; for `partial`, which tries every place, times the shorter"""


class Comparison(NamedTuple):
    """Two texts to be compared."""

    method: str
    wanted: str
    got: str

    @property
    def seconds(self) -> float:
        """How long it may take in another process."""
        return 10.0

    @property
    def too_slow(self) -> str:
        """What to say when it takes longer."""
        lengths = f"{len(self.wanted):,} with {len(self.got):,} characters"
        return f"comparing {lengths} by `{self.method}` took longer than {self.seconds:g} s"

    @property
    def steps(self) -> int:
        """How much work it is, at most."""
        short, long = sorted((len(self.wanted), len(self.got)))
        return short * long * (short if self.method == "partial" else 1)


def similarity(texts: Comparison) -> float:
    """Return how alike two texts are, from 0 to 1."""
    method, wanted, got = texts
    return float(_PERCENT[method](wanted, got) / 100 if method in _PERCENT else _SHARE[method](wanted, got))


class Similarity(Check):
    """The score is the similarity, 0 to 1."""

    def __init__(self, block: SimilarityGrader, fingerprint: str) -> None:
        super().__init__(fingerprint)
        self.block = block

    def check(self, case: Case) -> Verdict:
        """Compare the answer with the expected texts; the most similar one counts."""
        texts = [text.strip() for text in expected_texts(self.block.expected, case.sample.fields)]
        answer = normalize("NFC", case.said(self.block).strip())
        if "" in texts:
            raise AttemptError("grader", "the expected text is empty for this row", retry=False)
        if self.block.ignore_case:
            texts, answer = [text.casefold() for text in texts], answer.casefold()
        score = max(self._alike(text, answer) for text in texts)
        return Verdict(score, f"{score:.0%} alike")

    def _alike(self, expected: str, answer: str) -> float:
        texts = Comparison(self.block.method, expected, answer)
        return similarity(texts) if texts.steps <= _STEPS else float(answer_to(texts))
