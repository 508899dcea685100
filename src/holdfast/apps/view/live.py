"""Runs that are being written: their numbers so far, and a stream of events for pages that follow them.

Runs are only read. While a page is open, the run's journals are read once a second, or less often if that takes
long. The files say everything, even that the run's process is gone.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from holdfast.apps.view.site import RUN_ID
from holdfast.canonical import digest
from holdfast.display.format import dollars, duration, rate, share
from holdfast.errors import HoldfastError
from holdfast.report.stats import estimate
from holdfast.report.trial_table import STATUSES
from holdfast.store.catalog import Status, finished_status, is_running, summarize_run
from holdfast.store.lines import LineRef
from holdfast.store.shared import journal_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.apps.view.columns import Columns
    from holdfast.apps.view.site import Site
    from holdfast.report.trial_table import TrialTable
    from holdfast.store.rundir import RunDir

_PAUSE: Final = 1.0
"""seconds between two looks at a run"""
_LOAD: Final = 0.1
"""share of the time that looking may take"""
_WINDOW: Final = 60.0
"""seconds over which the rate is measured"""
_LARGE: Final = 32 << 20
"""size of outputs in bytes above which a first look estimates their number"""
_SAMPLED: Final = 1 << 18
"""bytes of each journal from which the number of its lines is estimated"""
_SILENCE: Final = 15.0
"""seconds after which a stream says that it is still there"""


class LiveNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a run so far."""

    run: str
    status: Status
    done: int
    """trials that have an output"""
    total: int
    exact: bool = True
    """False while `done` is an estimate: the journals are long, and are being read for the first time"""
    graded: int | None = None
    """trials with all their verdicts; None while the journals are read for the first time"""
    counts: dict[str, int] = {}
    """trials by status"""
    score: float | None = None
    low: float | None = None
    high: float | None = None
    errors: dict[str, int] = {}
    """trials without an output or a verdict, by the kind of their last failure"""
    tokens: int | None = None
    cost: float | None = None
    rate: float | None = None
    """outputs per second over the last minute, while the run is being written"""
    eta: float | None = None
    """seconds until all trials have an output, at this rate"""
    generation: int = 0
    """grows whenever a trial changes"""

    @property
    def settled(self) -> int:
        """Number of trials that have all their verdicts, or have failed."""
        return sum(count for status, count in self.counts.items() if status not in ("pending", "ungraded"))

    @property
    def texts(self) -> dict[str, str]:
        """The numbers as pages show them, by the name that elements have in `data-live`."""
        errors = ", ".join(f"{kind} {count:,}" for kind, count in sorted(self.errors.items()))
        return {
            "status": self.status,
            "progress": f"{'' if self.exact else 'about '}{self.done:,} of {self.total:,}",
            "graded": "" if self.graded is None else f"{self.graded:,} graded",
            "score": share(self.score),
            "interval": "" if self.low is None or self.high is None else f"{share(self.low)} – {share(self.high)}",
            "rate": rate(self.rate or 0.0),
            "eta": "" if self.eta is None else f"{duration(self.eta)} left",
            "errors": f"failed so far: {errors}" if errors else "",
            "cost": "" if self.cost is None else dollars(self.cost),
            "tokens": "" if self.tokens is None else f"{self.tokens:,} tokens",
        }


class Watch:
    """Watches one run for all pages that follow it."""

    def __init__(self, run: str, rundir: RunDir, columns: Callable[[], Columns | None]) -> None:
        self._run = run
        self._rundir = rundir
        self._columns = columns
        """returns None while the columns are built for the first time"""
        self._lock = threading.Lock()
        self._last: LiveNumbers | None = None
        self._next = 0.0
        self._reported: dict[str, Any] | None = None

    def numbers(self) -> LiveNumbers:
        """Return the current numbers, or the last ones if they are recent enough."""
        with self._lock:
            began = time.monotonic()
            if self._last is None or began >= self._next:
                self._last = self._count()
                ended = time.monotonic()
                self._next = ended + max(_PAUSE * 0.9, (ended - began) / _LOAD)
            return self._last

    def _count(self) -> LiveNumbers:
        status = _status(self._rundir)
        columns = self._columns()
        if columns is None:
            return self._first_look(status)
        if status != "finished":
            self._reported = None
        columns.refresh()
        with columns.lock:
            counted = columns.compute("counts", _count)
            numbers = LiveNumbers(run=self._run, status=status, generation=columns.generation, **counted)
            if status == "finished":
                return msgspec.structs.replace(numbers, status=finished_status(self._rundir), **self._report())
            measured = columns.compute("measures", _measure)
            pace = _pace(columns.table, time.time()) if status == "running" else None
        eta = (numbers.total - numbers.done) / pace if pace else None
        return msgspec.structs.replace(numbers, rate=pace, eta=eta, **measured)

    def _first_look(self, status: Status) -> LiveNumbers:
        """Return estimates while the journals are read for the first time."""
        if status != "finished" and (estimate := estimate_outputs(self._rundir)) is not None:
            manifest = self._rundir.read_manifest()
            total = 0 if manifest is None else manifest.dataset.count * manifest.trials
            return LiveNumbers(run=self._run, status=status, done=min(estimate, total), total=total, exact=False)
        summary = summarize_run(self._rundir)
        done, total = (summary.done, summary.total) if summary is not None else (0, 0)
        status = finished_status(self._rundir) if status == "finished" else status
        return LiveNumbers(run=self._run, status=status, done=done, total=total)

    def _report(self) -> dict[str, Any]:
        """Return the numbers of the report, which is read once."""
        if self._reported is None:
            with suppress(HoldfastError, OSError):
                metrics = self._rundir.read_metrics()
                if metrics is not None and metrics.overall is not None:
                    self._reported = {"score": metrics.score, "low": metrics.overall.low, "high": metrics.overall.high}
        return self._reported or {}


def _count(table: TrialTable) -> dict[str, Any]:
    """Return the numbers that can be counted at once, even over a million trials."""
    counts: Counter[str] = Counter()
    done = 0
    for number, count in table.count("outcome").items():
        outcome = table.outcomes[number]
        counts[STATUSES[outcome.status - 1]] += count
        done += count if outcome.has_output else 0
    return {"done": done, "total": table.rows, "graded": done - counts["ungraded"], "counts": dict(counts)}


def _measure(table: TrialTable) -> dict[str, Any]:
    """Return the numbers that are added up over all trials."""
    errors: Counter[str] = Counter()
    for number, count in table.count("outcome").items():
        errors[table.outcomes[number].error] += count
    tokens = sum(value for (value,) in table.select("tokens", "tokens IS NOT NULL"))
    cost = math.fsum(value for (value,) in table.select("cost", "cost IS NOT NULL"))
    return {
        "errors": {kind: count for kind, count in errors.items() if kind},
        "tokens": tokens or None,
        "cost": cost or None,
        **_score(table),
    }


def _score(table: TrialTable) -> dict[str, float | None]:
    """Return the score so far with its interval, computed as the report will compute it."""
    means, verdicts = [], 0
    proportion = True
    rows = table.select("sample, score", "score IS NOT NULL ORDER BY n")
    for _, group in groupby(rows, key=lambda row: row[0]):
        scores = [score for _, score in group]
        means.append(math.fsum(scores) / len(scores))
        verdicts += len(scores)
        proportion = proportion and all(score in (0.0, 1.0) for score in scores)
    if not means:
        return {"score": None, "low": None, "high": None}
    result = estimate(means, proportion=proportion, verdicts=verdicts)
    return {"score": result.mean, "low": result.low, "high": result.high}


def _pace(table: TrialTable, now: float) -> float | None:
    """Return the outputs per second over the last minute, or since the run's first output if that was later."""
    ends = [end for (end,) in table.select("started + seconds", "started + seconds > ?", (now - _WINDOW,))]
    if len(ends) < 2:
        return None
    elapsed = min(_WINDOW, max(1.0, now - min(ends)))
    return len(ends) / float(elapsed)


def estimate_outputs(rundir: RunDir) -> int | None:
    """Return about how many outputs a large run has, by the first lines of its journals; None for other runs."""
    sizes = {path: journal_size(path) for path in rundir.journals("outputs")}
    if sum(sizes.values()) < _LARGE:
        return None
    estimate = 0.0
    for path, size in sizes.items():
        if size:
            beginning = LineRef(path, 0, min(size, _SAMPLED)).read()
            estimate += beginning.count(b"\n") * size / len(beginning)
    return round(estimate)


def routes(site: Site) -> list[web.RouteDef]:
    """Return the routes of the streams."""

    def look_for(request: web.Request) -> Callable[[], Events]:
        run = request.match_info.get("run")
        return (lambda: _list_events(site)) if run is None else (lambda: _run_events([look_at(site, run)]))

    async def follow(request: web.Request) -> web.StreamResponse:
        look = look_for(request)
        await site.in_thread(look)  # a run that does not exist is an error, not a stream
        return await _stream(site, request, look)

    async def answer(request: web.Request) -> web.Response:
        """Answer with the current events, for pages that cannot receive streams."""
        events = await site.in_thread(look_for(request))
        return web.json_response(
            body=msgspec.json.encode([(name.partition(" ")[0], data) for name, data in events.items()])
        )

    addresses = (f"/events/run/{RUN_ID}", "/events/runs")
    return [
        *(web.get(f"{address}.json", answer) for address in addresses),
        *(web.get(address, follow) for address in addresses),
    ]


Events = dict[str, dict[str, Any]]
"""the current data by event and run"""


def _run_events(watched: list[LiveNumbers]) -> Events:
    events: Events = {}
    for numbers in watched:
        bar = {"done": numbers.done, "total": numbers.total}
        events[f"progress {numbers.run}"] = {"run": numbers.run, **bar, "texts": numbers.texts}
        events[f"rows {numbers.run}"] = {
            "run": numbers.run,
            "generation": numbers.generation,
            "settled": numbers.settled,
        }
        events[f"state {numbers.run}"] = {"run": numbers.run, "status": numbers.status}
    return events


def _list_events(site: Site) -> Events:
    states = run_states(site)
    events = _run_events([look_at(site, run) for run, state in states.items() if state == "running"])
    return {**events, "list": {"stamp": stamp_of(states)}}


def run_states(site: Site) -> dict[str, Status]:
    """Return the status of each run, judged only by the names of its files."""
    return {run: _status(rundir) for run, rundir in site.rundirs()}


def stamp_of(states: dict[str, Status]) -> str:
    """Return a digest that changes when runs come, go or end."""
    return digest(sorted(states.items()))


def _status(rundir: RunDir) -> Status:
    # The lease is looked at before the report: a run that has just ended counts as finished, not as abandoned.
    return "running" if is_running(rundir) else "finished" if rundir.finished else "unfinished"


def look_at(site: Site, run: str) -> LiveNumbers:
    """Return the numbers of a run so far."""
    watch: Watch | None = site.watches.get(run)
    if watch is None:
        rundir = site.rundir(run)
        watch = site.watches.setdefault(run, Watch(run, rundir, lambda: site.columns_if_ready(run)))
    return watch.numbers()


async def _stream(site: Site, request: web.Request, look: Callable[[], Events]) -> web.StreamResponse:
    """Send what has changed, once a second, until the page is closed or the server ends."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await response.prepare(request)
    if request.method == "HEAD":
        return response
    sent: Events = {}
    last = time.monotonic()
    with suppress(ConnectionResetError):
        while not site.ending.is_set():
            try:
                events = await site.in_thread(look)
            except (HoldfastError, OSError):
                events = {"state": {"status": "gone"}}  # removed, or archived by --fresh
            for name, data in events.items():
                if sent.get(name) != data:
                    text = msgspec.json.encode(data).decode()
                    await response.write(f"event: {name.partition(' ')[0]}\ndata: {text}\n\n".encode())
                    last = time.monotonic()
            sent = events
            if time.monotonic() - last > _SILENCE:
                await response.write(b": still here\n\n")
                last = time.monotonic()
            with suppress(TimeoutError):
                await asyncio.wait_for(site.ending.wait(), _PAUSE)
    return response
