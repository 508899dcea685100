"""Python targets that are objects: opened before the first prompt, closed after the last one."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.running import PATIENCE, ask_to_stop, holdfast, lines, run_dir, start, wait_for, write_eval

if TYPE_CHECKING:
    from pathlib import Path

AGENT = """
import asyncio
from pathlib import Path


def note(word):
    with Path("events.txt").open("a") as file:
        file.write(f"{word}\\n")


class Agent:
    async def open(self, params):
        note(f"open {params['greeting']}")
        self.greeting = params["greeting"]

    async def __call__(self, prompt):
        note("call")
        return f"{self.greeting} {prompt}"

    async def close(self):
        note("close")


class Plain:
    def open(self):
        note("open")

    def __call__(self, prompt):
        return prompt

    def close(self):
        note("close")


class FailsToOpen(Plain):
    def open(self):
        raise OSError("no such host")


class FailsToClose(Plain):
    def close(self):
        raise OSError("connection lost")


class Waits(Plain):
    async def __call__(self, prompt):
        note("call")
        await asyncio.Event().wait()


class Mute:
    pass


class Demanding(Plain):
    def __init__(self, model):
        pass


plain = Plain()
"""


def agent_eval(folder: Path, name: str, **keys: Any) -> Path:
    """An eval of four prompts for a target of AGENT."""
    (folder / "agent.py").write_text(AGENT)
    target = {"python": f"agent.py:{name}", "params": {"greeting": "hello"}}
    return write_eval(folder, "", rows=4, target=target, **keys)


def events(folder: Path) -> list[str]:
    """Return the actions of the target in order."""
    path = folder / "events.txt"
    return path.read_text().splitlines() if path.exists() else []


def test_an_object_is_opened_once_with_its_params_and_closed_once(tmp_path: Path) -> None:
    done = holdfast("eval", agent_eval(tmp_path, "Agent"), cwd=tmp_path)
    assert events(tmp_path) == ["open hello", *["call"] * 4, "close"]
    assert {line["output"] for line in lines(run_dir(tmp_path) / "outputs.jsonl")} == {
        f"hello question {number}" for number in range(4)
    }
    assert "Traceback" not in done.stderr

    holdfast("eval", tmp_path / "e.yaml", cwd=tmp_path)
    assert len(events(tmp_path)) == 6, "a finished run opens nothing"


@pytest.mark.parametrize("name", ["Plain", "plain"])
def test_methods_may_be_plain_and_the_target_may_be_an_instance(name: str, tmp_path: Path) -> None:
    holdfast("eval", agent_eval(tmp_path, name), cwd=tmp_path)
    assert events(tmp_path) == ["open", "close"]


def test_a_target_that_cannot_be_opened_stops_the_run_with_the_line_that_failed(tmp_path: Path) -> None:
    done = holdfast("eval", agent_eval(tmp_path, "FailsToOpen"), cwd=tmp_path, check=3)
    place = 1 + AGENT.splitlines().index('        raise OSError("no such host")')
    assert f"the target's open() failed: agent.py:{place}: OSError: no such host" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert events(tmp_path) == [], "what was not opened is not closed"


def test_a_target_that_cannot_be_closed_costs_no_result(tmp_path: Path) -> None:
    done = holdfast("eval", agent_eval(tmp_path, "FailsToClose"), cwd=tmp_path)
    assert "the target's close() failed: agent.py:" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert (run_dir(tmp_path) / "metrics.json").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_target_is_closed_after_a_signal(number: signal.Signals, code: int, tmp_path: Path) -> None:
    process = start("eval", agent_eval(tmp_path, "Waits"), cwd=tmp_path)
    try:
        wait_for(lambda: "call" in events(tmp_path), "a call in flight")
        if number == signal.SIGINT:
            ask_to_stop(process)
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == code
    assert events(tmp_path)[-1] == "close"
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "message"),
    [("Mute", "Mute has no method __call__"), ("Demanding", "Demanding() failed: TypeError")],
)
def test_a_class_that_cannot_answer_is_refused_with_its_place(name: str, message: str, tmp_path: Path) -> None:
    done = holdfast("eval", agent_eval(tmp_path, name), cwd=tmp_path, check=2)
    assert "e.yaml:1: target.python: " in done.stderr and message in done.stderr
    assert not (tmp_path / "runs").exists()
