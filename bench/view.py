"""Measure how fast a large run can be looked at, and print what was measured, promised and kept.

    python bench/view.py [--quick] [--folder FOLDER]

`--quick` takes 50,000 trials instead of 1,000,000. `--folder` measures the run that `synthetic.py` wrote there, and
only reads it; if there is none, it is written there and kept for the next time. `README.md` says how each figure is
measured. The figures go to `results/` as JSON; the exit code is 1 when a promise is not kept.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from holdfast.apps.view.columns import open_columns, read_rows
from holdfast.apps.view.query import parse_query
from holdfast.apps.view.search import TextSearch
from holdfast.apps.view.snapshot import facets, select
from holdfast.store.index_files import INDEX
from holdfast.store.rundir import RunDir
from run import HERE, HOLDFAST, PYTHON, Case, Figure, compile_first, conclude, serving
from synthetic import RARE, write_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FULL, QUICK = 1_000_000, 50_000
WINDOW = 70
"""rows that a screen shows, with some above and below"""
JUMPS = 20
COMMON = "import"
"""a word of many replies"""


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that some work takes, and its result."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of helpers that have ended. Load inflates them less than time."""
    own, helpers = os.times(), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.user + own.system + helpers.ru_utime + helpers.ru_stime


def memory(pid: int | str = "self") -> float:
    """Return the memory of a process in MB; of files that it has mapped, the part that is in its memory."""
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1]) / 1024


def bare_read(rundir: RunDir) -> tuple[float, float]:
    """Return the seconds, by the clock and of CPU, that it takes to read the lines of the run's files, and no more."""

    def read() -> None:
        for path in (rundir.results, rundir.path / "outputs.jsonl"):
            with path.open("rb", buffering=1 << 20) as file:
                for _ in file:
                    pass

    read()  # into the page cache
    spent = []
    for _ in range(3):
        began = cpu_seconds()
        spent.append((timed(read)[0], cpu_seconds() - began))
    return min(spent)


def ask_columns(rundir: RunDir) -> dict[str, Any]:
    """Measure the columns in this process, which does nothing else: by name, seconds or MB."""
    measured: dict[str, Any] = {}
    began = cpu_seconds()
    measured["first"], columns = timed(lambda: open_columns(rundir))
    measured["first_cpu"] = cpu_seconds() - began
    columns.close()
    measured["later"], columns = timed(lambda: open_columns(rundir))
    rng = random.Random(1)
    for name, query, sort in [
        ("filter", "failed", ""),
        ("filter2", "judge:failed correct:passed seconds>1", ""),
        ("field", "level=hard", ""),
        ("sort", "", "-score"),
    ]:
        measured[name], snapshot = timed(lambda query=query, sort=sort: select(columns, parse_query(query), sort))
    measured["facets"], _ = timed(lambda: facets(columns, snapshot))
    jumps = []
    for _ in range(JUMPS):
        start = rng.randrange(columns.rows - WINDOW)
        jumps.append(timed(lambda start=start: read_rows(columns, snapshot.rows[start : start + WINDOW]))[0])
    measured["jump"] = jumps
    trials = []
    for _ in range(JUMPS):
        sample = f"s{rng.randrange(columns.rows)}"
        trials.append(
            timed(lambda sample=sample: columns.view.trial(sample, 1, near=columns.find(sample, 1) / columns.rows))[0]
        )
    measured["trial"] = trials
    measured["hit"], _ = timed(lambda: next(iter(TextSearch(columns.table, COMMON))))
    began = cpu_seconds()
    measured["absent"], _ = timed(lambda: list(TextSearch(columns.table, "no such text anywhere")))
    measured["absent_cpu"] = cpu_seconds() - began
    measured["rare"], rows = timed(lambda: list(TextSearch(columns.table, RARE)))
    measured["rows"], measured["hits"] = columns.rows, len(rows)
    measured["memory"] = memory()
    return measured


def columns_figures(rundir: RunDir, home: Path) -> Iterator[Figure]:
    """Measure the columns in a process of their own."""
    bare, bare_cpu = bare_read(rundir)
    command = [PYTHON, HERE / "view.py", "--ask", rundir.path]
    variables = {**os.environ, "HOLDFAST_HOME": str(home)}
    measured = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=variables).stdout)
    rows = f"{measured['rows']:,} trials"
    yield Figure(f"bare read of results.json and outputs.jsonl, {rows}", bare, "s", note=f"{bare_cpu:.2f} s of CPU")
    note = f"{measured['first'] / bare:.1f} times the bare read"
    yield Figure(f"first opening, {rows}, {way(rundir)}: filters ready", measured["first"], "s", maximum=4.0, note=note)
    note = f"{measured['first_cpu'] / bare_cpu:.1f} times the bare read, over all processes"
    yield Figure("… CPU", measured["first_cpu"], "s", note=note)
    yield Figure("… later opening", measured["later"], "s", maximum=0.5)
    yield Figure("filter by status", measured["filter"], "s")
    yield Figure("filter by two graders and a number", measured["filter2"], "s")
    yield Figure("filter by a field under `by`", measured["field"], "s")
    yield Figure("sort all by score", measured["sort"], "s")
    yield Figure("count by status, graders, stop and error", measured["facets"], "s")
    yield Figure(f"jump: {WINDOW} rows anywhere, median of {JUMPS}", median(measured["jump"]), "s", maximum=0.1)
    yield Figure(f"one trial by its id, median of {JUMPS}", median(measured["trial"]), "s", maximum=0.1)
    yield Figure("search: first hit of a common word", measured["hit"], "s")
    note = f"{measured['absent'] / bare:.1f} times the bare read"
    yield Figure("search: a text that is nowhere", measured["absent"], "s", note=note)
    note = f"{measured['absent_cpu'] / bare_cpu:.1f} times the bare read"
    yield Figure("… CPU", measured["absent_cpu"], "s", note=note)
    yield Figure(f"search: all {measured['hits']} hits of a rare text", measured["rare"], "s")
    yield Figure("memory after all of it", measured["memory"], "MB", maximum=150)


class Viewer:
    """A running `holdfast view`, and a client that has its key."""

    def __init__(self, rundir: RunDir, home: Path) -> None:
        variables = {**os.environ, "HOLDFAST_HOME": str(home)}
        variables.pop("SSH_CONNECTION", None)
        command = [HOLDFAST, "view", rundir.path, "--no-open", "--runs-dir", rundir.path.parents[1]]
        self.process = subprocess.Popen(list(map(str, command)), env=variables, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        address = ""
        while not address.startswith("http"):
            address = self.process.stdout.readline().strip()
            if self.process.poll() is not None:
                raise SystemExit("holdfast view has ended")
        self.base = address.partition("/open")[0]
        self._client = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        key = re.search(r"key=([^&]+)", address)
        assert key is not None
        self.get(f"/open?key={key[1]}&to=/run/none.json", fails=True)  # sets the cookie, and reads no run

    def get(self, path: str, *, fails: bool = False) -> bytes:
        """Return what a page answers."""
        try:
            with self._client.open(self.base + path, timeout=120) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            if not fails:
                raise SystemExit(f"{path}: {error}\n{error.read().decode()[:2000]}") from error
            return b""

    def follow(self, path: str, timeout: float) -> Any:
        """Open a stream of events; reading it fails when nothing comes for `timeout` seconds."""
        return self._client.open(self.base + path, timeout=timeout)


@contextmanager
def viewing(rundir: RunDir, home: Path) -> Iterator[Viewer]:
    """Run `holdfast view` for a run."""
    viewer = Viewer(rundir, home)
    try:
        yield viewer
    finally:
        viewer.process.terminate()
        viewer.process.communicate()


def way(rundir: RunDir) -> str:
    """Say how a finished run is opened for the first time."""
    published = any((rundir.path / INDEX).glob("trials-*.db"))
    return "with the table of its report" if published else "that no process has indexed"


def first_look(viewer: Viewer, rundir: RunDir, maximum: float | None = None) -> Iterator[Figure]:
    """Measure what a browser waits for at a run that was never opened. `maximum` is promised for its filters."""
    run = rundir.path.name.rpartition("-")[2]
    first = max(timed(lambda: viewer.get(f"/run/{run}"))[0], timed(lambda: viewer.get(f"/run/{run}/trials"))[0])
    yield Figure(f"the first page of a run that was never opened, {way(rundir)}", first, "s", maximum=0.5)
    began = time.perf_counter()
    while json.loads(viewer.get(f"/run/{run}/trials.json"))["building"] is not None:
        time.sleep(0.05)
    yield Figure("… filters ready after that", time.perf_counter() - began, "s", maximum=maximum)


def server_figures(rundir: RunDir, home: Path) -> Iterator[Figure]:
    """Measure what a browser waits for: before the columns are there, and after."""
    run = rundir.path.name.rpartition("-")[2]
    rng = random.Random(2)
    with viewing(rundir, home) as viewer:
        yield from first_look(viewer, rundir, maximum=4.0)
        rows = json.loads(viewer.get(f"/run/{run}/trials.json?q=failed"))["selected"]
        pages = [timed(lambda: viewer.get(f"/run/{run}"))[0] for _ in range(5)]
        yield Figure("page of the run, with its numbers", median(pages), "s", maximum=0.5)
        pages = [timed(lambda: viewer.get(f"/run/{run}/trials"))[0] for _ in range(5)]
        yield Figure("page of the trials, with facets and first rows", median(pages), "s", maximum=0.5)
        jumps, trials = [], []
        for _ in range(JUMPS):
            address = f"/run/{run}/trials.json?q=failed&facets=0&count={WINDOW}&start={rng.randrange(rows)}"
            jumps.append(timed(lambda address=address: viewer.get(address))[0])
            address = f"/run/{run}/trial/s{rng.randrange(rows)}/1"
            trials.append(timed(lambda address=address: viewer.get(address))[0])
        slowest = f"the slowest of {JUMPS}: {{:.3f}} s"
        note = slowest.format(max(jumps))
        yield Figure("jump anywhere in a filter, at the server", median(jumps), "s", maximum=0.1, note=note)
        note = slowest.format(max(trials))
        yield Figure("any trial as a page, at the server", median(trials), "s", maximum=0.1, note=note)
        yield Figure("memory of the server", memory(viewer.process.pid), "MB", maximum=150)


def read_figures(rundir: RunDir, folder: Path) -> Iterator[Figure]:
    """Measure the first look at a run that no process has indexed, such as a copy without `.index/`."""
    copy = linked_copy(rundir, folder)
    began = cpu_seconds()
    os.environ["HOLDFAST_HOME"] = str(folder / "home")
    seconds, _ = timed(lambda: open_columns(copy))
    yield Figure(f"first opening, {way(copy)}: filters ready", seconds, "s", note="in the background")
    yield Figure("… CPU", cpu_seconds() - began, "s", note="over all processes")
    with viewing(copy, folder / "server-home") as viewer:
        yield from first_look(viewer, copy)


def unfinished_figures(rundir: RunDir, folder: Path) -> Iterator[Figure]:
    """Measure the first page of a run without a report, whose trials take a minute to be judged."""
    copy = linked_copy(rundir, folder).path
    RunDir(copy).reopen()
    run = copy.name.rpartition("-")[2]
    with viewing(RunDir(copy), folder / "home") as viewer:
        first = max(timed(lambda: viewer.get(f"/run/{run}"))[0], timed(lambda: viewer.get(f"/run/{run}/trials"))[0])
        yield Figure("the first page of an unfinished run that was never opened", first, "s", maximum=0.5)


def linked_copy(rundir: RunDir, folder: Path) -> RunDir:
    """Make a run that is only read appear in another folder, without its caches."""
    copy = folder / "runs" / rundir.path.parent.name / rundir.path.name
    copy.mkdir(parents=True)
    for path in rundir.path.iterdir():
        if path.is_file():
            link_or_copy(path, copy / path.name)
    return RunDir(copy)


def link_or_copy(path: Path, place: Path) -> None:
    """Make a file that is only read appear at another place, without copying it where that is possible."""
    try:
        place.hardlink_to(path)
    except OSError:
        shutil.copyfile(path, place)


def watched_figures(folder: Path, rows: int, pairs: int) -> Iterator[Figure]:
    """Run an eval with and without a viewer that follows it, in pairs, of which each begins with the other one."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    cpus: dict[bool, list[float]] = {True: [], False: []}
    with serving() as server:
        case = Case(folder / "watched", rows, f"{server.url}/50")
        case.fresh()
        rundir = RunDir(case.run)
        run = rundir.path.name.rpartition("-")[2]
        with viewing(rundir, folder / "watched-home") as viewer:
            for pair in range(pairs):
                for watch in (True, False) if pair % 2 == 0 else (False, True):
                    ended = Event()
                    watcher = Thread(target=_watch, args=(viewer, run, ended), daemon=True)
                    if watch:
                        watcher.start()
                    spent, seen = server.watch(case.fresh)
                    rates[watch].append(rows / (seen["last"] - seen["first"]))
                    cpus[watch].append(spent.cpu)
                    ended.set()
                    if watch:
                        watcher.join()
    what = f"{rows:,} samples at 50 ms, median of {pairs} pairs"
    ratio = median(other / one for one, other in zip(cpus[True], cpus[False], strict=True))
    note = f"{median(cpus[True]) / rows * 1e6:.0f} µs a sample, else {median(cpus[False]) / rows * 1e6:.0f}"
    yield Figure(f"CPU of a run that is not watched to one that is, {what}", ratio, "", note=note)
    ratio = median(one / other for one, other in zip(rates[True], rates[False], strict=True))
    note = f"{median(rates[True]):,.0f}/s of {median(rates[False]):,.0f}/s; all share this machine's cores"
    yield Figure("samples/s of a watched run to one that is not", ratio, "", minimum=0.98, note=note)


def _watch(viewer: Viewer, run: str, ended: Event) -> None:
    """Look at a run as an open page does: follow its events, and ask for its numbers and rows every few seconds."""
    while not ended.is_set():
        try:
            with viewer.follow(f"/events/run/{run}", timeout=5.0) as events:
                began = time.monotonic()
                while not ended.is_set() and events.readline():
                    if time.monotonic() - began > 5.0:
                        viewer.get(f"/run/{run}.json", fails=True)
                        viewer.get(f"/run/{run}/trials.json", fails=True)
                        began = time.monotonic()
        except (OSError, http.client.HTTPException):
            ended.wait(0.2)  # the run has not begun, or nothing has happened for a while


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure how fast a large run can be looked at.")
    parser.add_argument("--quick", action="store_true", help="50,000 trials instead of 1,000,000")
    parser.add_argument("--folder", type=Path, help="folder of the run; written if there is none, and kept")
    parser.add_argument("--ask", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        print(json.dumps(ask_columns(RunDir(options.ask))))
        return 0
    compile_first()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        folder = Path(name)
        large = options.folder or folder / "large"
        path = next((each.parent for each in large.glob("runs/bench/*-*/results.json")), None)
        rundir = RunDir(path) if path else write_run(large, QUICK if options.quick else FULL)
        for part in (
            lambda: columns_figures(rundir, folder / "home"),
            lambda: server_figures(rundir, folder / "server-home"),
            lambda: read_figures(rundir, folder / "read"),
            lambda: unfinished_figures(rundir, folder / "unfinished"),
            lambda: watched_figures(folder, 2_000 if options.quick else 5_000, 3 if options.quick else 7),
        ):
            for figure in part():
                print(f"{os.getloadavg()[0]:5.1f}  {figure.what}: {figure.measured:.3f} {figure.unit}", flush=True)
                figures.append(figure)
    print()
    return conclude(figures, "view", quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
