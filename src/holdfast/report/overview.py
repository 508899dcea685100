"""A run as numbers for a page: metrics, checkpoint funnel, distributions, and what happened when.

`metrics.json` has the numbers of a finished run. `TrialsTally` counts the rest, and the numbers so far of an unfinished
run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from holdfast.plan.changes import identity_changes
from holdfast.report.stats import Histogram  # noqa: TC001 - msgspec reads it
from holdfast.report.trial_counts import Activity, FunnelStep, TrialsTally  # noqa: TC001 - msgspec reads it
from holdfast.store.metrics import Answers, BenchmarkMetrics, GraderMetrics, ValueMetrics
from holdfast.store.records import ANSWER_CLASSES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.report.run_view import RunView
    from holdfast.store.metrics import Metrics
    from holdfast.store.rundir import Manifest


_MANY: Final = 6
"""graders up to which breakdowns also have columns for the graders of checkpoints"""
FEW: Final = 30
"""samples below which a breakdown marks a value, since its interval is too wide to compare"""


class GraderRow(Struct, frozen=True, kw_only=True):
    """A grader with its numbers."""

    name: str
    turn: int | None
    metrics: GraderMetrics
    scores: Histogram | None = None
    """None if all scores are 0 or 1"""


class Changes(Struct, frozen=True):
    """Differences from the nearest earlier run of the eval."""

    run: str
    target: str
    created: str
    changes: list[str]


class Overview(Struct, frozen=True, kw_only=True):
    """A run in numbers."""

    run: str
    eval: str
    target: str
    created: str
    finished: str | None = None
    """when the report was written; None while the run is not finished"""
    holdfast: str
    folder: str
    """names of the run's folder and of the folder above it"""
    dataset: list[str]
    samples: int
    trials: int
    """per sample"""
    total: int
    outputs: int | None = None
    answers: Answers | None = None
    graded: int | None = None
    """trials that passed or failed"""
    statuses: dict[str, int] | None = None
    """all trials by status: `error` and `pending` also without an output, `uncertain` only without one"""
    coverage: float | None = None
    passed: float | None = None
    """share of the trials that pass every grader"""
    overall: GraderMetrics | None = None
    graders: list[GraderRow]
    by: dict[str, dict[str, ValueMetrics]] = {}
    benchmark: BenchmarkMetrics | None = None
    tokens: int | None = None
    """None if unknown"""
    cost: float | None = None
    judge_tokens: int | None = None
    judge_cost: float | None = None
    """of the judges; None if unknown, and until the run is finished"""
    seconds: float | None = None
    """with work in flight; unknown until the run is finished"""
    funnel: list[FunnelStep] | None = None
    histograms: list[Histogram] | None = None
    activity: Activity | None = None
    notices: list[str] = []
    configuration: dict[str, Any]
    changes: Changes | None = None

    @property
    def rows(self) -> list[tuple[str, GraderMetrics]]:
        """The graders' numbers by name, and if there are several graders, the numbers of the trials as a whole."""
        rows = [(row.name, row.metrics) for row in self.graders]
        return [*rows, ("overall", self.overall)] if self.overall is not None and len(rows) > 1 else rows

    @property
    def extra(self) -> list[str]:
        """Counts that are not 0 for every grader."""
        names = ("left_out", "errors", "not_reached")
        return [name for name in names if any(getattr(values, name) for _, values in self.rows)]

    @property
    def passes(self) -> list[int]:
        """The smallest and the largest k of pass@k, if there are several trials."""
        ks = sorted({k for _, values in self.rows for k in values.pass_at})
        return [ks[0], ks[-1]] if len(ks) > 1 else []

    @property
    def compared(self) -> list[str]:
        """The graders that breakdowns have columns for: all, or if there are many, only the final ones."""
        names = [row.name for row in self.graders]
        if len(names) > _MANY:
            names = [row.name for row in self.graders if row.turn is None][:_MANY]
        return names

    @property
    def figures(self) -> bool:
        """True if there is a distribution to plot."""
        curve = self.overall is not None and len(self.overall.pass_at) > 2
        return bool(self.histograms) or curve or any(row.scores for row in self.graders)

    @property
    def counted(self) -> bool:
        """True if the trials were counted; otherwise the overview has only the numbers of `metrics.json`."""
        return self.funnel is not None


def run_overview(view: RunView, tally: TrialsTally | None) -> Overview:
    """Return a run in numbers; without a tally, what `metrics.json` has."""
    manifest = view.manifest
    total = manifest.dataset.count * manifest.trials
    if view.metrics is not None:
        numbers, by_grader = _reported(view.metrics), view.metrics.graders
    else:
        numbers, by_grader = ({}, {}) if tally is None else _so_far(tally, total)
    return Overview(
        run=manifest.id,
        eval=manifest.name,
        target=manifest.target,
        created=manifest.created,
        holdfast=manifest.holdfast,
        folder="/".join(view.rundir.path.resolve().parts[-2:]),
        dataset=manifest.dataset.source,
        samples=manifest.dataset.count,
        trials=manifest.trials,
        total=total,
        configuration=manifest.eval,
        graders=[
            GraderRow(
                name=place.name,
                turn=place.turn,
                metrics=by_grader[place.name],
                scores=None if tally is None else tally.scores(place.name),
            )
            for place in view.places
            if place.name in by_grader
        ],
        **numbers,
        **({} if tally is None else _counted(view, tally)),
    )


def _reported(metrics: Metrics) -> dict[str, Any]:
    """Return the fields of an overview that `metrics.json` has."""
    return {
        "finished": metrics.timing.finished,
        "outputs": metrics.outputs,
        "answers": metrics.answers,
        "graded": metrics.graded,
        "coverage": metrics.coverage,
        "passed": metrics.passed,
        "overall": metrics.overall,
        "by": metrics.by if metrics.graders else {},
        "benchmark": metrics.benchmark,
        "tokens": metrics.usage.tokens,
        "cost": metrics.usage.cost,
        "judge_tokens": metrics.judge_usage.tokens,
        "judge_cost": metrics.judge_usage.cost,
        "seconds": metrics.timing.seconds,
        "notices": metrics.notices,
    }


def _so_far(tally: TrialsTally, total: int) -> tuple[dict[str, Any], dict[str, GraderMetrics]]:
    """Return the same fields for a run that is not finished, without those still unknown, and the graders' numbers."""
    overall, by_grader = tally.numbers_so_far()
    passed, tokens_and_cost, missing = tally.statuses["passed"], tally.spent(), tally.missing
    graded = passed + tally.statuses["failed"]
    return {
        "outputs": tally.outputs,
        "answers": Answers(
            **{name: tally.answers[name] for name in ANSWER_CLASSES},
            errors=missing["error"],
            pending=missing["pending"] + missing["uncertain"],
        ),
        "graded": graded,
        "coverage": tally.covered / max(1, total),
        "passed": passed / graded if graded else None,
        "overall": overall,
        "tokens": tokens_and_cost[0],
        "cost": tokens_and_cost[1],
    }, by_grader


def _counted(view: RunView, tally: TrialsTally) -> dict[str, Any]:
    """Return the fields of an overview that need a count of the trials, even if the run is finished."""
    stops = {checkpoint.after_turn: checkpoint.stops for checkpoint in view.spec.checkpoints}
    return {
        "statuses": dict(tally.statuses + tally.missing),
        "funnel": tally.funnel(stops),
        "histograms": tally.histograms(),
        "activity": tally.activity(view.rundir),
    }


def changes_since(view: RunView, runs: Iterable[Manifest]) -> Changes | None:
    """Return what changed since the nearest earlier run of the eval: the one with most equal parts, then the newest."""
    ours = view.manifest
    earlier = [
        manifest
        for manifest in runs
        if manifest.name == ours.name and manifest.id != ours.id and manifest.created <= ours.created
    ]
    if not earlier:
        return None
    parts = msgspec.to_builtins(ours.fingerprints)

    def nearness(manifest: Manifest) -> tuple[int, str]:
        theirs = msgspec.to_builtins(manifest.fingerprints)
        return sum(theirs.get(part) == value for part, value in parts.items()), manifest.created

    nearest = max(earlier, key=nearness)
    same_rows = nearest.fingerprints.dataset == ours.fingerprints.dataset
    changes = identity_changes(nearest.identity, ours.identity)
    if not same_rows:
        changes.append(f"other rows ({nearest.dataset.count:,} → {ours.dataset.count:,})")
    return Changes(nearest.id, nearest.target, nearest.created, changes)
