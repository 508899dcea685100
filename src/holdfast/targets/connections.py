"""HTTP/1.1 to one server, over connections that are kept open.

aiohttp takes longer to import than the rest of a short run needs, and more time for a request than everything else
that is done for a trial. This is the part of HTTP that asking a model directly takes; `web_session.py` has the rest.

Failures are OSErrors: those of sockets, `socket.gaierror`, `ssl.SSLError`, and BrokenReply.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
import zlib
from base64 import b64encode
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote, unquote, urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Mapping

_CONNECT_SECONDS: Final = 30.0
_IDLE_SECONDS: Final = 30.0
"""how long a connection is kept without being used"""
_MOST_UNWRITTEN: Final = 8
"""requests that wait for each other: each more would delay the first one by the time that a trial takes"""
_ADDRESS_SECONDS: Final = 300.0
"""how long the addresses of a host are believed"""
_LONGEST_HEAD: Final = 1 << 17
_URL_SAFE: Final = "!#$%&'()*+,/:;=?@[]~"
"""characters that stand for themselves in a URL; `%` introduces what is quoted already"""
_UNSAFE: Final = re.compile(r"[\r\n\0]")


class BrokenReply(OSError):
    """A reply that is not HTTP, or ended early."""


class Response:
    """A response. Its body arrives piece by piece."""

    def __init__(self, status: int, headers: dict[str, str], connection: _Connection) -> None:
        self.status = status
        self.headers = headers
        """by names in lower case"""
        self._connection = connection
        self._pieces: list[bytes] = []
        """what has arrived and was not read yet"""
        self._ended: OSError | bool = False
        """the failure that ended the body early, or True at its end"""
        self._arrival: asyncio.Future[None] | None = None
        self._inflater: _Inflater | None = None
        if "content-encoding" in headers:
            encoding = headers["content-encoding"].strip().lower()
            self._inflater = None if encoding in ("", "identity") else _Inflater(encoding)

    @property
    def ends_with_connection(self) -> bool:
        """True if nothing but the end of the connection tells where the body ends."""
        return self.status not in (204, 304) and self.headers.keys().isdisjoint(("content-length", "transfer-encoding"))

    async def read(self) -> bytes:
        """Return the whole body."""
        if self._ended is not True:
            return b"".join([piece async for piece in self.pieces()])
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives."""
        while True:
            while self._pieces:
                arrived, self._pieces = self._pieces, []
                for piece in arrived:
                    yield piece
            if self._ended is True:
                return
            if self._ended:
                raise self._ended
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival

    def feed(self, data: bytes) -> None:
        """Take a piece of the body."""
        if self._inflater is not None:
            data = self._inflater.feed(data)
        if data:
            self._pieces.append(data)
            self._wake()

    def end(self, failure: OSError | None = None) -> None:
        """Take the end of the body, or the failure that ends it."""
        if failure is None and self._inflater is not None and not self._inflater.whole:
            failure = BrokenReply("the compressed reply ended early")
        self._ended = failure or True
        self._wake()

    def close(self) -> None:
        """Close the connection, unless the body has been read to its end."""
        if not self._ended:
            self._connection.close()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


class _Inflater:
    """Decompresses a body."""

    def __init__(self, encoding: str) -> None:
        if encoding not in ("gzip", "x-gzip", "deflate"):
            raise BrokenReply(f"the reply is compressed with {encoding!r}, which was not asked for")
        self._zlib = zlib.decompressobj(wbits=47)  # a header of gzip or of zlib
        self._may_be_bare = encoding == "deflate"
        self._start = b""
        """what came before there was anything to return"""

    @property
    def whole(self) -> bool:
        """True if everything has arrived."""
        return self._zlib.eof or not self._start

    def feed(self, data: bytes) -> bytes:
        """Decompress a piece."""
        if self._may_be_bare:
            self._start += data
        else:
            self._start = self._start or data[:1]
        try:
            try:
                inflated = self._zlib.decompress(data)
            except zlib.error:
                if not self._may_be_bare:
                    raise
                self._zlib = zlib.decompressobj(wbits=-15)  # some servers leave out the header
                inflated = self._zlib.decompress(self._start)
        except zlib.error as error:
            raise BrokenReply(f"the reply cannot be decompressed: {error}") from error
        self._may_be_bare = self._may_be_bare and not inflated
        return inflated


class Connections:
    """Connections to the server of one URL. Each carries one request at a time."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """`headers` are sent with every request."""
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._secure = parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        ports = "" if parts.port is None else f":{parts.port}"
        named = f"[{self._host}]" if ":" in self._host else self._host
        if not named.isascii():
            named = named.encode("idna").decode()
        self._headers = {"host": f"{named}{ports}", "accept": "*/*", "accept-encoding": "gzip, deflate"}
        self._headers |= {name.lower(): value for name, value in headers.items()}
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["authorization"] = f"Basic {b64encode(pair.encode('latin-1', 'replace')).decode()}"
        self.loop = asyncio.get_running_loop()
        self._url = url
        self._usual_head = self._head("POST", url, {})
        """of requests to the URL itself, which is the same each time"""
        self._unwritten: list[_Connection] = []
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._addresses: asyncio.Task[list[Any]] | None = None
        self._resolved = 0.0
        self._context: ssl.SSLContext | None = None

    def _head(self, method: str, url: str, headers: Mapping[str, str]) -> bytes:
        """Return the head of a request up to the length of its body."""
        named = {**self._headers, **{name.lower(): value for name, value in headers.items()}}
        if any(_UNSAFE.search(part) for pair in named.items() for part in pair):
            raise ValueError("a header contains a line break")
        lines = [f"{method} {_target_of(url)} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items())]
        return "\r\n".join([*lines, "content-length: "]).encode()

    async def request(
        self, method: str, url: str, data: bytes, headers: Mapping[str, str] | None, *, whole: bool
    ) -> Response:
        """Make a request to a URL of the server; `headers` are further ones, or replace others.

        Return the response when its head has arrived; with `whole`, when all of it has.
        """
        usual = not headers and method == "POST" and url == self._url
        head = self._usual_head if usual else self._head(method, url, headers or {})
        connection = self._take() or await self._connect()
        try:
            return await connection.send(b"%b%d\r\n\r\n%b" % (head, len(data), data), whole)
        except BaseException:
            connection.close()
            raise

    def write_soon(self, connection: _Connection) -> None:
        """Have a request written, together with some that are sent in the same iteration of the event loop.

        Between two trials, a system call would take what trials need out of the processor's caches: both take less time
        if each is done many times in a row.
        """
        if not self._unwritten:
            self.loop.call_soon(self._write)
        self._unwritten.append(connection)
        if len(self._unwritten) == _MOST_UNWRITTEN:
            self._write()

    def _write(self) -> None:
        unwritten, self._unwritten = self._unwritten, []
        for connection in unwritten:
            connection.write()

    def _take(self) -> _Connection | None:
        """Return a connection that waits for a request, if there is one."""
        now = time.monotonic()
        while self._idle:
            connection = self._idle.pop()
            if now - connection.used < _IDLE_SECONDS and not connection.lost:
                return connection
            connection.close()
        return None

    def give_back(self, connection: _Connection) -> None:
        """Keep a connection whose response has arrived."""
        connection.used = time.monotonic()
        if self._idle and connection.used - self._idle[0].used > _IDLE_SECONDS:
            self._idle.pop(0).close()
        self._idle.append(connection)

    def forget(self, connection: _Connection) -> None:
        """Drop a connection that is gone."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    async def _connect(self) -> _Connection:
        loop = self.loop
        secure: dict[str, Any] = {}
        if self._secure:
            secure = {"ssl": self._trust(), "server_hostname": self._host}
        async with asyncio.timeout(_CONNECT_SECONDS):
            addresses = await self._resolve()
            try:
                if len(addresses) == 1:
                    host, port = addresses[0][4][:2]
                    _, protocol = await loop.create_connection(lambda: _Connection(self), host, port, **secure)
                else:
                    from aiohappyeyeballs import start_connection  # a host of one address is usual on clusters

                    sock = await start_connection(addresses, happy_eyeballs_delay=0.25, interleave=1)
                    _, protocol = await loop.create_connection(lambda: _Connection(self), sock=sock, **secure)
            except OSError:
                self._addresses = None  # the host may have moved
                raise
        self._open.add(protocol)
        return protocol

    async def _resolve(self) -> list[Any]:
        """Return the addresses of the host, looked up once for all connections."""
        loop = self.loop
        if self._addresses is None or loop.time() - self._resolved > _ADDRESS_SECONDS:
            self._resolved = loop.time()
            lookup = loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._addresses = asyncio.ensure_future(cast("Any", lookup))
        task = self._addresses
        try:
            return await asyncio.shield(task)
        except OSError:
            if self._addresses is task:
                self._addresses = None
            raise

    def _trust(self) -> ssl.SSLContext:
        if self._context is None:
            import ssl

            self._context = ssl.create_default_context()
            self._context.set_alpn_protocols(["http/1.1"])
        return self._context

    async def close(self) -> None:
        """Close all connections."""
        for connection in [*self._open]:
            connection.close()
        await asyncio.sleep(0)  # they are closed in the next iteration


class _Connection(asyncio.Protocol):
    """One connection: a request, its response, the next request. The parser calls the methods named `on_…`."""

    def __init__(self, pool: Connections) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self.used = 0.0
        """when its last response ended"""
        self.lost = False
        self._waiter: asyncio.Future[Response] | None = None
        self._whole = False
        self._unwritten = b""
        """the request that is about to be written"""
        self._parser = HttpResponseParser(self)  # for all replies: after one that is not sound there is no other
        self._begin_reply()

    def _begin_reply(self) -> None:
        self._headers: dict[str, str] = {}
        self._read = 0
        """bytes of the reply so far"""
        self._response: Response | None = None
        self._reusable = True
        self._complete = False
        self._surplus = False
        """the server sent more than its reply"""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self, request: bytes, whole: bool) -> asyncio.Future[Response]:
        """Send a request; the result is its response, once the head or all of it has arrived."""
        assert self._transport is not None
        self._whole = whole
        self._waiter = waiter = self._pool.loop.create_future()
        if self.lost:
            waiter.set_exception(ConnectionResetError("the server closed the connection"))
        else:
            self._unwritten = request
            self._pool.write_soon(self)
        return waiter

    def write(self) -> None:
        """Write the request that was sent, unless the connection has been closed since."""
        if not self.lost:
            assert self._transport is not None
            self._transport.write(self._unwritten)
            self._unwritten = b""

    def close(self) -> None:
        """Close the connection, whatever it does."""
        self.lost = True
        self._pool.forget(self)
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:  # nothing was asked
            self.close()
            return
        self._read += len(data)
        failure: BrokenReply | None = None
        try:
            self._parser.feed_data(data)
            if self._response is None and self._read > _LONGEST_HEAD:
                failure = BrokenReply("the headers of the reply do not end")
        except (HttpParserError, HttpParserUpgrade) as error:
            cause = error.__context__  # what a call of ours raised
            failure = cause if isinstance(cause, BrokenReply) else BrokenReply(f"the reply is not HTTP: {error}")
        if self._complete:
            self._surplus = self._surplus or failure is not None
            self._end()
        elif failure is not None:
            self._fail(failure)

    def on_message_begin(self) -> None:
        self._surplus = self._complete

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._complete or status < 200:
            self._headers = {}  # a preliminary reply, after which the other one comes
            return
        self._response = Response(status, self._headers, self)
        self._reusable = self._parser.should_keep_alive()
        if not self._whole:
            self._answer(self._response)

    def on_body(self, data: bytes) -> None:
        if self._response is not None and not self._complete:
            self._response.feed(data)

    def on_message_complete(self) -> None:
        self._complete = self._response is not None

    def _end(self) -> None:
        """Complete the response. The connection is free, unless the server sent more than it announced."""
        response = self._response
        assert response is not None and self._transport is not None
        # refused before all of the request was there
        unsent = bool(self._unwritten) or self._transport.get_write_buffer_size() > 0
        reusable = self._reusable and not self._surplus and not unsent
        response.end()
        self._answer(response)
        self._begin_reply()
        self._waiter = None
        if reusable:
            self._pool.give_back(self)
        else:
            self.close()

    def _answer(self, response: Response) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(response)

    def _fail(self, error: OSError) -> None:
        if self._response is not None:
            self._response.end(error)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        self._waiter = None
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self._waiter is not None:
            if exc is None and self._response is not None and self._response.ends_with_connection:
                self._end()
                return
            begun = "in the middle of its reply" if self._read else "without a reply"
            failure = exc if isinstance(exc, OSError) else BrokenReply(f"the server closed the connection {begun}")
            self._fail(failure)
        self._pool.forget(self)


def _target_of(url: str) -> str:
    """Return the path and query of a URL, as they are sent."""
    parts = urlsplit(url)
    query = f"?{parts.query}" if parts.query else ""
    return quote(f"{parts.path or '/'}{query}", safe=_URL_SAFE)
