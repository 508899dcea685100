"""Run as a script: compare answers as mathematics.

A process of its own, because a comparison can take for ever, and nothing but a kill ends one that does.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from math_verify import parse, verify  # type: ignore[import-untyped]  # the extra `math`

from holdfast.graders.answering import answer_questions

if TYPE_CHECKING:
    from collections.abc import Callable

_MARKED = re.compile(r"\$|\\boxed|\\\(|\\\[")
_COMMAND = re.compile(r"\\(?:text|mathrm|mathbf|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3,}|(?<=\s)[A-Za-z]{2}(?!\S)|(?<!\S)[A-Za-z]{2}(?=\s)")
_FUNCTIONS = frozenset(
    re.findall(r"\w+", "sin cos tan cot sec csc log exp sqrt arcsin arccos arctan sinh cosh tanh min max inf")
)


_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?[eE][-+]?\d{1,3})(?![\w.]*\w)")
"""1.2e3; more digits than three in the exponent are no number that anybody means"""


def compared(expected: str, answer: str, reach: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Return `equal` and what was `found`, or an `error` where what is expected is not mathematics.

    `reach` is told when the expected answer is read: what goes wrong from there on is the answer's doing.
    """
    wanted = parsed(expected)
    if not wanted:
        return {"error": f"the expected answer {expected.strip()[:80]!r} is not mathematics"}
    reach("answer")
    try:
        found = parsed(answer)
        if not found:
            return {"equal": False, "found": None, "reason": "no mathematics found in the answer"}
        return {"equal": bool(verify(wanted, found, timeout_seconds=None)), "found": str(found[-1])[:200]}
    except Exception as error:  # of a library that meets everything models write
        return {"equal": False, "found": None, "reason": f"cannot be compared: {type(error).__name__}: {error}"[:300]}


def parsed(text: str) -> Any:
    """Read a formula that stands alone as a whole; in other text, look for the last one."""
    text = unicodedata.normalize("NFC", text).replace("\N{MINUS SIGN}", "-")
    text = _SCIENTIFIC.sub(lambda number: f"{Decimal(number[1]):f}", text)
    words = {word.lower() for word in _WORD.findall(_COMMAND.sub(" ", text))} - _FUNCTIONS
    alone = not _MARKED.search(text) and not words and "\n" not in text.strip()
    return parse(f"\\boxed{{{text.strip().rstrip('.')}}}" if alone else text, parsing_timeout=None)


def answer(question: dict[str, Any], reach: Callable[[str], None]) -> dict[str, Any]:
    """Compare the two answers of a question."""
    try:
        return compared(question["expected"], question["answer"], reach)
    except Exception as error:
        return {"error": f"the expected answer cannot be read: {type(error).__name__}: {error}"[:300]}


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    compared("1", "$1$")  # what the library loads at its first use is not the first answer's doing
    answer_questions(answer)
