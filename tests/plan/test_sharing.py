"""A large run lends its journals without a copy, and the borrower keeps what it counted whatever becomes of the lender.

How often the target was asked is counted in a file that it appends to.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.report.run_view import RunView
from holdfast.store.index_files import journals_size
from holdfast.store.lines import scan, seal
from holdfast.store.rundir import RunDir
from holdfast.store.shared import end_of, journal_size, share, unseal
from tests.support.breaking import holdfast_with_faults, metrics_bytes, needs_root, needs_strace, numbers
from tests.support.running import holdfast, lines, metrics, outputs_in, start, verdicts_in, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.store.index import RunIndex

ROWS = 140
"""few and long: their journals are large enough to be lent, and little else takes time"""
TARGET = """from pathlib import Path


def reply(prompt):
    with Path("asked").open("a") as file:
        file.write(prompt + "\\n")
    return prompt + " " + "x" * 9000
"""
EVAL: dict[str, Any] = {
    "schemaVersion": "1.0",
    "name": "e",
    "dataset": {"path": "rows.jsonl"},
    "prompt": "{{ q }}",
    "target": {"python": "target.py:reply"},
    "graders": [{"type": "text", "name": "right", "contains": "question"}],
}


class Folder:
    """An eval, and what its runs did."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "target.py").write_text(TARGET)

    def write(self, rows: list[str], **keys: Any) -> None:
        (self.path / "rows.jsonl").write_text(
            "".join(json.dumps({"id": f"s{number}", "q": row}) + "\n" for number, row in enumerate(rows))
        )
        (self.path / "e.yaml").write_text(json.dumps({**EVAL, **keys}))

    def eval(self, *arguments: str, check: int = 0) -> str:
        done = holdfast("eval", "e.yaml", *arguments, cwd=self.path, check=check)
        return str(done.stdout + done.stderr)

    def asked(self) -> int:
        """Return how many questions were asked since the last time."""
        file = self.path / "asked"
        count = len(file.read_text().splitlines()) if file.exists() else 0
        file.unlink(missing_ok=True)
        return count

    @property
    def runs(self) -> list[Path]:
        """Run directories, the oldest first."""
        manifests = (self.path / "runs/e").glob("*-????????/manifest.json")
        return [manifest.parent for manifest in sorted(manifests, key=lambda file: file.stat().st_mtime)]


@pytest.fixture(scope="module", params=[None, "1000000"], ids=["index read", "index published"])
def finished(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The folder of an eval that has run."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param is not None:
            patch.setenv("HOLDFAST_INDEX_BYTES", request.param)
        folder = Folder(tmp_path_factory.mktemp("finished"))
        folder.write(questions())
        folder.eval()
        assert folder.asked() == ROWS
        yield folder.path


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Folder:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    folder = Folder(tmp_path)
    if "HOLDFAST_INDEX_BYTES" in os.environ:  # the cached index belongs to the original files
        (folder.runs[0] / "metrics.json").unlink()
        folder.eval()
        assert folder.asked() == 0
    return folder


def questions(**changed: str) -> list[str]:
    return [changed.get(f"s{number}", f"question {number}") for number in range(ROWS)]


def shared_files(run: Path) -> list[Path]:
    return sorted(run.glob("shared/*/*.jsonl"))


def own_bytes(run: Path) -> int:
    """Bytes of journals that no other run shares."""
    return sum(path.stat().st_size for path in run.rglob("*.jsonl") if path.stat().st_nlink == 1)


def assert_shared(run: Path, links: int = 2) -> None:
    assert [path.stat().st_nlink for path in shared_files(run)] == [links, links]
    assert own_bytes(run) < 0.05 * sum(journal_size(path) for path in shared_files(run))


_ALONE: dict[bytes, tuple[bytes, bytes]] = {}
"""the numbers of runs that asked everything themselves, by what they were made of"""


def assert_as_if_run_alone(folder: Folder, run: Path) -> None:
    """The run has the numbers of one that asked everything itself, and asks nothing more."""
    folder.asked()
    folder.eval()
    assert folder.asked() == 0
    content = b"".join((folder.path / name).read_bytes() for name in ("e.yaml", "rows.jsonl", "target.py"))
    if content not in _ALONE:
        folder.eval("--fresh", "--runs-dir", "alone")
        _ALONE[content] = numbers(next((folder.path / "alone/e").iterdir()))
    assert numbers(run) == _ALONE[content]


def test_rows_that_are_added_cost_what_they_are(folder: Folder) -> None:
    folder.write([*questions(), "question, new"])
    plan = f"{ROWS + 1} trials of {ROWS + 1} samples: {ROWS} reused, 1 to run (1 row new); {ROWS} outputs from e/"
    assert plan in folder.eval("--dry-run")
    assert len(folder.runs) == 1
    assert plan in folder.eval()
    assert folder.asked() == 1
    lender, run = folder.runs
    assert_shared(run)
    assert lines(run / "outputs.jsonl")[0]["sample"] == f"s{ROWS}"
    trials = list(RunView(RunDir(run)).trials())
    assert {trial.output.source for trial in trials if trial.output.sample != f"s{ROWS}"} == {f"e/{lender.name}"}
    assert_as_if_run_alone(folder, run)


def test_a_changed_row_leaves_its_old_output_out(folder: Folder) -> None:
    folder.write(questions(s7="question, changed"))
    assert "1 to run (1 row changed)" in folder.eval()
    assert folder.asked() == 1
    run = folder.runs[-1]
    assert_shared(run)
    assert len(list(RunView(RunDir(run)).everything())) == ROWS
    shown = holdfast("show", run, "s7", cwd=folder.path).stdout
    assert "question, changed" in shown
    assert f"{ROWS} outputs" in holdfast("repair", run, cwd=folder.path).stdout
    assert_as_if_run_alone(folder, run)


def test_a_grader_that_is_added_grades_and_asks_nothing(folder: Folder) -> None:
    folder.write(questions(), graders=[*EVAL["graders"], {"type": "text", "name": "long", "contains": "xxx"}])
    assert f"{ROWS} to grade" in folder.eval()
    assert folder.asked() == 0
    run = folder.runs[-1]
    assert [path.stat().st_nlink for path in shared_files(run)] == [2, 2]
    assert len(lines(run / "grades.jsonl")) == ROWS
    assert not (run / "outputs.jsonl").exists()
    assert_as_if_run_alone(folder, run)


def test_other_rows_are_copied_where_few_are_the_same(folder: Folder) -> None:
    folder.write(questions()[: ROWS // 2])
    folder.eval()
    assert folder.asked() == 0
    assert shared_files(folder.runs[-1]) == []
    assert len(lines(folder.runs[-1] / "outputs.jsonl")) == ROWS // 2


def test_three_runs_share_one_file(folder: Folder) -> None:
    folder.write([*questions(), "question, second"])
    folder.eval()
    folder.write([*questions(), "question, second", "question, third"])
    assert f"{ROWS + 1} outputs from" in folder.eval()
    assert folder.asked() == 2
    first, second, third = folder.runs
    assert {path.stat().st_nlink for path in shared_files(third) if path.stat().st_size > 1 << 20} == {3}
    shutil.rmtree(first)
    shutil.rmtree(second)
    sources = {trial.output.source for trial in RunView(RunDir(third)).trials()}
    assert f"e/{first.name}" in sources
    assert_as_if_run_alone(folder, third)


def grade_again(folder: Folder, lender: Path) -> None:
    holdfast("grade", lender, "--again", cwd=folder.path)


def damage_and_repair(folder: Folder, lender: Path) -> None:
    """A line that the lender appended after it was shared is damaged, and set aside by replacing the file."""
    with (lender / "outputs.jsonl").open("ab") as file:
        file.write(b"not a line of ours\n")
    holdfast("repair", lender, cwd=folder.path)


def append_more(folder: Folder, lender: Path) -> None:
    """A lender that goes on: its new lines have keys of the borrower, and do not count there."""
    sound = [line.data for line in scan(lender / "outputs.jsonl")]
    repeated = {**json.loads(sound[0]), "output": "changed later"}
    del repeated["sum"]
    with (lender / "outputs.jsonl").open("ab") as file:
        file.write(seal(json.dumps(repeated, separators=(",", ":")).encode()))


def archive(folder: Folder, lender: Path) -> None:
    folder.write(questions())
    folder.eval("--fresh")
    folder.asked()


def remove(folder: Folder, lender: Path) -> None:
    shutil.rmtree(lender)


@pytest.mark.parametrize("happening", [grade_again, damage_and_repair, append_more, archive, remove])
def test_the_borrower_keeps_what_it_counted_whatever_happens_to_the_lender(folder: Folder, happening: Any) -> None:
    rows = [*questions(), "question, new"]
    folder.write(rows)
    folder.eval()
    lender, run = folder.runs
    before = metrics_bytes(run), (run / "results.json").read_bytes()
    happening(folder, lender)
    folder.write(rows)
    (run / "metrics.json").unlink()  # so that everything is read again
    folder.asked()
    folder.eval()
    assert folder.asked() == 0
    assert (metrics_bytes(run), (run / "results.json").read_bytes()) == before
    assert "nothing to repair" in holdfast("repair", run, cwd=folder.path).stdout


def test_a_damaged_line_is_done_again_and_left_to_its_owner(folder: Folder) -> None:
    folder.write([*questions(), "question, new"])
    folder.eval()
    lender, run = folder.runs
    shared = next(path for path in shared_files(run) if path.name.startswith("outputs"))
    data = bytearray(shared.read_bytes())
    data[data.index(b"xxxx")] ^= 1
    with shared.open("r+b") as file:  # the same file in both runs
        file.write(data)
    (run / "metrics.json").unlink()
    folder.asked()
    assert "its work counts as not done here" in folder.eval()
    assert folder.asked() == 1
    assert shared.read_bytes() == bytes(data)
    assert metrics(run)["coverage"] == 1
    assert "a damaged line" in holdfast("repair", lender, cwd=folder.path).stdout


def test_a_damaged_line_that_a_published_index_names_is_done_again_after_a_repair(folder: Folder) -> None:
    cached = {"HOLDFAST_INDEX_BYTES": "1"}
    folder.write([*questions(), "question, new"])
    for _ in range(2):
        holdfast("eval", "e.yaml", cwd=folder.path, env=cached)
        (folder.runs[-1] / "metrics.json").unlink()
    run = folder.runs[-1]
    assert published(run).exists()
    shared = next(path for path in shared_files(run) if path.name.startswith("outputs"))
    data = bytearray(shared.read_bytes())
    data[data.index(b"xxxx", len(data) // 2)] ^= 1  # beyond what is compared when the index is opened
    with shared.open("r+b") as file:
        file.write(data)
    folder.asked()
    stopped = holdfast("eval", "e.yaml", cwd=folder.path, env=cached, check=3)
    assert "holdfast repair" in stopped.stdout + stopped.stderr
    assert "a damaged line" in holdfast("repair", run, cwd=folder.path, env=cached).stdout
    holdfast("eval", "e.yaml", cwd=folder.path, env=cached)
    assert folder.asked() == 1
    assert metrics(run)["coverage"] == 1


def test_a_lender_that_is_being_written_is_copied(folder: Folder) -> None:
    slow = "import time\n" + TARGET.replace("    return", "    time.sleep(60 if 'slow' in prompt else 0)\n    return")
    (folder.path / "target.py").write_text(slow)
    folder.write([*questions(), "slow"])
    writer = start("eval", "e.yaml", cwd=folder.path)
    try:
        wait_for(lambda: len(folder.runs) == 2 and (folder.runs[-1] / "outputs.jsonl").exists(), "its outputs")
        wait_for(lambda: sum(line.sound for line in scan(folder.runs[-1] / "outputs.jsonl")) == ROWS, "all but one")
        wait_for((folder.path / "asked").exists, "the slow question")
        folder.asked()
        folder.write(questions())
        folder.eval()
        assert shared_files(folder.runs[-1]) == []
        assert folder.asked() == 0
    finally:
        writer.kill()
        writer.communicate()


def test_workers_use_what_is_shared(folder: Folder) -> None:
    folder.write([*questions(), *[f"question, new {number}" for number in range(5)]])
    folder.eval("--workers", "2")
    assert folder.asked() == 5
    run = folder.runs[-1]
    assert_shared(run)
    assert_as_if_run_alone(folder, run)


@needs_strace
@pytest.mark.parametrize("call", ["link", "fdatasync", "fsync"])
def test_a_process_killed_while_it_shares_resumes(folder: Folder, call: str) -> None:
    folder.write(questions(s3="question, changed"))
    for when in (1, 2, 3):
        fault = f"{call}:signal=SIGKILL:when={when}"
        holdfast_with_faults("eval", "e.yaml", faults=[fault], cwd=folder.path, check=None)
    folder.eval()
    run = folder.runs[-1]
    assert_shared(run)
    assert len(list(RunView(RunDir(run)).everything())) == ROWS
    assert_as_if_run_alone(folder, run)


@pytest.mark.parametrize("reason", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_a_journal_that_cannot_be_linked_is_copied(
    reason: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "outputs.jsonl"
    journal.write_bytes(b"counted\nappended later\n")

    def fail(*_: object) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "link", fail)
    journal.chmod(0o664)
    place = share(journal, 8, "outputs", 0, tmp_path)
    assert journal.stat().st_mode & 0o777 == 0o664, "nobody else has it"
    assert place.read_bytes() == b"counted\n"
    assert end_of(place) == 8
    assert [line.data for line in scan(place)] == [b"counted"]


@pytest.mark.parametrize(
    ("umask", "sealed", "mode"), [(0o002, 0o444, 0o664), (0o022, 0o444, 0o644), (0o002, 0o400, 0o600)]
)
def test_a_journal_gets_back_the_rights_of_a_new_file(tmp_path: Path, umask: int, sealed: int, mode: int) -> None:
    journal = tmp_path / "outputs.jsonl"
    journal.write_bytes(b"counted\n")
    journal.chmod(sealed)
    before = os.umask(umask)
    try:
        unseal(journal)
    finally:
        os.umask(before)
    assert journal.stat().st_mode & 0o777 == mode
    assert [*tmp_path.iterdir()] == [journal]


@needs_root
def test_a_colleague_goes_on_in_a_copy_of_a_journal() -> None:
    with tempfile.TemporaryDirectory() as folder:  # others may not enter pytest's
        journal = Path(folder) / "outputs.jsonl"
        journal.write_bytes(b"counted\n")
        journal.chmod(0o444)
        Path(folder).chmod(0o777)
        os.seteuid(65534)
        try:
            unseal(journal)
            with journal.open("ab") as file:
                file.write(b"more\n")
        finally:
            os.seteuid(0)
        assert journal.read_bytes() == b"counted\nmore\n" and journal.stat().st_uid == 65534


only_published = pytest.mark.parametrize("finished", ["1000000"], indirect=True, ids=["index published"])


def index_of(index: RunIndex) -> Any:
    spent = index.spent()
    return outputs_in(index), verdicts_in(index), index.attempts, spent.tokens, spent.periods()


def published(run: Path) -> Path:
    """Return the published index of a run."""
    head = json.loads((run / ".index" / "journals.head").read_bytes())
    return run / ".index" / str(head["file"])


@only_published
def test_a_run_that_ended_has_a_published_index(finished: Path) -> None:
    (run,) = map(RunDir, Folder(finished).runs)
    index = run.load(repair=False)
    assert index.published == published(run.path) and index.published_bytes == journals_size(run)
    assert index_of(index) == index_of(run.load(repair=False, verify=True))


@only_published
def test_a_chain_of_runs_shares_one_published_index(folder: Folder) -> None:
    lent = published(folder.runs[0]).stat().st_ino
    rows = questions(s7="question, changed")
    for number in range(3):
        rows = [*rows, f"question, added {number}"]
        folder.write(rows)
        folder.eval()
        assert folder.asked() == (2 if number == 0 else 1)
        run = RunDir(folder.runs[-1])
        assert published(run.path).stat().st_ino == lent
        index = run.load(repair=False)
        assert index.published is not None and journals_size(run) - index.published_bytes < 100_000
        assert index_of(index) == index_of(run.load(repair=False, verify=True))
    shutil.rmtree(folder.runs[0])
    assert run.load(repair=False).published == published(run.path)
    assert_as_if_run_alone(folder, run.path)


@only_published
def test_a_lent_index_that_is_damaged_is_not_used(folder: Folder) -> None:
    folder.write([*questions(), "question, new"])
    folder.eval()
    run = RunDir(folder.runs[-1])
    expected = index_of(run.load(repair=False))
    lent = published(run.path)
    damaged = bytearray(lent.read_bytes())
    damaged[-1] ^= 1
    lent.unlink()
    lent.write_bytes(damaged)
    index = run.load(repair=False)
    assert index.published != lent
    assert index_of(index) == expected
    run.load(repair=True)
    assert run.load(repair=False).published == published(run.path) != lent, "published again, as a whole"


@pytest.mark.parametrize("index_bytes", [None, "1000000"], ids=["index read", "index published"])
def test_rows_that_change_for_graders_alone_are_copied_and_ask_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index_bytes: str | None
) -> None:
    if index_bytes is not None:
        monkeypatch.setenv("HOLDFAST_INDEX_BYTES", index_bytes)
    folder = Folder(tmp_path)
    script = tmp_path / "answer.sh"
    script.write_text('#!/bin/sh\necho "$1" >> asked\nprintf "%s %09000d" "$1" 0\n')
    script.chmod(0o755)
    keys = {
        "target": {"command": ["./answer.sh", "{{ prompt }}"], "proxy": False},
        "graders": [{"type": "text", "name": "right", "contains": "{{ label }}"}],
    }

    def write(**labels: str) -> None:
        folder.write(questions(), **keys)
        rows = [{**row, "label": labels.get(row["id"], "question")} for row in lines(tmp_path / "rows.jsonl")]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    write()
    folder.eval()
    assert folder.asked() == ROWS
    write(s3="answer", s70="answer")
    plan = folder.eval("--dry-run")
    assert f"{ROWS - 2} reused, 2 to grade (2 rows changed in fields that only graders read)" in plan
    folder.eval()
    assert folder.asked() == 0
    borrower = folder.runs[-1]
    assert_shared(borrower)
    assert [line["sample"] for line in lines(borrower / "outputs.jsonl")] == ["s3", "s70"]
    assert metrics(borrower)["metrics"]["right"]["failed"] == 2
    shutil.rmtree(folder.runs[0])
    assert "to run" not in folder.eval("--dry-run") and folder.asked() == 0
    trials = {trial.output.sample: trial for trial in RunView(RunDir(borrower)).trials()}
    assert (
        len(trials) == ROWS and trials["s3"].grades[0].status == "failed" and trials["s3"].fields["label"] == "answer"
    )
