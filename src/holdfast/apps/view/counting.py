"""Numbers that need a count of a run's trials: funnel, distributions, activity; once for each state of the run.

Counting a million trials takes seconds, so a page waits for a moment if the run is small, and otherwise shows the
previous counts, if any. The trials of a large finished run are counted in a helper process, which is this module run
as a program; other trials are counted in a thread.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.apps.view.columns import Columns, open_columns, work_apart
from holdfast.report.overview import Overview, run_overview
from holdfast.report.trial_counts import TrialNumbers, TrialsTally
from holdfast.report.trial_table import STATUSES, score_column

if TYPE_CHECKING:
    from holdfast.apps.view.site import Site
    from holdfast.report.run_view import RunView
    from holdfast.report.trial_table import TrialTable
    from holdfast.report.trials import TrialStatus
    from holdfast.store.rundir import RunDir

_PATIENCE: Final = 0.25
"""seconds that a page waits"""
_KEPT: Final = 8
"""runs whose numbers are kept"""
_MANY: Final = 100_000
"""number of trials from which no page waits for their count, and of a finished run a helper process counts them"""
_STATUS: Final[tuple[TrialStatus, ...]] = tuple("pending" if status == "ungraded" else status for status in STATUSES)
"""by the codes of statuses, less one"""
_COLUMNS: Final = ("outcome", "sample", "score", "turns", "tokens", "cost", "started", "seconds", "first_token")


class Counting:
    """Counts the trials of runs, one run at a time."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(1, "counting")
        self._counts: dict[str, tuple[object, Future[Overview]]] = {}
        self._latest: dict[str, Overview] = {}

    def overview(self, run: str, view: RunView) -> Overview:
        """Return a run in numbers, which may be a moment old, or without counts if its trials were never counted."""
        with suppress(TimeoutError):
            columns = self._site.columns(run, _PATIENCE)
            columns.refresh()
            patience = 0.0 if columns.rows >= _MANY else _PATIENCE
            state = columns, columns.generation, view
            with self._lock:
                earlier, future = self._counts.pop(run, (None, None))
                if future is None or (earlier != state and future.done()):
                    earlier, future = state, self._thread.submit(count_run, view, columns)
                self._counts[run] = earlier, future
                while len(self._counts) > _KEPT:
                    oldest = next(iter(self._counts))
                    del self._counts[oldest]
                    self._latest.pop(oldest, None)
            self._latest[run] = future.result(patience)
        return self._latest.get(run) or run_overview(view, None)


def count_run(view: RunView, columns: Columns) -> Overview:
    """Count all trials of a run, and return the run in numbers."""
    if columns.rows >= _MANY and columns.settled:
        with suppress(msgspec.DecodeError):
            overview = msgspec.json.decode(b"".join(columns.helpers.ask("counting", columns.rundir)), type=Overview)
            return msgspec.structs.replace(overview, run=view.manifest.id)  # an archived run has another name
    return run_overview(view, count_rows(view, columns))


def _print_overview(rundir: RunDir) -> None:
    columns = open_columns(rundir)
    sys.stdout.buffer.write(msgspec.json.encode(run_overview(columns.view, count_rows(columns.view, columns))))


def count_rows(view: RunView, columns: Columns) -> TrialsTally:
    """Count all trials of a run."""
    tally = TrialsTally(view)
    with columns.lock:
        table = columns.table
    words: dict[int, tuple[Any, ...]] = {}
    """of outcomes, which become more while a run goes on"""
    names = ", ".join([*_COLUMNS, *map(score_column, range(len(table.graders)))])
    for number, sample, score, turns, *usage_and_times in table.select(names, "file IS NOT NULL ORDER BY n"):
        if number not in words:
            words[number] = _words_of(table, number)
        status, graders, stopped, *answer = words[number]
        numbers, scores = usage_and_times[:5], usage_and_times[5:]
        grades = {name: (state, scores[grader]) for grader, name, state in graders}
        tally.add(TrialNumbers(sample, status, score, grades, turns, stopped, *numbers, *answer))
    for number, count in table.count("outcome", "file IS NULL").items():
        tally.missing[_STATUS[table.outcomes[number].status - 1]] += count
    return tally


def _words_of(table: TrialTable, number: int) -> tuple[Any, ...]:
    """Return status, graders with theirs, whether a checkpoint ended it, answer, and whether it was reused."""
    outcome = table.outcomes[number]
    statuses = enumerate(zip(table.graders, outcome.statuses, strict=True))
    graders = [(grader, name, _STATUS[code - 1]) for grader, (name, code) in statuses if code]
    return _STATUS[outcome.status - 1], graders, outcome.stopped > 0, outcome.answer, bool(outcome.source)


if __name__ == "__main__":
    work_apart(_print_overview)
