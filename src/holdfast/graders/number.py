"""The grader of numbers."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

from holdfast.errors import AttemptError
from holdfast.graders.expected import expected_texts
from holdfast.graders.types import InstantGrader, Verdict
from holdfast.spec.number_grader_schema import NumberGrader
from holdfast.spec.numbers import numbers_in
from holdfast.spec.regex import compile_regex

if TYPE_CHECKING:
    from holdfast.graders.types import Case
    from holdfast.spec.origin import Origin


class Number(InstantGrader):
    """Scores 1 when a number in the answer equals the expected one."""

    schema = NumberGrader
    revision = 1
    block: NumberGrader

    def __init__(self, block: NumberGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._after = None if block.after is None else compile_regex(block.after, dialect=block.dialect)
        self._tolerance = Decimal(repr(block.tolerance))

    def check(self, case: Case) -> Verdict:
        """Compare the number in the answer with the expected one."""
        expected = [_single(text) for text in expected_texts(self.block.expected, case.sample.fields)]
        number = self._find(case.text(self.block))
        if number is None:
            return Verdict(0.0, "no number found in the answer", {"found": None})
        details = {"found": str(number)}
        for each in expected:
            allowed = self._tolerance * abs(each) if self.block.relative else self._tolerance
            if abs(number - each) <= allowed:
                return Verdict(1.0, "", details)
        return Verdict(0.0, f"found {number!s}, expected {' or '.join(map(str, expected))}", details)

    def _find(self, text: str) -> Decimal | None:
        if self._after is None:
            numbers = numbers_in(text)
            return numbers[-1] if numbers else None
        end = self._after.last_end(text)
        return None if end is None else next(iter(numbers_in(text[end:])), None)


def _single(text: str) -> Decimal:
    numbers = numbers_in(text)
    if len(numbers) != 1:
        what = "is not a number" if not numbers else "contains several numbers: which one counts?"
        raise AttemptError("grader", f"the expected value {text.strip()[:80]!r} {what}", retry=False)
    return numbers[0]
