"""The interface between the engine and its displays. Every method returns at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from holdfast.plan.plan import Plan
    from holdfast.plan.progress import Progress
    from holdfast.store.records import ErrorRecord, Grade, Output


class Result(Struct, frozen=True):
    """Result of a command, for programs."""

    exit_code: int
    reason: str
    """`finished`, `gate`, `errors`, `ungraded`, `budget`, `fault`, `waiting`, `interrupted` or `failed`"""
    message: str | None = None
    """details of the reason, if any"""
    run: str | None = None
    """the run directory"""
    metrics: dict[str, Any] | None = None
    """content of `metrics.json`; None if the run is not finished"""
    so_far: dict[str, Any] | None = None
    """metrics of a run that is not finished, if they were computed"""
    left: dict[str, int] | None = None
    """trials that are not finished: `to_run` and `to_grade`"""


class SuiteCell(msgspec.Struct, frozen=True):
    """The place of a run in a suite."""

    number: int
    """from 1"""
    cells: int
    """of the whole suite"""
    eval: str
    target: str
    done: int
    """trials that the cells before this one have finished"""
    trials: int
    """of the whole suite"""

    @property
    def place(self) -> str:
        """`2/6`."""
        return f"{self.number}/{self.cells}"


class Display:
    """Base class of displays. Its methods do nothing; subclasses override those that they need."""

    def cell(self, cell: SuiteCell) -> None:
        """Called before each run of a suite."""

    def begin(self, name: str, target: str, path: str, plan: Plan) -> None:
        """Called before a run starts or resumes."""

    def output(self, record: Output) -> None:
        """Called when a trial is finished and on disk."""

    def grade(self, record: Grade) -> None:
        """Called when a verdict is on disk."""

    def error(self, record: ErrorRecord) -> None:
        """Called when an attempt has failed."""

    def notice(self, message: str) -> None:
        """Called with a message for the user."""

    def warning(self, message: str) -> None:
        """Called with a failure that does not end the run."""

    def tick(self, progress: Progress) -> None:
        """Called a few times a second."""

    def end(self) -> None:
        """Called when the run is over for this process, before `result`."""

    def cell_result(self, result: Result) -> None:
        """Called after each run of a suite."""

    def result(self, result: Result) -> None:
        """Called last, with the result of the command."""
