"""Histograms of at most sixty bins with round bounds, pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from holdfast.report.stats import quantile

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST_BINS: Final = 40
_TAIL: Final = 4.0
"""a largest value beyond so many times the 95th percentile goes into a last, open bin"""


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
    """Return the distribution of values; None where there are none. `whole`: the values are whole numbers."""
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
    """Return the distribution of scores from 0 to 1, in tenths of which the last includes 1."""
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
