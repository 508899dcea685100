"""Displays for logs and programs: plain lines, JSON events, or nothing. They write to standard error."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.display.format import duration, money, plan_lines, share, tokens
from holdfast.display.types import Display

if TYPE_CHECKING:
    from holdfast.engine.progress import Progress
    from holdfast.plan.plan import Plan
    from holdfast.store.records import ErrorRecord, Grade, Output

_PLAIN_SECONDS = 10.0


class Quiet(Display):
    """Shows nothing but notices."""

    def notice(self, message: str) -> None:
        """Notices are never swallowed."""
        sys.stderr.write(f"{message}\n")


class Plain(Quiet):
    """A line now and then, for logs."""

    def __init__(self) -> None:
        self._last = time.monotonic() - _PLAIN_SECONDS + 2  # a first line soon, so that one sees it lives

    def begin(self, name: str, target: str, path: str, plan: Plan) -> None:
        """What is about to happen."""
        sys.stderr.write(plan_lines(name, target, path, plan) + "\n")

    def error(self, record: ErrorRecord) -> None:
        """Attempts that are not repeated are worth a line."""
        if record.final:
            sys.stderr.write(f"{record.sample} #{record.trial}: {record.where}: {record.kind}: {record.message}\n")

    def tick(self, progress: Progress) -> None:
        """A line every ten seconds."""
        if time.monotonic() - self._last < _PLAIN_SECONDS:
            return
        self._last = time.monotonic()
        spent = progress.spent
        parts = [
            f"{progress.outputs:,}/{progress.plan.total:,}",
            f"{progress.rate:.1f}/s",
            f"left {duration(progress.eta)}",
            f"score {share(progress.score)}",
            tokens(spent),
            money(spent),
        ]
        if progress.errors:
            parts.append("errors " + " ".join(f"{kind}={count}" for kind, count in progress.errors.items()))
        sys.stderr.write("  ".join(parts) + "\n")


class Events(Display):
    """One JSON object per line on standard error."""

    def begin(self, name: str, target: str, path: str, plan: Plan) -> None:
        """The plan."""
        numbers = {
            "finished": plan.finished,
            "reused": plan.reused,
            "to_grade": plan.to_grade,
            "to_run": plan.to_run,
            "total": plan.total,
        }
        self._emit("begin", eval=name, target=target, run=path, **numbers)

    def output(self, record: Output) -> None:
        """One per trial, without the transcript."""
        self._emit(
            "output",
            sample=record.sample,
            trial=record.trial,
            stop=record.stop,
            seconds=record.timing.seconds,
        )

    def grade(self, record: Grade) -> None:
        """One per verdict."""
        self._emit(
            "grade",
            sample=record.sample,
            trial=record.trial,
            grader=record.grader,
            status=record.status,
            score=record.score,
        )

    def error(self, record: ErrorRecord) -> None:
        """One per failed attempt."""
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
        """Something a person should know."""
        self._emit("notice", message=message)

    def _emit(self, event: str, **fields: Any) -> None:
        line = msgspec.json.encode({"event": event, "time": round(time.time(), 3), **fields})
        sys.stderr.write(line.decode() + "\n")
