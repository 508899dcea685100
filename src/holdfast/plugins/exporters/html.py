"""A run, or a comparison of runs, as one page to send.

The page of a run has the numbers with their intervals, and every trial with its transcript, grades and checkpoints. A
page needs nothing but itself: no request leaves it, and it can be read without scripts. What models say is text in it
and nothing else.
"""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup

from holdfast import GradedTrial, UsageError
from holdfast.pages.environment import environment, generate, read_asset
from holdfast.report.alignment import align
from holdfast.report.overview import run_overview
from holdfast.report.pairs import compare_runs, take_rows
from holdfast.report.timeline import trial_timeline
from holdfast.report.trial_counts import TrialsTally, count_trial
from holdfast.spec.template import RENDER_ERRORS, template
from holdfast.store.files import replacing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from holdfast import Pending, RunView
    from holdfast.report.alignment import SideBySide
    from holdfast.report.compare import ScoredRun
    from holdfast.report.timeline import Timeline
    from holdfast.spec.template import Template
    from holdfast.store.records import Grade

_PAGE: Final = 24_000_000
"""characters of trials on a page; beyond this, passed trials are left out first"""
_PREVIEW: Final = 160
"""characters of each line in the list of trials"""
_REMARKS: Final = 3
"""graders that did not pass, in the list of trials"""


def write_html(view: RunView, folder: Path) -> list[Path]:
    """Write `report.html`."""
    path = folder / "report.html"
    card = environment().get_template("card.html")
    counts: Counter[str] = Counter()
    tally = TrialsTally(view)
    cards: dict[int, Markup] = {}
    passed: list[int] = []
    space, full = _PAGE, False
    prompt = template(view.spec.prompt or "")
    for number, trial in enumerate(view.everything()):
        status = trial.status if isinstance(trial, GradedTrial) else "error"
        counts[status] += 1
        count_trial(tally, view.places, trial)
        if (full and status == "passed") or (space <= 0 and not passed):
            continue  # it would not be shown, and rendering a long conversation takes long
        timeline = trial_timeline(view, trial, contents=False)
        text = card.render(_card(trial, timeline, prompt), timeline=timeline, status=status)
        cards[number] = Markup(text)  # noqa: S704 - made by a template that escapes
        space -= len(text)
        if status == "passed":
            passed.append(number)
        while space < 0 and passed:  # people look for what did not pass
            space += len(cards.pop(passed.pop()))
            full = True  # from now on, add only what did not pass
    style, script = read_asset("style.css"), read_asset("report.js")
    page = generate(
        "report.html",
        page=run_overview(view, tally),
        gate=view.rundir.read_gate(),
        graders=view.graders,
        counts=counts,
        total=counts.total(),
        cards=list(cards.values()),
        missing=view.missing_rows,
        style=Markup(style),  # noqa: S704 - our own files
        script=Markup(script),  # noqa: S704
        style_hash=content_hash(style),
        script_hash=content_hash(script),
    )
    _write(path, page)
    return [path]


def _write(path: Path, page: Iterable[str]) -> None:
    with replacing(path) as file:
        for piece in page:
            file.write(piece.encode("utf-8", "backslashreplace"))


def _card(trial: GradedTrial | Pending, timeline: Timeline, prompt: Template) -> dict[str, Any]:
    """Return the variables for the card of a trial, in addition to its timeline."""
    if not isinstance(trial, GradedTrial):
        error = trial.error or "not run yet"
        return {
            "question": _first_line(_rendered(prompt, trial.fields)),
            "answer": "",
            "remarks": [{"grader": "", "status": "error", "text": _preview(error)}],
            "unsaid": 0,
            "error": error,
            "blame": "",
        }
    remarks = _remarks(trial.grades)
    question = next((message.text for message in _asked(timeline, trial) if message.role == "user"), "")
    return {
        "question": _first_line(question),
        "answer": _preview(trial.output.output),
        "remarks": remarks[:_REMARKS],
        "unsaid": len(remarks[_REMARKS:]),
        "error": None if trial.grades or trial.status != "error" else "not graded yet",
        "blame": "\n".join(grade.grader for grade in trial.grades if grade.status in ("failed", "error")),
    }


def _asked(timeline: Timeline, trial: GradedTrial) -> Iterator[Any]:
    """Yield the messages of the conversation; after a history, only the prompt and what follows."""
    return (message for message in timeline.messages if message.number > (trial.output.opening or 0))


def _preview(text: str) -> str:
    return " ".join(text[: 4 * _PREVIEW].split())[:_PREVIEW]


def _first_line(text: str) -> str:
    return _preview(next(filter(str.strip, text.splitlines()), ""))


def _rendered(prompt: Template, fields: dict[str, Any]) -> str:
    """Return the prompt of a trial that was not run; empty if the row does not fit it."""
    try:
        return prompt.render(fields)
    except RENDER_ERRORS:
        return ""


def _remarks(grades: list[Grade]) -> list[dict[str, str]]:
    """Return a line for each grader that did not pass; if all passed, one line with all their feedback."""
    wrong = [
        {"status": grade.status, "grader": grade.grader, "text": _preview(grade.feedback)}
        for grade in grades
        if grade.status in ("failed", "error")
    ]
    feedback = " · ".join(f"{grade.grader}: {_preview(grade.feedback)}" for grade in grades if grade.feedback)
    return wrong or [{"status": "passed", "grader": "", "text": _preview(feedback)}][: bool(feedback)]


def content_hash(text: str) -> str:
    """Return the hash by which a content security policy allows a script or a style."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


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
    _write(path, pieces)


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
