"""Stop reasons: why a model ended its answer, in the words of each API, and what follows from it.

A table maps the words of an API to those that outputs have. A word that no table has is recorded as it is. What follows
is one of three actions:

    record      the reply is the answer, whole or not
    continue    the model paused: its message is sent back to it, and the answer goes on
    retry       the server failed, so that there is no answer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from holdfast.spec.schema import Api

Action = Literal["record", "continue", "retry"]
UNKNOWN: Final = "unknown"
"""the stop reason of a whole reply without one"""


class Stop(NamedTuple):
    """A stop reason."""

    word: str
    """`stop`, `tool_calls`, `length` (the token limit), `context_window`, `content_filter`, `refusal`, `pause`,
    `unknown`, or the API's own word"""
    action: Action = "record"


def _table(*own: str, retry: tuple[str, ...] = (), **words: tuple[str, ...]) -> dict[str, Stop]:
    """Make a table of the API's words by those that they mean; `own` words are recorded as they are."""
    actions: dict[str, Action] = {"pause": "continue"}
    table = {theirs: Stop(ours, actions.get(ours, "record")) for ours in words for theirs in words[ours]}
    return table | {word: Stop(word) for word in own} | {word: Stop(word, "retry") for word in retry}


_MISTAKES: Final = (
    *("MALFORMED_FUNCTION_CALL", "UNEXPECTED_TOOL_CALL", "TOO_MANY_TOOL_CALLS", "MALFORMED_RESPONSE", "NO_IMAGE"),
)
"""mistakes of Google's models: they are the answer, so the model is not asked again"""
_GEMINI: Final = _table(
    *_MISTAKES,
    stop=("STOP",),
    length=("MAX_TOKENS",),
    content_filter=(
        *("SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "LANGUAGE", "MODEL_ARMOR"),
        *("IMAGE_SAFETY", "IMAGE_PROHIBITED_CONTENT", "IMAGE_RECITATION"),
    ),
    unknown=("FINISH_REASON_UNSPECIFIED",),
    retry=("OTHER", "IMAGE_OTHER"),  # "unknown reason": neither an answer nor a verdict on one
)
# Most servers speak chat completions, some with words of their own: Mistral `model_length`, Together `eos`, TGI
# `eos_token` and `stop_sequence`, GLM `sensitive` and `network_error`, vLLM and SGLang `abort`, DeepSeek
# `insufficient_system_resource`. Gateways pass the words of Messages and Gemini on.
_CHAT: Final = _GEMINI | _table(
    stop=("stop", "eos", "eos_token", "stop_sequence", "end_turn"),
    tool_calls=("tool_calls", "function_call", "tool_use"),
    length=("length", "max_tokens"),
    context_window=("model_length", "model_context_window_exceeded"),
    content_filter=("content_filter", "sensitive"),
    refusal=("refusal",),
    retry=("insufficient_system_resource", "network_error", "abort"),
)
_TABLES: Final[dict[Api, dict[str, Stop]]] = {
    "chat": _CHAT,
    "completions": _CHAT,
    "messages": _table(
        stop=("end_turn", "stop_sequence"),
        tool_calls=("tool_use",),
        length=("max_tokens",),
        context_window=("model_context_window_exceeded",),
        refusal=("refusal",),
        pause=("pause_turn",),
    ),
    "responses": _table(
        stop=("completed",),
        length=("max_output_tokens", "max_tokens"),
        content_filter=("content_filter",),
    ),
    "gemini": _GEMINI,
}
_KNOWN: Final = {stop.word for table in _TABLES.values() for stop in table.values()} - {UNKNOWN}

_PARTIAL: Final = {
    "length": "was cut off at its token limit",
    "context_window": "was cut off at the end of the model's context",
    "content_filter": "was filtered",
    "refusal": "was refused",
    "pause": "was paused and did not go on",
}
"""stop reasons of partial replies, in words"""


def read_stop(api: Api, word: Any, message: dict[str, Any]) -> Stop:
    """Return why a reply ended, by the API's word for it and by the message: a refusal may be in either."""
    table = _TABLES[api]
    name = str(word or "")
    # Google adds its reason to the word of chat completions: `content_filter: PROHIBITED_CONTENT`.
    stop = table.get(name) or table.get(name.partition(":")[0]) or Stop(name or UNKNOWN)
    if stop.word in ("stop", UNKNOWN) and message.get("tool_calls"):
        return Stop("tool_calls")
    if stop.word in ("stop", UNKNOWN) and message.get("refusal"):
        return Stop("refusal")
    return stop


def is_known(word: str) -> bool:
    """Return True for a stop reason that a table has."""
    return word in _KNOWN


def describe_partial(word: str) -> str | None:
    """Describe how a partial reply ended, such as "was filtered"; None for whole replies."""
    return f"ended with {word}" if word in _MISTAKES else _PARTIAL.get(word)
