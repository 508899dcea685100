"""Stop reasons: each API's words are translated, and the right action follows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import evaluate
from holdfast.dialects import dialect_of
from tests.dialects.test_conformance import Ran, keys, run  # noqa: F401 - `keys` is a fixture
from tests.support.breaking import kept
from tests.support.providers import Asked, Raw, Refuse, Say, provider
from tests.support.running import lines

if TYPE_CHECKING:
    from holdfast.spec.schema import Api
    from tests.support.providers import Move


def chat(stop: Any, content: Any = "yes", **message: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, **message}
    return {"choices": [{"index": 0, "message": message, "finish_reason": stop}]}


def claude(stop: Any, *blocks: dict[str, Any], **usage: Any) -> dict[str, Any]:
    content = list(blocks) or [{"type": "text", "text": "yes"}]
    counts = {"input_tokens": 10, "output_tokens": 5, **usage}
    return {"type": "message", "role": "assistant", "content": content, "stop_reason": stop, "usage": counts}


def gemini(stop: Any, text: str = "yes", **reply: Any) -> dict[str, Any]:
    return {"candidates": [{"content": {"parts": [{"text": text}]}, "finishReason": stop}], **reply}


def response(status: Any, reason: str | None = None, part: dict[str, Any] | None = None) -> dict[str, Any]:
    content = [part or {"type": "output_text", "text": "yes"}]
    details = {"incomplete_details": {"reason": reason}} if reason else {}
    return {"status": status, "output": [{"type": "message", "content": content}], **details}


CALL = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
STOPS: list[tuple[Api, dict[str, Any], str]] = [
    ("chat", chat("stop"), "stop"),
    ("chat", chat("eos"), "stop"),
    ("chat", chat("length"), "length"),
    ("chat", chat("model_length"), "context_window"),
    ("chat", chat("content_filter"), "content_filter"),
    ("chat", chat("sensitive"), "content_filter"),
    ("chat", chat("SAFETY"), "content_filter"),
    ("chat", chat("stop", None, refusal="I cannot"), "refusal"),
    ("chat", chat("length", None, refusal="I can"), "length"),
    ("chat", chat("stop", None, tool_calls=CALL), "tool_calls"),
    ("chat", chat("function_call", None, tool_calls=CALL), "tool_calls"),
    ("chat", chat(None), "unknown"),
    ("chat", chat("tired"), "tired"),
    ("chat", {"choices": [{"index": 0, "finish_reason": "content_filter: PROHIBITED_CONTENT"}]}, "content_filter"),
    ("completions", {"choices": [{"text": "yes", "finish_reason": "length"}]}, "length"),
    ("completions", {"choices": [{"text": "yes"}]}, "unknown"),
    ("messages", claude("end_turn"), "stop"),
    ("messages", claude("stop_sequence"), "stop"),
    ("messages", claude("max_tokens"), "length"),
    ("messages", claude("model_context_window_exceeded"), "context_window"),
    ("messages", claude("refusal"), "refusal"),
    ("messages", claude(None), "unknown"),
    ("messages", claude("tired"), "tired"),
    ("responses", response("completed"), "stop"),
    ("responses", response("completed", None, {"type": "refusal", "refusal": "no"}), "refusal"),
    ("responses", response("incomplete", "max_output_tokens"), "length"),
    ("responses", response("incomplete", "content_filter"), "content_filter"),
    ("responses", response("incomplete", "tired"), "tired"),
    ("responses", response("incomplete"), "incomplete"),
    ("responses", response(None), "unknown"),
    ("gemini", gemini("STOP"), "stop"),
    ("gemini", gemini("MAX_TOKENS"), "length"),
    ("gemini", gemini("RECITATION"), "content_filter"),
    ("gemini", gemini("LANGUAGE"), "content_filter"),
    ("gemini", gemini("SPII"), "content_filter"),
    ("gemini", gemini("MALFORMED_FUNCTION_CALL"), "MALFORMED_FUNCTION_CALL"),
    ("gemini", gemini(None), "unknown"),
    ("gemini", {"promptFeedback": {"blockReason": "OTHER"}}, "content_filter"),
]


@pytest.mark.parametrize(("api", "reply", "stop"), STOPS)
def test_stop_reasons_have_one_word_in_all_apis(api: Api, reply: dict[str, Any], stop: str) -> None:
    answer = dialect_of(api).read(reply)
    assert (answer.stop, answer.action) == (stop, "record")


@pytest.mark.parametrize(
    ("api", "reply"),
    [
        ("chat", chat("insufficient_system_resource", "y")),
        ("chat", chat("abort", "")),
        ("chat", chat("network_error", "y")),
        ("gemini", gemini("OTHER")),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_that_a_failing_server_ended_is_asked_for_again(
    api: Api, reply: dict[str, Any], stream: bool
) -> None:
    ran = run(api, [Raw([reply] if stream else reply), Say("yes")], target={"stream": stream})
    assert [output["output"] for output in ran.outputs] == ["yes"] and len(ran.server.asked) == 2
    assert [error["kind"] for error in ran.errors] == ["server"]


# Pauses

SEARCH = {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "weather"}}
RESULT = {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []}
PAUSED = claude("pause_turn", {"type": "text", "text": "Let me search. "}, SEARCH)
AGAIN = claude("pause_turn", RESULT, {"type": "text", "text": "It rains: "})
TOOL = {"params": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}}


def test_a_model_that_pauses_gets_its_message_back_until_it_has_answered() -> None:
    ran = run("messages", [Raw(PAUSED), Raw(AGAIN), Say("yes")], target=TOOL)
    [output] = ran.outputs
    assert (output["output"], output["stop"]) == ("Let me search. It rains: yes", "stop")
    assert ran.server.refused == [] and len(ran.server.asked) == 3
    assert ran.server.asked[2].body["messages"][1:] == [
        {"role": "assistant", "content": [*PAUSED["content"], *AGAIN["content"]]}
    ]
    assert (output["usage"]["input_tokens"], output["usage"]["requests"]) == (10 + 10 + 11, 3)
    assert [message["role"] for message in output["messages"]] == ["user", "assistant"]


def test_a_paused_answer_resumes_where_it_was() -> None:
    calls = 0

    def first(_: Asked) -> Move:
        nonlocal calls
        calls += 1
        return Raw(PAUSED) if calls == 1 else Refuse(401, "no such key")

    with provider("messages", first) as server:
        target = {"model": "m", "api": "messages", "base_url": server.url, "api_key_env": "HOLDFAST_TEST_KEY", **TOOL}
        block: dict[str, Any] = {"name": "p", "samples": [{"id": "a", "q": "Rain?"}], "prompt": "{{ q }}"}
        graders = [{"type": "text", "contains": "yes"}]
        assert evaluate(target=target, graders=graders, **block).exit_code == 3
    with provider("messages", [Say("yes")]) as server:
        done = evaluate(target={**target, "base_url": server.url}, graders=graders, **block)
        assert done.finished and len(server.asked) == 1, "the first part is on record"
        assert server.asked[0].body["messages"][-1]["content"] == PAUSED["content"]
    [output] = kept(done.path)
    assert output["output"] == "Let me search. yes" and output["usage"]["requests"] == 2


def test_a_model_that_never_ends_its_pauses_has_paused() -> None:
    ran = run("messages", [Raw(PAUSED)], target=TOOL)
    assert ran.outputs[0]["stop"] == "pause" and len(ran.server.asked) == 21


# Words that nobody knows


def noted(ran: Ran) -> list[str]:
    return [line.partition(" notice ")[2] for line in (ran.run.path / "run.log").read_text().splitlines()]


def test_a_stop_reason_that_is_not_known_is_recorded_and_named_once() -> None:
    rows = [{"id": name, "question": name} for name in "abc"]
    ran = run("chat", [Raw(chat("tired"))], samples=rows)
    assert [output["stop"] for output in ran.outputs] == ["tired"] * 3
    assert [note for note in noted(ran) if "tired" in note] == [
        "m-1 ended answers with 'tired', which Holdfast does not know; they are graded as whole ones"
    ]
    silent = run("chat", [Raw(chat(None))], name="silent")
    assert any("m-1 ended answers without a stop reason" in note for note in noted(silent))
    assert not any("stop reason" in note for note in noted(run("chat", [Say("yes")], name="usual")))


# Judges and simulated users

PARTIAL = ["length", "content_filter", "refusal", "model_length"]


def judged(stop: str, judge: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
    verdict = '{"reason": "fine", "score": 1}'
    function = {"name": "set_waza_grade_pass", "arguments": "{}"}
    calls = [{"id": "c", "type": "function", "function": function, "extra_content": {"google": {}}}]

    def move(asked: Asked) -> Move:
        if asked.body["messages"][0]["role"] != "system":
            return Say("yes")
        ends = asked.body["messages"][-1]["role"] == "tool"
        return Raw(chat(stop, verdict, tool_calls=calls if "tools" in asked.body and not ends else None))

    with provider("chat", move) as server:
        target = {"model": "m-1", "base_url": server.url}
        done = evaluate(
            name="judged",
            samples=[{"id": "a"}],
            prompt="Is it so?",
            target=target,
            graders=[{"type": "prompt", **judge}],
        )
    return done, lines(done.path / "grades.jsonl")


@pytest.mark.parametrize("judge", [{"rubric": "Is it right?"}, {"prompt": "Check it."}], ids=["score", "tools"])
@pytest.mark.parametrize("stop", PARTIAL)
def test_a_judges_reply_that_is_not_whole_is_no_verdict(stop: str, judge: dict[str, Any]) -> None:
    done, grades = judged(stop, judge)
    assert done.exit_code == 3 and [grade for grade in grades if grade["status"] in ("passed", "failed")] == []
    assert judged("stop", judge)[0].finished, "whole, the same reply is a verdict"


@pytest.mark.parametrize("stop", PARTIAL)
def test_a_simulated_users_reply_that_is_not_whole_is_no_turn(stop: str) -> None:
    def move(asked: Asked) -> Move:
        plays = asked.body["messages"][0]["role"] == "system"
        return Raw(chat(stop, json.dumps({"action": "stop"}))) if plays else Say("yes")

    with provider("chat", move) as server:
        done = evaluate(
            name="played",
            samples=[{"id": "a"}],
            prompt="Is it so?",
            target={"model": "m-1", "base_url": server.url},
            responder={"instructions": "Ask.", "max_followups": 2},
            graders=[{"type": "text", "contains": "yes"}],
            limits={"retries": 0},
        )
    assert kept(done.path) == [] and "the simulated user's reply was" in lines(done.path / "errors.jsonl")[0]["message"]
