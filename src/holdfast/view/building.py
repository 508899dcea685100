"""The helper process that builds the columns of a large run, and prints how far it is.

Its memory is freed when it ends. Other helpers read results and outputs at the same time, and start first, since they
import little.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import msgspec

from holdfast.store.rundir import RunDir
from holdfast.view.chunks import plan_job, sharing_chunks

_NICENESS = 5
"""so that a run on the same machine goes first; its own helpers inherit it"""


def main() -> None:
    """Build the columns of a run, and store them in a folder."""
    os.nice(_NICENESS)
    gc.disable()  # nothing in the columns has cycles, and looking for them takes half of the time
    rundir, folder = RunDir(Path(sys.argv[1])), Path(sys.argv[2])
    graders, fields = msgspec.json.decode(sys.argv[3])
    job = plan_job(rundir, graders, fields) if rundir.finished else None
    with sharing_chunks(job) if job else nullcontext() as collect:
        from holdfast.view.columns import Columns

        Columns(rundir, folder).build(_show, collect)


def _show(share: float) -> None:
    sys.stdout.write(f"{share}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError):  # the viewer has ended, and its helpers end with it
        sys.exit(1)
