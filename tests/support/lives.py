"""Runs an eval in as many lives as it takes.

    python -m tests.support.lives eval.yaml

Each life records one call more than the one before it, makes the next call, and is killed (SIGKILL) before that is on
record; the last one comes to the end. Lives are forks of one process, so that nobody waits for imports. Prints how
many were killed; exits as the last one did.

    python -m tests.support.lives --one before|after ARGUMENTS…

One life of a command, which is killed before its second call is on record, or after its first.
"""

from __future__ import annotations

import os
import signal
import sys

from holdfast.apps.cli.main import main as holdfast_main
from holdfast.engine.recorder import Recorder

recorded = 0
killed_after = False


async def step(self: Recorder, record: object) -> None:
    global recorded
    if recorded:
        os.kill(os.getpid(), signal.SIGKILL)
    await really_step(self, record)  # type: ignore[arg-type]
    recorded += 1
    if killed_after:
        os.kill(os.getpid(), signal.SIGKILL)


really_step = Recorder.step


def live(*arguments: str) -> None:
    Recorder.step = step  # type: ignore[method-assign]
    sys.argv = ["holdfast", *arguments]
    holdfast_main()


def main() -> None:
    global killed_after
    if sys.argv[1] == "--one":
        killed_after = sys.argv[2] == "after"
        live(*sys.argv[3:])
    killed = 0
    while True:
        child = os.fork()
        if child == 0:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            live("eval", *sys.argv[1:])
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            print(killed)
            sys.exit(os.waitstatus_to_exitcode(status))
        killed += 1


if __name__ == "__main__":
    main()
