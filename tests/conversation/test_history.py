"""Examples before the prompt: graders, a simulated user and exports begin with the prompt, not with an example."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.plugins.exporters.html import write_html
from holdfast.plugins.exporters.tables import write_csv
from holdfast.plugins.nat.export import write_nat
from tests.support.judges import judges
from tests.support.running import lines
from tests.support.specs import command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXAMPLES = [{"role": "user", "content": "What is an apple?"}, {"role": "assistant", "content": "fruit"}]
SKILL = "---\nname: stones\ndescription: about granite\n---\ngranite\n"


class Lab:
    """A model that answers `stone`, judges, and plays the user; and a run with it."""

    def __init__(self, folder: Path, served: Any) -> None:
        self.folder = folder
        self.served = served

    def run(self, name: str = "e", **keys: Any) -> Any:
        """Evaluate one sample with examples before its prompt."""
        spec: dict[str, Any] = {
            "name": name,
            "samples": [{"id": "a", "subject": "granite", "examples": EXAMPLES}],
            "system": "Be brief.",
            "history": "examples",
            "prompt": "{{ subject }}",
            "target": {"model": "m", "base_url": self.served.base_url},
            "graders": [],
            **keys,
        }
        run = holdfast.evaluate(**spec, runs_dir=self.folder / "runs")
        assert run.finished
        return run

    def asked(self, word: str) -> list[str]:
        """The last message of each request whose first message contains a word."""
        return [body["messages"][-1]["content"] for body in self.served.bodies if word in str(body["messages"][0])]


def answer(body: dict[str, Any]) -> str:
    first, last = body["messages"][0]["content"], body["messages"][-1]["content"]
    if "simulate" in first or "play" in first.lower():
        return json.dumps({"action": "reply", "message": "How hard?"})
    if "first-answer" in last:
        return json.dumps({"reason": "r", "better": "tie"})
    if "<answer-" in last:
        return json.dumps({"reason": "r", "score": 1})
    return "stone" if body["model"] == "m" else "rock"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with judges(answer) as served:
        yield Lab(tmp_path, served)


def test_only_an_output_with_history_says_where_its_prompt_is(lab: Lab) -> None:
    (output,) = lines(lab.run().path / "outputs.jsonl")
    assert output["opening"] == 3
    assert [message["content"] for message in output["messages"]][3:] == ["granite", "stone"]
    (plain,) = lines(lab.run("plain", history=None).path / "outputs.jsonl")
    assert "opening" not in plain


def test_every_export_names_the_prompt_as_the_question(lab: Lab) -> None:
    run = lab.run()
    assert run.results()[0]["prompt"] == "granite"
    view = run.view()
    (path,) = write_csv(view, lab.folder)
    with path.open() as file:
        assert next(csv.DictReader(file))["prompt"] == "granite"
    (page,) = write_html(view, lab.folder)
    assert '<span class="preview"><span>granite</span>' in page.read_text()
    write_nat(view, lab.folder)
    (row,) = json.loads((lab.folder / "workflow_output.json").read_text())
    assert row["question"] == "granite"
    (step,) = [step["payload"] for step in row["intermediate_steps"]]
    assert step["data"] == {"input": "granite", "output": "stone"}
    assert step["usage_info"]["token_usage"]["prompt_tokens"] == 10  # of the only call


def test_graders_of_all_replies_ignore_replies_in_examples(lab: Lab) -> None:
    run = lab.run(
        follow_ups=["More?"],
        graders=[
            {"type": "exact", "name": "replies", "transcript": "all", "expected": "stone\n\nstone"},
            {"type": "trigger", "skill": SKILL, "mode": "positive"},
            {
                "type": "prompt",
                "name": "judge",
                "rubric": "Is it right?",
                "transcript": "all",
                "model": "j",
                "base_url": lab.served.base_url,
            },
        ],
    )
    grades = run.results()[0]["grades"]
    assert {name: grade["status"] for name, grade in grades.items()} == dict.fromkeys(grades, "passed")
    (judged,) = [text for text in lab.asked("") if "<answer-" in text]
    assert "apple" not in judged and "granite" in judged and "More?" in judged


def test_a_simulated_user_sees_the_conversation_without_the_examples(lab: Lab) -> None:
    responder = {"model": "u", "base_url": lab.served.base_url, "instructions": "Ask.", "max_followups": 1}
    lab.run(responder=responder)
    (transcript,) = [text for text in lab.asked("") if text.startswith("[user]")]
    assert transcript == "[user]\ngranite\n\n[assistant]\nstone"


def test_pairs_of_answers_are_judged_as_answers_to_the_prompt(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"model": "other", "base_url": lab.served.base_url}
    runs = [str(lab.run().path), str(lab.run("other", target=other).path)]
    block = {"model": "j", "base_url": lab.served.base_url, "rubric": "Which is better?"}
    (lab.folder / "judge.yaml").write_text(json.dumps(block))
    command(monkeypatch, capsys, lab.folder, "compare", *runs, "--judge", "judge.yaml")
    judged = [text for text in lab.asked("") if "<first-answer-" in text]
    assert len(judged) == 2
    assert all("granite\n</question-" in text and "apple" not in text for text in judged)
