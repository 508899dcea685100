"""An index says what reading all journals says, whatever was written, published, damaged or left by a kill."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.store.heads import ErrorHead, GradeHead, OutputHead, decode_head
from holdfast.store.index import StaleIndexError
from holdfast.store.index_files import journals_size
from holdfast.store.lines import scan
from holdfast.store.records import Step, to_line
from tests.apps.view import journals
from tests.apps.view.journals import ROWS, JournaledRun, WriteOutput, whole_trial
from tests.support.running import outputs_in, verdicts_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.store.index import RunIndex
    from holdfast.store.rundir import RunDir

EXAMPLES = 40


def contents(index: RunIndex) -> Any:
    """Return an index's content: the places of outputs and verdicts, the failures of trials, and the usage."""
    outputs = {key: (str(ref.line.path), ref.line.offset) for key, ref in outputs_in(index).items()}
    verdicts = {name: (ref.status, ref.score, ref.time) for name, ref in verdicts_in(index).items()}
    spent = index.spent()
    counts = spent.tokens, spent.requests, round(spent.cost, 9), spent.unpriced, spent.unmetered, spent.periods()
    return outputs, verdicts, index.attempts, index.grader_attempts, counts


def plain_reading(rundir: RunDir) -> Any:
    """Return outputs, verdicts and failed attempts as a plain loop over all lines finds them."""
    outputs: dict[str, dict[str, tuple[Any, ...]]] = {}
    for path in rundir.journals("outputs"):
        for line in scan(path):
            if line.sound and (output := decode_head(OutputHead, line.data)) is not None:
                place = str(path), line.offset
                outputs.setdefault(output.key, {})[str(path)] = output.timing.started, str(path), place
    verdicts: dict[Any, tuple[Any, ...]] = {}
    for path in rundir.journals("grades"):
        for line in scan(path):
            if line.sound and (grade := decode_head(GradeHead, line.data)) is not None:
                name = grade.key, *grade.verdict_key
                found = (grade.time, str(path), line.offset), (grade.status, grade.score, grade.time)
                verdicts[name] = max(verdicts.get(name, found), found, key=lambda each: each[0])
    attempts: dict[str, int] = {}
    for path in rundir.journals("errors"):
        for line in scan(path):
            if line.sound and (error := decode_head(ErrorHead, line.data)) is not None and error.where == "target":
                attempts[error.key] = attempts.get(error.key, 0) + 1
    return (
        {key: max(of_files.values())[2] for key, of_files in outputs.items()},
        {name: value for name, (_, value) in verdicts.items()},
        attempts,
    )


@pytest.mark.parametrize("published", ["", "1"], ids=["read", "published"])
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=journals.events, cuts=st.lists(st.integers(0, 25), max_size=3), reopen=st.booleans())
def test_an_index_equals_a_plain_reading_at_every_moment(
    events: list[journals.Event], cuts: list[int], reopen: bool, published: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_INDEX_BYTES", published)
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("HOLDFAST_HOME", f"{folder}/home")
        run = JournaledRun(Path(folder))
        index = run.rundir.load(repair=False)
        for start, end in pairwise([0, *sorted(cuts), len(events)]):
            for event in events[start:end]:
                run.append(event)
            if reopen:
                index = run.rundir.load(repair=False)
            else:
                index.read()
            assert contents(index)[:3] == plain_reading(run.rundir)
        assert contents(run.rundir.load(repair=False)) == contents(run.rundir.load(repair=False, verify=True))
        repaired = contents(run.rundir.load(repair=True))
        assert contents(run.rundir.load(repair=True)) == repaired
        assert repaired[:3] == plain_reading(run.rundir)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JournaledRun:
    """A run with a published index."""
    monkeypatch.setenv("HOLDFAST_INDEX_BYTES", "1")
    run = JournaledRun(tmp_path)
    for sample in range(len(ROWS)):
        for event in whole_trial(sample, 1):
            run.append(event)
    assert run.rundir.load(repair=True).published is not None
    return run


def head_of(run: JournaledRun) -> Path:
    return run.rundir.path / ".index" / "journals.head"


def file_of(run: JournaledRun) -> Path:
    return head_of(run).with_name(msgspec.json.decode(head_of(run).read_bytes())["file"])


@pytest.mark.parametrize("part", ["head", "file"])
def test_a_flipped_bit_costs_only_time(run: JournaledRun, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_INDEX_BYTES")  # so that nothing is published in its place
    expected, path = contents(run.rundir.load(repair=False)), head_of(run) if part == "head" else file_of(run)
    data = path.read_bytes()
    used = 0
    for place in range(0, len(data), 1 if part == "head" else 401):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        index = run.rundir.load(repair=False)
        used += index.published is not None
        assert contents(index) == expected
    assert used <= (part == "head"), "only the newline after the head says nothing"


@pytest.mark.parametrize("other", ["torn", "empty", "text", "folder", "database", "newer version", "another run's"])
def test_another_file_in_the_place_of_an_index_is_not_used(run: JournaledRun, other: str, tmp_path: Path) -> None:
    expected, path = contents(run.rundir.load(repair=False)), file_of(run)
    data = path.read_bytes()
    if other == "folder":
        path.unlink()
        path.mkdir()
    elif other == "newer version":
        head_of(run).write_bytes(head_of(run).read_bytes().replace(b'"version":', b'"version":9'))
    elif other == "another run's":
        (tmp_path / "other").mkdir()
        another = JournaledRun(tmp_path / "other")
        another.append(whole_trial(0, 1)[0])
        another.rundir.load(repair=True)
        shutil.rmtree(head_of(run).parent)
        shutil.copytree(head_of(another).parent, head_of(run).parent)
    else:
        small = {"torn": data[:-4096], "empty": b"", "text": b"not a database", "database": data[:4096]}
        path.write_bytes(small[other])
    assert contents(run.rundir.load(repair=False)) == expected
    assert contents(run.rundir.load(repair=True)) == expected


def test_a_copied_run_keeps_its_index(run: JournaledRun, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(run.rundir.path, moved)
    index = type(run.rundir)(moved).load(repair=False)
    assert index.published == moved / ".index" / file_of(run).name
    assert len(outputs_in(index)) == len(ROWS)


def test_a_published_file_never_changes(run: JournaledRun, tmp_path: Path) -> None:
    first, linked = file_of(run), tmp_path / "linked"
    os.link(first, linked)
    data = first.read_bytes()
    for event in whole_trial(0, 2):
        run.append(event)
    assert run.rundir.load(repair=True).published != first
    assert linked.read_bytes() == data
    assert journals_size(run.rundir) == run.rundir.load(repair=False).published_bytes


def test_readers_write_nothing_into_a_run(run: JournaledRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    for event in whole_trial(1, 2):
        run.append(event)
    before = {path: path.stat().st_mtime_ns for path in run.rundir.path.rglob("*")}
    index = run.rundir.load(repair=False)
    assert index.published is not None and index.published.is_relative_to(tmp_path / "home" / "index")
    assert {path: path.stat().st_mtime_ns for path in run.rundir.path.rglob("*")} == before
    assert contents(index) == contents(run.rundir.load(repair=False, verify=True))


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Let this process write so many bytes to each file, and fail to write more."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("size", [0, 256, 5000, 20_000, 40_000])
def test_a_full_disk_costs_only_the_index(run: JournaledRun, size: int) -> None:
    expected = contents(run.rundir.load(repair=False))
    shutil.rmtree(head_of(run).parent)
    with full_disk(size):
        index = run.rundir.load(repair=True)
        assert contents(index) == expected
    assert contents(run.rundir.load(repair=True)) == expected


def test_a_journal_that_was_replaced_is_noticed(run: JournaledRun) -> None:
    index = run.rundir.load(repair=False)
    journal = run.rundir.path / "outputs.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*reversed(lines), lines[0]]))
    with pytest.raises(StaleIndexError):
        index.read()
    assert contents(run.rundir.load(repair=False))[:3] == plain_reading(run.rundir)


def test_a_follower_of_a_journal_that_was_cut_reads_it_again(run: JournaledRun) -> None:
    index = run.rundir.load(repair=False)
    journal = run.rundir.path / "outputs.jsonl"
    os.truncate(journal, journal.read_bytes().index(b"\n") + 1)
    index = run.rundir.follow(index)
    assert contents(index)[:3] == plain_reading(run.rundir)
    assert len(outputs_in(index)) == 1


def test_an_output_that_no_longer_counts_was_paid_for_once(run: JournaledRun) -> None:
    event = WriteOutput("", 0, 2, 0, True, False, 0, 1, True)  # a checkpoint that has changed since ended it
    run.append(event)
    output = run._output(event)
    call = Step(output.key, output.sample, 2, 1, "model", "r", 1, {}, output.usage, 101.0, 1.0)
    run._append("", "steps", to_line(call))
    index = run.rundir.load(repair=False)
    before = index.spent()
    run.identity.work.drop_unfit(index)
    assert index.output(output.key) is None and output.key in index.begun()
    assert (index.spent().tokens, index.spent().cost) == (before.tokens, before.cost)


def test_temporary_files_are_removed_once_they_are_abandoned(run: JournaledRun) -> None:
    abandoned, fresh = (head_of(run).with_name(f".{name}.tmp") for name in ("abandoned", "fresh"))
    for path in (abandoned, fresh):
        path.touch()
    os.utime(abandoned, (0, 0))
    for event in whole_trial(1, 2):
        run.append(event)
    run.rundir.load(repair=True)
    assert [*head_of(run).parent.glob(".*.tmp")] == [fresh], "another process may be writing it"


def test_private_indexes_of_runs_that_are_gone_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOLDFAST_INDEX_BYTES", "1")
    runs = []
    for name in ("gone", "kept", "last"):
        (tmp_path / name).mkdir()
        runs.append(JournaledRun(tmp_path / name))
        for event in whole_trial(1, 1):
            runs[-1].append(event)
    gone, kept, last = (run.rundir for run in runs)
    for rundir in (gone, kept):
        assert rundir.load(repair=False).published is not None
    foreign = gone.private_index.with_name("0" * 32)
    foreign.mkdir()
    shutil.copy(gone.private_index / "run", foreign)

    shutil.rmtree(gone.path)
    last.load(repair=False)
    assert {*last.private_index.parent.iterdir()} == {kept.private_index, last.private_index, foreign}
