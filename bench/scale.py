"""Measure what grows with the size of a run, and print what was measured, promised and kept.

    python bench/scale.py [--quick] [--folder FOLDER]

1,000,000 single-turn trials with one grader, or 50,000 with `--quick`. The run is written by `synthetic.py`; only its
last ten outputs are asked for, from the server of `run.py`. `--folder` keeps the run there, which takes 3 GB, and uses
it again. `README.md` says how each figure is measured. The figures go to `results/` as JSON; the exit code is 1 when a
promise is not kept.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from holdfast.store.rundir import RunDir
from run import HOLDFAST, MISSING, Figure, Server, Spent, compile_first, conclude, serving, spend
from synthetic import write_run

if TYPE_CHECKING:
    from collections.abc import Iterator

FULL, QUICK = 1_000_000, 50_000
REPEATS = 3
JOURNALS = ("outputs.jsonl", "grades.jsonl")
_TICKS = os.sysconf("SC_CLK_TCK")


class First(NamedTuple):
    """Time and CPU that a command used until its first request."""

    wall: float
    cpu: float


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

    def first_request(self) -> First:
        """Run the command until its first request has come, and kill it."""
        self.take_away()
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
            return First(seen["first"] - began, (int(fields[11]) + int(fields[12])) / _TICKS)
        finally:
            process.kill()
            process.communicate()


def opening(large: Large) -> Iterator[Figure]:
    """Measure resuming a run, and starting one that is finished."""
    rows = f"{large.rows:,} trials"
    what = f"{MISSING} of {rows} missing: start to first request"
    cold = large.first_request()
    yield Figure(f"{what}, nothing cached", cold.wall, "s", note=f"{cold.cpu:.1f} s of CPU")
    warm = [large.first_request() for _ in range(REPEATS)]
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
    options = parser.parse_args()
    compile_first()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name, serving() as server:
        folder = options.folder or Path(name)
        large = Large(folder.resolve(), QUICK if options.quick else FULL, server)
        for part in (opening, sizes):
            for figure in part(large):
                print(f"{os.getloadavg()[0]:5.1f}  {figure.what}: {figure.measured:.3f} {figure.unit}", flush=True)
                figures.append(figure)
        if options.folder:
            large.take_away()
    print()
    return conclude(figures, "scale", quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
