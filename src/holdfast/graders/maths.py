"""Compares an answer with the expected one as mathematics. Needs the package math-verify."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.errors import AttemptError
from holdfast.graders.expected import expected_texts
from holdfast.graders.pool import NoAnswer, Pool
from holdfast.graders.types import Verdict, WaitingGrader
from holdfast.spec.content_grader_schema import MathGrader

if TYPE_CHECKING:
    from holdfast.graders.types import Case
    from holdfast.spec.eval import Origin


class Mathematics(WaitingGrader):
    """Asks several processes, so that an answer which takes long does not delay the others."""

    schema = MathGrader
    revision = 2
    requires = ("math_verify", "math-verify")
    block: MathGrader

    def __init__(self, block: MathGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._pool = Pool("maths_worker.py")

    async def __aexit__(self, *_: object) -> None:
        await self._pool.close()

    async def judge(self, case: Case) -> Verdict:
        """Score 1 for an answer equal to any expected text, else 0, also where the answer cannot be compared."""
        expected = expected_texts(self.block.expected, case.sample.fields)
        formula = problem = failure = None
        reason = "no mathematics found in the answer"
        for text in expected:
            try:
                answer = await self._pool.ask({"expected": text, "answer": case.answer(self.block)}, self.block.timeout)
            except NoAnswer as error:
                failure = failure or error  # another expected text may be equal all the same
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
        """Return the verdict on an answer that takes too long; raise where the expected text is the cause."""
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
