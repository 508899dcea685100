"""The Responses API: what goes back to the server, and how other servers differ from OpenAI's."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.dialects.responses import DIALECT
from holdfast.dialects.types import ModelRequest
from holdfast.errors import AttemptError, Fault
from tests.support.providers import Asked
from tests.support.providers.responses import WIRE

USER = {"role": "user", "content": "hello"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "sealed rs_1"}
CALL = {
    "type": "function_call",
    "id": "of-thought-fc_1",
    "call_id": "call_1",
    "status": "completed",
    "name": "weather",
    "arguments": '{"city": "Oslo"}',
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}


def text(words: str, **keys: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": words}], **keys}


def reply(*items: Any, **keys: Any) -> dict[str, Any]:
    return {"object": "response", "status": "completed", "output": [*items], "temperature": 1.0, **keys}


def encode(*messages: Any, **keys: Any) -> dict[str, Any]:
    """Write a request that the strict server takes."""
    body = DIALECT.encode(ModelRequest(model=keys.pop("model", "m-1"), messages=messages, **keys))
    WIRE.check(Asked("/v1/responses", {}, body))
    return body


def test_items_go_back_as_they_came() -> None:
    answer = DIALECT.read(reply(REASONING, CALL))
    body = encode(USER, answer.message, RESULT)
    output = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
    assert body["input"] == [{"role": "user", "content": "hello"}, REASONING, CALL, output]
    assert (body["store"], body["include"]) == (False, ["reasoning.encrypted_content"])


def test_without_reasoning_no_item_names_it() -> None:
    answer = DIALECT.read(reply(REASONING, CALL))
    body = encode(USER, answer.message, RESULT, reasoning_history="none")
    assert [item.get("type") for item in body["input"]] == [None, "function_call", "function_call_output"]


def test_stored_reasoning_goes_back_to_the_server_that_stores_it() -> None:
    answer = DIALECT.read(reply({**REASONING, "encrypted_content": None}, text("yes", id="msg_1")))
    assert len(encode(USER, answer.message, USER)["input"]) == 3
    assert len(encode(USER, answer.message, USER, params={"store": True})["input"]) == 4


def test_names_of_chat_completions_are_translated_and_own_names_take_precedence() -> None:
    assert encode(USER, params={"max_tokens": 5, "temperature": 0})["max_output_tokens"] == 5
    assert encode(USER, params={"max_tokens": 5, "max_output_tokens": 6})["max_output_tokens"] == 6
    assert encode(USER, params={"max_tokens": 5}, max_tokens=9)["max_output_tokens"] == 5
    assert encode(USER, max_tokens=9)["max_output_tokens"] == 9


def test_a_schema_keeps_the_other_settings_of_text() -> None:
    schema = {"type": "object", "properties": {}}
    body = encode(USER, schema=schema, params={"text": {"verbosity": "low"}})
    assert body["text"]["verbosity"] == "low" and body["text"]["format"]["schema"] == schema


def test_models_that_do_not_reason_are_not_asked_for_encrypted_reasoning() -> None:
    assert "include" not in encode(USER, model="gpt-4o-mini")
    refusal = AttemptError("bad_request", "Encrypted content is not supported with this model.", status=400)
    assert "include: []" in (DIALECT.explain(refusal) or "")


def test_a_limit_of_reasoning_in_tokens_is_refused_with_the_line_to_write() -> None:
    with pytest.raises(Fault, match=r"reasoning\.tokens") as raised:
        encode(USER, params={"reasoning": {"tokens": 100}})
    assert "effort" in (raised.value.remedy or "")
    assert encode(USER, params={"reasoning": {"effort": "low", "summary": "auto"}})["reasoning"]["summary"] == "auto"


def test_tools_are_flat_and_the_providers_own_stay() -> None:
    function = {"name": "weather", "description": "Weather.", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}, {"type": "web_search"}]
    assert encode(USER, tools=tools)["tools"] == [{"type": "function", "strict": False, **function}, tools[1]]


def test_images_audio_and_files() -> None:
    content = [
        {"type": "text", "text": "look"},
        {"type": "image", "digest": "d1", "media_type": "image/png", "name": "a.png"},
        {"type": "file", "digest": "d2", "media_type": "application/pdf", "name": "b.pdf"},
        {"type": "audio", "digest": "d3", "media_type": "audio/wav", "name": "c.wav"},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": "low"}},
    ]
    [item] = encode({"role": "user", "content": content}, load=lambda digest: digest.encode())["input"]
    assert item["content"] == [
        {"type": "input_text", "text": "look"},
        {"type": "input_image", "image_url": "data:image/png;base64,ZDE=", "detail": "auto"},
        {"type": "input_file", "filename": "b.pdf", "file_data": "data:application/pdf;base64,ZDI="},
        {"type": "input_audio", "input_audio": {"data": "ZDM=", "format": "wav"}},
        {"type": "input_image", "image_url": "https://example.org/a.png", "detail": "low"},
    ]


def test_a_refusal_is_not_the_text() -> None:
    refusal = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot"}]}
    answer = DIALECT.read(reply(refusal))
    assert (answer.text, answer.message["refusal"]) == ("", "I cannot")
    foreign = {"role": "assistant", "content": None, "refusal": "I cannot"}
    assert encode(USER, foreign, USER)["input"][1] == {"role": "assistant", "content": "I cannot"}


def test_a_final_answer_is_the_text_without_the_remarks_before_it() -> None:
    answer = DIALECT.read(reply(text("I look.", phase="commentary"), text("yes", phase="final_answer")))
    assert answer.text == "yes" and len(answer.message["raw"]["reply"]["output"]) == 2


def test_items_of_unknown_types_are_kept_and_what_repeats_the_request_is_not() -> None:
    search = {"type": "web_search_call", "id": "ws_1", "action": {"query": "rain"}}
    answer = DIALECT.read(reply(search, text("yes"), service_tier="default", metadata={}))
    assert answer.text == "yes"
    assert answer.message["raw"]["reply"] == {
        "status": "completed",
        "output": [search, text("yes")],
        "service_tier": "default",
    }


@pytest.mark.parametrize("output", [[], None])
def test_a_last_event_without_items_does_not_empty_the_answer(output: Any) -> None:
    reader = DIALECT.reader()
    for number, item in ((1, CALL), (0, REASONING)):
        reader.feed({"type": "response.output_item.done", "output_index": number, "item": item})
    reader.feed({"type": "response.something_new", "delta": "?"})
    reader.feed({"type": "response.completed", "response": {"status": "completed", "output": output}})
    assert reader.finish().message["raw"]["reply"]["output"] == [REASONING, CALL]


def test_a_server_that_does_not_stream_is_read_too() -> None:
    reader = DIALECT.reader()
    reader.feed(reply(text("yes")))
    assert reader.ended and reader.finish().text == "yes"


@pytest.mark.parametrize(("code", "kind"), [("server_error", "server"), ("rate_limit_exceeded", "rate_limit")])
def test_a_failed_reply_is_no_answer(code: str, kind: str) -> None:
    failed = reply(status="failed", error={"code": code, "message": "the GPU fell off"})
    with pytest.raises(AttemptError, match="the GPU fell off") as whole:
        DIALECT.read(failed)
    with pytest.raises(AttemptError, match="the GPU fell off") as streamed:
        DIALECT.reader().feed({"type": "response.failed", "response": failed})
    assert whole.value.kind == streamed.value.kind == kind


@pytest.mark.parametrize("status", ["queued", "in_progress", "cancelled"])
def test_a_reply_that_is_not_there_yet_is_no_answer(status: str) -> None:
    with pytest.raises(AttemptError, match="no answer"):
        DIALECT.read(reply(text("half"), status=status))


def test_the_conversation_of_another_program() -> None:
    body = {
        "instructions": "Be brief.",
        "prompt_cache_key": "of this start",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You are a coder."}]},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I think"}], "encrypted_content": "x"},
            text("Let me look."),
            CALL,
            {"type": "custom_tool_call", "call_id": "call_2", "name": "apply_patch", "input": "*** Begin"},
            {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
            {"type": "custom_tool_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "ok"}]},
            {"type": "item_reference", "id": "msg_9"},
            {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]},
        ],
    }
    patch = {
        "id": "call_2",
        "type": "function",
        "function": {"name": "apply_patch", "arguments": '{"input": "*** Begin"}'},
    }
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    assert DIALECT.conversation(body) == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "You are a coder."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "Let me look.", "reasoning": "I think", "tool_calls": [call, patch]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "content": "ok"},
        {"role": "user", "content": [image]},
    ]
    assert DIALECT.conversation({"input": "hello"}) == [USER]


def test_an_item_that_is_not_an_object_is_an_error_of_the_attempt() -> None:
    reader = DIALECT.reader()
    reader.feed({"type": "response.output_text.delta", "output_index": 0, "delta": "4"})
    reader.feed({"type": "response.output_item.done", "output_index": 0, "item": None})
    reader.feed({"type": "response.completed", "response": {"object": "response", "status": "completed", "output": []}})
    with pytest.raises(AttemptError):
        reader.finish()
