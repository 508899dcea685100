"""Samples per second with 1, 2 and 4 workers on one run, at 50 ms latency, as ratios to one process in the same run;
and what 100,000 samples cost in a directory that four workers share, or as many as `--crews` lists.

    python bench/workers.py [--rows 4000] [--repeats 3] [--large 100000] [--crews 0 4] [--in-flight 64]

Each worker has 16 requests in flight, so that the server's latency is what limits it and not the machine's cores. They
take turns; rates are taken from the first request to the last answer, and by the whole command. In the large directory
each has as many as `--in-flight` says: 64 workers need few. `--rows 0` measures that directory alone.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from run import HOLDFAST, Case, compile_first, serving, spend

if TYPE_CHECKING:
    from collections.abc import Sequence

CONCURRENCY: Final = 16
CREWS: Final = (0, 1, 2, 4)
"""0 is the plain command"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure what workers add.")
    parser.add_argument("--rows", type=int, default=4000, help="samples at 50 ms; 0: leave that out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--large", type=int, default=100_000, help="samples of the shared directory; 0: leave that out")
    parser.add_argument("--crews", type=int, nargs="+", default=(0, 4), help="workers in it, one run for each number")
    parser.add_argument("--in-flight", type=int, default=64, help="requests of each process there")
    options = parser.parse_args()
    compile_first()
    if options.rows:
        ratios(options.rows, options.repeats)
    if options.large:
        large(options.large, options.crews, options.in_flight)


def ratios(rows: int, repeats: int) -> None:
    """Print the rates of each number of workers at 50 ms."""
    steady: dict[int, list[float]] = {count: [] for count in CREWS}
    whole: dict[int, list[float]] = {count: [] for count in CREWS}
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name, serving() as server:
        case = Case(Path(name) / "case", rows, f"{server.url}/50", limits={"concurrency": CONCURRENCY})
        for repeat in range(repeats):
            for count in CREWS if repeat % 2 == 0 else reversed(CREWS):
                command = [HOLDFAST, "eval", "bench.yaml", "--fresh", "--display", "none"]
                command += ["--workers", str(count)] if count else []
                spent, seen = server.watch(lambda words=command: spend(*words, cwd=case.folder))
                if seen["requests"] != case.rows:
                    raise SystemExit(f"{count} workers: {seen['requests']} requests for {case.rows} rows")
                steady[count].append(case.rows / (seen["last"] - seen["first"]))
                whole[count].append(case.rows / spent.wall)
    print(f"{rows:,} samples at 50 ms, {CONCURRENCY} requests in flight each, medians of {repeats}")
    print(f"{'workers':>10}  {'samples/s':>10}  {'ratio':>6}  {'whole command':>14}  {'ratio':>6}")
    for count in CREWS:
        to_one = [
            median(mine / one for mine, one in zip(rates[count], rates[0], strict=True)) for rates in (steady, whole)
        ]
        label = str(count) if count else "no workers"
        print(
            f"{label:>10}  {median(steady[count]):>10,.0f}  {to_one[0]:>6.2f}  "
            f"{median(whole[count]):>14,.0f}  {to_one[1]:>6.2f}"
        )


def large(rows: int, crews: Sequence[int], in_flight: int) -> None:
    """Many samples at no latency: what sharing them out adds to their cost. The memory is that of the largest process.

    That process is the one that writes the report, or shows the progress of all.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name, serving() as server:
        case = Case(Path(name) / "case", rows, f"{server.url}/0", limits={"concurrency": in_flight})
        heads = f"{'wall s':>8}  {'CPU ms a sample':>16}  {'CPU, ratio':>11}  {'MB':>5}  {'files':>6}"
        print(f"{rows:,} samples at 0 ms: {heads}", flush=True)
        alone = 0.0
        for count in crews:
            command = [HOLDFAST, "eval", "bench.yaml", "--fresh", "--display", "none"]
            spent, seen = server.watch(
                lambda words=[*command, *(["--workers", str(count)] if count else [])]: spend(*words, cwd=case.folder)
            )
            if seen["requests"] != rows:
                raise SystemExit(f"{count} workers: {seen['requests']} requests for {rows} rows")
            alone = alone or spent.cpu
            run = next(path.parent for path in case.folder.glob("runs/*/*/metrics.json"))
            files = sum(path.is_file() for path in run.rglob("*"))
            label = f"{count} workers" if count else "one process"
            cost = f"{spent.cpu / rows * 1000:>16.3f}  {spent.cpu / alone:>11.2f}"
            place = f"{spent.megabytes:>5.0f}  {files:>6,}"
            print(f"{label:>{len(f'{rows:,} samples at 0 ms:')}} {spent.wall:>8.1f}  {cost}  {place}", flush=True)


if __name__ == "__main__":
    main()
