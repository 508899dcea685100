"""Models of the blocks of NeMo Agent Toolkit in the eval file: target, grader and live export."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from holdfast import GraderBlock, TargetBlock
from holdfast.spec.eval_schema import LiveExport
from holdfast.spec.schema import refuse_secret_paths


def _without_secrets(override: dict[str, Any]) -> dict[str, Any]:
    refuse_secret_paths(override)
    return override


Override = Annotated[dict[str, Any], AfterValidator(_without_secrets)]
"""values by dotted path"""


class NatTarget(TargetBlock):
    """A workflow of NeMo Agent Toolkit, run in this process."""

    nat: str = Field(pattern=r"\.(ya?ml|json)$")
    """Configuration file of the workflow, relative to the eval file."""
    override: Override = {}
    """Values that override the configuration, by dotted path, as in `llms.main.temperature`."""
    result_json_path: str = "$"
    """JSONPath of the answer in the object that the workflow returns, such as `$.output`; as `nat eval` takes it."""
    version: str | None = None
    """Change this when an installed component answers differently from now on."""

    sees_row: ClassVar[bool] = False

    @property
    def reports_cost(self) -> bool:
        """False: NAT reports tokens only."""
        return False

    @property
    def label(self) -> str:
        """The configuration file's name."""
        return Path(self.nat).name


class NatGrader(GraderBlock):
    """Runs an evaluator of NeMo Agent Toolkit in this process."""

    type: Literal["nat"]
    config_file: str | None = Field(default=None, pattern=r"\.(ya?ml|json)$")
    """NAT configuration with the evaluator and its components, relative to the eval file. Default: the target's."""
    evaluator: str | dict[str, Any] | None = None
    """Name of the evaluator under `eval.evaluators`, or its block with a `_type`. Default: the grader's name."""
    override: Override = {}
    """Values that override the configuration, by dotted path. Default: the target's."""
    question: str | None = None
    """Template of the question passed to the evaluator. Default: the prompt."""
    expected: str | int | float | bool | None = None
    """Template of the expected answer passed to the evaluator. A single `{{ expression }}` keeps its type. Default: the
    row's `expected`, else its `answer`."""
    dataset: dict[str, Any] | None = None
    """Dataset block of NAT. The evaluator gets ids, questions, expected answers and rows as `nat eval` reads them from
    the eval's file. Set in configurations that run unchanged."""
    range: tuple[float, float] | None = None
    """Lowest and highest score of the evaluator, such as `[1, 5]`, mapped to 0 and 1. Default: 0 to 1."""
    measure: bool | None = None
    """True: record all values as measurements, such as seconds, tokens or labels, without a verdict. False: a value
    that is not between 0 and 1 is an error. Default: all values are measurements if one of them is no such number."""
    version: str | None = None
    """Change this when an installed package grades differently from now on."""

    templates: ClassVar[tuple[str, ...]] = ("question", "expected")
    as_written: ClassVar[tuple[str, ...]] = ("evaluator", "override")
    runs_code: ClassVar[bool] = True
    inherited: ClassVar[tuple[str, ...]] = ("config_file", "override")

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError("`range` must be the lowest and the highest score, as in [1, 5]")
        if self.dataset is not None and (self.question is not None or self.expected is not None):
            raise ValueError("give either `dataset`, or `question` and `expected`")
        if self.range is not None and self.measure:
            raise ValueError("give either `range`, for a score, or `measure`, for a number without a verdict")
        if isinstance(self.evaluator, dict) and not self.evaluator.get("_type"):
            raise ValueError("an evaluator's block needs its `_type`")
        return self


NatStep = Literal[
    "LLM_START",
    "LLM_NEW_TOKEN",
    "LLM_END",
    "TOOL_START",
    "TOOL_END",
    "FUNCTION_START",
    "FUNCTION_END",
    "WORKFLOW_START",
    "WORKFLOW_END",
    "TASK_START",
    "TASK_END",
    "TTC_START",
    "TTC_END",
    "CUSTOM_START",
    "CUSTOM_END",
    "SPAN_START",
    "SPAN_CHUNK",
    "SPAN_END",
]
"""the types of steps that NeMo Agent Toolkit knows"""


class NatOutput(LiveExport):
    """Files of NeMo Agent Toolkit, written while the run is in progress."""

    dir: str
    """Folder for the files, relative to the eval file."""
    step_filter: list[NatStep] = ["LLM_END", "TOOL_END"]
    """Types of steps to write. An empty list means all, as in NAT."""
    dataset: dict[str, Any] = {}
    """Dataset block of NAT, whose `id_key` and `structure` name the columns of `workflow_output.json`."""
    config_file: str | None = None
    """NAT configuration, relative to the eval file, that is written next to the results, as `nat eval` does."""
    override: Override = {}
    """Values that override the configuration, by dotted path."""
    profiler: dict[str, Any] | None = None
    """Profiler block of NAT: its files are written too, made from the recorded steps. Needs `nvidia-nat-profiler`."""
