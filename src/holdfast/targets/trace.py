"""Collects the tool calls of one turn from requests, replies and tool calls: each once, in order, with its result.

A call is asked for in a model's answer, run through `context.tool`, or both. Agents repeat it in the messages of later
requests, together with its result. A call that is only in a request was written by the agent itself: it counts after
the last user message; earlier ones are history or examples.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from holdfast.store.records import ToolCall

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

    from holdfast.targets.types import Message


class Seen(msgspec.Struct, eq=False):
    """A tool call."""

    name: str
    arguments: Any
    """an object; if it is not JSON, the text that the model wrote"""
    id: str
    result: Any = UNSET
    step: Hashable = None
    """the recorded call in which it was first seen"""

    def same(self, other: Seen) -> bool:
        """Return True for a call with the same name and arguments."""
        return self.name == other.name and _decoded(self.arguments) == _decoded(other.arguments)


def calls_in(message: Mapping[str, Any]) -> Iterator[Seen]:
    """Yield the tool calls of an assistant message, including calls without a name."""
    calls = message.get("tool_calls") if message.get("role", "assistant") == "assistant" else None
    for call in calls if isinstance(calls, list | tuple) else ():
        yield _call(call)
    if not calls and isinstance(message.get("function_call"), dict):  # from before the API had tools
        yield _call(message["function_call"])


def _call(call: Any) -> Seen:
    body: Any = call.get("function") or call.get("custom") or call if isinstance(call, dict) else {}
    body = body if isinstance(body, dict) else {}
    name, arguments = body.get("name"), body.get("arguments", body.get("input"))
    decoded = _decoded(arguments)
    whole = call if isinstance(call, dict) else {}
    return Seen(
        name if isinstance(name, str) else "",
        decoded if isinstance(decoded, dict) else arguments,
        str(whole.get("id") or ""),
        whole.get("result", UNSET),
    )


def _decoded(arguments: Any) -> Any:
    if isinstance(arguments, str | None):
        with suppress(msgspec.DecodeError, RecursionError):  # else they are no JSON
            return msgspec.json.decode(arguments or "{}")
    return arguments


def read_calls(messages: Iterable[Mapping[str, Any]]) -> list[Seen]:
    """Return the tool calls of a conversation in order; a tool's message answers the last call with its id."""
    calls: list[Seen] = []
    last: dict[str, Seen] = {}
    for message in messages:
        if (about := _answers(message)) is not None:
            _give(last.get(about), message)
        for call in calls_in(message):
            calls.append(call)
            last[call.id or call.name] = call
    return calls


def _answers(message: Mapping[str, Any]) -> str | None:
    """Return the id of the call that a tool's message answers; in old messages, the function's name."""
    role = message.get("role")
    return str(message.get("tool_call_id" if role == "tool" else "name")) if role in ("tool", "function") else None


def _give(call: Seen | None, message: Mapping[str, Any]) -> None:
    if call is not None and call.result is UNSET:
        call.result = message.get("content")


def as_listed(calls: Iterable[Seen], turn: int) -> list[ToolCall]:
    """Return calls in the form that outputs have."""
    return [ToolCall(turn, call.name, call.arguments, None if call.result is UNSET else call.result) for call in calls]


class Trace:
    """The calls of one attempt at a turn."""

    def __init__(self) -> None:
        self._calls: list[Seen] = []
        self._asked: dict[str, list[Seen]] = {}
        """calls in answers to equal requests: a client that repeats a request does not mean two calls"""
        self._heard: Sequence[Message] = ()
        """the messages of the last request"""
        self.observed = False
        """the target's calls are seen here"""
        self.unread = False
        """some of the calls are in answers that cannot be read"""

    def request(self, messages: Sequence[Message]) -> None:
        """Read the conversation in a request to a model."""
        if messages:
            self._heard = messages
            self._matched(messages)

    def response(self, step: Hashable, request: str, answers: Sequence[Message] | None) -> None:
        """Read a model's answers to the request with this digest; None for answers that cannot be read."""
        if answers is None:
            self.unread = self.observed = True
            return
        self.observed |= bool(answers)
        before = self._asked.setdefault(request, [])
        new: list[Seen] = []
        for answer in answers:
            for call in calls_in(answer):
                if any(call.same(earlier) and call.id == earlier.id for earlier in before):
                    continue
                call.step = step
                new.append(call)
        before += new
        self._calls += new

    def ran(self, step: Hashable, name: str, arguments: Any, result: Any) -> None:
        """Note a call that was run through `context.tool`, whether or not a model had asked for it."""
        self.observed = True
        call = Seen(name, arguments, "", step=step)
        open_calls = (earlier for earlier in self._calls if earlier.result is UNSET and earlier.same(call))
        match = next(open_calls, None)
        if match is None:
            match = call
            self._calls.append(call)
        match.result = result

    def covered_by(self, messages: Sequence[Message]) -> bool:
        """Return True if the messages of a reply hold all calls; add further calls that they hold."""
        matched = self._matched(messages, all_new=True)
        return len(matched) == len(self._calls)

    def transcript(self, text: str) -> tuple[list[Message], bool]:
        """Return a reply with the calls in the last request, and whether those are all."""
        matched = self._matched(self._heard)
        places = set(matched.values())
        messages: list[Message] = []
        answered: set[str | None] = set()
        for number, message in enumerate(self._heard):
            if number in places:
                answered |= {call.id or call.name for call in calls_in(message)}
            if number in places or _answers(message) in answered:
                messages.append(message)
        return [*messages, {"role": "assistant", "content": text}], len(matched) == len(self._calls)

    def calls(self, steps: Mapping[Any, int]) -> list[Seen]:
        """Return all calls in the order of their steps in the record, which is the same in every process."""
        places: list[int] = []
        for call in self._calls:  # a call without a step follows the one before it
            places.append(steps.get(call.step, places[-1] if places else -1))
        order = sorted(range(len(places)), key=lambda number: places[number])
        return [self._calls[number] for number in order]

    def _matched(self, messages: Sequence[Message], *, all_new: bool = False) -> dict[Seen, int]:
        """Return the calls in messages, each with the number of its message, and take their results from there.

        Calls are matched from the end, so that equal calls of earlier turns stay unmatched.
        """
        users = [number for number, message in enumerate(messages) if message.get("role") == "user"]
        start = -1 if all_new or not users else users[-1]
        matched: dict[Seen, int] = {}
        occurrences: list[tuple[int, Seen, Seen | None]] = []
        for number in reversed(range(len(messages))):
            for call in reversed(list(calls_in(messages[number]))):
                match = self._match(call, matched)
                if match is not None:
                    matched[match] = number
                occurrences.append((number, call, match))
        occurrences.reverse()
        for at, (number, call, match) in enumerate(occurrences):
            if match is None and number > start:
                self._calls.append(call)
                matched[call] = number
                occurrences[at] = number, call, call
        self._take_results(messages, occurrences)
        return matched

    def _match(self, call: Seen, taken: Mapping[Seen, int]) -> Seen | None:
        free = [earlier for earlier in reversed(self._calls) if earlier not in taken]
        by_id = (earlier for earlier in free if call.id and (earlier.id, earlier.name) == (call.id, call.name))
        return next(by_id, None) or next((earlier for earlier in free if earlier.same(call)), None)

    @staticmethod
    def _take_results(messages: Sequence[Message], occurrences: list[tuple[int, Seen, Seen | None]]) -> None:
        last: dict[str, Seen | None] = {}
        rest = iter(occurrences)
        coming = next(rest, None)
        for number, message in enumerate(messages):
            if (about := _answers(message)) is not None:
                _give(last.get(about), message)
            while coming is not None and coming[0] == number:
                last[coming[1].id or coming[1].name] = coming[2]
                coming = next(rest, None)
