"""Numbers of a run that its trials are counted for: funnel, distributions, activity; once for each state of the run.

Counting a million trials takes seconds, so it goes on beside the pages. A page waits for a moment and otherwise shows
what was counted before, if anything.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Final

from holdfast.report.overview import TrialNumbers, TrialsTally
from holdfast.view.table import STATUSES, score_column, status_column

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.report.checkpoints import TrialStatus
    from holdfast.report.run_view import RunView
    from holdfast.view.columns import Columns
    from holdfast.view.site import Site
    from holdfast.view.table import TrialTable

_PATIENCE: Final = 0.25
"""seconds that a page waits"""
_KEPT: Final = 8
"""runs whose numbers are kept"""
_STATUS: Final[tuple[TrialStatus, ...]] = tuple("pending" if status == "ungraded" else status for status in STATUSES)
"""by the numbers that columns have for statuses, less one"""


class Counting:
    """Counts the trials of runs, one run at a time."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(1, "counting")
        self._counts: dict[str, tuple[object, Future[TrialsTally]]] = {}
        self._latest: dict[str, TrialsTally] = {}

    def count(self, run: str, view: RunView) -> TrialsTally | None:
        """Return the counted trials of a run, maybe of a moment ago; None where they have never been counted."""
        with suppress(TimeoutError):
            columns = self._site.columns(run, _PATIENCE)
            columns.refresh()
            state = columns, columns.generation
            with self._lock:
                earlier, future = self._counts.pop(run, (None, None))
                if future is None or (earlier != state and future.done()):
                    earlier, future = state, self._thread.submit(count_rows, view, columns)
                self._counts[run] = earlier, future
                while len(self._counts) > _KEPT:
                    oldest = next(iter(self._counts))
                    del self._counts[oldest]
                    self._latest.pop(oldest, None)
            self._latest[run] = future.result(_PATIENCE)
        return self._latest.get(run)


def count_rows(view: RunView, columns: Columns) -> TrialsTally:
    """Count all trials of a run from its columns."""
    tally = TrialsTally(view)
    with columns.lock:
        table = columns.table
    for trial in _numbers(table):
        tally.add(trial)
    for place, status in zip(table["at"], table["status"], strict=True):
        if not place:
            tally.add_missing(_STATUS[status - 1])
    return tally


def _numbers(table: TrialTable) -> Iterator[TrialNumbers]:
    """Yield the trials that have an output."""
    graders = [
        (name, table[status_column(number)], table[score_column(number)]) for number, name in enumerate(table.graders)
    ]
    for row, place in enumerate(table["at"]):
        if not place:
            continue
        tokens, cost, first_token, turns = (table[name][row] for name in ("tokens", "cost", "first_token", "turns"))
        yield TrialNumbers(
            sample=table.id_at(row),
            status=_STATUS[table["status"][row] - 1],
            score=_known(table["score"][row]),
            grades={
                name: (_STATUS[statuses[row] - 1], _known(scores[row]))
                for name, statuses, scores in graders
                if statuses[row]
            },
            turns=int(turns) if turns == turns else 0,
            stopped=table["stopped"][row] > 0,
            tokens=None if tokens != tokens else int(tokens),
            cost=_known(cost),
            started=table["started"][row],
            seconds=table["seconds"][row],
            first_token=_known(first_token),
            copied=table["source"][row] > 0,
        )


def _known(value: float) -> float | None:
    return None if value != value else value
