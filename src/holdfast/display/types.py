"""What the engine tells whoever shows it. Every method returns at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.engine.progress import Progress
    from holdfast.plan.plan import Plan
    from holdfast.store.records import ErrorRecord, Grade, Output


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
        """No more will come."""
