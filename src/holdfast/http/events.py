"""JSON in bodies, and server-sent events in streams, parsed as the bytes arrive.

The parser of streams follows the HTML standard except in two ways. The last event counts even if the blank line after
it is missing, since many servers leave it out; the transport decides whether a stream was cut off. And lines with
unknown field names, which the standard drops, are reported with their event: some servers put errors and progress
there.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from contextlib import suppress
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from holdfast.errors import AttemptError

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
