"""The grader of numbers."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction
from typing import TYPE_CHECKING

from holdfast.errors import AttemptError
from holdfast.graders.expected import expected_texts
from holdfast.graders.types import InstantGrader, Verdict
from holdfast.spec.number_grader_schema import NumberGrader
from holdfast.spec.numbers import first_number, last_number, numbers_in
from holdfast.spec.regex import compile_regex

if TYPE_CHECKING:
    from decimal import Decimal

    from holdfast.graders.types import Case
    from holdfast.spec.eval import Origin
    from holdfast.spec.numbers import WrittenNumber


class Number(InstantGrader):
    """Scores 1 when a number in the answer equals the expected one."""

    schema = NumberGrader
    revision = 2
    block: NumberGrader

    def __init__(self, block: NumberGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._after = None if block.after is None else compile_regex(block.after, dialect=block.dialect)
        self._tolerance = Fraction(repr(block.tolerance))

    def check(self, case: Case) -> Verdict:
        """Compare the number in the answer with the expected one."""
        expected = [_single(text) for text in expected_texts(self.block.expected, case.sample.fields)]
        number = self._find(case.answer(self.block))
        if number is None:
            return Verdict(0.0, "no number found in the answer", {"found": None})
        if number.value is None:
            return Verdict(0.0, f"cannot tell which number {number.text[:80]!r} is", {"found": None})
        details = {"found": number.text}
        if any(self._is_close(number.value, each) for each in expected):
            return Verdict(1.0, "", details)
        return Verdict(0.0, f"found {number.text}, expected {' or '.join(map(str, expected))}", details)

    def _is_close(self, number: Decimal | Fraction, expected: Decimal | Fraction) -> bool:
        if number == expected:
            return True
        # Most wrong answers are far off: floats, which are good to 16 digits, tell so much faster than exact fractions.
        with suppress(OverflowError):
            ours, theirs = float(number), float(expected)
            near = self.block.tolerance * (abs(theirs) if self.block.relative else 1.0)
            if abs(ours - theirs) > 2 * near + 1e-12 * (abs(ours) + abs(theirs)):
                return False
        allowed = self._tolerance * abs(Fraction(expected)) if self.block.relative else self._tolerance
        return abs(Fraction(number) - Fraction(expected)) <= allowed

    def _find(self, text: str) -> WrittenNumber | None:
        if self._after is None:
            return last_number(text)
        end = self._after.last_end(text)
        return None if end is None else first_number(text[end:])


def _single(text: str) -> Decimal | Fraction:
    numbers = numbers_in(text)
    value = numbers[0].value if len(numbers) == 1 else None
    if value is None:
        what = (
            "is not a number"
            if not numbers
            else "contains several numbers: which one counts?"
            if len(numbers) > 1
            else "can be read in more than one way: write it without separators"
        )
        raise AttemptError("grader", f"the expected value {text.strip()[:80]!r} {what}", retry=False)
    return value
