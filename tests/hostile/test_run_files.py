"""Broken or hostile files of a run damage only that run, are named, and never make a command hang."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from holdfast.errors import RunFileError
from holdfast.store import files, lines
from holdfast.store.files import remove_leftovers, temporary_folder
from holdfast.store.lines import LineRef, find_lines, read_blocks, scan
from tests.hostile.inputs import DAMAGED, FILES, SPECIAL, assert_harmless, hostile_eval, put
from tests.support.running import HOLDFAST, environment, holdfast, wait_for
from tests.support.specs import Ended, command, write_spec
from tests.support.viewing import viewer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Run = Callable[[tuple[str, ...]], Ended]

SECONDS = 300
"""after which a command hangs: a loaded machine is slow, not wrong"""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two finished runs, one of which has an error."""
    folder = tmp_path_factory.mktemp("runs")
    holdfast("eval", hostile_eval(folder, "fine"), "--accept-errors", cwd=folder)
    write_spec(
        folder, name="other", target={"python": "agent.py:reply"}, samples=[{"id": "a", "question": "?"}], graders=None
    )
    holdfast("eval", "eval.yaml", cwd=folder)
    hostile_eval(folder, "fine")
    return folder


@pytest.fixture
def place(sound: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return shutil.copytree(sound, tmp_path / "copy")


def run_of(folder: Path) -> Path:
    (path,) = (path for path in (folder / "runs" / "e").iterdir() if path.is_dir())
    return path


READING: dict[str, tuple[str, ...]] = {
    "show": ("show", "RUN"),
    "show a sample": ("show", "RUN", "0"),
    "show JSON": ("show", "RUN", "--json"),
    "compare": ("compare", "RUN", "RUN"),
    "gate": ("gate", "RUN", "--min", "score=0"),
    "export": ("export", "RUN", "--to", "csv"),
    "html": ("export", "RUN", "--to", "html"),
    "status": ("status", "RUN"),
    "logs": ("logs", "RUN"),
    "batches": ("batches", "RUN"),
    "repair": ("repair", "RUN", "--dry-run"),
    "dry run": ("eval", "eval.yaml", "--dry-run"),
    "ls": ("ls",),
    "cache": ("cache", "ls"),
}
WRITING: dict[str, tuple[str, ...]] = {
    "eval": ("eval", "eval.yaml", "--accept-errors"),
    "grade": ("grade", "RUN", "--accept-errors"),
    "repair": ("repair", "RUN"),
}


@pytest.fixture
def run(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run commands in this process, each of which has to end within a time that only a hang takes."""

    def ring(*_: object) -> None:
        raise TimeoutError("the command hangs")

    def start(arguments: tuple[str, ...]) -> Ended:
        words = [str(run_of(place)) if word == "RUN" else word for word in arguments]
        signal.alarm(SECONDS)
        done = command(monkeypatch, capsys, place, *words)
        signal.alarm(0)
        assert "Traceback" not in done.err and "this is a bug" not in done.err, f"{words}: {done.err}"
        assert done.code in (0, 1, 2, 3), f"{words}: {done}"
        assert_harmless(done.out + done.err)
        if done.code in (2, 3) and "not finished" not in done.out:
            assert "error: " in done.err or "run" in done.out, f"{words}: {done}"
        return done

    before = signal.signal(signal.SIGALRM, ring)
    yield start
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


CASES = [
    *((kind, file) for kind in ("pipe", "device", "nested", "other_types") for file in FILES),
    *((kind, file) for kind in ("folder", "socket_file", "loop") for file in ("manifest.json", "outputs.jsonl")),
    *((kind, file) for kind in ("empty", "garbage") for file in ("manifest.json", "metrics.json", "grades.jsonl")),
    *(("huge", file) for file in ("manifest.json", "metrics.json")),
]


@pytest.mark.parametrize(("kind", "file"), CASES)
def test_every_reading_command_ends_with_a_clear_error_or_without_the_file(
    place: Path, run: Run, kind: str, file: str
) -> None:
    put(run_of(place) / file, {**SPECIAL, **DAMAGED}[kind])
    for name, arguments in READING.items():
        done = run(arguments)
        if done.code in (2, 3):
            assert "error: " in done.err and ("hint: " in done.err or kind == "loop"), f"{name}: {done.err}"
            assert file in done.err or "manifest.json" in done.err or file == "manifest.json", f"{name}: {done.err}"
    assert "other\t" in run(("ls",)).out, "the other run is listed as ever"


@pytest.mark.parametrize("file", ["manifest.json", "metrics.json", "outputs.jsonl", "grades.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "device", "nested"])
def test_a_writing_command_ends_as_well(place: Path, run: Run, kind: str, file: str) -> None:
    for arguments in WRITING.values():
        put(run_of(place) / file, {**SPECIAL, **DAMAGED}[kind])
        run(arguments)


@pytest.mark.parametrize("kind", SPECIAL)
def test_an_error_names_the_file_and_what_to_do(place: Path, run: Run, kind: str) -> None:
    put(run_of(place) / "outputs.jsonl", SPECIAL[kind])
    done = run(("export", "RUN", "--to", "csv"))
    assert done.code in (2, 3) and str(run_of(place) / "outputs.jsonl") in done.err
    if kind != "loop":
        assert (
            f"hint: It is not Holdfast's. Remove it, or restore the run from a copy: rm -r {run_of(place)}" in done.err
        )


def test_a_deeply_nested_line_is_set_aside(place: Path, run: Run) -> None:
    path = run_of(place) / "outputs.jsonl"
    sound = path.read_bytes()
    DAMAGED["nested"](path)
    path.write_bytes(sound + path.read_bytes())
    assert run(("repair", "RUN", "--dry-run")).code == 1
    assert "set aside" in run(("repair", "RUN")).out
    assert path.read_bytes() == sound


def test_a_run_with_a_pipe_is_listed_as_damaged(place: Path, run: Run) -> None:
    put(run_of(place) / "manifest.json", SPECIAL["pipe"])
    listed = {line.split("\t")[1]: line for line in run(("ls",)).out.splitlines()}
    assert "damaged" in listed["e"] and "finished" in listed["other"]


@pytest.mark.parametrize(
    ("kind", "file"), [("pipe", "outputs.jsonl"), ("device", "grades.jsonl"), ("nested", "results.json")]
)
def test_the_viewer_goes_on(place: Path, kind: str, file: str) -> None:
    put(run_of(place) / file, {**SPECIAL, **DAMAGED}[kind])
    run_id = run_of(place).name.rpartition("-")[2]
    with viewer(place) as pages:
        assert pages.get("/").status == 200
        pages.get(f"/run/{run_id}")
        pages.get(f"/run/{run_id}/trials")
        assert pages.get("/").status == 200


class TestLongLines:
    @pytest.fixture(autouse=True)
    def shorter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (files, lines):
            monkeypatch.setattr(module, "LONGEST_LINE", 3 << 20)

    @pytest.fixture
    def journal(self, tmp_path: Path) -> Path:
        path = tmp_path / "outputs.jsonl"
        path.write_bytes(b"x" * (1 << 20) + b"\n" + b"y" * (5 << 20))
        return path

    def test_a_line_longer_than_any_of_ours_is_an_error_with_its_place(self, journal: Path) -> None:
        readers: list[Callable[[], object]] = [
            lambda: list(scan(journal)),
            lambda: list(read_blocks(journal, 0, journal.stat().st_size)),
        ]
        for read in readers:
            with pytest.raises(RunFileError, match=r"outputs\.jsonl: the line at byte 1,048,577 is longer than 3 MB"):
                read()
        assert list(find_lines(journal, b"yy")) == [], "an unfinished line does not count"

    def test_a_line_up_to_that_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "grades.jsonl"
        path.write_bytes(b"x" * (2 << 20) + b"\n" + b"y" * (2 << 20) + b"\n")
        assert [len(line.data) for line in scan(path)] == [2 << 20, 2 << 20]
        assert len(LineRef(path, 0, 2 << 20).read()) == 2 << 20


def test_a_reading_command_that_is_interrupted_just_says_so(place: Path) -> None:
    journal = run_of(place) / "outputs.jsonl"
    put(journal, DAMAGED["huge"])  # whose lines are counted for long
    (run_of(place) / "metrics.json").unlink()
    process = subprocess.Popen([*HOLDFAST, "ls"], cwd=place, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: str(journal) in open_files(process.pid), "the journal to be read")
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=SECONDS)[1].strip() == "interrupted"
        assert process.returncode == 130
    finally:
        process.kill()
        process.wait()


def open_files(pid: int) -> list[str]:
    """The files that a process has open."""
    with suppress(psutil.Error):
        return [file.path for file in psutil.Process(pid).open_files()]
    return []


def test_every_file_of_a_private_run_is_private(tmp_path: Path) -> None:
    hostile_eval(tmp_path, "fine")
    arguments = ("eval", "eval.yaml", "--accept-errors", "--log-samples", "--workers", "2", "--export", "csv")
    holdfast(*arguments, cwd=tmp_path, env={"HOLDFAST_UMASK": "077"})
    paths = [tmp_path / "runs", *(tmp_path / "runs").rglob("*")]
    assert len(paths) > 10
    assert {path.name: oct(path.stat().st_mode & 0o077) for path in paths if path.stat().st_mode & 0o077} == {}


def test_without_holdfast_umask_files_follow_the_umask(tmp_path: Path) -> None:
    hostile_eval(tmp_path, "fine")
    shell = ["sh", "-c", 'umask 027; exec "$@"', "sh", *HOLDFAST, "eval", "eval.yaml", "--accept-errors"]
    subprocess.run(shell, cwd=tmp_path, env=environment(), check=True, capture_output=True)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert modes == {0o640}


def test_an_invalid_umask_is_an_error(tmp_path: Path) -> None:
    done = holdfast("ls", cwd=tmp_path, env={"HOLDFAST_UMASK": "rwx"}, check=2)
    assert "HOLDFAST_UMASK is 'rwx'; expected an octal number" in done.stderr


@pytest.mark.parametrize("umask", ["777", "0277", "400"])
def test_a_umask_that_locks_its_owner_out_is_an_error(tmp_path: Path, umask: str) -> None:
    done = holdfast("ls", cwd=tmp_path, env={"HOLDFAST_UMASK": umask}, check=2)
    assert f"HOLDFAST_UMASK is '{umask}': you could not read or write your own runs" in done.stderr
    assert "hint: 077 lets only you read" in done.stderr


def test_files_of_a_killed_process_are_removed_by_the_next_one(place: Path, run: Run) -> None:
    folder = run_of(place) / "export" / "csv"
    folder.mkdir(parents=True)
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone, alive, new = (
        folder / f".trials.csv.{pid}-140000-abc{number}.tmp"
        for number, pid in enumerate([ended.pid, os.getpid(), ended.pid])
    )
    for path in (gone, alive, new):
        path.write_text("sample\n")
    for path in (gone, alive):
        os.utime(path, (0, 0))
    assert run(("export", "RUN", "--to", "csv")).code == 0
    assert sorted(folder.iterdir()) == sorted([alive, new, folder / "trials.csv"]), "others may still be written"
    half = run_of(place) / "files" / f".new.{ended.pid}-140000-abc.tmp"
    half.parent.mkdir(exist_ok=True)
    half.write_text("half a file of a workspace")
    for path in (new, half):
        os.utime(path, (0, 0))
    assert run(("repair", "RUN")).code == 0
    assert not new.exists() and not half.exists() and alive.exists()


def test_a_temporary_folder_stays_while_its_process_is_alive(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with temporary_folder(tmp_path, "mlflow") as uploaded:
        gone = tmp_path / uploaded.name.replace(f".{os.getpid()}-", f".{ended.pid}-")
        (gone / "inner").mkdir(parents=True)
        for folder in (uploaded, gone):
            os.utime(folder, (0, 0))
        remove_leftovers(tmp_path)
        assert [*tmp_path.iterdir()] == [uploaded]
    assert [*tmp_path.iterdir()] == []
