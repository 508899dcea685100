"""Reads verdicts from a judge's reply: only the judge's own, and only complete ones.

A judge is asked for one JSON object. Many add prose, a code fence or their thoughts, and quote the judged answer, which
may contain a score that its author would like to get. So objects are decoded as a whole, from the outside in; thoughts
do not count; a verdict that the preceding words attribute to somebody else is a quotation; and among several verdicts,
only one that concludes the reply counts. Numbers are read as a whole: `1 out of 10`, `0.5 - 0.7`, `0,8` and scores on
another scale do not count. Everything else is Unreadable, and the judge is asked again: better no score than a wrong
one.
"""

from __future__ import annotations

import ast
import json
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.canonical import digest

if TYPE_CHECKING:
    from collections.abc import Iterator


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key has two values")
    return value


_DECODER: Final = json.JSONDecoder(strict=False, object_pairs_hook=_refuse_repeated)  # models break lines inside texts
_PLAIN: Final = r"[-+]?(?:\d++(?:\.\d++)?|\.\d++)(?:[eE][-+]?\d++)?"
_NUMBER: Final = re.compile(rf"({_PLAIN})\.?")
_SHARE: Final = re.compile(rf"({_PLAIN})\s*(?:/|(?:out\s+)?of)\s*({_PLAIN})(?![\w%.,]*\d)", re.IGNORECASE)
_RANGE: Final = rf"({_PLAIN})\s*(?:-|–|—|to|and|through|\.\.+)\s*({_PLAIN})"
_MENTION: Final = re.compile(
    rf"""\bscore\b(?:\s*[(\[]\s*(?:scale\W{{1,3}})?{_RANGE}\s*[)\]])?(?:\s+is\b)?[\s:=*()\[\]"'–—-]{{1,6}}?"""
    rf"(?P<score>{_PLAIN})",
    re.IGNORECASE,
)
_GOES_ON: Final = re.compile(
    r"""(?ix) [\w%‰] | [.,]\d | [ \t]*(?: [%‰/] | per\s?cent | (?:out\s+)?of\b
      | (?: [-–—~…;,&|(±] | \.\.+ | to\b | or\b | and\b | through\b | -> | => | → | \+/- )?[ \t]*[-+]?\.?\d )"""
)
"""follows a number that is one end of a range, or part of something else"""
_UNITS: Final = re.compile(r"\s*(?:stars?|points?|pts?|marks?)\b", re.IGNORECASE)
_SCALE: Final = re.compile(
    rf"""(?ix) \b scale \b [^.\n\d]{{0,40}} {_RANGE} | \b (\d+) [ -] point \b
      | \b max(?:imum)? (?:\s(?:score|points?|marks?|grade))? (?:\s(?:is|of|was))? \s*[:=]?\s* ({_PLAIN})
        (?= \s* (?:points?|marks?|stars?)? \s* (?:[.,;)\n]|\Z) )"""
)
"""a scale that is mentioned with a score"""
_SCALE_KEYS: Final = ("max", "max_score", "maximum", "out_of", "outOf", "scale", "range", "total")

_OPENING: Final = re.compile(r"(?i)\s*(?:<(?:think|thinking|thought|reasoning)>|\[think\])")
_CLOSING: Final = re.compile(r"(?i)</(?:think|thinking|thought|reasoning)>|\[/think\]")
_NOTHING_BEFORE: Final = re.compile(r"\s*(?:```\w*|`)?[\s*_#\[]*")
_NOTHING_AFTER: Final = re.compile(r"[\s`*_.)\]]*")
_FENCE: Final = re.compile(r"```\w*\Z")
_OWN_SENTENCE: Final = re.compile(
    r"(?:\A|[.!?…\n])[\s*_#-]*(?:(?:so|thus|therefore|hence|my|the|own|final|overall|total|verdict)[\s*_:,]+){0,4}\Z",
    re.IGNORECASE,
)
_QUOTING: Final = re.compile(
    r"""(?ix) \b(?: says? | said | saying | writes? | wrote | written | writing | claim\w* | contain\w* | prints?
      | printed | states? | stated | stating | reads | instruct\w* | ask\w* | demand\w* | tells? | told | telling
      | includ\w+ | quot\w+ | inject\w* | trick\w* | pretend\w* | outputs | returned | returns | replie[sd]
      | embed\w* | suggest\w* | insist\w* | wants? | wanted | tries | tried | trying | attempt\w* | request\w*
      | ends?\ with | begins?\ with | example | e\.g | such\ as | format | if | would\ like | itself | himself
      | themselves | (?:candidate|answer|model|student|author|response|assistant|submission|user)(?:'s|’s|s')
      | (?:not|never|cannot|can't|won't|refus\w+)\ (?:\w+\ ){0,2}?
        (?:output|give|return|reply|say|answer|follow|obey|respond|write|print|grade|assign|award)
    )(?!\w)"""
)
_QUOTED_LINE: Final = re.compile(rf"{_QUOTING.pattern}\W*:", re.IGNORECASE | re.VERBOSE)
_ANOTHERS: Final = re.compile(
    r"""(?ix) \b(?: answer | candidate | response | reply | output | text | student | model | assistant | author | user
      | submission | essay | completion | it | they | he | she | prompt | content | message )\b"""
)
_OWN: Final = re.compile(
    r"""(?ix) \b(?: my | I | here | verdict | evaluation | assessment | grade | grading | judge?ment | rating | final
      | overall | result | conclusion | therefore | thus | so | hence | json )\b"""
)
_IN_SENTENCE: Final = re.compile(r"[ \t]*(?:is|was|were|would|which|that|as|in|from)\b|[\"'”’»]")
_LONGEST_LITERAL: Final = 20_000
_SEEN: Final = 300
"""characters before a verdict that are examined"""


class Unreadable(ValueError):
    """A reply without a readable verdict; the message gives the reason, and completes "the judge …"."""


class _Statement(NamedTuple):
    """A part of a reply that states a verdict."""

    start: int
    end: int
    value: Any
    """None: not a verdict of the requested kind"""
    reason: str = ""
    is_object: bool = False


Range = tuple[float, float]
"""lowest and highest score"""
SHARE: Final[Range] = (0.0, 1.0)


def read_score(reply: str, within: Range = SHARE) -> tuple[float, str]:
    """Return the judge's score, within a range, and its reason; raises Unreadable."""
    text = without_thoughts(reply)
    lone = text.strip("\n\r\t `*_")
    if (value := _score(lone, within)) is not None:
        return value, ""
    objects = list(json_objects(text)) or list(_literal(text))
    statements = [
        _Statement(start, end, _object_score(value, within), str(value.get("reason") or ""), is_object=True)
        for start, end, value in objects
        if "score" in value
    ]
    statements += [
        _mentioned(text, match, within)
        for match in _MENTION.finditer(text)
        if not any(start <= match.start() < end for start, end, _ in objects)
    ]
    if not statements:
        raise Unreadable(f"gave no score from {within[0]:g} to {within[1]:g}: {reply[:200]!r}")
    conclusion = _conclusion(text, sorted(statements, key=lambda statement: statement.start))
    prose = _outside(text, objects)
    if conclusion.value is None or any(not _is_range(match, within) for match in _SCALE.finditer(prose)):
        raise Unreadable(f"gave no score from {within[0]:g} to {within[1]:g}: {text.strip()[:200]!r}")
    reason = next((statement.reason for statement in reversed(statements) if statement.is_object), "")
    return float(conclusion.value), reason


def _score(value: Any, within: Range) -> float | None:
    """Return the score that a number, or a text with nothing but a number, stands for."""
    if isinstance(value, str):
        share = _SHARE.fullmatch(value.strip())
        if share is not None and float(share[2]) != within[1]:
            return None
        number = share or _NUMBER.fullmatch(value.strip())
        value = None if number is None else number[1]
    if isinstance(value, bool) and within != SHARE:
        return None
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return score if within[0] <= score <= within[1] else None


def _object_score(value: dict[str, Any], within: Range) -> float | None:
    for key in _SCALE_KEYS:
        numbers = [float(number) for number in re.findall(_PLAIN, str(value.get(key, "")).replace("-", " "))]
        if numbers and numbers[-1] != within[1]:
            return None
    return _score(value["score"], within)


def _mentioned(text: str, match: re.Match[str], within: Range) -> _Statement:
    """Return the score after the word; it has no value if the number continues, or has another scale."""
    start, number = match.start(), match.start("score")
    share = _SHARE.match(text, number)
    end = match.end() if share is None else share.end()
    whole = _score(text[number:end], within)
    other_scale = match[1] is not None and (float(match[1]), float(match[2])) != within
    if other_scale or _GOES_ON.match(text, end) or (within == SHARE and _UNITS.match(text, end)):
        whole = None
    if not _OWN_SENTENCE.search(_before(text, start)):
        whole = None
    return _Statement(start, end, whole)


def _is_range(match: re.Match[str], within: Range) -> bool:
    lowest, highest = match[1], match[2] or match[3] or match[4]
    return (lowest is None or float(lowest) == within[0]) and float(highest) == within[1]


def _outside(text: str, objects: list[tuple[int, int, dict[str, Any]]]) -> str:
    starts = [0, *(end for _, end, _ in objects)]
    ends = [*(start for start, _, _ in objects), len(text)]
    return " ".join(text[start:end] for start, end in zip(starts, ends, strict=True))


def _conclusion(text: str, statements: list[_Statement]) -> _Statement:
    """Return the statement that is the judge's verdict; raise Unreadable if there is no such statement."""
    first, last = statements[0], statements[-1]
    agreed = len({repr(statement.value) for statement in statements}) == 1
    begins = _NOTHING_BEFORE.fullmatch(text, 0, first.start) is not None
    leads = agreed and begins and not _IN_SENTENCE.match(text, first.end)
    concludes = _NOTHING_AFTER.fullmatch(text, last.end) is not None and _is_own(text, statements, agreed=agreed)
    if not leads and not concludes:
        raise Unreadable(f"did not end its reply with a verdict of its own: {text.strip()[-200:]!r}")
    return last


def _is_own(text: str, statements: list[_Statement], *, agreed: bool) -> bool:
    """Return False if the preceding words introduce the last statement as a quotation, or as one of several."""
    last = statements[-1]
    before = _before(text, last.start)
    bare = _FENCE.sub("", before.rstrip(" \t\r\n*_#")).rstrip(" \t\r\n*_#")
    if not bare.strip("`["):
        return True
    line = bare[bare.rfind("\n") + 1 :]
    same_line = "\n" not in before[len(bare) :]
    if same_line and (bare[-1] in "\"'“‘«`>" or _QUOTED_LINE.search(line)):
        return False
    if not same_line and not bare.endswith((":", "：")):
        return True
    lead = re.split(r"[.!?…](?:\s|\Z)", line)[-1]
    if len(statements) > 1 and last.is_object and same_line:
        lead = bare[max(statements[-2].end - last.start + len(before), len(bare) - len(lead)) :]
        if not agreed and not _OWN.search(lead):
            return False
    return not _QUOTING.search(lead) and (not _ANOTHERS.search(lead) or _OWN.search(lead) is not None)


def _before(text: str, end: int) -> str:
    """Return the text before a place; the last part of a long text is marked, lest it seem to be a beginning."""
    return text[:end] if end <= _SEEN else f"…,{text[end - _SEEN : end]}"


def without_thoughts(reply: str) -> str:
    """Return the part of a reply after its thoughts; empty if the thoughts never end."""
    inside = [(start, end) for start, end, _ in json_objects(reply)]
    closings = [
        match.end()
        for match in _CLOSING.finditer(reply)
        if not any(start <= match.start() < end for start, end in inside)  # a verdict may quote the mark
    ]
    if closings:
        return reply[closings[-1] :]
    return "" if _OPENING.match(reply) else reply


def json_objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield the outermost JSON objects of a text with their places; text that only looks like an object is skipped."""
    place = 0
    while (start := text.find("{", place)) >= 0:
        try:
            value, place = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            place = _group_end(text, start)
        else:
            yield start, place, value


def _group_end(text: str, start: int) -> int:
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.end()
    return len(text)


def _literal(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield a reply that is nothing but a Python dict, with single quotes or a trailing comma."""
    bare = text.strip().removeprefix("```json").removeprefix("```python").strip("`\n ")
    if not (bare.startswith("{") and bare.endswith("}")) or len(bare) > _LONGEST_LITERAL:
        return
    try:
        node = ast.parse(bare, mode="eval").body
        value = ast.literal_eval(node)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return
    if isinstance(node, ast.Dict) and len(value) == len(node.keys):
        start = text.index(bare)
        yield start, start + len(bare), value


def boundary(*texts: str) -> str:
    """Return a code that marks the beginning and end of judged text.

    The code is a digest of the texts: equal texts give equal requests, and no text can contain its own code.
    """
    return digest(list(texts)).removeprefix("sha256:")[:16]


def read_checks(reply: str) -> tuple[list[str], list[str]]:
    """Return the passed and the failed checks, each with its reason; raises Unreadable."""
    text = without_thoughts(reply)
    lists = _under("checks", text)
    checks = _conclusion(text, lists).value if len(lists) == 1 else None
    if not isinstance(checks, list) or not checks or not all(_is_check(check) for check in checks):
        raise Unreadable(f"gave no JSON object with `checks`: {reply[:200]!r}")
    verdicts: dict[bool, list[str]] = {True: [], False: []}
    for check in checks:
        texts = (str(check.get("description") or ""), str(check.get("reason") or ""))
        verdicts[check["passed"]].append(": ".join(filter(None, texts)))
    return verdicts[True], verdicts[False]


def _is_check(check: Any) -> bool:
    return isinstance(check, dict) and isinstance(check.get("passed"), bool)


def read_choice(reply: str, key: str, choices: tuple[str, ...]) -> tuple[str, str]:
    """Return the judge's choice under a key of its JSON object, and its reason; raises Unreadable."""
    text = without_thoughts(reply)
    verdicts = _under(key, text)
    if not verdicts:
        raise Unreadable(f"gave no JSON object with {key!r}: {reply[:200]!r}")
    verdict = _conclusion(text, verdicts)
    if verdict.value not in choices:
        raise Unreadable(f"gave {key!r} as none of {', '.join(choices)}: {text[verdict.start : verdict.end][:200]!r}")
    return str(verdict.value), verdict.reason


def _under(key: str, text: str) -> list[_Statement]:
    """Return the values that a reply's objects have under a key."""
    return [
        _Statement(start, end, value[key], str(value.get("reason") or ""), is_object=True)
        for start, end, value in json_objects(text)
        if key in value
    ]
