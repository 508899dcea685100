"""The model of the grader that compares likelihoods."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import model_validator

from holdfast.spec.grader_schema import GraderBlock, NotEmpty
from holdfast.spec.schema import Formula


class LikelihoodGrader(GraderBlock):
    """Checks that the right continuation is the most likely one. Needs `continuations`."""

    type: Literal["likelihood"]
    expected: Annotated[str | int | list[str | int], NotEmpty] = "{{ expected }}"
    """Right continuation: its position counted from 0, its text among `choices`, or a list of accepted ones."""
    normalize: Literal["none", "chars", "bytes", "tokens"] = "none"
    """Divide each log-likelihood by the length of its text, in characters, bytes of UTF-8 or tokens."""
    choices: Formula | None = None
    """Expression over the row that returns the texts whose lengths normalize, and among which `expected` is looked
    up. Default: the continuations without white space at their beginning."""
    greedy: bool = False
    """Check instead that greedy decoding would produce the right continuation."""

    expressions: ClassVar[tuple[str, ...]] = ("choices",)

    @model_validator(mode="after")
    def _greedy_is_not_normalized(self) -> Self:
        if self.greedy and self.normalize != "none":
            raise ValueError("`greedy` compares no likelihoods, so there is nothing to `normalize`")
        return self
