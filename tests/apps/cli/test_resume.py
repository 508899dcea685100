"""`holdfast resume`: a path is enough to resume, without the configuration, unless somebody is working on it."""

from __future__ import annotations

import json
import shutil
import signal
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.apps.cluster.remote.slurm import Slurm
from holdfast.canonical import digest
from tests.support.invocations import Launched, end_all, env_of, launched, public_folder
from tests.support.running import Server, holdfast, lines, metrics, run_dir, server, start, wait_for, write_eval

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.slurm import Cluster


@pytest.fixture
def invocation(slurm: Cluster, tmp_path: Path) -> Iterator[Launched]:
    one = launched(slurm.here, tmp_path / "base", tasks=("gsm8k", "mmlu"))
    yield one
    end_all(slurm, one)


def live(lab: Cluster, invocation: Launched) -> list[str]:
    return sorted(job.name for job in Slurm(lab.here).jobs(invocation=invocation.id) if job.active)


def test_finished_tasks_are_not_started_again(slurm: Cluster, invocation: Launched, tmp_path: Path) -> None:
    for task in (0, 1):
        invocation.state(task, phase="done", exit_code=0)
    stdout = holdfast("resume", invocation.directory, cwd=tmp_path, env=env_of(slurm, tmp_path / "home")).stdout
    assert "already finished" in stdout and live(slurm, invocation) == []


def test_a_stopped_task_can_be_resumed(slurm: Cluster, invocation: Launched, tmp_path: Path) -> None:
    invocation.state(1, phase="stopped", reason="no progress in this job", exit_code=3)
    holdfast("resume", f"{invocation.directory}/1", cwd=tmp_path, env=env_of(slurm, tmp_path / "home"))
    assert live(slurm, invocation) == [f"hf-{invocation.id}.1.main"]


def test_an_invocation_takes_no_changes(slurm: Cluster, invocation: Launched, tmp_path: Path) -> None:
    env = env_of(slurm, tmp_path / "home")
    stderr = holdfast("resume", invocation.directory, "limits.max_cost=3", cwd=tmp_path, env=env, check=2).stderr
    assert "limits.max_cost=3 is for runs" in stderr and live(slurm, invocation) == []


def test_an_invocation_says_where_its_calls_are_settled(slurm: Cluster, invocation: Launched, tmp_path: Path) -> None:
    env, decision = env_of(slurm, tmp_path / "home"), 'a/1=happened:"bought tea"'
    stderr = holdfast("resume", invocation.directory, "--settle", decision, cwd=tmp_path, env=env, check=2).stderr
    assert f"holdfast resume RUN_DIR --settle '{decision}'" in stderr and "Submit it again" not in stderr
    assert live(slurm, invocation) == []


# Runs on this machine


def interrupted(folder: Path, base_url: str, **keys: Any) -> Path:
    """A run killed in its middle."""
    eval_file = write_eval(folder, base_url, rows=300, limits={"concurrency": 2}, **keys)
    process = start("eval", eval_file, cwd=folder)
    outputs = wait_for(lambda: next(folder.glob("runs/e/*/outputs.jsonl"), None), "the run")
    wait_for(lambda: outputs.stat().st_size, "an output")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return run_dir(folder)


@pytest.mark.faults
def test_a_run_can_be_resumed_by_its_path(tmp_path: Path) -> None:
    with server(latency=0.005) as provider:
        run = interrupted(tmp_path / "work", provider.base_url)
        before = len(lines(run / "outputs.jsonl"))
        (tmp_path / "work" / "e.yaml").unlink()  # the manifest is enough
        (tmp_path / "elsewhere").mkdir()
        provider.control(latency=0)
        provider.reset()
        holdfast("resume", run, cwd=tmp_path / "elsewhere")
        assert provider.requests <= 300 - before + 2
        provider.reset()
        assert "already finished" in holdfast("resume", run, cwd=tmp_path / "elsewhere").stdout
        assert provider.requests == 0
    assert metrics(run)["score"] == 0.5 and metrics(run)["coverage"] == 1
    assert not (tmp_path / "elsewhere" / "runs").exists()


@pytest.mark.faults
def test_a_moved_run_resumes_in_its_new_place(tmp_path: Path) -> None:
    with server(latency=0.005) as provider:
        run = interrupted(tmp_path / "work", provider.base_url)
        moved = tmp_path / "archive" / "kept"
        moved.parent.mkdir()
        shutil.move(run, moved)
        provider.control(latency=0)
        holdfast("resume", "kept", cwd=tmp_path / "archive")
    assert metrics(moved)["coverage"] == 1


@pytest.mark.faults
def test_a_run_whose_data_changed_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with server(latency=0.005) as provider:
        run = interrupted(tmp_path / "work", provider.base_url)
        before = (run / "outputs.jsonl").read_bytes()
        with (tmp_path / "work" / "data.jsonl").open("a") as file:
            file.write(json.dumps({"id": "new", "question": "q", "expected": "q"}) + "\n")
        provider.reset()
        stderr = holdfast("resume", run, cwd=tmp_path, check=2).stderr
        assert "cannot be resumed: its data, code or graders have changed" in stderr and provider.requests == 0
    assert (run / "outputs.jsonl").read_bytes() == before


@pytest.mark.faults
def test_a_run_in_progress_is_not_started_twice(tmp_path: Path) -> None:
    with server(latency=0.02) as provider:
        eval_file = write_eval(tmp_path, provider.base_url, rows=2000, limits={"concurrency": 2})
        process = start("eval", eval_file, cwd=tmp_path)
        outputs = wait_for(lambda: next(tmp_path.glob("runs/e/*/outputs.jsonl"), None), "the run")
        wait_for(lambda: outputs.stat().st_size, "an output")
        stderr = holdfast("resume", run_dir(tmp_path), cwd=tmp_path, check=4).stderr
        assert f"process {process.pid}" in stderr
        process.kill()
        process.communicate()


def test_a_budget_can_be_raised(tmp_path: Path, provider: Server) -> None:
    folder = tmp_path / "work"
    eval_file = write_eval(folder, provider.base_url, limits={"token_budget": 1, "concurrency": 1})
    holdfast("eval", eval_file, cwd=folder, check=3)
    run = run_dir(folder)
    holdfast("resume", run, cwd=tmp_path, check=3)
    holdfast("resume", run, "limits.token_budget=1000000", cwd=tmp_path)
    assert metrics(run)["coverage"] == 1


def test_a_secret_that_no_run_keeps_is_asked_for(tmp_path: Path) -> None:
    with server() as provider:
        url = provider.base_url.replace("//", "//somebody@")
        target = {"http": f"{url}/chat/completions?key=written-out", "request": {"messages": "{{ messages }}"}}
        eval_file = write_eval(tmp_path, provider.base_url, target=target)
        holdfast("eval", eval_file, cwd=tmp_path, check=None)
        stderr = holdfast("resume", run_dir(tmp_path), cwd=tmp_path, check=2).stderr
    assert (
        "runs never store secrets" in stderr and f"holdfast eval {eval_file}" in stderr and "written-out" not in stderr
    )


def test_a_colleague_learns_why_they_cannot_resume_a_run(slurm: Cluster, tmp_path: Path) -> None:
    env = env_of(slurm, tmp_path / "home")
    with public_folder() as base:
        invocation = launched(slurm.here, base)
        stderr = holdfast("resume", f"colleague:{invocation.directory}", cwd=tmp_path, env=env, check=2).stderr
    assert "only they can read" in stderr and live(slurm, invocation) == []


def test_a_run_that_this_version_grades_differently_is_resumed_with_its_outputs(
    tmp_path: Path, provider: Server
) -> None:
    graders = [{"type": "similarity"}]
    eval_file = write_eval(
        tmp_path, provider.base_url, rows=4, graders=graders, limits={"token_budget": 1, "concurrency": 1}
    )
    holdfast("eval", eval_file, cwd=tmp_path, check=3)
    run = run_dir(tmp_path)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["identity"]["graders"]["similarity"]["revision"] = 7  # as another version writes it
    before = digest(manifest["identity"]["graders"]["similarity"])
    manifest["fingerprints"]["graders"]["similarity"] = before
    manifest["id"] = "0" * 8
    moved = run.with_name(f"test-model-{manifest['id']}")
    run.rename(moved)
    (moved / "manifest.json").write_text(json.dumps(manifest))
    asked = provider.requests
    done = holdfast("resume", moved, "limits.token_budget=1000000", cwd=tmp_path)
    assert "this version grades some outputs differently" in done.stderr
    assert provider.requests == asked + 3, "the output that was there is not asked for again"
