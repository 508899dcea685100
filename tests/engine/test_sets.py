"""Graders that look at all outputs of a run together: a plug-in's, which ranks the answers by their length."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.spec.schema import SCHEMA_VERSION
from tests.support.running import holdfast, lines, metrics, run_dir

if TYPE_CHECKING:
    from pathlib import Path

RANK = """
import os, signal
from pathlib import Path
from holdfast import AttemptError, GraderBlock, SetVerdict, Verdict, WaitingGrader

class RankBlock(GraderBlock):
    rows: str = "all"

class Rank(WaitingGrader):
    schema = RankBlock
    default_threshold = 0.5
    looks_at_all = True

    async def judge_all(self, cases):
        with open("asked.txt", "a") as file:
            file.write(f"{len(cases)}\\n")
        mood = Path("mood.txt").read_text() if Path("mood.txt").exists() else ""
        if mood == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if mood == "raises":
            raise LookupError("no order")
        lengths = sorted(len(case.output.output) for case in cases)
        verdicts = [
            AttemptError("grader", "tied", retry=False)
            if mood == "ties" and case.sample.id == "b"
            else Verdict((lengths.index(len(case.output.output)) + 1) / len(cases), f"of {len(cases)}")
            for case in cases
        ]
        return SetVerdict(verdicts, lengths[len(cases) // 2], {"lengths": lengths})
"""
TARGET = """
from pathlib import Path

def reply(prompt):
    with open("called.txt", "a") as file:
        file.write(prompt + "\\n")
    if prompt == "four" and Path("broken.txt").exists():
        raise ValueError("not now")
    return prompt * len(prompt)
"""
SAMPLES = [{"id": "a", "q": "x"}, {"id": "b", "q": "yy"}, {"id": "c", "q": "four"}]


class Project:
    """A folder with an eval of three rows, and an installed plug-in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        package = folder / "installed" / "ranks-1.0.dist-info"
        package.mkdir(parents=True)
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: ranks\nVersion: 1.0\n")
        (package / "entry_points.txt").write_text("[holdfast.graders]\nrank = ranks:Rank\n")
        (folder / "installed" / "ranks.py").write_text(RANK)
        (folder / "target.py").write_text(TARGET)
        self.write()

    def write(self, *graders: dict[str, Any], **keys: Any) -> None:
        spec = {
            "schemaVersion": SCHEMA_VERSION,
            "name": "e",
            "samples": SAMPLES,
            "target": {"python": "target.py:reply"},
            "prompt": "{{ q }}",
            "graders": [{"type": "rank"}, *graders],
            "limits": {"retries": 0},
            "files": ["!mood.txt"],
            **keys,
        }
        (self.folder / "e.yaml").write_text(json.dumps(spec))

    def run(self, *arguments: str, check: int = 0) -> str:
        env = {"PYTHONPATH": str(self.folder / "installed")}
        done = holdfast(*(arguments or ("eval", "e.yaml")), cwd=self.folder, env=env, check=check)
        return done.stdout + done.stderr

    def mood(self, word: str) -> None:
        (self.folder / "mood.txt").write_text(word)

    @property
    def asked(self) -> list[int]:
        """The numbers of outputs of which the grader was asked."""
        path = self.folder / "asked.txt"
        return [*map(int, path.read_text().split())] if path.exists() else []

    @property
    def called(self) -> int:
        return len((self.folder / "called.txt").read_text().splitlines())

    def scores(self) -> dict[str, Any]:
        """The verdicts that count, by sample."""
        results = json.loads((run_dir(self.folder) / "results.json").read_text())
        return {row["sample"]: row["grades"].get("rank", {}).get("score") for row in results["trials"]}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_the_grader_is_asked_once_about_everything_and_has_a_number_of_its_own(project: Project) -> None:
    shown = project.run("eval", "e.yaml")
    assert project.asked == [3]
    assert project.scores() == {"a": 1 / 3, "b": 2 / 3, "c": 1.0}
    assert "grader `rank` gives 4 for all outputs together" in shown
    block = metrics(run_dir(project.folder))["metrics"]["rank"]
    assert (block["set_score"], block["n"], block["passed"]) == (4, 3, 2)
    together = [line["together"] for line in lines(run_dir(project.folder) / "grades.jsonl")]
    assert together[0]["details"] == {"lengths": [1, 4, 16]} and together.count(together[0]) == 3

    project.run("eval", "e.yaml")
    assert project.asked == [3], "a finished run asks nobody"
    project.run("grade", str(run_dir(project.folder)), "--again")
    assert (project.asked, project.called) == ([3, 3], 3)
    project.write({"type": "text", "contains": "x"})
    project.run("eval", "e.yaml")
    assert (project.asked, project.called) == ([3, 3], 3), "another run with the same outputs borrows the verdicts"
    project.write(samples=[*SAMPLES, {"id": "d", "q": "zzz"}])
    project.run("eval", "e.yaml")
    assert (project.asked, project.called) == ([3, 3, 4], 4), "with one row more, it is another set"


def test_a_set_grader_waits_for_all_outputs_and_is_asked_again_when_there_are_more(project: Project) -> None:
    (project.folder / "broken.txt").touch()
    shown = project.run("eval", "e.yaml", check=3)
    assert "grader 'rank' looks at all outputs together: it is asked when 1 more trial has an output" in shown
    assert project.asked == []
    project.run("grade", str(run_dir(project.folder)), check=3)
    assert project.asked == []
    project.run("eval", "e.yaml", "--accept-errors")
    assert (project.asked, project.scores()) == ([2], {"a": 0.5, "b": 1.0, "c": None})
    (project.folder / "broken.txt").unlink()
    project.run("eval", "e.yaml", "--retry-failed")
    assert (project.asked, project.scores()) == ([2, 3], {"a": 1 / 3, "b": 2 / 3, "c": 1.0})


def test_after_a_kill_the_whole_set_is_graded_again_and_no_output_is_generated_again(project: Project) -> None:
    project.mood("dies")
    project.run("eval", "e.yaml", check=-9)
    project.mood("")
    project.run("eval", "e.yaml")
    assert (project.asked, project.called) == ([3, 3], 3)
    run = run_dir(project.folder)
    before = project.scores()
    grades = (run / "grades.jsonl").read_bytes()
    (run / "grades.jsonl").write_bytes(grades[: grades.index(b"\n") + 9])  # killed in the middle of the second line
    (run / "metrics.json").unlink()
    project.run("eval", "e.yaml")
    assert (project.asked, project.called, project.scores()) == ([3, 3, 3], 3, before)


def test_an_output_that_a_set_grader_cannot_judge_is_an_error_and_leaves_no_number_for_all(project: Project) -> None:
    project.mood("raises")
    shown = project.run("eval", "e.yaml", check=3)
    assert "LookupError: no order" in shown
    run = run_dir(project.folder)
    assert [line["status"] for line in lines(run / "grades.jsonl")] == ["error"] * 3
    assert len(lines(run / "errors.jsonl")) == 1, "told once"
    project.mood("ties")
    project.run("eval", "e.yaml", "--accept-errors")
    assert project.scores() == {"a": 1 / 3, "b": None, "c": 1.0}
    assert "set_score" not in metrics(run)["metrics"]["rank"]
    project.mood("")
    project.run("eval", "e.yaml", "--retry-failed")
    assert (project.asked, project.called) == ([3, 3, 3], 3)
    assert metrics(run)["metrics"]["rank"]["set_score"] == 4


def test_of_several_workers_the_last_one_asks_once(project: Project) -> None:
    project.write({"type": "text", "contains": "x"}, trials=2)
    project.run("eval", "e.yaml", "--workers", "2")
    assert project.asked == [6]
    assert project.scores()["c"] == 5 / 6


def test_rows_that_it_does_not_apply_to_are_not_in_its_set(project: Project) -> None:
    project.write(graders=[{"type": "rank", "where": "id != 'b'"}, {"type": "text", "contains": "x"}])
    project.run("eval", "e.yaml")
    assert (project.asked, project.scores()) == ([2], {"a": 0.5, "b": None, "c": 1.0})
