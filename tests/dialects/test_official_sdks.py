"""The providers' own clients read what the scripted servers send: the servers have the form of the real ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.providers import Call, Say, provider

THINKS = Say(
    "let me look",
    (Call("weather", {"city": "Oslo"}), Call("clock", {"zone": "CET"})),
    reasoning="it may rain",
    input_tokens=100,
    cached_tokens=90,
    reasoning_tokens=3,
)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_anthropic(stream: bool) -> None:
    from anthropic import Anthropic

    request: Any = {
        "model": "claude-opus-5",
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "Shall I take an umbrella?"}],
    }
    with (
        provider("messages", [THINKS]) as server,
        Anthropic(api_key="sk-of-the-test", base_url=server.url.removesuffix("/v1")) as client,
    ):
        if stream:
            with client.messages.stream(**request) as events:
                message: Any = events.get_final_message()
        else:
            message = client.messages.create(**request)
    thinking, redacted, text, *calls = message.content
    assert (thinking.thinking, len(thinking.signature), redacted.data) == ("it may rain", 64, "hidden-thoughts")
    assert text.text == "let me look"
    assert [(call.name, call.input) for call in calls] == [("weather", {"city": "Oslo"}), ("clock", {"zone": "CET"})]
    assert message.stop_reason == "tool_use"
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (10, 90)
    assert (message.usage.output_tokens, message.usage.output_tokens_details.thinking_tokens) == (7, 3)
