"""A comparison of runs as one page to send: it needs nothing but itself, no script, and prints."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from markupsafe import Markup

from holdfast.errors import UsageError
from holdfast.export.html import content_hash
from holdfast.pages.environment import generate, read_asset
from holdfast.report.alignment import align
from holdfast.report.pairs import compare_runs, take_rows
from holdfast.report.timeline import trial_timeline
from holdfast.store.durable import replacing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from holdfast.report.alignment import SideBySide
    from holdfast.report.compare import ScoredRun
    from holdfast.report.run_view import RunView

_ROWS: Final = 500
"""samples on the page"""
_MOST_TEXT: Final = 8_000_000
"""characters of conversations on the page"""


def write_comparison(views: Sequence[RunView], scored: Sequence[ScoredRun], path: Path) -> None:
    """Write the comparison of the first run with each of the others; of two runs, with both conversations of flips."""
    comparison = compare_runs(scored)
    for pair in comparison.pairs:
        if pair.problem:
            raise UsageError(pair.problem, remedy=pair.hint)
    style = read_asset("style.css") + read_asset("compare.css")
    pieces = generate(
        "comparison_report.html",
        page=take_rows(comparison, [partial(view.trial, number=1) for view in views], 0, _ROWS),
        conversations=_conversations(views),
        style=Markup(style),  # noqa: S704 - our own files
        style_hash=content_hash(style),
    )
    with replacing(path) as file:
        for piece in pieces:
            file.write(piece.encode("utf-8", "backslashreplace"))


def _conversations(views: Sequence[RunView]) -> Callable[[str], SideBySide | None]:
    """Return a function that aligns both conversations about a sample, until the page has enough of them."""
    room = _MOST_TEXT

    def aligned(sample: str) -> SideBySide | None:
        nonlocal room
        trials = [view.trial(sample, 1) for view in views]
        timelines = [
            trial_timeline(view, trial, contents=False)
            for view, trial in zip(views, trials, strict=True)
            if trial is not None
        ]
        length = sum(len(message.text) for timeline in timelines for message in timeline.messages)
        if len(timelines) < 2 or length > room:
            return None
        room -= length
        return align(*timelines)

    return aligned
