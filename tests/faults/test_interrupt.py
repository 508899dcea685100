"""Told to stop, a run stops: at once, with everything that finished on disk and the command that goes on."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.support.breaking import (
    assert_each_once,
    assert_same_numbers,
    kept,
    leftovers,
    nothing_left,  # noqa: F401 - a fixture
)
from tests.support.running import PATIENCE, Server, holdfast, run_dir, server, start, wait_for, write_eval

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

ROWS = 60
CONCURRENCY = 8
KEYS: dict[str, Any] = {"rows": ROWS, "limits": {"concurrency": CONCURRENCY}}


def ends(process: subprocess.Popen[str], *signals: signal.Signals) -> tuple[int, str, str]:
    """Send the signals and wait for the end; a process that does not end is a failure, not a hang."""
    for number in signals:
        process.send_signal(number)
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_run_and_prints_the_command_to_resume(
    number: signal.Signals, code: int, tmp_path: Path, provider: Server, calm: Path
) -> None:
    provider.control(latency=0.02)
    eval_file = write_eval(tmp_path, provider.base_url, **KEYS)
    process = start("eval", eval_file, "limits.retries=3", cwd=tmp_path)
    wait_for(lambda: len(provider.stats()["answered"]) >= 10, "some answers")
    ended, out, _ = ends(process, number)
    assert ended == code
    assert "interrupted; everything that finished is on disk" in out
    assert f"holdfast eval {eval_file} limits.retries=3" in out
    run = run_dir(tmp_path)
    there, asked = len(kept(run)), provider.requests
    assert 10 - CONCURRENCY <= there < ROWS, "what was answered may have been on its way"
    assert asked - there <= CONCURRENCY
    assert kept(run, "errors") == [], "what was cancelled leaves no record"

    holdfast("eval", eval_file, cwd=tmp_path)
    assert provider.requests == asked + ROWS - there
    assert_each_once(run, ROWS)
    assert_same_numbers(run, calm)


def test_a_signal_cancels_requests_that_hang(tmp_path: Path, provider: Server) -> None:
    provider.control(fail={"hang": 1.0})
    process = start("eval", write_eval(tmp_path, provider.base_url, **KEYS), cwd=tmp_path)
    wait_for(lambda: provider.stats()["active"] == CONCURRENCY, "a full window")
    assert ends(process, signal.SIGINT)[0] == 130
    wait_for(lambda: provider.stats()["active"] == 0, "the requests to be dropped")
    assert provider.requests == CONCURRENCY
    assert kept(run_dir(tmp_path), "errors") == []


def test_a_signal_ends_waiting_for_a_retry(tmp_path: Path, provider: Server) -> None:
    provider.control(fail={"429": 1.0}, retry_after=100)
    process = start("eval", write_eval(tmp_path, provider.base_url, **KEYS), cwd=tmp_path)
    wait_for(lambda: provider.requests == CONCURRENCY, "a full window")
    wait_for(lambda: len(kept(run_dir(tmp_path), "errors")) == CONCURRENCY, "all of it to be put off")
    code, out, _ = ends(process, signal.SIGINT)
    assert code == 130
    assert f"0 of {ROWS} trials have an output" in out
    assert provider.requests == CONCURRENCY


def test_a_signal_cancels_a_judge_that_hangs(tmp_path: Path, provider: Server) -> None:
    with server(fail={"hang": 1.0}) as judge:
        judged = {"type": "prompt", "rubric": "Good?", "model": "judge", "base_url": judge.base_url}
        eval_file = write_eval(tmp_path, provider.base_url, **KEYS, graders=[judged])
        process = start("eval", eval_file, cwd=tmp_path)
        wait_for(lambda: judge.stats()["active"] == CONCURRENCY, "the judge to be asked")
        assert ends(process, signal.SIGINT)[0] == 130
        there = len(kept(run_dir(tmp_path)))
        assert there > 0 and kept(run_dir(tmp_path), "grades") == []
        asked = provider.requests
        judge.control(fail={}, answer="judge")
        holdfast("eval", eval_file, cwd=tmp_path)
        assert provider.requests == asked + ROWS - there


SLEEPER = """
import time

def reply(prompt):
    open("called", "a").close()
    time.sleep(1000)
"""

STUBBORN = """
import asyncio

async def reply(prompt):
    open("called", "a").close()
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            open("cancelled", "a").close()
"""


def python_eval(folder: Path, source: str, **keys: Any) -> Path:
    """An eval of a Python function."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent.py").write_text(source)
    return write_eval(folder, "", rows=4, target={"python": "agent.py:reply"}, **keys)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_a_run_whose_function_never_returns(number: signal.Signals, code: int, tmp_path: Path) -> None:
    process = start("eval", python_eval(tmp_path, SLEEPER), cwd=tmp_path)
    wait_for(lambda: started(tmp_path), "the function to be called")
    assert ends(process, number)[0] == code


def started(folder: Path) -> bool:
    """Report whether the function has been called."""
    return (folder / "called").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_exits_at_once(number: signal.Signals, tmp_path: Path) -> None:
    """The function refuses to be cancelled, so that the first signal alone would wait for ever."""
    process = start("eval", python_eval(tmp_path, STUBBORN), cwd=tmp_path)
    wait_for(lambda: started(tmp_path), "the function to be called")
    process.send_signal(number)
    wait_for(lambda: (tmp_path / "cancelled").exists(), "the first signal to be heeded")
    assert process.poll() is None
    assert ends(process, number)[0] == 128 + number


BUSY = {
    "the event loop is inside C code": "async def reply(prompt):\n    mark()\n    sum(range(10**15))\n",
    "the event loop sleeps": "async def reply(prompt):\n    mark()\n    time.sleep(1000)\n",
    "the event loop runs a loop of Python": "async def reply(prompt):\n    mark()\n    while True: pass\n",
    "a pattern backtracks on the event loop": (
        "async def reply(prompt):\n    mark()\n    re.match('(a+)+$', 'a' * 60 + '!')\n"
    ),
    "a thread keeps the interpreter to itself": "def reply(prompt):\n    mark()\n    sum(range(10**15))\n",
    "a module is being imported": "mark()\nsum(range(10**15))\n",
}


@pytest.mark.parametrize(
    ("what", "number"),
    [*((what, signal.SIGINT) for what in BUSY), ("the event loop is inside C code", signal.SIGTERM)],
)
def test_a_second_signal_exits_at_once_whatever_the_process_is_doing(
    what: str, number: signal.Signals, tmp_path: Path
) -> None:
    source = "import re, time\ndef mark():\n    open('called', 'a').close()\n" + BUSY[what]
    process = start("eval", python_eval(tmp_path, source), cwd=tmp_path)
    wait_for(lambda: started(tmp_path), "the function to be called")
    assert ends_by_repeating(process, number) in (128 + number, -number)


def ends_by_repeating(process: subprocess.Popen[str], number: signal.Signals) -> int:
    """Send a signal again and again, as an impatient user does; signals that are not yet delivered do not add up."""

    def gone() -> bool:
        process.send_signal(number)
        return process.poll() is not None

    try:
        wait_for(gone, "the process to end")
    finally:
        process.kill()
        process.communicate()
    return process.returncode


def test_a_second_signal_ends_a_run_with_all_its_workers(tmp_path: Path) -> None:
    process = start("eval", python_eval(tmp_path, STUBBORN), "--workers", "2", cwd=tmp_path)
    wait_for(lambda: started(tmp_path), "the function to be called")
    process.send_signal(signal.SIGINT)
    wait_for(lambda: (tmp_path / "cancelled").exists(), "the first signal to be heeded by a worker")
    assert process.poll() is None
    assert ends(process, signal.SIGINT)[0] == 130
    wait_for(lambda: not leftovers(tmp_path), "the workers to be gone")


def test_a_second_signal_ends_a_busy_worker_at_once(tmp_path: Path) -> None:
    source = BUSY["the event loop is inside C code"].replace("mark()", "open('called', 'a')")
    crew = start("eval", python_eval(tmp_path, source), "--workers", "1", cwd=tmp_path)
    wait_for(lambda: started(tmp_path), "the function to be called")
    (worker,) = [process for process in leftovers(tmp_path) if process.pid != crew.pid]

    def gone() -> bool:
        with suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGINT)
        return not psutil.pid_exists(worker.pid)

    wait_for(gone, "the worker to end")
    assert crew.communicate(timeout=PATIENCE)[0] is not None
    assert crew.returncode == 3, "it has not finished, and nobody told the run to stop"


def test_the_next_command_takes_over_from_one_that_exited_at_once(tmp_path: Path) -> None:
    eval_file = python_eval(tmp_path, STUBBORN)
    process = start("eval", eval_file, cwd=tmp_path)
    wait_for(lambda: started(tmp_path), "the function to be called")
    process.send_signal(signal.SIGINT)
    wait_for(lambda: (tmp_path / "cancelled").exists(), "the first signal to be heeded")
    ends(process, signal.SIGINT)
    run = run_dir(tmp_path)
    again = start("eval", eval_file, cwd=tmp_path)
    wait_for(lambda: (run / "run.log").read_text().count("begin") == 2, "the run to be taken over")
    again.kill()  # what it would do with signals is the other tests' matter
    again.communicate()


@pytest.mark.parametrize("by", ["Ctrl-C", "SIGTERM"])
def test_a_signal_while_waiting_for_another_process_prints_how_to_resume(
    by: str, tmp_path: Path, provider: Server
) -> None:
    provider.control(fail={"hang": 1.0})
    eval_file = write_eval(tmp_path, provider.base_url, **KEYS)
    holder = start("eval", eval_file, cwd=tmp_path)
    wait_for(lambda: provider.stats()["active"] == CONCURRENCY, "a full window")
    waiting = start("eval", eval_file, "--wait", cwd=tmp_path)
    assert waiting.stderr is not None
    assert f"waiting for process {holder.pid} on" in waiting.stderr.readline()
    code, _, err = ends(waiting, signal.SIGINT if by == "Ctrl-C" else signal.SIGTERM)
    assert code == (130 if by == "Ctrl-C" else 143)
    assert f"holdfast eval {eval_file} --wait" in err
    assert "Traceback" not in err
    assert ends(holder, signal.SIGINT)[0] == 130


@pytest.mark.parametrize("limit", ["turn_timeout", "trial_timeout"])
def test_a_function_that_never_returns_does_not_hang_the_last_sample(limit: str, tmp_path: Path) -> None:
    source = SLEEPER.replace("    open", "    if prompt != 'question 3': return prompt\n    open")
    eval_file = python_eval(tmp_path, source, limits={limit: 1, "retries": 1})
    ended = holdfast("eval", eval_file, cwd=tmp_path, check=3)
    assert "1 trial has errors and stays pending" in ended.stdout
    run = run_dir(tmp_path)
    errors = kept(run, "errors")
    assert {output["sample"] for output in kept(run)} == {"s0", "s1", "s2"}
    assert {(error["sample"], error["kind"]) for error in errors} == {("s3", "timeout")}
    assert [error["final"] for error in errors] == ([False, True] if limit == "turn_timeout" else [True])
    assert limit in errors[-1]["message"]


def test_a_server_that_never_answers_the_last_sample_does_not_hang_the_run(tmp_path: Path, provider: Server) -> None:
    provider.control(fail={"hang": 0.02})
    eval_file = write_eval(tmp_path, provider.base_url, rows=100, limits={"turn_timeout": 1.5, "retries": 0})
    holdfast("eval", eval_file, cwd=tmp_path, check=3)
    run = run_dir(tmp_path)
    hung = provider.stats()["outcomes"]["hang"]
    assert hung > 0
    assert len(kept(run)) == 100 - hung
    assert {error["kind"] for error in kept(run, "errors")} == {"timeout"}


def test_a_command_that_never_ends_is_killed_with_its_children(tmp_path: Path) -> None:
    script = 'echo "out $1"; test "$1" = "question 0" || echo "stuck at $1" >&2; sleep 1000 & sleep 1000'
    target = {"command": ["sh", "-c", script, "sh", "{{ prompt }}"]}
    eval_file = write_eval(tmp_path, "", rows=2, target=target, limits={"turn_timeout": 5, "retries": 0})
    holdfast("eval", eval_file, cwd=tmp_path, check=3)
    errors = {error["sample"]: error for error in kept(run_dir(tmp_path), "errors")}
    assert {error["kind"] for error in errors.values()} == {"timeout"}
    assert errors["s0"]["message"].endswith("(turn_timeout); sh had printed: out question 0")
    assert errors["s1"]["message"].endswith("(turn_timeout); sh had printed: stuck at question 1")
    wait_for(lambda: not leftovers(tmp_path), "all processes to be gone")
