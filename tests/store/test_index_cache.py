"""A cached index is the index that reading all journals gives, or it is ignored."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from holdfast.errors import Fault, UsageError
from holdfast.store import index_cache
from holdfast.store.cache_file import FRAME
from holdfast.store.index import KINDS, Entry, Index, read_output
from holdfast.store.lines import LineRef, scan
from holdfast.store.records import ErrorRecord, Grade, Mark, Step, Timing, Usage, to_line
from holdfast.store.rundir import RunDir
from tests.support.specs import output_of

FILES = ("", "workers/a", "workers/b")


@pytest.fixture(autouse=True)
def cache_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_INDEX_BYTES", "1")


def digest_of(number: int) -> str:
    return f"sha256:{number * 7919:032x}"


keys = st.sampled_from([*map(digest_of, range(6)), "k", "sha256:K"])
times = st.sampled_from([0.0, 1.0, 2.0, 3.5])
usages = st.sampled_from(
    [Usage(1, 2, 1, 0.5), Usage(), Usage(2**33, 1, 2, None), Usage(3, 4, 1, 0.25, reasoning_tokens=2)]
)
sources = st.sampled_from([msgspec.UNSET, "other/run"])
marks = st.sampled_from([msgspec.UNSET, [Mark(2, digest_of(9)), Mark(4, "odd", usage=Usage(1, 1, 1), seconds=0.5)]])
outputs = st.builds(
    lambda key, usage, time, source, marks, stop, digest: output_of(
        "x", key=key, usage=usage, timing=Timing(time, 0.75), source=source, marks=marks, stopped_by=stop, digest=digest
    ),
    keys,
    usages,
    times,
    sources,
    marks,
    st.sampled_from([msgspec.UNSET, digest_of(3)]),
    keys,
)
grades = st.builds(
    lambda key, status, usage, time, source, counts: Grade(
        key, key, "s", 1, "g", "x", None, status, 0.5, 1.0, "", None, 0.25, usage, time, source=source, counts=counts
    ),
    keys,
    st.sampled_from(["passed", "failed", "error"]),
    st.none() | usages,
    times,
    sources,
    st.sampled_from([msgspec.UNSET, (1, 2)]),
)
errors = st.builds(
    lambda key, where, kind, usage, time: ErrorRecord(
        key, "s", 1, 1, where, kind, "", 500, time, 0.5, False, **({} if usage is None else {"usage": usage})
    ),
    keys,
    st.sampled_from(["target", "g"]),
    st.sampled_from(["server", "uncertain"]),
    st.none() | usages,
    times,
)
steps = st.builds(
    lambda key, usage, time, source: Step(key, "s", 1, 1, "model", "r", 1, "", usage, time, 0.5, source=source),
    keys,
    usages,
    times,
    sources,
)
entries = st.one_of(
    *[
        st.tuples(st.just(name), st.sampled_from(FILES), records)
        for name, records in {"outputs": outputs, "grades": grades, "errors": errors, "steps": steps}.items()
    ]
)
sessions = st.lists(
    st.tuples(st.lists(entries, max_size=8), st.none() | st.tuples(st.sampled_from(["outputs", "steps"]), st.just(30))),
    min_size=1,
    max_size=4,
)
"""what processes append one after the other, each perhaps killed within a line"""


def append(folder: Path, name: str, place: str, data: bytes) -> None:
    (folder / place).mkdir(parents=True, exist_ok=True)
    with (folder / place / f"{name}.jsonl").open("ab") as file:
        file.write(data)


def content(index: Index) -> dict[str, Any]:
    """Everything in an index; calls by file, as readers take them, and sums without the last bits."""
    spent = index.spent
    return {
        "outputs": dict(index.outputs),
        "verdicts": dict(index.verdicts),
        "attempts": index.attempts,
        "failures": (index.failed_at, index.uncertain),
        "grader attempts": index.grader_attempts,
        "steps": {key: sorted(lines) for key, lines in index.steps.items()},
        "damage": index.damage,
        "spent": (spent.tokens, spent.requests, round(spent.cost, 9), spent.unpriced, spent.unmetered),
        "periods": spent.periods(),
    }


def assert_as_fresh(folder: Path) -> Index:
    """Open a run as a reader does, with the cache; return the index."""
    index = RunDir(folder).load(repair=False)
    assert content(index) == content(RunDir(folder).load(repair=False, verify=True))
    return index


@settings(max_examples=60, deadline=None)
@given(sessions)
def test_any_history_of_a_run_gives_the_index_of_a_fresh_scan(history: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for records, torn in history:
            for journal, place, record in records:
                append(folder, journal, place, to_line(record))
            if torn is not None:
                append(folder, torn[0], "", to_line(output_of("torn"))[: torn[1]])
            assert_as_fresh(folder)
            RunDir(folder).load(repair=True)
            assert_as_fresh(folder)


@settings(deadline=None)
@given(st.lists(entries, max_size=20))
def test_reading_a_journal_gives_the_index_of_taking_one_line_after_the_other(records: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        rundir, expected = RunDir(Path(name)), Index()
        for journal, place, record in records:
            append(rundir.path, journal, place, to_line(record))
        for kind in KINDS:
            for path in rundir.journals(kind.name):
                for line in scan(path):
                    place = LineRef(path, line.offset, len(line.data))
                    kind.take(expected, Entry(place, msgspec.json.decode(line.data, type=kind.head)))
        assert content(rundir.load(repair=False)) == content(expected)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with every kind of record, whose index is cached."""
    folder = tmp_path / "run"
    for number in range(4):
        append(folder, "outputs", "", to_line(output_of(str(number), key=digest_of(number))))
        grade = Grade("k", digest_of(number), "s", 1, "g", "x", None, "passed", 1.0, 1.0, "", None, 0.0, None, 1.0)
        append(folder, "grades", "", to_line(grade))
    append(folder, "errors", "", to_line(ErrorRecord("k", "s", 1, 1, "g", "server", "", 500, 4.0, 0.5, False)))
    append(folder, "steps", "", to_line(Step("k", "s", 1, 1, "turn", "r", 1, "", Usage(1, 1), 1.0, 0.5)))
    append(folder, "outputs", "workers/a", to_line(output_of("5", key="odd")))
    RunDir(folder).load(repair=True)
    assert assert_as_fresh(folder).origin
    return folder


def cache_file(run: Path) -> Path:
    return run / ".index" / "journals"


def test_lines_that_were_appended_are_added_to_the_cached_index(run: Path) -> None:
    append(run, "outputs", "", to_line(output_of("new", key="new")))
    append(run, "outputs", "workers/c", to_line(output_of("newer", key="newer")))
    index = assert_as_fresh(run)
    assert index.origin and {"new", "newer"} <= index.outputs.keys()


def test_a_cache_with_any_byte_changed_is_ignored(run: Path) -> None:
    whole = cache_file(run).read_bytes()
    expected = content(RunDir(run).load(repair=False))
    for place in range(0, len(whole), 3):
        cache_file(run).write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        index = RunDir(run).load(repair=False)
        assert not index.origin and content(index) == expected


def test_a_cache_that_was_torn_anywhere_is_ignored(run: Path) -> None:
    whole = cache_file(run).read_bytes()
    for length in range(0, len(whole), 17):
        cache_file(run).write_bytes(whole[:length])
        assert not assert_as_fresh(run).origin
    cache_file(run).write_bytes(whole + b"\0")
    assert not assert_as_fresh(run).origin


def rewrite(run: Path, change: Any) -> None:
    """Change the header of a cache, with the right digest."""
    magic, frame = index_cache._MAGIC, FRAME
    data = cache_file(run).read_bytes()
    size, rest, _ = frame.unpack_from(data, len(magic))
    start = len(magic) + frame.size
    header = msgspec.msgpack.decode(data[start : start + size])
    body = data[start + size :]
    change(header)
    packed = msgspec.msgpack.encode(header)
    digest = xxh3_128_digest(packed + body)
    cache_file(run).write_bytes(magic + frame.pack(len(packed), rest, digest) + packed + body)


def test_a_cache_of_another_version_or_machine_or_of_other_content_is_ignored(run: Path) -> None:
    whole = cache_file(run).read_bytes()
    rewrite(run, len)
    assert assert_as_fresh(run).origin, "the control: unchanged, it is used"
    for change in (
        lambda header: header.__setitem__(0, "middle"),
        lambda header: header.__setitem__(1, "no marks"),
        lambda header: header.pop(),
        lambda header: header[3].__setitem__(0, 10**6),
        lambda header: header[3].__setitem__(1, 10**6),
        lambda header: header[3].__setitem__(2, 10**6),
    ):
        cache_file(run).write_bytes(whole)
        rewrite(run, change)
        assert not assert_as_fresh(run).origin
    cache_file(run).write_bytes(whole.replace(b"holdfast index 6", b"holdfast index 5", 1))
    assert not assert_as_fresh(run).origin


def flip(path: Path, place: int) -> None:
    """Change a byte in place."""
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))


class TestJournalsThatChanged:
    def test_truncated(self, run: Path) -> None:
        path = run / "outputs.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        with path.open("r+b") as file:
            file.truncate(len(b"".join(lines[:-1])))
        assert not assert_as_fresh(run).origin

    def test_truncated_and_written_again(self, run: Path) -> None:
        path = run / "grades.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        with path.open("r+b") as file:
            file.truncate(len(b"".join(lines[:-1])))
        grade = Grade("k", digest_of(50), "s", 1, "g", "x", None, "failed", 0.0, 1.0, "", None, 0.0, None, 2.0)
        for _ in range(2):
            append(run, "grades", "", to_line(grade))
        assert not assert_as_fresh(run).origin

    def test_replaced(self, run: Path) -> None:
        path = run / "outputs.jsonl"
        copy = path.with_suffix(".new")
        copy.write_bytes(path.read_bytes())
        copy.replace(path)
        assert not assert_as_fresh(run).origin

    def test_repaired(self, run: Path) -> None:
        lines = (run / "outputs.jsonl").read_bytes().splitlines(keepends=True)
        flip(run / "outputs.jsonl", len(lines[0]) + 20)
        RunDir(run).load(repair=True, verify=True)
        assert len((run / "outputs.jsonl").read_bytes().splitlines()) == len(lines) - 1
        assert not assert_as_fresh(run).origin

    @pytest.mark.parametrize("place", ["first", "last"])
    def test_changed_in_place_at_an_end(self, run: Path, place: str) -> None:
        path = run / "outputs.jsonl"
        flip(path, 20 if place == "first" else path.stat().st_size - 20)
        assert not assert_as_fresh(run).origin

    def test_gone(self, run: Path) -> None:
        shutil.rmtree(run / "workers" / "a")
        assert not assert_as_fresh(run).origin

    def test_of_another_run(self, run: Path, tmp_path: Path) -> None:
        other = tmp_path / "other"
        append(other, "outputs", "", to_line(output_of("of the other", key=digest_of(1))))
        RunDir(other).load(repair=True)
        shutil.copy(cache_file(run), cache_file(other))
        assert not assert_as_fresh(other).origin

    def test_copied_with_its_cache(self, run: Path, tmp_path: Path) -> None:
        shutil.copytree(run, tmp_path / "copy")
        index = assert_as_fresh(tmp_path / "copy")
        assert not index.origin and all(
            ref.line.path.is_relative_to(tmp_path / "copy") for ref in index.outputs.values()
        )

    def test_moved_with_its_cache(self, run: Path, tmp_path: Path) -> None:
        run.rename(tmp_path / "moved")
        index = assert_as_fresh(tmp_path / "moved")
        assert index.origin and all(ref.line.path.is_relative_to(tmp_path / "moved") for ref in index.outputs.values())


def test_damage_that_the_cache_hides_is_noticed_where_the_line_is_used_and_by_a_repair(tmp_path: Path) -> None:
    data = b"".join(to_line(output_of("x" * 5000, key=f"key {number}")) for number in range(3))
    append(tmp_path, "outputs", "", data)
    RunDir(tmp_path).load(repair=True)
    flip(tmp_path / "outputs.jsonl", len(data) // 2)
    index = RunDir(tmp_path).load(repair=False)
    assert index.origin and not index.damage, "the ends of the file are as they were"
    with pytest.raises(Fault, match=r"outputs.jsonl: a damaged line at byte \d+") as raised:
        read_output(index.outputs["key 1"])
    assert f"holdfast repair {tmp_path}" in (raised.value.remedy or "")
    assert read_output(index.outputs["key 2"]).key == "key 2"
    assert len(RunDir(tmp_path).load(repair=True, verify=True).damage) == 1
    assert assert_as_fresh(tmp_path).outputs.keys() == {"key 0", "key 2"}


def test_small_runs_have_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_INDEX_BYTES")
    append(tmp_path, "outputs", "", to_line(output_of("x", key="k")))
    RunDir(tmp_path).load(repair=True)
    assert not (tmp_path / ".index").exists()


def test_readers_write_no_cache(tmp_path: Path) -> None:
    append(tmp_path, "outputs", "", to_line(output_of("x", key="k")))
    RunDir(tmp_path).load(repair=False)
    assert not (tmp_path / ".index").exists()


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    append(tmp_path, "outputs", "", to_line(output_of("x", key="k")))
    (tmp_path / ".index").write_text("a file in the way")
    index = RunDir(tmp_path).load(repair=True)
    assert not index.origin and index.outputs.keys() == {"k"}


def test_leftovers_of_a_process_that_was_killed_are_removed(run: Path) -> None:
    leftover = run / ".index" / ".journals.0123.tmp"
    leftover.write_bytes(b"half")
    append(run, "outputs", "", to_line(output_of("new", key="new")))
    RunDir(run).load(repair=True)
    assert [path.name for path in (run / ".index").iterdir()] == ["journals"]


def test_a_setting_that_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_INDEX_BYTES", "many")
    with pytest.raises(UsageError, match="HOLDFAST_INDEX_BYTES is 'many'"):
        RunDir(tmp_path).load(repair=False)
