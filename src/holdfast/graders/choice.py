"""The grader of multiple choice: which letter an answer concludes with.

Letters are ranked by how clearly the answer calls them its choice (in a box, after "the answer is", as its first
word …); among equals, the last one counts. Letters that are denied, asked about or called a mistake are skipped, and so
are lists of the options. An answer that chooses several letters has made no choice.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

from pydantic import Field

from holdfast.errors import AttemptError
from holdfast.graders.expected import expected_texts
from holdfast.graders.types import InstantGrader, Verdict
from holdfast.spec.grader_schema import NotEmpty, TextBlock

if TYPE_CHECKING:
    from re import Match, Pattern

    from holdfast.graders.types import Case
    from holdfast.spec.eval import Origin

_SEEN: Final = 160
"""characters around a letter that can change its meaning"""
_LATEX: Final = re.compile(
    r"\\(?:text(?:bf|it|rm|sf)?|math(?:rm|bf|it|sf|bb)|boldsymbol|mbox|bm|operatorname)\s?\{([^{}]{0,200})\}"
)
_EMPHASIS: Final = re.compile(r"`|(?<!\w)_{1,3}(?=\w)|(?<=\w)_{1,3}(?!\w)")
_DENIED: Final = re.compile(
    r"(?i)\b(?:not|never|nor|neither|isn't|wasn't|can't be|cannot be|won't be|except|rather than|instead of"
    r"|exclud\w+|eliminat\w+|rul(?:e[sd]?|ing) out|discard\w*|reject\w*)\W+(?:(?:option|choice|answer)\W+)?\Z"
)
_CLAUSE: Final = re.compile(r"[.!?;:,(\n][^.!?;:,(\n]*\Z")
_DOUBTED: Final = re.compile(
    r"""(?ix) \b (?: mistak\w+ | tempt\w+ | trap | misconception | fallacy | wrong\w* | incorrect\w* | if | unless
      | at\ first | initially | (?:had\ )?thought | assumed
      | (?<!\bI\ )(?<!\bwe\ )(?:might|may|could|would|often)\ (?:\w+\ )?(?:think|say|guess|choose|pick|answer|select|
        assume|believe|conclude|argue)
      | (?:some|many|most|other)\ (?:\w+\ )?(?:think|say|choose|pick|answer|select|assume|believe|would|might|may)
      ) \b"""
)
_REFUTED: Final = re.compile(
    r"""(?ix) \W{0,4} (?: \?
      | (?:is|was|are|were|looks?|seems?|sounds?|appears?|may\ be|might\ be|would\ be)\ (?:\w+\ ){0,2}?
        (?:tempting|wrong|incorrect|false|not|out|plausible|attractive|close|eliminated|ruled|a\ trap|a\ distractor
        |a\ common|a\ mistake)\b
      | (?:isn't|wasn't|aren't|can't|cannot|doesn't)\b )"""
)
_CORRECTION: Final = re.compile(r"(?i)\b(?:wait|actually|correction|on second thought|scratch that|let me re\w+)\b")


class ChoiceGrader(TextBlock):
    """Checks the letter of a multiple-choice answer."""

    type: Literal["choice"]
    expected: Annotated[str | int | list[str | int], NotEmpty] = "{{ expected }}"
    """Letter of the right choice, its position counted from 0, or a list of accepted ones."""
    choices: str = Field(default="ABCDEFGHIJ", min_length=1)
    """Letters that count as choices."""


class Choice(InstantGrader):
    """Scores 1 when the answer names the expected choice."""

    schema = ChoiceGrader
    block: ChoiceGrader

    def __init__(self, block: ChoiceGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._reader = _Reader(block.choices)

    def check(self, case: Case) -> Verdict:
        """Compare the letter in the answer with the expected one."""
        letters = [self._letter(text) for text in expected_texts(self.block.expected, case.sample.fields)]
        letter = self._reader.find(case.answer(self.block))
        if letter is None:
            return Verdict(0.0, "no choice found in the answer", {"found": None})
        right = letter in letters
        return Verdict(float(right), "" if right else f"chose {letter}, not {' or '.join(letters)}", {"found": letter})

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


class _Form(NamedTuple):
    """A phrase that names the choice."""

    pattern: Pattern[str]
    plain: bool
    """explicit: an answer that names several letters in this way has made no choice"""
    among_options: bool
    """it also counts inside a list of the options"""


class _Reader:
    def __init__(self, choices: str) -> None:
        letter, end = f"([{re.escape(choices)}])", r"(?![\w'])"
        single = rf"(?<![\w']){letter}{end}"
        word = r"(?<!\w)(?i:answer|choice|option|selection)(?:\s(?i:choice|option|letter))?"
        link = r"(?:(?i:is|was|would\sbe|must\sbe|should\sbe|has\sto\sbe|will\sbe)(?!\w)|[:=→>–—-]|是|为|為)"
        adverb = r"clearly|therefore|thus|definitely|probably|(?:most\s)?likely"
        filler = rf"(?:(?i:option|choice|answer|letter|{adverb})\W{{1,9}}+)"
        stated = rf"(?:(?:{word}|答案|正解)\W{{0,9}}?{link}|故?选)\W*+{filler}{{0,2}}{letter}{end}"
        named = rf"{word}\W*+(?:(?i:is|would\sbe)\W++)?{letter}{end}"
        no_pronoun = r"(?!(?<=I)\s+[a-z])"
        verb = r"it's|it\sis|that's|is|be|choose|chose|pick|picked|select|selected|say|go\swith|going\swith"
        # From the clearest to the vaguest. Before a lowercase word, A is usually an article and I a pronoun.
        forms = {
            rf"\\(?:boxed|fbox)\{{\W*(?:(?i:option|choice|answer)\W*)?{letter}(?!\w)": (True, True),
            rf"{stated}{no_pronoun}": (True, True),
            rf"{named}{no_pronoun}": (True, False),
            rf"(?im){named}(?=\W*$)": (True, False),
            rf"(?<![\w']){letter}\s+is\s+(?:the\s+)?(?:correct|right|best|better)": (True, True),
            rf"\A\W*{letter}{end}(?!(?<=[AI])\s+(?!because\b|since\b)[a-z])": (False, False),
            rf"\b(?i:{verb})[\s*(]+{letter}{end}(?=[\s*]*(?:[,;.:!?)\]—]|\Z|because\b|since\b))": (False, False),
            rf"[(\[*]{letter}[)\]*]": (False, False),
            rf"(?<![\w']){letter}(?=\s*[.):!]|\s*\Z)": (False, False),
            rf"(?i)\A\W*{letter}[).:](?=\s)": (False, False),
            named: (False, False),
        }
        self._forms = [_Form(re.compile(source), *traits) for source, traits in forms.items()]
        self._alone = re.compile(rf"\A\W*{letter}\W*\Z", re.IGNORECASE)
        self._several = re.compile(rf"\A\W*{letter}(?:\W+{letter})+\W*\Z")
        doubt = r"maybe|perhaps|possibly|(?:more\s)?likely|even|also|both|either"
        more = rf"(?:(?i:option|choice|answer|{doubt})\W{{1,4}}){{0,2}}"
        either = rf"\W{{0,4}}(?:,\W{{0,3}})?(?i:or|and/or|/|vs\.?)\W{{0,4}}{more}{single}"
        both = (
            rf"\W{{0,4}}(?:,|;|&|\+|,?\s?(?i:and)\b)\W{{0,4}}{more}{single}(?!(?<=[AI])\s+(?!or\b|and\b)[a-z])"
            r"(?!\W{0,3}\s+(?:is|was|does|doesn't|has|would|could|fails|refers|means|describes)\b)"
        )
        self._list = re.compile(rf"{single}(?:{either}|{both})+")
        self._option = re.compile(rf"(?im)^[^\w\n]*(?:(?:option|choice)\s)?{letter}\s?[).:\]].*$")

    def find(self, text: str) -> str | None:
        """Return the letter that a text chooses, in upper case."""
        if match := self._alone.search(text):
            return match[1].upper()
        text = text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
        text = _EMPHASIS.sub("*", _LATEX.sub(r"\1", _LATEX.sub(r"\1", text)))
        if self._several.match(text) and len({*re.findall(r"\w", text)}) > 1:
            return None
        return self._find(text)

    def _find(self, text: str) -> str | None:
        lists = [match for match in self._list.finditer(text) if len({*filter(None, match.groups())}) > 1]
        without_options = self._without_options(text)
        begin = 0
        for form in self._forms:
            matches = [*form.pattern.finditer(text if form.among_options else without_options, begin)]
            for match in reversed(matches):
                start = match.start(1)
                place = bisect_right(lists, start, key=lambda each: each.start())
                several = lists[place - 1] if place and start < lists[place - 1].end() else None
                if several is not None:
                    refuted = _is_dropped(text, several.start(), several.end())
                    if refuted and form.plain and start == several.start():  # "the answer is B, C and D are wrong"
                        return str(match[1]).upper()
                    if refuted or not form.plain:
                        continue
                    begin = several.end()  # the text after the list may decide
                    break
                if not _is_dropped(text, start, match.end(1), match.start()):
                    return self._corrected_choice(text, match) or str(match[1]).upper()
        return None

    def _corrected_choice(self, text: str, match: Match[str]) -> str | None:
        """Return the choice that replaces the one at a match, if the text takes that one back."""
        rest = text[match.end() :]
        correction = _CORRECTION.search(rest)
        return self._find(rest) if correction is not None and rest[correction.end() :].strip() else None

    def _without_options(self, text: str) -> str:
        """Blank out options that a text repeats as a list, one per line."""
        options = [*self._option.finditer(text)]
        if len({option[1].upper() for option in options}) < 2:
            return text
        return self._option.sub(lambda option: " " * len(option[0]), text)


def _is_dropped(text: str, start: int, end: int, clause_end: int | None = None) -> bool:
    """Return True for a letter that is denied, asked about or called a mistake."""
    before = text[max(0, start - _SEEN) : start]
    if _DENIED.search(before) or _REFUTED.match(text, end):
        return True
    before = text[max(0, start - _SEEN) : start if clause_end is None else clause_end]
    clause = _CLAUSE.search(before)
    return _DOUBTED.search(before if clause is None else clause[0]) is not None
