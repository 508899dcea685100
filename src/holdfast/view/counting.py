"""Numbers of a run that its trials are counted for: funnel, distributions, activity; once for each state of the run.

Counting a million trials takes seconds, so a page waits for a moment and otherwise shows what was counted before, if
anything. Trials are counted in a thread, and those of a large finished run in a helper process, which this module is
when it runs as a program: sorting a million numbers would hold up the pages. It stores the numbers beside the columns,
so that they are there when the run is opened again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import compress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.report.overview import Overview, run_overview
from holdfast.report.trial_counts import ManyTrials, TrialNumbers, TrialsTally
from holdfast.report.verdicts import gravest
from holdfast.store.cache_file import read_header, write_cache
from holdfast.store.rundir import RunDir
from holdfast.store.trial_table import STATUSES, score_column, status_column
from holdfast.view.columns import Columns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.report.run_view import RunView
    from holdfast.report.verdicts import BandState, TrialStatus
    from holdfast.store.trial_table import TrialTable
    from holdfast.view.site import Site

_PATIENCE: Final = 0.25
"""seconds that a page waits"""
_KEPT: Final = 8
"""runs whose numbers are kept"""
_MANY: Final = 100_000
"""trials from which on a helper process counts those of a finished run"""
_NICENESS: Final = 5
"""of the helper process, so that a run on the same machine goes first"""
_MAGIC: Final = b"holdfast overview 1\n"
_STATUS: Final[tuple[TrialStatus, ...]] = tuple("pending" if status == "ungraded" else status for status in STATUSES)
"""by the numbers that columns have for statuses, less one"""


_COLUMNS: Final = (
    *("at", "status", "score", "turns", "stopped", "tokens", "cost", "started", "seconds", "first_token", "source"),
    "answer",
)


class Counting:
    """Counts the trials of runs, one run at a time."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(1, "counting")
        self._counts: dict[str, tuple[object, Future[Overview]]] = {}
        self._latest: dict[str, Overview] = {}

    def overview(self, run: str, view: RunView) -> Overview:
        """Return a run in numbers, maybe those of a moment ago; without a count, if there has never been one."""
        with suppress(TimeoutError):
            columns = self._site.columns(run, _PATIENCE)
            columns.refresh()
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
            self._latest[run] = future.result(_PATIENCE)
        return self._latest.get(run) or run_overview(view, None)


def count_run(view: RunView, columns: Columns) -> Overview:
    """Return a run in numbers, for which all its trials are counted, or were before."""
    overview = _count_many(columns) if columns.rows >= _MANY and columns.settled is not None else None
    if overview is None:
        return run_overview(view, count_rows(view, columns))
    return msgspec.structs.replace(overview, run=view.manifest.id)  # an archived run has another name in addresses


class _Stored(msgspec.Struct):
    """An overview, and the state of the run that it is of."""

    state: bytes
    overview: Overview


def _count_many(columns: Columns) -> Overview | None:
    """Return the stored overview of a run, which a helper process makes if need be; None if that is impossible."""
    overview = _load(columns)
    if overview is None:
        command = [sys.executable, "-P", "-m", "holdfast.view.counting", str(columns.rundir.path), str(columns.folder)]
        subprocess.run(command, check=False)
        overview = _load(columns)
    return overview


def _load(columns: Columns) -> Overview | None:
    """Return the stored overview; None if there is none of the present state, or it is damaged."""
    with suppress(OSError, ValueError, msgspec.DecodeError), (columns.folder / "overview").open("rb") as file:
        stored = msgspec.msgpack.decode(read_header(file, _MAGIC)[0], type=_Stored)
        return stored.overview if stored.state == columns.settled else None
    return None


def main() -> None:
    """Count the trials of a run from its stored columns, and store its overview beside them."""
    os.nice(_NICENESS)
    columns = Columns(RunDir(Path(sys.argv[1])), Path(sys.argv[2]))
    if columns.open_stored() and columns.settled is not None:
        overview = run_overview(columns.view, count_rows(columns.view, columns))
        with suppress(OSError):
            write_cache(columns.folder / "overview", _MAGIC, msgspec.msgpack.encode(_Stored(columns.settled, overview)))


def count_rows(view: RunView, columns: Columns) -> TrialsTally:
    """Count all trials of a run from its columns."""
    tally = TrialsTally(view)
    with columns.lock:
        table = columns.table
    if view.metrics is not None and view.manifest.trials == 1:
        tally.add_many(_many(view, table))
    else:
        for trial in _numbers(table):
            tally.add(trial)
    missing = Counter(status for place, status in zip(table["at"], table["status"], strict=True) if not place)
    for code, count in missing.items():
        tally.missing[_STATUS[code - 1]] += count
    table.release()
    return tally


def _many(view: RunView, table: TrialTable) -> ManyTrials:
    """Count the trials that have an output column by column."""
    present = bytes(map(bool, table["at"]))

    def known(name: str) -> list[float]:
        return [value for value in compress(table[name], present) if value == value]

    turns: dict[int, list[int]] = {}
    for number, place in enumerate(view.places):
        if place.turn is not None:
            turns.setdefault(place.turn, []).append(number)
    ends = zip(present, table["source"], table["started"], table["seconds"], strict=True)
    return ManyTrials(
        Counter({_STATUS[code - 1]: count for code, count in Counter(compress(table["status"], present)).items()}),
        {name: known(score_column(number)) for number, name in enumerate(table.graders)},
        {turn: _bands(table, turn, graders, present) for turn, graders in turns.items()},
        known("seconds"),
        known("first_token"),
        known("tokens"),
        known("cost"),
        [started + seconds for output, source, started, seconds in ends if output and not source],
    )


def _bands(table: TrialTable, turn: int, graders: list[int], present: bytes) -> Counter[tuple[BandState, bool]]:
    columns = [table[status_column(number)] for number in graders]
    bands: Counter[tuple[BandState, bool]] = Counter()
    rows = compress(zip(table["stopped"], *columns, strict=True), present)
    for (stopped, *codes), count in Counter(rows).items():
        if any(codes):  # else none of its graders looks at the row
            state = gravest(_STATUS[code - 1] for code in codes if code)
            bands[state, state == "failed" and stopped == turn] += count
    return bands


def _numbers(table: TrialTable) -> Iterator[TrialNumbers]:
    """Yield the trials that have an output."""
    rows, answers = range(len(table)), table.values["answer"]
    columns = [table[name] for name in _COLUMNS]
    graders = [
        (name, table[status_column(number)], table[score_column(number)]) for number, name in enumerate(table.graders)
    ]
    for row, *values in zip(rows, *columns, strict=True):
        place, status, score, turns, stopped, tokens, cost, started, seconds, first_token, source, answer = values
        if not place:
            continue
        yield TrialNumbers(
            table.id_at(row),
            _STATUS[status - 1],
            _known(score),
            {
                name: (_STATUS[statuses[row] - 1], _known(scores[row]))
                for name, statuses, scores in graders
                if statuses[row]
            },
            int(turns) if turns == turns else 0,
            stopped > 0,
            int(tokens) if tokens == tokens else None,
            _known(cost),
            started,
            seconds,
            _known(first_token),
            answers[answer],
            source > 0,
        )


def _known(value: float) -> float | None:
    return None if value != value else value


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # the viewer has ended
        sys.exit(1)
