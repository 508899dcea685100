"""The numbers of a run that is not finished, the same wherever they are shown: a terminal, a page, the state of a job.

A report computes them from the whole run (`report.metrics.report_so_far`), which takes a while. These are for whoever
looks at a run every second.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from holdfast.report.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.report.verdicts import TrialStatus
    from holdfast.store.index import RunIndex
    from holdfast.store.metrics import GraderMetrics


class TrialCounts(NamedTuple):
    """Trials of a run by how far they are."""

    total: int
    outputs: int
    graded: int
    """outputs with all their verdicts, estimated by the number of verdicts"""


def count_trials(index: RunIndex, total: int, graders_per_trial: float) -> TrialCounts:
    """Count the trials of a run by its index, without looking up each of them."""
    outputs = min(total, index.rows["outputs"])
    graded = min(outputs, int(index.rows["verdicts"] / graders_per_trial)) if graders_per_trial else outputs
    return TrialCounts(total, outputs, graded)


def count_failed(index: RunIndex) -> int:
    """Count the trials without an output whose attempts have failed."""
    return sum(index.output(key) is None for key in index.attempts)


def summarize_verdicts(trials: int, verdicts: Iterable[tuple[object, TrialStatus, float | None]]) -> GraderMetrics:
    """Return the statistics of verdicts, each given as sample, status and score, sample by sample.

    `trials` is the number of trials of each sample. Trials that wait for a verdict or a person do not count.
    """
    tally = Tally(trials)
    for _, of_sample in groupby(verdicts, key=itemgetter(0)):
        tally.add([(status, score) for _, status, score in of_sample if status != "pending" and status != "uncertain"])
    return tally.summary()
