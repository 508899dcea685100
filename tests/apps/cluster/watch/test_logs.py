"""Lines of logs are shown once and whole, across the attempts of a task."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from holdfast.apps.cli.logs import command
from holdfast.apps.cluster.remote.transport import Here
from holdfast.apps.cluster.watch.logs import follow
from tests.support.invocations import Launched, entry_of, launched

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def killed(tmp_path: Path) -> Launched:
    """An invocation whose first attempt was killed in the middle of a line."""
    invocation = launched(Here(pauses=()), tmp_path, executor="local")
    invocation.log("main-12-0.log", "first attempt\ncut sh")
    os.utime(invocation.log("main-12-0.log", ""), (1, 1))
    invocation.log("main-13-0.log", "second attempt\nlast wor")
    invocation.state(phase="done", exit_code=1)
    return invocation


LINES = ["first attempt", "cut sh", "second attempt", "last wor"]


def test_a_launch_that_is_followed_keeps_the_lines_of_attempts_apart(killed: Launched) -> None:
    lines: list[str] = []
    assert follow(killed.transport, entry_of(killed), lines.append) == 1
    assert lines == LINES


def test_logs_keep_the_lines_of_attempts_apart(killed: Launched, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(killed.directory), "--all"], standalone_mode=False) == 0
    assert capsys.readouterr().out.splitlines() == LINES
