"""The grader `ifeval`: does the answer follow every instruction of its prompt?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.errors import AttemptError
from holdfast.graders.ifeval_checks import follows
from holdfast.graders.types import InstantGrader, Verdict
from holdfast.spec.benchmark_grader_schema import IfevalGrader
from holdfast.spec.template import RENDER_ERRORS, expression

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.graders.types import Case


class InstructionFollowing(InstantGrader):
    """Scores 1 when all instructions are followed; over a run, `instruction_level` is the share of all instructions."""

    schema = IfevalGrader
    extra = "ifeval"
    block: IfevalGrader

    @classmethod
    def totals(cls, block: IfevalGrader, counts: Sequence[int]) -> dict[str, float]:
        """Return the share of instructions that were followed, over all answers."""
        return {"instruction_level": counts[0] / counts[1]}

    def check(self, case: Case) -> Verdict:
        """Check each instruction."""
        instructions = self._list(self.block.instructions, case)
        arguments = self._list(self.block.arguments, case)
        if not instructions or len(instructions) != len(arguments):
            message = f"{len(instructions)} instructions and arguments for {len(arguments)} of them"
            raise AttemptError("grader", message, retry=False)
        text = case.text(self.block)
        answers = [text] if self.block.mode == "strict" else _variants(text)
        followed = [
            any(follows(instruction, values or {}, answer) for answer in answers)
            for instruction, values in zip(instructions, arguments, strict=True)
        ]
        missed = [name for name, holds in zip(instructions, followed, strict=True) if not holds]
        feedback = f"does not follow {', '.join(missed)}" if missed else ""
        counts = (sum(followed), len(followed))
        return Verdict(float(not missed), feedback, {"followed": followed, "value": counts}, counts=counts)

    def _list(self, written: str, case: Case) -> list[Any]:
        try:
            value = expression(written)(case.sample.fields)
        except RENDER_ERRORS as error:
            raise AttemptError("grader", f"cannot evaluate {written!r}: {error}", retry=False) from error
        if not isinstance(value, list):
            raise AttemptError("grader", f"{written!r} is not a list for this row", retry=False)
        return value


def _variants(answer: str) -> list[str]:
    """Return the answer with and without its first line, its last line and its asterisks."""
    lines = answer.split("\n")
    cut = [answer, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*cut, *(text.replace("*", "") for text in cut)]
