"""A process is identified by its id and its start, with `/proc` and without it.

No macOS is available: its lack of `/proc` is simulated by hiding the folder from the module, which then asks the real
`ps` of this machine, with options that macOS has too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from holdfast.store import lease as leases
from holdfast.store.lease import is_running, start_token
from holdfast.store.run_lock import holders, stop
from holdfast.store.rundir import RunDir
from tests.support.running import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


_HOLD = """
import signal, sys
from pathlib import Path
from holdfast.store import lease as leases
from holdfast.store.lease import RunLease
leases._PROC = Path(sys.argv[2])
lease = RunLease(Path(sys.argv[1]))
lease.acquire(0)
signal.pause()
"""


@pytest.fixture(params=["proc", "ps"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    if request.param == "ps":
        monkeypatch.setattr(leases, "_PROC", tmp_path / "no-proc")
    return str(request.param)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.faults
@pytest.mark.usefixtures("system")
def test_a_zombie_does_not_run(sleeper: subprocess.Popen[bytes]) -> None:
    token = start_token(sleeper.pid)
    assert token.isdigit()
    assert is_running(sleeper.pid, token)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(sleeper.pid, token)
    sleeper.wait()
    assert not is_running(sleeper.pid, token) and start_token(sleeper.pid) == ""


@pytest.mark.faults
@pytest.mark.usefixtures("system")
def test_a_process_with_another_start_is_another_process(sleeper: subprocess.Popen[bytes]) -> None:
    assert not is_running(sleeper.pid, str(int(start_token(sleeper.pid)) - 10))


@pytest.mark.usefixtures("system")
def test_the_process_that_holds_a_run_is_found_and_stopped(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    holder = subprocess.Popen([sys.executable, "-c", _HOLD, str(run.lease), str(leases._PROC)])
    try:
        held = wait_for(lambda: holders(run), "the holder")
        assert [each.pid for each in held] == [holder.pid] and held[0].is_here
        ended, remaining = stop(held, 30)
        assert ended == held and remaining == []
    finally:
        holder.kill()
        holder.wait()
