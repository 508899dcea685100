"""The base of displays, and the result of a command. Every method of a display returns at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    from holdfast.plan.plan import Plan
    from holdfast.plan.progress import Progress
    from holdfast.store.records import ErrorRecord, Grade, Output


class Result(Struct, frozen=True):
    """The result of a command, for programs."""

    exit_code: int
    reason: str
    """`finished`, `gate`, `errors`, `ungraded`, `budget`, `fault`, `interrupted` or `failed`"""
    message: str | None = None
    """the reason in words, where there is more to say"""
    run: str | None = None
    """the run directory"""
    metrics: dict[str, Any] | None = None
    """what `metrics.json` holds; None when the run is not finished"""
    so_far: dict[str, Any] | None = None
    """the same numbers of a run that is not finished, where they were computed"""
    left: dict[str, int] | None = None
    """trials that are not finished: `to_run` and `to_grade`"""


class Display:
    """The base does nothing; each display shows what it wants to."""

    def begin(self, name: str, target: str, path: str, plan: Plan) -> None:
        """A run is about to start, or to go on."""

    def output(self, record: Output) -> None:
        """A trial is finished and on disk."""

    def grade(self, record: Grade) -> None:
        """A verdict is on disk."""

    def error(self, record: ErrorRecord) -> None:
        """An attempt failed."""

    def notice(self, message: str) -> None:
        """Something a person should know."""

    def tick(self, progress: Progress) -> None:
        """Called a few times a second."""

    def end(self) -> None:
        """The run is over for this process; what it amounts to is reported by `result`."""

    def result(self, result: Result) -> None:
        """Report how the command ended, after everything else."""
