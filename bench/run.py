"""Measure all promises in one command, and print what was measured, promised and kept.

    python bench/run.py [--quick]

Rates are ratios to the bare loop (`bare.py`) on the same server (`server.py`), taken in pairs one after the other
in the same run, and the median of the pairs is what counts. `README.md` says how each figure is measured. The figures
go to `results/` as JSON; the exit code is 1 when a promise is not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).resolve().parent
PYTHON = sys.executable
HOLDFAST = Path(PYTHON).with_name("holdfast")
CONCURRENCY = 64


class Sizes(NamedTuple):
    """Numbers of samples and repetitions of a measurement."""

    fast: int
    """samples of a throughput run at 0 ms"""
    slow: int
    """samples of a throughput run at 50 ms"""
    stray: int
    """samples of a run with stray refusals"""
    small: int
    large: int
    """samples of the runs whose CPU per sample is compared"""
    repeats: int
    starts: int


FULL = Sizes(fast=20_000, slow=10_000, stray=8_000, small=1_000, large=100_000, repeats=5, starts=15)
QUICK = Sizes(fast=10_000, slow=10_000, stray=4_000, small=1_000, large=20_000, repeats=3, starts=7)
MISSING = 10
"""outputs that lack when a large run goes on"""


class Spent(NamedTuple):
    """Resources that a command used."""

    spawned: float
    """when it was started, on the clock of `time.monotonic()`"""
    wall: float
    cpu: float
    """seconds of user and system time"""
    megabytes: float
    """the most memory it held"""
    storage: int
    """bytes it caused to be sent to the disk, in whole pages"""
    calls: int
    """bytes it gave to write(): files, standard output and sockets alike"""


def spend(*command: str | Path, cwd: Path, **variables: str) -> Spent:
    """Run a command to its end, with further variables in its environment."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HOLDFAST_", "OPENAI_"))}
    spawned = time.monotonic()
    process = subprocess.Popen(
        list(map(str, command)), cwd=cwd, env=kept | variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    stderr = process.stderr.read().decode()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, but its counts can still be read
    wall = time.monotonic() - spawned
    counts = dict(line.split(": ") for line in Path(f"/proc/{process.pid}/io").read_text().splitlines())
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}:\n{stderr}")
    cpu = used.ru_utime + used.ru_stime
    return Spent(spawned, wall, cpu, used.ru_maxrss / 1024, int(counts["write_bytes"]), int(counts["wchar"]))


class Server:
    """The server, and what it saw of one command."""

    def __init__(self, url: str) -> None:
        self.url = url

    def _call(self, path: str, data: bytes | None = None) -> Any:
        with urllib.request.urlopen(self.url + path, data, timeout=10) as response:
            return json.load(response)

    def watch(self, run: Callable[[], Spent]) -> tuple[Spent, dict[str, Any]]:
        """Run a command; also returns how many requests came, when the first came and the last was answered."""
        self.reset()
        spent = run()
        return spent, self.stats()

    def reset(self) -> None:
        """Forget what came so far."""
        self._call("/reset", b"")

    def stats(self) -> dict[str, Any]:
        """Return what came since the last reset."""
        return self._call("/stats")


@contextmanager
def serving() -> Iterator[Server]:
    """A server for the whole bench."""
    process = subprocess.Popen([PYTHON, HERE / "server.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield Server(process.stdout.readline().decode().split()[1])
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


class Case:
    """An eval of a given size in a folder of its own."""

    def __init__(self, folder: Path, rows: int, base_url: str, **keys: Any) -> None:
        self.folder = folder
        self.rows = rows
        self.base_url = base_url
        self.data = folder / "data.jsonl"
        folder.mkdir(parents=True)
        with self.data.open("w") as file:
            for number in range(rows):
                question = (
                    f"A shop sells {number} boxes of {number % 97 + 1} pens on each of {number % 31 + 1} days. "
                    "How many pens does it sell? Explain, then answer with a number."
                )
                row = {"id": f"s{number}", "question": question, "expected": str(number % 60)}
                file.write(json.dumps(row) + "\n")
        spec = {
            "name": "bench",
            "dataset": {"path": "data.jsonl"},
            "target": {"model": "bench", "base_url": f"{base_url}/v1"},
            "prompt": "{{ question }}",
            "graders": [{"type": "number"}],
            "limits": {"concurrency": CONCURRENCY},
            **keys,
        }
        (folder / "bench.yaml").write_text(json.dumps(spec))  # JSON is YAML

    @property
    def run(self) -> Path:
        """The run directory."""
        return next(path.parent for path in (self.folder / "runs" / "bench").glob("*/manifest.json"))

    def fresh(self) -> Spent:
        """The whole command, with no earlier run there."""
        shutil.rmtree(self.folder / "runs", ignore_errors=True)
        return self.again()

    def again(self) -> Spent:
        """The whole command."""
        return spend(HOLDFAST, "eval", "bench.yaml", "--display", "none", cwd=self.folder)

    def bare(self, loop: str) -> Spent:
        """The yardstick on the same rows."""
        return spend(PYTHON, HERE / "bare.py", self.base_url, self.data, "bare.jsonl", loop, cwd=self.folder)

    def take_away(self, count: int) -> None:
        """Unfinish the run: the outputs of its last rows are missing, and the grades on them."""
        gone = {f"s{number}".encode() for number in range(self.rows - count, self.rows)}
        for name in ("outputs.jsonl", "grades.jsonl"):
            path = self.run / name
            with path.open("rb") as lines, path.with_suffix(".new").open("wb") as kept:
                kept.writelines(line for line in lines if line.split(b'"sample":"', 1)[1].split(b'"', 1)[0] not in gone)
            path.with_suffix(".new").replace(path)
        for name in ("metrics.json", "results.json"):
            (self.run / name).unlink()

    def kept(self) -> int:
        """Bytes in the run directory."""
        return sum(path.stat().st_size for path in self.run.rglob("*") if path.is_file())


class Figure(NamedTuple):
    """One line of the table."""

    what: str
    measured: float
    unit: str
    minimum: float | None = None
    maximum: float | None = None
    note: str = ""

    @property
    def ok(self) -> bool:
        """Report whether the promise is kept; a figure without a promise is always fine."""
        low_enough = self.maximum is None or self.measured <= self.maximum
        return low_enough and (self.minimum is None or self.measured >= self.minimum)

    @property
    def promise(self) -> str:
        """The promise."""
        return (
            f"≥ {self.minimum:g}"
            if self.minimum is not None
            else f"≤ {self.maximum:g}"
            if self.maximum is not None
            else ""
        )

    @property
    def verdict(self) -> str:
        """Return the text of the table's last column."""
        return "" if not self.promise else "ok" if self.ok else "NOT"


def throughput(server: Server, folder: Path, sizes: Sizes, latency: int, minimum: float) -> Iterator[Figure]:
    """Samples per second against the bare loop, in turns."""
    case = Case(folder, sizes.slow if latency else sizes.fast, f"{server.url}/{latency}")
    runs = {"ours": case.fresh, "asyncio": lambda: case.bare("asyncio"), "uvloop": lambda: case.bare("uvloop")}
    if latency:
        del runs["uvloop"]  # where the server takes its time, both loops are the same
    whole: dict[str, list[float]] = {name: [] for name in runs}
    steady: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(sizes.repeats):
        for name in runs if repeat % 2 == 0 else reversed(runs):
            spent, seen = server.watch(runs[name])
            if seen["requests"] != case.rows:
                raise SystemExit(f"{name}: {seen['requests']} requests for {case.rows} rows")
            whole[name].append(case.rows / spent.wall)
            steady[name].append(case.rows / (seen["last"] - seen["first"]))
    at = f"at {latency} ms, {case.rows:,} samples"
    for bare in list(runs)[1:]:
        for part, rates in {"whole command": whole, "first request to last answer": steady}.items():
            ratio = median(mine / other for mine, other in zip(rates["ours"], rates[bare], strict=True))
            note = f"{median(rates['ours']):,.0f}/s of {median(rates[bare]):,.0f}/s"
            if bare == "asyncio":
                yield Figure(f"samples/s to bare, {part}, {at}", ratio, "", minimum, note=note)
            else:
                yield Figure(f"… bare loop on uvloop, {part}, {at}", ratio, "", note=note)


def stray_refusals(server: Server, folder: Path, sizes: Sizes) -> Iterator[Figure]:
    """Samples per second where 2 % of the requests are refused with 429, to those without, in turns."""
    limits = {"concurrency": 200}
    cases = [Case(folder / part, sizes.stray, f"{server.url}/{part}", limits=limits) for part in ("1000", "1000-2")]
    rates: list[list[float]] = [[], []]
    for repeat in range(1 + sizes.repeats // 2):
        for case, measured in [*zip(cases, rates, strict=True)][:: 1 if repeat % 2 == 0 else -1]:
            _, seen = server.watch(case.fresh)
            measured.append(case.rows / (seen["last"] - seen["first"]))
    ratio = median(refused / calm for calm, refused in zip(*rates, strict=True))
    note = f"{median(rates[1]):,.0f}/s of {median(rates[0]):,.0f}/s"
    what = f"samples/s with 2 % stray 429s to those without, 200 in flight at 1 s, {sizes.stray:,} samples"
    yield Figure(what, ratio, "", 0.85, note=note)


def starting(server: Server, folder: Path, sizes: Sizes) -> Iterator[Figure]:
    """Measure the time until the first request and the start of the command."""
    case = Case(folder, 100, server.url)
    first, version, python = [], [], []
    for _ in range(sizes.starts):
        spent, seen = server.watch(case.fresh)
        first.append(seen["first"] - spent.spawned)
        version.append(spend(HOLDFAST, "--version", cwd=folder).wall)
        python.append(spend(PYTHON, "-c", "pass", cwd=folder).wall)
    yield Figure("start to first request, 100 samples", median(first), "s", maximum=0.6)
    above = median(one - other for one, other in zip(version, python, strict=True))
    note = f"{median(version):.3f} s and {median(python):.3f} s"
    yield Figure("holdfast --version, above python -c pass", above, "s", maximum=0.15, note=note)


def scale(server: Server, folder: Path, sizes: Sizes) -> Iterator[Figure]:
    """Cost per sample from small to large; memory; going on with nearly everything done; bytes."""
    one, small = Case(folder / "one", 1, server.url), Case(folder / "small", sizes.small, server.url)
    large = Case(folder / "large", sizes.large, server.url)
    alone, little, much, memory = [], [], [], []
    for _ in range(max(1, sizes.repeats // 2)):
        for _ in range(5):
            alone.append(one.fresh().cpu)
            little.append(small.fresh().cpu)
        spent, seen = server.watch(large.fresh)
        much.append(spent.cpu)
        memory.append(spent.megabytes)
    start = median(alone)
    per_little = (median(little) - start) / (small.rows - 1)
    per_much = (median(much) - start) / (large.rows - 1)
    yield Figure(
        f"CPU per sample at {large.rows:,} to that at {small.rows:,}",
        per_much / per_little,
        "",
        maximum=1.2,
        note=f"{per_much * 1e6:.0f} µs and {per_little * 1e6:.0f} µs above the {start:.2f} s of one sample",
    )
    yield Figure(f"memory at {large.rows:,} samples", max(memory), "MB", maximum=300)

    yield from bytes_written(large, spent, seen["bytes"])

    first, memory = [], []
    for _ in range(sizes.repeats):
        large.take_away(MISSING)
        spent, seen = server.watch(large.again)
        if seen["requests"] != MISSING:
            raise SystemExit(f"{seen['requests']} requests where {MISSING} outputs were missing")
        first.append(seen["first"] - spent.spawned)
        memory.append(spent.megabytes)
    what = f"{large.rows:,} outputs there and {MISSING} missing"
    yield Figure(f"{what}: start to first request", median(first), "s", maximum=3.0)
    yield Figure(f"{what}: memory", max(memory), "MB", maximum=300)


def bytes_written(case: Case, spent: Spent, sent: int) -> Iterator[Figure]:
    """Count the bytes written to files: those given to write(), less those sent to the server."""
    written, kept = spent.calls - sent, case.kept()
    outputs = (case.run / "outputs.jsonl").stat().st_size
    what = f"bytes written to bytes kept, {case.rows:,} samples"
    note = f"{written / 1e6:.1f} MB of {kept / 1e6:.1f} MB"
    yield Figure(what, written / kept, "", maximum=1.5, note=note)
    note = f"{outputs / 1e6:.1f} MB; grades and results are written too"
    yield Figure("… to bytes of outputs.jsonl alone", written / outputs, "", note=note)
    note = f"{spent.storage / 1e6:.1f} MB, a page for each end of a batch"
    yield Figure("… in whole pages, as the disk sees it, to bytes kept", spent.storage / kept, "", note=note)


def slow_bytes(server: Server, folder: Path, sizes: Sizes) -> Iterator[Figure]:
    """Bytes again where answers come more slowly and batches are smaller."""
    case = Case(folder, sizes.slow, f"{server.url}/50")
    spent, seen = server.watch(case.fresh)
    for figure in bytes_written(case, spent, seen["bytes"]):
        yield figure._replace(what=f"{figure.what}, at 50 ms")


def table(figures: list[Figure]) -> str:
    """The figures as lines of text."""
    rows = [("what", "measured", "promised", "", "")]
    for figure in figures:
        number = f"{figure.measured:.3g}" if figure.measured < 100 else f"{figure.measured:.0f}"
        rows.append((figure.what, f"{number} {figure.unit}", figure.promise, figure.verdict, figure.note))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    )


def compile_first() -> None:
    """Without byte code every start would compile all it imports, and start-up would look twice as long."""
    if sys.dont_write_bytecode:
        print("PYTHONDONTWRITEBYTECODE is set: byte-compiling the environment and src/ first")
        folders = [*islice((path for path in sys.path if "site-packages" in path), 1), HERE.parent / "src"]
        subprocess.run([PYTHON, "-m", "compileall", "-q", *folders], check=False, stdout=subprocess.DEVNULL)


def conclude(figures: list[Figure], bench: str, *, quick: bool) -> int:
    """Print the table, keep the figures in a file, and return the exit code."""
    print(table(figures))
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    document = {
        "time": stamp,
        "bench": bench,
        "quick": quick,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "figures": [{**figure._asdict(), "ok": figure.ok} for figure in figures],
    }
    path = results / f"{stamp}.json"
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    print(f"\n{path.relative_to(HERE.parent)}")
    return 0 if all(figure.ok for figure in figures) else 1


def main() -> int:
    """Measure everything and say it."""
    parser = argparse.ArgumentParser(description="Measure Holdfast's promises side by side with a bare aiohttp loop.")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and smaller runs")
    quick = parser.parse_args().quick
    sizes = QUICK if quick else FULL
    compile_first()
    began = time.monotonic()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name, serving() as server:
        folder = Path(name)
        for title, part in {
            "starting": lambda: starting(server, folder / "start", sizes),
            "throughput at 0 ms": lambda: throughput(server, folder / "fast", sizes, 0, 0.8),
            "throughput at 50 ms": lambda: throughput(server, folder / "slow", sizes, 50, 0.9),
            "stray refusals": lambda: stray_refusals(server, folder / "stray", sizes),
            "bytes at 50 ms": lambda: slow_bytes(server, folder / "bytes", sizes),
            "scale": lambda: scale(server, folder / "scale", sizes),
        }.items():
            print(f"{time.monotonic() - began:6.0f} s  {title}", flush=True)
            figures += part()
    print(f"{time.monotonic() - began:6.0f} s  done\n")
    return conclude(figures, "run", quick=quick)


if __name__ == "__main__":
    sys.exit(main())
