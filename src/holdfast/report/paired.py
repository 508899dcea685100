"""Two runs on the same samples: paired differences, and whether they are more than chance. Pure functions.

Trials of one sample are averaged first, so that a sample counts once however often it was tried.

The tests are exact: McNemar's for pass or fail, sign flips for other scores. No draw is made, so a p-value has no floor
but that of its arithmetic, `LEAST_P`, below which p-values are not told apart.
"""

from __future__ import annotations

import math
from collections import Counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.report.stats import normal_quantile, t95, t_quantile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Z80: Final = 0.8416212335729143
"""the normal quantile for a power of 80 %"""
LEVEL: Final = 0.05
"""chance of a wrong verdict over all comparisons that are made together"""
LEAST_P: Final = 1e-12
"""the smallest p-value that is computed"""

_ENUMERATED: Final = 14
"""differences up to which every combination of signs is looked at"""
_COUNTED: Final = 1_000
"""throws of a coin up to which combinations are counted, without rounding"""
_UNITS: Final = 32
"""least number of units to the typical difference, of differences that are rounded"""
_SPREAD: Final = 1_000
"""units to the standard deviation of a sum that are enough for few differences"""
_MOST_STEPS: Final = 1_000
"""steps to 1 that are tried"""
_FAR: Final = 8.5
"""standard deviations beyond which less than `LEAST_P` of a sum of flipped differences lies"""


class Difference(NamedTuple):
    """The mean difference of two runs, first minus second, over the samples both have."""

    samples: int
    mean: float
    low: float | None
    high: float | None
    stderr: float | None
    freedom: int = 0
    """degrees of freedom of the standard error"""
    comparisons: int = 1
    """number of comparisons with which the interval holds together"""

    @property
    def detectable(self) -> float | None:
        """The smallest true difference that so many samples would show four times out of five."""
        if self.stderr is None:
            return None
        return (normal_quantile(1 - LEVEL / self.comparisons) + Z80) * self.stderr

    def corrected(self, p_value: float, comparisons: int) -> Difference:
        """Return the difference with an interval that holds together with those of so many comparisons.

        It is Student's, unless that contradicts the exact test about 0; then it is the one that the p-value implies.
        So it excludes 0 exactly if the p-value, times the number of comparisons, is below the level.
        """
        size, level = abs(self.mean), LEVEL / comparisons
        differs = p_value * comparisons < LEVEL
        half = None if self.stderr is None else t_quantile(self.freedom, 1 - level) * self.stderr
        if size and (half is None or (half < size) != differs):
            half = implied_half(size, p_value, level, differs=differs)
        if half is None:
            return self._replace(comparisons=comparisons)
        low, high = max(-1.0, self.mean - half), min(1.0, self.mean + half)
        return self._replace(low=low, high=high, comparisons=comparisons)


def implied_half(size: float, p_value: float, level: float, *, differs: bool) -> float:
    """Half the width of the interval that the two-sided p-value of a difference implies: it excludes 0 if it `differs`.

    The standard error is the one that would give a normal test this p-value.
    """
    half = math.inf if p_value >= 1 else size * normal_quantile(1 - level) / normal_quantile(1 - p_value)
    return min(half, size * (1 - 1e-9)) if differs else max(half, size)


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
    if not by_sample:
        return None
    parts = cluster_parts(by_sample, clusters)
    mean, stderr = mean_and_error(parts)
    freedom = len(parts) - 1
    if not freedom or not stderr:
        return Difference(len(by_sample), mean, None, None, None)  # no spread was seen, which is not certainty
    half = t95(freedom) * stderr
    # Scores are from 0 to 1. With few samples, Student's interval would promise differences that cannot be.
    return Difference(len(by_sample), mean, max(-1.0, mean - half), min(1.0, mean + half), stderr, freedom)


def mean_and_error(parts: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """The mean over samples and its standard error, from each cluster's sum and size."""
    samples = sum(size for _, size in parts)
    mean = math.fsum(total for total, _ in parts) / samples
    spread = math.fsum((total - size * mean) ** 2 for total, size in parts)
    return mean, math.sqrt(spread * len(parts) / max(1, len(parts) - 1)) / samples


def cluster_parts(values: Mapping[str, float], clusters: Mapping[str, str]) -> list[tuple[float, int]]:
    """The sum of the values of each cluster and the number of its samples. Others are clusters of their own."""
    if not clusters:
        return [(value, 1) for value in values.values()]
    members: dict[tuple[bool, str], list[float]] = {}
    for sample, value in values.items():
        known = sample in clusters
        members.setdefault((known, clusters[sample] if known else sample), []).append(value)
    return [(math.fsum(part), len(part)) for part in members.values()]


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact two-sided p-value for pass or fail: of those samples on which the two differ, is it a fair coin?"""
    fewer, count = min(only_first, only_second), only_first + only_second
    return max(LEAST_P, min(1.0, 2 * _tail(fewer, count)))


def mcnemar_less(only_first: int, only_second: int) -> float:
    """The exact chance that a fair coin would give the first so few of the samples on which the two differ."""
    count = only_first + only_second
    if only_first >= only_second:  # the other tail is shorter
        return 1.0 if not only_second else 1 - _tail(only_second - 1, count)
    return max(LEAST_P, _tail(only_first, count))


def _tail(most: int, count: int) -> float:
    """The chance of at most so many heads in a number of throws, at most half of them."""
    if count <= _COUNTED:
        term = float(math.comb(count, most) / 2**count)
    else:
        ways = math.lgamma(count + 1) - math.lgamma(most + 1) - math.lgamma(count - most + 1)
        term = math.exp(ways - count * math.log(2))
    total = term
    for number in range(most, 0, -1):
        term *= number / (count - number + 1)
        total += term
        if term < total * 1e-17:
            break
    return total


def sign_flip(differences: Sequence[float]) -> float:
    """The two-sided p-value of a sum of differences, if each could as well have had the other sign."""
    moved = [gap for gap in differences if gap]
    if not moved:
        return 1.0
    if len(moved) <= _ENUMERATED:
        sums, observed, slack = _all_sums(moved)
        return sum(abs(total) >= abs(observed) - slack for total in sums) / len(sums)
    units = _in_units(moved)
    return max(LEAST_P, 1 - _chance_within(units, abs(sum(units))))


def sign_flip_less(differences: Sequence[float]) -> float:
    """The chance of a sum so low, if each difference could as well have had the other sign."""
    moved = [gap for gap in differences if gap]
    if not moved:
        return 1.0
    if len(moved) <= _ENUMERATED:
        sums, observed, slack = _all_sums(moved)
        return sum(total <= observed + slack for total in sums) / len(sums)
    units = _in_units(moved)
    observed_units = sum(units)
    if observed_units >= 0:
        return (1 + _chance_within(units, observed_units + 2)) / 2
    return max(LEAST_P, (1 - _chance_within(units, -observed_units)) / 2)


def _all_sums(differences: Sequence[float]) -> tuple[list[float], float, float]:
    """The sums with every combination of signs, the observed one, and how far rounding may set equal sums apart."""
    sums = [0.0]
    for gap in differences:
        sums = [total + sign for sign in (gap, -gap) for total in sums]
    return sums, math.fsum(differences), 1e-12 * math.fsum(map(abs, differences))


def _in_units(differences: Sequence[float]) -> list[int]:
    """The differences as whole numbers: exactly, if they come in steps such as halves or tenths, else rounded.

    Rounding keeps the test exact. It treats a difference and its opposite alike, so the rounded differences could as
    well have had the other sign, too.
    """
    typical = math.sqrt(math.fsum(gap * gap for gap in differences) / len(differences))
    finest = max(_UNITS, _SPREAD / math.sqrt(len(differences)))
    for steps in range(1, min(_MOST_STEPS, int(2 * finest / typical)) + 1):
        if all(abs(gap * steps - round(gap * steps)) < 1e-9 for gap in differences):
            return [round(gap * steps) for gap in differences]
    return [round(gap * finest / typical) for gap in differences]


def _chance_within(units: Iterable[int], bound: int) -> float:
    """The chance that a sum of whole numbers with random signs lies between -bound and bound, both excluded.

    `bound` is odd or even as the sum is. The distribution is the Fourier sum of its characteristic function, a product
    of cosines, over so many points that sums which share a point are impossible, or rarer than `LEAST_P`.
    """
    sizes = Counter(abs(unit) for unit in units if unit)
    largest = sum(size * times for size, times in sizes.items())
    far = _FAR * math.sqrt(sum(size * size * times for size, times in sizes.items()))
    if bound > min(largest, far):
        return 1.0
    if bound <= 0:
        return 0.0
    points = min((largest + bound) // 2, math.ceil((bound + far) / 2)) + 1 | 1
    factors = sorted(sizes.items(), key=lambda factor: -factor[1])  # those that are soon close to 0 first
    total = float(bound - 1)
    for point in range(1, points // 2 + 1):
        angle = math.pi * point / points
        product = 2.0
        for size, times in factors:
            product *= math.cos(size * angle) ** times
            if -1e-18 < product < 1e-18:
                break
        else:
            total += product * math.sin((bound - 1) * angle) / math.sin(angle)
    return min(1.0, max(0.0, total / points))


def p_text(p_value: float, adjusted: float) -> str:
    """Format a p-value after its correction; one that is as small as they come as a bound."""
    return f"{'< ' if p_value <= LEAST_P else ''}{adjusted:.3g}"


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction for tests of which each can only find a loss."""
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
