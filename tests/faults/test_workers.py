"""Many workers on one run: each trial is done once, whoever dies, freezes, joins late or leaves early."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import Fault, RunBeingFinished
from holdfast.store.claims import Claims, Round, begin_round, cut
from holdfast.store.heads import read_output, read_steps
from holdfast.store.lease import RunLease
from holdfast.store.lines import read_blocks
from holdfast.store.records import ErrorRecord, Grade, Step, Timing, Usage, to_line
from holdfast.store.run_lock import finish, join, worker_lease
from holdfast.store.rundir import RunDir
from tests.faults.test_two_processes import end, is_stopped
from tests.support.breaking import (
    assert_each_once,
    assert_same_numbers,
    leftovers,
    nothing_left,  # noqa: F401 - a fixture
    share,
    whole_outputs,
    worker,
)
from tests.support.running import Server, holdfast, lines, outputs_in, run_dir, start, verdicts_in, wait_for, write_eval
from tests.support.specs import output_of, write_spec

ROWS = 120
CONCURRENCY = 4
KEYS: dict[str, Any] = {"rows": ROWS, "limits": {"concurrency": CONCURRENCY}}
SHORT_LEASE = {"HOLDFAST_LEASE_SECONDS": "4"}


@pytest.fixture
def eval_file(tmp_path: Path, provider: Server) -> Path:
    return write_eval(tmp_path, provider.base_url, **KEYS)


def busy(provider: Server, run: Path, name: str, **env: str) -> subprocess.Popen[str]:
    """A worker in the middle of the run, waiting for answers that do not come until the server is told to."""
    provider.control(fail={"hang": 1.0})
    active = provider.stats()["active"]
    process = worker(run, name, **env)
    wait_for(lambda: provider.stats()["active"] == active + CONCURRENCY, "a full window")
    return process


def leave(*processes: subprocess.Popen[str]) -> list[str]:
    """Wait until they have ended well; what each said."""
    outputs = []
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, out + err
        outputs.append(out)
    return outputs


def done_by(run: Path, name: str) -> int:
    """Count the outputs that a worker has written."""
    return len(lines(run / "workers" / name / "outputs.jsonl"))


def test_workers_ask_for_each_sample_once_and_give_the_numbers_of_one_process(
    tmp_path: Path, provider: Server, eval_file: Path, calm: Path
) -> None:
    provider.control(latency=0.05)
    shown = holdfast("eval", eval_file, "--workers", "4", "--log-samples", cwd=tmp_path)
    run = run_dir(tmp_path)
    assert provider.stats()["asked"] == {f"question {number}": 1 for number in range(ROWS)}
    assert_each_once(run, ROWS)
    assert_same_numbers(run, calm)
    assert sum(done_by(run, f"w{number}") > 0 for number in range(1, 5)) > 1, "the work was shared"
    assert not (run / "outputs.jsonl").exists(), "each wrote below workers/ only"
    assert len(lines(run / "samples.jsonl")) == ROWS
    assert "coverage 100.0%" in shown.stdout and not (run / "claims").exists()
    again = holdfast("eval", eval_file, "--workers", "2", cwd=tmp_path)
    assert "already finished" in again.stdout and provider.requests == ROWS
    late = holdfast("work", run, cwd=tmp_path)
    assert "already finished" in late.stdout and provider.requests == ROWS
    holdfast("eval", eval_file, "--workers", "2", "--fresh", cwd=tmp_path)
    assert provider.requests == 2 * ROWS


def test_the_chunk_of_a_killed_worker_is_done_by_the_others(
    tmp_path: Path, provider: Server, eval_file: Path, calm: Path
) -> None:
    provider.control(latency=0.05)
    run = share(eval_file)
    killed, other = worker(run, "a"), worker(run, "b")
    wait_for(lambda: done_by(run, "a") > CONCURRENCY, "some answers")
    assert end(killed, signal.SIGKILL) == -signal.SIGKILL
    leave(other)
    assert provider.requests <= ROWS + CONCURRENCY
    assert whole_outputs(run) == {f"s{number}" for number in range(ROWS)}
    assert_same_numbers(run, calm)


def test_a_frozen_worker_is_taken_over_and_changes_nothing_when_it_wakes(
    tmp_path: Path, provider: Server, eval_file: Path, calm: Path
) -> None:
    run = share(eval_file)
    frozen = busy(provider, run, "a", **SHORT_LEASE)
    frozen.send_signal(signal.SIGSTOP)
    wait_for(lambda: is_stopped(frozen), "it to freeze")
    provider.control(fail={})
    leave(worker(run, "b", **SHORT_LEASE))
    assert provider.requests == ROWS + CONCURRENCY
    assert_same_numbers(run, calm)
    files = {path: path.read_bytes() for path in run.rglob("*.json*")}
    frozen.send_signal(signal.SIGCONT)
    out, err = frozen.communicate(timeout=300)
    assert frozen.returncode == 3 and "another" in out + err
    assert {path: path.read_bytes() for path in run.rglob("*.json*")} == files
    assert holdfast("repair", run, cwd=tmp_path, env=SHORT_LEASE).stdout.startswith(f"{ROWS} outputs and {ROWS} grades")


def test_workers_with_skipped_graders_exit_with_0(provider: Server, eval_file: Path) -> None:
    provider.control(latency=0.02)
    run = share(eval_file, skip_graders=True)
    leave(worker(run, "a"), worker(run, "b"))
    assert whole_outputs(run) == {f"s{number}" for number in range(ROWS)} and provider.requests == ROWS
    assert not (run / "metrics.json").exists()


def test_a_worker_may_join_late(tmp_path: Path, provider: Server, eval_file: Path, calm: Path) -> None:
    provider.control(latency=0.1)
    run = share(eval_file)
    first = worker(run, "a")
    wait_for(lambda: done_by(run, "a") >= CONCURRENCY, "the first answers")
    first.send_signal(signal.SIGSTOP)  # until the second has come
    late = worker(run, "b")
    wait_for(lambda: done_by(run, "b") > 0, "the second to have its share")
    first.send_signal(signal.SIGCONT)
    outputs = leave(first, late)
    assert done_by(run, "b") > 0 and done_by(run, "a") + done_by(run, "b") == provider.requests == ROWS
    assert sum("wrote the report" in out for out in outputs) <= 1, "one of them makes it"
    assert_same_numbers(run, calm)


def test_a_run_resumes_with_another_number_of_workers(
    tmp_path: Path, provider: Server, eval_file: Path, calm: Path
) -> None:
    provider.control(latency=0.1)
    crew = start("eval", eval_file, "--workers", "3", cwd=tmp_path)
    wait_for(lambda: len(provider.stats()["answered"]) > 5 * CONCURRENCY, "some answers")
    assert end(crew, signal.SIGINT) == 130
    run, asked = run_dir(tmp_path), provider.requests
    assert asked == (kept := len(whole_outputs(run))), "requests in flight have finished"
    states = Counter(path.suffix for path in run.glob("claims/*/0*"))
    assert set(states) <= {".free", ".left", ".done"}, "claims were given back"
    (listed,) = json.loads(holdfast("cache", "ls", "--json", cwd=tmp_path).stdout)
    assert (listed["done"], listed["status"]) == (kept, "unfinished")
    plan = json.loads(holdfast("eval", eval_file, "--dry-run", "--json", cwd=tmp_path).stdout)
    assert plan["to_run"] == ROWS - kept
    holdfast("eval", eval_file, "--workers", "2", cwd=tmp_path)
    assert provider.requests == asked + ROWS - kept
    assert_each_once(run, ROWS)
    assert_same_numbers(run, calm)


def test_a_single_process_can_continue_where_workers_stopped(
    tmp_path: Path, provider: Server, eval_file: Path, calm: Path
) -> None:
    provider.control(latency=0.1)
    run = share(eval_file)
    first = worker(run, "a")
    wait_for(lambda: done_by(run, "a") >= CONCURRENCY, "the first answers")
    assert end(first, signal.SIGUSR2) == 143, "as a batch system says that the time is up"
    kept, asked = len(whole_outputs(run)), provider.requests
    holdfast("eval", eval_file, cwd=tmp_path)
    assert provider.requests == asked + ROWS - kept
    assert_each_once(run, ROWS)
    assert_same_numbers(run, calm)


def test_killed_workers_are_replaced(tmp_path: Path, provider: Server) -> None:
    provider.control(fail={"hang": 1.0})  # so that the run goes on until all were killed
    limits = {"concurrency": CONCURRENCY, "turn_timeout": "20s"}
    crew = start(
        "eval", write_eval(tmp_path, provider.base_url, rows=ROWS, limits=limits), "--workers", "4", cwd=tmp_path
    )
    wait_for(lambda: provider.stats()["active"] == 4 * CONCURRENCY, "four full windows")
    workers = [process for process in leftovers(tmp_path) if process.pid != crew.pid]
    for victim in workers:
        victim.kill()
    old = {crew.pid, *(victim.pid for victim in workers)}
    wait_for(lambda: len({process.pid for process in leftovers(tmp_path)} - old) == 4, "four other workers")
    provider.control(fail={})
    _, err = crew.communicate(timeout=300)
    assert crew.returncode == 0, err
    assert err.count("was killed (SIGKILL); its finished trials are saved, and another worker takes its place") == 4
    assert_each_once(run_dir(tmp_path), ROWS)


CRASHES = """import os, signal
def answer(prompt):
    if "3" in prompt:
        os.kill(os.getpid(), signal.SIGKILL)
    return prompt
"""


def test_a_trial_that_crashes_every_worker_stops_the_run_after_a_few(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(CRASHES)
    rows = [{"id": f"r{number}", "question": f"q{number}"} for number in range(6)]
    write_spec(
        tmp_path,
        name="crash",
        samples=rows,
        target={"python": "agent.py:answer"},
        limits={"concurrency": 1},
        graders=None,
    )
    ended = holdfast("eval", "eval.yaml", "--workers", "2", cwd=tmp_path, check=3)
    assert ended.stderr.count("finished nothing 3 times in a row, and is not replaced again") == 2
    assert "workers exited before all trials were done" in ended.stdout
    assert len(list((tmp_path / "runs" / "crash").glob("*/workers/*/outputs.jsonl"))) >= 1


def test_workers_end_with_the_command_that_started_them(tmp_path: Path, provider: Server, eval_file: Path) -> None:
    provider.control(fail={"hang": 1.0})
    crew = start("eval", eval_file, "--workers", "2", cwd=tmp_path)
    wait_for(lambda: provider.stats()["active"] == 2 * CONCURRENCY, "two full windows")
    assert end(crew, signal.SIGKILL) == -signal.SIGKILL
    wait_for(lambda: not leftovers(tmp_path), "the workers to leave")


def test_workers_and_a_process_that_needs_the_run_to_itself_exclude_each_other(
    tmp_path: Path, provider: Server, eval_file: Path
) -> None:
    run = share(eval_file)
    first = busy(provider, run, "a")
    second = busy(provider, run, "b")
    commands: list[list[str | Path]] = [
        ["eval", eval_file],
        ["eval", eval_file, "--workers", "2"],
        ["repair", run],
        ["grade", run],
    ]
    for command in commands:
        refused = holdfast(*command, cwd=tmp_path, check=4)
        assert f"a (process {first.pid} on" in refused.stderr and f"b (process {second.pid} on" in refused.stderr
    twice = holdfast("work", run, "--worker", "a", cwd=tmp_path, check=4)
    assert f"worker a is already running: process {first.pid}" in twice.stderr
    (listed,) = json.loads(holdfast("cache", "ls", "--json", cwd=tmp_path).stdout)
    assert listed["status"] == "running"
    holdfast("cache", "rm", "--all", "-y", cwd=tmp_path, check=4)
    assert [end(process, signal.SIGTERM) for process in (first, second)] == [143, 143]
    holder = start("eval", eval_file, cwd=tmp_path)
    wait_for(lambda: provider.stats()["active"] == CONCURRENCY, "a full window")
    refused = holdfast("work", run, "--worker", "a", cwd=tmp_path, check=4)
    assert f"process {holder.pid} on" in refused.stderr
    assert end(holder, signal.SIGTERM) == 143


def test_a_waiting_process_gets_the_run_when_the_workers_have_left(
    tmp_path: Path, provider: Server, eval_file: Path
) -> None:
    run = share(eval_file)
    first = busy(provider, run, "a")
    waiting = start("eval", eval_file, "--wait", cwd=tmp_path)
    assert waiting.stderr is not None
    assert "waiting for workers, which hold this run: a (process" in waiting.stderr.readline()
    provider.control(fail={})
    assert end(first, signal.SIGTERM) == 143
    leave(waiting)
    assert_each_once(run, ROWS)


def test_only_one_of_many_finished_workers_writes_the_report(tmp_path: Path, provider: Server, eval_file: Path) -> None:
    run = share(eval_file, 1)
    plan = next(run.glob("claims/*/plan.json")).read_bytes()
    leave(worker(run, "a"))
    numbers = json.loads((run / "metrics.json").read_text())
    for name in ("metrics.json", "results.json"):  # as if the one that made it had been killed before
        (run / name).unlink()
    place = run / "claims" / "0001"
    place.mkdir(parents=True)
    (place / "plan.json").write_bytes(plan)
    for chunk in range(len(json.loads(plan)["chunks"])):
        (place / f"{chunk:05}.done").touch()
    log = (run / "run.log").read_text().count(" finished ")
    leave(*[worker(run, f"b{number}") for number in range(4)])
    assert (run / "run.log").read_text().count(" finished ") == log + 1
    assert json.loads((run / "metrics.json").read_text())["metrics"] == numbers["metrics"]
    assert provider.requests == ROWS


JUDGE = """import os, time
from pathlib import Path
here = Path(__file__).parent
def check(output):
    seen = here / output.replace(" ", "-")
    if not seen.exists():
        seen.touch()
        raise ValueError("not at the first time")
    (here / f"held-{os.getpid()}").touch()
    while (here / "hold").exists():
        time.sleep(0.01)
    return True
"""


def held_while_finishing(folder: Path, provider: Server) -> Path:
    """An eval whose grades are all left to the one who makes the report, and who is held over the first of them."""
    (folder / "judge.py").write_text(JUDGE)
    (folder / "hold").touch()
    graders = [{"type": "python", "function": "judge.py:check"}]
    return write_eval(folder, provider.base_url, rows=8, graders=graders, limits={"retries": 0})


def finisher(folder: Path, *killed: int) -> int:
    """The process that makes the report, once it is in the middle of that."""
    begun = {int(path.name.partition("-")[2]) for path in folder.glob("held-*")} - {*killed}
    return begun.pop() if begun else 0


def kill_finisher(folder: Path, *killed: int) -> int:
    pid = wait_for(lambda: finisher(folder, *killed), "the report to be begun")
    psutil.Process(pid).kill()
    return int(pid)


def await_waiting(process: subprocess.Popen[str], pid: int) -> None:
    """Wait until a worker says that it waits for the report of another one."""
    assert process.stderr is not None
    while f"waiting for process {pid}" not in process.stderr.readline():
        assert process.poll() is None


def test_a_worker_waits_for_the_report_and_writes_it_if_the_other_dies(tmp_path: Path, provider: Server) -> None:
    run = share(held_while_finishing(tmp_path, provider))
    workers = {process.pid: process for process in (worker(run, "a"), worker(run, "b"), worker(run, "c"))}
    first = kill_finisher(tmp_path)
    workers.pop(first).communicate()  # a process that nobody has waited for keeps its lease until that expires
    second = kill_finisher(tmp_path, first)
    workers.pop(second).communicate()
    wait_for(lambda: finisher(tmp_path, first, second), "the report to be begun once more")
    late = worker(run, "d")
    (tmp_path / "hold").unlink()
    (last,) = workers.values()
    outputs = leave(last, late)
    assert "coverage 100.0%" in outputs[0]
    assert "wrote the report" in outputs[1] or "already finished" in outputs[1]
    assert json.loads((run / "metrics.json").read_text())["score"] == 1
    assert provider.requests == 8


def test_a_worker_that_starts_after_the_finisher_died_takes_over_the_report(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    lease = RunLease(rundir.lease, finishing=True)
    lease.acquire(0)
    assert lease.holder is not None
    ended = subprocess.Popen(["true"])
    ended.wait()
    rundir.lease.write_bytes(msgspec.json.encode(msgspec.structs.replace(lease.holder, pid=ended.pid, token="")))
    with pytest.raises(RunBeingFinished):
        join(rundir, "late")
    taken = finish(rundir)
    assert taken is not None and taken.still_held() and not lease.still_held()
    taken.release()
    lease.release()


def test_a_worker_exits_if_the_other_left_without_a_report(tmp_path: Path, provider: Server) -> None:
    run = share(held_while_finishing(tmp_path, provider))
    workers = {process.pid: process for process in (worker(run, "a"), worker(run, "b"))}
    first = workers.pop(wait_for(lambda: finisher(tmp_path), "the report to be begun"))
    (other,) = workers.values()
    await_waiting(other, first.pid)
    assert end(first, signal.SIGTERM) == 143
    out, err = other.communicate(timeout=300)
    assert other.returncode == 3 and "exited without writing the report" in out, out + err
    assert not (run / "metrics.json").exists()
    (tmp_path / "hold").unlink()
    leave(worker(run, "c"))


def test_the_parent_process_writes_the_report_if_all_workers_die_doing_so(tmp_path: Path, provider: Server) -> None:
    crew = start("eval", held_while_finishing(tmp_path, provider), "--workers", "2", cwd=tmp_path)
    await_waiting(crew, wait_for(lambda: finisher(tmp_path), "the report to be begun"))
    killed: list[int] = []
    while wait_for(lambda: finisher(tmp_path, *killed), "the report to be begun once more") != crew.pid:
        killed.append(kill_finisher(tmp_path, *killed))
    assert len(killed) == 6, "each worker is replaced twice"
    (tmp_path / "hold").unlink()
    out, err = crew.communicate(timeout=300)
    assert crew.returncode == 0 and "coverage 100.0%" in out, out + err
    assert err.count("was killed (SIGKILL)") == 6
    assert "stopped without a report; writing it here" in err, "another worker took over"
    assert provider.requests == 8


def test_a_worker_repairs_only_its_own_journal(tmp_path: Path, provider: Server, eval_file: Path, calm: Path) -> None:
    provider.control(latency=0.1)
    run = share(eval_file)
    both = [worker(run, name) for name in ("a", "b")]
    wait_for(lambda: min(done_by(run, "a"), done_by(run, "b")) >= CONCURRENCY, "answers for both")
    assert [end(process, signal.SIGKILL) for process in both] == [-signal.SIGKILL] * 2
    torn = b'{"key":"sha256:0'
    files = {name: run / "workers" / name / "outputs.jsonl" for name in ("a", "b")}
    for path in files.values():
        with path.open("ab") as file:
            file.write(torn)
    before = files["b"].read_bytes()
    provider.control(fail={"hang": 1.0})
    going = worker(run, "a")
    wait_for(lambda: provider.stats()["active"] == CONCURRENCY, "it to go on")
    assert files["b"].read_bytes() == before
    assert not files["a"].read_bytes().endswith(torn)
    assert (run / "workers" / "a" / "set-aside" / "outputs.jsonl").read_bytes() == torn + b"\n"
    assert end(going, signal.SIGTERM) == 143
    provider.control(fail={})
    leave(worker(run, "c"))
    assert not files["b"].read_bytes().endswith(torn), "the one who makes the report mends what is left"
    assert_each_once(run, ROWS)
    assert_same_numbers(run, calm)


def test_trials_with_errors_stay_pending_and_a_later_round_does_only_them(
    tmp_path: Path, provider: Server, calm: Path
) -> None:
    eval_file = write_eval(tmp_path, provider.base_url, rows=ROWS, limits={"concurrency": CONCURRENCY, "retries": 0})
    provider.control(fail={"500": 0.2})
    first = holdfast("eval", eval_file, "--workers", "3", cwd=tmp_path, check=3)
    run = run_dir(tmp_path)
    failed = ROWS - len(whole_outputs(run))
    assert 0 < failed < ROWS and provider.requests == ROWS
    assert f"{failed} trials have errors and stay pending" in first.stdout and not (run / "metrics.json").exists()
    provider.control(fail={})
    holdfast("eval", eval_file, "--workers", "2", cwd=tmp_path)
    assert provider.requests == ROWS + failed
    assert_each_once(run, ROWS)
    assert_same_numbers(run, calm)


def test_a_fatal_fault_is_reported_once_for_all_workers(tmp_path: Path, provider: Server, eval_file: Path) -> None:
    provider.control(status=401)
    ended = holdfast("eval", eval_file, "--workers", "2", cwd=tmp_path, check=3)
    assert ended.stdout.count("stopped: ") == 1 and "401" in ended.stdout
    provider.control(status=200)
    holdfast("eval", eval_file, "--workers", "2", cwd=tmp_path)
    assert_each_once(run_dir(tmp_path), ROWS)


def test_a_budget_stops_all_workers_and_a_higher_one_resumes(tmp_path: Path, provider: Server, eval_file: Path) -> None:
    provider.control(latency=0.05)
    ended = holdfast("eval", eval_file, "--workers", "2", "--token-budget", "60", cwd=tmp_path, check=3)
    assert "budget reached" in ended.stdout and 20 <= provider.requests < ROWS / 2
    asked = provider.requests
    at_once = holdfast("eval", eval_file, "--workers", "2", "--token-budget", "60", cwd=tmp_path, check=3)
    assert "budget reached" in at_once.stdout and provider.requests == asked
    holdfast("eval", eval_file, "--workers", "2", cwd=tmp_path)
    assert provider.requests == ROWS
    assert_each_once(run_dir(tmp_path), ROWS)


def test_evals_that_workers_cannot_run_are_rejected(tmp_path: Path, provider: Server, eval_file: Path) -> None:
    shown = "target.base_url=http://user:sesame@127.0.0.1:1/v1"
    assert "${NAME}" in holdfast("eval", eval_file, shown, "--workers", "2", cwd=tmp_path, check=2).stderr
    holdfast("eval", eval_file, "limits.token_budget=1", cwd=tmp_path, check=3)
    run = run_dir(tmp_path)
    assert "has no divided work" in holdfast("work", run, cwd=tmp_path, check=2).stderr
    run = share(eval_file)
    assert "'../a' is not a worker id" in holdfast("work", run, "--worker", "../a", cwd=tmp_path, check=2).stderr
    (tmp_path / "data.jsonl").write_text('{"id": "s0", "question": "other", "expected": "x"}\n')
    assert "no longer the one whose work was divided" in holdfast("work", run, cwd=tmp_path, check=3).stderr


class TestTwice:
    """A trial done twice by accident is harmless: every reader takes the same one."""

    @pytest.mark.parametrize("late", ["a", "b"])
    def test_the_output_that_started_last_counts(self, tmp_path: Path, late: str) -> None:
        for name in ("a", "b"):
            folder = tmp_path / "workers" / name
            folder.mkdir(parents=True)
            started = 20.0 if name == late else 10.0
            (folder / "outputs.jsonl").write_bytes(to_line(output_of(name, key="k", timing=Timing(started, 1.0))))
        for repair in (False, True):
            (ref,) = outputs_in(RunDir(tmp_path).load(repair=repair)).values()
            assert read_output(ref).output == late

    @pytest.mark.parametrize("places", [("", "workers/a"), ("workers/a", ""), ("workers/b", "workers/a")])
    def test_the_latest_verdict_counts(self, tmp_path: Path, places: tuple[str, str]) -> None:
        for number, place in enumerate(places):
            grade = Grade(
                "k", "s", 1, "x", "x", "g", None, "d", "passed", number / 2, 1.0, "", None, 0.0, None, 10.0 + number
            )
            (tmp_path / place).mkdir(parents=True, exist_ok=True)
            (tmp_path / place / "grades.jsonl").write_bytes(to_line(grade))
        assert RunDir(tmp_path).load(repair=False).verdicts("k")["g", None, "d"].score == 0.5

    def test_a_conversation_continues_in_the_order_of_its_calls_of_all_workers(self, tmp_path: Path) -> None:
        for name, times in {"a": (2.0, 4.0), "b": (1.0, 3.0)}.items():
            folder = tmp_path / "workers" / name
            folder.mkdir(parents=True)
            calls = [Step("k", "s", 1, 1, "turn", "r", 1, time, Usage(), time, 0.5) for time in times]
            (folder / "steps.jsonl").write_bytes(b"".join(map(to_line, calls)))
        places = RunDir(tmp_path).load(repair=False).steps("k")
        assert [call.response for call in read_steps(places)] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("start", range(7))
def test_following_others_line_by_line_ends_where_reading_everything_does(tmp_path: Path, start: int) -> None:
    folder = tmp_path / "workers" / "a"
    folder.mkdir(parents=True)
    used = Usage(3, 4, 1, 0.5)
    records = [
        ("steps", Step("k", "s", 1, 1, "turn", "r", 1, "", used, 1.0, 0.5)),
        ("steps", Step("other", "s", 2, 1, "turn", "r", 1, "", used, 2.0, 0.5)),
        ("steps", Step("k", "s", 1, 2, "turn", "r", 1, "", used, 3.0, 0.5)),
        ("errors", ErrorRecord("k", "s", 1, 1, "target", "server", "", 500, 4.0, 0.5, False)),
        ("outputs", output_of("x", key="k", usage=Usage(6, 8, 2, 1.0))),
        ("grades", Grade("k", "s", 1, "x", "x", "g", None, "d", "passed", 1.0, 1.0, "", None, 0.0, used, 5.0)),
    ]
    for name, record in records[:start]:
        with (folder / f"{name}.jsonl").open("ab") as file:
            file.write(to_line(record))  # type: ignore[arg-type]
    index = RunDir(tmp_path).load(repair=False)
    for name, record in records[start:]:
        line = to_line(record)  # type: ignore[arg-type]
        before = (index.spent().tokens, outputs_in(index), verdicts_in(index))
        for part in (line[:-9], line[-9:]):
            index.read()
            assert (index.spent().tokens, outputs_in(index), verdicts_in(index)) == before, "half a line does not count"
            with (folder / f"{name}.jsonl").open("ab") as file:
                file.write(part)
        index.read()
    whole = RunDir(tmp_path).load(repair=False)
    assert (outputs_in(index), verdicts_in(index), index.attempts) == (
        outputs_in(whole),
        verdicts_in(whole),
        whole.attempts,
    )
    assert index.begun() == whole.begun() and index.steps("other") == whole.steps("other")
    counts = ("tokens", "requests", "cost", "unpriced", "unmetered")
    assert [getattr(index.spent(), name) for name in counts] == [getattr(whole.spent(), name) for name in counts]
    assert whole.spent().tokens == (6 + 8) + 2 * (3 + 4), "the output, the call of the other trial, and the judge"


def test_a_worker_joins_a_large_run_from_its_cached_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_INDEX_BYTES", "1")
    (tmp_path / "workers" / "a").mkdir(parents=True)
    journals = [tmp_path / "outputs.jsonl", tmp_path / "workers" / "a" / "outputs.jsonl"]
    for number, path in enumerate(journals):
        path.write_bytes(to_line(output_of("x", key=f"k{number}")))
    RunDir(tmp_path).load(repair=True)
    cached = journals[1].stat().st_size
    with journals[1].open("ab") as file:
        file.write(to_line(output_of("x", key="new")))
    starts: list[int] = []

    def read(path: Path, start: int, stop: int) -> Any:
        starts.append(start)
        return read_blocks(path, start, stop)

    monkeypatch.setattr("holdfast.store.index.read_blocks", read)
    index = RunDir(tmp_path).load(repair=False)
    assert sorted(key for key, _ in index.all_outputs()) == ["k0", "k1", "new"]
    assert starts == [cached], "what the published index covers is not read again"


class TestClaims:
    def test_a_search_looks_at_few_leases_and_in_turn_at_all(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        owners = [f"w{number}" for number in range(40)]
        for number, owner in enumerate(owners):
            (tmp_path / f"{number:05}.by.{owner}").touch()
        asked: list[str] = []
        monkeypatch.setattr(RunLease, "take_if_dead", lambda lease: asked.append(lease._path.parent.name))
        claims = Claims(tmp_path, len(owners), "idle", RunDir(tmp_path / "run"))
        assert claims.take() is None
        assert len(asked) == 8
        for _ in range(4):
            assert claims.take() is None
        assert sorted(asked) == sorted(owners)

    @given(pending=st.sets(st.integers(0, 5000)), workers=st.integers(1, 40))
    def test_chunks_hold_every_trial_left_once_and_in_order(self, pending: set[int], workers: int) -> None:
        chunks = cut(sorted(pending), workers)
        assert all(first < end for first, end in chunks)
        assert all(end <= first for (_, end), (first, _) in pairwise(chunks))
        held = [number for first, end in chunks for number in range(first, end) if number in pending]
        assert held == sorted(pending)

    @settings(max_examples=40)  # each plays a whole round in files
    @given(data=st.data(), count=st.integers(1, 6))
    def test_each_chunk_is_done_and_never_held_by_two_live_workers(self, data: st.DataObject, count: int) -> None:
        """Workers claim, finish, give back, die, and dead ones who only seemed so go on with what they had."""
        folder = Path(tempfile.mkdtemp())
        try:
            _play(RunDir(folder / "run"), data, count)
        finally:
            shutil.rmtree(folder)


def _play(rundir: RunDir, data: st.DataObject, count: int) -> None:
    rundir.path.mkdir()
    chunks = [(number, number + 1) for number in range(count)]
    place = begin_round(rundir, Round(chunks=chunks, eval={}, folder="", eval_file=None))
    alive: dict[str, tuple[Claims, RunLease, set[int]]] = {}
    ghosts: list[tuple[Claims, set[int]]] = []
    finished: Counter[int] = Counter()

    def join(name: str) -> tuple[Claims, RunLease, set[int]]:
        path = worker_lease(rundir, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        lease = RunLease(path)
        lease.acquire(0)
        return Claims(place, count, name, rundir), lease, set()

    def take(name: str) -> bool:
        claims, _, mine = alive[name]
        taken = claims.take()
        if taken is not None:
            assert all(taken[0] not in others for _, _, others in alive.values())
            mine.add(taken[0])
        return taken is not None

    def finish(claims: Claims, mine: set[int]) -> None:
        number = mine.pop()
        try:
            claims.finish(number)
            finished[number] += 1
        except Fault:
            assert claims in [ghost for ghost, _ in ghosts], "a live worker never loses a chunk"

    for _ in range(data.draw(st.integers(0, 25))):
        name = data.draw(st.sampled_from("abc"))
        if name not in alive:
            alive[name] = join(name)
        claims, lease, mine = alive[name]
        action = data.draw(st.sampled_from(["take", "take", "finish", "give back", "die", "ghost"]))
        if action == "take":
            take(name)
        elif action == "finish" and mine:
            finish(claims, mine)
        elif action == "give back" and mine:
            claims.give_back(mine.pop())
        elif action == "die":
            lease.release()  # nobody holds it, and its claims are still there
            del alive[name]
            ghosts.append((claims, mine))
        elif action == "ghost" and ghosts:
            ghost, had = data.draw(st.sampled_from(ghosts))
            if had and not any(number in others for _, _, others in alive.values() for number in had):
                finish(ghost, had)
    for _, lease, _ in alive.values():
        lease.release()
    alive = {"z": join("z")}
    claims, lease, mine = alive["z"]
    while take("z"):
        finish(claims, mine)
    lease.release()
    assert claims.all_done
    assert set(finished) == set(range(count))
