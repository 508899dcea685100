"""Checkpoints: graders in the middle of a conversation, and what their failure does to it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import evaluate
from holdfast.engine.retry import Deadline
from tests.support.breaking import kept
from tests.support.lab import Lab
from tests.support.running import Server, lines, metrics, module_server, server
from tests.support.specs import command, write_spec

if TYPE_CHECKING:
    from pathlib import Path

NOBODY = "http://127.0.0.1:1/v1"
GOOD, BAD = "please", "now!"
"""what the two users say in turn 2; the target says it again"""


provider = module_server()


def polite(**keys: Any) -> dict[str, Any]:
    return {"type": "text", "name": "polite", "not_contains": ["!"], **keys}


@pytest.fixture
def lab(tmp_path: Path, provider: Server) -> Lab:
    """Two conversations of four turns that both end well; one of them is rude in turn 2."""
    rows = [
        {"id": "good", "question": "hello", "second": GOOD, "expected": "bye good"},
        {"id": "bad", "question": "hello", "second": BAD, "expected": "bye bad"},
    ]
    spec = {
        "follow_ups": ["{{ second }}", "so", "bye {{ id }}"],
        "checkpoints": [
            {"after_turn": 2, "on_failure": "stop", "graders": [polite()]},
            {"after_turn": 3, "graders": [{"type": "text", "name": "so", "contains": ["so"]}]},
        ],
    }
    return Lab(tmp_path, provider, rows=rows, spec=spec)


def results(run: Path) -> dict[str, dict[str, Any]]:
    return {entry["sample"]: entry for entry in json.loads((run / "results.json").read_text())["trials"]}


def statuses(run: Path, sample: str) -> dict[str, str]:
    """Return the status of each grader for a trial."""
    return {name: grade["status"] for name, grade in results(run)[sample]["grades"].items()}


def outputs(run: Path) -> dict[str, dict[str, Any]]:
    return {output["sample"]: output for output in kept(run)}


ALL_PASSED = {"checkpoint@2/polite": "passed", "checkpoint@3/so": "passed", "correct": "passed"}
STOPPED = {"checkpoint@2/polite": "failed", "checkpoint@3/so": "not_reached", "correct": "not_reached"}


def use_grader(lab: Lab, body: str, on_failure: str = "stop") -> None:
    """A Python function as the only grader of the first checkpoint."""
    (lab.folder / "check.py").write_text(f"from pathlib import Path\ndef polite(output):\n    {body}\n")
    lab.spec["checkpoints"][0] = {
        "after_turn": 2,
        "on_failure": on_failure,
        "graders": [{"type": "python", "name": "polite", "function": "check.py:polite"}],
    }
    lab.spec["limits"] = {"retries": 0}


WAITS_TO_BE_MENDED = """if not Path(__file__).with_name('mended').exists():
        raise RuntimeError('no idea')
    return '!' not in output"""


def test_a_failed_checkpoint_that_stops_ends_the_conversation(lab: Lab, provider: Server) -> None:
    provider.reset()
    done = lab.eval()
    assert done.asked == 4 + 2
    assert provider.stats()["asked"] == {"hello": 2, GOOD: 1, BAD: 1, "so": 1, "bye good": 1}
    stopped, whole = outputs(done.run)["bad"], outputs(done.run)["good"]
    assert (stopped["stop"], stopped["turns"], stopped["output"]) == ("checkpoint@2", 2, BAD)
    assert (whole["stop"], whole["turns"], whole["output"]) == ("stop", 4, "bye good")
    assert "stopped_by" in stopped and "stopped_by" not in whole


def test_graders_after_a_stop_are_not_reached_and_the_trial_fails_with_0(lab: Lab) -> None:
    run = lab.eval().run
    assert statuses(run, "good") == ALL_PASSED and statuses(run, "bad") == STOPPED
    entries = results(run)
    assert (entries["good"]["status"], entries["good"]["score"]) == ("passed", 1.0)
    assert (entries["bad"]["status"], entries["bad"]["score"]) == ("failed", 0.0)
    report = metrics(run)
    assert (report["score"], report["passed"], report["coverage"]) == (0.5, 0.5, 1.0)
    assert list(report["metrics"]) == list(ALL_PASSED)
    assert report["metrics"]["checkpoint@2/polite"]["failed"] == 1
    for name in ("checkpoint@3/so", "correct"):
        assert (report["metrics"][name]["n"], report["metrics"][name]["not_reached"]) == (1, 1)


def test_the_table_shows_how_many_passed_and_were_not_reached_turn_by_turn(lab: Lab) -> None:
    shown = lab.eval().out
    rows = {
        cells[0].strip(): [cell.strip() for cell in cells[3:]]
        for line in shown.splitlines()
        if line.startswith("│") and (cells := line.strip("│").split("│"))
    }
    assert rows["checkpoint@2/polite"] == ["1", "2", "0"]
    assert rows["checkpoint@3/so"] == ["1", "1", "1"]


def test_a_failed_checkpoint_that_continues_fails_the_trial_despite_a_passing_end(lab: Lab) -> None:
    lab.spec["checkpoints"][0]["on_failure"] = "continue"
    done = lab.eval()
    assert done.asked == 8
    assert outputs(done.run)["bad"]["stop"] == "stop"
    assert statuses(done.run, "bad") == {**ALL_PASSED, "checkpoint@2/polite": "failed"}
    entry = results(done.run)["bad"]
    assert (entry["status"], entry["score"]) == ("failed", 1.0)
    assert metrics(done.run)["passed"] == 0.5


def test_a_checkpoint_runs_only_its_graders_on_its_turn(lab: Lab) -> None:
    (lab.folder / "check.py").write_text("def seen(messages, output):\n    return {'score': 1, 'feedback': output}\n")
    seen = {"type": "python", "name": "seen", "function": "check.py:seen"}
    lab.rows = lab.rows[:1]
    lab.spec |= {"checkpoints": [{"after_turn": 1, "graders": [seen]}, {"after_turn": 3, "graders": [seen]}]}
    lab.spec["graders"] = [seen]
    run = lab.eval().run
    grades = [(grade["turn"], grade["grader"], grade["feedback"]) for grade in kept(run, "grades")]
    assert grades == [(1, "seen", "hello"), (3, "seen", "so"), (None, "seen", "bye good")]
    assert list(metrics(run)["metrics"]) == ["checkpoint@1/seen", "checkpoint@3/seen", "seen"]


@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_a_checkpoint_grader_that_crashes_stops_nothing_and_leaves_the_trial_pending(lab: Lab, on_failure: str) -> None:
    use_grader(lab, WAITS_TO_BE_MENDED, on_failure)
    first = lab.eval(check=3)
    assert first.asked == 8
    assert {output["stop"] for output in kept(first.run)} == {"stop"}
    assert not (first.run / "metrics.json").exists()
    crashed = [grade for grade in kept(first.run, "grades") if grade["status"] == "error"]
    assert crashed and all(grade["turn"] == 2 and "no idea" in grade["feedback"] for grade in crashed)
    assert {error["where"] for error in lines(first.run / "errors.jsonl")} == {"polite"}

    (lab.folder / "mended").touch()
    second = lab.eval()
    assert second.run == first.run and second.asked == 0
    assert second.graded["polite"] == 2
    assert statuses(second.run, "good") == ALL_PASSED
    entry = results(second.run)["bad"]
    assert entry["status"] == "failed"
    if on_failure == "stop":
        assert statuses(second.run, "bad") == STOPPED and entry["score"] == 0.0
    else:
        assert statuses(second.run, "bad") == {**ALL_PASSED, "checkpoint@2/polite": "failed"}


def test_skipped_checkpoints_stop_nothing_and_are_graded_later_on_the_stored_turns(lab: Lab) -> None:
    skipped = lab.eval("--skip-graders")
    assert skipped.asked == 8 and kept(skipped.run, "grades") == []
    assert {output["turns"] for output in kept(skipped.run)} == {4}

    lab.spec["target"]["base_url"] = NOBODY
    lab.write()
    graded = lab.do("grade", skipped.run)
    assert graded.work == (0, {"polite": 2, "so": 1, "correct": 1})
    assert statuses(skipped.run, "good") == ALL_PASSED and statuses(skipped.run, "bad") == STOPPED
    assert {grade["grader"]: grade["turn"] for grade in kept(skipped.run, "grades")} == {
        "polite": 2,
        "so": 3,
        "correct": None,
    }


def test_a_checkpoint_sees_the_same_reply_later_as_on_the_way(lab: Lab) -> None:
    """An agent may say one thing and show another in its messages: graders are given what it says."""
    (lab.folder / "agent.py").write_text(
        "def reply(prompt, context):\n"
        "    shown = [{'role': 'assistant', 'content': 'calling a tool!'}, {'role': 'tool', 'content': 'rude!'}]\n"
        "    return {'output': prompt, 'messages': shown, 'state': {'turn': context.turn}}\n"
    )
    lab.spec["target"] = {"python": "agent.py:reply"}
    on_the_way = lab.eval("--runs-dir", "on-the-way").run
    assert statuses(on_the_way, "good") == ALL_PASSED and statuses(on_the_way, "bad") == STOPPED
    run = lab.eval("--skip-graders").run
    lab.do("grade", run)
    assert statuses(run, "good") == ALL_PASSED and statuses(run, "bad") == STOPPED


def test_a_stop_checkpoint_edited_so_that_it_passes_asks_only_for_the_missing_turns(lab: Lab, provider: Server) -> None:
    lab.eval()
    lab.spec["checkpoints"][0]["graders"] = [polite(not_contains=["?"])]
    provider.reset()
    done = lab.eval()
    assert provider.stats()["asked"] == {"so": 1, "bye bad": 1}
    assert statuses(done.run, "bad") == statuses(done.run, "good") == ALL_PASSED
    replies = [message["content"] for message in outputs(done.run)["bad"]["messages"][1::2]]
    assert replies == ["hello", BAD, "so", "bye bad"]


def test_a_stop_checkpoint_turned_into_one_that_continues_asks_only_for_the_missing_turns(lab: Lab) -> None:
    lab.eval()
    lab.spec["checkpoints"][0]["on_failure"] = "continue"
    done = lab.eval()
    assert done.asked == 2
    assert statuses(done.run, "bad") == {**ALL_PASSED, "checkpoint@2/polite": "failed"}


def test_a_row_corrected_for_a_stop_checkpoint_asks_only_for_the_turns_that_it_had_stopped(lab: Lab) -> None:
    lab.rows = [{**row, "rude": "!"} for row in lab.rows]
    lab.spec["checkpoints"][0]["graders"] = [polite(not_contains=["{{ rude }}"])]
    assert statuses(lab.eval().run, "bad") == STOPPED
    lab.rows = [{**row, "rude": "?"} for row in lab.rows]
    done = lab.eval()
    assert done.asked == 2, "of the conversation that went on, nothing"
    assert statuses(done.run, "bad") == statuses(done.run, "good") == ALL_PASSED


def test_editing_the_graders_of_a_checkpoint_that_continues_asks_nothing(lab: Lab) -> None:
    lab.spec["checkpoints"][0]["on_failure"] = "continue"
    lab.eval()
    lab.spec["checkpoints"][0]["graders"] = [polite(not_contains=["please"])]
    done = lab.eval()
    assert done.work == (0, {"polite": 2})
    assert statuses(done.run, "good")["checkpoint@2/polite"] == "failed"
    assert statuses(done.run, "bad")["checkpoint@2/polite"] == "passed"


def test_a_checkpoint_added_to_a_finished_run_grades_the_stored_turns(lab: Lab) -> None:
    checkpoints = lab.spec.pop("checkpoints")
    assert lab.eval().asked == 8
    lab.spec["checkpoints"] = checkpoints
    done = lab.eval()
    assert done.asked == 0
    assert statuses(done.run, "good") == ALL_PASSED and statuses(done.run, "bad") == STOPPED


def test_a_checkpoint_after_the_end_of_a_shorter_conversation_fails_nothing(lab: Lab) -> None:
    lab.rows = [
        {"id": "long", "question": "hello", "more": ["please", "so"], "expected": "so"},
        {"id": "short", "question": "hello", "more": ["please"], "expected": "please"},
    ]
    lab.spec["follow_ups"] = "more"
    run = lab.eval().run
    assert statuses(run, "long") == ALL_PASSED
    assert statuses(run, "short") == {**ALL_PASSED, "checkpoint@3/so": "not_reached"}
    assert {entry["status"] for entry in results(run).values()} == {"passed"}
    assert metrics(run)["metrics"]["checkpoint@3/so"]["not_reached"] == 1


@pytest.mark.faults
def test_a_reply_is_on_disk_while_its_checkpoint_is_graded(lab: Lab) -> None:
    """The grader takes the process with it: the reply was on disk before."""
    del lab.spec["follow_ups"]
    lab.spec["same_prompt"] = True
    lab.spec["checkpoints"] = lab.spec["checkpoints"][:1]
    use_grader(
        lab,
        "import os, signal\n    died = Path(__file__).with_name('died')\n    if not died.exists():\n"
        "        died.touch()\n        os.kill(os.getpid(), signal.SIGKILL)\n    return True",
    )
    lab.spec["checkpoints"][0]["after_turn"] = 1
    lab.spec["limits"] = {"concurrency": 1}
    assert lab.eval(check=-9).asked == 1
    assert lab.eval().asked == 1  # the other sample's


def test_a_stop_after_the_only_turn_cuts_nothing_short_and_editing_it_asks_nothing(lab: Lab) -> None:
    del lab.spec["follow_ups"]
    lab.spec["same_prompt"] = True
    lab.spec["checkpoints"] = [{"after_turn": 1, "on_failure": "stop", "graders": [polite(not_contains=["hello"])]}]
    assert lab.eval().asked == 2
    lab.spec["checkpoints"][0]["graders"] = [polite()]
    done = lab.eval()
    assert done.asked == 0
    assert statuses(done.run, "good") == {"checkpoint@1/polite": "passed", "correct": "failed"}


def test_a_threshold_lowered_below_the_score_lets_the_conversation_continue(lab: Lab) -> None:
    lab.eval()
    lab.spec["checkpoints"][0]["graders"] = [polite(threshold=0)]
    done = lab.eval()
    assert done.asked == 2 and "polite" not in done.graded  # the score is known, only the limit has moved
    assert statuses(done.run, "bad") == ALL_PASSED


# What is refused

FINE = [{"type": "text", "contains": ["x"]}]
PLAYED = {"model": "m", "instructions": "be brief", "max_followups": 2}


def points(*turns: int, **keys: Any) -> list[dict[str, Any]]:
    return [{"after_turn": turn, "graders": FINE, **keys} for turn in turns]


@pytest.mark.parametrize(
    ("keys", "line", "message"),
    [
        ({"checkpoints": points(0)}, '"after_turn": 0', "greater than or equal to 1"),
        ({"checkpoints": points(-1)}, '"after_turn": -1', "greater than or equal to 1"),
        ({"checkpoints": [{"graders": FINE}]}, None, "after_turn"),
        ({"checkpoints": points(2, 1, 2), "follow_ups": ["x"]}, '"after_turn": 2', "duplicate checkpoint after turn 2"),
        ({"checkpoints": points(2)}, '"after_turn": 2', "at most 1 turns"),
        ({"checkpoints": points(4), "follow_ups": ["x", "y"]}, '"after_turn": 4', "at most 3 turns"),
        ({"checkpoints": points(4), "responder": PLAYED}, '"after_turn": 4', "at most 3 turns"),
        ({"checkpoints": points(1, graders=[])}, '"graders": []', "at least 1"),
        ({"checkpoints": [{"after_turn": 1}]}, None, "graders"),
        ({"checkpoints": points(1, on_failure="abort")}, '"on_failure": "abort"', "'continue' or 'stop'"),
        ({"checkpoints": points(1, graders=[{"type": "text"}])}, None, "check"),
        ({"checkpoints": points(1, graders=[{"type": "txt"}])}, '"type": "txt"', "unknown grader type"),
        ({"checkpoints": points(1, graders=FINE * 2)}, None, "duplicate grader name 'text'"),
        ({"checkpoints": points(1, at="turn")}, '"at": "turn"', "at"),
    ],
)
def test_an_invalid_checkpoint_is_rejected_with_its_line(
    keys: dict[str, Any], line: str | None, message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    path = write_spec(tmp_path, **keys)
    ended = command(monkeypatch, capsys, tmp_path, "eval", path.name)
    assert ended.code == 2
    assert message in ended.err
    text = path.read_text().splitlines()
    numbers = [int(number) for number in re.findall(r"eval\.yaml:(\d+)", ended.err)]
    assert numbers, ended.err
    begin = next(number for number, content in enumerate(text, 1) if '"checkpoints"' in content)
    assert all(number > begin for number in numbers), "the line is inside of checkpoints"
    if line is not None:
        assert any(line in text[number - 1] for number in numbers)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_a_checkpoint_after_the_last_possible_turn_is_accepted(
    turn: int, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    path = write_spec(tmp_path, checkpoints=points(turn), follow_ups=["x", "y"])
    assert command(monkeypatch, capsys, tmp_path, "eval", path.name, "--dry-run").code == 0


def test_waiting_for_a_judge_at_a_checkpoint_does_not_use_the_trials_time(
    lab: Lab, provider: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    postponed: list[tuple[Deadline, float]] = []
    postpone = Deadline.postpone

    def note(deadline: Deadline, seconds: float) -> None:
        postponed.append((deadline, seconds))
        postpone(deadline, seconds)

    monkeypatch.setattr(Deadline, "postpone", note)
    with server(answer="judge", fail={"429": 1.0}, fail_first=1, retry_after=0.5) as judge:
        judged = {"type": "prompt", "name": "polite", "rubric": "Polite?", "model": "j", "base_url": judge.base_url}
        lab.rows = lab.rows[:1]
        lab.spec["checkpoints"] = [{"after_turn": 2, "graders": [judged]}]
        lab.write()
        run = evaluate(lab.eval_file, runs_dir=lab.runs)
        assert judge.stats()["outcomes"] == {"429": 1, "ok": 1}
    assert run.finished and statuses(run.path, "good") == {"checkpoint@2/polite": "passed", "correct": "passed"}
    (limited, waited), (trial, graded) = postponed
    assert trial is not limited, "the judge's own deadline, and then the trial's"
    assert graded >= waited >= 0.5
