"""Invocations as `holdfast eval -c … --run` leaves them, with jobs that only sleep: for whoever looks after them."""

from __future__ import annotations

import getpass
import os
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.apps.cluster.config.launch import TaskFile
from holdfast.apps.cluster.remote import invocation as layout
from holdfast.apps.cluster.remote.invocation import InvocationFile, State, TaskFolder
from holdfast.apps.cluster.remote.ledger import JobScript, Ledger, Submitter
from holdfast.apps.cluster.remote.registry import Invocation, InvocationRegistry, new_invocation
from holdfast.apps.cluster.remote.slurm import JobName, Slurm
from tests.support.slurm import wait_for_job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.apps.cluster.remote.ledger import Job
    from holdfast.apps.cluster.remote.transport import Transport
    from tests.support.slurm import Cluster

SLEEP = b"#!/bin/sh\nexec sleep 600\n"


@dataclass(frozen=True)
class Launched:
    """An invocation below `base`."""

    id: str
    base: Path
    transport: Transport

    @property
    def directory(self) -> Path:
        return self.base / "holdfast" / self.id

    def place(self, task: int = 0) -> TaskFolder:
        return TaskFolder(self.directory, task)

    def state(self, task: int = 0, **fields: Any) -> None:
        """Write the state of a task, as its main job does."""
        layout.write_state(self.place(task), State(**fields))

    def submit(self, role: str = "main", *options: str, task: int = 0, script: bytes = SLEEP) -> Job:
        """A job of it, recorded as jobs are."""
        submitter = Submitter(Slurm(self.transport), Ledger(self.transport, str(self.directory)))
        return submitter.submit(
            JobScript(JobName(self.id, task, role), script, options=["--output=/dev/null", "--begin=now", *options])
        )

    def log(self, name: str, text: str, task: int = 0) -> Path:
        """Add to one of its logs."""
        path = Path(self.place(task).logs) / name
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(text)
        return path


def launched(
    transport: Transport, base: Path, *, tasks: tuple[str, ...] = ("gsm8k",), executor: str = "slurm"
) -> Launched:
    """An invocation that nothing has been submitted for yet."""
    invocation = Launched(new_invocation(), base, transport)
    invocation.directory.mkdir(parents=True)
    described = InvocationFile(
        id=invocation.id,
        created=time.time(),
        user=getpass.getuser(),
        host=os.uname().nodename,
        holdfast="0",
        executor=executor,
        profile="lab",
        tasks=tasks,
        base=str(base),
        config={},
    )
    layout.write(invocation.directory / "invocation.json", described)
    secrets = invocation.directory / "secrets.env"
    secrets.touch(0o600)
    for number, name in enumerate(tasks):
        task = TaskFile(
            invocation=invocation.id,
            number=number,
            name=name,
            executor=executor,
            python="python3",
            eval_file="/nowhere/e.yaml",
            runs_dir=str(base / "runs"),
        )
        layout.write(Path(invocation.place(number).task), task)
        Path(invocation.place(number).script).write_bytes(SLEEP)
    return invocation


def register(invocation: Launched, home: Path, *, host: str | None = None, tasks: tuple[str, ...] = ("gsm8k",)) -> None:
    """Add an invocation to the registry below `home`."""
    InvocationRegistry(home / "invocations").add(entry_of(invocation, host=host, tasks=tasks))


def entry_of(invocation: Launched, *, host: str | None = None, tasks: tuple[str, ...] = ("gsm8k",)) -> Invocation:
    """Return the registry's entry of an invocation."""
    return Invocation(invocation.id, time.time(), str(invocation.directory), tasks, host=host, profile="lab")


@contextmanager
def public_folder() -> Iterator[Path]:
    """A directory that other accounts may enter; pytest's own are closed to them, time and again."""
    if os.getuid() != 0:
        pytest.skip("there is a second account only for root")
    with tempfile.TemporaryDirectory(prefix="holdfast-public-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def end_all(lab: Cluster, *invocations: Launched) -> None:
    """Cancel all jobs of invocations."""
    slurm = Slurm(lab.here)
    for one in invocations:
        slurm.cancel({job.name for job in slurm.jobs(invocation=one.id) if job.active})


@pytest.fixture
def invocation(slurm: Cluster, tmp_path: Path) -> Iterator[Launched]:
    """An invocation of two tasks, without jobs yet; those it gets are ended with the test."""
    one = launched(slurm.here, tmp_path / "base", tasks=("gsm8k", "mmlu"))
    yield one
    end_all(slurm, one)


def env_of(lab: Cluster, home: Path, **more: str) -> dict[str, str]:
    """Return the environment of a user of the lab."""
    return {
        "SLURM_CONF": lab.env["SLURM_CONF"],
        "HOLDFAST_HOME": str(home),
        "HOLDFAST_SSH_CONFIG": str(lab.ssh_config),
        **more,
    }


def running(invocation: Launched, lab: Cluster, task: int = 0) -> str:
    """A main job that runs; its id."""
    job = invocation.submit(task=task)
    wait_for_job(Slurm(lab.here), job.intent.name, lambda state: state.state == "running")
    assert job.id is not None
    return job.id
