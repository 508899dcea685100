"""Where the lines of each trial are: all of them, in order, without holding them."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.report.line_places import LinePlaces
from holdfast.store import spool
from holdfast.store.index import Index
from holdfast.store.lines import LineRef
from holdfast.store.records import Usage
from holdfast.store.refs import OutputRef

if TYPE_CHECKING:
    import pytest

FILES = [Path("a"), Path("b")]


def _outputs(count: int) -> Index:
    index = Index()
    for number in range(count):
        index.outputs[f"k{number}"] = OutputRef(LineRef(FILES[0], number, 1), "d", Usage(), 1.0, (), None, 0.0)
    return index


def test_lines_of_a_trial_come_in_order_with_and_without_an_output() -> None:
    places = LinePlaces(FILES, _outputs(2).outputs)
    for offset in range(12):
        places.add(f"k{offset % 3}", offset % 2, 100 * offset, offset)  # `k2` has no output
    for number in range(3):
        expected = [LineRef(FILES[offset % 2], 100 * offset, offset) for offset in range(number, 12, 3)]
        assert places.lines(f"k{number}") == expected
    assert places.lines("unknown") == []


def test_calls_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "_IN_MEMORY", 1 << 17)
    places = LinePlaces(FILES, _outputs(10).outputs)
    tracemalloc.start()
    try:
        for offset in range(25_000):
            places.add(f"k{offset % 10}", 1, offset, 1)
        assert tracemalloc.get_traced_memory()[1] < 320_000, "24 bytes for each call were 600,000"
    finally:
        tracemalloc.stop()
    assert places.lines("k3")[-1] == LineRef(FILES[1], 24_993, 1)
