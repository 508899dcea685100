"""Server-sent events, parsed as the bytes arrive, as the HTML standard defines them.

The parser departs from the standard in two ways. The last event counts even where the blank line after it is missing,
since many servers leave it out; whether a stream was cut off is for the transport to say. And lines with unknown field
names, which the standard drops, are reported with their event: some servers put errors and progress there.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class Event(msgspec.Struct, frozen=True):
    """The lines between two blank lines."""

    name: str
    """the value of `event:`, or an empty text"""
    data: tuple[bytes, ...]
    """the values of its `data:` lines; joined with newlines they are the event's data"""
    other: tuple[bytes, ...]
    """whole lines whose field is none of the standard's"""


class EventParser:
    """Splits a stream into events. The time it takes is linear in the bytes it is fed, whatever their chunking."""

    def __init__(self) -> None:
        self._line: list[bytes] = []
        """the pieces of a line that has not ended yet"""
        self._after_cr = False
        """the last byte was a CR: an LF that follows belongs to the same line end"""
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
        """Return the last event, where no blank line followed it."""
        events: list[Event] = []
        if self._line:
            self._end_line(events)
        self._dispatch(events)
        return events

    def _end_line(self, events: list[Event]) -> None:
        line = b"".join(self._line)
        self._line.clear()
        if self._at_start:
            line = line.removeprefix(_BYTE_ORDER_MARK)
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
