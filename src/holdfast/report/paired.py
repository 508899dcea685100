"""Two runs on the same samples: paired differences, and whether they are more than chance. Pure functions.

Trials of one sample are averaged first, so that a sample counts once however often it was tried.
"""

from __future__ import annotations

import itertools
import math
import random
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.report.stats import Z95, t95

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Z80: Final = 0.8416212335729143
"""the normal quantile for a power of 80 %"""
_ENUMERATED: Final = 14
_DRAWN: Final = 5_000
_DRAWS: Final = 10_000


class Difference(NamedTuple):
    """The mean difference of two runs, first minus second, over the samples both have."""

    samples: int
    mean: float
    low: float | None
    high: float | None
    stderr: float | None

    @property
    def detectable(self) -> float | None:
        """The smallest true difference that so many samples would show four times out of five."""
        return None if self.stderr is None else (Z95 + Z80) * self.stderr


def gaps(first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """First minus second, by sample, for the samples both have."""
    return {
        sample: _mean(scores) - _mean(second[sample])
        for sample, scores in first.items()
        if scores and second.get(sample)
    }


def paired_difference(
    first: Mapping[str, Sequence[float]],
    second: Mapping[str, Sequence[float]],
    *,
    clusters: Mapping[str, str] = MappingProxyType({}),
) -> Difference | None:
    """The mean over samples of their differences, with Student's 95 % interval; None if no sample is shared.

    `clusters` names the cluster of samples that belong together, whose differences are not independent.
    """
    by_sample = gaps(first, second)
    differences = list(by_sample.values())
    if not differences:
        return None
    mean = _mean(differences)
    parts = cluster_sums({sample: gap - mean for sample, gap in by_sample.items()}, clusters)
    spread = math.fsum(part**2 for part in parts) * len(parts) / max(1, len(parts) - 1)
    if len(parts) == 1 or spread == 0:
        return Difference(len(differences), mean, None, None, None)  # no spread was seen, which is not certainty
    stderr = math.sqrt(spread) / len(differences)
    half = t95(len(parts) - 1) * stderr
    # Scores are from 0 to 1. With few samples, Student's interval would promise differences that cannot be.
    return Difference(len(differences), mean, max(-1.0, mean - half), min(1.0, mean + half), stderr)


def cluster_sums(values: Mapping[str, float], clusters: Mapping[str, str]) -> list[float]:
    """The sum of the values of each cluster. A sample without a cluster is one of its own."""
    if not clusters:
        return list(values.values())
    sums: dict[tuple[bool, str], list[float]] = {}
    for sample, value in values.items():
        known = sample in clusters
        sums.setdefault((known, clusters[sample] if known else sample), []).append(value)
    return [math.fsum(part) for part in sums.values()]


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact two-sided p-value for pass or fail: of those samples on which the two differ, is it a fair coin?"""
    count = only_first + only_second
    tail = sum(math.comb(count, k) for k in range(min(only_first, only_second) + 1))
    return float(min(1.0, 2 * tail / 2**count))


def sign_flip(differences: Sequence[float]) -> float:
    """The two-sided p-value of a mean difference, if each sample's difference could as well have had the other sign.

    All combinations of signs for a few samples, seeded draws for more, the normal limit for very many.
    """
    moved = [gap for gap in differences if gap]
    if not moved:
        return 1.0
    observed = abs(math.fsum(moved)) * (1 - 1e-12)
    if len(moved) <= _ENUMERATED:
        sums = [sum(map(float.__mul__, signs, moved)) for signs in itertools.product((1.0, -1.0), repeat=len(moved))]
        return sum(abs(total) >= observed for total in sums) / len(sums)
    if len(moved) > _DRAWN:
        return math.erfc(observed / math.sqrt(2 * math.fsum(gap * gap for gap in moved)))
    draw = random.Random(0)  # noqa: S311 - the same runs give the same p-value
    hits = 0
    for _ in range(_DRAWS):
        signs = draw.choices((1.0, -1.0), k=len(moved))
        hits += abs(sum(map(float.__mul__, signs, moved))) >= observed
    return (hits + 1) / (_DRAWS + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction for looking at several metrics."""
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
