"""Outputs and verdicts as the index refers to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.store.lines import LineRef
    from holdfast.store.records import GradeStatus, Mark, Together, Usage


class Moment(NamedTuple):
    """The state of a conversation after a turn or at its end, as far as grade keys depend on it."""

    digest: str
    tokens: int | None
    seconds: float


class OutputRef(NamedTuple):
    """A finished trial: the place of its line, and the values that grading needs."""

    line: LineRef
    digest: str
    usage: Usage
    seconds: float
    marks: tuple[Moment, ...] = ()
    """the ends of the turns, if recorded"""
    stopped_by: str | None = None
    started: float = 0.0
    row: str | None = None
    """16 digits of the digest of the row, if the target sees only a part of it"""
    kind: str = "whole"
    """kind of the answer, one of `answers.KINDS`"""

    def at(self, turn: int | None) -> Moment | None:
        """Return the state after a turn, or at the end; None if the conversation ended earlier."""
        if turn is None or (turn == 1 and not self.marks):
            return Moment(self.digest, self.usage.tokens, self.seconds)
        return self.marks[turn - 1] if turn <= len(self.marks) else None


def moments(marks: Iterable[Mark], usage: Usage, seconds: float) -> tuple[Moment, ...]:
    """Convert marks for the index. Marks of early versions lack usage and time; those of the whole output are used."""
    return tuple(
        Moment(
            mark.digest,
            (usage if isinstance(mark.usage, msgspec.UnsetType) else mark.usage).tokens,
            seconds if isinstance(mark.seconds, msgspec.UnsetType) else mark.seconds,
        )
        for mark in marks
    )


class VerdictRef(NamedTuple):
    """The verdict of a grade."""

    status: GradeStatus
    score: float | None
    usage: Usage | None
    time: float = 0.0
    counts: tuple[int, ...] | None = None
    """numbers to be summed over the run, of graders with run-wide metrics"""
    together: Together | None = None
    """of a grader that has looked at all outputs of the run together"""
