"""Run as a script: compare answers as mathematics.

It runs in a process of its own, because a comparison can take forever and only a kill ends it.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from math_verify import parse, verify  # type: ignore[import-untyped]  # the extra `math`

from holdfast.graders.worker_loop import answer_questions

if TYPE_CHECKING:
    from collections.abc import Callable

_MARKED = re.compile(r"\$|\\boxed|\\\(|\\\[")
_COMMAND = re.compile(r"\\(?:text|mathrm|mathbf|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3,}|(?<=\s)[A-Za-z]{2}(?!\S)|(?<!\S)[A-Za-z]{2}(?=\s)")
_FUNCTIONS = frozenset(
    re.findall(r"\w+", "sin cos tan cot sec csc log exp sqrt arcsin arccos arctan sinh cosh tanh min max inf")
)


_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?[eE][-+]?\d{1,3})(?![\w.]*\w)")
"""1.2e3, with at most three digits in the exponent"""


def compare(expected: str, answer: str, reach: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Return `equal` and the formula that was `found`, or an `error` where the expected text is not mathematics.

    `reach` is called once the expected text is read: any failure after that is caused by the answer.
    """
    formulas = parse_text(expected)
    if not formulas:
        return {"error": f"the expected answer {expected.strip()[:80]!r} is not mathematics"}
    reach("answer")
    try:
        answered = parse_text(answer)
        if not answered:
            return {"equal": False, "found": None, "reason": "no mathematics found in the answer"}
        return {"equal": bool(verify(formulas, answered, timeout_seconds=None)), "found": str(answered[-1])[:200]}
    except Exception as error:  # of a library that meets everything models write
        return {"equal": False, "found": None, "reason": f"cannot be compared: {type(error).__name__}: {error}"[:300]}


def parse_text(text: str) -> Any:
    """Read a formula that stands alone as a whole; in other text, look for the last one."""
    text = unicodedata.normalize("NFC", text).replace("\N{MINUS SIGN}", "-")
    text = _SCIENTIFIC.sub(lambda number: f"{Decimal(number[1]):f}", text)
    words = {word.lower() for word in _WORD.findall(_COMMAND.sub(" ", text))} - _FUNCTIONS
    alone = not _MARKED.search(text) and not words and "\n" not in text.strip()
    return parse(f"\\boxed{{{text.strip().rstrip('.')}}}" if alone else text, parsing_timeout=None)


def answer(question: dict[str, Any], reach: Callable[[str], None]) -> dict[str, Any]:
    """Compare the two answers of a question."""
    try:
        return compare(question["expected"], question["answer"], reach)
    except Exception as error:
        return {"error": f"the expected answer cannot be read: {type(error).__name__}: {error}"[:300]}


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    compare("1", "$1$")  # so that the first answer does not wait for what the library loads at its first use
    answer_questions(answer)
