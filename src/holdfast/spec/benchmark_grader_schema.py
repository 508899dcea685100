"""Models of graders that benchmarks need. Unknown keys are errors."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from holdfast.spec.grader_schema import Expected, GraderBlock, TextBlock
from holdfast.spec.schema import Block, Formula, Pattern, Seconds


class RegexFilter(Block):
    """A filter that keeps a match of a pattern."""

    regex: Pattern
    """Pattern to look for. Where it has groups, the first group that is not empty is kept, else the whole match."""
    group: int = 0
    """Number of the match to keep, counted from 0, or from the end with negative numbers. lm-eval calls it
    `group_select`."""
    fallback: str = "[invalid]"
    """Text to use if there is no such match."""


def _preferred_name(written: Any) -> Any:
    return "remove_whitespace" if written == "strip" else written


Filter = Annotated[
    Literal["remove_whitespace", "lowercase", "uppercase", "take_first"] | RegexFilter,
    BeforeValidator(_preferred_name),
]


class ExtractGrader(TextBlock):
    """Extracts an answer by filters, and compares it with the expected one."""

    type: Literal["extract"]
    filters: list[Filter] = Field(default=[])
    """Filters to apply in order: `{regex: PATTERN, group: 0, fallback: "[invalid]"}`, `remove_whitespace` (or `strip`),
    `lowercase`, `uppercase`, `take_first`."""
    expected: Expected = "{{ expected }}"
    """Expected answer, or a list of accepted answers. Templates over the row."""
    ignore_case: bool = False
    """Ignore upper and lower case."""
    ignore_punctuation: bool = False
    """Ignore ASCII punctuation."""
    ignore_numbers: bool = False
    """Ignore the digits 0 to 9."""
    ignore: list[Pattern] = Field(default=[])
    """Patterns whose matches are removed from the answer and from the expected value, one after the other. lm-eval
    calls them `regexes_to_ignore`."""


class IfevalGrader(TextBlock):
    """Checks which instructions of IFEval the answer follows."""

    type: Literal["ifeval"]
    instructions: Formula = "instruction_id_list"
    """Expression over the row that returns the list of instructions, such as `punctuation:no_comma`."""
    arguments: Formula = "kwargs"
    """Expression over the row that returns a mapping of arguments for each instruction, such as `{num_words: 300}`."""
    mode: Literal["strict", "loose"] = "strict"
    """Check the answer as it is (`strict`), or accept an instruction that holds without the first line, the last line
    or asterisks (`loose`)."""

    expressions: ClassVar[tuple[str, ...]] = ("instructions", "arguments")


class LmEvalGrader(GraderBlock):
    """Grades with a task of lm-eval: its filters and its metric. Needs rows that were compiled from lm-eval."""

    type: Literal["lm_eval"]
    task: str = Field(min_length=1)
    """Name of the task."""
    metric: str = Field(min_length=1)
    """Name of the metric. A value between 0 and 1 is the score; others are recorded without one."""
    filter: str = "none"
    """Name of the task's filter to apply to the reply."""
    version: str | None = None
    """Version of lm-eval whose task grades; another one is refused. Benchmarks set it when they are compiled. Default:
    the installed version."""
    timeout: Seconds = 60
    """Time limit for one reply."""
