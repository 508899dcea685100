"""Which trials are finished is published with the index; the plan is the one that looking up everything gives."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.plan.finished import Inherited, inherit_finished, publish_finished, read_finished
from holdfast.plan.identity import identify, new_manifest
from holdfast.plan.plan import make_plan
from holdfast.plan.reuse import _match_outputs
from holdfast.spec.load import load_eval
from holdfast.store.heads import Moment
from holdfast.store.records import Grade, Timing, to_line
from tests.support.specs import output_of

if TYPE_CHECKING:
    from holdfast.plan.identity import RunIdentity
    from holdfast.store.rundir import RunDir

SAMPLES, TRIALS = 3, 2


def row(number: int, label: str = "1") -> dict[str, Any]:
    return {"id": f"s{number}", "q": f"{number}", "expected": label, "hard": number % 3 == 2}


def make_run(folder: Path, rows: Any = None, **keys: Any) -> tuple[RunIdentity, RunDir]:
    rows = [row(number) for number in range(SAMPLES)] if rows is None else rows
    (folder / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    spec = {
        "name": "done",
        "dataset": {"path": "data.jsonl"},
        "target": {"model": "m", "base_url": "http://127.0.0.1:9/v1"},
        "prompt": "{{ q }}",
        "trials": TRIALS,
        "graders": [{"type": "exact", "name": "a"}, {"type": "exact", "name": "b", "where": "hard"}],
        **keys,
    }
    (folder / "eval.yaml").write_text(json.dumps(spec))
    identity = identify(load_eval(folder / "eval.yaml"))
    rundir = identity.directory(folder / "runs")
    rundir.write_manifest(new_manifest(identity))
    return identity, rundir


def append(rundir: RunDir, name: str, record: Any) -> None:
    with (rundir.path / f"{name}.jsonl").open("ab") as file:
        file.write(to_line(record))


def output(identity: RunIdentity, number: int, digest: int = 0) -> Any:
    position, trial = divmod(number, TRIALS)
    key = identity.work.key("sha256:" + identity.survey.asked_at(position).hex(), trial + 1)
    row = identity.survey.row_text(position)
    return output_of("x", key=key, digest=f"sha256:{digest:032x}", timing=Timing(1.0, 1.0), row=row)


def grade(identity: RunIdentity, number: int, grader: int, status: Any, digest: int = 0) -> Any:
    of, slot = output(identity, number, digest), identity.work.slots[grader]
    judged = slot.judged(Moment(of.digest, None, 1.0), of.row)
    verdict = status, 1.0, 1.0, "", None, 0.0, None, 2.0
    return Grade(of.key, "s", 1, "abc"[grader], "exact", slot.fingerprint, None, judged, *verdict)


def publish(identity: RunIdentity, rundir: RunDir) -> bytes:
    """Plan a run that this process holds, and publish which trials are finished."""
    index = rundir.load(repair=True)
    plan = make_plan(identity.survey, identity.work, index)
    publish_finished(identity.survey, identity.work, rundir, index, plan.done)
    return plan.done


numbers = st.integers(0, SAMPLES * TRIALS - 1)
records = st.one_of(
    st.tuples(st.just("outputs"), numbers, st.integers(0, 1)),
    st.tuples(st.just("grades"), numbers, st.integers(0, 1), st.sampled_from(["passed", "passed", "error"])),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(records, max_size=10), st.booleans()), min_size=1, max_size=4))
def test_a_plan_with_what_is_known_is_the_plan_without(sessions: Any) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_INDEX_BYTES", "1")
        identity, rundir = make_run(Path(name))
        for lines, holds_the_lease in sessions:
            for kind, number, *values in lines:
                if kind == "outputs":
                    append(rundir, kind, output(identity, number, *values))
                else:
                    append(rundir, kind, grade(identity, number, *values))
            index = rundir.load(repair=holds_the_lease)
            known = read_finished(identity.survey, identity.work, rundir, index)
            plan = make_plan(identity.survey, identity.work, index, known_done=known)
            assert plan == make_plan(identity.survey, identity.work, rundir.load(repair=False, verify=True))
            if holds_the_lease:
                publish_finished(identity.survey, identity.work, rundir, index, plan.done)


def finish(identity: RunIdentity, rundir: RunDir, numbers: range) -> None:
    for number in numbers:
        append(rundir, "outputs", output(identity, number))
        for grader in (0, 1):
            append(rundir, "grades", grade(identity, number, grader, "passed"))


def test_finished_trials_are_known_only_for_the_same_rows_and_graders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_INDEX_BYTES", "1")
    identity, rundir = make_run(tmp_path)
    finish(identity, rundir, range(4))
    done = publish(identity, rundir)
    index = rundir.load(repair=False)
    assert read_finished(identity.survey, identity.work, rundir, index) == done == bytes([1, 1, 1, 1, 0, 0])
    for keys in (
        {"graders": [{"type": "exact", "name": "a"}]},
        {"trials": 3},
        {"dataset": {"path": "data.jsonl", "limit": 2}},
    ):
        other, _ = make_run(tmp_path, **keys)
        assert read_finished(other.survey, other.work, rundir, index) == b""
    (file,) = (rundir.path / ".index").glob("finished-*.db")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert read_finished(identity.survey, identity.work, rundir, index) == b"", "a damaged file is not used"


def test_journals_that_lost_lines_since_are_planned_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_INDEX_BYTES", "1")
    identity, rundir = make_run(tmp_path)
    finish(identity, rundir, range(6))
    publish(identity, rundir)
    path = rundir.path / "outputs.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    with path.open("r+b") as file:
        file.truncate(len(b"".join(lines[:-1])))
    index = rundir.load(repair=False)
    known = read_finished(identity.survey, identity.work, rundir, index)
    plan = make_plan(identity.survey, identity.work, index, known_done=known)
    assert (plan.finished, plan.to_run) == (5, 1)


GRADERS: Any = [
    {"type": "exact", "name": "a"},
    {"type": "exact", "name": "b", "expected": "2", "where": "hard"},
    {"type": "text", "name": "c", "contains": "1"},
]
graders = st.lists(st.sampled_from(range(3)), min_size=1, max_size=3, unique=True)
edits = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2), st.lists(st.integers(0, 9), max_size=2)), max_size=2)


@settings(max_examples=80, deadline=None)
@given(
    graders,
    graders,
    st.booleans(),
    edits,
    st.lists(records, max_size=6),
    st.booleans(),
    st.sets(st.integers(0, SAMPLES)),
)
def test_a_borrower_knows_what_looking_up_all_keys_finds(
    lent: list[int], own: list[int], elsewhere: bool, changes: Any, added: Any, again: bool, relabelled: set[int]
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_INDEX_BYTES", "1")
        patch.setenv("HOLDFAST_HOME", f"{name}/home")
        lender, rundir = make_run(Path(name), graders=[GRADERS[number] for number in lent])
        for number in range(4):
            append(rundir, "outputs", output(lender, number))
            for grader in lender.survey.panels.panel_at(number // TRIALS).graders:
                append(rundir, "grades", grade(lender, number, grader, "passed"))
        publish(lender, rundir)
        for kind, number, *values in added:
            if kind == "outputs":
                append(rundir, kind, output(lender, number, *values))
            elif values[0] < len(lent):
                append(rundir, kind, grade(lender, number, *values))
        if elsewhere:  # an output that is in no dataset of these two
            append(rundir, "outputs", output_of("x", key=f"sha256:{7:032x}", digest=f"sha256:{1:032x}"))
        if again:
            publish(lender, rundir)
        numbers = list(range(SAMPLES))
        for start, count, inserted in changes:
            numbers[start : start + count] = inserted
        rows = [row(number, "2" if number in relabelled else "1") for number in dict.fromkeys(numbers)] or [row(8)]
        borrower, _ = make_run(Path(name), rows, graders=[GRADERS[number] for number in own])
        index = rundir.load(repair=False)
        known = inherit_finished(borrower.survey, borrower.work, rundir, index)
        if again:
            assert known.done, "nothing speaks against it"
        plain = make_plan(borrower.survey, borrower.work, index)
        assert make_plan(borrower.survey, borrower.work, index, known_done=known.done) == plain
        unknown = _match_outputs(borrower.survey, borrower.work, index, Inherited())
        assert _match_outputs(borrower.survey, borrower.work, index, known) == unknown


@pytest.mark.parametrize("numbers", [[9, 1, 2], [0, 9, 2], [0, 1, 2, 5], [1, 2], [2, 0, 1]])
def test_only_rows_that_differ_from_a_lenders_are_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: list[int]
) -> None:
    monkeypatch.setenv("HOLDFAST_INDEX_BYTES", "1")
    lender, rundir = make_run(tmp_path, [row(number) for number in range(3)])
    finish(lender, rundir, range(6))
    publish(lender, rundir)
    borrower, _ = make_run(tmp_path, [row(number) for number in numbers])
    known = inherit_finished(borrower.survey, borrower.work, rundir, rundir.load(repair=False))
    assert known.done == b"".join(bytes([number < 3] * TRIALS) for number in numbers)
    assert known.gone == {lender.survey.asked_at(number) for number in {0, 1, 2}.difference(numbers)}
