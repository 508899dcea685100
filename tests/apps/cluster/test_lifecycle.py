"""A launch looked after from its beginning to its end, only with commands, on Slurm and on this machine."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.apps.cluster.remote.slurm import ACTIVE
from tests.support.invocations import env_of
from tests.support.launching import Site
from tests.support.running import holdfast, server, wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.slurm import Cluster

ROWS = 300


@pytest.mark.parametrize(("profile", "task_of_it"), [("lab", ".0"), ("here", "")])
def test_a_launch_is_watched_killed_and_resumed(tmp_path: Path, slurm: Cluster, profile: str, task_of_it: str) -> None:
    site = Site(tmp_path, slurm, slurm.here)
    env = env_of(slurm, tmp_path / "home")

    def run(*arguments: str, check: int = 0) -> str:
        return str(holdfast(*arguments, cwd=tmp_path, env=env, check=check).stdout)

    def task() -> dict[str, Any]:
        (shown,) = json.loads(run("status", invocation, "--json"))["tasks"]
        return dict(shown)

    with server(latency=2) as model:
        site.write(model.base_url, rows=ROWS, limits={"concurrency": 4})
        executor = ["execution.type=local"] if profile == "here" else []
        output = run("eval", "-c", "nano", "--batch", profile, *executor)
        invocation = re.search(r"submitted: ([0-9a-f]{16})", output)[1]
        wait_for(lambda: task()["done"] > 0, "some trials")
        seen = task()
        assert seen["status"] == "running" and seen["total"] == ROWS
        assert [job["state"] for job in seen["jobs"] if job["name"].endswith(".main")] == ["running"]
        assert run("logs", invocation)
        run("resume", invocation, check=4)

        run("kill", invocation + task_of_it)
        assert task()["status"] == "stopped" and task()["reason"] == "stopped by `holdfast kill`"
        assert len(task()["jobs"]) <= 2, "successors that were begun meanwhile queued more"
        assert not [job for job in task()["jobs"] if job["state"] in ACTIVE]
        before = model.requests
        assert "no jobs were running" in run("kill", invocation + task_of_it)
        assert 0 < before < ROWS

        model.control(latency=0)
        run("resume", str(tmp_path / "cluster" / "holdfast" / invocation / task_of_it[1:]))
        run("logs", "-f", invocation)
        assert task()["status"] == "done" and task()["done"] == ROWS
        assert model.requests <= ROWS + 4
        run_dir = task()["run_dir"]
    assert "done" in run("status", run_dir)  # a run of an invocation leads to it
    assert "already finished" in run("resume", invocation)
