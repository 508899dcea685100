"""Run as a script: compares answers as mathematics, one JSON object per line in and out, until its input ends.

A process of its own, because a comparison can take for ever, and nothing but a kill ends one that does.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import signal
import sys
from typing import Any

from math_verify import parse, verify  # type: ignore[import-untyped]  # the extra `math`

_MARKED = re.compile(r"\$|\\boxed|\\\(|\\\[")
_COMMAND = re.compile(r"\\(?:text|mathrm|mathbf|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3,}|(?<=\s)[A-Za-z]{2}(?!\S)|(?<!\S)[A-Za-z]{2}(?=\s)")
_FUNCTIONS = frozenset(
    re.findall(r"\w+", "sin cos tan cot sec csc log exp sqrt arcsin arccos arctan sinh cosh tanh min max inf")
)


def compared(expected: str, answer: str) -> dict[str, Any]:
    """`equal`, or `error` where what is expected is not mathematics."""
    wanted = parsed(expected)
    if not wanted:
        return {"error": f"the expected answer {expected.strip()[:80]!r} is not mathematics"}
    found = parsed(answer)
    if not found:
        return {"equal": False, "found": None}
    return {"equal": bool(verify(wanted, found, timeout_seconds=None)), "found": str(found[-1])[:200]}


def parsed(text: str) -> Any:
    """A formula that stands alone is read as a whole; in other text, the last one is looked for."""
    words = {word.lower() for word in _WORD.findall(_COMMAND.sub(" ", text))} - _FUNCTIONS
    alone = not _MARKED.search(text) and not words and "\n" not in text.strip()
    return parse(f"\\boxed{{{text.strip().rstrip('.')}}}" if alone else text, parsing_timeout=None)


def main() -> None:
    """Answer until nobody asks any more."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    logging.disable(logging.CRITICAL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever is printed on the way is not an answer
    answers.write("ready\n")
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = compared(asked["expected"], asked["answer"])
        except Exception as error:  # of a library that meets everything models write
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
