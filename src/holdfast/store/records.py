"""Records of the journals, one struct per file. The field names are the documented format."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeVar

from msgspec import UNSET, Struct, UnsetType
from msgspec.json import Encoder

from holdfast.store.lines import seal

SCHEMA_VERSION = "1.1"
"""Version of the run directory's files, MAJOR.MINOR, written into each `.json` of it."""

GradeStatus = Literal["passed", "failed", "error", "skipped", "not_reached"]

Number = TypeVar("Number", int, float)


def status_by(threshold: float | None, status: GradeStatus, score: float | None) -> GradeStatus:
    """Return a verdict's status by the present threshold; without one, the grader's decision."""
    if threshold is None or score is None or status not in ("passed", "failed"):
        return status
    return "passed" if score >= threshold else "failed"


class Usage(Struct, frozen=True):
    """Tokens, requests and dollars of a trial or a grade. None means unknown, which is not zero."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    requests: int = 0
    cost: float | None = None

    @property
    def tokens(self) -> int | None:
        """Input and output tokens together."""
        if self.input_tokens is None or self.output_tokens is None:
            return None
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Usage) -> Usage:
        """Add the usage of another call; unknown plus anything is unknown."""
        return Usage(
            _add(self.input_tokens, other.input_tokens),
            _add(self.output_tokens, other.output_tokens),
            self.requests + other.requests,
            _add(self.cost, other.cost),
        )


def _add(one: Number | None, other: Number | None) -> Number | None:
    return None if one is None or other is None else one + other


NO_USAGE: Final = Usage(0, 0, 0, 0.0)
"""Known to be nothing."""


class Timing(Struct, frozen=True):
    """When a trial started (seconds since the epoch), how long it took, and when its first token came."""

    started: float
    seconds: float
    first_token: float | None = None


class Mark(Struct, frozen=True):
    """The end of a turn: how many messages there were, and their digest."""

    end: int
    digest: str
    output: str | UnsetType = UNSET
    """the reply's text, where it is not that of the last message"""
    usage: Usage | UnsetType = UNSET
    """of the conversation so far"""
    seconds: float | UnsetType = UNSET
    """since the conversation began"""
    files: dict[str, str] | UnsetType = UNSET
    """the workspace after the turn: paths to digests of contents"""
    trace: int | UnsetType = UNSET
    """how many steps the trace had, where there is one"""


class ToolCall(Struct, frozen=True, omit_defaults=True):
    """A tool call of a trial."""

    turn: int
    name: str | None
    """None: nobody knows what was called in this turn"""
    arguments: Any = None
    """as JSON; as the model wrote them where they are not JSON"""
    result: Any = None
    """None where it is not known"""


class ToolResponse(Struct, frozen=True):
    """The `response` of a recorded tool call."""

    tool: str
    arguments: Any = UNSET
    """UNSET in records of earlier versions"""
    result: Any = None
    traceback: str | UnsetType = UNSET
    """of a Python function that raised"""
    function: str | UnsetType | None = UNSET
    """of `context.tool(function)` with `replay: again`: `module:name`; None where no other process can find it"""
    files: dict[str, str] | UnsetType = UNSET
    """the workspace after the call"""


class ProxiedResponse(Struct, frozen=True):
    """The `response` of a model call that an agent made through the proxy."""

    model: Any
    """as the request names it"""
    whole: Any = UNSET
    """the reply, where it was not streamed"""
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
returns its steps as `Reply.trace`; the output and the case that a grader sees have those of all turns in order.
"""


class Output(Struct, frozen=True, omit_defaults=False):
    """A finished trial: a line of `outputs.jsonl`."""

    key: str
    sample: str
    trial: int
    attempt: int
    messages: list[dict[str, Any]]
    output: str
    turns: int
    stop: str
    usage: Usage
    timing: Timing
    digest: str
    """of `messages`, `files` and `calls`, so that a grade is tied to what it graded"""
    state: Any = None
    marks: list[Mark] | UnsetType = UNSET
    """where each turn ended, in conversations of more than one"""
    stopped_by: str | UnsetType = UNSET
    """digest of the checkpoint that ended the conversation, where one did"""
    files: dict[str, str] | UnsetType = UNSET
    """the workspace at the end: paths to digests of contents, which are in the run directory's `files/`"""
    calls: list[ToolCall] | UnsetType = UNSET
    """every tool call in order, where `messages` do not hold them all"""
    trace: list[TraceStep] | UnsetType = UNSET
    """what the target reported about its inner calls, over all turns, where it reported anything"""
    source: str | UnsetType = UNSET
    """the run it was copied from, where it was"""


class Grade(Struct, frozen=True):
    """A verdict: a line of `grades.jsonl`."""

    key: str
    grade_key: str
    sample: str
    trial: int
    grader: str
    type: str
    turn: int | None
    status: GradeStatus
    score: float | None
    weight: float
    feedback: str
    details: Any
    seconds: float
    usage: Usage | None = None
    time: float | UnsetType = UNSET
    """when it was given, seconds since the epoch"""
    source: str | UnsetType = UNSET
    counts: tuple[int, ...] | UnsetType = UNSET
    """what is summed over the run, of graders that have a number for the whole"""


class ErrorRecord(Struct, frozen=True):
    """A failed attempt: a line of `errors.jsonl`."""

    key: str
    sample: str
    trial: int
    attempt: int
    where: str
    """`target`, or the grader's name"""
    kind: str
    message: str
    status: int | None
    time: float
    seconds: float
    final: bool
    """True when no further attempt followed in that process"""
    usage: Usage | None = None
    """what it used all the same, where that is known"""
    traceback: str | UnsetType = UNSET
    """of the user's code that raised, where one did"""
    row: str | UnsetType = UNSET
    """file and line of the row, where the sample has no id of its own"""

    @property
    def named_sample(self) -> str:
        """The sample's id, or the place of its row where the id is only a digest."""
        return named_sample(self.sample, self.row)


def named_sample(sample: str, row: str | UnsetType) -> str:
    """Return a sample's id, with file and line behind it where the id is only a digest."""
    return sample if isinstance(row, UnsetType) else f"{sample} ({row.rpartition('/')[2]})"


class Step(Struct, frozen=True):
    """A call inside a conversation, with its result: a line of `steps.jsonl`."""

    key: str
    sample: str
    trial: int
    turn: int
    kind: str
    """`turn` (a whole reply of the target), `responder`, `model`, `tool`; `intent`: a tool call with side effects is
    about to be made; `restart`: what came before does not count"""
    request: str
    """digest of what was asked"""
    nth: int
    """which of the equal requests of this conversation, from 1"""
    response: Any
    usage: Usage
    time: float
    seconds: float
    source: str | UnsetType = UNSET


Record = Output | Grade | ErrorRecord | Step

_encoder = Encoder()


def to_line(record: Record) -> bytes:
    """Return the record as a sealed journal line."""
    return seal(_encoder.encode(record))
