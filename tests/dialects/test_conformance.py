"""Every API of models, against a scripted server that refuses what the real service refuses.

The same eval produces the same graded transcript through all of them.
"""

from __future__ import annotations

import json
from base64 import b64encode
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import evaluate
from holdfast.dialects import dialect_of
from holdfast.dialects.reading import visible
from holdfast.dialects.types import ModelRequest
from tests.support.breaking import kept
from tests.support.providers import Asked, Call, Cut, FailMidStream, Refuse, Say, provider
from tests.support.running import lines

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from holdfast.spec.schema import Api
    from tests.support.providers import Move, Provider

APIS: tuple[Api, ...] = ("chat", "messages", "responses", "gemini")
"""the APIs that have tools and reasoning; `completions` has neither"""

apis = pytest.mark.parametrize("api", APIS)
every_api = pytest.mark.parametrize("api", [*APIS, "completions"])
streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])

TOOLS = """
def weather(city: str) -> str:
    "Weather of a city."
    return f"rain in {city}"

def clock(zone: str) -> str:
    "Time of a zone."
    return f"noon in {zone}"
"""


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_TEST_KEY", "sk-of-the-test")
    (tmp_path / "tools.py").write_text(TOOLS)


class Ran:
    """A run, and what its server was asked."""

    def __init__(self, run: Any, server: Provider) -> None:
        self.run = run
        self.server = server

    @property
    def outputs(self) -> list[dict[str, Any]]:
        return kept(self.run.path)

    @property
    def errors(self) -> list[dict[str, Any]]:
        return lines(self.run.path / "errors.jsonl")

    def transcript(self) -> list[dict[str, Any]]:
        """The conversation as graders see it, without the ids of its calls, which each API makes in its own way."""
        return [
            {key: value for key, value in message.items() if key not in ("tool_call_id", "name")}
            | ({"tool_calls": [call["function"] for call in message["tool_calls"]]} if "tool_calls" in message else {})
            for message in visible(self.outputs[0]["messages"])
        ]


def run(api: Api, script: Sequence[Move], *, tools: bool = False, target: Any = None, **keys: Any) -> Ran:
    """Run an eval of one sample; `target` and `keys` are added to its target and to the eval."""
    with provider(api, script) as server:
        block: dict[str, Any] = {"model": "m-1", "api": api, "base_url": server.url, "api_key_env": "HOLDFAST_TEST_KEY"}
        block |= target or {}
        if tools:
            block["tools"] = [{"python": "tools.py:weather"}, {"python": "tools.py:clock"}]
        eval_ = {
            "name": "conformance",
            "samples": [{"id": "a", "question": "Shall I take an umbrella?", "expected": "yes"}],
            "prompt": "{{ question }}",
            "graders": [{"type": "text", "contains": "yes"}],
        }
        return Ran(evaluate(target=block, **{**eval_, **keys}), server)


@every_api
@streamed
def test_text_with_its_usage(api: Api, stream: bool) -> None:
    ran = run(api, [Say("yes take one")], target={"stream": stream, "params": {"temperature": 0.5}})
    [output] = ran.outputs
    assert (output["output"], output["stop"]) == ("yes take one", "stop")
    assert (output["usage"]["input_tokens"], output["usage"]["output_tokens"]) == (11, 7)
    assert (output["timing"]["first_token"] is not None) == stream
    assert ran.run.metrics.score == 1 and ran.server.refused == []


@apis
@streamed
def test_tool_calls_at_once_and_in_a_row(api: Api, stream: bool) -> None:
    script = [
        Say("let me look", (Call("weather", {"city": "Oslo"}), Call("clock", {"zone": "CET"}))),
        Say("", (Call("weather", {"city": "Rome"}),)),
        Say("yes"),
    ]
    ran = run(api, script, tools=True, target={"stream": stream})
    assert ran.server.refused == []
    assert ran.transcript() == [
        {"role": "user", "content": "Shall I take an umbrella?"},
        {
            "role": "assistant",
            "content": "let me look",
            "tool_calls": [
                {"name": "weather", "arguments": '{"city": "Oslo"}'},
                {"name": "clock", "arguments": '{"zone": "CET"}'},
            ],
        },
        {"role": "tool", "content": "rain in Oslo"},
        {"role": "tool", "content": "noon in CET"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "weather", "arguments": '{"city": "Rome"}'}]},
        {"role": "tool", "content": "rain in Rome"},
        {"role": "assistant", "content": "yes"},
    ]
    assert ran.outputs[0]["usage"]["input_tokens"] == 33


@apis
@streamed
def test_reasoning_goes_back_in_a_tool_loop_and_is_counted(api: Api, stream: bool) -> None:
    thinks = Say("", (Call("weather", {"city": "Oslo"}),), reasoning="I must look outside", reasoning_tokens=3)
    ran = run(api, [thinks, thinks, Say("yes", reasoning="it rains")], tools=True, target={"stream": stream})
    assert ran.server.refused == [], "the server refuses a loop whose reasoning does not come back as it was"
    [output] = ran.outputs
    assert output["messages"][1]["reasoning"] == "I must look outside"
    assert output["messages"][-1]["reasoning"] == "it rains"
    assert output["usage"]["reasoning_tokens"] == 6
    assert not any("reasoning" in message or "raw" in message for message in visible(output["messages"]))


@apis
def test_graders_do_not_see_reasoning(api: Api, tmp_path: Path) -> None:
    (tmp_path / "grade.py").write_text(
        "def grade(messages):\n    return 1.0 if all(m.keys() <= {'role', 'content'} for m in messages) else 0.0\n"
    )
    ran = run(api, [Say("yes", reasoning="secretly no")], graders=[{"type": "python", "function": "grade.py:grade"}])
    assert ran.run.metrics.score == 1


@apis
@streamed
def test_usage_with_cache(api: Api, stream: bool) -> None:
    ran = run(api, [Say("yes", input_tokens=1000, cached_tokens=900)], target={"stream": stream})
    usage = ran.outputs[0]["usage"]
    assert (usage["input_tokens"], usage["cache_read_tokens"]) == (1000, 900)


@every_api
def test_an_error_inside_a_stream_is_no_answer(api: Api) -> None:
    ran = run(api, [FailMidStream("yes take one", "the GPU fell off"), Say("yes")], target={"stream": True})
    assert [output["output"] for output in ran.outputs] == ["yes"]
    assert "the GPU fell off" in ran.errors[0]["message"]


@every_api
def test_a_stream_that_ends_early_is_no_answer(api: Api) -> None:
    ran = run(api, [Cut("yes take one"), Say("yes")], target={"stream": True})
    assert [output["output"] for output in ran.outputs] == ["yes"]
    assert ran.errors[0]["kind"] == "bad_reply" and "ended before" in ran.errors[0]["message"]


@every_api
def test_a_storm_of_rate_limits_uses_up_no_retries(api: Api) -> None:
    storm = [Refuse(429, "slow down", {"retry-after-ms": "1"})] * 6
    ran = run(api, [*storm, Say("yes")])
    assert ran.run.finished and len(ran.server.asked) == 7


@apis
def test_a_cut_answer_says_so(api: Api) -> None:
    assert run(api, [Say("yes but", stop="length")]).outputs[0]["stop"] == "length"


@apis
def test_the_key_is_sent_and_stored_nowhere(api: Api) -> None:
    ran = run(api, [Say("yes")])
    assert any("sk-of-the-test" in value for value in ran.server.asked[0].headers.values())
    stored = b"".join(path.read_bytes() for path in ran.run.path.rglob("*") if path.is_file())
    assert b"sk-of-the-test" not in stored


@apis
@streamed
def test_files_in_messages(api: Api, stream: bool, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"\x89PNG cat")
    (tmp_path / "notes.pdf").write_bytes(b"%PDF notes")
    content = ["Shall I?", {"image": "{{ picture }}"}, {"file": "notes.pdf"}]
    ran = run(
        api,
        [Say("yes")],
        target={"stream": stream},
        prompt=None,
        messages=[{"role": "user", "content": content}],
        samples=[{"id": "a", "picture": "cat.png"}],
    )
    assert ran.server.refused == [] and ran.run.metrics.score == 1
    sent = json.dumps(ran.server.asked[0].body)
    assert b64encode(b"\x89PNG cat").decode() in sent and b64encode(b"%PDF notes").decode() in sent
    assert [part["type"] for part in ran.transcript()[0]["content"]] == ["text", "image", "file"]


@apis
@streamed
def test_json_by_a_schema(api: Api, stream: bool, tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"take": {"type": "string"}},
        "required": ["take"],
        "additionalProperties": False,
    }
    (tmp_path / "reply.json").write_text(json.dumps(schema))
    script = [Say('{"take": "yes"}')]
    inline = run(api, script, target={"stream": stream, "schema": schema})
    assert inline.server.refused == [] and inline.run.metrics.score == 1
    assert '"take"' in json.dumps(inline.server.asked[0].body)
    same = run(api, script, target={"stream": stream, "schema": "reply.json"})
    assert same.run.path == inline.run.path and same.server.asked == [], "the same schema is the same request"
    plain = run(api, script, target={"stream": stream})
    assert plain.run.path != inline.run.path and '"take"' not in json.dumps(plain.server.asked[0].body)


@apis
def test_a_parameter_that_an_api_does_not_have_ends_the_run_with_the_line_to_write(api: Api) -> None:
    ran = run(api, [Say("yes")], target={"params": {"mirostat": 2}})
    assert "Remove `mirostat` from target.params: this API does not have it." in (ran.run.reason or "")


@pytest.mark.parametrize("api", [api for api in APIS if api != "chat"])
@pytest.mark.parametrize("length", [2, 4, 7, 8, 9])
def test_a_history_from_elsewhere_is_one_that_the_server_takes(api: Api, length: int) -> None:
    """User-written messages, messages of another API, and messages that this one would not send."""
    weather = {"id": "a.1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    broken = {"id": "b", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "CE'}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "", "raw": {"api": "of-another-server", "reply": {"id": 1}}},
        {"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "text", "text": "outside"}]},
        {"role": "assistant", "content": None, "tool_calls": [weather, broken], "reasoning": "I must look"},
        {"role": "tool", "tool_call_id": "a.1", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "name": "clock", "content": "not a JSON object"},
        {"role": "assistant", "content": None, "refusal": "I cannot say"},
        {"role": "user", "content": "Yes or no?"},
    ]
    dialect, wire = dialect_of(api), import_module(f"tests.support.providers.{api}").WIRE
    body = dialect.encode(ModelRequest(model="m-1", messages=messages[:length], max_tokens=9))
    wire.check(Asked("/v1" + dialect.path("m-1", stream=False), dialect.headers("k"), body))
    sent = [message for message in dialect.conversation(body) if message["role"] == "tool"]
    assert [message["content"] for message in sent] == (["rain", "not a JSON object"] if length >= 7 else [])
