"""The bodies that HTTP targets are sent: values keep their types, and old answers are never taken for new requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from tests.support.running import lines, server
from tests.support.specs import Ended, command, who, write_spec
from tests.support.workflow import Asked, workflow

if TYPE_CHECKING:
    from pathlib import Path

ROW = {
    "id": "a",
    "q": "two",
    "expected": "two",
    "n": 3,
    "part": 0.5,
    "tags": ["x", {"y": None}],
    "on": True,
    "none": None,
}


def sent(tmp_path: Path, request: dict[str, Any]) -> Any:
    """The body that a workflow is asked with."""
    asked: list[Asked] = []
    with workflow(lambda one: asked.append(one) or {"answer": "two"}) as service:
        run = holdfast.evaluate(
            name="e",
            samples=[ROW],
            prompt="{{ q }}",
            target={"http": service.url, "request": request, "response": "answer"},
            graders=[{"type": "exact"}],
            runs_dir=tmp_path / "runs",
        )
    assert run.score == 1
    return asked[0].body


def test_a_value_that_is_one_expression_keeps_its_type(tmp_path: Path) -> None:
    request = {
        "text": "{{ prompt }}",
        "n": "{{ n }}",
        "part": "{{ part }}",
        "tags": ["{{ tags }}", "{{ tags[0] }}"],
        "sum": "{{ n + trial }}",
        "on": "{{ on }}",
        "none": "{{ none }}",
        "messages": "{{ messages }}",
        "inside": "n is {{ n }}",
        "as text": "{{ n | string }}",
        "json": "{{ tags | tojson }}",
        "fixed": 7,
    }
    assert sent(tmp_path, request) == {
        "text": "two",
        "n": 3,
        "part": 0.5,
        "tags": [["x", {"y": None}], "x"],
        "sum": 4,
        "on": True,
        "none": None,
        "messages": [{"role": "user", "content": "two"}],
        "inside": "n is 3",
        "as text": "3",
        "json": '["x", {"y": null}]',
        "fixed": 7,
    }


def test_a_conversation_of_several_turns_goes_through_a_chat_endpoint(tmp_path: Path) -> None:
    with server() as model:
        run = holdfast.evaluate(
            name="e",
            samples=[{"id": "a", "q": "one", "expected": "three"}],
            prompt="{{ q }}",
            system="Be brief.",
            follow_ups=["two", "three"],
            target={
                "http": f"{model.base_url}/chat/completions",
                "request": {"model": "m", "messages": "{{ messages }}"},
                "response": "choices[0].message.content",
            },
            graders=[{"type": "exact"}],
            runs_dir=tmp_path / "runs",
        )
        assert run.score == 1 and model.requests == 3
    (output,) = lines(run.path / "outputs.jsonl")
    contents = [message["content"] for message in output["messages"]]
    assert contents == ["Be brief.", "one", "one", "two", "two", "three", "three"]


REQUESTS = [
    ({"q": "{{ prompt }}"}, False),
    ({"q": "{{ q }}", "last": "{{ messages[-1].content }}"}, False),
    ({"q": "{{ n | string }}", "inside": "{{ n }} of {{ n }}", "fixed": 3}, False),
    ({"q": "{{ n }}"}, True),
    ({"q": {"deep": ["{{ messages }}"]}}, True),
    ({"q": "{{ trial }}"}, True),
]


@pytest.mark.parametrize(("request_", "typed"), REQUESTS)
def test_only_requests_whose_values_were_once_sent_as_texts_have_another_key(
    tmp_path: Path, request_: dict[str, Any], typed: bool
) -> None:
    target = {"http": "http://127.0.0.1:1", "request": request_}
    found = who(tmp_path, samples=[ROW], prompt="{{ q }}", target=target)
    assert ("request_values" in found.identity["target"]) == typed


def test_a_run_whose_numbers_were_sent_as_texts_is_graded_as_it_is_and_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def type_(*arguments: Any) -> Ended:
        return command(monkeypatch, capsys, tmp_path, *arguments)

    with workflow(lambda _: {"answer": "two"}) as service:
        target = {"http": service.url, "request": {"n": "{{ n }}"}, "response": "answer"}
        found = write_spec(tmp_path, samples=[ROW], prompt="{{ q }}", target=target)
        with monkeypatch.context() as before:  # as runs of earlier versions are: not marked
            before.setattr("holdfast.data.dataset._Request.look", lambda *_: None)
            assert type_("eval", found.name).code == 0
        (run,) = (tmp_path / "runs" / "e").glob("*-*")
        regraded = type_("grade", run, "--again")
        assert regraded.code == 0 and "1.000" in regraded.out
        assert len(service.asked) == 1, "grading asks nobody"
        planned = type_("eval", found.name, "--dry-run")
        assert "1 to run" in planned.out and "request_values" in planned.out
        assert type_("eval", found.name).code == 0
        assert len(service.asked) == 2 and service.asked[1].body == {"n": 3}
