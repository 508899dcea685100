"""Helpers of all dialects: token counts, errors, raw replies, and which reasoning is sent back to a model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from holdfast.dialects.types import TokenCounts
from holdfast.errors import AttemptError
from holdfast.store.records import MOST_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from holdfast.dialects.types import Message
    from holdfast.spec.schema import ReasoningHistory
    from holdfast.spec.target_schema import ThoughtsBlock

STOPPED_EARLY: Final = "the stream ended before the answer was complete"

_HALF: Final = re.compile(r"[\ud800-\udfff]")
_HIDDEN: Final = frozenset(("reasoning", "reasoning_content", "reasoning_details", "raw"))
"""keys of a message that neither graders nor simulated users see"""
_START_OF_THOUGHTS: Final = re.compile(r"(?i)<(?:think|thinking|thought|reasoning)>")
_END_OF_THOUGHTS: Final = re.compile(r"(?i)</(?:think|thinking|thought|reasoning)>")


def count(value: Any) -> int | None:
    """Return a number of tokens; None where the server sent something else."""
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None  # a bool is no number


def check_counts(tokens: TokenCounts, reported: Iterable[Any], total: Any = None) -> TokenCounts:
    """Return counts as far as they can be true; the rest is unknown.

    `reported` are the numbers as the server sent them. One that is no number of tokens makes all of them unknown.
    xAI counts reasoning beside the output: then `total` says so.
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


def no_answer(reply: Any) -> AttemptError:
    """Return the error for a reply in which there is no answer."""
    return AttemptError("bad_reply", f"the reply has no answer in it: {str(reply)[:200]}")


def not_an_event(event: Any) -> AttemptError:
    """Return the error for an event that the API does not have."""
    return AttemptError("bad_reply", f"not an event of a reply: {str(event)[:200]}")


def failed_reply(error: Any) -> AttemptError:
    """Return the error for a failure that a server reports instead of an answer, or inside one."""
    message = (error.get("message") if isinstance(error, dict) else error) or "no reason given"
    limited = isinstance(error, dict) and error.get("code") in (429, "rate_limit_exceeded")
    return AttemptError("rate_limit" if limited else "server", f"the answer ends with an error: {message}"[:300])


def renamed(params: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return parameters with the names that an API has for those of chat completions; its own take precedence."""
    return {names[key]: value for key, value in params.items() if key in names} | {
        key: value for key, value in params.items() if key not in names
    }


def objects(value: Any) -> list[dict[str, Any]]:
    """Return the objects of a list; nothing for what is no list."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def text_of(content: Any) -> str:
    """Return the text of a message's content, which is a text or a list of parts."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""


def with_raw(message: Message, api: str, reply: dict[str, Any]) -> Message:
    """Add what the server sent beside a message."""
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
    """Return the reasoning of a message as text, whatever its server calls it; empty where there is none."""
    return next((text for key in ("reasoning", "reasoning_content") if isinstance(text := message.get(key), str)), "")


def split_thoughts(message: Message, thoughts: ThoughtsBlock) -> Message:
    """Return a reply with the reasoning in its text as `reasoning`; unchanged where its server reports reasoning."""
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


def mend(value: Any) -> Any:
    """Return a value whose texts can be stored: halves of a character are joined, and a lone one is replaced.

    JavaScript cuts texts between the two halves (surrogates) of a character, so that each event has one of them.
    """
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if _HALF.search(value) else value
    if isinstance(value, dict):
        return {mend(key): mend(each) for key, each in value.items()}
    return [mend(each) for each in value] if isinstance(value, list) else value


def after_thoughts(text: str) -> str:
    """Return the part of a reply after the reasoning that its server has left in the text, where that has an end."""
    if "</" not in text or not (ends := [mark.end() for mark in _END_OF_THOUGHTS.finditer(text)]):
        return text
    start = _START_OF_THOUGHTS.search(text, 0, ends[0])  # it may be missing, as where the prompt ends with it
    return text[ends[-1] :] if start is None or not text[: start.start()].strip() else text


def visible(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation without reasoning and without what only the server that sent it can read."""
    return [
        message if _HIDDEN.isdisjoint(message) else {key: value for key, value in message.items() if key not in _HIDDEN}
        for message in messages
    ]
