"""Answer the questions of a `pool`, in a process of its own: one line of JSON in, one out, until the input ends."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_MEMORY: Final = 4 << 30
OUTSIDE: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
"""signals that come from outside: no answer makes a program send them to itself"""


def answer_questions(answer: Callable[[dict[str, Any], Callable[[str], None]], dict[str, Any]]) -> None:
    """Call `answer` with each question and with a function that names the stage it has reached."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # the kernel kills this process with the run
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = _MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    for number in OUTSIDE:  # signals to the process group arrive here too, but the run decides when this process ends
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever is printed on the way is not an answer

    def write(line: object) -> None:
        answers.write(json.dumps(line) + "\n")

    write("ready")
    for question in sys.stdin:
        write(answer(json.loads(question), write))
