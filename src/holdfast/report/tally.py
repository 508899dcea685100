"""Sums over a run, taken in the dataset's order, so that they do not depend on which trial finished first."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from typing import TYPE_CHECKING, Final

from holdfast.report.stats import estimate, pass_all_k, pass_at_k
from holdfast.store.metrics import GraderMetrics
from holdfast.store.records import Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.store.records import GradeStatus

_ENDS: Final = frozenset((0.0, 1.0))
"""the only scores of a proportion"""


class Tally:
    """The verdicts of one grader, or of all together."""

    def __init__(self, trials: int) -> None:
        self._trials = trials
        self._sums, self._counts = array("d"), array("I")
        self._proportion = True
        self._pass_at = [0.0] * trials
        self._pass_all = [0.0] * trials
        self._pass_samples = [0] * trials
        self.statuses: Counter[GradeStatus] = Counter()

    def add(self, verdicts: Sequence[tuple[GradeStatus, float | None]], cluster: int | None = None) -> None:
        """Add the verdicts on all trials of one sample, which may belong to a cluster of samples."""
        scores, passes = [], 0
        for status, score in verdicts:
            self.statuses[status] += 1
            passes += status == "passed"
            if score is not None:
                scores.append(score)
        count = len(scores)
        if cluster is None:
            self._sums.append(math.fsum(scores))
            self._counts.append(count)
        else:
            missing = cluster + 1 - len(self._sums)
            self._sums.extend([0.0] * missing)
            self._counts.extend([0] * missing)
            self._sums[cluster] += math.fsum(scores)
            self._counts[cluster] += count
        self._proportion = self._proportion and _ENDS.issuperset(scores)
        if count == 1:  # the common case, in which the chances are 0 or 1
            self._pass_at[0] += passes > 0
            self._pass_all[0] += passes
            self._pass_samples[0] += 1
            return
        for k in range(1, count + 1):
            self._pass_at[k - 1] += pass_at_k(count, passes, k)
            self._pass_all[k - 1] += pass_all_k(count, passes, k)
            self._pass_samples[k - 1] += 1

    @property
    def decided(self) -> int:
        """Number of trials with a verdict; an error is not a verdict."""
        return self.statuses.total() - self.statuses["error"]

    def summary(self) -> GraderMetrics:
        """Return the verdicts counted so far in numbers."""
        n = sum(self._counts)
        mean, low, high, stderr, method = (
            estimate(self._sums, self._counts, proportion=self._proportion) if n else (None, None, None, None, "none")
        )
        return GraderMetrics(
            score=mean,
            low=low,
            high=high,
            stderr=stderr,
            interval=method,
            n=n,
            passed=self.statuses["passed"],
            failed=self.statuses["failed"],
            skipped=self.statuses["skipped"],
            errors=self.statuses["error"],
            not_reached=self.statuses["not_reached"],
            pass_at={
                k: self._pass_at[k - 1] / samples for k, samples in enumerate(self._pass_samples, start=1) if samples
            },
            pass_all={
                k: self._pass_all[k - 1] / samples
                for k, samples in enumerate(self._pass_samples, start=1)
                if samples and k > 1
            },
        )


class UsageTally:
    """Tokens and costs; one unknown makes the sum unknown."""

    def __init__(self) -> None:
        self._input = self._output = self._requests = 0
        self._costs = array("d")
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
            self._costs.append(usage.cost)

    def summary(self) -> Usage:
        """Return the sums."""
        return Usage(
            self._input if self._tokens_known else None,
            self._output if self._tokens_known else None,
            self._requests,
            math.fsum(self._costs) if self._cost_known else None,
        )
