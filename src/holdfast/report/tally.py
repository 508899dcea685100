"""Sums over a run, taken in the dataset's order, so that they do not depend on which trial finished first."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from typing import TYPE_CHECKING, Final

from holdfast.report.stats import ExactSum, estimate, pass_all_k, pass_at_k
from holdfast.store.metrics import GraderMetrics
from holdfast.store.records import Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.report.stats import Estimate
    from holdfast.store.records import GradeStatus

_ENDS: Final = frozenset((0.0, 1.0))
"""the only scores of a proportion"""
_MOST_MEANS: Final = 1 << 12
"""different means that are counted instead of listed"""


class Tally:
    """The verdicts of one grader, or of all together."""

    def __init__(self, trials: int) -> None:
        self._samples: dict[float, int] = {}
        """how many samples have a mean score, while few of these are different"""
        self._sums, self._counts = array("d"), array("I")
        """mean score of each further sample with 1, or sum and number of the means of each cluster"""
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
        """Number of trials with a verdict or a reason to have none; an error is not a verdict."""
        return self.statuses.total() - self.statuses["error"]

    def summary(self, *, not_asked: int = 0, missing: int = 0) -> GraderMetrics:
        """Return the verdicts counted so far in numbers.

        The grader is not to look at `not_asked` more trials, and has no verdict on `missing` trials because of errors.
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


class UsageTally:
    """Tokens and costs; one unknown makes the sum unknown."""

    def __init__(self) -> None:
        self._input = self._output = self._requests = 0
        self._cost = ExactSum()
        self._tokens_known = self._cost_known = True

    def add(self, usage: Usage) -> None:
        """Add the usage of one trial or grade."""
        if usage.input_tokens is None or usage.output_tokens is None:
            self._tokens_known = False
        self._input += usage.input_tokens or 0
        self._output += usage.output_tokens or 0
        self._requests += usage.requests
        if usage.cost is None:
            self._cost_known = False
        else:
            self._cost.add(usage.cost)

    def summary(self) -> Usage:
        """Return the sums."""
        return Usage(
            self._input if self._tokens_known else None,
            self._output if self._tokens_known else None,
            self._requests,
            self._cost.value if self._cost_known else None,
        )
