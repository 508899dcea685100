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
        self.set_scores: dict[int, float] = {}
        """by grader, its own number for all outputs together, of graders that look at all of them at once"""
        self.overall = Tally(trials)
        self.samples = self.trials = 0
        self.covered = 0
        """trials on which every grader that was asked gave a verdict"""
        self.looked_at = [0] * len(places)
        """outputs that each grader is to look at"""
        self._asked = [0] * len(places)
        """trials of the rows that each grader is to look at"""
        self._measures = {number for number, place in enumerate(places) if getattr(place.block, "measure", False)}
        self._may_measure = {number for number, place in enumerate(places) if grader_class(place.block).one_scale}
        """graders whose skips are measurements"""

    def add(self, row: Row, samples: int = 1) -> None:
        """Add a row, or several equal rows."""
        panel, trials, outputs, cluster = row
        self.samples += samples
        self.trials += samples * len(trials)
        self.covered += samples * sum(map(self._is_covered, trials))
        for grader in panel.graders:
            self._asked[grader] += samples * len(trials)
            self.looked_at[grader] += samples * outputs
            verdicts = [trial.verdicts.get(grader) for trial in trials]
            scored = [(each.status, each.score) for each in verdicts if each is not None]
            self._tallies[grader].add(scored, cluster, samples)
            for verdict in verdicts:
                recorded = None if verdict is None else verdict.recorded
                if recorded is None:
                    continue
                if recorded.together is not None and isinstance(recorded.together.score, int | float):
                    self.set_scores[grader] = recorded.together.score
                if (counts := recorded.counts) is not None:
                    sums = self._counts.get(grader, [0] * len(counts))
                    self._counts[grader] = [total + samples * count for total, count in zip(sums, counts, strict=True)]
        scored = [(trial.status, trial.score) for trial in trials if trial.status != "error"]
        self.overall.add(scored, cluster, samples)

    def _is_covered(self, judged: JudgedOutput) -> bool:
        return judged.status != "error" and not any(
            verdict is not None and verdict.status == "skipped" and grader not in self._may_measure
            for grader, verdict in judged.verdicts.items()
        )

    def decided(self, grader: int) -> int:
        """Return the number of trials with a verdict of a grader."""
        return self._tallies[grader].decided

    def grader_metrics(self, grader: int, *, so_far: bool) -> GraderMetrics:
        """Return the statistics of a grader, without its rule; while a run goes on, missing verdicts are no errors."""
        block, totals = self._places[grader].block, {}
        if grader in self._counts:
            totals = grader_class(block).totals(block, self._counts[grader])
        tally, asked = self._tallies[grader], self._asked[grader]
        missing = 0 if so_far else asked - tally.statuses.total()
        return msgspec.structs.replace(
            tally.summary(not_asked=self.trials - asked, missing=missing),
            totals=totals,
            measure=grader in self._measures,
        )

    def overall_metrics(self, *, so_far: bool) -> GraderMetrics:
        """Return the statistics of the trials as a whole."""
        return self.overall.summary(missing=0 if so_far else self.trials - self.overall.statuses.total())

    def value_metrics(self, *, so_far: bool) -> ValueMetrics:
        """Return the statistics as those of the rows with one value."""
        return ValueMetrics(
            samples=self.samples,
            graders={
                place.name: self.grader_metrics(number, so_far=so_far)
                for number, place in enumerate(self._places)
                if self._asked[number]
            },
            overall=self.overall_metrics(so_far=so_far) if self._places else None,
        )
