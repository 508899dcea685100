"""The helper process that builds the columns of a large run, and prints how far it is.

Its memory is freed when it ends. The columns of a finished run are made with few modules, so it begins at once; others
need most of Holdfast.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from holdfast.store.rundir import RunDir
from holdfast.view.chunks import ChunkPlan  # noqa: TC001 - msgspec reads it
from holdfast.view.reported import read_reported

_NICENESS = 5
"""so that a run on the same machine goes first; its own helpers inherit it"""


class BuildOrder(msgspec.Struct):
    """The columns that are to be built."""

    run: str
    folder: str
    """where they are to be stored"""
    plan: ChunkPlan | None
    """None if the run is not finished, or its report does not fit its journals"""
    notes: Any
    """for columns that are made of the report"""


def main() -> None:
    """Build the columns of a run, and store them in a folder."""
    os.nice(_NICENESS)
    gc.disable()  # nothing in the columns has cycles, and looking for them takes half of the time
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=BuildOrder)
    folder = Path(order.folder)
    table = None if order.plan is None else read_reported(order.plan, _show)
    if table is None:
        from holdfast.view.columns import Columns

        Columns(RunDir(Path(order.run)), folder).build(_show, reported=False)
    else:
        with suppress(OSError):  # the viewer then builds them again, and keeps them in memory
            table.store(folder, order.notes)


def _show(share: float) -> None:
    sys.stdout.write(f"{share}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError):  # the viewer has ended, and its helpers end with it
        sys.exit(1)
