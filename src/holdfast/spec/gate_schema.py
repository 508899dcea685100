"""The schema of `gate`: minimum values by metric, and the run that this one must not be worse than."""

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, model_validator

from holdfast.spec.schema import Block, Points

RUN_METRICS: Final = ("score", "passed", "coverage", "whole", "graded")
"""metrics of a whole run, beside those of its graders: `Metrics.shares` has them by the same names"""
MAX_DROP: Final = 0.02
"""how far a metric may fall, unless the gate says otherwise"""

Inconclusive = Literal["pass", "fail"]
"""what a gate makes of a difference that so few samples can neither show nor exclude"""


def _quoted(name: Any) -> Any:
    if isinstance(name, int | float):
        raise ValueError(  # noqa: TRY004 - pydantic takes no other
            "YAML reads the id of this run as a number: put it in quotes"
        )
    return name


class GateSettings(Block):
    """The keys of a gate that are no metrics."""

    baseline: Annotated[str | None, BeforeValidator(_quoted)] = Field(default=None, min_length=1)
    """Finished run that this one must not be worse than: its id, the beginning of its id, or its path."""
    max_drop: Points | None = None
    """How far a metric may fall below the baseline: `2pt` or `2` for 2 points, `0.02` for the same as a share of 1.
    Default: 2 points."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Confidence of each verdict against the baseline."""
    inconclusive: Inconclusive = "pass"
    """Whether the gate passes if there are too few samples to tell: `pass`, with a warning, or `fail`."""


SETTINGS: Final = tuple(GateSettings.__annotations__)


class GateBlock(GateSettings):
    """Conditions that a finished run must meet."""

    minima: dict[str, Annotated[float, Field(ge=0, le=1)]] = {}
    """every other key: the minimum of the metric of this name"""

    @model_validator(mode="before")
    @classmethod
    def _gather_minima(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        settings = {key: data[key] for key in SETTINGS if key in data}
        return {**settings, "minima": {key: value for key, value in data.items() if key not in SETTINGS}}

    @property
    def present(self) -> bool:
        """True if there is something to check."""
        return bool(self.minima) or self.baseline is not None

    def idle_settings(self) -> list[str]:
        """Describe settings that have no effect."""
        idle = [f"gate.{name}" for name in SETTINGS[1:] if name in self.model_fields_set and self.baseline is None]
        return [f"{' and '.join(idle)}: without gate.baseline there is nothing to compare with"] if idle else []
