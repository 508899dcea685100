"""Find what two versions of a dataset have in common, by the digests of their rows, without looking at each row.

If rows were added, changed or removed here and there, nearly all of the work is comparing long runs of bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH: Final = 16
"""bytes of a digest"""
_LONGEST: Final = 1 << 12
"""rows that are compared at once"""
_WINDOWS: Final = (16, 1024)
"""numbers of rows after a difference that are searched for the next common row, before all others are"""


class CommonRows(NamedTuple):
    """Consecutive rows that both versions have."""

    new: int
    """position of the first of them in the new version"""
    old: int
    length: int


def match_rows(old: bytes, new: bytes) -> list[CommonRows]:
    """Return the rows that two versions have in common, in the order of the new one. Each old row is used once.

    `old` and `new` are the joined digests of the rows.
    """
    matches: list[CommonRows] = []
    here, there, end_new, end_old = 0, 0, len(new) // WIDTH, len(old) // WIDTH
    while here < end_new and there < end_old:
        if count := _count_equal(old, there, new, here):
            matches.append(CommonRows(here, there, count))
            here, there = here + count, there + count
        elif (common := _next_common(old, there, new, here)) is not None:
            there, here = common
        else:
            break
    return sorted([*matches, *_match_others(old, new, matches)])


def _count_equal(old: bytes, there: int, new: bytes, here: int) -> int:
    """Return the number of equal rows from two positions on."""
    count, step = 0, 1
    limit = min(len(old) // WIDTH - there, len(new) // WIDTH - here)
    while step:
        step = min(step, limit - count)
        start, other = (here + count) * WIDTH, (there + count) * WIDTH
        if step and new[start : start + step * WIDTH] == old[other : other + step * WIDTH]:
            count += step
            step = min(2 * step, _LONGEST)
        else:
            step //= 2
            limit = min(limit, count + 2 * step + 1)
    return count


def _next_common(old: bytes, there: int, new: bytes, here: int) -> tuple[int, int] | None:
    """Return the old and the new position of the next row that both have, if it is near."""
    for window in _WINDOWS:
        places = dict(zip(_digests(old, there, window), range(there, there + window), strict=False))
        for ahead, digest in enumerate(_digests(new, here, window)):
            if digest in places:
                return places[digest], here + ahead
    return None


def _match_others(old: bytes, new: bytes, matches: list[CommonRows]) -> Iterator[CommonRows]:
    """Match the rows between the matches, wherever they are."""
    unused = {
        digest: place
        for start, count in _gaps([(match.old, match.length) for match in matches], len(old) // WIDTH)
        for place, digest in enumerate(_digests(old, start, count), start)
    }
    match = CommonRows(0, 0, 0)
    for start, count in _gaps([(match.new, match.length) for match in matches], len(new) // WIDTH) if unused else ():
        for position, digest in enumerate(_digests(new, start, count), start):
            place = unused.pop(digest, None)
            if place is None:
                continue
            if match.length and (position, place) == (match.new + match.length, match.old + match.length):
                match = match._replace(length=match.length + 1)
                continue
            if match.length:
                yield match
            match = CommonRows(position, place, 1)
    if match.length:
        yield match


def _gaps(ranges: list[tuple[int, int]], end: int) -> Iterator[tuple[int, int]]:
    """Yield start and length of what lies between ranges, which are in order, up to an end."""
    position = 0
    for start, count in [*ranges, (end, 0)]:
        if position < start:
            yield position, start - position
        position = start + count


def _digests(data: bytes, start: int, count: int) -> Iterator[bytes]:
    stop = min(start + count, len(data) // WIDTH)
    return (data[place : place + WIDTH] for place in range(start * WIDTH, stop * WIDTH, WIDTH))
