"""Continuations, history and row parameters in the eval file: what is read, rendered, refused, and in no key before."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.conversation.turns import Script
from holdfast.data.dataset import Dataset
from holdfast.errors import AttemptError, ConfigError
from holdfast.targets.types import Continuation
from tests.support.running import holdfast, lines, run_dir, server
from tests.support.specs import load, who, write_spec

if TYPE_CHECKING:
    from pathlib import Path

MODEL = {"model": "m", "api": "completions"}
ROW = {"id": "a", "question": "q", "ends": [" x", {"text": " y"}, {"text": " z", "context": "c"}]}
EXAMPLES = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]


def read(folder: Path, **keys: Any) -> Any:
    plain: dict[str, Any] = {"samples": [ROW], "target": MODEL, "continuations": "ends", "graders": []}
    return load(folder, **{**plain, **keys})


def test_continuations_are_texts_or_texts_with_a_context(tmp_path: Path) -> None:
    for written in ("ends", "{{ ends }}"):
        spec = read(tmp_path, continuations=written)
        prompts = Script(spec).render(next(iter(Dataset(spec))))
        assert prompts.continuations == (Continuation(" x"), Continuation(" y"), Continuation(" z", "c"))


def test_history_stands_between_the_system_message_and_the_prompt(tmp_path: Path) -> None:
    spec = read(tmp_path, samples=[{**ROW, "shots": EXAMPLES}], history="shots", system="Be brief.")
    prompts = Script(spec).render(next(iter(Dataset(spec))))
    assert prompts.opening == [{"role": "system", "content": "Be brief."}, *EXAMPLES]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"target": {"command": ["echo"]}}, "continuations: only a model has likelihoods"),
        ({"target": {"model": "m"}}, "set `api: completions`"),
        ({"target": {**MODEL, "stream": True}}, "target.stream: `continuations` ask for likelihoods"),
        ({"follow_ups": ["more"]}, "follow_ups: `continuations` end the conversation with the prompt"),
        ({"follow_ups": "ends"}, "follow_ups: `continuations` end the conversation with the prompt"),
        ({"responder": {"python": "a.py:b", "max_followups": 2}}, "responder: `continuations` end"),
        ({"checkpoints": [{"after_turn": 1, "graders": [{"type": "exact"}]}]}, "checkpoints: `continuations` end"),
        ({"continuations": None, "graders": [{"type": "likelihood"}]}, "the eval has no `continuations`: add them"),
        ({"continuations": "ends +"}, "continuations: not a valid expression"),
        ({"continuations": "{{ }}"}, "continuations"),
        ({"graders": [{"type": "likelihood", "choices": "a b"}]}, "graders[0].choices: not a valid expression"),
        ({"graders": [{"type": "likelihood", "greedy": True, "normalize": "chars"}]}, "nothing to `normalize`"),
        ({"target": {**MODEL, "likelihood": {"truncate": "right"}}}, "target.likelihood.truncate"),
    ],
)
def test_keys_that_contradict_continuations_are_refused_with_their_lines(
    tmp_path: Path, keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, **keys)
    assert words in str(caught.value)
    assert "eval.yaml:" in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ({"continuations": "choices"}, "continuations"),
        ({"history": "choices"}, "history"),
        ({"continuations": None, "target": {**MODEL, "params_from": "choices"}}, "target.params_from"),
        ({"graders": [{"type": "likelihood", "choices": "choices"}]}, "graders[0].choices"),
    ],
)
def test_a_field_that_no_row_has_is_reported_before_the_run(tmp_path: Path, keys: dict[str, Any], place: str) -> None:
    plain: dict[str, Any] = {"samples": [{**ROW, "expected": 0}], "target": MODEL, "continuations": "ends"}
    with pytest.raises(ConfigError) as caught:
        who(tmp_path, **{**plain, "graders": [], **keys})
    assert f"{place}: no sample has a field 'choices'" in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"continuations": "question"}, "continuations give 'q', not a list of texts"),
        ({"continuations": "[]"}, "continuations give [], not a list of texts"),
        ({"continuations": "[3]"}, "a continuation is 3, not a text or a mapping"),
        ({"continuations": "[{'context': 'c'}]"}, "not a text or a mapping"),
        ({"continuations": "[{'text': 't', 'rolling': 1}]"}, "`rolling` is true or false"),
        ({"continuations": "[{'text': 't', 'rolling': true, 'context': 'c'}]"}, "and has no `context`"),
        ({"history": "['x']"}, "a message of history is 'x'"),
        ({"history": "[{'role': 'tool', 'content': 'x'}]"}, "a message of history is"),
        ({"history": "question"}, "history gives 'q', not a list of messages"),
        ({"target": {**MODEL, "params_from": "question"}}, "target.params_from gives 'q', not a mapping"),
    ],
)
def test_a_row_that_does_not_fit_is_an_error_of_its_trial(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    spec = read(tmp_path, **keys)
    with pytest.raises(AttemptError) as caught:
        Script(spec).render(next(iter(Dataset(spec))))
    assert words in caught.value.message and "eval.yaml:" in caught.value.message and not caught.value.retry


def test_keys_contain_history_and_continuations_only_if_they_are_set(tmp_path: Path) -> None:
    plain = {"samples": [ROW], "graders": [], "target": {"model": "m"}}
    identity = who(tmp_path, **plain)
    assert identity.contents.conversation == {"system": None, "prompt": "{{ question }}"}
    assert identity.contents.target.keys() == {"kind", "model", "api", "params", "version"}
    assert who(tmp_path, **plain, by=["question"]).id == identity.id
    changed = [
        who(tmp_path, **plain, history="[]"),
        who(tmp_path, **{**plain, "target": {"model": "m", "params_from": "{}"}}),
        who(tmp_path, **{**plain, "target": MODEL}, continuations="ends"),
    ]
    assert len({each.work.digest for each in [identity, *changed]}) == 4


def test_history_and_row_parameters_reach_the_server(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "question": "2 + 2?", "shots": EXAMPLES, "settings": {"max_tokens": 7, "stop": ["x"]}},
        {"id": "b", "question": "3 + 3?", "shots": [], "settings": {}},
    ]
    with server(answer="body") as provider:
        target = {"model": "m", "base_url": provider.base_url, "params": {"max_tokens": 5, "seed": 1}}
        keys = {"samples": rows, "history": "shots", "graders": [], "target": {**target, "params_from": "settings"}}
        holdfast("eval", write_spec(tmp_path, schemaVersion="1.0", **keys), cwd=tmp_path)
    outputs = {output["sample"]: output for output in lines(run_dir(tmp_path) / "outputs.jsonl")}
    asked = {name: json.loads(output["output"]) for name, output in outputs.items()}
    assert asked["a"] == {
        "model": "m",
        "max_tokens": 7,
        "seed": 1,
        "stop": ["x"],
        "messages": [*EXAMPLES, {"role": "user", "content": "2 + 2?"}],
    }
    assert asked["b"] == {"model": "m", "max_tokens": 5, "seed": 1, "messages": [{"role": "user", "content": "3 + 3?"}]}
    assert outputs["a"]["messages"][:2] == EXAMPLES
