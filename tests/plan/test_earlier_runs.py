"""Run directories that an earlier commit wrote open, resume and are reused.

`tests/fixtures/earlier` was written on 2026-11-16 by Holdfast 0.1.0 at commit bf25177, with eval files and run
directories of version 1.1: `plain` is finished, `talk` was killed within a conversation with tools, `shared` when its
two workers died. The fixture is never rewritten.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.support.running import ROOT, holdfast, lines, run_dir

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(ROOT / "tests/fixtures/earlier", tmp_path / "earlier")


def calls(folder: Path) -> list[str]:
    """Return the recorded calls of the agent and its tool."""
    path = folder / "calls.txt"
    return sorted(path.read_text().splitlines()) if path.exists() else []


def test_a_finished_run_is_finished(folder: Path) -> None:
    before = {path: path.read_bytes() for path in (folder / "runs/plain").rglob("*.json*")}
    assert "already finished" in holdfast("eval", "plain.yaml", cwd=folder).stdout
    assert calls(folder) == []
    assert {path: path.read_bytes() for path in before} == before


def test_an_additional_grader_grades_the_outputs_that_are_there(folder: Path) -> None:
    text = (folder / "plain.yaml").read_text()
    (folder / "plain.yaml").write_text(
        text.replace("graders:\n", "graders:\n  - {type: text, name: is, contains: [IS]}\n")
    )
    plan = json.loads(holdfast("eval", "plain.yaml", "--dry-run", "--json", cwd=folder).stdout)
    assert (plan["to_run"], plan["to_grade"]) == (0, 6)
    holdfast("eval", "plain.yaml", cwd=folder)
    assert calls(folder) == []


def test_a_killed_conversation_continues_with_the_first_call_that_has_no_result(folder: Path) -> None:
    holdfast("eval", "talk.yaml", cwd=folder)
    missing = ["more d more d: 6", "price last d", "last d last d: 6"]
    for row in "ef":
        for turn in (f"what is {row}", f"more {row}", f"last {row}"):
            missing += [f"price {turn}", f"{turn} {turn}: {len(turn)}"]
    assert calls(folder) == sorted(missing)
    metrics = json.loads((run_dir(folder, "talk") / "metrics.json").read_text())
    assert (metrics["coverage"], metrics["score"]) == (1.0, 1.0)


def test_workers_that_died_are_replaced_and_do_only_what_they_had_not_finished(folder: Path) -> None:
    holdfast("eval", "shared.yaml", "--workers", "2", cwd=folder)
    assert calls(folder) == ["so, what is e"]
    run = run_dir(folder, "shared")
    assert json.loads((run / "metrics.json").read_text())["coverage"] == 1.0
    grades = [grade for path in run.rglob("grades.jsonl") for grade in lines(path)]
    assert len({(grade["sample"], grade["grader"]) for grade in grades}) == len(grades) == 18


def test_other_commands_read_it(folder: Path) -> None:
    run = run_dir(folder, "plain")
    assert "nothing to repair" in holdfast("repair", run, cwd=folder).stdout
    holdfast("export", run, "--to", "csv", cwd=folder)
    assert "plain" in holdfast("cache", "ls", cwd=folder).stdout
    holdfast("grade", run, "plain.yaml", cwd=folder)
    assert calls(folder) == []
