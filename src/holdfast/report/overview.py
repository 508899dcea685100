"""A run as numbers for a page: metrics, checkpoint funnel, distributions, and what happened when.

`metrics.json` has the numbers of a finished run. What it does not have, and the numbers so far of an unfinished one, is
counted by `TrialsTally`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from holdfast.plan.changes import identity_changes
from holdfast.report.stats import Histogram  # noqa: TC001 - msgspec reads it
from holdfast.report.trial_counts import Activity, FunnelStep, TrialsTally  # noqa: TC001 - msgspec reads it
from holdfast.store.answers import ANSWER_CLASSES, Answers
from holdfast.store.metrics import BenchmarkMetrics, GraderMetrics, ValueMetrics  # noqa: TC001 - msgspec reads it

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.report.run_view import RunView
    from holdfast.store.manifest import Manifest


_MANY: Final = 6
"""graders beyond which breakdowns have no columns for those of checkpoints"""
FEW: Final = 30
"""samples below which an interval is too wide to tell values apart, so that a breakdown marks them"""


class GraderRow(Struct, frozen=True, kw_only=True):
    """A grader with its numbers."""

    name: str
    turn: int | None
    metrics: GraderMetrics
    scores: Histogram | None = None
    """only of scores that are not 0 or 1 alone"""


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
    finished: str | None
    """when the report was written; None while the run is not finished"""
    holdfast: str
    folder: str
    """of the run, and of the eval above it"""
    dataset: list[str]
    samples: int
    trials: int
    """per sample"""
    total: int
    outputs: int | None
    answers: Answers | None
    graded: int | None
    """trials that passed or failed"""
    statuses: dict[str, int] | None
    """all trials by status: `error` and `pending` also without an output, `uncertain` only without one"""
    coverage: float | None
    passed: float | None
    """share of the trials that pass every grader"""
    overall: GraderMetrics | None
    graders: list[GraderRow]
    by: dict[str, dict[str, ValueMetrics]]
    benchmark: BenchmarkMetrics | None
    tokens: int | None
    """None if unknown"""
    cost: float | None
    judge_tokens: int | None
    judge_cost: float | None
    """of the judges; None if unknown, and while the run is not finished"""
    seconds: float | None
    """with work in flight; unknown while the run is not finished"""
    funnel: list[FunnelStep] | None
    histograms: list[Histogram] | None
    activity: Activity | None
    notices: list[str]
    configuration: dict[str, Any]
    changes: Changes | None

    @property
    def rows(self) -> list[tuple[str, GraderMetrics]]:
        """The graders' numbers by name, and those of the trials as a whole where there are several."""
        rows = [(row.name, row.metrics) for row in self.graders]
        return [*rows, ("overall", self.overall)] if self.overall is not None and len(rows) > 1 else rows

    @property
    def extra(self) -> list[str]:
        """Counts that are not 0 for every grader."""
        names = ("left_out", "errors", "not_reached")
        return [name for name in names if any(getattr(values, name) for _, values in self.rows)]

    @property
    def passes(self) -> list[int]:
        """The smallest and the largest k of pass@k, where there are several trials."""
        ks = sorted({k for _, values in self.rows for k in values.pass_at})
        return [ks[0], ks[-1]] if len(ks) > 1 else []

    @property
    def compared(self) -> list[str]:
        """The graders that breakdowns have columns for: all, or of many those at the end."""
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
        """True if the trials were counted; else only what `metrics.json` has is known."""
        return self.funnel is not None


def run_overview(view: RunView, tally: TrialsTally | None, changes: Changes | None = None) -> Overview:
    """Return a run in numbers; without a tally, what `metrics.json` has."""
    manifest, metrics = view.manifest, view.metrics
    total = manifest.dataset.count * manifest.trials
    stops = {checkpoint.after_turn: checkpoint.stops for checkpoint in view.spec.checkpoints}
    if metrics is not None:
        overall, by_grader = metrics.overall, metrics.graders
    else:
        overall, by_grader = (None, {}) if tally is None else tally.numbers_so_far()
    statuses = None if tally is None else dict(tally.statuses + tally.missing)
    decided = 0 if tally is None else tally.statuses["passed"] + tally.statuses["failed"]
    passed_so_far = tally.statuses["passed"] / decided if tally is not None and decided else None
    tokens_so_far, cost_so_far = (None, None) if tally is None else tally.spent()
    return Overview(
        run=manifest.id,
        eval=manifest.name,
        target=manifest.target,
        created=manifest.created,
        finished=None if metrics is None else metrics.timing.finished,
        holdfast=manifest.holdfast,
        folder="/".join(view.rundir.path.resolve().parts[-2:]),
        dataset=manifest.dataset.source,
        samples=manifest.dataset.count,
        trials=manifest.trials,
        total=total,
        outputs=tally.outputs if metrics is None and tally is not None else metrics.outputs if metrics else None,
        answers=metrics.answers if metrics is not None else None if tally is None else _answers_so_far(tally),
        graded=metrics.graded if metrics is not None else None if tally is None else decided,
        statuses=statuses,
        coverage=metrics.coverage if metrics is not None else None if tally is None else tally.covered / max(1, total),
        passed=metrics.passed if metrics is not None else passed_so_far,
        overall=overall,
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
        by=metrics.by if metrics is not None and metrics.graders else {},
        benchmark=metrics.benchmark if metrics is not None else None,
        tokens=metrics.usage.tokens if metrics is not None else tokens_so_far,
        cost=metrics.usage.cost if metrics is not None else cost_so_far,
        judge_tokens=None if metrics is None else metrics.judge_usage.tokens,
        judge_cost=None if metrics is None else metrics.judge_usage.cost,
        seconds=metrics.timing.seconds if metrics is not None else None,
        funnel=None if tally is None else tally.funnel(stops),
        histograms=None if tally is None else tally.histograms(),
        activity=None if tally is None else tally.activity(view.rundir),
        notices=metrics.notices if metrics is not None else [],
        configuration=manifest.eval,
        changes=changes,
    )


def _answers_so_far(tally: TrialsTally) -> Answers:
    missing = {"errors": tally.missing["error"], "pending": tally.missing["pending"] + tally.missing["uncertain"]}
    return Answers(**{name: tally.answers[name] for name in ANSWER_CLASSES}, **missing)


def changes_since(view: RunView, runs: Iterable[Manifest]) -> Changes | None:
    """Return what changed since the nearest earlier run of the eval: the one with most parts equal, then the newest."""
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
