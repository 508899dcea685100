"""One request of a program to a model and its answer, in whichever API the program uses.

The path of a request determines the API. The record holds what the program got; it is read here for its tokens and for
the model's messages.

Two requests count as the same if they ask the same, whatever the client changes on every start: fields that are
volatile are left out. A path names a field: `metadata.user_id`, or `input[].id` for a field of every object in a list.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import UnsetType

from holdfast.dialects import dialect_of
from holdfast.dialects.chat import StreamedCalls, read_tokens
from holdfast.dialects.types import TokenCounts, no_answer
from holdfast.errors import AttemptError
from holdfast.store.records import ProxiedResponse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from holdfast.dialects.types import Answer, Dialect, Message
    from holdfast.spec.schema import Api

_VERSIONS: Final = re.compile(r"(?:v1(?:beta\d*|alpha)?(?:/+|$))+")
_GEMINI: Final = re.compile(r"models/([^/:]+):(generateContent|streamGenerateContent|countTokens)$")
_FREE: Final = ("messages/count_tokens", "responses/input_tokens")


class Place(NamedTuple):
    """The API and the provider that the path of a request belongs to."""

    path: str
    """without the version that stands before it"""
    api: Api | None
    """None: nothing that answers, such as a list of models, or an API that is not read here"""
    provider: str
    """whose clients use the path: `openai`, `anthropic` or `google`"""
    model: str | None = None
    """the model, if the path names it"""
    free: bool = False
    """the request costs nothing: it counts tokens"""
    streams: bool = False
    """the answer is streamed whatever the body says"""


def place_of(path: str, headers: Mapping[str, str]) -> Place:
    """Read the path of a request after the base URL, with or without `v1`."""
    path = path.strip("/")
    version = _VERSIONS.match(path)
    rest = path[version.end() :] if version else path
    if gemini := _GEMINI.search(rest):
        model, method = gemini.groups()
        if method == "countTokens":
            return Place(rest, None, "google", model, free=True)
        return Place(rest, "gemini", "google", model, streams=method == "streamGenerateContent")
    if "x-goog-api-key" in headers:
        return Place(rest, None, "google")
    if rest == "messages":
        return Place(rest, "messages", "anthropic")
    if "anthropic-version" in headers:
        return Place(rest, None, "anthropic", free=rest in _FREE)
    if rest.endswith("chat/completions"):
        return Place(rest, "chat", "openai")
    if rest.endswith("completions"):
        return Place(rest, "completions", "openai")
    return Place(rest, "responses" if rest == "responses" else None, "openai", free=rest in _FREE)


def dialect_at(place: Place) -> Dialect | None:
    """Return the dialect of a request; None if it does not ask a model."""
    return None if place.api is None else dialect_of(place.api)


def read_answer(dialect: Dialect, response: ProxiedResponse) -> Answer | None:
    """Read an answer; None if it is not in the form of its API."""
    try:
        if isinstance(response.events, UnsetType):
            return dialect.read(response.whole)
        reader = dialect.reader()
        for event in response.events:
            reader.feed(event)
        return reader.finish()
    except AttemptError as error:
        if error.kind != "bad_reply":
            raise
        return None


def check_answer(dialect: Dialect, response: ProxiedResponse) -> None:
    """Raise AttemptError for a reply without an answer, or a failure that a server reports as one, or at its end.

    On record, the program would get it again and again.
    """
    answer = read_answer(dialect, response)
    if answer is None:
        raise no_answer(response.whole if isinstance(response.events, UnsetType) else response.events)
    if answer.action == "retry":
        raise AttemptError("server", f"the server ended the answer with {answer.stop!r}: it has failed")


def read_messages(place: Place, recorded: Any) -> list[Message] | None:
    """Return the messages of the model in a recorded answer; None if they cannot be read."""
    dialect, response = dialect_at(place), msgspec.convert(recorded, ProxiedResponse)
    if dialect is None:
        return []
    if place.api != "chat":
        answer = read_answer(dialect, response)
        return None if answer is None else [answer.message]
    try:  # each of several choices is a message
        if not isinstance(response.events, UnsetType):
            return _joined(response.events)
        choices = response.whole.get("choices") if isinstance(response.whole, dict) else None
        return [choice.get("message") or {} for choice in choices or ()]
    except (AttributeError, TypeError, KeyError):
        return None


def _joined(events: Iterable[Any]) -> list[Message]:
    answers: dict[int, StreamedCalls] = {}
    for event in events:
        for choice in event.get("choices") or ():
            calls = answers.setdefault(choice.get("index") or 0, StreamedCalls())
            for piece in (choice.get("delta") or choice.get("message") or {}).get("tool_calls") or ():
                calls.add(piece)
    return [{"tool_calls": calls.all()} for calls in answers.values()]


def _tier(response: ProxiedResponse) -> Any:
    """Return the service tier that answered, which each event of a stream names."""
    parts = [response.whole] if isinstance(response.events, UnsetType) else response.events
    return next((part["service_tier"] for part in parts if isinstance(part, dict) and part.get("service_tier")), None)


def read_counts(place: Place, response: ProxiedResponse) -> TokenCounts:
    """Return the tokens of a recorded answer."""
    dialect = dialect_at(place)
    if dialect is not None and place.api not in ("chat", "completions"):
        answer = read_answer(dialect, response)
        if answer is not None:
            return answer.tokens
    counts = response.counts if isinstance(response.counts, dict) else {}
    if "prompt_tokens" not in counts:
        counts = {"prompt_tokens": counts.get("input_tokens"), "completion_tokens": counts.get("output_tokens")}
    tokens = read_tokens(counts, _tier(response))
    if tokens.output is None and tokens.input is not None and counts.get("total_tokens") == tokens.input:
        return TokenCounts(input=tokens.input, output=0)  # embeddings
    return tokens


class Volatile(NamedTuple):
    """A field of requests, or a part of it, that does not change what is asked."""

    path: str
    pattern: re.Pattern[str] | None = None
    """matches the parts of a text that are left out; None: the field is left out"""


def without(body: Any, fields: Iterable[Volatile]) -> Any:
    """Return the body of a request without its volatile parts."""
    for field in fields:
        body = _without(body, re.findall(r"\[\]|[^.\[\]]+", field.path), field.pattern)
    return body


def _without(value: Any, path: Sequence[str], pattern: re.Pattern[str] | None) -> Any:
    if not path:
        return pattern.sub("", value) if pattern is not None and isinstance(value, str) else value
    name, *rest = path
    if name == "[]":
        return [_without(each, rest, pattern) for each in value] if isinstance(value, list) else value
    if not isinstance(value, dict) or name not in value:
        return value
    if not rest and pattern is None:
        return {key: each for key, each in value.items() if key != name}
    return {**value, name: _without(value[name], rest, pattern)}
