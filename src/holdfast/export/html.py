"""A run as one page: the numbers with their intervals, and every trial with its transcript, grades and checkpoints.

The page needs nothing but itself: no request leaves it, and it can be read without scripts. What models say is text in
it and nothing else.
"""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from holdfast.display.format import dollars, duration, share
from holdfast.report.run_view import GradedTrial
from holdfast.spec.template import RENDER_ERRORS, template
from holdfast.store.durable import replacing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.report.run_view import Pending, RunView
    from holdfast.spec.template import Template
    from holdfast.store.records import Grade, Output

_PAGE: Final = 24_000_000
"""characters of trials on a page; beyond, those that passed are left out first"""
_TEXT: Final = 20_000
"""characters shown of one text"""
_PREVIEW: Final = 160
"""characters of each line in the list of trials"""
_REMARKS: Final = 3
"""graders that did not pass, in the list of trials"""


def write_html(view: RunView, folder: Path) -> list[Path]:
    """Write `report.html`."""
    path = folder / "report.html"
    environment = _environment()
    card = environment.get_template("trial.html")
    counts: Counter[str] = Counter()
    cards: dict[int, Markup] = {}
    passed: list[int] = []
    space = _PAGE
    prompt = template(view.spec.prompt)
    for number, trial in enumerate(view.everything()):
        shown = _shown(trial, prompt)
        counts[shown["status"]] += 1
        if space <= 0 and (shown["status"] == "passed" or not passed):
            continue
        text = card.render(shown, several=view.manifest.trials > 1)
        cards[number] = Markup(text)  # noqa: S704 - made by a template that escapes
        space -= len(text)
        if shown["status"] == "passed":
            passed.append(number)
        while space < 0 and passed:  # what did not pass is what people look for
            space += len(cards.pop(passed.pop()))
    metrics = view.metrics
    rows = list(metrics.graders.items()) if metrics else []
    if metrics and metrics.overall and len(rows) > 1:
        rows.append(("overall", metrics.overall))
    ks = sorted({k for _, values in rows for k in values.pass_at})
    style, script = (files("holdfast.export").joinpath("page", name).read_text() for name in ("page.css", "page.js"))
    page = environment.get_template("page.html").generate(
        manifest=view.manifest,
        configuration=_pretty(view.manifest.eval),
        metrics=metrics,
        rows=rows,
        by=metrics.by if metrics and metrics.graders else {},
        passes=[ks[0], ks[-1]] if len(ks) > 1 else [],
        extra=[key for key in ("skipped", "errors", "not_reached") if any(getattr(values, key) for _, values in rows)],
        graders=view.graders,
        counts=counts,
        total=counts.total(),
        cards=list(cards.values()),
        missing=view.missing_rows,
        folder="/".join(view.rundir.path.resolve().parts[-2:]),
        style=Markup(style),  # noqa: S704 - our own files
        script=Markup(script),  # noqa: S704
        style_hash=_hash(style),
        script_hash=_hash(script),
    )
    with replacing(path) as file:
        for piece in page:
            file.write(piece.encode("utf-8", "backslashreplace"))
    return [path]


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(str(files("holdfast.export").joinpath("page"))),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"share": share, "dollars": dollars, "duration": duration, "cut": _cut, "pretty": _pretty}
    return environment


def _shown(trial: GradedTrial | Pending, prompt: Template) -> dict[str, Any]:
    """Return the variables for the template of a trial."""
    if not isinstance(trial, GradedTrial):
        error = trial.error or "not run yet"
        nothing: dict[str, Any] = {"score": None, "grades": [], "blocks": [], "fields": {}, "facts": [], "blame": ""}
        return nothing | {
            "sample": trial.sample,
            "trial": trial.trial,
            "status": "error",
            "question": _first_line(_rendered(prompt, trial.fields)),
            "answer": "",
            "remarks": [{"grader": "", "status": "error", "text": _preview(error)}],
            "unsaid": 0,
            "error": error,
        }
    output = trial.output
    remarks = _remarks(trial.grades)
    return {
        "sample": output.sample,
        "trial": output.trial,
        "status": trial.status,
        "score": trial.score,
        "question": _first_line(_message({"content": output.prompt})["content"]),
        "answer": _preview(output.output),
        "remarks": remarks[:_REMARKS],
        "unsaid": len(remarks[_REMARKS:]),
        "error": None if trial.grades or trial.status != "error" else "not graded yet",
        "blame": "\n".join(grade.grader for grade in trial.grades if grade.status in ("failed", "error")),
        "grades": [grade for grade in trial.grades if grade.turn is None],
        "blocks": list(_blocks(output, trial.grades)),
        "fields": trial.fields,
        "facts": list(_facts(output)),
    }


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


def _blocks(output: Output, grades: list[Grade]) -> Iterator[dict[str, Any]]:
    """The conversation turn by turn, each with the checkpoints after it."""
    ends = [mark.end for mark in output.marks] if output.marks else [len(output.messages)]
    start = 0
    for turn, end in enumerate(ends, 1):
        checks = [grade for grade in grades if grade.turn == turn]
        yield {
            "turn": turn if len(ends) > 1 else None,
            "messages": [*map(_message, output.messages[start:end]), *_listed(output, turn)],
            "checks": checks,
        }
        start = end
    if start < len(output.messages):
        yield {"turn": None, "messages": [_message(message) for message in output.messages[start:]], "checks": []}


def _listed(output: Output, turn: int) -> Iterator[dict[str, Any]]:
    """The tool calls of a turn, where its messages do not hold them all."""
    calls = [call for call in output.calls or () if call.turn == turn and call.name]
    if calls:
        shown = [_call({"function": {"name": call.name, "arguments": call.arguments}}) for call in calls]
        yield {"role": "all tool calls", "name": None, "content": "", "calls": shown}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):  # parts, as the chat API has them; what is not text is named
        parts = [part for part in content if isinstance(part, dict)]
        content = "\n".join(str(part.get("text", f"[{part.get('type', 'part')}]")) for part in parts)
    elif content is not None and not isinstance(content, str):
        content = _pretty(content)
    calls = message.get("tool_calls")
    name = message.get("name") or message.get("tool_call_id")
    return {
        "role": str(message.get("role") or "?"),
        "name": str(name) if name else None,
        "content": content or "",
        "calls": [_call(call) for call in calls] if isinstance(calls, list) else [],
    }


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return _pretty(call)
    arguments = function.get("arguments")
    return f"{function.get('name')}({arguments if isinstance(arguments, str) else _pretty(arguments)})"


def _facts(output: Output) -> Iterator[str]:
    usage = output.usage
    yield f"stop: {output.stop}"
    yield duration(output.timing.seconds)
    if usage.input_tokens is not None and usage.output_tokens is not None:
        yield f"{usage.input_tokens:,} + {usage.output_tokens:,} tokens"
    if usage.cost:
        yield dollars(usage.cost)
    if output.attempt > 1:
        yield f"attempt {output.attempt}"


def _cut(text: Any) -> str:
    """Shorten a text, with the number of characters that are not shown."""
    whole = text if isinstance(text, str) else _pretty(text)
    hidden = len(whole) - _TEXT
    return whole if hidden <= 0 else f"{whole[:_TEXT]}\n… {hidden:,} characters more in outputs.jsonl"


def _pretty(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _hash(text: str) -> str:
    """As a content security policy names what may run."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
