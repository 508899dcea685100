"""The runs that are shown, and how a page is answered.

A page is a struct, made in a thread, which a template shows; the same address with `.json` answers the struct itself.
No address has a path in it: runs are found by their ids, below the runs directory and among those that were named.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web

from holdfast.errors import HoldfastError, UsageError
from holdfast.pages.environment import render
from holdfast.report.run_view import RunView
from holdfast.store.catalog import find_runs
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from pathlib import Path

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

T = TypeVar("T")

RUN_ID = "{run:[0-9a-f]+}"
"""the segment of an address that names a run"""
_KEPT_RUNS = 8
"""runs that are kept open"""
_THREADS = 8


class Link(msgspec.Struct, frozen=True):
    """A link to a page."""

    href: str
    text: str


class ProblemPage(msgspec.Struct, frozen=True):
    """A page that cannot be shown, with what to do about it."""

    title: str
    error: str
    hint: str | None = None
    close: list[Link] = []
    """pages that may have been meant"""


class NotFound(UsageError):
    """An address that names nothing."""

    def __init__(self, message: str, *, remedy: str | None = None, close: Sequence[Link] = ()) -> None:
        super().__init__(message, remedy=remedy)
        self.close = list(close)


class Site:
    """Everything that pages are made from."""

    def __init__(self, runs_dir: Path, home: Path, named: Sequence[Path] = ()) -> None:
        self.runs_dir = runs_dir
        self.home = home
        """`$HOLDFAST_HOME`, where the key and caches are"""
        self._named = tuple(named)
        """run directories that were named on the command line, wherever they are"""
        self._threads = ThreadPoolExecutor(_THREADS, "page")
        self._lock = threading.Lock()
        self._open: dict[str, tuple[object, RunView]] = {}

    def rundirs(self) -> Iterator[RunDir]:
        """Yield all runs; a run that was named comes first."""
        yield from map(RunDir, self._named)
        yield from find_runs(self.runs_dir)

    def rundir(self, run: str) -> RunDir:
        """Return the run of an id."""
        for rundir in self.rundirs():
            if run_id(rundir) == run:
                return rundir
        names = {run_id(rundir): rundir for rundir in self.rundirs()}
        close = [name for name in names if name.startswith(run)] or get_close_matches(run, names)
        raise NotFound(
            f"no run {run!r}",
            remedy="The list of runs has all runs of this runs directory.",
            close=[Link(f"/run/{name}", f"{name} · {names[name].path.parent.name}") for name in close[:10]],
        )

    def run(self, run: str) -> RunView:
        """Return a run as it is on disk now; the same object for as long as its files do not change."""
        rundir = self.rundir(run)
        state = _state(rundir)
        with self._lock:
            kept = self._open.pop(run, None)
            if kept is None or kept[0] != state:
                kept = state, RunView(rundir)
            self._open[run] = kept
            if len(self._open) > _KEPT_RUNS:
                del self._open[next(iter(self._open))]
        return kept[1]

    def page(self, path: str, handler: Handler) -> list[web.RouteDef]:
        """Return the routes of a page: its address, and the same with `.json`."""
        return [web.get("/index.json" if path == "/" else f"{path}.json", handler), web.get(path, handler)]

    async def respond(self, request: web.Request, template: str, make: Callable[[], msgspec.Struct]) -> web.Response:
        """Answer with a page that is made in a thread: as HTML, or as JSON where the address ends in `.json`."""
        as_json = is_json(request)
        status, body = await self.in_thread(lambda: _answer(template, make, request, as_json=as_json))
        return web.Response(
            body=body, status=status, content_type="application/json" if as_json else "text/html", charset="utf-8"
        )

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do what reads files or computes, without holding up other pages."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Start no more work."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def run_id(rundir: RunDir) -> str:
    """Return the id of a run, as its directory is named."""
    return rundir.path.name.rpartition("-")[2]


def is_json(request: web.Request) -> bool:
    """True if a page is asked for as JSON."""
    resource = request.match_info.route.resource
    return resource is not None and resource.canonical.endswith(".json")


def _answer(
    template: str, make: Callable[[], msgspec.Struct], request: web.Request, *, as_json: bool
) -> tuple[int, bytes]:
    try:
        page, status = make(), 200
    except NotFound as error:
        page, status = ProblemPage("Not found", error.message, error.remedy, error.close), 404
    except HoldfastError as error:
        page, status = ProblemPage("This page cannot be shown", error.message, error.remedy), 500
    if as_json:
        return status, msgspec.json.encode(page)
    name = "problem.html" if isinstance(page, ProblemPage) else template
    return status, render(name, page=page, address=request.path_qs).encode("utf-8", "backslashreplace")


def _state(rundir: RunDir) -> object:
    """Return what changes whenever the files of a run do."""
    journals = [path for name in ("outputs", "grades", "errors", "steps") for path in rundir.journals(name)]
    return [_stamp(path) for path in (rundir.manifest, rundir.metrics, rundir.results, *journals)]


def _stamp(path: Path) -> Any:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
