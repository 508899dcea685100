"""Whatever system call on a run's files fails, the command succeeds or says why, and the next one finishes the run.

A sample of what `python -m bench.failing_calls` goes through.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.support.breaking import needs_strace, nothing_left  # noqa: F401 - a fixture
from tests.support.failing_calls import Scene

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.running import Server


@needs_strace
@pytest.mark.parametrize(("name", "sample"), [("new", 12), ("resumed", 12), ("reused", 8), ("graded", 8)])
def test_a_call_that_fails_stops_the_run_at_most_until_the_next_command(
    name: str, sample: int, tmp_path: Path, provider: Server
) -> None:
    scene = Scene.make(name, tmp_path, provider)
    failures = list(scene.failures())
    assert len(failures) > 100
    endings = set()
    for failure in random.Random(name).sample(failures, sample):
        try:
            endings.add(scene.fail(failure))
        except AssertionError as error:
            raise AssertionError(f"{failure}: {error}") from error
    assert endings <= {"stopped", "succeeded", "not made this time", "hit another file"}


@needs_strace
def test_other_runs_that_cannot_be_read_for_a_moment_are_not_paid_for_again(tmp_path: Path, provider: Server) -> None:
    scene = Scene.make("reused", tmp_path, provider)
    lender, *_ = (path.parent for path in scene.template.glob("runs/*/*/manifest.json"))
    manifest = str(scene.folder / lender.relative_to(scene.template) / "manifest.json")
    failures = [each for each in scene.failures() if each.path == manifest and each.error == "EIO"]
    assert {each.call for each in failures} >= {"openat", "read"}
    assert "stopped" in {scene.fail(failure) for failure in failures}
