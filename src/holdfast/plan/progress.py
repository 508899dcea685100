"""The numbers of a run in progress, for displays."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import TYPE_CHECKING

import msgspec

from holdfast.plan.plan import Plan

if TYPE_CHECKING:
    from holdfast.store.records import Spent


class GraderProgress(msgspec.Struct):
    """Verdicts that one grader has given in this process."""

    grades: int = 0
    scored: int = 0
    score_sum: float = 0.0

    @property
    def score(self) -> float | None:
        """The mean of the scores it gave."""
        return self.score_sum / self.scored if self.scored else None


class RateLimit(msgspec.Struct):
    """Requests of one party, the target or a grader, that wait because its server has too much to do."""

    since: float
    """when it began, or when an answer came last, by the monotonic clock"""
    waiting: int = 0
    reported: bool = False

    @property
    def seconds(self) -> float:
        """Seconds without an answer."""
        return time.monotonic() - self.since


class _Mark(msgspec.Struct, frozen=True):
    time: float
    outputs: int
    graded: int


class Progress(msgspec.Struct):
    """The counts of a run in progress: the engine updates them, displays read them."""

    plan: Plan
    spent: Spent
    outputs: int
    """trials that have an output, earlier ones included"""
    graded: int
    """trials with all their verdicts"""
    generates: bool = True
    """outputs are made in this process"""
    grades: bool = True
    """outputs are graded in this process"""
    graders: dict[str, GraderProgress] = {}
    """by name, in the order of the eval file"""
    retried: Counter[str] = msgspec.field(default_factory=Counter)
    """failed attempts that were or will be retried, by class"""
    failed_grades: Counter[str] = msgspec.field(default_factory=Counter)
    """grades that this process gave up, by grader"""
    given_up: int = 0
    """trials without an output that this process will not try again"""
    uncertain: int = 0
    """trials among them that wait for a person"""
    ungraded: int = 0
    """trials with an output whose missing verdict this process will not ask for again"""
    kinds: Counter[str] = msgspec.field(default_factory=Counter)
    """answers that this process got, by kind"""
    turns: int = 0
    """of conversations with several, since this process began"""
    calls: int = 0
    """of agents, to models and tools, since this process began"""
    in_flight: int = 0
    backing_off: int = 0
    """attempts that wait to be retried, rate limits included"""
    rate_limits: dict[str, RateLimit] = {}
    """by whose requests wait: `target`, or a grader's name"""
    limit: int = 0
    batches: list[str] = []
    """batches that trials or grades wait for, in words"""
    _at_work: int = 0
    _busy: float = 0.0
    _busy_since: float = 0.0
    _marks: deque[_Mark] = msgspec.field(default_factory=lambda: deque(maxlen=60))

    def begin(self) -> None:
        """Count a trial as in flight."""
        self.begin_work()
        self.in_flight += 1

    def step(self, kind: str) -> None:
        """Count a recorded call or turn of a trial that is in flight."""
        self.turns += kind == "turn"
        self.calls += kind in ("model", "tool")

    def end(self) -> None:
        """Mark a trial as finished."""
        self.in_flight -= 1
        self.end_work()

    def begin_work(self) -> None:
        """Begin to count time as busy, for a trial or a grade that takes time."""
        if not self._at_work:
            self._busy_since = time.monotonic()
        self._at_work += 1

    def end_work(self) -> None:
        """Stop counting time that `begin_work` began to count."""
        self._at_work -= 1
        if not self._at_work:
            self._busy += time.monotonic() - self._busy_since

    def grade(self, grader: str, score: float | None) -> None:
        """Count a verdict."""
        counts = self.graders.get(grader)
        if counts is None:
            counts = self.graders[grader] = GraderProgress()
        counts.grades += 1
        if score is not None:
            counts.scored += 1
            counts.score_sum += score

    def wait(self, where: str, *, limited: bool) -> None:
        """Count an attempt that waits to be retried; `limited`: because of a rate limit."""
        self.backing_off += 1
        if limited:
            self.rate_limits.setdefault(where, RateLimit(time.monotonic())).waiting += 1

    def waited(self, where: str, *, limited: bool) -> None:
        """Stop counting an attempt as waiting."""
        self.backing_off -= 1
        if limited:
            self.rate_limits[where].waiting -= 1

    def answered(self, where: str) -> None:
        """Note an answer of the target or a grader, which ends its rate limit."""
        if (limited := self.rate_limits.get(where)) is None:
            return
        if limited.waiting:
            limited.since, limited.reported = time.monotonic(), False
        else:
            del self.rate_limits[where]

    @property
    def busy(self) -> bool:
        """True while a trial or a grade is at work, not only waiting for a batch."""
        return self._at_work > 0

    @property
    def asking(self) -> int:
        """Trials and grades whose requests are in flight: none waits for a batch, or for its next attempt."""
        return max(0, self._at_work - self.backing_off)

    @property
    def busy_seconds(self) -> float:
        """Seconds that this process was busy, as `Spent.seconds` computes them from the records."""
        return self._busy + (time.monotonic() - self._busy_since if self._at_work else 0.0)

    @property
    def remaining(self) -> Plan:
        """The plan for the unfinished trials."""
        plan = self.plan
        return Plan(plan.samples, plan.trials, self.graded, self.outputs - self.graded, plan.total - self.outputs)

    def mark(self) -> None:
        """Note the current counts, from which rates are computed."""
        now = time.monotonic()
        if not self._marks or now - self._marks[-1].time >= 0.5:
            self._marks.append(_Mark(now, self.outputs, self.graded))

    @property
    def _left_to_run(self) -> int:
        return max(0, self.plan.total - self.outputs - self.given_up) if self.generates else 0

    @property
    def _left_to_grade(self) -> int:
        expected = self.outputs + self._left_to_run
        return max(0, expected - self.graded - self.ungraded) if self.grades else 0

    def _rates(self) -> tuple[float, float]:
        """Return outputs and fully graded trials per second over the last half minute."""
        if not self._marks:
            return 0.0, 0.0
        then = self._marks[0]
        elapsed = time.monotonic() - then.time
        if elapsed <= 0:
            return 0.0, 0.0
        return (self.outputs - then.outputs) / elapsed, (self.graded - then.graded) / elapsed

    @property
    def rate(self) -> float:
        """Trials per second over the last half minute: generated, or graded once all are generated."""
        outputs, graded = self._rates()
        return outputs if self._left_to_run else graded

    @property
    def eta(self) -> float | None:
        """Seconds until the last trial is generated and graded, at the present rates; None while unknown."""
        slowest = 0.0
        for count, rate in zip((self._left_to_run, self._left_to_grade), self._rates(), strict=True):
            if count and rate <= 0:
                return None
            slowest = max(slowest, count / rate if count else 0.0)
        return slowest
