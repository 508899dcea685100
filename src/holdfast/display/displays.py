"""Displays of a run in progress, on standard error: live, plain lines, JSON events, or only notices."""

from __future__ import annotations

import sys
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from holdfast.display.format import (
    in_flight,
    inside,
    one_line,
    pace,
    plan_lines,
    scores,
    spending,
    trouble,
    without_details,
)
from holdfast.display.grid import SafeConsole
from holdfast.display.terminal import echo, printable_json
from holdfast.display.types import Display
from holdfast.errors import UsageError
from holdfast.store.records import SCHEMA_VERSION

if TYPE_CHECKING:
    from rich.console import RenderableType

    from holdfast.display.types import Result, SuiteCell
    from holdfast.plan.plan import Plan
    from holdfast.plan.progress import Progress
    from holdfast.store.records import ErrorRecord, Grade, Output

KINDS: Final = ("rich", "plain", "json", "none")
_PLAIN_SECONDS: Final = 10.0
_SHOWN_ALIKE: Final = 3


def make_display(name: str | None) -> Display:
    """Make the display of a command: by default a live one on a terminal, lines elsewhere."""
    kind = name or ("rich" if sys.stderr.isatty() else "plain")
    if kind not in KINDS:
        raise UsageError(f"unknown display {kind!r}", remedy=f"Choose one of {', '.join(KINDS)}.")
    if kind == "rich":
        return LiveDisplay()
    return Events() if kind == "json" else Plain() if kind == "plain" else Quiet()


def display_for_python(display: str | Display | None) -> Display:
    """Make the display of a call from Python: by default live on a terminal, lines in a notebook, else only notices."""
    if display is None:
        display = "rich" if _on_terminal() else "plain" if _in_notebook() else "none"
    if isinstance(display, str):
        return make_display(display)
    if not isinstance(display, Display):
        raise UsageError(
            f"invalid display {display!r}",
            remedy=f"Choose one of {', '.join(KINDS)}, or pass a holdfast.Display of your own.",
        )
    return display


def _on_terminal() -> bool:
    return bool(getattr(sys.stderr, "isatty", bool)())


def _in_notebook() -> bool:
    """True if this process is a notebook kernel, which shows standard error below the cell."""
    return "ipykernel" in sys.modules or "google.colab" in sys.modules


class ErrorLines:
    """Describes failures: the first few of each kind, then a single line for the others."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, str, str]] = Counter()

    def line(self, record: ErrorRecord) -> str | None:
        """Describe a failure; None if it is retried, or enough similar ones were shown."""
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


_BAR_WIDTH = 40


class LiveDisplay(Display):
    """A display that is redrawn in place on a terminal."""

    def __init__(self) -> None:
        self._console = SafeConsole(stderr=True, highlight=False)
        self._live: Live | None = None
        self._errors = ErrorLines()
        self._cell: SuiteCell | None = None

    def cell(self, cell: SuiteCell) -> None:
        """Note the place in the suite, which is drawn below the progress of the run."""
        self._cell, self._errors = cell, ErrorLines()

    def begin(self, name: str, target: str, path: str, plan: Plan) -> None:
        """Show the plan, then start drawing."""
        head, _, counts = plan_lines(name, target, path, plan, self._cell).partition("\n")
        self._console.print(Text(head, style="bold"))
        self._console.print(Text(counts))
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def notice(self, message: str) -> None:
        """Print a notice above the moving part."""
        self._console.print(Text(f"note: {message}", style="yellow"))

    def warning(self, message: str) -> None:
        """Print a warning above the moving part."""
        self._console.print(Text(f"warning: {message}", style="bold yellow"))

    def error(self, record: ErrorRecord) -> None:
        """Show the first few failures of each kind above the moving part."""
        if (line := self._errors.line(record)) is not None:
            self._console.print(Text(line, style="red"))

    def tick(self, progress: Progress) -> None:
        """Draw the current state."""
        if self._live is not None:
            self._live.update(_render(progress, self._console.width, self._cell), refresh=True)

    def end(self) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _render(progress: Progress, width: int, cell: SuiteCell | None = None) -> RenderableType:
    trials = progress.plan.total
    stages = [(progress.outputs, trials, "outputs", pace(progress))] if progress.generates else []
    if progress.graders:
        stages.append((progress.graded, trials, "graded", [] if stages else pace(progress)))
    if cell is not None:
        done = cell.done + progress.remaining.finished
        stages.append((done, cell.trials, "suite", [f"{cell.place} {cell.eval}", cell.target]))
    bars = Table.grid(padding=(0, 1))
    bars.add_column(no_wrap=True)
    bars.add_column(justify="right", no_wrap=True)
    bars.add_column(overflow="ellipsis", no_wrap=True)
    for count, total, what, beside in stages:
        bars.add_row(
            ProgressBar(
                total=total,
                completed=count,
                width=max(4, min(_BAR_WIDTH, width // 3)),
                complete_style="cyan",
                finished_style="green",
            ),
            Text(f"{count:,}/{total:,}", style="bold"),
            Text(" · ".join((what, *beside))),
        )
    lines: list[RenderableType] = [bars]
    facts = [*inside(progress), *spending(progress), *in_flight(progress)]
    lines += [Text(" · ".join(parts)) for parts in (scores(progress), facts) if parts]
    lines += [Text(part, style="yellow") for part in trouble(progress)]
    return Group(*lines)
