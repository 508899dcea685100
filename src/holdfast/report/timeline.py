"""A trial as a timeline: messages, tool calls and checkpoints turn by turn, for browser, terminal and files.

Each tool call has its result. Each checkpoint follows the turn that it graded, even if the conversation ended before
that turn, and failed attempts are shown at the turn in which they happened. A trial without an output is replayed from
its recorded calls, and shown in the same form.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec import Struct, UnsetType

from holdfast.conversation.simulated_user import Decision
from holdfast.conversation.turns import Conversation, Prompts
from holdfast.data.columns import Panel
from holdfast.data.dataset import Sample
from holdfast.errors import AttemptError
from holdfast.graders.build import threshold
from holdfast.plan.changes import format_count
from holdfast.report.chat import ChatMessage, ToolUse, listed_call, read_messages
from holdfast.report.file_changes import FileChange, compare_files, initial_files
from holdfast.report.run_view import GradedTrial
from holdfast.report.trials import BandState, TrialStatus, gravest
from holdfast.store.blobs import Blobs, describe_partial
from holdfast.store.records import NO_USAGE, Mark, Output, Timing, ToolCall, ToolResponse, Usage, content_text
from holdfast.targets.types import Reply

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from holdfast.graders.build import GraderPlace
    from holdfast.report.run_view import Pending, RunView
    from holdfast.store.records import ErrorRecord, Grade, Step, TraceStep

_JUDGE_DETAILS: Final = frozenset({"judge", "reply"})


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


class FailedAttempt(Struct, frozen=True, kw_only=True):
    """An attempt of the target or of a grader that failed."""

    attempt: int
    kind: str
    message: str
    status: int | None
    """of HTTP"""
    time: float
    seconds: float
    final: bool
    """no further attempt followed in that process"""
    traceback: str = ""


class GraderVerdict(Struct, frozen=True, kw_only=True):
    """A grader's verdict on the trial, or the lack of one."""

    name: str
    """as metrics have it: `checkpoint@2/name` after a turn"""
    grader: str
    """in the eval file"""
    type: str
    turn: int | None
    """of a checkpoint; None at the end of the conversation"""
    status: TrialStatus
    score: float | None = None
    threshold: float | None = None
    weight: float = 1.0
    feedback: str = ""
    judge: str = ""
    """name of the model that judged"""
    reply: str = ""
    """the judge's words"""
    details: Any = None
    """further values that the grader returned"""
    usage: Usage | None = None
    """of a judge"""
    seconds: float | None = None
    source: str = ""
    """the run in which the verdict was made, if it was copied"""
    attempts: list[FailedAttempt] = []


class CheckpointBand(Struct, frozen=True, kw_only=True):
    """The graders after a turn."""

    turn: int
    state: BandState
    stops: bool
    """a failure ends the conversation"""
    ended_here: bool
    """the conversation ended because of it"""
    verdicts: list[GraderVerdict]


class TimelineTurn(Struct, frozen=True, kw_only=True):
    """A user message, the reply to it, and the checkpoint after it."""

    number: int
    state: Literal["answered", "running", "not_asked"]
    """`running`: the turn has no reply yet; `not_asked`: the conversation ended before it"""
    messages: list[ChatMessage] = []
    listed: list[ToolUse] = []
    """all tool calls of the turn, if the messages do not hold them"""
    unlisted_calls: bool = False
    """the target does not report its tool calls"""
    attempts: list[FailedAttempt] = []
    """attempts at this turn that failed"""
    seconds: float | None = None
    tokens: int | None = None
    cost: float | None = None
    files: list[FileChange] = []
    """the workspace after the turn, with the change of each file since the previous turn"""
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
    """class of the answer; empty without an output"""
    stop: str = ""
    """why the conversation ended"""
    detail: str = ""
    """which limit ended it, or what the program printed"""
    partial: str = ""
    """what is missing of the workspace, if it was too large"""
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
    """the run in which the output was generated, if it was copied"""
    error: str = ""
    """why there is no output"""


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
    """the row; empty if the dataset no longer has it"""
    state: Any = None
    """the state that the target returned"""
    line: StoredLine | None = None

    @property
    def messages(self) -> Iterator[ChatMessage]:
        """Yield the messages of all turns, in order."""
        yield from self.opening
        for turn in self.turns:
            yield from turn.messages


def trial_timeline(view: RunView, trial: GradedTrial | Pending, *, contents: bool = True) -> Timeline:
    """Return the timeline of a trial. `contents`: read its files, and show the lines that changed."""
    if isinstance(trial, GradedTrial):
        steps, errors = view.steps(trial.output.key), view.failed_attempts(trial.output.key)
        facts = _facts(trial.output, trial_status(trial, errors), trial.score)
        return _Maker(view, trial, steps, errors, contents=contents).timeline(facts)
    steps = view.steps(trial.key) if trial.key else []
    errors = view.failed_attempts(trial.key) if trial.key else []
    partial = _replayed(view, trial, steps, errors)
    facts = msgspec.structs.replace(
        _facts(partial.output, trial.status, None),
        answer="",
        started=min((step.time - step.seconds for step in steps), default=None),
        seconds=partial.output.timing.seconds or None,
        error=trial.error or "no output yet",
    )
    return _Maker(view, partial, steps, errors, contents=contents).timeline(facts)


def trial_status(trial: GradedTrial | Pending, errors: Sequence[ErrorRecord]) -> TrialStatus:
    """Return the status of a trial; a trial that was not run, or whose graders were not asked yet, is pending.

    `errors` are its failed attempts.
    """
    if not isinstance(trial, GradedTrial):
        return trial.status
    asked = trial.grades or any(error.where != "target" for error in errors)
    return trial.status if trial.status != "error" or asked else "pending"


def _facts(output: Output, status: TrialStatus, score: float | None) -> TimelineFacts:
    return TimelineFacts(
        status=status,
        score=score,
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
        started=output.timing.started,
        seconds=output.timing.seconds,
        first_token=output.timing.first_token,
        source=output.source or "",
    )


def _describe_settled(calls: int) -> str:
    """Describe tool calls whose results a person has given."""
    return f"the result of {format_count(calls, 'tool call')} was given by hand (--settle)" if calls else ""


def _replayed(view: RunView, trial: Pending, steps: Sequence[Step], errors: Sequence[ErrorRecord]) -> GradedTrial:
    """Replay the recorded calls of a trial that has no output, and return it with the part of an output that it has.

    A turn without a reply is the last mark, which has no digest.
    """
    prompts = _prompts(view, trial.sample, trial.fields)
    conversation = Conversation(prompts, Sample(trial.sample, trial.fields, "", trial.sample), trial.trial)
    replies = {step.turn: step for step in steps if step.kind == "turn"}
    decisions = {step.turn: msgspec.convert(step.response, Decision) for step in steps if step.kind == "responder"}
    seconds = 0.0
    running: list[Mark] = []
    while not running:
        decision = decisions.get(conversation.turns)
        prompt = conversation.scripted_prompt or (None if decision is None else decision.message)
        if prompt is None:
            break
        turn = conversation.begin_turn(prompt).number
        if turn in replies:
            seconds += replies[turn].seconds
            conversation.end_turn(msgspec.convert(replies[turn].response, Reply), seconds)
        else:
            running = [Mark(len(conversation.messages), "", conversation.usage, seconds)]
    calls = [_tool_call(step) for step in steps if step.kind == "tool" and step.turn > conversation.turns]
    grades = view.checkpoint_grades(trial.key) if trial.key else []
    graders = {grade.grader for grade in grades}
    output = Output(
        key=trial.key,
        sample=trial.sample,
        trial=trial.trial,
        attempt=max(1, sum(error.where == "target" for error in errors)),
        messages=conversation.messages,
        output="",
        turns=conversation.turns,
        stop="",
        answer=conversation.answer,
        usage=sum((step.usage for step in steps), NO_USAGE),
        timing=Timing(0.0, sum(step.seconds for step in steps if step.kind in ("turn", "responder"))),
        digest="",
        marks=[*conversation.marks, *running],
        calls=[*(conversation.calls or ()), *calls],
        opening=conversation.opening,
    )
    panel = Panel(tuple(number for number, place in enumerate(view.places) if place.name in graders))
    return GradedTrial(trial.fields, output, grades, "error", None, panel)


def _prompts(view: RunView, sample: str, fields: dict[str, Any]) -> Prompts:
    """Return the user's messages in the eval; none if the row does not fit the templates, or is gone."""
    try:
        return view.script.render(Sample(sample, fields, "", sample))
    except AttemptError:
        return Prompts([], [])


def _tool_call(step: Step) -> ToolCall:
    response = msgspec.convert(step.response, ToolResponse)
    return ToolCall(step.turn, response.tool, response.arguments or {}, response.result)


class _Maker:
    """Makes the timeline of a trial, which may have only a part of an output."""

    def __init__(
        self,
        view: RunView,
        trial: GradedTrial,
        steps: Sequence[Step],
        errors: Sequence[ErrorRecord],
        *,
        contents: bool,
    ) -> None:
        self._view, self._trial, self._output = view, trial, trial.output
        self._contents = contents
        self._blobs = Blobs(view.rundir.files)
        self._steps, self._errors = steps, errors
        output = trial.output
        whole = len(output.messages), output.digest, output.usage, output.timing.seconds
        self._marks = output.marks or [Mark(*whole, files=output.files)]
        """the turns; an output of one turn has no marks"""
        self._ends = _turn_ends(output, self._marks, steps)
        self._attempts = _grader_attempts(errors, view.places, self._ends)

    def timeline(self, facts: TimelineFacts) -> Timeline:
        trial, output, manifest, line = self._trial, self._output, self._view.manifest, self._trial.line
        verdicts = self._verdicts()
        messages = read_messages(output.messages)
        opening = _opening(output)
        judges = [verdict.usage for verdict in verdicts if verdict.usage is not None]
        journal = "" if line is None else str(line.path.relative_to(self._view.rundir.path))
        return Timeline(
            run=manifest.id,
            eval=manifest.name,
            target=manifest.target,
            sample=output.sample,
            trial=output.trial,
            trials=manifest.trials,
            facts=msgspec.structs.replace(facts, judge_cost=sum(judges, NO_USAGE).cost if judges else None),
            opening=[message for message in messages if message.number <= opening],
            turns=[*self._asked(messages, opening, verdicts), *self._not_asked(verdicts)],
            graders=[verdict for verdict in verdicts if verdict.turn is None],
            steps=list(_strip(self._steps, output.trace or ())),
            fields=trial.fields,
            state=output.state,
            line=None if line is None else StoredLine(journal=journal, offset=line.offset, length=line.length),
        )

    def _verdicts(self) -> list[GraderVerdict]:
        """Return the verdicts of all graders that apply to the row, including graders that were never asked."""
        places = [self._view.places[number] for number in self._trial.panel.graders]
        grades = {grade.grader: grade for grade in self._trial.grades}
        verdicts = [self._verdict(place, grades.pop(place.name, None)) for place in places]
        return verdicts + [_recorded_verdict(grade, None, []) for grade in grades.values()]

    def _verdict(self, place: GraderPlace, grade: Grade | None) -> GraderVerdict:
        attempts = self._attempts.get(place.name, [])
        if grade is not None:
            return _recorded_verdict(grade, place, attempts)
        stopped = bool(self._output.stopped_by)
        missed = stopped if place.turn is None else place.turn > self._output.turns
        return _missing_verdict(place, "not_reached" if missed else "pending", attempts)

    def _asked(
        self, messages: list[ChatMessage], opening: int, verdicts: list[GraderVerdict]
    ) -> Iterator[TimelineTurn]:
        output = self._output
        start, seconds, usage = opening, 0.0, NO_USAGE
        files = initial_files(self._view.manifest)
        for number, mark in enumerate(self._marks, 1):
            running = not mark.digest
            end = len(output.messages) if number == len(self._marks) else mark.end
            so_far = output.usage if isinstance(mark.usage, UnsetType) else mark.usage
            until = output.timing.seconds if isinstance(mark.seconds, UnsetType) else mark.seconds
            now = files if isinstance(mark.files, UnsetType) else mark.files
            calls = [call for call in output.calls or () if call.turn == number]
            inside = [message for message in messages if start < message.number <= end]
            yield TimelineTurn(
                number=number,
                state="running" if running else "answered",
                messages=inside,
                calls=max(len(calls), sum(len(message.calls) for message in inside)),
                listed=[listed_call(call.name, call.arguments, call.result) for call in calls if call.name is not None],
                unlisted_calls=any(call.name is None for call in calls),
                attempts=[
                    _failed_attempt(error)
                    for error in self._errors
                    if error.where == "target" and _turn_at(error.time, self._ends) == number
                ],
                seconds=None if running else max(0.0, until - seconds),
                tokens=None if running else _difference(so_far.tokens, usage.tokens),
                cost=None if running else _difference(so_far.cost, usage.cost),
                files=[] if running else compare_files(self._blobs, files, now, contents=self._contents),
                checkpoint=self._band(number, verdicts),
            )
            start, seconds, usage, files = end, until, so_far, now

    def _not_asked(self, verdicts: list[GraderVerdict]) -> Iterator[TimelineTurn]:
        """Yield the turns that the eval has after the last one that was asked."""
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
        return CheckpointBand(
            turn=turn,
            state=gravest(verdict.status for verdict in here),
            stops=any(each.stops for each in self._view.spec.checkpoints if each.after_turn == turn),
            ended_here=bool(self._output.stopped_by) and turn == self._output.turns,
            verdicts=here,
        )


def _opening(output: Output) -> int:
    if not isinstance(output.opening, UnsetType):
        return output.opening
    roles = [message.get("role") for message in output.messages]
    return next((number for number, role in enumerate(roles) if role not in ("system", "developer")), 0)


def _turn_ends(output: Output, marks: Sequence[Mark], steps: Iterable[Step]) -> list[float]:
    """Return when each turn ended: by the record of its reply, else by the marks; infinity if it has no reply yet."""
    recorded = {step.turn: step.time for step in steps if step.kind == "turn"}
    started, whole = output.timing.started, output.timing.seconds
    return [
        math.inf
        if not mark.digest
        else recorded.get(turn, started + (whole if isinstance(mark.seconds, UnsetType) else mark.seconds))
        for turn, mark in enumerate(marks, 1)
    ]


def _turn_at(time: float, ends: Sequence[float]) -> int:
    """Return the turn that was in progress at a time; the last one if the conversation was over."""
    return next((turn for turn, end in enumerate(ends, 1) if time <= end), max(1, len(ends)))


def _difference(now: float | None, before: float | None) -> Any:
    return None if now is None or before is None else now - before


def _recorded_verdict(grade: Grade, place: GraderPlace | None, attempts: list[FailedAttempt]) -> GraderVerdict:
    """Return a verdict that a grader gave."""
    details = grade.details
    judge = reply = ""
    if isinstance(details, dict) and isinstance(details.get("judge"), str):
        judge, reply = details["judge"], str(details.get("reply") or "")
        details = {key: value for key, value in details.items() if key not in _JUDGE_DETAILS}
    return GraderVerdict(
        name=grade.grader,
        grader=grade.grader if place is None else str(place.block.name),
        type=grade.type,
        turn=grade.turn,
        status=grade.status,
        score=grade.score,
        threshold=None if place is None else threshold(place.block),
        weight=grade.weight,
        feedback=grade.feedback,
        judge=judge,
        reply=reply,
        details=details or None,
        usage=grade.usage,
        seconds=grade.seconds,
        source=grade.source or "",
        attempts=attempts,
    )


def _missing_verdict(place: GraderPlace, status: TrialStatus, attempts: list[FailedAttempt]) -> GraderVerdict:
    """Return a verdict that a grader has not given."""
    return GraderVerdict(
        name=place.name,
        grader=str(place.block.name),
        type=place.block.type,
        turn=place.turn,
        status=status,
        threshold=threshold(place.block),
        weight=place.block.weight,
        attempts=attempts,
    )


def _failed_attempt(error: ErrorRecord) -> FailedAttempt:
    """Return a failed attempt without the fields that identify its trial."""
    return FailedAttempt(
        attempt=error.attempt,
        kind=error.kind,
        message=error.message,
        status=error.status,
        time=error.time,
        seconds=error.seconds,
        final=error.final,
        traceback=error.traceback or "",
    )


def _grader_attempts(
    errors: Iterable[ErrorRecord], places: Sequence[GraderPlace], ends: Sequence[float]
) -> dict[str, list[FailedAttempt]]:
    """Return the failed attempts of graders by place.

    They are recorded by the grader's own name, which several checkpoints may share. Then the time decides: a checkpoint
    is graded before the next turn begins.
    """
    attempts: dict[str, list[FailedAttempt]] = {}
    for error in errors:
        if error.where == "target":
            continue
        sharing = [place for place in places if place.block.name == error.where]
        past = sum(end <= error.time for end in ends)
        place = next((place for place in sharing if place.turn == past), sharing[-1] if sharing else None)
        if place is not None:
            attempts.setdefault(place.name, []).append(_failed_attempt(error))
    return attempts


def _strip(steps: Sequence[Step], trace: Sequence[TraceStep]) -> Iterator[CallStep]:
    """Yield the recorded calls with their times, else the calls in the target's own trace."""
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
