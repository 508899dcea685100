"""Anthropic's Messages: differences from the other APIs. `test_conformance.py` has what they share."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest

from holdfast.dialects.messages import DIALECT, MAX_TOKENS
from holdfast.dialects.types import ModelRequest
from holdfast.errors import AttemptError

QUESTION = {"role": "user", "content": "Shall I?"}


def encode(*messages: dict[str, Any], model: str = "claude-opus-5", **keys: Any) -> dict[str, Any]:
    return DIALECT.encode(ModelRequest(model=model, messages=messages or [QUESTION], **keys))


def test_the_default_limit_of_replies_stays_what_it_is() -> None:
    assert MAX_TOKENS == 16_384, "outputs depend on it, and their keys do not show it"
    assert encode()["max_tokens"] == MAX_TOKENS
    assert encode(max_tokens=5)["max_tokens"] == 5
    assert encode(params={"max_completion_tokens": 7}, max_tokens=5)["max_tokens"] == 7


@pytest.mark.parametrize(
    ("model", "reasoning", "sent"),
    [
        (
            "claude-opus-5",
            {"effort": "high"},
            {"output_config": {"effort": "high"}, "thinking": {"type": "adaptive", "display": "summarized"}},
        ),
        ("claude-opus-4-5-20251101", {"effort": "low"}, {"output_config": {"effort": "low"}}),
        ("claude-sonnet-4-20250514", {"effort": "low"}, {"output_config": {"effort": "low"}}),
        ("MiniMax-M3", {"effort": "low"}, {"output_config": {"effort": "low"}}),
        (
            "claude-haiku-4-5",
            {"tokens": 2048},
            {"thinking": {"type": "enabled", "budget_tokens": 2048}, "max_tokens": MAX_TOKENS + 2048},
        ),
        ("claude-opus-5", {"effort": "none"}, {"thinking": {"type": "disabled"}}),
    ],
)
def test_reasoning_is_translated(model: str, reasoning: dict[str, Any], sent: dict[str, Any]) -> None:
    body = encode(model=model, params={"reasoning": reasoning})
    assert body == {"model": model, "messages": [QUESTION], "max_tokens": MAX_TOKENS, **sent}


def test_names_of_the_api_take_precedence_over_translated_ones() -> None:
    params = {"reasoning": {"effort": "high"}, "thinking": {"display": "omitted"}, "stop": "END", "top_k": 3}
    body = encode(params=params, schema={"type": "object"})
    assert body["thinking"] == {"type": "adaptive", "display": "omitted"}
    assert body["output_config"] == {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}}
    assert (body["stop_sequences"], body["top_k"]) == (["END"], 3)
    assert "stop" not in body and "reasoning" not in body


def test_a_conversation_of_another_api_is_written_in_blocks() -> None:
    call = {"id": "call|1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    cut = {"id": "call_2", "type": "function", "function": {"name": "look", "arguments": '{"at'}}
    body = encode(
        {"role": "system", "content": "Be brief."},
        QUESTION,
        {"role": "assistant", "content": "Wait.", "tool_calls": [call, cut], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "call|1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "content": "no JSON"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "Say."},
    )
    assert body["system"] == "Be brief."
    assert body["messages"] == [
        QUESTION,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Wait."},
                {"type": "tool_use", "id": "call_1", "name": "look", "input": {"at": "sky"}},
                {"type": "tool_use", "id": "call_2", "name": "look", "input": {"arguments": '{"at'}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "rain"},
                {"type": "tool_result", "tool_use_id": "call_2", "content": "no JSON"},
                {"type": "text", "text": "And?"},
                {"type": "text", "text": "Say."},
            ],
        },
    ]


def test_files_are_sent_by_content() -> None:
    files = {"d1": b"\x89PNG", "d2": b"%PDF", "d3": b"plain"}
    parts = [
        {"type": "image", "digest": "d1", "media_type": "image/png", "name": "a.png"},
        {"type": "file", "digest": "d2", "media_type": "application/pdf", "name": "b.pdf"},
        {"type": "file", "digest": "d3", "media_type": "text/markdown", "name": "c.md"},
        {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}},
    ]
    [message] = encode({"role": "user", "content": parts}, load=files.__getitem__)["messages"]
    assert [block["source"] for block in message["content"]] == [
        {"type": "base64", "media_type": "image/png", "data": b64encode(b"\x89PNG").decode()},
        {"type": "base64", "media_type": "application/pdf", "data": b64encode(b"%PDF").decode()},
        {"type": "text", "media_type": "text/plain", "data": "plain"},
        {"type": "url", "url": "https://example.org/x.png"},
    ]
    assert [block["type"] for block in message["content"]] == ["image", "document", "document", "image"]
    audio = {"type": "audio", "digest": "d1", "media_type": "audio/wav", "name": "d.wav"}
    with pytest.raises(AttemptError, match="no audio"):
        encode({"role": "user", "content": [audio]}, load=files.__getitem__)


def test_a_request_of_a_program_is_read_as_a_conversation() -> None:
    body = {
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": "Shall I?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "sky"}},
                    {"type": "of_the_future"},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                    {"type": "text", "text": "Hurry."},
                ],
            },
            {"role": "assistant", "content": [{"type": "tool_use"}]},
        ],
    }
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    assert DIALECT.conversation(body) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Shall I?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "t1", "content": "rain"},
        {"role": "user", "content": "Hurry."},
    ]


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("seed: Extra inputs are not permitted", "Remove `seed`"),
        ('"thinking.type.enabled" is not supported for this model.', "{effort: high}"),
        ("adaptive thinking is not supported on this model", "{tokens: 8192}"),
        ("max_tokens: 16384 > 8192, which is the maximum allowed number of output tokens", "`max_tokens: 8192`"),
        ("`temperature` is deprecated for this model.", "Remove `temperature`"),
    ],
)
def test_a_refusal_of_every_request_names_the_line_to_write(message: str, line: str) -> None:
    explained = DIALECT.explain(AttemptError("bad_request", f"the server answered 400: {message}", status=400))
    assert explained is not None and line in explained
