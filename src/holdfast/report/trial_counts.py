"""Trials counted for an overview: checkpoint funnel, distributions, activity, and numbers so far of an unfinished run.

Trials are counted in any order, from any source, and without their transcripts.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec import Struct, UnsetType

from holdfast.graders.build import grader_class, threshold
from holdfast.report.run_view import Pending
from holdfast.report.stats import Histogram, estimate, make_histogram, score_histogram, wilson
from holdfast.report.tally import summarize_verdicts
from holdfast.report.trials import gravest, read_error_heads

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from holdfast.graders.build import GraderPlace
    from holdfast.report.run_view import GradedTrial, RunView
    from holdfast.report.trials import TrialStatus
    from holdfast.store.metrics import GraderMetrics
    from holdfast.store.rundir import RunDir

    PlaceVerdict = tuple[TrialStatus, float | None]

_ENDS: Final = frozenset((0.0, 1.0))
_MOST_BINS: Final = 60
_DAY: Final = 86400
_STEPS: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, _DAY)
"""seconds of a bin of the activity; beyond, whole days"""
_MOST_ERROR_BYTES: Final = 64_000_000
"""of `errors.jsonl` up to which it is read for a plot"""


class FunnelStep(Struct, frozen=True, kw_only=True):
    """A checkpoint: how many trials reached it, and how many of them passed."""

    turn: int
    graders: list[str]
    stops: bool
    """a failure ends the conversation"""
    trials: int
    """trials with an output that it applies to"""
    reached: int
    passed: int
    failed: int
    ended_here: int
    """of those that failed: their conversation ended because of it"""
    error: int
    pending: int
    """reached, and not graded yet"""
    share: float | None
    """of those that reached it and were graded: how many passed"""
    low: float | None
    high: float | None

    @property
    def names(self) -> list[str]:
        """The graders as the eval file names them."""
        return [name.partition("/")[2] or name for name in self.graders]

    @property
    def not_reached(self) -> int:
        """Number of trials whose conversation ended before it."""
        return self.trials - self.reached


class ActivityBin(Struct, frozen=True):
    """Outputs and failed attempts in a span of time."""

    start: float
    """seconds since the epoch"""
    outputs: int
    errors: dict[str, int]
    """failed attempts by kind"""


class Activity(Struct, frozen=True, kw_only=True):
    """Outputs and failed attempts over time; pauses between processes are empty bins."""

    seconds: float
    """of one bin"""
    bins: list[ActivityBin]

    @property
    def most(self) -> int:
        """The largest count in a bin."""
        return max(max(each.outputs, sum(each.errors.values())) for each in self.bins)

    @property
    def kinds(self) -> list[str]:
        """Kinds of failed attempts, the most frequent first."""
        return [kind for kind, _ in sum((Counter(each.errors) for each in self.bins), Counter()).most_common()]


class TrialNumbers(NamedTuple):
    """The numbers of a trial with an output that an overview counts."""

    sample: str
    status: TrialStatus
    score: float | None
    grades: Mapping[str, PlaceVerdict]
    """status and score by grader as metrics name it, for the graders that apply to the row"""
    turns: int
    stopped: bool
    """a checkpoint ended the conversation"""
    tokens: int | None
    cost: float | None
    started: float
    seconds: float
    first_token: float | None
    answer: str = "whole"
    """class of the answer"""
    copied: bool = False
    """the output comes from another run"""


def count_trial(tally: TrialsTally, places: Sequence[GraderPlace], trial: GradedTrial | Pending) -> None:
    """Count a trial of a run that is read back."""
    if isinstance(trial, Pending):
        tally.add_missing(trial.status)
    else:
        tally.add(trial_numbers(places, trial))


def trial_numbers(places: Sequence[GraderPlace], trial: GradedTrial) -> TrialNumbers:
    """Return the facts of a trial that an overview counts."""
    output = trial.output
    grades: dict[str, PlaceVerdict] = {grade.grader: (grade.status, grade.score) for grade in trial.grades}
    stopped = bool(output.stopped_by)
    for number in trial.panel.graders:
        place = places[number]
        if place.name not in grades:
            missed = stopped if place.turn is None else place.turn > output.turns
            grades[place.name] = ("not_reached" if missed else "pending", None)
    failed_to_grade = any(grade.status == "error" for grade in trial.grades)
    return TrialNumbers(
        output.sample,
        trial.status if trial.status != "error" or failed_to_grade else "pending",
        trial.score,
        grades,
        output.turns,
        stopped,
        output.usage.tokens,
        output.usage.cost,
        output.timing.started,
        output.timing.seconds,
        output.timing.first_token,
        output.answer,
        not isinstance(output.source, UnsetType),
    )


class _Reached:
    """The trials at one checkpoint."""

    def __init__(self, trials: int) -> None:
        self.states: Counter[str] = Counter()
        self.ended_here = 0
        self._passes: dict[str, list[int]] | None = None if trials == 1 else {}
        """by sample: passed, and graded; None if each sample has one trial"""

    def add(self, trial: TrialNumbers, turn: int, statuses: Iterable[TrialStatus]) -> None:
        state = gravest(statuses)
        self.states[state] += 1
        self.ended_here += state == "failed" and trial.stopped and trial.turns == turn
        if self._passes is not None and state in ("passed", "failed"):
            counts = self._passes.setdefault(trial.sample, [0, 0])
            counts[0] += state == "passed"
            counts[1] += 1

    def share(self) -> tuple[float | None, float | None, float | None]:
        """Return the pass rate of the graded trials, with its interval."""
        graded = self.states["passed"] + self.states["failed"]
        if not graded:
            return None, None, None
        if self._passes is None:
            share = self.states["passed"] / graded
            return share, *wilson(share, graded)
        means = [passed / count for passed, count in self._passes.values()]
        result = estimate(means, proportion=True, verdicts=graded)
        return result.mean, result.low, result.high


class TrialsTally:
    """Counts trials, in any order, for an overview."""

    def __init__(self, view: RunView) -> None:
        self._places = view.places
        self._trials = view.manifest.trials
        self._finished = view.metrics is not None
        self.outputs = 0
        self.statuses: Counter[str] = Counter()
        """of trials with an output"""
        self.covered = 0
        """of an unfinished run: trials with a verdict of every grader that applies"""
        self._may_measure = {place.name for place in self._places if grader_class(place.block).one_scale}
        """graders whose skips are measurements"""
        self.answers: Counter[str] = Counter()
        """of an unfinished run: answers by class"""
        self.missing: Counter[str] = Counter()
        """statuses of trials without one: `error` if an attempt has failed, else `pending`"""
        self._reached = {place.turn: _Reached(self._trials) for place in self._places if place.turn is not None}
        self._names = {turn: [place.name for place in self._places if place.turn == turn] for turn in self._reached}
        self._seconds, self._first_tokens, self._tokens, self._costs = (array("d") for _ in range(4))
        self._ends = array("d")
        self._scores: dict[str, array[float]] = {place.name: array("d") for place in self._places}
        self._verdicts: list[tuple[str, TrialStatus, float | None, Mapping[str, PlaceVerdict]]] = []
        """of an unfinished run: the verdicts for its numbers so far"""

    def add_missing(self, status: str) -> None:
        """Count a trial that has no output."""
        self.missing[status] += 1

    def add(self, trial: TrialNumbers) -> None:
        """Count a trial that has an output."""
        self.outputs += 1
        self.statuses[trial.status] += 1
        self.answers[trial.answer] += 1
        self.covered += trial.status not in ("error", "pending") and not any(
            status == "skipped" and name not in self._may_measure for name, (status, _) in trial.grades.items()
        )
        for turn, reached in self._reached.items():
            statuses = [trial.grades[name][0] for name in self._names[turn] if name in trial.grades]
            if statuses:
                reached.add(trial, turn, statuses)
        for name, (_, score) in trial.grades.items():
            if score is not None and name in self._scores:
                self._scores[name].append(score)
        self._seconds.append(trial.seconds)
        for values, value in (
            (self._first_tokens, trial.first_token),
            (self._tokens, trial.tokens),
            (self._costs, trial.cost),
        ):
            if value is not None:
                values.append(value)
        if not trial.copied:
            self._ends.append(trial.started + trial.seconds)
        if not self._finished:
            self._verdicts.append((trial.sample, trial.status, trial.score, trial.grades))

    def funnel(self, spec_stops: Mapping[int, bool]) -> list[FunnelStep]:
        """Return the checkpoints by turn."""
        steps = []
        for turn, reached in self._reached.items():
            states = reached.states
            share, low, high = reached.share()
            steps.append(
                FunnelStep(
                    turn=turn,
                    graders=self._names[turn],
                    stops=spec_stops.get(turn, False),
                    trials=states.total(),
                    reached=states.total() - states["not_reached"],
                    passed=states["passed"],
                    failed=states["failed"],
                    ended_here=reached.ended_here,
                    error=states["error"],
                    pending=states["pending"],
                    share=share,
                    low=low,
                    high=high,
                )
            )
        return steps

    def histograms(self) -> list[Histogram]:
        """Return the distributions of all measures that are known."""
        measures: list[tuple[str, str, Sequence[float]]] = [
            ("Time per trial", "seconds", self._seconds),
            ("Time to the first token", "seconds", self._first_tokens),
            ("Tokens per trial", "tokens", self._tokens),
            ("Cost per trial", "dollars", self._costs if any(self._costs) else ()),
        ]
        histograms = [
            make_histogram(name, unit, values, unknown=self.outputs - len(values), whole=unit == "tokens")
            for name, unit, values in measures
        ]
        return [histogram for histogram in histograms if histogram is not None]

    def scores(self, grader: str) -> Histogram | None:
        """Return the distribution of a grader's scores, unless they are all 0 or 1."""
        scores = self._scores[grader]
        return None if _ENDS.issuperset(scores) else score_histogram(grader, scores)

    def spent(self) -> tuple[int | None, float | None]:
        """Return tokens and dollars of all outputs; None if one of them is unknown."""
        tokens = round(sum(self._tokens)) if len(self._tokens) == self.outputs else None
        return tokens, math.fsum(self._costs) if len(self._costs) == self.outputs else None

    def activity(self, rundir: RunDir) -> Activity | None:
        """Return outputs and failed attempts over time."""
        errors = list(_error_times(rundir))
        times = [*self._ends, *(time for time, _ in errors)]
        if not times:
            return None
        first, last = min(times), max(times)
        step = _activity_step(last - first)
        start = first - first % step
        outputs: Counter[int] = Counter(int((end - start) // step) for end in self._ends)
        kinds: dict[int, Counter[str]] = {}
        for time, kind in errors:
            kinds.setdefault(int((time - start) // step), Counter())[kind] += 1
        return Activity(
            seconds=step,
            bins=[
                ActivityBin(start + number * step, outputs[number], dict(kinds.get(number, {})))
                for number in range(int((last - start) // step) + 1)
            ],
        )

    def numbers_so_far(self) -> tuple[GraderMetrics | None, dict[str, GraderMetrics]]:
        """Return the statistics of an unfinished run: of the trials as a whole, and by grader."""
        if not self._places:
            return None, {}
        ordered = sorted(self._verdicts, key=lambda verdict: verdict[0])
        overall = summarize_verdicts(
            self._trials, ((sample, status, score) for sample, status, score, _ in ordered if status != "error")
        )
        by_grader = {}
        for place in self._places:
            name = place.name
            summary = summarize_verdicts(
                self._trials, ((sample, *grades[name]) for sample, _, _, grades in ordered if name in grades)
            )
            rule = {"threshold": threshold(place.block), "weight": place.block.weight}
            by_grader[name] = msgspec.structs.replace(summary, **rule)
        return overall, by_grader


def _error_times(rundir: RunDir) -> Iterator[tuple[float, str]]:
    if sum(path.stat().st_size for path in rundir.journals("errors") if path.exists()) <= _MOST_ERROR_BYTES:
        yield from ((head.time, head.kind) for head in read_error_heads(rundir))


def _activity_step(span: float) -> float:
    for step in _STEPS:
        if span / step < _MOST_BINS - 1:
            return float(step)
    days = 1
    while span / (days * _DAY) >= _MOST_BINS - 1:
        days += 1
    return float(days * _DAY)
