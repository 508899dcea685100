"""Notices about graders that checked nothing: they fail no trial, so nobody would notice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.data.panels import name_graders

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from holdfast.graders.build import GraderPlace
    from holdfast.store.metrics import GraderMetrics


def without_verdicts(places: Sequence[GraderPlace], graders: Mapping[str, GraderMetrics]) -> Iterator[str]:
    """Yield notices about graders that gave no score, although there were outputs and no errors."""
    silent = [
        place.name
        for place in places
        if _only(graders[place.name], "skipped") and not getattr(place.block, "measure", False)
    ]
    if silent:
        have = "it has" if len(silent) == 1 else "they have"
        yield f"{name_graders(silent)} skipped every output: {have} checked nothing"
    ahead = [place.name for place in places if place.turn is not None and _only(graders[place.name], "not_reached")]
    if ahead:
        yield f"{name_graders(ahead)} checked nothing: no conversation reached that turn"


def _only(counts: GraderMetrics, status: str) -> bool:
    others = {"n", "skipped", "not_reached", "errors", "ungraded"} - {status}
    return bool(getattr(counts, status)) and not any(getattr(counts, other) for other in others)
