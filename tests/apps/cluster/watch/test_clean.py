"""Cleaning up on a cluster: what unfinished invocations need stays, what was used today stays, and so do runs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from holdfast.apps.cluster.config.launch import Server
from holdfast.apps.cluster.remote import invocation as layout
from holdfast.apps.cluster.remote.registry import InvocationRegistry
from holdfast.apps.cluster.remote.transport import Here
from holdfast.apps.cluster.remote.trees import SourceFile
from tests.support.invocations import Launched, launched, register
from tests.support.running import holdfast

if TYPE_CHECKING:
    from tests.support.slurm import Cluster

WEEK = 7 * 86_400


def put(base: Path, name: str, *, age: float = WEEK) -> Path:
    """An entry that was last used some time ago: a folder, or an image."""
    path = base / name
    if name.endswith(".sqsh"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"hsqs" * 1024)
    else:
        path.mkdir(parents=True)
        (path / "file").write_text("x")
    os.utime(path, (time.time() - age,) * 2)
    return path


def needing(base: Path, phase: str, bundle: str, env: str, image: str) -> Launched:
    """An invocation whose only task names these, in this phase."""
    invocation = launched(Here(pauses=()), base, executor="local")
    place = invocation.place()
    task = msgspec.structs.replace(
        layout.read_task(Here(pauses=()), place),
        eval_file=f"{base}/holdfast/bundles/{bundle}/e.yaml",
        python=f"{base}/holdfast/env/{env}/bin/python",
        deployment=Server(command="serve", image=f"{base}/containers/{image}"),
    )
    layout.write(Path(place.task), task)
    invocation.state(phase=phase)
    return invocation


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    profile = f'[site]\nexecutor = "local"\nremote_job_dir = "{tmp_path / "base"}"\n'
    (tmp_path / "env.toml").write_text(profile)
    return tmp_path / "base"


def clean(base: Path, *arguments: str, check: int = 0) -> str:
    env = {"HOLDFAST_HOME": str(base.parent / "home")}
    done = holdfast("clean", *arguments, cwd=base.parent, env=env, check=check)
    return str(done.stdout + done.stderr)


def test_what_no_unfinished_invocation_needs_is_removed(base: Path) -> None:
    finished, stopped = (
        needing(base, "done", "old", "old", "old.sqsh"),
        needing(base, "stopped", "kept", "kept", "kept.sqsh"),
    )
    names = [f"holdfast/{kind}/{name}" for kind in ("bundles", "env") for name in ("old", "kept", "nobodys")]
    names += ["containers/old.sqsh", "containers/kept.sqsh", "holdfast/code/old", "holdfast/arriving/torn"]
    places = {name: put(base, name) for name in names}
    today = put(base, "holdfast/bundles/today", age=60)
    run = put(base, "evaluations/e/model-12345678")

    shown = clean(base, "site", "--dry-run")
    assert f"would remove {places['containers/old.sqsh']}" in shown and "kept" not in shown
    assert all(place.exists() for place in places.values()), "a preview removes nothing"

    assert "of holdfast/bundles" in clean(base, "site")
    left = {name for name, place in places.items() if place.exists()}
    assert left == {"holdfast/bundles/kept", "holdfast/env/kept", "containers/kept.sqsh"}
    assert today.exists() and run.exists()
    assert not (finished.directory / "secrets.env").exists()
    assert (stopped.directory / "secrets.env").exists(), "resume needs them"
    assert "nothing that no run needs" in clean(base, "site")


def test_an_invocation_is_removed_and_forgotten_with_what_only_it_needed(base: Path) -> None:
    invocation = needing(base, "stopped", "its", "its", "its.sqsh")
    register(invocation, base.parent / "home")
    bundle, run = put(base, "holdfast/bundles/its"), put(base, "evaluations/e/model-12345678")
    assert f"would remove {invocation.directory}" in clean(base, invocation.id, "--dry-run")
    assert invocation.directory.exists()
    clean(base, invocation.id[:6])
    assert not invocation.directory.exists() and not bundle.exists() and run.exists()
    assert not InvocationRegistry(base.parent / "home" / "invocations").all()
    assert f"no invocation {invocation.id!r}" in clean(base, invocation.id, check=2)


@pytest.mark.parametrize("way", ["here", "ssh"])
def test_files_that_are_sent_again_count_as_used(base: Path, slurm: Cluster, way: str) -> None:
    transport = slurm.ssh() if way == "ssh" else Here(pauses=())
    place = Path(transport.put({"e.yaml": SourceFile(b"x")}, f"{base}/holdfast/bundles"))
    os.utime(place, (time.time() - WEEK,) * 2)
    assert transport.put({"e.yaml": SourceFile(b"x")}, f"{base}/holdfast/bundles") == str(place)
    clean(base, "site")
    assert place.exists()


def test_an_invocation_that_cannot_be_read_stops_the_cleaning(base: Path) -> None:
    broken = needing(base, "done", "a", "b", "c.sqsh")
    Path(broken.place().task).write_text("{")
    bundle = put(base, "holdfast/bundles/a")
    assert f"{broken.id}: cannot be read, so what it needs is unknown" in clean(base, "site", check=3)
    assert bundle.exists()
