"""The numbers of waza's `results.json`, of tasks and of the whole: averages, intervals, reliability.

waza writes no interval where there was one trial, and neither does this: an interval needs a spread.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from holdfast.report.stats import wilson

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_RESAMPLES: Final = 10_000
_DRAWS: Final = 20_000_000
"""of all resamples together; many scores are resampled less often, and the result says how often"""
SUITE_NUMBERS: Final = {
    "total_runs": "q",
    "passed_runs": "q",
    "failed_runs": "q",
    "error_runs": "q",
    "avg_duration_ms": "q",
    "avg_score": "d",
    "avg_weighted_score": "d",
}
"""fields of a task's `stats` from which the numbers of all tasks are computed, with their types in an array"""


def task_stats(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the `stats` of a task."""
    total = len(runs)
    counts = {status: sum(run["status"] == status for run in runs) for status in ("passed", "failed", "error")}
    plain = [run["_plain"] for run in runs if run["_score"] is not None and run["_plain"] is not None]
    weighted = [run["_score"] for run in runs if run["_score"] is not None]
    scores = plain if len(plain) == len(weighted) else weighted
    average, spread = mean(scores) or 0.0, deviation(scores)
    rate = counts["passed"] / total
    margin = 1.96 * spread / math.sqrt(len(scores)) if scores else 0.0
    several = len(scores) > 1
    return {
        "pass_rate": rate,
        "flakiness_percent": 100 * (1 - abs(2 * rate - 1)),
        "passed_runs": counts["passed"],
        "failed_runs": counts["failed"],
        "error_runs": counts["error"],
        "total_runs": total,
        "avg_score": average,
        "avg_weighted_score": mean(weighted) or 0.0,
        "min_score": min(scores, default=0.0),
        "max_score": max(scores, default=0.0),
        "std_dev_score": spread,
        "score_variance": spread**2,
        "ci95_lo": max(0.0, average - margin) if several else 0.0,
        "ci95_hi": min(1.0, average + margin) if several else 0.0,
        "flaky": 0 < counts["passed"] < total,
        "avg_duration_ms": round(sum(run["duration_ms"] for run in runs) / total),
        **({"pass_rate_ci": _proportion(counts["passed"], total)} if total > 1 and sum(counts.values()) else {}),
        **({"bootstrap_ci": _bootstrap(tuple(weighted))} if len(weighted) > 1 else {}),
    }


def suite_statistics(tasks: Mapping[str, Sequence[Any]], succeeded: int) -> dict[str, Any] | None:
    """Return the `statistics` of all tasks; None where waza has none: for one task, or one trial of each.

    `tasks` has the number of each task for each field in `SUITE_NUMBERS`.
    """
    totals, passed = tasks["total_runs"], tasks["passed_runs"]
    graded = map(any, zip(passed, tasks["failed_runs"], tasks["error_runs"], strict=True))
    if len(totals) < 2 or min(totals) < 2 or not all(graded):
        return None
    return {
        "bootstrap_ci": _bootstrap(tuple(tasks["avg_score"])),
        "success_rate_ci": _proportion(succeeded, len(totals)),
        "pass_hat_k": [mean(list(map(_pass_hat, passed, totals, repeat(k)))) for k in range(1, min(totals) + 1)],
    }


def mean(values: Sequence[float]) -> float | None:
    """Return the average; None of nothing."""
    return math.fsum(values) / len(values) if values else None


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of these values, taken as all there are."""
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
    """Return the percentile interval of the mean. The same scores always give the same one."""
    count, average = len(scores), mean(scores)
    resamples = min(_RESAMPLES, max(200, _DRAWS // count))
    lower = upper = average
    if len(set(scores)) > 1:
        draw = random.Random(repr(scores))  # noqa: S311 - nothing here is a secret
        means = sorted(math.fsum(draw.choices(scores, k=count)) / count for _ in range(resamples))
        lower, upper = means[int(0.025 * resamples)], means[min(int(0.975 * resamples), resamples - 1)]
    interval = {"lower": lower, "upper": upper, "mean": average}
    return {**interval, "confidence_level": 0.95, "num_bootstraps": resamples}
