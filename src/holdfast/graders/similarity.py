"""The similarity of two texts. Needs the extra `similarity`."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unicodedata import normalize

from holdfast.errors import AttemptError
from holdfast.graders.expected import expected_texts
from holdfast.graders.types import InstantGrader, Verdict
from holdfast.spec.content_grader_schema import SimilarityGrader
from holdfast.spec.slow import answer_to

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.graders.types import Case

_STEPS: Final = 20_000_000
"""work that is done in this process: the product of the lengths; `partial` tries every place, so times the shorter"""


class TextPair(NamedTuple):
    """Two texts to compare."""

    method: str
    expected: str
    answer: str

    @property
    def seconds(self) -> float:
        """Time limit in another process."""
        return 10.0

    @property
    def too_slow(self) -> str:
        """Error message for a comparison that takes longer."""
        lengths = f"{len(self.expected):,} with {len(self.answer):,} characters"
        return f"comparing {lengths} by `{self.method}` took longer than {self.seconds:g} s"

    @property
    def steps(self) -> int:
        """Upper bound of the work."""
        short, long = sorted((len(self.expected), len(self.answer)))
        return short * long * (short if self.method == "partial" else 1)


def similarity(texts: TextPair) -> float:
    """Return how alike two texts are, from 0 to 1."""
    return _measure(texts.method)(texts.expected, texts.answer)


@cache
def _measure(method: str) -> Callable[[str, str], float]:
    from rapidfuzz import fuzz
    from rapidfuzz.distance import JaroWinkler, Levenshtein

    shares: dict[str, Any] = {
        "levenshtein": Levenshtein.normalized_similarity,
        "jaro_winkler": JaroWinkler.normalized_similarity,
    }
    percents: dict[str, Any] = {
        "ratio": fuzz.ratio,
        "partial": fuzz.partial_ratio,
        "token_sort": fuzz.token_sort_ratio,
        "token_set": fuzz.token_set_ratio,
    }
    if method in shares:
        return lambda expected, answer: float(shares[method](expected, answer))
    return lambda expected, answer: float(percents[method](expected, answer) / 100)


class Similarity(InstantGrader):
    """The score is the similarity, 0 to 1."""

    schema = SimilarityGrader
    revision = 1
    default_threshold = 0.8
    requires = ("rapidfuzz", "rapidfuzz")
    block: SimilarityGrader

    def check(self, case: Case) -> Verdict:
        """Compare the answer with the expected texts; the most similar one counts."""
        texts = [text.strip() for text in expected_texts(self.block.expected, case.sample.fields)]
        answer = normalize("NFC", case.text(self.block).strip())
        if "" in texts:
            raise AttemptError("grader", "the expected text is empty for this row", retry=False)
        if self.block.ignore_case:
            texts, answer = [text.casefold() for text in texts], answer.casefold()
        score = max(self._alike(text, answer) for text in texts)
        return Verdict(score, f"{score:.0%} alike")

    def _alike(self, expected: str, answer: str) -> float:
        texts = TextPair(self.block.method, expected, answer)
        return similarity(texts) if texts.steps <= _STEPS else float(answer_to(texts))
