"""Leases of workers on other machines: dead ones are noticed together, whatever the clocks say, and Slurm is asked.

Another machine is a process with another host name, in a UTS namespace of its own.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from holdfast.cluster.remote.slurm import JobName, Slurm
from holdfast.store import lease as leases
from holdfast.store.run_lock import WorkerLeases, worker_lease
from holdfast.store.rundir import RunDir
from tests.support.breaking import needs_root
from tests.support.running import environment, wait_for
from tests.support.slurm import wait_for_job

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.slurm import Cluster

pytestmark = [pytest.mark.faults, needs_root]

_HOLD = """
import signal, sys
from pathlib import Path
from holdfast.store.lease import RunLease
held = [RunLease(Path(path)) for path in sys.argv[1:]]
for lease in held:
    lease.acquire(0)
print("held", flush=True)
signal.pause()
"""
SHORT = 2.0


def hold_elsewhere(paths: list[Path]) -> list[str]:
    """The command of a process on another machine that holds these leases until it is killed."""
    for path in paths:
        path.parent.mkdir(parents=True)
    hold = [sys.executable, "-c", _HOLD, *map(str, paths)]
    return ["unshare", "--uts", "sh", "-c", 'hostname another-machine && exec "$@"', "sh", *hold]


def paths_of(rundir: RunDir, count: int) -> list[Path]:
    """The leases of so many workers."""
    return [worker_lease(rundir, f"w{number}") for number in range(count)]


def kill_workers_elsewhere(rundir: RunDir, count: int) -> None:
    """Leave the leases of workers that a power cut ended."""
    env = environment(HOLDFAST_LEASE_SECONDS=str(SHORT))
    command = hold_elsewhere(paths_of(rundir, count))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    process.kill()
    process.communicate()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of whoever watches leases, which last two seconds here."""
    made: list[float] = []
    sleep = time.sleep

    def pause(seconds: float) -> None:
        made.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(leases, "LEASE_SECONDS", SHORT)
    monkeypatch.setattr(time, "sleep", pause)
    return made


def test_sixty_four_dead_workers_are_watched_no_longer_than_four(tmp_path: Path, pauses: list[float]) -> None:
    watched = {}
    for count in (4, 64):
        rundir = RunDir(tmp_path / str(count))
        kill_workers_elsewhere(rundir, count)
        pauses.clear()
        notices: list[str] = []
        assert WorkerLeases(rundir).live(notices.append) == []
        watched[count] = sum(pauses)
        assert len(notices) == 1 and "no heartbeat" in notices[0], notices
        assert not list(rundir.workers.glob("*/lease"))
    assert watched[64] < 2 * SHORT, watched


def test_a_heartbeat_counts_and_not_the_time_that_another_machine_gives_it(tmp_path: Path, pauses: list[float]) -> None:
    rundir = RunDir(tmp_path / "run")
    kill_workers_elsewhere(rundir, 3)
    behind, ahead, alive = paths_of(rundir, 3)
    hour = 3600
    os.utime(behind, (time.time() - hour,) * 2)
    os.utime(ahead, (time.time() + hour,) * 2)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(SHORT / 4):
            os.utime(alive, (time.time() - hour,) * 2)

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        workers = WorkerLeases(rundir)
        (live,) = workers.live()
        assert live.startswith("w2 (") and "on another-machine" in live
        assert not behind.exists() and not ahead.exists()
        pauses.clear()
        assert len(workers.live()) == 1 and not any(pauses), "a worker that was seen alive is not watched again"
    finally:
        stop.set()
        heart.join()
    assert WorkerLeases(rundir).live() == []


def test_slurm_is_asked_about_the_job_of_a_silent_worker(
    tmp_path: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDir(tmp_path / "run")
    (path,) = paths_of(rundir, 1)
    command = ["env", "HOLDFAST_LEASE_SECONDS=600", *hold_elsewhere([path])]
    name = str(JobName("0123456789abcdef", os.getpid(), "workers"))
    lab = Slurm(slurm.here)
    lab.submit(
        f"#!/bin/sh\nexec {shlex.join(command)}\n".encode(),
        name=name,
        comment="",
        options=["--no-requeue", "--output=/dev/null"],
    )
    wait_for(path.with_suffix(".holder").exists, "the lease")
    monkeypatch.setenv("SLURM_CONF", slurm.env["SLURM_CONF"])
    monkeypatch.setattr(leases, "LEASE_SECONDS", 600.0)
    slurm.here.check(["scancel", "--signal=KILL", "--full", f"--name={name}"])
    wait_for_job(lab, name, lambda state: not state.active)
    assert path.exists(), "nobody released it"
    assert WorkerLeases(rundir).live() == []
