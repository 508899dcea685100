"""Tools of MCP servers, over standard input and output and over HTTP.

The servers are the SDK's where that matters, and else plain ones, which start sooner.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.breaking import (
    assert_same_numbers,
    kept,
    leftovers,
    nothing_left,  # noqa: F401 - a fixture
)
from tests.support.forking import Forked
from tests.support.lab import Lab
from tests.support.running import ROOT, Server, environment, lines, module_server, start, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="needs the extra `mcp`")

SERVER = '''
import os, sys
from pathlib import Path
from plain_mcp import MCPServer

server = MCPServer("shop", log_level="ERROR")
here = Path(__file__).parent
count = 0

def note(what):
    with (here / "noted.txt").open("a") as file:
        file.write(f"{os.getpid()} {what}\\n")

note("started")

@server.tool()
def price(thing: str) -> str:
    """What something costs."""
    global count
    count += 1
    note(f"price {thing}")
    if thing.startswith(os.environ.get("DIE_AT", "?")) and not (here / "died").exists():
        (here / "died").touch()
        sys.stderr.write("the shop burns\\n")
        sys.stderr.flush()
        os._exit(7)
    if thing.startswith("nothing"):
        raise ValueError("we have no such thing")
    return f"{thing} costs {count}"

@server.tool()
def where() -> str:
    """Where the server works."""
    Path("written.txt").write_text("by the server")
    return os.getcwd()

if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
'''


provider = module_server(tool_calls=2)
"""A model that calls two tools before each answer."""


@pytest.fixture
def lab(tmp_path: Path, provider: Server) -> Lab:
    provider.reset()
    provider.control(latency=0)
    created = Lab(
        tmp_path, provider, rows=[{"id": "a", "question": "tea", "expected": "tea: tea 0 costs 1; tea 1 costs 2"}]
    )
    write_server(tmp_path)
    use(created)
    return created


def write_server(folder: Path) -> None:
    shutil.copy(ROOT / "tests/support/plain_mcp.py", folder)
    (folder / "shop.py").write_text(SERVER)


def use_the_sdk(lab: Lab) -> None:
    (lab.folder / "shop.py").write_text(SERVER.replace("plain_mcp", "mcp.server.mcpserver"))


def use(lab: Lab, mcp: dict[str, Any] | None = None, **keys: Any) -> None:
    block = {"mcp": mcp or {"command": [sys.executable, "shop.py"]}, "only": ["price"], **keys}
    lab.spec["target"] = {"model": "m", "base_url": lab.provider.base_url, "tools": [block]}


def calls(lab: Lab, what: str = "price") -> Counter[str]:
    noted = [line.split(" ", 1) for line in (lab.folder / "noted.txt").read_text().splitlines()]
    return Counter(call for _, call in noted if call.startswith(what))


def status(run: Path) -> list[str]:
    return [trial["status"] for trial in json.loads((run / "results.json").read_text())["trials"]]


def serve(lab: Lab, port: int) -> subprocess.Popen[Any]:
    """Start the server at a port, forked from a process that has imported the SDK."""
    command = [sys.executable, "-m", "shop", str(port)]
    return Forked(command, cwd=lab.folder, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextmanager
def over_http(lab: Lab) -> Iterator[str]:
    """Serve the tools at a URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    use_the_sdk(lab)
    process = serve(lab, port)

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_for(answers, "the server")
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def test_a_model_calls_the_tools_of_a_program(lab: Lab) -> None:
    done = lab.eval()
    assert status(done.run) == ["passed"]
    assert [message["role"] for message in kept(done.run)[0]["messages"]] == [
        *("user", "assistant", "tool", "assistant", "tool", "assistant")
    ]
    assert calls(lab) == {"price tea 0": 1, "price tea 1": 1}
    assert "Processing request" not in done.err and "Traceback" not in done.err


def test_a_model_calls_tools_at_a_url(lab: Lab) -> None:
    with over_http(lab) as url:
        use(lab, {"url": url})
        done = lab.eval()
        assert status(done.run) == ["passed"]
        use(lab, {"url": url, "headers": {"Authorization": "Bearer ${SHOP_KEY}"}})
        lab.eval("--fresh", env={"SHOP_KEY": "a-very-secret-key"})
    assert calls(lab) == {"price tea 0": 2, "price tea 1": 2}
    assert not [path for path in done.run.rglob("*") if path.is_file() and b"a-very-secret" in path.read_bytes()]


def test_each_trial_has_a_server_of_its_own_unless_all_share_one(lab: Lab) -> None:
    lab.rows = [{"id": name, "question": name, "expected": "x"} for name in ("tea", "milk", "salt")]
    lab.spec["limits"] = {"concurrency": 1}
    run = lab.eval().run
    answers = {output["sample"]: output["output"] for output in kept(run)}
    assert answers == {name: f"{name}: {name} 0 costs 1; {name} 1 costs 2" for name in answers}
    assert calls(lab, "started") == {"started": 4}  # one to see whether it can be had

    (lab.folder / "noted.txt").unlink()
    use(lab, per="run")
    run = lab.eval("--fresh").run
    assert calls(lab, "started") == {"started": 1}
    numbers = sorted(
        int(word) for output in kept(run) for word in output["output"].replace(";", "").split() if word.isdigit()
    )
    assert numbers == [0, 0, 0, 1, 1, 1, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("per", ["trial", "run"])
def test_a_server_that_crashes_is_an_error_and_is_started_again(lab: Lab, per: str) -> None:
    command = {"command": [sys.executable, "shop.py"], "env": {"DIE_AT": "tea 1"}}
    use(lab, command, per=per)
    lab.rows[0]["expected"] = "tea: tea 0 costs 1; tea 1 costs 1"  # the new server has not answered the first call
    done = lab.eval()
    (error,) = lines(done.run / "errors.jsonl")
    assert error["kind"] == "agent" and "shop.py" in error["message"] and "the shop burns" in error["message"]
    assert status(done.run) == ["passed"]
    assert calls(lab) == {"price tea 0": 1, "price tea 1": 2}
    assert done.asked == 3


def test_replay_again_brings_a_servers_own_state_back(lab: Lab) -> None:
    command = {"command": [sys.executable, "shop.py"], "env": {"DIE_AT": "tea 1"}}
    use(lab, command, replay="again")
    done = lab.eval()
    assert status(done.run) == ["passed"]  # tea 1 costs 2: the new server has been asked for the first thing again
    assert calls(lab) == {"price tea 0": 2, "price tea 1": 2} and done.asked == 3


def test_a_server_at_a_url_that_comes_back_is_used_again(lab: Lab) -> None:
    lab.rows = [{"id": "a", "question": "tea", "expected": "x"}]
    lab.spec["follow_ups"] = ["milk"]
    with over_http(lab) as url:
        use(lab, {"url": url}, per="run")
        lab.spec["limits"] = {"retries": 20}
        lab.write()
        lab.provider.control(latency=0.4)
        process = start("eval", lab.eval_file.name, cwd=lab.folder)
        wait_for(lambda: (lab.folder / "noted.txt").exists() and calls(lab).total() == 1, "the first call")
    wait_for(lambda: lab.runs.exists() and any(lab.runs.glob("e/*/errors.jsonl")), "an error")
    lab.provider.control(latency=0)
    again = serve(lab, int(url.split(":")[2].split("/")[0]))
    try:
        out, err = process.communicate(timeout=300)
    finally:
        again.kill()
        again.wait()
    assert process.returncode == 0, out + err
    (run,) = lab.runs.glob("e/*/")
    assert {error["kind"] for error in lines(run / "errors.jsonl")} == {"agent"}
    assert set(lab.provider.stats()["asked"].values()) == {1}


def test_a_model_calls_tools_of_the_sdk_and_their_errors_go_back_to_it(lab: Lab) -> None:
    use_the_sdk(lab)
    use(lab, per="run")
    lab.rows.append({"id": "b", "question": "nothing", "expected": "x"})
    lab.spec["limits"] = {"concurrency": 1}
    done = lab.eval()
    assert status(done.run) == ["passed", "failed"]
    replies = {
        output["sample"]: [message["content"] for message in output["messages"] if message["role"] == "tool"]
        for output in kept(done.run)
    }
    # An error is in the server's words, which keep the reason back.
    assert replies == {"a": ["tea 0 costs 1", "tea 1 costs 2"], "b": ["Error: Error executing tool price"] * 2}
    assert lines(done.run / "errors.jsonl") == []
    assert "Processing request" not in done.err and "Traceback" not in done.err


def test_a_tool_missing_from_its_server_is_reported_at_once(lab: Lab) -> None:
    use(lab, only=["price", "prize"])
    done = lab.eval(check=3)
    assert "has no tool called prize" in done.out + done.err
    assert "where" in done.out + done.err, "what it has is said"
    assert done.asked == 0


@pytest.mark.parametrize(
    ("source", "message"),
    [("import sys; sys.exit('no money for a shop')", "no money for a shop"), ("print('hello')", "Connection closed")],
)
def test_a_server_that_cannot_start_stops_the_run_with_its_message(lab: Lab, source: str, message: str) -> None:
    (lab.folder / "shop.py").write_text(source)
    done = lab.eval(check=3)
    assert "shop.py" in done.out + done.err and "by hand" in done.out + done.err
    assert message in done.out + done.err
    assert "Traceback" not in done.err and done.asked == 0


def test_a_program_that_ends_at_once_stops_the_run(lab: Lab) -> None:
    use(lab, {"command": ["false"]})
    done = lab.eval(check=3)
    assert "MCP server false" in done.out + done.err and "Traceback" not in done.err
    assert done.asked == 0


def test_a_url_without_a_server_stops_the_run(lab: Lab) -> None:
    use(lab, {"url": "http://127.0.0.1:9/mcp"})
    done = lab.eval(check=3)
    assert "127.0.0.1:9" in done.out + done.err and "Traceback" not in done.err
    assert done.asked == 0


def test_without_the_package_the_remedy_is_the_command_that_installs_it(lab: Lab) -> None:
    (lab.folder / "blocked").mkdir()
    (lab.folder / "blocked" / "mcp.py").write_text("raise ImportError('No module named mcp')\n")
    done = lab.eval(check=3, env={"PYTHONPATH": str(lab.folder / "blocked")})
    assert "pip install mcp" in done.out + done.err


def test_a_server_works_in_the_trials_workspace_in_every_turn(lab: Lab) -> None:
    lab.spec |= {"workspace": {}, "follow_ups": ["again"], "prompt": "first"}
    use(lab, only=["where"])
    run = lab.eval().run
    (output,) = kept(run)
    assert [list(mark["files"]) for mark in output["marks"]] == [["written.txt"], ["written.txt"]]
    places = {message["content"] for message in output["messages"] if message["role"] == "tool"}
    assert len(places) == 1 and "(deleted)" not in places.pop()
    assert calls(lab, "started") == {"started": 2}  # one to see whether it can be had, one for the trial


@pytest.mark.faults
def test_a_conversation_with_an_mcp_server_killed_at_every_step_is_as_an_unbroken_one(lab: Lab, tmp_path: Path) -> None:
    """With `replay: again` the server's own state comes back too."""
    use(lab, replay="again")
    calm = lab.eval().run
    killed = Lab(tmp_path / "killed", lab.provider, rows=lab.rows, spec=lab.spec)
    write_server(killed.folder)
    lab.provider.reset()
    assert killed.many_lives() == 4
    (run,) = killed.runs.glob("e/*/")
    assert_same_numbers(run, calm)
    assert lab.provider.stats()["asked"] == {"tea": 1, "tea #1": 2, "tea #2": 2}
    wait_for(lambda: not leftovers(killed.folder), "the killed runs' servers to be gone")


@pytest.mark.faults
def test_nothing_is_left_of_servers_after_a_kill_or_an_interruption(lab: Lab) -> None:
    detach = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    lab.edit("shop.py", 'if __name__ == "__main__":', f'{detach}if __name__ == "__main__":')
    lab.provider.control(latency=30)
    lab.spec["limits"] = {"concurrency": 3}
    lab.rows = [{"id": name, "question": name, "expected": "x"} for name in ("tea", "milk", "salt")]
    lab.write()
    for how, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        before = lab.provider.requests
        process = start("eval", lab.eval_file.name, cwd=lab.folder)
        wait_for(lambda n=before: lab.provider.requests >= n + 3, "three conversations")
        shops = [one for one in leftovers(lab.folder) if str(lab.folder / "shop.py") in one.cmdline()]
        assert len(shops) == 3 and len(leftovers(lab.folder)) >= 6, "each has started another process"
        process.send_signal(how)
        _, err = process.communicate()
        assert process.returncode == code and "Traceback" not in err
        wait_for(lambda: not leftovers(lab.folder), "all processes to be gone")


def test_a_run_does_not_wait_for_a_server_that_will_not_leave(lab: Lab) -> None:
    """One that ignores the end of its input and SIGTERM is ended."""
    lab.edit(
        "shop.py",
        'if __name__ == "__main__":',
        'import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nif __name__ == "__main__":',
    )
    lab.edit(
        "shop.py", "        server.run()\n", "        server.run()\n        while True:\n            time.sleep(1)\n"
    )
    done = lab.eval()
    assert status(done.run) == ["passed"]
    wait_for(lambda: not leftovers(lab.folder), "the server to be gone")


def test_two_servers_with_a_tool_of_one_name_are_refused_and_both_let_go(lab: Lab) -> None:
    lab.spec["target"]["tools"] *= 2
    done = lab.eval(check=3)
    assert "two tools called 'price'" in done.out + done.err and "only" in done.out + done.err


def test_a_shared_server_is_let_go_when_the_next_one_cannot_start(lab: Lab) -> None:
    shared = {**lab.spec["target"]["tools"][0], "per": "run"}
    lab.spec["target"]["tools"] = [shared, {"mcp": {"command": ["false"]}}]
    done = lab.eval(check=3)
    assert "MCP server false" in done.out + done.err
    assert "never retrieved" not in done.err and "was destroyed" not in done.err


def test_an_agent_may_ask_for_a_servers_tools_twice_at_once(lab: Lab) -> None:
    (lab.folder / "agent.py").write_text(
        "import asyncio\n"
        "async def reply(prompt, context):\n"
        "    both = [context.tool('price', {'thing': thing}) for thing in ('a', 'b')]\n"
        "    return '; '.join(await asyncio.gather(*both))\n"
    )
    lab.spec["target"] = {"python": "agent.py:reply", "tools": lab.spec["target"]["tools"]}
    done = lab.eval()
    assert calls(lab, "started") == {"started": 2}  # one to see whether it can be had, one for the trial
    assert "a costs" in kept(done.run)[0]["output"] and "b costs" in kept(done.run)[0]["output"]


def test_the_files_of_a_server_are_in_the_key(lab: Lab) -> None:
    lab.eval()
    use(lab, per="run", replay="again")
    assert lab.plan()["to_run"] == 0, "how long it lives and what happens after a crash change no answer"
    lab.edit("shop.py", "costs", "is")
    plan = lab.plan()
    assert plan["to_run"] == 1 and plan["reasons"] == ["shop.py changed"]
