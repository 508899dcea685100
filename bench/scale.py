"""Measure what grows with the size of a run, and print what was measured, promised and kept.

    python bench/scale.py [--quick] [--folder FOLDER] [--only NAME …]

1,000,000 single-turn trials with one grader, or 50,000 with `--quick`. The run is written by `synthetic.py`; only its
last ten outputs are asked for, from the server of `run.py`, and then those of rows that are added and changed. Last, as
many samples as `--samples` says are run from the beginning. `--folder` keeps the run there, which takes 5 GB, and uses
it again. `--only` measures some figures; each brings the run into the state that it needs. `README.md` says how
they are measured. The figures go to `results/` as JSON; the exit code is 1 when a promise is not kept.

The most memory that the system reports of a command is at least that of the process that started it. So this process
stays small: another one writes the run, and the dataset is changed line by line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.store.rundir import RunDir
from run import HERE, HOLDFAST, MISSING, PYTHON, Case, Figure, Server, Spent, compile_first, conclude, serving, spend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

FULL, QUICK = 1_000_000, 50_000
SMALL = 1_000
REPEATS = 3
JOURNALS = ("outputs.jsonl", "grades.jsonl")
NEW = [b'{"id": "n%d", "question": "new %d", "expected": "4", "level": "easy"}\n' % (n, n) for n in range(MISSING)]
"""rows that are added"""
_TICKS = os.sysconf("SC_CLK_TCK")


class First(NamedTuple):
    """Resources that a command used until its first request."""

    wall: float
    cpu: float
    calls: int
    """bytes that it gave to write()"""


class Large:
    """A large run of which a few outputs are missing."""

    def __init__(self, folder: Path, rows: int, server: Server) -> None:
        self.folder, self.rows, self.server = folder, rows, server
        self.home = folder / "home"
        sizes = folder / "sizes.json"
        if not sizes.exists():
            script = [PYTHON, HERE / "synthetic.py", folder, "--trials", str(rows), "--missing", str(MISSING)]
            spend(*script, cwd=HERE, HOLDFAST_HOME=str(self.home))
            run = next(folder.glob("runs/bench/*/manifest.json")).parent
            sizes.write_text(json.dumps({"run": run.name, **{name: (run / name).stat().st_size for name in JOURNALS}}))
        self.sizes: dict[str, Any] = json.loads(sizes.read_bytes())
        self.run = RunDir(folder / "runs" / "bench" / self.sizes.pop("run"))
        self.command = ["eval", "bench.yaml", "--display", "none", f"target.base_url={server.url}/v1"]
        self.restore()

    @property
    def trials(self) -> str:
        """The size of the run in words."""
        return f"{self.rows:,} trials"

    @property
    def journal_bytes(self) -> int:
        """Bytes of outputs and grades."""
        return sum(self.sizes.values())

    def take_away(self) -> None:
        """Unfinish the run: what was appended to its journals is cut off again, and its report is gone."""
        for name, size in self.sizes.items():
            os.truncate(self.run.path / name, size)
        for path in (self.run.metrics, self.run.results, self.run.path / "errors.jsonl"):
            path.unlink(missing_ok=True)

    def forget_caches(self) -> None:
        """Remove the cached index and survey."""
        shutil.rmtree(self.run.path / ".index", ignore_errors=True)
        (self.home / "home.db").unlink(missing_ok=True)

    def cache(self) -> None:
        """Let a command publish the index, unless that was done."""
        if not (self.run.path / ".index" / "journals.head").exists():
            self.take_away()
            self.first_request()

    def finish(self) -> None:
        """Finish the run, unless that was done."""
        if not self.run.finished:
            self.whole()

    def whole(self, *options: str) -> Spent:
        """Run the whole command."""
        return spend(HOLDFAST, *self.command, *options, cwd=self.folder, HOLDFAST_HOME=str(self.home))

    def change(
        self, edit: Callable[[Iterable[bytes]], Iterable[bytes]], graders: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Change the lines of the dataset, and add graders; every run but the first is removed."""
        self.finish()
        self.restore()
        data, eval_file = self.folder / "data.jsonl", self.folder / "bench.yaml"
        data.replace(data.with_suffix(".bak"))
        with data.with_suffix(".bak").open("rb") as before, data.open("wb") as after:
            after.writelines(edit(before))
        (self.folder / "bench.bak").write_bytes(eval_file.read_bytes())
        spec = json.loads(eval_file.read_bytes())
        eval_file.write_text(json.dumps({**spec, "graders": [*spec["graders"], *graders]}))

    def restore(self) -> None:
        """Undo `change`."""
        for name, suffix in (("data", ".jsonl"), ("bench", ".yaml")):
            if (backup := self.folder / f"{name}.bak").exists():
                backup.replace(backup.with_suffix(suffix))
        for run in self.run.path.parent.iterdir():
            if run.is_dir() and run != self.run.path:
                shutil.rmtree(run)

    def first_request(self) -> First:
        """Run the command until its first request has come, and kill it."""
        self.server.reset()
        variables = {**os.environ, "HOLDFAST_HOME": str(self.home)}
        began = time.monotonic()
        process = subprocess.Popen(
            [HOLDFAST, *self.command], cwd=self.folder, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            while not (seen := self.server.stats())["requests"]:
                if process.poll() is not None:
                    raise SystemExit(f"ended with {process.returncode}")
                time.sleep(0.02)
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            counts = dict(line.split(": ") for line in Path(f"/proc/{process.pid}/io").read_text().splitlines())
            cpu = (int(fields[11]) + int(fields[12])) / _TICKS
            return First(seen["first"] - began, cpu, int(counts["wchar"]))
        finally:
            process.kill()
            process.communicate()


class Bench:
    """Where figures are measured."""

    def __init__(self, folder: Path, rows: int, samples: int, server: Server, temporary: Path) -> None:
        self._folder, self._rows = folder, rows
        self.samples, self.server, self.temporary = samples, server, temporary

    @cached_property
    def large(self) -> Large:
        """The large run, which is written when it is first needed."""
        return Large(self._folder.resolve(), self._rows, self.server)


def measure_cold(bench: Bench) -> Iterator[Figure]:
    """Resume the run with nothing cached."""
    large = bench.large
    large.take_away()
    large.forget_caches()
    first = large.first_request()
    what = f"{MISSING} of {large.trials} missing: start to first request, nothing cached"
    yield Figure(what, first.wall, "s", note=f"{first.cpu:.1f} s of CPU")


def measure_warm(bench: Bench) -> Iterator[Figure]:
    """Resume the run from its cached index."""
    large = bench.large
    large.cache()
    starts = []
    for _ in range(REPEATS):
        large.take_away()
        starts.append(large.first_request())
    what = f"{MISSING} of {large.trials} missing: start to first request, index cached"
    note = f"{median(each.cpu for each in starts):.1f} s of CPU"
    yield Figure(what, median(each.wall for each in starts), "s", maximum=5.0, note=note)


def measure_memory(bench: Bench) -> Iterator[Figure]:
    """Memory of the run that is resumed, with its report."""
    large = bench.large
    large.cache()
    large.take_away()
    spent = large.whole()
    note = f"{spent.cpu:.0f} s of CPU, the report included"
    yield Figure(f"memory of the run, {large.trials}", spent.megabytes, "MB", maximum=250, note=note)


def measure_again(bench: Bench) -> Iterator[Figure]:
    """Repeat the command on the finished run."""
    large = bench.large
    large.finish()
    again = [large.whole() for _ in range(REPEATS)]
    what = f"same command on the finished run, {large.trials}"
    note = f"{median(each.cpu for each in again):.1f} s of CPU, {max(each.megabytes for each in again):.0f} MB"
    yield Figure(what, median(each.wall for each in again), "s", maximum=2.0, note=note)


def measure_sizes(bench: Bench) -> Iterator[Figure]:
    """Bytes of journals, report, published index and survey."""
    large = bench.large
    large.finish()
    yield Figure("journals", large.journal_bytes / 1e6, "MB")
    yield Figure("results.json", large.run.results.stat().st_size / 1e6, "MB")
    cached = sum(path.stat().st_size for path in (large.run.path / ".index").iterdir())
    note = f"{cached / large.rows:.0f} bytes for each trial"
    yield Figure("published index to journals", cached / large.journal_bytes, "", note=note)
    yield Figure("cached survey", (large.home / "home.db").stat().st_size / 1e6, "MB")


def measure_added(bench: Bench) -> Iterator[Figure]:
    """Add ten rows: start to first request, and bytes written."""
    large = bench.large
    large.change(lambda lines: chain(lines, NEW))
    first = large.first_request()
    what, note = f"{MISSING} rows added to {large.trials}: start to first request", f"{first.cpu:.1f} s of CPU"
    yield Figure(what, first.wall, "s", maximum=10.0, note=note)
    note = f"{first.calls / 1e6:.0f} MB: lists of rows and finished trials"
    share = first.calls / large.journal_bytes
    yield Figure("… bytes written by then, to those of the run", share, "", maximum=0.05, note=note)
    large.restore()


def measure_added_memory(bench: Bench) -> Iterator[Figure]:
    """Memory of the run with ten rows added, with its report."""
    large = bench.large
    large.change(lambda lines: chain(lines, NEW))
    spent = large.whole()
    what = f"memory of the run that reuses the other, {MISSING} rows added"
    note = f"{spent.cpu:.0f} s of CPU and {spent.calls / 1e6:.0f} MB written, the report included"
    yield Figure(what, spent.megabytes, "MB", maximum=250, note=note)
    large.restore()


def measure_changed(bench: Bench) -> Iterator[Figure]:
    """Change a row: start to first request."""
    large = bench.large
    middle = large.rows // 2
    large.change(lambda lines: chain(islice(lines, middle), NEW[:1], islice(lines, 1, None)))
    first = large.first_request()
    what, note = f"a row changed of {large.trials}: start to first request", f"{first.cpu:.1f} s of CPU"
    yield Figure(what, first.wall, "s", maximum=10.0, note=note)
    large.restore()


def measure_grader(bench: Bench) -> Iterator[Figure]:
    """Add a grader for all rows, and one with `where`: CPU of the plan."""
    large = bench.large
    grader = {"type": "text", "name": "polite", "contains": "please"}
    for what, block in (("", grader), (" with `where`", {**grader, "where": "level == 'easy'"})):
        large.change(lambda lines: lines, [block])
        spent = large.whole("--dry-run")
        note = f"{spent.megabytes:.0f} MB"
        yield Figure(f"a grader{what} added to {large.trials}: CPU of the plan", spent.cpu, "s", note=note)
    large.restore()


def measure_cpu(bench: Bench) -> Iterator[Figure]:
    """CPU per sample of a run from the beginning, less that of starting, beside that of a small one; and its memory."""
    samples = bench.samples
    if not samples:
        return
    one, few, many = (Case(bench.temporary / f"run-{rows}", rows, bench.server.url) for rows in (1, SMALL, samples))

    def measure_pairs() -> list[tuple[float, float]]:
        return [(one.fresh().cpu, few.fresh().cpu) for _ in range(REPEATS)]

    pairs = measure_pairs()
    much = many.fresh()
    pairs += measure_pairs()  # before and after: the machine may have become faster or slower
    per_little = median(little - alone for alone, little in pairs) / (SMALL - 1)
    per_much = (much.cpu - median(alone for alone, _ in pairs)) / (samples - 1)
    what = f"CPU per sample at {samples:,} to that at {SMALL:,}"
    note = f"{per_much * 1e6:.0f} µs of {per_little * 1e6:.0f} µs"
    yield Figure(what, per_much / per_little, "", maximum=1.1, note=note)
    yield Figure("… memory of that run", much.megabytes, "MB", maximum=250)


MEASURES: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "cold": measure_cold,
    "warm": measure_warm,
    "memory": measure_memory,
    "again": measure_again,
    "sizes": measure_sizes,
    "added": measure_added,
    "added-memory": measure_added_memory,
    "changed": measure_changed,
    "grader": measure_grader,
    "cpu": measure_cpu,
}


def main() -> int:
    """Measure and print."""
    names = "\n".join(f"  {name:14}{measure.__doc__}" for name, measure in MEASURES.items())
    parser = argparse.ArgumentParser(
        description="Measure what grows with the size of a run.",
        epilog=f"names:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="50,000 trials instead of 1,000,000")
    parser.add_argument("--folder", type=Path, help="where the run is, or is to be kept")
    parser.add_argument("--samples", type=int, help="samples to run from the beginning (default: all; 0: none)")
    parser.add_argument("--only", nargs="+", choices=MEASURES, metavar="NAME", help="measure only these, in this order")
    options = parser.parse_args()
    rows = QUICK if options.quick else FULL
    samples = rows if options.samples is None else options.samples
    compile_first()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name, serving() as server:
        temporary = Path(name)
        bench = Bench(options.folder or temporary / "large", rows, samples, server, temporary)
        for figure in chain.from_iterable(MEASURES[each](bench) for each in options.only or MEASURES):
            print(f"{os.getloadavg()[0]:5.1f}  {figure.what}: {figure.measured:.3f} {figure.unit}", flush=True)
            figures.append(figure)
    print()
    return conclude(figures, "scale", quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
