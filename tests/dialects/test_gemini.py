"""Gemini: parts that go back as they came, and calls that have no ids."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.dialects.gemini import DIALECT
from holdfast.dialects.types import ModelRequest
from holdfast.errors import AttemptError
from tests.support.providers import Asked, Call, Say
from tests.support.providers.gemini import WIRE

USER = {"role": "user", "content": "hello"}
ASKED = Asked("/v1/models/m-1:generateContent", {"x-goog-api-key": "k"}, {"contents": []})
OLDER = ASKED._replace(path="/v1/models/gemini-2.5-flash:generateContent")
CALLS = Say("let me look", (Call("weather", {"city": "Oslo"}), Call("weather", {"city": "Rome"})), reasoning="I think")


def encode(*messages: Any, model: str = "m-1", **keys: Any) -> dict[str, Any]:
    """Write a request that the strict server takes."""
    body = DIALECT.encode(ModelRequest(model=model, messages=messages, **keys))
    WIRE.check(Asked("/v1" + DIALECT.path(model, stream=False), DIALECT.headers("k"), body))
    return body


def config(**params: Any) -> Any:
    return encode(USER, params=params).get("generationConfig")


def results(message: dict[str, Any]) -> list[dict[str, Any]]:
    """What the tools say to the calls of a message."""
    return [
        {"role": "tool", "tool_call_id": call["id"], "name": "weather", "content": f"rain {number}"}
        for number, call in enumerate(message["tool_calls"])
    ]


def test_parts_go_back_as_they_came_and_results_are_one_content() -> None:
    reply = WIRE.whole(CALLS, ASKED)
    message = DIALECT.read(reply).message
    user, model, answers = encode(USER, message, *results(message))["contents"]
    assert (user["role"], model["role"], answers["role"]) == ("user", "model", "user")
    assert model["parts"] == reply["candidates"][0]["content"]["parts"]
    assert [part["functionResponse"] for part in answers["parts"]] == [
        {"id": "fc0x0", "name": "weather", "response": {"output": "rain 0"}},
        {"id": "fc0x1", "name": "weather", "response": {"output": "rain 1"}},
    ]


def test_calls_without_ids_get_ids_in_the_conversation_but_not_in_requests() -> None:
    message = DIALECT.read(WIRE.whole(CALLS, OLDER)).message
    assert [call["id"] for call in message["tool_calls"]] == ["r0-0", "r0-1"]
    answers = encode(USER, message, *results(message), model="gemini-2.5-flash")["contents"][-1]
    assert [part["functionResponse"].keys() for part in answers["parts"]] == [{"name", "response"}] * 2


def test_no_reasoning_goes_back_if_the_history_excludes_it() -> None:
    message = DIALECT.read(WIRE.whole(CALLS, ASKED)).message
    body = encode(USER, message, *results(message), reasoning_history="none")
    signatures = [part.get("thoughtSignature") for part in body["contents"][1]["parts"]]
    assert signatures == [None, "skip_thought_signature_validator", None]
    assert not any("thought" in part for part in body["contents"][1]["parts"])
    assert "thoughtSignature" in message["raw"]["reply"]["parts"][2], "the conversation itself is unchanged"


def test_calls_of_another_model_are_marked_as_unsigned_for_models_that_check_signatures() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    [part] = encode(USER, message, *results(message))["contents"][1]["parts"]
    assert part["thoughtSignature"] == "skip_thought_signature_validator"
    older = DIALECT.encode(ModelRequest(model="gemini-2.5-pro", messages=[USER, message, *results(message)]))
    assert "thoughtSignature" not in older["contents"][1]["parts"][0]


def test_names_of_chat_completions_are_translated_and_own_names_stay() -> None:
    assert config(temperature=0, top_p=0.5, max_tokens=5, stop="END", seed=1) == {
        "temperature": 0,
        "topP": 0.5,
        "maxOutputTokens": 5,
        "stopSequences": ["END"],
        "seed": 1,
    }
    assert config(maxOutputTokens=6, max_tokens=5) == {"maxOutputTokens": 6}
    assert config(generationConfig={"topK": 3}, temperature=1) == {"topK": 3, "temperature": 1}
    settings = [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}]
    assert encode(USER, params={"safetySettings": settings})["safetySettings"] == settings
    assert encode(USER, max_tokens=9)["generationConfig"] == {"maxOutputTokens": 9}


def test_reasoning() -> None:
    assert config(reasoning={"effort": "low"}) == {"thinkingConfig": {"includeThoughts": True, "thinkingLevel": "low"}}
    assert config(reasoning={"tokens": 9}) == {"thinkingConfig": {"includeThoughts": True, "thinkingBudget": 9}}
    assert config(reasoning={"effort": "none"}) == {"thinkingConfig": {"thinkingBudget": 0}}


def test_tools_and_the_choice_among_them() -> None:
    function = {"name": "weather", "description": "Weather.", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}, {"googleSearch": {}}]
    choice = {"type": "function", "function": {"name": "weather"}}
    body = encode(USER, tools=tools, params={"tool_choice": choice})
    declared = {"name": "weather", "description": "Weather.", "parametersJsonSchema": {"type": "object"}}
    assert body["tools"] == [{"functionDeclarations": [declared]}, {"googleSearch": {}}]
    assert body["toolConfig"]["functionCallingConfig"] == {"mode": "ANY", "allowedFunctionNames": ["weather"]}
    required = encode(USER, params={"tool_choice": "required"})
    assert required["toolConfig"]["functionCallingConfig"] == {"mode": "ANY"}


def test_system_messages_and_schemas() -> None:
    schema = {"type": "object", "properties": {}}
    body = encode({"role": "system", "content": "Be brief."}, USER, schema=schema)
    assert body["systemInstruction"] == {"parts": [{"text": "Be brief."}]} and len(body["contents"]) == 1
    structured = {"responseMimeType": "application/json", "responseJsonSchema": schema}
    assert body["generationConfig"] == structured


def test_images_and_files() -> None:
    content = [
        {"type": "text", "text": "look"},
        {"type": "image", "digest": "d1", "media_type": "image/png", "name": "a.png"},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    ]
    [item] = encode({"role": "user", "content": content}, load=lambda digest: digest.encode())["contents"]
    assert item["parts"] == [
        {"text": "look"},
        {"inlineData": {"mimeType": "image/png", "data": "ZDE="}},
        {"fileData": {"fileUri": "https://example.org/a.png"}},
        {"inlineData": {"mimeType": "image/png", "data": "AA=="}},
    ]


def test_a_blocked_prompt_is_an_answer_without_text() -> None:
    blocked = {"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": {"promptTokenCount": 3}}
    reader = DIALECT.reader()
    reader.feed(blocked)
    for answer in (DIALECT.read(blocked), reader.finish()):
        assert (answer.text, answer.stop, answer.tokens.input, answer.tokens.output) == ("", "content_filter", 3, 0)
        assert answer.message["raw"]["reply"]["promptFeedback"] == {"blockReason": "SAFETY"}


@pytest.mark.parametrize(
    ("reason", "stop"),
    [("SAFETY", "content_filter"), ("RECITATION", "content_filter"), ("MALFORMED_FUNCTION_CALL",) * 2],
)
def test_an_answer_that_ended_otherwise_says_how(reason: str, stop: str) -> None:
    assert DIALECT.read({"candidates": [{"finishReason": reason}]}).stop == stop


def test_a_reply_without_candidates_is_no_answer() -> None:
    for reply in ({}, {"candidates": []}, {"candidates": [{}]}, {"usageMetadata": {}}):
        with pytest.raises(AttemptError, match="no answer"):
            DIALECT.read(reply)


def test_parts_of_unknown_kinds_are_kept_and_go_back() -> None:
    code = {"executableCode": {"language": "PYTHON", "code": "1"}, "thoughtSignature": "AA=="}
    reply = {"candidates": [{"content": {"parts": [code, {"text": "yes"}]}, "finishReason": "STOP"}]}
    answer = DIALECT.read(reply)
    body = DIALECT.encode(ModelRequest(model="m-1", messages=[USER, answer.message, USER]))
    assert answer.text == "yes" and body["contents"][1]["parts"] == [code, {"text": "yes"}]


def test_a_key_that_is_not_accepted_stops_the_run_with_a_hint() -> None:
    refusal = AttemptError("bad_request", "API key not valid. Please pass a valid API key.", status=400)
    assert "key" in (DIALECT.explain(refusal) or "")


def test_the_conversation_of_another_program() -> None:
    call = {"functionCall": {"name": "read_file", "args": {"path": "a"}}, "thoughtSignature": "AA=="}
    body = {
        "systemInstruction": {"role": "user", "parts": [{"text": "You are a coder."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "look "}, {"text": "at it"}]},
            {"role": "model", "parts": [{"text": "I think", "thought": True}, {"text": "I look."}, call, call]},
            {
                "role": "user",
                "parts": [
                    {"functionResponse": {"name": "read_file", "response": {"output": "one"}}},
                    {"functionResponse": {"name": "read_file", "response": {"lines": 2}}},
                    {"text": "go on"},
                ],
            },
            {"role": "user", "parts": [{"inlineData": {"mimeType": "image/png", "data": "AA=="}}]},
        ],
    }
    function = {"name": "read_file", "arguments": '{"path": "a"}'}
    calls = [{"id": name, "type": "function", "function": function} for name in ("call-1-0", "call-1-1")]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    assert DIALECT.conversation(body) == [
        {"role": "system", "content": "You are a coder."},
        {"role": "user", "content": "look at it"},
        {"role": "assistant", "content": "I look.", "reasoning": "I think", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call-1-0", "name": "read_file", "content": "one"},
        {"role": "tool", "tool_call_id": "call-1-1", "name": "read_file", "content": '{"lines": 2}'},
        {"role": "user", "content": "go on"},
        {"role": "user", "content": [image]},
    ]
