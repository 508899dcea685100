"""Records of the journals. One struct per file; the field names are the documented format."""

from __future__ import annotations

from array import array
from math import floor, fsum
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args

from msgspec import UNSET, Struct, UnsetType, field
from msgspec.json import Encoder
from msgspec.structs import replace

from holdfast.store.lines import seal

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA_VERSION = "1.0"
"""Version of the run directory's files, MAJOR.MINOR, written into each `.json` of it."""

AnswerClass = Literal["whole", "cut", "filtered", "refused", "empty", "paused", "limited", "exited"]
"""How an answer ended; every trial has one class. An answer is whole unless its `stop` says that it ended early, or
there is nothing in it. Graders look at all answers alike, so a report says how many of them were not whole: a token
limit that is too low looks like a bad model."""
ANSWER_CLASSES: Final[tuple[AnswerClass, ...]] = get_args(AnswerClass)

_KINDS: Final[dict[str, tuple[AnswerClass, str]]] = {
    **{name: (name, name) for name in ANSWER_CLASSES},
    "length": ("cut", "cut at the token limit"),
    "context_window": ("cut", "cut at the end of the context window"),
    "max_steps": ("cut", "cut after `max_steps` model calls"),
    "content_filter": ("filtered", "filtered"),
    "refusal": ("refused", "refused"),
    "pause": ("paused", "paused"),
    "limited": ("limited", "ended by a limit"),
    "time_limit": ("limited", "ended at the time limit"),
    "token_limit": ("limited", "ended at the limit of tokens"),
    "cost_limit": ("limited", "ended at the limit of cost"),
    "call_limit": ("limited", "ended at the limit of calls"),
    "exited": ("exited", "ended by a program's exit code"),
}
"""classes, and more specific values of `stop`, each with its class and words for a count of answers"""
KINDS: Final = tuple(_KINDS)
"""kinds of answers; the index holds an answer's kind as its number in this list"""
KIND_CODES: Final = {kind: code for code, kind in enumerate(KINDS)}
EXIT: Final = "exit:"
"""begins the `stop` of a program that ended with an exit code other than 0, which follows"""

GradeStatus = Literal["passed", "failed", "error", "skipped", "not_reached"]

OnCutOff = Literal["stop", "error_result", "restart"]
"""What happens if a call with `replay: never` was cut off: the trial stops until a person settles the call, the call
gets an error as its result, or the trial begins again."""

Number = TypeVar("Number", int, float)

MOST_TOKENS: Final = 10**12
"""maximum number of tokens, or of dollars; a larger number is a mistake"""

_FEWEST_PERIODS: Final = 1 << 14
"""periods of work that are kept before they are merged"""


def classify_answer(stop: str, *, empty: bool) -> AnswerClass:
    """Return the class of an answer by its `stop`; `empty`: the answer has no text, tool call or file."""
    if stop in _KINDS:
        return _KINDS[stop][0]
    if stop.startswith(EXIT):
        return "exited"
    return "empty" if empty else "whole"


def answer_kind(answer: AnswerClass, stop: str) -> str:
    """Return the kind of an answer: its `stop` if that explains the class, else the class."""
    return stop if stop in _KINDS and _KINDS[stop][0] == answer else answer


def class_of_kind(kind: str) -> AnswerClass:
    """Return the class that a kind of answers belongs to."""
    return _KINDS[kind][0]


def describe_answers(kinds: Mapping[str, int]) -> str | None:
    """Describe how many answers are not whole, and why, from counts of kinds; None if all are."""
    others = {kind: count for kind, count in kinds.items() if kind != "whole" and count}
    if not others:
        return None
    total, count = sum(kinds.values()), sum(others.values())
    ordered = sorted(others, key=lambda kind: ANSWER_CLASSES.index(class_of_kind(kind)))
    parts = [f"{others[kind]:,} {_KINDS[kind][1]}" for kind in ordered]
    return f"{count:,} of {total:,} answers {'is' if count == 1 else 'are'} not whole: {', '.join(parts)}"


def apply_threshold(threshold: float | None, status: GradeStatus, score: float | None) -> GradeStatus:
    """Return a verdict's status for the current threshold; without a threshold the grader's own decision stands."""
    if threshold is None or score is None or status not in ("passed", "failed"):
        return status
    return "passed" if score >= threshold else "failed"


def to_milliseconds(moment: float) -> float:
    """Round a time as records have it. `round` takes three times as long."""
    return floor(moment * 1e3 + 0.5) / 1e3


def to_microseconds(duration: float) -> float:
    """Round a duration as records have it."""
    return floor(duration * 1e6 + 0.5) / 1e6


class Usage(Struct, frozen=True):
    """Tokens, requests and dollars of a trial or a grade. None means unknown, which is not zero."""

    input_tokens: int | None = None
    """tokens of the prompts; null is unknown"""
    output_tokens: int | None = None
    """tokens of the replies; null is unknown"""
    requests: int = 0
    """number of requests"""
    cost: float | None = None
    """dollars; null is unknown"""
    cache_read_tokens: int | UnsetType = UNSET
    """only if the server reports them: input tokens read from its cache"""
    cache_write_tokens: int | UnsetType = UNSET
    """only if the server reports them: input tokens written to its cache"""
    reasoning_tokens: int | UnsetType = UNSET
    """only if the server reports them: output tokens spent on reasoning"""

    @property
    def tokens(self) -> int | None:
        """Input and output tokens."""
        if self.input_tokens is None or self.output_tokens is None:
            return None
        return self.input_tokens + self.output_tokens

    def checked(self) -> Usage:
        """Return usage that a user's code reports, but unknown numbers if it cannot be true."""
        reported = (self.input_tokens, self.output_tokens, self.requests, self.cost)
        if all(value is None or 0 <= value <= MOST_TOKENS for value in reported):
            return self
        return Usage(requests=max(0, self.requests))

    def __add__(self, other: Usage) -> Usage:
        """Add the usage of another call; unknown plus anything is unknown."""
        return Usage(
            _add(self.input_tokens, other.input_tokens),
            _add(self.output_tokens, other.output_tokens),
            self.requests + other.requests,
            _add(self.cost, other.cost),
            _add_reported(self.cache_read_tokens, other.cache_read_tokens),
            _add_reported(self.cache_write_tokens, other.cache_write_tokens),
            _add_reported(self.reasoning_tokens, other.reasoning_tokens),
        )


def _add(first: Number | None, second: Number | None) -> Number | None:
    return None if first is None or second is None else first + second


def _add_reported(first: int | UnsetType, second: int | UnsetType) -> int | UnsetType:
    """Add counts of which only some calls report any."""
    return second if first is UNSET else first if second is UNSET else first + second


NO_USAGE: Final = Usage(0, 0, 0, 0.0)
"""Usage that is known to be zero."""


class Timing(Struct, frozen=True):
    """Start of a trial (seconds since the epoch), its duration, and the time to its first token."""

    started: float
    """start, in seconds since the epoch"""
    seconds: float
    """duration"""
    first_token: float | None = None
    """seconds until the first token, if the reply was streamed"""


class Spent(Struct):
    """Usage of a run: outputs, judges, failed attempts, and calls of conversations that have no output yet."""

    tokens: int = 0
    requests: int = 0
    cost: float = 0.0
    unpriced: int = 0
    """number of trials and grades without a known price"""
    unmetered: int = 0
    """number of trials and grades that do not report their tokens"""
    _starts: array[float] = field(default_factory=lambda: array("d"))
    _ends: array[float] = field(default_factory=lambda: array("d"))
    """periods of work; overlapping ones are merged from time to time"""
    _merge_at: int = _FEWEST_PERIODS

    def add(self, usage: Usage) -> None:
        """Add the usage of a trial, a grade or a call."""
        if usage.input_tokens is None or usage.output_tokens is None:
            self.unmetered += 1
        self.tokens += (usage.input_tokens or 0) + (usage.output_tokens or 0)
        self.requests += usage.requests
        if usage.cost is None:
            self.unpriced += 1
        else:
            self.cost += usage.cost

    def add_time(self, started: float, ended: float) -> None:
        """Add a period of work; periods may overlap and come in any order."""
        self._starts.append(started)
        self._ends.append(ended)
        if len(self._starts) >= self._merge_at:
            self.periods()

    def add_grade(self, usage: Usage | None, time: float, seconds: float) -> None:
        """Add a grade: the usage of its judge, and its time if noticeable."""
        if usage is not None:
            self.add(usage)
        if seconds >= 0.001:
            self.add_time(time - seconds, time)

    def become(self, other: Spent) -> None:
        """Take over the numbers of another object, which was read from the journals."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(other, name))

    def copy(self) -> Spent:
        """Return an independent copy."""
        return replace(self, _starts=self._starts[:], _ends=self._ends[:])

    @property
    def seconds(self) -> float:
        """Wall time with work in flight, without the pauses between processes."""
        return fsum(ended - started for started, ended in self.periods())

    def periods(self) -> list[tuple[float, float]]:
        """Return the periods with work in flight, in order and without overlaps. There are few, however long a run."""
        merged: list[tuple[float, float]] = []
        for started, ended in sorted(zip(self._starts, self._ends, strict=True)):
            if merged and started <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], ended)
            elif ended > started:
                merged.append((started, ended))
        self._starts, self._ends = (array("d", [period[side] for period in merged]) for side in (0, 1))
        self._merge_at = max(_FEWEST_PERIODS, 2 * len(merged))
        return merged


class PartialFiles(Struct, frozen=True):
    """The files of a workspace that were not kept, because it was too large."""

    count: int
    bytes: int
    paths: list[str]
    """the first ones by name"""


class Mark(Struct, frozen=True):
    """The end of a turn: how many messages there were, and their digest."""

    end: int
    """number of messages at the end of the turn"""
    digest: str
    """digest of these messages"""
    usage: Usage
    """of the conversation so far"""
    seconds: float
    """since the conversation began"""
    output: str | UnsetType = UNSET
    """the reply's text, if it differs from the last message"""
    files: dict[str, str] | UnsetType = UNSET
    """the workspace after the turn: paths to digests of contents"""
    trace: int | UnsetType = UNSET
    """number of steps in the trace, if there is a trace"""
    value: Any = UNSET
    """the reply's value, if it is not text"""
    files_partial: PartialFiles | UnsetType = UNSET
    """what `files` lacks, if the workspace was too large"""


class ToolCall(Struct, frozen=True, omit_defaults=True):
    """A tool call of a trial."""

    turn: int
    name: str | None
    """None: unknown tools were called in this turn"""
    arguments: Any = None
    """as JSON, or as the model wrote them if they are not JSON"""
    result: Any = None
    """None if unknown"""


class ToolResponse(Struct, frozen=True):
    """The `response` of a recorded tool call."""

    tool: str
    arguments: Any
    result: Any = None
    traceback: str | UnsetType = UNSET
    """of a Python function that raised"""
    function: str | UnsetType | None = UNSET
    """of `context.tool(function)` with `replay: again`: `module:name`; None if no other process can find it"""
    files: dict[str, str] | UnsetType = UNSET
    """the workspace after the call"""
    settled: Literal["happened", "error_result"] | UnsetType = UNSET
    """of a call that was cut off: its result was given by a person, or is an error that says that nothing is known"""


class CallIntent(Struct, frozen=True):
    """The `response` of an intent: the call that is about to be made, and must not be made twice."""

    tool: str
    arguments: Any
    function: str | UnsetType | None = UNSET
    """as in `ToolResponse`, whatever the replay policy; UNSET for `target.tools`, whose results are texts"""
    on_cut_off: OnCutOff = "stop"
    """what happens if the call has no result, as the eval said when the call began"""


class ProxiedResponse(Struct, frozen=True):
    """The `response` of a model call that an agent made through the proxy."""

    model: Any
    """as the request names it"""
    whole: Any = UNSET
    """the reply, if it was not streamed"""
    events: list[Any] | UnsetType = UNSET
    """the events of a stream that the agent got"""
    counts: Any = UNSET
    """the tokens that the server reported"""
    free: bool | UnsetType = UNSET
    """the call costs nothing, such as a list of models"""


TraceStep = dict[str, Any]
"""One inner step of a target, in the form of NeMo Agent Toolkit's `IntermediateStep`, kept as the target sent it:

    {"parent_id": "…", "function_ancestry": {"function_id": …, "function_name": …, "parent_id": …, "parent_name": …},
     "payload": {"event_type": "LLM_END", "event_timestamp": 1.5, "span_event_timestamp": 1.0, "name": "model",
                 "data": {"input": …, "output": …}, "usage_info": {"token_usage": {…}}, "UUID": "…"}}

Readers must not rely on any field but `payload.event_type`: other keys may be missing, and more may be there. A target
returns its steps as `Reply.trace`; the output and the case that a grader sees have the steps of all turns in order.
"""


Content = str | list[dict[str, Any]]
"""the content of a message: a text, or a list of texts and files"""


def content_text(content: Any) -> str:
    """Return a message as text, with each file replaced by its name."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts = [part for part in content if isinstance(part, dict)]
    files = any("digest" in part for part in parts)
    return ("\n" if files else "").join(file_label(part) or str(part.get("text") or "") for part in parts)


def file_label(part: dict[str, Any]) -> str:
    """Return the name and type of a file in a message, for people; empty for other parts."""
    return f"[{part['type']}: {part.get('name')} ({part.get('media_type')})]" if "digest" in part else ""


class Output(Struct, frozen=True, omit_defaults=False):
    """A finished trial: a line of `outputs.jsonl`."""

    key: str
    """key of the trial"""
    sample: str
    """id of the sample"""
    trial: int
    """number of the trial, from 1"""
    attempt: int
    """1 + how often this trial had failed before it succeeded, in all processes"""
    messages: list[dict[str, Any]]
    """whole conversation, in the format of OpenAI's chat API; with `continuations` the last message has their
    `likelihoods`"""
    output: str
    """text of the last reply"""
    turns: int
    """number of user messages that were answered"""
    stop: str
    """[reason why the conversation ended](models.md#why-an-answer-ended): `stop`, `tool_calls`, `length`,
    `context_window`, `max_steps`, `content_filter`, `refusal`, `pause`, `time_limit`, `token_limit`, `cost_limit`,
    `call_limit`, `exit:CODE`, `checkpoint@TURN`, or the target's own word"""
    answer: AnswerClass
    """[class of the answer](graders.md#every-trial-is-accounted-for): `whole`, `cut`, `filtered`, `refused`, `empty`,
    `paused`, `limited` or `exited`; with several turns, the class of the first reply that is not whole"""
    usage: Usage
    """`input_tokens`, `output_tokens`, `requests`, and `cost` in dollars; null is unknown"""
    timing: Timing
    """`started` (seconds since the epoch), `seconds`, `first_token` (seconds, if streamed)"""
    digest: str
    """digest of `messages` and, if present, `files`, `calls` and `trace`, which ties a grade to what it graded"""
    state: Any = None
    """state that the target returned"""
    marks: list[Mark] | UnsetType = UNSET
    """only for conversations of several turns, or with checkpoints: the end of each turn (`end`, the number of
    messages, and `digest`; `output`, the text of the reply, if the last message differs; `usage` and `seconds` so far;
    `files`)"""
    stopped_by: str | UnsetType = UNSET
    """only if a checkpoint ended the conversation: its digest"""
    files: dict[str, str] | UnsetType = UNSET
    """only with a workspace: each path with the digest of its content, which is in `files/`. `+x` follows the digest of
    an executable file, `link:TARGET` stands for a symbolic link, and a path that ends in `/` is an empty folder"""
    calls: list[ToolCall] | UnsetType = UNSET
    """only if `messages` do not hold every tool call: all calls of the trial in order, each with `turn`, `name`,
    `arguments`, and `result` if it is known. A `name` of null means that the calls of this turn are unknown"""
    trace: list[TraceStep] | UnsetType = UNSET
    """only if the target reported its inner steps: the steps of all turns, in the form of NeMo Agent Toolkit's
    `IntermediateStep` (`parent_id`, `function_ancestry`, `payload` with `event_type`, `event_timestamp`, `name`,
    `data`, `usage_info` …), as the target sent them"""
    stop_detail: str | UnsetType = UNSET
    """only if a limit or an exit code ended the trial: which limit, or the end of what the program had printed"""
    files_partial: PartialFiles | UnsetType = UNSET
    """only if the workspace was larger than `workspace.max_size`: what `files` lacks (`count`, `bytes`, and `paths`, at
    most 1,000 of them)"""
    source: str | UnsetType = UNSET
    """only if the output was copied: the run in which it was generated"""
    opening: int | UnsetType = UNSET
    """only with `history` or `messages`: number of messages before the prompt"""
    value: Any = UNSET
    """only if the target returned a value that is no text, such as an object or a number: that value; `output` has it
    as JSON"""
    row: str | UnsetType = UNSET
    """only if the target sees just a part of the row: 16 digits of the row's digest, by which it is graded"""
    settled: int | UnsetType = UNSET
    """only if a person has said what a tool returned whose call was cut off: the number of such calls"""
    redacted: int | UnsetType = UNSET
    """only if the value of an environment variable that holds a secret was replaced: how often `(hidden: $NAME)` stands
    in the record; a text of this form that the dataset or the target wrote itself counts, too"""

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages; with `history` or `messages`, only from the prompt on: earlier ones are not the target's."""
        return self.messages[self.opening or 0 :]

    @property
    def prompt(self) -> str | None:
        """Text of the user's first message in the conversation; None without such a message."""
        asked = (message.get("content") for message in self.conversation if message.get("role") == "user")
        return next(map(content_text, asked), None)


class Together(Struct, frozen=True, omit_defaults=True):
    """The outputs that a grader has judged together, and its verdict on them as a whole."""

    digest: str
    """digest of these outputs: a verdict counts only while the run has exactly these"""
    score: Any = None
    """the grader's own number for all of them, such as a corpus metric; left out if it gives none, or could not judge
    one of them"""
    details: Any = None
    """further values that it returned for all of them"""


class Grade(Struct, frozen=True):
    """A verdict: a line of `grades.jsonl`."""

    key: str
    """key of the output"""
    sample: str
    """id of the sample"""
    trial: int
    """number of the trial, from 1"""
    grader: str
    """name of the grader"""
    type: str
    """type of the grader"""
    by: str
    """fingerprint of the grader: a verdict counts only for a grader with the same one"""
    turn: int | None
    """turn of a checkpoint; null for the end of the conversation"""
    judged: str
    """digest of what was judged: the conversation up to that moment, and whatever else the grader looks at. A verdict
    counts only for an output with the same one"""
    status: GradeStatus
    """`passed`, `failed`, `error`, `skipped` or `not_reached`, with the threshold at that time; `results.json` uses the
    current threshold"""
    score: float | None
    """from 0 to 1, or null"""
    weight: float
    """weight of the grader at that time"""
    feedback: str
    """the grader's explanation"""
    details: Any
    """further values that the grader returned"""
    seconds: float
    """duration of the grading"""
    usage: Usage | None = None
    """tokens, requests and cost of a judge; null for other graders"""
    time: float = 0.0
    """time of the verdict, in seconds since the epoch"""
    source: str | UnsetType = UNSET
    """only if the grade was copied: the run in which it was made"""
    counts: tuple[int, ...] | UnsetType = UNSET
    """only for metrics that have a number for the whole run: the counts that are summed for it"""
    together: Together | UnsetType = UNSET
    """only if the grader looked at all outputs of the run together: their `digest`, and its `score` and `details` for
    all of them"""


class ErrorRecord(Struct, frozen=True):
    """A failed attempt: a line of `errors.jsonl`."""

    key: str
    """key of the trial"""
    sample: str
    """id of the sample"""
    trial: int
    """number of the trial, from 1"""
    attempt: int
    """how many times the target, or that grader, has failed at this trial, from 1"""
    where: str
    """`target`, or the name of the grader"""
    kind: str
    """`connection`, `rate_limit`, `server`, `timeout`, `bad_reply`, `bad_request`, `agent`, `grader`; `uncertain` if a
    call that must not be made twice [was cut off](agents.md#calls-that-must-not-happen-twice); or a kind that stops a
    run: `auth`, `no_model`, `refused`, `quota`, `disk`, `rejected`"""
    message: str
    """cause in words"""
    status: int | None
    """HTTP status, or null"""
    time: float
    """time of the failure, in seconds since the epoch"""
    seconds: float
    """duration of the attempt"""
    final: bool
    """true if no further attempt followed in that process"""
    usage: Usage | None = None
    """tokens, requests and cost of the failed attempt, if known"""
    traceback: str | UnsetType = UNSET
    """only if a user's Python function raised, or a hook wrote one: the frames of the user's code, at most 8,000
    characters, with the values of environment variables that hold secrets (`…KEY`, `…TOKEN`, `…SECRET`, `…PASSWORD`)
    redacted"""
    row: str | UnsetType = UNSET
    """only if the sample has no id of its own: file and line"""

    @property
    def named_sample(self) -> str:
        """The sample's id, with the place of its row if the id is only a digest."""
        return named_sample(self.sample, self.row)


def named_sample(sample: str, row: str | UnsetType) -> str:
    """Return a sample's id, followed by file and line if the id is only a digest."""
    return sample if isinstance(row, UnsetType) else f"{sample} ({row.rpartition('/')[2]})"


class Step(Struct, frozen=True):
    """A call inside a conversation, with its result: a line of `steps.jsonl`."""

    key: str
    """key of the trial"""
    sample: str
    """id of the sample"""
    trial: int
    """number of the trial, from 1"""
    turn: int
    """number of the turn, from 1"""
    kind: str
    """`turn`, `responder`, `model`, `tool`, `intent`, `settle` or `restart`: see below"""
    request: str
    """digest of the request"""
    nth: int
    """number among the equal requests of this turn, from 1"""
    response: Any
    """the answer. A tool's answer has `tool`, `arguments`, `result`, with a workspace `files`, and if a Python function
    of the eval's `tools` raised, `traceback`, as in `errors.jsonl`; `settled` if the call was cut off and the result
    is what a person said (`happened`) or an error (`error_result`)"""
    usage: Usage
    """tokens, requests and cost of the call"""
    time: float
    """time of the call, in seconds since the epoch"""
    seconds: float
    """duration of the call"""
    source: str | UnsetType = UNSET
    """only if the step was copied: the run in which the call was made"""


Record = Output | Grade | ErrorRecord | Step

KEY_PLACE: Final = slice(8, 47)
"""The place of the key in a line of each journal: the first field, a digest, by which lines are found."""

_encoder = Encoder()


def to_line(record: Record) -> bytes:
    """Encode a record as a sealed journal line."""
    return seal(_encoder.encode(record))
