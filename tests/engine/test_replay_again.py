"""`replay: again`: the state that tools have built is the same after a kill, or a server's crash, as without one."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.breaking import (
    kept,
    nothing_left,  # noqa: F401 - a fixture
)
from tests.support.lab import Lab
from tests.support.running import ROOT, Server, lines, module_server, run_dir, start, wait_for

if TYPE_CHECKING:
    from pathlib import Path

provider = module_server(tool_calls=2)
"""A model that calls two tools before each answer."""

ANSWERS = ["tea: 1 tea 0; 2 tea 1", "milk: 3 milk 0; 4 milk 1"]
"""what is said where the state of the first turn is there in the second"""

TOOL = """
import os
from pathlib import Path
here = Path(__file__).parent
added = []

def add(thing: str) -> str:
    with (here / "added.txt").open("a") as file:
        file.write(f"{os.getpid()} {thing}\\n")
    added.append(thing)
    return f"{len(added)} {thing}"
"""

SERVER = """
import os, signal, uuid
from pathlib import Path
from plain_mcp import MCPServer

server = MCPServer("adder", log_level="ERROR")
here = Path(__file__).parent
added, process = [], uuid.uuid4()  # in a namespace, process ids are the same each time

@server.tool()
def add(thing: str) -> str:
    with (here / "added.txt").open("a") as file:
        file.write(f"{process} {thing}\\n")
    if thing == os.environ.get("FALL_AT") and not (here / "fell").exists():
        (here / "fell").touch()
        if os.environ["WHO"] == "holdfast":
            signal.pause()
        os._exit(7)
    added.append(thing)
    return f"{len(added)} {thing}"

server.run()
"""


@pytest.fixture
def lab(tmp_path: Path, provider: Server) -> Lab:
    provider.reset()
    created = Lab(tmp_path, provider, rows=[{"id": "a", "question": "tea", "expected": ANSWERS[1]}])
    created.spec["follow_ups"] = ["milk"]
    (tmp_path / "tool.py").write_text(TOOL)
    return created


def use(lab: Lab, **tool: Any) -> None:
    lab.spec["target"] = {
        "model": "m",
        "base_url": lab.provider.base_url,
        "tools": [{"python": "tool.py:add", "replay": "again", **tool}],
    }


def use_server(lab: Lab, who: str, fall_at: str, per: str = "trial") -> None:
    pytest.importorskip("mcp", reason="the extra `mcp`")
    (lab.folder / "server.py").write_text(SERVER)
    shutil.copy(ROOT / "tests/support/plain_mcp.py", lab.folder)
    mcp = {"command": [sys.executable, "server.py"], "env": {"FALL_AT": fall_at, "WHO": who}}
    use(lab, mcp=mcp, per=per)
    del lab.spec["target"]["tools"][0]["python"]


def kill_during_a_call(lab: Lab) -> None:
    """Run the eval, and kill it when its server waits for that."""
    lab.write()
    with start("eval", lab.eval_file.name, cwd=lab.folder) as process:
        wait_for((lab.folder / "fell").exists, "the call")
        process.kill()
        process.communicate()


def answers(run: Path) -> list[str]:
    replies = [message for message in kept(run)[0]["messages"] if message["role"] == "assistant"]
    return [message["content"] for message in replies if not message.get("tool_calls")]


def added(lab: Lab) -> list[list[str]]:
    """Return the values that each process was asked to add, in order."""
    each: dict[str, list[str]] = {}
    for line in (lab.folder / "added.txt").read_text().splitlines():
        process, thing = line.split(" ", 1)
        each.setdefault(process, []).append(thing)
    return list(each.values())


@pytest.mark.faults
def test_a_python_tools_state_is_the_same_however_often_the_run_is_killed(lab: Lab) -> None:
    use(lab)
    assert lab.many_lives() >= 8
    assert answers(run_dir(lab.folder)) == ANSWERS
    whole = ["tea 0", "tea 1", "milk 0", "milk 1"]
    for things in added(lab):
        assert things == whole[: len(things)], "each process sees the calls once and in order"
    assert added(lab)[-1] == whole


@pytest.mark.faults
@pytest.mark.parametrize("fall_at", ["milk 0", "milk 1"])
def test_a_run_killed_in_the_second_turn_restores_the_state_of_its_server(lab: Lab, fall_at: str) -> None:
    use_server(lab, "holdfast", fall_at)
    kill_during_a_call(lab)
    done = lab.eval()
    assert answers(done.run) == ANSWERS
    assert added(lab)[-1] == ["tea 0", "tea 1", "milk 0", "milk 1"]


@pytest.mark.faults
@pytest.mark.parametrize("per", ["trial", "run"])
def test_a_server_that_dies_in_the_second_turn_gets_its_state_back(lab: Lab, per: str) -> None:
    use_server(lab, "server", "milk 1", per)
    done = lab.eval()
    assert answers(done.run) == ANSWERS and len(lines(done.run / "errors.jsonl")) == 1
    assert added(lab) == [["tea 0", "tea 1", "milk 0", "milk 1"]] * 2
    assert done.asked == 6


def test_a_turn_that_is_retried_does_not_build_the_state_twice(lab: Lab, provider: Server) -> None:
    use(lab)
    with provider.controlled(fail={"500": 1.0}, fail_first=1):
        done = lab.eval()
    assert lines(done.run / "errors.jsonl") != [] and answers(done.run) == ANSWERS
    assert added(lab) == [["tea 0", "tea 1", "milk 0", "milk 1"]]


AGENT = """
import tool

class Notes:
    def __init__(self):
        self.lines = []
    def write(self, text):
        self.lines.append(text)
        return len(self.lines)

def reply(prompt, context):
    notes = Notes()
    context.tool(notes.write, {"text": prompt}, replay=NOTES)
    first = context.tool(tool.add, {"thing": f"{prompt} 0"}, replay="again")
    second = context.tool("add", {"thing": f"{prompt} 1"})
    return f"{prompt}: {first}; {second} {notes.lines}"
"""


@pytest.mark.faults
def test_calls_of_a_python_agent_rebuild_their_state_after_a_kill(lab: Lab) -> None:
    (lab.folder / "agent.py").write_text(AGENT.replace("NOTES", "'record'"))
    use(lab)
    lab.spec["target"] = {"python": "agent.py:reply", "tools": lab.spec["target"]["tools"]}
    assert lab.many_lives() >= 6
    (output,) = kept(run_dir(lab.folder))
    replies = [message["content"] for message in output["messages"] if message["role"] == "assistant"]
    assert replies[0].startswith(ANSWERS[0]) and replies[1].startswith(ANSWERS[1])


@pytest.mark.faults
def test_state_that_cannot_be_rebuilt_restarts_the_trial(lab: Lab) -> None:
    (lab.folder / "agent.py").write_text(
        AGENT.replace("NOTES", "'again'")
        + "\nimport os, signal\n_reply = reply\n"
        + "def reply(prompt, context):\n"
        + "    if context.turn == 2 and not (tool.here / 'died').exists():\n"
        + "        (tool.here / 'died').touch()\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        + "    return _reply(prompt, context)\n"
    )
    use(lab)
    lab.spec["target"] = {"python": "agent.py:reply", "tools": lab.spec["target"]["tools"]}
    lab.eval(check=-9)
    done = lab.eval()
    (output,) = kept(done.run)
    assert output["output"].startswith(ANSWERS[1]) and output["output"].endswith("['milk']")
    assert "a call of write (replay: again) has built is lost" in done.err
    assert added(lab)[-1] == ["tea 0", "tea 1", "milk 0", "milk 1"]


@pytest.mark.faults
def test_each_call_sees_its_original_workspace_while_the_state_is_rebuilt(lab: Lab) -> None:
    (lab.folder / "tool.py").write_text(
        TOOL + "\nread = []\n"
        "def grow(word: str, context) -> str:\n"
        "    file = context.workspace / 'grown.txt'\n"
        "    text = file.read_text() if file.exists() else ''\n"
        "    read.append(text)\n"
        "    file.write_text(text + word[0])\n"
        "    return '|'.join(read)\n"
    )
    use(lab, python="tool.py:grow")
    lab.spec["workspace"] = {}
    assert lab.many_lives() >= 8
    (output,) = kept(run_dir(lab.folder))
    assert answers(run_dir(lab.folder))[1] == "milk: |t|tt; |t|tt|ttm"
    assert len({mark["files"]["grown.txt"] for mark in output["marks"]}) == 2
