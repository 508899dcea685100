"""A run that asks for likelihoods, killed at every write of a journal, ends as if nothing had happened."""

from __future__ import annotations

import signal
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.breaking import (
    assert_same_numbers,
    holdfast_with_faults,
    kept,
    needs_strace,
    nothing_left,  # noqa: F401 - a fixture
    place_of,
    whole_outputs,
)
from tests.support.running import Server, holdfast, run_dir, write_eval

if TYPE_CHECKING:
    from pathlib import Path

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
