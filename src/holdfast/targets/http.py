"""A workflow with an HTTP interface as the target."""

from __future__ import annotations

import os
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import jmespath
import msgspec
from jmespath.exceptions import JMESPathError
from msgspec import UNSET
from msgspec.structs import replace

from holdfast.dialects.chat import is_first
from holdfast.errors import AttemptError, UsageError
from holdfast.http.client import Client
from holdfast.http.response import mend
from holdfast.spec.plugins import BUILT_IN, load_reference
from holdfast.spec.redact import VARIABLE, fill_variables, shown_url
from holdfast.spec.target_schema import HttpTarget
from holdfast.spec.template import RENDER_ERRORS, fill_in
from holdfast.store.records import Usage
from holdfast.targets.access import eval_hints
from holdfast.targets.types import Reply, Target

if TYPE_CHECKING:
    from holdfast.spec.eval import Origin
    from holdfast.store.records import TraceStep
    from holdfast.targets.types import Turn


STEP_READERS: Final = BUILT_IN["holdfast.step_readers"]
"""Readers of the inner steps that a server reports in its streams, by the field of their lines."""


class StepReader(Protocol):
    """Collects the inner steps of one reply."""

    trace: list[TraceStep]
    """the steps that were read"""

    def read(self, line: bytes) -> None:
        """Read a line of the stream; lines that are no steps are skipped."""
        ...

    def usage(self) -> Usage:
        """Add up what the steps used."""
        ...


class HttpWorkflow(Target):
    """Posts the rendered request and picks the answer from the reply, or from each event of a stream."""

    schema = HttpTarget
    block: HttpTarget

    def __init__(self, block: HttpTarget, origin: Origin) -> None:
        super().__init__(block, origin)
        try:
            self._pick = jmespath.compile(block.response)
        except JMESPathError as error:
            raise origin.error(f"target.response is not a JMESPath: {error}") from error
        headers = {name: fill_variables(value, "target.headers") for name, value in block.headers.items()}
        url = fill_variables(block.http, "target.http")
        if not url.startswith(("http://", "https://")):
            raise UsageError("target.http is not an HTTP URL after variable substitution")
        values = [os.environ[name] for name in VARIABLE.findall(block.http)]
        named = [value for value in values if "://" not in value]  # addresses are no secrets
        self._client = Client(
            url,
            headers,
            hints=eval_hints(
                "Check target.headers and target.http.",
                "Check the path in target.http: the server has nothing there.",
            ),
            secrets=named,
        )

    @classmethod
    def identity(cls, block: HttpTarget, origin: Origin) -> dict[str, Any]:
        """Return the URL without secrets, the request, and how the answer is read."""
        identity = block.model_dump(include={"http", "request", "response", "version"})
        if block.stream_end not in (None, "close"):  # what follows the marker is not read
            identity["stream_end"] = block.stream_end
        return {**identity, "http": shown_url(block.http)}

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__()

    @property
    def final_notices(self) -> list[str]:
        """Report a server that sent replies unasked."""
        return self._client.notices

    async def reply(self, turn: Turn) -> Reply:
        """Ask the workflow."""
        fields = {**turn.sample.fields, "prompt": turn.prompt, "messages": turn.messages, "trial": turn.trial}
        try:
            body = fill_in(self.block.request, fields)
        except RENDER_ERRORS as error:
            raise AttemptError("bad_request", f"cannot render target.request: {error}", retry=False) from error
        started, first = time.monotonic(), None
        parts: list[str] = []
        steps: StepReader | None = None
        chat = finished = False
        async with aclosing(self._client.events(body, end=self.block.stream_end, halves=True)) as events:
            async for event in events:
                for line in event.other:
                    steps = steps or _step_reader(line)
                    if steps is not None:
                        steps.read(line)
                if event.value is UNSET:
                    continue
                choices = [] if event.whole else _choices(event.value)
                chat |= bool(choices)
                if choices and not any(map(is_first, choices)):
                    continue  # part of another answer: the request asked for several
                finished |= any(choice.get("finish_reason") for choice in choices)
                part = self._find(event.value, whole=event.whole)
                if part is not None:
                    first = time.monotonic() - started if first is None else first
                    parts.append(part if isinstance(part, str) else _compact(mend(part)))
        if chat and not finished:
            raise AttemptError("bad_reply", "the stream ended before the answer did: no event has a finish_reason")
        if not parts:
            raise AttemptError("bad_reply", f"nothing at {self.block.response!r} in the reply")
        usage, trace = (Usage(), None) if steps is None else (steps.usage(), steps.trace or None)
        return Reply(text=mend("".join(parts)), usage=replace(usage, requests=1), first_token=first, trace=trace)

    def _find(self, value: Any, *, whole: bool) -> Any:
        """Pick the answer, or a piece of it, from a reply or an event. Raise the error of a reply without one."""
        try:
            part = self._pick.search(value)
        except JMESPathError as error:
            raise AttemptError("bad_reply", f"{self.block.response!r} does not fit the reply: {error}") from error
        if whole and (part is value or part in (None, "", [], {})):
            self._client.check(value)
        return part


def _step_reader(line: bytes) -> StepReader | None:
    """Return a reader for a line of a stream, by the line's field."""
    reference = STEP_READERS.get(line.partition(b":")[0].decode(errors="replace"))
    if reference is None:
        return None
    reader: StepReader = load_reference(reference)()
    return reader


def _choices(event: Any) -> list[dict[str, Any]]:
    """Return the choices of an event of chat completions; an empty list for other events."""
    choices = event.get("choices") if isinstance(event, dict) else None
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _compact(value: Any) -> str:
    return msgspec.json.encode(value).decode()
