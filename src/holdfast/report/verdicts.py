"""Verdicts of the graders on an output, by the present thresholds: one join for the report and for every reader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

from holdfast.graders.build import grader_class, grader_places, threshold
from holdfast.store.metrics import Rule
from holdfast.store.records import GradeStatus, apply_threshold

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.data.panels import Panel
    from holdfast.graders.build import GraderPlace
    from holdfast.plan.plan import Work
    from holdfast.spec.eval import Eval
    from holdfast.store.index import Index
    from holdfast.store.refs import OutputRef, VerdictRef


class Judged(NamedTuple):
    """A grader's verdict on an output."""

    status: GradeStatus
    score: float | None
    recorded: VerdictRef | None = None
    """None where the conversation did not get so far"""


class JudgedOutput(Struct, frozen=True, eq=False):
    """An output with its verdicts. Equal ones are different keys of a mapping, which takes no time to find out."""

    verdicts: dict[int, Judged | None]
    """by the numbers of the graders that look at it; None is a verdict that is still to come"""
    status: GradeStatus
    score: float | None

    def score_of(self, grader: int) -> float | None:
        """Return the score that a grader gave; None where it gave none."""
        verdict = self.verdicts.get(grader)
        return None if verdict is None else verdict.score


_NOT_REACHED: Final = Judged("not_reached", None)


def judge_output(
    work: Work,
    places: Sequence[GraderPlace],
    key: str,
    ref: OutputRef,
    recorded: Mapping[str, VerdictRef],
    panel: Panel,
) -> JudgedOutput:
    """Join an output with the recorded verdicts of the graders that look at its row."""
    verdicts: dict[int, Judged | None] = dict.fromkeys(panel.graders, _NOT_REACHED)
    for number, verdict in work.verdicts(key, ref, recorded, panel):
        if verdict is None:
            verdicts[number] = None
            continue
        status = apply_threshold(work.slots[number].threshold, verdict.status, verdict.score)
        verdicts[number] = Judged(status, verdict.score, verdict)
    return JudgedOutput(verdicts, *combine_verdicts([places[number] for number in verdicts], [*verdicts.values()]))


def combine_verdicts(
    places: Sequence[GraderPlace], verdicts: Sequence[Judged | None]
) -> tuple[GradeStatus, float | None]:
    """Return status and score of a trial: passed when every grader passes, the weighted mean of those at the end.

    Graders of weight 0 are reported and decide nothing. A checkpoint that fails makes the trial fail, whatever the
    graders at the end say; a checkpoint that ended the conversation leaves it a score of 0, also one of weight 0. A
    verdict of None is still to come.
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


def level_measurements(work: Work, places: Sequence[GraderPlace], index: Index) -> None:
    """Make all verdicts of a grader measurements if some are: scores of a part of its scale would be a wrong mean."""
    for number, place in enumerate(places):
        if place.votes or not grader_class(place.block).one_scale:
            continue
        verdicts = index.verdicts
        keys = [work.grade_key(trial, ref, number) for trial, ref in index.outputs.items()]
        recorded = {key: verdicts[key] for key in keys if key is not None and key in verdicts}
        if any(verdict.counts is not None for verdict in recorded.values()):
            for key, verdict in recorded.items():
                verdicts[key] = as_measurement(verdict)


def as_measurement(verdict: VerdictRef) -> VerdictRef:
    """Return a verdict without its score; an error is neither."""
    return verdict if verdict.score is None else verdict._replace(status="skipped", score=None)


def grading_rules(spec: Eval) -> dict[str, Rule]:
    """Return the thresholds and weights of an eval's graders, which turn recorded scores into a report."""
    return {
        place.name: Rule(threshold(place.block), place.block.weight, place.combine if place.votes else None)
        for place in grader_places(spec)
    }
