"""Verdicts on one trial as readers see them, at its checkpoints and at its end: words, costs, failed attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Struct

from holdfast.graders.build import threshold
from holdfast.store.records import Usage  # noqa: TC001 - msgspec reads annotations when it runs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.graders.build import GraderPlace
    from holdfast.report.run_view import RunView
    from holdfast.store.records import ErrorRecord, Grade

TrialStatus = Literal["passed", "failed", "error", "skipped", "not_reached", "pending", "uncertain"]
"""`pending`: the trial has no output, or its graders have not been asked yet; `uncertain`: the trial has no output, and
a person has to settle a call that may have happened"""
BandState = Literal["passed", "failed", "error", "not_reached", "pending", "skipped"]

_JUDGE_DETAILS: Final = frozenset({"judge", "reply"})


class FailedAttempt(Struct, frozen=True, kw_only=True):
    """An attempt of the target or of a grader that failed."""

    attempt: int
    kind: str
    message: str
    status: int | None
    """of HTTP"""
    time: float
    seconds: float
    final: bool
    """no further attempt followed in that process"""
    traceback: str = ""


class GraderVerdict(Struct, frozen=True, kw_only=True):
    """A grader's verdict on the trial, or the lack of one."""

    name: str
    """as metrics have it: `checkpoint@2/name` after a turn"""
    grader: str
    """in the eval file"""
    type: str
    turn: int | None
    """of a checkpoint; None at the end of the conversation"""
    status: TrialStatus
    score: float | None = None
    threshold: float | None = None
    weight: float = 1.0
    feedback: str = ""
    judge: str = ""
    """name of the model that judged"""
    reply: str = ""
    """the judge's words"""
    details: Any = None
    """further values that the grader returned"""
    usage: Usage | None = None
    """of a judge"""
    seconds: float | None = None
    source: str = ""
    """the run in which the verdict was made, where it was copied"""
    attempts: list[FailedAttempt] = []


class CheckpointBand(Struct, frozen=True, kw_only=True):
    """The graders after a turn."""

    turn: int
    state: BandState
    stops: bool
    """a failure ends the conversation"""
    ended_here: bool
    """the conversation ended because of it"""
    verdicts: list[GraderVerdict]


def make_band(view: RunView, turn: int, verdicts: list[GraderVerdict], *, ended_here: bool = False) -> CheckpointBand:
    """Return the band of a checkpoint with the verdicts of its graders."""
    stops = any(checkpoint.stops for checkpoint in view.spec.checkpoints if checkpoint.after_turn == turn)
    return CheckpointBand(
        turn=turn,
        state=gravest(verdict.status for verdict in verdicts),
        stops=stops,
        ended_here=ended_here,
        verdicts=verdicts,
    )


def gravest(statuses: Iterable[TrialStatus]) -> BandState:
    """Return the status of a checkpoint from those of its graders."""
    present = frozenset(statuses)
    order: tuple[BandState, ...] = ("error", "failed", "pending", "passed", "not_reached")
    return next((status for status in order if status in present), "skipped")


def recorded_verdict(grade: Grade, place: GraderPlace | None, attempts: list[FailedAttempt]) -> GraderVerdict:
    """Return a verdict that a grader gave."""
    details = grade.details
    judge = reply = ""
    if isinstance(details, dict) and isinstance(details.get("judge"), str):
        judge, reply = details["judge"], str(details.get("reply") or "")
        details = {key: value for key, value in details.items() if key not in _JUDGE_DETAILS}
    return GraderVerdict(
        name=grade.grader,
        grader=grade.grader if place is None else str(place.block.name),
        type=grade.type,
        turn=grade.turn,
        status=grade.status,
        score=grade.score,
        threshold=None if place is None else threshold(place.block),
        weight=grade.weight,
        feedback=grade.feedback,
        judge=judge,
        reply=reply,
        details=details or None,
        usage=grade.usage,
        seconds=grade.seconds,
        source=grade.source or "",
        attempts=attempts,
    )


def missing_verdict(place: GraderPlace, status: TrialStatus, attempts: list[FailedAttempt]) -> GraderVerdict:
    """Return the place of a verdict that a grader did not give."""
    return GraderVerdict(
        name=place.name,
        grader=str(place.block.name),
        type=place.block.type,
        turn=place.turn,
        status=status,
        threshold=threshold(place.block),
        weight=place.block.weight,
        attempts=attempts,
    )


def failed_attempt(error: ErrorRecord) -> FailedAttempt:
    """Return a failed attempt for readers."""
    return FailedAttempt(
        attempt=error.attempt,
        kind=error.kind,
        message=error.message,
        status=error.status,
        time=error.time,
        seconds=error.seconds,
        final=error.final,
        traceback=error.traceback or "",
    )


def grader_attempts(
    errors: Iterable[ErrorRecord], places: Sequence[GraderPlace], ends: Sequence[float]
) -> dict[str, list[FailedAttempt]]:
    """Return the failed attempts of graders by place.

    They are recorded by the grader's own name, which several checkpoints may share; then the time decides: a grader
    after a turn is asked before the next turn begins.
    """
    attempts: dict[str, list[FailedAttempt]] = {}
    for error in errors:
        if error.where == "target":
            continue
        sharing = [place for place in places if place.block.name == error.where]
        past = sum(end <= error.time for end in ends)
        place = next((place for place in sharing if place.turn == past), sharing[-1] if sharing else None)
        if place is not None:
            attempts.setdefault(place.name, []).append(failed_attempt(error))
    return attempts
