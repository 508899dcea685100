"""Verdicts on tokens and time are about an output as it was made: the same words, made anew, are looked at again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.plan.plan import Slot
from holdfast.store.heads import Moment
from tests.support.running import lines

if TYPE_CHECKING:
    from pathlib import Path

AGENT = """\
import json
import time
from pathlib import Path
from holdfast.store.records import Usage  # noqa: TC001 - msgspec reads annotations when it runs
from holdfast.targets.types import Reply

def reply(prompt, context):
    how = json.loads(Path({how!r}).read_text())
    if prompt == how.get("fails"):
        raise RuntimeError("down")
    time.sleep(how.get("sleeps", 0))
    return Reply(text="the same words", usage=Usage(how["tokens"], 1, 1, 0.0))
"""
READS = {
    "tokens": {"type": "behavior", "max_tokens": 100},
    "time": {"type": "behavior", "max_duration_ms": 3_600_000},
    "code": {"type": "code", "assertions": ["duration_ms < 3_600_000"]},
}
DOES_NOT = {
    "text": {"type": "text", "contains": "same"},
    "calls": {"type": "behavior", "max_tool_calls": 3},
    "untimed": {"type": "code", "assertions": ["'same' in output"]},
}


@pytest.fixture
def evaluate(tmp_path: Path) -> Any:
    (tmp_path / "agent.py").write_text(AGENT.format(how=str(tmp_path / "how.json")))

    def run(graders: Any, how: Any, **keys: Any) -> Any:
        (tmp_path / "how.json").write_text(json.dumps({"tokens": 10, **how}))
        return holdfast.evaluate(
            name="e",
            samples=[{"id": "a"}],
            prompt="{{ id }}",
            target={"python": f"{tmp_path}/agent.py:reply"},
            graders=[{"name": name, **grader} for name, grader in graders.items()],
            runs_dir=tmp_path / "runs",
            files=["!*how.json"],
            **{"limits": {"retries": 0}, **keys},
        )

    return run


def forget_output(run: Any) -> None:
    """Remove the output of a trial and keep its verdicts, so that the output is generated again."""
    for name in ("outputs.jsonl", "steps.jsonl", "metrics.json", "results.json"):
        (run.path / name).unlink(missing_ok=True)


def statuses_of(run: Any) -> Any:
    return {name: grade["status"] for name, grade in run.results()[0]["grades"].items()}


def grades(run: Any, name: Any) -> Any:
    return [grade for grade in lines(run.path / "grades.jsonl") if grade["grader"] == name]


def count(run: Any, name: Any) -> Any:
    return len(grades(run, name))


def last(run: Any, name: Any) -> Any:
    return grades(run, name)[-1]


def test_a_regenerated_text_is_graded_again_only_by_graders_of_usage_and_time(evaluate: Any) -> None:
    graders = {**READS, **DOES_NOT}
    first = evaluate(graders, {})
    assert statuses_of(first) == dict.fromkeys(graders, "passed")
    forget_output(first)
    second = evaluate(graders, {"tokens": 1000})
    assert statuses_of(second) == {**dict.fromkeys(graders, "passed"), "tokens": "failed"}
    counts = {name: count(second, name) for name in graders}
    assert counts == {**dict.fromkeys(READS, 2), **dict.fromkeys(DOES_NOT, 1)}
    (output,) = second.outputs()
    assert last(second, "time")["details"]["duration_ms"] == output["timing"]["seconds"] * 1000


def test_an_assertion_that_does_not_name_the_time_cannot_see_it(evaluate: Any) -> None:
    hidden = {"type": "code", "assertions": ["'duration' + '_ms' not in globals()"]}
    assert statuses_of(evaluate({"hidden": hidden}, {})) == {"hidden": "passed"}


def test_an_unchanged_output_keeps_its_verdicts(evaluate: Any) -> None:
    graders = {**READS, **DOES_NOT}
    run = evaluate(graders, {})
    for name in ("metrics.json", "results.json"):
        (run.path / name).unlink()
    again = evaluate(graders, {"tokens": 1000})
    assert statuses_of(again) == dict.fromkeys(graders, "passed")
    assert {count(again, name) for name in graders} == {1}


CHECKPOINT = {"after_turn": 1, "graders": [{"name": name, **grader} for name, grader in READS.items()]}


class TestCheckpoints:
    def test_a_conversation_of_one_turn_is_graded_once_and_finished(self, evaluate: Any) -> None:
        run = evaluate({}, {}, checkpoints=[CHECKPOINT])
        assert run.exit_code == 0 and {count(run, name) for name in READS} == {1}
        for name in ("metrics.json", "results.json"):
            (run.path / name).unlink()
        assert evaluate({}, {}, checkpoints=[CHECKPOINT]).exit_code == 0
        assert {count(run, name) for name in READS} == {1}

    def test_a_resumed_conversation_keeps_the_verdicts_of_its_first_turns(self, evaluate: Any) -> None:
        """The time that a turn took is the time that it took, also for the process that only reads of it."""
        keys: dict[str, Any] = {"checkpoints": [CHECKPOINT], "follow_ups": ["more"]}
        first = evaluate({}, {"fails": "more"}, **keys)
        assert first.exit_code == 3 and {count(first, name) for name in READS} == {1}
        second = evaluate({}, {"tokens": 1000}, **keys)
        assert second.exit_code == 0 and {count(second, name) for name in READS} == {1}
        assert statuses_of(second) == {f"checkpoint@1/{name}": "passed" for name in READS}
        (output,) = second.outputs()
        assert last(second, "time")["details"]["duration_ms"] == output["marks"][0]["seconds"] * 1000


def test_the_time_of_a_conversation_spans_all_its_processes(evaluate: Any) -> None:
    grader = {"time": {"type": "behavior", "max_duration_ms": 250}}
    keys: dict[str, Any] = {"follow_ups": ["more"]}
    assert evaluate(grader, {"fails": "more", "sleeps": 0.3}, **keys).exit_code == 3
    run = evaluate(grader, {}, **keys)
    (output,) = run.outputs()
    assert statuses_of(run) == {"time": "failed"}
    assert output["timing"]["seconds"] >= output["marks"][-1]["seconds"] >= 0.3


moments = st.builds(Moment, st.sampled_from(["d1", "d2"]), st.sampled_from([None, 1, 2]), st.sampled_from([0.5, 1.5]))


@given(one=moments, other=moments, measures=st.sampled_from([(), ("tokens",), ("seconds",), ("tokens", "seconds")]))
def test_a_key_covers_what_its_grader_reads_and_no_more(one: Any, other: Any, measures: Any) -> None:
    slot = Slot("f", None, False, None, measures)
    same = one.digest == other.digest and all(getattr(one, name) == getattr(other, name) for name in measures)
    assert (slot.judged(one, None) == slot.judged(other, None)) == same
    if not measures:
        assert slot.judged(one, None) == one.digest
