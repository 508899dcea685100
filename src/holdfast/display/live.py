"""The live display: progress, rate, remaining time, scores so far, tokens, cost and failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from holdfast.display.format import in_flight, inside, pace, plan_lines, scores, spending, trouble
from holdfast.display.grid import SafeConsole
from holdfast.display.text import ErrorLines
from holdfast.display.types import Display

if TYPE_CHECKING:
    from rich.console import RenderableType

    from holdfast.display.types import SuiteCell
    from holdfast.plan.plan import Plan
    from holdfast.plan.progress import Progress
    from holdfast.store.records import ErrorRecord

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
