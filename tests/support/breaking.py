"""Breaking a run on purpose, and judging what is left of it."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from holdfast.display.displays import Quiet
from holdfast.engine.session import Options
from holdfast.engine.worker import prepare
from holdfast.plan.identity import identify
from holdfast.spec.load import load_eval
from tests.support.forking import Forked
from tests.support.running import environment, lines, run_dir, start

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="faults at the Nth call are made by strace")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount file systems and make namespaces")


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Check that Holdfast leaves no process and no temporary file behind."""
    yield
    remaining = leftovers(tmp_path)
    for process in remaining:
        process.kill()
    assert remaining == []
    assert [path for path in tmp_path.rglob("*.tmp") if path.name.startswith(".")] == []


def leftovers(folder: Path) -> list[psutil.Process]:
    """The processes that live in a folder. Holdfast, and all that it starts in tests, do."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.cwd().startswith(str(folder)) and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return processes


def place_of(eval_file: Path, cwd: Path) -> Path:
    """Return the run directory that an eval will use."""
    return identify(load_eval(eval_file, [])).directory(cwd / "runs").path


def holdfast_with_faults(
    *arguments: str | Path,
    faults: list[str],
    cwd: Path,
    check: int | None,
    file: Path | None = None,
    largest_file: int | None = None,
) -> Any:
    """Run the command under strace, which does `faults` to its calls: to those on one file, or to all.

    A fault is strace's: `write:error=ENOSPC:when=3`, `fdatasync:signal=SIGKILL:when=2`. A signal is delivered when the
    call is entered, so that a process killed there has not made it. `largest_file` is a limit in bytes on every
    file; a write that would pass it is short, really.
    """
    process = Forked(
        [sys.executable, "-m", "tests.support.waiting", *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if largest_file is not None:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (largest_file, largest_file))
    with process, _traced(process.pid, faults, file) if faults else nullcontext():
        stdout, stderr = process.communicate(timeout=120)  # closes its input, for which it waits
    assert check in (None, process.returncode), f"exit {process.returncode}\n{stdout}\n{stderr}"
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@contextmanager
def _traced(pid: int, faults: list[str], file: Path | None) -> Iterator[None]:
    """Attach strace to a process, and wait for its end."""
    calls = ",".join(sorted({fault.partition(":")[0] for fault in faults}))
    strace = [
        *("strace", "-f", "-o", "/dev/null", "-p", str(pid), "-e", f"trace={calls}"),
        *(() if file is None else ("-P", str(file))),
        *[part for fault in faults for part in ("-e", f"inject={fault}")],
    ]
    with subprocess.Popen(strace, stderr=subprocess.PIPE, text=True) as tracer:
        line = ""
        while f"Process {pid} attached" not in line:
            line = tracer.stderr.readline()
            assert line, "strace has ended"
        yield
        tracer.stderr.read()


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of this size on a folder, for a while."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def enlarge(folder: Path, size: str) -> None:
    """Make room on a small disk."""
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)


def journal_files(run: Path, name: str) -> list[Path]:
    """The files of one journal, of every writer there was."""
    return [path for path in [run / f"{name}.jsonl", *run.glob(f"workers/*/{name}.jsonl")] if path.exists()]


def kept(run: Path, name: str = "outputs") -> list[dict[str, Any]]:
    """The records of one journal, of every writer there was."""
    return [record for path in journal_files(run, name) for record in lines(path)]


def whole_outputs(run: Path) -> set[str]:
    """The samples whose output has a whole line: what a killed process leaves may end in half of one."""
    samples = set()
    for path in journal_files(run, "outputs"):
        text = path.read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():
            samples.update(re.findall(r'^\{"key":"[^"]*","sample":"([^"]*)"', line))
    return samples


def assert_each_once(run: Path, samples: int) -> None:
    """Every sample has exactly one output and one grade."""
    for name in ("outputs", "grades"):
        counts = Counter(record["sample"] for record in kept(run, name))
        assert counts == {f"s{number}": 1 for number in range(samples)}, name


def metrics_bytes(run: Path) -> bytes:
    """`metrics.json` as it is on disk, with the one block cut out that may differ."""
    data = (run / "metrics.json").read_bytes()
    rest, count = re.subn(rb',\n  "timing": \{[^{}]*\}', b"", data)
    assert count == 1, data
    return rest


def numbers(run: Path) -> tuple[bytes, bytes]:
    """`metrics.json` without times, and `results.json`: equal for two runs of one eval."""
    return metrics_bytes(run), (run / "results.json").read_bytes()


def assert_same_numbers(run: Path, other: Path) -> None:
    """Two runs of one eval ended in the same bytes, times left out."""
    assert numbers(run) == numbers(other)


def share(eval_file: Path, workers: int = 4, **options: Any) -> Path:
    """Distribute an eval's work without starting workers; return the run directory."""
    chosen = Options(runs_dir=eval_file.parent / "runs", command="holdfast eval e.yaml", **options)
    prepare(load_eval(eval_file, []), chosen, workers, Quiet())
    return run_dir(eval_file.parent)


def worker(run: Path, name: str, **env: str) -> subprocess.Popen[str]:
    """Start a worker as a job array does."""
    return start("work", run, "--worker", name, cwd=run.parents[2], env=env)
