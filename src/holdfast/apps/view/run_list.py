"""`/`: the runs, by eval. `/compare?run=…&run=…`: redirects to the comparison of the ticked runs."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from holdfast.apps.view.live import LiveNumbers, look_at, run_states, stamp_of
from holdfast.apps.view.site import NotFound
from holdfast.store.catalog import RunSummary, list_runs, summarize_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.apps.view.site import Site

_WIDTH, _HEIGHT = 120.0, 24.0
"""of the plot of an eval's scores"""


class ListedRun(msgspec.Struct, frozen=True):
    """A run in the list."""

    run: RunSummary
    age: str
    """time since the last write"""
    live: LiveNumbers | None = None
    """of a run that is being written"""


class TrendPoint(msgspec.Struct, frozen=True):
    """A score in the plot of an eval's scores over time."""

    run: str
    target: str
    score: float
    x: float
    y: float


class EvalGroup(msgspec.Struct, frozen=True):
    """The runs of an eval, the most recently written first."""

    name: str
    runs: list[ListedRun]
    trend: list[TrendPoint]
    """scores of its finished runs, the oldest first; empty if there are fewer than two"""


class ArchivedRun(msgspec.Struct, frozen=True):
    """A run that `--fresh` archived."""

    name: str
    """in addresses"""
    archived: str
    """when, in UTC"""
    run: RunSummary


class RunsPage(msgspec.Struct, frozen=True):
    """The runs that are shown, by eval."""

    filter: str
    total: int
    """number of all runs"""
    selected: int
    """number of runs that the filter selects"""
    evals: list[EvalGroup]
    folder: str
    """the runs directory"""
    running: bool
    """some of the runs are being written"""
    stamp: str
    """changes when runs come, go or end"""
    archived: list[ArchivedRun]
    """runs that `--fresh` archived and the filter selects, the latest first"""


def routes(site: Site) -> list[web.RouteDef]:
    """Return the routes of this page."""

    async def show(request: web.Request) -> web.Response:
        words = request.query.get("q", "")
        return await site.respond(request, "runs.html", lambda: list_page(site, words))

    async def compare(request: web.Request) -> web.Response:
        runs = request.query.getall("run", [])
        if len(set(runs)) > 1:
            await site.in_thread(lambda: [site.rundir(run) for run in runs])
            raise web.HTTPSeeOther("/compare/" + "/".join(dict.fromkeys(runs)))

        def explain() -> msgspec.Struct:
            raise NotFound("A comparison needs two runs or more.", remedy="Tick them in the list of runs.")

        return await site.respond(request, "problem.html", explain)

    return [*site.page("/", show), web.get("/compare", compare)]


def list_page(site: Site, words: str) -> RunsPage:
    """Return the runs whose eval, target, dataset, status or id contain all words."""
    everything = summaries(site)
    runs = [run for run in everything if _matches(run, words.casefold().split())]
    written = {name: max(run.written for run in group) for name, group in _by_eval(runs)}
    groups = [
        EvalGroup(
            name,
            [ListedRun(run, run.age, look_at(site, run.id) if run.status == "running" else None) for run in group],
            _trend(group),
        )
        for name, group in sorted(_by_eval(runs), key=lambda pair: (-written[pair[0]], pair[0]))
    ]
    return RunsPage(
        words,
        len(everything),
        len(runs),
        groups,
        str(site.runs_dir),
        any(run.status == "running" for run in runs),
        stamp_of(run_states(site)),
        [run for run in _archived(site) if _matches(run.run, words.casefold().split())],
    )


def _archived(site: Site) -> list[ArchivedRun]:
    runs = []
    for name, rundir in site.archived():
        if (summary := summarize_run(rundir)) is not None:
            time = datetime.strptime(name.partition(".")[2][:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
            runs.append(ArchivedRun(name, f"{time:%Y-%m-%d %H:%M}", summary))
    return sorted(runs, key=lambda run: run.name.partition(".")[2], reverse=True)


def summaries(site: Site) -> list[RunSummary]:
    """Summarize all runs, the most recently written first."""
    runs = [run for run in list_runs(site.runs_dir) if run.id not in site.named]
    for name, rundir in site.named.items():
        if (summary := summarize_run(rundir)) is not None:
            runs.append(msgspec.structs.replace(summary, id=name))  # an archived run has another name here
    return sorted(runs, key=lambda run: (-run.written, run.name, run.id))


def _by_eval(runs: Sequence[RunSummary]) -> list[tuple[str, list[RunSummary]]]:
    ordered = sorted(runs, key=lambda run: (run.name, -run.written))
    return [(name, list(group)) for name, group in groupby(ordered, key=lambda run: run.name)]


def _matches(run: RunSummary, words: list[str]) -> bool:
    text = " ".join((run.name, run.target, run.dataset, run.status, run.id)).casefold()
    return all(word in text for word in words)


def _trend(runs: list[RunSummary]) -> list[TrendPoint]:
    scored = sorted(
        (run for run in runs if run.score is not None and run.created), key=lambda run: (run.created, run.written)
    )
    if len(scored) < 2:
        return []
    margin, step = 3.0, (_WIDTH - 6.0) / (len(scored) - 1)
    return [
        TrendPoint(
            run.id,
            run.target,
            run.score,
            round(margin + number * step, 1),
            round(_HEIGHT - margin - (_HEIGHT - 2 * margin) * min(1.0, max(0.0, run.score)), 1),
        )
        for number, run in enumerate(scored)
        if run.score is not None
    ]
