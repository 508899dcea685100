"""HTTP/1.1 to one server, over connections that are kept open.

This implements only the HTTP that a direct request needs; `session.py` has the rest. aiohttp takes longer to import
than a short run needs for everything else, and more time per request than the rest of the work for it.

Failures are OSErrors: a socket's, `socket.gaierror`, `ssl.SSLError`, or BrokenReply.

Whatever a server sends, it takes no more memory than a reply may have bytes, and holds up other requests only briefly.
Only the order on a connection ties a reply to its request in HTTP/1.1. So bytes that arrive while no request is
outstanding end the connection, and no connection to that server is reused afterwards. The first connections are reused
only after a pause, so that a server with this habit is found out before a stray reply can be taken for an answer.
"""

from __future__ import annotations

import asyncio
import re
import select
import socket
import time
from base64 import b64encode
from collections import deque
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote, unquote, urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from holdfast.http.response import REPLY_BYTES, BrokenReply, Response, TooLong, check_size

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

_CONNECT_SECONDS: Final = 30.0
_IDLE_SECONDS: Final = 30.0
"""how long a connection is kept without being used"""
_MOST_UNWRITTEN: Final = 8
"""requests that are written together: each further one would delay the first by the time of preparing a request"""
_ADDRESS_SECONDS: Final = 300.0
"""how long the addresses of a host are cached"""
_LONGEST_HEAD: Final = 1 << 17
_LONGEST_HEADER: Final = 1 << 14
"""of one repeated header: joining the values takes quadratic time"""
_PROBATION: Final = 32
"""replies of a server before its connections are reused at once"""
_QUIET_SECONDS: Final = 0.25
"""during the probation, how long a connection must be silent after a reply before it is reused"""
_TIMED_OUT: Final = (b"HTTP/1.1 408", b"HTTP/1.0 408")
"""sent by some servers before they close a connection that was idle for long; never an answer"""
_URL_SAFE: Final = "!#$%&'()*+,/:;=?@[]~"
"""characters that stand for themselves in a URL; `%` begins a quoted character"""
_UNSAFE: Final = re.compile(r"[\r\n\0]")


class _NotSent(Exception):
    """A request that was not written, since its connection turned out to be unusable."""


class Connections:
    """Connections to the server of one URL. Each carries one request at a time."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """`headers` are sent with every request."""
        self.most_bytes = REPLY_BYTES.get()
        self.strayed = False
        """the server has sent something that no request asked for; connections are no longer reused"""
        self._replies = 0
        """how many have arrived, up to the end of the probation"""
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self.secure = parts.scheme == "https"
        self._port = parts.port or (443 if self.secure else 80)
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
        self._idle: deque[_Connection] = deque()
        """the one that has been idle for the longest time first"""
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
        """Make a request to a URL of the server; `headers` are added, or replace others.

        Return the response when its head has arrived; with `whole`, when all of it has.
        """
        usual = not headers and method == "POST" and url == self._url
        head = self._usual_head if usual else self._head(method, url, headers or {})
        while True:
            connection = self._take() or await self._connect()
            try:
                return await connection.send(b"%b%d\r\n\r\n%b" % (head, len(data), data), whole)
            except _NotSent:
                continue  # on another connection
            except BaseException:
                connection.close()
                raise

    def write_soon(self, connection: _Connection) -> None:
        """Write a request soon, together with others of the same iteration of the event loop.

        Batching writes keeps CPU caches warm; interleaving system calls with the preparation of requests is slower.
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
            if self._replies >= _PROBATION:
                connection = self._idle.pop()  # its state is still in the CPU's caches
            elif now - self._idle[0].used < _QUIET_SECONDS:
                return None
            else:
                connection = self._idle.popleft()
            if now - connection.used < _IDLE_SECONDS and not connection.lost:
                return connection
            connection.close()
        return None

    def give_back(self, connection: _Connection) -> None:
        """Keep a connection whose response has arrived."""
        if self.strayed:
            connection.close()
            return
        connection.used = time.monotonic()
        self._replies += self._replies < _PROBATION
        if self._idle and connection.used - self._idle[0].used > _IDLE_SECONDS:
            self._idle.popleft().close()
        self._idle.append(connection)

    def stray(self) -> None:
        """Stop reusing connections: the server has sent something that no request asked for."""
        self.strayed = True
        while self._idle:
            self._idle.popleft().close()

    def forget(self, connection: _Connection) -> None:
        """Drop a connection that is gone."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    async def _connect(self) -> _Connection:
        loop = self.loop
        secure: dict[str, Any] = {}
        if self.secure:
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
        self.most_bytes = pool.most_bytes
        self._transport: asyncio.Transport | None = None
        self.used = 0.0
        """when its last response ended; 0 before the first"""
        self.lost = False
        self.whole = False
        """the response is wanted when all of it has arrived"""
        self._waiter: asyncio.Future[Response] | None = None
        self._unwritten = b""
        """the request that is about to be written"""
        self._paused = False
        self._readable = select.poll()
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
        self._readable.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def send(self, request: bytes, whole: bool) -> asyncio.Future[Response]:
        """Send a request; the result is its response, once the head or all of it has arrived."""
        assert self._transport is not None
        self.whole = whole
        self._waiter = waiter = self._pool.loop.create_future()
        if self.lost:
            self._not_sent()
        else:
            self._unwritten = request
            self._pool.write_soon(self)
        return waiter

    def write(self) -> None:
        """Write the request that was sent, unless the connection has been closed since.

        Bytes that arrive before the request is written are not its reply. They are left to `data_received` or
        `connection_lost`, and the request goes to another connection.
        """
        if self.lost or not self._unwritten:
            return
        assert self._transport is not None
        # After a TLS handshake, servers send tickets unasked. `data_received` sees other stray bytes.
        if (self.used or not self._pool.secure) and self._readable.poll(0):
            self._not_sent()
            self._pool.loop.call_later(1.0, self.close)  # neither of them may ever be called
            return
        self._transport.write(self._unwritten)
        self._unwritten = b""

    def _not_sent(self) -> None:
        """Report that the request was not written; on a new connection, that is a failure."""
        self._unwritten = b""
        if self._waiter is not None and not self._waiter.done():
            new = BrokenReply("the server sent something, or closed the connection, before it was asked")
            self._waiter.set_exception(_NotSent() if self.used else new)
        self._waiter = None

    def close(self) -> None:
        """Close the connection, whatever it does."""
        self.lost = True
        self._pool.forget(self)
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Make the server wait."""
        if not self._paused and not self.lost:
            assert self._transport is not None
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on after a pause; complete the response if all of it had arrived."""
        if self._paused and not self.lost:
            assert self._transport is not None
            self._transport.resume_reading()
        self._paused = False
        if self._complete:
            self._end()

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self._unwritten:
            self._take_stray(data)
            return
        self._read += len(data)
        failure: BrokenReply | None = None
        try:
            self._parser.feed_data(data)
            if self._response is None:
                if self._read > _LONGEST_HEAD:
                    failure = BrokenReply("the headers of the reply do not end")
            elif self._read > self.most_bytes:  # in tiny chunks, or after the end
                check_size(self._read - _LONGEST_HEAD, self.most_bytes)
        except (HttpParserError, HttpParserUpgrade) as error:
            cause = error.__context__  # raised by one of the methods below
            failure = cause if isinstance(cause, BrokenReply) else BrokenReply(f"the reply is not HTTP: {error}")
        except TooLong as error:
            failure = error
        if self._complete:
            self._surplus = self._surplus or failure is not None
            self._end()
        elif failure is not None:
            self.fail(failure)

    def _take_stray(self, data: bytes) -> None:
        """Close a connection on which bytes arrived that no request asked for."""
        if data.strip() and not data.startswith(_TIMED_OUT):
            self._pool.stray()
        self.close()
        self._not_sent()

    def on_message_begin(self) -> None:
        self._surplus = self._complete

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._response is not None:
            return  # after the body
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        if key in self._headers:
            text = f"{self._headers[key]}, {text}"
            if len(text) > _LONGEST_HEADER:
                raise BrokenReply("a header of the reply is too long")
        self._headers[key] = text

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._complete or status < 200:
            self._headers = {}  # a preliminary reply, which the final one follows
            return
        self._response = Response(status, self._headers, self)
        self._reusable = self._parser.should_keep_alive()
        if not self.whole:
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
        if response.inflating:
            return  # `resume` is called when that is done
        # refused before all of the request was there
        unsent = not self.lost and self._transport.get_write_buffer_size() > 0
        reusable = self._reusable and not self._surplus and not unsent and not self.lost
        if self._surplus:
            self._pool.stray()
        response.end()
        self._answer(response)
        self._begin_reply()
        self._waiter = None
        if reusable:
            if self._paused:
                self.resume()
            self._pool.give_back(self)
        else:
            self.close()

    def _answer(self, response: Response) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(response)

    def fail(self, error: OSError) -> None:
        """End the response with a failure, and close the connection."""
        if self._response is not None:
            self._response.end(error)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        self._waiter = None
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._pool.forget(self)
        if self._unwritten:
            self._not_sent()
        elif self._waiter is not None:
            ends = exc is None and self._response is not None and self._response.ends_with_connection
            if ends or self._complete:
                self._complete = True
                self._end()
                return
            begun = "in the middle of its reply" if self._read else "without a reply"
            self.fail(exc if isinstance(exc, OSError) else BrokenReply(f"the server closed the connection {begun}"))


def _target_of(url: str) -> str:
    """Return the path and query of a URL, as they are sent."""
    parts = urlsplit(url)
    query = f"?{parts.query}" if parts.query else ""
    return quote(f"{parts.path or '/'}{query}", safe=_URL_SAFE)
