"""The `replay: again` calls of one trial, which run again, in order, where the state that they built is lost.

The state lives in a home: the connection to an MCP server, an object of the agent's, or this process. No home sees a
call twice. A new home (another process, a server that was restarted after a crash) first sees all earlier calls: those
of the turns before, and those that the current attempt has already made.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.canonical import digest
from holdfast.store.records import ToolResponse, call_id
from holdfast.targets.types import PastCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.engine.workspace import Workspace
    from holdfast.store.blobs import Files
    from holdfast.store.records import Step
    from holdfast.targets.types import FindHome

Key = tuple[int, str, str, int]
"""turn, kind, digest of the request, which of the equal ones"""


class Unrepeatable(Exception):
    """A call whose state is lost cannot be run again."""


class _RepeatableCall(msgspec.Struct):
    call: PastCall
    before: Files | None
    """the workspace before the call"""
    home: object | None = None
    """where the call was made last; None: nowhere in this process"""


class AgainCalls:
    """The calls of a trial that may have to be run again, in the order in which they were made."""

    def __init__(self, workspace: Workspace | None) -> None:
        self._workspace = workspace
        self._calls: dict[Key, _RepeatableCall] = {}
        self._one_at_a_time = asyncio.Lock()
        self.restored = 0
        """how many calls were run again; an attempt that timed out meanwhile has made progress"""

    def seen(self, key: Key, home: object) -> bool:
        """Return True if a call was made in a home."""
        repeatable = self._calls.get(key)
        return repeatable is not None and repeatable.home is home

    def note(self, key: Key, call: PastCall, home: object, before: Files | None) -> None:
        """Note that a call was made in a home. A call that was made before keeps its position."""
        self._calls.setdefault(key, _RepeatableCall(call, self._deduplicate(before))).home = home

    def _deduplicate(self, files: Files | None) -> Files | None:
        """Return the previous call's map if it is equal: most calls change nothing, and a map may be large."""
        last = next(reversed(self._calls.values()), None)
        return last.before if last is not None and last.before == files else files

    def remember(self, steps: Iterable[Step], reply: Any, before: Files | None) -> None:
        """Remember the tool calls of a turn answered from an earlier process's record.

        The target knows which of them are `replay: again`; the others are forgotten when it looks for their homes.
        """
        from_messages: dict[str, Any] | None = None
        for step in steps:
            if step.kind != "tool":
                continue
            response = msgspec.convert(step.response, ToolResponse)
            arguments = response.arguments
            if isinstance(arguments, UnsetType):  # recorded by an earlier version: the turn's messages may have them
                from_messages = _arguments_by_digest(reply) if from_messages is None else from_messages
                arguments = from_messages.get(step.request, UNSET)
            identity = call_id(step.key, step.turn, step.request, step.nth)
            call = PastCall(step.turn, response.tool, arguments, response.function, identity)
            key = (step.turn, step.kind, step.request, step.nth)
            self._calls.setdefault(key, _RepeatableCall(call, self._deduplicate(before)))
            before = before if isinstance(response.files, UnsetType) else response.files

    def forget(self, keys: Iterable[Key]) -> None:
        """Forget calls that the conversation does not make any more."""
        for key in keys:
            self._calls.pop(key, None)

    def clear(self) -> None:
        """Forget everything: the trial starts from its beginning."""
        self._calls.clear()

    async def restore(self, find: FindHome, due: Callable[[Key], bool]) -> None:
        """Run the calls that are due in homes where they were not made; raise Unrepeatable if that is impossible."""
        async with self._one_at_a_time:  # an agent may use two tools at once
            present: Files | None = None
            try:
                for key, repeatable in list(self._calls.items()):
                    call = repeatable.call
                    if not due(key) or (call.function is None and repeatable.home is not None):
                        continue
                    place = await find(call)
                    if place is None:
                        self._calls.pop(key, None)  # not, or no longer, `replay: again`
                        continue
                    if place.home is repeatable.home:
                        continue
                    if place.rerun is None or isinstance(call.arguments, UnsetType):
                        raise Unrepeatable(call.name)
                    if self._workspace is not None:
                        if present is None:
                            present = await asyncio.to_thread(self._workspace.keep)
                        if repeatable.before is not None:
                            await asyncio.to_thread(self._workspace.go_back_to, repeatable.before)
                    await place.rerun()
                    repeatable.home = place.home
                    self.restored += 1
            finally:
                if present is not None and self._workspace is not None:
                    await asyncio.to_thread(self._workspace.go_back_to, present)


def _arguments_by_digest(reply: Any) -> dict[str, Any]:
    """Return the arguments of the tool calls in a recorded reply, by the digest of the request."""
    by_digest: dict[str, Any] = {}
    for message in (reply.get("messages") if isinstance(reply, dict) else None) or ():
        for call in message.get("tool_calls") or ():
            body = call.get("function") or {}
            arguments = body.get("arguments")
            if isinstance(arguments, str | None):
                with suppress(msgspec.DecodeError):  # else they stay as the model wrote them
                    arguments = msgspec.json.decode(arguments or "{}")
            by_digest[digest([body.get("name"), arguments])] = arguments
    return by_digest
