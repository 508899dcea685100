"""Models of text metrics, which compare an answer with references. Unknown keys are errors."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from holdfast.spec.grader_schema import Expected, TextBlock


class OverlapBlock(TextBlock):
    """Keys that every text metric has."""

    expected: Expected = "{{ expected }}"
    """Reference, or a list of references. Templates over the row."""
    ignore_case: bool = False
    """Ignore upper and lower case."""

    alternatives: ClassVar[tuple[str, ...]] = ("expected",)

    def reads_as_before(self, fields: Mapping[str, Any]) -> bool:
        """Lists have been references from the first version of these graders on."""
        return True


class BleuGrader(OverlapBlock):
    """BLEU of sacrebleu, of each answer and of the whole run."""

    type: Literal["bleu"]
    tokenize: Literal["13a", "intl", "char", "zh", "ja-mecab", "ko-mecab", "none"] = "13a"
    """Tokenizer of sacrebleu."""


class ChrfGrader(OverlapBlock):
    """chrF of sacrebleu, of each answer and of the whole run."""

    type: Literal["chrf"]
    word_order: int = Field(default=0, ge=0, le=4)
    """Length of word n-grams to include: 0 for chrF, 2 for chrF++."""


class RougeGrader(OverlapBlock):
    """The F-measure of ROUGE, by rouge-score."""

    type: Literal["rouge"]
    variant: Literal["rouge1", "rouge2", "rougeL"] = "rougeL"
    """Which ROUGE to compute."""
    stem: bool = False
    """Compare the stems of English words."""
    tokenize: Literal["words", "characters"] = "words"
    """Compare `words` of Latin letters and digits, or `characters` for languages without spaces."""


class CharF1Grader(OverlapBlock):
    """F1 over the characters of the longest common subsequence."""

    type: Literal["char_f1"]


class ErrorRateGrader(OverlapBlock):
    """1 minus the error rate: insertions, deletions and substitutions per word or character of the reference."""

    type: Literal["wer", "cer"]
