"""Two or more runs sample by sample, as pages, files and programs show them.

`compare` has the statistics: the first run is compared with each of the others. This module has the samples: which pass
in only one of two runs, how far apart scores are, and which samples only some of the runs have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct, structs

from holdfast.display.format import one_line
from holdfast.errors import UsageError
from holdfast.report.compare import (
    OVERALL,
    Breakdown,
    Compared,
    changed_thresholds,
    compare_scores,
    metric_names,
    metric_title,
    shared_names,
)
from holdfast.report.run_view import GradedTrial, Pending

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.report.compare import ScoredRun

Kind = Literal["gained", "lost", "both", "neither"]
"""the runs in which a sample passes: only the first, only the second, both, or neither"""
Choice = Literal["flips", "gained", "lost", "both", "neither", "all"]
"""rows to show; `flips` are the gained and the lost ones"""

KINDS: Final[tuple[Kind, ...]] = ("gained", "lost", "both", "neither")
_WORDS: Final = {
    "gained": "only the first passes",
    "lost": "only the second passes",
    "both": "both pass",
    "neither": "neither passes",
}
_PREVIEW: Final = 240
"""characters of an answer, and of feedback"""


class RunSide(Struct, frozen=True, kw_only=True):
    """A run of a comparison, in numbers."""

    run: str
    """its id"""
    eval: str
    target: str
    path: str
    samples: int
    trials: int
    """per sample"""
    coverage: float
    score: float | None
    low: float | None
    high: float | None
    tokens: int | None
    """of the outputs"""
    cost: float | None
    """in dollars, of the outputs"""
    judge_cost: float | None
    seconds: float
    """with trials or grades in flight"""
    trial_seconds_p50: float | None
    trial_seconds_p95: float | None

    @property
    def label(self) -> str:
        """Return eval, target and id."""
        return f"{self.eval} · {self.target} · {self.run}"


class PairFacts(Struct, frozen=True, kw_only=True):
    """The first run compared with one of the others."""

    second: str
    """id of the other run"""
    metrics: tuple[Compared, ...] = ()
    by: tuple[Breakdown, ...] = ()
    differences: tuple[str, ...] = ()
    """what differs between the runs apart from their verdicts"""
    not_compared: tuple[str, ...] = ()
    """graders with the same name in both runs that are different graders"""
    problem: str = ""
    """why the runs cannot be compared; empty if they can"""
    hint: str | None = None
    """what to do about that"""


class SampleCell(Struct, frozen=True, kw_only=True):
    """A sample in one run."""

    score: float
    passed: float
    """share of its trials that pass"""
    trials: int
    answer: str = ""
    """the beginning of its first trial's answer"""
    feedback: str = ""
    """of the graders that its first trial did not pass"""


class SampleRow(Struct, frozen=True, kw_only=True):
    """A sample in all runs."""

    sample: str
    spread: float
    """the highest score minus the lowest"""
    kind: Kind | None
    """None in a comparison of more than two runs, and if passing means different things"""
    cells: list[SampleCell | None]
    """by run; None if a run lacks the sample, or a verdict on it"""


class ScorePoint(Struct, frozen=True, kw_only=True):
    """Samples with about the same scores in both runs."""

    first: float
    second: float
    samples: int
    sample: str
    """one of them"""


class Absent(Struct, frozen=True, kw_only=True):
    """Samples that not all runs have."""

    run: str
    """the only run that has them, or with more than two runs, a run that lacks them"""
    lacks: bool
    samples: list[str]


class RunComparison(Struct, frozen=True, kw_only=True):
    """Two or more runs, compared."""

    runs: list[RunSide]
    """the first one is compared with each of the others"""
    pairs: list[PairFacts]
    metrics: list[str]
    """metrics that samples can be shown by"""
    metric: str
    """the metric that samples are shown by"""
    counts: dict[str, int]
    """samples by the runs in which they pass; empty with more than two runs, and if passing means different things"""
    show: Choice
    rows: list[SampleRow]
    """the requested rows, or some of them; rows on which the runs disagree most come first"""
    start: int
    """number of rows before these"""
    total: int
    """number of requested rows"""
    points: list[ScorePoint]
    """only for two runs, and scores that are not pass or fail"""
    absent: list[Absent]

    @property
    def metric_title(self) -> str:
        """The metric that samples are shown by, in words."""
        return metric_title(self.metric)

    @property
    def metric_choices(self) -> list[tuple[str, str]]:
        """The metrics that samples can be shown by, each with its words."""
        return [(metric, metric_title(metric)) for metric in self.metrics]

    @property
    def choices(self) -> list[tuple[Choice, str, int]]:
        """The rows that can be shown: by value, in words, and how many there are."""
        counts = self.counts
        listed: list[tuple[Choice, str, int]] = [("flips", "flips", counts["gained"] + counts["lost"])]
        listed += [(kind, _WORDS[kind], counts[kind]) for kind in KINDS]
        return [*listed, ("all", "all", sum(counts.values()))]


def compare_runs(scored: Sequence[ScoredRun], *, metric: str | None = None, show: str | None = None) -> RunComparison:
    """Compare the first run with each of the others, and list samples by one metric."""
    first, *others = scored
    pairs = [_pair(first, other) for other in others]
    names = _comparable(first, [other for other, pair in zip(others, pairs, strict=True) if not pair.problem])
    if metric is not None and metric not in names:
        raise UsageError(f"no metric {metric!r} that all runs have", remedy=f"There are: {', '.join(names) or 'none'}.")
    chosen = metric or (OVERALL if OVERALL in names else names[0] if names else "")
    rows = list(_rows(scored, chosen)) if chosen else []
    crossed = len(scored) == 2 and chosen not in changed_thresholds(*scored) and bool(chosen)
    if not crossed:
        rows = [structs.replace(row, kind=None) for row in rows]
    counts = Counter(row.kind for row in rows if row.kind)
    choice = _choice(show, counts)
    chosen_rows = [row for row in rows if _is_chosen(row, choice)]
    chosen_rows.sort(key=lambda row: -row.spread)  # stable: equal spreads stay in the dataset's order
    return RunComparison(
        runs=[_side(run) for run in scored],
        pairs=pairs,
        metrics=names,
        metric=chosen,
        counts={kind: counts[kind] for kind in KINDS} if crossed else {},
        show=choice,
        rows=chosen_rows,
        start=0,
        total=len(chosen_rows),
        points=_points(rows) if len(scored) == 2 else [],
        absent=list(_absent(scored)),
    )


Find = Callable[[str], GradedTrial | Pending | None]
"""returns the first trial of a sample in one run, or None"""


def take_rows(comparison: RunComparison, finders: Sequence[Find], start: int, most: int) -> RunComparison:
    """Return the comparison with some of its rows, and in these the beginnings of answers and feedback."""
    rows = [
        structs.replace(
            row,
            cells=[
                None if cell is None else _with_answer(cell, find(row.sample), comparison.metric)
                for cell, find in zip(row.cells, finders, strict=True)
            ],
        )
        for row in comparison.rows[start : start + most]
    ]
    return structs.replace(comparison, rows=rows, start=start)


def _with_answer(cell: SampleCell, trial: GradedTrial | Pending | None, metric: str) -> SampleCell:
    if not isinstance(trial, GradedTrial):
        return cell
    remarks = [
        f"{grade.grader}: {grade.feedback}"
        for grade in trial.grades
        if grade.feedback and grade.status in ("failed", "error") and metric in (grade.grader, OVERALL)
    ]
    answer, feedback = one_line(trial.output.output, _PREVIEW), one_line(" · ".join(remarks), _PREVIEW)
    return structs.replace(cell, answer=answer, feedback=feedback)


def _comparable(first: ScoredRun, others: Sequence[ScoredRun]) -> list[str]:
    """Return the metrics that mean the same in the first run and in some other, in the first run's order."""
    shared = {name for other in others for name in shared_names(first, other)}
    return [name for name in metric_names(first) if name in shared]


def _choice(show: str | None, counts: Counter[Kind]) -> Choice:
    """Return the rows to show: by default the flips if there are any, else all rows."""
    if not counts:
        return "all"
    choices: tuple[Choice, ...] = ("flips", *KINDS, "all")
    for choice in choices:
        if choice == show:
            return choice
    return "flips" if counts["gained"] + counts["lost"] else "all"


def _is_chosen(row: SampleRow, choice: Choice) -> bool:
    return choice in ("all", row.kind) or (choice == "flips" and row.kind in ("gained", "lost"))


def _rows(scored: Sequence[ScoredRun], metric: str) -> Iterator[SampleRow]:
    """Yield the samples with a verdict in at least two runs, in the first run's order."""
    for sample in dict.fromkeys(sample for run in scored for sample in run.keys):
        cells = [_cell(run, metric, sample) for run in scored]
        present = [cell for cell in cells if cell is not None]
        if len(present) > 1:
            scores = [cell.score for cell in present]
            yield SampleRow(
                sample=sample, spread=max(scores) - min(scores), kind=_kind(present[0], present[1]), cells=cells
            )


def _cell(run: ScoredRun, metric: str, sample: str) -> SampleCell | None:
    scores, passes = run.scores.get(metric, {}).get(sample), run.passes.get(metric, {}).get(sample)
    if not scores or not passes:
        return None
    return SampleCell(score=sum(scores) / len(scores), passed=sum(passes) / len(passes), trials=len(scores))


def _kind(first: SampleCell, second: SampleCell) -> Kind:
    """Return in which runs a sample passes, which it does if at least half of its trials pass."""
    ours, theirs = first.passed >= 0.5, second.passed >= 0.5
    if ours == theirs:
        return "both" if ours else "neither"
    return "gained" if ours else "lost"


def _points(rows: Sequence[SampleRow]) -> list[ScorePoint]:
    """Return the scores of both runs, to two digits; nothing for metrics that are pass or fail."""
    places: dict[tuple[float, float], list[str]] = {}
    graded = False
    for row in rows:
        first, second = row.cells
        assert first is not None and second is not None  # a row of two runs has both
        graded = graded or any(cell.score not in (0.0, 1.0) for cell in (first, second))
        places.setdefault((round(first.score, 2), round(second.score, 2)), []).append(row.sample)
    if not graded:
        return []
    return [
        ScorePoint(first=first, second=second, samples=len(samples), sample=samples[0])
        for (first, second), samples in places.items()
    ]


def _absent(scored: Sequence[ScoredRun]) -> Iterator[Absent]:
    """Yield the samples that only one of two runs has, or that some of several runs lack."""
    everything = dict.fromkeys(sample for run in scored for sample in run.keys)
    for run, other in zip(scored, reversed(scored), strict=True):
        lacks = len(scored) > 2
        has = run.samples if lacks else other.samples
        if samples := [sample for sample in everything if sample not in has]:
            yield Absent(run=run.metrics.run, lacks=lacks, samples=samples)


def _side(run: ScoredRun) -> RunSide:
    metrics = run.metrics
    overall, timing = metrics.overall, metrics.timing
    return RunSide(
        run=metrics.run,
        eval=metrics.eval,
        target=metrics.target,
        path=run.path,
        samples=metrics.samples,
        trials=metrics.trials,
        coverage=metrics.coverage,
        score=metrics.score,
        low=overall.low if overall else None,
        high=overall.high if overall else None,
        tokens=metrics.usage.tokens,
        cost=metrics.usage.cost,
        judge_cost=metrics.judge_usage.cost if metrics.judge_usage.requests else None,
        seconds=timing.seconds,
        trial_seconds_p50=timing.trial_seconds_p50,
        trial_seconds_p95=timing.trial_seconds_p95,
    )


def _pair(first: ScoredRun, second: ScoredRun) -> PairFacts:
    try:
        comparison = compare_scores(first, second)
    except UsageError as error:
        return PairFacts(second=second.metrics.run, problem=error.message, hint=error.remedy)
    return PairFacts(
        second=second.metrics.run,
        metrics=comparison.metrics,
        by=comparison.by,
        differences=comparison.differences,
        not_compared=comparison.not_compared,
    )
