"""Graders that look at the text and answer at once: exact, text, choice, number."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Self

from holdfast.errors import AttemptError
from holdfast.graders.types import Verdict
from holdfast.spec.regex import compile_regex
from holdfast.spec.template import RENDER_ERRORS, template

if TYPE_CHECKING:
    from holdfast.graders.types import Case
    from holdfast.spec.grader_fields import ChoiceGrader, ExactGrader, NumberGrader, TextGrader

_NUMBER = re.compile(r"(?:(?<![\w.)])[-+])?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")

_MOST_DIGITS = 10_000
"""numbers further from 1 than this many digits are noise, and no arithmetic can hold them"""


def rendered(value: Any, fields: dict[str, Any]) -> str:
    """A template over the row, or a plain value as text."""
    if not isinstance(value, str):
        return str(value)
    try:
        return template(value).render(fields)
    except RENDER_ERRORS as error:
        raise AttemptError("grader", f"cannot render {value!r}: {error}", retry=False) from error


class Check:
    """A grader that needs nothing opened or closed."""

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


def share(count: int, failures: list[str], details: Any = None) -> Verdict:
    """The share of checks that hold, with those that do not in words."""
    return Verdict((count - len(failures)) / count, "; ".join(failures), details)


class Exact(Check):
    """The whole answer equals the expected one."""

    def __init__(self, block: ExactGrader, fingerprint: str) -> None:
        super().__init__(fingerprint)
        self.block = block

    def check(self, case: Case) -> Verdict:
        """1 when equal, else 0."""
        wanted, got = rendered(self.block.expected, case.sample.fields), case.said(self.block)
        if self.block.strip:
            wanted, got = wanted.strip(), got.strip()
        if self.block.ignore_case:
            wanted, got = wanted.casefold(), got.casefold()
        return Verdict(1.0) if wanted == got else Verdict(0.0, f"expected {wanted[:200]!r}")


class Text(Check):
    """What the answer contains or matches; the score is the share of checks that hold."""

    def __init__(self, block: TextGrader, fingerprint: str) -> None:
        super().__init__(fingerprint)
        self.block = block
        self._match = [compile_regex(pattern, dialect=block.dialect) for pattern in block.regex_match]
        self._not_match = [compile_regex(pattern, dialect=block.dialect) for pattern in block.regex_not_match]

    def check(self, case: Case) -> Verdict:
        """All its checks on what was said."""
        block, fields, exact = self.block, case.sample.fields, case.said(self.block)
        folded = exact.casefold()
        failures: list[str] = []
        count = 0
        for wanted, unwanted, any_of, text, fold in (
            (block.contains, block.not_contains, block.contains_any, folded, str.casefold),
            (block.contains_cs, block.not_contains_cs, block.contains_any_cs, exact, str),
        ):
            count += len(wanted) + len(unwanted) + bool(any_of)
            failures += [f"lacks {part!r}" for part in wanted if fold(_sought(part, fields)) not in text]
            failures += [f"contains {part!r}" for part in unwanted if fold(_sought(part, fields)) in text]
            if any_of and not any(fold(_sought(part, fields)) in text for part in any_of):
                failures.append(f"has none of {any_of}")
        count += len(self._match) + len(self._not_match)
        failures += [f"does not match {p.pattern!r}" for p in self._match if not p.search(exact)]
        failures += [f"matches {p.pattern!r}" for p in self._not_match if p.search(exact)]
        return share(count, failures)


def _sought(part: str, fields: dict[str, Any]) -> str:
    text = rendered(part, fields)
    if not text:
        raise AttemptError("grader", f"{part!r} is empty for this row, and so in every answer", retry=False)
    return text


class Choice(Check):
    """The letter of a multiple-choice answer."""

    def __init__(self, block: ChoiceGrader, fingerprint: str) -> None:
        super().__init__(fingerprint)
        self.block = block
        letter = f"([{re.escape(block.choices)}])"
        named = rf"(?i:answer|choice|option)\W*(?:(?i:is|would be)\W+)?{letter}(?![\w'])"
        # From the plainest to the vaguest. An A or I before a small word is an article or a pronoun as a rule.
        self._patterns = [
            re.compile(rf"\\boxed\{{\W*(?:text\W*)?{letter}(?!\w)"),
            re.compile(rf"{named}(?!(?<=I)\s+[a-z])"),
            re.compile(rf"{named}(?=\W*$)", re.IGNORECASE | re.MULTILINE),
            re.compile(rf"(?<![\w']){letter}\s+is\s+(?:the\s+)?(?:correct|right|best)"),
            re.compile(rf"\A\W*{letter}(?![\w'])(?!(?<=[AI])\s+[a-z])"),
            re.compile(rf"[(\[*]{letter}[)\]*]"),
            re.compile(rf"(?<![\w']){letter}(?=\s*[.):!]|\s*\Z)"),
            re.compile(named),
        ]
        self._loose = re.compile(rf"\A\W*{letter}\W*\Z", re.IGNORECASE)

    def check(self, case: Case) -> Verdict:
        """Compare the letter found with the expected one."""
        wanted = self._expected(case.sample.fields)
        found = self._find(case.said(self.block))
        if found is None:
            return Verdict(0.0, "no choice found in the answer", {"found": None})
        return Verdict(
            float(found == wanted),
            "" if found == wanted else f"chose {found}, not {wanted}",
            {"found": found},
        )

    def _find(self, text: str) -> str | None:
        if match := self._loose.search(text):
            return match[1].upper()
        for pattern in self._patterns:
            if matches := pattern.findall(text):
                return str(matches[-1]).upper()
        return None

    def _expected(self, fields: dict[str, Any]) -> str:
        text = rendered(self.block.expected, fields).strip()
        if text.isdecimal() and int(text) < len(self.block.choices):
            return self.block.choices[int(text)].upper()
        letter = text.strip("().").upper()
        if len(letter) != 1 or letter not in self.block.choices.upper():
            raise AttemptError(
                "grader",
                f"the expected choice is {text!r}, not a letter of {self.block.choices}",
                retry=False,
            )
        return letter


class Number(Check):
    """A number in the answer."""

    def __init__(self, block: NumberGrader, fingerprint: str) -> None:
        super().__init__(fingerprint)
        self.block = block
        self._after = None if block.after is None else compile_regex(block.after, dialect=block.dialect)

    def check(self, case: Case) -> Verdict:
        """Compare the number found with the expected one."""
        text = rendered(self.block.expected, case.sample.fields)
        wanted = _numbers(text)
        if not wanted:
            raise AttemptError("grader", f"the expected value {text.strip()[:80]!r} is not a number", retry=False)
        found = self._find(case.said(self.block))
        if found is None:
            return Verdict(0.0, "no number found in the answer", {"found": None})
        allowed = Decimal(repr(self.block.tolerance))
        if self.block.relative:
            allowed *= abs(wanted[0])
        right = abs(found - wanted[0]) <= allowed
        return Verdict(float(right), "" if right else f"found {found}, expected {wanted[0]}", {"found": str(found)})

    def _find(self, text: str) -> Decimal | None:
        if self._after is None:
            return next(iter(_numbers(text)[-1:]), None)
        end = self._after.last_end(text)
        return None if end is None else next(iter(_numbers(text[end:])), None)


def _numbers(text: str) -> list[Decimal]:
    numbers = []
    for match in _NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")):
        try:
            number = Decimal(match[0].replace(",", ""))
        except InvalidOperation:  # an exponent no number needs
            continue
        if abs(number.adjusted()) < _MOST_DIGITS:
            numbers.append(number)
    return numbers
