"""The paths of a model's server: those of OpenAI's API below its base URL, and the server's own beside it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from holdfast.errors import AttemptError, Fault
from holdfast.http.balancer import client_of
from holdfast.targets.types import eval_hints

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from contextlib import AsyncExitStack

    from holdfast.http.balancer import Balancer
    from holdfast.http.client import Client

_PAUSES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
"""seconds between the attempts of a probe"""
_ABSENT: Final = (401, 403, 404, 405, 501)
"""a path that the server does not have, or that a proxy does not let through"""


class ModelServer:
    """Servers of one model. Each path has a client, opened on first use."""

    def __init__(self, urls: Sequence[str], headers: Mapping[str, str], key_hint: str, opened: AsyncExitStack) -> None:
        self._urls = urls
        self._headers = headers
        self._key_hint = key_hint
        self._opened = opened
        self._clients: dict[str, Client | Balancer] = {}

    async def post(self, path: str, body: Any) -> Any:
        """Post JSON to a path and return the JSON of the reply. `/v1` in the path stands for the base URL."""
        return await (await self._client(path)).post(body)

    async def find(self, method: Literal["GET", "POST"], path: str, body: Any = None) -> Any:
        """Return the reply of a path that the server may not have; None where it has none."""
        client = await self._client(path)
        try:
            return await patiently(lambda: client.get() if method == "GET" else client.post(body))
        except Fault as fault:
            if fault.status not in _ABSENT:
                raise
        except AttemptError as error:
            if error.kind not in ("bad_request", "bad_reply") and error.status not in _ABSENT:
                raise
        return None

    async def _client(self, path: str) -> Client | Balancer:
        if path not in self._clients:
            urls = [
                f"{url}{path.removeprefix('/v1')}" if path.startswith("/v1/") else f"{url.removesuffix('/v1')}{path}"
                for url in self._urls
            ]
            client = client_of(urls, self._headers, eval_hints(self._key_hint))
            self._clients[path] = await self._opened.enter_async_context(client)
        return self._clients[path]


async def patiently(call: Callable[[], Awaitable[Any]]) -> Any:
    """Return the result of a call at the start of a run, which is repeated a few times where that may help."""
    for pause in _PAUSES:
        try:
            return await call()
        except AttemptError as error:
            if not error.retry or error.kind == "bad_reply" or error.status in _ABSENT:
                raise
            await asyncio.sleep(max(pause, error.retry_after or 0))
    return await call()


class Gate:
    """Limits requests in flight to a number that may change meanwhile. First come, first served."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._active = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> Self:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._leave()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        self._active -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._active < self._limit():
            turn = self._waiting.popleft()
            if not turn.cancelled():
                self._active += 1
                turn.set_result(None)
