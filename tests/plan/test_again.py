"""Graders that are asked again: an error replaces a verdict, and a later verdict replaces the error."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.running import holdfast, lines, metrics

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 6
GRADER: dict[str, Any] = {"type": "python", "name": "g", "function": "grade.py:g"}
SOURCES = {
    "target.py": "def reply(prompt):\n    return prompt\n",
    "grade.py": (
        "from pathlib import Path\n"
        "FOLDER = Path(__file__).parent\n"
        "def g(output):\n"
        "    with open(FOLDER / 'graded', 'a') as file:\n"
        "        file.write('x')\n"
        "    if output == 'question 3' and (FOLDER / 'broken').exists():\n"
        "        raise RuntimeError('broken')\n"
        "    return 1.0\n"
    ),
}


def write(folder: Path, graders: list[dict[str, Any]], count: int = ROWS) -> None:
    for name, text in SOURCES.items():
        (folder / name).write_text(text)
    rows = [{"id": f"s{number}", "q": f"question {number}"} for number in range(count)]
    spec = {
        "name": "e",
        "samples": rows,
        "prompt": "{{ q }}",
        "target": {"python": "target.py:reply"},
        "graders": graders,
        "files": ["!broken", "!graded"],
    }
    (folder / "e.yaml").write_text(json.dumps(spec))


def graded(folder: Path) -> int:
    """Return how often the grader was asked since the last time."""
    path = folder / "graded"
    count = len(path.read_text()) if path.exists() else 0
    path.write_text("")
    return count


def run_of(stdout: str, folder: Path) -> Path:
    (run,) = (line.removeprefix("run: ") for line in stdout.splitlines() if line.startswith("run: "))
    return folder / run


def fail_again(folder: Path, run: Path, env: dict[str, str]) -> None:
    """Grade a run again while the grader fails at one output."""
    (folder / "broken").touch()
    holdfast("grade", run, "--again", cwd=folder, env=env, check=3)
    (folder / "broken").unlink()
    assert graded(folder) == ROWS
    assert [line["status"] for line in lines(run / "grades.jsonl")].count("error") == 1


@pytest.mark.parametrize("index_bytes", ["", "1"], ids=["index read", "index published"])
def test_an_output_at_which_a_grader_failed_again_is_graded_by_the_next_command(
    tmp_path: Path, index_bytes: str
) -> None:
    env = {"HOLDFAST_INDEX_BYTES": index_bytes}
    write(tmp_path, [GRADER])
    run = run_of(holdfast("eval", "e.yaml", cwd=tmp_path, env=env).stdout, tmp_path)
    assert graded(tmp_path) == ROWS
    fail_again(tmp_path, run, env)
    holdfast("eval", "e.yaml", cwd=tmp_path, env=env)
    assert graded(tmp_path) == 1
    assert metrics(run)["coverage"] == 1


def test_a_verdict_of_another_run_counts_after_an_error_of_this_one(tmp_path: Path) -> None:
    write(tmp_path, [GRADER])
    holdfast("eval", "e.yaml", cwd=tmp_path)
    write(tmp_path, [GRADER, {"type": "text", "name": "t", "contains": "question"}])
    run = run_of(holdfast("eval", "e.yaml", cwd=tmp_path).stdout, tmp_path)
    assert graded(tmp_path) == ROWS
    fail_again(tmp_path, run, {})
    holdfast("eval", "e.yaml", cwd=tmp_path)
    assert graded(tmp_path) == 0, "the other run has the verdict"
    assert metrics(run)["coverage"] == 1


def test_graders_are_asked_again_about_outputs_that_a_run_shares(tmp_path: Path) -> None:
    rows, text = ROWS * 25, "x" * 9_000  # enough for sharing instead of copying
    write(tmp_path, [GRADER], rows)
    (tmp_path / "target.py").write_text(f"def reply(prompt):\n    return prompt + {text!r}\n")
    run = run_of(holdfast("eval", "e.yaml", cwd=tmp_path).stdout, tmp_path)
    assert graded(tmp_path) == rows
    write(tmp_path, [GRADER, {"type": "text", "name": "t", "contains": "question"}], rows)
    (tmp_path / "target.py").write_text(f"def reply(prompt):\n    return prompt + {text!r}\n")
    borrower = run_of(holdfast("grade", run, "e.yaml", "--again", cwd=tmp_path).stdout, tmp_path)
    assert (borrower / "shared").is_dir()
    assert graded(tmp_path) == rows
