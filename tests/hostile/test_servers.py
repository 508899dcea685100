"""Whatever a server sends, by whichever way it is asked: an error of that trial, never an answer, and others go on."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import evaluate
from holdfast.errors import AttemptError, Fault
from holdfast.http.client import Client
from holdfast.http.response import REPLY_BYTES, parse
from tests.hostile.servers import ATTACKS, LIMIT, hostile, redirecting
from tests.support.running import lines
from tests.support.workflow import workflow

if TYPE_CHECKING:
    from pathlib import Path

KEYS = {
    "OPENAI_API_KEY": "sk-of-openai-123456",
    "ANTHROPIC_API_KEY": "sk-of-anthropic-123456",
    "GEMINI_API_KEY": "sk-of-google-123456",
    "AZURE_OPENAI_API_KEY": "sk-of-azure-123456",
}
AGENT = """
import json, urllib.error, urllib.request
def reply(prompt, context):
    body = {"model": "m", "messages": [{"role": "user", "content": prompt}], **context.params}
    request = urllib.request.Request(context.base_url + "/chat/completions",
        json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as response:
            text = response.read().decode()
    except urllib.error.HTTPError as error:
        error.close()
        raise RuntimeError(error.code) from None
    if not body.get("stream"):
        return json.loads(text)["choices"][0]["message"]["content"]
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


def target(way: str, url: str) -> dict[str, Any]:
    """The target that asks a server in one of the ways."""
    kind, _, how = way.partition(" ")
    stream = how == "streamed"
    if kind == "http":
        request = {"q": "{{ prompt }}", **({"stream": True} if stream else {})}
        return {
            "http": f"{url}/flow",
            "request": request,
            "response": "value",
            "headers": {"X-Api-Key": "${OPENAI_API_KEY}"},
        }
    if kind == "proxy":
        return {"python": "agent.py:reply", "base_url": url, "params": {"stream": True} if stream else {}}
    key = {"messages": "ANTHROPIC_API_KEY", "gemini": "GEMINI_API_KEY"}.get(kind, "OPENAI_API_KEY")
    return {"model": "m", "api": kind, "base_url": url, "stream": stream, "api_key_env": key}


APIS = ("chat", "completions", "messages", "responses", "gemini")
WAYS = [f"{kind}{how}" for kind in (*APIS, "http", "proxy") for how in ("", " streamed")]
WITH_TIME = ("chat", "http streamed", "proxy")
"""ways that also meet the attacks which only a time limit ends"""
HOSTILE = [f"attack:{name}" for name, attack in ATTACKS.items() if not attack.hangs]
HANGING = [f"attack:{name}" for name, attack in ATTACKS.items() if attack.hangs]
SOUND = [f"sound:{number}" for number in range(0, len(HOSTILE), 3)]
LIMITS = {"retries": 0, "concurrency": 6, "reply_bytes": f"{LIMIT // 1_000_000}MB", "turn_timeout": 60}


def rows(*more: str) -> list[dict[str, Any]]:
    """Attacks between sound rows."""
    mixed = [*more]
    mixed += [name for at in range(0, len(HOSTILE), 3) for name in (f"sound:{at}", *HOSTILE[at : at + 3])]
    return [{"id": name, "question": name} for name in mixed]


def memory() -> int:
    """The most bytes that this process has held so far."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def ask(block: dict[str, Any], samples: list[dict[str, Any]] | None = None, **keys: Any) -> Any:
    samples = rows() if samples is None else samples
    keys = {"graders": [], "limits": LIMITS, **keys}
    return evaluate(name="h", target=block, samples=samples, prompt="{{ question }}", display="none", **keys)


@pytest.mark.parametrize("way", WAYS)
def test_no_reply_of_a_hostile_server_becomes_an_answer_and_the_others_are_answered(way: str) -> None:
    with hostile() as server:
        before = memory()
        attacks = [*HOSTILE, *(HANGING if way in WITH_TIME else ())]
        samples = rows(*attacks[len(HOSTILE) :])
        limits = LIMITS if way not in WITH_TIME else {**LIMITS, "turn_timeout": 8}
        run = ask(target(way, server.url), samples, limits=limits)
        assert memory() - before < 300_000_000
        answers = {each["sample"]: each["output"] for each in lines(run.path / "outputs.jsonl")}
        failures = {each["sample"]: each["kind"] for each in lines(run.path / "errors.jsonl")}
        assert answers == {name: f"answer to {name}" for name in SOUND}
        assert failures.keys() == {*attacks} and run.exit_code == 3
        kinds = {*failures.values()}
        assert kinds <= {"bad_reply", "connection", "server", "timeout", "bad_request", "agent"}
        server.attacks = False
        again = ask(target(way, server.url), samples)
        answers = {each["sample"]: each["output"] for each in lines(again.path / "outputs.jsonl")}
        assert again.exit_code == 0 and answers == {name: f"answer to {name}" for name in (*SOUND, *attacks)}
        assert all(server.asked.count(name) == 1 for name in SOUND), "what was answered is not asked again"


def test_no_reply_of_a_hostile_judge_becomes_a_verdict() -> None:
    def judged(url: str) -> Any:
        judge = {"type": "prompt", "model": "j", "base_url": url, "rubric": "Good?\n{{ id }}"}
        return ask(echo, graders=[judge])

    with hostile() as server, workflow(lambda one: {"value": one.body["q"]}) as flow:
        echo = {"http": flow.url, "request": {"q": "{{ prompt }}"}, "response": "value"}
        run = judged(server.url)
        passed = {each["sample"] for each in lines(run.path / "grades.jsonl") if each["status"] == "passed"}
        assert passed == {*SOUND} and run.exit_code == 3
        server.attacks = False
        assert judged(server.url).exit_code == 0


@pytest.mark.parametrize("name", ATTACKS)
def test_no_hostile_reply_to_a_request_about_batches_is_accepted(name: str) -> None:
    async def call(url: str) -> None:
        REPLY_BYTES.set(LIMIT)
        body = b'{"custom_id": "attack:%b"}' % name.encode()
        async with (
            asyncio.timeout(2),
            Client(f"{url}/chat/completions", {}) as client,
            client.call("POST", f"{url}/batches", body) as response,
        ):
            value = parse(await response.read())
            assert not isinstance(value, dict) or not value.get("id"), value

    with hostile() as server:
        try:
            asyncio.run(call(server.url))
        except (AttemptError, Fault, TimeoutError):
            return
        assert name in ("null", "number", "list", "empty-object", "200,000-empty-choices", "choices-are-a-text")


ELSEWHERE = [
    *(
        (way, header)
        for way, header in {
            "chat": "authorization",
            "chat streamed": "authorization",
            "messages": "x-api-key",
            "gemini": "x-goog-api-key",
            "http": "x-api-key",
            "proxy": "authorization",
            "proxy streamed": "authorization",
        }.items()
    ),
    ("azure", "api-key"),
    ("judge", "authorization"),
]


@pytest.mark.parametrize(("way", "header"), ELSEWHERE)
def test_a_redirect_to_another_server_takes_neither_key_nor_prompt_there(
    way: str, header: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [{"id": str(number), "question": f"secret prompt {number}"} for number in range(3)]
    with workflow(lambda _: {"value": "stolen"}) as other, redirecting(f"{other.url}/taken?a=b") as (url, asked):
        graders: list[dict[str, Any]] = []
        if way == "azure":
            monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", url)
            block: dict[str, Any] = {"model": "azure/m"}
        elif way == "judge":
            block = {"python": "echo.py:reply"}
            (tmp_path / "echo.py").write_text("def reply(prompt): return prompt")
            graders = [{"type": "prompt", "model": "j", "base_url": url, "rubric": "Good?\n{{ id }}"}]
        else:
            block = target(way, url)
        run = ask(block, samples, graders=graders)
        assert other.asked == [], "nothing was sent there"
    assert asked and all(any(key in each[header] for key in KEYS.values()) for each in asked)
    assert run.exit_code == 3
    messages = [each["message"] for each in lines(run.path / "errors.jsonl")]
    assert any(f"redirects to another server: {other.url}/taken. Nothing was sent there" in text for text in messages)
    assert len(asked) <= 3, "the run stops"
