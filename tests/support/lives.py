"""Runs an eval in as many lives as it takes.

    python -m tests.support.lives eval.yaml

Each life records one call more than the one before it, makes the next call, and is killed (SIGKILL) before that is on
record; the last one comes to the end. Lives are forks of one process, so that nobody waits for imports. Prints how
many were killed; exits as the last one did.
"""

from __future__ import annotations

import os
import signal
import sys

from holdfast.cli.main import main as holdfast_main
from holdfast.engine.recorder import Recorder

recorded = 0


async def step(self: Recorder, record: object) -> None:
    global recorded
    if recorded:
        os.kill(os.getpid(), signal.SIGKILL)
    await really_step(self, record)  # type: ignore[arg-type]
    recorded += 1


really_step = Recorder.step


def live() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    Recorder.step = step  # type: ignore[method-assign]
    sys.argv = ["holdfast", "eval", *sys.argv[1:]]
    holdfast_main()


def main() -> None:
    killed = 0
    while True:
        child = os.fork()
        if child == 0:
            live()
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            print(killed)
            sys.exit(os.waitstatus_to_exitcode(status))
        killed += 1


if __name__ == "__main__":
    main()
