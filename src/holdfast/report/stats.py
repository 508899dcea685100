"""Statistics: intervals, pass@k, quantiles, histograms, and paired tests. Pure functions, checked against scipy.

Trials of one sample are averaged before two runs are compared, so a sample counts once however often it was tried. The
paired tests are exact: McNemar's for pass or fail, sign flips for other scores. Nothing is drawn at random, so the only
lower limit of a p-value is the precision of its arithmetic, `LEAST_P`.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from functools import cache
from itertools import accumulate, chain, repeat
from operator import mul
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_PARTS: Final = 1 << 12
"""numbers that are kept before they are summed"""
_BINS: Final = 1 << 12
"""bins that narrow down where a quantile lies"""

Z95: Final = 1.959963984540054
"""the normal quantile of a two-sided 95 % interval"""


class Estimate(NamedTuple):
    """A mean with its 95 % interval, None if there are too few samples for one."""

    mean: float
    low: float | None
    high: float | None
    stderr: float | None
    method: str


def wilson(share: float, count: float) -> tuple[float, float]:
    """Return Wilson's interval for a proportion. `count` may be an effective number, below the real one."""
    square = Z95 * Z95
    centre = (share + square / (2 * count)) / (1 + square / count)
    half = Z95 / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    # At the ends rounding may leave the interval a hair short of the proportion itself.
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


def normal_quantile(inside: float) -> float:
    """Return the normal quantile of a two-sided interval with this coverage, such as 0.95."""
    from statistics import NormalDist  # imports fractions and decimal

    return -NormalDist().inv_cdf((1 - inside) / 2)


def t_quantile(freedom: int, inside: float) -> float:
    """Return Student's quantile of a two-sided interval with this coverage, for a number of degrees of freedom."""
    if freedom > 200:  # Cornish and Fisher's expansion, which has nine correct digits here
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
    """Return Student's quantile of a two-sided 95 % interval, for a number of degrees of freedom."""
    return t_quantile(freedom, 0.95)


def _t_inside(bound: float, freedom: int) -> float:
    """Return the chance that Student's t lies within ±bound, a finite sum for whole degrees of freedom."""
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
    """Return the mean over samples with its interval, from each sample's mean over its graded trials.

    If samples belong together, pass the sum of their means and their number for each cluster of samples. With `times`,
    each sum stands for that many samples. `verdicts` is the number of graded trials, if there are several per sample.

    Trials of one sample are not independent, so the standard error is computed from the means of samples or clusters. A
    proportion gets Wilson's interval at the effective number of trials (with one
    trial per sample, their number). Other scores get Student's interval, with one degree of freedom fewer than
    clusters, cut to 0..1.
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
        # No spread is not certainty: use the interval that a proportion would have.
        return Estimate(mean, *wilson(mean, clusters), stderr, "wilson")
    half = t95(clusters - 1) * stderr
    method = "t" if most == clusters else "t-clustered"
    return Estimate(mean, max(0.0, mean - half), min(1.0, mean + half), stderr, method)


def _repeated(values: Iterable[float], times: Iterable[int]) -> Iterator[float]:
    return chain.from_iterable(map(repeat, values, times))


def pass_at_k(trials: int, passes: int, k: int) -> float:
    """Estimate the chance that at least one of k trials passes, without bias, from `passes` of `trials`."""
    if trials - passes < k:
        return 1.0
    return 1.0 - math.comb(trials - passes, k) / math.comb(trials, k)


def pass_all_k(trials: int, passes: int, k: int) -> float:
    """Estimate the chance that all of k trials pass, without bias, from `passes` of `trials`."""
    return math.comb(passes, k) / math.comb(trials, k)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, interpolated."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def quantile_of(values: Sequence[float], share: float) -> float:
    """Return the same quantile of values in any order, without a sorted copy of many values."""
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


_MOST_BINS: Final = 40
_TAIL: Final = 4.0
"""values beyond this many times the 95th percentile go into a last, open bin"""


class Bin(Struct, frozen=True):
    """Values from `low` to below `high`; None is open."""

    low: float
    high: float | None
    count: int


class Histogram(Struct, frozen=True, kw_only=True):
    """The distribution of a measure."""

    name: str
    unit: str
    """`seconds`, `tokens`, `dollars` or `score`"""
    count: int
    unknown: int
    """trials without the measure"""
    mean: float
    p50: float
    p95: float
    most: float
    bins: list[Bin]

    @property
    def highest(self) -> int:
        """The count of the fullest bin."""
        return max(each.count for each in self.bins)


def make_histogram(
    name: str, unit: str, values: Iterable[float], *, unknown: int = 0, whole: bool = False
) -> Histogram | None:
    """Return the distribution of values; None without values. `whole`: the values are whole numbers."""
    ordered = sorted(values)
    if not ordered:
        return None
    p95 = quantile(ordered, 0.95)
    return Histogram(
        name=name,
        unit=unit,
        count=len(ordered),
        unknown=unknown,
        mean=math.fsum(ordered) / len(ordered),
        p50=quantile(ordered, 0.5),
        p95=p95,
        most=ordered[-1],
        bins=_bins(ordered, p95, whole=whole),
    )


def score_histogram(name: str, scores: Iterable[float]) -> Histogram | None:
    """Return the distribution of scores from 0 to 1, in tenths; the last one includes 1."""
    ordered = sorted(scores)
    if not ordered:
        return None
    bounds = [number / 10 for number in range(10)]
    places = [bisect_left(ordered, bound) for bound in bounds] + [len(ordered)]
    bins = [Bin(low, low + 0.1, places[number + 1] - places[number]) for number, low in enumerate(bounds)]
    return Histogram(
        name=name,
        unit="score",
        count=len(ordered),
        unknown=0,
        mean=math.fsum(ordered) / len(ordered),
        p50=quantile(ordered, 0.5),
        p95=quantile(ordered, 0.95),
        most=ordered[-1],
        bins=bins,
    )


def _bins(ordered: list[float], p95: float, *, whole: bool) -> list[Bin]:
    least, most = ordered[0], ordered[-1]
    top = most if most <= _TAIL * max(p95, 1e-9) else quantile(ordered, 0.99)
    start = 0.0 if least < 0.3 * top else least
    step = round_step(max(top - start, 1e-9, 1e-9 * top) / _MOST_BINS)  # far above the precision of the values
    if whole:
        step = max(1.0, step)
    first = math.floor(start / step)
    if first * step > start:  # the quotient was rounded up to a whole number
        first -= 1
    count = min(_MOST_BINS + 1, max(1, math.floor(top / step) - first + 1))
    bounds = [(first + number) * step for number in range(count + 1)]
    places = [bisect_left(ordered, bound) for bound in bounds]
    bins = [
        Bin(low, high, after - before)
        for low, high, before, after in zip(bounds, bounds[1:], places, places[1:], strict=False)
    ]
    beyond = len(ordered) - places[-1]
    return [*bins, Bin(bounds[-1], None, beyond)] if beyond else bins


def round_step(least: float) -> float:
    """Return the next number of the form 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


Z80: Final = 0.8416212335729143
"""the normal quantile for a power of 80 %"""
LEVEL: Final = 0.05
"""chance of a wrong verdict in any of the comparisons made together"""
LEAST_P: Final = 1e-12
"""the smallest p-value that is computed"""

_ENUMERATED: Final = 14
"""differences up to which every combination of signs is tried"""
_COUNTED: Final = 1_000
"""coin throws up to which combinations are counted exactly"""
_UNITS: Final = 32
"""minimum units per typical difference, if differences are rounded"""
_SPREAD: Final = 1_000
"""units per standard deviation of a sum, which are enough if there are few differences"""
_MOST_STEPS: Final = 1_000
"""largest number of equal steps between 0 and 1 that is tried"""
_FAR: Final = 8.5
"""standard deviations beyond which a sum of flipped differences has a chance below `LEAST_P`"""


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
    """number of comparisons whose intervals hold at once"""

    @property
    def detectable(self) -> float | None:
        """The smallest true difference that so many samples would show four times out of five."""
        if self.stderr is None:
            return None
        return (normal_quantile(1 - LEVEL / self.comparisons) + Z80) * self.stderr

    def corrected(self, p_value: float, comparisons: int) -> Difference:
        """Return the difference with an interval for so many comparisons, all of whose intervals hold at once.

        Student's interval is used unless it contradicts the exact test about 0; then the p-value implies the interval.
        So the interval excludes 0 exactly if the p-value, times the number of comparisons, is below the level.
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
    """Return half the width of the interval that the two-sided p-value of a difference implies.

    The standard error is the one that would give a normal test this p-value. The interval excludes 0 if `differs`.
    """
    half = math.inf if p_value >= 1 else size * normal_quantile(1 - level) / normal_quantile(1 - p_value)
    return min(half, size * (1 - 1e-9)) if differs else max(half, size)


def gaps(first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return first minus second, by sample, for the samples that both have."""
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
    """Return the mean difference over samples, with Student's 95 % interval; None if no sample is shared.

    `clusters` names the cluster of samples that belong together, whose differences are not independent.
    """
    by_sample = gaps(first, second)
    if not by_sample:
        return None
    parts = cluster_parts(by_sample, clusters)
    mean, stderr = mean_and_error(parts)
    freedom = len(parts) - 1
    if not freedom or not stderr:
        return Difference(len(by_sample), mean, None, None, None)  # no spread is not certainty
    half = t95(freedom) * stderr
    # Scores are from 0 to 1. With few samples, Student's interval would include impossible differences.
    return Difference(len(by_sample), mean, max(-1.0, mean - half), min(1.0, mean + half), stderr, freedom)


def mean_and_error(parts: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Return the mean over samples and its standard error, from each cluster's sum and size."""
    samples = sum(size for _, size in parts)
    mean = math.fsum(total for total, _ in parts) / samples
    spread = math.fsum((total - size * mean) ** 2 for total, size in parts)
    return mean, math.sqrt(spread * len(parts) / max(1, len(parts) - 1)) / samples


def cluster_parts(values: Mapping[str, float], clusters: Mapping[str, str]) -> list[tuple[float, int]]:
    """Return the sum and the size of each cluster. A sample without a cluster is one of its own."""
    if not clusters:
        return [(value, 1) for value in values.values()]
    members: dict[tuple[bool, str], list[float]] = {}
    for sample, value in values.items():
        known = sample in clusters
        members.setdefault((known, clusters[sample] if known else sample), []).append(value)
    return [(math.fsum(part), len(part)) for part in members.values()]


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value for pass or fail: do differing samples fall like a fair coin?"""
    fewer, count = min(only_first, only_second), only_first + only_second
    return max(LEAST_P, min(1.0, 2 * _tail(fewer, count)))


def mcnemar_less(only_first: int, only_second: int) -> float:
    """Return the exact chance that a fair coin gives the first run so few of the differing samples."""
    count = only_first + only_second
    if only_first >= only_second:  # the other tail is shorter
        return 1.0 if not only_second else 1 - _tail(only_second - 1, count)
    return max(LEAST_P, _tail(only_first, count))


def _tail(most: int, count: int) -> float:
    """Return the chance of at most `most` heads in `count` throws; `most` is at most half of them."""
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


def sign_flip(differences: Sequence[float], *, less: bool = False) -> float:
    """Return the two-sided p-value of a sum of differences, each of which might equally have the other sign.

    With `less`, return the chance of so low a sum.
    """
    moved = [gap for gap in differences if gap]
    if not moved:
        return 1.0
    if len(moved) <= _ENUMERATED:
        sums, observed, slack = _all_sums(moved)
        low, far = observed + slack, abs(observed) - slack
        return sum(total <= low if less else abs(total) >= far for total in sums) / len(sums)
    units = _in_units(moved)
    total_units = sum(units)
    if not less:
        return max(LEAST_P, 1 - _chance_within(units, abs(total_units)))
    if total_units >= 0:
        return (1 + _chance_within(units, total_units + 2)) / 2
    return max(LEAST_P, (1 - _chance_within(units, -total_units)) / 2)


def _all_sums(differences: Sequence[float]) -> tuple[list[float], float, float]:
    """Return the sums with every combination of signs, the observed sum, and the rounding error between equal sums."""
    sums = [0.0]
    for gap in differences:
        sums = [total + sign for sign in (gap, -gap) for total in sums]
    return sums, math.fsum(differences), 1e-12 * math.fsum(map(abs, differences))


def _in_units(differences: Sequence[float]) -> list[int]:
    """Return the differences as whole numbers: exact if they come in steps such as halves or tenths, else rounded.

    Rounding keeps the test exact. It treats a difference and its opposite alike, so each rounded difference might
    equally have the other sign.
    """
    typical = math.sqrt(math.fsum(gap * gap for gap in differences) / len(differences))
    finest = max(_UNITS, _SPREAD / math.sqrt(len(differences)))
    for steps in range(1, min(_MOST_STEPS, int(2 * finest / typical)) + 1):
        if all(abs(gap * steps - round(gap * steps)) < 1e-9 for gap in differences):
            return [round(gap * steps) for gap in differences]
    return [round(gap * finest / typical) for gap in differences]


def _chance_within(units: Iterable[int], bound: int) -> float:
    """Return the chance that a sum of whole numbers with random signs lies strictly between -bound and bound.

    `bound` has the parity of the sum. The distribution is the Fourier sum of its characteristic function, a product
    of cosines, over enough points that sums which share a point are impossible, or rarer than `LEAST_P`.
    """
    sizes = Counter(abs(unit) for unit in units if unit)
    largest = sum(size * times for size, times in sizes.items())
    far = _FAR * math.sqrt(sum(size * size * times for size, times in sizes.items()))
    if bound > min(largest, far):
        return 1.0
    if bound <= 0:
        return 0.0
    points = min((largest + bound) // 2, math.ceil((bound + far) / 2)) + 1 | 1
    factors = sorted(sizes.items(), key=lambda factor: -factor[1])  # the factors that approach 0 fastest come first
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
    """Format a corrected p-value; the smallest possible one is shown as a bound."""
    return f"{'< ' if p_value <= LEAST_P else ''}{adjusted:.3g}"


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values by Holm's method."""
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
