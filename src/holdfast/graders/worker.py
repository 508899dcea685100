"""Run as a module by a `pool`: answer its questions, one line of JSON each, until the input ends.

    python -P -m holdfast.graders.worker [MODULE:FUNCTION]

The function prepares the process and returns a function that answers a question. Without an argument, questions are
requests of `spec.slow`. An answer may take forever, so the pool may kill this process at any time.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING, Any, Final

from holdfast.spec.plugins import load_reference

if TYPE_CHECKING:
    from collections.abc import Callable

    Answer = Callable[[dict[str, Any], Callable[[str], None]], dict[str, Any]]
    """answers a question; calls its second argument with the name of each stage that it reaches"""

_MEMORY: Final = 4 << 30
OUTSIDE: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
"""signals from outside: no answer makes a program send them to itself"""


def main(reference: str | None = None) -> None:
    """Prepare, then answer all questions."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # the kernel kills this process with the run
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = _MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    for number in OUTSIDE:  # signals to the process group arrive here too, but the run decides when this process ends
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # printed text is not an answer

    def write(line: object) -> None:
        answers.write(json.dumps(line) + "\n")

    answer: Answer = _answer_slow_request if reference is None else load_reference(reference)()
    write("ready")
    for question in sys.stdin:
        write(answer(json.loads(question), write))


def _answer_slow_request(question: dict[str, Any], _: Callable[[str], None]) -> dict[str, Any]:
    return {"answer": load_reference(question["request"])(**question["values"]).work()}


if __name__ == "__main__":
    main(*sys.argv[1:])
