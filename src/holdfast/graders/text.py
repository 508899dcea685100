"""Graders that compare texts: exact, text, choice."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

from holdfast.errors import AttemptError
from holdfast.graders.expected import expected_texts, one_of, share
from holdfast.graders.types import InstantGrader, Verdict
from holdfast.spec.regex import compile_regex
from holdfast.spec.text_grader_schema import ChoiceGrader, ExactGrader, TextGrader

if TYPE_CHECKING:
    from holdfast.graders.types import Case
    from holdfast.spec.origin import Origin


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
