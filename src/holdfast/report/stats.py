"""Intervals, pass@k and pass^k. Pure functions, checked against scipy in the tests."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import Counter
from functools import cache
from itertools import accumulate, chain, repeat
from operator import mul
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_PARTS: Final = 1 << 12
"""numbers that are summed at a time"""
_BINS: Final = 1 << 12
"""bins among which a quantile is looked for"""

Z95: Final = 1.959963984540054
"""the normal quantile of a two-sided 95 % interval"""


class Estimate(NamedTuple):
    """A mean with its 95 % interval, None where there is too little to say."""

    mean: float
    low: float | None
    high: float | None
    stderr: float | None
    method: str


def wilson(share: float, count: float) -> tuple[float, float]:
    """Wilson's interval for a proportion. `count` may be an effective number, less than was counted."""
    square = Z95 * Z95
    centre = (share + square / (2 * count)) / (1 + square / count)
    half = Z95 / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    # At the ends rounding may leave the interval a hair short of the proportion itself.
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


def normal_quantile(inside: float) -> float:
    """The normal quantile of a two-sided interval that holds so much, such as 0.95."""
    from statistics import NormalDist  # imports fractions and decimal

    return -NormalDist().inv_cdf((1 - inside) / 2)


def t_quantile(freedom: int, inside: float) -> float:
    """Student's quantile of a two-sided interval that holds so much, for a number of degrees of freedom."""
    if freedom > 200:  # Cornish and Fisher's expansion, good to nine digits from here on
        z, n = normal_quantile(inside), freedom
        return (
            z
            + (z**3 + z) / (4 * n)
            + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        )
    low, high = 0.0, 1.0
    while _t_inside(high, freedom) < inside:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _t_inside(middle, freedom) < inside else (low, middle)
    return low


@cache
def t95(freedom: int) -> float:
    """Student's quantile of a two-sided 95 % interval, for a number of degrees of freedom."""
    return t_quantile(freedom, 0.95)


def _t_inside(bound: float, freedom: int) -> float:
    """Probability that Student's t lies within ±bound: the finite sum for a whole number of degrees of freedom."""
    angle = math.atan2(bound, math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for number in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (number - 1) / number
    inner = math.sin(angle) * total
    return 2 / math.pi * (angle + inner) if odd else inner


class ExactSum:
    """A sum of many floats, rounded once at the end as by `math.fsum`, in little memory."""

    def __init__(self) -> None:
        self._parts = array("d")
        self._limit = _PARTS

    def add(self, *values: float) -> None:
        """Add numbers."""
        self._parts.extend(values)
        if len(self._parts) >= self._limit:
            total = math.fsum(self._parts)
            rest = math.fsum([*self._parts, -total])
            self._parts = array("d", [total, rest, math.fsum([*self._parts, -total, -rest])])

    @property
    def value(self) -> float:
        """The sum."""
        return math.fsum(self._parts)


def estimate(
    sums: Sequence[float],
    counts: Sequence[int] | None = None,
    times: Sequence[int] | None = None,
    *,
    proportion: bool,
    verdicts: int | None = None,
) -> Estimate:
    """The mean over the samples, and its interval, from each sample's mean over its graded trials.

    If samples belong together, pass the sum of their means and their number for each cluster of samples. With `times`,
    each sum stands for so many samples. `verdicts` is the number of graded trials, if there are several per sample.

    Trials of one sample are not independent, so the standard error is that of the means of samples or clusters. A
    proportion gets Wilson's interval at the effective number of trials (which for one trial per sample is their
    number); other scores get Student's interval, with one degree of freedom less than there are clusters, cut to 0..1.
    """
    times = times or array("B", [1]) * len(sums)
    counts = counts or array("B", [1]) * len(sums)
    total = sum(map(mul, counts, times))
    mean = math.fsum(_repeated(sums, times)) / total
    clusters = sum(number for count, number in zip(counts, times, strict=True) if count)
    stderr = None
    if clusters > 1:
        squares = ((part - count * mean) ** 2 for part, count in zip(sums, counts, strict=True))
        spread = math.fsum(_repeated(squares, times))
        stderr = math.sqrt(spread * clusters / (clusters - 1)) / total
    most = total if verdicts is None else verdicts
    if proportion:
        effective = float(most)
        if most > clusters:
            effective = float(clusters)
            if stderr and 0 < mean < 1:
                effective = min(float(most), max(1.0, mean * (1 - mean) / stderr**2))
        return Estimate(mean, *wilson(mean, effective), stderr, "wilson" if most == clusters else "wilson-clustered")
    if stderr is None:
        return Estimate(mean, None, None, None, "none")
    if stderr < 1e-12:
        # No spread was seen, which is not the same as certainty: a proportion would be allowed this much.
        return Estimate(mean, *wilson(mean, clusters), stderr, "wilson")
    half = t95(clusters - 1) * stderr
    method = "t" if most == clusters else "t-clustered"
    return Estimate(mean, max(0.0, mean - half), min(1.0, mean + half), stderr, method)


def _repeated(values: Iterable[float], times: Iterable[int]) -> Iterator[float]:
    return chain.from_iterable(map(repeat, values, times))


def pass_at_k(trials: int, passes: int, k: int) -> float:
    """The chance that at least one of k trials passes, estimated without bias from `passes` of `trials`."""
    if trials - passes < k:
        return 1.0
    return 1.0 - math.comb(trials - passes, k) / math.comb(trials, k)


def pass_all_k(trials: int, passes: int, k: int) -> float:
    """The chance that all of k trials pass, estimated without bias from `passes` of `trials`."""
    return math.comb(passes, k) / math.comb(trials, k)


def quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile of sorted values, interpolated."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def quantile_of(values: Sequence[float], share: float) -> float:
    """A quantile of values in any order, as `quantile` returns it, without a sorted copy of many values."""
    if len(values) <= _BINS:
        return quantile(sorted(values), share)
    place = share * (len(values) - 1)
    first = math.floor(place)
    last = min(first + 1, len(values) - 1)
    low = min(values)
    width = (max(values) - low) / _BINS or 1.0
    counts = Counter(int((value - low) / width) for value in values)
    ends = list(accumulate(counts[number] for number in range(max(counts) + 1)))
    least, most = bisect_right(ends, first), bisect_right(ends, last)
    near = sorted(value for value in values if least <= int((value - low) / width) <= most)
    before = ends[least - 1] if least else 0
    return near[first - before] + (near[last - before] - near[first - before]) * (place - first)
