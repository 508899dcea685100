"""Displays of a run in progress: their interface to the engine, and those on standard error.

`LiveDisplay`, `Plain` lines, JSON `Events`, and `Quiet`, which shows only notices.
"""

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

from holdfast.display.format import dollars, duration, one_line, rate, rate_limit_text, share, without_details
from holdfast.display.grid import SafeConsole
from holdfast.display.terminal import echo, printable_json
from holdfast.errors import UsageError
from holdfast.plan.changes import format_count
from holdfast.store.records import SCHEMA_VERSION

if TYPE_CHECKING:
    from rich.console import RenderableType

    from holdfast.plan.plan import Plan
    from holdfast.plan.progress import Progress
    from holdfast.store.records import ErrorRecord, Grade, Output, Spent

KINDS: Final = ("rich", "plain", "json", "none")
_PLAIN_SECONDS: Final = 10.0
_SHOWN_ALIKE: Final = 3


class Result(msgspec.Struct, frozen=True):
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


class _Readable(Display):
    """A display for people: of failures, it shows the first few of each kind, then a single line for the others."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, str, str]] = Counter()
        self._cell: SuiteCell | None = None
        """the place in the suite, which is shown with the progress"""

    def cell(self, cell: SuiteCell) -> None:
        """Note the place in the suite."""
        self._cell = cell
        self._seen.clear()

    def _failure(self, record: ErrorRecord) -> str | None:
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


class Plain(_Readable, Quiet):
    """Prints a line of progress every ten seconds, for logs."""

    def __init__(self) -> None:
        super().__init__()
        self._last = time.monotonic() - _PLAIN_SECONDS + 2  # a first line soon, to show that the run is alive

    def begin(self, name: str, target: str, path: str, plan: Plan) -> None:
        """Print the plan."""
        say(plan_lines(name, target, path, plan, self._cell))

    def error(self, record: ErrorRecord) -> None:
        """Print the first few failures of each kind that are not retried."""
        if (line := self._failure(record)) is not None:
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
        numbers = _fields(plan, "finished", "reused", "to_grade", "to_run", "total")
        self._emit("begin", schemaVersion=SCHEMA_VERSION, eval=name, target=target, run=path, **numbers)

    def output(self, record: Output) -> None:
        """Emit an event per trial, without the transcript."""
        self._emit("output", **_fields(record, "sample", "trial", "stop", "answer"), seconds=record.timing.seconds)

    def grade(self, record: Grade) -> None:
        """Emit an event per verdict."""
        self._emit("grade", **_fields(record, "sample", "trial", "grader", "status", "score"))

    def error(self, record: ErrorRecord) -> None:
        """Emit an event per failed attempt."""
        self._emit("error", **_fields(record, "sample", "trial", "where", "kind", "message", "final"))

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


def _fields(record: object, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


_BAR_WIDTH = 40


class LiveDisplay(_Readable):
    """A display that is redrawn in place on a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._console = SafeConsole(stderr=True, highlight=False)
        self._live: Live | None = None

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
        if (line := self._failure(record)) is not None:
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


def in_flight(progress: Progress) -> list[str]:
    """Describe how full the window is. A rate limit may have lowered it below what is already in flight."""
    if progress.in_flight > progress.limit > 0:
        return [f"{progress.in_flight} in flight, limit lowered to {progress.limit}"]
    return [f"{progress.in_flight} of {progress.limit} in flight"] if progress.limit else []


def plan_lines(name: str, target: str, path: str, plan: Plan, cell: SuiteCell | None = None) -> str:
    """Return the two lines that are shown before a run starts; a run of a suite is named as in the suite."""
    head = f"{name} · {target}" if cell is None else f"{cell.place} {cell.eval} · {cell.target}"
    return f"{head} · {path}\n{plan}"


def inside(progress: Progress) -> list[str]:
    """List turns and calls so far: in long trials, no other number may change for minutes."""
    counts = ((progress.turns, "turn"), (progress.calls, "call"))
    return [f"{count:,} {what}{'s' * (count != 1)}" for count, what in counts if count]


def pace(progress: Progress) -> list[str]:
    """Describe the rate and the time left, if known."""
    eta = progress.eta
    return [part for part in (rate(progress.rate), "" if eta is None else f"{duration(eta)} left") if part]


def scores(progress: Progress, most: int = 6) -> list[str]:
    """List each grader's running score with the number of its verdicts; of many graders, the slowest."""
    names = [name for name, counts in progress.graders.items() if counts.scored]
    shown = set(sorted(names, key=lambda name: progress.graders[name].grades)[:most])
    parts = [
        f"{name} {share(counts.score)} ({counts.scored:,})"
        for name, counts in progress.graders.items()
        if name in shown
    ]
    return [*parts, *([f"{len(names) - most:,} more graders"] if len(names) > most else [])]


def spending(progress: Progress) -> list[str]:
    """List tokens and cost so far, once there are any."""
    spent = progress.spent
    return [tokens(spent), money(spent)] if spent.tokens or spent.cost else []


def trouble(progress: Progress) -> list[str]:
    """List what has gone wrong so far: requests that wait, failed attempts, answers that are not whole."""
    parts = list(progress.batches)
    parts += [rate_limit_text(where, limit) for where, limit in progress.rate_limits.items() if limit.waiting]
    if progress.retried:
        others = progress.backing_off - sum(limit.waiting for limit in progress.rate_limits.values())
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in progress.retried.most_common())
        parts.append(f"retried: {kinds}" + (f" ({others:,} waiting)" if others > 0 else ""))
    if partial := progress.kinds.total() - progress.kinds["whole"]:
        parts.append(f"not whole: {format_count(partial, 'answer')}")
    if failed := progress.given_up - progress.uncertain:
        parts.append(f"failed: {format_count(failed, 'trial')}")
    if progress.uncertain:
        parts.append(f"uncertain: {format_count(progress.uncertain, 'trial')}")
    if progress.failed_grades:
        graders = ", ".join(f"{name} {count:,}" for name, count in progress.failed_grades.most_common())
        parts.append(f"failed grades: {graders}")
    return parts


def tokens(spent: Spent) -> str:
    """Format the tokens of a run; an unknown part is shown as unknown."""
    if not spent.unmetered:
        return f"{spent.tokens:,} tokens"
    return f"{spent.tokens:,} tokens + unknown" if spent.tokens else "tokens unknown"


def money(spent: Spent) -> str:
    """Format the cost of a run; an unknown cost is shown as unknown, not as zero."""
    if not spent.unpriced:
        return dollars(spent.cost)
    return f"{dollars(spent.cost)} + unknown" if spent.cost else "cost unknown"
