"""Notices about graders that checked nothing: they fail no trial, so nobody would notice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from holdfast.data.panels import Panels
    from holdfast.graders.build import GraderPlace
    from holdfast.spec.load import Eval
    from holdfast.store.metrics import GraderMetrics

_NAMED: Final = 5


def without_rows(spec: Eval, places: Sequence[GraderPlace], panels: Panels) -> list[str]:
    """What is known as soon as the dataset was read: whose `where` is true for no row."""
    names = [places[number].name for number, rows in enumerate(panels.rows()) if not rows]
    block = spec.dataset
    chosen = block is not None and any((block.limit, block.offset, block.where, block.ids, block.tags))
    rows = "none of the selected rows" if chosen else "no row"
    verb, whose = ("applies", "its") if len(names) == 1 else ("apply", "their")
    return [f"{_named(names)} {verb} to {rows}: check {whose} `where`"] if names else []


def without_verdicts(places: Sequence[GraderPlace], graders: Mapping[str, GraderMetrics]) -> Iterator[str]:
    """Yield notices about graders that gave no score, although there were outputs and no errors."""
    silent = [
        place.name
        for place in places
        if _only(graders[place.name], "skipped") and not getattr(place.block, "measure", False)
    ]
    if silent:
        yield f"{_named(silent)} skipped every output: {'it has' if len(silent) == 1 else 'they have'} checked nothing"
    ahead = [place.name for place in places if place.turn is not None and _only(graders[place.name], "not_reached")]
    if ahead:
        yield f"{_named(ahead)} checked nothing: no conversation got so far"


def _only(counts: GraderMetrics, status: str) -> bool:
    others = {"n", "skipped", "not_reached", "errors", "ungraded"} - {status}
    return bool(getattr(counts, status)) and not any(getattr(counts, other) for other in others)


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_NAMED])
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return f"grader{'' if len(names) == 1 else 's'} {shown}{more}"
