"""Graders of tool calls: what was called, how often, in which order and with what."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.errors import AttemptError, ConfigError
from holdfast.graders.build import build_graders
from holdfast.graders.tool_calls import calls_in_messages, skills_of
from holdfast.graders.tool_graders import f1, matches
from holdfast.store.records import Timing, Usage
from tests.support.running import holdfast as running
from tests.support.running import lines
from tests.support.specs import grade, load

if TYPE_CHECKING:
    from pathlib import Path


def call(name: Any, /, **arguments: Any) -> Any:
    return {"id": f"c-{name}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def talk(*calls: Any) -> Any:
    """The messages of a conversation with these calls, each answered."""
    answers = [{"role": "tool", "tool_call_id": one["id"], "content": "done"} for one in calls]
    return [
        {"role": "user", "content": "do it"},
        {"role": "assistant", "content": None, "tool_calls": list(calls)},
        *answers,
        {"role": "assistant", "content": "I did."},
    ]


def verdict_of(folder: Path, block: Any, *calls: Any, **fields: Any) -> Any:
    verdict = grade(folder, block, "I did.", fields={"messages": talk(*calls), **fields})
    assert not isinstance(verdict, AttemptError), verdict
    return verdict


class TestReadingCalls:
    def test_calls_of_all_turns_are_read_in_order_with_their_results(self) -> None:
        messages = [*talk(call("read", path="a")), *talk(call("edit", path="b"), call("run"))]
        calls = calls_in_messages(messages)
        assert [(one.name, one.arguments, one.result) for one in calls] == [
            ("read", {"path": "a"}, "done"),
            ("edit", {"path": "b"}, "done"),
            ("run", {}, "done"),
        ]

    @pytest.mark.parametrize("written", ["{not json", "[1]", '"text"'])
    def test_arguments_that_are_not_a_json_object_stay_as_written(self, written: str) -> None:
        (parsed,) = calls_in_messages(
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": written}}]}]
        )
        assert (parsed.arguments, parsed.raw) == ({}, written)

    def test_a_call_without_a_name_cannot_be_judged(self, tmp_path: Path) -> None:
        messages = [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]
        error = grade(tmp_path, {"type": "tool_calls", "max_calls": 3}, "x", fields={"messages": messages})
        assert isinstance(error, AttemptError) and "a tool call has no name" in error.message

    @pytest.mark.parametrize(
        "use", [call("skill", skill="pdf"), call("Skill", name="pdf"), call("use_skill", command="pdf")]
    )
    def test_a_skill_is_used_by_calling_the_tool_of_that_name(self, use: Any) -> None:
        assert skills_of(calls_in_messages(talk(use, call("read", name="not a skill")))) == ["pdf"]


class TestBehavior:
    @pytest.mark.parametrize(
        ("block", "score"),
        [
            ({"max_tool_calls": 2}, 1),
            ({"max_tool_calls": 1}, 0),
            ({"max_tool_calls": 0}, 0),
            ({"max_tokens": 30}, 1),
            ({"max_tokens": 29}, 0),
            ({"max_duration_ms": 1500}, 1),
            ({"max_duration_ms": 1499}, 0),
            ({"required_tools": ["read", "nothing"]}, 0.5),
            ({"forbidden_tools": ["read", "nothing"]}, 0.5),
            ({"max_tool_calls": 1, "max_tokens": 30, "required_tools": "read", "forbidden_tools": "run"}, 0.5),
        ],
        ids=str,
    )
    def test_the_score_is_the_share_of_rules_that_are_kept(
        self, tmp_path: Path, block: Any, score: float | int
    ) -> None:
        spent = {"usage": Usage(10, 20), "timing": Timing(0.0, 1.5)}
        assert verdict_of(tmp_path, {"type": "behavior", **block}, call("read"), call("run"), **spent).score == score

    @pytest.mark.parametrize("usage", [Usage(), Usage(10, None), Usage(None, 20)])
    def test_uncounted_tokens_are_an_error_and_never_a_pass(self, tmp_path: Path, usage: Any) -> None:
        error = grade(tmp_path, {"type": "behavior", "max_tokens": 100}, "x", fields={"usage": usage})
        assert isinstance(error, AttemptError) and "does not report its tokens" in error.message


class TestSequences:
    @pytest.mark.parametrize(
        ("mode", "got", "passed", "score"),
        [
            ("exact_match", "a b", True, 1),
            ("exact_match", "b a", False, 1),
            ("exact_match", "a b c", False, 0.8),
            ("in_order_match", "a x b", True, 0.8),
            ("in_order_match", "b a", False, 1),
            ("any_order_match", "b a", True, 1),
            ("any_order_match", "b b", False, 0.5),
            ("any_order_match", "", False, 0),
        ],
    )
    def test_calls_that_do_not_match_score_0_and_have_f1_as_a_detail(
        self, tmp_path: Path, mode: str, got: str, passed: bool, score: float | int
    ) -> None:
        block = {"type": "action_sequence", "expected_actions": ["a", "b"], "matching_mode": mode}
        verdict = verdict_of(tmp_path, block, *map(call, got.split()))
        assert (verdict.passed, verdict.score) == (passed, pytest.approx(score if passed else 0))
        assert verdict.details["f1"] == pytest.approx(score)
        partial = verdict_of(tmp_path, {**block, "partial": True}, *map(call, got.split()))
        assert (partial.passed, partial.score) == (passed, pytest.approx(score))

    def test_reports_keep_to_the_mode_unless_a_threshold_is_given(self, tmp_path: Path) -> None:
        (tmp_path / "agent.py").write_text(
            "def reply(prompt):\n"
            "    calls = [{'id': n, 'function': {'name': n, 'arguments': '{}'}} for n in prompt.split()]\n"
            "    return {'output': 'done', 'tool_calls': calls}\n"
        )
        order = {"type": "action_sequence", "expected_actions": ["a", "b"], "matching_mode": "in_order_match"}

        def run(**more: Any) -> Any:
            return holdfast.evaluate(
                name="calls",
                samples=[{"id": "more", "do": "a x b"}, {"id": "wrong", "do": "b a"}],
                prompt="{{ do }}",
                target={"python": str(tmp_path / "agent.py:reply")},
                graders=[{**order, **more}],
                runs_dir=tmp_path / "runs",
            )

        def statuses(finished: Any) -> Any:
            return {
                entry["sample"]: entry["grades"]["action_sequence"]["status"]
                for entry in json.loads((finished.path / "results.json").read_text())["trials"]
            }

        first = run()
        assert statuses(first) == {"more": "passed", "wrong": "failed"}
        assert first.metrics.graders["action_sequence"].threshold is None
        assert statuses(run(threshold=0.9)) == {"more": "failed", "wrong": "failed"}
        assert statuses(run()) == {"more": "passed", "wrong": "failed"}, "the grader's own word is kept"
        assert len(lines(first.path / "grades.jsonl")) == 2, "nothing was graded again"
        running("grade", first.path, "--again", cwd=tmp_path)
        assert statuses(first) == {"more": "passed", "wrong": "failed"}

    @given(st.lists(st.sampled_from("abc"), min_size=1), st.lists(st.sampled_from("abcd")))
    def test_f1_is_a_share_and_does_not_see_order(self, expected: Any, got: Any) -> None:
        score = f1(expected, got)
        assert 0 <= score <= 1
        assert score == f1(sorted(expected), got[::-1])
        assert (score == 1) == (Counter(expected) == Counter(got))
        assert (score == 0) == (not Counter(expected) & Counter(got) and bool(expected or got))

    @given(st.lists(st.sampled_from("abc"), min_size=1), st.lists(st.sampled_from("abcd")))
    def test_a_stricter_mode_never_allows_what_a_looser_one_refuses(self, expected: Any, got: Any) -> None:
        exact, in_order, any_order = (matches(expected, got, mode) for mode in ("exact", "in_order", "any_order"))
        assert exact <= in_order <= any_order

    @pytest.mark.parametrize(
        ("block", "got", "passed", "score"),
        [
            ({"required_skills": ["a"], "mode": "any_order"}, "a", True, 1),
            ({"required_skills": ["a"], "mode": "any_order"}, "a x", True, 2 / 3),
            ({"required_skills": ["a"], "mode": "any_order", "allow_extra": False}, "a x", False, 0),
            (
                {"required_skills": ["a"], "mode": "any_order", "allow_extra": False, "partial": True},
                "a x",
                False,
                2 / 3 * 0.7,
            ),
            ({"required_skills": ["a", "b"], "mode": "in_order"}, "b a", False, 0),
            ({"required_skills": ["a", "b"], "mode": "in_order", "partial": True}, "b a", False, 1),
            ({"required_skills": ["a"], "forbidden_skills": ["b"], "mode": "in_order"}, "a b", False, 0),
            ({"forbidden_skills": ["b"]}, "a", True, 1),
            ({"forbidden_skills": ["b"]}, "", True, 1),
        ],
    )
    def test_skills(self, tmp_path: Path, block: Any, got: str, passed: bool, score: Any) -> None:
        calls = [call("skill", skill=name) for name in got.split()]
        verdict = verdict_of(tmp_path, {"type": "skill_invocation", **block}, call("read"), *calls)
        assert (verdict.passed, verdict.score) == (passed, pytest.approx(score))


MATCHES = [
    ({"equals": 1}, 1.0, True),
    ({"equals": 1}, True, False),
    ({"equals": None}, None, True),
    ({"equals": {"a": [1, 2]}}, {"a": [1, 2]}, True),
    ({"equals": {"a": [1, 2]}}, {"a": [2, 1]}, False),
    ({"equals": "4711"}, 4711, False),
    ({"equals": "cafe\u0301"}, "caf\u00e9", True),
    ("4711", "4711", True),
    ([1, "a"], [1.0, "a"], True),
    (None, None, True),
    (None, "x", False),
    ({"regex": "^auth"}, "authenticate", True),
    ({"regex": "^auth"}, "Auth", False),
    ({"regex": r"\[1,2\]"}, [1, 2], True),
    ({"contains": "b"}, "abc", True),
    ({"contains": "B"}, "abc", False),
    ({"range": {"gte": 1, "lt": 5}}, 1, True),
    ({"range": {"gte": 1, "lt": 5}}, 5, False),
    ({"range": {"gt": 0}}, "1", False),
    ({"range": {"gt": 0}}, True, False),
    ({"json_schema": {"type": "array", "minItems": 1}}, [1], True),
    ({"json_schema": {"type": "array", "minItems": 1}}, [], False),
]


class TestToolCalls:
    @pytest.mark.parametrize(("matcher", "value", "fits"), MATCHES, ids=str)
    def test_an_argument_is_matched(self, tmp_path: Path, matcher: Any, value: Any, fits: Any) -> None:
        block = {"type": "tool_calls", "expect": [{"tool": "find", "args": {"q": matcher}}]}
        assert verdict_of(tmp_path, block, call("find", q=value)).score == float(fits)

    @pytest.mark.parametrize(
        ("block", "score"),
        [
            ({"required_tools": ["read"], "forbidden_tools": ["rm"]}, 1),
            ({"required_tools": ["Read"]}, 0),
            ({"min_calls": 3, "max_calls": 1}, None),
            ({"min_calls": 3}, 0),
            ({"max_calls": 2, "min_calls": 0}, 1),
            ({"max_calls": 1, "min_calls": 2}, None),
            ({"expect": [{"tool": "read"}, {"tool": "READ"}]}, 0.5),
            ({"expect": [{"tool": "rea"}, {"tool": {"pattern": "^rea"}}]}, 0.5),
            ({"required_tools": ["rea", {"pattern": "^rea"}], "forbidden_tools": {"pattern": "(?i)^R"}}, 1 / 3),
            ({"expect": [{"tool": "read"}, {"tool": "read"}]}, 0.5),
            ({"expect": [{"tool": "read"}, {"tool": "read"}], "distinct": False}, 1),
            ({"expect": [{"tool": {"pattern": "r"}}, {"tool": "read"}]}, 1),
            ({"expect": [{"tool": {"pattern": "r"}}, {"tool": "read"}, {"tool": {"pattern": "run"}}]}, 2 / 3),
            ({"expect": [{"tool": "read", "args": {"path": {"contains": "a"}, "no": {"equals": 1}}}]}, 0),
        ],
        ids=str,
    )
    def test_each_rule_of_tool_calls_is_one_check(self, tmp_path: Path, block: Any, score: float | int | None) -> None:
        calls = [call("read", path="a.txt"), call("run")]
        if score is None:
            with pytest.raises(ConfigError, match="no number of calls"):
                verdict_of(tmp_path, {"type": "tool_calls", **block}, *calls)
        else:
            assert verdict_of(tmp_path, {"type": "tool_calls", **block}, *calls).score == score

    @pytest.mark.parametrize(
        ("calls", "feedback"),
        [
            ([], "no call of order with id = \"4711\" and note containing 'x'"),
            ([call("order", id="4712", note="axb")], "note containing 'x'; called with id = \"4712\""),
            ([call("order", note="y")], 'called with no id, note = "y"'),
            ([call("order", id=n, note="x") for n in range(5)], "id = 0 / id = 1 / id = 2 and 2 more"),
            ([call("order", id="4" * 200, note="x")], f'called with id = "{"4" * 79}…'),
        ],
        ids=str,
    )
    def test_the_feedback_names_the_values_wanted_and_the_values_seen(
        self, tmp_path: Path, calls: Any, feedback: str
    ) -> None:
        expected = {"tool": "order", "args": {"id": "4711", "note": {"contains": "x"}}}
        assert feedback in verdict_of(tmp_path, {"type": "tool_calls", "expect": [expected]}, *calls).feedback

    def test_all_arguments_must_match_in_the_same_call(self, tmp_path: Path) -> None:
        rule = {"tool": "f", "args": {"a": {"equals": 1}, "b": {"equals": 2}}}
        block = {"type": "tool_calls", "expect": [rule]}
        assert verdict_of(tmp_path, block, call("f", a=1, b=0), call("f", a=0, b=2)).score == 0
        assert verdict_of(tmp_path, block, call("f", a=1, b=0), call("f", a=1, b=2)).score == 1


class TestToolConstraint:
    @pytest.mark.parametrize(
        ("block", "score"),
        [
            ({"expect_tools": [{"tool": "bash", "command_pattern": "npm (test|run)"}]}, 1),
            ({"expect_tools": [{"tool": "bash", "command_pattern": "^test"}]}, 0),
            ({"reject_tools": [{"tool": {"pattern": ".*"}, "command_pattern": "rm -rf"}]}, 1),
            ({"reject_tools": [{"tool": "bash", "command_pattern": "NPM"}]}, 1),
            ({"reject_tools": [{"tool": "bash", "command_pattern": "(?i)NPM"}]}, 0),
            ({"expect_tools": [{"tool": "edit", "path_pattern": r"\.py$"}]}, 1),
            ({"expect_tools": [{"tool": "Skill", "skill_pattern": "^pdf$"}]}, 1),
            ({"expect_tools": [{"tool": "edit", "args": {"lines": {"range": {"lte": 3}}}}]}, 1),
            ({"allow_only": ["bash", "edit", "Skill"]}, 1),
            ({"allow_only": ["bas", "edit", "Skill"]}, 0),
            ({"allow_only": ["bash", "edit", "skill"]}, 0),
            ({"allow_only": [{"pattern": "^ba"}], "expect_tools": [{"tool": "bash"}]}, 0.5),
        ],
        ids=str,
    )
    def test_each_entry_of_tool_constraint_is_one_check(self, tmp_path: Path, block: Any, score: float | int) -> None:
        calls = [call("bash", command="npm test"), call("edit", path="a.py", lines=2), call("Skill", skill="pdf")]
        assert verdict_of(tmp_path, {"type": "tool_constraint", **block}, *calls).score == score

    def test_arguments_that_are_not_json_do_not_slip_past_a_rejection(self, tmp_path: Path) -> None:
        broken = {"id": "x", "function": {"name": "bash", "arguments": '{"command": "rm -rf /'}}
        block = {"type": "tool_constraint", "reject_tools": [{"tool": "bash", "command_pattern": "rm -rf"}]}
        assert verdict_of(tmp_path, block, broken).score == 0


REFUSED = [
    ({"type": "behavior"}, "checks nothing"),
    ({"type": "behavior", "required_tools": []}, "checks nothing"),
    ({"type": "behavior", "required_tools": [""]}, "at least 1 character"),
    ({"type": "behavior", "max_tokens": 0}, "greater than 0"),
    ({"type": "behavior", "max_tool_call": 3}, "did you mean 'max_tool_calls'"),
    ({"type": "action_sequence", "expected_actions": [], "matching_mode": "exact_match"}, "at least 1 item"),
    ({"type": "action_sequence", "expected_actions": ["a"]}, "matching_mode: is missing"),
    ({"type": "skill_invocation"}, "checks nothing"),
    ({"type": "skill_invocation", "required_skills": ["a"]}, "need a mode"),
    ({"type": "skill_invocation", "forbidden_skills": ["a"], "allow_extra": False}, "which is empty"),
    ({"type": "tool_calls"}, "checks nothing"),
    ({"type": "tool_calls", "min_calls": 0}, "checks nothing"),
    ({"type": "tool_calls", "required": ["a"]}, "did you mean 'required_tools'"),
    ({"type": "tool_calls", "expect": [{"tool": ""}]}, "at least 1 character"),
    ({"type": "tool_calls", "expect": [{"tool": {"pattern": "("}}]}, "not a regular expression"),
    (
        {"type": "tool_calls", "expect": [{"tool": "bash|sh"}]},
        "is not the name of a tool, and names are compared whole",
    ),
    ({"type": "tool_constraint", "allow_only": ["^ba"]}, "write {pattern: …}"),
    ({"type": "behavior", "forbidden_tools": [{"patern": "x"}]}, "did you mean 'pattern'"),
    ({"type": "tool_calls", "expect": [{"tol": "x"}]}, "did you mean 'tool'"),
    ({"type": "tool_calls", "expect": [{"tool": "x", "args": {"a": {}}}]}, "exactly one of equals, regex"),
    ({"type": "tool_calls", "expect": [{"tool": "x", "args": {"a": {"equals": 1, "regex": "x"}}}]}, "exactly one of"),
    ({"type": "tool_calls", "expect": [{"tool": "x", "args": {"a": {"range": {}}}}]}, "checks nothing"),
    ({"type": "tool_calls", "expect": [{"tool": "x", "args": {"a": {"contain": "x"}}}]}, "did you mean 'contains'"),
    ({"type": "tool_calls", "expect": [{"tool": "x", "args": {"a": {"city": "x"}}}]}, "is written as {equals: …}"),
    ({"type": "tool_calls", "expect": [{"tool": "x", "args": {"a": {"contains": ""}}}]}, "at least 1 character"),
    (
        {"type": "tool_calls", "expect": [{"tool": "x", "args": {"a": {"json_schema": {"type": 3}}}}]},
        "not a JSON Schema",
    ),
    ({"type": "tool_constraint"}, "checks nothing"),
    ({"type": "tool_constraint", "reject_tools": [{"command_pattern": "x"}]}, "tool: is missing"),
]


@pytest.mark.parametrize(("block", "message"), REFUSED, ids=str)
def test_graders_that_check_nothing_or_are_impossible_are_refused(tmp_path: Path, block: Any, message: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        build_graders(load(tmp_path, graders=[block]))
    assert message in str(caught.value) and "eval.yaml:" in str(caught.value)
