"""The inner steps that `nat serve` reports in its streams, as `intermediate_data:` lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from holdfast.store.records import TraceStep

_PREFIX: Final = b"intermediate_data:"


class _Line(msgspec.Struct):
    payload: str
    """JSON as a text: what NAT calls an IntermediateStepPayload"""


def read_step(line: bytes) -> TraceStep | None:
    """Read a step as NAT's own `nat eval --endpoint` does; None where the line is none, or only words for people.

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
        return None  # one per token, and all of them again at the end of the call
    ancestry = {
        "function_id": payload.get("UUID") or "remote_function_id",
        "function_name": payload.get("name") or "remote_function",
        "parent_id": None,
        "parent_name": None,
    }
    return {"parent_id": "remote", "function_ancestry": ancestry, "payload": payload}
