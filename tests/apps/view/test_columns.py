"""Columns of a run say what `RunView` says, whatever its journals hold, and whenever they are looked at."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import CancelledError
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.apps.view.columns import Helpers, open_columns, read_rows
from holdfast.apps.view.query import parse_query
from holdfast.apps.view.snapshot import facets, select
from holdfast.report.run_view import GradedTrial, RunView
from holdfast.store.rundir import RunDir
from tests.apps.view import journals
from tests.apps.view.journals import ROWS, TRIALS, JournaledRun, WriteBytes, WriteOutput, whole_trial

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.apps.view.columns import Columns

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
    """Compare all but the texts of errors: simultaneous errors in several files have no order of their own."""
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
        columns = open_columns(run.rundir)
        for start, end in pairwise([0, *sorted(cuts), len(events)]):
            for event in events[start:end]:
                run.append(event)
            if reopen:
                columns.close()
                columns = open_columns(run.rundir)
            else:
                columns.refresh()
            assert same(shown(columns), expected(run))
            assert columns.refresh() == 0


@pytest.mark.parametrize("published", [False, True])
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=journals.events, threshold=st.sampled_from([0.6, 0.3, 1.0]))
def test_columns_of_a_finished_run_agree_with_the_run_view(
    events: list[journals.Event], threshold: float, published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_INDEX_BYTES", "1" if published else "")
    with tempfile.TemporaryDirectory() as folder:
        run = JournaledRun(Path(folder))
        for event in events:
            run.append(event)
        columns = open_columns(run.rundir)
        run.report()
        columns.refresh()
        assert same(shown(columns), expected(run))
        run.report(threshold)
        columns.refresh()
        assert same(shown(columns), expected(run))
        assert same(shown(open_columns(run.rundir)), expected(run))


@pytest.fixture
def finished(run: JournaledRun, monkeypatch: pytest.MonkeyPatch) -> JournaledRun:
    """A finished run of all trials, which has a published table."""
    monkeypatch.setenv("HOLDFAST_INDEX_BYTES", "1")
    for sample in range(len(ROWS)):
        for trial in range(1, TRIALS + 1):
            for event in whole_trial(sample, trial):
                run.append(event)
    run.report()
    return run


def published_table(run: JournaledRun) -> Path:
    [path] = (run.rundir.path / ".index").glob("trials-*.db")
    return path


def places(columns: Columns) -> list[Path]:
    """Return the folders of the databases that columns are in."""
    return [Path(file).parent for _, _, file in columns.table.db.execute("PRAGMA database_list") if file]


def test_a_published_table_is_used_as_it_is(finished: JournaledRun) -> None:
    before = published_table(finished).read_bytes()
    columns = open_columns(finished.rundir)
    assert columns.settled
    assert same(shown(columns), expected(finished))
    assert columns.refresh() == columns.generation == 0
    columns.field("question")
    assert published_table(finished).read_bytes() == before


@pytest.mark.parametrize("damage", ["torn", "changed", "empty", "foreign", "head changed", "no head", "folder"])
def test_a_published_table_that_is_not_whole_is_not_used(finished: JournaledRun, damage: str) -> None:
    wanted = shown(open_columns(finished.rundir))
    path = published_table(finished)
    head, data = path.with_name("trials.head"), path.read_bytes()
    if damage == "head changed":
        head.write_bytes(head.read_bytes().replace(b'"rows":6', b'"rows":5'))
    elif damage == "no head":
        head.unlink()
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        broken = {
            "torn": data[: len(data) // 2],
            "changed": data[:-40] + bytes([data[-40] ^ 1]) + data[-39:],
            "empty": b"",
            "foreign": b"PAR1" + data[4:],
        }
        path.write_bytes(broken[damage])
    columns = open_columns(finished.rundir)
    assert path.parent not in places(columns)
    assert shown(columns) == wanted


def test_fields_of_a_breakdown_are_in_the_published_table(finished: JournaledRun) -> None:
    (finished.folder / "data.jsonl").unlink()
    columns = open_columns(finished.rundir)
    everything = select(columns, parse_query(""))
    assert {facet.value: facet.count for facet in facets(columns, everything)["level"]} == {"hard": 4, "easy": 2}
    assert list(select(columns, parse_query("level=hard"), "-sample").rows) == [2, 3, 4, 5]
    assert list(select(columns, parse_query(""), "-level").rows) == [2, 3, 4, 5, 0, 1]


def test_a_large_run_that_nobody_indexed_is_read_by_a_helper_process(
    finished: JournaledRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(finished.rundir.path / ".index")
    monkeypatch.setattr("holdfast.apps.view.columns.TableFiller", None)  # the helper process has its own
    shares: list[float] = []
    columns = open_columns(finished.rundir, shares.append)
    assert columns.settled
    assert shares[0] == 0.0 and shares[-1] == 1.0
    assert same(shown(columns), expected(finished))
    assert not (finished.rundir.path / ".index").exists()
    monkeypatch.setattr(Helpers, "ask", None)  # it published what it read
    assert same(shown(open_columns(finished.rundir)), expected(finished))


def test_a_large_run_is_read_without_a_helper_process_that_fails(
    finished: JournaledRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(finished.rundir.path / ".index")
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert same(shown(open_columns(finished.rundir)), expected(finished))


def test_helper_processes_end_with_the_viewer(run: JournaledRun, monkeypatch: pytest.MonkeyPatch) -> None:
    program = run.folder / "endless"
    program.write_text("#!/bin/sh\necho 0.5\nexec sleep 1000\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    helpers = Helpers()
    lines = helpers.ask("columns", run.rundir)
    assert next(lines) == b"0.5\n"
    helpers.end()
    with pytest.raises(CancelledError):
        next(lines)
    with pytest.raises(CancelledError):
        list(helpers.ask("columns", run.rundir))


def test_the_table_of_another_run_is_not_used(finished: JournaledRun, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = JournaledRun(tmp_path / "other")
    for event in whole_trial(0, 1, score=0.0):
        other.append(event)
    other.report()
    index = other.rundir.path / ".index"
    shutil.rmtree(index, ignore_errors=True)
    shutil.copytree(finished.rundir.path / ".index", index)
    columns = open_columns(other.rundir)
    assert index not in places(columns)
    assert same(shown(columns), expected(other))


def test_a_run_that_was_replaced_by_another_is_read_again(run: JournaledRun) -> None:
    for event in whole_trial(0, 1):
        run.append(event)
    columns = open_columns(run.rundir)
    assert shown(columns)["s0", 1][0] == "passed"
    run.rundir.set_aside()
    run.rundir.write_manifest(RunView(RunDir(next((run.rundir.path.parent / "archived").iterdir()))).manifest)
    columns.refresh()
    assert shown(columns)["s0", 1][0] == "pending"


def test_a_journal_that_was_cut_is_read_again(run: JournaledRun) -> None:
    for event in whole_trial(0, 1):
        run.append(event)
    columns = open_columns(run.rundir)
    journal = run.rundir.path / "outputs.jsonl"
    size = journal.stat().st_size
    with journal.open("r+b") as file:
        file.truncate(0)
    run.append(whole_trial(1, 1)[0])
    run.append(whole_trial(2, 1)[0])
    assert journal.stat().st_size > size
    assert columns.refresh() > 0
    assert same(shown(columns), expected(run))


def test_a_dataset_that_changed_moves_outputs_to_rows_that_are_gone(run: JournaledRun) -> None:
    for event in whole_trial(1, 1):
        run.append(event)
    columns = open_columns(run.rundir)
    data = run.folder / "data.jsonl"
    data.write_text(data.read_text().replace("one", "ONE"))
    columns.refresh()
    assert columns.rows == len(ROWS) * TRIALS + 1
    assert read_rows(columns, [columns.rows - 1])[0].sample == "s1"
    data.unlink()
    columns.refresh()
    assert same(shown(columns), expected(run))
    assert columns.rows == 1


def test_the_table_of_a_finished_run_needs_no_dataset(finished: JournaledRun) -> None:
    (finished.folder / "data.jsonl").unlink()
    columns = open_columns(finished.rundir)
    samples = [row.sample for row in read_rows(columns, range(columns.rows))]
    assert samples == [row["id"] for row in ROWS for _ in range(TRIALS)]


def test_a_field_of_a_dataset_that_has_changed_has_no_value_in_rows_that_are_gone(finished: JournaledRun) -> None:
    data = finished.folder / "data.jsonl"
    data.write_text(data.read_text().replace("zero", "0"))
    columns = open_columns(finished.rundir)
    values, numbers = columns.field("question")
    questions = ["", *(row["question"] for row in ROWS[1:])]
    assert [values[number] for number in numbers] == [question for question in questions for _ in range(TRIALS)]


def test_a_lost_line_of_a_finished_run_is_noticed(finished: JournaledRun) -> None:
    journal = finished.rundir.path / "outputs.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([b"x" * (len(lines[0]) - 1) + b"\n", *lines[1:]]))
    assert same(shown(open_columns(finished.rundir)), expected(finished))


def test_a_run_is_shown_although_nothing_can_be_stored(run: JournaledRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_INDEX_BYTES", "1")
    home = run.folder / "home"
    home.write_text("a file is in the way")
    monkeypatch.setenv("HOLDFAST_HOME", str(home))
    for event in whole_trial(0, 1):
        run.append(event)
    assert same(shown(open_columns(run.rundir)), expected(run))


def test_a_trial_is_found_by_sample_and_number(finished: JournaledRun) -> None:
    columns = open_columns(finished.rundir)
    for sample, row in enumerate(ROWS):
        assert columns.find(row["id"], 2) == sample * TRIALS + 1
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
    columns = open_columns(run.rundir)
    assert shown(columns)["s0", 1][0] == "pending"
    run.append(WriteBytes("", "outputs", whole[100:]))
    assert columns.refresh() == 1
    assert shown(columns)["s0", 1][0] == "ungraded"


def test_a_field_is_read_once_until_the_dataset_changes(run: JournaledRun) -> None:
    columns = open_columns(run.rundir)
    values, numbers = columns.field("question")
    assert [values[number] for number in numbers] == [row["question"] for row in ROWS for _ in range(TRIALS)]
    run.append(whole_trial(0, 1)[0])
    assert columns.refresh() == 1
    assert columns.field("question")[1] is numbers
    data = run.folder / "data.jsonl"
    data.write_text(data.read_text().replace("zero", "0"))
    assert columns.refresh() > 0
    assert columns.field("question")[0][:2] == ["", "0"]
