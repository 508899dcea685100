"""An eval that asks the same for every row is refused before the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from holdfast.data import survey
from holdfast.data.checks import Questions
from holdfast.data.dataset import Dataset
from holdfast.data.survey import make_survey
from holdfast.plan.identity import identify
from tests.support.running import Server, module_server
from tests.support.specs import command, load, who, write_rows, write_spec

if TYPE_CHECKING:
    from pathlib import Path

provider = module_server()
ROWS = [
    {"id": n, "question": f"What is {n}?", "topic": "sums", "expected": str(n), "files": {"n": str(n)}}
    for n in range(3)
]
AGENT = """
def by_prompt(prompt, messages): return prompt
def by_row(prompt, sample): return sample["expected"]
def by_field(prompt, expected): return expected
def by_anything(**given): return given["sample"]["expected"]
def decorate(function): return function
@decorate
def decorated(prompt): return prompt
class Agent:
    def __call__(self, prompt): return prompt
"""
COMMAND = {"command": ["echo", "hi"]}
MODEL = {"model": "m", "base_url": "http://127.0.0.1:1/v1"}


@pytest.mark.parametrize(
    ("prompt", "likely"),
    [
        ("{question}", "'{question}' looks like a field"),
        ("${question}", "'${question}' looks like a field"),
        ("$question", "'$question' looks like a field"),
        ("<question>", "'<question>' looks like a field"),
        ("%(question)s", "'%(question)s' looks like a field"),
        ("Say {other} and {{ topic }}: {question}", "is the same for all 3 rows, although it uses topic; '{question}'"),
        ("<topic>{{ topic }}</topic>", "although it uses topic\n"),
        ("Hello", "uses no field of the rows, so it is the same for all 3 of them"),
    ],
)
def test_nothing_is_asked_and_the_likely_spelling_is_named(
    tmp_path: Path,
    provider: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prompt: str,
    likely: str,
) -> None:
    provider.reset()
    write_spec(tmp_path, samples=ROWS, prompt=prompt, target={"model": "m", "base_url": provider.base_url})
    for more in ([], ["--dry-run"]):
        ended = command(monkeypatch, capsys, tmp_path, "eval", "eval.yaml", *more)
        assert ended.code == 2 and "eval.yaml:" in ended.err and likely in ended.err, ended.err
        assert "trials: 3" in ended.err and "same_prompt: true" in ended.err
        assert "looks like" not in likely or "Write {{ question }} for the field." in ended.err
    assert provider.requests == 0


@pytest.mark.parametrize(
    ("keys", "is_refused"),
    [
        ({"samples": ROWS[:1]}, False),
        ({"same_prompt": True}, False),
        ({"system": "{{ question }}"}, False),
        ({"history": "[{'role': 'user', 'content': question}]"}, False),
        ({"history": "[{'role': 'user', 'content': topic}]"}, True),
        ({"follow_ups": ["{{ question }}"]}, False),
        ({"follow_ups": "[question]"}, False),
        ({"follow_ups": ["More."]}, True),
        ({"prompt": None, "messages": [{"role": "user", "content": "Hello"}]}, True),
        ({"prompt": None, "messages": "[{'role': 'user', 'content': question}]"}, False),
        ({"responder": {"instructions": "You are {{ id }}", "max_followups": 1}}, False),
        ({"responder": {"instructions": "You are Ada", "max_followups": 1, "stop_when": "expected in output"}}, True),
        ({"responder": {"python": "agent.py:by_row", "max_followups": 1}}, False),
        ({"workspace": {"files": "files"}}, False),
        ({"workspace": {}}, True),
        ({"hooks": {"before_task": [{"command": "true"}]}}, False),
        ({"target": {**MODEL, "params_from": "{'seed': id}"}}, False),
        ({"target": {**MODEL, "tools": [{"python": "agent.py:by_field"}]}}, False),
        ({"target": {"command": ["echo", "{{ question }}"]}}, False),
        ({"target": {"command": ["echo", "{{ prompt }}"]}}, True),
        ({"target": {"command": ["echo"], "env": "{'Q': question}"}}, False),
        ({"target": {"http": "http://127.0.0.1:1/", "request": {"q": "{{ question }}"}}}, False),
        ({"target": {"http": "http://127.0.0.1:1/", "request": {"q": "{{ prompt }}"}}}, True),
        ({"target": {"python": "agent.py:by_prompt"}}, True),
        ({"target": {"python": "agent.py:Agent"}}, True),
        ({"target": {"python": "agent.py:by_row"}}, False),
        ({"target": {"python": "agent.py:by_field"}}, False),
        ({"target": {"python": "agent.py:by_anything"}}, False),
        ({"target": {"python": "agent.py:decorated"}}, False),
    ],
    ids=str,
)
def test_a_fixed_prompt_is_refused_only_where_the_target_gets_nothing_else_of_the_row(
    tmp_path: Path, keys: dict[str, Any], is_refused: bool
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    identity = who(tmp_path, **{"samples": ROWS, "prompt": "Hello", "target": MODEL, **keys})
    assert (identity.survey.unsendable is not None) == is_refused


def test_a_stored_survey_does_not_forget_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "LARGE", 0)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    (tmp_path / "agent.py").write_text(AGENT)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    keys: dict[str, Any] = {"samples": None, "dataset": "rows.jsonl", "prompt": "{{ topic }}"}

    def is_refused(**more: Any) -> bool:
        return identify(load(tmp_path, **{**keys, **more})).survey.unsendable is not None

    assert not is_refused(target={"python": "agent.py:by_row"})
    assert is_refused(target={"python": "agent.py:by_prompt"})
    assert not is_refused(target={"python": "agent.py:by_prompt"}, same_prompt=True)
    assert is_refused(target={"python": "agent.py:by_prompt"})


def test_rows_are_compared_up_to_the_first_difference_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    look = Questions.look
    monkeypatch.setattr(Questions, "look", lambda self, fields: (looked.append(fields), look(self, fields)))
    make_survey(Dataset(load(tmp_path, samples=ROWS, prompt="{{ question }}"), must_differ=True))
    assert len(looked) == 2


def test_a_field_that_is_spelled_in_another_way_gets_a_note(tmp_path: Path) -> None:
    graders = [{"type": "text", "not_contains": ["{expected}", r"\boxed{expected}"], "regex_match": "${topic} {n}"}]
    prompt = "{{ question }} {question} {topic} \\boxed{expected} {other} <expected>"
    notices = who(tmp_path, samples=ROWS, prompt=prompt, graders=graders).spelling_notices
    assert [notice.partition(": ")[2].partition(" stands")[0] for notice in notices] == [
        "prompt: '{topic}'",
        "graders[0].not_contains[0]: '{expected}'",
        "graders[0].regex_match[0]: '${topic}'",
    ]
    assert notices[0].endswith("the row's field is written {{ topic }}")


@pytest.mark.parametrize("dataset", ["rows.jsonl", ["rows.jsonl"], {"path": "rows.jsonl"}], ids=str)
def test_a_path_is_a_dataset(tmp_path: Path, dataset: Any) -> None:
    write_rows(tmp_path / "rows.jsonl", ROWS)
    for overrides, count in (([], 3), (["dataset.limit=2"], 2), (["dataset.where=expected == '1'"], 1)):
        assert who(tmp_path, *overrides, samples=None, dataset=dataset).survey.count == count
