"""A workflow behind HTTP as the target."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Self

import jmespath
from jmespath.exceptions import JMESPathError

from holdfast.errors import AttemptError, ConfigError, Problem, UsageError
from holdfast.spec.secrets import VARIABLE, filled
from holdfast.spec.template import RENDER_ERRORS, render_tree
from holdfast.store.records import Usage
from holdfast.targets.client import Client
from holdfast.targets.types import Reply

if TYPE_CHECKING:
    from holdfast.spec.fields import HttpTarget
    from holdfast.targets.types import Turn


class HttpWorkflow:
    """Posts the rendered request and picks the answer from the reply, or from each event of a stream."""

    def __init__(self, block: HttpTarget, where: str) -> None:
        self._block = block
        try:
            self._pick = jmespath.compile(block.response)
        except JMESPathError as error:
            raise ConfigError([Problem(where, f"target.response is not a JMESPath: {error}")]) from error
        headers = {name: filled(value, "target.headers") for name, value in block.headers.items()}
        url = filled(block.http, "target.http")
        if not url.startswith(("http://", "https://")):
            raise UsageError("target.http is not the address of a web service once its variables are filled in")
        values = [os.environ[name] for name in VARIABLE.findall(block.http)]
        named = [value for value in values if "://" not in value]  # where it is asked is no secret
        self._client = Client(url, headers, key_hint="Check target.headers and target.http.", secrets=named)

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__()

    async def reply(self, turn: Turn) -> Reply:
        """Ask the workflow."""
        fields = {**turn.sample.fields, "prompt": turn.prompt, "messages": turn.messages, "trial": turn.trial}
        started, first = time.monotonic(), None
        parts: list[str] = []
        try:
            body = render_tree(self._block.request, fields)
        except RENDER_ERRORS as error:
            raise AttemptError("bad_request", f"cannot render target.request: {error}", retry=False) from error
        async for event in self._client.stream(body):
            try:
                found = self._pick.search(event)
            except JMESPathError as error:
                raise AttemptError("bad_reply", f"{self._block.response!r} does not fit the reply: {error}") from error
            if found is not None:
                first = time.monotonic() - started if first is None else first
                parts.append(found if isinstance(found, str) else _compact(found))
        if not parts:
            raise AttemptError("bad_reply", f"nothing at {self._block.response!r} in the reply")
        return Reply(text="".join(parts), usage=Usage(requests=1), first_token=first)


def _compact(value: Any) -> str:
    import msgspec

    return msgspec.json.encode(value).decode()
