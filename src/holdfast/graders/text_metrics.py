"""Text metrics: similarity, BLEU, chrF, ROUGE, character F1, word and character error rates.

Each needs a package of its own. BLEU, chrF and error rates of a whole run are not the mean over its answers, but are
computed from sums of counts. So a verdict carries its counts, and `totals` turns their sums into numbers for
`metrics.json`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple
from unicodedata import normalize

from pydantic import Field, model_validator

from holdfast.errors import AttemptError
from holdfast.graders.expected import expected_texts
from holdfast.graders.types import InstantGrader, Verdict
from holdfast.spec.grader_schema import Expected, TextBlock
from holdfast.spec.regex import answer_to

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.graders.types import Case
    from holdfast.spec.eval import Origin


class OverlapBlock(TextBlock):
    """Keys that every text metric has."""

    expected: Expected = "{{ expected }}"
    """Reference, or a list of references. Templates over the row."""
    ignore_case: bool = False
    """Ignore upper and lower case."""


class Overlap(InstantGrader):
    """A text metric; the subclasses compute it."""

    default_threshold = 0.5
    block: OverlapBlock
    strips = True
    """white space around the texts is ignored"""

    def check(self, case: Case) -> Verdict:
        """Compare the answer with its references."""
        texts = expected_texts(self.block.expected, case.sample.fields)
        answer = normalize("NFC", case.text(self.block))
        if self.strips:
            texts, answer = [text.strip() for text in texts], answer.strip()
        if "" in texts:
            raise AttemptError("grader", "a reference is empty for this row", retry=False)
        if self.block.ignore_case:
            texts, answer = [text.casefold() for text in texts], answer.casefold()
        if any(self.steps(answer, text) > self.most_steps for text in texts):
            lengths = f"{len(answer):,} with {max(map(len, texts)):,} characters"
            raise AttemptError("grader", f"too long to compare by `{self.block.type}`: {lengths}", retry=False)
        return self.compare(answer, texts)

    most_steps: ClassVar[int] = 20_000_000_000
    """more would block the run for seconds"""

    def steps(self, answer: str, reference: str) -> int:
        """Return an upper bound of the work: most metrics look at each pair of characters."""
        return len(answer) * len(reference)

    def compare(self, answer: str, references: list[str]) -> Verdict:
        """Return the verdict on an answer."""
        raise NotImplementedError


class SimilarityGrader(OverlapBlock):
    """Scores how similar the answer is to the expected one."""

    type: Literal["similarity"]
    expected: Expected = "{{ expected }}"
    """Expected text, or a list, of which the most similar text counts. Templates over the row."""
    method: Literal["ratio", "partial", "token_sort", "token_set", "levenshtein", "jaro_winkler"] = "ratio"
    """How similarity is measured: `partial` uses the best matching part of the longer text, `token_sort` and
    `token_set` compare words in any order or as sets."""


class Similarity(Overlap):
    """The similarity to the expected text that is most similar."""

    schema = SimilarityGrader
    default_threshold = 0.8
    requires = ("rapidfuzz", "rapidfuzz")
    block: SimilarityGrader

    def steps(self, answer: str, reference: str) -> int:
        """Return 0: comparisons that would take long are made in another process."""
        return 0

    def compare(self, answer: str, references: list[str]) -> Verdict:
        """Return the similarity, from 0 to 1."""
        score = max(self._alike(text, answer) for text in references)
        return Verdict(score, f"{score:.0%} alike")

    def _alike(self, expected: str, answer: str) -> float:
        texts = TextPair(self.block.method, expected, answer)
        return texts.work() if texts.steps <= _STEPS else float(answer_to(texts))


_STEPS: Final = 20_000_000
"""largest product of lengths that is compared in this process; `partial` tries every place, so times the shorter"""


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

    def work(self) -> float:
        """Return how alike the texts are, from 0 to 1."""
        return _measure(self.method)(self.expected, self.answer)


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


class BleuGrader(OverlapBlock):
    """BLEU of sacrebleu, of each answer and of the whole run."""

    type: Literal["bleu"]
    tokenize: Literal["13a", "intl", "char", "zh", "ja-mecab", "ko-mecab", "none"] = "13a"
    """Tokenizer of sacrebleu."""


class Bleu(Overlap):
    """Sentence BLEU with exponential smoothing and effective order, against all references at once."""

    schema = BleuGrader
    requires = ("sacrebleu", "sacrebleu")

    def __init__(self, block: BleuGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        from sacrebleu.metrics.bleu import BLEU

        try:
            self._metric = BLEU(tokenize=block.tokenize, effective_order=True)
        except (ImportError, RuntimeError) as error:  # tokenizers of Japanese and Korean have packages of their own
            raise origin.error(str(error).partition("\n")[0]) from error

    @classmethod
    def totals(cls, block: BleuGrader, counts: Sequence[int]) -> dict[str, float]:
        """Return the BLEU of the whole corpus."""
        from sacrebleu.metrics.bleu import BLEU

        correct, total = list(counts[2:6]), list(counts[6:10])
        bleu = BLEU.compute_bleu(correct, total, counts[0], counts[1], smooth_method="exp")
        return {"corpus": bleu.score / 100}

    def compare(self, answer: str, references: list[str]) -> Verdict:
        """Return BLEU from 0 to 1."""
        bleu = self._metric.sentence_score(answer, references)
        counts = (bleu.sys_len, bleu.ref_len, *bleu.counts, *bleu.totals)
        return _scored(bleu.score / 100, "BLEU", counts)


class ChrfGrader(OverlapBlock):
    """chrF of sacrebleu, of each answer and of the whole run."""

    type: Literal["chrf"]
    word_order: int = Field(default=0, ge=0, le=4)
    """Length of word n-grams to include: 0 for chrF, 2 for chrF++."""


class Chrf(Overlap):
    """chrF against the best reference."""

    schema = ChrfGrader
    requires = ("sacrebleu", "sacrebleu")

    def __init__(self, block: ChrfGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        from sacrebleu.metrics.chrf import CHRF

        self._metric = CHRF(word_order=block.word_order)

    @classmethod
    def totals(cls, block: ChrfGrader, counts: Sequence[int]) -> dict[str, float]:
        """Return the chrF of the whole corpus."""
        from sacrebleu.metrics.chrf import CHRF

        return {"corpus": CHRF(word_order=block.word_order)._compute_f_score(list(counts)) / 100}

    def compare(self, answer: str, references: list[str]) -> Verdict:
        """Return chrF from 0 to 1."""
        score = self._metric.sentence_score(answer, references).score / 100
        (counts,) = self._metric._extract_corpus_statistics([answer], [[text] for text in references])
        return _scored(score, "chrF", counts)


class RougeGrader(OverlapBlock):
    """The F-measure of ROUGE, by rouge-score."""

    type: Literal["rouge"]
    variant: Literal["rouge1", "rouge2", "rougeL"] = "rougeL"
    """Which ROUGE to compute."""
    stem: bool = False
    """Compare the stems of English words. Only with `tokenize: words`."""
    tokenize: Literal["words", "whitespace", "characters", "ja-mecab"] = "words"
    """Compare `words` of Latin letters and digits, whatever is between `whitespace`, `characters` for languages without
    spaces, or Japanese words as sacrebleu's `ja-mecab` finds them."""

    @model_validator(mode="after")
    def _check_stem(self) -> RougeGrader:
        if self.stem and self.tokenize != "words":
            raise ValueError("stem is for `tokenize: words`")
        return self


class Rouge(Overlap):
    """The best F-measure over the references."""

    schema = RougeGrader
    block: RougeGrader
    requires = ("rouge_score", "rouge-score")

    def __init__(self, block: RougeGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]

        self._variant = block.variant
        tokenizer = _tokenizer(block.tokenize, origin)
        self._scorer = RougeScorer([block.variant], use_stemmer=block.stem, tokenizer=tokenizer)

    most_steps = 4_000_000

    def steps(self, answer: str, reference: str) -> int:
        """Return the pairs of words or characters that `rougeL` compares in Python; other variants count words once."""
        if self._variant != "rougeL":
            return max(len(answer), len(reference))
        return self._count(answer) * self._count(reference)

    def _count(self, text: str) -> int:
        return len(self._scorer._tokenizer.tokenize(text))

    def compare(self, answer: str, references: list[str]) -> Verdict:
        """Return the F-measure, from 0 to 1."""
        for text in references:
            if self._count(text) < (2 if self._variant == "rouge2" else 1):
                self._refuse(text)
        return _scored(max(self._of(answer, text) for text in references), self._variant)

    def _of(self, answer: str, reference: str) -> float:
        return float(self._scorer.score(reference, answer)[self._variant].fmeasure)

    def _refuse(self, reference: str) -> None:
        hint = "it is too short"
        if self.block.tokenize == "words":
            hint = "it has too few words of Latin letters or digits; `tokenize: characters` takes any language"
        raise AttemptError(
            "grader", f"{self._variant} cannot use the reference {reference[:80]!r}: {hint}", retry=False
        )


class _Tokenizer:
    """A tokenizer with rouge-score's interface."""

    def __init__(self, split: Callable[[str], list[str]]) -> None:
        self.tokenize = split


def _tokenizer(name: str, origin: Origin) -> _Tokenizer | None:
    """Return a tokenizer; None for rouge-score's own."""
    match name:
        case "whitespace":
            return _Tokenizer(str.split)
        case "characters":
            return _Tokenizer(lambda text: [character for character in text if not character.isspace()])
        case "ja-mecab":
            try:
                from sacrebleu.tokenizers.tokenizer_ja_mecab import TokenizerJaMecab

                mecab = TokenizerJaMecab()  # type: ignore[no-untyped-call]
            except (ImportError, RuntimeError) as error:
                message = "`tokenize: ja-mecab` needs packages that are not installed"
                raise origin.error(message, "pip install 'sacrebleu[ja]'") from error
            return _Tokenizer(lambda text: mecab(text).split())
    return None


class CharF1Grader(OverlapBlock):
    """F1 over the characters of the longest common subsequence."""

    type: Literal["char_f1"]
    strip: bool = True
    """Ignore white space around answer and reference."""


class CharF1(Overlap):
    """Twice the longest common subsequence divided by the sum of both lengths; the best over the references."""

    schema = CharF1Grader
    requires = ("rapidfuzz", "rapidfuzz")

    def __init__(self, block: CharF1Grader, origin: Origin) -> None:
        super().__init__(block, origin)
        from rapidfuzz.distance import Indel

        self.strips = block.strip
        self._similarity = Indel.normalized_similarity

    def compare(self, answer: str, references: list[str]) -> Verdict:
        """Return F1, from 0 to 1."""
        return _scored(max(self._similarity(answer, text) for text in references), "character F1")


class ErrorRateGrader(OverlapBlock):
    """1 minus the error rate: insertions, deletions and substitutions per word or character of the reference."""

    type: Literal["wer", "cer"]


class ErrorRate(Overlap):
    """1 minus the lowest error rate over the references, but at least 0: rates can exceed 1."""

    schema = ErrorRateGrader
    requires = ("rapidfuzz", "rapidfuzz")

    def __init__(self, block: ErrorRateGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        from rapidfuzz.distance import Levenshtein

        self._distance = Levenshtein.distance

    @classmethod
    def totals(cls, block: ErrorRateGrader, counts: Sequence[int]) -> dict[str, float]:
        """Return the error rate over all words or characters, and 1 minus the rate."""
        rate = counts[0] / counts[1]
        return {"corpus": max(0.0, 1 - rate), "error_rate": rate}

    def compare(self, answer: str, references: list[str]) -> Verdict:
        """Return 1 minus the rate, and the rate in the details."""
        words = self.block.type == "wer"
        hypothesis = answer.split() if words else answer
        sizes = []
        for text in references:
            reference = text.split() if words else text
            sizes.append((self._distance(reference, hypothesis), len(reference)))
        edits, length = min(sizes, key=lambda pair: pair[0] / pair[1])
        rate = edits / length
        feedback = f"{self.block.type.upper()} {rate:.3f}"
        return Verdict(max(0.0, 1 - rate), feedback, {"error_rate": rate}, counts=(edits, length))


def _scored(score: float, name: str, counts: Sequence[int] | None = None) -> Verdict:
    score = min(1.0, max(0.0, score))  # rounding can give 1.0000000000000002
    return Verdict(score, f"{name} {score:.3f}", counts=None if counts is None else tuple(counts))
