"""Told to stop, a run stops: what is in flight finishes or is abandoned, and the command that resumes is printed."""

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
from tests.support.running import (
    PATIENCE,
    Server,
    ask_to_stop,
    holdfast,
    run_dir,
    server,
    spawn,
    start,
    wait_for,
    write_eval,
)

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


def stopping(requests: int) -> str:
    return f"stopping; {requests} request{'s' * (requests != 1)} in flight; Ctrl-C again to abandon them"


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_ctrl_c_lets_requests_in_flight_finish(
    workers: int, tmp_path: Path, provider: Server, calm: Path
) -> None:
    """No request is made twice: what the server was asked is, in the end, what the run has outputs for."""
    in_flight = CONCURRENCY * (workers or 1)
    provider.control(holds_after=10)
    eval_file = write_eval(tmp_path, provider.base_url, **KEYS)
    flags = ("--workers", str(workers)) if workers else ()
    process = start("eval", eval_file, "limits.retries=3", *flags, cwd=tmp_path)
    wait_for(lambda: provider.stats()["active"] == in_flight, "a full window")
    assert ask_to_stop(process) == stopping(in_flight)
    provider.control(holds_after=-1)
    code, out, _ = ends(process)
    assert code == 130
    assert "interrupted; everything that finished is on disk" in out
    assert f"holdfast eval {eval_file} limits.retries=3" in out
    assert provider.requests == 10 + in_flight, "nothing new was started"
    run = run_dir(tmp_path)
    assert len(kept(run)) == 10 + in_flight and kept(run, "errors") == []
    assert f"{10 + in_flight} of {ROWS} trials have an output" in out

    holdfast("eval", eval_file, cwd=tmp_path)
    assert provider.requests == ROWS
    assert_each_once(run, ROWS)
    assert_same_numbers(run, calm)


@pytest.mark.parametrize("verb", ["eval", "grade"])
def test_the_first_ctrl_c_lets_judges_finish(verb: str, tmp_path: Path, provider: Server) -> None:
    with server(holds_after=3, answer="judge") as judge:
        judged = {"type": "prompt", "rubric": "Good?", "model": "judge", "base_url": judge.base_url}
        eval_file = write_eval(tmp_path, provider.base_url, **KEYS, graders=[judged])
        if verb == "grade":
            holdfast("eval", eval_file, "--skip-graders", cwd=tmp_path)
        process = start(verb, eval_file if verb == "eval" else run_dir(tmp_path), cwd=tmp_path)
        wait_for(lambda: judge.stats()["active"] == CONCURRENCY, "the judge to be asked")
        # Three are judged, and a window full is in each of these places: at the judge, twice in the queue, before it.
        outputs = ROWS if verb == "grade" else 3 + 4 * CONCURRENCY
        wait_for(lambda: len(kept(run_dir(tmp_path))) == outputs, "only judges in flight")
        # An output is on disk a moment before its trial waits for the judges, so that more may seem to be in flight.
        counted = int(ask_to_stop(process).split()[1])
        assert CONCURRENCY <= counted < 2 * CONCURRENCY
        judge.control(holds_after=-1)
        assert ends(process)[0] == 130
        assert judge.requests == 3 + CONCURRENCY == len(kept(run_dir(tmp_path), "grades"))
        assert provider.requests == outputs
        holdfast(verb, eval_file if verb == "eval" else run_dir(tmp_path), cwd=tmp_path)
        assert judge.requests == provider.requests == ROWS


TOOLS = """
def look_up(city: str) -> str:
    "Look a city up."
    return f"{city} is far"

async def ask(prompt, context):
    reply = await context.model(prompt, model="test-model")
    for number in range(4):
        reply = await context.model(f"{prompt} and {number}", model="test-model")
    return reply.text

def ask_and_wait(prompt, context):
    for number in range(5):
        text = context.model(f"{prompt} and {number}", model="test-model").text
    return text
"""
PROXIED = """
import json, os, sys, urllib.request

for number in range(5):
    body = {"model": "test-model", "messages": [{"role": "user", "content": f"{sys.argv[1]} {number}"}]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    answer = json.load(urllib.request.urlopen(request))
print(answer["choices"][0]["message"]["content"])
"""
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "turns": {"follow_ups": ["a", "b", "c", "d"]},
    "tools": {"target": {"model": "test-model", "tools": [{"python": "agent.py:look_up"}], "max_steps": 9}},
    "an async function": {"target": {"python": "agent.py:ask"}},
    "a function": {"target": {"python": "agent.py:ask_and_wait"}},
    "a program": {"target": {"command": ["python3", "program.py", "{{ prompt }}"]}},
}


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_the_first_ctrl_c_ends_a_conversation_after_the_request_in_flight(
    kind: str, tmp_path: Path, provider: Server
) -> None:
    (tmp_path / "agent.py").write_text(TOOLS)
    (tmp_path / "program.py").write_text(PROXIED)
    keys: dict[str, Any] = {**CONVERSATIONS[kind]}
    target = keys.pop("target", {"model": "test-model"}) | {"base_url": provider.base_url}
    eval_file = write_eval(tmp_path, "", rows=1, target=target, **keys)
    provider.control(holds_after=2, tool_calls=4 if kind == "tools" else 0)
    process = start("eval", eval_file, cwd=tmp_path)
    wait_for(lambda: provider.stats()["active"] == 1 and provider.requests == 3, "the third of five requests")
    assert ask_to_stop(process) == stopping(1)
    provider.control(holds_after=-1)
    code, out, err = ends(process)
    assert code == 130, (out, err)
    assert "Traceback" not in err and kept(run_dir(tmp_path), "errors") == [] == kept(run_dir(tmp_path))
    assert provider.requests == 3
    wait_for(lambda: not leftovers(tmp_path), "what the trial has started to be gone")
    holdfast("eval", eval_file, cwd=tmp_path)
    assert provider.requests == 5


def test_the_first_ctrl_c_lets_calls_that_an_agent_makes_at_once_finish(tmp_path: Path, provider: Server) -> None:
    """One of two branches is about to make its next call while the other one's is in flight."""
    source = """
import asyncio

async def branch(prompt, context, name):
    for number in range(2):
        reply = await context.model(f"{prompt} {name} {number}", model="test-model")
    return reply.text

async def reply(prompt, context):
    quick = asyncio.create_task(branch(prompt, context, "quick"))
    slow = asyncio.create_task(branch(prompt, context, "slow"))
    return await quick + await slow
"""
    provider.control(holds_after=0)
    (tmp_path / "agent.py").write_text(source)
    target = {"python": "agent.py:reply", "base_url": provider.base_url}
    eval_file = write_eval(tmp_path, "", rows=1, target=target)
    process = start("eval", eval_file, cwd=tmp_path)
    wait_for(lambda: provider.stats()["active"] == 2, "both branches")
    assert ask_to_stop(process) == stopping(1)  # the trial's
    provider.control(holds_after=-1)
    assert ends(process)[0] == 130
    assert provider.requests == 2 == len(kept(run_dir(tmp_path), "steps"))
    holdfast("eval", eval_file, cwd=tmp_path)
    assert provider.requests == 4


SCRIPT = """
import asyncio, signal, sys, holdfast

signal.signal(signal.SIGINT, signal.default_int_handler)

def call():
    return holdfast.evaluate("e.yaml", display="plain")

async def cell():
    return call()

try:
    run = call() if sys.argv[1] == "script" else asyncio.new_event_loop().run_until_complete(cell())
    print("finished", run.finished)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("place", ["script", "notebook"])
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_in_python_is_the_same(presses: int, place: str, tmp_path: Path, provider: Server) -> None:
    """A notebook has an event loop in the main thread, and Python's own handler of Ctrl-C."""
    write_eval(tmp_path, provider.base_url, **KEYS)
    (tmp_path / "script.py").write_text(SCRIPT)
    provider.control(holds_after=10)
    process = spawn("script", place, cwd=tmp_path)
    wait_for(lambda: provider.stats()["active"] == CONCURRENCY, "a full window")
    told = ask_to_stop(process)
    assert "again to abandon them" in told
    if presses == 1:
        provider.control(holds_after=-1)
        assert ends(process)[1] == "interrupted\n"
    else:
        assert ends(process, signal.SIGINT)[1] == "interrupted\n"
        wait_for(lambda: provider.stats()["active"] == 0, "the requests to be dropped")
        provider.control(holds_after=-1)
    assert len(kept(run_dir(tmp_path))) == (10 + CONCURRENCY if presses == 1 else 10)
    assert ends(spawn("script", place, cwd=tmp_path))[1] == "finished True\n"
    assert provider.requests == ROWS + (presses - 1) * CONCURRENCY


def test_the_second_ctrl_c_abandons_requests_that_hang(tmp_path: Path, provider: Server) -> None:
    provider.control(fail={"hang": 1.0})
    process = start("eval", write_eval(tmp_path, provider.base_url, **KEYS), cwd=tmp_path)
    wait_for(lambda: provider.stats()["active"] == CONCURRENCY, "a full window")
    assert ask_to_stop(process) == stopping(CONCURRENCY)
    assert process.poll() is None and provider.stats()["active"] == CONCURRENCY
    code, out, _ = ends(process, signal.SIGINT)
    assert code == 130 and "Resume with:" in out
    wait_for(lambda: provider.stats()["active"] == 0, "the requests to be dropped")
    assert provider.requests == CONCURRENCY
    assert kept(run_dir(tmp_path), "errors") == [], "what was cancelled leaves no record"


def test_sigterm_abandons_requests_at_once(tmp_path: Path, provider: Server) -> None:
    """What sends it, a batch system or a container's host, kills soon afterwards."""
    provider.control(holds_after=10)
    eval_file = write_eval(tmp_path, provider.base_url, **KEYS)
    process = start("eval", eval_file, cwd=tmp_path)
    wait_for(lambda: provider.stats()["active"] == CONCURRENCY, "a full window")
    code, out, _ = ends(process, signal.SIGTERM)
    assert code == 143 and "Resume with:" in out
    wait_for(lambda: provider.stats()["active"] == 0, "the requests to be dropped")
    run = run_dir(tmp_path)
    assert len(kept(run)) == 10 and kept(run, "errors") == []
    provider.control(holds_after=-1)
    holdfast("eval", eval_file, cwd=tmp_path)
    assert provider.requests == ROWS + CONCURRENCY
    assert_each_once(run, ROWS)


def test_the_first_ctrl_c_ends_waiting_for_a_retry(tmp_path: Path, provider: Server) -> None:
    provider.control(fail={"429": 1.0}, retry_after=100)
    process = start("eval", write_eval(tmp_path, provider.base_url, **KEYS), cwd=tmp_path)
    wait_for(lambda: provider.requests == CONCURRENCY, "a full window")
    wait_for(lambda: len(kept(run_dir(tmp_path), "errors")) == CONCURRENCY, "all of it to be put off")
    code, out, err = ends(process, signal.SIGINT)
    assert code == 130
    assert f"0 of {ROWS} trials have an output" in out
    assert provider.requests == CONCURRENCY
    assert "in flight" not in err, "nothing was"
    assert len(kept(run_dir(tmp_path), "errors")) == CONCURRENCY


def test_a_run_that_requests_in_flight_complete_is_finished(tmp_path: Path, provider: Server) -> None:
    provider.control(holds_after=0)
    process = start("eval", write_eval(tmp_path, provider.base_url, rows=4), cwd=tmp_path)
    wait_for(lambda: provider.stats()["active"] == 4, "all requests")
    assert ask_to_stop(process) == stopping(4)
    provider.control(holds_after=-1)
    assert ends(process)[0] == 0
    assert (run_dir(tmp_path) / "metrics.json").exists()


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
    if number == signal.SIGINT:
        ask_to_stop(process)
    assert ends(process, number)[0] == code


def started(folder: Path) -> bool:
    """Report whether the function has been called."""
    return (folder / "called").exists()


def abandon(process: subprocess.Popen[str], number: signal.Signals, folder: Path) -> None:
    """Have the function of a trial cancelled: Ctrl-C does so when it is pressed twice, SIGTERM at once."""
    if number == signal.SIGINT:
        ask_to_stop(process)
        assert not (folder / "cancelled").exists()
    process.send_signal(number)
    wait_for(lambda: (folder / "cancelled").exists(), "the function to be cancelled")
    assert process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_last_signal_exits_at_once(number: signal.Signals, tmp_path: Path) -> None:
    """The function refuses to be cancelled, so that the run would wait for ever."""
    process = start("eval", python_eval(tmp_path, STUBBORN), cwd=tmp_path)
    wait_for(lambda: started(tmp_path), "the function to be called")
    abandon(process, number, tmp_path)
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
def test_signals_end_a_busy_process_at_once_whatever_it_is_doing(
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


def test_the_third_ctrl_c_ends_a_run_with_all_its_workers(tmp_path: Path) -> None:
    process = start("eval", python_eval(tmp_path, STUBBORN), "--workers", "2", cwd=tmp_path)
    wait_for(lambda: started(tmp_path), "the function to be called")
    abandon(process, signal.SIGINT, tmp_path)
    assert ends(process, signal.SIGINT)[0] == 130
    wait_for(lambda: not leftovers(tmp_path), "the workers to be gone")


def test_signals_end_a_busy_worker_at_once(tmp_path: Path) -> None:
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
    assert ends(holder, signal.SIGTERM)[0] == 143


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
