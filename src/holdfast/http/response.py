"""The body of a response: read as it arrives, decompressed in steps, never larger than a reply may be, and parsed.

A body is JSON, or a stream of server-sent events. The parser of streams follows the HTML standard except in two ways.
The last event counts even if the blank line after it is missing, since many servers leave it out; the connection
decides whether a stream was cut off. And lines with unknown field names, which the standard drops, are reported with
their event: some servers put errors and progress there.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from codecs import BOM_UTF8
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
from msgspec.structs import replace

from holdfast.errors import AttemptError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

REPLY_BYTES: Final[ContextVar[int]] = ContextVar("reply_bytes", default=64_000_000)
"""the maximum size of a reply after decompression, for clients that are opened in this context"""
_STEP: Final = 1 << 18
"""bytes that are decompressed at once: a fraction of a millisecond, after which other requests have their turn"""
_MOST_UNREAD: Final = 1 << 22
"""bytes of a stream that may wait for their reader before the server has to wait, too"""


class BrokenReply(OSError):
    """A reply that is not HTTP, or ended early."""


class TooLong(BrokenReply):
    """A reply that is larger than a reply may be."""


def check_size(size: int, most_bytes: int) -> None:
    """Raise TooLong if a reply is too large."""
    if size > most_bytes:
        raise TooLong(f"the reply has more than {most_bytes:,} bytes")


class _Source(Protocol):
    """The connection on which a body arrives."""

    most_bytes: int
    whole: bool
    """the response is wanted when all of it has arrived"""

    def pause(self) -> None:
        """Make the server wait."""
        ...

    def resume(self) -> None:
        """Read on after a pause; complete the response if all of it has arrived."""
        ...

    def fail(self, error: OSError) -> None:
        """End the response with a failure, and close the connection."""
        ...

    def close(self) -> None:
        """Close the connection, whatever it does."""
        ...


class Response:
    """A response. Its body arrives piece by piece."""

    def __init__(self, status: int, headers: dict[str, str], connection: _Source) -> None:
        self.status = status
        self.headers = headers
        """by names in lower case"""
        self._connection = connection
        self._unread: bytes | bytearray = b""
        """bytes that have arrived and were not read yet"""
        self._size = 0
        """bytes of the body so far"""
        self._held_up = False
        """the server has to wait until something is read"""
        self._ended: OSError | bool = False
        """the failure that ended the body early, or True at its end"""
        self._arrival: asyncio.Future[None] | None = None
        self._inflater = inflater_of(headers) if "content-encoding" in headers else None

    @property
    def ends_with_connection(self) -> bool:
        """True if only the end of the connection marks the end of the body."""
        return self.status not in (204, 304) and self.headers.keys().isdisjoint(("content-length", "transfer-encoding"))

    @property
    def inflating(self) -> bool:
        """True while something is left to decompress."""
        return self._inflater is not None and self._inflater.busy

    async def read(self) -> bytes:
        """Return the whole body."""
        if self._ended is not True:
            return b"".join([piece async for piece in self.pieces()])
        return bytes(self._unread)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. The server waits while too much is unread."""
        while True:
            while self._unread:
                arrived, self._unread = self._unread, b""
                if self._held_up:
                    self._held_up = False
                    self._go_on()
                yield bytes(arrived)
            if self._ended is True:
                return
            if self._ended:
                raise self._ended
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival

    def feed(self, data: bytes) -> None:
        """Take a piece of the body."""
        if self._inflater is None:
            self._take(data)
            return
        busy = self._inflater.busy
        self._inflater.feed(data)
        if not busy:
            self._inflate()

    def _inflate(self) -> None:
        """Decompress one step. Later iterations of the event loop do the rest, before anything else is read."""
        assert self._inflater is not None
        self._take(self._inflater.step())
        if self._inflater.busy:
            self._connection.pause()
            if not self._held_up:
                asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        """Decompress what has arrived, then read on."""
        if self._ended:
            return
        if self.inflating:
            try:
                self._inflate()
            except BrokenReply as error:
                self._connection.fail(error)
                return
        if not self.inflating and not self._held_up:
            self._connection.resume()

    def _take(self, data: bytes) -> None:
        if not data:
            return
        self._size += len(data)
        if not self._unread:
            self._unread = data
        else:
            if isinstance(self._unread, bytes):
                self._unread = bytearray(self._unread)
            self._unread += data
        if self._size > _MOST_UNREAD or self._size > self._connection.most_bytes:
            check_size(self._size, self._connection.most_bytes)
            if len(self._unread) > _MOST_UNREAD and not self._connection.whole:
                self._held_up = True
                self._connection.pause()
        if self._arrival is not None:
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


def inflater_of(headers: Mapping[str, str]) -> Inflater | None:
    """Return the decompressor for a body with these headers; None if it is not compressed."""
    if "content-encoding" not in headers:
        return None
    encoding = headers["content-encoding"].strip().lower()
    return None if encoding in ("", "identity") else Inflater(encoding)


class Inflater:
    """Decompresses a body step by step: one received byte may become a thousand."""

    def __init__(self, encoding: str) -> None:
        if encoding not in ("gzip", "x-gzip", "deflate"):
            raise BrokenReply(f"the reply is compressed with {encoding!r}, which was not asked for")
        self._zlib = zlib.decompressobj(wbits=47)  # a header of gzip or of zlib
        self._may_be_bare = encoding == "deflate"
        self._start = b""
        """input that has not produced output yet"""
        self._packed = bytearray()
        """input that was not decompressed yet"""
        self.busy = False
        """something is left to decompress"""

    @property
    def whole(self) -> bool:
        """True if everything has arrived."""
        return self._zlib.eof or not self._start

    def feed(self, data: bytes) -> None:
        """Take a piece. Bytes after the end of the compressed data are dropped."""
        if not self._zlib.eof:
            self._packed += data
            self.busy = True

    def step(self) -> bytes:
        """Return the next bytes."""
        data, self._packed = bytes(self._packed), bytearray()
        if self._may_be_bare:
            self._start += data
        else:
            self._start = self._start or data[:1]
        try:
            try:
                inflated = self._zlib.decompress(data, _STEP)
            except zlib.error:
                if not self._may_be_bare:
                    raise
                self._zlib = zlib.decompressobj(wbits=-15)  # some servers leave out the header
                inflated = self._zlib.decompress(self._start, _STEP)
        except zlib.error as error:
            raise BrokenReply(f"the reply cannot be decompressed: {error}") from error
        self._packed += self._zlib.unconsumed_tail
        self.busy = not self._zlib.eof and (bool(self._packed) or len(inflated) == _STEP)
        self._may_be_bare = self._may_be_bare and not inflated
        return inflated


decode: Final = msgspec.json.Decoder().decode
NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""what `decode` raises"""
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_WRITTEN_HALF: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_HALF: Final = re.compile(r"[\ud800-\udfff]")


def parse(data: bytes, *, halves: bool = False) -> Any:
    """Parse JSON; raise an AttemptError that shows the data if it is not JSON.

    Half a character, which JSON can write and no file can hold, is replaced; with `halves` it is kept.
    """
    data = data.removeprefix(BOM_UTF8)
    try:
        return decode(data)
    except NOT_JSON as error:
        if _WRITTEN_HALF.search(data):
            import json  # takes a while to import, and few replies need it

            with suppress(ValueError, RecursionError):
                value = json.loads(data)  # unlike msgspec, it reads half characters
                return value if halves else mend(value)
        text = data[:120].decode("utf-8", "replace")
        raise AttemptError("bad_reply", f"the reply is not JSON ({error}): {text!r}") from error


def mend(value: Any) -> Any:
    """Return a value whose texts can be stored: halves of a character are joined, and a lone half is replaced.

    JavaScript cuts texts between the two halves (surrogates) of a character, so that each event has one of them.
    """
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if _HALF.search(value) else value
    if isinstance(value, dict):
        return {mend(key): mend(each) for key, each in value.items()}
    return [mend(each) for each in value] if isinstance(value, list) else value


class Event(msgspec.Struct, frozen=True):
    """The lines between two blank lines."""

    name: str
    """the value of `event:`, or an empty text"""
    data: tuple[bytes, ...]
    """the values of its `data:` lines; joined with newlines they are the event's data"""
    other: tuple[bytes, ...]
    """whole lines whose field is not in the standard, such as `intermediate_data: …`"""


class EventParser:
    """Splits a stream into events. The time it takes is linear in the bytes it is fed, whatever their chunking."""

    def __init__(self) -> None:
        self._line: list[bytes] = []
        """the pieces of a line that has not ended yet"""
        self._after_cr = False
        """the last byte was a CR: an LF after it belongs to the same line end"""
        self._at_start = True
        self._name = ""
        self._data: list[bytes] = []
        self._other: list[bytes] = []

    def feed(self, chunk: bytes) -> list[Event]:
        """Take the next bytes and return the events that they complete."""
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
            self._after_cr = False
        if not chunk:
            return []
        self._after_cr = chunk.endswith(b"\r")
        events: list[Event] = []
        start = 0
        for end in _LINE_END.finditer(chunk):
            self._line.append(chunk[start : end.start()])
            self._end_line(events)
            start = end.end()
        if start < len(chunk):
            self._line.append(chunk[start:])
        return events

    def close(self) -> list[Event]:
        """Return the last event, if no blank line followed it."""
        events: list[Event] = []
        if self._line:
            self._end_line(events)
        self._dispatch(events)
        return events

    def _end_line(self, events: list[Event]) -> None:
        line = b"".join(self._line)
        self._line.clear()
        if self._at_start:
            line = line.removeprefix(BOM_UTF8)
            self._at_start = False
        if not line:
            self._dispatch(events)
            return
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        elif field not in (b"", b"id", b"retry"):  # a line that begins with a colon is a comment
            self._other.append(line)

    def _dispatch(self, events: list[Event]) -> None:
        if self._data or self._other or self._name:
            events.append(Event(self._name, tuple(self._data), tuple(self._other)))
        self._name = ""
        self._data.clear()
        self._other.clear()


def split_lines(event: Event) -> list[Event]:
    """Split an event by its lines if its data is JSON only line by line: some servers leave out the blank lines."""
    if len(event.data) > 1:
        try:
            decode(b"\n".join(event.data))
        except NOT_JSON:
            return [*(replace(event, data=(line,), other=()) for line in event.data), replace(event, name="", data=())]
    return [event]
