"""What users may write in a text metric: how much an answer has in common with a reference. Unknown keys are errors."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from holdfast.spec.grader_schema import Expected, TextBlock


class OverlapBlock(TextBlock):
    """What every text metric has."""

    expected: Expected = "{{ expected }}"
    """the reference, or a list of references"""
    ignore_case: bool = False

    alternatives: ClassVar[tuple[str, ...]] = ("expected",)

    def reads_as_before(self, fields: Mapping[str, Any]) -> bool:
        """Lists have been references from the first version of these graders on."""
        return True


class BleuGrader(OverlapBlock):
    """BLEU of sacrebleu, of each answer and of the whole run."""

    type: Literal["bleu"]
    tokenize: Literal["13a", "intl", "char", "zh", "ja-mecab", "ko-mecab", "none"] = "13a"


class ChrfGrader(OverlapBlock):
    """chrF of sacrebleu, of each answer and of the whole run."""

    type: Literal["chrf"]
    word_order: int = Field(default=0, ge=0, le=4)
    """2 is chrF++"""


class RougeGrader(OverlapBlock):
    """The F-measure of ROUGE, by rouge-score."""

    type: Literal["rouge"]
    variant: Literal["rouge1", "rouge2", "rougeL"] = "rougeL"
    stem: bool = False
    """compare English words by their stems"""
    tokenize: Literal["words", "characters"] = "words"
    """`words` are those of Latin letters and digits; `characters` is for languages without spaces"""


class CharF1Grader(OverlapBlock):
    """F1 over the characters of the longest common subsequence."""

    type: Literal["char_f1"]


class ErrorRateGrader(OverlapBlock):
    """1 less the error rate: insertions, deletions and substitutions for each word or character of the reference."""

    type: Literal["wer", "cer"]
