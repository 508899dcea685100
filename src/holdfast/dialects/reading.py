"""Helpers of all dialects: token counts, errors and hints, raw replies, reasoning that is sent back, and files.

In a conversation a file is a part `{"type": "image" | "audio" | "file", "digest": …, "media_type": …, "name": …}`. Its
content is kept once, by its digest; requests have the content itself.
"""

from __future__ import annotations

import re
from base64 import b64encode
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec.structs import replace

from holdfast.dialects.types import TokenCounts
from holdfast.errors import AttemptError
from holdfast.store.records import MOST_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from holdfast.dialects.types import Message
    from holdfast.errors import Fault
    from holdfast.spec.schema import ReasoningHistory
    from holdfast.spec.target_schema import ThoughtsBlock

_HIDDEN: Final = frozenset(("reasoning", "reasoning_content", "reasoning_details", "raw"))
"""keys of a message that neither graders nor simulated users see"""
_START_OF_THOUGHTS: Final = re.compile(r"(?i)<(?:think|thinking|thought|reasoning)>")
_END_OF_THOUGHTS: Final = re.compile(r"(?i)</(?:think|thinking|thought|reasoning)>")

_PARAMETER: Final = r"[`'\"]?\b(temperature|top_p|top_k|presence_penalty|frequency_penalty|stop|logprobs|seed)\b[`'\"]?"
_REFUSED: Final = r"(?:not supported|unsupported|does not support|deprecated|not enabled)"
_REMOVE: Final = "Remove `{0}` from target.params: this model does not take it."
_LINES: Final = (
    (
        r"['`\"]([\w.]+)['`\"].{0,120}moved to ['`\"]([\w.]+)['`\"]",
        "Write `{1}` instead of `{0}` in target.params: this API knows only that name.",
    ),
    (
        r"use ['`\"]?max_completion_tokens",
        "Write `max_completion_tokens` instead of `max_tokens` in target.params: this model knows only that name.",
    ),
    (r"v1/responses|Responses API", "Write `api: responses` in target: this model answers such requests only there."),
    (r"use v1/completions", "Write `api: completions` in target: this model has no chat API."),
    (r"max_tokens: Field required", "Write `max_tokens: 4096` in target.params: this API requires a limit."),
    (
        r"['`\"]?\b(\w+)\b['`\"]? and ['`\"]?(\w+)['`\"]? cannot both be specified",
        "Remove `{0}` or `{1}` from target.params: this model takes only one of them.",
    ),
    (
        r"(temperature)['`\"]? may only be set to 1 when thinking",
        "Remove `temperature` from target.params: this model does not take it while it reasons.",
    ),
    (
        r"thinking budget is not supported",
        "Write `reasoning: {{effort: high}}` in target.params: this model takes no limit of its reasoning in tokens.",
    ),
    (
        r"thinking level is not supported",
        "Write `reasoning: {{tokens: 8192}}` in target.params: this model takes no effort, only a limit.",
    ),
    (
        r"thinking can't be disabled|only works in thinking mode",
        "Remove `reasoning` from target.params: this model cannot do without.",
    ),
    (r"developer instruction is not enabled", "Remove `system` from the eval file: this model takes no instructions."),
    (
        r"(?:unrecognized request argument supplied: |unknown parameter: |unknown name )['`\"]?([\w.]+)",
        "Remove `{0}` from target.params: this API does not have it.",
    ),
    (
        r"property ['`\"]([\w.]+)['`\"] is unsupported",
        "Remove `{0}` from target.params: this API does not have it.",
    ),
    (rf"{_PARAMETER}\W.{{0,60}}{_REFUSED}", _REMOVE),
    (rf"{_REFUSED}.{{0,60}}\W{_PARAMETER}", _REMOVE),
)
"""a server's words, and the line to write; the first match counts"""


def count(value: Any) -> int | None:
    """Return a number of tokens; None if the server sent something else."""
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None  # a bool is no number


def check_counts(tokens: TokenCounts, reported: Iterable[Any], total: Any = None) -> TokenCounts:
    """Return the counts that can be true; the rest is unknown.

    `reported` are the numbers as the server sent them. One that is no number of tokens makes all of them unknown.
    xAI counts reasoning separately from the output, which `total` shows.
    """
    if any(value is not None and count(value) is None for value in reported):
        return TokenCounts(tier=tokens.tier, searches=tokens.searches, unpriced=tokens.unpriced, absurd=True)
    sent, received, reasoning = tokens.input, tokens.output, tokens.reasoning or 0
    if reasoning and sent is not None and received is not None and count(total) == sent + received + reasoning:
        tokens = replace(tokens, output=received + reasoning)
    if tokens.output is not None and max(reasoning, tokens.output_audio) > tokens.output:
        tokens = replace(tokens, output=None, output_audio=0, reasoning=None, absurd=True)
    parts = tokens.cache_read + tokens.cache_write
    if sent is not None and (max(parts, tokens.input_audio) > sent or tokens.cache_write_long > tokens.cache_write):
        unknown = {"input": None, "input_audio": 0, "cache_read": 0, "cache_write": 0, "cache_write_long": 0}
        tokens = replace(tokens, **unknown, absurd=True)
    return tokens


def failed_reply(error: Any) -> AttemptError:
    """Return the error for a failure that a server reports instead of an answer, or inside one."""
    message = (error.get("message") if isinstance(error, dict) else error) or "no reason given"
    limited = isinstance(error, dict) and error.get("code") in (429, "rate_limit_exceeded")
    return AttemptError("rate_limit" if limited else "server", f"the answer ends with an error: {message}"[:300])


def renamed(params: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return parameters with an API's names for the parameters of chat completions; its own take precedence."""
    return {names[key]: value for key, value in params.items() if key in names} | {
        key: value for key, value in params.items() if key not in names
    }


def objects(value: Any) -> list[dict[str, Any]]:
    """Return the objects of a list; an empty list for anything else."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def text_of(content: Any) -> str:
    """Return the text of a message's content, which is a text or a list of parts."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""


def with_raw(message: Message, api: str, reply: dict[str, Any]) -> Message:
    """Add what the server sent with a message."""
    return {**message, "raw": {"api": api, "reply": reply}} if reply else message


def raw_of(message: Message, api: str) -> Mapping[str, Any] | None:
    """Return what a server of the same API sent with a message; None for messages from elsewhere."""
    raw = message.get("raw")
    return raw["reply"] if isinstance(raw, dict) and raw.get("api") == api else None


def keeps_reasoning(
    messages: Sequence[Message], history: ReasoningHistory, *, default: ReasoningHistory
) -> Iterator[bool]:
    """Yield for each message whether its reasoning goes back to the model; `default` is what `auto` means."""
    policy = default if history == "auto" else history
    last_user = max((at for at, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    for at in range(len(messages)):
        yield policy == "all" or (policy == "last" and at > last_user)


def reasoning_text(message: Message) -> str:
    """Return the reasoning of a message as text, by any of its names; empty without reasoning."""
    return next((text for key in ("reasoning", "reasoning_content") if isinstance(text := message.get(key), str)), "")


def split_thoughts(message: Message, thoughts: ThoughtsBlock) -> Message:
    """Return a reply with the reasoning in its text as `reasoning`; unchanged if its server reports reasoning."""
    text = message.get("content")
    if not isinstance(text, str) or reasoning_text(message):
        return message
    reasoning, end, answer = text.rpartition(thoughts.end)
    if not end:
        if thoughts.unfinished == "keep":
            return message
        reasoning, answer = text, ""
    reasoning = reasoning.strip().removeprefix(thoughts.start).strip()
    return {**message, "content": answer.strip("\n"), **({"reasoning": reasoning} if reasoning else {})}


def after_thoughts(text: str) -> str:
    """Return the part of a reply after the reasoning that its server has left in the text, if that has an end."""
    if "</" not in text or not (ends := [mark.end() for mark in _END_OF_THOUGHTS.finditer(text)]):
        return text
    start = _START_OF_THOUGHTS.search(text, 0, ends[0])  # it may be missing, for example if the prompt ends with it
    return text[ends[-1] :] if start is None or not text[: start.start()].strip() else text


def visible(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation without reasoning and without what only the server that sent it can read."""
    return [
        message if _HIDDEN.isdisjoint(message) else {key: value for key, value in message.items() if key not in _HIDDEN}
        for message in messages
    ]


def explain(error: AttemptError | Fault) -> str | None:
    """Return the line to write, for a refusal by a model that takes other parameters or another API."""
    if error.status not in (400, 404, 422):
        return None
    reason = re.sub(r"^https?://\S+ [^:]*: ", "", error.message)  # the address may name an API too
    for pattern, line in _LINES:
        if match := re.search(pattern, reason, re.IGNORECASE | re.DOTALL):
            return line.format(*match.groups())
    return None


KINDS: Final = ("image", "audio", "file")


class Media(NamedTuple):
    """An image, audio or a file of a message, for APIs whose parts differ from chat completions."""

    kind: str
    """one of KINDS"""
    media_type: str = ""
    data: str = ""
    """the content in base64; empty if `url` names a place on the web"""
    url: str = ""
    name: str = ""

    @property
    def link(self) -> str:
        """A URL of the content; a data URL if there is no other."""
        return self.url or f"data:{self.media_type};base64,{self.data}"


def media_of(part: dict[str, Any], load: Callable[[str], bytes] | None) -> Media | None:
    """Read a part that conversations or chat completions have; None for texts and for parts of other APIs."""
    kind = part.get("type")
    if kind in KINDS and "digest" in part:
        return Media(kind, part["media_type"], content_of(part, load), name=part.get("name") or "")
    if kind == "image_url":
        return _linked("image", part["image_url"]["url"])
    if kind == "input_audio":
        audio = part["input_audio"]
        return Media("audio", f"audio/{audio['format']}", audio["data"])
    if kind == "file" and "file_data" in part.get("file", {}):
        return _linked("file", part["file"]["file_data"])._replace(name=part["file"].get("filename") or "")
    return None


def _linked(kind: str, url: str) -> Media:
    head, comma, data = url.partition(",")
    if not (comma and head.startswith("data:") and head.endswith(";base64")):
        return Media(kind, url=url)
    return Media(kind, head.removeprefix("data:").removesuffix(";base64"), data)


def content_of(part: dict[str, Any], load: Callable[[str], bytes] | None) -> str:
    """Return the content of a part, in base64."""
    assert load is not None, "a conversation with files needs a way to load them"
    return b64encode(load(part["digest"])).decode()


def as_chat(message: Message, load: Callable[[str], bytes] | None) -> Message:
    """Return a message with its files in the form of chat completions."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_part(part, load) for part in content]}


def _part(part: dict[str, Any], load: Callable[[str], bytes] | None) -> dict[str, Any]:
    if part.get("type") not in KINDS or "digest" not in part:
        return part
    data, media_type = content_of(part, load), part["media_type"]
    if part["type"] == "image":
        return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}
    if part["type"] == "audio":
        return {"type": "input_audio", "input_audio": {"data": data, "format": media_type.rpartition("/")[2]}}
    return {"type": "file", "file": {"filename": part["name"], "file_data": f"data:{media_type};base64,{data}"}}
