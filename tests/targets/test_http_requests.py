"""The bodies that HTTP targets are sent: values keep their types, and old answers are never taken for new requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.engine.options import Options
from holdfast.engine.session import preview_run
from holdfast.report.run_view import GradedTrial, RunView
from tests.support.running import lines, server
from tests.support.specs import load, who, write_spec
from tests.support.workflow import Asked, Workflow, workflow

if TYPE_CHECKING:
    from collections.abc import Iterator
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


TEXTS = [{"id": f"t{number}", "q": "two", "n": str(number), "expected": "two"} for number in range(4)]
NUMBERS = [{"id": f"n{number}", "q": "two", "n": number, "expected": "two"} for number in range(4)]


class Service:
    """A workflow that is asked for rows, over and over, in one folder of runs."""

    def __init__(self, folder: Path, service: Workflow) -> None:
        self.folder, self._service = folder, service

    def evaluate(self, rows: list[dict[str, Any]], **keys: Any) -> tuple[int, list[Any]]:
        """Plan, then run; return how many trials were to run, and the numbers that were asked for."""
        target = {"http": self._service.url, "request": {"n": "{{ n }}"}, "response": "answer"}
        keys = {"samples": rows, "prompt": "{{ q }}", "target": target, **keys}
        _, self.rundir, self.plan = preview_run(load(self.folder, **keys), Options(runs_dir=self.folder / "runs"))
        self._service.asked.clear()
        run = holdfast.evaluate(write_spec(self.folder, **keys), runs_dir=self.folder / "runs")
        assert run.score == 1 and run.path == self.rundir.path
        trials = list(RunView(self.rundir).everything())
        assert [len(trial.grades) for trial in trials if isinstance(trial, GradedTrial)] == [1] * len(rows)
        assert [trial.fields for trial in trials] == rows
        return self.plan.to_run, [asked.body["n"] for asked in self._service.asked]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with workflow(lambda _: {"answer": "two"}) as running:
        yield Service(tmp_path, running)


@pytest.mark.parametrize(("rows", "new"), [(TEXTS, NUMBERS[0]), (NUMBERS, TEXTS[0])], ids=["number", "text"])
def test_the_first_row_with_another_kind_of_value_is_the_only_one_that_is_asked(
    service: Service, rows: list[dict[str, Any]], new: dict[str, Any]
) -> None:
    assert service.evaluate(rows)[0] == len(rows)
    assert service.evaluate([*rows, new]) == (1, [new["n"]])
    assert str(service.plan) == (
        f"5 trials of 5 samples: 4 reused, 1 to run (1 row new); 4 outputs from e/{neighbour(service)}"
    )
    assert service.evaluate(rows) == (0, []), "and without it everything is there"


def neighbour(service: Service) -> str:
    (other,) = {path.parent for path in service.folder.glob("runs/e/*/manifest.json")} - {service.rundir.path}
    return other.name


def test_a_row_without_an_id_keeps_its_name_whatever_it_sends(tmp_path: Path) -> None:
    rows = [{"q": "two", "n": n, "expected": "x"} for n in ("3", 3)]
    names = []
    for request in ({"q": "{{ q }}"}, {"n": "{{ n }}"}):
        identity = who(tmp_path, samples=rows, prompt="x", target={"http": "http://127.0.0.1:1", "request": request})
        names.append([sample.id for sample in identity.dataset])
        assert all(sample.is_nameless for sample in identity.dataset)
    assert names[0] == names[1]
