"""A run as one page: the numbers with their intervals, and every trial with its transcript, grades and checkpoints.

The page needs nothing but itself: no request leaves it, and it can be read without scripts. What models say is text in
it and nothing else.
"""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup

from holdfast.pages.environment import environment, generate, read_asset
from holdfast.report.overview import run_overview
from holdfast.report.run_view import GradedTrial
from holdfast.report.timeline import trial_timeline
from holdfast.report.trial_counts import TrialsTally, count_trial
from holdfast.spec.template import RENDER_ERRORS, template
from holdfast.store.durable import replacing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.report.run_view import Pending, RunView
    from holdfast.report.timeline import Timeline
    from holdfast.spec.template import Template
    from holdfast.store.records import Grade

_PAGE: Final = 24_000_000
"""characters of trials on a page; beyond, those that passed are left out first"""
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
            continue  # rendering it would be wasted, and takes long for a long conversation
        timeline = trial_timeline(view, trial, contents=False)
        text = card.render(_card(trial, timeline, prompt), timeline=timeline, status=status)
        cards[number] = Markup(text)  # noqa: S704 - made by a template that escapes
        space -= len(text)
        if status == "passed":
            passed.append(number)
        while space < 0 and passed:  # what did not pass is what people look for
            space += len(cards.pop(passed.pop()))
            full = True  # from here on, only what did not pass is added
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
    with replacing(path) as file:
        for piece in page:
            file.write(piece.encode("utf-8", "backslashreplace"))
    return [path]


def _card(trial: GradedTrial | Pending, timeline: Timeline, prompt: Template) -> dict[str, Any]:
    """Return the variables for the card of a trial, beside its timeline."""
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
    """Yield the messages of the conversation; with a history only those from the prompt on."""
    return (message for message in timeline.messages if message.number > (trial.output.opening or 0))


def _preview(text: str) -> str:
    return " ".join(text[: 4 * _PREVIEW].split())[:_PREVIEW]


def _first_line(text: str) -> str:
    return _preview(next(filter(str.strip, text.splitlines()), ""))


def _rendered(prompt: Template, fields: dict[str, Any]) -> str:
    """Return the prompt of a trial that was not run; empty where the row does not fit it."""
    try:
        return prompt.render(fields)
    except RENDER_ERRORS:
        return ""


def _remarks(grades: list[Grade]) -> list[dict[str, str]]:
    """Return a line for each grader that did not pass; where all passed, one line with everything they say."""
    wrong = [
        {"status": grade.status, "grader": grade.grader, "text": _preview(grade.feedback)}
        for grade in grades
        if grade.status in ("failed", "error")
    ]
    feedback = " · ".join(f"{grade.grader}: {_preview(grade.feedback)}" for grade in grades if grade.feedback)
    return wrong or [{"status": "passed", "grader": "", "text": _preview(feedback)}][: bool(feedback)]


def content_hash(text: str) -> str:
    """As a content security policy names what may run."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
