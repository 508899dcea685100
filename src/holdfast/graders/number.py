"""The grader of numbers, which reads them as people and models write them: each whole or not at all.

A number may have its digits in groups (`1,080`, `1{,}080`, `1'080`, `1,00,000`, `1.000.000`, and with a no-break or
thin space), a sign before a currency (`-$5`), an exponent (`1e6`, `2.5 × 10⁶`, `10^3`), and may be a fraction (`3/4`,
`1 1/2`, `\\frac{3}{4}`). Anything ambiguous (`1,23`, `1 080`, `12:30`, `1.2.3`) or part of a formula
(`\\sqrt{2}`, `x/4`) is a number without a value, because a part of it would pass for another number. Subscripts and
exponents of letters (`cm^2`) do not count.

A number does not span lines. In a long text, only the part around the relevant number is examined closely.
"""

from __future__ import annotations

import re
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple, Self
from unicodedata import normalize

from pydantic import Field, model_validator

from holdfast.errors import AttemptError
from holdfast.graders.expected import expected_texts
from holdfast.graders.types import InstantGrader, Verdict
from holdfast.spec.grader_schema import NotEmpty, PatternBlock, TextBlock
from holdfast.spec.regex import compile_regex

if TYPE_CHECKING:
    from collections.abc import Iterator
    from re import Match

    from holdfast.graders.types import Case
    from holdfast.spec.eval import Origin


class NumberGrader(PatternBlock, TextBlock):
    """Checks a number in the answer: the last one, or the one after a pattern."""

    type: Literal["number"]
    expected: Annotated[str | int | float | list[str | int | float], NotEmpty] = "{{ expected }}"
    """Expected number, or a list of accepted numbers. Templates over the row."""
    after: str | None = None
    """Pattern. The first number after its last match is compared. Default: the last number of the answer."""
    tolerance: float = Field(default=0.0, ge=0)
    """Largest accepted difference."""
    relative: bool = False
    """Take `tolerance` as a share of the expected number."""

    @model_validator(mode="after")
    def _regex_compiles(self) -> Self:
        if self.after is not None:
            compile_regex(self.after)
        return self

    @model_validator(mode="after")
    def _expects_numbers(self) -> Self:
        for part in self.expected if isinstance(self.expected, list) else [self.expected]:
            if any(mark in str(part) for mark in ("{{", "{%", "{#")):
                continue
            numbers = numbers_in(str(part))
            if len(numbers) != 1:
                raise ValueError(f"expected: {part!r} is not one number; write several as a list")
            if numbers[0].value is None:
                raise ValueError(f"expected: {part!r} can be read in more than one way; write it without separators")
        return self


class Number(InstantGrader):
    """Scores 1 if a number in the answer equals the expected one."""

    schema = NumberGrader
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
            return Verdict(0.0, f"{number.text[:80]!r} can be read in more than one way", {"found": None})
        details = {"found": number.text}
        if any(self._is_close(number.value, each) for each in expected):
            return Verdict(1.0, "", details)
        return Verdict(0.0, f"found {number.text}, expected {' or '.join(map(str, expected))}", details)

    def _is_close(self, number: Decimal | Fraction, expected: Decimal | Fraction) -> bool:
        equal = number == expected
        if equal or not self._tolerance:
            return equal
        # Most wrong answers are far off, which floats with their 16 digits show much faster than exact fractions.
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
    if _is_plain(text):
        return Decimal(text)
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


_MOST_DIGITS: Final = 10_000
"""longer numbers are noise, and overflow arithmetic"""
_MOST_EXACT: Final = 1_000
"""limit of digits in fractions and powers, which are computed"""
_GAP: Final = "\N{NARROW NO-BREAK SPACE}"
"""replaces every space that groups digits"""

_PLAIN: Final = rf"\d++(?:[.,'_{_GAP}]\d++)*+(?:[eE][-+]?\d++)?"
_POWER: Final = r"(?:\^(?:\{\s?[-+]?\d++\s?\}|\(\s?[-+]?\d++\s?\)|[-+]?\d++)|\*\*\s?[-+]?\d++)"
_PART: Final = rf"(?:\{{\s?[-+]?{_PLAIN}\s?\}}|\d)"
_NUMBER: Final = re.compile(
    rf"""
    (?= [\d.\\] )  # the first character of every form: rejects most characters of a text at once
    (?: (?P<spaced> (?<![\d.,'_/]) [1-9]\d{{0,2}} (?:[ ]\d{{3}}(?![\d/]))++ (?:[.,]\d++)? )
      | (?: (?P<before>\d++) [ {_GAP}]? )? \\[dt]?frac \s? (?P<over>{_PART}) (?P<under>{_PART})
      | (?P<whole>\d++) [ {_GAP}] (?P<upper>\d++) / (?P<lower>\d++)
      | (?P<plain> (?:(?<![\w.)\]}}])\.)? {_PLAIN} ) (?P<power>{_POWER})?
        (?: [ ]?×[ ]? (?P<base>{_PLAIN}) (?P<exponent>{_POWER}) )?
        (?: [ ]?/[ ]? (?P<divisor>{_PLAIN}) )?
    )
    (?P<rest>
        (?: [:/]{_PLAIN} | (?:-\d++){{2,}}+ | -\d++/\d++ | (?<=\b0)[xX][\dA-Fa-f]++
          | \.?\d*\\(?:overline|bar|dot)\b\s?\{{?\d++\}}? | \.\(\d++\)
        )++
    )?
    """,
    re.VERBOSE,
)
_GROUPED: Final = re.compile(
    rf"""
    \d* \.? \d+
    | [1-9]\d{{0,2}} (?:,\d{{3}})+ (?:\.\d+)?
    | [1-9]\d? (?:,\d\d)+ ,\d{{3}} (?:\.\d+)?
    | [1-9]\d{{0,2}} (?: (?:{_GAP}\d{{3}})+ | (?:'\d{{3}})+ ) (?P<either>[.,]\d+)?
    | [1-9]\d{{0,2}} (?:_\d{{3}})+ (?:\.\d+)?
    | [1-9]\d{{0,2}} (?: (?:\.\d{{3}}){{2,}} (?P<comma>,\d+)? | \.\d{{3}} (?P<cents>,(?:\d\d?|\d{{4,}})) )
    """,
    re.VERBOSE,
)
"""unambiguous groups of digits: `0,5`, `1,23` and `1234,567` may be decimals or lists"""

_DIGIT: Final = re.compile(r"[\d¼-¾⅐-⅞]")
_SKIPPED: Final = re.compile(r"(?:(?:[^\W_]|[})])_\{?|\^[{(]?[-+]?|\\sqrt\[)\Z")
_PARTIAL: Final = re.compile(
    r"(?:\\sqrt(?:\[[^\]]*\])?\{?|√\(?|/[ ]?|(?:±|\\pm|\+/?-)[ ]?|\\[dt]?frac\{[-+]?|\}\{[-+]?|(?:[^\W\d]|[)\]])\."
    r"|\b[Mm]inus[ ])\Z"
)
_COEFFICIENT: Final = re.compile(r"[ ]?(?:[π√]|\\(?:pi|sqrt|log|ln|sin|cos|tan)(?![a-z]))|\^|\*\*[\w(]")
_SIGN: Final = re.compile(
    r"(?:(?P<glued>[-+])(?:[A-Z]{0,3}\$[ ]?)?|[=({\[<>][ ]*(?P<apart>[-+])[ ]|(?P<word>\b[Nn]egative)[ ])\Z"
)
_OPERATOR: Final = re.compile(r"(?:[\w.)\]}%-]|[\w}]\$)\Z")
"""the text before a minus sign that subtracts, as in `2-1`"""
_WORDS_BEFORE: Final = ("egative ", "inus ", "\\pm ")
"""ends of words that belong to the following number: see _SIGN and _PARTIAL"""
_SEEN: Final = 24
"""characters before a number that can change its meaning"""

_WINDOW, _MARGIN = 600, 150
"""characters of a long line that are examined first; the margin exceeds any number's surroundings"""

_CHARACTERS: Final = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"),
        **dict.fromkeys("\u00a0\u2005\u2006\u2007\u2008\u2009\u200a", _GAP),
        **dict.fromkeys("\u2018\u2019\u02bc\u2032\uff07", "'"),
        **dict.fromkeys("\u22c5\u00b7\u2219\u2715\u2217", "×"),
        **dict.fromkeys("\u2044\u2215\uff0f", "/"),
        **dict.fromkeys("£¥€₹₩₽₺₫₪₴₦₱฿₡₲₵₸₼₾￥＄￡", "$"),
        **dict(zip("\uff0b\uff0e\uff0c\u066b\u066c\u3000\uff1a", "+.,., :", strict=True)),
    }
)
_SUPERSCRIPT: Final = re.compile("[⁰¹²³⁴-⁹⁺⁻]+")
_VULGAR: Final = re.compile(r"(\d)?[ ]?([¼-¾⅐-⅞])")
_LATEX: Final = (
    (re.compile(r"\\\$"), "$"),
    (re.compile(r"(?:\\(?:text|mathrm|mathord|mathpunct)\s?)?\{([.,])\}|(,)\\!"), r"\1\2"),
    (re.compile(r"(?<=\d)(?:\\[,;:! ]|\\thinspace\s?|\{\\[,;:! ]\})(?=\d)"), _GAP),
    (re.compile(r"(?:\\[,;:! ]|\s){0,3}+\\(?:times|cdot|ast)(?![A-Za-z])(?:\\[,;:! ]|\s){0,3}+"), "×"),
    (re.compile(r"(?<=\d)(?:\\[,;:! ]|\s){1,3}+(?=\\[dt]?frac)"), ""),
)
_ASTERISK: Final = re.compile(r"(?<=\d)[ ]?[*xX][ ]?(?=10(?:\^|\*\*))")


class WrittenNumber(NamedTuple):
    """A number in a text."""

    text: str
    """its value in digits, or the original text if it has no value"""
    value: Decimal | Fraction | None
    """None: ambiguous, or part of a formula"""


def numbers_in(text: str) -> list[WrittenNumber]:
    """Return every number of a text, in order."""
    if _is_plain(text):
        return [_plain_number(text)]
    return [number for line in text.splitlines() for number in _numbers_of(line)]


def first_number(text: str) -> WrittenNumber | None:
    """Return the first number of a text."""
    for line in text.splitlines():
        if (digit := _DIGIT.search(line)) is not None:
            start = max(0, digit.start() - _MARGIN)
            near = line[start : start + _WINDOW]
            whole = start + len(near) == len(line)
            if (number := next(_numbers_of(near, end=None if whole else _WINDOW - _MARGIN), None)) is not None:
                return number
            if not whole and (number := next(_numbers_of(line), None)) is not None:
                return number
    return None


def last_number(text: str) -> WrittenNumber | None:
    """Return the last number of a text."""
    if _is_plain(text):
        return _plain_number(text)
    for line in reversed(text.splitlines()):
        size = _WINDOW
        while True:
            start = max(0, len(line) - size)
            number = _last_of(line[start:], _MARGIN if start else 0)
            if number is not None:
                return number
            if start == 0:
                break
            size *= 8
    return None


def _last_of(line: str, margin: int) -> WrittenNumber | None:
    """Return the last number after a margin; a number in the margin may begin before this part of the line."""
    if _DIGIT.search(line):
        for match in reversed([*_NUMBER.finditer(_unified(line))]):
            if match.start() < margin:
                return None
            if (number := _read(match)) is not None:
                return number
    return None


def _is_plain(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) < _MOST_DIGITS  # like most expected values


def _plain_number(digits: str) -> WrittenNumber:
    value = Decimal(digits)
    return WrittenNumber(str(value), value)


def _numbers_of(line: str, end: int | None = None) -> Iterator[WrittenNumber]:
    """Yield the numbers of a line, or only the numbers that end before `end`."""
    if _DIGIT.search(line):
        for match in _NUMBER.finditer(_unified(line)):
            if end is not None and match.end() > end:
                return
            if (number := _read(match)) is not None:
                yield number


def _unified(line: str) -> str:
    """Return a line with equivalent characters and commands replaced by one spelling."""
    if not line.isascii():
        line = line.translate(_CHARACTERS)
        line = _SUPERSCRIPT.sub(lambda run: f"^{{{normalize('NFKC', run[0]).replace(chr(0x2212), '-')}}}", line)
        line = _VULGAR.sub(_spelled, line)
    if "\\" in line or "{" in line:
        for pattern, replacement in _LATEX:
            line = pattern.sub(replacement, line)
    return _ASTERISK.sub("×", line) if "10^" in line or "10**" in line else line


def _spelled(match: Match[str]) -> str:
    fraction = normalize("NFKC", match[2]).replace("\N{FRACTION SLASH}", "/")
    return f"{match[1]} {fraction}" if match[1] else fraction


def _read(match: Match[str]) -> WrittenNumber | None:
    """Return the number at a match; None if its digits do not form a number."""
    line, start = match.string, match.start()
    before = line[max(0, start - _SEEN) : start]
    if before[-1:] == " " and before[-2:-1].isalpha() and not before.endswith(_WORDS_BEFORE):
        before = ""  # as in "the answer is 42": only these words change the following number
    sign = None
    if before:
        if _SKIPPED.search(before):
            return None
        sign = _SIGN.search(before)
        if sign is not None and _OPERATOR.search(before, 0, sign.start(sign.lastgroup or 0)):
            sign = None
    text = line[start - len(before) + sign.start(sign.lastgroup or 0) if sign else start : match.end()]
    partial = before and _PARTIAL.search(before)
    if partial or match["rest"] or match["spaced"] or _COEFFICIENT.match(line, match.end()):
        return WrittenNumber(text, None)
    value = _value(match)
    if value is not None and sign is not None and sign[sign.lastgroup or 0] != "+":
        value = value.copy_negate() if isinstance(value, Decimal) else -value
    return WrittenNumber(str(value) if value is not None else text, value)


def _value(match: Match[str]) -> Decimal | Fraction | None:
    if match["over"]:
        return _mixed(match["before"], match["over"].strip("{} "), match["under"].strip("{} "))
    if match["whole"]:
        return _mixed(match["whole"], match["upper"], match["lower"])
    plain = _decimal(match["plain"])
    value = _raised(plain, match["power"]) if match["power"] else plain
    if match["base"]:  # any other base makes it a product
        exponent = _integer(match["exponent"]) if _decimal(match["base"]) == 10 else None
        value = None if match["power"] else _shifted(plain, exponent)
    return value if match["divisor"] is None or value is None else _divided(value, _decimal(match["divisor"]))


def _decimal(written: str) -> Decimal | None:
    """Return the value of digits with separators; None if they are ambiguous."""
    if _is_plain(written):
        return Decimal(written)
    mantissa, mark, exponent = written.replace("E", "e").partition("e")
    sign, mantissa = (mantissa[0], mantissa[1:]) if mantissa[:1] in ("-", "+") else ("", mantissa)
    match = _GROUPED.fullmatch(mantissa)
    if match is None or len(mantissa) > _MOST_DIGITS:
        return None
    fraction = match["either"] or match["comma"] or match["cents"] or ""
    if fraction:
        whole = re.sub(r"\D", "", mantissa[: -len(fraction)])
        mantissa = f"{whole}.{fraction[1:]}"
    elif mantissa.count(".") > 1:
        mantissa = mantissa.replace(".", "")
    else:
        mantissa = re.sub(r"[^\d.]", "", mantissa)
    try:
        value = Decimal(f"{sign}{mantissa}{mark}{exponent}")
    except InvalidOperation:  # an absurd exponent
        return None
    return value if abs(value.adjusted()) < _MOST_DIGITS else None


def _integer(power: str) -> int | None:
    digits = power.strip("^*{}() ")
    return int(digits) if len(digits) < 6 else None


def _shifted(value: Decimal | None, exponent: int | None) -> Decimal | None:
    """Return a number times a power of ten, without rounding."""
    if value is None or exponent is None:
        return None
    sign, digits, place = value.as_tuple()
    shifted = Decimal((sign, digits, int(place) + exponent))
    return shifted if abs(shifted.adjusted()) < _MOST_DIGITS else None


def _raised(value: Decimal | None, power: str) -> Decimal | Fraction | None:
    exponent = _integer(power)
    if value is None or exponent is None:
        return None
    if value == 10:
        return _shifted(Decimal(1), exponent)
    if len(value.as_tuple().digits) * abs(exponent) > _MOST_EXACT or abs(value.adjusted()) > _MOST_EXACT:
        return None
    if not value:
        return None if exponent <= 0 else value
    raised = Fraction(value) ** exponent
    return Decimal(raised.numerator) if raised.denominator == 1 else raised


def _divided(value: Decimal | Fraction, divisor: Decimal | None) -> Fraction | None:
    parts = [part for part in (value, divisor) if isinstance(part, Decimal)]
    if not divisor or any(len(part.as_tuple().digits) + abs(part.adjusted()) > _MOST_EXACT for part in parts):
        return None
    return Fraction(value) / Fraction(divisor)


def _mixed(whole: str | None, upper: str, lower: str) -> Fraction | None:
    """Return a fraction or a mixed number; None for others, such as `5 7/3`."""
    over, under = _decimal(upper), _decimal(lower)
    fraction = None if over is None else _divided(over, under)
    if whole is None or fraction is None:
        return fraction
    return int(whole) + fraction if 0 < fraction < 1 and len(whole) < _MOST_EXACT else None
