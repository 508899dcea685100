"""Displays for logs and programs, on standard error: plain lines, JSON events, or only notices."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.display.format import inside, one_line, pace, plan_lines, scores, spending, trouble, without_details
from holdfast.display.terminal import echo, printable_json
from holdfast.display.types import Display
from holdfast.store.records import SCHEMA_VERSION

if TYPE_CHECKING:
    from holdfast.display.types import Result, SuiteCell
    from holdfast.plan.plan import Plan
    from holdfast.plan.progress import Progress
    from holdfast.store.records import ErrorRecord, Grade, Output

_PLAIN_SECONDS = 10.0
_SHOWN_ALIKE = 3


class ErrorLines:
    """Describes failures: the first few of each kind, then one line that there are more."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, str, str]] = Counter()

    def line(self, record: ErrorRecord) -> str | None:
        """Describe a failure; None where it is repeated, or enough like it were shown."""
        if not record.final:
            return None
        message = one_line(record.message)
        alike = (record.where, record.kind, without_details(message))
        self._seen[alike] += 1
        if self._seen[alike] <= _SHOWN_ALIKE:
            return f"{record.named_sample} #{record.trial}: {record.where}: {record.kind}: {message}"
        return "… and more like this, in errors.jsonl" if self._seen[alike] == _SHOWN_ALIKE + 1 else None


def say(line: str) -> None:
    """Write a line to standard error. The run continues if that fails (a full disk, a closed pipe)."""
    with suppress(OSError, ValueError):
        echo(line, err=True)


class Quiet(Display):
    """Shows nothing but notices."""

    def notice(self, message: str) -> None:
        """Print the notice."""
        say(f"note: {message}")

    def warning(self, message: str) -> None:
        """Print the warning."""
        say(f"warning: {message}")


class Plain(Quiet):
    """Prints a line of progress every ten seconds, for logs."""

    def __init__(self) -> None:
        self._last = time.monotonic() - _PLAIN_SECONDS + 2  # a first line soon, to show that the run is alive
        self._errors = ErrorLines()
        self._cell: SuiteCell | None = None

    def cell(self, cell: SuiteCell) -> None:
        """Note the place in the suite, which later lines begin with."""
        self._cell, self._errors = cell, ErrorLines()

    def begin(self, name: str, target: str, path: str, plan: Plan) -> None:
        """Print the plan."""
        say(plan_lines(name, target, path, plan, self._cell))

    def error(self, record: ErrorRecord) -> None:
        """Print the first few failures of each kind that are not retried."""
        if (line := self._errors.line(record)) is not None:
            say(line)

    def tick(self, progress: Progress) -> None:
        """Print the progress every ten seconds."""
        if time.monotonic() - self._last < _PLAIN_SECONDS:
            return
        self._last = time.monotonic()
        total = f"{progress.plan.total:,}"
        graded = [f"{progress.graded:,}/{total} graded"] if progress.graders else []
        parts = [
            *([] if self._cell is None else [self._cell.place]),
            f"{progress.outputs:,}/{total} outputs",
            *graded,
            *pace(progress),
            *scores(progress),
            *inside(progress),
            *spending(progress),
            *trouble(progress),
        ]
        say("  ".join(parts))


class Events(Display):
    """Prints one JSON object per line on standard error."""

    def cell(self, cell: SuiteCell) -> None:
        """Emit the place of the next run in the suite."""
        self._emit("cell", schemaVersion=SCHEMA_VERSION, **msgspec.structs.asdict(cell))

    def begin(self, name: str, target: str, path: str, plan: Plan) -> None:
        """Emit the plan."""
        numbers = {
            "finished": plan.finished,
            "reused": plan.reused,
            "to_grade": plan.to_grade,
            "to_run": plan.to_run,
            "total": plan.total,
        }
        self._emit("begin", schemaVersion=SCHEMA_VERSION, eval=name, target=target, run=path, **numbers)

    def output(self, record: Output) -> None:
        """Emit an event per trial, without the transcript."""
        self._emit(
            "output",
            sample=record.sample,
            trial=record.trial,
            stop=record.stop,
            answer=record.answer,
            seconds=record.timing.seconds,
        )

    def grade(self, record: Grade) -> None:
        """Emit an event per verdict."""
        self._emit(
            "grade",
            sample=record.sample,
            trial=record.trial,
            grader=record.grader,
            status=record.status,
            score=record.score,
        )

    def error(self, record: ErrorRecord) -> None:
        """Emit an event per failed attempt."""
        self._emit(
            "error",
            sample=record.sample,
            trial=record.trial,
            where=record.where,
            kind=record.kind,
            message=record.message,
            final=record.final,
        )

    def notice(self, message: str) -> None:
        """Emit a notice."""
        self._emit("notice", message=message)

    def warning(self, message: str) -> None:
        """Emit a warning, which is a notice to programs."""
        self.notice(message)

    def cell_result(self, result: Result) -> None:
        """Emit how a run of a suite ended."""
        self._emit("cell_end", **msgspec.to_builtins(result))

    def result(self, result: Result) -> None:
        """Emit the last event: how the command ended."""
        self._emit("end", **msgspec.to_builtins(result))

    def _emit(self, event: str, **fields: Any) -> None:
        line = msgspec.json.encode({"event": event, "time": round(time.time(), 3), **fields})
        say(printable_json(line.decode()))
