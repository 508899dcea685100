"""`holdfast ls`: runs as people look for them."""

from __future__ import annotations

import json
import os
import re
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.lab import Lab, rows
from tests.support.running import Server, holdfast, module_server, on_a_terminal

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS = ["id", "name", "target", "status", "done", "score", "interval", "cost", "dataset", "size", "age"]

provider = module_server()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, provider: Server) -> Path:
    """Two finished runs of two evals, the second one older, and an unfinished run."""
    lab = Lab(tmp_path_factory.mktemp("runs"), provider, rows=rows(6))
    lab.spec["prices"] = {"test-model": {"input": 1.0, "output": 2.0}}
    lab.eval()
    lab.eval("name=second", "-m", "llama-2")
    lab.eval("-m", "llama-3", "--token-budget", 1, "--concurrency", 1, check=3)
    old = time.time() - 3 * 86400
    for path in lab.runs.glob("second/*/*"):
        os.utime(path, (old, old))
    return lab.folder


def listed(cwd: Path, *arguments: str) -> list[dict[str, str]]:
    """Return the rows of the list as it is written into a pipe."""
    head, *lines = [line.split("\t") for line in holdfast("ls", *arguments, cwd=cwd).stdout.splitlines()]
    assert head == COLUMNS
    return [dict(zip(head, line, strict=True)) for line in lines]


def test_newest_runs_are_listed_first_with_what_people_look_for(runs: Path) -> None:
    unfinished, finished, old = listed(runs)
    assert (unfinished["status"], unfinished["done"], unfinished["score"]) == ("unfinished", "1/6", "-")
    assert (finished["status"], finished["done"], finished["score"]) == ("finished", "6/6", "0.500")
    assert re.fullmatch(r"0\.\d{3} – 0\.\d{3}", finished["interval"]) and finished["cost"].startswith(("$", "<$"))
    assert (old["name"], old["target"], old["age"], old["cost"]) == ("second", "llama-2", "3d", "-")
    assert all(re.fullmatch(r"[0-9a-f]{8}", run["id"]) for run in (unfinished, finished, old))


def test_an_eval_a_number_and_the_filters_of_cache_ls_choose(runs: Path) -> None:
    assert [run["name"] for run in listed(runs, "SECO")] == ["second"]
    assert [run["target"] for run in listed(runs, "-n", "1")] == ["llama-3"]
    assert [run["name"] for run in listed(runs, "--status", "finished", "--older-than", "1d")] == ["second"]
    assert listed(runs, "nothing") == []


def test_json_equals_that_of_cache_ls(runs: Path) -> None:
    ours, theirs = (json.loads(holdfast(*command, "--json", cwd=runs).stdout) for command in (["ls"], ["cache", "ls"]))
    assert ours == theirs and len(ours) == 3
    assert 0 < ours[1]["low"] < ours[1]["score"] < ours[1]["high"] < 1


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_table_fits_the_terminal_and_keeps_ids_status_and_score(runs: Path, columns: int) -> None:
    screen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", on_a_terminal("ls", cwd=runs, columns=columns))
    lines = [line.rstrip() for line in screen.splitlines() if line.strip()]
    assert len(lines) == 4 and all(len(line) <= columns for line in lines)
    assert lines[0].split()[:3] == ["id", "name", "target"]
    assert "unfinished" in lines[1] and re.search(r"finished +6/6 +0\.500", lines[2])
    assert ("interval" in lines[0]) == (columns >= 80)


def test_where_there_are_no_runs_it_says_where_it_looked(tmp_path: Path) -> None:
    assert "no runs in runs" in on_a_terminal("ls", cwd=tmp_path, columns=80)
    assert listed(tmp_path) == []
