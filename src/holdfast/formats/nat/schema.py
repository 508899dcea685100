"""Models of the blocks of NeMo Agent Toolkit in the eval file: target, grader and live export."""

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from holdfast.spec.export_schema import LiveExport
from holdfast.spec.grader_schema import GraderBlock
from holdfast.spec.schema import refuse_secret_paths
from holdfast.spec.target_schema import TargetBlock


class NatTarget(TargetBlock):
    """A workflow of NeMo Agent Toolkit, run in this process."""

    nat: str = Field(pattern=r"\.(ya?ml|json)$")
    """Configuration file of the workflow, relative to the eval file."""
    override: dict[str, Any] = {}
    """Values that override the configuration, by dotted path, as in `llms.main.temperature`."""
    version: str | None = None
    """Change this when an installed component answers differently from now on."""

    @model_validator(mode="after")
    def _no_secrets(self) -> Self:
        refuse_secret_paths(self.override)
        return self

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
    override: dict[str, Any] = {}
    """Values that override the configuration, by dotted path. Default: the target's."""
    question: str | None = None
    """Template of the question passed to the evaluator. Default: the prompt."""
    expected: str | int | float | bool | None = None
    """Template of the expected answer passed to the evaluator. Default: the row's `expected`, else its `answer`."""
    range: tuple[float, float] | None = None
    """Lowest and highest score of the evaluator, such as `[1, 5]`, mapped to 0 and 1. Default: 0 to 1."""
    measure: bool = False
    """Record the number as a measurement, such as seconds or tokens, without a verdict."""
    version: str | None = None
    """Change this when an installed package grades differently from now on."""

    templates: ClassVar[tuple[str, ...]] = ("question", "expected")
    inherited: ClassVar[tuple[str, ...]] = ("config_file", "override")

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        refuse_secret_paths(self.override)
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError("`range` must be the lowest and the highest score, as in [1, 5]")
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
