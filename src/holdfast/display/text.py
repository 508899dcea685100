"""Displays for logs and programs: plain lines, JSON events, or nothing. They write to standard error."""

from __future__ import annotations

import sys
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.display.format import duration, inside, money, plan_lines, share, tokens
from holdfast.display.types import Display
from holdfast.store.records import SCHEMA_VERSION

if TYPE_CHECKING:
    from holdfast.engine.progress import Progress
    from holdfast.plan.plan import Plan
    from holdfast.store.records import ErrorRecord, Grade, Output

_PLAIN_SECONDS = 10.0
_SHOWN_ALIKE = 3


def say(line: str) -> None:
    """A line on standard error. Where it cannot be written (a full disk, a closed pipe) the run goes on without it."""
    with suppress(OSError, ValueError):
        sys.stderr.write(line + "\n")


class Quiet(Display):
    """Shows nothing but notices."""

    def notice(self, message: str) -> None:
        """Notices are never swallowed."""
        say(message)


class Plain(Quiet):
    """A line now and then, for logs."""

    def __init__(self) -> None:
        self._last = time.monotonic() - _PLAIN_SECONDS + 2  # a first line soon, so that one sees it lives
        self._errors: Counter[tuple[str, str, str]] = Counter()

    def begin(self, name: str, target: str, path: str, plan: Plan) -> None:
        """What is about to happen."""
        say(plan_lines(name, target, path, plan))

    def error(self, record: ErrorRecord) -> None:
        """Attempts that are not repeated are worth a line."""
        if not record.final:
            return
        alike = (record.where, record.kind, record.message)
        self._errors[alike] += 1
        if self._errors[alike] <= _SHOWN_ALIKE:
            say(f"{record.sample} #{record.trial}: {record.where}: {record.kind}: {record.message}")
        elif self._errors[alike] == _SHOWN_ALIKE + 1:
            say("… and more like this, which are in errors.jsonl")

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
            *inside(progress),
            tokens(spent),
            money(spent),
        ]
        if progress.errors:
            parts.append("errors " + " ".join(f"{kind}={count}" for kind, count in progress.errors.items()))
        say("  ".join(parts))


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
        self._emit("begin", schemaVersion=SCHEMA_VERSION, eval=name, target=target, run=path, **numbers)

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
        say(line.decode())
