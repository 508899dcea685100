"""Requests that need more of HTTP than `connections.py` has: through a proxy, or with files.

Failures are the same OSErrors. Redirects are left to the caller.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from typing import IO, TYPE_CHECKING, Any, Final

import aiohttp
from yarl import URL

from holdfast.http.response import REPLY_BYTES, BrokenReply, check_size, inflater_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping

_CALL_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=300)
"""of uploads and downloads, for which callers set no limit"""


class WebResponse:
    """A response, whose body arrives piece by piece."""

    def __init__(self, response: aiohttp.ClientResponse, most_bytes: int) -> None:
        self._response = response
        self._most_bytes = most_bytes
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers

    async def read(self) -> bytes:
        """Return the whole body; raise TooLong if it has more bytes than a reply may have."""
        return b"".join([piece async for piece in self.pieces()])

    async def line(self) -> bytes:
        """Return the first line of the body, without its end."""
        begun = b""
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                begun += piece
                if b"\n" in piece:
                    break
        return begun.partition(b"\n")[0]

    async def pieces(self, *, endless: bool = False) -> AsyncGenerator[bytes]:
        """Yield the body as it arrives; `endless`: it holds many replies, and may have any number of bytes."""
        inflater, size = inflater_of({name.lower(): value for name, value in self.headers.items()}), 0
        try:
            async for packed in self._response.content.iter_any():
                if inflater is not None:
                    inflater.feed(packed)
                while inflater is None or inflater.busy:
                    piece = packed if inflater is None else inflater.step()
                    size += len(piece)
                    if not endless:
                        check_size(size, self._most_bytes)
                    yield piece
                    if inflater is None:
                        break
                    await asyncio.sleep(0)  # other requests have their turn
            if inflater is not None and not inflater.whole:
                raise BrokenReply("the compressed reply ended early")
        except aiohttp.ClientError as error:
            raise _failure(error) from error
        finally:
            self.close()

    def close(self) -> None:
        """Give back the connection, or close it if the body has not been read to its end."""
        self._response.release()


class WebSession:
    """A session of aiohttp."""

    def __init__(self, headers: Mapping[str, str], proxy: str | None) -> None:
        self._most_bytes = REPLY_BYTES.get()
        # Callers set time-outs and limit concurrency.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30, ttl_dns_cache=300),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # which has no limit
            headers={"Accept-Encoding": "gzip, deflate", **headers},
            proxy=proxy,
        )

    async def request(self, method: str, url: str, data: bytes, headers: Mapping[str, str] | None) -> WebResponse:
        """Make a request; return the response when its head has arrived."""
        try:
            sent = URL(url, encoded=headers is not None)  # a signature covers the URL as it is written
            response = await self._session.request(method, sent, data=data, headers=headers, allow_redirects=False)
            return WebResponse(response, self._most_bytes)
        except (aiohttp.ClientError, asyncio.IncompleteReadError) as error:
            raise _failure(error) from error

    @asynccontextmanager
    async def call(
        self, method: str, url: str, data: Any = None, content_type: str | None = None
    ) -> AsyncIterator[WebResponse]:
        """Make a request whose body may be a file, and yield the response."""
        headers = {} if content_type is None else {"Content-Type": content_type}
        try:
            async with self._session.request(
                method, url, data=data, headers=headers, timeout=_CALL_TIMEOUT, allow_redirects=False
            ) as response:
                yield WebResponse(response, self._most_bytes)
        except (aiohttp.ClientError, asyncio.IncompleteReadError) as error:
            raise _failure(error) from error

    @staticmethod
    def form(fields: Mapping[str, str], file: IO[bytes], name: str) -> tuple[Any, str]:
        """Return a form with a file, and its content type."""
        form = aiohttp.FormData(fields)
        form.add_field("file", file, filename=name, content_type="application/jsonl")
        payload = form()
        return payload, payload.content_type

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


def _failure(error: Exception) -> OSError:
    """Return the operating system's error that caused an error of aiohttp, or a BrokenReply with its message."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError) and isinstance(error.certificate_error, OSError):
        return error.certificate_error
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error
    return BrokenReply(f"{type(error).__name__}: {error}".rstrip(": "))
