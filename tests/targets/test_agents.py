"""Agents that are installed as programs.

Claude Code and Codex themselves run where $HOLDFAST_AGENTS names the folder into which `scripts/agents` installed them:
they take 800 MB. Everywhere else a program that only knows its version stands in for what comes before a trial.
"""

from __future__ import annotations

import os
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from holdfast import evaluate
from holdfast.errors import ConfigError
from tests.support.breaking import kept
from tests.support.providers import Call, Say, provider
from tests.support.running import holdfast, run_dir, start, wait_for

if TYPE_CHECKING:
    from holdfast.spec.schema import Api
    from tests.support.providers import Asked, Move

INSTALLED = os.environ.get("HOLDFAST_AGENTS")
needs_agents = pytest.mark.skipif(INSTALLED is None, reason="$HOLDFAST_AGENTS is not set: see scripts/agents")

AGENTS: list[tuple[str, str, Api, str, str]] = [
    ("claude-code", "claude-opus-5", "messages", "Bash", "command"),
    ("codex", "gpt-5.6", "responses", "exec_command", "cmd"),
]


def write_eval_of(agent: str, model: str, folder: Path, prompt: str, grader: str) -> None:
    assert INSTALLED is not None
    program = Path(INSTALLED, "node_modules", ".bin", agent.partition("-")[0])
    (folder / "e.yaml").write_text(
        f"""schemaVersion: "1.0"
name: killed
samples: [{{id: a}}]
target: {{agent: {agent}, model: {model}, program: {program}}}
workspace: {{}}
prompt: {prompt}
graders: [{{type: text, contains: done}}, {grader}]
"""
    )


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def evaluate_with(**target: Any) -> Any:
    program = Path("claude")
    program.write_text("#!/bin/sh\necho '2.1.0 (Claude Code)'\n")
    program.chmod(0o755)
    block: dict[str, Any] = {"agent": "claude-code", "model": "m", "program": "./claude"}
    return evaluate(
        name="agents",
        samples=[{"id": "a"}],
        prompt="?",
        graders=[{"type": "text", "contains": "2.1.0"}],
        **{"workspace": {}, **target.pop("eval", {}), "target": {**block, **target}},
    )


def test_the_version_of_an_agent_is_part_of_the_key() -> None:
    first, second = (evaluate_with(**more) for more in ({}, {"version": "2.1.0"}))
    assert first.path == second.path and first.metrics.score == 1
    with pytest.raises(ConfigError, match=r"target\.version is 2\.2\.0, but 2\.1\.0 is installed"):
        evaluate_with(version="2.2.0")


def test_an_agent_needs_a_workspace_and_its_program() -> None:
    with pytest.raises(ConfigError, match="claude-code needs a workspace"):
        evaluate_with(eval={"workspace": None})
    with pytest.raises(ConfigError, match="npm install --global @anthropic-ai/claude-code"):
        evaluate_with(program="./missing")


@needs_agents
@pytest.mark.faults
@pytest.mark.parametrize(("agent", "model", "api", "tool", "argument"), AGENTS)
def test_a_killed_agent_repeats_only_the_call_in_flight(
    agent: str, model: str, api: Api, tool: str, argument: str, tmp_path: Path
) -> None:
    in_flight = threading.Event()

    def move(asked: Asked) -> Move:
        done = str(asked.body.get("messages", asked.body.get("input"))).count("step-of-the-test >>")
        if done == 3:
            in_flight.set()
        command = {argument: f"echo {done} step-of-the-test >> log.txt; cat log.txt", "description": "log"}
        return (
            Say("", (Call(tool, command if api == "messages" else {argument: command[argument]}),))
            if done < 5
            else Say("all done")
        )

    write_eval_of(agent, model, tmp_path, "Do the steps.", f"{{type: tool_calls, required_tools: [{tool}]}}")
    with provider(api, move) as server:
        env = {"ANTHROPIC_BASE_URL": server.url.removesuffix("/v1"), "OPENAI_BASE_URL": server.url}
        env |= {"ANTHROPIC_API_KEY": "sk-of-the-test", "OPENAI_API_KEY": "sk-of-the-test"}
        env["HOME"] = str(tmp_path)  # else login shells run the user's profile, and die in it
        process = start("eval", "e.yaml", cwd=tmp_path, env=env)
        assert in_flight.wait(120)
        process.kill()
        process.communicate()
        holdfast("eval", "e.yaml", cwd=tmp_path, env=env)
        assert server.refused == [] and len(server.asked) == 7, "six calls, of which one was in flight"
    [output] = kept(run_dir(tmp_path, "killed"))
    assert output["output"] == "all done" and output["usage"]["requests"] == 6
    calls = [call for message in output["messages"] for call in message.get("tool_calls") or ()]
    assert [call["function"]["name"] for call in calls] == [tool] * 5


@needs_agents
@pytest.mark.faults
@pytest.mark.parametrize(("agent", "model", "api", "tool", "argument"), AGENTS)
def test_the_command_that_a_killed_agent_ran_has_no_part_in_the_next_attempt(
    agent: str, model: str, api: Api, tool: str, argument: str, tmp_path: Path
) -> None:
    """Both agents run commands in sessions of their own, and name files in full."""
    gates = tmp_path / f"gates-{uuid.uuid4()}"
    gates.mkdir()
    command = (
        f"echo >> {gates}/lives; life=$(wc -l < {gates}/lives); until [ -e {gates}/go-$life ]; do sleep 0.05; done; "
        "echo built >> $PWD/notes.txt; cat $PWD/notes.txt"
    )

    def move(asked: Asked) -> Move:
        if str(asked.body.get("messages", asked.body.get("input"))).count("cat $PWD/notes.txt"):
            return Say("all done")
        words = {argument: command, "description": "build"} if api == "messages" else {argument: command}
        return Say("", (Call(tool, words),))

    def shells() -> list[psutil.Process]:
        listing = psutil.process_iter(["cmdline"])
        return [one for one in listing if any(str(gates) in word for word in one.info["cmdline"] or ())]

    write_eval_of(agent, model, tmp_path, "Build it.", "{type: file, must_exist: [notes.txt]}")
    with provider(api, move) as server:
        env = {"ANTHROPIC_BASE_URL": server.url.removesuffix("/v1"), "OPENAI_BASE_URL": server.url}
        env |= {"ANTHROPIC_API_KEY": "sk-of-the-test", "OPENAI_API_KEY": "sk-of-the-test"}
        env["HOME"] = str(tmp_path)  # else login shells run the user's profile, and die in it
        process = start("eval", "e.yaml", cwd=tmp_path, env=env)
        wait_for((gates / "lives").exists, "the command")
        assert any(os.getsid(shell.pid) != process.pid for shell in shells())
        process.kill()
        process.communicate()
        (gates / "go-2").touch()
        holdfast("eval", "e.yaml", cwd=tmp_path, env=env)
    (gates / "go-1").touch()
    assert shells() == []
    [output] = kept(run_dir(tmp_path, "killed"))
    [result] = [message["content"] for message in output["messages"] if message["role"] == "tool"]
    assert output["output"] == "all done" and str(result).count("built") == 1
