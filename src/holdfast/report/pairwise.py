"""Runs judged against each other, answer by answer: win rates, and ratings by Bradley and Terry. Pure functions."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from holdfast.report.stats import estimate

if TYPE_CHECKING:
    from collections.abc import Sequence

Choice = Literal["first", "second", "tie"]
POINTS: Final[dict[Choice, float]] = {"first": 1.0, "tie": 0.5, "second": 0.0}
"""for the answer that is shown first"""
_ROUNDS: Final = 10_000
_SCALE, _MEAN = 400.0, 1000.0


@dataclass
class Pair:
    """Two runs with the verdicts of the judge, to which each pair of answers is shown in both orders."""

    first: str
    second: str
    points: dict[str, list[float]] = field(default_factory=dict)
    """by sample, for each trial: the share of its two verdicts that the first run won"""
    agreed: int = 0
    """trials on which the judge preferred the same answer in both orders"""
    identical: int = 0
    """trials on which both gave the same answer: ties, which the judge is not asked about"""

    def add(self, sample: str, verdicts: tuple[Choice, Choice]) -> None:
        """Add the verdicts on a trial: with the first run's answer shown first, and shown second."""
        shown_first, shown_second = POINTS[verdicts[0]], 1 - POINTS[verdicts[1]]
        self.points.setdefault(sample, []).append((shown_first + shown_second) / 2)
        self.agreed += shown_first == shown_second

    def add_identical(self, sample: str) -> None:
        """Add a trial on which both runs gave the same answer."""
        self.points.setdefault(sample, []).append(0.5)
        self.agreed += 1
        self.identical += 1

    def summary(self) -> dict[str, Any]:
        """Return the win rate of the first run over samples, with its 95 % interval, and the counts."""
        each = [point for points in self.points.values() for point in points]
        counts = {
            "trials": len(each),
            "wins": sum(point > 0.5 for point in each),
            "ties": sum(point == 0.5 for point in each),
            "losses": sum(point < 0.5 for point in each),
            "identical": self.identical,
            "agreement": self.agreed / len(each) if each else None,
        }
        if not each:
            return {"first": self.first, "second": self.second, "win_rate": None, "low": None, "high": None, **counts}
        means = array("d", (sum(points) / len(points) for points in self.points.values()))
        interval = estimate(means, proportion=False)
        return {
            "first": self.first,
            "second": self.second,
            "win_rate": interval.mean,
            "low": interval.low,
            "high": interval.high,
            "samples": len(means),
            **counts,
        }

    @property
    def won(self) -> float:
        """Points of the first run over all trials."""
        return math.fsum(point for points in self.points.values() for point in points)

    @property
    def count(self) -> int:
        """Number of trials that were judged."""
        return sum(map(len, self.points.values()))


def bradley_terry(runs: Sequence[str], pairs: Sequence[Pair]) -> dict[str, float]:
    """Return a rating for each run on Elo's scale, 1000 on average: 400 more means 10 to 1 to win.

    Every pair gets one more tie, so that a run that won or lost everything has a finite rating.
    """
    won = dict.fromkeys(runs, 0.0)
    met: dict[tuple[str, str], float] = {}
    for pair in pairs:
        won[pair.first] += pair.won + 0.5
        won[pair.second] += pair.count - pair.won + 0.5
        met[pair.first, pair.second] = met[pair.second, pair.first] = pair.count + 1.0
    strength = dict.fromkeys(runs, 1.0)
    for _ in range(_ROUNDS):
        updated = {
            run: won[run]
            / math.fsum(met[run, other] / (strength[run] + strength[other]) for other in runs if other != run)
            for run in runs
        }
        scale = math.exp(math.fsum(map(math.log, updated.values())) / len(runs))
        updated = {run: value / scale for run, value in updated.items()}
        moved = max(abs(math.log(updated[run] / strength[run])) for run in runs)
        strength = updated
        if moved < 1e-12:
            break
    return {run: _MEAN + _SCALE * math.log10(value) for run, value in strength.items()}
