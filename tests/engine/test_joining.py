"""Workers that join a run: each reads the rows of its chunks, and looks up no trial of others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from holdfast.data import readers
from holdfast.display.displays import Quiet
from holdfast.engine.session import Options, Worker
from holdfast.engine.worker import SharedRun, finish_run, prepare, run_worker
from holdfast.plan import plan
from holdfast.store.lease import RunLease
from holdfast.store.records import to_line
from holdfast.store.rundir import RunDir
from tests.support.running import lines
from tests.support.specs import load, output_of, write_rows

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.plan.identity import RunIdentity

ROWS = [{"id": f"r{number}", "question": f"question {number}"} for number in range(60)]


def share(folder: Path, **dataset: Any) -> SharedRun:
    """Divide a run of two files into chunks of two samples, of which the second file has a blank line."""
    write_rows(folder / "a.jsonl", ROWS[:25])
    write_rows(folder / "b.jsonl", ROWS[25:])
    (folder / "b.jsonl").write_bytes((folder / "b.jsonl").read_bytes().replace(b"\n", b"\n \n", 1))
    (folder / "agent.py").write_text("def reply(prompt):\n    return prompt\n")
    spec = load(
        folder,
        samples=None,
        dataset={"path": ["a.jsonl", "b.jsonl"], **dataset},
        target={"python": "agent.py:reply"},
        graders=[{"type": "text", "contains": "question"}],
        trials=3,
    )
    shared = prepare(spec, Options(runs_dir=folder / "runs"), 4, Quiet())
    assert isinstance(shared, SharedRun)
    return shared


def mark_done(rundir: RunDir, *, but: set[int]) -> int:
    """Let all chunks be done, except some; return how many there are."""
    chunks = sorted(rundir.claims.glob("*/*.free"))
    for number, path in enumerate(chunks):
        if number not in but:
            path.rename(path.with_suffix(".done"))
    return len(chunks)


@pytest.mark.parametrize("open_chunks", [{0}, {10, 17, 18}, {30, 35}])
def test_a_worker_decodes_the_rows_of_its_chunks_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_chunks: set[int]
) -> None:
    rundir = share(tmp_path).rundir
    assert mark_done(rundir, but=open_chunks) == 36, "of 5 trials, so that samples are divided, too"
    decoded: list[str] = []
    check_row = readers._check_row

    def note_row(row: Any, where: str) -> Any:
        decoded.append(row["id"])
        return check_row(row, where)

    monkeypatch.setattr(readers, "_check_row", note_row)
    run_worker(rundir, "w", Options(runs_dir=tmp_path / "runs"), Quiet())
    trials = {(record["sample"], record["trial"]) for record in lines(rundir.workers / "w" / "outputs.jsonl")}
    numbers = [number for chunk in open_chunks for number in range(5 * chunk, 5 * chunk + 5)]
    assert trials == {(f"r{number // 3}", number % 3 + 1) for number in numbers}
    surveyed, read_again = decoded[: len(ROWS)], decoded[len(ROWS) :]
    assert surveyed == [row["id"] for row in ROWS]
    assert sorted(read_again) == sorted({sample for sample, _ in trials})


def test_a_worker_finds_its_rows_if_not_every_line_is_a_sample(tmp_path: Path) -> None:
    rundir = share(tmp_path, where="id != 'r3'").rundir
    mark_done(rundir, but={20})
    run_worker(rundir, "w", Options(runs_dir=tmp_path / "runs"), Quiet())
    done = [(record["sample"], record["trial"]) for record in lines(rundir.workers / "w" / "outputs.jsonl")]
    assert sorted(done) == [("r34", 2), ("r34", 3), ("r35", 1), ("r35", 2), ("r35", 3)]


def keys_of(identity: RunIdentity) -> list[str]:
    """Return the keys of all trials."""
    work, survey = identity.work, identity.survey
    return [work.key_at(survey, number) for number in work.numbers(survey)]


def write_outputs(rundir: RunDir, keys: list[str]) -> None:
    """Let another worker have written outputs under these keys."""
    folder = rundir.workers / "early"
    folder.mkdir(parents=True)
    (folder / "outputs.jsonl").write_bytes(b"".join(to_line(output_of("x", key=key)) for key in keys))


def test_a_worker_that_joins_late_looks_up_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity, rundir, _ = share(tmp_path)
    keys = keys_of(identity)
    write_outputs(rundir, keys[:2])
    looked_up: list[str] = []
    monkeypatch.setattr(plan, "generation_key", lambda *parts: looked_up.append(parts[0]) or "")
    loaded = Worker(identity, Options(runs_dir=tmp_path / "runs"), "late").load(print)
    assert looked_up == []
    assert (loaded.plan.total, loaded.plan.to_run, loaded.plan.to_grade) == (len(keys), len(keys) - 2, 2)


def test_a_worker_counts_trials_if_others_have_written_as_many_outputs(tmp_path: Path) -> None:
    identity, rundir, _ = share(tmp_path)
    write_outputs(rundir, [*keys_of(identity)[1:], "sha256:other"])
    assert Worker(identity, Options(runs_dir=tmp_path / "runs"), "late").load(print).plan.to_run == 1


def test_a_worker_that_waited_for_the_report_reads_no_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity, rundir, _ = share(tmp_path)
    options = Options(runs_dir=tmp_path / "runs")
    run_worker(rundir, "w", options, Quiet())
    lease = RunLease(rundir.lease, finishing=True)
    lease.acquire(0)
    try:
        monkeypatch.setattr(RunDir, "load", lambda *_, **__: pytest.fail("the run is read"))
        outcome = finish_run(identity, rundir, options, Quiet(), print)
    finally:
        lease.release()
    assert outcome.exit_code == 0 and outcome.finisher is not None
