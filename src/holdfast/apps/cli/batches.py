"""`holdfast batches`: list the batches of a run, and give up those that cannot be collected."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import click

from holdfast.apps.cli.flags import complete_runs, find_run, runs_dir_option, runs_directory
from holdfast.display.format import duration
from holdfast.display.terminal import echo
from holdfast.plugins.batches.ledger import BatchAbandoned, BatchStore, now, read_batches
from holdfast.store.run_lock import hold
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.plugins.batches.ledger import Batch


@click.command("batches")
@click.argument("run", shell_complete=complete_runs)
@click.option("--abandon", is_flag=True, help="Give up the batches that are under way: their results do not count.")
@runs_dir_option
def command(run: str, abandon: bool, runs_dir: Path | None) -> int:
    """List the batches of RUN (path or id), with the ids that the provider gave them.

    With --abandon, batches that are under way are given up, for an account or a server that is gone. They are not
    cancelled at the provider, and the next `holdfast eval` pays for their requests once more.
    """
    rundir = RunDir(find_run(run, runs_directory(runs_dir)))
    if abandon:
        _abandon(rundir)
    batches = read_batches(rundir).values()
    for batch in batches:
        echo(_line(batch))
    if not batches:
        echo("no batches")
    return 0


def _abandon(rundir: RunDir) -> None:
    lease = hold(rundir)
    try:
        store = BatchStore(rundir, rundir.path)
        waiting = [batch for batch in store.refresh().values() if batch.waiting]
        steps = (BatchAbandoned(batch.intent.intent, "given up by the user", now(), batch.id) for batch in waiting)
        asyncio.run(store.write(*steps))
    finally:
        lease.release()


def _line(batch: Batch) -> str:
    count = len(batch.intent.requests)
    if batch.collected is not None:
        state = f"{batch.collected.status}, {batch.collected.answered:,} results collected"
    elif batch.abandoned is not None:
        state = f"abandoned: {batch.abandoned}"
    else:
        state = "under way"
    age = duration(max(0.0, time.time() - (batch.sent or batch.intent.time)))
    return f"{batch.name}  {count:,} requests of {batch.intent.where}, {age} ago  {state}"
