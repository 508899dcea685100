"""Columns that a report has written say what `RunView` says, are used only for the files that they were made from, and
are no reason for a report to fail.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.report.run_view import RunView
from holdfast.store.durable import replacing
from holdfast.store.rundir import RunDir
from holdfast.store.trial_table import TableWriter, TrialTable, split_place
from holdfast.view.columns import Columns, open_columns
from tests.support.lab import Lab, rows
from tests.support.running import Server, module_server
from tests.view import journals
from tests.view.journals import ROWS, TRIALS, JournaledRun, WriteError, whole_trial
from tests.view.test_columns import EXAMPLES, expected, same, shown
from tests.view.test_counting import from_columns, from_trials

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import BinaryIO

provider = module_server()


def large() -> AbstractContextManager[Any]:
    """Let each run be as large as those whose report writes columns."""
    return patch.dict(os.environ, HOLDFAST_INDEX_BYTES="1")


def stored(rundir: RunDir) -> Path:
    return rundir.path / ".index" / "columns"


def contents(table: TrialTable) -> dict[str, list[Any]]:
    """Return all that a table holds, whatever numbers stand for texts and files."""
    held: dict[str, list[Any]] = {"id": [table.id_at(row) for row in range(len(table))]}
    for name in set(table.names) - {"ids", "id_starts"}:
        values = list(table[name])
        if name in table.values:
            values = [table.values[name][code] for code in values]
        elif name in ("at", "error_at"):
            values = [place and (table.files[split_place(place)[0]], split_place(place)[1]) for place in values]
        held[name] = [None if value != value else value for value in values]
    return held


@settings(max_examples=EXAMPLES)
@given(journals.events, st.booleans(), st.sampled_from([0.6, 0.3]), st.sampled_from([1, 3, 4096]))
def test_columns_that_a_report_wrote_agree_with_the_run_view(
    events: list[journals.Event], complete: bool, threshold: float, rows_at_once: int
) -> None:
    at_once = patch("holdfast.report.trial_columns._ROWS", rows_at_once)
    with tempfile.TemporaryDirectory() as folder, large(), at_once, patch("holdfast.report.trials._BATCH", 2):
        run = JournaledRun(Path(folder))
        for event in [*whole_run(complete), *events]:
            run.append(event)
        run.report()
        run.report(threshold)
        columns = open_columns(run.rundir, run.folder / "home")
        assert same(shown(columns), expected(run))
        if stored(run.rundir).exists():
            stored(run.rundir).unlink()
            read = open_columns(run.rundir, run.folder / "other")
            if read.table.notes["kind"] == "reported":
                assert contents(columns.table) == contents(read.table)


def whole_run(complete: bool) -> list[journals.Event]:
    trials = [(sample, trial) for sample in range(len(ROWS)) for trial in range(1, TRIALS + 1)] if complete else []
    return [event for each in trials for event in whole_trial(*each)]


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JournaledRun:
    """A finished run of all trials but one, with the columns of its report."""
    monkeypatch.setenv("HOLDFAST_INDEX_BYTES", "1")
    run = JournaledRun(tmp_path)
    for event in [*whole_run(True)[:-4], WriteError("", 2, 2, "target", "timeout")]:
        run.append(event)
    run.report()
    return run


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Columns]:
    """Return the columns that are built, not opened."""
    columns: list[Columns] = []
    build = Columns.build

    def note(self: Columns, *arguments: Any, **options: Any) -> None:
        columns.append(self)
        build(self, *arguments, **options)

    monkeypatch.setattr(Columns, "build", note)
    return columns


def open_again(run: JournaledRun) -> Columns:
    return open_columns(run.rundir, run.folder / "home")


def test_a_run_that_was_never_opened_is_not_read(finished: JournaledRun, built: list[Columns]) -> None:
    columns = open_again(finished)
    assert same(shown(columns), expected(finished))
    assert shown(columns)["s 2", 2][0] == "error"
    assert columns.refresh() == 0
    assert built == []


def test_columns_of_a_report_need_no_dataset(finished: JournaledRun) -> None:
    (finished.folder / "data.jsonl").unlink()
    assert open_again(finished).field("level")[0] == ["", "easy", "hard"]
    assert open_again(finished).field("level")[0] == ["", "easy", "hard"]


def test_a_viewer_that_is_open_takes_the_columns_of_a_new_report(finished: JournaledRun, built: list[Columns]) -> None:
    columns = open_again(finished)
    finished.report(1.0)
    columns.refresh()
    assert same(shown(columns), expected(finished))
    assert built == []


def test_a_small_run_has_no_columns(tmp_path: Path) -> None:
    run = JournaledRun(tmp_path)
    run.report()
    assert not stored(run.rundir).exists()


def test_outputs_whose_rows_are_gone_are_listed(finished: JournaledRun, built: list[Columns]) -> None:
    finished.append(whole_trial(len(ROWS), 1)[0])
    finished.report()
    assert ("gone", 1) in shown(open_again(finished))
    assert len(built) == 1


def damaged(data: bytes, damage: str) -> bytes:
    changes = {
        "torn": data[: len(data) // 2],
        "row": data[:100] + bytes([data[100] ^ 1]) + data[101:],
        "header": data[:-40] + bytes([data[-40] ^ 1]) + data[-39:],
        "frame": data[:20] + bytes([data[20] ^ 1]) + data[21:],
        "empty": b"",
        "foreign": b"PAR1" + data[4:],
        "other version": data.replace(b"columns 4", b"columns 3", 1),
    }
    return changes[damage]


@pytest.mark.parametrize("damage", ["torn", "row", "header", "frame", "empty", "foreign", "other version"])
def test_columns_that_are_not_whole_are_not_used(finished: JournaledRun, built: list[Columns], damage: str) -> None:
    path = stored(finished.rundir)
    data = path.read_bytes()
    path.write_bytes(damaged(data, damage))
    assert path.read_bytes() != data
    assert same(shown(open_again(finished)), expected(finished))
    assert len(built) == 1


def test_a_byte_that_was_flipped_anywhere_is_noticed(finished: JournaledRun) -> None:
    wanted = contents(open_again(finished).table)
    path = stored(finished.rundir)
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        table = TrialTable.load(path.parent)
        assert table is None or contents(table) == wanted, place  # a byte between two columns


def replace_results(run: JournaledRun) -> None:
    text = run.rundir.results.read_bytes()
    run.rundir.results.unlink()
    run.rundir.results.write_bytes(text)


def append_trial(run: JournaledRun) -> None:
    for event in whole_trial(2, 2):
        run.append(event)


def append_error(run: JournaledRun) -> None:
    run.append(WriteError("workers/a", 2, 2, "target", "agent"))


@pytest.mark.parametrize("change", [replace_results, append_trial, append_error], ids=lambda change: change.__name__)
def test_columns_of_other_files_are_not_used(finished: JournaledRun, built: list[Columns], change: Any) -> None:
    change(finished)
    assert same(shown(open_again(finished)), expected(finished))
    assert len(built) == 1


def test_a_run_that_goes_on_is_read_from_its_journals(finished: JournaledRun) -> None:
    finished.rundir.reopen()
    append_trial(finished)
    columns = open_again(finished)
    assert columns.table.notes["kind"] == "recorded"
    assert shown(columns)["s 2", 2][0] == "passed"


def test_columns_of_a_copied_run_are_not_used(finished: JournaledRun, built: list[Columns]) -> None:
    copy = RunDir(finished.folder / "copied" / finished.rundir.path.name)
    shutil.copytree(finished.rundir.path, copy.path)
    columns = open_columns(copy, finished.folder / "home")
    assert same(shown(columns), expected(finished))
    assert built == [columns]


def test_columns_name_no_file_outside_the_run(finished: JournaledRun, built: list[Columns]) -> None:
    table = TrialTable.load(stored(finished.rundir).parent)
    assert table is not None
    table.files[0] = "../../../secret"
    table.store(stored(finished.rundir).parent, table.notes)
    assert open_again(finished).table.files[0] == "outputs.jsonl"
    assert len(built) == 1


def leftovers(rundir: RunDir) -> list[Path]:
    return [*rundir.path.glob(".index/.*.tmp")]


@pytest.mark.parametrize("writes", [0, 1, 40, 88])
def test_a_disk_that_becomes_full_costs_only_the_columns(finished: JournaledRun, writes: int) -> None:
    before = msgspec.json.decode(finished.rundir.results.read_bytes())
    stored(finished.rundir).unlink()
    write, count = TableWriter._write_at, 0

    def write_some(self: TableWriter, place: int, data: memoryview) -> None:
        nonlocal count
        count += 1
        if count > writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, place, data)

    few = patch("holdfast.report.trial_columns._ROWS", 1), patch("holdfast.report.trials._BATCH", 2)
    with patch.object(TableWriter, "_write_at", write_some), few[0], few[1]:
        finished.report()
    assert count == writes + 1
    assert not stored(finished.rundir).exists()
    assert leftovers(finished.rundir) == []
    assert msgspec.json.decode(finished.rundir.results.read_bytes()) == before


def test_a_disk_with_room_for_the_report_alone_gets_the_report(
    finished: JournaledRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = finished.rundir.results.read_bytes()
    finished.rundir.reopen()
    stored(finished.rundir).unlink()

    def replace(path: Path) -> AbstractContextManager[BinaryIO]:
        if leftovers(finished.rundir):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replacing(path)

    monkeypatch.setattr("holdfast.report.metrics.replacing", replace)
    finished.report()
    assert finished.rundir.results.read_bytes() == before
    assert leftovers(finished.rundir) == []


def test_a_file_in_the_way_of_the_folder_costs_only_the_columns(finished: JournaledRun) -> None:
    shutil.rmtree(stored(finished.rundir).parent)
    stored(finished.rundir).parent.write_text("in the way")
    finished.report()
    assert same(shown(open_again(finished)), expected(finished))


def test_what_a_killed_process_left_is_removed(finished: JournaledRun) -> None:
    stored(finished.rundir).with_name(".columns.0123.tmp").write_bytes(b"half")
    finished.report()
    assert leftovers(finished.rundir) == []


def test_columns_of_a_run_that_borrows_from_another(
    tmp_path: Path, provider: Server, monkeypatch: pytest.MonkeyPatch, built: list[Columns]
) -> None:
    """The runs are those of real processes, which write more after their report."""
    monkeypatch.setenv("HOLDFAST_INDEX_BYTES", "1")
    lab = Lab(tmp_path, provider, rows=rows(6))
    first = lab.eval().run
    assert from_columns(first, tmp_path / "home") == from_trials(first)
    lab.rows += rows(2, start=6)
    second = lab.eval().run
    assert from_columns(second, tmp_path / "home") == from_trials(second)
    assert built == []
    table = open_columns(RunDir(second), tmp_path / "home").table
    sources = [table.values["source"][code] for code in table["source"]]
    assert sources == [each.output.source or "" for each in RunView(RunDir(second)).trials()]
    assert sources == [f"e/{first.name}"] * 6 + [""] * 2
