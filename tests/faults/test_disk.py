"""A disk that fails costs at most the requests in flight, and what it damaged is found, told and done again."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.breaking import (
    assert_each_once,
    assert_same_numbers,
    enlarge,
    holdfast_with_faults,
    journal_files,
    kept,
    needs_root,
    needs_strace,
    nothing_left,  # noqa: F401 - a fixture
    place_of,
    small_disk,
)
from tests.support.running import Server, holdfast, lines, run_dir, write_eval

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS = 60
CONCURRENCY = 8
LATENCY = 0.05
"""seconds: verdicts are synced that often, so a run is under way when the third sync fails"""
KEYS: dict[str, Any] = {"rows": ROWS, "limits": {"concurrency": CONCURRENCY}}


HARMLESS = {
    "short write": "write:retval=3:when=3",
    "ENOSPC": "write:error=ENOSPC:when=3",
    "EIO": "write:error=EIO:when=3",
}


@needs_strace
@pytest.mark.parametrize(
    ("fault", "name"),
    [("short write", "outputs"), ("short write", "grades"), ("ENOSPC", "outputs"), ("EIO", "grades")],
)
def test_a_write_that_fails_once_is_truncated_and_repeated(
    fault: str, name: str, tmp_path: Path, provider: Server, calm: Path
) -> None:
    provider.control(latency=LATENCY)
    eval_file = write_eval(tmp_path, provider.base_url, **KEYS)
    run = place_of(eval_file, tmp_path)
    file = run / f"{name}.jsonl"
    holdfast_with_faults("eval", eval_file, file=file, faults=[HARMLESS[fault]], cwd=tmp_path, check=0)
    assert provider.requests == ROWS
    assert journal_files(run, name) == [file]
    assert_each_once(run, ROWS)
    assert_same_numbers(run, calm)


@pytest.mark.parametrize("name", ["outputs", "grades"])
def test_a_short_write_is_truncated_to_whole_lines(name: str, tmp_path: Path, provider: Server, calm: Path) -> None:
    eval_file = write_eval(tmp_path, provider.base_url, **KEYS)
    if name == "grades":
        holdfast("eval", eval_file, "--skip-graders", cwd=tmp_path)
    limit = (calm / f"{name}.jsonl").stat().st_size // 2
    stopped = holdfast_with_faults("eval", eval_file, faults=[], largest_file=limit, cwd=tmp_path, check=3)
    run = run_dir(tmp_path)
    assert f"cannot write {run.relative_to(tmp_path)}/{name}.jsonl: No space left on device" in stopped.stdout
    data = (run / f"{name}.jsonl").read_bytes()
    assert len(data) < limit and data[-1:] in (b"", b"\n")
    assert "nothing to repair" in holdfast("repair", run, cwd=tmp_path).stdout
    asked, safe = provider.requests, len(kept(run))
    holdfast("eval", eval_file, cwd=tmp_path)
    assert provider.requests == asked + ROWS - safe
    assert_each_once(run, ROWS)
    assert_same_numbers(run, calm)


STOPPING = {
    "no space": ("write:error=ENOSPC:when=3+", "No space left on device"),
    "write errors": ("write:error=EIO:when=3+", "Input/output error"),
    "short writes": ("write:retval=3:when=3+", "No space left on device"),
    "sync errors": ("fdatasync:error=EIO:when=3+", "Input/output error"),
}


@needs_strace
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("no space", "outputs"),
        ("no space", "grades"),
        ("write errors", "outputs"),
        ("short writes", "grades"),
        ("sync errors", "outputs"),
    ],
)
def test_a_disk_that_keeps_failing_stops_the_run_which_resumes_later(
    fault: str, name: str, tmp_path: Path, provider: Server, calm: Path
) -> None:
    provider.control(latency=LATENCY)
    eval_file = write_eval(tmp_path, provider.base_url, **KEYS)
    run = place_of(eval_file, tmp_path)
    what, message = STOPPING[fault]
    # A file under workers/ takes over after a failed sync, so syncs fail wherever they are made.
    file = None if fault == "sync errors" else run / f"{name}.jsonl"
    stopped = holdfast_with_faults("eval", eval_file, file=file, faults=[what], cwd=tmp_path, check=3)
    assert f"stopped: cannot write {run.relative_to(tmp_path)}/" in stopped.stdout
    assert message in stopped.stdout
    assert "Then run the same command again: it resumes from here." in stopped.stdout
    assert not (run / "metrics.json").exists()
    asked, safe = provider.requests, len(kept(run))
    assert asked < ROWS, "it went on asking although nothing could be kept"
    assert asked - safe <= CONCURRENCY

    holdfast("eval", eval_file, cwd=tmp_path)
    assert provider.requests == asked + ROWS - safe
    assert_each_once(run, ROWS)
    assert_same_numbers(run, calm)


@needs_strace
@pytest.mark.parametrize(("error", "name"), [("EIO", "outputs"), ("ENOSPC", "grades")])
def test_after_a_failed_sync_writing_continues_in_a_new_file(
    error: str, name: str, tmp_path: Path, provider: Server, calm: Path
) -> None:
    provider.control(latency=LATENCY)
    eval_file = write_eval(tmp_path, provider.base_url, **KEYS)
    run = place_of(eval_file, tmp_path)
    fault = f"fdatasync:error={error}:when=3"
    seen = holdfast_with_faults(
        "eval", eval_file, file=run / f"{name}.jsonl", faults=[fault], cwd=tmp_path, check=0
    ).stderr
    retired, spare = journal_files(run, name)
    assert f"sync of {retired.relative_to(tmp_path)} failed" in seen
    assert f"notice sync of {retired.relative_to(tmp_path)} failed" in (run / "run.log").read_text()
    assert f"continuing in {spare.relative_to(tmp_path)}" in seen
    assert spare.parent.parent == run / "workers"
    assert lines(retired) and lines(spare), "the good part stays in the one, the rest is in the other"
    assert provider.requests == ROWS
    assert_each_once(run, ROWS)
    assert_same_numbers(run, calm)

    for finished in (run / "metrics.json", run / "results.json"):
        finished.unlink()
    holdfast("eval", eval_file, cwd=tmp_path)
    assert provider.requests == ROWS
    assert_same_numbers(run, calm)


@needs_strace
def test_a_kill_after_a_failed_sync_does_not_make_unsynced_lines_count_twice(
    tmp_path: Path, provider: Server, calm: Path
) -> None:
    """The file is cut back before its lines are written elsewhere; here the kill comes right before the cut."""
    eval_file = write_eval(tmp_path, provider.base_url, **KEYS)
    run = place_of(eval_file, tmp_path)
    faults = ["fdatasync:error=EIO:when=3", "ftruncate:signal=SIGKILL:when=1"]
    holdfast_with_faults("eval", eval_file, file=run / "outputs.jsonl", faults=faults, cwd=tmp_path, check=-9)
    asked, there = provider.requests, len(kept(run))
    holdfast("eval", eval_file, cwd=tmp_path)
    assert provider.requests == asked + ROWS - there
    assert_each_once(run, ROWS)
    assert_same_numbers(run, calm)


@needs_root
def test_a_full_disk_stops_the_run_which_resumes_when_there_is_room(
    tmp_path: Path, provider: Server, calm: Path
) -> None:
    provider.control(latency=0.01)
    eval_file = write_eval(tmp_path, provider.base_url, **KEYS)
    with small_disk(tmp_path / "runs", "28k"):
        stopped = holdfast("eval", eval_file, cwd=tmp_path, check=3)
        assert ".jsonl: No space left on device" in stopped.stdout
        assert "disk space" in stopped.stdout
        run = run_dir(tmp_path)
        asked, safe = provider.requests, len(kept(run))
        assert (run / "outputs.jsonl").read_bytes().endswith(b"\n"), "what had no room was cut back"
        assert 0 < safe < asked < ROWS
        assert asked - safe <= CONCURRENCY

        again = holdfast("eval", eval_file, cwd=tmp_path, check=3)
        assert "disk space" in again.stdout + again.stderr
        asked, safe = provider.requests, len(kept(run))

        enlarge(tmp_path / "runs", "4m")
        holdfast("eval", eval_file, cwd=tmp_path)
        assert provider.requests == asked + ROWS - safe
        assert_each_once(run, ROWS)
        assert_same_numbers(run, calm)


@needs_root
def test_a_disk_too_full_for_the_report_keeps_the_run_unfinished(tmp_path: Path, provider: Server, calm: Path) -> None:
    eval_file = write_eval(tmp_path, provider.base_url, **KEYS)
    with small_disk(tmp_path / "runs", "4m"):
        holdfast("eval", eval_file, "--skip-graders", cwd=tmp_path)
        run = run_dir(tmp_path)
        ballast = tmp_path / "runs" / "ballast"
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        os.truncate(ballast, ballast.stat().st_size - 9 * 4096)  # room for the grades, not for the report
        stopped = holdfast("eval", eval_file, cwd=tmp_path, check=3)
        assert "No space left on device" in stopped.stdout
        assert "run the same command again" in stopped.stdout
        assert not (run / "metrics.json").exists()
        assert len(kept(run, "grades")) == ROWS
        ballast.unlink()
        holdfast("eval", eval_file, cwd=tmp_path)
        assert provider.requests == ROWS
        assert_each_once(run, ROWS)
        assert_same_numbers(run, calm)


@contextmanager
def disk_that_loses_pages(folder: Path) -> Iterator[Path]:
    """An ext4 on `folder/runs` whose backing file lies on a tmpfs too small for it, in the folder that is returned.

    Writes succeed, then their sync really fails, while the page cache goes on showing what the disk does not hold.
    """
    with small_disk(folder / "back", "6m"):
        image, mounted = folder / "back" / "image", folder / "runs"
        mounted.mkdir()
        subprocess.run(["truncate", "-s", "64M", str(image)], check=True)
        subprocess.run(["mkfs.ext4", "-q", "-J", "size=1", "-b", "1024", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop,errors=continue", str(image), str(mounted)], check=True)
        try:
            yield folder / "back"
        finally:
            subprocess.run(["umount", "--lazy", str(mounted)], check=True)


@needs_root
def test_lines_lost_by_a_failed_sync_are_never_counted(tmp_path: Path, provider: Server) -> None:
    answer, rows = "x" * 20_000, 400
    provider.control(latency=0.005, answer=answer)
    eval_file = write_eval(tmp_path, provider.base_url, rows=rows, limits={"concurrency": CONCURRENCY})
    with disk_that_loses_pages(tmp_path) as backing:
        stopped = holdfast("eval", eval_file, cwd=tmp_path, check=3)
        assert "Then run the same command again" in stopped.stdout
        counted = int(stopped.stdout.split(f" of {rows} trials have an output")[0].split()[-1])
        asked = provider.requests
        assert 0 < counted < asked < rows
        assert asked - counted <= CONCURRENCY

        enlarge(backing, "128m")
        # The file system has turned read-only. What its page cache knows better than the disk goes with the mount.
        subprocess.run(["umount", str(tmp_path / "runs")], check=True)
        fsck = subprocess.run(
            ["e2fsck", "-fy", str(backing / "image")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert fsck.returncode in (0, 1), fsck.stdout
        subprocess.run(["mount", "-o", "loop", str(backing / "image"), str(tmp_path / "runs")], check=True)
        holdfast("eval", eval_file, cwd=tmp_path)
        run = run_dir(tmp_path)
        # Some kernels' loop device calls a short write a success: then even a sync that returned 0 lost lines, and
        # it is their checksums that tell.
        found_out = sum(path.stat().st_size for path in run.glob("set-aside/outputs.jsonl"))
        assert provider.requests <= asked + rows - counted + found_out // (2 * len(answer))
        assert "nothing to repair" in holdfast("repair", run, cwd=tmp_path).stdout
        assert_each_once(run, rows)
        assert all(record["output"] == answer for record in kept(run))


# What is damaged while nobody looks.


def assert_all_there(run: Path) -> None:
    """Every sample has one output and one verdict; a verdict whose output was damaged may stand there twice."""
    assert sorted(record["sample"] for record in kept(run)) == sorted(f"s{number}" for number in range(ROWS))
    assert len(kept(run, "grades")) >= ROWS
    assert len({(record["key"], record["by"]) for record in kept(run, "grades")}) == ROWS


@pytest.fixture
def finished(tmp_path: Path, provider: Server, calm: Path) -> tuple[Path, Path]:
    """An eval and its finished run, a copy of the uninterrupted one."""
    eval_file = write_eval(tmp_path, provider.base_url, **KEYS)
    run = place_of(eval_file, tmp_path)
    shutil.copytree(calm, run)
    return eval_file, run


@pytest.fixture
def unreported(finished: tuple[Path, Path]) -> tuple[Path, Path]:
    """An eval and its run, all there but for the report."""
    for name in ("metrics.json", "results.json"):
        (finished[1] / name).unlink()
    return finished


@pytest.mark.parametrize("name", ["outputs", "grades"])
def test_a_torn_last_line_is_set_aside_reported_and_done_again(
    name: str, unreported: tuple[Path, Path], tmp_path: Path, provider: Server, calm: Path
) -> None:
    eval_file, run = unreported
    file = run / f"{name}.jsonl"
    data = file.read_bytes()
    start = data.rfind(b"\n", 0, -1) + 1
    file.write_bytes(data[:-20])
    seen = holdfast("eval", eval_file, cwd=tmp_path).stderr
    damage = f"{name}.jsonl: an unfinished last line at byte {start} was set aside; its work counts as not done"
    assert damage in seen and damage in (run / "run.log").read_text()
    assert (run / "set-aside" / file.name).read_bytes() == data[start:-20] + b"\n"
    assert provider.requests == (name == "outputs")
    assert_all_there(run)
    assert_same_numbers(run, calm)


@pytest.mark.parametrize("name", ["outputs", "grades"])
def test_flipped_bits_are_found_and_only_those_lines_are_done_again(
    name: str, unreported: tuple[Path, Path], tmp_path: Path, provider: Server, calm: Path
) -> None:
    eval_file, run = unreported
    file = run / f"{name}.jsonl"
    records = file.read_bytes().splitlines(keepends=True)
    chance = random.Random(1)
    hit = {0, 7, 8, ROWS - 1}
    for number in hit:
        line = bytearray(records[number])
        line[chance.randrange(len(line) - 1)] ^= 1 << chance.randrange(7)
        records[number] = bytes(line)
    assert sum(line.count(b"\n") for line in records) == ROWS, "a flip that makes a newline damages two lines"
    file.write_bytes(b"".join(records))
    damaged = file.read_bytes()

    looked = holdfast("repair", run, "--dry-run", cwd=tmp_path, check=1).stdout
    assert looked.count(f"{name}.jsonl: a damaged line at byte") == len(hit)
    assert file.read_bytes() == damaged, "a dry run changes nothing"

    seen = holdfast("eval", eval_file, cwd=tmp_path).stderr
    assert seen.count(f"{name}.jsonl: a damaged line at byte") == len(hit)
    assert (run / "set-aside" / file.name).read_bytes() == b"".join(records[number] for number in sorted(hit))
    assert provider.requests == (len(hit) if name == "outputs" else 0)
    assert_all_there(run)
    assert_same_numbers(run, calm)


def test_repair_sets_damage_aside_and_the_next_command_does_that_work_again(
    finished: tuple[Path, Path], tmp_path: Path, provider: Server, calm: Path
) -> None:
    eval_file, run = finished
    assert "nothing to repair" in holdfast("repair", run, cwd=tmp_path).stdout

    records = (run / "outputs.jsonl").read_bytes().splitlines(keepends=True)
    records[5] = records[5].replace(b"question", b"Question")
    (run / "outputs.jsonl").write_bytes(b"".join(records)[:-5])
    looked = holdfast("repair", run, "--dry-run", cwd=tmp_path, check=1).stdout
    assert f"{ROWS - 2} outputs and {ROWS} grades are sound" in looked
    assert f"2 of the {ROWS} outputs that metrics.json counts are missing" in looked
    assert (run / "metrics.json").exists()

    stdout = holdfast("repair", run, cwd=tmp_path).stdout
    assert "outputs.jsonl: a damaged line at byte" in stdout
    assert "outputs.jsonl: an unfinished last line at byte" in stdout
    assert "removed metrics.json" in stdout
    assert str(run / "set-aside") in stdout
    assert "nothing to repair" in holdfast("repair", run, cwd=tmp_path).stdout
    assert provider.requests == 0, "repair asks nobody"

    holdfast("eval", eval_file, cwd=tmp_path)
    assert provider.requests == 2
    assert_same_numbers(run, calm)


@pytest.mark.parametrize("cut", ["half of the outputs", "all outputs", "half of the grades"])
def test_lines_that_are_gone_from_a_finished_run_are_noticed_everywhere(
    cut: str, finished: tuple[Path, Path], tmp_path: Path, provider: Server, calm: Path
) -> None:
    eval_file, run = finished
    file = run / ("grades.jsonl" if "grades" in cut else "outputs.jsonl")
    records = file.read_bytes().splitlines(keepends=True)
    kept = 0 if "all" in cut else ROWS // 2
    file.write_bytes(b"".join(records[:kept])) if kept else file.unlink()

    looked = holdfast("repair", run.name.rpartition("-")[2], "-d", cwd=tmp_path, check=1).stdout
    if "outputs" in cut:
        assert f"outputs.jsonl: {ROWS - kept} of the {ROWS} outputs that metrics.json counts are missing" in looked
    else:
        assert "the journals are shorter than when metrics.json was written" in looked
    for verb, *options in (("export", "--to", "csv"), ("show",), ("gate", "--min", "coverage=1")):
        done = holdfast(verb, run, *options, cwd=tmp_path)
        assert "have become shorter since its report was made" in done.stderr
    if "all outputs" in cut:
        shown = holdfast("show", run, "s0", cwd=tmp_path).stdout
        assert "damaged: the output is missing" in shown and "pending" not in shown
    (listed,) = json.loads(holdfast("cache", "ls", "--json", cwd=tmp_path).stdout)
    assert (listed["status"], listed["done"]) == ("damaged", kept if "outputs" in cut else ROWS)

    for again in ([], ["--dry-run"], ["--workers", "2"]):
        refused = holdfast("eval", eval_file, *again, cwd=tmp_path, check=3)
        told = refused.stdout + refused.stderr
        assert "is finished, and its journals have become shorter" in told and "Traceback" not in told
    assert provider.requests == 0, "nothing is paid for twice without a question"
    (command,) = re.findall(r"`holdfast repair (\S+)`", told)
    holdfast("repair", command, cwd=tmp_path)
    holdfast("eval", eval_file, cwd=tmp_path)
    assert provider.requests == (ROWS - kept if "outputs" in cut else 0)
    assert_all_there(run)
    assert_same_numbers(run, calm)


def test_a_manifest_that_is_gone_is_written_again_by_the_command_that_made_the_run(
    tmp_path: Path, provider: Server
) -> None:
    eval_file = write_eval(tmp_path, provider.base_url, **KEYS)
    holdfast("eval", eval_file, cwd=tmp_path)
    run = run_dir(tmp_path)
    provider.reset()
    before = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").unlink()
    assert "manifest.json is missing" in holdfast("repair", run, "--dry-run", cwd=tmp_path, check=1).stdout
    refused = holdfast("export", run, "--to", "csv", cwd=tmp_path, check=2)
    assert "has no manifest.json" in refused.stderr and "holdfast eval" in refused.stderr
    holdfast("eval", eval_file, cwd=tmp_path)
    after = json.loads((run / "manifest.json").read_text())
    assert {**after, "created": before["created"]} == before
    assert provider.requests == 0
    holdfast("export", run, "--to", "csv", cwd=tmp_path)


def test_repair_works_inside_a_run_and_rejects_other_folders(unreported: tuple[Path, Path], tmp_path: Path) -> None:
    _, run = unreported
    assert "nothing to repair" in holdfast("repair", ".", cwd=run).stdout
    refused = holdfast("repair", tmp_path, cwd=tmp_path, check=2)
    assert "is not a run directory" in refused.stderr


def test_repair_reports_errors_of_the_disk(unreported: tuple[Path, Path], tmp_path: Path) -> None:
    _, run = unreported
    (run / "outputs.jsonl").unlink()
    (run / "outputs.jsonl").mkdir()
    refused = holdfast("repair", run, cwd=tmp_path, check=3)
    assert f"{run / 'outputs.jsonl'}: a folder, not a file" in refused.stderr
    (run / "outputs.jsonl").rmdir()
    (run / "outputs.jsonl").symlink_to("outputs.jsonl")
    refused = holdfast("repair", run, cwd=tmp_path, check=3)
    assert f"cannot repair {run / 'outputs.jsonl'}: Too many levels of symbolic links" in refused.stderr
    assert "Repair the disk first" in refused.stderr


@pytest.mark.parametrize("content", [b"", b"\x00\xff garbage", b"[]", b'{"schemaVersion": "1.0"}'])
def test_a_manifest_that_is_garbage_is_refused_and_can_be_repaired(
    content: bytes, unreported: tuple[Path, Path], tmp_path: Path, provider: Server, calm: Path
) -> None:
    eval_file, run = unreported
    (run / "manifest.json").write_bytes(content)
    refused = holdfast("eval", eval_file, cwd=tmp_path, check=2)
    assert f"{run.relative_to(tmp_path)}/manifest.json: not a manifest" in refused.stderr
    assert f"holdfast repair {run.relative_to(tmp_path)}" in refused.stderr
    assert "Traceback" not in refused.stderr

    assert "manifest.json" in holdfast("repair", run, "--dry-run", cwd=tmp_path, check=1).stdout
    assert (run / "manifest.json").read_bytes() == content
    assert "manifest.json" in holdfast("repair", run, cwd=tmp_path).stdout
    assert (run / "set-aside" / "manifest.json").read_bytes() == content
    holdfast("eval", eval_file, cwd=tmp_path)
    assert provider.requests == 0
    assert_same_numbers(run, calm)
