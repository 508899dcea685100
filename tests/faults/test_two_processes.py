"""Two processes on one run: one works, the other says who does, waits, or takes over from the dead."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.breaking import (
    assert_each_once,
    needs_root,
    nothing_left,  # noqa: F401 - a fixture
    place_of,
    whole_outputs,
)
from tests.support.running import HOLDFAST, Server, environment, holdfast, run_dir, start, wait_for, write_eval

ROWS = 30
CONCURRENCY = 4
KEYS: dict[str, Any] = {"rows": ROWS, "limits": {"concurrency": CONCURRENCY}}
HERE = os.uname().nodename
ELSEWHERE = "another-machine"


@pytest.fixture
def eval_file(tmp_path: Path, provider: Server) -> Path:
    return write_eval(tmp_path, provider.base_url, **KEYS)


def busy(provider: Server, eval_file: Path, host: str | None = None) -> subprocess.Popen[str]:
    """A process in the middle of the run, waiting for answers that do not come until the server is told to."""
    provider.control(fail={"hang": 1.0})
    process = start("eval", eval_file, cwd=eval_file.parent) if host is None else start_on(host, eval_file)
    wait_for(lambda: provider.stats()["active"] == CONCURRENCY, "a full window")
    return process


def start_on(host: str, eval_file: Path) -> subprocess.Popen[str]:
    """The command as on a machine of another name that sees the same disk."""
    return subprocess.Popen(
        ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host, *HOLDFAST, "eval", str(eval_file)],
        cwd=eval_file.parent,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str], number: signal.Signals) -> int:
    """Send a signal and wait for the end."""
    process.send_signal(number)
    process.communicate(timeout=300)
    return process.returncode


def test_a_second_process_reports_who_holds_the_run_and_exits(
    tmp_path: Path, provider: Server, eval_file: Path
) -> None:
    holder = busy(provider, eval_file)
    second = holdfast("eval", eval_file, cwd=tmp_path, check=4)
    match = re.search(r"process (\d+) on (\S+), since (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", second.stderr)
    assert match is not None, second.stderr
    assert (int(match[1]), match[2]) == (holder.pid, HERE)
    assert "--wait" in second.stderr and "HOLDFAST_LOCK_TIMEOUT" in second.stderr
    repair = holdfast("repair", run_dir(tmp_path), cwd=tmp_path, check=4)
    assert f"process {holder.pid} on {HERE}" in repair.stderr
    assert provider.requests == CONCURRENCY
    assert end(holder, signal.SIGTERM) == 143


def test_fresh_does_not_take_the_run_from_under_a_live_process(
    tmp_path: Path, provider: Server, eval_file: Path
) -> None:
    holder = busy(provider, eval_file)
    holdfast("eval", eval_file, "--fresh", cwd=tmp_path, check=4)
    assert run_dir(tmp_path).exists() and not (run_dir(tmp_path).parent / "archived").exists()
    assert end(holder, signal.SIGTERM) == 143


@pytest.mark.parametrize(("arguments", "env"), [(["--wait"], {}), ([], {"HOLDFAST_LOCK_TIMEOUT": "60"})])
def test_a_waiting_process_finds_the_run_finished(
    arguments: list[str], env: dict[str, str], tmp_path: Path, provider: Server, eval_file: Path
) -> None:
    provider.control(latency=0.05)
    first = start("eval", eval_file, cwd=tmp_path)
    wait_for(lambda: provider.requests > 0, "the first to work")
    first.send_signal(signal.SIGSTOP)  # until the second has come to wait for it
    second = start("eval", eval_file, *arguments, cwd=tmp_path, env=env)
    assert second.stderr is not None
    assert f"waiting for process {first.pid} on {HERE}" in second.stderr.readline()
    first.send_signal(signal.SIGCONT)
    first.communicate(timeout=300)
    numbers = (run_dir(tmp_path) / "metrics.json").read_bytes()
    out, err = second.communicate(timeout=300)
    assert (first.returncode, second.returncode) == (0, 0), err
    assert "already finished" in out
    assert (run_dir(tmp_path) / "metrics.json").read_bytes() == numbers
    assert provider.requests == ROWS
    assert_each_once(run_dir(tmp_path), ROWS)


def test_a_waiting_process_continues_where_the_other_stopped(tmp_path: Path, provider: Server, eval_file: Path) -> None:
    first = busy(provider, eval_file)
    second = start("eval", eval_file, "--wait", cwd=tmp_path)
    assert second.stderr is not None
    assert f"waiting for process {first.pid} on {HERE}" in second.stderr.readline()
    provider.control(fail={})
    assert end(first, signal.SIGKILL) == -signal.SIGKILL
    _, err = second.communicate(timeout=300)
    assert second.returncode == 0, err
    assert provider.requests == CONCURRENCY + ROWS
    assert_each_once(run_dir(tmp_path), ROWS)


def test_waiting_for_a_run_times_out(tmp_path: Path, provider: Server, eval_file: Path) -> None:
    holder = busy(provider, eval_file)
    holdfast("eval", eval_file, cwd=tmp_path, env={"HOLDFAST_LOCK_TIMEOUT": "0.3"}, check=4)
    wrong = holdfast("eval", eval_file, cwd=tmp_path, env={"HOLDFAST_LOCK_TIMEOUT": "soon"}, check=2)
    assert "invalid HOLDFAST_LOCK_TIMEOUT 'soon'" in wrong.stderr
    assert end(holder, signal.SIGTERM) == 143


def test_many_processes_at_once_ask_for_each_sample_once(tmp_path: Path, provider: Server, eval_file: Path) -> None:
    provider.control(latency=0.02)
    processes = [start("eval", eval_file, "--wait", cwd=tmp_path) for _ in range(5)]
    for process in processes:
        process.communicate(timeout=300)
    assert [process.returncode for process in processes] == [0] * 5
    assert provider.stats()["asked"] == {f"question {number}": 1 for number in range(ROWS)}
    assert_each_once(run_dir(tmp_path), ROWS)


def test_a_lock_left_by_a_killed_process_is_taken_over_at_once(
    tmp_path: Path, provider: Server, eval_file: Path
) -> None:
    holder = busy(provider, eval_file)
    end(holder, signal.SIGKILL)
    run = run_dir(tmp_path)
    assert run.with_name(f"{run.name}.lock").exists(), "the killed process left its lock"
    provider.control(fail={})
    taken = holdfast("eval", eval_file, cwd=tmp_path)
    assert "silent" not in taken.stderr
    assert provider.requests == ROWS + CONCURRENCY
    assert_each_once(run_dir(tmp_path), ROWS)


@pytest.mark.parametrize("content", [b"", bytes(100), b"garbage"], ids=["empty", "zeros", "garbage"])
def test_a_lock_that_lost_its_content_is_taken_over(
    content: bytes, tmp_path: Path, provider: Server, eval_file: Path
) -> None:
    """After a power cut the name of a lock may be on disk without its content."""
    run = place_of(eval_file, tmp_path)
    run.parent.mkdir(parents=True)
    run.with_name(f"{run.name}.lock").write_bytes(content)
    holdfast("eval", eval_file, cwd=tmp_path)
    assert provider.requests == ROWS
    assert_each_once(run, ROWS)


@needs_root
def test_a_live_process_on_another_machine_keeps_the_run(tmp_path: Path, provider: Server, eval_file: Path) -> None:
    holder = busy(provider, eval_file, ELSEWHERE)
    second = holdfast("eval", eval_file, cwd=tmp_path, check=4)
    assert f"process {holder.pid} on {ELSEWHERE}, since" in second.stderr
    assert provider.requests == CONCURRENCY
    assert end(holder, signal.SIGTERM) == 143


@needs_root
def test_a_frozen_process_on_another_machine_loses_the_run_and_stops_when_it_wakes(
    tmp_path: Path, provider: Server, eval_file: Path
) -> None:
    """The one slow test here: a heartbeat has to be missed for a whole lease, 30 s, before it counts as dead."""
    provider.control(latency=0.02)
    holder = start_on(ELSEWHERE, eval_file)
    wait_for(lambda: len(provider.stats()["answered"]) >= 2 * CONCURRENCY, "some answers")
    holder.send_signal(signal.SIGSTOP)
    wait_for(lambda: is_stopped(holder) and provider.stats()["active"] == 0, "it to freeze, its answers on the way")
    run = run_dir(tmp_path)
    safe, asked = len(whole_outputs(run)), provider.requests
    assert safe < ROWS
    lock = run.with_name(f"{run.name}.lock")
    assert ELSEWHERE in lock.read_text()
    os.utime(lock, (0, 0))  # an old heartbeat
    taken = holdfast("eval", eval_file, cwd=tmp_path)
    assert f"process {holder.pid} on {ELSEWHERE}" in taken.stderr and "has no heartbeat" in taken.stderr
    assert "which holds this run, has no heartbeat" in (run / "run.log").read_text()
    assert provider.requests == asked + ROWS - safe
    assert_each_once(run, ROWS)
    files = {path.name: path.read_bytes() for path in run.glob("*.json*")}
    holder.send_signal(signal.SIGCONT)
    out, err = holder.communicate(timeout=300)
    assert holder.returncode == 3 and "another process" in out + err
    # A write that was under way when the process froze ends when it wakes: a line of its own, which counts for nothing.
    later = {path.name: path.read_bytes() for path in run.glob("*.json*")}
    assert later.keys() == files.keys()
    assert all(content.startswith(files[name]) for name, content in later.items())
    assert {name: later[name] for name in files if name.endswith(".json")} == {
        name: content for name, content in files.items() if name.endswith(".json")
    }
    provider.reset()
    assert "already finished" in holdfast("eval", eval_file, cwd=tmp_path).stdout
    assert provider.requests == 0


def is_stopped(process: subprocess.Popen[str]) -> bool:
    """Report whether all threads of a process have stopped."""
    states = [
        path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{process.pid}/task").glob("*/stat")
    ]
    return set(states) == {"T"}
