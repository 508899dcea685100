"""The bodies that HTTP targets are sent: values keep their types, and old answers are never taken for new requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.engine.options import Options
from holdfast.engine.session import preview_run
from holdfast.plan.keys import generation_key, work_digest
from holdfast.report.run_view import GradedTrial, RunView
from tests.support.running import lines, server
from tests.support.specs import Ended, command, load, who, write_spec
from tests.support.workflow import Answer, Asked, Workflow, workflow

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
    identity = who(tmp_path, samples=[ROW], prompt="{{ q }}", target=target)
    assert ("request_values" in identity.contents.target) == typed
    texts = {key: value for key, value in identity.contents.target.items() if key != "request_values"}
    values = {**texts, "request_values": "JSON"}
    work = work_digest(identity.contents.conversation, values if typed else texts)
    (sample,) = identity.dataset
    assert next(identity.work.keys(identity.survey))[1] == generation_key(sample.digest, 1, work)


TEXTS = [{"id": f"t{number}", "q": "two", "n": str(number), "expected": "two"} for number in range(4)]
NUMBERS = [{"id": f"n{number}", "q": "two", "n": number, "expected": "two"} for number in range(4)]


MIXED: list[Any] = [*TEXTS, *NUMBERS]


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


@pytest.fixture
def by_run(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Give all rows the key of those with other values than text, as earlier versions did where there was one."""
    monkeypatch.setattr("holdfast.data.dataset._Request.is_typed", lambda *_: True)
    return monkeypatch


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
    assert names[0] == names[1] and identity.survey.typed == b"\0\1"


class TestRunsOfEarlierVersions:
    """One row with another value once changed the keys of all rows of its run."""

    def test_they_are_finished_and_lend_every_row(self, service: Service, by_run: pytest.MonkeyPatch) -> None:
        service.evaluate(MIXED)
        begun = service.rundir
        by_run.undo()
        assert service.evaluate(MIXED) == (0, []) and service.rundir.path == begun.path
        begun.metrics.unlink()
        assert service.evaluate(MIXED) == (0, []), "nor where the report is made again"
        assert service.evaluate(TEXTS) == (0, [])
        more = {**TEXTS[0], "id": "new", "n": "new"}
        assert service.evaluate([*MIXED, more]) == (1, ["new"])
        assert service.evaluate([*MIXED, more]) == (0, [])

    def test_they_are_resumed(self, service: Service, by_run: pytest.MonkeyPatch) -> None:
        service.evaluate(MIXED)
        by_run.undo()
        service.rundir.reopen()
        outputs = service.rundir.path / "outputs.jsonl"
        kept = [line for line in outputs.read_text().splitlines(keepends=True) if '"sample":"t1"' not in line]
        outputs.write_text("".join(kept))
        assert service.evaluate(MIXED) == (1, ["1"])
        assert service.evaluate(MIXED) == (0, [])

    def test_a_conversation_begun_with_text_values_resumes_in_the_middle(
        self, tmp_path: Path, by_run: pytest.MonkeyPatch
    ) -> None:
        fails = {"second": True}

        def answer(asked: Asked) -> Any:
            return Answer(status=500) if fails.get(asked.body["q"]) and asked.body["n"] == "1" else {"answer": "two"}

        def evaluate() -> holdfast.Run:
            return holdfast.evaluate(
                name="e",
                samples=MIXED,
                prompt="first",
                follow_ups=["second"],
                target={"http": service.url, "request": {"q": "{{ prompt }}", "n": "{{ n }}"}, "response": "answer"},  # type: ignore[attr-defined]
                graders=[{"type": "exact"}],
                limits={"retries": 0},
                runs_dir=tmp_path / "runs",
            )

        with workflow(answer) as service:
            begun = evaluate()
            assert not begun.finished and len(service.asked) == 16
            by_run.undo()
            fails.clear()
            run = evaluate()
        assert run.finished and run.path == begun.path
        assert [asked.body for asked in service.asked[16:]] == [{"q": "second", "n": "1"}]
        (failed,) = lines(run.path / "errors.jsonl")
        (done,) = [line for line in lines(run.path / "outputs.jsonl") if line["sample"] == "t1"]
        assert (done["key"], done["attempt"]) == (failed["key"], 2)


def test_a_run_whose_numbers_were_sent_as_texts_is_graded_as_it_is_and_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def type_(*arguments: Any) -> Ended:
        return command(monkeypatch, capsys, tmp_path, *arguments)

    with workflow(lambda _: {"answer": "two"}) as service:
        target = {"http": service.url, "request": {"n": "{{ n }}"}, "response": "answer"}
        eval_file = write_spec(tmp_path, samples=[ROW], prompt="{{ q }}", target=target)
        with monkeypatch.context() as before:  # as runs of earlier versions are: not marked
            before.setattr("holdfast.data.dataset._Request.is_typed", lambda *_: False)
            assert type_("eval", eval_file.name).code == 0
        (run,) = (tmp_path / "runs" / "e").glob("*-*")
        regraded = type_("grade", run, "--again")
        assert regraded.code == 0 and "1.000" in regraded.out
        assert len(service.asked) == 1, "grading asks nobody"
        planned = type_("eval", eval_file.name, "--dry-run")
        assert "1 to run" in planned.out and "request_values" in planned.out
        assert type_("eval", eval_file.name).code == 0
        assert len(service.asked) == 2 and service.asked[1].body == {"n": 3}
