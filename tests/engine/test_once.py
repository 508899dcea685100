"""Calls with `replay: never` happen at most once, whatever is killed and whenever."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from holdfast.engine.calls import RecordedCalls
from holdfast.engine.replay import Replay
from holdfast.store.records import ErrorRecord, to_line
from holdfast.store.rundir import RunDir
from tests.support.breaking import (
    assert_same_numbers,
    kept,
    nothing_left,  # noqa: F401 - a fixture
)
from tests.support.lab import Lab
from tests.support.running import ROOT, Server, lines, module_server, run_dir, spawn, start, wait_for
from tests.support.viewing import viewer

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.store.records import Step

pytestmark = pytest.mark.faults

SHOP = '''
import os, signal, time
from pathlib import Path

here = Path(__file__).parent

def note(what, context):
    with (here / "orders.txt").open("a") as file:
        file.write(f"{what} {context.call_id}\\n")

def order(thing: str, context) -> str:
    """Buy something."""
    if os.environ.get("DIE_BEFORE") == thing:
        os.kill(os.getpid(), signal.SIGKILL)
    note(thing, context)
    if os.environ.get("DIE_AT") == thing:
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ.get("HANG_AT") == thing:
        time.sleep(600)
    return f"bought {thing}"

def pay(thing: str, context) -> str:
    """Pay for something."""
    return order("pay " + thing, context)
'''
ANSWER = "tea: bought tea 0; bought tea 1"

provider = module_server(tool_calls=2)
"""A model that calls two tools before each answer."""


@pytest.fixture
def lab(tmp_path: Path, provider: Server) -> Lab:
    """A shop at which the model buys `tea 0`, then `tea 1`."""
    provider.reset()
    return shop(tmp_path, provider)


def shop(folder: Path, provider: Server, sample: str = "a", **rules: Any) -> Lab:
    lab = Lab(folder, provider, rows=[{"id": sample, "question": "tea", "expected": ANSWER}])
    (folder / "shop.py").write_text(SHOP)
    lab.spec["target"] = {
        "model": "gpt-4o-mini",
        "base_url": provider.base_url,
        "tools": [{"python": "shop.py:order", "replay": "never", **rules}],
    }
    return lab


def ordered(lab: Lab) -> list[str]:
    """Return the orders that the shop got, counted outside of Holdfast."""
    path = lab.folder / "orders.txt"
    return [line.rpartition(" ")[0] for line in path.read_text().splitlines()] if path.exists() else []


def call_ids(lab: Lab) -> list[str]:
    return [line.rpartition(" ")[2] for line in (lab.folder / "orders.txt").read_text().splitlines()]


def settle(lab: Lab, *decisions: str, **keys: Any) -> Any:
    options = [word for decision in decisions for word in ("--settle", decision)]
    return lab.do("resume", run_dir(lab.folder), *options, **keys)


def steps(lab: Lab) -> bytes:
    return (run_dir(lab.folder) / "steps.jsonl").read_bytes()


# A call that was cut off


def test_a_call_that_was_cut_off_is_not_made_again_and_is_named(lab: Lab) -> None:
    lab.eval(env={"DIE_AT": "tea 1"}, check=-9)
    for arguments in ((), ("--accept-errors",), ("--retry-failed",)):
        done = lab.eval(*arguments, check=3)
        assert ordered(lab) == ["tea 0", "tea 1"] == sorted(set(ordered(lab)))
        assert done.asked == 0 and kept(done.run) == []
        assert "1 trial is uncertain:" in done.out
        assert 'a/1: order({"thing":"tea 1"}) (call ' in done.out
        assert f"(call {call_ids(lab)[1][:12]})" in done.out
        for decision in ("'a/1=happened:\"RESULT\"'", "a/1=again", "a/1=restart"):
            assert re.search(rf"^  holdfast resume \S+ --settle {decision}  # ", done.out, re.MULTILINE), done.out
        assert "--accept-errors to finish" not in done.out
    errors = lines(run_dir(lab.folder) / "errors.jsonl")
    assert {(error["kind"], error["final"]) for error in errors} == {("uncertain", True)}


@pytest.mark.parametrize(
    ("decision", "kill", "orders"),
    [
        ('a/1=happened:"bought tea 1"', "DIE_AT", ["tea 0", "tea 1"]),
        ("a/1=again", "DIE_BEFORE", ["tea 0", "tea 1"]),
        ("a/1=restart", "DIE_AT", ["tea 0", "tea 1", "tea 0", "tea 1"]),
    ],
)
def test_a_settled_trial_continues_and_equals_an_uninterrupted_one(
    decision: str, kill: str, orders: list[str], lab: Lab, tmp_path: Path, provider: Server
) -> None:
    calm = shop(tmp_path / "calm", provider).eval().run
    lab.eval(env={kill: "tea 1"}, check=-9)
    done = settle(lab, decision)
    assert ordered(lab) == orders
    assert len(set(call_ids(lab))) == 2, "a call has the same id whenever it is made"
    assert_same_numbers(done.run, calm)
    assert kept(done.run)[0]["messages"] == kept(calm)[0]["messages"]
    settled = [step["response"]["settled"] for step in kept(done.run, "steps") if "settled" in (step["response"] or {})]
    assert settled == (["happened"] if "happened" in decision else [])
    assert kept(done.run)[0].get("settled", 0) == len(settled)
    shown = lab.do("show", done.run, "a").out
    assert ("the result of 1 tool call was given by hand" in shown) == bool(settled)
    assert lab.eval().asked == 0


def test_a_result_that_is_no_text_reaches_the_model_as_json(lab: Lab) -> None:
    lab.eval(env={"DIE_AT": "tea 1"}, check=-9)
    done = settle(lab, 'a/1=happened:{"ordered": ["tea 1", 2]}')
    results = [message["content"] for message in kept(done.run)[0]["messages"] if message["role"] == "tool"]
    assert results == ["bought tea 0", '{"ordered":["tea 1",2]}']


@pytest.mark.parametrize("decision", ['a/1=happened:"bought tea 1"', "a/1=again", "a/1=restart"])
def test_a_decision_is_on_disk_before_anything_else_happens(decision: str, lab: Lab) -> None:
    lab.eval(env={"DIE_BEFORE": "tea 1"}, check=-9)
    code = (
        "import os, signal, sys\n"
        "from holdfast.engine import run\n"
        "run.work = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from holdfast.apps.cli.main import main\n"
        "main()\n"
    )
    (lab.folder / "killed.py").write_text(code)
    with spawn("killed", "resume", run_dir(lab.folder), "--settle", decision, cwd=lab.folder) as process:
        out, err = process.communicate()
    assert process.returncode == -9, out + err
    before = steps(lab)
    preview = lab.do("eval", lab.eval_file.name, "--dry-run")
    assert "uncertain" not in preview.out
    again = settle(lab, decision)  # as after a look at the shell's history: not a second decision
    assert "a/1 was settled before" in again.err
    assert steps(lab).startswith(before)
    bought = ["tea 1"] if "again" in decision else [] if "happened" in decision else ["tea 0", "tea 1"]
    assert ordered(lab) == ["tea 0", *bought]
    assert len(kept(again.run)) == 1


def test_a_call_that_is_cut_off_again_is_uncertain_again(lab: Lab) -> None:
    lab.eval(env={"DIE_BEFORE": "tea 1"}, check=-9)
    settle(lab, "a/1=again", env={"DIE_AT": "tea 1"}, check=-9)
    done = lab.eval(check=3)
    assert ordered(lab) == ["tea 0", "tea 1"] and "1 trial is uncertain" in done.out
    settle(lab, 'a/1=happened:"bought tea 1"')
    assert ordered(lab) == ["tea 0", "tea 1"]


def test_the_command_that_resumes_does_not_repeat_a_decision(lab: Lab) -> None:
    """Another trial fails, so that the command is printed at the end."""
    lab.rows.append({"id": "b", "question": "wrong", "expected": "x"})
    lab.spec["limits"] = {"concurrency": 1, "retries": 0}
    agent(
        lab,
        "import shop\n"
        "def reply(prompt, context):\n"
        "    if prompt == 'wrong':\n"
        "        raise RuntimeError('no such thing')\n"
        "    return context.tool(shop.order, {'thing': 'tea'}, replay='never')\n",
    )
    lab.eval(env={"DIE_BEFORE": "tea"}, check=-9)
    done = settle(lab, "a/1=again", check=3)
    assert ordered(lab) == ["tea"]
    assert re.search(r"^  holdfast resume \S+$", done.out, re.MULTILINE) and "--settle" not in done.out
    assert "1 trial has errors and stays pending" in done.out


BAD = {
    "a/1": "this is not a decision",
    "a/1=": "this is not a decision",
    "a/1=maybe": "this is not a decision",
    "a/1=happened": "this is not a decision",
    "a/1=happened:": "the result is not JSON",
    "a/1=happened:bought": "the result is not JSON",
    "a/1=happened:" + "[" * 100_000: "the result is not JSON",
    "b/1=again": "trial 1 of 'b' is not uncertain",
    "a/2=again": "trial 2 of 'a' is not uncertain",
    "a/1#ffffffffffff=again": "a/1 has no such call",
    "a/99999999999999=again": "this is not a decision",
}


def test_a_wrong_decision_is_refused_and_nothing_is_lost(lab: Lab) -> None:
    lab.rows.append({"id": "c", "question": "milk", "expected": "x"})
    lab.spec["limits"] = {"concurrency": 1}
    lab.eval(env={"DIE_AT": "tea 1"}, check=-9)
    before = steps(lab)
    for text, why in BAD.items():
        done = settle(lab, text, check=2)
        assert why in done.err and "hint: " in done.err, text
    settle(lab, 'a/1=happened:"x"', "a/1=again", check=2)
    settle(lab, "a/1=restart", "a/1=again", check=2)
    settle(lab, 'a/1=happened:"bought tea 1"', "c/1=again", check=2)
    assert steps(lab) == before and ordered(lab) == ["tea 0", "tea 1"]
    done = settle(lab, 'a/1=happened:"bought tea 1"')
    assert ordered(lab)[:2] == ["tea 0", "tea 1"] and len(kept(done.run)) == 2


@pytest.mark.parametrize("sample", ["a/b=c#1", "x/1=again", "ü x/2"])
def test_samples_may_have_any_id(sample: str, tmp_path: Path, provider: Server) -> None:
    lab = shop(tmp_path, provider, sample)
    lab.eval(env={"DIE_AT": "tea 1"}, check=-9)
    settle(lab, f"{sample}/1=happened:", check=2)
    settle(lab, f'{sample}/1=happened:"bought tea 1"')
    assert ordered(lab) == ["tea 0", "tea 1"]


# What a tool's block says beforehand


def test_an_error_result_tells_the_model_that_nothing_is_known(tmp_path: Path, provider: Server) -> None:
    lab = shop(tmp_path, provider, on_cut_off="error_result")
    lab.eval(env={"DIE_AT": "tea 1"}, check=-9)
    done = lab.eval()
    assert ordered(lab) == ["tea 0", "tea 1"]
    results = [message["content"] for message in kept(done.run)[0]["messages"] if message["role"] == "tool"]
    assert results == ["bought tea 0", "Error: this call was interrupted, and it is unknown whether it happened"]
    assert [step["response"].get("settled") for step in kept(done.run, "steps") if step["kind"] == "tool"] == [
        None,
        "error_result",
    ]
    assert 'a #1: order({"thing":"tea 1"})' in done.err


def test_a_trial_restarts_only_if_all_that_it_repeats_may_be_repeated(tmp_path: Path, provider: Server) -> None:
    """A cut-off call allows the restart, but an earlier call of another tool does not."""
    lab = shop(tmp_path, provider)
    agent = (
        "import shop\n"
        "def reply(prompt, context):\n"
        "    first = context.tool(shop.pay, {'thing': 'rent'}, replay='never')\n"
        "    second = context.tool(shop.order, {'thing': 'tea'}, replay='never', on_cut_off='restart')\n"
        "    return f'{first}, {second}'\n"
    )
    (lab.folder / "agent.py").write_text(agent)
    lab.spec["target"] = {"python": "agent.py:reply"}
    lab.eval(env={"DIE_AT": "tea"}, check=-9)
    done = lab.eval(check=3)
    assert ordered(lab) == ["pay rent", "tea"] and 'a/1: order({"thing":"tea"})' in done.out

    lab.edit("agent.py", "replay='never')", "replay='never', on_cut_off='restart')")
    lab.eval(env={"DIE_AT": "tea"}, check=-9)
    done = lab.eval()
    assert "starts from scratch" in done.err and ordered(lab) == ["pay rent", "tea"] * 3


def test_a_rule_for_calls_that_were_cut_off_needs_calls_that_happen_once(tmp_path: Path, provider: Server) -> None:
    lab = shop(tmp_path, provider, replay="record", on_cut_off="restart")
    assert "`on_cut_off` is for tools with `replay: never`" in lab.eval(check=2).err
    assert not lab.runs.exists()


# Attempts that fail in a process that lives


@pytest.mark.parametrize("retries", [0, 2])
def test_a_time_out_during_a_call_leaves_the_trial_uncertain(retries: int, lab: Lab) -> None:
    lab.spec["limits"] = {"turn_timeout": 8, "retries": retries}  # long enough to get to the call
    done = lab.eval(env={"HANG_AT": "tea 1"}, check=3)
    assert ordered(lab) == ["tea 0", "tea 1"] and "1 trial is uncertain:" in done.out
    assert [error["kind"] for error in kept(done.run, "errors")] == ["timeout", "uncertain"]
    settle(lab, 'a/1=happened:"bought tea 1"')
    assert ordered(lab) == ["tea 0", "tea 1"]


def test_a_function_that_raises_leaves_the_call_uncertain_if_the_trial_has_to_run_again(lab: Lab) -> None:
    """It may have raised after the order was made."""
    (lab.folder / "agent.py").write_text(
        "import shop\n"
        "def buy(thing, context):\n"
        "    shop.order(thing, context)\n"
        "    raise RuntimeError('the line is dead')\n"
        "def reply(prompt, context):\n"
        "    return context.tool(buy, {'thing': 'tea'}, replay='never')['said']\n"
    )
    lab.spec["target"] = {"python": "agent.py:reply"}
    done = lab.eval(check=3)
    assert ordered(lab) == ["tea"] and "1 trial is uncertain:" in done.out
    done = settle(lab, 'a/1=happened:{"said": "thanks"}')
    assert ordered(lab) == ["tea"] and kept(done.run)[0]["output"] == "thanks"


SERVER = """
import os, sys
from pathlib import Path
from plain_mcp import MCPServer

server = MCPServer("shop")
here = Path(__file__).parent

@server.tool()
def order(thing: str) -> str:
    "Buy something."
    with (here / "orders.txt").open("a") as file:
        file.write(f"{thing} {server.meta.get('holdfast/call_id')}\\n")
    if os.environ.get("DIE_AT") == thing:
        os._exit(7)
    return f"bought {thing}"

server.run()
"""


@pytest.mark.skipif(find_spec("mcp") is None, reason="needs the extra `mcp`")
@pytest.mark.parametrize("per", ["trial", "run"])
def test_a_server_that_dies_during_a_call_leaves_the_trial_uncertain(per: str, lab: Lab) -> None:
    shutil.copy(ROOT / "tests/support/plain_mcp.py", lab.folder)
    (lab.folder / "server.py").write_text(SERVER)
    mcp = {"command": [sys.executable, "server.py"], "env": {"DIE_AT": "${DIE_AT}"}}
    lab.spec["target"]["tools"] = [{"mcp": mcp, "per": per, "replay": "never"}]
    done = lab.eval(env={"DIE_AT": "tea 1"}, check=3)
    assert ordered(lab) == ["tea 0", "tea 1"] and "1 trial is uncertain:" in done.out
    assert f"(call {call_ids(lab)[1][:12]})" in done.out
    done = settle(lab, "a/1=again", env={"DIE_AT": "nothing"})
    assert ordered(lab) == ["tea 0", "tea 1", "tea 1"]
    assert call_ids(lab)[1] == call_ids(lab)[2] != call_ids(lab)[0]
    assert kept(done.run)[0]["output"] == ANSWER


def test_a_second_ctrl_c_during_a_call_leaves_the_trial_uncertain(lab: Lab) -> None:
    lab.write()
    with start("eval", lab.eval_file.name, cwd=lab.folder, env={"HANG_AT": "tea 1"}) as process:
        wait_for(lambda: ordered(lab) == ["tea 0", "tea 1"], "the call")
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        next(line for line in process.stderr if "Ctrl-C again" in line)
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 130
    assert "1 trial is uncertain:" in lab.eval(check=3).out
    assert ordered(lab) == ["tea 0", "tea 1"]


def test_workers_leave_a_trial_uncertain_and_one_process_settles_it(lab: Lab) -> None:
    """The intent is in a worker's journal, and the decision in the run's."""
    lab.eval("--workers", "2", env={"DIE_AT": "tea 1"}, check=3)
    done = lab.eval("--workers", "2", "--accept-errors", check=3)
    assert 'a/1: order({"thing":"tea 1"})' in done.out and "1 trial is uncertain" in done.out
    assert ordered(lab) == ["tea 0", "tea 1"]
    done = settle(lab, 'a/1=happened:"bought tea 1"')
    assert ordered(lab) == ["tea 0", "tea 1"] and len(kept(done.run)) == 1


@pytest.mark.parametrize("on_limit", ["score", "error"])
def test_a_time_limit_that_scores_names_the_call_that_it_cut_off(on_limit: str, lab: Lab) -> None:
    agent(
        lab,
        "import shop\n"
        "def reply(prompt, context):\n"
        "    return context.tool(shop.order, {'thing': 'tea'}, replay='never')\n",
    )
    lab.spec |= {"workspace": {}, "limits": {"turn_timeout": 3, "retries": 0, "on_limit": on_limit}}
    done = lab.eval(env={"HANG_AT": "tea"}, check=0 if on_limit == "score" else 3)
    cut_off = f'order({{"thing":"tea"}}) (call {call_ids(lab)[0][:12]}) was cut off, and may or may not have happened'
    if on_limit == "error":
        assert kept(done.run) == [] and "1 trial is uncertain" in done.out and cut_off in done.out
    else:
        (output,) = kept(done.run)
        assert output["stop"] == "time_limit" and output["stop_detail"].endswith(f"; {cut_off}")
        assert f"a #1: {cut_off}; the trial is graded as it was left" in done.err
        assert "uncertain" not in lab.do("ls").out
        lab.eval()
    assert ordered(lab) == ["tea"]


# Several calls at once, and calls in another order


def test_a_call_that_is_held_does_not_end_a_trial_between_an_intent_and_its_call() -> None:
    """The disk is a fake, since a real one cannot be told to be slow."""

    async def converse() -> list[str]:
        events: list[str] = []
        halted, writing, written = False, asyncio.Event(), asyncio.Event()

        class SlowDisk:
            async def step(self, step: Step) -> None:
                if step.kind == "intent":
                    writing.set()
                    await written.wait()
                events.append(step.kind)

        pending = SimpleNamespace(key="k", sample=SimpleNamespace(id="a"), trial=1)
        ways: dict[str, Any] = {"halted": lambda: halted, "end_trial": lambda: events.append("ended")}
        replay = Replay(cast("Any", pending), cast("Any", SlowDisk()), [], print, **ways)
        calls = await RecordedCalls.begin(replay, 1)

        async def order(_: str) -> str:
            events.append("call")
            return "bought"

        once = asyncio.create_task(calls.tool("order", {}, order, "never"))
        await writing.wait()
        halted = True  # the budget is spent
        held = asyncio.create_task(calls.tool("look", {}, order, "record"))
        await asyncio.sleep(0)
        written.set()
        await once
        calls.end()
        await asyncio.gather(held, return_exceptions=True)
        return events

    assert asyncio.run(converse()) == ["intent", "call", "tool", "ended"]


SIDE_BY_SIDE = """
import asyncio, os, signal
from pathlib import Path

here = Path(__file__).parent
lines = here / "orders.txt"

async def order(thing, context):
    with lines.open("a") as file:
        file.write(f"{thing} {context.call_id}\\n")
    if os.environ.get("DIE"):
        while len(lines.read_text().splitlines()) < 3:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return f"bought {thing}"

async def reply(prompt, context):
    buy = lambda thing: context.tool(order, {"thing": thing}, replay="never")
    return ", ".join(await asyncio.gather(*map(buy, ("tea", "milk", "tea"))))
"""


def agent(lab: Lab, source: str) -> None:
    (lab.folder / "agent.py").write_text(source)
    lab.spec["target"] = {"python": "agent.py:reply", "base_url": lab.provider.base_url}


def test_the_intents_of_calls_have_no_secrets(lab: Lab) -> None:
    secret = "sk-tea-0123456789"
    agent(lab, SIDE_BY_SIDE.replace('"milk"', "os.environ['SHOP_API_KEY']"))
    lab.eval(env={"DIE": "1", "SHOP_API_KEY": secret}, check=-9)
    assert secret in ordered(lab), "the tool has it"
    done = lab.eval(env={"SHOP_API_KEY": secret}, check=3)
    assert "(hidden: $SHOP_API_KEY)" in done.out
    assert secret not in done.out + done.err
    assert all(secret.encode() not in path.read_bytes() for path in done.run.rglob("*.jsonl"))


def test_several_calls_of_a_trial_are_settled_one_by_one(lab: Lab) -> None:
    agent(lab, SIDE_BY_SIDE)
    lab.rows[0]["expected"] = "bought tea, none left, bought tea"
    lab.eval(env={"DIE": "1"}, check=-9)
    ids = dict(zip(call_ids(lab), ordered(lab), strict=True))
    assert len(ids) == 3, "equal calls have ids of their own"
    done = lab.eval(check=3)
    assert all(f'order({{"thing":"{thing}"}}) (call {call[:12]})' in done.out for call, thing in ids.items())
    assert "were cut off" in done.out
    refused = settle(lab, 'a/1=happened:"bought tea"', check=2)
    assert all(f"a/1#{call[:12]}=" in refused.err for call in ids)

    decisions = [
        f'a/1#{call[:12]}=happened:"{"bought tea" if thing == "tea" else "none left"}"' for call, thing in ids.items()
    ]
    partly = settle(lab, *decisions[:2], check=3)
    assert 'a/1: order({"thing":"' in partly.out and "was cut off" in partly.out
    done = settle(lab, decisions[2])
    assert kept(done.run)[0]["output"] == "bought tea, none left, bought tea"
    assert sorted(ordered(lab)) == ["milk", "tea", "tea"]


def test_a_single_decision_makes_all_calls_of_a_trial_that_were_cut_off(lab: Lab) -> None:
    agent(lab, SIDE_BY_SIDE)
    lab.eval(env={"DIE": "1"}, check=-9)
    (lab.folder / "orders.txt").unlink()
    done = settle(lab, "a/1=again")
    assert sorted(ordered(lab)) == ["milk", "tea", "tea"]
    assert kept(done.run)[0]["output"] == "bought tea, bought milk, bought tea"


OTHER_WAY = """
import os, signal
from pathlib import Path
import shop

def look(text, context):
    (context.workspace / f"{text}.txt").write_text(text)
    return text

def order(thing, context):
    (context.workspace / f"{thing}.txt").write_text(thing)
    return shop.order(thing, context)

def reply(prompt, context):
    died = Path(__file__).with_name("died")
    buy = lambda thing: context.tool(order, {"thing": thing}, replay="never")
    if not died.exists():
        answer = [context.tool(look, {"text": "first"}), buy("tea"), buy("milk")]
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return ", ".join([buy("milk"), context.tool(look, {"text": "second"}), buy("tea")])
"""


def test_an_agent_that_comes_back_in_another_order_repeats_no_side_effect(lab: Lab) -> None:
    agent(lab, OTHER_WAY)
    lab.spec["workspace"] = {}
    lab.eval(check=-9)
    done = lab.eval()
    assert ordered(lab) == ["tea", "milk"]
    assert "the target is not deterministic" in done.err and "1 recorded call is dropped" in done.err
    (output,) = kept(done.run)
    assert output["output"] == "bought milk, second, bought tea"
    assert sorted(output["files"]) == ["first.txt", "milk.txt", "second.txt", "tea.txt"], "nothing was undone"


def test_a_side_effect_that_the_agent_does_not_ask_for_again_is_mentioned(lab: Lab) -> None:
    agent(lab, OTHER_WAY.replace(', buy("tea")])\n', "])\n"))
    lab.spec["workspace"] = {}
    lab.eval(check=-9)
    done = lab.eval()
    assert ordered(lab) == ["tea", "milk"]
    assert 'order({"thing":"tea"})' in done.err and "has not asked for it again" in done.err


MIXED = """
import shop

count = 0

def tick():
    global count
    count += 1
    return count

def write(thing, context):
    (context.workspace / f"{thing}.txt").write_text(thing)
    return shop.order(thing, context)

def reply(prompt, context):
    before = context.tool(tick, replay="again")
    for thing in ("lamp", "desk"):
        context.tool(write, {"thing": thing}, replay="never")
    return f"{before} {context.tool(tick, replay='again')}"
"""


def test_a_settled_trial_has_its_state_and_the_files_of_its_finished_calls(lab: Lab) -> None:
    agent(lab, MIXED)
    lab.spec["workspace"] = {}
    lab.eval(env={"DIE_AT": "desk"}, check=-9)
    done = settle(lab, 'a/1=happened:"bought desk"')
    assert ordered(lab) == ["lamp", "desk"]
    (output,) = kept(done.run)
    assert output["output"] == "1 2", "the state was built once more, and no call of it was lost"
    assert sorted(output["files"]) == ["lamp.txt"], "what the call wrote went with its process"


LOST = """
import os, signal
from pathlib import Path
import shop

def reply(prompt, context):
    built = []
    if context.turn == 1:
        context.tool(shop.order, {"thing": "tea"}, replay="never")
        return str(context.tool(lambda: built.append(1), replay="again"))
    if os.environ.get("DIE"):
        os.kill(os.getpid(), signal.SIGKILL)
    return "end"
"""


def test_a_trial_whose_state_is_lost_does_not_repeat_its_side_effects_by_itself(lab: Lab) -> None:
    agent(lab, LOST)
    lab.spec["follow_ups"] = ["more"]
    lab.eval(env={"DIE": "1"}, check=-9)
    done = lab.eval(check=3)
    assert ordered(lab) == ["tea"] and "1 trial is uncertain" in done.out and "only `restart` can settle" in done.out
    settle(lab, "a/1=again", check=2)
    settle(lab, "a/1=restart")
    assert ordered(lab) == ["tea", "tea"]


# Everywhere


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_every_single_step_no_side_effect_happens_twice(when: str, tmp_path: Path, provider: Server) -> None:
    """A person looks at the shop's books each time, and says what they say."""
    turns = {"follow_ups": ["milk"]}
    calm = shop(tmp_path / "calm", provider)
    calm.spec |= turns
    expected = calm.eval().run
    lab = shop(tmp_path / "killed", provider)
    lab.spec |= turns
    lab.write()
    kills = settlements = 0
    arguments: list[Any] = ["eval", lab.eval_file.name]
    while True:
        # Killed after each intent, a call would never be made.
        place = "before" if "--settle" in arguments else when
        with spawn("tests.support.lives", "--one", place, *arguments, cwd=lab.folder) as life:
            out, err = life.communicate()
        assert len(set(call_ids(lab))) == len(ordered(lab)) if ordered(lab) else True, "twice"
        arguments = ["resume", run_dir(lab.folder)]
        if life.returncode == -9:
            kills += 1
        elif life.returncode == 3:
            (uncertain,) = cut_off(run_dir(lab.folder))
            thing = uncertain["response"]["arguments"]["thing"]
            happened = thing in ordered(lab)
            arguments += ["--settle", f'a/1=happened:"bought {thing}"' if happened else "a/1=again"]
            settlements += 1
        else:
            break
    assert life.returncode == 0, out + err
    assert ordered(lab) == ["tea 0", "tea 1", "milk 0", "milk 1"] == ordered(calm)
    assert call_ids(lab) == call_ids(calm)
    assert settlements == (4 if when == "before" else 8) and kills > 10
    run = run_dir(lab.folder)
    assert kept(run)[0]["messages"] == kept(expected)[0]["messages"]
    assert_same_numbers(run, expected)


def cut_off(run: Path) -> list[dict[str, Any]]:
    """Return the last intent of a run if it has no result."""
    last = [step for step in kept(run, "steps") if step["kind"] in ("intent", "tool", "settle")][-1]
    return [last] if last["kind"] == "intent" else []


def test_ids_of_calls_differ_between_calls_trials_and_runs(lab: Lab) -> None:
    lab.spec["trials"] = 2
    lab.eval()
    assert len(set(call_ids(lab))) == 4
    first = set(call_ids(lab))
    lab.eval("--fresh")
    assert set(call_ids(lab)) == first, "the same calls of the same trials"
    lab.eval("target.params.temperature=0.5")
    assert len(set(call_ids(lab))) == 8


def test_commands_that_look_at_a_run_say_that_a_trial_is_uncertain(lab: Lab) -> None:
    lab.rows.append({"id": "c", "question": "milk", "expected": "milk: bought milk 0; bought milk 1"})
    lab.spec["limits"] = {"concurrency": 1}
    lab.eval(env={"DIE_AT": "tea 1"}, check=-9)
    planned = lab.do("eval", lab.eval_file.name, "--dry-run")
    assert "1 uncertain" in planned.out
    assert lab.plan()["uncertain"] == 1
    did = lab.eval("--display", "json", check=3)
    run, ending = did.run, json.loads(did.err.splitlines()[-1])
    assert ending["left"] == {"to_run": 1, "to_grade": 0, "uncertain": 1}
    answers = ending["so_far"]["answers"]
    assert (answers["whole"], answers["errors"], answers["pending"]) == (1, 0, 1)
    shown = lab.do("show", run, "a").out
    assert "uncertain" in shown and 'order({"thing":"tea 1"})' in shown
    (timeline,) = json.loads(lab.do("show", run, "a", "--json").out)
    assert timeline["facts"]["status"] == "uncertain"
    assert "1 ? uncertain" in lab.do("show", run).out and "a" in lab.do("show", run, "--errors").out
    assert "1/2 (1 uncertain)" in lab.do("ls").out
    status = json.loads(lab.do("status", run, "--json").out)
    assert (status["uncertain"], status["errors"]) == (1, 0)
    assert "1 uncertain" in lab.do("status", run).out
    with viewer(lab.folder) as page:
        name = run.name.rpartition("-")[2]
        wait_for(lambda: page.json(f"/run/{name}/trials.json")["building"] is None, "the columns")
        assert [row["sample"] for row in page.json(f"/run/{name}/trials.json?q=uncertain")["rows"]] == ["a"]
    settle(lab, "a/1=restart")
    assert "uncertain" not in lab.do("ls").out + lab.do("show", run).out


def looks(lab: Lab) -> str:
    """Return how often `ls`, `status`, `show` and a dry run call a trial uncertain."""
    run = run_dir(lab.folder)
    status = json.loads(lab.do("status", run, "--json").out)
    (timeline,) = json.loads(lab.do("show", run, "a", "--json").out)
    listed, shown = lab.do("ls").out, lab.do("show", run).out
    return " ".join(
        [
            str(status["uncertain"]),
            str(status["errors"]),
            timeline["facts"]["status"],
            "listed" if "0/1 (1 uncertain)" in listed else "",
            "shown" if "1 ? uncertain" in shown else "",
        ]
    ).strip()


def test_a_kill_leaves_no_error_and_commands_that_look_at_the_run_say_uncertain(lab: Lab) -> None:
    lab.write()
    with start("eval", lab.eval_file.name, cwd=lab.folder, env={"HANG_AT": "tea 1"}) as process:
        wait_for(lambda: ordered(lab) == ["tea 0", "tea 1"], "the call")
        assert looks(lab) == "0 0 pending", "the call is in flight"
        with viewer(lab.folder) as page:
            trials = f"/run/{run_dir(lab.folder).name.rpartition('-')[2]}/trials.json"
            wait_for(lambda: page.json(trials)["building"] is None, "the columns")
            assert page.json(f"{trials}?q=uncertain")["rows"] == []
            process.kill()
            process.wait()
            wait_for(lambda: [row["sample"] for row in page.json(f"{trials}?q=uncertain")["rows"]] == ["a"], "the kill")
    assert not (run_dir(lab.folder) / "errors.jsonl").exists()
    assert looks(lab) == "1 0 uncertain listed shown"
    assert 'order({"thing":"tea 1"})' in lab.do("show", run_dir(lab.folder), "a").out
    decided = "import os, signal\nfrom holdfast.engine import run\n"
    decided += "run.work = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
    (lab.folder / "killed.py").write_text(decided + "from holdfast.apps.cli.main import main\nmain()\n")
    with spawn("killed", "resume", run_dir(lab.folder), "--settle", "a/1=again", cwd=lab.folder) as process:
        process.communicate()
    assert process.returncode == -9
    assert looks(lab) == "0 0 pending", "it is settled"


@pytest.mark.parametrize(("first", "second"), [("w1", "w2"), ("w2", "w1")])
def test_the_last_error_by_time_tells_whether_a_trial_is_uncertain(first: str, second: str, tmp_path: Path) -> None:
    """Journals of workers are read one after the other."""
    for worker, kind, time in ((first, "server", 100.0), (second, "uncertain", 200.0)):
        folder = tmp_path / "workers" / worker
        folder.mkdir(parents=True)
        error = ErrorRecord("k", "a", 1, 1, "target", kind, "", None, time, 0.5, True)
        (folder / "errors.jsonl").write_bytes(to_line(error))
    assert RunDir(tmp_path).load(repair=False).uncertain == {"k"}
