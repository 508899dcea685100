"""When a server is asked again, and which servers are public."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from holdfast.errors import AttemptError
from holdfast.http.client import Client
from holdfast.http.failures import limit_reset
from holdfast.http.urls import is_public
from tests.support.providers import Refuse, provider


def in_a_minute() -> str:
    return (datetime.now(UTC) + timedelta(seconds=60)).strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.mark.parametrize(
    ("reset", "seconds"),
    [("1s", 1), ("6m0s", 360), ("120ms", 0.12), ("2m59.56s", 179.56), ("1h2m3s", 600), ("7.66s", 7.66), ("17", 17)],
)
def test_the_reset_of_a_limit_that_is_used_up_is_waited_for(reset: str, seconds: float) -> None:
    for unit in ("requests", "tokens"):
        headers = {f"x-ratelimit-remaining-{unit}": "0", f"x-ratelimit-reset-{unit}": reset}
        assert limit_reset(headers, None) == pytest.approx(seconds)


@pytest.mark.parametrize("unit", ["requests", "tokens", "input-tokens", "output-tokens"])
def test_anthropics_limits_have_times_instead_of_durations(unit: str) -> None:
    headers = {f"anthropic-ratelimit-{unit}-remaining": "0", f"anthropic-ratelimit-{unit}-reset": in_a_minute()}
    wait = limit_reset(headers, None)
    assert wait is not None and 50 < wait <= 60


def test_google_has_the_delay_in_the_error() -> None:
    info = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "27s"}
    assert limit_reset({}, {"error": {"code": 429, "details": [{"reason": "x"}, info]}}) == 27


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-ratelimit-remaining-requests": "3", "x-ratelimit-reset-requests": "6m0s"},
        {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "soon"},
        {"x-ratelimit-remaining-requests": "0"},
    ],
)
def test_without_a_limit_that_is_used_up_nothing_is_known(headers: dict[str, str]) -> None:
    assert limit_reset(headers, {"error": {"details": "no list"}}) is None


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"}, 360),
        ({"Retry-After": "2", "x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"}, 2),
        ({}, None),
    ],
)
def test_a_refusal_says_how_long_to_wait(headers: dict[str, str], seconds: float | None) -> None:
    async def ask(url: str) -> None:
        async with Client(f"{url}/chat/completions", {}) as client:
            await client.post({"model": "m", "messages": [{"role": "user", "content": "?"}]})

    with provider("chat", [Refuse(429, "slow down", headers)]) as server, pytest.raises(AttemptError) as raised:
        asyncio.run(ask(server.url))
    assert (raised.value.kind, raised.value.retry_after) == ("rate_limit", seconds)


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("https://api.openai.com/v1", True),
        ("http://8.8.8.8/v1", True),
        ("http://127.0.0.1:8000/v1", False),
        ("http://[::1]:8000/v1", False),
        ("http://10.1.2.3:8000/v1", False),
        ("http://192.168.0.4/v1", False),
        ("http://localhost:8000/v1", False),
        ("http://node17:8000/v1", False),
        ("http://box.local/v1", False),
    ],
)
def test_servers_on_the_internet_are_distinguished_from_servers_nearby(url: str, public: bool) -> None:
    assert is_public(url) is public
