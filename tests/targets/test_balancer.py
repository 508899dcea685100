"""Several servers of one model: each is asked its part, and one that fails costs nothing."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.errors import AttemptError, ConfigError, UsageError
from holdfast.http.client import Balancer, client_of
from holdfast.http.failures import NO_HINTS
from holdfast.spec.providers import endpoint_of
from holdfast.targets.build import build_target
from tests.support.breaking import assert_each_once, assert_same_numbers, kept
from tests.support.running import Server, holdfast, run_dir, server, write_eval
from tests.support.specs import load, who

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS = 40
KEYS: dict[str, Any] = {"rows": ROWS, "limits": {"concurrency": 8}}


@pytest.fixture
def other() -> Iterator[Server]:
    with server() as running:
        yield running


@pytest.fixture
def nobody() -> str:
    """The base URL of a port at which nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}/v1"


def measured(folder: Path, urls: list[str], *arguments: str, check: int = 0, **keys: Any) -> Path:
    """The run of an eval whose model is at these URLs."""
    path = write_eval(folder, "", **KEYS, target={"model": "test-model", "base_url": urls, **keys})
    holdfast("eval", path, *arguments, cwd=folder, check=check)
    return run_dir(folder)


def posted(balancer: Balancer, text: str) -> Any:
    return balancer.post({"model": "m", "messages": [{"role": "user", "content": text}]})


def test_two_servers_are_asked_alike_and_each_question_once(
    tmp_path: Path, provider: Server, other: Server, calm: Path
) -> None:
    for one in (provider, other):
        one.control(latency=0.02)
    run = measured(tmp_path, [provider.base_url, other.base_url])
    asked = [one.stats()["asked"] for one in (provider, other)]
    assert sum(map(Counter, asked), Counter()) == {f"question {number}": 1 for number in range(ROWS)}
    assert abs(len(asked[0]) - len(asked[1])) <= KEYS["limits"]["concurrency"]
    assert_each_once(run, ROWS)
    assert_same_numbers(run, calm)


async def test_the_one_with_the_fewest_in_flight_is_asked_and_equals_take_turns(
    provider: Server, other: Server
) -> None:
    provider.control(fail={"hang": 1.0})
    async with _both(provider, other) as balancer:
        slow = [asyncio.ensure_future(posted(balancer, f"slow {number}")) for number in range(2)]
        await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
        for number in range(6):  # one hangs in the first server, so the second always has fewer
            await posted(balancer, f"quick {number}")
        for task in slow:
            task.cancel()
    assert provider.requests == 1
    assert other.requests == 7


@pytest.mark.parametrize("stream", [False, True])
def test_requests_avoid_a_server_that_refuses_connections(
    tmp_path: Path, provider: Server, nobody: str, calm: Path, stream: bool
) -> None:
    run = measured(tmp_path, [nobody, provider.base_url], stream=stream)
    assert provider.stats()["asked"] == {f"question {number}": 1 for number in range(ROWS)}
    assert kept(run, "errors") == []
    assert_each_once(run, ROWS)
    if not stream:  # the test server puts a space after each word of a stream
        assert_same_numbers(run, calm)


def test_when_all_servers_refuse_connections_nothing_is_scored(tmp_path: Path, provider: Server, nobody: str) -> None:
    run = measured(tmp_path, [nobody, nobody.replace("127.0.0.1", "127.0.0.2")], check=3)
    assert not (run / "metrics.json").exists()
    assert kept(run) == []
    measured(tmp_path, [nobody, provider.base_url])  # elsewhere now, and the same run
    assert_each_once(run, ROWS)


async def test_a_request_that_fails_at_one_server_goes_to_another(provider: Server, other: Server) -> None:
    provider.control(fail={"500": 0.5, "cut": 0.5})
    async with _both(provider, other) as balancer:
        for number in range(4):
            try:
                await posted(balancer, f"question {number}")
            except AttemptError as error:
                assert error.kind in ("server", "connection")
                await posted(balancer, f"question {number}")
    assert provider.requests == 1, "it rests after its failure"
    assert other.stats()["answered"] == {f"question {number}": 1 for number in range(4)}


async def test_a_server_that_does_not_answer_is_left_alone_for_a_while(provider: Server, other: Server) -> None:
    provider.control(fail={"hang": 1.0})
    async with _both(provider, other) as balancer:
        for number in range(6):
            try:
                await asyncio.wait_for(posted(balancer, f"question {number}"), 0.5)
            except TimeoutError:
                await posted(balancer, f"question {number}")
    assert provider.requests < 4 and other.requests == 6


def test_a_server_that_always_fails_costs_retries_and_no_answer(
    tmp_path: Path, provider: Server, other: Server, calm: Path
) -> None:
    provider.control(fail={"503": 1.0})
    run = measured(tmp_path, [provider.base_url, other.base_url])
    assert other.stats()["answered"] == {f"question {number}": 1 for number in range(ROWS)}
    assert len(kept(run, "errors")) == provider.requests, "what failed is on record"
    assert_same_numbers(run, calm)


def _both(first: Server, second: Server) -> Balancer:
    client = client_of([f"{one.base_url}/chat/completions" for one in (second, first)], {}, NO_HINTS)
    assert isinstance(client, Balancer)
    return client


def test_agents_calls_are_spread_too(tmp_path: Path, provider: Server, other: Server) -> None:
    (tmp_path / "agent.py").write_text(
        "def reply(prompt, context):\n    return context.model(prompt, model='test-model').text\n"
    )
    target = {"python": "agent.py:reply", "base_url": [provider.base_url, other.base_url]}
    holdfast("eval", write_eval(tmp_path, "", **KEYS, target=target), cwd=tmp_path)
    assert provider.requests + other.requests == ROWS
    assert min(provider.requests, other.requests) > 0


class TestKeys:
    def test_several_urls_are_in_the_key_in_any_order(self, tmp_path: Path) -> None:
        def digest(*urls: str) -> str:
            return who(tmp_path, target={"model": "m", "base_url": list(urls), "identity": "url"}).work.digest

        assert digest("http://a/v1", "http://b/v1/") == digest("http://b/v1", "http://a/v1")
        assert digest("http://a/v1") != digest("http://a/v1", "http://b/v1")

    def test_a_password_in_one_of_them_is_not_kept(self, tmp_path: Path, provider: Server) -> None:
        secret = provider.base_url.replace("//", "//me:hush@")
        run = measured(tmp_path, [secret, provider.base_url])
        assert "hush" not in (run / "manifest.json").read_text()
        assert len(json.loads((run / "manifest.json").read_text())["eval"]["target"]["base_url"]) == 2


def test_a_variable_may_hold_several_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_URL", "http://a:1/v1,http://b:2/v1/")
    assert endpoint_of("m", base_url="${JUDGE_URL}").urls == ["http://a:1/v1", "http://b:2/v1"]
    assert endpoint_of("m", base_url=["${JUDGE_URL}", "http://a:1/v1"]).urls == ["http://a:1/v1", "http://b:2/v1"]
    assert endpoint_of("m", base_url="http://a/v1?x=1,2").urls == ["http://a/v1?x=1,2"], "which is written out, and one"


def test_a_url_may_be_the_environments(tmp_path: Path, provider: Server) -> None:
    path = write_eval(tmp_path, "${MODEL_AT}", rows=2)
    holdfast("eval", path, cwd=tmp_path, env={"MODEL_AT": provider.base_url})
    assert provider.requests == 2
    with pytest.raises(UsageError, match=r"base_url names \$\{MODEL_AT\}, which is not set"):
        build_target(load(tmp_path, target={"model": "m", "base_url": "${MODEL_AT}"}))


@pytest.mark.parametrize(
    ("base_url", "message"),
    [
        ("127.0.0.1:8000", "'127.0.0.1:8000' is not a URL: it must start with http:// or https://"),
        (["http://a/v1", "b"], "'b' is not a URL"),
        ([], "needs at least one URL"),
        (7, "should be text or a list, not 7"),
    ],
)
def test_an_invalid_url_is_reported_with_its_place(tmp_path: Path, base_url: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, target={"model": "m", "base_url": base_url})
    assert message in str(caught.value)
    assert "eval.yaml:" in str(caught.value)
