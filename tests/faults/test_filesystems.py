"""Runs resume, are shared and exported on file systems that lack what ext4 has.

exFAT, by FUSE, has neither hard links nor modes, rounds times to two seconds, and, as NFS and SMB, cannot exchange two
names. XFS clones files. Where these cannot be mounted, strace refuses the same calls on whatever file system there is.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.breaking import (
    assert_each_once,
    assert_same_numbers,
    holdfast_with_faults,
    kept,
    leftovers,
    needs_root,
    needs_strace,
    nothing_left,  # noqa: F401 - a fixture
    numbers,
)
from tests.support.running import Server, holdfast, lines, run_dir, start, wait_for, write_eval

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS = 60
CONCURRENCY = 4
KEYS: dict[str, Any] = {"rows": ROWS, "limits": {"concurrency": CONCURRENCY}}
LONG = {**KEYS, "prompt": "{{ question }} " + "x" * 20_000}
"""outputs of more than a megabyte: small runs are copied"""
REFUSED = ["link:error=EPERM", "linkat:error=EPERM", "renameat2:error=EINVAL"]
"""what exFAT refuses"""


@contextmanager
def mounted(folder: Path, megabytes: int, make: list[str], mount: list[str]) -> Iterator[Path]:
    """Mount a new file system from an image, for a while; skip the test if that is impossible here."""
    missing = [tool for tool in (make[0], mount[0], "losetup") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"cannot mount the file system: {', '.join(missing)} not installed (scripts/lab/install)")
    image, place = folder / "image", folder / "place"
    place.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    subprocess.run([*make, str(image)], check=True, capture_output=True)
    loop = subprocess.run(["losetup", "--find", "--show", str(image)], capture_output=True, text=True)
    if loop.returncode != 0:
        pytest.skip(f"cannot mount the file system: {loop.stderr.strip()}")
    device = loop.stdout.strip()
    try:
        done = subprocess.run([*mount, device, str(place)], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"cannot mount the file system: {done.stderr.strip()}")
        try:
            yield place
        finally:
            subprocess.run(["umount", "--lazy", str(place)], check=True)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


@pytest.fixture
def exfat(tmp_path: Path) -> Iterator[Path]:
    """A folder on exFAT."""
    with mounted(tmp_path / "exfat", 64, ["mkfs.exfat"], ["mount.exfat-fuse"]) as place:
        (place / "file").touch()
        with pytest.raises(PermissionError):
            (place / "link").hardlink_to(place / "file")
        yield place


def kill_at_work(provider: Server, eval_file: Path, *arguments: str) -> int:
    """Kill a run, and all that it has started, when it has some outputs; return the number of requests so far."""
    provider.control(latency=0.3)
    before = provider.requests
    process = start("eval", eval_file, *arguments, cwd=eval_file.parent)
    wait_for(lambda: provider.requests >= before + 2 * CONCURRENCY, "some answers")
    for each in [process, *leftovers(eval_file.parent)]:
        each.send_signal(signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not leftovers(eval_file.parent), "all of it to be dead")
    wait_for(lambda: provider.stats()["active"] == 0, "its requests to end")
    provider.control(latency=0)
    return provider.requests


@needs_root
@pytest.mark.parametrize("arguments", [[], ["--wait"], ["--workers", "2"]], ids=["at once", "waiting", "workers"])
def test_a_killed_run_resumes_without_links_exchange_and_exact_times(
    arguments: list[str], exfat: Path, provider: Server, calm: Path
) -> None:
    eval_file = write_eval(exfat / "evals", provider.base_url, **KEYS)
    crew = [argument for argument in arguments if argument != "--wait"]
    for _ in range(2):
        asked = kill_at_work(provider, eval_file, *crew)
        assert [*eval_file.parent.rglob("*.lock"), *eval_file.parent.rglob("lease")], "it left its lease"
    safe = len({record["sample"] for record in kept(run_dir(eval_file.parent))})
    resumed = holdfast("eval", eval_file, *arguments, cwd=eval_file.parent)
    assert "no heartbeat" not in resumed.stderr, "the holder was known to be dead"
    assert provider.requests == asked + ROWS - safe
    assert_same_numbers(run_dir(eval_file.parent), calm)
    assert not list(eval_file.parent.rglob("*.lock"))


@needs_strace
@pytest.mark.parametrize("arguments", [[], ["--wait"]], ids=["at once", "waiting"])
def test_a_killed_run_resumes_if_links_and_exchange_are_refused(
    arguments: list[str], tmp_path: Path, provider: Server, calm: Path
) -> None:
    eval_file = write_eval(tmp_path, provider.base_url, **KEYS)
    asked = kill_at_work(provider, eval_file)
    safe = len(kept(run_dir(tmp_path)))
    holdfast_with_faults("eval", eval_file, *arguments, faults=REFUSED, cwd=tmp_path, check=0)
    assert provider.requests == asked + ROWS - safe
    assert_each_once(run_dir(tmp_path), ROWS)
    assert_same_numbers(run_dir(tmp_path), calm)


def borrow(eval_file: Path, provider: Server, faults: list[str] | None = None) -> tuple[Path, Path]:
    """Finish a run and one with another row that reuses it; return both."""
    folder = eval_file.parent
    holdfast("eval", eval_file, cwd=folder)
    lender = run_dir(folder)
    rows = (folder / "data.jsonl").read_text()
    (folder / "data.jsonl").write_text(rows + '{"id": "new", "question": "new", "expected": "new"}\n')
    provider.reset()
    if faults:
        holdfast_with_faults("eval", eval_file, faults=faults, cwd=folder, check=0)
    else:
        holdfast("eval", eval_file, cwd=folder)
    assert provider.requests == 1
    (borrower,) = {path.parent for path in lender.parent.glob("*/manifest.json")} - {lender}
    (folder / "data.jsonl").write_text(rows)
    return lender, borrower


def shared_outputs(borrower: Path) -> Path:
    """The lender's outputs, as the borrower has them."""
    (path,) = borrower.glob("shared/*/outputs.*.jsonl")
    return path


def truncate_in_place(lender: Path) -> None:
    """Cut off most of the lender's outputs, as `truncate` or `rsync --inplace` do."""
    os.truncate(lender / "outputs.jsonl", 1000)


def assert_whole(eval_file: Path, borrower: Path, before: tuple[bytes, bytes], provider: Server) -> None:
    """The borrower has everything, and makes the same report of it without asking anybody."""
    with (eval_file.parent / "data.jsonl").open("a") as file:
        file.write('{"id": "new", "question": "new", "expected": "new"}\n')
    (borrower / "metrics.json").unlink()
    provider.reset()
    holdfast("eval", eval_file, cwd=eval_file.parent)
    assert provider.requests == 0
    assert numbers(borrower) == before


@needs_root
def test_without_links_the_outputs_of_another_run_are_copied(exfat: Path, provider: Server) -> None:
    eval_file = write_eval(exfat / "evals", provider.base_url, **LONG)
    lender, borrower = borrow(eval_file, provider)
    assert shared_outputs(borrower).stat().st_nlink == 1
    before = numbers(borrower)
    truncate_in_place(lender)
    assert_whole(eval_file, borrower, before, provider)
    holdfast("export", borrower, "--to", "csv", cwd=eval_file.parent)
    assert not list(eval_file.parent.rglob(".*.tmp"))


@needs_strace
def test_outputs_are_copied_if_links_are_refused(tmp_path: Path, provider: Server) -> None:
    eval_file = write_eval(tmp_path, provider.base_url, **LONG)
    lender, borrower = borrow(eval_file, provider, REFUSED)
    assert not shared_outputs(borrower).samefile(lender / "outputs.jsonl")
    before = numbers(borrower)
    truncate_in_place(lender)
    assert_whole(eval_file, borrower, before, provider)


@needs_root
def test_a_file_system_that_clones_gives_each_run_a_file_of_its_own(tmp_path: Path, provider: Server) -> None:
    with mounted(tmp_path / "xfs", 320, ["mkfs.xfs", "-q"], ["mount", "-t", "xfs"]) as place:
        eval_file = write_eval(place / "evals", provider.base_url, **LONG)
        lender, borrower = borrow(eval_file, provider)
        there = shared_outputs(borrower)
        assert not there.samefile(lender / "outputs.jsonl") and there.stat().st_nlink == 1
        assert (lender / "outputs.jsonl").stat().st_mode & 0o200, "it need not be sealed"
        before = numbers(borrower)
        truncate_in_place(lender)
        assert_whole(eval_file, borrower, before, provider)


def test_a_shared_journal_is_sealed_and_its_lender_goes_on_in_a_copy(tmp_path: Path, provider: Server) -> None:
    eval_file = write_eval(tmp_path, provider.base_url, **LONG)
    lender, borrower = borrow(eval_file, provider)
    for name in ("outputs", "grades"):
        own, (there,) = lender / f"{name}.jsonl", borrower.glob(f"shared/*/{name}.*.jsonl")
        if not there.samefile(own):
            pytest.skip("the temporary folder is on a file system that clones files")
        assert own.stat().st_mode & 0o222 == 0
    before, content = numbers(borrower), there.read_bytes()

    provider.reset()
    holdfast("grade", lender, "--again", cwd=tmp_path)
    assert provider.requests == 0
    assert len(lines(own)) == 2 * ROWS, "the lender went on"
    assert there.read_bytes() == content and there.stat().st_mode & 0o222 == 0
    assert_whole(eval_file, borrower, before, provider)


def test_a_lender_whose_borrower_is_gone_goes_on_in_its_file(tmp_path: Path, provider: Server) -> None:
    eval_file = write_eval(tmp_path, provider.base_url, **LONG)
    lender, borrower = borrow(eval_file, provider)
    shutil.rmtree(borrower)
    file = (lender / "grades.jsonl").stat().st_ino
    holdfast("grade", lender, "--again", cwd=tmp_path)
    assert len(lines(lender / "grades.jsonl")) == 2 * ROWS
    assert (lender / "grades.jsonl").stat().st_ino == file
