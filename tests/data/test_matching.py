"""Rows that two versions of a dataset have in common are found, wherever they are, and none is used twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data import matching
from holdfast.data.matching import match_rows


def digests(rows: list[int]) -> bytes:
    return b"".join(row.to_bytes(16, "little") for row in rows)


def test_changes_here_and_there_leave_the_rest_in_a_few_pieces() -> None:
    old = list(range(10_000))
    new = [*old[:3], -1 % 2**64, *old[4:7_000], *old[7_005:], 10_000]
    assert match_rows(digests(old), digests(new)) == [
        (0, 0, 3),
        (4, 4, 6_996),
        (7_000, 7_005, 2_995),
    ]


@pytest.mark.parametrize("windows", [(16, 1024), (2, 4), ()])
@given(
    st.lists(st.integers(0, 40), max_size=60),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9), st.lists(st.integers(0, 60), max_size=9)), max_size=4),
    st.booleans(),
)
def test_matches_are_equal_rows_used_once(windows: Any, old: list[int], edits: Any, turned: bool) -> None:
    new = old[::-1] if turned else list(old)
    for start, count, inserted in edits:
        new[start : start + count] = inserted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matching, "_WINDOWS", windows)
        matches = match_rows(digests(old), digests(new))
    used: list[int] = []
    position = 0
    for match in matches:
        assert match.length > 0 and match.new >= position
        assert new[match.new : match.new + match.length] == old[match.old : match.old + match.length]
        used += range(match.old, match.old + match.length)
        position = match.new + match.length
    assert len(set(used)) == len(used)


@given(st.lists(st.integers(0, 99), max_size=60, unique=True), st.randoms())
def test_all_rows_are_found_in_any_order(rows: list[int], order: Any) -> None:
    shuffled = list(rows)
    order.shuffle(shuffled)
    assert sum(match.length for match in match_rows(digests(rows), digests(shuffled))) == len(rows)
