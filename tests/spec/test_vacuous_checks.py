"""Checks that can hardly fail are named, and an empty list of allowed tools allows none."""

from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigError
from tests.support.specs import command, grade, identities, load, write_spec


@pytest.mark.parametrize(
    ("graders", "words"),
    [
        ([{"type": "exact", "threshold": 0}], "threshold: 0 is met by every score"),
        ([{"type": "text", "regex_match": ".*"}], "'.*' is found in every answer, so the check of 'text' always holds"),
        ([{"type": "text", "regex_not_match": "x*"}], "never holds"),
        ([{"type": "text", "regex_match": "({{ question }})?"}], "is found in every answer"),
        ([{"type": "tool_constraint", "allow_only": ["bash", {"pattern": ".*"}]}], "allows all tools"),
        ([{"type": "text", "contains": " "}], "contains of 'text' looks for white space"),
        ([{"type": "exact", "weight": 0}], "every grader has weight 0"),
    ],
)
def test_a_check_that_can_hardly_fail_is_named_with_its_line(tmp_path: Path, graders: Any, words: str) -> None:
    (notice,) = load(tmp_path, graders=graders).notices
    assert words in notice and "eval.yaml:" in notice


@pytest.mark.parametrize(
    "graders",
    [
        [{"type": "exact"}],
        [{"type": "text", "regex_match": [".+", "^$", "a*b", r"\S"]}],
        [{"type": "exact", "weight": 0}, {"type": "number"}],
        [{"type": "text", "contains": ["{{ question }}", "a b"]}],
        [{"type": "text", "regex_match": ["{{ question }}", "{{ question | upper }}"]}],
        [{"type": "tool_constraint", "allow_only": ["bash", {"pattern": "^read_"}]}],
    ],
)
def test_a_check_that_can_fail_gets_no_notice(tmp_path: Path, graders: Any) -> None:
    assert not load(tmp_path, graders=graders).notices


def test_the_command_prints_the_notice_about_a_check_that_can_hardly_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_spec(tmp_path, target={"command": ["echo", "2"]}, graders=[{"type": "exact", "threshold": 0}])
    ended = command(monkeypatch, capsys, tmp_path, "eval", "eval.yaml")
    assert ended.code == 0 and "threshold: 0 is met by every score" in ended.out + ended.err


CALLED = {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "shell"}}]}]}


def test_an_empty_list_of_allowed_tools_allows_none(tmp_path: Path) -> None:
    block = {"type": "tool_constraint", "allow_only": []}
    assert grade(tmp_path, block, "x").score == 1
    verdict = grade(tmp_path, block, "x", fields=CALLED)
    assert verdict.score == 0 and verdict.feedback == "shell may not be called"
    without = {"type": "tool_constraint", "reject_tools": [{"tool": "rm"}]}
    keys = [
        identities(spec)[0]
        for spec in (load(tmp_path, graders=[each]) for each in (without, {**without, "allow_only": []}))
    ]
    assert keys[0] != keys[1]


def test_a_tool_constraint_without_anything_still_checks_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="checks nothing"):
        load(tmp_path, graders=[{"type": "tool_constraint"}])


def test_a_missing_judge_says_what_to_type(tmp_path: Path) -> None:
    graders = [{"type": "prompt", "name": "tone", "rubric": "r"}]
    with pytest.raises(ConfigError, match=r"graders\.tone\.model=NAME"):
        load(tmp_path, target={"command": ["echo"]}, graders=graders)
    spec = load(tmp_path, "graders.tone.model=gpt", target={"command": ["echo"]}, graders=graders)
    assert spec.graders[0].model == "gpt"
