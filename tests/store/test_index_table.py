"""The packed tables of an index behave like the dicts that they stand for."""

from __future__ import annotations

import math
import subprocess
import sys
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from holdfast.canonical import digest
from holdfast.store.index import Spent
from holdfast.store.index_table import OutputTable, VerdictTable, lines_of, pack_digest
from holdfast.store.lines import LineRef
from holdfast.store.records import Usage
from holdfast.store.refs import Moment, OutputRef, VerdictRef

digests = st.binary(min_size=16, max_size=16).map(lambda raw: f"sha256:{raw.hex()}")
few_digests = st.integers(0, 12).map(lambda number: f"sha256:{number << 64:032x}")
"""keys whose slots are all the same, so that they push each other on"""
odd_texts = st.sampled_from(
    ["", "k", "sha256:", f"sha256:{'AB' * 16}", f"sha256:{'ab ' * 10}ab", f"sha256:{'zz' * 16}", "md5:" + "a" * 35, "ü"]
)
keys = digests | few_digests | odd_texts
numbers = st.integers(0, 9) | st.sampled_from([0xFFFFFFFE, 0xFFFFFFFF, 2**40, -1])
counts = st.none() | numbers
reported = st.just(UNSET) | st.integers(0, 5)
floats = st.floats(allow_nan=False)
usages = st.builds(Usage, counts, counts, numbers, st.none() | floats, reported, reported, reported)
lines = st.builds(
    LineRef,
    st.sampled_from([Path("outputs.jsonl"), Path("workers/a/outputs.jsonl"), Path("workers/b/outputs.jsonl")]),
    st.integers(0, 2**47),
    st.integers(0, 2**32 - 1),
)
marks = st.lists(st.builds(Moment, digests | odd_texts, counts, floats), max_size=2).map(tuple)
outputs = st.builds(
    OutputRef, lines, digests | odd_texts, usages, floats, marks, st.none() | digests | odd_texts, floats
)
verdicts = st.builds(
    VerdictRef,
    st.sampled_from(["passed", "failed", "error", "skipped", "not_reached"]),
    st.none() | floats,
    st.none() | usages,
    floats,
    st.none() | st.lists(st.integers(), max_size=3).map(tuple),
)


def operations(values: Any) -> Any:
    """Random sequences of what is done with an index."""
    return st.lists(
        st.tuples(st.sampled_from(["set", "set", "set", "add", "delete", "clear", "reserve", "compact"]), keys, values),
        max_size=40,
    )


def assert_alike(table: Any, plain: dict[str, Any], asked: list[str]) -> None:
    assert len(table) == len(plain) and bool(table) == bool(plain)
    assert list(table) == list(plain) and list(table.keys()) == list(plain)
    assert list(table.items()) == list(plain.items())
    assert list(table.values()) == list(plain.values())
    assert table == plain
    plain_digests = [key for key in asked if pack_digest(key) is not None]
    assert table.rows_of(map(pack_digest, plain_digests)) == [table.row_of(key) for key in plain_digests]
    assert [table.ref_at(table.row_of(key)) for key in plain] == list(plain.values())
    for key in asked:
        assert (key in table) == (key in plain)
        assert table.get(key) == plain.get(key)
        if key not in plain:
            with pytest.raises(KeyError):
                table[key]


def apply(table: Any, steps: Any) -> None:
    plain: dict[str, Any] = {}
    for what, key, value in steps:
        if what == "set":
            table[key] = plain[key] = value
        elif what == "add":
            assert table.add(key, value) == plain.get(key)
            plain.setdefault(key, value)
        elif what == "delete":
            if key in plain:
                del table[key], plain[key]
            else:
                with pytest.raises(KeyError):
                    del table[key]
        elif what == "reserve":
            table.reserve(len(key) * 10)
        elif what == "compact":
            table.compact()
            assert not table.holes and table.row_count == len(plain)
        elif len(key) % 3 == 0:
            table.clear()
            plain.clear()
    assert_alike(table, plain, [key for _, key, _ in steps])


@given(operations(outputs))
def test_outputs_behave_like_a_dict(steps: Any) -> None:
    table = OutputTable()
    apply(table, steps)
    rows = [table.row_of(key) for key in table]
    lines = lines_of(table.fields_at(rows))
    assert [(table.files[file], *rest) for file, *rest in lines] == [ref.line for ref in table.values()]
    assert dict(table.stopped()) == {key: ref for key, ref in table.items() if ref.stopped_by is not None}


@given(operations(verdicts))
def test_verdicts_behave_like_a_dict(steps: Any) -> None:
    apply(VerdictTable(), steps)


def test_numbers_that_are_not_numbers_read_as_unknown_as_they_do_from_a_journal() -> None:
    table = VerdictTable()
    table["k"] = VerdictRef("passed", math.nan, Usage(1, 1, 1, math.nan))
    assert table["k"] == VerdictRef("passed", None, Usage(1, 1, 1, None))


@given(digests)
def test_a_digest_is_packed_and_no_other_spelling_of_it(text: str) -> None:
    assert (pack_digest(text) or b"").hex() == text[7:]
    assert pack_digest(text.upper()) is pack_digest(text[:-2] + "  ") is pack_digest(text + "00") is None


def test_an_output_takes_at_most_110_bytes_and_a_verdict_60_or_80_with_the_usage_of_a_judge() -> None:
    outputs, verdicts, judged = OutputTable(), VerdictTable(), VerdictTable()
    line, usage = LineRef(Path("outputs.jsonl"), 1 << 30, 1600), Usage(50, 60, 1, 0.001)
    for number in range(10_000):
        key = digest(number)
        outputs[key] = OutputRef(line, key, usage, 1.0, started=2.0)
        verdicts[key] = VerdictRef("passed", 1.0, None, 3.0)
        judged[key] = VerdictRef("passed", 1.0, usage, 3.0)
    for table, most in ((outputs, 110), (verdicts, 60), (judged, 80)):
        assert not table.rare
        assert (len(table.rows) + 4 * len(table.slots)) / len(table) <= most


GROW = """
import random, resource, sys
from pathlib import Path  # noqa: TC003 - msgspec reads it
from holdfast.store.index import Index
from holdfast.store.lines import LineRef
from holdfast.store.records import Usage  # noqa: TC001 - msgspec reads annotations when it runs
from holdfast.store.refs import OutputRef, VerdictRef

count, index = int(sys.argv[1]), Index()
index.reserve(count, 1)
bytes(31 << 20)  # as surveying does: the C library then keeps blocks of up to this size on its heap
path, usage = Path("outputs.jsonl"), Usage(50, 60, 1, 0.001)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for number in range(count):
    key = f"sha256:{random.getrandbits(128):032x}"
    index.outputs[key] = OutputRef(LineRef(path, number, 1600), key, usage, 1.0, started=2.0)
    index.verdicts[key] = VerdictRef("passed", 1.0, None, 3.0)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024))
"""


def test_an_index_that_grows_takes_no_more_memory_than_its_rows() -> None:
    trials = 200_000
    done = subprocess.run([sys.executable, "-c", GROW, str(trials)], capture_output=True, text=True, check=True)
    assert int(done.stdout) / trials < 130, "a trial takes 113 bytes, 80 of them for its output"


@pytest.mark.parametrize("usage", [Usage(1, None, 2, 0.5), Usage(1, 1, 1, None, reasoning_tokens=3)])
def test_verdicts_keep_what_they_hold_when_the_first_with_usage_comes(usage: Usage) -> None:
    table, verdicts = VerdictTable(), {digest(n): VerdictRef("passed", n / 2, None, float(n)) for n in range(2_000)}
    table.update(verdicts)
    before = table.fields_at(range(len(verdicts)))
    verdicts[digest("judged")] = table[digest("judged")] = VerdictRef("failed", None, usage, 1.0)
    assert dict(table) == verdicts
    assert str(table.fields_at(range(2_000))) == str(before), "as texts, NaN is equal to itself"
    assert table.fields_at([-1]) == [None]


@pytest.mark.parametrize("count", [3, 300])
def test_the_rows_that_are_left_are_found_after_others_were_removed_for_good(count: int) -> None:
    table, verdicts = VerdictTable(), {digest(n): VerdictRef("passed", n / 2, None, float(n)) for n in range(count)}
    table.update(verdicts)
    del table[digest(1)], verdicts[digest(1)]
    table.compact()
    assert table.row_count == count - 1
    assert dict(table) == verdicts and all(key in table for key in verdicts)


class FixedMemory(mmap):
    """Mapped memory of a system that cannot make it larger, such as macOS."""

    def resize(self, _: int) -> None:
        raise SystemError("mmap: resizing not available")


def test_rows_are_kept_where_the_system_cannot_make_mapped_memory_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.store.index_table.mmap", FixedMemory)
    table, verdicts = VerdictTable(), {digest(n): VerdictRef("passed", float(n), None, 1.0) for n in range(5_000)}
    table.update(verdicts)
    assert dict(table) == verdicts


def test_only_outputs_that_a_checkpoint_ended_are_unpacked_to_find_these(monkeypatch: pytest.MonkeyPatch) -> None:
    table = OutputTable()
    line, turns = LineRef(Path("outputs.jsonl"), 0, 10), (Moment(digest("turn"), 3, 1.0),) * 200
    for key, stopped_by in (("a", None), ("b", "sha256:graders"), ("c", None)):
        table[digest(key)] = OutputRef(line, digest(key), Usage(1, 2, 1, 0.0), 1.0, turns, stopped_by)
    unpacked: list[int] = []
    unpack = table._unpack
    monkeypatch.setattr(table, "_unpack", lambda row: unpacked.append(row) or unpack(row))
    assert [key for key, _ in table.stopped()] == [digest("b")]
    assert unpacked == [1]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=30), st.integers(1, 8))
def test_time_at_work_is_the_union_of_all_periods_in_any_order(periods: list[tuple[int, int]], merge_at: int) -> None:
    spent = Spent(_merge_at=merge_at)
    for start, length in periods:
        spent.add_time(float(start), float(start + length))
    busy = {second for start, length in periods for second in range(start, start + length)}
    assert spent.seconds == len(busy)
    assert spent.periods() == Spent(_starts=spent._starts, _ends=spent._ends).periods()
