"""Templates in graders: every text is rendered with the row, or the file is refused; none is taken literally."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import AttemptError, ConfigError
from holdfast.graders.expected import patterns
from holdfast.spec.load_graders import GRADERS
from holdfast.spec.regex import compile_regex
from tests.graders.test_identities import FILES
from tests.graders.test_identities import GRADERS as EVERY_KIND
from tests.support.specs import command, grade, load, write_spec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROW: dict[str, Any] = {
    "tool": "order_status",
    "tools": ["order_status", "order_status", "refund"],
    "n": 4711,
    "digits": "4711",
    "price": "1.50$",
    "form": r"\d+\.\d\d\$",
    "secrets": ["swordfish", "hunter2"],
    "file": "out/a.txt",
    "none": None,
    "empty": "",
    "nothing": [],
}


def calls(*names: str, **arguments: Any) -> dict[str, Any]:
    listed = [{"id": name, "function": {"name": name, "arguments": json.dumps(arguments)}} for name in names]
    return {"messages": [{"role": "assistant", "tool_calls": listed}]}


ORDER = calls("order_status", id="4711", price="costs 1.50$", note={"n": 4711})


def expect(**args: Any) -> dict[str, Any]:
    return {"type": "tool_calls", "expect": [{"tool": "{{ tool }}", "args": args}]}


@pytest.mark.parametrize(
    ("block", "score"),
    [
        ({"type": "text", "regex_match": "costs {{ price }}"}, 1),
        ({"type": "text", "regex_match": "costs {{ form | regex }}$"}, 1),
        ({"type": "text", "regex_match": r"^\w{5} {{ price }}$"}, 1),
        ({"type": "text", "regex_not_match": "{{ price }}"}, 0),
        ({"type": "text", "regex_not_match": "{{ secrets }}"}, 1),
        ({"type": "text", "regex_match": r"{{ n }}|\{\{"}, 0),
        (expect(id="{{ n }}"), 1),
        (expect(id="{{ digits }}"), 1),
        (expect(id={"equals": "{{ n }}"}, note={"n": "{{ digits }}"}), None),
        (expect(id={"equals": "{{ n }}"}, note={"equals": {"n": "{{ digits }}"}}), 1),
        (expect(id={"equals": "{{ price }}"}), 0),
        (expect(price={"contains": "{{ price }}"}), 1),
        (expect(price={"regex": "^costs {{ price }}$"}), 1),
        ({"type": "tool_calls", "required_tools": "{{ tools }}"}, 2 / 3),
        ({"type": "tool_calls", "forbidden_tools": ["{{ tool }}"]}, 0),
        ({"type": "tool_calls", "forbidden_tools": [{"pattern": "^{{ tool }}$"}]}, 0),
        ({"type": "behavior", "required_tools": ["{{ tool }}"], "forbidden_tools": "{{ tool }}"}, 0.5),
        ({"type": "tool_constraint", "reject_tools": [{"tool": "{{ tool }}"}]}, 0),
        ({"type": "tool_constraint", "allow_only": ["{{ tool }}"]}, 1),
        ({"type": "tool_constraint", "allow_only": "{{ secrets }}"}, 0),
        ({"type": "action_sequence", "expected_actions": "{{ tool }}", "matching_mode": "exact_match"}, 1),
        ({"type": "action_sequence", "expected_actions": "{{ tools }}", "matching_mode": "exact_match"}, 0),
        ({"type": "action_sequence", "expected_actions": "{{ nothing }}", "matching_mode": "exact_match"}, 0),
        ({"type": "skill_invocation", "forbidden_skills": ["{{ tool }}"]}, 1),
        ({"type": "file", "must_exist": ["{{ file }}", "out/{{ tool }}"]}, 0.5),
        ({"type": "file", "must_not_exist": "{{ file }}"}, None),
        ({"type": "file", "must_not_exist": ["./{{ file }}"]}, 0),
        ({"type": "file", "content_patterns": [{"path": "{{ file }}", "must_match": ["^{{ price }}$"]}]}, 1),
        ({"type": "diff", "expected_files": [{"path": "{{ file }}", "contains": ["-{{ price }}", "1.5"]}]}, 2 / 3),
        (
            {
                "type": "program",
                "command": "sh",
                "args": ["-c", 'test "$*" = "swordfish hunter2"', "", "{{ secrets }}"],
            },
            1,
        ),
        ({"type": "python", "function": "check.py:check", "params": {"wanted": "{{ secrets }}", "n": "{{ n }}"}}, 1),
    ],
    ids=str,
)
def test_a_graders_text_is_rendered_with_the_row(tmp_path: Path, block: dict[str, Any], score: float | None) -> None:
    (tmp_path / "check.py").write_text(
        "def check(wanted, n):\n    return wanted == ['swordfish', 'hunter2'] and n == 4711\n"
    )
    files = {"out/a.txt": "1.50$"}

    def judge() -> Any:
        return grade(tmp_path, block, "costs 1.50$", fields=ORDER, files=files, **ROW)

    if score is None:
        with pytest.raises(ConfigError):
            judge()
    else:
        verdict = judge()
        assert not isinstance(verdict, AttemptError), verdict
        assert verdict.score == pytest.approx(score)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"type": "text", "regex_match": "{{ empty }}"}, "an empty text is found everywhere"),
        ({"type": "text", "regex_not_match": "^{{ empty }}$"}, "an empty text is found everywhere"),
        ({"type": "text", "contains": " {{ empty }}"}, "renders to empty text for this row"),
        (
            {"type": "tool_calls", "forbidden_tools": [{"pattern": "^{{ empty }}$"}]},
            "an empty text is found everywhere",
        ),
        ({"type": "text", "regex_not_match": "{{ none }}"}, "cannot insert null into text"),
        ({"type": "text", "regex_match": "{{ nothing }}"}, "is an empty list for this row"),
        ({"type": "text", "regex_match": "x{{ secrets }}"}, "cannot insert a list into text"),
        ({"type": "text", "regex_match": "{{ '(' | regex }}"}, "not a regular expression"),
        ({"type": "tool_calls", "forbidden_tools": ["{{ empty }}"]}, "gives '' for this row, which is not a name"),
        ({"type": "behavior", "required_tools": ["{{ none }}"]}, "gives None for this row, which is not a name"),
        ({"type": "tool_constraint", "allow_only": ["{{ nothing }}"]}, "is an empty list for this row"),
        (
            {"type": "action_sequence", "expected_actions": "{{ nothing }}", "matching_mode": "any_order_match"},
            "is an empty list for this row",
        ),
        ({"type": "file", "must_not_exist": ["../{{ tool }}"]}, "does not name a file inside the folder"),
        ({"type": "program", "command": "true", "args": ["{{ none }}"]}, "gives None for this row, not a text"),
    ],
    ids=str,
)
def test_a_row_that_leaves_nothing_to_check_is_an_error_of_the_grade(
    tmp_path: Path, block: dict[str, Any], message: str
) -> None:
    error = grade(tmp_path, block, "costs 1.50$", fields=ORDER, files={"out/a.txt": ""}, **ROW)
    assert isinstance(error, AttemptError) and message in error.message, error


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"type": "code", "assertions": ["'{{ question }}' in output"]}, "assertions[0]: is not a template, and"),
        ({"type": "code", "assertions": ["'{{ question }}' in output"]}, "write sample['FIELD']"),
        ({"type": "number", "after": "{{ question }}"}, "graders[0].after: is not a template"),
        ({"type": "json_schema", "schema": {"const": "{{ question }}"}}, "graders[0].schema.const: is not a template"),
        ({"type": "program", "command": "{{ question }}"}, "its `args` take values of the row"),
        ({"type": "diff", "expected_files": [{"path": "a", "snapshot": "{{ id }}"}]}, "expected_files[0].snapshot"),
        ({"type": "tool_calls", "max_calls": "{{ question }}"}, "graders[0].max_calls: is not a template"),
        (
            {"type": "tool_calls", "expect": [{"tool": "a", "args": {"{{ id }}": 1}}]},
            "the name of a key is not a template",
        ),
        ({"type": "tool_calls", "config": {"min_calls": "{{ id }}"}}, "graders[0].config.min_calls: is not a template"),
        ({"type": "text", "regex_match": "{{ missing }}"}, "regex_match[0]: no sample has a field 'missing'"),
        ({"type": "tool_calls", "expect": [{"tool": "{{ missing }}"}]}, "expect[0].tool: no sample has a field"),
        ({"type": "text", "regex_match": "({{ question }}"}, "not a regular expression"),
        ({"type": "text", "regex_match": "{{ question "}, "not a valid template"),
        ({"type": "text", "regex_match": "[{%]"}, "not a valid template"),
        ({"type": "text", "contains": "{{ question | regex }}"}, "not a valid template: No filter named 'regex'"),
    ],
    ids=str,
)
def test_a_template_that_cannot_be_rendered_is_refused_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], block: Any, message: str
) -> None:
    write_spec(tmp_path, graders=[block], workspace={}, target={"command": ["echo", "{{ prompt }}"]})
    ended = command(monkeypatch, capsys, tmp_path, "eval", "eval.yaml", "--dry-run")
    assert ended.code == 2 and "eval.yaml:" in ended.err and message in ended.err, ended.err


def leaves(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The places of all texts inside a JSON value."""
    if isinstance(value, str):
        yield place
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*place, key))


TEXTS = [(block, place) for block in EVERY_KIND.values() for place in leaves(block) if place != ("type",)]


@pytest.mark.parametrize(("block", "place"), TEXTS, ids=[f"{block['type']}-{place}" for block, place in TEXTS])
def test_no_text_of_any_kind_of_grader_is_taken_literally(tmp_path: Path, block: Any, place: Any) -> None:
    if GRADERS.load(block["type"]).schema.expressions and place[0] in GRADERS.load(block["type"]).schema.expressions:
        return  # an expression, with or without braces
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    changed = copy.deepcopy(block)
    holder = changed
    for part in place[:-1]:
        holder = holder[part]
    holder[place[-1]] = "{{ question }}"
    keys: dict[str, Any] = {}
    if block["type"] == "likelihood":
        keys = {"continuations": "[question]", "target": {"model": "m", "api": "completions"}}
    try:
        spec = load(tmp_path, graders=[changed], workspace={}, **keys)
    except ConfigError as error:
        assert "graders[0]" in str(error) and "eval.yaml:" in str(error)
    else:
        written = {each.location for each in spec.templates() if each.source == "{{ question }}"}
        as_written = GRADERS.load(block["type"]).schema.as_written
        assert ("graders", 0, *place) in written or place[0] in as_written


@pytest.mark.parametrize(
    ("block", "answer", "score"),
    [
        ({"type": "text", "regex_match": r"a{2}\{\{"}, "aa{{", 1),
        ({"type": "text", "regex_match": r"^\{{2}x{1,2}\}$"}, "{{xx}", 1),
        ({"type": "text", "regex_match": r"\{%"}, "{% if", 1),
        ({"type": "text", "regex_match": "{% raw %}{{ .Name }}{% endraw %}"}, "Hi {{ .Name }}", 1),
        ({"type": "text", "regex_match": "{{ '{{' }} {{ '.' }}"}, "{{ x", 0),
        ({"type": "text", "contains": "{{ '{{' }}"}, "Hi {{ .Name }}", 1),
        ({"type": "code", "assertions": ["{% raw %}'{{' in output{% endraw %}"]}, "Hi {{ .Name }}", 1),
        ({"type": "exact", "expected": "{% raw %}{{ x }}{% endraw %}"}, "{{ x }}", 1),
        ({"type": "json_schema", "schema": {"const": "{% raw %}{{ x }}{% endraw %}"}}, '"{{ x }}"', 1),
    ],
    ids=str,
)
def test_braces_that_stand_for_themselves_can_be_written(tmp_path: Path, block: Any, answer: str, score: int) -> None:
    verdict = grade(tmp_path, block, answer)
    assert not isinstance(verdict, AttemptError) and verdict.score == score, verdict


@given(st.text(min_size=1), st.text())
def test_a_value_in_a_pattern_is_found_as_it_is_and_nothing_else_is(value: str, other: str) -> None:
    for source in ("^{{ v }}\\Z", "^{{ v ~ '' }}\\Z"):
        (pattern,) = patterns(source, {"v": value})
        regex = compile_regex(pattern)
        assert regex.match_to_the_end("search", value) is not None
        assert (regex.match_to_the_end("search", other) is not None) == (value == other)


LEAKING = """
def reply(prompt, sample):
    call = {"id": "1", "function": {"name": "delete_user", "arguments": "{}"}}
    return {"output": f"The code is {sample['secret']}.", "tool_calls": [call]}
"""


def test_a_leak_fails_and_a_changed_field_is_graded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "agent.py").write_text(LEAKING)
    rows = [{"id": name, "secret": name * 3, "watched": name * 3, "banned": "delete_user"} for name in ("ab", "cd")]
    graders = [
        {"name": "no-leak", "type": "text", "regex_not_match": "{{ watched }}"},
        {"name": "no-banned", "type": "tool_calls", "forbidden_tools": ["{{ banned }}"]},
    ]

    def scores() -> dict[str, Any]:
        keys = {"samples": rows, "graders": graders, "target": {"python": "agent.py:reply"}, "prompt": "{{ id }}"}
        write_spec(tmp_path, **keys)
        ended = command(monkeypatch, capsys, tmp_path, "eval", "eval.yaml")
        assert ended.code == 0, ended.err
        (newest,) = sorted((tmp_path / "runs").glob("*/*/metrics.json"), key=lambda path: path.stat().st_mtime_ns)[-1:]
        return {name: each["score"] for name, each in json.loads(newest.read_text())["metrics"].items()}

    assert scores() == {"no-leak": 0, "no-banned": 0}
    rows[0]["watched"] = "nothing"
    assert scores() == {"no-leak": 0.5, "no-banned": 0}, "only a pattern uses the field"
