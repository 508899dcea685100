"""Classes of answers: every trial has one, and their counts add up to the number of trials.

An answer is whole unless its `stop` says that it ended early, or there is nothing in it. Graders look at all answers
alike, so a report says how many of them were not whole: a token limit that is too low looks like a bad model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, get_args

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Mapping

AnswerClass = Literal["whole", "cut", "filtered", "refused", "empty", "paused", "limited", "exited"]
ANSWER_CLASSES: Final[tuple[AnswerClass, ...]] = get_args(AnswerClass)

_KINDS: Final[dict[str, tuple[AnswerClass, str]]] = {
    **{name: (name, name) for name in ANSWER_CLASSES},
    "length": ("cut", "cut at the token limit"),
    "context_window": ("cut", "cut at the end of the context window"),
    "max_steps": ("cut", "cut after `max_steps` model calls"),
    "content_filter": ("filtered", "filtered"),
    "refusal": ("refused", "refused"),
    "pause": ("paused", "paused"),
    "limited": ("limited", "ended by a limit"),
    "time_limit": ("limited", "ended at the time limit"),
    "token_limit": ("limited", "ended at the limit of tokens"),
    "cost_limit": ("limited", "ended at the limit of cost"),
    "call_limit": ("limited", "ended at the limit of calls"),
    "exited": ("exited", "ended by a program's exit code"),
}
"""classes, and more specific values of `stop`, each with its class and words for a count of answers"""
KINDS: Final = tuple(_KINDS)
"""kinds of answers; the index holds an answer's kind as its number in this list"""
KIND_CODES: Final = {kind: code for code, kind in enumerate(KINDS)}


EXIT: Final = "exit:"
"""begins the `stop` of a program that ended with an exit code other than 0, which follows"""


def classify_answer(stop: str, *, empty: bool) -> AnswerClass:
    """Return the class of an answer by its `stop`; `empty`: the answer has no text, tool call or file."""
    if stop in _KINDS:
        return _KINDS[stop][0]
    if stop.startswith(EXIT):
        return "exited"
    return "empty" if empty else "whole"


def answer_kind(answer: AnswerClass, stop: str) -> str:
    """Return the kind of an answer: its `stop` if that explains the class, else the class."""
    return stop if stop in _KINDS and _KINDS[stop][0] == answer else answer


def class_of_kind(kind: str) -> AnswerClass:
    """Return the class that a kind of answers belongs to."""
    return _KINDS[kind][0]


class Answers(Struct, frozen=True, kw_only=True):
    """Number of trials by the class of their answer. The counts add up to the number of trials."""

    whole: int = 0
    """the target ended its answer itself"""
    cut: int = 0
    """the token limit, the context window or `max_steps` ended it"""
    filtered: int = 0
    """the provider's filter removed it, or a part of it"""
    refused: int = 0
    """the model refused to answer, and the API says so"""
    empty: int = 0
    """the answer ended normally and has no content"""
    paused: int = 0
    """the provider paused the answer and did not continue it"""
    limited: int = 0
    """a limit of the trial ended it: time, tokens, cost or calls"""
    exited: int = 0
    """the target's program ended with an exit code other than 0"""
    errors: int = 0
    """trials without an output"""
    pending: int = 0
    """trials that were not attempted yet, or are uncertain; only while a run is not finished"""

    @property
    def outputs(self) -> int:
        """Number of answers."""
        return self.total - self.errors - self.pending

    @property
    def total(self) -> int:
        """Number of trials."""
        return sum(getattr(self, name) for name in self.__struct_fields__)


def count_answers(kinds: Mapping[str, int], *, errors: int, pending: int = 0) -> Answers:
    """Sum counts of kinds by class."""
    counts = dict.fromkeys(ANSWER_CLASSES, 0)
    for kind, count in kinds.items():
        counts[class_of_kind(kind)] += count
    return Answers(**counts, errors=errors, pending=pending)


def describe_answers(kinds: Mapping[str, int]) -> str | None:
    """Describe how many answers are not whole, and why, from counts of kinds; None if all are."""
    others = {kind: count for kind, count in kinds.items() if kind != "whole" and count}
    if not others:
        return None
    total, count = sum(kinds.values()), sum(others.values())
    ordered = sorted(others, key=lambda kind: ANSWER_CLASSES.index(class_of_kind(kind)))
    parts = [f"{others[kind]:,} {_KINDS[kind][1]}" for kind in ordered]
    return f"{count:,} of {total:,} answers {'is' if count == 1 else 'are'} not whole: {', '.join(parts)}"
