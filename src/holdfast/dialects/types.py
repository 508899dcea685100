"""The interface of dialects: they write requests to a model, read its replies, and say why replies ended.

Conversations have the same form everywhere in Holdfast: OpenAI's chat API with two additions. A message of the model
may have `reasoning`, its thoughts as text, and `raw`, everything that the server sent and the other keys do not hold.
A dialect writes conversations in the form of its API, and reads replies into this form.

A table maps an API's words for the end of an answer to those that outputs have. A word that no table has is recorded as
it is. The action that follows is one of three:

    record      the reply is the answer, whole or not
    continue    the model paused: its message is sent back to it, and the answer goes on
    retry       the server failed, so that there is no answer
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple

from msgspec import Struct

from holdfast.errors import AttemptError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from holdfast.errors import Fault
    from holdfast.spec.providers import Access
    from holdfast.spec.schema import Api, ReasoningHistory

Message = dict[str, Any]
"""a message of a conversation: `role`, `content`, `tool_calls`, `tool_call_id`, `reasoning`, `raw`"""

_MALFORMED: Final = (KeyError, IndexError, TypeError, AttributeError, ValueError)
"""raised by reading a reply that is not in the form of its API"""
STOPPED_EARLY: Final = "the stream ended before the answer was complete"


class ModelRequest(Struct, frozen=True, kw_only=True):
    """A request to a model, before it is written in a dialect."""

    model: str
    messages: Sequence[Message]
    params: Mapping[str, Any] = MappingProxyType({})
    """sent as they are, except for `reasoning`, which each dialect translates"""
    tools: Sequence[dict[str, Any]] = ()
    """definitions in the form of OpenAI's chat API"""
    schema: Mapping[str, Any] | None = None
    """JSON Schema of the reply"""
    max_tokens: int | None = None
    """limit of the reply, for callers that always need one; `params` takes precedence"""
    stream: bool = False
    reasoning_history: ReasoningHistory = "auto"
    load: Callable[[str], bytes] | None = None
    """returns the content of a file that a message names by its digest"""


class TokenCounts(Struct, frozen=True, kw_only=True):
    """Counts of tokens, as the server reports them. None is unknown."""

    input: int | None = None
    """all tokens of the prompt, cached ones included"""
    output: int | None = None
    """all tokens of the reply, reasoning included"""
    cache_read: int = 0
    """of `input`: read from the provider's cache"""
    cache_write: int = 0
    """of `input`: written to it"""
    cache_write_long: int = 0
    """of `cache_write`: to be kept for an hour, which costs more"""
    input_audio: int = 0
    """of `input`: sound"""
    output_audio: int = 0
    """of `output`: sound"""
    reasoning: int | None = None
    """of `output`: spent on reasoning"""
    searches: int = 0
    """web searches that the provider made, and charges for one by one"""
    tier: str | None = None
    """the service tier that answered; None: the standard one"""
    unpriced: str | None = None
    """other charges of the provider, which no table of prices has"""
    absurd: bool = False
    """the server reported impossible numbers, which count as unknown"""


class Answer(Struct, frozen=True, kw_only=True):
    """A reply of a model."""

    message: Message
    """in the form of conversations"""
    tokens: TokenCounts = TokenCounts()
    stop: str = "stop"
    """why it ended, in the words of `Stop`"""
    action: Action = "record"
    """what follows from it"""

    @property
    def text(self) -> str:
        """The reply's text, empty if the model only thought or called tools."""
        return self.message.get("content") or ""


class StreamReader:
    """Puts the events of one streamed reply together."""

    def feed(self, event: Any) -> bool:
        """Take the next event; return True if it holds a part of the answer's text.

        Raises AttemptError for an error event or an unknown event.
        """
        try:
            return self.take_event(event)
        except _MALFORMED as error:
            raise AttemptError("bad_reply", f"not an event of a reply: {str(event)[:200]}") from error

    def take_event(self, event: Any) -> bool:
        """Take the next event, as `feed` does; any error of reading it means that it is unknown."""
        raise NotImplementedError

    @property
    def ended(self) -> bool:
        """True once the event that ends the answer has arrived."""
        raise NotImplementedError

    def finish(self) -> Answer:
        """Return the whole answer; raise AttemptError if the stream ended before it did."""
        if not self.ended:
            raise AttemptError("bad_reply", STOPPED_EARLY)
        return self.answer()

    def answer(self) -> Answer:
        """Return the answer, after its last event."""
        raise NotImplementedError


class Dialect:
    """An API of models. Has no state: one object serves all targets, judges and proxies."""

    api: ClassVar[Api]
    volatile: ClassVar[tuple[str, ...]] = ()
    """fields of a request that clients change on every start, as `metadata.user_id` or `input[].id`; a recorded call
    is found without them"""

    def at(self, access: Access) -> Dialect:
        """Return the dialect as a cloud offers it: with `access`, how requests there are authenticated."""
        return self

    def path(self, model: str, *, stream: bool) -> str:
        """Return the path of a request, which follows the base URL."""
        raise NotImplementedError

    def headers(self, key: str | None) -> dict[str, str]:
        """Return the headers that authenticate a request, and other headers that the API requires."""
        return {"Authorization": f"Bearer {key}"} if key else {}

    def encode(self, request: ModelRequest) -> dict[str, Any]:
        """Return the body of a request."""
        raise NotImplementedError

    def read(self, reply: Any) -> Answer:
        """Read a whole reply; raise AttemptError if there is no answer in it."""
        try:
            return self.read_reply(reply)
        except _MALFORMED as error:
            raise no_answer(reply) from error

    def read_reply(self, reply: Any) -> Answer:
        """Read a whole reply, as `read` does; any error of reading it means that there is no answer."""
        raise NotImplementedError

    def reader(self) -> StreamReader:
        """Return a reader for one streamed reply."""
        raise NotImplementedError

    def join(self, paused: Message, rest: Message) -> Message:
        """Join a paused message and its continuation."""
        raise NotImplementedError

    def explain(self, error: AttemptError | Fault) -> str | None:
        """Return the line to write in the eval file, for a refusal that every request will meet; None for others."""
        return None

    def conversation(self, body: Any) -> list[Message]:
        """Extract the conversation from a third-party request, ignoring unknown fields."""
        raise NotImplementedError


def no_answer(reply: Any) -> AttemptError:
    """Return the error for a reply in which there is no answer."""
    return AttemptError("bad_reply", f"the reply has no answer in it: {str(reply)[:200]}")


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
