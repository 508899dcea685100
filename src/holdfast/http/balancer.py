"""Balances requests over several servers that answer alike: each goes to the server with the fewest in flight.

A server that fails rests for a while. Retries go to another server, and a server that refuses everything at once does
not attract all requests. Only if all servers refuse connections is the request refused.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, Self

from holdfast.errors import AttemptError, Fault
from holdfast.http.client import Client

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence

    from holdfast.http.client import Signer
    from holdfast.http.failures import Hints

_FIRST_REST: Final = 1.0
"""seconds; longer than callers wait before the first retry"""
_LONGEST_REST: Final = 30.0


def client_of(
    urls: Sequence[str], headers: Mapping[str, str], hints: Hints, signer: Signer | None = None
) -> Client | Balancer:
    """Return a client for one URL, or a balancer for several."""
    clients = [Client(url, headers, hints=hints, signer=signer) for url in urls]
    return clients[0] if len(clients) == 1 else Balancer(clients)


class Balancer:
    """Has the methods of a `Client`, for several servers."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._servers = [_Server(client) for client in clients]
        self._next = 0
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for server in self._servers:
            await self._opened.enter_async_context(server.client)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    @property
    def notices(self) -> list[str]:
        """Report servers whose connections cannot be reused."""
        return [notice for server in self._servers for notice in server.client.notices]

    async def post(self, body: Any) -> Any:
        """Post JSON and return the JSON of the reply."""
        return await self._ask(lambda client: client.post(body))

    async def get(self, query: str = "") -> Any:
        """Return the JSON at the URL."""
        return await self._ask(lambda client: client.get(query))

    async def _ask(self, call: Callable[[Client], Awaitable[Any]]) -> Any:
        tried: list[_Server] = []
        while True:
            server = self._pick(tried)
            try:
                with server.request():
                    return await call(server.client)
            except Fault as fault:
                self._try_next(fault, tried)

    async def stream(self, body: Any, *, halves: bool = False) -> AsyncIterator[Any]:
        """Yield the JSON events of a reply."""
        tried: list[_Server] = []
        while True:
            server = self._pick(tried)
            try:
                with server.request():
                    async for event in server.client.stream(body, halves=halves):
                        yield event
                return
            except Fault as fault:
                self._try_next(fault, tried)

    def _try_next(self, fault: Fault, tried: list[_Server]) -> None:
        """Raise the fault, unless the server was not reached and there is another one to ask at once."""
        if fault.kind != "refused" or len(tried) == len(self._servers):
            raise fault

    def _pick(self, tried: list[_Server]) -> _Server:
        """Return the next server to ask; servers of equal rank take turns."""
        self._next += 1
        count, now = len(self._servers), time.monotonic()
        order = [self._servers[(self._next + offset) % count] for offset in range(count)]
        best = min((server for server in order if server not in tried), key=lambda server: server.rank(now))
        tried.append(best)
        return best


class _Server:
    def __init__(self, client: Client) -> None:
        self.client = client
        self._in_flight = 0
        self._failures = 0
        """in a row"""
        self._rests_until = 0.0

    def rank(self, now: float) -> tuple[bool, int]:
        """Return a sort key: the lowest is asked first. After its rest, a server that failed gets a single request."""
        resting = now < self._rests_until or (self._failures > 0 and self._in_flight > 0)
        return resting, self._in_flight

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request, and its failure."""
        self._in_flight += 1
        try:
            yield
        except asyncio.CancelledError:  # probably a time-out; after Ctrl-C a rest does no harm
            self._rest(time.monotonic())
            raise
        except (AttemptError, Fault) as error:
            if error.kind in ("refused", "connection", "server") or error.status in (503, 529):  # or overloaded
                self._rest(time.monotonic())
            raise
        else:
            self._failures = 0
        finally:
            self._in_flight -= 1

    def _rest(self, now: float) -> None:
        if now >= self._rests_until:  # many requests that fail at once are one failure
            self._failures += 1
            self._rests_until = now + min(_LONGEST_REST, _FIRST_REST * 2.0 ** (self._failures - 1))
