"""Runs as a grid of evals and targets: their scores, and which of them differ from the best of their eval."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from holdfast.errors import HoldfastError
from holdfast.report.compare import read_scores
from holdfast.report.paired import LEVEL, p_text
from holdfast.report.run_view import RunView
from holdfast.report.suite import compare_with_best
from holdfast.store.catalog import summarize_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from holdfast.report.suite import Comparisons, Place
    from holdfast.store.catalog import RunSummary
    from holdfast.store.rundir import RunDir

_MOST_TRIALS: Final = 100_000
"""trials of all runs together up to which they are tested against each other"""


class GridCell(Struct, frozen=True, kw_only=True):
    """A run of the grid."""

    run: str
    status: str
    score: float | None
    low: float | None
    high: float | None
    coverage: float | None
    done: int
    total: int
    best: bool = False
    """the best score of its eval"""
    differs: bool = False
    """from the best one, by more than chance"""
    adjusted: float | None = None
    """p-value against the best one, after Holm's correction over the grid"""
    p_text: str = ""
    """the same as text"""


class GridRow(Struct, frozen=True, kw_only=True):
    """The runs of an eval."""

    eval: str
    cells: list[GridCell | None]
    """by target; None where there is no run"""


class SuiteGrid(Struct, frozen=True, kw_only=True):
    """Evals and targets with their runs."""

    targets: list[str]
    rows: list[GridRow]
    level: float
    """p-values below it are marked"""
    comparisons: int
    """number of scores that were tested against the best one of their eval"""
    not_compared: list[str]
    """runs that cannot be compared with the best one, with the reason"""
    hidden: list[str]
    """ids of older runs with the same eval and target as one that is shown"""
    tested: bool
    """False: there are too many trials to compare scores"""


def suite_grid(rundirs: Iterable[RunDir]) -> SuiteGrid:
    """Arrange runs by eval and target; of several runs of both, the newest one is shown."""
    listed = [(summary, rundir) for rundir in rundirs if (summary := summarize_run(rundir)) is not None]
    listed.sort(key=lambda each: -each[0].written)
    places: dict[Place, tuple[RunSummary, RunDir]] = {}
    hidden = []
    for summary, rundir in listed:
        if (summary.name, summary.target) in places:
            hidden.append(summary.id)
        else:
            places[summary.name, summary.target] = summary, rundir
    tested = sum(summary.total for summary, _ in places.values()) <= _MOST_TRIALS
    compared = _compare(places) if tested else None
    targets = sorted({target for _, target in places})
    best = _best(places)
    return SuiteGrid(
        targets=targets,
        rows=[
            GridRow(
                eval=name,
                cells=[
                    _cell(places[name, target][0], (name, target), best, compared) if (name, target) in places else None
                    for target in targets
                ],
            )
            for name in sorted({name for name, _ in places})
        ],
        level=LEVEL,
        comparisons=0 if compared is None else len(compared.tested),
        not_compared=[]
        if compared is None
        else [f"{name} · {target} {reason}" for (name, target), reason in compared.not_compared.items()],
        hidden=hidden,
        tested=tested,
    )


def _compare(places: Mapping[Place, tuple[RunSummary, RunDir]]) -> Comparisons:
    runs = {}
    for place, (summary, rundir) in places.items():
        if summary.finished:
            try:
                runs[place] = read_scores(RunView(rundir))
            except HoldfastError:  # damaged since it was listed; its score is shown, and tested with nothing
                continue
    return compare_with_best(runs)


def _best(places: Mapping[Place, tuple[RunSummary, RunDir]]) -> set[Place]:
    """Return the best runs of each eval, unless all its runs are as good."""
    best: set[Place] = set()
    for name in {name for name, _ in places}:
        scores = {
            place: summary.score
            for place, (summary, _) in places.items()
            if place[0] == name and summary.score is not None
        }
        highest = [place for place, score in scores.items() if score == max(scores.values())]
        best |= set(highest if len(highest) < len(scores) else ())
    return best


def _cell(summary: RunSummary, place: Place, best: set[Place], compared: Comparisons | None) -> GridCell:
    against = None if compared is None else compared.tested.get(place)
    return GridCell(
        run=summary.id,
        status=summary.status,
        score=summary.score,
        low=summary.low,
        high=summary.high,
        coverage=summary.coverage,
        done=summary.done,
        total=summary.total,
        best=place in best,
        differs=against is not None and against.differs,
        adjusted=None if against is None else against.adjusted,
        p_text="" if against is None else p_text(against.p_value, against.adjusted),
    )
