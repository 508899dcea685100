"""The providers' own clients read what the scripted servers send: the servers have the form of the real ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

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


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_openai_chat(stream: bool) -> None:
    from openai import OpenAI
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    messages: Any = [{"role": "user", "content": "Shall I take an umbrella?"}]
    with provider("chat", [THINKS]) as server, OpenAI(api_key="sk-of-the-test", base_url=server.url) as client:
        if stream:
            with client.chat.completions.stream(
                model="m-1", messages=messages, stream_options={"include_usage": True}
            ) as events:
                for event in events:
                    if event.type == "chunk":
                        ChatCompletionChunk.model_validate(event.chunk.to_dict())
                reply: Any = events.get_final_completion()
        else:
            reply = client.chat.completions.create(model="m-1", messages=messages)
            ChatCompletion.model_validate(reply.to_dict())
    [choice] = reply.choices
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert calls == [("weather", {"city": "Oslo"}), ("clock", {"zone": "CET"})]
    assert (choice.message.content, choice.message.reasoning) == ("let me look", "it may rain")
    assert choice.finish_reason == "tool_calls"
    assert (reply.usage.prompt_tokens, reply.usage.prompt_tokens_details.cached_tokens) == (100, 90)
    assert (reply.usage.completion_tokens, reply.usage.completion_tokens_details.reasoning_tokens) == (7, 3)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_openai_responses(stream: bool) -> None:
    from openai import OpenAI
    from openai.types.responses import Response, ResponseStreamEvent

    request: Any = {"model": "m-1", "input": "hello", "store": False, "include": ["reasoning.encrypted_content"]}
    with provider("responses", [THINKS]) as server, OpenAI(api_key="sk-of-the-test", base_url=server.url) as client:
        if stream:
            seen = [event.to_dict() for event in client.responses.create(**request, stream=True)]
            for event in seen:
                TypeAdapter[Any](ResponseStreamEvent).validate_python(event)
            with client.responses.stream(**request) as events:
                reply: Any = events.get_final_response()
        else:
            reply = client.responses.create(**request)
    Response.model_validate(reply.to_dict())
    reasoning, message, *calls = reply.output
    assert (reasoning.summary[0].text, reasoning.encrypted_content) == ("it may rain", f"sealed {reasoning.id}")
    assert reply.output_text == message.content[0].text == "let me look"
    assert [(call.name, call.arguments) for call in calls] == [
        ("weather", '{"city": "Oslo"}'),
        ("clock", '{"zone": "CET"}'),
    ]
    assert (reply.usage.input_tokens, reply.usage.input_tokens_details.cached_tokens) == (100, 90)
    assert (reply.usage.output_tokens, reply.usage.output_tokens_details.reasoning_tokens) == (7, 3)


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # in the client's own source
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_google(stream: bool) -> None:
    from google.genai import Client
    from google.genai.types import HttpOptions

    request: Any = {"model": "m-1", "contents": "Shall I take an umbrella?"}
    with provider("gemini", [THINKS]) as server:
        options = HttpOptions(base_url=server.url.removesuffix("/v1"), api_version="v1")
        with Client(api_key="sk-of-the-test", http_options=options) as client:
            replies: list[Any] = (
                [*client.models.generate_content_stream(**request)]
                if stream
                else [client.models.generate_content(**request)]
            )
    parts = [part for reply in replies for part in reply.candidates[0].content.parts or ()]
    assert "".join(part.text for part in parts if part.thought) == "it may rain"
    assert "".join(part.text for part in parts if part.text and not part.thought) == "let me look"
    calls = [part for part in parts if part.function_call]
    assert [(call.function_call.name, call.function_call.args) for call in calls] == [
        ("weather", {"city": "Oslo"}),
        ("clock", {"zone": "CET"}),
    ]
    assert b"sealed" in calls[0].thought_signature and calls[1].thought_signature is None
    assert replies[-1].candidates[0].finish_reason == "STOP"
    usage = replies[-1].usage_metadata
    assert (usage.prompt_token_count, usage.cached_content_token_count) == (100, 90)
    assert (usage.candidates_token_count, usage.thoughts_token_count) == (4, 3)
