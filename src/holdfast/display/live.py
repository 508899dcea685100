"""The live display: progress, rate, time left, running score, tokens, cost, and what goes wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from holdfast.display.format import duration, inside, money, plan_lines, share, tokens
from holdfast.display.types import Display

if TYPE_CHECKING:
    from rich.console import RenderableType

    from holdfast.engine.progress import Progress
    from holdfast.plan.plan import Plan


class LiveDisplay(Display):
    """Redrawn in place on a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live: Live | None = None

    def begin(self, name: str, target: str, path: str, plan: Plan) -> None:
        """Say what is about to happen, then start drawing."""
        head, _, counts = plan_lines(name, target, path, plan).partition("\n")
        self._console.print(Text(head, style="bold"))
        self._console.print(Text(counts))
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def notice(self, message: str) -> None:
        """Above the moving part."""
        self._console.print(Text(message, style="yellow"))

    def tick(self, progress: Progress) -> None:
        """Draw the present state."""
        if self._live is not None:
            self._live.update(_drawing(progress), refresh=True)

    def end(self) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _drawing(progress: Progress) -> RenderableType:
    total = progress.plan.total
    head = Table.grid(padding=(0, 1))
    head.add_row(
        ProgressBar(total=total, completed=progress.outputs, width=40),
        Text(f"{progress.outputs:,}/{total:,}", style="bold"),
        Text(f"{progress.rate:.1f}/s"),
        Text(f"left {duration(progress.eta)}", style="cyan"),
    )
    spent = progress.spent
    facts = [
        f"score {share(progress.score)}",
        f"{progress.graded:,} graded",
        *inside(progress),
        tokens(spent),
        money(spent),
        f"{progress.in_flight} of {progress.limit} in flight",
    ]
    lines: list[RenderableType] = [head, Text(" · ".join(facts))]
    if progress.errors:
        counts = "  ".join(f"{kind} {count:,}" for kind, count in progress.errors.most_common())
        waiting = f" · {progress.backing_off} waiting to retry" if progress.backing_off else ""
        lost = f" · {progress.given_up} given up for now" if progress.given_up else ""
        lines.append(Text(f"errors: {counts}{waiting}{lost}", style="yellow"))
    return Group(*lines)
