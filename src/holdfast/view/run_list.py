"""`/`: the list of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.store.catalog import RunSummary, summarize_run

if TYPE_CHECKING:
    from aiohttp import web

    from holdfast.view.site import Site


class RunsPage(msgspec.Struct, frozen=True):
    """The runs that are shown, the most recently written first."""

    runs: list[RunSummary]


def routes(site: Site) -> list[web.RouteDef]:
    """Return the routes of this page."""

    async def show(request: web.Request) -> web.Response:
        return await site.respond(request, "runs.html", lambda: _list_runs(site))

    return site.page("/", show)


def _list_runs(site: Site) -> RunsPage:
    runs = [summary for _, rundir in site.rundirs() if (summary := summarize_run(rundir)) is not None]
    return RunsPage(sorted(runs, key=lambda run: (-run.written, run.name, run.id)))
