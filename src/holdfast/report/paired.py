"""Two runs on the same samples: the paired difference and its interval. Pure functions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from holdfast.report.stats import Z95

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Difference(NamedTuple):
    """How much higher the first scores than the second, over the samples both have."""

    samples: int
    mean: float
    low: float | None
    high: float | None


def paired_difference(first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]) -> Difference | None:
    """The mean over samples of the difference of their mean scores, with a normal interval; None if none is shared.

    Trials of one sample are averaged first, so that a sample counts once however often it was tried.
    """
    shared = [sample for sample in first if first[sample] and second.get(sample)]
    if not shared:
        return None
    gaps = [_mean(first[sample]) - _mean(second[sample]) for sample in shared]
    mean = _mean(gaps)
    spread = math.fsum((gap - mean) ** 2 for gap in gaps) / max(1, len(gaps) - 1)
    if spread == 0:
        return Difference(len(gaps), mean, None, None)  # no spread was seen, which is not certainty
    half = Z95 * math.sqrt(spread / len(gaps))
    return Difference(len(gaps), mean, mean - half, mean + half)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
