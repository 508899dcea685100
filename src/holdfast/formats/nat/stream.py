"""The inner steps that `nat serve` reports in its streams, as `intermediate_data:` lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.dialects.reading import count
from holdfast.store.records import Usage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.store.records import TraceStep

_PREFIX: Final = b"intermediate_data:"


class _Line(msgspec.Struct):
    payload: str
    """JSON as a text: what NAT calls an IntermediateStepPayload"""


class StreamedSteps:
    """Collects the steps of one reply."""

    def __init__(self) -> None:
        self.trace: list[TraceStep] = []

    def read(self, line: bytes) -> None:
        """Read a line of the stream; other lines are skipped."""
        if (step := _read_step(line)) is not None:
            self.trace.append(step)

    def usage(self) -> Usage:
        """Add up the tokens of all model calls."""
        return usage_of(self.trace)


def _read_step(line: bytes) -> TraceStep | None:
    """Read a step as `nat eval --endpoint` does; None where the line is none, or text for people.

    `/generate/full` sends steps, `/generate/stream` sends them as Markdown, which no evaluator can read.
    """
    if not line.startswith(_PREFIX):
        return None
    try:
        sent = msgspec.json.decode(line[len(_PREFIX) :], type=_Line)
        payload = msgspec.json.decode(sent.payload, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(payload.get("event_type"), str) or payload["event_type"] == "LLM_NEW_TOKEN":
        return None  # one per token; the end of the call has all of them
    ancestry = {
        "function_id": payload.get("UUID") or "remote_function_id",
        "function_name": payload.get("name") or "remote_function",
        "parent_id": None,
        "parent_name": None,
    }
    return {"parent_id": "remote", "function_ancestry": ancestry, "payload": payload}


def usage_of(trace: Iterable[TraceStep]) -> Usage:
    """Add up the tokens of all model calls; unknown where a call does not say."""
    counts = []
    for step in trace:
        payload = step["payload"]
        if payload.get("event_type") == "LLM_END":
            counts.append((payload.get("usage_info") or {}).get("token_usage") or {})
    sent = [count(each.get("prompt_tokens")) for each in counts]
    received = [count(each.get("completion_tokens") or 0) for each in counts]
    complete = bool(counts) and all(sent) and None not in received
    return Usage(
        sum(number or 0 for number in sent) if complete else None,
        sum(number or 0 for number in received) if complete else None,
        len(counts),
    )
