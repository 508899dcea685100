"""Sums over the rows of a run: verdicts, usage, agreement of judges; and notices about what a score does not show.

Rows are added in the dataset's order, so the sums do not depend on which trial finished first.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.data.columns import name_graders
from holdfast.graders.build import grader_class
from holdfast.report.stats import estimate, pass_all_k, pass_at_k
from holdfast.store.metrics import Agreement, GraderMetrics, ValueMetrics
from holdfast.store.records import describe_answers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from holdfast.data.columns import Panel
    from holdfast.graders.build import GraderPlace
    from holdfast.report.stats import Estimate
    from holdfast.report.trials import Judged, JudgedOutput, TrialStatus
    from holdfast.spec.eval import Eval
    from holdfast.store.records import GradeStatus

_ENDS: Final = frozenset((0.0, 1.0))
"""the only scores of a proportion"""
_MOST_MEANS: Final = 1 << 12
"""different means up to which they are counted instead of listed"""


class Tally:
    """The verdicts of one grader, or of all together."""

    def __init__(self, trials: int) -> None:
        self._samples: dict[float, int] = {}
        """samples by mean score, while there are few different means"""
        self._sums, self._counts = array("d"), array("I")
        """for each further sample its mean score and 1, or for each cluster the sum and the number of its means"""
        self._proportion = True
        self._pass_at = [0.0] * trials
        self._pass_all = [0.0] * trials
        self._pass_samples = [0] * trials
        self.scored = 0
        """number of verdicts with a score"""
        self.statuses: Counter[GradeStatus] = Counter()

    def add(
        self, verdicts: Sequence[tuple[GradeStatus, float | None]], cluster: int | None = None, samples: int = 1
    ) -> None:
        """Add the verdicts on all trials of one sample, which may belong to a cluster, or of several equal samples."""
        scores, passes, decided = [], 0, 0
        for status, score in verdicts:
            self.statuses[status] += samples
            if status == "passed":
                passes += 1
                decided += 1
            elif status == "failed":
                decided += 1
            if score is not None:
                scores.append(score)
        if scores:
            self.scored += samples * len(scores)
            self._add_mean(math.fsum(scores) / len(scores), cluster, samples)
            self._proportion = self._proportion and _ENDS.issuperset(scores)
        if decided == 1:  # the common case, in which the chances are 0 or 1
            self._pass_at[0] += samples * (passes > 0)
            self._pass_all[0] += samples * passes
            self._pass_samples[0] += samples
            return
        for k in range(1, decided + 1):
            self._pass_at[k - 1] += samples * pass_at_k(decided, passes, k)
            self._pass_all[k - 1] += samples * pass_all_k(decided, passes, k)
            self._pass_samples[k - 1] += samples

    def _add_mean(self, mean: float, cluster: int | None, samples: int) -> None:
        if cluster is None:
            if mean in self._samples or len(self._samples) < _MOST_MEANS:
                self._samples[mean] = self._samples.get(mean, 0) + samples
            else:
                self._sums.extend([mean] * samples)
                self._counts.extend([1] * samples)
            return
        missing = cluster + 1 - len(self._sums)
        self._sums.extend([0.0] * missing)
        self._counts.extend([0] * missing)
        self._sums[cluster] += samples * mean
        self._counts[cluster] += samples

    def _estimate(self) -> Estimate:
        sums, counts, times = self._sums, self._counts, None
        if self._samples:
            sums = array("d", self._samples) + sums
            counts = array("I", [1]) * len(self._samples) + counts
            times = array("I", self._samples.values()) + array("I", [1]) * len(self._sums)
        return estimate(sums, counts, times, proportion=self._proportion, verdicts=self.scored)

    @property
    def decided(self) -> int:
        """Number of trials with a verdict or a reason for its absence; an error is not a verdict."""
        return self.statuses.total() - self.statuses["error"]

    def summary(self, *, not_asked: int = 0, missing: int = 0) -> GraderMetrics:
        """Return the verdicts in numbers.

        The grader does not apply to `not_asked` further trials, and errors left `missing` trials without a verdict.
        """
        mean, low, high, stderr, method = self._estimate() if self.scored else (None, None, None, None, "none")
        shares = [(k, samples) for k, samples in enumerate(self._pass_samples, start=1) if samples]
        return GraderMetrics(
            score=mean,
            low=low,
            high=high,
            stderr=stderr,
            interval=method,
            n=self.scored,
            passed=self.statuses["passed"],
            failed=self.statuses["failed"],
            skipped=self.statuses["skipped"] + self.statuses["not_reached"] + not_asked,
            errors=self.statuses["error"] + missing,
            not_reached=self.statuses["not_reached"],
            not_asked=not_asked,
            pass_at={k: self._pass_at[k - 1] / samples for k, samples in shares},
            pass_all={k: self._pass_all[k - 1] / samples for k, samples in shares if k > 1},
            pass_n=dict(shares) if len(self._pass_samples) > 1 else {},
        )


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
        """sums over rows, for graders whose metrics are not means over rows"""
        self.set_scores: dict[int, float] = {}
        """the score of the whole set, for graders that judge all outputs at once"""
        self.overall = Tally(trials)
        self.samples = self.trials = 0
        self.covered = 0
        """trials with a verdict of every grader that applies"""
        self.looked_at = [0] * len(places)
        """outputs that each grader applies to"""
        self._asked = [0] * len(places)
        """trials of the rows that each grader applies to"""
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
        """Return the number of trials on which a grader gave a verdict."""
        return self._tallies[grader].decided

    def grader_metrics(self, grader: int, *, so_far: bool) -> GraderMetrics:
        """Return the statistics of a grader, without its rule. `so_far`: missing verdicts are not errors."""
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
        """Return the statistics of the rows, which all have one value of a field."""
        return ValueMetrics(
            samples=self.samples,
            graders={
                place.name: self.grader_metrics(number, so_far=so_far)
                for number, place in enumerate(self._places)
                if self._asked[number]
            },
            overall=self.overall_metrics(so_far=so_far) if self._places else None,
        )


class AgreementTally:
    """Sums over the outputs of a run, from which Krippendorff's alpha for interval data is computed."""

    def __init__(self) -> None:
        self._outputs = self._equal = self._values = 0
        self._sum = self._squares = self._observed = 0.0

    def add(self, votes: Sequence[Judged | None]) -> None:
        """Add the votes on one output. Outputs with fewer than two scores do not count."""
        scored = [(vote.status, vote.score) for vote in votes if vote is not None and vote.score is not None]
        if len(scored) < 2:
            return
        scores, count = [score for _, score in scored], len(scored)
        self._outputs += 1
        self._equal += len({status for status, _ in scored}) == 1
        self._values += count
        self._sum += sum(scores)
        self._squares += sum(score * score for score in scores)
        # The sum of (x - y)² over all ordered pairs is 2 (n Σx² - (Σx)²); from differences, it is exact for equal ones.
        self._observed += sum((x - y) ** 2 for x in scores for y in scores) / (count - 1)

    def summary(self) -> Agreement | None:
        """Return the agreement; None if no output has two scores."""
        if not self._outputs:
            return None
        expected = 2 * (self._values * self._squares - self._sum**2) / (self._values - 1)
        # If all scores are the same, chance would agree as well: alpha is not defined.
        alpha = None if expected <= 1e-12 else 1 - self._observed / expected
        return Agreement(alpha=alpha, equal=self._equal / self._outputs, outputs=self._outputs)


def account_notices(
    kinds: Mapping[str, int], places: Sequence[GraderPlace], graders: Mapping[str, GraderMetrics]
) -> Iterator[str]:
    """Yield notices about answers that are not whole, from counts by kind, and about verdicts that graders skipped."""
    if (described := describe_answers(kinds)) is not None:
        yield described
    for name, counts in graders.items():
        if counts.set_score is not None:
            yield f"{name_graders([name])} gives {counts.set_score:.4g} for all outputs together"
        if "measured" in counts.totals and not counts.measure:
            yield (
                f"{name_graders([name])} has no score: some of its values are labels, or are not between 0 and 1, so "
                f"all are kept as measurements. Give it its scale, as in graders.{name}.range=[1,5], or "
                f"graders.{name}.measure=true"
            )
    declining = {
        name: counts for name, counts in graders.items() if counts.declined and "measured" not in counts.totals
    }
    silent = [name for name, counts in declining.items() if not _has_verdicts(counts)]
    if silent:
        have = "it has" if len(silent) == 1 else "they have"
        yield f"{name_graders(silent)} skipped every output: {have} checked nothing"
    for name, counts in declining.items():
        if name not in silent:
            asked = counts.passed + counts.failed + counts.declined + counts.errors
            yield f"{name} skipped {counts.declined:,} of {asked:,} trials: they have no verdict and no score"
    ahead = [
        place.name
        for place in places
        if place.turn is not None
        and (counts := graders[place.name]).not_reached
        and not (counts.errors or _has_verdicts(counts))
    ]
    if ahead:
        yield f"{name_graders(ahead)} checked nothing: no conversation reached that turn"


def with_thoughts(spec: Eval, count: int, outputs: int) -> Iterator[str]:
    """Yield a notice about replies in which graders see the model's reasoning."""
    if count and (spec.graders or spec.checkpoints) and getattr(spec.target, "strip_reasoning", None) is None:
        is_model = hasattr(spec.target, "strip_reasoning")
        remedy = "set target.strip_reasoning: true" if is_model else "return the answer without it"
        yield f"{count} of {outputs} replies contain </think>: graders see the model's reasoning; {remedy}"


def _has_verdicts(counts: GraderMetrics) -> bool:
    """Return True if a grader gave a verdict, or may still give one."""
    return bool(counts.n or counts.passed or counts.failed or counts.ungraded)


def summarize_verdicts(trials: int, verdicts: Iterable[tuple[object, TrialStatus, float | None]]) -> GraderMetrics:
    """Return the statistics of verdicts, each given as sample, status and score, sample by sample.

    `trials` is the number of trials of each sample. Trials that wait for a verdict or a person do not count.
    """
    tally = Tally(trials)
    for _, of_sample in groupby(verdicts, key=itemgetter(0)):
        tally.add([(status, score) for _, status, score in of_sample if status != "pending" and status != "uncertain"])
    return tally.summary()
