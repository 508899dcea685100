"""Text metrics: BLEU, chrF, ROUGE, character F1, word and character error rates. Each needs a package of its own.

BLEU, chrF and error rates of a whole run are not the mean over its answers: they come of counts that are summed first.
So a verdict carries its counts, and `totals` turns their sums into numbers for `metrics.json`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar
from unicodedata import normalize

from holdfast.errors import AttemptError
from holdfast.graders.expected import expected_texts
from holdfast.graders.types import InstantGrader, Verdict
from holdfast.spec.text_metric_schema import (
    BleuGrader,
    CharF1Grader,
    ChrfGrader,
    ErrorRateGrader,
    OverlapBlock,
    RougeGrader,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.graders.types import Case
    from holdfast.spec.eval import Origin


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
    """above this a comparison would block the run for seconds"""

    def steps(self, answer: str, reference: str) -> int:
        """Return an upper bound of the work: most metrics look at each pair of characters."""
        return len(answer) * len(reference)

    def compare(self, answer: str, references: list[str]) -> Verdict:
        """Return the verdict on an answer."""
        raise NotImplementedError


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


class Chrf(Overlap):
    """chrF against the reference that fits best."""

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
        """The pairs of words, or characters, that `rougeL` compares in Python; the others count them once."""
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
    """What rouge-score asks for the words of a text."""

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


class CharF1(Overlap):
    """Twice the longest common subsequence over both lengths: the best over the references."""

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


class ErrorRate(Overlap):
    """1 less the lowest error rate over the references; not below 0, though a rate can be above 1."""

    schema = ErrorRateGrader
    requires = ("rapidfuzz", "rapidfuzz")

    def __init__(self, block: ErrorRateGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        from rapidfuzz.distance import Levenshtein

        self._distance = Levenshtein.distance

    @classmethod
    def totals(cls, block: ErrorRateGrader, counts: Sequence[int]) -> dict[str, float]:
        """Return the error rate over all words or characters, and 1 less that."""
        rate = counts[0] / counts[1]
        return {"corpus": max(0.0, 1 - rate), "error_rate": rate}

    def compare(self, answer: str, references: list[str]) -> Verdict:
        """Return 1 less the rate, and the rate itself in the details."""
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
    score = min(1.0, max(0.0, score))  # rounding can leave 1.0000000000000002
    return Verdict(score, f"{name} {score:.3f}", counts=None if counts is None else tuple(counts))
