"""Lines, journal and index: lines come back in order; damage is noticed, and only damaged lines are lost."""

from __future__ import annotations

import asyncio
import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import Fault
from holdfast.report.trials import TextReader
from holdfast.store.heads import read_output
from holdfast.store.journal import JOURNALS, Journal
from holdfast.store.lease import RunLease
from holdfast.store.lines import is_sound, scan, seal
from holdfast.store.records import ErrorRecord, Grade, Output, Timing, Usage, to_line
from holdfast.store.rundir import RunDir
from tests.support.running import outputs_in, verdicts_in
from tests.support.specs import output_of

objects = st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=20), min_size=1, max_size=4)
bodies = objects.map(lambda value: json.dumps(value, ensure_ascii=False).encode("utf-8"))
tokens = st.none() | st.integers(0, 10**6)
usages = st.builds(Usage, tokens, tokens, st.integers(0, 5), st.none() | st.floats(0, 10))
texts = st.text(max_size=40)

outputs = st.builds(
    Output,
    key=texts,
    sample=texts,
    trial=st.integers(1, 9),
    attempt=st.integers(1, 9),
    messages=st.lists(objects, max_size=3),
    output=texts,
    turns=st.integers(1, 3),
    stop=texts,
    usage=usages,
    timing=st.builds(Timing, st.floats(0, 2e9), st.floats(0, 1e4), st.none() | st.floats(0, 10)),
    digest=texts,
    state=st.none() | objects,
)
grades = st.builds(
    Grade,
    key=texts,
    sample=texts,
    trial=st.integers(1, 9),
    grader=texts,
    type=texts,
    by=texts,
    turn=st.none(),
    judged=texts,
    status=st.sampled_from(["passed", "failed", "error", "skipped"]),
    score=st.none() | st.floats(0, 1),
    weight=st.floats(0, 9),
    feedback=texts,
    details=st.none() | objects,
    seconds=st.floats(0, 9),
    usage=st.none() | usages,
)
errors = st.builds(
    ErrorRecord,
    key=texts,
    sample=texts,
    trial=st.integers(1, 9),
    attempt=st.integers(1, 9),
    where=st.sampled_from(["target", "judge"]),
    kind=texts,
    message=texts,
    status=st.none() | st.integers(400, 599),
    time=st.floats(0, 2e9),
    seconds=st.floats(0, 9),
    final=st.booleans(),
)
entries = st.one_of(
    *(st.tuples(st.just(n), r) for n, r in (("outputs", outputs), ("grades", grades), ("errors", errors)))
)


def numbered(count: Any) -> Any:
    """Outputs that differ in their keys."""
    return [output_of(f"answer {number}", key=f"key {number}") for number in range(count)]


def append(folder: Path, written: Any) -> Any:
    """Hand (name, record) pairs to a journal, some awaited and some posted; returns the size and what was said."""
    notices = []

    async def main() -> Any:
        journal = Journal(folder, notice=notices.append)
        for number, (name, record) in enumerate(written):
            if number % 3:
                await journal.write(name, to_line(record))
            else:
                journal.post(name, to_line(record))
        await journal.close()
        return journal.bytes_written

    return asyncio.run(main()), notices


class TestLines:
    @given(bodies)
    def test_a_sealed_line_is_sound_and_is_the_object_with_its_sum_last(self, body: Any) -> None:
        line = seal(body)
        assert line.endswith(b'"}\n') and is_sound(line[:-1])
        decoded = json.loads(line)
        assert list(decoded)[-1] == "sum"
        del decoded["sum"]
        assert decoded == {key: value for key, value in json.loads(body).items() if key != "sum"}

    @given(bodies, st.data())
    def test_any_changed_byte_is_noticed(self, body: Any, data: Any) -> None:
        line = bytearray(seal(body)[:-1])
        line[data.draw(st.integers(0, len(line) - 1))] ^= data.draw(st.integers(1, 255))
        assert not is_sound(bytes(line))

    @given(bodies, st.data())
    def test_any_truncation_or_addition_is_noticed(self, body: Any, data: Any) -> None:
        line = seal(body)[:-1]
        assert not is_sound(line[: data.draw(st.integers(0, len(line) - 1))])
        assert not is_sound(line[data.draw(st.integers(1, len(line))) :])
        assert not is_sound(line + data.draw(st.binary(min_size=1, max_size=5)))

    def test_the_documented_sum_is_xxh3_of_the_bytes_before_it(self) -> None:
        from xxhash import xxh3_64_hexdigest

        assert seal(b'{"a":1}') == b'{"a":1,"sum":"%b"}\n' % xxh3_64_hexdigest(b'{"a":1').encode()

    def test_a_missing_file_has_no_lines(self, tmp_path: Path) -> None:
        assert list(scan(tmp_path / "none.jsonl")) == []

    def test_a_last_line_without_a_newline_is_neither_whole_nor_sound(self, tmp_path: Path) -> None:
        path = tmp_path / "x.jsonl"
        path.write_bytes(seal(b'{"a":1}') + seal(b'{"b":2}')[:-1])
        first, last = scan(path)
        assert (first.sound, first.whole, first.offset) == (True, True, 0)
        assert (last.sound, last.whole, last.offset) == (False, False, len(first.data) + 1)


class TestJournal:
    @settings(max_examples=40)
    @given(st.lists(entries, max_size=12))
    def test_any_sequence_of_records_is_read_in_order(self, written: Any) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            size, notices = append(folder, written)
            for kind in JOURNALS:
                lines = [line.data + b"\n" for line in scan(folder / f"{kind}.jsonl") if line.sound]
                assert lines == [to_line(record) for journal, record in written if journal == kind]
            assert size == sum(path.stat().st_size for path in folder.glob("*.jsonl"))
            assert notices == []

    async def test_lines_in_no_hurry_share_a_batch_of_their_own_and_are_written_at_the_end(
        self, tmp_path: Path
    ) -> None:
        outputs, settled = numbered(6), []
        journal = Journal(tmp_path, notice=settled.append)
        for number, record in enumerate(outputs[:3]):
            journal.post("outputs", to_line(record), lambda number=number: settled.append(number), hurry=False)
        while not settled:
            await journal.write("outputs", to_line(outputs[3]))
        assert len(settled) == 3
        for number, record in enumerate(outputs[4:], 4):
            journal.post("outputs", to_line(record), lambda number=number: settled.append(number), hurry=False)
        await journal.close()
        assert settled == [0, 1, 2, 4, 5]
        keys = [json.loads(line.data)["key"] for line in scan(tmp_path / "outputs.jsonl") if line.sound]
        assert [key for key in keys if key != outputs[3].key] == [outputs[number].key for number in settled]

    @settings(max_examples=40)
    @given(st.lists(entries, max_size=12))
    def test_the_index_holds_the_last_record_of_every_key(self, written: Any) -> None:
        with tempfile.TemporaryDirectory() as name:
            append(Path(name), written)
            index = RunDir(Path(name)).load(repair=False)
            assert index.damage == []
            last = {record.key: record for kind, record in written if kind == "outputs"}
            assert {key: read_output(ref) for key, ref in index.all_outputs()} == last
            grades = {(r.key, r.by, r.turn, r.judged): r for kind, r in written if kind == "grades"}
            assert {name: (ref.status, ref.score, ref.usage) for name, ref in verdicts_in(index).items()} == {
                name: (record.status, record.score, record.usage) for name, record in grades.items()
            }
            failed = [record for kind, record in written if kind == "errors" and record.where == "target"]
            assert sum(index.attempts.values()) == len(failed)
            used = [record.usage for kind, record in written if kind != "errors" and record.usage is not None]
            assert index.spent().tokens == sum((u.input_tokens or 0) + (u.output_tokens or 0) for u in used)
            assert index.spent().requests == sum(u.requests for u in used)
            assert index.spent().cost == pytest.approx(sum(u.cost or 0 for u in used))

    def test_texts_are_read_by_their_place_in_the_file(self, tmp_path: Path) -> None:
        append(tmp_path, [("outputs", record) for record in numbered(3)])
        outputs, reader = outputs_in(RunDir(tmp_path).load(repair=False)), TextReader()
        lines = [outputs[f"key {number}"].line for number in (2, 0, 1)]
        assert reader.read(lines) == ["answer 2", "answer 0", "answer 1"]
        reader.close()

    def test_outputs_in_a_shared_file_name_the_run_that_made_them(self, tmp_path: Path) -> None:
        append(tmp_path, [("outputs", record) for record in numbered(2)])
        journal = tmp_path / "outputs.jsonl"
        shared = tmp_path / "shared" / "lender" / f"outputs.0.{journal.stat().st_size}.jsonl"
        shared.parent.mkdir(parents=True)
        journal.rename(shared)
        outputs = outputs_in(RunDir(tmp_path).load(repair=False)).values()
        assert [ref.source for ref in outputs] == [read_output(ref).source for ref in outputs] == ["lender", "lender"]


class TestDamage:
    def lost(self, content: Any, lines: Any, change: Any) -> Any:
        """The numbers of the lines that a change of one byte, or of the length, touches."""
        at, new = change
        if new is None:
            return {number for number, (_, end) in enumerate(lines) if end > at}
        touched = {number for number, (start, end) in enumerate(lines) if start <= at < end}
        if content[at : at + 1] == b"\n":  # two lines become one
            touched |= {number + 1 for number in touched if number + 1 < len(lines)}
        return touched

    @given(st.data())
    def test_damage_anywhere_loses_the_lines_it_touches_and_no_other(self, data: Any) -> None:
        records = numbered(data.draw(st.integers(1, 6)))
        content = b"".join(map(to_line, records))
        starts = [0]
        for record in records:
            starts.append(starts[-1] + len(to_line(record)))
        places = list(pairwise(starts))
        at = data.draw(st.integers(0, len(content) - 1))
        new = data.draw(st.none() | st.integers(0, 255).filter(lambda byte: byte != content[at]))
        broken = content[:at] if new is None else content[:at] + bytes([new]) + content[at + 1 :]
        kept = {f"key {number}" for number in range(len(records))} - {
            f"key {number}" for number in self.lost(content, places, (at, new))
        }
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "outputs.jsonl"
            path.write_bytes(broken)
            rundir = RunDir(Path(name))
            looked = rundir.load(repair=False)
            assert outputs_in(looked).keys() == kept
            assert path.read_bytes() == broken, "a reader changes nothing"
            repaired = rundir.load(repair=True)
            assert {key: read_output(ref).key for key, ref in outputs_in(repaired).items()} == {
                key: key for key in kept
            }
            assert all(line.sound for line in scan(path))
            assert [(d.offset, d.length, d.torn) for d in repaired.damage] == [
                (d.offset, d.length, d.torn) for d in looked.damage
            ]
            assert bool(repaired.damage) == (new is not None or at not in starts)
            if repaired.damage:
                aside = (rundir.aside / "outputs.jsonl").read_bytes()
                for spot in looked.damage:
                    assert broken[spot.offset : spot.offset + spot.length].rstrip(b"\n") in aside
            assert rundir.load(repair=True).damage == []

    @given(st.binary(max_size=300))
    def test_a_file_of_anything_at_all_is_no_crash(self, noise: Any) -> None:
        with tempfile.TemporaryDirectory() as name:
            for kind in JOURNALS:
                (Path(name) / f"{kind}.jsonl").write_bytes(noise)
            index = RunDir(Path(name)).load(repair=True)
            assert not outputs_in(index) and not verdicts_in(index) and not index.attempts
            assert RunDir(Path(name)).load(repair=True).damage == []

    def test_a_torn_tail_is_set_aside_and_writing_continues_in_its_place(self, tmp_path: Path) -> None:
        first, second, third = numbered(3)
        torn = to_line(second)[:40]
        (tmp_path / "outputs.jsonl").write_bytes(to_line(first) + torn)
        index = RunDir(tmp_path).load(repair=True)
        (damage,) = index.damage
        assert damage.torn and "unfinished last line" in str(damage) and "outputs.jsonl" in str(damage)
        assert (tmp_path / "set-aside" / "outputs.jsonl").read_bytes() == torn + b"\n"
        append(tmp_path, [("outputs", third)])
        assert (tmp_path / "outputs.jsonl").read_bytes() == to_line(first) + to_line(third)

    def test_later_damage_is_appended_to_what_was_set_aside(self, tmp_path: Path) -> None:
        for noise in (b"one\n", b"two\n"):
            with (tmp_path / "grades.jsonl").open("ab") as file:
                file.write(noise)
            RunDir(tmp_path).load(repair=True)
        assert (tmp_path / "set-aside" / "grades.jsonl").read_bytes() == b"one\ntwo\n"


class TestSeveralWriters:
    def test_the_files_of_all_writers_are_read_as_one(self, tmp_path: Path) -> None:
        records = numbered(6)
        for number, folder in enumerate((tmp_path, tmp_path / "workers" / "a", tmp_path / "workers" / "b")):
            folder.mkdir(parents=True, exist_ok=True)
            append(folder, [("outputs", record) for record in records[2 * number : 2 * number + 2]])
        index = RunDir(tmp_path).load(repair=False)
        assert {key: read_output(ref).output for key, ref in outputs_in(index).items()} == {
            record.key: record.output for record in records
        }

    def test_a_key_written_by_two_counts_once(self, tmp_path: Path) -> None:
        (tmp_path / "workers" / "a").mkdir(parents=True)
        for folder in (tmp_path, tmp_path / "workers" / "a"):
            append(folder, [("outputs", numbered(1)[0])])
        assert RunDir(tmp_path).load(repair=False).count_outputs() == 1

    def test_damage_in_one_writers_file_leaves_the_others_alone(self, tmp_path: Path) -> None:
        (tmp_path / "workers" / "a").mkdir(parents=True)
        append(tmp_path, [("outputs", numbered(2)[0])])
        (tmp_path / "workers" / "a" / "outputs.jsonl").write_bytes(b"rot\n" + to_line(numbered(2)[1]))
        index = RunDir(tmp_path).load(repair=True)
        outputs = outputs_in(index)
        assert outputs.keys() == {"key 0", "key 1"}
        assert [damage.path.parent.name for damage in index.damage] == ["a"]
        assert read_output(outputs["key 1"]).key == "key 1"


class TestASecondWriter:
    """A process that was frozen for longer than its lease wakes up in a run that is another's by now."""

    def meets(self, folder: Path, held: Any = lambda: True) -> Any:
        """Write, let somebody else write, and write again; returns what was raised and what is in the file."""
        path = folder / "outputs.jsonl"
        first, others, late = map(to_line, numbered(3))

        async def main() -> Any:
            journal = Journal(folder, notice=lambda _: None, held=held)
            await journal.write("outputs", first)
            with path.open("ab") as theirs:
                theirs.write(others)
            try:
                with pytest.raises(Fault) as raised:
                    await journal.write("outputs", late)
            finally:
                await journal.close()
            return raised.value

        return asyncio.run(main()), path.read_bytes(), (first, others, late)

    def test_lines_of_another_writer_are_never_cut_off(self, tmp_path: Path) -> None:
        fault, content, (first, others, _) = self.meets(tmp_path)
        assert fault.kind == "lease_lost" and "None of its work was touched" in str(fault)
        assert content.startswith(first + others)

    def test_nothing_is_written_once_the_lease_is_known_to_be_lost(self, tmp_path: Path) -> None:
        answers = iter([True, False])
        fault, content, (first, others, _) = self.meets(tmp_path, held=lambda: next(answers))
        assert fault.kind == "lease_lost" and content == first + others

    async def test_a_failed_background_write_stops_the_run_too(self, tmp_path: Path) -> None:
        faults = []
        journal = Journal(tmp_path, notice=lambda _: None, failed=faults.append, held=lambda: False)
        journal.post("steps", to_line(numbered(1)[0]))
        await journal.close()
        assert [fault.kind for fault in faults] == ["lease_lost"] and not list(tmp_path.iterdir())

    def test_a_failed_sync_cuts_off_no_lines_of_others(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The last lines are our own only while nobody else has appended any."""
        path = tmp_path / "outputs.jsonl"
        ours, others = map(to_line, numbered(2))

        def fail(fd: Any) -> None:
            with path.open("ab") as theirs:
                theirs.write(others)
            monkeypatch.undo()
            raise OSError(5, "Input/output error")

        monkeypatch.setattr("holdfast.store.journal.sync", fail)
        append(tmp_path, [("outputs", numbered(1)[0])])
        assert path.read_bytes() == ours + others

    def test_a_lease_is_held_until_its_file_is_another(self, tmp_path: Path) -> None:
        path = tmp_path / "run.lock"
        lease = RunLease(path, lost=lambda: None)
        lease.acquire(0)
        try:
            assert lease.still_held()
            aside = path.rename(tmp_path / "aside")
            assert not lease.still_held()
            aside.rename(path)
            assert lease.still_held(), "a contender may move it aside to look at it, and back"
            path.rename(aside)
            path.write_bytes(aside.read_bytes())
            assert lease.still_held(), "a contender without links puts it back as another file"
            path.write_bytes(aside.read_bytes().replace(lease.holder.token.encode(), b"another's"))
            assert not lease.still_held()
            aside.replace(path)
        finally:
            lease.release()


def test_a_later_verdict_takes_the_place_of_an_error(tmp_path: Path) -> None:
    def verdict(status: Any, score: Any) -> Any:
        return Grade("k", "s", 1, "exact", "exact", "g", None, "d", status, score, 1.0, "", None, 0.0)

    append(tmp_path, [("grades", verdict("error", None)), ("grades", verdict("passed", 1.0))])
    assert RunDir(tmp_path).load(repair=False).verdicts("k")["g", None, "d"][:2] == ("passed", 1.0)


def test_time_spent_counts_stretches_once_and_leaves_pauses_out(tmp_path: Path) -> None:
    stretches = [(100.0, 10.0), (105.0, 10.0), (198.0, 3.0), (200.0, 5.0)]
    append(
        tmp_path,
        [
            ("outputs", output_of("x", key=str(number), timing=Timing(start, seconds)))
            for number, (start, seconds) in enumerate(stretches)
        ],
    )
    assert RunDir(tmp_path).load(repair=False).spent().seconds == pytest.approx(22.0)
