"""Sums over the rows of a run, as a whole and for each value of the fields under `by`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from holdfast.graders.build import grader_class
from holdfast.report.tally import Tally
from holdfast.store.metrics import GraderMetrics, ValueMetrics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.data.panels import Panel
    from holdfast.graders.build import GraderPlace
    from holdfast.report.verdicts import JudgedOutput


class Row(NamedTuple):
    """A row with its trials."""

    panel: Panel
    trials: Sequence[JudgedOutput]
    outputs: int
    """number of trials with an output"""
    cluster: int | None = None
    """number of the cluster that the row belongs to"""


class RowsTally:
    """The verdicts on some rows: by grader, and for the trials as a whole."""

    def __init__(self, places: Sequence[GraderPlace], trials: int) -> None:
        self._places = places
        self._tallies = [Tally(trials) for _ in places]
        self._counts: dict[int, list[int]] = {}
        """sums over the rows, by grader, of graders with metrics that are not the mean of their parts"""
        self.overall = Tally(trials)
        self.samples = 0
        self.looked_at = [0] * len(places)
        """outputs that each grader is to look at"""
        self._applies = [False] * len(places)

    def add(self, row: Row, samples: int = 1) -> None:
        """Add a row, or several equal rows."""
        panel, trials, outputs, cluster = row
        self.samples += samples
        for grader in panel.graders:
            self._applies[grader] = True
            self.looked_at[grader] += samples * outputs
            verdicts = [trial.verdicts.get(grader) for trial in trials]
            scored = [(each.status, each.score) for each in verdicts if each is not None]
            self._tallies[grader].add(scored, cluster, samples)
            for verdict in verdicts:
                if verdict is not None and verdict.recorded is not None and verdict.recorded.counts is not None:
                    counts = verdict.recorded.counts
                    sums = self._counts.get(grader, [0] * len(counts))
                    self._counts[grader] = [total + samples * count for total, count in zip(sums, counts, strict=True)]
        scored = [(trial.status, trial.score) for trial in trials if trial.status != "error"]
        self.overall.add(scored, cluster, samples)

    def decided(self, grader: int) -> int:
        """Return the number of trials with a verdict of a grader."""
        return self._tallies[grader].decided

    def grader_metrics(self, grader: int) -> GraderMetrics:
        """Return the statistics of a grader, without its rule."""
        block, totals = self._places[grader].block, {}
        if grader in self._counts:
            totals = grader_class(block).totals(block, self._counts[grader])
        return msgspec.structs.replace(self._tallies[grader].summary(), totals=totals)

    def value_metrics(self) -> ValueMetrics:
        """Return the statistics as those of the rows with one value."""
        return ValueMetrics(
            samples=self.samples,
            graders={
                place.name: self.grader_metrics(number)
                for number, place in enumerate(self._places)
                if self._applies[number]
            },
            overall=self.overall.summary() if self._places else None,
        )
