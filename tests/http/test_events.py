"""Server-sent events, parsed as the standard says."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from holdfast.http.response import Event, EventParser


def parse(*chunks: bytes) -> list[Event]:
    parser = EventParser()
    return [event for chunk in chunks for event in parser.feed(chunk)] + parser.close()


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Split bytes at places."""
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


FIELDS = [b"data: a", b"data:b", b"data:  c", b"data", b"event: error", b"event:", b": comment", b"id: 1", b"x: y"]
OTHERS = [b"", b"", b"\xef\xbb\xbf", b'{"code":"e"}', "data: \u2028é".encode(), b"data: [DONE]"]
LINES = st.sampled_from([*FIELDS, *OTHERS])
Parts = list[tuple[bytes, bytes]]
ENDS = st.sampled_from([b"\n", b"\r", b"\r\n"])


@given(st.lists(st.tuples(LINES, ENDS)), st.lists(st.integers(min_value=0)), st.booleans())
def test_the_chunking_of_a_stream_changes_nothing(
    parts: list[tuple[bytes, bytes]], places: list[int], end: bool
) -> None:
    data = b"".join(line + ending for line, ending in parts) + (b"" if end else b"data: last")
    assert parse(*cut(data, places)) == parse(data)


@given(st.lists(st.tuples(LINES, ENDS)))
def test_events_equal_the_standards_read_line_by_line(parts: Parts) -> None:
    expected, name, data = [], "", []
    # A CR before an LF is one line end, whatever two were meant.
    text = b"".join(line + ending for line, ending in parts)
    for number, line in enumerate([*text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")[:-1], b""]):
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
        field, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if not line:
            expected += [(name, b"\n".join(data))] if data else []
            name, data = "", []
        elif field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode()
    assert [(event.name, b"\n".join(event.data)) for event in parse(text) if event.data] == expected


def test_a_huge_line_in_small_pieces_is_parsed_in_linear_time() -> None:
    parser = EventParser()
    piece = b"x" * 16
    parser.feed(b"data: ")
    for _ in range(200_000):  # quadratic time would be minutes
        assert parser.feed(piece) == []
    (event,) = parser.feed(b"\n\n")
    assert len(event.data[0]) == 200_000 * 16
