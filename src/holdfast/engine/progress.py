"""The numbers of a run in progress, for whoever shows them."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.plan.plan import Plan

if TYPE_CHECKING:
    from holdfast.store.index import Spent


@dataclass
class Progress:
    """Kept by the engine, read by displays."""

    plan: Plan
    spent: Spent
    outputs: int
    """trials that have an output, earlier ones included"""
    graded: int
    """trials with all their verdicts"""
    score_sum: float = 0.0
    score_count: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """failed attempts of this process by class"""
    given_up: int = 0
    """trials this process will not try again"""
    turns: int = 0
    """of conversations with several, since this process began"""
    calls: int = 0
    """of agents, to models and tools, since this process began"""
    in_flight: int = 0
    backing_off: int = 0
    limit: int = 0
    _busy: float = 0.0
    _busy_since: float = 0.0
    _marks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=60))

    def begin(self) -> None:
        """A trial is being worked on."""
        if not self.in_flight:
            self._busy_since = time.monotonic()
        self.in_flight += 1

    def step(self, kind: str) -> None:
        """A part of a trial is done, which may be long before the trial is."""
        self.turns += kind == "turn"
        self.calls += kind in ("model", "tool")

    def end(self) -> None:
        """It is no more."""
        self.in_flight -= 1
        if not self.in_flight:
            self._busy += time.monotonic() - self._busy_since

    @property
    def busy_seconds(self) -> float:
        """Time of this process with work in hand: what `Spent.seconds` will say of it, without reading the records."""
        return self._busy + (time.monotonic() - self._busy_since if self.in_flight else 0.0)

    @property
    def score(self) -> float | None:
        """The running mean over graded trials."""
        return self.score_sum / self.score_count if self.score_count else None

    @property
    def left(self) -> Plan:
        """What is not finished."""
        plan = self.plan
        return Plan(plan.samples, plan.trials, self.graded, self.outputs - self.graded, plan.total - self.outputs)

    def mark(self) -> None:
        """Note where we are, for the rate; displays call it at each look."""
        now = time.monotonic()
        if not self._marks or now - self._marks[-1][0] >= 0.5:
            self._marks.append((now, self.outputs))

    @property
    def rate(self) -> float:
        """Trials per second over the last half minute."""
        if not self._marks:
            return 0.0
        then, count = self._marks[0]
        elapsed = time.monotonic() - then
        return (self.outputs - count) / elapsed if elapsed > 0 else 0.0

    @property
    def eta(self) -> float | None:
        """Seconds until the last trial, at the present rate."""
        rate = self.rate
        return (self.plan.total - self.outputs) / rate if rate > 0 else None
