"""Columns of a run say what `RunView` says, whatever its journals hold, and whenever they are looked at."""

from __future__ import annotations

import json
import os
import resource
import tempfile
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.report.run_view import GradedTrial, RunView
from holdfast.store.rundir import RunDir
from holdfast.store.trial_table import TrialTable, key_bytes, many_key_bytes
from holdfast.view.columns import open_columns, read_rows, remove_least_used
from tests.view import journals
from tests.view.journals import ROWS, TRIALS, JournaledRun, WriteBytes, WriteOutput, whole_trial

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.view.columns import Columns

EXAMPLES = 40


@pytest.fixture
def run(tmp_path: Path) -> JournaledRun:
    return JournaledRun(tmp_path)


def shown(columns: Columns) -> dict[tuple[str, int], Any]:
    """Return each trial as columns have it."""
    rows = read_rows(columns, range(columns.rows))
    trials = {
        (row.sample, row.trial): (
            row.status,
            row.score,
            row.graders,
            row.turns,
            row.tokens,
            row.cost,
            row.seconds,
            row.attempt,
            row.stop,
            row.stopped,
            row.preview,
            row.error,
        )
        for row in rows
    }
    assert len(trials) == len(rows), "a trial has two rows"
    return trials


def expected(run: JournaledRun) -> dict[tuple[str, int], Any]:
    """Return each trial as `RunView.everything` has it."""
    view = RunView(run.rundir)
    return dict(_trials(view))


def _trials(view: RunView) -> Iterator[tuple[tuple[str, int], Any]]:
    for trial in view.everything():
        if not isinstance(trial, GradedTrial):
            missing = "error" if trial.error else "pending"
            yield (trial.sample, trial.trial), (missing, None, {}, *[None] * 5, "", None, "", trial.error)
            continue
        output = trial.output
        graders: dict[str, Any] = {grade.grader: (grade.status, grade.score) for grade in trial.grades}
        stopped = any(
            place.stops and graders.get(place.name, ("",))[0] == "failed" and output.turns >= (place.turn or 0)
            for place in view.places
        )
        for number in trial.panel.graders:
            place = view.places[number]
            late = place.turn is not None and place.turn > output.turns
            graders.setdefault(place.name, ("not_reached" if stopped or late else "ungraded", None))
        failures = [error for error in view.failed_attempts(output.key) if error.where != "target"]
        status: str = trial.status
        if status == "error" and not failures and all(verdict[0] != "error" for verdict in graders.values()):
            status = "ungraded"
        yield (
            (output.sample, output.trial),
            (
                status,
                trial.score,
                graders,
                output.turns,
                output.usage.tokens,
                output.usage.cost,
                output.timing.seconds,
                output.attempt,
                output.stop,
                1 if output.stopped_by else None,
                output.output,
                f"strict: {failures[-1].kind}: {failures[-1].message}" if failures and status == "error" else "",
            ),
        )


def same(actual: dict[Any, Any], wanted: dict[Any, Any]) -> bool:
    """Compare without the texts of errors of the same time in several files, whose order is that of the files."""
    assert {key: row[:-1] for key, row in actual.items()} == {key: row[:-1] for key, row in wanted.items()}
    assert {key: bool(row[-1]) for key, row in actual.items()} == {key: bool(row[-1]) for key, row in wanted.items()}
    return True


@settings(max_examples=EXAMPLES)
@given(journals.events, st.lists(st.integers(0, 25), max_size=3), st.booleans())
def test_columns_agree_with_the_run_view_at_every_look(
    events: list[journals.Event], cuts: list[int], reopen: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = JournaledRun(Path(folder))
        columns = open_columns(run.rundir, run.folder / "home")
        for start, end in pairwise([0, *sorted(cuts), len(events)]):
            for event in events[start:end]:
                run.append(event)
            if reopen:
                columns.close()
                columns = open_columns(run.rundir, run.folder / "home")
            else:
                columns.refresh()
            assert same(shown(columns), expected(run))
            assert columns.refresh() == 0
        assert same(shown(open_columns(run.rundir, run.folder / "other")), expected(run))


@pytest.mark.parametrize("reopen", [False, True])
def test_verdicts_that_come_one_look_after_another_are_joined(run: JournaledRun, reopen: bool) -> None:
    columns = open_again(run)
    for event in whole_trial(1, 1):
        run.append(event)
        if reopen:
            columns.close()
            columns = open_again(run)
        else:
            assert columns.refresh() == 1
        assert same(shown(columns), expected(run))
    assert shown(columns)["s1", 1][0] == "passed"


@settings(max_examples=EXAMPLES)
@given(
    journals.events,
    st.sampled_from([0.6, 0.3, 1.0]),
    st.sampled_from([1, 2, 1024]),
    st.sampled_from([1, 700, 1 << 24]),
    st.sampled_from([16, 600, 1 << 20]),
)
def test_columns_of_a_finished_run_agree_with_the_run_view(
    events: list[journals.Event], threshold: float, waiting: int, chunk: int, block: int
) -> None:
    outputs_at_once = patch("holdfast.view.reported._WAITING", waiting)  # with few, some come after their turn
    sizes = patch.multiple("holdfast.view.chunks", _CHUNK=chunk), patch.multiple("holdfast.view.results", _BLOCK=block)
    with tempfile.TemporaryDirectory() as folder, outputs_at_once, sizes[0], sizes[1]:
        run = JournaledRun(Path(folder))
        for event in events:
            run.append(event)
        columns = open_columns(run.rundir, run.folder / "home")
        run.report()
        columns.refresh()
        assert same(shown(columns), expected(run))
        run.report(threshold)
        columns.refresh()
        assert same(shown(columns), expected(run))
        assert same(shown(open_columns(run.rundir, run.folder / "home")), expected(run))


def open_again(run: JournaledRun) -> Columns:
    return open_columns(run.rundir, run.folder / "home")


def cache_file(run: JournaledRun) -> Path:
    """Return the only stored table."""
    [path] = (run.folder / "home" / "view").glob("*/columns")
    return path


@pytest.fixture
def finished(run: JournaledRun) -> JournaledRun:
    """A finished run of all trials."""
    for sample in range(len(ROWS)):
        for trial in range(1, TRIALS + 1):
            for event in whole_trial(sample, trial):
                run.append(event)
    run.report()
    return run


def test_outputs_in_another_order_than_the_dataset_come_to_their_rows(
    run: JournaledRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.view.reported._WAITING", 1)
    monkeypatch.setattr("holdfast.view.reported._choose_outputs", None)  # the slow way, for keys with several outputs
    for sample in reversed(range(len(ROWS))):
        for trial in range(1, TRIALS + 1):
            for event in whole_trial(sample, trial):
                run.append(event)
    run.report()
    assert same(shown(open_again(run)), expected(run))
    table = TrialTable.load(cache_file(run).parent)
    assert table is not None
    assert table.notes["kind"] == "reported"


def test_a_stored_table_is_used_as_long_as_nothing_changes(finished: JournaledRun) -> None:
    first = open_again(finished)
    written = cache_file(finished).stat()
    second = open_again(finished)
    assert shown(first) == shown(second)
    assert (cache_file(finished).stat().st_ino, cache_file(finished).stat().st_mtime) == (
        written.st_ino,
        written.st_mtime,
    )
    assert second.refresh() == 0
    assert second.generation == 0


@pytest.mark.parametrize("damage", ["torn", "changed", "header", "empty", "foreign", "other format"])
def test_a_stored_table_that_is_not_whole_is_built_again(finished: JournaledRun, damage: str) -> None:
    wanted = shown(open_again(finished))
    path = cache_file(finished)
    data = path.read_bytes()
    broken = {
        "torn": data[: len(data) // 2],
        "changed": data[:-40] + bytes([data[-40] ^ 1]) + data[-39:],
        "header": data[:60] + bytes([data[60] ^ 1]) + data[61:],
        "empty": b"",
        "foreign": b"PAR1" + data[4:],
        "other format": data.replace(b"columns 4", b"columns 3", 1),
    }
    path.write_bytes(broken[damage])
    assert shown(open_again(finished)) == wanted
    assert path.read_bytes() != broken[damage]


def test_a_table_of_a_run_that_was_replaced_by_another_is_built_again(run: JournaledRun, tmp_path: Path) -> None:
    for event in whole_trial(0, 1):
        run.append(event)
    assert shown(open_again(run))["s0", 1][0] == "passed"
    run.rundir.set_aside()
    run.rundir.write_manifest(RunView(RunDir(next((run.rundir.path.parent / "archived").iterdir()))).manifest)
    assert shown(open_again(run))["s0", 1][0] == "pending"


def test_a_journal_that_was_cut_is_read_again(run: JournaledRun) -> None:
    for event in whole_trial(0, 1):
        run.append(event)
    columns = open_again(run)
    journal = run.rundir.path / "outputs.jsonl"
    size = journal.stat().st_size
    with journal.open("r+b") as file:
        file.truncate(0)
    run.append(whole_trial(1, 1)[0])
    run.append(whole_trial(2, 1)[0])
    assert journal.stat().st_size > size
    assert columns.refresh() == 3
    assert same(shown(columns), expected(run))


def test_a_dataset_that_changed_moves_outputs_to_rows_that_are_gone(run: JournaledRun) -> None:
    for event in whole_trial(1, 1):
        run.append(event)
    columns = open_again(run)
    data = run.folder / "data.jsonl"
    data.write_text(data.read_text().replace("one", "ONE"))
    columns.refresh()
    assert columns.rows == len(ROWS) * TRIALS + 1
    assert columns.table.id_at(columns.rows - 1) == "s1"
    data.unlink()
    columns.refresh()
    assert same(shown(columns), expected(run))
    assert columns.rows == 1


def test_a_table_of_a_finished_run_needs_no_dataset(finished: JournaledRun) -> None:
    (finished.folder / "data.jsonl").unlink()
    columns = open_again(finished)
    assert [columns.table.id_at(row) for row in range(columns.rows)] == [
        row["id"] for row in ROWS for _ in range(TRIALS)
    ]
    assert columns.field("level")[0] == ["", "easy", "hard"]


def test_fields_are_read_from_the_dataset_once(finished: JournaledRun, monkeypatch: pytest.MonkeyPatch) -> None:
    open_again(finished).field("question")
    columns = open_again(finished)
    monkeypatch.setattr("holdfast.view.columns.read_field", None)
    assert columns.field("question")[0] == ["", *(row["question"] for row in ROWS)]
    assert columns.field("level")[0] == ["", "easy", "hard"]
    monkeypatch.undo()
    data = finished.folder / "data.jsonl"
    data.write_text(data.read_text().replace("zero", "0"))
    values, codes = columns.field("question")
    questions = ["", *(row["question"] for row in ROWS[1:])]
    assert [values[code] for code in codes] == [question for question in questions for _ in range(TRIALS)]


def test_a_lost_line_of_a_finished_run_is_noticed(finished: JournaledRun) -> None:
    journal = finished.rundir.path / "outputs.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([b"x" * (len(lines[0]) - 1) + b"\n", *lines[1:]]))
    assert same(shown(open_again(finished)), expected(finished))


def test_large_runs_are_built_by_helper_processes(finished: JournaledRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.view.columns._LARGE", 0)
    shares: list[float] = []
    columns = open_columns(finished.rundir, finished.folder / "home", shares.append)
    assert shares[-1] == 1.0
    assert same(shown(columns), expected(finished))
    assert columns.table.dataset is not None


@pytest.mark.parametrize("twice", [False, True])
def test_helper_processes_share_results_and_outputs_of_large_runs(
    finished: JournaledRun, monkeypatch: pytest.MonkeyPatch, twice: bool
) -> None:
    if twice:
        journal = finished.rundir.path / "outputs.jsonl"
        journal.write_bytes(journal.read_bytes() * 2)
        finished.report()
    monkeypatch.setattr("holdfast.view.chunks._LARGE", 0)
    monkeypatch.setattr("holdfast.view.chunks._CHUNK", 1)  # a line each, so the trials of a sample are in two of them
    columns = open_again(finished)
    assert columns.table.notes["kind"] == "reported"
    assert same(shown(columns), expected(finished))
    assert len(set(columns.table["id_starts"])) == len(ROWS)


@pytest.mark.parametrize("change", ["formatted", "unexpected", "cut off"])
def test_results_that_are_not_as_expected_are_not_needed(finished: JournaledRun, change: str) -> None:
    results = finished.rundir.results
    text = results.read_text()
    changed = {
        "formatted": json.dumps(json.loads(text), indent=2) + "\n",
        "unexpected": text.replace('"status":"passed"', '"status":"marvellous"', 1),
        "cut off": text[: len(text) // 2],
    }
    results.write_text(changed[change])
    columns = open_again(finished)
    assert columns.table.notes["kind"] == "recorded"
    assert same(shown(columns), expected(finished))


@pytest.mark.parametrize("program", ["/bin/false", "/bin/echo"])
def test_a_helper_process_that_fails_costs_only_time(
    finished: JournaledRun, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr("holdfast.view.chunks._LARGE", 0)
    monkeypatch.setattr("holdfast.view.chunks._CHUNK", 500)
    monkeypatch.setattr("sys.executable", program)
    assert same(shown(open_again(finished)), expected(finished))


@given(st.lists(st.lists(st.sampled_from(["", "a", "é", "a\nb", "\udc80"]), max_size=4), max_size=4))
def test_sample_ids_come_back_as_they_were(batches: list[list[str]]) -> None:
    table = TrialTable(())
    for batch in batches:
        table.extend(batch, [1] * len(batch), [f"sha256:{number:032x}" for number in range(len(batch))])
    samples = [sample for batch in batches for sample in batch]
    assert [table.id_at(row) for row in range(len(table))] == samples
    assert all(list(table.rows_of(sample)) == [r for r, s in enumerate(samples) if s == sample] for sample in samples)


@given(st.lists(st.sampled_from(["sha256:" + "0a" * 16, "sha256:" + "FF" * 16, "sha256:" + " 0" * 16, "", "x" * 39])))
def test_keys_are_the_same_one_by_one_and_together(keys: list[str]) -> None:
    assert many_key_bytes(keys) == b"".join(map(key_bytes, keys))


def test_columns_are_shown_where_nothing_can_be_stored(finished: JournaledRun) -> None:
    (finished.folder / "home").write_text("a file is in the way")
    assert same(shown(open_again(finished)), expected(finished))


@contextmanager
def full_disk() -> Iterator[None]:
    """Let this process and those that it starts write 256 bytes to each file, and fail to write more."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_helper_processes_that_cannot_write_cost_only_time(
    finished: JournaledRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("holdfast.view.chunks._LARGE", 0)
    monkeypatch.setattr("holdfast.view.chunks._claim", lambda _: iter(()))  # so the helper process takes all chunks
    with full_disk():
        columns = open_again(finished)
    assert same(shown(columns), expected(finished))
    assert columns.table.notes["kind"] == "recorded"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("large", [False, True])
def test_a_full_disk_costs_only_the_cache(finished: JournaledRun, monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    if large:
        monkeypatch.setattr("holdfast.view.columns._LARGE", 0)
    with full_disk():
        assert same(shown(open_again(finished)), expected(finished))
    assert [path for path in (finished.folder / "home").rglob("*") if path.is_file()] == []
    assert same(shown(open_again(finished)), expected(finished))
    assert cache_file(finished).exists()


def test_a_trial_is_found_by_sample_and_number(finished: JournaledRun) -> None:
    columns = open_again(finished)
    for sample, row in enumerate(ROWS):
        assert columns.find(row["id"], 2) == sample * TRIALS + 1
        assert len(set(columns.table["id_starts"][sample * TRIALS : (sample + 1) * TRIALS])) == 1
    assert columns.find("s", 1) is None
    assert columns.find("s0", 3) is None


def test_a_line_that_is_not_finished_is_read_later(run: JournaledRun) -> None:
    output = whole_trial(0, 1)[0]
    assert isinstance(output, WriteOutput)
    run.append(output)
    journal = run.rundir.path / "outputs.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(b"")
    run.append(WriteBytes("", "outputs", whole[:100]))
    columns = open_again(run)
    assert shown(columns)["s0", 1][0] == "pending"
    run.append(WriteBytes("", "outputs", whole[100:]))
    assert columns.refresh() == 1
    assert shown(columns)["s0", 1][0] == "ungraded"


def test_the_least_recently_used_tables_are_removed(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "columns").write_bytes(bytes(100))
        os.utime(tmp_path / f"{number}", (number, number))
    remove_least_used(tmp_path, keep=tmp_path / "0", limit=250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "3"]
