"""A run and its trials in the terminal: which trials are shown, and each conversation turn by turn.

Text of models, tools and datasets stays text in the terminal: control characters are spelled out.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from textwrap import indent
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from holdfast.display.format import byte_count, dollars, duration, latency, share
from holdfast.display.grid import Column, fit_table
from holdfast.display.terminal import printable
from holdfast.errors import UsageError
from holdfast.plan.changes import format_count
from holdfast.report.chat import as_text
from holdfast.report.run_view import GradedTrial
from holdfast.report.table import draw_metrics
from holdfast.report.timeline import trial_status

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import RenderableType

    from holdfast.report.chat import ChatMessage, MessageImage, ToolUse
    from holdfast.report.file_changes import FileChange
    from holdfast.report.run_view import Pending, RunView
    from holdfast.report.timeline import (
        CheckpointBand,
        FailedAttempt,
        GraderVerdict,
        Timeline,
        TimelineTurn,
    )
    from holdfast.store.metrics import ResultGrade
    from holdfast.store.records import Grade

    Trial = GradedTrial | Pending

_MARKS: Final = {
    "passed": ("✓", "green"),
    "failed": ("✗", "red"),
    "error": ("!", "yellow"),
    "uncertain": ("?", "yellow"),
    "not_reached": ("○", "bright_black"),
    "pending": ("…", "bright_black"),
    "skipped": ("–", "bright_black"),
}
"""shape and colour of each status"""
_ROLES: Final = {"user": "bold cyan", "assistant": "bold green", "system": "bold bright_black"}
_FILES: Final = {"added": "+", "changed": "~", "removed": "-"}
_MOST_TEXT: Final = 20_000
"""characters of one text"""
_MOST_LINES: Final = 12
"""lines of the difference between two versions of a file"""
_LONG_LINE: Final = 300
"""characters of a line of a question or an answer in the short form"""
_ONE_LINE: Final = 60
"""characters up to which arguments, results and values are on the same line as their name"""


class Writer:
    """Draws pieces of a trial. Without a width, as in a pipe, long lines stay whole."""

    def __init__(self, *, terminal: bool) -> None:
        self._terminal = terminal

    def block(self, text: str, margin: int, style: str = "") -> RenderableType:
        """Draw somebody else's text with a margin."""
        shown = printable(text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT]).expandtabs(4)  # rich would drop some
        if hidden := len(text) - _MOST_TEXT:
            shown += f"\n… {hidden:,} characters more; --json has all of it" if hidden > 0 else ""
        if not self._terminal:
            return Text(indent(shown, " " * margin, lambda _: True), style)
        return Padding(Text(shown, style), (0, 0, 0, margin))

    def labelled(self, label: str, text: str, style: str = "") -> RenderableType:
        """Draw a text after a mark, with all its lines aligned."""
        if not self._terminal:
            return Text(f"  {label} " + printable(text).replace("\n", "\n    "), style)
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(width=3)
        grid.add_column()
        grid.add_row(Text(f"  {label}", style), Text(printable(text).expandtabs(4), style))
        return grid

    def rule(self, *parts: tuple[str, str], character: str = "─") -> RenderableType:
        """Draw a line across the screen with a title."""
        title = Text(no_wrap=True, overflow="ellipsis")
        for text, style in parts:
            title.append(text, style)
        if not self._terminal:
            return Text.assemble(character * 2 + " ", title, " " + character * 2)
        return Rule(
            title, align="left", characters=character, style=parts[0][1] if character == "━" else "bright_black"
        )


def mark(status: str) -> tuple[str, str]:
    """Return the shape and word of a status, and its colour."""
    shape, colour = _MARKS[status]
    return f"{shape} {status.replace('_', ' ')}", colour


def draw_timeline(timeline: Timeline, write: Writer) -> Iterator[RenderableType]:
    """Draw a trial from its first message to its last verdict."""
    yield from _heading(timeline)
    if timeline.facts.error:
        yield write.block(timeline.facts.error, 0, "yellow")
    yield from _complaints(timeline, write, 1)
    for message in timeline.opening:
        yield from _message(message, write)
    for turn in timeline.turns:
        yield from _turn(turn, write, alone=len(timeline.turns) == 1)
    if timeline.graders:
        yield write.rule(("graders", "bold"))
        for verdict in timeline.graders:
            yield from draw_verdict(verdict, write)
    if timeline.fields:
        yield write.rule(("row", "bold"))
        for name, value in timeline.fields.items():
            yield from _named(name, value, write)
    if timeline.state is not None:
        yield from _named("state", timeline.state, write)
    if (line := timeline.line) is not None:
        yield Text(f"{line.journal}, at byte {line.offset:,}", "bright_black")


def _heading(timeline: Timeline) -> Iterator[RenderableType]:
    facts = timeline.facts
    word, colour = mark(facts.status)
    number = f" #{timeline.trial} of {timeline.trials}" if timeline.trials > 1 else ""
    head = Text.assemble((printable(timeline.sample, ""), "bold"), f"{number}  ", (word, f"bold {colour}"))
    if facts.score is not None:
        head.append(f"  score {share(facts.score)}")
    yield head
    yield Text(printable(f"{timeline.eval} · {timeline.target} · {timeline.run}", ""), "bright_black")
    tokens = f"{facts.input_tokens:,} + {facts.output_tokens or 0:,} tokens" if facts.input_tokens else ""
    parts = [
        format_count(facts.turns, "turn") if facts.turns > 1 else "",
        f"answer: {facts.answer}" if facts.answer not in ("", "whole") else "",
        f"stop: {printable(facts.stop, '')}" if facts.stop else "",
        tokens,
        dollars(facts.cost) if facts.cost else "",
        f"judges {dollars(facts.judge_cost)}" if facts.judge_cost else "",
        "" if facts.seconds is None else latency(facts.seconds),
        "" if facts.first_token is None else f"first token after {latency(facts.first_token)}",
        f"attempt {facts.attempt}" if facts.attempt > 1 else "",
        f"output of {printable(facts.source, '')}" if facts.source else "",
    ]
    yield Text(" · ".join(part for part in parts if part), "bright_black")
    for detail in filter(None, (facts.detail, facts.partial)):
        yield Text(f"  {printable(detail, '')}", "bright_black")


def _turn(turn: TimelineTurn, write: Writer, *, alone: bool) -> Iterator[RenderableType]:
    """Draw a turn; the only turn of a trial has no title."""
    asked = turn.state != "not_asked"
    title = {"answered": "", "running": " · no reply yet", "not_asked": " · never asked"}[turn.state]
    facts = [
        "" if turn.seconds is None else latency(turn.seconds),
        "" if turn.tokens is None else f"{turn.tokens:,} tokens",
        dollars(turn.cost) if turn.cost else "",
    ]
    note = " · ".join(fact for fact in facts if fact)
    if not alone:
        style = "bold" if asked else "bright_black"
        yield write.rule((f"turn {turn.number}{title}", style), (f"  {note}" if note else "", "bright_black"))
    for message in turn.messages:
        yield from _message(message, write, quiet=not asked)
    for use in turn.listed:
        yield from _tool_use(use, write)
    if turn.unlisted_calls:
        yield Text("  the target does not report its tool calls", "bright_black")
    if turn.hidden_after:
        yield _hidden(turn.hidden_after)
    for attempt in turn.attempts:
        yield from _attempt(attempt, "attempt", write)
    for change in turn.files:
        if change.change in _FILES:
            yield from _file(change, write)
    if turn.checkpoint is not None:
        yield from _band(turn.checkpoint, write)


def _message(message: ChatMessage, write: Writer, *, quiet: bool = False) -> Iterator[RenderableType]:
    if message.hidden_before:
        yield _hidden(message.hidden_before)
    style = "bright_black" if quiet else ""
    name = f" {printable(message.name, '')}" if message.name else ""
    yield Text(f"{printable(message.role, '')}{name}", style or _ROLES.get(message.role, "bold"))
    if message.reasoning:
        yield write.block(message.reasoning, 2, "italic bright_black")
    if message.text:
        yield write.block(message.text, 2, style)
    for image in message.images:
        yield Text(f"  [{_image(image)}]", "magenta")
    for use in message.calls:
        yield from _tool_use(use, write)
    for name, value in message.others.items():
        yield from _named(name, value, write, "bright_black")
    if not (message.text or message.images or message.calls or message.others):
        yield Text("  (empty)", "bright_black")


def _image(image: MessageImage) -> str:
    """Name an image: its address, or if it is inside the message, its kind and size."""
    kind, _, data = image.address.partition(",")
    if not kind.startswith("data:"):
        return f"image {printable(image.address[:500], '')}"
    return f"image {printable(kind[5:].partition(';')[0], '')}, {byte_count(len(data) * 3 // 4)}"


def _tool_use(use: ToolUse, write: Writer) -> Iterator[RenderableType]:
    yield from _beside(f"  ▸ {printable(use.name, '')}", "bold magenta", use.arguments, write)
    if use.result is not None:
        yield from _beside("    ←", "magenta", use.result, write)


def _beside(label: str, style: str, text: str, write: Writer) -> Iterator[RenderableType]:
    """Draw a short text on the line of its label, and a long one below it."""
    flat = _flat(text)
    if len(flat) <= _ONE_LINE:
        yield Text.assemble((label, style), " ", printable(flat, ""))
        return
    yield Text(label, style)
    yield write.block(text, len(label) - len(label.lstrip()) + 2)


def _flat(text: str) -> str:
    """Put a text on one line; JSON without its indentation."""
    if text.startswith(("{", "[")) and len(text) <= 10 * _ONE_LINE:
        with suppress(msgspec.DecodeError):
            return msgspec.json.format(text, indent=0)
    return " ".join(text.split())


def _named(name: str, value: Any, write: Writer, style: str = "") -> Iterator[RenderableType]:
    yield from _beside(f"  {printable(name, '')}:", style or "cyan", as_text(value), write)


def _attempt(attempt: FailedAttempt, what: str, write: Writer) -> Iterator[RenderableType]:
    status = f" (HTTP {attempt.status})" if attempt.status else ""
    cause = f"{attempt.kind}{status}: {' '.join(attempt.message.split())}"
    yield write.block(f"! {what} {attempt.attempt} failed after {duration(attempt.seconds)}: {cause}", 2, "yellow")
    if attempt.traceback:
        yield write.block(attempt.traceback, 6, "bright_black")


def _file(change: FileChange, write: Writer) -> Iterator[RenderableType]:
    colour = {"added": "green", "changed": "yellow", "removed": "red"}[change.change]
    link = f" → {printable(change.link, '')}" if change.link else ""
    yield Text.assemble(
        "  ",
        (_FILES[change.change], colour),
        f" {printable(change.path, '')}{link}",
        (f"  {change.change}", "bright_black"),
    )
    lines = change.difference.splitlines()
    for line in lines[:_MOST_LINES]:
        yield write.block(
            line, 6, "green" if line.startswith("+") else "red" if line.startswith("-") else "bright_black"
        )
    if len(lines) > _MOST_LINES:
        yield Text(f"      … {format_count(len(lines) - _MOST_LINES, 'line')} more", "bright_black")


def _band(band: CheckpointBand, write: Writer) -> Iterator[RenderableType]:
    word, colour = mark(band.state)
    yield write.rule((f"checkpoint after turn {band.turn} · {word}", f"bold {colour}"), character="━")
    for verdict in band.verdicts:
        yield from draw_verdict(verdict, write)
    if band.ended_here:
        yield Text("  ■ the conversation ended here", f"bold {colour}")


def draw_verdict(verdict: GraderVerdict, write: Writer) -> Iterator[RenderableType]:
    """Draw a grader's verdict with its feedback, details and failed attempts."""
    word, colour = mark(verdict.status)
    score = "" if verdict.score is None else f"  {share(verdict.score)}"
    facts = [
        f"threshold {verdict.threshold:g}" if verdict.threshold not in (None, 1.0) else "",
        f"weight {verdict.weight:g}" if verdict.weight != 1 else "",
        printable(verdict.judge, ""),
        dollars(verdict.usage.cost) if verdict.usage is not None and verdict.usage.cost else "",
        f"verdict of {printable(verdict.source, '')}" if verdict.source else "",
    ]
    note = " · ".join(fact for fact in facts if fact)
    yield Text.assemble(
        (f"  {word}", colour),
        "  ",
        (printable(verdict.grader, ""), "bold"),
        score,
        (f"  {note}" if note else "", "bright_black"),
    )
    for text, style in ((verdict.feedback, ""), (verdict.reply, "italic")):
        if text:
            yield write.block(text, 4, style)
    details = (
        verdict.details
        if isinstance(verdict.details, dict)
        else {}
        if verdict.details is None
        else {"details": verdict.details}
    )
    for name, value in details.items():
        yield from _named(f"  {name}", value, write, "bright_black")
    for attempt in verdict.attempts:
        yield from _attempt(attempt, "attempt", write)


def _hidden(count: int) -> RenderableType:
    return Text(f"  … {format_count(count, 'message')} not shown", "bright_black")


def draw_run(view: RunView, chosen: Chosen, width: int) -> Iterator[RenderableType]:
    """Draw a run as a whole: its numbers, or its progress."""
    manifest = view.manifest
    if view.metrics is not None:
        yield from draw_metrics(view.metrics, width)
    else:
        title = printable(f"{manifest.name} · {manifest.target} · not finished", "")
        statuses = [status for status in _MARKS if any(counts[status] for counts in chosen.verdicts.values())]
        columns = [Column("grader", name=True), *(Column(status.replace("_", " ")) for status in statuses)]
        rows = [
            (printable(name, ""), *(f"{counts[status]:,}" for status in statuses))
            for name, counts in chosen.verdicts.items()
        ]
        yield fit_table(columns, rows, width, title=title) if rows else Text(title, "bold")
    words = ((chosen.counts[status], mark(status)) for status in _MARKS)
    parts = [Text(f"{count:,} {word}", colour) for count, (word, colour) in words if count]
    yield Text.assemble(f"{format_count(chosen.counts.total(), 'trial')}: ", Text(" · ").join(parts))
    yield from _gate(view)
    yield Text(f"run: {view.rundir.path}", no_wrap=True, overflow="ignore")


def _gate(view: RunView) -> Iterator[RenderableType]:
    """Draw the outcome of a finished run's gate."""
    gate = view.rundir.read_gate()
    if gate is None:
        return
    if gate.passed:
        yield Text("gate passed", "green")
    for missed in gate.missed:
        yield Text(printable(f"gate failed: {missed}", ""), "bold red")
    for warning in gate.warnings:
        yield Text(printable(f"gate: {warning}", ""), "yellow")


def draw_failure(timeline: Timeline, write: Writer, lines: int) -> Iterator[RenderableType]:
    """Draw a trial in short: the question, the answer, and the verdicts that did not pass."""
    facts = timeline.facts
    word, colour = mark(facts.status)
    number = f"/{timeline.trial}" if timeline.trials > 1 else ""
    score = "" if facts.score is None else f"  {share(facts.score)}"
    yield Text()
    answer = "" if facts.answer in ("", "whole") else f"  answer {facts.answer}"
    yield Text.assemble((word, colour), "  ", (f"{printable(timeline.sample, '')}{number}", "bold"), score, answer)
    for text, label, style in ((_question(timeline), "?", "bright_black"), (_answer(timeline), "→", "")):
        if text:
            yield write.labelled(label, _first_lines(text, lines), style)
    if facts.error:
        yield write.block(_first_lines(facts.error, lines), 4, "yellow")
    yield from _complaints(timeline, write, lines)


def _complaints(timeline: Timeline, write: Writer, lines: int) -> Iterator[RenderableType]:
    """Draw the verdicts that did not pass, each in at most this many lines."""
    verdicts = [verdict for turn in timeline.turns if turn.checkpoint for verdict in turn.checkpoint.verdicts]
    for verdict in (*verdicts, *timeline.graders):
        if verdict.status in ("failed", "error") or (verdict.status == "pending" and verdict.attempts):
            feedback = verdict.feedback or (verdict.attempts[-1].message if verdict.attempts else "")
            shape, colour = _MARKS["error" if verdict.status == "pending" else verdict.status]
            words = _first_lines(feedback, lines)
            yield write.labelled(shape, f"{verdict.name}{': ' if words else ''}{words}", colour)


def _question(timeline: Timeline) -> str:
    return next((message.text for turn in timeline.turns for message in turn.messages if message.role == "user"), "")


def _answer(timeline: Timeline) -> str:
    """Return the text of the last reply; empty if there is no reply, as with likelihoods."""
    replies = [message.text for turn in timeline.turns for message in turn.messages if message.role == "assistant"]
    return replies[-1] if replies else ""


def _first_lines(text: str, most: int) -> str:
    """Return the first lines of a text that are not blank, with the number of the others."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    shown = [line if len(line) <= _LONG_LINE else f"{line[: _LONG_LINE - 1]}…" for line in lines[:most]]
    rest = len(lines) - most
    return "\n".join([*shown, *([f"… {format_count(rest, 'line')} more"] if rest > 0 else [])])


_FEW: Final = 50
"""trials that are read one by one rather than in a pass over the whole run"""
_LISTED: Final = 10
"""ids that an error lists"""


@dataclass(frozen=True)
class Criteria:
    """Statuses that trials must have, or that the verdicts of one grader must have."""

    statuses: tuple[str, ...] = ("failed", "error", "uncertain")
    graders: tuple[str, ...] = ()
    """names as metrics have them, of which one must match; empty: the trial as a whole"""
    answer: str | None = None
    """class that the answer must have"""

    def __call__(self, status: str, answer: str | None, verdicts: Mapping[str, Grade | ResultGrade]) -> bool:
        """Return True if a trial is wanted. A missing verdict counts as an error if the trial has an error."""
        if self.answer is not None and answer != self.answer:
            return False
        if not self.graders:
            return status in self.statuses
        missing = "error" if status == "error" else ""
        return any((verdicts[name].status if name in verdicts else missing) in self.statuses for name in self.graders)


def find_graders(view: RunView, name: str) -> tuple[str, ...]:
    """Return the graders of a name. The name of a checkpoint's grader may omit the turn."""
    names = tuple(each for each in view.graders if each == name or each.endswith(f"/{name}"))
    if not names:
        raise UsageError(f"no grader {name!r}", remedy=f"The run has: {', '.join(view.graders) or 'none'}.")
    return names


class Chosen:
    """The wanted trials of a run, and the number of trials by status."""

    def __init__(self, view: RunView, criteria: Criteria) -> None:
        self._view = view
        self.counts: Counter[str] = Counter()
        """trials by status"""
        self.verdicts: dict[str, Counter[str]] = {name: Counter() for name in view.graders}
        """verdicts by grader and status, only of an unfinished run: finished runs have them in their metrics"""
        self._names: list[tuple[str, int]] = []
        for sample, number, status, answer, verdicts in _statuses(view):
            self.counts[status] += 1
            if view.metrics is None:
                for name, verdict in verdicts.items():
                    self.verdicts[name][verdict.status] += 1
            if criteria(status, answer, verdicts):
                self._names.append((sample, number))

    def __len__(self) -> int:
        return len(self._names)

    def trials(self, most: int | None = None) -> Iterator[Trial]:
        """Yield the first wanted trials, at most `most`."""
        names = self._names[:most]
        if len(names) <= _FEW:
            trials = (self._view.trial(sample, number) for sample, number in names)
            yield from (trial for trial in trials if trial is not None)
            return
        left = set(names)
        for trial in self._view.everything():
            if _name(trial) in left:
                yield trial
                left.remove(_name(trial))
                if not left:
                    return


def _statuses(view: RunView) -> Iterator[tuple[str, int, str, str | None, Mapping[str, Grade | ResultGrade]]]:
    """Yield sample, trial, status, answer class and verdicts: as reported if the run is finished, else as of now."""
    if view.metrics is not None:
        for result in view.rundir.iterate_results():
            yield result.sample, result.trial, result.status, result.answer, result.grades
        return
    for trial in view.everything():
        grades = trial.grades if isinstance(trial, GradedTrial) else []
        key = trial.output.key if isinstance(trial, GradedTrial) else trial.key
        status = trial_status(trial, view.failed_attempts(key))
        answer = trial.output.answer if isinstance(trial, GradedTrial) else None
        yield *_name(trial), status, answer, {grade.grader: grade for grade in grades}


def _name(trial: Trial) -> tuple[str, int]:
    of = trial.output if isinstance(trial, GradedTrial) else trial
    return of.sample, of.trial


def sample_ids(view: RunView) -> dict[str, None]:
    """Return the ids of all samples, in the dataset's order."""
    return dict.fromkeys(sample for sample, *_ in _statuses(view))


def find_sample(view: RunView, name: str) -> tuple[str, int | None]:
    """Return the sample that a name stands for, and the trial if it says which.

    The name is an id or the beginning of one, with or without `/TRIAL`. An id may itself contain slashes.
    """
    if view.trial(name, 1) is not None:
        return name, None
    head, _, tail = name.rpartition("/")
    trial = int(tail) if head and tail.isdecimal() else None
    if trial is not None and view.trial(head, 1) is not None:
        return head, _check_trial(view, trial)
    ids = sample_ids(view)
    for beginning, number in ((name, None), *([(head, trial)] if trial is not None else [])):
        matches = [each for each in ids if beginning and each.startswith(beginning)]
        if len(matches) == 1:
            return matches[0], None if number is None else _check_trial(view, number)
        if matches:
            raise UsageError(
                f"{name!r} is ambiguous, it matches {len(matches):,} samples: {_listed(matches)}",
                remedy="Give more of the id.",
            )
    close = get_close_matches(name, list(ids)[:100_000], n=5, cutoff=0.5)
    hint = f"Did you mean {', '.join(close)}?" if close else f"There are: {_listed(list(ids))}."
    raise UsageError(f"no sample {name!r} in {view.rundir.path}", remedy=hint)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", …" if len(names) > _LISTED else "")


def _check_trial(view: RunView, number: int) -> int:
    trials = view.manifest.trials
    if not 1 <= number <= trials:
        raise UsageError(
            f"no trial {number}: the run has {trials} per sample", remedy=f"Give a number from 1 to {trials}."
        )
    return number
