"""Notices about what a score does not show: partial answers, skipped outputs, graders that saw nothing or too much."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.data.panels import name_graders
from holdfast.store.answers import describe_answers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from holdfast.graders.build import GraderPlace
    from holdfast.spec.eval import Eval
    from holdfast.store.metrics import GraderMetrics


def account_notices(
    kinds: Mapping[str, int], places: Sequence[GraderPlace], graders: Mapping[str, GraderMetrics]
) -> Iterator[str]:
    """Yield notices about answers that are not whole, from counts by kind, and about verdicts that graders skipped."""
    if (described := describe_answers(kinds)) is not None:
        yield described
    for name, counts in graders.items():
        if counts.set_score is not None:
            yield f"{name_graders([name])} gives {counts.set_score:.4g} for all outputs together"
        if "measured" in counts.totals and not counts.measure:
            yield (
                f"{name_graders([name])} has no score: some of its values are labels, or are not between 0 and 1, so "
                f"all are kept as measurements. Give it its scale, as in graders.{name}.range=[1,5], or "
                f"graders.{name}.measure=true"
            )
    declining = {
        name: counts for name, counts in graders.items() if counts.declined and "measured" not in counts.totals
    }
    silent = [name for name, counts in declining.items() if not _has_verdicts(counts)]
    if silent:
        have = "it has" if len(silent) == 1 else "they have"
        yield f"{name_graders(silent)} skipped every output: {have} checked nothing"
    for name, counts in declining.items():
        if name not in silent:
            asked = counts.passed + counts.failed + counts.declined + counts.errors
            yield f"{name} skipped {counts.declined:,} of {asked:,} trials: they have no verdict and no score"
    ahead = [
        place.name
        for place in places
        if place.turn is not None
        and (counts := graders[place.name]).not_reached
        and not (counts.errors or _has_verdicts(counts))
    ]
    if ahead:
        yield f"{name_graders(ahead)} checked nothing: no conversation reached that turn"


def with_thoughts(spec: Eval, count: int, outputs: int) -> Iterator[str]:
    """Yield a notice about replies in which graders see the model's reasoning."""
    if count and (spec.graders or spec.checkpoints) and getattr(spec.target, "strip_reasoning", None) is None:
        is_model = hasattr(spec.target, "strip_reasoning")
        remedy = "set target.strip_reasoning: true" if is_model else "return the answer without it"
        yield f"{count} of {outputs} replies contain </think>: graders see the model's reasoning; {remedy}"


def _has_verdicts(counts: GraderMetrics) -> bool:
    """Return True if a grader gave a verdict, or may still give one."""
    return bool(counts.n or counts.passed or counts.failed or counts.ungraded)
