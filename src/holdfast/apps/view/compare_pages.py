"""`/compare/ID/ID…`: runs compared; `/compare/ID/ID/trial/SAMPLE/N`: two conversations; `/suite`: evals and targets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlencode

import msgspec

from holdfast.apps.view.site import RUN, NotFound, is_json, whole_number
from holdfast.errors import UsageError
from holdfast.report.alignment import SideBySide, align
from holdfast.report.compare import read_scores
from holdfast.report.pairs import RunComparison, compare_runs, take_rows
from holdfast.report.suite import SuiteGrid, suite_grid
from holdfast.report.timeline import trial_timeline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from aiohttp import web

    from holdfast.apps.view.site import Site
    from holdfast.report.compare import ScoredRun
    from holdfast.report.run_view import GradedTrial, Pending, RunView

_ROWS: Final = 100
"""samples of one page"""
_KEPT: Final = 4
"""comparisons that are kept for the next page, and runs whose scores are kept"""
_MOST_RUNS: Final = 12
_PATIENCE: Final = 3.0
"""seconds that a page waits for a comparison; after that, it says so and loads again"""
_MANY: Final = 20_000
"""number of trials above which finding answers takes long, so that they are shown only once the columns are there"""


class WaitingPage(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that are being compared."""

    up: str
    waiting: bool = True


class ComparePage(RunComparison, frozen=True, kw_only=True):
    """Runs compared."""

    waiting: bool = False
    without_answers: bool
    """a run is so large that finding its answers takes time"""
    here: str
    """address of the comparison"""
    query: str
    """the rest of this page's address, which chooses samples"""
    swapped: str
    """address of the comparison the other way round; empty for more than two runs"""
    grid: str
    """address of the runs as a grid; empty unless they belong to several evals"""
    previous: str
    next: str


class BesidePage(msgspec.Struct, frozen=True, kw_only=True):
    """Two conversations side by side."""

    waiting: bool = False
    talk: SideBySide
    up: str
    trials: list[str]
    """addresses of the trials of the sample"""
    position: int
    """position among the chosen samples, from 1; 0 if it is not one of them"""
    total: int
    previous: str
    next: str


class SuitePage(msgspec.Struct, frozen=True, kw_only=True):
    """Evals and targets."""

    grid: SuiteGrid
    links: list[str]
    """by row: address of the comparison of its finished runs, if there are several"""


def routes(site: Site) -> list[web.RouteDef]:
    """Return the routes of these pages."""
    comparisons = _Comparisons(site)

    async def compare(request: web.Request) -> web.Response:
        runs = request.match_info["runs"].split("/")
        make = partial(comparisons.page, runs, request.query, wait=is_json(request))
        return await site.respond(request, "compare.html", make)

    async def beside(request: web.Request) -> web.Response:
        names = request.match_info
        runs, number = [names["first"], names["second"]], int(names["number"])
        make = partial(comparisons.beside, runs, names["sample"], number, request.query, wait=is_json(request))
        return await site.respond(request, "beside.html", make)

    async def suite(request: web.Request) -> web.Response:
        runs = request.match_info.get("runs", "").split("/")
        return await site.respond(request, "suite.html", partial(_suite, site, [run for run in runs if run]))

    return [
        *site.page(f"/compare/{{first:{RUN}}}/{{second:{RUN}}}/trial/{{sample:[^/]+}}/{{number:[1-9][0-9]*}}", beside),
        *site.page(f"/compare/{{runs:{RUN}(?:/{RUN})+}}", compare),
        *site.page(f"/suite/{{runs:{RUN}(?:/{RUN})*}}", suite),
        *site.page("/suite", suite),
    ]


class _Comparisons:
    """The latest comparisons, each kept until one of its runs changes."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._scored: dict[str, tuple[RunView, ScoredRun]] = {}
        self._kept: dict[tuple[str, ...], tuple[list[RunView], Future[RunComparison]]] = {}
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(1, "compare")

    def page(self, runs: Sequence[str], query: Mapping[str, str], *, wait: bool) -> ComparePage | WaitingPage:
        if (comparison := self._compare(runs, query, wait=wait)) is None:
            return WaitingPage(up="/")
        start = min(whole_number(query.get("start")) or 0, comparison.total)
        large = {
            run
            for run, side in zip(runs, comparison.runs, strict=True)
            if side.samples * side.trials > _MANY and self._site.columns_if_ready(run) is None
        }
        finders = [partial(self._find, run) if run not in large else _find_nothing for run in runs]
        shown = take_rows(comparison, finders, start, _ROWS)
        here = f"/compare/{'/'.join(runs)}"
        chosen = {"metric": shown.metric, "show": shown.show}

        def at(first: int) -> str:
            return f"{here}?{urlencode({**chosen, 'start': first})}#samples"

        evals = {side.eval for side in shown.runs}
        return ComparePage(
            **msgspec.structs.asdict(shown),
            without_answers=bool(large),
            here=here,
            query=f"?{urlencode(chosen)}",
            swapped=f"/compare/{runs[1]}/{runs[0]}" if len(runs) == 2 else "",
            grid=f"/suite/{'/'.join(runs)}" if len(evals) > 1 else "",
            previous=at(max(0, start - _ROWS)) if start else "",
            next=at(start + _ROWS) if start + _ROWS < shown.total else "",
        )

    def beside(
        self, runs: Sequence[str], sample: str, number: int, query: Mapping[str, str], *, wait: bool
    ) -> BesidePage | WaitingPage:
        here = f"/compare/{'/'.join(runs)}"
        suffix = f"?{urlencode({name: query[name] for name in ('metric', 'show') if name in query})}".rstrip("?")
        if (comparison := self._compare(runs, query, wait=wait)) is None:
            return WaitingPage(up=f"{here}{suffix}#samples")
        timelines = []
        for run in runs:
            if (trial := self._site.trial(run, sample, number)) is None:
                raise NotFound(f"run {run} has no trial {number} of sample {sample!r}")
            timelines.append(trial_timeline(self._site.run(run), trial, contents=False))

        def at(name: str, trial: int = 1) -> str:
            return f"{here}/trial/{quote(name, safe='')}/{trial}{suffix}"

        samples = [row.sample for row in comparison.rows]
        place = samples.index(sample) if sample in samples else -1
        return BesidePage(
            talk=align(*timelines),
            up=f"{here}{suffix}#samples",
            trials=[at(sample, each) for each in range(1, min(timeline.trials for timeline in timelines) + 1)],
            position=place + 1,
            total=len(samples),
            previous=at(samples[place - 1]) if place > 0 else "",
            next=at(samples[place + 1]) if 0 <= place < len(samples) - 1 else "",
        )

    def _find(self, run: str, sample: str) -> GradedTrial | Pending | None:
        return self._site.trial(run, sample, 1)

    def _compare(self, runs: Sequence[str], query: Mapping[str, str], *, wait: bool) -> RunComparison | None:
        """Return the comparison of runs; None if it takes longer than a page waits for it."""
        if len(set(runs)) < len(runs):
            raise NotFound("a run is compared with itself", remedy="Name each run once.")
        if len(runs) > _MOST_RUNS:
            raise NotFound(f"a comparison has at most {_MOST_RUNS} runs", remedy="Show more of them as a grid: /suite.")
        views = [self._site.run(run) for run in runs]
        metric, show = query.get("metric"), query.get("show")
        key = (*runs, metric or "", show or "")
        with self._lock:
            kept = self._kept.pop(key, None)
            if kept is None or any(ours is not theirs for ours, theirs in zip(kept[0], views, strict=True)):
                kept = views, self._thread.submit(self._work, runs, views, metric, show)
            self._kept[key] = kept
            while len(self._kept) > _KEPT:
                del self._kept[next(iter(self._kept))]
        try:
            return kept[1].result(None if wait else _PATIENCE)
        except TimeoutError:
            return None
        except UsageError as error:  # a run is not finished, or there is no such metric
            raise NotFound(error.message, remedy=error.remedy) from error

    def _work(
        self, runs: Sequence[str], views: Sequence[RunView], metric: str | None, show: str | None
    ) -> RunComparison:
        scored = [self._scores(run, view) for run, view in zip(runs, views, strict=True)]
        return compare_runs(scored, metric=metric, show=show)

    def _scores(self, run: str, view: RunView) -> ScoredRun:
        kept = self._scored.pop(run, None)
        if kept is None or kept[0] is not view:
            kept = view, read_scores(view)
        self._scored[run] = kept
        while len(self._scored) > _MOST_RUNS:
            self._scored.pop(next(iter(self._scored)), None)
        return kept[1]


def _find_nothing(_: str) -> None:
    """Stand in for a search that would take too long."""


def _suite(site: Site, runs: Sequence[str]) -> SuitePage:
    rundirs = [site.rundir(run) for run in runs] if runs else [rundir for _, rundir in site.rundirs()]
    grid = suite_grid(rundirs)
    links = []
    for row in grid.rows:
        finished = [cell.run.id for cell in row.cells if cell is not None and cell.run.score is not None]
        links.append(f"/compare/{'/'.join(finished[:_MOST_RUNS])}" if len(finished) > 1 else "")
    return SuitePage(grid=grid, links=links)
