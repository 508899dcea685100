"""waza's results.json: of runs of its evals and of ours, finished or not."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.plugins.waza.statistics import SuiteNumbers, task_stats
from tests.support.lab import Lab
from tests.support.running import ROOT, Server, holdfast, run_dir, server
from tests.support.waza import EVAL, tree

if TYPE_CHECKING:
    from pathlib import Path

KITCHEN = ROOT / "tests" / "fixtures" / "waza" / "kitchen"


def exported(run: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((run / "export" / "waza" / "results.json").read_text())
    return results


def tasks(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {task["test_id"]: task for task in results["tasks"]}


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of the kitchen eval, whose talk is stopped after its second turn."""
    folder = tmp_path_factory.mktemp("kitchen")
    shutil.copytree(KITCHEN, folder / "kitchen")
    talk = folder / "kitchen" / "tasks" / "20-talk.yaml"
    later = "  - {after_turn: 3, graders: [{type: text, name: never, contains: [x]}]}\n"
    talk.write_text(talk.read_text().replace("contains: [with it]", "contains: [salt]") + later)
    holdfast("eval", "kitchen/eval.yaml", "--export", "waza", "--export", "csv", cwd=folder)
    run = run_dir(folder, "kitchen")
    assert (run / "export" / "csv").is_dir()
    return exported(run)


def test_the_head_describes_the_eval(kitchen: dict[str, Any]) -> None:
    assert kitchen["schemaVersion"] == "1.5"
    assert (kitchen["eval_name"], kitchen["skill"]) == ("kitchen", "cook")
    assert kitchen["eval_id"].startswith("run-")
    assert kitchen["config"] == {
        "runs_per_test": 2,
        "model_id": "some-model",
        "engine_type": "mock",
        "timeout_sec": 45,
    }


def test_the_summary_counts_tasks(kitchen: dict[str, Any]) -> None:
    summary = kitchen["summary"]
    counts = {key: summary[key] for key in ("total_tests", "succeeded", "failed", "errors", "skipped")}
    assert counts == {"total_tests": 3, "succeeded": 1, "failed": 2, "errors": 0, "skipped": 0}
    assert summary["success_rate"] == pytest.approx(1 / 3)
    assert summary["aggregate_score"] == pytest.approx((1 + 0 + 0.75) / 3)
    assert summary["weighted_score"] == pytest.approx((1 + 0 + 2.5 / 3) / 3)
    assert (summary["min_score"], summary["max_score"]) == (0.0, 1.0)
    assert summary["groups"] == [
        {"name": "first", "passed": 1, "total": 1, "avg_score": 1.0},
        {"name": "second", "passed": 0, "total": 1, "avg_score": 0.0},
    ]
    assert summary["usage"]["turns"] == 2 * (1 + 2 + 1)


def test_a_task_has_its_runs_and_their_verdicts_by_wazas_names(kitchen: dict[str, Any]) -> None:
    soup = tasks(kitchen)["soup"]
    assert (soup["display_name"], soup["group"], soup["golden"]) == ("A soup for a guest", "first", True)
    assert (soup["status"], soup["stats"]["pass_rate"], soup["stats"]["total_runs"]) == ("passed", 1.0, 2)
    run = soup["runs"][0]
    assert (run["run_number"], run["attempts"], run["status"]) == (1, 1, "passed")
    assert set(run["validations"]) == {
        "polite",
        "_output_contains",
        "_output_not_contains",
        "_output_contains_any",
        "for_guest",
    }
    verdict = run["validations"]["polite"]
    assert verdict.pop("duration_ms") >= 0
    assert verdict == {
        "identifier": "polite",
        "type": "text",
        "score": 1.0,
        "weight": 2.0,
        "passed": True,
        "feedback": "",
        "details": {"failures": []},
    }
    assert run["final_output"] == run["transcript"][-1]["content"]
    assert [event["type"] for event in run["transcript"]] == ["user.message", "assistant.message"]
    dessert = tasks(kitchen)["dessert"]
    assert (dessert["status"], dessert["stats"]["failed_runs"], dessert["stats"]["flaky"]) == ("failed", 2, False)


def test_a_trial_that_a_checkpoint_stopped_is_an_error(kitchen: dict[str, Any]) -> None:
    talk = tasks(kitchen)["talk"]
    assert (talk["status"], talk["stats"]["error_runs"], talk["stats"]["pass_rate"]) == ("failed", 2, 0.0)
    run = talk["runs"][0]
    assert run["status"] == "error"
    assert run["error_msg"] == "checkpoint after_turn=2 failed (on_failure: stop): hears"
    assert [(point["after_turn"], point["status"], point.get("stopped")) for point in run["checkpoints"]] == [
        (1, "passed", None),
        (2, "failed", True),
        (3, "skipped", None),  # never reached, and said so
    ]
    assert run["checkpoints"][1]["validations"]["hears"]["passed"] is False


CHECKS = """
def starts(output, sample):
    if sample["id"] == "s2":
        raise RuntimeError("no idea")
    return float(output.startswith("question"))
"""


def test_numbers_of_an_unfinished_run_are_those_of_the_screen(tmp_path: Path, provider: Server) -> None:
    """One trial of s1 has no output, and of s2 no verdict; the others have passed or failed."""
    lab = Lab(tmp_path, provider)
    (tmp_path / "check.py").write_text(CHECKS)
    (tmp_path / "agent.py").write_text(
        "def reply(prompt, context):\n"
        "    if context.sample_id == 's1' and context.trial == 2: raise OSError('away')\n"
        "    return prompt\n"
    )
    lab.rows = lab.rows[:4]
    lab.spec |= {
        "target": {"python": "agent.py:reply"},
        "limits": {"retries": 0},
        "trials": 2,
        "graders": [{"type": "exact"}, {"type": "python", "function": "check.py:starts", "name": "starts"}],
    }
    lab.write()
    done = holdfast("eval", lab.eval_file.name, "--export", "waza", "--display", "json", cwd=tmp_path, check=3)
    so_far = json.loads(done.stderr.splitlines()[-1])["so_far"]
    results = exported(run_dir(tmp_path))
    by_id, summary = tasks(results), results["summary"]
    assert [by_id[name]["status"] for name in sorted(by_id)] == ["passed", "failed", "error", "failed"]
    assert [by_id[name]["stats"]["avg_score"] for name in sorted(by_id)] == [1.0, 0.5, None, 0.5]
    assert [by_id[name]["stats"]["pass_rate"] for name in sorted(by_id)] == [1.0, 0.0, None, 0.0]
    assert [run["status"] for run in by_id["s1"]["runs"]] == ["failed", "error"]
    assert by_id["s1"]["stats"]["avg_duration_ms"] == by_id["s1"]["runs"][0]["duration_ms"]
    assert (summary["succeeded"], summary["failed"], summary["errors"]) == (1, 2, 1)
    assert summary["success_rate"] == pytest.approx(1 / 3)
    assert summary["aggregate_score"] == pytest.approx((1.0 + 0.5 + 0.5) / 3)
    assert results["metadata"]["holdfast"]["coverage"] == so_far["coverage"] == 5 / 8
    assert summary["duration_ms"] == sum(run["duration_ms"] or 0 for task in by_id.values() for run in task["runs"])


AGENT = """
def reply(prompt):
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"path": "a.txt"}'}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
        {"role": "assistant", "content": "done"},
    ]
    return {"output": "done", "messages": messages, "usage": {"input_tokens": 5, "output_tokens": 2}}
"""


def test_tool_calls_are_events_with_their_turn_and_result(tmp_path: Path, provider: Server) -> None:
    lab = Lab(tmp_path, provider)
    (tmp_path / "agent.py").write_text(AGENT)
    lab.rows = lab.rows[:1]
    lab.spec |= {"target": {"python": "agent.py:reply"}, "follow_ups": ["again"]}
    run = tasks(exported(lab.eval("--export", "waza").run))["s0"]["runs"][0]
    event = {"tool_call_id": "c1", "tool_name": "look", "args": {"path": "a.txt"}, "result": "found", "success": True}
    assert run["tool_events"] == [{"turn": turn, "sequence": turn, **event} for turn in (1, 2)]
    digest = run["session_digest"]
    assert (digest["tool_call_count"], digest["tools_used"]) == (2, ["look"])
    assert (run["usage"]["input_tokens"], run["usage"]["output_tokens"], run["usage"]["turns"]) == (10, 4, 2)
    assert [event["type"] for event in run["transcript"]][:5] == [
        "user.message",
        "assistant.message",
        "tool.execution_start",
        "tool.execution_complete",
        "assistant.message",
    ]


def test_a_checkpoint_whose_grader_could_not_judge_is_an_error(tmp_path: Path, provider: Server) -> None:
    lab = Lab(tmp_path, provider)
    (tmp_path / "check.py").write_text("def broken(output):\n    raise RuntimeError('no idea')\n")
    broken = {"type": "python", "name": "broken", "function": "check.py:broken"}
    lab.rows = lab.rows[:1]
    lab.spec["checkpoints"] = [{"after_turn": 1, "graders": [broken]}]
    lab.eval("--export", "waza", check=3)
    run = tasks(exported(run_dir(tmp_path)))["s0"]["runs"][0]
    assert run["status"] == "error" and "broken" in run["error_msg"]
    (checkpoint,) = run["checkpoints"]
    assert checkpoint["status"] == "error"
    assert checkpoint["validations"]["_checkpoint_error"]["type"] == "checkpoint_error"
    assert checkpoint["validations"]["_checkpoint_error"]["score"] is None
    assert "no idea" in checkpoint["validations"]["_checkpoint_error"]["feedback"]


def test_two_graders_that_waza_would_give_one_name_keep_two_verdicts(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "eval.yaml").write_text(
        "name: same\nconfig: {trials_per_task: 1, timeout_seconds: 9, executor: mock}\n"
        "graders: [{type: text, name: check, contains: [mock]}]\ntasks: [tasks/a.yaml]\n"
    )
    (tmp_path / "tasks" / "a.yaml").write_text(
        "id: a\ninputs: {prompt: x}\ngraders: [{type: text, name: check, contains: [nothing like it]}]\n"
    )
    holdfast("eval", "eval.yaml", "--export", "waza", cwd=tmp_path)
    (run,) = exported(run_dir(tmp_path, "same"))["tasks"][0]["runs"]
    assert {name: verdict["passed"] for name, verdict in run["validations"].items()} == {
        "check": True,
        "a/check": False,
    }
    assert run["status"] == "failed"


def export_of(folder: Path, *arguments: str) -> dict[str, Any]:
    """The results of an eval in a folder."""
    holdfast("eval", "eval.yaml", "--export", "waza", *arguments, cwd=folder)
    return exported(run_dir(folder, "small"))


def test_a_trial_that_was_not_graded_is_skipped(tmp_path: Path) -> None:
    task = "id: one\ninputs: {prompt: x, follow_up_prompts: [y]}\n"
    task += "checkpoints: [{after_turn: 1, on_failure: stop, graders: [{type: text, contains: [nothing like it]}]}]\n"
    tree(tmp_path, tasks_a_yaml=task)
    results = export_of(tmp_path, "--skip-graders")
    (outcome,) = results["tasks"]
    (run,) = outcome["runs"]
    assert (outcome["status"], run["status"], run["validations"]) == ("skipped", "skipped", {})
    assert "checkpoints" not in run and "error_msg" not in run and "pass_rate_ci" not in outcome["stats"]
    assert (results["summary"]["skipped"], results["summary"]["failed"]) == (1, 0)
    holdfast("grade", run_dir(tmp_path, "small"), cwd=tmp_path)
    holdfast("export", run_dir(tmp_path, "small"), "--to", "waza", cwd=tmp_path)
    assert exported(run_dir(tmp_path, "small"))["tasks"][0]["status"] == "failed"


def test_the_model_of_the_file_is_named_and_groups_are_by_model(tmp_path: Path) -> None:
    config = "executor: mock, model: gpt-5, group_by: model"
    tree(tmp_path, eval_yaml=EVAL.replace("executor: mock", config), tasks_b_yaml="id: two\ninputs: {prompt: x}\n")
    results = export_of(tmp_path)
    assert results["config"]["model_id"] == "gpt-5"
    assert [task["group"] for task in results["tasks"]] == ["gpt-5", "gpt-5"]
    assert results["summary"]["groups"] == [{"name": "gpt-5", "passed": 2, "total": 2, "avg_score": 1.0}]
    assert "statistics" not in results["summary"]
    stats = results["tasks"][0]["stats"]
    assert (stats["ci95_lo"], stats["ci95_hi"]) == (0.0, 0.0)  # one trial has no spread
    assert "pass_rate_ci" not in stats and "bootstrap_ci" not in stats


def test_several_trials_have_intervals_and_a_reliability_curve(kitchen: dict[str, Any]) -> None:
    statistics = kitchen["summary"]["statistics"]
    assert statistics["pass_hat_k"] == [pytest.approx(1 / 3), pytest.approx(1 / 3)]
    assert statistics["success_rate_ci"]["mean"] == pytest.approx(1 / 3)
    interval = statistics["bootstrap_ci"]
    assert (interval["num_bootstraps"], interval["mean"]) == (10_000, pytest.approx((1 + 0 + 0.75) / 3))
    assert 0 <= interval["lower"] <= interval["mean"] <= interval["upper"] <= 1
    stats = tasks(kitchen)["soup"]["stats"]
    assert stats["pass_rate_ci"] == {
        "lower": pytest.approx(0.3424, abs=1e-4),
        "upper": 1.0,
        "mean": 1.0,
        "confidence_level": 0.95,
    }
    assert stats["bootstrap_ci"]["lower"] == stats["bootstrap_ci"]["upper"] == 1.0


def test_the_numbers_are_those_of_wazas_own_example() -> None:
    numbers, stats = SuiteNumbers(), []
    for passed in (5, 4, 2):
        runs = [{"status": "passed" if n < passed else "failed", "duration_ms": 1} for n in range(5)]
        runs = [{**run, "_score": float(run["status"] == "passed"), "_plain": None} for run in runs]
        stats.append(task_stats(runs))
        numbers.add(runs, stats[-1])
    assert stats[1]["pass_rate_ci"]["lower"] == pytest.approx(0.3755, abs=1e-4)
    assert stats[1]["pass_rate_ci"]["upper"] == pytest.approx(0.9638, abs=1e-4)
    statistics = numbers.statistics(1, 3)
    assert statistics is not None
    assert statistics["pass_hat_k"] == pytest.approx([0.7333, 0.5667, 0.4667, 0.4, 0.3333], abs=1e-4)
    assert statistics["success_rate_ci"]["lower"] == pytest.approx(0.0615, abs=1e-4)
    assert statistics["success_rate_ci"]["upper"] == pytest.approx(0.7923, abs=1e-4)


def test_failed_checks_of_a_checkpoint_are_named_in_order(tmp_path: Path) -> None:
    checks = "{type: text, name: zebra, contains: [no]}, {type: text, name: ape, contains: [no]}"
    task = f"id: one\ninputs: {{prompt: x}}\ncheckpoints: [{{after_turn: 1, on_failure: stop, graders: [{checks}]}}]\n"
    tree(tmp_path, tasks_a_yaml=task)
    (run,) = export_of(tmp_path)["tasks"][0]["runs"]
    assert run["error_msg"] == "checkpoint after_turn=1 failed (on_failure: stop): ape, zebra"
    assert run["checkpoints"][0]["validations"]["ape"]["details"]["failures"] == [
        run["checkpoints"][0]["validations"]["ape"]["feedback"]
    ]


RESPONDER = "id: {id}\ninputs:\n  prompt: x\n  responder: {{model: p, instructions: y, max_followups: {most}}}\n"


@pytest.mark.parametrize(
    ("decision", "responder"),
    [
        ({"action": "stop", "reason": "done"}, {"followups_sent": 0, "outcome": "stopped"}),
        ({"action": "reply", "message": "more"}, {"followups_sent": 2, "outcome": "cap_exhausted"}),
        ({"action": "abstain", "reason": "too vague"}, {"outcome": "abstained", "reason": "too vague"}),
    ],
)
def test_how_a_simulated_user_ended_the_conversation(
    tmp_path: Path, decision: dict[str, str], responder: dict[str, Any]
) -> None:
    tree(tmp_path, tasks_a_yaml=RESPONDER.format(id="played", most=2), tasks_b_yaml="id: plain\ninputs: {prompt: x}\n")
    abstains = decision["action"] == "abstain"
    with server(answer=json.dumps(decision)) as user:
        options = ["--export", "waza", f"responder.base_url={user.base_url}", "limits.retries=0"]
        holdfast("eval", "eval.yaml", *options, cwd=tmp_path, check=3 if abstains else 0)
    by_id = tasks(exported(run_dir(tmp_path, "small")))
    assert by_id["played"]["runs"][0]["responder"] == responder
    assert "responder" not in by_id["plain"]["runs"][0]
