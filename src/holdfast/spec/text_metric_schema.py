"""Models of text metrics, which compare an answer with references. Unknown keys are errors."""

from typing import Literal

from pydantic import Field, model_validator

from holdfast.spec.grader_schema import Expected, TextBlock


class OverlapBlock(TextBlock):
    """Keys that every text metric has."""

    expected: Expected = "{{ expected }}"
    """Reference, or a list of references. Templates over the row."""
    ignore_case: bool = False
    """Ignore upper and lower case."""


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
    """Compare the stems of English words. Only with `tokenize: words`."""
    tokenize: Literal["words", "whitespace", "characters", "ja-mecab"] = "words"
    """Compare `words` of Latin letters and digits, whatever is between `whitespace`, `characters` for languages without
    spaces, or Japanese words as sacrebleu's `ja-mecab` finds them."""

    @model_validator(mode="after")
    def _check_stem(self) -> "RougeGrader":
        if self.stem and self.tokenize != "words":
            raise ValueError("stem is for `tokenize: words`")
        return self


class CharF1Grader(OverlapBlock):
    """F1 over the characters of the longest common subsequence."""

    type: Literal["char_f1"]
    strip: bool = True
    """Ignore white space around answer and reference."""


class ErrorRateGrader(OverlapBlock):
    """1 minus the error rate: insertions, deletions and substitutions per word or character of the reference."""

    type: Literal["wer", "cer"]
