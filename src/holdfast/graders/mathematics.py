"""The answer equals the expected one as mathematics. Needs the package math-verify."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from holdfast.errors import AttemptError
from holdfast.graders.checks import rendered
from holdfast.graders.pool import NoAnswer, Pool
from holdfast.graders.types import Verdict

if TYPE_CHECKING:
    from holdfast.graders.types import Case
    from holdfast.spec.grader_fields import MathGrader


class Mathematics:
    """Asks a few processes at once, so that an answer which takes long does not hold up the others."""

    def __init__(self, block: MathGrader, fingerprint: str) -> None:
        self.block = block
        self.fingerprint = fingerprint
        self._pool = Pool("mathematics_worker.py")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.close()

    async def judge(self, case: Case) -> Verdict:
        """1 when equal, else 0; also 0 where the answer is such that it cannot be compared."""
        expected = rendered(self.block.expected, case.sample.fields)
        try:
            answer = await self._pool.ask({"expected": expected, "answer": case.said(self.block)}, self.block.timeout)
        except NoAnswer as error:
            return self._failed(error)
        if "error" in answer:
            raise AttemptError("grader", answer["error"], retry=False)
        if answer["found"] is None:
            return Verdict(0.0, answer["reason"], {"found": None})
        feedback = "" if answer["equal"] else f"found {answer['found']}, expected {expected.strip()[:200]}"
        return Verdict(float(answer["equal"]), feedback, {"found": answer["found"]})

    def _failed(self, error: NoAnswer) -> Verdict:
        """Return the verdict on an answer that costs too much to compare; it is not that of the expected one."""
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
