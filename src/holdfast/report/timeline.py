"""A trial as a timeline: messages, tool calls and checkpoints turn by turn, for browser, terminal and files.

Tool calls have their results beside them. Each checkpoint stands after the turn that it graded, also where the
conversation did not get so far, and failed attempts stand where they happened. A trial without an output is shown from
its recorded calls, in the same form.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct, UnsetType

from holdfast.conversation.script import Prompts
from holdfast.conversation.simulated_user import Decision
from holdfast.data.dataset import Sample
from holdfast.errors import AttemptError
from holdfast.plan.changes import format_count
from holdfast.report.chat import ChatMessage, ToolUse, listed_call, read_messages
from holdfast.report.checkpoints import (
    CheckpointBand,
    FailedAttempt,
    GraderVerdict,
    TrialStatus,
    failed_attempt,
    grader_attempts,
    make_band,
    missing_verdict,
    recorded_verdict,
)
from holdfast.report.file_changes import FileChange, compare_files, initial_files
from holdfast.report.run_view import GradedTrial
from holdfast.store.blobs import describe_partial
from holdfast.store.records import NO_USAGE, Mark, ToolResponse, content_text
from holdfast.targets.types import Reply

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from holdfast.graders.build import GraderPlace
    from holdfast.report.run_view import Pending, RunView
    from holdfast.store.records import ErrorRecord, Grade, Output, Step, TraceStep


class CallStep(Struct, frozen=True, kw_only=True):
    """A recorded call, for the strip of durations."""

    turn: int
    kind: str
    """`turn`, `responder`, `model`, `tool`, or an event of the target's trace"""
    name: str
    started: float
    """seconds since the trial's first step"""
    seconds: float
    tokens: int | None = None
    cost: float | None = None

    @property
    def end(self) -> float:
        """Seconds between the trial's first step and the end of this one."""
        return self.started + self.seconds


class TimelineTurn(Struct, frozen=True, kw_only=True):
    """A user message, the reply to it, and what was looked at afterwards."""

    number: int
    state: Literal["answered", "running", "not_asked"]
    """`running`: the turn has no reply yet; `not_asked`: the conversation ended before it"""
    messages: list[ChatMessage] = []
    listed: list[ToolUse] = []
    """all tool calls of the turn, where the messages do not hold them"""
    unlisted_calls: bool = False
    """the target does not report its tool calls"""
    attempts: list[FailedAttempt] = []
    """attempts at this turn that failed"""
    seconds: float | None = None
    tokens: int | None = None
    cost: float | None = None
    files: list[FileChange] = []
    """the workspace after the turn, each file with what became of it since the turn before"""
    checkpoint: CheckpointBand | None = None
    hidden_after: int = 0
    """messages at its end that were left out"""
    hidden_from: int = 0
    """number of the first of them"""
    calls: int = 0
    """number of its tool calls"""


class TimelineFacts(Struct, frozen=True, kw_only=True):
    """A trial in numbers."""

    status: TrialStatus
    score: float | None = None
    answer: str = ""
    """class of the answer; empty without one"""
    stop: str = ""
    """why the conversation ended"""
    detail: str = ""
    """which limit, or what a program printed, where that is why"""
    partial: str = ""
    """what is missing of the workspace, where it was too large"""
    turns: int = 0
    attempt: int = 1
    input_tokens: int | None = None
    output_tokens: int | None = None
    requests: int = 0
    cost: float | None = None
    judge_cost: float | None = None
    started: float | None = None
    """seconds since the epoch"""
    seconds: float | None = None
    first_token: float | None = None
    source: str = ""
    """the run in which the output was generated, where it was copied"""
    error: str = ""
    """why there is no output, as far as is known"""


class StoredLine(Struct, frozen=True, kw_only=True):
    """The place of the trial's line."""

    journal: str
    """relative to the run directory"""
    offset: int
    length: int


class Timeline(Struct, frozen=True, kw_only=True):
    """Everything about one trial."""

    run: str
    eval: str
    target: str
    sample: str
    trial: int
    trials: int
    """trials per sample of the run"""
    facts: TimelineFacts
    opening: list[ChatMessage] = []
    """the system message, and a history if there is one"""
    turns: list[TimelineTurn] = []
    graders: list[GraderVerdict] = []
    """at the end of the conversation"""
    steps: list[CallStep] = []
    fields: dict[str, Any] = {}
    """the row; empty where the dataset no longer has it"""
    state: Any = None
    """that the target returned"""
    line: StoredLine | None = None

    @property
    def messages(self) -> Iterator[ChatMessage]:
        """Yield the messages of all turns, in order."""
        yield from self.opening
        for turn in self.turns:
            yield from turn.messages


def trial_timeline(view: RunView, trial: GradedTrial | Pending, *, contents: bool = True) -> Timeline:
    """Return the timeline of a trial. `contents`: with the differences between its files, which have to be read."""
    if isinstance(trial, GradedTrial):
        return _Finished(view, trial, contents=contents).timeline()
    return _pending_timeline(view, trial)


class _Finished:
    """Makes the timeline of a trial that has an output."""

    def __init__(self, view: RunView, trial: GradedTrial, *, contents: bool) -> None:
        self._view, self._trial, self._output = view, trial, trial.output
        self._contents = contents
        self._steps = view.steps(trial.output.key)
        self._errors = view.failed_attempts(trial.output.key)
        output = trial.output
        self._marks = list(output.marks) if output.marks else [_whole(output)]
        self._ends = _turn_ends(output, self._marks, self._steps)
        self._attempts = grader_attempts(self._errors, view.places, self._ends)

    def timeline(self) -> Timeline:
        trial, output = self._trial, self._output
        verdicts = self._verdicts()
        messages = read_messages(output.messages)
        opening = _opening(output)
        turns = [*self._answered(messages, opening, verdicts), *self._not_asked(verdicts)]
        judges = [verdict.usage for verdict in verdicts if verdict.usage is not None]
        line = trial.line
        return Timeline(
            **_heading(self._view, output.sample, output.trial),
            facts=TimelineFacts(
                status=trial_status(trial, self._errors),
                score=trial.score,
                stop=output.stop,
                detail="; ".join(filter(None, (output.stop_detail or "", _describe_settled(output.settled or 0)))),
                partial=describe_partial(output.files_partial) if output.files_partial else "",
                answer=output.answer,
                turns=output.turns,
                attempt=output.attempt,
                input_tokens=output.usage.input_tokens,
                output_tokens=output.usage.output_tokens,
                requests=output.usage.requests,
                cost=output.usage.cost,
                judge_cost=sum(judges, NO_USAGE).cost if judges else None,
                started=output.timing.started,
                seconds=output.timing.seconds,
                first_token=output.timing.first_token,
                source=output.source or "",
            ),
            opening=[message for message in messages if message.number <= opening],
            turns=turns,
            graders=[verdict for verdict in verdicts if verdict.turn is None],
            steps=list(_strip(self._steps, output.trace or ())),
            fields=trial.fields,
            state=output.state,
            line=None
            if line is None
            else StoredLine(
                journal=str(line.path.relative_to(self._view.rundir.path)), offset=line.offset, length=line.length
            ),
        )

    def _verdicts(self) -> list[GraderVerdict]:
        """Return the verdicts of all graders that look at the row, also those that were never asked."""
        places = [self._view.places[number] for number in self._trial.panel.graders]
        grades = {grade.grader: grade for grade in self._trial.grades}
        verdicts = [self._verdict(place, grades.pop(place.name, None)) for place in places]
        return verdicts + [recorded_verdict(grade, None, []) for grade in grades.values()]

    def _verdict(self, place: GraderPlace, grade: Grade | None) -> GraderVerdict:
        attempts = self._attempts.get(place.name, [])
        if grade is not None:
            return recorded_verdict(grade, place, attempts)
        stopped = bool(self._output.stopped_by)
        missed = stopped if place.turn is None else place.turn > self._output.turns
        return missing_verdict(place, "not_reached" if missed else "pending", attempts)

    def _answered(
        self, messages: list[ChatMessage], opening: int, verdicts: list[GraderVerdict]
    ) -> Iterator[TimelineTurn]:
        output = self._output
        start, seconds, usage = opening, 0.0, NO_USAGE
        files = initial_files(self._view.manifest)
        for number, mark in enumerate(self._marks, 1):
            end = len(output.messages) if number == len(self._marks) else mark.end
            so_far = output.usage if isinstance(mark.usage, UnsetType) else mark.usage
            until = output.timing.seconds if isinstance(mark.seconds, UnsetType) else mark.seconds
            now = files if isinstance(mark.files, UnsetType) else mark.files
            calls = [call for call in output.calls or () if call.turn == number]
            inside = [message for message in messages if start < message.number <= end]
            yield TimelineTurn(
                number=number,
                state="answered",
                messages=inside,
                calls=max(len(calls), sum(len(message.calls) for message in inside)),
                listed=[listed_call(call.name, call.arguments, call.result) for call in calls if call.name is not None],
                unlisted_calls=any(call.name is None for call in calls),
                attempts=[
                    failed_attempt(error)
                    for error in self._errors
                    if error.where == "target" and _turn_at(error.time, self._ends) == number
                ],
                seconds=max(0.0, until - seconds),
                tokens=_difference(so_far.tokens, usage.tokens),
                cost=_difference(so_far.cost, usage.cost),
                files=compare_files(self._view.rundir.files, files, now, contents=self._contents),
                checkpoint=self._band(number, verdicts),
            )
            start, seconds, usage, files = end, until, so_far, now

    def _not_asked(self, verdicts: list[GraderVerdict]) -> Iterator[TimelineTurn]:
        """Yield the turns after the last one, as far as the eval says what they would have been."""
        output, places = self._output, self._view.places
        texts: list[str] = []
        if output.stopped_by:
            texts = list(map(content_text, _prompts(self._view, output.sample, self._trial.fields).contents))
        turns = [places[number].turn or 0 for number in self._trial.panel.graders]
        for number in range(output.turns + 1, max([len(texts), *turns]) + 1):
            band = self._band(number, verdicts)
            if number <= len(texts) or band is not None:
                text = texts[number - 1] if number <= len(texts) else ""
                yield TimelineTurn(
                    number=number,
                    state="not_asked",
                    messages=[ChatMessage(number=0, role="user", text=text)] if text else [],
                    checkpoint=band,
                )

    def _band(self, turn: int, verdicts: list[GraderVerdict]) -> CheckpointBand | None:
        here = [verdict for verdict in verdicts if verdict.turn == turn]
        if not here:
            return None
        ended = bool(self._output.stopped_by) and turn == self._output.turns
        return make_band(self._view, turn, here, ended_here=ended)


def _heading(view: RunView, sample: str, trial: int) -> dict[str, Any]:
    manifest = view.manifest
    return {
        "run": manifest.id,
        "eval": manifest.name,
        "target": manifest.target,
        "sample": sample,
        "trial": trial,
        "trials": manifest.trials,
    }


def trial_status(trial: GradedTrial | Pending, errors: Sequence[ErrorRecord]) -> TrialStatus:
    """Return the status of a trial; one that was not run, or whose graders were not asked yet, is pending.

    `errors` are its failed attempts.
    """
    if not isinstance(trial, GradedTrial):
        return trial.status
    asked = trial.grades or any(error.where != "target" for error in errors)
    return trial.status if trial.status != "error" or asked else "pending"


def _whole(output: Output) -> Mark:
    """Return the mark of a conversation of one turn, which the output does not have."""
    usage, seconds = output.usage, output.timing.seconds
    return Mark(len(output.messages), output.digest, usage, seconds, files=output.files)


def _describe_settled(calls: int) -> str:
    """Say that a person has given the results of tool calls, if that is so."""
    return f"the result of {format_count(calls, 'tool call')} was given by hand (--settle)" if calls else ""


def _opening(output: Output) -> int:
    if not isinstance(output.opening, UnsetType):
        return output.opening
    roles = [message.get("role") for message in output.messages]
    return next((number for number, role in enumerate(roles) if role not in ("system", "developer")), 0)


def _turn_ends(output: Output, marks: Sequence[Mark], steps: Iterable[Step]) -> list[float]:
    """Return when each turn ended: by the record of its reply, else by the marks of the conversation."""
    recorded = {step.turn: step.time for step in steps if step.kind == "turn"}
    started, whole = output.timing.started, output.timing.seconds
    return [
        recorded.get(turn, started + (whole if isinstance(mark.seconds, UnsetType) else mark.seconds))
        for turn, mark in enumerate(marks, 1)
    ]


def _turn_at(time: float, ends: Sequence[float]) -> int:
    """Return the turn that was in progress at a time; the last one if the conversation was over."""
    return next((turn for turn, end in enumerate(ends, 1) if time <= end), max(1, len(ends)))


def _difference(now: float | None, before: float | None) -> Any:
    return None if now is None or before is None else now - before


def _strip(steps: Sequence[Step], trace: Sequence[TraceStep]) -> Iterator[CallStep]:
    """Yield the recorded calls with their times, else those that the target's own trace has."""
    shown = [step for step in steps if step.kind not in ("intent", "restart")]
    begun = min((step.time - step.seconds for step in shown), default=0.0)
    for step in shown:
        yield CallStep(
            turn=step.turn,
            kind=step.kind,
            name=_step_name(step),
            started=max(0.0, step.time - step.seconds - begun),
            seconds=step.seconds,
            tokens=step.usage.tokens if step.usage.requests else None,
            cost=step.usage.cost if step.usage.requests else None,
        )
    if not shown:
        yield from _traced(trace)


def _step_name(step: Step) -> str:
    response = step.response if isinstance(step.response, dict) else {}
    name = response.get("tool" if step.kind == "tool" else "model")
    return name if isinstance(name, str) else step.kind


def _traced(trace: Sequence[TraceStep]) -> Iterator[CallStep]:
    spans = []
    for step in trace:
        payload = step.get("payload")
        if not isinstance(payload, dict) or not str(payload.get("event_type")).endswith("_END"):
            continue
        end, start = payload.get("event_timestamp"), payload.get("span_event_timestamp")
        if isinstance(end, int | float) and isinstance(start, int | float):
            spans.append((float(start), float(end), payload))
    begun = min((start for start, _, _ in spans), default=0.0)
    for start, end, payload in sorted(spans, key=lambda span: span[:2]):
        kind = str(payload["event_type"]).removesuffix("_END").lower()
        name = payload.get("name")
        yield CallStep(
            turn=1,
            kind={"llm": "model"}.get(kind, kind),
            name=name if isinstance(name, str) else kind,
            started=start - begun,
            seconds=max(0.0, end - start),
        )


def _prompts(view: RunView, sample: str, fields: dict[str, Any]) -> Prompts:
    """Return the user's messages as the eval has them; nothing where the row does not fit, or is gone."""
    try:
        return view.script.render(Sample(sample, fields, "", sample))
    except AttemptError:
        return Prompts([], [])


def _pending_timeline(view: RunView, trial: Pending) -> Timeline:
    """Return what there is of a trial without an output: its recorded turns and calls, and its failed attempts."""
    steps = view.steps(trial.key) if trial.key else []
    errors = view.failed_attempts(trial.key) if trial.key else []
    prompts = _prompts(view, trial.sample, trial.fields)
    opening, contents = prompts.opening, prompts.contents
    replies = {step.turn: step for step in steps if step.kind == "turn"}
    decisions = {step.turn: msgspec.convert(step.response, Decision) for step in steps if step.kind == "responder"}
    ends = [replies[turn].time for turn in sorted(replies)]
    places = {place.name: place for place in view.places}
    grades = view.checkpoint_grades(trial.key) if trial.key else []
    verdicts = [recorded_verdict(grade, places[grade.grader], []) for grade in grades]
    turns: list[TimelineTurn] = []
    messages = [*opening]
    bounds = [len(opening)]
    for number in range(1, len(replies) + 2):
        after = decisions.get(number - 1)
        content = contents[number - 1] if number <= len(contents) else None if after is None else after.message
        if content is None:
            break
        messages.append({"role": "user", "content": content})
        if number in replies:
            messages += _reply_messages(msgspec.convert(replies[number].response, Reply))
        bounds.append(len(messages))
    read = read_messages(messages)
    for number, (start, end) in enumerate(pairwise(bounds), 1):
        inside = [step for step in steps if step.turn == number]
        step, here = replies.get(number), [verdict for verdict in verdicts if verdict.turn == number]
        turns.append(
            TimelineTurn(
                number=number,
                state="answered" if step is not None else "running",
                messages=[message for message in read if start < message.number <= end],
                calls=sum(each.kind == "tool" for each in inside),
                listed=[] if step is not None else [_tool_step(each) for each in inside if each.kind == "tool"],
                attempts=[
                    failed_attempt(error)
                    for error in errors
                    if error.where == "target" and min(_turn_after(error.time, ends), len(bounds) - 1) == number
                ],
                seconds=None if step is None else step.seconds,
                tokens=None if step is None else step.usage.tokens,
                cost=None if step is None else step.usage.cost,
                checkpoint=make_band(view, number, here) if here else None,
            )
        )
    spent = sum((step.usage for step in steps), NO_USAGE)
    first = min((step.time - step.seconds for step in steps), default=None)
    return Timeline(
        **_heading(view, trial.sample, trial.trial),
        facts=TimelineFacts(
            status=trial_status(trial, errors),
            turns=len(replies),
            attempt=max(1, sum(error.where == "target" for error in errors)),
            input_tokens=spent.input_tokens,
            output_tokens=spent.output_tokens,
            requests=spent.requests,
            cost=spent.cost,
            started=first,
            seconds=sum(step.seconds for step in steps if step.kind in ("turn", "responder")) or None,
            error=trial.error or "no output yet",
        ),
        opening=[message for message in read if message.number <= len(opening)],
        turns=turns,
        steps=list(_strip(steps, ())),
        fields=trial.fields,
    )


def _turn_after(time: float, ends: Sequence[float]) -> int:
    """Return the turn that was in progress at a time, which may be the one after the last reply."""
    return 1 + sum(end < time for end in ends)


def _reply_messages(reply: Reply) -> list[dict[str, Any]]:
    return list(reply.messages or [{"role": "assistant", "content": reply.text}])


def _tool_step(step: Step) -> ToolUse:
    response = msgspec.convert(step.response, ToolResponse)
    arguments = {} if isinstance(response.arguments, UnsetType) else response.arguments
    return listed_call(response.tool, arguments, response.result)
