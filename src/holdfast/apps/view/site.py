"""The runs that are shown, and how a page is answered.

A page is a struct, made in a thread, which a template shows; the same address with `.json` answers the struct itself.
No address contains a path: runs are found by id, below the runs directory and among the runs named at the start.
"""

from __future__ import annotations

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from difflib import get_close_matches
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from aiohttp import web

from holdfast.apps.view.columns import Helpers, open_columns, stamp
from holdfast.errors import HoldfastError, UsageError
from holdfast.pages.environment import compile_templates, render
from holdfast.report.run_view import RunView
from holdfast.store.catalog import find_runs
from holdfast.store.metrics import GateOutcome, GraderMetrics, Metrics, Results, ValueMetrics
from holdfast.store.records import Grade, Output, Step
from holdfast.store.rundir import ARCHIVE, Manifest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from holdfast.apps.view.columns import Columns
    from holdfast.report.run_view import GradedTrial, Pending
    from holdfast.store.rundir import RunDir

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

T = TypeVar("T")

RUN = r"[0-9a-f]+(?:\.[0-9TZ-]+)?"
"""the name of a run in addresses: its id, and of an archived run also when it was archived"""
RUN_ID = f"{{run:{RUN}}}"
"""the segment of an address that names a run"""
_ARCHIVED = re.compile(r"\.[0-9]{8}T[0-9]{6}Z(-[0-9]+)?")
"""the end of an archived run's directory name"""
_KEPT_RUNS = 8
"""runs that are kept open"""
_THREADS = 8
_FIRST_TEMPLATES = (
    *("base.html", "numbers.html", "plots.html", "parts.html", "run.html", "trials.html"),
    *("conversation.html", "trial.html", "runs.html"),
)


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


class _ArchivedRunView(RunView):
    """Reads an archived run under its name in addresses: the run that replaced it has the same id."""

    def __init__(self, rundir: RunDir, name: str) -> None:
        super().__init__(rundir)
        self.manifest = msgspec.structs.replace(self.manifest, id=name)

    @cached_property
    def metrics(self) -> Metrics | None:
        """The content of `metrics.json`; None while the run is not finished."""
        metrics = self.rundir.read_metrics()
        return None if metrics is None else msgspec.structs.replace(metrics, run=self.manifest.id)


def archive_stamp(rundir: RunDir) -> str:
    """Return the end of an archived run's directory name, which says when it was archived; else an empty text."""
    stamp = _ARCHIVED.search(rundir.path.name) if rundir.path.parent.name == ARCHIVE else None
    return "" if stamp is None else stamp[0]


_READ_IN_THREADS: Final = (Manifest, Metrics, GraderMetrics, ValueMetrics, Results, GateOutcome, Output, Grade, Step)


class Site:
    """Everything that pages are made from."""

    def __init__(self, runs_dir: Path, home: Path, named: Mapping[str, RunDir] | None = None) -> None:
        self.runs_dir = runs_dir
        self.home = home
        """`$HOLDFAST_HOME`, the folder of the key and the caches"""
        # msgspec looks at a struct's fields when it is first decoded, and two threads that do so at once can crash.
        for kind in _READ_IN_THREADS:
            msgspec.json.Decoder(kind)
        self.named = dict(named or {})
        """runs that were named on the command line, wherever they are, by id"""
        self._threads = ThreadPoolExecutor(_THREADS, "page")
        self._builders = ThreadPoolExecutor(1, "columns")
        self._askers = ThreadPoolExecutor(2, "cluster")
        self._lock = threading.Lock()
        self._open: dict[str, tuple[object, RunView]] = {}
        self._columns: dict[str, Future[Columns]] = {}
        self._helpers = Helpers()
        self._decided: dict[str, threading.Event] = {}
        """by run: set when its columns are there, or will take a while"""
        self.shares_read: dict[str, float] = {}
        """share of the work that is done, from 0 to 1, by run whose columns are being built"""
        self.watches: dict[str, Any] = {}
        """the `live.Watch` of each run that somebody follows"""
        self.ending = asyncio.Event()
        """set when the server ends; streams end with it"""

    def prepare(self) -> None:
        """Begin to read what the first pages need, while they wait for other things."""
        self._threads.submit(compile_templates, _FIRST_TEMPLATES)

    def rundirs(self) -> Iterator[tuple[str, RunDir]]:
        """Yield the id and the directory of every run; runs named on the command line come first."""
        yield from self.named.items()
        for rundir in find_runs(self.runs_dir):
            run = rundir.path.name.rpartition("-")[2]
            if run not in self.named:
                yield run, rundir

    def archived(self) -> Iterator[tuple[str, RunDir]]:
        """Yield the name and the directory of every archived run that was not named."""
        for rundir in find_runs(self.runs_dir, archived=True):
            stamp = archive_stamp(rundir)
            run = rundir.path.name.removesuffix(stamp).rpartition("-")[2] + stamp
            if stamp and run not in self.named:
                yield run, rundir

    def rundir(self, run: str) -> RunDir:
        """Return the run of a name."""
        rundirs: dict[str, RunDir] = {}
        for name, rundir in chain(self.rundirs(), self.archived() if "." in run else ()):
            if name == run:
                return rundir
            rundirs[name] = rundir
        close = [name for name in rundirs if name.startswith(run)] or get_close_matches(run, rundirs)
        raise NotFound(
            f"no run {run!r}",
            remedy="The list of runs has all runs of this runs directory.",
            close=[Link(f"/run/{name}", f"{name} · {rundirs[name].path.parent.name}") for name in close[:10]],
        )

    def run(self, run: str) -> RunView:
        """Return a run as it is on disk now; the same object for as long as its files do not change."""
        rundir = self.rundir(run)
        state = _state(rundir)
        with self._lock:
            kept = self._open.pop(run, None)
            if kept is None or kept[0] != state:
                kept = state, _ArchivedRunView(rundir, run) if "." in run else RunView(rundir)
            self._open[run] = kept
            if len(self._open) > _KEPT_RUNS:
                del self._open[next(iter(self._open))]
        return kept[1]

    def columns(self, run: str, wait: float | None = None) -> Columns:
        """Return the columns of a run; raise TimeoutError as soon as it is clear that building them takes longer."""
        rundir = self.rundir(run)
        with self._lock:
            future = self._columns.pop(run, None)
            if future is None or (future.done() and future.exception() is not None):
                self._decided[run] = threading.Event()
                future = self._builders.submit(open_columns, rundir, partial(self._note_share, run), self._helpers)
                future.add_done_callback(lambda _: self._decided[run].set())
            self._columns[run], decided = future, self._decided[run]
            evicted = self._columns.pop(next(iter(self._columns))) if len(self._columns) > _KEPT_RUNS else None
        if evicted is not None:
            _close_columns(evicted)
        if wait is not None:
            decided.wait(wait)
            wait = 0.0
        return future.result(wait)

    def _note_share(self, run: str, done: float) -> None:
        self.shares_read[run] = done
        if not done:  # it will take longer than pages wait
            self._decided[run].set()

    def columns_if_ready(self, run: str) -> Columns | None:
        """Return the columns of a run; None if they are still being built, or cannot be."""
        with suppress(TimeoutError, HoldfastError):
            return self.columns(run, 0)
        return None

    def trial(self, run: str, sample: str, number: int) -> GradedTrial | Pending | None:
        """Return a trial, found by its run's columns if they are there; None if there is no such trial."""
        columns = self.columns_if_ready(run)
        row = None if columns is None else columns.find(sample, number)
        near = 0.0 if columns is None or row is None else row / columns.rows
        return self.run(run).trial(sample, number, near=near)

    def page(self, path: str, handler: Handler) -> list[web.RouteDef]:
        """Return the routes of a page: its address, and the same with `.json`."""
        return [web.get("/index.json" if path == "/" else f"{path}.json", handler), web.get(path, handler)]

    async def respond(self, request: web.Request, template: str, make: Callable[[], msgspec.Struct]) -> web.Response:
        """Answer with a page that is made in a thread: as HTML, or as JSON if the address ends in `.json`."""
        return await self.in_thread(lambda: self.answer(request, template, make()))

    def answer(self, request: web.Request, template: str, page: msgspec.Struct, status: int = 200) -> web.Response:
        """Return the answer to a request: a page as HTML or as JSON."""
        if is_json(request):
            return web.json_response(body=msgspec.json.encode(page), status=status)
        html = render(template, page=page, address=request.path_qs)
        return web.Response(
            body=html.encode("utf-8", "backslashreplace"), status=status, content_type="text/html", charset="utf-8"
        )

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run a function that reads files or computes, without holding up other pages."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def ask_cluster(self, question: Callable[[], T]) -> Future[T]:
        """Ask a cluster without holding up pages: it may take long to answer."""
        return self._askers.submit(question)

    async def end_streams(self, _: web.Application) -> None:
        """Let the streams end, for which the server would otherwise wait."""
        self.ending.set()

    def close(self) -> None:
        """Start no more work, end the helpers, and close the columns of all runs."""
        for pool in (self._threads, self._builders, self._askers):
            pool.shutdown(wait=False, cancel_futures=True)
        self._helpers.end()
        for future in self._columns.values():
            _close_columns(future)


def _close_columns(future: Future[Columns]) -> None:
    """Close the columns of a run. If they are not built yet, cancel that; if it has begun, let it finish unused."""
    if not future.cancel() and future.done() and future.exception() is None:
        future.result().close()


def problem_page(error: HoldfastError) -> tuple[ProblemPage, int]:
    """Return the page that explains an error, and its status."""
    if isinstance(error, NotFound):
        return ProblemPage("Not found", error.message, error.remedy, error.close), 404
    return ProblemPage("This page cannot be shown", error.message, error.remedy), 500


def whole_number(text: str | None) -> int | None:
    """Return the number that a part of an address stands for; None if it is not one."""
    return int(text) if text is not None and text.isdecimal() and len(text) < 10 else None


def is_json(request: web.Request) -> bool:
    """True if a page is asked for as JSON."""
    resource = request.match_info.route.resource
    return resource is not None and resource.canonical.endswith(".json")


def _state(rundir: RunDir) -> object:
    """Return a value that changes whenever the files of a run do."""
    journals = [path for name in ("outputs", "grades", "errors", "steps") for path in rundir.journals(name)]
    return [stamp(path) for path in (rundir.manifest, rundir.metrics, rundir.results, *journals)]
