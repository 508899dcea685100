"""Refusals that every request would meet: the run stops at the first one, with the line to write, and loses nothing.

The wordings are the services' own, from reports of their users.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.dialects import dialect_of
from holdfast.errors import AttemptError
from holdfast.targets.model import Model
from holdfast.targets.prices import Prices
from tests.support.breaking import kept
from tests.support.providers import Refuse, Say, provider
from tests.support.running import run_dir
from tests.support.specs import command, load, write_spec

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.spec.schema import Api

WORDINGS = r"""
chat 400 Function tools with reasoning_effort are not supported in /v1/chat/completions. Use /v1/responses.
    Write `api: responses` in target
chat 404 This model is only supported in v1/responses and not in v1/chat/completions.
    Write `api: responses` in target
chat 404 This is not a chat model and thus not supported in v1/chat/completions. Did you mean to use v1/completions?
    Write `api: completions` in target
chat 400 Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.
    Write `max_completion_tokens` instead of `max_tokens`
chat 400 Unsupported value: 'temperature' does not support 0 with this model. Only the default (1) value is supported.
    Remove `temperature` from target.params
chat 400 Unsupported parameter: 'top_p' is not supported with this model.
    Remove `top_p` from target.params
chat 400 Unrecognized request argument supplied: thinking_budget
    Remove `thinking_budget` from target.params
chat 400 property 'logit_bias' is unsupported
    Remove `logit_bias` from target.params
responses 400 Unsupported parameter: 'response_format'. In the Responses API, this parameter has moved to 'text.format'.
    Write `text.format` instead of `response_format`
responses 400 Unsupported parameter: 'temperature' is not supported with this model.
    Remove `temperature` from target.params
responses 400 Unknown parameter: 'stop'.
    Remove `stop` from target.params
messages 400 `temperature` is deprecated for this model.
    Remove `temperature` from target.params
messages 400 max_tokens: Field required
    Write `max_tokens: 4096` in target.params
messages 400 `temperature` and `top_p` cannot both be specified for this model. Please use only one.
    Remove `temperature` or `top_p` from target.params
messages 400 `temperature` may only be set to 1 when thinking is enabled or in adaptive mode.
    Remove `temperature` from target.params
messages 400 frequency_penalty: Extra inputs are not permitted
    Remove `frequency_penalty` from target.params
"""
"""an API, the status and the words of a refusal, and what the run says to do"""
GEMINI: list[tuple[str, str]] = [
    ("Thinking budget is not supported for this model.", "Write `reasoning: {effort: high}` in target.params"),
    ("Thinking level is not supported for this model.", "Write `reasoning: {tokens: 8192}` in target.params"),
    (
        "Budget 0 is invalid. This model only works in thinking mode.",
        "Remove `reasoning` from target.params",
    ),
    (
        "Invalid JSON payload received. Unknown name \"max_tokens\" at 'generation_config': Cannot find field.",
        "Remove `max_tokens` from target.params",
    ),
    ("Developer instruction is not enabled for models/gemma-3-27b-it", "Remove `system` from the eval file"),
]


@pytest.mark.parametrize(
    ("api", "status", "message", "line"), re.findall(r"^(\w+) (\d+) (.+)\n    (.+)$", WORDINGS, re.MULTILINE)
)
def test_the_run_stops_at_the_first_request_with_the_line_to_write(
    api: Api, status: str, message: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with provider(api, [Refuse(int(status), message), Say("2")]) as server:
        target = {"model": "m-1", "api": api, "base_url": server.url, "api_key_env": "HOLDFAST_TEST_KEY"}
        path = write_spec(tmp_path, target=target, limits={"concurrency": 1})
        monkeypatch.setenv("HOLDFAST_TEST_KEY", "sk-of-the-test")
        refused = command(monkeypatch, capsys, tmp_path, "eval", path, "--display", "none")
        asked = len(server.asked)
        again = command(monkeypatch, capsys, tmp_path, "eval", path, "--display", "none")
    assert (refused.code, asked) == (3, 1)
    assert line in refused.out + refused.err
    assert (again.code, len(server.asked)) == (0, 3), "every trial is asked when the server answers"
    assert len(kept(run_dir(tmp_path))) == 2


@pytest.mark.parametrize(("message", "line"), GEMINI)
def test_wordings_of_gemini(message: str, line: str) -> None:
    pytest.importorskip("holdfast.dialects.gemini")
    found = dialect_of("gemini").explain(AttemptError("bad_request", message, status=400, retry=False))
    assert found is not None and line in found


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "This model's maximum context length is 8192 tokens."),
        (400, "Invalid prompt: your prompt was flagged."),
        (429, "Unsupported value: 'temperature' does not support 0 with this model."),
        (500, "max_tokens: Field required"),
    ],
)
def test_a_refusal_of_one_request_is_no_reason_to_stop(status: int, message: str) -> None:
    for api in ("chat", "responses", "messages"):
        assert dialect_of(api).explain(AttemptError("bad_request", message, status=status, retry=False)) is None


def test_the_line_names_the_block_that_asks(tmp_path: Path) -> None:
    judge = {"type": "prompt", "name": "fair", "model": "j", "prompt": "good?"}
    spec = load(tmp_path, graders=[judge])
    error = AttemptError("bad_request", "`temperature` is deprecated for this model.", status=400, retry=False)
    refusal = Model.of(spec.graders[0], Prices("j", {}), "eval.yaml").explained(error)
    assert refusal.remedy is not None and "Remove `temperature` from graders.fair.params" in refusal.remedy
