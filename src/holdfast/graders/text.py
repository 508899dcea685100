"""Graders of the text that answer at once: exact, text, choice, number."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

from holdfast.errors import AttemptError
from holdfast.graders.types import InstantGrader, Verdict
from holdfast.spec.expected import NotComparable, alternatives
from holdfast.spec.grader_schema import ChoiceGrader, ExactGrader, NumberGrader, TextGrader
from holdfast.spec.numbers import numbers_in
from holdfast.spec.regex import compile_regex
from holdfast.spec.template import RENDER_ERRORS, template

if TYPE_CHECKING:
    from holdfast.graders.types import Case
    from holdfast.spec.origin import Origin


def render_text(value: Any, fields: dict[str, Any]) -> str:
    """Render a template over the row, or return a plain value as text."""
    if not isinstance(value, str):
        return str(value)
    try:
        return template(value).render(fields)
    except RENDER_ERRORS as error:
        raise AttemptError("grader", f"cannot render {value!r}: {error}", retry=False) from error


def expected_texts(written: Any, fields: dict[str, Any], *, composed: bool = True) -> list[str]:
    """Return the expected texts, of which the answer should be one; never the repr of a list or an object."""
    try:
        return alternatives(written, fields, composed=composed)
    except NotComparable as error:
        raise AttemptError("grader", f"{written!r} {error}", retry=False) from error
    except RENDER_ERRORS as error:
        raise AttemptError("grader", f"cannot render {written!r}: {error}", retry=False) from error


def one_of(texts: list[str]) -> str:
    """Format expected texts for a feedback: the only one, or the first few."""
    quoted = [repr(text[:200]) for text in texts[:5]]
    more = f" and {len(texts) - 5} more" if len(texts) > 5 else ""
    return quoted[0] if len(texts) == 1 else f"one of {', '.join(quoted)}{more}"


def share(count: int, failures: list[str], details: Any = None) -> Verdict:
    """Return the share of checks that hold as the score, and the failures as the feedback."""
    return Verdict((count - len(failures)) / count, "; ".join(failures), details)


class Exact(InstantGrader):
    """Scores 1 when the whole answer equals an expected text."""

    schema = ExactGrader
    block: ExactGrader

    def check(self, case: Case) -> Verdict:
        """Compare the texts, normalized as the block says."""
        texts = expected_texts(self.block.expected, case.sample.fields)
        answer = normalize("NFC", case.text(self.block))
        if self.block.strip:
            texts, answer = [text.strip() for text in texts], answer.strip()
        if self.block.ignore_case:
            texts, answer = [text.casefold() for text in texts], answer.casefold()
        return Verdict(1.0) if answer in texts else Verdict(0.0, f"expected {one_of(texts)}")


class Text(InstantGrader):
    """Scores the share of texts and patterns that the answer contains, or lacks, as it should."""

    schema = TextGrader
    block: TextGrader

    def __init__(self, block: TextGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._match = [compile_regex(pattern, dialect=block.dialect) for pattern in block.regex_match]
        self._not_match = [compile_regex(pattern, dialect=block.dialect) for pattern in block.regex_not_match]

    def check(self, case: Case) -> Verdict:
        """Check each text and each pattern."""
        block, fields, answer = self.block, case.sample.fields, case.text(self.block)
        exact = normalize("NFC", answer)
        folded = exact.casefold()
        failures: list[str] = []
        count = 0
        for contains, not_contains, contains_any, text, fold in (
            (block.contains, block.not_contains, block.contains_any, folded, str.casefold),
            (block.contains_cs, block.not_contains_cs, block.contains_any_cs, exact, str),
        ):
            required, forbidden, alternative = (
                _expand(parts, fields) for parts in (contains, not_contains, contains_any)
            )
            count += len(required) + len(forbidden) + bool(alternative)
            failures += [f"lacks {part!r}" for part in required if fold(part) not in text]
            failures += [f"contains {part!r}" for part in forbidden if fold(part) in text]
            if alternative and not any(fold(part) in text for part in alternative):
                failures.append(f"has none of {', '.join(map(repr, alternative))}")
        count += len(self._match) + len(self._not_match)
        failures += [f"does not match {p.pattern!r}" for p in self._match if not p.search(answer)]
        failures += [f"matches {p.pattern!r}" for p in self._not_match if p.search(answer)]
        return share(count, failures)


def _expand(parts: list[str], fields: dict[str, Any]) -> list[str]:
    """Return the texts to look for; a template that gives a list stands for each of its elements."""
    expanded: list[str] = []
    for part in parts:
        texts = expected_texts(part, fields)
        if "" in texts:
            raise AttemptError(
                "grader", f"{part!r} renders to empty text for this row, which matches every answer", retry=False
            )
        expanded += texts
    return expanded


class Choice(InstantGrader):
    """Scores 1 when the answer names the expected choice."""

    schema = ChoiceGrader
    revision = 1
    block: ChoiceGrader

    def __init__(self, block: ChoiceGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        letter = f"([{re.escape(block.choices)}])"
        named = rf"(?i:answer|choice|option)\W*(?:(?i:is|would be)\W+)?{letter}(?![\w'])"
        # From the plainest to the vaguest. Before a small word, A is usually an article and I a pronoun.
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
        """Compare the letter in the answer with the expected one."""
        letters = [self._letter(text) for text in expected_texts(self.block.expected, case.sample.fields)]
        letter = self._find(case.text(self.block))
        if letter is None:
            return Verdict(0.0, "no choice found in the answer", {"found": None})
        right = letter in letters
        return Verdict(float(right), "" if right else f"chose {letter}, not {' or '.join(letters)}", {"found": letter})

    def _find(self, text: str) -> str | None:
        if match := self._loose.search(text):
            return match[1].upper()
        for pattern in self._patterns:
            if matches := pattern.findall(text):
                return str(matches[-1]).upper()
        return None

    def _letter(self, text: str) -> str:
        text = text.strip()
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
