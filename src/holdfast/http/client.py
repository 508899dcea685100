"""Requests with JSON to one URL, or balanced over several servers that answer alike.

Each request goes to the server with the fewest in flight. A server that fails rests for a while. Retries go to another
server, and a server that refuses everything at once does not attract all requests. Only if all servers refuse
connections is the request refused.

A failure is either an `AttemptError`, which concerns one request and may be retried, or a `Fault`, which every other
request would meet too. No other exception leaves this module.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from itertools import chain
from typing import IO, TYPE_CHECKING, Any, Final, Protocol, Self
from urllib.parse import parse_qsl, urljoin, urlsplit

import msgspec
from msgspec import UNSET

from holdfast.errors import AttemptError, Fault
from holdfast.http.connections import Connections
from holdfast.http.failures import NO_HINTS, Refusals, is_error
from holdfast.http.response import EventParser, parse, split_lines
from holdfast.http.urls import bare_url, origin_of, proxy_of
from holdfast.versions import __version__

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Callable,
        Coroutine,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from holdfast.http.failures import Hints
    from holdfast.http.response import Event, Response
    from holdfast.http.session import WebResponse, WebSession

_REDIRECTS: Final = (301, 302, 303, 307, 308)
_MOST_REDIRECTS: Final = 5
"""of one request"""


class Signer(Protocol):
    """Makes the headers that authenticate one request, whose body is known."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no message may repeat."""
        ...

    async def headers(self, url: str, body: bytes) -> dict[str, str]:
        """Return the headers that authenticate a request."""
        ...


class Reported(msgspec.Struct, frozen=True):
    """An event of a stream, or a whole reply."""

    value: Any = UNSET
    """the JSON of an event, or of a whole reply"""
    other: tuple[bytes, ...] = ()
    """lines of an event whose field is not in the standard, such as `intermediate_data: …`"""
    whole: bool = False
    """the reply was one JSON document and not a stream"""


_END = Reported()
"""the end of a stream, as the server marks it"""


class Client:
    """POSTs JSON to one URL over kept connections."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        hints: Hints = NO_HINTS,
        secrets: Iterable[str] = (),
        signer: Signer | None = None,
    ) -> None:
        self.url = bare_url(url)
        """without credentials and query, for messages"""
        self._url = url
        self._headers = {
            "Content-Type": "application/json",
            "User-Agent": f"holdfast/{__version__}",
            **headers,
        }
        words = [word for value in headers.values() for word in value.split()]
        words += [value or name for name, value in parse_qsl(urlsplit(url).query, keep_blank_values=True)]
        self._secrets = [word for word in [*words, *secrets] if len(word) > 7]
        self._signer = signer
        self._failures = Refusals(self.url, hints, self._all_secrets)
        self._connections: Connections | None = None
        """None: requests go through a proxy"""
        self._session: WebSession | None = None

    def _all_secrets(self) -> Iterable[str]:
        return self._secrets if self._signer is None else (*self._secrets, *self._signer.secrets)

    async def __aenter__(self) -> Self:
        try:
            if proxy_of(self.url) is None:
                self._connections = Connections(self._url, self._headers)
        except ValueError as error:
            raise Fault("refused", f"{self.url} cannot be asked: {error}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        for opened in (self._connections, self._session):
            if opened is not None:
                await opened.close()

    @property
    def notices(self) -> list[str]:
        """Report a server whose connections cannot be reused."""
        if self._connections is None or not self._connections.strayed:
            return []
        notice = (
            f"{self.url} sent replies that no request had asked for. They were dropped, and since then each request "
            "has had a connection of its own. If one of them arrived while another request was waiting, it was taken "
            "for the answer: check the server, or the proxy in front of it."
        )
        return [notice]

    def post(self, body: Any) -> Coroutine[Any, Any, Any]:
        """Post JSON and return the JSON of the reply."""
        return self._ask("POST", self._url, msgspec.json.encode(body))

    def get(self, query: str = "") -> Coroutine[Any, Any, Any]:
        """Return the JSON at the URL."""
        return self._ask("GET", urlsplit(self._url)._replace(query=query).geturl(), b"")

    async def _ask(self, method: str, url: str, data: bytes) -> Any:
        try:
            response = await self._request(method, url, data, whole=True)
            data = await response.read()
        except OSError as error:
            raise self._failures.of_exception(error) from error
        if response.status >= 300:
            raise self._failures.of_response(response.status, response.headers, data)
        return self.check(parse(data))

    def check(self, value: Any) -> Any:
        """Return the JSON of a reply; raise the error that it reports although its status is good."""
        if is_error(value):
            raise self._failures.reported(msgspec.json.encode(value), "with status 200")
        return value

    async def _request(self, method: str, url: str, data: bytes, *, whole: bool) -> Response | WebResponse:
        """Make a request; return the response when its head has arrived, or with `whole` all of it.

        Redirects are followed on the same server, with the same method and body, except for 303, which asks for a GET.
        """
        for _ in range(1 + _MOST_REDIRECTS):
            headers = None if self._signer is None else await self._signer.headers(url, data)
            response: Response | WebResponse
            if self._connections is not None:
                response = await self._connections.request(method, url, data, headers, whole=whole)
            else:
                response = await self._opened_session().request(method, url, data, headers)
            if response.status not in _REDIRECTS or "location" not in response.headers:
                return response
            response.close()
            url = self._redirected(url, response.headers["location"])
            if response.status == 303:
                method, data = "GET", b""
        raise self._failures.too_many_redirects(_MOST_REDIRECTS)

    def _redirected(self, url: str, location: str) -> str:
        """Return the address that a redirect leads to; raise Fault if it belongs to another server."""
        try:
            new = urljoin(url, location)
            if origin_of(new) == origin_of(url):
                return new
        except ValueError:  # not a URL
            new = location
        raise self._failures.other_server(bare_url(url), bare_url(new))

    def _opened_session(self) -> WebSession:
        if self._session is None:
            from holdfast.http.session import WebSession  # aiohttp takes long to import

            self._session = WebSession(self._headers, proxy_of(self.url))
        return self._session

    @asynccontextmanager
    async def call(
        self, method: str, url: str, data: Any = None, content_type: str | None = None
    ) -> AsyncIterator[WebResponse]:
        """Make a request to another path of the server, and yield the response once its status is good.

        Only a GET is redirected: a file that was uploaded is at its end.
        """
        try:
            for _ in range(1 + _MOST_REDIRECTS):
                async with self._opened_session().call(method, url, data, content_type) as response:
                    if response.status in _REDIRECTS and "location" in response.headers:
                        new = self._redirected(url, response.headers["location"])
                        if method == "GET":
                            url = new
                            continue
                    if response.status >= 300:
                        raise self._failures.of_response(
                            response.status, response.headers, await response.read(), bare_url(url)
                        )
                    yield response
                    return
        except OSError as error:
            raise self._failures.of_exception(error) from error
        raise self._failures.too_many_redirects(_MOST_REDIRECTS)

    def form(self, fields: Mapping[str, str], file: IO[bytes], name: str) -> tuple[Any, str]:
        """Return a form with a file, and its content type."""
        return self._opened_session().form(fields, file, name)

    def refusal(self, status: int, data: bytes) -> AttemptError | Fault:
        """Return the error for a request that was refused inside a batch: the same as for a single request."""
        return self._failures.of_response(status, {}, data)

    async def stream(self, body: Any, *, halves: bool = False) -> AsyncIterator[Any]:
        """Yield the JSON events of a reply. Callers check that the last one ends the answer."""
        async for event in self.events(body, end="close", halves=halves):
            if event.value is not UNSET:
                yield self.check(event.value) if event.whole else event.value

    async def events(self, body: Any, *, end: str | None = None, halves: bool = False) -> AsyncGenerator[Reported]:
        """Yield the events of a stream, or a single event if the reply is a JSON document.

        With `halves`, texts may begin or end with half a character, and callers put them together (`mend`).

        Raises the error that a server reports inside a stream. A stream that ended early is an error, too: if `end`
        names an event, a stream without it; else a stream whose transport cannot distinguish its end from a cut. With
        `end="close"`, any end counts.
        """
        try:
            response = await self._request("POST", self._url, msgspec.json.encode(body), whole=False)
            try:
                if response.status >= 300:
                    raise self._failures.of_response(response.status, response.headers, await response.read())
                if "event-stream" not in response.headers.get("content-type", ""):
                    yield Reported(parse(await response.read()), whole=True)
                    return
                parser = EventParser()
                async for piece in response.pieces():
                    for report in self._read(parser.feed(piece), end, halves=halves):
                        if report is _END:
                            return
                        yield report
                for report in self._read(parser.close(), end, halves=halves):
                    if report is _END:
                        return
                    yield report
                self._failures.check_end(response.headers, end)
            finally:
                response.close()
        except OSError as error:
            raise self._failures.of_exception(error) from error

    def _read(self, events: Iterable[Event], end: str | None, *, halves: bool) -> Iterator[Reported]:
        """Parse events, yield `_END` for the one that ends the stream, and raise the error that one reports."""
        for event in chain.from_iterable(map(split_lines, events)):
            data = b"\n".join(event.data).strip()
            if data == b"[DONE]" or (end not in (None, "close") and end in (event.name, data.decode(errors="replace"))):
                yield _END
                return
            bare = [line for line in event.other if line.startswith(b"{")]
            if bare or event.name == "error":
                raise self._failures.reported(bare[0] if bare else data, "in its stream")
            if event.other:
                yield Reported(other=event.other)
            if data:  # servers send empty events to keep a connection open
                value = parse(data, halves=halves)
                if is_error(value):
                    raise self._failures.reported(data, "in its stream")
                yield Reported(value)


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
