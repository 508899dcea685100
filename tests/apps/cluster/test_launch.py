"""Launches on a real Slurm, from a configuration to metrics.json, with every way of being interrupted between."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from holdfast.apps.cluster.config.tree import compiled_yaml
from holdfast.apps.cluster.job.context import JobContext
from holdfast.apps.cluster.job.main import JobRun
from holdfast.apps.cluster.remote import invocation as layout
from holdfast.apps.cluster.remote.executor import active_main_jobs
from holdfast.apps.cluster.remote.invocation import Begin, End
from holdfast.apps.cluster.remote.ledger import Ledger
from holdfast.apps.cluster.remote.local import LocalExecutor
from holdfast.apps.cluster.remote.registry import InvocationRegistry
from holdfast.apps.cluster.remote.submit import start_jobs
from holdfast.apps.cluster.remote.transport import Here
from holdfast.apps.cluster.watch.find import Subject
from holdfast.apps.cluster.watch.logs import follow
from holdfast.apps.cluster.watch.status import look
from tests.support.invocations import launched
from tests.support.launching import Site, calmly, deployment, free_port
from tests.support.running import holdfast, server, start, wait_for
from tests.support.slurm import Cluster

if TYPE_CHECKING:
    from holdfast.apps.cluster.remote.registry import Invocation
    from holdfast.apps.cluster.remote.slurm import JobState
    from tests.support.running import Server


@pytest.fixture
def site(tmp_path: Path, slurm: Cluster) -> Site:
    return Site(tmp_path, slurm, slurm.here)


def test_a_launch_over_ssh_is_followed_to_its_numbers(tmp_path: Path, sshd: Cluster) -> None:
    site = Site(tmp_path, sshd, sshd.ssh())
    with server() as model:
        site.write(model.base_url)
        invocation = site.submit()
        lines: list[str] = []
        code = follow(site.transport, invocation, lines.append)
        state = site.state(invocation)
        assert (code, state.phase) == (0, "done"), site.logs(invocation)
        assert site.metrics(state)["score"] == 0.5
        assert model.requests == 20
        assert any("│ exact" in line and "0.500" in line for line in lines), lines


def command(site: Site, *arguments: str, check: int = 0) -> str:
    """`holdfast eval -c nano …` in the site's folder."""
    env = {"SLURM_CONF": site.lab.env["SLURM_CONF"], "HOLDFAST_HOME": str(site.folder / "home")}
    return str(holdfast("eval", "-c", "nano", *arguments, cwd=site.folder, env=env, check=check).stdout)


def begin(site: Site, model: Server, **keys: Any) -> Invocation:
    """Submit 200 trials, four at a time, and return once some are done."""
    site.write(model.base_url, rows=200, limits={"concurrency": 4}, **keys)
    invocation = site.submit()
    site.await_done(invocation, 20)
    return invocation


def asked_once(model: Server, rows: int) -> None:
    """Every question was asked, and none twice."""
    counts = model.stats()["asked"]
    assert (len(counts), set(counts.values())) == (rows, {1})


def at_most_twice(model: Server, rows: int, in_flight: int) -> None:
    """Every question was asked; only those in flight at an interruption twice."""
    counts = Counter(model.stats()["asked"].values())
    assert sum(counts.values()) == rows
    assert set(counts) <= {1, 2}
    assert counts[2] <= in_flight


def test_a_detached_launch_shows_how_to_follow_it_and_finishes_by_itself(site: Site) -> None:
    with server() as model:
        site.write(model.base_url)
        output = command(site, "--batch", "lab")
        assert "Compiled Configuration" in output
        assert "Starting evaluation..." in output
        match = re.search(r"✓ Evaluation submitted: ([0-9a-f]{16})", output)
        assert match is not None
        for verb in ("status", "logs", "kill"):
            assert f"holdfast {verb} {match[1]}" in output
        invocation = InvocationRegistry(site.folder / "home" / "invocations").get(match[1])
        state = site.await_over(invocation)
        assert (state.phase, state.exit_code, state.done, state.total) == ("done", 0, 20, 20)
        asked_once(model, 20)
        calmly(lambda: not site.live(invocation, "main"), "the end of the successor that is not needed")

        second = command(site, "--run", "lab")  # the same again finds its run, and asks nothing
        assert "already finished; nothing was run" in second
        assert "coverage 100.0% of 20 trials" in second
        asked_once(model, 20)


def test_a_missed_gate_is_the_exit_code_of_an_attached_launch(site: Site) -> None:
    with server() as model:
        site.write(model.base_url, gate={"score": 0.9})
        output = command(site, "--run", "lab", check=1)
        assert "done: gate not met: score is 0.5 (minimum 0.9)" in output


def test_without_a_profile_only_a_configuration_that_says_where_is_submitted(site: Site) -> None:
    env = {"SLURM_CONF": site.lab.env["SLURM_CONF"], "HOLDFAST_HOME": str(site.folder / "home")}
    with server() as model:
        site.write(model.base_url)
        refused = holdfast("eval", "-c", "nano", cwd=site.folder, env=env, check=2)
        assert "Name a profile with --run or --batch, or preview it with --dry-run." in refused.stderr
        assert not (site.folder / ".holdfast").exists()
        assert model.requests == 0
        holdfast("eval", "-c", "nano", "--dry-run", cwd=site.folder, env=env)
        (site.folder / "whole.yaml").write_text(compiled_yaml(site.compiled().tree))
        holdfast("eval", "-c", "whole", cwd=site.folder, env=env)
        asked_once(model, 20)


def test_four_workers_share_one_run_and_ask_for_nothing_twice(site: Site) -> None:
    with server(latency=0.5) as model:  # so slow that all have begun before the first is done
        site.write(model.base_url, rows=300, limits={"concurrency": 8}, execution={"workers": 4})
        invocation = site.submit()
        state = site.await_over(invocation)
        assert (state.phase, state.done) == ("done", 300), site.logs(invocation)
        asked_once(model, 300)
        assert state.run_dir is not None
        workers = {path.parent.name for path in Path(state.run_dir).glob("workers/*/outputs.jsonl")}
        assert workers == {"main", "w1", "w2", "w3"}
        calmly(lambda: not site.live(invocation, "workers"), "the workers to leave")


def test_a_cancelled_worker_loses_only_its_requests_in_flight(site: Site) -> None:
    with server(latency=0.1) as model:
        site.write(model.base_url, rows=400, limits={"concurrency": 4}, execution={"workers": 3})
        invocation = site.submit()
        calmly(lambda: len(site.running(invocation, "workers")) == 2 and model.requests > 100, "workers at work")
        victim = site.running(invocation, "workers")[0]
        site.slurm("scancel", victim.handle)
        state = site.await_over(invocation)
        assert (state.phase, state.done) == ("done", 400), site.logs(invocation)
        at_most_twice(model, 400, 4)


def test_a_requeued_main_job_continues_under_its_id(site: Site) -> None:
    with server(latency=0.1) as model:
        invocation = begin(site, model, execution={"workers": 2})
        calmly(lambda: site.running(invocation, "workers"), "a worker")
        (job,) = site.running(invocation, "main")
        site.slurm("scontrol", "requeue", job.id)
        state = site.await_over(invocation)
        assert (state.phase, state.done) == ("done", 200), site.logs(invocation)
        at_most_twice(model, 200, 4)
        assert len(site.chain(invocation).known("workers")) == 1, "the workers stayed"
        begins = [record for record in site.attempts(invocation) if isinstance(record, Begin)]
        assert [(begin.job, begin.restart) for begin in begins] == [(job.id, 0), (job.id, 1)], site.logs(invocation)
        assert len(site.chain(invocation).known("main")) == 2, "one successor, not one per start"


def test_a_job_whose_signal_reaches_its_evaluation_first_starts_no_other(site: Site) -> None:
    with server(latency=0.1) as model:
        invocation = begin(site, model)
        (job,) = site.processes(invocation, "main")
        (evaluation,) = job.children()
        evaluation.terminate()
        calmly(lambda: evaluation not in job.children(), "its end")
        with pytest.raises(AssertionError, match="in vain"):
            wait_for(job.children, "another evaluation", patience=2)
        job.terminate()
        state = site.await_over(invocation)
        assert (state.phase, state.done) == ("done", 200), site.logs(invocation)
        at_most_twice(model, 200, 4)


def test_a_preempted_job_continues_afterwards(tmp_path: Path, own_slurm: Cluster) -> None:
    site = Site(tmp_path, own_slurm, own_slurm.here)
    with server(latency=0.1) as model:
        invocation = begin(site, model, execution={"partition": "low"})
        all_of_it = ["--partition=main", "--nodes=4", "--exclusive", "--time=1", "--output=/dev/null"]
        site.slurm("sbatch", *all_of_it, "--wrap", "sleep 3")
        state = site.await_over(invocation, 150)
        assert (state.phase, state.done) == ("done", 200), site.logs(invocation)
        at_most_twice(model, 200, 4)
        begins = [record for record in site.attempts(invocation) if isinstance(record, Begin)]
        assert len(begins) == 2, site.logs(invocation)


def test_a_cancelled_main_job_ends_the_evaluation_until_it_is_resumed_from_its_files(site: Site) -> None:
    with server(latency=0.1) as model:
        invocation = begin(site, model)
        (job,) = site.running(invocation, "main")
        site.slurm("scancel", job.id)
        state = site.await_over(invocation)
        reason = f"job {job.id} was cancelled; `holdfast resume {invocation.id}` continues"
        assert (state.phase, state.reason, state.attempt) == ("stopped", reason, 1), site.logs(invocation)
        calmly(lambda: not site.live(invocation, "main"), "the end of the successor")
        assert len(site.chain(invocation).known("main")) == 2, "no further job was queued"
        (site.folder / "nano.yaml").unlink()
        (site.folder / "evals" / "e.yaml").unlink()
        start_jobs(site.transport, invocation.directory)
        state = site.await_over(invocation)
        assert (state.phase, state.done) == ("done", 200), site.logs(invocation)
        at_most_twice(model, 200, 4)


def test_cancelling_all_jobs_at_once_leaves_no_job(site: Site) -> None:
    with server(latency=0.1) as model:
        site.write(model.base_url, rows=2000, limits={"concurrency": 2}, execution={"workers": 2})
        invocation = site.submit()
        site.await_done(invocation, 20)
        chain = site.chain(invocation)
        calmly(lambda: site.running(invocation, "workers"), "a worker")
        jobs = [state.id for role in ("main", "workers") for state in site.live(invocation, role)]
        assert len(jobs) == 3, "the main job, its successor and the workers"
        site.slurm("scancel", *jobs)
        state = site.await_over(invocation)
        assert state.phase == "stopped" and "was cancelled" in state.reason, site.logs(invocation)
        calmly(
            lambda: not site.live(invocation, "main") and not site.live(invocation, "workers"), "the end of all jobs"
        )
        assert {job.id for role in ("main", "workers") for job in chain.known(role)} == set(jobs), "none was added"
        start_jobs(site.lab.here, invocation.directory)
        calmly(
            lambda: len(site.live(invocation, "workers")) == 1,
            "other workers: those that were cancelled are of an earlier chain",
        )
        layout.write_stop(site.transport, invocation.directory, "test")
        site.await_over(invocation)


def test_under_a_limit_of_one_job_no_worker_keeps_the_main_job_from_running(site: Site) -> None:
    single = {"licenses": "single:1"}  # the lab's limit: of the jobs that ask for this licence one runs
    with server(latency=0.1) as model:
        site.write(
            model.base_url,
            rows=100,
            limits={"concurrency": 4},
            execution={"workers": 3, "sbatch_extra_flags": single},
        )
        invocation = site.submit()
        calmly(
            lambda: site.state(invocation).done >= 20 and len(site.live(invocation, "workers")) == 2,
            "only the main job",
            60,
        )
        assert not site.running(invocation, "workers")
        site.kill(invocation, "main")  # workers that begin before its successor leave
        state = site.await_over(invocation, 90)
        assert (state.phase, state.done, state.attempt) == ("done", 100, 2), site.logs(invocation)
        at_most_twice(model, 100, 4)
        calmly(lambda: not site.live(invocation, "workers"), "the end of workers that never began")


def test_a_main_job_that_waits_or_is_cancelled_has_no_workers(site: Site) -> None:
    site.write(None, execution={"workers": 3, "sbatch_extra_flags": {"hold": True}})
    invocation = site.submit()
    chain = site.chain(invocation)
    (job,) = chain.states()
    assert job.state == "pending"
    # A worker that was queued by an earlier main job begins meanwhile, and leaves.
    worker = [sys.executable, "-m", "holdfast.apps.cluster.job", site.place(invocation).path, "--role", "worker"]
    env = {**site.lab.env, "SLURM_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "1"}
    assert subprocess.run(worker, env=env, timeout=90, check=False).returncode == 0
    assert "exiting: no main job runs" in site.logs(invocation)
    site.slurm("scancel", job.id)
    calmly(lambda: not site.live(invocation, "main"), "its end")
    shown = look(Subject(site.lab.here, invocation.directory), site.registry).tasks[0]
    assert (shown.status, shown.reason) == ("interrupted", "no job is left; the last one: cancelled")
    assert [each.name for each in chain.states()] == [job.name]


def test_a_successor_does_not_continue_a_job_that_was_cancelled_without_noticing_it(site: Site) -> None:
    with server(latency=0.1) as model:
        invocation = begin(site, model)
        (job,) = site.running(invocation, "main")
        # The line by which a job learns that it was cancelled goes to a file that is gone.
        (Path(site.place(invocation).logs) / f"slurm-{job.id}.log").unlink()
        site.slurm("scancel", job.id)
        state = site.await_over(invocation)
        assert state.phase == "stopped" and f"job {job.id} was cancelled" in state.reason, site.logs(invocation)
        assert "continues in the next job" in site.logs(invocation), "the main job did not know"
        begins = [record for record in site.attempts(invocation) if isinstance(record, Begin)]
        assert [begin.job for begin in begins] == [job.id], "the successor began no attempt"


def test_a_fault_that_would_hit_every_trial_stops_the_chain(site: Site) -> None:
    with server(status=401) as model:
        site.write(model.base_url, rows=50)
        invocation = site.submit()
        state = site.await_over(invocation)
        assert (state.phase, state.exit_code, state.attempt) == ("stopped", 3, 1)
        assert "401" in state.reason or "key" in state.reason.lower(), state
        calmly(lambda: not site.live(invocation, "main"), "the successor's end")


def test_an_attempt_that_adds_nothing_is_the_last(site: Site) -> None:
    with server(fail={"500": 1.0}) as model:
        site.write(model.base_url, rows=4, limits={"retries": 0})
        invocation = site.submit()
        state = site.await_over(invocation)
        assert (state.phase, state.exit_code) == ("stopped", 3)
        assert "500" in state.reason or "server" in state.reason, state


def test_a_job_stops_cleanly_at_its_time_limit_and_the_successor_continues(site: Site) -> None:
    # Slurm's least limit is a minute, and it may send its signal up to a minute early: the margin leaves time to begin.
    with server(latency=2) as model:  # too slow to end before the limit; quick once that was met
        flags = {"walltime": "00:01:00", "sbatch_extra_flags": {"signal": "B:USR2@20"}}
        site.write(model.base_url, rows=250, limits={"concurrency": 4}, execution=flags)
        invocation = site.submit()
        calmly(lambda: any(isinstance(one, End) for one in site.attempts(invocation)), "the first attempt's end", 150)
        model.control(latency=0)
        state = site.await_over(invocation, 150)
        assert (state.phase, state.done) == ("done", 250), site.logs(invocation)
        ends = [record.why for record in site.attempts(invocation) if isinstance(record, End)]
        assert len(ends) > 1 and set(ends[:-1]) == {"the time limit is near"}, ends
        at_most_twice(model, 250, 4 * len(ends))


@pytest.mark.faults
def test_after_all_workers_were_killed_slurm_says_that_they_are_dead(site: Site) -> None:
    """On other machines, as the nodes of the lab are, a silence of half a minute would have to say so."""
    with server(latency=0.1) as model:
        site.write(model.base_url, rows=200, limits={"concurrency": 2}, execution={"workers": 4})
        invocation = site.submit()
        calmly(lambda: len(site.running(invocation, "workers")) == 3, "the workers")
        run = Path(str(site.await_done(invocation, 20).run_dir))
        calmly(lambda: len(list(run.glob("workers/*/lease"))) == 4, "all to work")
        for process in psutil.process_iter(["cmdline"]):
            if any(str(site.base) in word for word in process.info["cmdline"] or []):
                process.kill()
        state = site.await_over(invocation)
        assert (state.phase, state.done, state.attempt) == ("done", 200, 2), site.logs(invocation)
        assert "no heartbeat" not in site.logs(invocation)
        at_most_twice(model, 200, 4 * 2)


def test_requests_in_flight_finish_before_the_time_limit(site: Site) -> None:
    with server(latency=1) as model:
        site.write(model.base_url, rows=40, limits={"concurrency": 4})
        invocation = site.submit()
        site.await_done(invocation, 4)
        site.slurm("scancel", "--batch", "--signal=USR2", str(site.state(invocation).job))  # as near the time limit
        calmly(lambda: any(isinstance(one, End) for one in site.attempts(invocation)), "the first attempt's end")
        model.control(latency=0)
        state = site.await_over(invocation)
        assert (state.phase, state.done, state.attempt) == ("done", 40, 2), site.logs(invocation)
        assert model.stats()["asked"] == {f"question {number}": 1 for number in range(40)}


def test_only_one_of_several_resumes_submits(site: Site) -> None:
    site.write(None, execution={"sbatch_extra_flags": {"hold": True}})
    invocation = site.submit()
    env = site.env()
    holdfast("kill", invocation.id, cwd=site.folder, env=env)
    try:
        commands = [start("resume", invocation.id, cwd=site.folder, env=env) for _ in range(3)]
        outputs = [(*command.communicate(timeout=300), command.returncode) for command in commands]
        assert sorted(code for *_, code in outputs) == [0, 4, 4], outputs
        assert all("already running" in error for _, error, code in outputs if code == 4), outputs
        assert len(site.chain(invocation).known("main")) == 2
        assert not (Path(invocation.directory) / "submitting").exists()
    finally:
        holdfast("kill", invocation.id, cwd=site.folder, env=env)


def test_a_job_that_was_overtaken_does_not_turn_the_state_back(tmp_path: Path) -> None:
    invocation = launched(Here(pauses=()), tmp_path, executor="local")
    job = JobContext.detect(Path(invocation.place().path), "main", None)
    late = JobRun(job)
    late._set(phase="running", done=3, attempt=1, job=job.id)
    invocation.state(phase="running", done=20, attempt=2, job="another")
    late._set(phase="draining", done=4)
    assert layout.read_state(Here(), invocation.place()).done == 20
    last = JobRun(job)
    invocation.state(phase="done", done=20, attempt=2, job="another")
    last._set(phase="stopped", done=4)
    assert layout.read_state(Here(), invocation.place()).phase == "done"


def test_max_walltime_of_all_jobs_together_ends_the_chain(site: Site) -> None:
    with server(latency=0.1) as model:
        site.write(model.base_url, rows=200, limits={"concurrency": 2}, execution={"max_walltime": "00:00:01"})
        invocation = site.submit()
        site.await_done(invocation, 20)
        site.kill(invocation, "main")
        state = site.await_over(invocation)
        assert (state.phase, state.exit_code) == ("stopped", 3)
        assert "max_walltime" in state.reason
        start_jobs(site.transport, invocation.directory)  # whoever resumes is told the same, and nothing is lost
        assert site.await_over(invocation).done >= 20


@pytest.mark.faults
def test_a_submitter_killed_between_two_jobs_leaves_nothing_lost_and_nothing_twice(site: Site) -> None:
    with server(latency=0.05) as model:
        site.write(model.base_url, rows=40)
        config = json.loads((site.folder / "nano.yaml").read_text())
        config["evaluation"]["tasks"].append({"name": "evals/e.yaml", "overrides": {"prompt": "Again: {{ question }}"}})
        (site.folder / "nano.yaml").write_text(json.dumps(config))
        # The second sbatch never returns: the first task is submitted, the second is not.
        env = site.env(sbatch='case "$*" in *.1.main*) touch "$0.second"; exec sleep 600 ;; esac\nexec "$REAL" "$@"')
        submitting = start("eval", "-c", "nano", "--batch", "lab", cwd=site.folder, env=env)
        registry = InvocationRegistry(site.folder / "home" / "invocations")

        def second_intent() -> Invocation | None:
            return registry.all()[0] if (site.folder / "bin" / "sbatch.second").exists() else None

        invocation = calmly(second_intent, "the second submission")
        submitting.kill()
        submitting.communicate()
        started = start_jobs(site.lab.here, invocation.directory)
        assert [job.intent.name for job in started] == [f"hf-{invocation.id}.1.main-2"]
        assert start_jobs(site.lab.here, invocation.directory) == []
        states = [site.await_over(invocation, task=task) for task in (0, 1)]
        assert [(state.phase, state.done) for state in states] == [("done", 40)] * 2, site.logs(invocation)
        asked_once(model, 80)


def test_secrets_are_in_no_script_log_manifest_or_process_list(site: Site) -> None:
    secret, other = "s3cr3t-of-the-target-0001", "s3cr3t-of-another-part-0002"
    with server(latency=0.1) as model:
        site.write(
            model.base_url,
            rows=100,
            limits={"concurrency": 4},
            target={"model": "test-model", "base_url": model.base_url, "api_key_env": "MODEL_KEY"},
        )
        config = json.loads((site.folder / "nano.yaml").read_text())
        config["evaluation"]["env_vars"] = {"MODEL_KEY": "host:MY_KEY"}
        config["export"] = {"env_vars": {"OTHER": "host:OTHER_KEY"}}
        (site.folder / "nano.yaml").write_text(json.dumps(config))
        invocation = site.submit(MY_KEY=secret, OTHER_KEY=other)
        site.await_done(invocation, 10)
        listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        worker = next(
            int(path.name)
            for path in Path("/proc").iterdir()
            if path.name.isdigit()
            and _argv(path)[2] == "holdfast.apps.cluster.job.evaluate"
            and str(site.base) in _argv(path)[3]
        )
        environment = Path(f"/proc/{worker}/environ").read_bytes()
        holding = [path for path in site.base.rglob("*.env") if b"s3cr3t" in path.read_bytes()]
        mode = stat.S_IMODE(holding[0].stat().st_mode)
        assert site.await_over(invocation).phase == "done", site.logs(invocation)
    assert f"MODEL_KEY={secret}".encode() in environment
    assert other.encode() not in environment
    assert secret not in listed and other not in listed
    assert [path.name for path in holding] == ["secrets.env"]
    assert mode == 0o600
    calmly(lambda: not holding[0].exists(), "secrets.env to be removed, since all is done")
    assert not any(path.is_file() and b"s3cr3t" in path.read_bytes() for path in site.base.rglob("*"))
    assert not any("s3cr3t" in path.read_text() for path in (site.folder / "home").rglob("*.json"))


def _argv(process: Path) -> list[str]:
    with suppress(OSError):
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        return words if len(words) > 3 else [""] * 4
    return [""] * 4


def test_the_embedded_model_is_served_and_measured(site: Site) -> None:
    pytest.importorskip("xllamacpp")
    weights = pytest.importorskip("holdfast.targets.embedded")._weights("local/smollm2-135m")
    port = free_port()
    script = site.folder / "embedded.py"
    script.write_text(
        "import threading, xllamacpp\n"
        "params = xllamacpp.CommonParams()\n"
        f"params.model.path, params.port, params.hostnames = {str(weights)!r}, {port}, ['127.0.0.1']\n"
        "params.n_parallel, params.n_ctx, params.n_gpu_layers, params.use_jinja = 2, 4096, 0, True\n"
        "params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1\n"  # several wait for each other and spin
        "server = xllamacpp.Server(params)\nthreading.Event().wait()\n"
    )
    served = {"type": "generic", "command": f"{sys.executable} {script}", "port": port, "served_model_name": "smollm2"}
    params = {"model": "smollm2", "params": {"max_tokens": 8, "temperature": 0}}
    site.write(None, rows=2, deployment=served, target=params, limits={"concurrency": 2})
    invocation = site.submit()
    state = site.await_over(invocation, 120)
    assert (state.phase, state.done) == ("done", 2), site.logs(invocation)
    assert site.metrics(state)["outputs"] == 2


def running_processes(ledger: Ledger, invocation: str) -> list[JobState]:
    return active_main_jobs(LocalExecutor(), ledger, invocation).get(0, [])


def test_the_same_on_this_machine_and_a_repeated_launch_exports_nothing_again(tmp_path: Path) -> None:
    site = Site(tmp_path, Cluster(tmp_path), Here(pauses=()))
    with server(latency=0.05) as model:
        site.write(model.base_url, rows=40, execution={"workers": 2, "auto_export": ["csv"]})
        invocation = site.submit(profile="here")
        state = site.await_over(invocation)
        assert (state.phase, state.done) == ("done", 40), site.logs(invocation)
        asked_once(model, 40)
        ledger = Ledger(site.transport, invocation.directory)
        calmly(lambda: not running_processes(ledger, invocation.id), "the process's end")
        assert state.run_dir is not None
        # A process that was about to work when others finished the run has not seen its numbers.
        command = [sys.executable, "-m", "holdfast.apps.cluster.job.evaluate", site.place(invocation).path]
        late = subprocess.run([*command, "--run-dir", state.run_dir], input=b"", capture_output=True, check=True)
        assert json.loads(late.stdout)["finished"] is None
        noted = Path(state.run_dir) / "exports.json"
        before = noted.read_bytes(), noted.stat().st_mtime_ns
        again = site.await_over(site.submit(profile="here"))
        assert (again.phase, again.run_dir) == ("done", state.run_dir)
    assert (noted.read_bytes(), noted.stat().st_mtime_ns) == before


@pytest.mark.faults
def test_a_killed_local_process_continues_when_started_again(tmp_path: Path) -> None:
    site = Site(tmp_path, Cluster(tmp_path), Here(pauses=()))
    site.write(None, rows=80, limits={"concurrency": 4}, deployment=deployment(tmp_path))
    invocation = site.submit(profile="here")
    site.await_done(invocation, 20)
    ledger = Ledger(site.transport, invocation.directory)
    (job,) = running_processes(ledger, invocation.id)
    os.kill(int(job.id.partition("-")[0]), signal.SIGKILL)
    calmly(lambda: not running_processes(ledger, invocation.id), "the process's end")
    start_jobs(site.transport, invocation.directory)
    state = site.await_over(invocation)
    assert (state.phase, state.done) == ("done", 80), site.logs(invocation)
    counts = Counter((tmp_path / "asked.txt").read_text().splitlines())
    assert len(counts) == 80
    assert sum(count - 1 for count in counts.values()) <= 4


def test_ctrl_c_detaches_and_the_evaluation_continues(site: Site) -> None:
    with server(latency=0.1) as model:
        site.write(model.base_url, rows=100, limits={"concurrency": 4})
        env = {"SLURM_CONF": site.lab.env["SLURM_CONF"], "HOLDFAST_HOME": str(site.folder / "home")}
        attached = start("eval", "-c", "nano", "--run", "lab", cwd=site.folder, env=env)
        calmly(lambda: model.requests > 10, "work")
        attached.send_signal(signal.SIGINT)
        _, stderr = attached.communicate(timeout=300)
        (invocation,) = InvocationRegistry(site.folder / "home" / "invocations").all()
        assert attached.returncode == 130
        assert "Detached" in stderr and f"holdfast kill {invocation.id}" in stderr
        assert site.await_over(invocation).done == 100
        asked_once(model, 100)


def test_a_job_that_cannot_begin_is_not_waited_for_without_end(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.apps.cluster.watch.logs._LOST_SECONDS", 2.0)
    site.write("http://127.0.0.1:9/v1", profile='setup_lines = ["echo no such module >&2", "exit 1"]')
    invocation = site.submit()
    lines: list[str] = []
    assert follow(site.transport, invocation, lines.append) == 3
    assert any("no such module" in line for line in lines), lines
    assert f"holdfast resume {invocation.id}" in lines[-1]


def test_dead_workers_are_replaced_and_cancelled_ones_are_not(site: Site) -> None:
    # Like workers of an earlier start, which leave when this one has found them; in jobs too short to look each minute.
    with server(latency=1) as model:
        limits = {"walltime": "00:02:00", "sbatch_extra_flags": {"signal": "B:USR2@1"}}
        site.write(model.base_url, rows=400, limits={"concurrency": 2}, execution={"workers": 2, **limits})
        invocation = site.submit()
        calmly(lambda: site.running(invocation, "workers") and site.state(invocation).phase == "running", "work")
        site.kill(invocation, "worker")
        calmly(lambda: len(site.chain(invocation).known("workers")) == 2, "other workers")
        calmly(lambda: site.running(invocation, "workers"), "the other workers to begin")
        site.slurm("scancel", site.running(invocation, "workers")[0].id)
        calmly(lambda: "were cancelled; continuing without them" in site.logs(invocation), "the workers' end")
        assert len(site.chain(invocation).known("workers")) == 2, "cancelled workers are not replaced"
        assert (site.state(invocation).phase, site.state(invocation).attempt) == ("running", 1), site.logs(invocation)
        layout.write_stop(site.transport, invocation.directory, "test")
        site.await_over(invocation)
        calmly(lambda: not site.live(invocation, "workers"), "the workers to leave")


def test_results_are_exported_and_a_failed_export_does_not_fail_the_run(site: Site) -> None:
    with server() as model:
        nobody = "http://127.0.0.1:9"
        site.write(model.base_url, output={"export": ["csv"]}, execution={"auto_export": ["mlflow", "wandb"]})
        config = json.loads((site.folder / "nano.yaml").read_text())
        config["export"] = {
            "mlflow": {"tracking_uri": nobody, "experiment_name": "x"},
            "wandb": {"project": "p"},
        }
        (site.folder / "nano.yaml").write_text(json.dumps(config))
        invocation = site.submit(WANDB_API_KEY="k" * 40, WANDB_BASE_URL=nobody)
        state = site.await_over(invocation)
    assert (state.phase, state.exit_code) == ("done", 0), site.logs(invocation)
    assert state.run_dir is not None
    assert list(Path(state.run_dir).rglob("*.csv"))
    assert "done: export to mlflow failed with exit code" in site.logs(invocation), "whoever is attached sees it"
    shown = look(Subject(site.lab.here, invocation.directory), site.registry).tasks[0]
    assert shown.status == "done" and "export to mlflow failed" in shown.reason
    assert "export to wandb is offline, nothing was sent" in shown.reason
    assert f"WANDB_BASE_URL={nobody} wandb sync {state.run_dir}/export/wandb/" in shown.reason


def test_the_same_launch_twice_at_once_asks_for_nothing_twice(site: Site) -> None:
    with server(latency=0.1) as model:
        site.write(model.base_url, rows=100, limits={"concurrency": 4})
        both = [site.submit(), site.submit()]
        states = [site.await_over(invocation) for invocation in both]
        assert [(state.phase, state.exit_code) for state in states] == [("done", 0)] * 2, site.logs(both[1])
        assert states[0].run_dir == states[1].run_dir
        asked_once(model, 100)
