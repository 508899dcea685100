"""Compute the numbers of waza's `results.json`, per task and overall: averages, intervals, reliability.

Trials without a verdict do not count. A single trial has no interval, as in waza: an interval needs a spread.
"""

from __future__ import annotations

import math
import random
from array import array
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from holdfast.report.stats import wilson

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_RESAMPLES: Final = 10_000
_DRAWS: Final = 20_000_000
"""of all resamples together; many scores are resampled less often, and the result says how often"""


def task_stats(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the `stats` of a task."""
    judged = [run for run in runs if run["_score"] is not None]
    took = [run["duration_ms"] for run in runs if run["duration_ms"] is not None]
    counts = {status: sum(run["status"] == status for run in runs) for status in ("passed", "failed", "error")}
    plain = [run["_plain"] for run in judged if run["_plain"] is not None]
    weighted = [run["_score"] for run in judged]
    scores = plain if len(plain) == len(weighted) else weighted
    average, spread = mean(scores), deviation(scores)
    rate = counts["passed"] / len(judged) if judged else None
    low = high = 0.0
    if average is not None and len(scores) > 1:
        margin = 1.96 * spread / math.sqrt(len(scores))
        low, high = max(0.0, average - margin), min(1.0, average + margin)
    return {
        "pass_rate": rate,
        "flakiness_percent": None if rate is None else 100 * (1 - abs(2 * rate - 1)),
        "passed_runs": counts["passed"],
        "failed_runs": counts["failed"],
        "error_runs": counts["error"],
        "total_runs": len(runs),
        "avg_score": average,
        "avg_weighted_score": mean(weighted),
        "min_score": min(scores, default=None),
        "max_score": max(scores, default=None),
        "std_dev_score": spread,
        "score_variance": spread**2,
        "ci95_lo": low,
        "ci95_hi": high,
        "flaky": 0 < counts["passed"] < len(judged),
        "avg_duration_ms": round(sum(took) / len(took)) if took else None,
        **({"pass_rate_ci": _proportion(counts["passed"], len(judged))} if len(judged) > 1 else {}),
        **({"bootstrap_ci": _bootstrap(tuple(weighted))} if len(weighted) > 1 else {}),
    }


class SuiteNumbers:
    """Collects the scores of all tasks for the overall numbers. Tasks without a verdict are left out."""

    def __init__(self) -> None:
        self.scores, self.weighted_scores = array("d"), array("d")
        self._passed, self._judged = array("q"), array("q")
        """runs of each task"""

    def add(self, runs: Sequence[dict[str, Any]], stats: Mapping[str, Any]) -> None:
        """Add a task with its runs and their `stats`."""
        if stats["avg_score"] is not None:
            self.scores.append(stats["avg_score"])
            self.weighted_scores.append(stats["avg_weighted_score"])
            self._passed.append(stats["passed_runs"])
            self._judged.append(sum(run["_score"] is not None for run in runs))

    def statistics(self, succeeded: int, judged: int) -> dict[str, Any] | None:
        """Return the `statistics` of all tasks; None for one task or one trial of each, as in waza.

        `succeeded` of `judged` tasks have passed.
        """
        fewest = min(self._judged, default=0)
        if len(self._judged) < 2 or fewest < 2 or not judged:
            return None
        return {
            "bootstrap_ci": _bootstrap(tuple(self.scores)),
            "success_rate_ci": _proportion(succeeded, judged),
            "pass_hat_k": [
                mean(list(map(_pass_hat, self._passed, self._judged, repeat(k)))) for k in range(1, fewest + 1)
            ],
        }


def mean(values: Sequence[float]) -> float | None:
    """Return the average; None if there are no values."""
    return math.fsum(values) / len(values) if values else None


def deviation(values: Sequence[float]) -> float:
    """Return the population standard deviation."""
    average = mean(values)
    return 0.0 if average is None else math.sqrt(math.fsum((value - average) ** 2 for value in values) / len(values))


def _pass_hat(passed: int, total: int, k: int) -> float:
    """Estimate the probability that `k` more trials of a task all pass."""
    return math.comb(passed, k) / math.comb(total, k)


def _proportion(successes: int, count: int) -> dict[str, Any]:
    lower, upper = wilson(successes / count, count)
    return {"lower": lower, "upper": upper, "mean": successes / count, "confidence_level": 0.95}


@lru_cache(maxsize=4096)
def _bootstrap(scores: tuple[float, ...]) -> dict[str, Any]:
    """Return the percentile interval of the mean, which is deterministic."""
    count, average = len(scores), mean(scores)
    resamples = min(_RESAMPLES, max(200, _DRAWS // count))
    lower = upper = average
    if len(set(scores)) > 1:
        draw = random.Random(repr(scores))  # noqa: S311 - nothing here is a secret
        means = sorted(math.fsum(draw.choices(scores, k=count)) / count for _ in range(resamples))
        lower, upper = means[int(0.025 * resamples)], means[min(int(0.975 * resamples), resamples - 1)]
    interval = {"lower": lower, "upper": upper, "mean": average}
    return {**interval, "confidence_level": 0.95, "num_bootstraps": resamples}
