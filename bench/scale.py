"""Measure what grows with the size of a run, and print what was measured, promised and kept.

    python bench/scale.py [--quick] [--folder FOLDER]

1,000,000 single-turn trials with one grader, or 50,000 with `--quick`. The run is written by `synthetic.py`; only its
last ten outputs are asked for, from the server of `run.py`, and then those of rows that are added and changed. Last, as
many samples as `--samples` says are run from the beginning. `--folder` keeps the run there, which takes 5 GB, and uses
it again. `README.md` says how each figure is measured. The figures go to `results/` as JSON; the exit code is 1 when a
promise is not kept.
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
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.store.rundir import RunDir
from run import HOLDFAST, MISSING, Case, Figure, Server, Spent, compile_first, conclude, serving, spend
from synthetic import write_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

FULL, QUICK = 1_000_000, 50_000
SMALL = 1_000
REPEATS = 3
JOURNALS = ("outputs.jsonl", "grades.jsonl")
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
        present = next(folder.glob("runs/bench/*/manifest.json"), None)
        if present is None:
            write_run(folder, rows, report=False, judge=False, missing=MISSING)
            present = next(folder.glob("runs/bench/*/manifest.json"))
        self.run = RunDir(present.parent)
        self.sizes = {name: (self.run.path / name).stat().st_size for name in JOURNALS}
        self.command = ["eval", "bench.yaml", "--display", "none", f"target.base_url={server.url}/v1"]

    def take_away(self) -> None:
        """Unfinish the run: what was appended to its journals is cut off again, and its report is gone."""
        for name, size in self.sizes.items():
            os.truncate(self.run.path / name, size)
        for path in (self.run.metrics, self.run.results, self.run.path / "errors.jsonl"):
            path.unlink(missing_ok=True)

    def whole(self) -> Spent:
        """Run the whole command."""
        return spend(HOLDFAST, *self.command, cwd=self.folder, HOLDFAST_HOME=str(self.home))

    def change(self, edit: Callable[[list[bytes]], list[bytes]], graders: Sequence[dict[str, Any]] = ()) -> None:
        """Change the lines of the dataset, and add graders; every run but the first is removed."""
        self.restore()
        data, eval_file = self.folder / "data.jsonl", self.folder / "bench.yaml"
        (self.folder / "data.bak").write_bytes(data.read_bytes())
        (self.folder / "bench.bak").write_bytes(eval_file.read_bytes())
        data.write_bytes(b"".join(edit(data.read_bytes().splitlines(keepends=True))))
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


def opening(large: Large) -> Iterator[Figure]:
    """Measure resuming a run, and starting one that is finished."""
    rows = f"{large.rows:,} trials"
    what = f"{MISSING} of {rows} missing: start to first request"
    large.take_away()
    cold = large.first_request()
    yield Figure(f"{what}, nothing cached", cold.wall, "s", note=f"{cold.cpu:.1f} s of CPU")
    warm = []
    for _ in range(REPEATS):
        large.take_away()
        warm.append(large.first_request())
    note = f"{median(each.cpu for each in warm):.1f} s of CPU"
    yield Figure(f"{what}, index cached", median(each.wall for each in warm), "s", maximum=5.0, note=note)
    large.take_away()
    spent = large.whole()
    note = f"{spent.cpu:.0f} s of CPU, the report included"
    yield Figure(f"memory of the run, {rows}", spent.megabytes, "MB", maximum=250, note=note)
    again = [large.whole() for _ in range(REPEATS)]
    note = f"{median(each.cpu for each in again):.1f} s of CPU, {max(each.megabytes for each in again):.0f} MB"
    yield Figure(
        f"same command on the finished run, {rows}", median(each.wall for each in again), "s", maximum=2.0, note=note
    )


def reusing(large: Large) -> Iterator[Figure]:
    """Measure runs that reuse the large one: with rows added, with a row changed, with another grader."""
    rows = f"{large.rows:,} trials"
    journals = sum((large.run.path / name).stat().st_size for name in JOURNALS)
    new = [b'{"id": "n%d", "question": "new %d", "expected": "4", "level": "easy"}\n' % (n, n) for n in range(MISSING)]
    large.change(lambda lines: [*lines, *new])
    first = large.first_request()
    note = f"{first.cpu:.1f} s of CPU"
    yield Figure(f"{MISSING} rows added to {rows}: start to first request", first.wall, "s", maximum=10.0, note=note)
    note = f"{first.calls / 1e6:.0f} MB: lists of rows and finished trials"
    yield Figure("… bytes written by then, to those of the run", first.calls / journals, "", maximum=0.05, note=note)
    large.change(lambda lines: [*lines, *new])
    spent = large.whole()
    note = f"{spent.cpu:.0f} s of CPU and {spent.calls / 1e6:.0f} MB written, the report included"
    yield Figure("… memory of the run that reuses the other", spent.megabytes, "MB", maximum=250, note=note)
    large.change(lambda lines: [*lines[: len(lines) // 2], new[0], *lines[len(lines) // 2 + 1 :]])
    first = large.first_request()
    note = f"{first.cpu:.1f} s of CPU"
    yield Figure(f"a row changed of {rows}: start to first request", first.wall, "s", maximum=10.0, note=note)
    large.change(lambda lines: lines, [{"type": "text", "name": "polite", "contains": "please"}])
    spent = spend(HOLDFAST, *large.command, "--dry-run", cwd=large.folder, HOLDFAST_HOME=str(large.home))
    yield Figure(f"a grader added to {rows}: CPU of the plan", spent.cpu, "s", note=f"{spent.megabytes:.0f} MB")
    large.restore()


def running(server: Server, folder: Path, samples: int) -> Iterator[Figure]:
    """Measure CPU per sample of a large run, less that of starting, beside that of a small one."""
    cases = [Case(folder / f"run-{rows}", rows, server.url) for rows in (1, SMALL, samples)]
    alone, little = ([case.fresh().cpu for _ in range(REPEATS)] for case in cases[:2])
    much = cases[2].fresh()
    per_little = (median(little) - median(alone)) / (SMALL - 1)
    per_much = (much.cpu - median(alone)) / (samples - 1)
    note = f"{per_much * 1e6:.0f} µs of {per_little * 1e6:.0f} µs; {much.megabytes:.0f} MB"
    yield Figure(
        f"CPU per sample at {samples:,} to that at {SMALL:,}", per_much / per_little, "", maximum=1.1, note=note
    )


def sizes(large: Large) -> Iterator[Figure]:
    """Measure files."""
    journals = sum((large.run.path / name).stat().st_size for name in JOURNALS)
    yield Figure("journals", journals / 1e6, "MB")
    yield Figure("results.json", large.run.results.stat().st_size / 1e6, "MB")
    cached = sum(path.stat().st_size for path in (large.run.path / ".index").iterdir())
    note = f"{cached / large.rows:.0f} bytes for each trial"
    yield Figure("cached index to journals", cached / journals, "", note=note)
    surveys = sum(path.stat().st_size for path in large.home.glob("surveys/*"))
    yield Figure("stored survey", surveys / 1e6, "MB")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure what grows with the size of a run.")
    parser.add_argument("--quick", action="store_true", help="50,000 trials instead of 1,000,000")
    parser.add_argument("--folder", type=Path, help="where the run is, or is to be kept")
    parser.add_argument("--samples", type=int, help="samples to run from the beginning (default: all; 0: none)")
    options = parser.parse_args()
    rows = QUICK if options.quick else FULL
    samples = rows if options.samples is None else options.samples
    compile_first()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name, serving() as server:
        folder = options.folder or Path(name)
        large = Large(folder.resolve(), rows, server)
        parts = [part(large) for part in (opening, sizes, reusing)]
        if samples:
            parts.append(running(server, Path(name), samples))
        for figure in chain.from_iterable(parts):
            print(f"{os.getloadavg()[0]:5.1f}  {figure.what}: {figure.measured:.3f} {figure.unit}", flush=True)
            figures.append(figure)
        if options.folder:
            large.take_away()
    print()
    return conclude(figures, "scale", quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
