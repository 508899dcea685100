"""`holdfast kill` ends what is meant, says so, and touches nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from holdfast.apps.cluster.remote.invocation import read_state, write_stop
from holdfast.apps.cluster.remote.ledger import Intent, Ledger, Submitted
from holdfast.apps.cluster.remote.registry import new_invocation
from holdfast.apps.cluster.remote.slurm import JobName, Slurm
from holdfast.apps.cluster.remote.transport import Here
from holdfast.apps.cluster.watch.cleanup import kill
from holdfast.apps.cluster.watch.find import Subject
from holdfast.apps.cluster.watch.status import look
from holdfast.errors import Unreachable, UsageError
from holdfast.store.lease import Holder, start_token, this_system
from holdfast.store.run_lock import holders
from holdfast.store.rundir import RunDir
from tests.support.invocations import SLEEP, Launched, end_all, env_of, launched, public_folder, register, running
from tests.support.running import holdfast, lines, run_dir, server, start, wait_for, write_eval
from tests.support.slurm import submit_script, wait_for_job

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.apps.cluster.remote.invocation import Phase
    from holdfast.apps.cluster.remote.transport import Transport
    from tests.support.slurm import Cluster


def foreign(slurm: Slurm, name: str) -> str:
    """Submit a job that does not belong to the invocation, and return its id."""
    return submit_script(slurm, SLEEP, name=name, comment="somebody else's", options=["--output=/dev/null"])


def states(slurm: Slurm, name: str) -> list[str]:
    return [job.state for job in slurm.jobs(names=[name])]


def test_kill_cancels_all_jobs_of_an_invocation_and_no_others(
    transport: Transport, slurm: Cluster, invocation: Launched
) -> None:
    here = Slurm(slurm.here)
    job = running(invocation, slurm)
    invocation.submit("main-2", f"--dependency=afternotok:{job}")
    invocation.submit("workers", "--array=1-3")
    invocation.submit("main", "--hold", task=1)
    other = new_invocation()
    similar = [
        f"hf-{invocation.id}0.0.main",
        f"hf-{invocation.id}",
        f"x-hf-{invocation.id}.0.main",
        f"hf-{other}.0.main",
    ]
    ids = [foreign(here, name) for name in similar]
    try:
        ended, remain = kill(Subject(transport, str(invocation.directory)), "test", poll=0.1)
        assert remain == [] and len(ended) == 6
        assert not [state for state in here.jobs(invocation=invocation.id) if state.active]
        assert [states(here, name)[0] in ("running", "pending") for name in similar] == [True] * 4
        assert (invocation.directory / "stop").exists()
        pictures = look(Subject(transport, str(invocation.directory))).tasks
        assert [task.status for task in pictures] == ["stopped", "stopped"]
        again = kill(Subject(transport, str(invocation.directory)), "test", poll=0.1)
        assert again == ([], [])
    finally:
        for name, job_id in zip(similar, ids, strict=True):
            slurm.here.check(["scancel", f"--name={name}", job_id])


def test_a_foreign_job_that_reuses_a_recorded_id_stays_alive(slurm: Cluster, invocation: Launched) -> None:
    here = Slurm(slurm.here)
    name = f"somebody-{new_invocation()}"
    job = foreign(here, name)
    ledger = Ledger(slurm.here, str(invocation.directory))
    ours = str(JobName(invocation.id, 0, "main"))
    ledger.write(
        Intent("a" * 16, ours, "", time.time() - 1000, "h", 1, "1"), Submitted("a" * 16, job, time.time() - 999)
    )
    try:
        wait_for(lambda: states(here, name) == ["running"], "the other job")
        assert kill(Subject(slurm.here, str(invocation.directory)), "test", poll=0.1) == ([], [])
        assert states(here, name) == ["running"]
        assert look(Subject(slurm.here, str(invocation.directory))).tasks[0].jobs[0].state == "gone"
    finally:
        slurm.here.check(["scancel", f"--name={name}", job])


def test_a_job_that_stops_because_of_the_mark_counts_as_stopped(
    slurm: Cluster, invocation: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, name = running(invocation, slurm), str(JobName(invocation.id, 0, "main"))

    def mark(transport: Transport, directory: str, why: str) -> None:
        write_stop(transport, directory, why)
        slurm.here.check(["scancel", job])  # stands for a job that reads the mark before it is cancelled
        wait_for_job(Slurm(slurm.here), name, lambda state: not state.active)

    monkeypatch.setattr("holdfast.apps.cluster.watch.cleanup.write_stop", mark)
    ended, remain = kill(Subject(slurm.here, str(invocation.directory)), "test", poll=0.1)
    assert remain == [] and [name in shown for shown in ended] == [True]


def test_kill_can_end_only_one_task(slurm: Cluster, invocation: Launched, tmp_path: Path) -> None:
    running(invocation, slurm, 0)
    running(invocation, slurm, 1)
    register(invocation, tmp_path / "home", tasks=("gsm8k", "mmlu"))
    env = env_of(slurm, tmp_path / "home")
    stdout = holdfast("kill", f"{invocation.id}.1", cwd=tmp_path, env=env).stdout
    assert (
        f"hf-{invocation.id}.1.main" in stdout
        and "cancelled 1 job\n" in stdout
        and f"holdfast resume {invocation.id}.1" in stdout
    )
    first, second = look(Subject(slurm.here, str(invocation.directory))).tasks
    assert (first.status, second.status) == ("starting", "stopped")
    assert not (invocation.directory / "stop").exists() and (invocation.directory / "1" / "stop").exists()
    assert "cancelled 1 job\n" in holdfast("kill", invocation.directory, cwd=tmp_path, env=env).stdout
    assert "no jobs were running" in holdfast("kill", invocation.id[:5], cwd=tmp_path, env=env).stdout


def test_kill_does_not_offer_to_resume_a_finished_invocation(
    slurm: Cluster, invocation: Launched, tmp_path: Path
) -> None:
    invocation.state(0, phase="done")
    env = env_of(slurm, tmp_path / "home")
    stdout = holdfast("kill", invocation.directory / "0", cwd=tmp_path, env=env).stdout
    assert "is done" in stdout and "resume" not in stdout
    assert "holdfast resume" in holdfast("kill", invocation.directory, cwd=tmp_path, env=env).stdout, "one is not"


def test_a_job_that_was_submitted_unseen_is_ended_too(slurm: Cluster, invocation: Launched) -> None:
    here, name = Slurm(slurm.here), str(JobName(invocation.id, 0, "main"))
    ledger = Ledger(slurm.here, str(invocation.directory))
    ledger.write(Intent("b" * 16, name, "", time.time(), os.uname().nodename, 2**22 + 1, "1"))
    submit_script(here, SLEEP, name=name, comment="b" * 16, options=["--output=/dev/null"])
    ended, _ = kill(Subject(slurm.here, str(invocation.directory)), "test", poll=0.1)
    assert len(ended) == 1 and wait_for_job(here, name, lambda job: not job.active)
    assert [job.id is not None for job in ledger.jobs()] == [True]


def test_another_users_invocation_is_refused_with_its_owner(slurm: Cluster) -> None:
    with public_folder() as base:
        invocation = launched(slurm.here, base)
        job = running(invocation, slurm)
        try:
            with pytest.raises(UsageError, match="is an invocation of root"):
                kill(Subject(slurm.ssh("colleague"), str(invocation.directory)), "test")
            assert not (invocation.directory / "stop").exists()
            assert [state.id for state in Slurm(slurm.here).jobs(invocation=invocation.id) if state.active] == [job]
        finally:
            end_all(slurm, invocation)


def test_without_slurms_answer_kill_leaves_its_mark_and_reports_that(own_slurm: Cluster, tmp_path: Path) -> None:
    invocation = launched(own_slurm.here, tmp_path / "base")
    running(invocation, own_slurm)
    own_slurm.kill_controller()
    with pytest.raises(Unreachable, match="jobs that start from now on will not continue it"):
        kill(Subject(own_slurm.impatient, str(invocation.directory)), "test")
    assert (invocation.directory / "stop").exists()


@pytest.mark.parametrize("marked", ["", "0"])
@pytest.mark.parametrize(("phase", "then"), [("done", "done"), ("running", "stopped")])
def test_a_job_that_begins_after_the_mark_does_nothing(tmp_path: Path, marked: str, phase: Phase, then: str) -> None:
    invocation = launched(Here(pauses=()), tmp_path, executor="local")
    invocation.state(phase=phase)
    write_stop(invocation.transport, str(invocation.directory / marked), "test")
    subprocess.run(
        [sys.executable, "-m", "holdfast.apps.cluster.job", invocation.place().path, "--role", "main"], check=True
    )
    assert read_state(invocation.transport, invocation.place()).phase == then


# A run on this machine


def test_kill_stops_the_process_of_a_run_without_loss(tmp_path: Path) -> None:
    with server(latency=0.02) as provider:
        eval_file = write_eval(tmp_path, provider.base_url, rows=2000, limits={"concurrency": 2})
        process = start("eval", eval_file, cwd=tmp_path)
        outputs = wait_for(lambda: next(tmp_path.glob("runs/e/*/outputs.jsonl"), None), "the run")
        wait_for(lambda: outputs.stat().st_size, "an output")
        run = run_dir(tmp_path)
        stdout = holdfast("kill", run, cwd=tmp_path).stdout
        assert f"stopped process {process.pid}" in stdout and f"holdfast resume {run}" in stdout
        process.communicate(timeout=300)
    assert process.returncode == 143
    assert lines(outputs) and not (run / "metrics.json").exists()
    assert "no process holds" in holdfast("kill", run, cwd=tmp_path).stdout


def test_kill_spares_a_process_that_reuses_the_id_of_a_holder(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "e" / "m-12345678")
    run.path.mkdir(parents=True)
    run.manifest.write_text("{}")
    other = subprocess.Popen(["sleep", "600"])
    try:
        token = start_token(other.pid)
        here, then = this_system(), str(int(token) - 1000)
        holder = Holder(os.uname().nodename, other.pid, time.time(), start=then, system=here)
        assert msgspec.structs.replace(holder, start=token).is_here and not holder.is_here
        run.lease.write_bytes(msgspec.json.encode(holder))
        assert holders(run) == []
        assert "no process holds" in holdfast("kill", run.path, cwd=tmp_path).stdout
        assert other.poll() is None
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
