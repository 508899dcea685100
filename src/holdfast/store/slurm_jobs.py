"""Ask Slurm whether the jobs that hold leases have ended.

A process on another node cannot be looked up, but the job that it belongs to can. What Slurm does not know, or does not
say for sure, is left to the lease's heartbeat.
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection

# Not NODE_FAIL: the processes of a node that Slurm cannot reach may live on, and those of a requeued job, too.
_ENDED: Final = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY", "PREEMPTED"})
_SECONDS: Final = 20


class SlurmJob(msgspec.Struct, frozen=True):
    """A Slurm job. The name is a part of it: a controller that was killed may reuse ids."""

    id: str
    """unique also for each member of an array"""
    name: str


def this_slurm_job() -> SlurmJob | None:
    """Return the job that this process runs in."""
    job, name = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_JOB_NAME")
    return SlurmJob(job, name) if job and name else None


def which_ended(jobs: Collection[SlurmJob]) -> set[SlurmJob]:
    """Return those of the jobs that Slurm says have ended. One question for all; none if Slurm does not answer."""
    if not jobs:
        return set()
    ids = ",".join(sorted({job.id for job in jobs}))
    argv = ["squeue", "--noheader", "--states=all", f"--jobs={ids}", "--format=%A %T %j"]
    try:
        listing = subprocess.run(argv, capture_output=True, text=True, timeout=_SECONDS, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return set()
    rows = (line.split(" ", 2) for line in listing.splitlines())
    ended = {SlurmJob(row[0], row[2].strip()) for row in rows if len(row) == 3 and row[1] in _ENDED}
    return ended & set(jobs)
