"""`holdfast status` and `holdfast logs` say what is so, to everybody who may read it, and nothing that nobody knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from holdfast.apps.cluster.remote import invocation as layout
from holdfast.apps.cluster.remote.invocation import Begin, End
from holdfast.apps.cluster.remote.ledger import DOUBT_SECONDS, Intent, Ledger
from holdfast.apps.cluster.remote.registry import InvocationRegistry
from holdfast.apps.cluster.remote.slurm import JobName, Slurm
from holdfast.apps.cluster.remote.transport import Here
from holdfast.apps.cluster.watch.find import Subject
from holdfast.apps.cluster.watch.status import look
from tests.support.invocations import SLEEP, Launched, end_all, env_of, launched, public_folder, register, running
from tests.support.running import ROOT, holdfast, run_dir, server, start, wait_for, write_eval
from tests.support.slurm import submit_script, wait_for_job

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.apps.cluster.watch.status import Picture
    from tests.support.slurm import Cluster


def status(what: str | Path, tmp_path: Path, env: dict[str, str], check: int = 0) -> Any:
    return json.loads(holdfast("status", what, "--json", cwd=tmp_path, env=env, check=check).stdout)


def test_a_running_task_shows_its_progress_and_a_pending_one_its_reason(
    slurm: Cluster, invocation: Launched, tmp_path: Path
) -> None:
    job = running(invocation, slurm)
    invocation.state(
        phase="running", done=120, total=2000, rate=4.0, errors=3, attempt=1, job=job, run_dir="/r/e/m-12345678"
    )
    invocation.submit("main", "--hold", task=1)
    register(invocation, tmp_path / "home", tasks=("gsm8k", "mmlu"))
    env = env_of(slurm, tmp_path / "home")
    first, second = status(invocation.id[:6], tmp_path, env)["tasks"]
    assert (first["status"], first["done"], first["total"], first["errors"]) == ("running", 120, 2000, 3)
    assert first["eta"] == pytest.approx(470)
    (one,) = first["jobs"]
    assert (one["id"], one["state"]) == (job, "running") and one["name"].endswith(".main")
    assert one["nodes"].startswith("node")
    assert second["status"] == "pending" and "scontrol release" in second["reason"]
    (task,) = status(f"{invocation.id}.1", tmp_path, env)["tasks"]
    assert task == second
    shown = holdfast("status", invocation.id, cwd=tmp_path, env=env).stdout
    assert "120/2,000" in shown and "7m 50s" in shown and "scontrol release" in shown and "/r/e/m-12345678" in shown
    listed = holdfast("status", cwd=tmp_path, env=env).stdout
    assert invocation.id in listed and "1 running, 1 pending" in listed


@pytest.mark.parametrize("way", ["invocation", "task", "run", "ssh", "relative"])
def test_status_finds_an_invocation_by_its_path(slurm: Cluster, invocation: Launched, tmp_path: Path, way: str) -> None:
    running(invocation, slurm)
    run = invocation.base / "runs" / "e" / "m-12345678"
    run.mkdir(parents=True)
    (run / "manifest.json").write_text("{}")
    invocation.state(phase="running", done=1, total=2, run_dir=str(run))
    what = {
        "invocation": str(invocation.directory),
        "task": f"{invocation.directory}/0",
        "run": str(run),
        "ssh": f"cluster:{run}",
        "relative": f"holdfast/{invocation.id}",
    }[way]
    shown = status(what, invocation.base, env_of(slurm, tmp_path / "nothing here"))
    assert shown["id"] == invocation.id and shown["tasks"][0]["status"] == "running"
    assert len(shown["tasks"]) == (2 if way in ("invocation", "relative") else 1)


def test_a_colleague_with_read_access_sees_the_same(slurm: Cluster, tmp_path: Path) -> None:
    registry = InvocationRegistry(tmp_path / "none" / "invocations")
    with public_folder() as base:
        invocation = launched(slurm.here, base, tasks=("gsm8k", "mmlu"))
        theirs, mine = (Subject(way, str(invocation.directory)) for way in (slurm.ssh("colleague"), slurm.here))
        job = running(invocation, slurm)
        invocation.state(phase="running", done=5, total=10, rate=1.0, job=job)
        try:
            seen = look(theirs, registry)
            assert [(task.status, task.done, task.eta) for task in seen.tasks] == [
                ("running", 5, 5.0),
                ("unsubmitted", 0, None),
            ]
            same = {"looked": 0.0, "place": ""}
            assert _still(replace(seen, **same)) == _still(replace(look(mine, registry), **same))
        finally:
            end_all(slurm, invocation)
        wait_for_job(Slurm(slurm.here), str(JobName(invocation.id, 0, "main")), lambda state: not state.active)
        assert look(theirs, registry).tasks[0].status == "interrupted"


def _still(picture: Picture) -> Picture:
    """Without what moves with the clock."""
    tasks = [
        replace(task, jobs=tuple(replace(job, elapsed=None, start=None) for job in task.jobs)) for task in picture.tasks
    ]
    return replace(picture, tasks=tuple(tasks))


@pytest.mark.parametrize(
    ("state", "word", "reason"),
    [
        ({"phase": "done", "done": 10, "total": 10, "exit_code": 0}, "done", ""),
        ({"phase": "stopped", "reason": "max_walltime"}, "stopped", "max_walltime"),
        ({"phase": "running", "done": 3, "total": 10}, "interrupted", "the last one: cancelled"),
    ],
)
def test_without_jobs_a_task_has_its_last_state_or_is_interrupted(
    slurm: Cluster, invocation: Launched, state: dict[str, Any], word: str, reason: str
) -> None:
    job = invocation.submit()
    Slurm(slurm.here).cancel([job.intent.name])
    wait_for_job(Slurm(slurm.here), job.intent.name, lambda seen: not seen.active)
    invocation.state(**state)
    first, second = look(Subject(slurm.here, str(invocation.directory))).tasks
    assert first.status == word and reason in first.reason
    assert second.status == "unsubmitted"


def test_an_interrupted_task_shows_how_its_last_attempt_ended(slurm: Cluster, invocation: Launched) -> None:
    invocation.submit("main", script=b"#!/bin/sh\nexit 1\n")
    name = str(JobName(invocation.id, 0, "main"))
    wait_for_job(Slurm(slurm.here), name, lambda seen: not seen.active)
    layout.append_start(invocation.place(), Begin(attempt=1, job="1", node="node1", time=1.0))
    assert (
        look(Subject(slurm.here, str(invocation.directory))).tasks[0].reason == "no job is left; the last one: failed"
    )
    layout.append_start(invocation.place(), End(attempt=1, job="1", time=2.0, why="the server died"))
    assert "the server died" in look(Subject(slurm.here, str(invocation.directory))).tasks[0].reason


def test_a_successor_in_the_queue_is_pending_not_interrupted(slurm: Cluster, invocation: Launched) -> None:
    first = invocation.submit("main", script=b"#!/bin/sh\nexit 75\n")
    invocation.submit("main-2", f"--dependency=afternotok:{first.id}", "--hold")
    wait_for_job(Slurm(slurm.here), str(JobName(invocation.id, 0, "main")), lambda seen: not seen.active)
    invocation.state(phase="draining", done=3, total=10)
    task = look(Subject(slurm.here, str(invocation.directory))).tasks[0]
    assert task.status == "pending" and task.done == 3


def test_a_finished_task_shows_the_job_that_finished_it(slurm: Cluster, invocation: Launched, tmp_path: Path) -> None:
    first = invocation.submit("main", script=b"#!/bin/sh\nexit 0\n")
    wait_for_job(Slurm(slurm.here), first.intent.name, lambda seen: not seen.active)
    successor = invocation.submit("main-2", "--hold")
    Slurm(slurm.here).cancel([successor.intent.name])
    wait_for_job(Slurm(slurm.here), successor.intent.name, lambda seen: not seen.active)
    invocation.state(phase="done", done=1, total=1)
    shown = holdfast("status", invocation.directory, cwd=tmp_path, env=env_of(slurm, tmp_path / "home")).stdout
    assert f".0  main  {first.id}" in shown and "cancelled" not in shown


def test_a_job_that_waits_again_gives_its_own_reason_and_not_its_successors(
    slurm: Cluster, invocation: Launched
) -> None:
    first = running(invocation, slurm)
    invocation.submit("main-2", f"--dependency=afternotok:{first}", "--kill-on-invalid-dep=yes")
    slurm.here.check(["scontrol", "requeuehold", first])
    wait_for_job(Slurm(slurm.here), str(JobName(invocation.id, 0, "main")), lambda seen: seen.state == "pending")
    task = look(Subject(slurm.here, str(invocation.directory))).tasks[0]
    assert task.status == "pending" and "scontrol release" in task.reason
    assert [job.why for job in task.jobs][1] == "it waits for another job to end"


def test_an_intent_without_an_answer_is_not_called_failed(slurm: Cluster, invocation: Launched) -> None:
    name = str(JobName(invocation.id, 0, "main"))
    Ledger(slurm.here, str(invocation.directory)).write(Intent("0" * 16, name, "", time.time(), "elsewhere", 1, "1"))
    task = look(Subject(slurm.here, str(invocation.directory))).tasks[0]
    assert task.status == "pending" and "not known" in task.reason and task.jobs[0].id == ""


def test_a_submission_whose_answer_is_overdue_is_settled(slurm: Cluster, invocation: Launched) -> None:
    ledger = Ledger(slurm.here, str(invocation.directory))
    names = [str(JobName(invocation.id, task, "main")) for task in (0, 1)]
    old = time.time() - DOUBT_SECONDS - 20
    ledger.write(*(Intent(f"{task}" * 16, name, "", old, "elsewhere", task, "1") for task, name in enumerate(names)))
    submitted = submit_script(
        Slurm(slurm.here), SLEEP, name=names[1], comment="1" * 16, options=["--output=/dev/null", "--hold"]
    )
    lost, found = look(Subject(slurm.here, str(invocation.directory))).tasks
    assert (lost.status, lost.reason) == ("unsubmitted", "no job was submitted")
    assert found.status == "pending" and [job.id for job in found.jobs] == [submitted]
    assert not any(job.open for job in ledger.jobs())


def test_of_many_jobs_that_are_submitted_at_once_none_is_given_up_early(slurm: Cluster, invocation: Launched) -> None:
    name, ago = str(JobName(invocation.id, 0, "main")), time.time() - DOUBT_SECONDS - 20
    intents = [Intent(f"{number:016x}", name, "", ago, "elsewhere", 1, "1") for number in range(9)]
    Ledger(slurm.here, str(invocation.directory)).write(*intents)
    assert look(Subject(slurm.here, str(invocation.directory))).tasks[0].status == "pending"


def test_workers_without_a_main_job_are_mentioned(slurm: Cluster, invocation: Launched) -> None:
    invocation.submit("main", script=b"#!/bin/sh\nexit 1\n")
    invocation.submit("workers", "--array=1-2")
    wait_for_job(Slurm(slurm.here), str(JobName(invocation.id, 0, "main")), lambda seen: not seen.active)
    task = look(Subject(slurm.here, str(invocation.directory))).tasks[0]
    expected = "no main job is left; the last one: failed; 2 worker jobs are left, which end by themselves"
    assert (task.status, task.reason) == ("interrupted", expected)


def test_a_silent_controller_makes_tasks_unknown_never_failed(own_slurm: Cluster, tmp_path: Path) -> None:
    one = launched(own_slurm.here, tmp_path / "base")
    running(one, own_slurm)
    one.state(phase="running", done=5, total=10, rate=1.0)
    register(one, tmp_path / "home")
    env = env_of(own_slurm, tmp_path / "home")
    assert status(one.id, tmp_path, env)["tasks"][0]["status"] == "running"
    own_slurm.kill_controller()
    env["SLURM_CONF"] = str(own_slurm.impatient._env["SLURM_CONF"])
    silent = status(one.id, tmp_path, env, check=3)
    assert silent["tasks"][0]["status"] == "unknown" and silent["tasks"][0]["done"] == 5 and silent["unreachable"]
    shown = holdfast("status", one.id, cwd=tmp_path, env=env, check=3).stdout
    assert "not reachable" in shown and "failed" not in shown


def test_an_unreachable_cluster_is_reported_with_the_last_known_status(
    slurm: Cluster, invocation: Launched, tmp_path: Path
) -> None:
    running(invocation, slurm)
    invocation.state(phase="running", done=7, total=10)
    register(invocation, tmp_path / "home", host="cluster", tasks=("gsm8k", "mmlu"))
    env = env_of(slurm, tmp_path / "home")
    assert status(invocation.id, tmp_path, env)["tasks"][0]["status"] == "running"
    config = tmp_path / "broken"
    config.write_text("Host cluster\n  HostName 127.0.0.1\n  Port 1\n  ControlPath none\n")
    broken = env | {"HOLDFAST_SSH_CONFIG": str(config)}
    shown = status(invocation.id, tmp_path, broken, check=3)
    assert shown["tasks"][0]["status"] == "unknown" and shown["tasks"][0]["done"] == 7
    assert "refused" in shown["unreachable"]
    assert status(f"{invocation.id}.1", tmp_path, broken, check=3)["tasks"][0]["id"] == f"{invocation.id}.1"
    listed = holdfast("status", cwd=tmp_path, env=broken, check=3)
    assert invocation.id in listed.stdout and "unknown" in listed.stdout and "failed" not in listed.stdout
    for task in (0, 1):
        invocation.state(task, phase="done")
    assert status(invocation.id, tmp_path, env)["tasks"][1]["status"] == "done"
    assert "2 done" in holdfast("status", cwd=tmp_path, env=broken).stdout  # which nobody has to be asked about


def test_ids_are_found_by_their_prefix_and_ambiguous_ones_are_refused(slurm: Cluster, tmp_path: Path) -> None:
    home = tmp_path / "home"
    two = [Launched(f"abc{number}" + 12 * "0", tmp_path / "base", slurm.here) for number in (1, 2)]
    for one in two:
        register(one, home)
    env = env_of(slurm, home)
    both = holdfast("status", "abc", cwd=tmp_path, env=env, check=2).stderr
    assert two[0].id in both and two[1].id in both
    assert "no invocation 'ffff'" in holdfast("status", "ffff", cwd=tmp_path, env=env, check=2).stderr
    assert "does not exist or is not accessible" in holdfast("status", "abc1", cwd=tmp_path, env=env, check=2).stderr
    assert "there is no .7" in holdfast("status", "abc1.7", cwd=tmp_path, env=env, check=2).stderr
    (tmp_path / "empty").mkdir()
    wrong = holdfast("status", "./empty", cwd=tmp_path, env=env, check=2).stderr
    assert "neither an invocation's directory nor a run's" in wrong


def test_status_writes_nothing_into_the_invocation(slurm: Cluster, invocation: Launched) -> None:
    running(invocation, slurm)
    invocation.state(phase="running", done=1, total=2)
    before = sorted((path, path.stat().st_mtime_ns) for path in invocation.base.rglob("*"))
    look(
        Subject(slurm.here, str(invocation.directory)),
        InvocationRegistry(invocation.base.parent / "elsewhere" / "invocations"),
    )
    assert sorted((path, path.stat().st_mtime_ns) for path in invocation.base.rglob("*")) == before


def test_the_list_names_a_few_tasks_of_many(tmp_path: Path) -> None:
    names = tuple(f"benchmark-{number}" for number in range(20))
    one = launched(Here(pauses=()), tmp_path / "base", tasks=names)
    register(one, tmp_path / "home", tasks=names)
    for number in range(20):
        one.state(number, phase="done")
    home = {"HOLDFAST_HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"}
    shown = holdfast("status", cwd=tmp_path, env=home, check=None).stdout
    assert "benchmark-0, benchmark-1, benchmark-2 and 17 more" in shown
    assert max(map(len, shown.splitlines())) < 120


# Logs


def test_logs_show_the_last_attempt_or_all_and_other_parts_by_name(
    slurm: Cluster, invocation: Launched, tmp_path: Path
) -> None:
    env = env_of(slurm, tmp_path / "home")
    invocation.log("main-12-0.log", "first attempt\n")
    os.utime(invocation.log("main-12-0.log", ""), (1, 1))
    invocation.log("main-9-0.log", "second attempt, whose id is smaller\n")
    invocation.log("deployment-8-0.log", "an earlier server\n")
    os.utime(invocation.log("deployment-8-0.log", ""), (1, 1))
    invocation.log("deployment-9-0.log", "serving\n")
    invocation.log("judge-9-0.log", "judging\n")
    invocation.log("worker-1-10-0.log", "worker one\n")
    invocation.log("worker-12-10-0.log", "worker twelve\n")
    what = f"{invocation.directory}/0"

    def logs(*options: str) -> str:
        return holdfast("logs", what, *options, cwd=tmp_path, env=env).stdout

    assert logs() == "second attempt, whose id is smaller\n"
    assert logs("--all") == "first attempt\nsecond attempt, whose id is smaller\n"
    assert logs("--deployment") == "serving\n"
    assert logs("--server", "judge") == "judging\n"
    invocation.log("deployment-9-0-1.log", "a second instance\n")
    assert sorted(logs("--deployment").splitlines()) == ["a second instance", "serving"]
    assert logs("--worker", "1") == "worker one\n"
    missing = holdfast("logs", what, "--worker", "7", cwd=tmp_path, env=env, check=2).stderr
    assert "no worker-7 log" in missing
    both = holdfast("logs", invocation.directory, cwd=tmp_path, env=env).stdout
    assert both == "[gsm8k] second attempt, whose id is smaller\n"


@pytest.mark.parametrize("host", [None, "cluster"])
def test_following_continues_with_the_next_attempt_and_ends_with_the_task(
    slurm: Cluster, invocation: Launched, tmp_path: Path, host: str | None
) -> None:
    job = running(invocation, slurm)
    invocation.state(phase="running", done=1, total=2)
    invocation.state(1, phase="done")
    invocation.log("main-5-0.log", "one\ntwo, not yet ")
    register(invocation, tmp_path / "home", host=host, tasks=("gsm8k", "mmlu"))
    following = start("logs", "-f", f"{invocation.id}.0", cwd=tmp_path, env=env_of(slurm, tmp_path / "home"))
    assert following.stdout is not None
    output: list[str] = []
    reader = threading.Thread(target=lambda: output.extend(following.stdout))  # type: ignore[arg-type]
    reader.start()
    try:
        wait_for(lambda: output == ["one\n"], "the first line")
        invocation.log("main-5-0.log", "whole\n")
        wait_for(lambda: output[1:] == ["two, not yet whole\n"], "the rest of the line")
        invocation.log("main-5-1.log", "after a requeue\n")
        wait_for(lambda: output[2:] == ["after a requeue\n"], "the next attempt")
        invocation.log("main-6-0.log", "the successor\nits last words")
        invocation.state(phase="done", done=2, total=2)
        Slurm(slurm.here).cancel(ids={job: str(JobName(invocation.id, 0, "main"))})
        assert following.wait(60) == 0
    finally:
        following.kill()
        reader.join()
        following.communicate()
    assert output[3:] == ["the successor\n", "its last words\n"]


# Runs without a cluster


def test_the_status_of_a_run_is_running_finished_or_how_to_resume(tmp_path: Path) -> None:
    with server(latency=0.01) as provider:
        eval_file = write_eval(tmp_path, provider.base_url, rows=400, limits={"concurrency": 2})
        process = start("eval", eval_file, cwd=tmp_path)
        outputs = wait_for(lambda: next(tmp_path.glob("runs/e/*/outputs.jsonl"), None), "the run")
        wait_for(lambda: outputs.stat().st_size, "an output")
        run = run_dir(tmp_path)
        status = json.loads(holdfast("status", run, "--json", cwd=tmp_path).stdout)
        assert status["status"] == "running" and status["total"] == 400
        assert [f"process {process.pid} on {os.uname().nodename}"] == [who.split(",")[0] for who in status["held_by"]]
        process.kill()
        process.communicate()
        shown = holdfast("status", run, cwd=tmp_path).stdout
        assert "not finished: " in shown and "of 400 trials" in shown and f"holdfast resume {run}" in shown
        assert "begin pid=" in holdfast("logs", run, cwd=tmp_path).stdout
        provider.control(latency=0)
        followed = start("logs", "-f", run, cwd=tmp_path)
        holdfast("eval", eval_file, cwd=tmp_path)
        assert "begin pid=" in followed.communicate(timeout=300)[0]
    assert "finished: score 0.500, coverage 100.0%" in holdfast("status", run, cwd=tmp_path).stdout
    assert "finished" in holdfast("status", run.name.rpartition("-")[2], cwd=tmp_path).stdout


def test_read_permission_is_enough_for_the_status_of_a_run() -> None:
    script = (
        "import os, sys; from pathlib import Path; from holdfast.apps.cli.status import look_at_run; "
        "run = Path(sys.argv[1]); look_at_run(run); os.setgroups([]); os.setgid(65534); os.setuid(65534); "
        "print(os.access(run, os.W_OK), look_at_run(run).status)"
    )
    with server() as provider, public_folder() as folder:
        holdfast("eval", write_eval(folder, provider.base_url), cwd=folder)
        done = subprocess.run([sys.executable, "-c", script, run_dir(folder)], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "False finished\n", done.stderr
