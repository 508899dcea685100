"""Requests per second and CPU per request of a likelihood benchmark, as ratios to lm-eval's `local-completions` on the
same server; the start of full MMLU with compiled rows; and the time that compiling takes.

    python bench/benchmarks.py [--quick]

Both ask the same questions with 64 requests in flight, send token ids and take these from the server's `/tokenize`.
They take turns, and the median of the ratios of neighbours counts. Their accuracies have to be equal. All data is made
here, in the layout of the hub. Needs the extra `lm-eval`. `README.md` says how each figure is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from run import CONCURRENCY, HERE, HOLDFAST, Case, Figure, Server, Spent, compile_first, conclude, serving, spend

sys.path.insert(0, str(HERE.parent))
from tests.support import hub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

CHOICES: Final = 4
MMLU_ROWS: Final = 14_042
HELLASWAG_ROWS: Final = 10_042
"""rows of the originals' test and validation splits"""


class Sizes(NamedTuple):
    """Numbers of documents and repetitions."""

    documents: dict[int, int]
    """of a throughput run, by the number of examples in the prompt"""
    repeats: int
    starts: int
    compiles: int


FULL = Sizes({0: 1000, 10: 500}, repeats=5, starts=9, compiles=3)
QUICK = Sizes({0: 300, 10: 150}, repeats=3, starts=5, compiles=1)


def hellaswag(number: int) -> dict[str, Any]:
    """Return a row as long as those of the original usually are."""
    row = hub.hellaswag(number)
    middle = f" Then she looks at it for {number} seconds, turns around and calls for somebody who could help her."
    endings = [f"{ending[:-1]} and walks back to the others, who wait." for ending in row["endings"]]
    return {**row, "ctx_a": row["ctx_a"] + middle, "endings": endings}


def mmlu(subject: str, number: int) -> dict[str, Any]:
    """Return a row as long as those of the original usually are."""
    row = hub.mmlu(subject, number)
    story = f"Somebody has kept {number} of them for years and asks those who know about it. Which answer is right?"
    return {**row, "question": f"{row['question']}{story}"}


def write_data(folder: Path) -> None:
    """Write both datasets at their full sizes."""
    splits = {
        "train": [hellaswag(HELLASWAG_ROWS + number) for number in range(1000)],
        "validation": [hellaswag(number) for number in range(HELLASWAG_ROWS)],
    }
    hub.write_dataset(folder / "Rowan/hellaswag", {"default": splits})
    share, rest = divmod(MMLU_ROWS, len(hub.SUBJECTS))
    subjects = {
        subject: {
            "dev": [mmlu(subject, number) for number in range(5)],
            "test": [mmlu(subject, number) for number in range(5, 5 + share + (place < rest))],
        }
        for place, subject in enumerate(hub.SUBJECTS)
    }
    hub.write_dataset(folder / "cais/mmlu", subjects)


class Start(NamedTuple):
    """Seconds from the start of a command."""

    opened: float
    """to the first request of any kind, which belongs to the probe"""
    first: float
    """to the first request of a row"""
    cpu: float
    """of user and system time by then"""


class Benchmark:
    """A benchmark with a number of examples, run by Holdfast and by lm-eval."""

    def __init__(self, folder: Path, server: Server, name: str, task: str, shots: int) -> None:
        self.folder = folder
        self.data = folder / "hub"
        self.url = server.url
        self.task = task
        self.shots = shots
        self.file = folder / f"{task}-{shots}.yaml"
        block = {"name": name, "num_fewshot": shots, "data": str(self.data)}
        target = {"model": "bench", "base_url": f"{server.url}/v1"}
        spec = {"benchmark": block, "target": target, "limits": {"concurrency": CONCURRENCY}}
        self.file.write_text(json.dumps(spec))  # JSON is YAML

    @property
    def variables(self) -> dict[str, str]:
        """Environment of both: nothing is read or kept outside the folder."""
        return {
            "HOLDFAST_HOME": str(self.folder / "home"),
            "HF_HOME": str(self.folder / "huggingface"),
            "HF_HUB_OFFLINE": "1",
            "TQDM_DISABLE": "1",
        }

    def command(self, *options: str) -> list[str]:
        """Return the command that runs the benchmark with Holdfast."""
        return [str(HOLDFAST), "eval", self.file.name, "--display", "none", *options]

    def ours(self, limit: int) -> Spent:
        """Run the whole command, with no earlier run there and with rows compiled."""
        shutil.rmtree(self.folder / "runs", ignore_errors=True)
        return spend(*self.command("--limit", str(limit)), cwd=self.folder, **self.variables)

    def theirs(self, limit: int) -> Spent:
        """Run lm-eval on the same documents."""
        shutil.rmtree(self.folder / "results", ignore_errors=True)
        options = {
            "model": "bench",
            "base_url": f"{self.url}/v1/completions",
            "tokenizer_backend": "remote",
            "tokenized_requests": True,
            "num_concurrent": CONCURRENCY,
            "max_length": 100_000,
        }
        return spend(
            *(HOLDFAST.with_name("lm_eval"), "run", "--model", "local-completions"),
            *("--model_args", ",".join(f"{key}={value}" for key, value in options.items())),
            *("--tasks", self.task, "--num_fewshot", str(self.shots), "--limit", str(limit), "--batch_size", "1"),
            *("--output_path", self.folder / "results"),
            cwd=self.data,  # where lm-eval finds datasets by their names on the hub
            **self.variables,
        )

    def prepare(self) -> list[Figure]:
        """Compile the rows, and let lm-eval fill its caches."""
        self.ours(1)
        self.theirs(1)
        return []

    def accuracies(self) -> list[dict[str, float]]:
        """Return the numbers of both."""
        own = next((self.folder / "runs").glob("*/*/metrics.json"))
        other = next((self.folder / "results").rglob("results_*.json"))
        found = [
            json.loads(own.read_text())["benchmark"]["results"][self.task],
            json.loads(other.read_text())["results"][self.task],
        ]
        return [{key: each[key] for key in ("acc,none", "acc_norm,none")} for each in found]

    def start(self, server: Server) -> Start:
        """Start the whole benchmark, and end it when its first row is asked for."""
        shutil.rmtree(self.folder / "runs", ignore_errors=True)
        server.reset()
        spawned = time.monotonic()
        process = subprocess.Popen(
            self.command(),
            cwd=self.folder,
            env=os.environ | self.variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while (seen := server.stats())["first"] is None:
                if process.poll() is not None:
                    raise SystemExit(f"{self.file.name} ended with {process.returncode} before its first request")
                time.sleep(0.01)
            ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        finally:
            process.kill()
            process.wait()
        cpu = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        return Start(seen["opened"] - spawned, seen["first"] - spawned, cpu)


def compiling(benchmark: Benchmark, name: str, rows: int, repeats: int) -> Iterator[Figure]:
    """Measure what preparing a benchmark takes; its rows are there afterwards."""
    walls, cpus, sizes = [], [], []
    for _ in range(repeats):
        for folder in ("home", "huggingface"):
            shutil.rmtree(benchmark.folder / folder, ignore_errors=True)
        command = [HOLDFAST, "tasks", "fetch", name, "--data", benchmark.data]
        spent = spend(*command, cwd=benchmark.folder, **benchmark.variables)
        walls.append(spent.wall)
        cpus.append(spent.cpu)
        sizes.append(sum(path.stat().st_size for path in (benchmark.folder / "home").rglob("*.zst")))
    note = f"{median(cpus):.1f} s of CPU in the command itself, {sizes[-1] / 1e6:.1f} MB of rows"
    yield Figure(f"compiling {name}, {rows:,} documents", median(walls), "s", note=note)


def starting(benchmark: Benchmark, server: Server, repeats: int) -> Iterator[Figure]:
    """Measure the time until the first row is asked for, with rows compiled, and beside it that of a small eval."""
    small = Case(benchmark.folder / "small", 100, server.url)
    starts, others = [], []
    for _ in range(repeats):
        starts.append(benchmark.start(server))
        spent, seen = server.watch(small.fresh)
        others.append(seen["first"] - spent.spawned)
    first = median(start.first for start in starts)
    what = f"start to first row's request, {benchmark.task} compiled, {MMLU_ROWS:,} rows"
    note = f"the probe's after {median(start.opened for start in starts):.2f} s"
    yield Figure(what, first, "s", maximum=1.0, note=note)
    yield Figure("… CPU until then", median(start.cpu for start in starts), "s")
    ratio = median(start.first / other for start, other in zip(starts, others, strict=True))
    yield Figure("… to the start of a plain eval of 100 samples", ratio, "", note=f"{median(others):.2f} s")


def throughput(benchmark: Benchmark, server: Server, documents: int, repeats: int) -> Iterator[Figure]:
    """Compare requests per second and CPU per request, in turns."""
    runs: dict[str, Callable[[int], Spent]] = {"ours": benchmark.ours, "theirs": benchmark.theirs}
    fixed = {name: [] for name in runs}
    kinds = ("whole command", "first request to last answer", "first scoring request to last answer", "CPU")
    figures: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in runs} for kind in kinds}
    requests = documents * CHOICES
    for repeat in range(repeats):
        for name in runs if repeat % 2 == 0 else reversed(runs):
            if repeat % 2 == 0:
                fixed[name].append(runs[name](1).cpu)
            spent, seen = server.watch(lambda run=runs[name]: run(documents))
            if seen["requests"] != requests:
                raise SystemExit(f"{name}: {seen['requests']} requests for {requests} continuations")
            rates = (spent.wall, seen["last"] - seen["opened"], seen["last"] - seen["first"], spent.cpu)
            for kind, seconds in zip(kinds, rates, strict=True):
                figures[kind][name].append(seconds)
        own, other = benchmark.accuracies()
        if own != other:
            raise SystemExit(f"the accuracies differ: {own} and {other}")
    at = f"{benchmark.task} {benchmark.shots}-shot, {requests:,} requests"
    for kind in kinds[:3]:
        ours, theirs = figures[kind]["ours"], figures[kind]["theirs"]
        ratio = median(other / mine for mine, other in zip(ours, theirs, strict=True))
        note = f"{requests / median(ours):,.0f}/s and {requests / median(theirs):,.0f}/s"
        minimum = None if "scoring" in kind else 1.0  # without lm-eval's requests for token ids, but with ours
        yield Figure(f"requests/s to lm-eval, {kind}, {at}", ratio, "", minimum, note=note)
    start = {name: median(cpus) for name, cpus in fixed.items()}
    per_request = {name: [(cpu - start[name]) / (requests - CHOICES) for cpu in figures["CPU"][name]] for name in runs}
    ratio = median(mine / other for mine, other in zip(*per_request.values(), strict=True))
    note = " and ".join(f"{median(values) * 1e6:,.0f} µs" for values in per_request.values())
    yield Figure(f"CPU per request to lm-eval, {at}", ratio, "", maximum=1.0, note=note)


class _Asking(asyncio.Protocol):
    """Sends the same bytes whenever a whole reply has come."""

    def __init__(self, request: bytes, done: Callable[[], None]) -> None:
        self._request = request
        self._done = done
        self._missing = 0

    def connection_made(self, transport: Any) -> None:
        self._write = transport.write
        self._write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._missing <= 0:
            end = data.index(b"\r\n\r\n") + 4
            head = data[:end]
            self._missing = end + int(head[head.index(b"Length:") + 7 :].split(b"\r", 1)[0])
        self._missing -= len(data)
        if self._missing <= 0:
            self._done()
            self._write(self._request)


async def _count_answers(url: str, tokens: int, seconds: float) -> float:
    """Return how many likelihoods of a prompt of so many tokens the server gives in a second."""
    place = urlsplit(url)
    body = json.dumps({"model": "bench", "prompt": [1] * tokens, "max_tokens": 1, "logprobs": 1, "echo": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    answers = 0

    def count() -> None:
        nonlocal answers
        answers += 1

    loop = asyncio.get_running_loop()
    opened = [
        await loop.create_connection(lambda: _Asking(head + body, count), place.hostname, place.port)
        for _ in range(CONCURRENCY)
    ]
    before, began = answers, time.monotonic()
    await asyncio.sleep(seconds)
    rate = (answers - before) / (time.monotonic() - began)
    for transport, _ in opened:
        transport.abort()
    return rate


def ceiling(server: Server) -> Iterator[Figure]:
    """Measure how much the server could answer, with a client that does not read what it gets."""
    import uvloop

    for tokens in (150, 1500):
        rates = [uvloop.run(_count_answers(server.url, tokens, 2)) for _ in range(3)]
        yield Figure(f"the server's ceiling, prompts of {tokens:,} tokens", median(rates), "/s")


def main() -> int:
    """Measure everything and print the table."""
    parser = argparse.ArgumentParser(description="Measure likelihood benchmarks side by side with lm-eval.")
    parser.add_argument("--quick", action="store_true", help="Run fewer and smaller repeats.")
    quick = parser.parse_args().quick
    sizes = QUICK if quick else FULL
    compile_first()
    began = time.monotonic()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name, serving() as server:
        folder = Path(name)
        write_data(folder / "hub")
        big = Benchmark(folder, server, "mmlu_logits", "mmlu", 5)
        parts: dict[str, Callable[[], Iterable[Figure]]] = {
            "the server's ceiling": lambda: ceiling(server),
            "compiling hellaswag": lambda: compiling(big, "hellaswag", HELLASWAG_ROWS, sizes.compiles),
            "compiling MMLU": lambda: compiling(big, "mmlu_logits", MMLU_ROWS, sizes.compiles),
            "starting MMLU": lambda: starting(big, server, sizes.starts),
        }
        for shots, documents in sizes.documents.items():
            small = Benchmark(folder, server, "hellaswag", "hellaswag", shots)
            parts[f"preparing hellaswag, {shots} examples"] = small.prepare
            parts[f"hellaswag, {shots} examples"] = lambda small=small, documents=documents: throughput(
                small, server, documents, sizes.repeats
            )
        for title, part in parts.items():
            print(f"{time.monotonic() - began:6.0f} s  {title}", flush=True)
            figures += part()
    print(f"{time.monotonic() - began:6.0f} s  done\n")
    return conclude(figures, "benchmarks", quick=quick)


if __name__ == "__main__":
    sys.exit(main())
