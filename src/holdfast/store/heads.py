"""What is read of journal lines: the fields that an index takes, the results of look-ups, and the records themselves.

A head is decoded in a fraction of the time of the whole record. Recorded calls of a conversation are read all together:
later ones may take back earlier ones, and show which were cut off.
"""

from __future__ import annotations

from heapq import merge
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec

from holdfast.canonical import digest
from holdfast.errors import Fault
from holdfast.store.files import UNREADABLE
from holdfast.store.lines import LineRef, is_sound
from holdfast.store.records import (
    AnswerClass,
    CallIntent,
    GradeStatus,
    Mark,
    OnCutOff,
    Output,
    Step,
    Timing,
    Together,
    Usage,
    answer_kind,
)
from holdfast.store.shared import lender_of, run_of

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")

_LONGEST: Final = 300
"""characters of a call's arguments in messages"""

VerdictKey = tuple[str, int | None, str]
"""The key of a verdict on an output: `Grade.by`, `Grade.turn` and `Grade.judged`."""


class Moment(NamedTuple):
    """The state of a conversation after a turn or at its end, to the extent that verdicts depend on it."""

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
    kind: str = "whole"
    """kind of the answer, one of `answers.KINDS`"""
    row: str | None = None
    """16 digits of the digest of the row, if the target sees only a part of it"""
    sample: str = ""
    trial: int = 1
    turns: int = 1
    attempt: int = 1
    stop: str = ""
    first_token: float | None = None
    source: str | None = None
    """the run from which it was copied, or with which it is shared"""

    @property
    def stopped(self) -> int:
        """The turn of the checkpoint that ended the conversation; 0 if none did."""
        return 0 if self.stopped_by is None else len(self.marks) or 1

    def at(self, turn: int | None) -> Moment | None:
        """Return the state after a turn, or at the end; None if the conversation ended earlier."""
        if turn is None or (turn == 1 and not self.marks):
            return Moment(self.digest, self.usage.tokens, self.seconds)
        return self.marks[turn - 1] if turn <= len(self.marks) else None


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
    line: LineRef | None = None
    """the place of its line"""


class OutputHead(msgspec.Struct):
    """The fields of an output that the index uses."""

    key: str
    sample: str
    trial: int
    attempt: int
    turns: int
    stop: str
    answer: AnswerClass
    usage: Usage
    timing: Timing
    digest: str
    marks: list[Mark] = []
    stopped_by: str | None = None
    source: str | None = None
    row: str | None = None

    @property
    def kind(self) -> str:
        """Kind of the answer, as the index holds it."""
        return answer_kind(self.answer, self.stop)

    def ref(self, line: LineRef) -> OutputRef:
        """Return the index's reference to an output on the given line."""
        timing, marks = self.timing, moments(self.marks)
        own = line, self.digest, self.usage, timing.seconds, marks, self.stopped_by, timing.started, self.kind
        return OutputRef(*own, *self.facts)

    @property
    def facts(self) -> tuple[str | None, str, int, int, int, str, float | None, str | None]:
        """The last fields of a reference, from `row` on."""
        first_token = self.timing.first_token
        return self.row, self.sample, self.trial, self.turns, self.attempt, self.stop, first_token, self.source


NOWHERE: Final = LineRef(Path(), 0, 0)
"""The place of an output that is about to be recorded."""


def ref_of(output: Output) -> OutputRef:
    """Return a reference to an output that no index has yet."""
    return OutputRef(
        NOWHERE,
        output.digest,
        output.usage,
        output.timing.seconds,
        () if isinstance(output.marks, msgspec.UnsetType) else moments(output.marks),
        None if isinstance(output.stopped_by, msgspec.UnsetType) else output.stopped_by,
        output.timing.started,
        answer_kind(output.answer, output.stop),
        None if isinstance(output.row, msgspec.UnsetType) else output.row,
    )


def moments(marks: Iterable[Mark]) -> tuple[Moment, ...]:
    """Return the moments at which the turns of a conversation ended."""
    return tuple([Moment(mark.digest, mark.usage.tokens, mark.seconds) for mark in marks])


class GradeHead(msgspec.Struct):
    """The fields of a grade that the index uses."""

    key: str
    by: str
    judged: str
    grader: str
    turn: int | None
    status: GradeStatus
    score: float | None
    seconds: float
    usage: Usage | None = None
    time: float = 0.0
    source: str | None = None
    counts: tuple[int, ...] | None = None
    together: Together | None = None

    @property
    def verdict_key(self) -> VerdictKey:
        """The key of the verdict among the verdicts on its output."""
        return self.by, self.turn, self.judged


class StepHead(msgspec.Struct):
    """The fields of a recorded call that the index uses."""

    key: str
    kind: str
    usage: Usage
    time: float
    seconds: float
    source: str | None = None


class ErrorHead(msgspec.Struct):
    """The fields of a failed attempt that the index, summaries and followers of a run use."""

    key: str
    where: str
    time: float
    seconds: float
    usage: Usage | None = None
    sample: str = ""
    trial: int = 1
    kind: str = ""
    message: str = ""
    final: bool = False
    row: str | msgspec.UnsetType = msgspec.UNSET


_decoders: Final[dict[type, msgspec.json.Decoder[Any]]] = {}


def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Return the decoder of a kind of record, made when it is first needed: a new run has no records yet."""
    known = _decoders.get(kind)
    if known is None:
        known = _decoders[kind] = msgspec.json.Decoder(kind)
    return known


def decode_head(kind: type[T], line: bytes) -> T | None:
    """Decode the head of a line; None if the line is not a record of this kind."""
    try:
        return decoder(kind).decode(line)
    except UNREADABLE:
        return None


def read_output(ref: OutputRef) -> Output:
    """Read the whole record of a reference."""
    output, lender = decode_line(Output, ref.line), lender_of(ref.line.path)
    return output if lender is None or output.source else msgspec.structs.replace(output, source=lender)


def decode_line(kind: type[T], line: LineRef, data: bytes | None = None) -> T:
    """Read a line as a record; raise Fault if it is damaged or of another kind. `data` is a sound line."""
    data = check_line(line, line.read()) if data is None else data
    try:
        return decoder(kind).decode(data)
    except UNREADABLE as error:
        raise _damaged(line, f"not a record of Holdfast ({error})") from error


def check_line(line: LineRef, data: bytes) -> bytes:
    """Return the bytes of a line if they are sound; raise Fault if not.

    A published index was made of lines that were sound then, which may be long ago.
    """
    if is_sound(data):
        return data
    raise _damaged(line, "a damaged line")


def _damaged(line: LineRef, reason: str) -> Fault:
    return Fault(
        "disk",
        f"{line.path}: {reason} at byte {line.offset}",
        remedy=f"Set it aside with `holdfast repair {run_of(line.path)}`; the same command then does its work again.",
    )


def read_steps(lines: Iterable[LineRef]) -> list[Step]:
    """Read the valid recorded calls of a conversation, in the order in which they were made.

    If several workers ran the conversation, its lines may be passed in another order, file by file.
    """
    return _in_effect(_in_order(lines))


def _in_order(lines: Iterable[LineRef]) -> list[Step]:
    by_file: dict[Path, list[Step]] = {}
    for line in lines:
        by_file.setdefault(line.path, []).append(decode_line(Step, line))
    return list(merge(*by_file.values(), key=lambda step: step.time))


def _in_effect(recorded: Iterable[Step]) -> list[Step]:
    """Leave out calls that a decision took back."""
    steps: list[Step] = []
    for step in recorded:
        if step.kind == "restart":
            steps.clear()
        elif step.kind == "settle":  # the call is to be made again: forget that it was about to be made
            steps = [each for each in steps if each.kind != "intent" or _call_of(each) != _call_of(step)]
        else:
            steps.append(step)
    return steps


def _call_of(step: Step) -> tuple[int, str, int]:
    return step.turn, step.request, step.nth


def is_decision(step: Step) -> bool:
    """Return True for a record of what became of calls that were cut off."""
    return step.kind in ("settle", "restart") or (step.kind == "tool" and bool(step.response.get("settled")))


def cut_off_calls(steps: Iterable[Step]) -> list[Step]:
    """Return the intents of calls without a result, in turns that have not ended: they may or may not have happened."""
    recorded = list(steps)
    results = {_call_of(step) for step in recorded if step.kind == "tool"}
    ended = {step.turn for step in recorded if step.kind == "turn"}
    return [
        step for step in recorded if step.kind == "intent" and step.turn not in ended and _call_of(step) not in results
    ]


def why_uncertain(cut_off: Iterable[Step], intents: Iterable[Step]) -> str:
    """Describe the calls that leave a trial uncertain; empty if their tools' settings decide.

    `cut_off` are the intents of calls that were cut off, and `intents` all intents of the trial.
    """
    undecided = [step for step in cut_off if _on_cut_off(step) != "error_result"]
    return "" if all(_on_cut_off(step) == "restart" for step in intents) else describe_cut_off(undecided)


def describe_cut_off(calls: Iterable[Step]) -> str:
    """Describe the calls that were cut off; empty if there are none."""
    names = [describe_call(step) for step in calls]
    were = "was" if len(names) == 1 else "were"
    return f"{'; '.join(names)} {were} cut off, and may or may not have happened" if names else ""


def _on_cut_off(intent: Step) -> OnCutOff:
    return msgspec.convert(intent.response, CallIntent).on_cut_off


def explain_uncertain(lines: Iterable[LineRef], failed_at: float | None) -> tuple[str, bool]:
    """Return why a trial is uncertain, and True if it stopped for that reason at `failed_at` and was not settled."""
    recorded = _in_order(lines)
    steps = _in_effect(recorded)
    try:
        why = why_uncertain(cut_off_calls(steps), [step for step in steps if step.kind == "intent"])
    except msgspec.ValidationError:
        why = "a recorded call cannot be read, and may or may not have happened"
    stopped = failed_at is not None and not any(is_decision(step) and step.time >= failed_at for step in recorded)
    return why, stopped


def call_id(key: str, turn: int, request: str, nth: int) -> str:
    """Return the id of a tool call of a trial: the same in every process, attempt and copy of the run."""
    return digest([key, turn, request, nth]).removeprefix("sha256:")


def describe_call(step: Step) -> str:
    """Return a recorded tool call or intent for people, with its id: `order({"item":"desk"}) (call 3f2a9c1e0b12)`."""
    arguments = msgspec.json.encode(step.response.get("arguments")).decode()
    if len(arguments) > _LONGEST:
        arguments = arguments[:_LONGEST] + "…"
    identity = call_id(step.key, step.turn, step.request, step.nth)
    return f"{step.response['tool']}({arguments}) (call {identity[:12]})"
