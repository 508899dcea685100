"""Leases: dead holders are noticed, together, whatever the clocks say, and of many contenders one replaces them.

Another machine is a process with another host name, in a UTS namespace of its own. Waiting takes no time here: whoever
watches leases does so by a clock that only the pauses move.
"""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import pytest

from holdfast.apps.cluster.remote.slurm import JobName, Slurm
from holdfast.errors import RunHeld
from holdfast.store import lease as leases
from holdfast.store.lease import Holder, RunLease
from holdfast.store.run_lock import WorkerLeases, worker_lease
from holdfast.store.rundir import RunDir
from tests.support.breaking import needs_root
from tests.support.interleaving import Stepped, every_order
from tests.support.running import environment, wait_for
from tests.support.slurm import submit_script, wait_for_job

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.slurm import Cluster

pytestmark = pytest.mark.faults

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
ELSEWHERE = Holder("another-machine", 4321, 1.5e9, token="0123456789abcdef")


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
    process = subprocess.Popen(
        hold_elsewhere(paths_of(rundir, count)), stdout=subprocess.PIPE, env=environment(), text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    process.kill()
    process.communicate()


def beat(path: Path) -> None:
    """Send the heartbeat of a process on another machine."""
    path.write_bytes(leases._content(msgspec.json.decode(path.read_bytes(), type=Holder)))


class Clock:
    """Time that passes only in pauses."""

    def __init__(self) -> None:
        self.slept = 0.0
        self.at_pause: Callable[[], object] = lambda: None
        self._since = time.monotonic()

    def monotonic(self) -> float:
        return self._since + self.slept

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.at_pause()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of whoever watches leases in this process."""
    clock = Clock()
    rest = {name: getattr(time, name) for name in ("time", "monotonic_ns", "localtime", "strftime")}
    monkeypatch.setattr(leases, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep, **rest))
    return clock


@needs_root
def test_sixty_four_dead_workers_are_watched_no_longer_than_four(tmp_path: Path, clock: Clock) -> None:
    watched = {}
    for count in (4, 64):
        rundir = RunDir(tmp_path / str(count))
        kill_workers_elsewhere(rundir, count)
        before, notices = clock.slept, list[str]()
        assert WorkerLeases(rundir).live(notices.append) == []
        watched[count] = clock.slept - before
        (notice,) = notices
        assert f"and {count - 1} more, which hold this run, have no heartbeat; taking over unless" in notice
        assert not list(rundir.workers.glob("*/lease"))
    assert watched[4] == pytest.approx(watched[64]) == pytest.approx(leases.LEASE_SECONDS, abs=0.2)


@needs_root
def test_a_heartbeat_counts_and_not_the_time_that_another_machine_gives_it(tmp_path: Path, clock: Clock) -> None:
    rundir = RunDir(tmp_path / "run")
    kill_workers_elsewhere(rundir, 3)
    behind, ahead, alive = paths_of(rundir, 3)
    hour = 3600
    os.utime(behind, (time.time() - hour,) * 2)
    os.utime(ahead, (time.time() + hour,) * 2)

    def beat_late() -> None:
        if clock.slept % 10 < 0.1:
            beat(alive)
            os.utime(alive, (time.time() - hour,) * 2)

    clock.at_pause = beat_late
    workers = WorkerLeases(rundir)
    (live,) = workers.live()
    assert live.startswith("w2 (") and "on another-machine" in live
    assert not behind.exists() and not ahead.exists()
    before = clock.slept
    assert len(workers.live()) == 1 and clock.slept == before, "a worker that was seen alive is not watched again"
    clock.at_pause = lambda: None
    assert WorkerLeases(rundir).live() == []


def test_a_heartbeat_is_seen_if_the_file_system_rounds_times_and_changes_inode_numbers(
    tmp_path: Path, clock: Clock
) -> None:
    path = tmp_path / "run.lock"
    path.write_bytes(leases._content(ELSEWHERE))

    def beat_in_a_new_file() -> None:
        new = tmp_path / "new"
        new.write_bytes(leases._content(ELSEWHERE))
        os.utime(new, (2, 2))  # as always
        new.replace(path)

    clock.at_pause = beat_in_a_new_file
    with pytest.raises(RunHeld, match="process 4321 on another-machine"):
        RunLease(path).acquire(100)
    assert clock.slept >= 100 - 1e-6


def test_holders_heartbeats_change_the_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    lease = RunLease(path)
    lease.acquire(0)
    before = path.read_bytes()
    assert lease._own is not None and lease._touch(lease._own)
    assert path.read_bytes() != before and len(path.read_bytes()) == len(before)
    assert lease.holder == msgspec.structs.replace(lease._own, beat=lease.holder.beat)
    lease.release()
    assert not lease._touch(lease.__dict__["_own"] or ELSEWHERE) and not path.exists(), "it does not come back"


def test_waiting_ends_when_the_holder_is_dead_and_says_so_before(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "run.lock"
    path.write_bytes(leases._content(ELSEWHERE))
    notices: list[str] = []
    lease = RunLease(path)
    lease.acquire(-1, notices.append)
    assert lease.inherited and clock.slept == pytest.approx(leases.LEASE_SECONDS, abs=0.5)
    assert notices[0].startswith("waiting for process 4321 on another-machine")
    assert notices[1].endswith("no heartbeat; taking over unless it returns within 15 s")
    lease.release()


def test_each_holder_keeps_the_lease_for_the_time_that_it_announced(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "run.lock"
    path.write_bytes(leases._content(msgspec.structs.replace(ELSEWHERE, lease=200.0)))
    lease = RunLease(path)
    lease.acquire(0)
    assert clock.slept == pytest.approx(200, abs=0.5)
    lease.release()


@needs_root
def test_a_process_of_another_pid_namespace_is_not_taken_for_dead(tmp_path: Path) -> None:
    """Two containers may have the same host name; process ids of one mean nothing in the other."""
    path = tmp_path / "run.lock"
    hold = [sys.executable, "-c", _HOLD, str(path)]
    process = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", *hold], stdout=subprocess.PIPE, env=environment(), text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        holder = RunLease(path).holder
        assert holder is not None and holder.host == os.uname().nodename and holder.pid == 1
        assert not holder.is_dead and not holder.is_here
        assert not RunLease(path).take_if_dead()
    finally:
        process.kill()
        process.communicate()


def test_a_lease_that_cannot_be_removed_is_named_and_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal is simulated: root, as which tests run, may remove everything."""
    path = tmp_path / "a run.lock"
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = RunLease(tmp_path / "other.lock")
    here.acquire(0)
    assert here._own is not None
    path.write_bytes(leases._content(msgspec.structs.replace(here._own, pid=ended.pid)))
    here.release()

    def refuse(self: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(RunHeld, match=f"process {ended.pid} .* has ended.* cannot be removed: Permission") as caught:
        RunLease(path).acquire(-1)
    assert f"rm '{path}'" in str(caught.value.remedy)


class Contenders:
    """A lease and the processes that want it, each of which makes one step at a time."""

    def __init__(self, folder: Path, holder: Holder) -> None:
        self.path = Stepped(folder / f"{secrets.token_hex(4)}.lock")
        self.content = leases._content(holder)
        self.path.write_bytes(self.content)
        self.taken: dict[str, RunLease] = {}

    def watched(self) -> RunLease:
        """A contender that has watched the holder for a whole lease."""
        lease = RunLease(self.path)
        lease._look()
        lease._seen_since -= 1000
        return lease

    def contend(self, name: str, lease: RunLease) -> Callable[[], None]:
        """Take the lease if the holder is dead."""

        def act() -> None:
            if lease.take_if_dead():
                self.taken[name] = lease

        return act

    def return_(self, holder: Holder) -> Callable[[], None]:
        """Send the heartbeat of a holder that was frozen."""
        lease = RunLease(self.path)
        lease._own = holder
        self.taken["holder"] = lease
        return lambda: (lease._touch(holder), None)[1]

    def holding(self) -> list[str]:
        """The processes that would write to the run now."""
        return [name for name, lease in self.taken.items() if lease.still_held()]

    def check(self) -> None:
        """Check what is true in any case."""
        assert len(self.holding()) <= 1
        assert not list(self.path.parent.glob(".*.tmp")), "nothing is left aside"


def test_of_two_contenders_one_takes_over_in_every_order_of_their_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = 0
    for schedule in every_order(monkeypatch, leases, switches=3):
        contenders = Contenders(tmp_path, ELSEWHERE)
        first, second = contenders.watched(), contenders.watched()
        schedule.run(first=contenders.contend("first", first), second=contenders.contend("second", second))
        contenders.check()
        assert contenders.holding() == list(contenders.taken), "whoever has it keeps it"
        assert len(contenders.taken) == 1 or not contenders.path.exists(), "it is taken, or free"
        orders += 1
    assert orders > 200


def test_a_holder_that_returns_among_contenders_keeps_the_lease_or_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = replaced = 0
    for schedule in every_order(monkeypatch, leases, switches=2):
        contenders = Contenders(tmp_path, ELSEWHERE)
        first, second = contenders.watched(), contenders.watched()
        schedule.run(
            first=contenders.contend("first", first),
            second=contenders.contend("second", second),
            holder=contenders.return_(ELSEWHERE),
        )
        contenders.check()
        kept += contenders.holding() == ["holder"]
        replaced += bool(contenders.taken.keys() - {"holder"})
        if not contenders.holding():
            assert not contenders.path.exists(), "it is free, and not blocked by a lease that nobody has"
    assert kept and replaced


@needs_root
def test_slurm_is_asked_about_the_job_of_a_silent_worker(
    tmp_path: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDir(tmp_path / "run")
    (path,) = paths_of(rundir, 1)
    command = ["env", "HOLDFAST_LEASE_SECONDS=600", *hold_elsewhere([path])]
    name = str(JobName("0123456789abcdef", os.getpid(), "workers"))
    lab = Slurm(slurm.here)
    submit_script(
        lab,
        f"#!/bin/sh\nexec {shlex.join(command)}\n".encode(),
        name=name,
        comment="",
        options=["--no-requeue", "--output=/dev/null"],
    )
    wait_for(path.exists, "the lease")
    monkeypatch.setenv("SLURM_CONF", slurm.env["SLURM_CONF"])
    slurm.here.check(["scancel", "--signal=KILL", "--full", f"--name={name}"])
    wait_for_job(lab, name, lambda state: not state.active)
    assert path.exists(), "nobody released it"
    assert WorkerLeases(rundir).live() == []
