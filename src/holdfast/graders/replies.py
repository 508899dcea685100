"""Scores read from a judge's reply, so that a score which the judge only quotes is never taken for its own.

A judge is asked for one JSON object. Many add prose, a code fence or their thoughts, and quote what they judge, which
may contain a score that its author would like to have. So objects are decoded whole, from the outside in; thoughts do
not count; and where a reply names more than one score, only a verdict that concludes it does. Everything else is
Unreadable, and the judge is asked again: better no score than somebody else's.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.canonical import digest

if TYPE_CHECKING:
    from collections.abc import Iterator

_DECODER: Final = json.JSONDecoder(strict=False)  # models break lines inside of texts
_NUMBER: Final = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)")
_MENTION: Final = re.compile(
    r"(?i)\bscore\b\W{1,5}?(?P<number>[-+]?(?:\d+(?:\.\d+)?|\.\d+))(?P<scale>\s*[/%])?"
    r"(?!\s*(?:[-–—]|to)\s*\d)"  # `score (0-1)` names the scale
)
_OPENING: Final = re.compile(r"(?i)\s*<(?:think|thinking|thought|reasoning)>")
_CLOSING: Final = re.compile(r"(?i)</(?:think|thinking|thought|reasoning)>")
_NOTHING_BEFORE: Final = re.compile(r"\s*(?:```\w*)?\s*")
_NOTHING_AFTER: Final = re.compile(r"[\s`*_.)\]]*")
_OWN_SENTENCE: Final = re.compile(
    r"(?i)(?:\A|[.!?…\n])[\s*_#]*(?:(?:so|my|the|own|final|overall|total|verdict)[\s*_:]+){0,4}\Z"
)


class Unreadable(ValueError):
    """A reply that is no verdict; the message says why, and completes "the judge …"."""


class _Statement(NamedTuple):
    """A place of a reply that names a score."""

    start: int
    end: int
    score: float | None
    """None: not a number within the range"""
    reason: str = ""
    is_object: bool = False


Range = tuple[float, float]
"""lowest and highest score"""
SHARE: Final[Range] = (0.0, 1.0)


def read_score(reply: str, within: Range = SHARE) -> tuple[float, str]:
    """Return the judge's score, within a range, and its reason; raises Unreadable."""
    text = without_thoughts(reply)
    lone = text.strip("\n\r\t `*_")
    if _NUMBER.fullmatch(lone):
        return _valid(_score(lone, within), lone, within), ""
    objects = list(json_objects(text))
    statements = [
        _Statement(start, end, _score(value["score"], within), str(value.get("reason") or ""), is_object=True)
        for start, end, value in objects
        if "score" in value
    ]
    for match in _MENTION.finditer(text):
        if not any(start <= match.start() < end for start, end, _ in objects):
            score = None if match["scale"] else _score(match["number"], within)
            statements.append(_Statement(match.start(), match.end(), score))
    if not statements:
        raise Unreadable(f"gave no score from {within[0]:g} to {within[1]:g}: {reply[:200]!r}")
    return _verdict(text, sorted(statements), within)


def _verdict(text: str, statements: list[_Statement], within: Range) -> tuple[float, str]:
    last = statements[-1]
    agreed = len({statement.score for statement in statements}) == 1
    leads = agreed and _NOTHING_BEFORE.fullmatch(text, 0, statements[0].start) is not None
    concludes = _NOTHING_AFTER.fullmatch(text, last.end) is not None or text[last.end :].strip("`*_. \n\r\t") == "}"
    if not agreed and not last.is_object:
        concludes = concludes and _OWN_SENTENCE.search(text, 0, last.start) is not None
    if not leads and not concludes:
        raise Unreadable(f"did not end its reply with a verdict of its own: {text.strip()[-200:]!r}")
    reason = next((statement.reason for statement in reversed(statements) if statement.is_object), "")
    return _valid(last.score, text[last.start : last.end], within), reason


def _score(value: Any, within: Range) -> float | None:
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return score if within[0] <= score <= within[1] else None


def _valid(score: float | None, text: str, within: Range) -> float:
    if score is None:
        raise Unreadable(f"gave no score from {within[0]:g} to {within[1]:g}: {text[:200]!r}")
    return score


def without_thoughts(reply: str) -> str:
    """Return the part of a reply after its thoughts; an empty text where the thoughts never end."""
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


def boundary(*texts: str) -> str:
    """Return a code to mark where judged text begins and ends.

    It is the same whenever the same texts are judged, so that requests can be repeated, and a digest of these texts
    themselves, so that none of them can contain it.
    """
    return digest(list(texts)).removeprefix("sha256:")[:16]


def read_checks(reply: str) -> tuple[list[str], list[str]]:
    """Return the checks that passed and those that failed, each with its reason; raises Unreadable."""
    lists = [value["checks"] for _, _, value in json_objects(without_thoughts(reply)) if "checks" in value]
    checks = lists[0] if len(lists) == 1 else None
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
    verdicts = [(start, end, value) for start, end, value in json_objects(text) if key in value]
    if not verdicts:
        raise Unreadable(f"gave no JSON object with {key!r}: {reply[:200]!r}")
    start, end, verdict = verdicts[-1]
    agreed = len({str(value[key]) for _, _, value in verdicts}) == 1
    leads = agreed and _NOTHING_BEFORE.fullmatch(text, 0, verdicts[0][0]) is not None
    if not leads and _NOTHING_AFTER.fullmatch(text, end) is None:
        raise Unreadable(f"did not end its reply with a verdict of its own: {text.strip()[-200:]!r}")
    if verdict[key] not in choices:
        raise Unreadable(f"gave {key!r} as none of {', '.join(choices)}: {text[start:end][:200]!r}")
    return str(verdict[key]), str(verdict.get("reason") or "")
