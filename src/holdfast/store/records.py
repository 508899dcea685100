"""Records of the journals. One struct per file; the field names are the documented format."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeVar

from msgspec import UNSET, Struct, UnsetType
from msgspec.json import Encoder

from holdfast.store.lines import seal

SCHEMA_VERSION = "1.1"
"""Version of the run directory's files, MAJOR.MINOR, written into each `.json` of it."""

GradeStatus = Literal["passed", "failed", "error", "skipped", "not_reached"]

Number = TypeVar("Number", int, float)


def apply_threshold(threshold: float | None, status: GradeStatus, score: float | None) -> GradeStatus:
    """Return a verdict's status for the current threshold; without a threshold the grader's own decision stands."""
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
        """Input and output tokens."""
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


def _add(first: Number | None, second: Number | None) -> Number | None:
    return None if first is None or second is None else first + second


NO_USAGE: Final = Usage(0, 0, 0, 0.0)
"""Usage that is known to be zero."""


class Timing(Struct, frozen=True):
    """Start of a trial (seconds since the epoch), its duration, and the time to its first token."""

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
    """None: unknown tools were called in this turn"""
    arguments: Any = None
    """as JSON; as the model wrote them where they are not JSON"""
    result: Any = None
    """None if unknown"""


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
    """the run that the output was copied from"""


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
    """time of the verdict, seconds since the epoch"""
    source: str | UnsetType = UNSET
    counts: tuple[int, ...] | UnsetType = UNSET
    """numbers to be summed over the run, of graders with run-wide metrics"""


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
    """tokens and cost of the failed attempt, if known"""
    traceback: str | UnsetType = UNSET
    """traceback of the user's code, if it raised"""
    row: str | UnsetType = UNSET
    """file and line of the row, where the sample has no id of its own"""

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
    sample: str
    trial: int
    turn: int
    kind: str
    """`turn` (a whole reply of the target), `responder`, `model`, `tool`; `intent`: a tool call with side effects is
    about to be made; `restart`: what came before does not count"""
    request: str
    """digest of the request"""
    nth: int
    """number among the equal requests of this conversation, from 1"""
    response: Any
    usage: Usage
    time: float
    seconds: float
    source: str | UnsetType = UNSET


Record = Output | Grade | ErrorRecord | Step

_encoder = Encoder()


def to_line(record: Record) -> bytes:
    """Encode a record as a sealed journal line."""
    return seal(_encoder.encode(record))
