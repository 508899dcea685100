"""Agents on every API: recorded, counted, replayed and graded alike, through the providers' own clients."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import evaluate
from holdfast.canonical import digest
from holdfast.dialects.reading import visible
from holdfast.store.lines import seal
from holdfast.targets.exchange import Place, place_of
from holdfast.targets.matching import Volatile, without
from tests.support.breaking import kept
from tests.support.providers import Call, Cut, FailMidStream, Say, provider
from tests.support.running import lines

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.spec.schema import Api
    from tests.support.providers import Move, Provider

APIS: tuple[Api, ...] = ("chat", "responses", "messages", "gemini")

pytestmark = pytest.mark.filterwarnings("ignore:invalid escape sequence")  # in google-genai's own source

AGENT = """
import json, uuid
from pathlib import Path  # noqa: TC003 - msgspec reads it

def look(city):
    return f"rain in {city}"

def chat(context, stream):
    from openai import OpenAI
    messages = [{"role": "user", "content": "Shall I take an umbrella?"}]
    with OpenAI(base_url=context.base_url, api_key="none", max_retries=0) as client:
        while True:
            # Gemini's signatures are in keys that the client drops.
            asked = dict(model="m-1", messages=messages, user=str(uuid.uuid4()))
            if stream:
                calls, text = {}, ""
                for event in client.chat.completions.create(stream=True, **asked):
                    for choice in event.choices:
                        text += choice.delta.content or ""
                        for piece in choice.delta.tool_calls or ():
                            call = calls.setdefault(piece.index, piece.model_dump())
                            if call["id"] != piece.id:
                                call["function"]["arguments"] += piece.function.arguments
                calls = list(calls.values())
            else:
                message = client.chat.completions.create(**asked).choices[0].message
                text, calls = message.content, [call.model_dump() for call in message.tool_calls or ()]
            if not calls:
                return text
            messages.append({"role": "assistant", "content": text or None, "tool_calls": calls})
            for call in calls:
                result = look(**json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            stumble()

def responses(context, stream):
    from openai import OpenAI
    items = [{"role": "user", "content": "Shall I take an umbrella?", "id": f"msg_{uuid.uuid4().hex}"}]
    with OpenAI(base_url=context.base_url, api_key="none", max_retries=0) as client:
        while True:
            asked = dict(model="m-1", input=items, store=False, prompt_cache_key=str(uuid.uuid4()))
            if stream:
                with client.responses.stream(**asked) as events:
                    response = events.get_final_response()
            else:
                response = client.responses.create(**asked)
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return response.output_text
            items += [item.model_dump(exclude_none=True) for item in response.output]
            for call in calls:
                result = look(**json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
            stumble()

def messages(context, stream):
    from anthropic import Anthropic
    conversation = [{"role": "user", "content": "Shall I take an umbrella?"}]
    with Anthropic(base_url=context.base_url.removesuffix("/v1"), api_key="none", max_retries=0) as client:
        while True:
            asked = dict(model="m-1", max_tokens=100, messages=conversation, metadata={"user_id": str(uuid.uuid4())})
            if stream:
                with client.messages.stream(**asked) as events:
                    message = events.get_final_message()
            else:
                message = client.messages.create(**asked)
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in message.content if block.type == "text")
            conversation.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
            results = [{"type": "tool_result", "tool_use_id": c.id, "content": look(**c.input)} for c in calls]
            conversation.append({"role": "user", "content": results})
            stumble()

def gemini(context, stream):
    from google import genai
    from google.genai import types
    contents = [types.Content(role="user", parts=[types.Part(text="Shall I take an umbrella?")])]
    options = types.HttpOptions(base_url=context.base_url.removesuffix("/v1"))
    client = genai.Client(api_key="none", http_options=options)
    try:
        while True:
            asked = dict(model="m-1", contents=contents)
            if stream:
                replies = list(client.models.generate_content_stream(**asked))
            else:
                replies = [client.models.generate_content(**asked)]
            parts = [p for r in replies for c in r.candidates or () for p in (c.content and c.content.parts) or ()]
            calls = [part.function_call for part in parts if part.function_call]
            if not calls:
                return "".join(part.text or "" for part in parts)
            contents.append(types.Content(role="model", parts=parts))
            results = [
                types.FunctionResponse(id=call.id, name=call.name, response={"result": look(**call.args)})
                for call in calls
            ]
            contents.append(types.Content(role="user", parts=[types.Part(function_response=r) for r in results]))
            stumble()
    finally:
        client.close()

def stumble():
    marks = Path(__file__).parent / "stumbles"
    if marks.exists() and int(marks.read_text()) > 0:
        marks.write_text(str(int(marks.read_text()) - 1))
        raise RuntimeError("stumbled")

def reply(prompt, context):
    return globals()[context.params["api"]](context, context.params["stream"])
"""


@pytest.fixture(autouse=True)
def agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_TEST_KEY", "sk-of-the-test")
    (tmp_path / "agent.py").write_text(AGENT)


def run(api: Api, script: list[Move], *, stream: bool = False, **keys: Any) -> tuple[Any, Provider]:
    with provider(api, script) as server:
        target: dict[str, Any] = {
            "python": "agent.py:reply",
            "base_url": server.url,
            "api_key_env": "HOLDFAST_TEST_KEY",
            "params": {"api": api, "stream": stream},
        }
        eval_: dict[str, Any] = {
            "name": "proxied",
            "samples": [{"id": "a", "expected": "yes"}],
            "prompt": "Shall I?",
            "graders": [{"type": "tool_calls", "required_tools": ["weather"]}],
            "prices": {"m-1": {"input": 1e6, "output": 0}},
        }
        return evaluate(target=target, **{**eval_, **keys}), server


LOOK = Say("let me look", (Call("weather", {"city": "Oslo"}),), input_tokens=10, output_tokens=5)
each_api = pytest.mark.parametrize("api", APIS)
streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@each_api
@streamed
def test_an_agent_is_recorded_counted_priced_and_graded(api: Api, stream: bool) -> None:
    done, server = run(api, [LOOK, Say("yes", input_tokens=20, output_tokens=1)], stream=stream)
    assert server.refused == []
    [output] = kept(done.path)
    assert output["output"] == "yes" and done.metrics.score == 1
    usage = output["usage"]
    assert (usage["requests"], usage["input_tokens"], usage["output_tokens"], usage["cost"]) == (2, 30, 6, 30)
    call, result, answer = visible(output["messages"])[1:]
    assert call["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert result["role"] == "tool" and "rain in Oslo" in result["content"]
    assert answer == {"role": "assistant", "content": "yes"}
    headers = server.asked[0].headers
    assert sum("sk-of-the-test" in value for value in headers.values()) == 1
    assert ("anthropic-version" in headers) == (api == "messages")


@each_api
@streamed
def test_what_is_on_record_is_found_whatever_the_client_changes(api: Api, stream: bool, tmp_path: Path) -> None:
    (tmp_path / "stumbles").write_text("2")
    done, server = run(api, [LOOK, LOOK._replace(text="again"), Say("yes")], stream=stream)
    assert kept(done.path)[0]["output"] == "yes"
    assert len(server.asked) == 3, "each attempt sends other ids, and is answered from the record"


def test_records_that_name_calls_by_the_whole_request_are_found(tmp_path: Path) -> None:
    """Earlier versions left nothing out of the digest of a request."""
    (tmp_path / "agent.py").write_text(AGENT.replace("user=str(uuid.uuid4())", 'user="always the same"'))
    (tmp_path / "stumbles").write_text("1")
    stopped, first = run("chat", [LOOK, Say("yes")], limits={"retries": 0})
    assert stopped.metrics is None and len(first.asked) == 1
    [step] = kept(stopped.path, "steps")
    body = first.asked[0].body
    described = {"method": "POST", "path": "chat/completions", "query": "", "body": body}
    present = {**described, "body": {key: value for key, value in body.items() if key != "user"}}
    assert step["request"] == digest(present)
    record = {**step, "request": digest(described)}
    (stopped.path / "steps.jsonl").write_bytes(seal(json.dumps(record).encode()))
    done, second = run("chat", [Say("yes")])
    assert kept(done.path)[0]["output"] == "yes" and len(second.asked) == 1
    assert done.metrics.score == 1, "the tool was called as the answer on record says"


@each_api
@pytest.mark.parametrize("move", [Cut("yes take one"), FailMidStream("yes take one", "the GPU fell off")])
def test_an_answer_that_fails_inside_its_stream_is_not_recorded(api: Api, move: Move) -> None:
    done, server = run(api, [move, Say("yes")], stream=True)
    assert kept(done.path)[0]["output"] == "yes" and len(server.asked) == 2
    assert len(kept(done.path, "steps")) == 1 and lines(done.path / "errors.jsonl")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_that_a_failing_server_ended_is_not_recorded(stream: bool) -> None:
    done, server = run("chat", [Say("ye", stop="insufficient_system_resource"), Say("yes")], stream=stream)
    assert kept(done.path)[0]["output"] == "yes" and len(server.asked) == 2
    assert len(kept(done.path, "steps")) == 1 and lines(done.path / "errors.jsonl")


@pytest.mark.parametrize(
    ("path", "headers", "place"),
    [
        ("v1/chat/completions", {}, Place("chat/completions", "chat", "openai")),
        ("chat/completions", {}, Place("chat/completions", "chat", "openai")),
        ("v1/completions", {}, Place("completions", "completions", "openai")),
        ("v1/responses", {}, Place("responses", "responses", "openai")),
        ("v1/responses/input_tokens", {}, Place("responses/input_tokens", None, "openai", free=True)),
        ("v1/v1/messages", {}, Place("messages", "messages", "anthropic")),
        ("v1/messages", {"anthropic-version": "2023-06-01"}, Place("messages", "messages", "anthropic")),
        (
            "v1/messages/count_tokens",
            {"anthropic-version": "2023-06-01"},
            Place("messages/count_tokens", None, "anthropic", free=True),
        ),
        ("v1/models", {"anthropic-version": "2023-06-01"}, Place("models", None, "anthropic")),
        ("v1/models", {}, Place("models", None, "openai")),
        ("v1beta/models", {"x-goog-api-key": "k"}, Place("models", None, "google")),
        (
            "v1beta/models/gemini-3:generateContent",
            {},
            Place("models/gemini-3:generateContent", "gemini", "google", "gemini-3"),
        ),
        (
            "models/gemini-3:streamGenerateContent",
            {},
            Place("models/gemini-3:streamGenerateContent", "gemini", "google", "gemini-3", streams=True),
        ),
    ],
)
def test_the_path_tells_the_api(path: str, headers: dict[str, str], place: Place) -> None:
    assert place_of(path, headers) == place


def test_volatile_fields_are_left_out_at_any_depth() -> None:
    body = {"input": [{"id": 1, "text": "a"}, "b"], "metadata": {"user_id": 1, "kept": 2}, "model": "m"}
    fields = [Volatile("input[].id"), Volatile("metadata.user_id"), Volatile("missing.field"), Volatile("model.name")]
    assert without(body, fields) == {"input": [{"text": "a"}, "b"], "metadata": {"kept": 2}, "model": "m"}
    assert without(body, []) is body and without("text", fields) == "text"
