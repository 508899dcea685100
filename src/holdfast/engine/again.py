"""The `replay: again` calls of one trial, run again in order wherever the state they built has been lost.

The state lives in a home: the connection to an MCP server, an object of the agent's, or this process. A home that has
seen a call never sees it twice. A new home (another process, a server started after a crash) first sees all earlier
calls: those of the turns before, and those that the current attempt has already made.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.canonical import digest
from holdfast.store.records import ToolResponse
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
    """A call whose state is lost, and that cannot be run again."""


@dataclass
class _Known:
    call: PastCall
    before: Files | None
    """the workspace as the call found it"""
    home: object | None = None
    """what has seen the call; None: nothing in this process"""


class AgainCalls:
    """All calls of a trial that may have to be run again, in the order in which they were made."""

    def __init__(self, workspace: Workspace | None) -> None:
        self._workspace = workspace
        self._known: dict[Key, _Known] = {}
        self._one_at_a_time = asyncio.Lock()
        self.restored = 0
        """how many calls were run again before a turn; a time-out that hit meanwhile has not been for nothing"""

    def seen(self, key: Key, home: object) -> bool:
        """Whether a home has seen a call."""
        known = self._known.get(key)
        return known is not None and known.home is home

    def note(self, key: Key, call: PastCall, home: object, before: Files | None) -> None:
        """Note that a home has seen a call. A call made earlier keeps its place."""
        known = self._known.setdefault(key, _Known(call, self._shared(before)))
        known.home = home

    def _shared(self, files: Files | None) -> Files | None:
        """The map of the call before where it is equal: most calls change nothing, and a map may be large."""
        last = next(reversed(self._known.values()), None)
        return last.before if last is not None and last.before == files else files

    def remember(self, steps: Iterable[Step], reply: Any, before: Files | None) -> None:
        """Remember the tool calls of a turn answered from an earlier process's record.

        Which of them are `again` is known when the target looks for their homes; the others are then forgotten.
        """
        missing: dict[str, Any] | None = None
        for step in steps:
            if step.kind != "tool":
                continue
            response = msgspec.convert(step.response, ToolResponse)
            arguments = response.arguments
            if isinstance(arguments, UnsetType):  # recorded by an earlier version: the turn's messages may have them
                missing = _by_digest(reply) if missing is None else missing
                arguments = missing.get(step.request, UNSET)
            call = PastCall(step.turn, response.tool, arguments, response.function)
            key = (step.turn, step.kind, step.request, step.nth)
            self._known.setdefault(key, _Known(call, self._shared(before)))
            before = before if isinstance(response.files, UnsetType) else response.files

    def forget(self, keys: Iterable[Key]) -> None:
        """Forget calls that the conversation does not make any more."""
        for key in keys:
            self._known.pop(key, None)

    def clear(self) -> None:
        """Forget everything: the trial starts from its beginning."""
        self._known.clear()

    async def restore(self, find: FindHome, due: Callable[[Key], bool]) -> None:
        """Run the calls that are due in homes that have not seen them; raise Unrepeatable where that is impossible."""
        async with self._one_at_a_time:  # an agent may use two tools at once
            present: Files | None = None
            try:
                for key, known in list(self._known.items()):
                    if not due(key) or (known.call.function is None and known.home is not None):
                        continue
                    found = await find(known.call)
                    if found is None:
                        self._known.pop(key, None)  # not, or no longer, `again`
                        continue
                    if found.home is known.home:
                        continue
                    if found.rerun is None or isinstance(known.call.arguments, UnsetType):
                        raise Unrepeatable(known.call.name)
                    if self._workspace is not None:
                        if present is None:
                            present = await asyncio.to_thread(self._workspace.keep)
                        if known.before is not None:
                            await asyncio.to_thread(self._workspace.go_back_to, known.before)
                    await found.rerun()
                    known.home = found.home
                    self.restored += 1
            finally:
                if present is not None and self._workspace is not None:
                    await asyncio.to_thread(self._workspace.go_back_to, present)


def _by_digest(reply: Any) -> dict[str, Any]:
    """The arguments of the tool calls in a recorded reply, by the digest of what was asked."""
    found: dict[str, Any] = {}
    for message in (reply.get("messages") if isinstance(reply, dict) else None) or ():
        for call in message.get("tool_calls") or ():
            body = call.get("function") or {}
            arguments = body.get("arguments")
            if isinstance(arguments, str | None):
                with suppress(msgspec.DecodeError):  # else they are as the model wrote them
                    arguments = msgspec.json.decode(arguments or "{}")
            found[digest([body.get("name"), arguments])] = arguments
    return found
