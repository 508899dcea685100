"""Servers that speak an API their own way: their answer is read as it was meant, or refused, and never another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from holdfast import evaluate
from holdfast.dialects import dialect_of
from holdfast.dialects.types import ModelRequest
from tests.dialects.test_conformance import keys, run  # noqa: F401 - `keys` is a fixture
from tests.dialects.test_stops import chat, claude, gemini
from tests.support.providers import Raw, Say, provider
from tests.support.running import lines
from tests.support.specs import command, write_spec

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.spec.schema import Api


def delta(index: int | None, stop: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": delta, "finish_reason": stop}]}


def piece(index: int, text: str, stop: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": text, "finish_reason": stop}]}


THOUGHT = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "42"}]
BEGIN = {"type": "message_start", "message": claude(None) | {"content": []}}
ANSWERS: list[Any] = [
    pytest.param(
        "chat",
        [delta(0, content="4"), delta(1, content="9"), delta(0, content="2"), delta(1, "length"), delta(0, "stop")],
        id="two choices in a stream",
    ),
    pytest.param(
        "completions",
        [piece(1, "99", "length"), piece(0, "4"), piece(0, "2", "stop")],
        id="two in a stream",
    ),
    pytest.param(
        "chat",
        {"choices": [{**chat("length", "99")["choices"][0], "index": 1}, chat("stop", "42")["choices"][0]]},
        id="choices out of order",
    ),
    pytest.param(
        "completions",
        {"choices": [piece(1, "9")["choices"][0], piece(0, "42", "stop")["choices"][0]]},
        id="completions",
    ),
    pytest.param(
        "gemini",
        {"candidates": [{**gemini("MAX_TOKENS")["candidates"][0], "index": 1}, gemini("STOP", "42")["candidates"][0]]},
        id="candidates out of order",
    ),
    pytest.param("chat", [delta(0, content="4"), delta(0, content="2"), chat("stop", "42")], id="message at the end"),
    pytest.param("chat", [chat("stop", "42")], id="only a message"),
    pytest.param("chat", chat("stop", [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]), id="parts"),
    pytest.param("chat", chat("stop", THOUGHT), id="parts with thoughts"),
    pytest.param(
        "chat", [delta(0, content=THOUGHT[:1]), delta(0, content=THOUGHT[1:]), delta(0, "stop")], id="parts in a stream"
    ),
    pytest.param(
        "responses",
        [
            {"type": "response.output_text.delta", "output_index": 0, "delta": "4"},
            {"type": "response.output_text.delta", "output_index": 0, "delta": "2"},
            {"type": "response.completed", "response": {"status": "completed", "output": []}},
        ],
        id="a response in pieces only",
    ),
    pytest.param(
        "responses",
        [
            {"type": "response.output_item.done", "output_index": 0, "item": {"type": "reasoning", "summary": []}},
            {"type": "response.output_text.delta", "output_index": 1, "delta": "42"},
            {"type": "response.completed", "response": {"status": "completed"}},
        ],
        id="a response with reasoning, and its text in pieces",
    ),
    pytest.param(
        "chat", b"\xef\xbb\xbf" + b'{"choices": [{"message": {"content": "42"}, "finish_reason": "stop"}]}', id="BOM"
    ),
]


@pytest.mark.parametrize(("api", "reply"), ANSWERS)
def test_the_answer_is_the_one_that_was_meant(api: Api, reply: Any) -> None:
    ran = run(api, [Raw(reply)], target={"stream": isinstance(reply, list)})
    assert [(output["output"], output["stop"]) for output in ran.outputs] == [("42", "stop")]
    assert len(ran.server.asked) == 1


NOT_ANSWERS: list[Any] = [
    pytest.param("chat", chat("stop", "") | {"error": {"message": "overloaded"}}, id="an error with an empty answer"),
    pytest.param("messages", claude("end_turn") | {"error": {"message": "overloaded"}}, id="with an answer"),
    pytest.param("responses", {"status": "completed", "output": [], "error": {"message": "overloaded"}}, id="response"),
    pytest.param(
        "messages",
        [
            BEGIN,
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "42"}},
            {"type": "message_stop"},
        ],
        id="a stream without its message_delta",
    ),
    pytest.param("chat", [delta(1, content="99"), delta(1, "stop")], id="a stream of another choice"),
    pytest.param("chat", chat("stop", [1]), id="no parts"),
]


@pytest.mark.parametrize(("api", "reply"), NOT_ANSWERS)
def test_what_is_no_answer_is_asked_for_again(api: Api, reply: Any) -> None:
    ran = run(api, [Raw(reply), Say("42")], target={"stream": isinstance(reply, list)})
    assert [output["output"] for output in ran.outputs] == ["42"]
    assert len(ran.server.asked) == 2 and len(ran.errors) == 1


def test_characters_that_a_gateway_cut_in_two_are_whole_again() -> None:
    """JavaScript cuts texts between the halves of a character."""
    halves = [delta(0, content="so \ud83d"), delta(0, content="\ude00!"), delta(0, "stop")]
    [output] = run("chat", [Raw(halves)], target={"stream": True}).outputs
    assert output["output"] == "so \N{GRINNING FACE}!"
    [output] = run("chat", [Raw(chat("stop", "half \ud83d"))], target={"version": "2"}).outputs
    assert output["output"] == "half \N{REPLACEMENT CHARACTER}"


def test_thoughts_among_the_parts_go_back_as_parts() -> None:
    answer = dialect_of("chat").read(chat("stop", THOUGHT))
    assert (answer.text, answer.message["reasoning"]) == ("42", "hm")
    user = {"role": "user", "content": "?"}
    for history, content in (("all", THOUGHT), ("none", "42")):
        request = ModelRequest(model="m", messages=[user, answer.message, user], reasoning_history=history)  # type: ignore[arg-type]
        sent = dialect_of("chat").encode(request)["messages"][1]
        assert sent == {"role": "assistant", "content": content}


def test_only_xai_counts_reasoning_separately_from_the_output() -> None:
    usage = {"prompt_tokens": 10_120, "completion_tokens": 1_499, "completion_tokens_details": {"reasoning_tokens": 99}}
    for total, output in ((10_120 + 1_499 + 99, 1_598), (10_120 + 1_499, 1_499), (None, 1_499)):
        answer = dialect_of("chat").read(chat("stop") | {"usage": {**usage, "total_tokens": total}})
        assert (answer.tokens.output, answer.tokens.reasoning) == (output, 99)


USAGES: list[tuple[Api, dict[str, Any], tuple[int | None, int | None]]] = [
    ("chat", {"prompt_tokens": -5, "completion_tokens": 7}, (None, None)),
    ("chat", {"prompt_tokens": 5, "completion_tokens": True}, (None, None)),
    ("chat", {"prompt_tokens": 5.5, "completion_tokens": 7}, (None, None)),
    ("chat", {"prompt_tokens": "5", "completion_tokens": 7}, (None, None)),
    ("chat", {"prompt_tokens": 5, "completion_tokens": 10**13}, (None, None)),
    ("chat", {"prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 9}}, (None, 7)),
    (
        "chat",
        {"prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": -1}},
        (None, None),
    ),
    (
        "chat",
        {"prompt_tokens": 5, "completion_tokens": 7, "completion_tokens_details": {"reasoning_tokens": 9}},
        (5, None),
    ),
    ("messages", {"input_tokens": 5, "output_tokens": 7, "cache_read_input_tokens": -3}, (None, None)),
    ("messages", {"input_tokens": 5, "output_tokens": 7, "output_tokens_details": {"thinking_tokens": 8}}, (5, None)),
    ("responses", {"input_tokens": 5, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 6}}, (None, 7)),
    ("responses", {"input_tokens": 5, "output_tokens": -7}, (None, None)),
    ("gemini", {"promptTokenCount": 5, "candidatesTokenCount": -1}, (None, None)),
    ("gemini", {"promptTokenCount": 5, "cachedContentTokenCount": 6, "candidatesTokenCount": 1}, (None, 1)),
]


@pytest.mark.parametrize(("api", "usage", "counts"), USAGES)
def test_usage_that_cannot_be_true_is_unknown(api: Api, usage: Any, counts: tuple[int | None, int | None]) -> None:
    replies: dict[str, dict[str, Any]] = {
        "chat": chat("stop") | {"usage": usage},
        "messages": claude("end_turn") | {"usage": usage},
        "responses": {"status": "completed", "output": [], "usage": usage},
        "gemini": gemini("STOP", usageMetadata=usage),
    }
    tokens = dialect_of(api).read(replies[api]).tokens
    assert (tokens.input, tokens.output) == counts
    assert (tokens.cache_read, tokens.cache_write) == (0, 0)
    assert tokens.absurd


def test_a_reply_with_negative_tokens_takes_nothing_from_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    bad, good = ({"prompt_tokens": number, "completion_tokens": 1} for number in (-1_000_000, 60))
    replies = [Raw(chat("stop") | {"usage": usage}) for usage in (bad, good, good, good)]
    with provider("chat", replies) as server:
        path = write_spec(
            tmp_path,
            target={"model": "m", "base_url": server.url},
            samples=[{"id": str(number), "question": "?"} for number in range(9)],
            same_prompt=True,
            graders=None,
            limits={"token_budget": 100, "concurrency": 1, "max_cost": 1},
            prices={"m": {"input": 10, "output": 10}},
        )
        done = command(monkeypatch, capsys, tmp_path, "eval", path)
    assert done.code == 3 and "budget reached: --token-budget 100 (122 tokens used)" in done.out + done.err
    assert len(server.asked) == 3, "the one whose tokens are unknown, and two that reach the budget"
    text = " ".join((done.out + done.err).split())
    assert text.count("m reported token counts that cannot be true") == 1 and "$-" not in text


@pytest.mark.parametrize("usage", [{"input_tokens": -5, "output_tokens": 1}, {"cost": -1.0}, {"requests": -3}])
def test_usage_of_a_function_that_cannot_be_true_is_unknown(tmp_path: Path, usage: dict[str, Any]) -> None:
    (tmp_path / "agent.py").write_text(f"def reply(prompt): return {{'output': 'x', 'usage': {usage!r}}}")
    spec = write_spec(tmp_path, target={"python": "agent.py:reply"}, graders=None)
    run = evaluate(spec, runs_dir=tmp_path / "runs")
    for output in lines(run.path / "outputs.jsonl"):
        assert output["usage"] == {"input_tokens": None, "output_tokens": None, "requests": 0, "cost": None}
