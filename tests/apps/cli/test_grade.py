"""`holdfast grade`: verdicts on outputs that are there, without one call to the target."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.support.breaking import assert_same_numbers, kept, metrics_bytes
from tests.support.lab import Lab, rows
from tests.support.running import Server, holdfast, metrics, module_server

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 6
NOBODY = "http://127.0.0.1:1/v1"


provider = module_server()
judge = module_server(answer="judge")


@pytest.fixture
def lab(tmp_path: Path, provider: Server, judge: Server) -> Lab:
    graders = [
        {"type": "exact", "name": "correct"},
        {"type": "prompt", "name": "judge", "rubric": "polite", "model": "j", "base_url": judge.base_url},
    ]
    return Lab(tmp_path, provider, judge, rows(ROWS), {"graders": graders})


def generated(lab: Lab) -> Path:
    """A run that has outputs and no grades, and a target that is gone since."""
    run = lab.eval("--skip-graders").run
    assert kept(run, "grades") == [] and not (run / "metrics.json").exists()
    lab.spec["target"]["base_url"] = NOBODY
    lab.write()
    return run


def test_grading_afterwards_gives_the_bytes_that_grading_at_once_gives(lab: Lab) -> None:
    lab.spec["trials"] = 2
    at_once = lab.eval("--runs-dir", "at-once").run
    run = generated(lab)
    done = lab.do("grade", run)
    assert done.work == (0, {"correct": 2 * ROWS, "judge": 2 * ROWS}) and done.run == run
    assert_same_numbers(run, at_once)


def test_a_beginning_that_fits_two_runs_is_refused_with_both(lab: Lab) -> None:
    run = generated(lab)
    twin = run.with_name(run.name + "0")
    shutil.copytree(run, twin)
    stderr = lab.do("grade", run.name.rpartition("-")[2], check=2).err
    assert "matches 2 runs" in stderr and run.name in stderr and twin.name in stderr and "more digits" in stderr


def test_more_graders_go_with_copies_into_the_run_that_eval_would_use(lab: Lab) -> None:
    run = lab.eval().run
    before = metrics_bytes(run)
    lab.spec["graders"].append({"type": "text", "name": "new", "contains": "question 1"})
    lab.spec["target"]["base_url"] = NOBODY
    lab.write()
    done = lab.do("grade", run, "e.yaml")
    assert done.work == (0, {"new": ROWS}) and done.run != run
    assert metrics(done.run)["metrics"]["new"]["passed"] == 1
    assert metrics_bytes(run) == before, "the run that was graded is left as it was"
    assert lab.eval().work == (0, {}), "and eval finds it all done"


def test_a_changed_grader_grades_again_and_keeps_the_old_verdicts(lab: Lab) -> None:
    lab.rows[1]["expected"] = "QUESTION 1"
    run = lab.eval().run
    done = lab.do("grade", run, "graders.correct.ignore_case=true")
    assert done.work == (0, {"correct": ROWS})
    assert metrics(run)["metrics"]["correct"]["passed"] == 3
    assert metrics(done.run)["metrics"]["correct"]["passed"] == 4


def test_a_new_threshold_is_taken_over_without_grading(lab: Lab) -> None:
    run = lab.eval().run
    done = lab.do("grade", run, "graders.judge.threshold=0.1")
    assert done.work == (0, {}) and done.run == run
    assert metrics(run)["metrics"]["judge"]["threshold"] == 0.1


def test_without_an_eval_file_a_run_is_judged_by_what_it_was_last_judged_by(lab: Lab) -> None:
    lab.spec["follow_ups"] = ["more"]
    lab.spec["checkpoints"] = [{"after_turn": 1, "graders": [{"type": "exact", "config": {"threshold": 0.9}}]}]
    run = lab.eval().run
    changed = ["graders.judge.threshold=0.1", "graders.correct.weight=3", "checkpoints.0.graders.0.threshold=0.2"]
    lab.do("grade", run, *changed)
    numbers = metrics(run)
    assert numbers["metrics"]["checkpoint@1/exact"]["threshold"] == 0.2
    for options in ([], ["--again"]):
        lab.do("grade", run, *options)
        assert [metrics(run)[part] for part in ("metrics", "score")] == [numbers[part] for part in ("metrics", "score")]
    lab.do("grade", run, "graders.correct.weight=2")
    assert metrics(run)["metrics"]["correct"]["weight"] == 2, "what is said now goes before"


def test_accepted_errors_of_a_grader_are_taken_up(lab: Lab, judge: Server) -> None:
    with judge.controlled(answer="nonsense"):
        accepted = lab.eval("--accept-errors", "limits.retries=0")
    run = accepted.run
    assert metrics(run)["coverage"] == 0 and "errors" in accepted.out, "the table says why nothing is graded"
    done = lab.do("grade", run)
    assert done.work == (0, {"judge": ROWS}) and metrics(run)["coverage"] == 1


def test_accepted_errors_of_the_target_do_not_reopen_a_run_that_is_graded(lab: Lab, provider: Server) -> None:
    with provider.controlled(fail={"500": 0.5}):
        run = lab.eval("--accept-errors", "limits.retries=0").run
    before = metrics_bytes(run)
    assert 0 < metrics(run)["outputs"] < ROWS
    assert lab.do("grade", run).work == (0, {}) and metrics_bytes(run) == before


def test_nothing_is_graded_twice_without_again(lab: Lab) -> None:
    run = generated(lab)
    assert lab.do("grade", run).judged == ROWS
    finished = lab.do("grade", run)
    assert finished.work == (0, {}) and "Use --again" in finished.out and "--fresh" not in finished.out
    again = lab.do("grade", run, "--again")
    assert again.judged == ROWS and again.graded == {"correct": ROWS, "judge": ROWS}
    assert metrics(run)["metrics"]["judge"]["n"] == ROWS, "the later verdict counts, once"


def test_again_with_other_graders_keeps_the_outputs_and_none_of_the_verdicts(lab: Lab) -> None:
    run = lab.eval().run
    lab.spec["graders"].append({"type": "text", "name": "new", "contains": "q"})
    lab.write()
    assert lab.do("grade", run, "e.yaml", "--again").work == (0, {"correct": ROWS, "judge": ROWS, "new": ROWS})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt": "Say: {{ question }}"}, "prompt changed"),
        ({"system": "Be brief."}, "system added"),
        ({"target": {"model": "other", "base_url": NOBODY}}, "target.model test-model → other"),
    ],
)
def test_an_eval_whose_outputs_would_be_others_is_refused_with_what_changed(
    lab: Lab, change: dict[str, object], reason: str
) -> None:
    run = generated(lab)
    lab.spec.update(change)
    lab.write()
    stderr = lab.do("grade", run, "e.yaml", check=2).err
    assert reason in stderr and "holdfast eval" in stderr
    assert kept(run, "grades") == []


def test_changed_code_of_a_python_target_is_refused_by_its_name(lab: Lab) -> None:
    lab.use_agent()
    run = lab.eval("--skip-graders").run
    lab.edit("agent.py", "return answer(prompt)", "return answer(prompt) + '!'")
    assert "agent.py changed" in lab.do("grade", run, check=2).err
    assert kept(run, "grades") == []


def test_rows_without_an_output_are_reported_and_are_not_errors(lab: Lab) -> None:
    run = generated(lab)
    lab.rows += rows(2, start=50)
    lab.write()
    done = lab.do("grade", run, "e.yaml", check=3)
    assert done.work == (0, {"correct": ROWS, "judge": ROWS})
    assert "2 trials have no output yet; `holdfast eval` runs them" in done.out
    assert "have errors" not in done.out


def test_an_unfinished_run_is_graded_as_far_as_it_goes(lab: Lab) -> None:
    run = lab.eval("--skip-graders", "--token-budget", 1, "--concurrency", 1, check=3).run
    assert lab.do("grade", run, check=3).graded == {"correct": 1, "judge": 1}
    assert lab.eval().work == (ROWS - 1, {"correct": ROWS - 1, "judge": ROWS - 1})


def test_a_judge_that_is_down_keeps_what_is_graded_and_exits_3(lab: Lab, judge: Server) -> None:
    run = generated(lab)
    done = lab.do("grade", run, f"graders.judge.base_url={NOBODY}", check=3)
    assert done.graded == {"correct": ROWS}
    assert lab.do("grade", run).graded == {"judge": ROWS}


def test_a_run_that_was_moved_is_graded_where_it_is(lab: Lab, tmp_path: Path) -> None:
    run = generated(lab)
    moved = tmp_path / "copies" / "mine"
    moved.parent.mkdir()
    run.rename(moved)
    assert holdfast("grade", moved, cwd=tmp_path)
    assert metrics(moved)["coverage"] == 1.0
    assert list(lab.runs.rglob("manifest.json")) == [] and sorted(p.name for p in moved.parent.iterdir()) == ["mine"]
    assert "already finished" in holdfast("grade", ".", cwd=moved).stdout


def test_a_run_that_was_moved_lends_its_outputs_to_other_graders(lab: Lab, tmp_path: Path) -> None:
    run = generated(lab)
    moved = tmp_path / "copies" / "mine"
    moved.parent.mkdir()
    run.rename(moved)
    lab.spec["graders"] = [{"type": "text", "name": "new", "contains": "q"}]
    lab.write()
    done = lab.do("grade", moved, "e.yaml")
    assert done.work == (0, {"new": ROWS}) and done.run.parent == lab.runs / "e"
    assert {output["source"] for output in kept(done.run)} == {str(moved)}


def test_the_outputs_of_an_archived_run_can_be_graded(lab: Lab) -> None:
    generated(lab)
    lab.spec["target"]["base_url"] = lab.provider.base_url
    lab.eval("--fresh", "--skip-graders")
    (archived,) = lab.runs.glob("e/archived/*/")
    assert lab.do("grade", archived).run == archived
    assert metrics(archived)["coverage"] == 1.0
