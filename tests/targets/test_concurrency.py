"""How many requests are in flight at once, and how long rate limits hold them up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from holdfast.targets.build import concurrency_of
from tests.support.providers import Refuse, provider
from tests.support.specs import command, load, write_spec

if TYPE_CHECKING:
    from pathlib import Path


def test_waiting_for_a_reset_is_bounded_by_the_time_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    headers = {"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "9m0s"}
    with provider("chat", [Refuse(429, "slow down", headers)]) as server:
        path = write_spec(tmp_path, target={"model": "m", "base_url": server.url})
        done = command(monkeypatch, capsys, tmp_path, "eval", path, "--max-time", "1s", "--display", "none")
    assert done.code == 3 and "max-time" in done.out
    assert len(server.asked) == 2, "each trial once; both wait for the reset"


@pytest.mark.parametrize(
    ("target", "concurrency"),
    [
        ({"model": "gpt-5"}, None),
        ({"model": "anthropic/claude-x"}, None),
        ({"model": "m", "base_url": "https://models.example.com/v1"}, None),
        ({"model": "m", "base_url": ["https://a.example.com/v1", "https://b.example.com/v1"]}, 64),
        ({"model": "m", "base_url": "http://127.0.0.1:1/v1"}, 64),
        ({"model": "ollama/m"}, 64),
        ({"model": "local/smollm2-135m"}, 4),
        ({"http": "https://flows.example.com/run", "request": {}}, 64),
    ],
)
def test_models_on_the_internet_are_asked_as_often_as_they_keep_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: dict[str, Any], concurrency: int | None
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert concurrency_of(load(tmp_path, target=target)) == concurrency
    assert concurrency_of(load(tmp_path, target=target, limits={"concurrency": 5})) == 5
    assert concurrency_of(load(tmp_path, target=target, limits={"concurrency": "auto"})) is None
