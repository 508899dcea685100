"""Verdicts of the graders on an output, by the present thresholds: one join for the report and for every reader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from msgspec import Struct

from holdfast.graders.build import grader_class, grader_places, threshold
from holdfast.store.metrics import Rule
from holdfast.store.records import GradeStatus, apply_threshold

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from holdfast.data.panels import Panel
    from holdfast.graders.build import GraderPlace
    from holdfast.plan.plan import Work
    from holdfast.spec.eval import Eval
    from holdfast.store.heads import VerdictRef
    from holdfast.store.index import RunIndex

TrialStatus = Literal["passed", "failed", "error", "skipped", "not_reached", "pending", "uncertain"]
"""`pending`: the trial has no output, or its graders have not been asked yet; `uncertain`: the trial has no output, and
a person has to settle a call that may have happened"""
BandState = Literal["passed", "failed", "error", "not_reached", "pending", "skipped"]


class Judged(NamedTuple):
    """A grader's verdict on an output."""

    status: GradeStatus
    score: float | None
    recorded: VerdictRef | None = None
    """None if the conversation ended before this checkpoint"""


class JudgedOutput(Struct, frozen=True, eq=False):
    """An output with its verdicts. It is compared by identity, which makes it a fast key of mappings."""

    verdicts: dict[int, Judged | None]
    """by number of the graders that apply; None is a verdict that is still to come"""
    status: GradeStatus
    score: float | None

    def score_of(self, grader: int) -> float | None:
        """Return the score that a grader gave; None if it gave none."""
        verdict = self.verdicts.get(grader)
        return None if verdict is None else verdict.score


_NOT_REACHED: Final = Judged("not_reached", None)


def judge_output(
    work: Work,
    places: Sequence[GraderPlace],
    recorded: Iterable[tuple[int, VerdictRef | None]],
    panel: Panel,
    measured: Container[int] = (),
) -> JudgedOutput:
    """Join an output with the verdicts of the graders that look at its row, which `Work.verdicts` returns.

    `measured` are the graders of which all verdicts are measurements.
    """
    verdicts: dict[int, Judged | None] = dict.fromkeys(panel.graders, _NOT_REACHED)
    for number, verdict in recorded:
        if verdict is None:
            verdicts[number] = None
            continue
        if number in measured:
            verdict = as_measurement(verdict)
        status = apply_threshold(work.slots[number].threshold, verdict.status, verdict.score)
        verdicts[number] = Judged(status, verdict.score, verdict)
    return JudgedOutput(verdicts, *combine_verdicts([places[number] for number in verdicts], [*verdicts.values()]))


def combine_verdicts(
    places: Sequence[GraderPlace], verdicts: Sequence[Judged | None]
) -> tuple[GradeStatus, float | None]:
    """Return status and score of a trial: passed if every grader passes, and the final graders' weighted mean.

    Graders of weight 0 are reported and decide nothing. A failed checkpoint makes the trial fail, whatever the final
    graders say. A checkpoint that ended the conversation, even one of weight 0, leaves a score of 0. A verdict of None
    is still to come.
    """
    passed, scored, cut_short, objected = True, False, False, False
    weights: list[float] = []
    weighted: list[float] = []
    for place, verdict in zip(places, verdicts, strict=True):
        if verdict is None or verdict.status == "error":
            return "error", None
        status, score, _ = verdict
        objected = objected or status == "failed"
        cut_short = cut_short or (status == "not_reached" and place.turn is None)
        weight = place.block.weight
        if weight == 0:
            continue
        passed = passed and status != "failed"
        if score is not None:
            scored = True
            if place.turn is None:
                weights.append(weight)
                weighted.append(weight * score)
    if cut_short and objected:
        return "failed", 0.0
    if not scored:
        return "skipped", None
    total = sum(weights)
    return "passed" if passed else "failed", sum(weighted) / total if total else None


def gravest(statuses: Iterable[TrialStatus]) -> BandState:
    """Return the status of a checkpoint from the statuses of its graders."""
    present = frozenset(statuses)
    order: tuple[BandState, ...] = ("error", "failed", "pending", "passed", "not_reached")
    return next((status for status in order if status in present), "skipped")


def measured_graders(work: Work, places: Sequence[GraderPlace], index: RunIndex) -> frozenset[int]:
    """Return the graders of which all verdicts are measurements, because some are.

    Scores of a part of a grader's scale would be a wrong mean.
    """
    return frozenset(
        number
        for number, place in enumerate(places)
        if not place.votes and grader_class(place.block).one_scale and _measures(work, number, index)
    )


def _measures(work: Work, number: int, index: RunIndex) -> bool:
    """Return True if a verdict of a grader that counts has counts."""
    slot = work.slots[number]
    for key in index.unusual_verdicts(slot.fingerprint, slot.turn):
        ref = index.output(key)
        verdict_key = None if ref is None else work.verdict_key(ref, number)
        verdict = None if verdict_key is None else index.verdicts(key).get(verdict_key)
        if verdict is not None and verdict.counts is not None:
            return True
    return False


def as_measurement(verdict: VerdictRef) -> VerdictRef:
    """Return a verdict without its score; errors stay as they are."""
    return verdict if verdict.score is None else verdict._replace(status="skipped", score=None)


def grading_rules(spec: Eval) -> dict[str, Rule]:
    """Return the thresholds and weights of an eval's graders, which turn recorded scores into a report."""
    return {
        place.name: Rule(threshold(place.block), place.block.weight, place.combine if place.votes else None)
        for place in grader_places(spec)
    }
