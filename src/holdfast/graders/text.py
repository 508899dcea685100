"""Graders that compare texts: exact, text, extract."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self
from unicodedata import normalize

from pydantic import BeforeValidator, Field, model_validator

from holdfast.graders.expected import Patterns, expected_texts, one_of, share, texts_to_find
from holdfast.graders.types import InstantGrader, Verdict
from holdfast.spec.grader_schema import Expected, PatternBlock, TextBlock, is_everywhere
from holdfast.spec.regex import compile_regex
from holdfast.spec.schema import Block, Pattern, Strings, check_pattern

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.graders.types import Case
    from holdfast.spec.eval import Origin


_ANSWERS: Final = ("", " ", "x", "\n", "A sentence, with the number 1.\nAnd another line.")
"""a pattern that is found in all of these is found in every answer"""


class ExactGrader(TextBlock):
    """Checks that the whole answer equals the expected one."""

    type: Literal["exact"]
    expected: Expected = "{{ expected }}"
    """Expected answer, or a list of accepted answers. Templates over the row."""
    ignore_case: bool = False
    """Ignore upper and lower case."""
    strip: bool = True
    """Ignore white space around the answer and the expected value."""


class Exact(InstantGrader):
    """Scores 1 if the whole answer equals an expected text."""

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


class TextGrader(PatternBlock, TextBlock):
    """Checks which texts and patterns the answer contains. Keys that end in `_cs` match case."""

    type: Literal["text"]
    contains: Strings = []
    """Texts that must all occur, ignoring case. Templates over the row."""
    contains_cs: Strings = []
    """Texts that must all occur, matching case. Templates over the row."""
    contains_any: Strings = []
    """Texts of which at least one must occur, ignoring case. Templates over the row."""
    contains_any_cs: Strings = []
    """Texts of which at least one must occur, matching case. Templates over the row."""
    not_contains: Strings = []
    """Texts that must not occur, ignoring case. Templates over the row."""
    not_contains_cs: Strings = []
    """Texts that must not occur, matching case. Templates over the row."""
    regex_match: Strings = []
    """Patterns that must be found. Templates over the row."""
    regex_not_match: Strings = []
    """Patterns that must not be found. Templates over the row."""

    checks: ClassVar[tuple[str, ...]] = (
        "contains",
        "contains_cs",
        "contains_any",
        "contains_any_cs",
        "not_contains",
        "not_contains_cs",
        "regex_match",
        "regex_not_match",
    )
    templates: ClassVar[tuple[str, ...]] = checks
    regexes: ClassVar[tuple[str, ...]] = checks[6:]
    alternatives: ClassVar[tuple[str, ...]] = checks[:6]

    def idle_checks(self) -> Iterator[str]:
        """Yield a warning for each pattern and text that nearly every answer contains."""
        yield from super().idle_checks()
        for patterns, outcome in ((self.regex_match, "always holds"), (self.regex_not_match, "never holds")):
            for pattern in patterns:
                if is_everywhere(pattern, _ANSWERS):
                    yield f"the pattern {pattern!r} is found in every answer, so the check of {self.name!r} {outcome}"
        for field in self.alternatives:
            if any(part.isspace() for part in getattr(self, field)):
                yield f"{field} of {self.name!r} looks for white space, which nearly every answer contains"

    @model_validator(mode="after")
    def _regexes_compile(self) -> Self:
        for pattern in (*self.regex_match, *self.regex_not_match):
            check_pattern(pattern)
        if any("" in getattr(self, field) for field in self.checks):
            raise ValueError("checks nothing: an empty text is in every answer")
        return self


class Text(InstantGrader):
    """Scores the share of texts and patterns that the answer contains, or lacks, as required."""

    schema = TextGrader
    block: TextGrader

    def __init__(self, block: TextGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._match = Patterns(block.regex_match, block.dialect)
        self._not_match = Patterns(block.regex_not_match, block.dialect)

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
                texts_to_find(parts, fields) for parts in (contains, not_contains, contains_any)
            )
            count += len(required) + len(forbidden) + bool(alternative)
            failures += [f"lacks {part!r}" for part in required if fold(part) not in text]
            failures += [f"contains {part!r}" for part in forbidden if fold(part) in text]
            if alternative and not any(fold(part) in text for part in alternative):
                failures.append(f"contains none of {', '.join(map(repr, alternative))}")
        match, not_match = self._match.for_row(fields), self._not_match.for_row(fields)
        count += len(match) + len(not_match)
        failures += [f"does not match {p.pattern!r}" for p in match if not p.search(answer)]
        failures += [f"matches {p.pattern!r}" for p in not_match if p.search(answer)]
        return share(count, failures)


class RegexFilter(Block):
    """A filter that keeps a match of a pattern."""

    regex: Pattern
    """Pattern to look for. Keeps the first group that is not empty, or the whole match if the pattern has no groups."""
    group: int = 0
    """Number of the match to keep, counted from 0, or from the end with negative numbers. lm-eval calls it
    `group_select`."""
    fallback: str = "[invalid]"
    """Text to use if there is no such match."""


def _preferred_name(written: Any) -> Any:
    return "remove_whitespace" if written == "strip" else written


Filter = Annotated[
    Literal["remove_whitespace", "lowercase", "uppercase", "take_first"] | RegexFilter,
    BeforeValidator(_preferred_name),
]


class ExtractGrader(TextBlock):
    """Extracts an answer by filters, and compares it with the expected one."""

    type: Literal["extract"]
    filters: list[Filter] = Field(default=[])
    """Filters to apply in order: `{regex: PATTERN, group: 0, fallback: "[invalid]"}`, `remove_whitespace` (or `strip`),
    `lowercase`, `uppercase`, `take_first`."""
    expected: Expected = "{{ expected }}"
    """Expected answer, or a list of accepted answers. Templates over the row."""
    ignore_case: bool = False
    """Ignore upper and lower case."""
    ignore_punctuation: bool = False
    """Ignore ASCII punctuation."""
    ignore_numbers: bool = False
    """Ignore the digits 0 to 9."""
    ignore: list[Pattern] = Field(default=[])
    """Patterns whose matches are removed from the answer and the expected value, in order. lm-eval calls them
    `regexes_to_ignore`."""


_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)
_DIGITS: Final = str.maketrans("", "", string.digits)
_CHANGES: Final[dict[str, Callable[[str], str]]] = {
    "remove_whitespace": str.strip,
    "lowercase": str.lower,
    "uppercase": str.upper,
}


class Extract(InstantGrader):
    """Scores 1 if the extracted answer equals an expected text: the exact match of lm-eval, to the letter."""

    schema = ExtractGrader
    block: ExtractGrader

    def check(self, case: Case) -> Verdict:
        """Apply the filters, and compare the result."""
        texts = expected_texts(self.block.expected, case.sample.fields, composed=False)
        answers = self._filter(case.text(self.block))
        accepted = {self._simplify(text) for text in texts}
        hits = [self._simplify(answer) in accepted for answer in answers]
        share = sum(hits) / len(hits) if hits else 0.0
        score = share if len(texts) == 1 else float(any(hits))
        shown = answers[0] if len(answers) == 1 else answers
        feedback = "" if score == 1 else f"extracted {shown!r:.200}, expected {one_of(texts)}"
        return Verdict(score, feedback, {"extracted": shown})

    def _filter(self, text: str) -> list[str]:
        """Return an answer after the filters.

        Filters work on a list of replies, which here has one element. As in lm-eval, `take_first` replaces the list by
        the text itself, so that later filters take each character for a reply.
        """
        replies: list[str] | str = [text]
        for step in self.block.filters:
            if isinstance(step, RegexFilter):
                replies = [_match(step, reply) for reply in replies]
            elif step == "take_first":
                replies = replies[0] if replies else ""
            else:
                replies = [_CHANGES[step](reply) for reply in replies]
        return [replies] if isinstance(replies, str) else replies

    def _simplify(self, text: str) -> str:
        for pattern in self.block.ignore:
            text = compile_regex(pattern).remove(text)
        if self.block.ignore_case:
            text = text.lower()
        if self.block.ignore_punctuation:
            text = text.translate(_PUNCTUATION)
        return text.translate(_DIGITS) if self.block.ignore_numbers else text


def _match(step: RegexFilter, text: str) -> str:
    groups = compile_regex(step.regex).find(text, step.group)
    if groups is None:
        return step.fallback
    match = groups[0] if len(groups) == 1 else next(filter(None, groups), step.fallback)
    return match.strip()
