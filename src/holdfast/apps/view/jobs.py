"""`/jobs`: what this user submitted to clusters. `/jobs/INVOCATION`: one invocation, with the ends of its logs.

Clusters are asked in a thread of their own and at most every ten seconds. A page shows the last answer and its time;
if a cluster does not answer, that says nothing about its jobs.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.apps.cluster.remote.invocation import TaskFolder
from holdfast.apps.cluster.remote.registry import InvocationRegistry
from holdfast.apps.cluster.watch.find import subject_from
from holdfast.apps.cluster.watch.logs import read_end
from holdfast.apps.cluster.watch.status import Picture, look, look_at_all
from holdfast.apps.view.site import Link, NotFound
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from aiohttp import web

    from holdfast.apps.view.site import Site

_PAUSE: Final = 10.0
"""seconds between two questions to a cluster"""
_PATIENCE: Final = 0.5
"""seconds that a page waits for an answer"""
_LOG_BYTES: Final = 8_000


class LogEnd(msgspec.Struct, frozen=True):
    """The last lines of a log."""

    task: str
    file: str
    lines: list[str]


class JobsPage(msgspec.Struct, frozen=True, kw_only=True):
    """Invocations as they were when their clusters were last asked."""

    invocations: list[Picture] = []
    as_of: str | None = None
    """the time of the last answer; None while the first one is awaited"""
    asking: bool = False
    """a newer answer is awaited; ask again"""
    error: str | None = None
    """why the clusters could not be asked"""
    logs: list[LogEnd] = []
    runs: dict[str, str] = {}
    """ids of the tasks' runs that are on this machine, by their paths"""
    one: bool = False
    """the page of one invocation"""


class _Answer(msgspec.Struct, frozen=True):
    pictures: list[Picture]
    logs: list[LogEnd] = []
    error: str | None = None
    at: float = 0.0


class Board:
    """The last answer to a question, asked again in a thread when a page needs it and it is old."""

    def __init__(self, ask: Callable[[], _Answer]) -> None:
        self._ask = ask
        self._last: _Answer | None = None
        self._next = 0.0
        self._asking: Future[_Answer] | None = None

    def look(self, site: Site) -> tuple[_Answer | None, bool]:
        """Return the last answer, and True while a newer answer is awaited."""
        if self._asking is None and time.monotonic() >= self._next:
            self._asking = site.ask_cluster(self._ask)
        asking = self._asking
        if asking is not None:
            try:
                answer = asking.result(_PATIENCE)
            except TimeoutError:
                return self._last, True
            except HoldfastError as error:
                before = self._last or _Answer([])
                answer = msgspec.structs.replace(before, error=error.message)
            self._last, self._asking, self._next = answer, None, time.monotonic() + _PAUSE
        return self._last, False


def routes(site: Site) -> list[web.RouteDef]:
    """Return the routes of these pages."""
    boards: dict[str, Board] = {}
    registry = InvocationRegistry(site.home / "invocations")

    async def show_all(request: web.Request) -> web.Response:
        board = boards.setdefault("", Board(lambda: _Answer(look_at_all(registry), at=time.time())))
        return await site.respond(request, "jobs.html", lambda: _page(site, board))

    async def show(request: web.Request) -> web.Response:
        name = request.match_info["invocation"]

        def make() -> JobsPage:
            known = [invocation.id for invocation in registry.all()]
            if name not in known:
                close = [Link(f"/jobs/{each}", each) for each in known if each.startswith(name)]
                raise NotFound(
                    f"no invocation {name!r}", remedy="The list of jobs has all that are known.", close=close
                )
            return _page(site, boards.setdefault(name, Board(lambda: _look_closely(registry, name))), one=True)

        return await site.respond(request, "jobs.html", make)

    return [*site.page("/jobs", show_all), *site.page("/jobs/{invocation:[0-9a-f]+}", show)]


def _look_closely(registry: InvocationRegistry, name: str) -> _Answer:
    subject = subject_from(registry.get(name))
    picture = look(subject, registry)
    logs = []
    if not picture.unreachable:
        for number, task in enumerate(picture.tasks):
            folder = TaskFolder(subject.directory, number).logs
            file, lines = read_end(subject.transport, folder, "main-*.log", _LOG_BYTES)
            if not file:  # Python may never have started
                file, lines = read_end(subject.transport, folder, "slurm-*.log", _LOG_BYTES)
            if file:
                logs.append(LogEnd(task.id, file, lines))
    return _Answer([picture], logs, at=time.time())


def _page(site: Site, board: Board, *, one: bool = False) -> JobsPage:
    answer, asking = board.look(site)
    if answer is None:
        return JobsPage(asking=asking, one=one)
    here: dict[Path, str] = {rundir.path.resolve(): run for run, rundir in site.rundirs()}
    paths = {task.run_dir for picture in answer.pictures for task in picture.tasks if task.run_dir}
    runs = {str(path): run for path, run in here.items() if str(path) in paths}
    as_of = time.strftime("%H:%M:%S", time.localtime(answer.at)) if answer.at else None
    return JobsPage(
        invocations=answer.pictures,
        as_of=as_of,
        asking=asking,
        error=answer.error,
        logs=answer.logs,
        runs=runs,
        one=one,
    )
