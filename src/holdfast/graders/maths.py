"""Compares an answer with the expected one as mathematics. Needs the package math-verify.

Comparisons run in worker processes: one can take forever, and only a kill ends it.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from holdfast.errors import AttemptError
from holdfast.graders.expected import expected_texts
from holdfast.graders.pool import NoAnswer, Pool
from holdfast.graders.types import Verdict, WaitingGrader
from holdfast.spec.grader_schema import NotEmpty, OnTimeout, TextBlock
from holdfast.spec.schema import Seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.graders.types import Case
    from holdfast.graders.worker import Answer
    from holdfast.spec.eval import Origin


class MathGrader(TextBlock):
    """Checks that the answer equals the expected one as mathematics: 1/2 is 0.5 is \\frac{2}{4}."""

    type: Literal["math"]
    expected: Annotated[str | int | float | list[str | int | float], NotEmpty] = "{{ expected }}"
    """Expected value, or a list of accepted values. Templates over the row."""
    timeout: Seconds = 10
    """Time limit for one comparison."""
    on_timeout: OnTimeout = "fail"
    """The result of a timeout: a failed check with score 0 (`fail`), or an `error` that the next command retries."""


class Mathematics(WaitingGrader):
    """Asks several processes, so that a slow answer does not delay the others."""

    schema = MathGrader
    requires = ("math_verify", "math-verify")
    block: MathGrader

    def __init__(self, block: MathGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._pool = Pool("holdfast.graders.maths:start")

    async def __aexit__(self, *_: object) -> None:
        await self._pool.close()

    async def judge(self, case: Case) -> Verdict:
        """Score 1 for an answer equal to any expected text, else 0, even if the answer cannot be compared."""
        expected = expected_texts(self.block.expected, case.sample.fields)
        formula = problem = failure = None
        reason = "no mathematics found in the answer"
        for text in expected:
            try:
                answer = await self._pool.ask({"expected": text, "answer": case.answer(self.block)}, self.block.timeout)
            except NoAnswer as error:
                failure = failure or error  # another expected text may still be equal
                continue
            if answer.get("equal"):
                return Verdict(1.0, "", {"found": answer["found"]})
            problem = problem or answer.get("error")
            formula, reason = formula or answer.get("found"), answer.get("reason") or reason
        if problem is not None:
            raise AttemptError("grader", problem, retry=False)
        if failure is not None:
            return self._failed(failure)
        if formula is None:
            return Verdict(0.0, reason, {"found": None})
        choices = " or ".join(text.strip()[:200] for text in expected[:5])
        return Verdict(0.0, f"found {formula}, expected {choices}", {"found": formula})

    def _failed(self, error: NoAnswer) -> Verdict:
        """Return the verdict on an answer that takes too long; raise AttemptError if the expected text is the cause."""
        limit = f"{self.block.timeout:g} s"
        if error.stage != "answer":
            if error.late:
                message = f"the expected answer could not be read within {limit}"
                raise AttemptError("timeout", message, retry=False) from None
            raise AttemptError("grader", "the process that compares answers has died", retry=False) from error
        if error.late and self.block.on_timeout == "error":
            raise AttemptError("timeout", f"no comparison within {limit}", retry=False) from None
        details: dict[str, Any] = {"found": None, "timed_out": error.late}
        return Verdict(0.0, f"timed out after {limit}" if error.late else "the comparison crashed", details)


_MARKED: Final = re.compile(r"\$|\\boxed|\\\(|\\\[")
_COMMAND: Final = re.compile(r"\\(?:text|mathrm|mathbf|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD: Final = re.compile(r"[A-Za-z]{3,}|(?<=\s)[A-Za-z]{2}(?!\S)|(?<!\S)[A-Za-z]{2}(?=\s)")
_FUNCTIONS: Final = frozenset(
    re.findall(r"\w+", "sin cos tan cot sec csc log exp sqrt arcsin arccos arctan sinh cosh tanh min max inf")
)
_SCIENTIFIC: Final = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?[eE][-+]?\d{1,3})(?![\w.]*\w)")
"""1.2e3, with at most three digits in the exponent"""


def compare(expected: str, answer: str, reach: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Return `equal` and the formula that was `found`, or an `error` if the expected text is not mathematics.

    `reach` is called once the expected text is read: any failure after that is caused by the answer.
    """
    from math_verify import verify  # type: ignore[import-untyped]

    formulas = parse_text(expected)
    if not formulas:
        return {"error": f"the expected answer {expected.strip()[:80]!r} is not mathematics"}
    reach("answer")
    try:
        answered = parse_text(answer)
        if not answered:
            return {"equal": False, "found": None, "reason": "no mathematics found in the answer"}
        return {"equal": bool(verify(formulas, answered, timeout_seconds=None)), "found": str(answered[-1])[:200]}
    except Exception as error:  # the library meets everything models write
        return {"equal": False, "found": None, "reason": f"cannot be compared: {type(error).__name__}: {error}"[:300]}


def parse_text(text: str) -> Any:
    """Read a text that is nothing but a formula as a whole; in other text, look for the last formula."""
    from math_verify import parse

    text = unicodedata.normalize("NFC", text).replace("\N{MINUS SIGN}", "-")
    text = _SCIENTIFIC.sub(lambda number: f"{Decimal(number[1]):f}", text)
    words = {word.lower() for word in _WORD.findall(_COMMAND.sub(" ", text))} - _FUNCTIONS
    alone = not _MARKED.search(text) and not words and "\n" not in text.strip()
    return parse(f"\\boxed{{{text.strip().rstrip('.')}}}" if alone else text, parsing_timeout=None)


def start() -> Answer:
    """Load math-verify, so that no question waits for it; return the function that compares two answers."""
    logging.disable(logging.CRITICAL)
    compare("1", "$1$")
    return _answer


def _answer(question: dict[str, Any], reach: Callable[[str], None]) -> dict[str, Any]:
    try:
        return compare(question["expected"], question["answer"], reach)
    except Exception as error:
        return {"error": f"the expected answer cannot be read: {type(error).__name__}: {error}"[:300]}
