"""Jobs on this machine are processes, found again by id and start, with `/proc` and without it.

The lack of `/proc` on macOS is simulated by hiding the folder from `store.lease`; the `ps` it asks instead is real.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from holdfast.apps.cluster.remote.executor import active_main_jobs
from holdfast.apps.cluster.remote.invocation import read_task
from holdfast.apps.cluster.remote.ledger import Ledger
from holdfast.apps.cluster.remote.local import LocalExecutor
from holdfast.apps.cluster.remote.transport import Here
from holdfast.store import lease as leases
from tests.support.invocations import launched
from tests.support.running import wait_for

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("proc", [True, False])
def test_a_job_on_this_machine_is_alive_until_it_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proc: bool
) -> None:
    if not proc:
        monkeypatch.setattr(leases, "_PROC", tmp_path / "no-proc")
    invocation = launched(Here(pauses=()), tmp_path, executor="local")
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    ledger = Ledger(invocation.transport, str(invocation.directory))
    task = replace(read_task(invocation.transport, invocation.place()), python=str(program))
    executor = LocalExecutor()
    (job,) = executor.start(ledger, task, invocation.place())
    running = active_main_jobs(executor, ledger, invocation.id)[0]
    assert [state.id for state in running] == [job.id]
    executor.cancel(invocation.transport, running)
    wait_for(lambda: not active_main_jobs(executor, ledger, invocation.id), "the end of the process")
    assert job.id is not None
    os.waitpid(int(job.id.partition("-")[0]), 0)
