"""A trial turn by turn: what was said, called, checked and left out, each where it happened."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import holdfast
from holdfast.report.chat import read_messages
from holdfast.report.run_view import GradedTrial, Pending, RunView
from holdfast.report.timeline import Timeline, trial_timeline
from holdfast.store.lines import scan, seal
from holdfast.store.rundir import RunDir
from tests.support.lab import Lab, rows
from tests.support.running import Server, module_server, server
from tests.support.showcase import agent_run

if TYPE_CHECKING:
    from pathlib import Path


provider = module_server()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return agent_run(tmp_path_factory.mktemp("shop"))


@pytest.fixture
def large_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that has a published index, as a large one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_INDEX_BYTES", "1")
    (tmp_path / "tools.py").write_text("def search(place: str) -> str:\n    return place\n")
    with server(tool_calls=1) as model:
        run = holdfast.evaluate(
            name="e",
            samples=[{"id": f"s{number}"} for number in range(12)],
            prompt="Begin.",
            target={"model": "m", "base_url": model.base_url, "tools": [{"python": "tools.py:search"}]},
            graders=[{"type": "text", "contains": "part"}],
            runs_dir=tmp_path / "runs",
        )
    return run.path


def timeline(run: Path, sample: str) -> Timeline:
    view = RunView(RunDir(run))
    trial = view.trial(sample, 1)
    assert trial is not None
    return trial_timeline(view, trial)


class TestOneTrial:
    def test_a_single_trial_equals_the_same_trial_of_a_full_read(self, run: Path) -> None:
        whole = RunView(RunDir(run))
        trials = list(whole.everything())
        assert [type(trial) for trial in trials] == [GradedTrial] * 3 + [Pending]
        for trial in trials:
            sample = trial.output.sample if isinstance(trial, GradedTrial) else trial.sample
            assert RunView(RunDir(run)).trial(sample, 1) == trial
            assert trial_timeline(whole, trial) == timeline(run, sample)

    def test_repeated_outputs_and_many_trials_are_told_apart(self, tmp_path: Path, provider: Server) -> None:
        lab = Lab(tmp_path, provider, rows=rows(12), spec={"trials": 3})
        lab.rows[3]["id"] = 's"1\n'  # a name that contains another, with characters that JSON escapes
        lab.rows[4]["id"] = 1
        run = lab.eval().run
        view = RunView(RunDir(run))
        trials = list(view.trials())
        assert len(trials) == 36
        for trial in trials:
            assert RunView(RunDir(run)).trial(trial.output.sample, trial.output.trial) == trial
        assert {trial.output.sample for trial in trials} >= {'s"1\n', "1"}

    def test_a_wrong_place_of_a_row_costs_only_time(self, tmp_path: Path, provider: Server) -> None:
        run = Lab(tmp_path, provider, rows=rows(30), spec={"trials": 2}).eval().run
        trials = list(RunView(RunDir(run)).trials())
        for number, trial in enumerate(trials):
            name = trial.output.sample, trial.output.trial
            right = RunView(RunDir(run)).trial(*name, near=number / len(trials))
            wrong = RunView(RunDir(run)).trial(*name, near=1 - number / len(trials))
            assert right == wrong == trial

    def test_of_verdicts_that_were_given_again_the_latest_counts(self, tmp_path: Path, provider: Server) -> None:
        lab = Lab(tmp_path, provider, rows=rows(4))
        (tmp_path / "mood.py").write_text(
            "from pathlib import Path\n"
            "def mood(output):\n"
            "    words = Path(__file__).with_name('words.txt').read_text()\n"
            "    return {'score': 1.0, 'feedback': words}\n"
        )
        lab.spec["graders"].append({"type": "python", "name": "mood", "function": "mood.py:mood"})
        lab.spec["files"] = ["!words.txt"]
        (tmp_path / "words.txt").write_text("fine")
        run = lab.eval().run
        (tmp_path / "words.txt").write_text("better")
        lab.do("grade", run, "--again")
        trials = list(RunView(RunDir(run)).trials())
        assert [trial.grades[-1].feedback for trial in trials] == ["better"] * 4
        for trial in trials:
            assert RunView(RunDir(run)).trial(trial.output.sample, 1) == trial

    def test_a_trial_of_a_large_run_is_found_without_reading_its_journals(
        self, large_run: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = RunView(RunDir(large_run))
        steps = {trial.output.sample: (trial, whole.steps(trial.output.key)) for trial in whole.trials()}
        monkeypatch.setattr("holdfast.store.index.read_blocks", None)
        for sample, (trial, calls) in steps.items():
            view = RunView(RunDir(large_run))
            assert view.trial(sample, 1) == trial
            assert view.steps(trial.output.key) == calls and len(calls) == 3

    def test_an_output_that_came_after_the_report_counts(self, large_run: Path) -> None:
        line = next(line.data for line in scan(large_run / "outputs.jsonl") if b'"sample":"s3",' in line.data)
        record = {**json.loads(line), "output": "later"}
        del record["sum"]
        record["timing"]["started"] += 1
        with (large_run / "outputs.jsonl").open("ab") as file:
            file.write(seal(msgspec.json.encode(record)))
        trial = RunView(RunDir(large_run)).trial("s3", 1)
        assert isinstance(trial, GradedTrial) and trial.output.output == "later"

    def test_unknown_samples_and_trial_numbers_have_no_trial(self, run: Path) -> None:
        view = RunView(RunDir(run))
        assert [view.trial("te", 1), view.trial("tea", 2), view.trial("tea", 0), view.trial("", 1)] == [None] * 4

    def test_a_trial_whose_row_is_gone_is_still_there(self, run: Path, tmp_path: Path) -> None:
        shutil.copytree(run.parents[2], tmp_path / "shop")
        moved = tmp_path / "shop" / run.relative_to(run.parents[2])
        manifest = json.loads((moved / "manifest.json").read_text())
        manifest["folder"] = str(tmp_path / "nowhere")
        (moved / "manifest.json").write_text(json.dumps(manifest))
        shown = timeline(moved, "salt")
        assert shown.fields == {} and [turn.state for turn in shown.turns] == ["answered", "not_asked"]
        assert RunView(RunDir(moved)).trial("broken", 1) is None


class TestConversation:
    def test_tool_calls_have_their_results_beside_them(self, run: Path) -> None:
        shown = timeline(run, "tea")
        assert [message.role for message in shown.opening] == ["system"]
        first = shown.turns[0]
        assert [(message.number, message.role) for message in first.messages] == [
            (2, "user"),
            (3, "assistant"),
            (5, "assistant"),
        ]
        (call,) = first.messages[1].calls
        assert (call.name, json.loads(call.arguments), call.answer) == ("price", {"thing": "tea"}, 4)
        assert json.loads(call.result or "") == {"thing": "tea", "price": 3}
        assert first.messages[1].reasoning.startswith("The customer wants a price")

    def test_equal_ids_answer_the_last_call_and_answers_to_nothing_stay_messages(self) -> None:
        def call(arguments: str) -> dict[str, Any]:
            function = {"name": "f", "arguments": arguments}
            return {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": function}]}

        def answer(text: str) -> dict[str, Any]:
            return {"role": "tool", "tool_call_id": "a", "content": text}

        first, stray, second = read_messages([call("{}"), answer("1"), answer("2"), call("no JSON"), answer("3")])
        assert [(use.arguments, use.result, use.answer) for use in first.calls] == [("{}", "1", 2)]
        assert (stray.number, stray.role, stray.text) == (3, "tool", "2")
        assert [(use.arguments, use.result, use.answer) for use in second.calls] == [("no JSON", "3", 5)]

    def test_parts_of_a_message_are_texts_images_and_what_else_there_is(self) -> None:
        parts: list[Any] = [
            {"type": "text", "text": "look"},
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            {"type": "audio", "data": 1},
            "odd",
        ]
        (message,) = read_messages([{"role": "user", "content": parts, "refusal": "no", "logprobs": None}])
        assert [(image.address[:5], image.inline) for image in message.images] == [("https", False), ("data:", True)]
        assert message.text.startswith("look\n{") and message.text.endswith("odd")
        assert message.others == {"refusal": "no"}

    def test_failed_attempts_stand_at_the_turn_where_they_happened(self, run: Path) -> None:
        shown = timeline(run, "tea")
        assert [[attempt.message for attempt in turn.attempts] for turn in shown.turns] == [
            [],
            ["agent.py:18: ConnectionError: the stock service hung up"],
            [],
        ]
        assert shown.facts.attempt == 2 and "ConnectionError" in shown.turns[1].attempts[0].traceback

    def test_files_are_compared_with_the_turn_before(self, run: Path) -> None:
        files = [{file.path: file for file in turn.files} for turn in timeline(run, "tea").turns]
        changes = [{path: file.change for path, file in turn.items()} for turn in files]
        assert changes == [
            {"notes.md": "added", "draft.txt": "unchanged"},
            {"notes.md": "changed", "draft.txt": "removed", "bill.json": "added"},
            {"notes.md": "changed", "bill.json": "unchanged"},
        ]
        assert "+- turn 2: tea costs 3" in files[1]["notes.md"].difference.splitlines()
        assert "-to be written" in files[1]["draft.txt"].difference.splitlines()

    def test_the_recorded_calls_have_times(self, run: Path) -> None:
        steps = timeline(run, "tea").steps
        assert [step.name for step in steps if step.kind == "tool"] == ["price"] * 3
        assert [step.turn for step in steps if step.kind == "turn"] == [1, 2, 3]
        assert min(step.started for step in steps) == 0.0

    def test_the_place_of_the_stored_line_is_given(self, run: Path) -> None:
        line = timeline(run, "milk").line
        assert line is not None
        data = (run / line.journal).read_bytes()[line.offset : line.offset + line.length]
        assert json.loads(data)["sample"] == "milk"


class TestCheckpoints:
    def test_a_checkpoint_follows_the_turn_that_it_graded(self, run: Path) -> None:
        shown = timeline(run, "milk")
        bands = [turn.checkpoint for turn in shown.turns]
        assert [band and (band.turn, band.state, band.ended_here) for band in bands] == [
            (1, "passed", False),
            (2, "failed", False),
            None,
        ]
        assert bands[1] is not None and bands[1].verdicts[0].feedback
        assert [(verdict.name, verdict.status) for verdict in shown.graders] == [("polite", "passed")]
        assert shown.facts.status == "failed"

    def test_a_stop_ends_the_conversation_and_what_was_not_asked_is_shown(self, run: Path) -> None:
        shown = timeline(run, "salt")
        assert [turn.state for turn in shown.turns] == ["answered", "not_asked", "not_asked"]
        stop, later = shown.turns[0].checkpoint, shown.turns[1].checkpoint
        assert stop is not None and (stop.state, stop.stops, stop.ended_here) == ("failed", True, True)
        assert later is not None and (later.state, later.ended_here) == ("not_reached", False)
        assert [turn.messages[0].text for turn in shown.turns[1:]] == [
            "And the bill for one salt?",
            "Thank you. What was the price of salt again?",
        ]
        assert [verdict.status for verdict in shown.graders] == ["not_reached"]
        assert shown.facts.stop == "checkpoint@1"


class TestInProgress:
    def test_a_trial_without_an_output_shows_its_attempts(self, run: Path) -> None:
        shown = timeline(run, "broken")
        assert (shown.facts.status, shown.facts.attempt) == ("error", 2)
        (turn,) = shown.turns
        assert turn.state == "running" and turn.messages[0].text == "What does broken cost?"
        assert [attempt.final for attempt in turn.attempts] == [False, True]

    def test_turns_calls_and_checkpoints_of_a_pending_trial_are_shown(self, run: Path, tmp_path: Path) -> None:
        shutil.copytree(run, tmp_path / "run")
        for name in ("outputs.jsonl", "steps.jsonl"):
            path = tmp_path / "run" / name
            kept = [line for line in path.read_text().splitlines(keepends=True) if _goes_on(json.loads(line), name)]
            path.write_text("".join(kept))
        shown = timeline(tmp_path / "run", "tea")
        whole = timeline(run, "tea")
        assert shown.opening == whole.opening
        assert [turn.state for turn in shown.turns] == ["answered", "answered", "running"]
        assert [turn.messages for turn in shown.turns[:2]] == [turn.messages for turn in whole.turns[:2]]
        assert [turn.checkpoint for turn in shown.turns[:2]] == [turn.checkpoint for turn in whole.turns[:2]]
        assert [turn.files for turn in shown.turns] == [*(turn.files for turn in whole.turns[:2]), []]
        assert [turn.tokens for turn in shown.turns] == [*(turn.tokens for turn in whole.turns[:2]), None]
        assert [call.name for call in shown.turns[2].listed] == ["price"]
        assert shown.turns[2].messages[0].text == "Thank you. What was the price of tea again?"
        assert shown.facts.turns == 2 and len(shown.turns[1].attempts) == 1


def _goes_on(record: dict[str, Any], name: str) -> bool:
    """Drop what `tea` has recorded since the tool call of its third turn."""
    return record["sample"] != "tea" or (name == "steps.jsonl" and (record["turn"], record["kind"]) != (3, "turn"))


def test_a_timeline_is_read_back_from_its_json(run: Path) -> None:
    for sample in ("tea", "milk", "salt", "broken"):
        shown = timeline(run, sample)
        assert msgspec.json.decode(msgspec.json.encode(shown), type=Timeline) == shown
