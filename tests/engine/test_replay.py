"""Trials of many calls, killed in their middle: every call that is on record is answered from it."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.breaking import (
    assert_same_numbers,
    journal_files,
    kept,
    nothing_left,  # noqa: F401 - a fixture
)
from tests.support.lab import Lab, remove
from tests.support.running import Server, lines, module_server, run_dir

if TYPE_CHECKING:
    from pathlib import Path

TURNS = 4
TOOLS = '''
from pathlib import Path

def note(what, result):
    with Path(__file__).with_name("calls.txt").open("a") as file:
        file.write(what + "\\n")
    return result

def look_up(text: str) -> str:
    """Look something up."""
    return note("look_up " + text, text.upper())

def count(number: int, context) -> int:
    """Count on."""
    return note(f"count {context.sample['id']} {context.turn} {number}", number + context.turn)
'''


provider = module_server(tool_calls=2)
"""A model that calls two tools before each answer."""


@pytest.fixture
def lab(tmp_path: Path, provider: Server) -> Lab:
    provider.reset()
    return Lab(tmp_path, provider, rows=[{"id": "a", "question": "begin", "expected": "x"}])


def talk(folder: Path, provider: Server, names: str = "a", turns: int = TURNS, **keys: Any) -> Lab:
    """Conversations with two tool calls in each turn: three model calls, two tool calls."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tools.py").write_text(TOOLS)
    spec = {
        "target": {
            "model": "gpt-4o-mini",
            "base_url": provider.base_url,
            "tools": [{"python": "tools.py:look_up"}, {"python": "tools.py:count"}],
        },
        "prompt": "{{ id }} turn 1",
        "follow_ups": ["{{ id }} turn " + str(turn) for turn in range(2, turns + 1)],
        "checkpoints": [{"after_turn": 3, "graders": [{"type": "text", "contains": ["TURN 3"]}]}],
        "limits": {"concurrency": 3},
        **keys,
    }
    rows = [
        {"id": name, "expected": f"{name} turn {turns}: {name.upper()} TURN {turns} 0; {turns + 1}"} for name in names
    ]
    return Lab(folder, provider, rows=rows, spec=spec)


def prompts_of(name: str) -> set[str]:
    """Return the distinct prompts that the server receives in a conversation."""
    return {f"{name} turn {turn}{more}" for turn in range(1, TURNS + 1) for more in ("", " #1", " #2")}


def tool_calls(lab: Lab) -> Counter[str]:
    return Counter((lab.folder / "calls.txt").read_text().splitlines())


def transcripts(run: Path) -> dict[str, Any]:
    return {output["sample"]: (output["messages"], output["usage"], output["turns"]) for output in kept(run)}


def recorded(run: Path) -> Counter[tuple[Any, ...]]:
    """Count the whole lines of steps.jsonl; a killed process may leave half a line."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for path in journal_files(run, "steps"):
        text = path.read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():
            step = json.loads(line)
            counts[step["sample"], step["turn"], step["kind"], step["request"], step["nth"]] += 1
    return counts


# A model with tools


@pytest.mark.faults
def test_turns_with_tools_killed_at_every_step_equal_an_uninterrupted_run(tmp_path: Path, provider: Server) -> None:
    calm_lab = talk(tmp_path / "calm", provider)
    calm = calm_lab.eval().run
    provider.reset()
    lab = talk(tmp_path / "killed", provider)
    kills = lab.many_lives()

    steps = TURNS * (3 + 2 + 1)  # model calls, tool calls, and the whole turn
    assert kills == steps - 1
    # Each life made one call that was not recorded. All but the first call of all were in that place once.
    asked = provider.stats()["asked"]
    assert asked == {prompt: 1 if prompt == "a turn 1" else 2 for prompt in prompts_of("a")}
    assert tool_calls(lab) == dict.fromkeys(tool_calls(calm_lab), 2)
    run = run_dir(lab.folder)
    assert transcripts(run) == transcripts(calm)
    assert_same_numbers(run, calm)
    assert recorded(run) == recorded(calm) and set(recorded(run).values()) == {1}
    assert json.loads((run / "results.json").read_text())["trials"][0]["status"] == "passed"


# Python agents

AGENT = """
from pathlib import Path

def add(a, b):
    with Path(__file__).with_name("calls.txt").open("a") as file:
        file.write(f"add {a} {b}\\n")
    return a + b

def reply(prompt, context):
    first = context.model(prompt + " plan")
    total = context.tool(add, {"a": len(first.text), "b": context.turn})
    again = context.model([{"role": "user", "content": f"{prompt} {total}"}], temperature=0)
    same = context.model([{"role": "user", "content": f"{prompt} {total}"}], temperature=0)
    return f"{first.text}, {again.text}, {same.text}"
"""
ASYNC_AGENT = (AGENT.replace("def reply", "async def reply").replace("context.model(", "await context.model(")).replace(
    "context.tool(", "await context.tool("
)
SIDE_BY_SIDE = """
import asyncio

async def reply(prompt, context):
    for round in (1, 2):
        said = await asyncio.gather(*[context.model(f"{prompt} {name}{round}") for name in "xyz"])
    return " ".join(answer.text for answer in said)
"""


def use(lab: Lab, source: str, **keys: Any) -> None:
    (lab.folder / "agent.py").write_text(source)
    params = {"model": "gpt-4o-mini"}
    lab.spec["target"] = {"python": "agent.py:reply", "base_url": lab.provider.base_url, "params": params, **keys}


@pytest.mark.faults
@pytest.mark.parametrize("source", [AGENT, ASYNC_AGENT], ids=["plain", "async"])
def test_a_python_agent_killed_at_every_step_equals_an_uninterrupted_one(
    source: str, tmp_path: Path, provider: Server
) -> None:
    labs = []
    for name in ("calm", "killed"):
        labs.append(Lab(tmp_path / name, provider, rows=[{"id": "a", "question": "1", "expected": "x"}]))
        labs[-1].spec["follow_ups"] = ["2"]
        use(labs[-1], source)
    calm = labs[0].eval().run
    provider.reset()
    assert labs[1].many_lives() == 2 * (4 + 1) - 1
    # The last two calls of a turn are equal: one prompt, asked twice, and each of them once in flight.
    asked = provider.stats()["asked"]
    assert asked == {"1 plan": 1, "1 7": 4, "2 plan": 2, "2 8": 4}
    assert set(tool_calls(labs[1]).values()) == {2}
    run = run_dir(labs[1].folder)
    assert transcripts(run) == transcripts(calm)
    assert_same_numbers(run, calm)
    usage = kept(run)[0]["usage"]
    assert usage["requests"] == 6 and usage["cost"] > 0


@pytest.mark.faults
def test_concurrent_calls_are_replayed_in_any_order(lab: Lab, provider: Server) -> None:
    use(lab, SIDE_BY_SIDE)
    assert lab.many_lives() >= 1
    asked = provider.stats()["asked"]
    assert {prompt: count for prompt, count in asked.items() if "1" in prompt} == dict.fromkeys(
        ("begin x1", "begin y1", "begin z1"), 1
    )
    assert kept(run_dir(lab.folder))[0]["output"] == "begin x2 begin y2 begin z2"
    assert len(kept(run_dir(lab.folder), "steps")) == 6


@pytest.mark.faults
def test_an_agent_that_diverges_from_its_record_is_reported_and_continues_live(lab: Lab, provider: Server) -> None:
    use(
        lab,
        "import os, signal\n"
        "from pathlib import Path\n"
        "died = Path(__file__).with_name('died')\n"
        "def reply(prompt, context):\n"
        "    life = 'second' if died.exists() else 'first'\n"
        "    context.model('the same')\n"
        "    answer = context.model(f'{life} life')\n"
        "    if not died.exists():\n"
        "        died.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return answer.text\n",
    )
    lab.eval(check=-9)
    done = lab.eval()
    assert provider.stats()["asked"] == {"the same": 1, "first life": 1, "second life": 1}
    assert "a #1: the target is not deterministic" in done.err and "1 recorded call is dropped" in done.err
    (output,) = kept(done.run)
    assert output["output"] == "second life" and output["usage"]["requests"] == 2


def test_an_agent_that_always_diverges_has_no_additional_retries(lab: Lab, provider: Server) -> None:
    use(
        lab,
        "import uuid\n"
        "def reply(prompt, context):\n"
        "    context.model(str(uuid.uuid4()))\n"
        "    raise RuntimeError('never content')\n",
    )
    lab.spec["limits"] = {"retries": 3}
    done = lab.eval(check=3)
    assert done.asked == 4
    assert len(lines(done.run / "errors.jsonl")) == 4


def test_an_agent_that_gets_further_each_time_has_all_its_retries_again(lab: Lab, provider: Server) -> None:
    use(
        lab,
        "from pathlib import Path\n"
        "tries = Path(__file__).with_name('tries')\n"
        "def reply(prompt, context):\n"
        "    done = len(tries.read_text()) if tries.exists() else 0\n"
        "    for number in range(done + 1):\n"
        "        answer = context.model(f'call {number}')\n"
        "    tries.write_text('x' * (done + 1))\n"
        "    if done < 5:\n"
        "        raise RuntimeError('out of breath')\n"
        "    return answer.text\n",
    )
    lab.spec["limits"] = {"retries": 1}
    done = lab.eval()
    assert done.asked == 6  # each call once, however often the agent began anew
    assert kept(done.run)[0]["usage"]["requests"] == 6
    assert len(lines(done.run / "errors.jsonl")) == 5


def test_an_answer_after_an_outage_is_an_error_and_has_no_score(lab: Lab, provider: Server) -> None:
    use(
        lab,
        "def reply(prompt, context):\n"
        "    try:\n"
        "        return context.model(prompt).text\n"
        "    except Exception:\n"
        "        return 'I do not know'\n",
    )
    lab.spec["limits"] = {"retries": 1}
    with provider.controlled(status=500):
        done = lab.eval(check=3)
    assert kept(done.run) == [] and kept(done.run, "grades") == []
    assert {error["kind"] for error in lines(done.run / "errors.jsonl")} == {"server"}
    assert kept(lab.eval().run)[0]["output"] == "begin"


def test_an_agent_may_recover_from_an_outage(lab: Lab, provider: Server) -> None:
    use(
        lab,
        "def reply(prompt, context):\n"
        "    while True:\n"
        "        try:\n"
        "            return context.model(prompt).text\n"
        "        except Exception:\n"
        "            pass\n",
    )
    with provider.controlled(fail={"500": 1.0}, fail_first=2):
        done = lab.eval()
    assert done.asked == 3 and lines(done.run / "errors.jsonl") == []
    assert kept(done.run)[0]["output"] == "begin"


def test_a_wrong_api_key_inside_an_agent_stops_the_run_with_a_hint(lab: Lab, provider: Server) -> None:
    use(lab, "def reply(prompt, context):\n    raise SystemError(context.model(prompt).text)\n")
    lab.rows = [{"id": str(number), "question": str(number), "expected": "x"} for number in range(50)]
    lab.spec["limits"] = {"concurrency": 1}
    with provider.controlled(status=401):
        done = lab.eval(check=3)
    assert done.asked == 1
    assert "answered 401" in done.out and "OPENAI_API_KEY" in done.out


def test_an_abandoned_thread_cannot_write_to_the_record(lab: Lab, provider: Server) -> None:
    """Its call comes back after its attempt is over, while the next attempt has an answer of its own."""
    use(
        lab,
        "import threading\n"
        "began, late = threading.Event(), threading.Event()\n"
        "def speak():\n"
        "    if not began.is_set():\n"
        "        began.set()\n"
        "        late.wait(60)\n"
        "        return 'first'\n"
        "    return 'second'\n"
        "def reply(prompt, context):\n"
        "    if not began.is_set():\n"
        "        try:\n"
        "            context.tool(speak)\n"
        "        finally:\n"
        "            refused.set()\n"
        "    said = context.tool(speak)\n"
        "    late.set()\n"
        "    refused.wait(60)\n"
        "    return said + ' ' + context.model('more').text\n"
        "refused = threading.Event()\n",
    )
    done = lab.eval("limits.turn_timeout=3")
    assert kept(done.run)[0]["output"] == "second more"
    assert [step["response"].get("result") for step in kept(done.run, "steps")] == ["second", None]
    assert [error["kind"] for error in lines(done.run / "errors.jsonl")] == ["timeout"]


# Side effects and state

ORDERS = '''
import os, signal
from pathlib import Path

here = Path(__file__).parent

def order(thing: str) -> str:
    """Buy something."""
    with (here / "calls.txt").open("a") as file:
        file.write(f"{thing}\\n")
    if thing == os.environ.get("DIE_AT"):
        os.kill(os.getpid(), signal.SIGKILL)
    return f"bought {thing}"
'''


def orders(lab: Lab, **rules: str) -> None:
    (lab.folder / "shop.py").write_text(ORDERS)
    lab.rows = [{"id": "a", "question": "tea", "expected": "milk: bought milk 0; bought milk 1"}]
    lab.spec |= {
        "target": {
            "model": "m",
            "base_url": lab.provider.base_url,
            "tools": [{"python": "shop.py:order", "replay": "never", **rules}],
        },
        "follow_ups": ["milk"],
    }


@pytest.mark.faults
def test_a_trial_killed_inside_a_tool_that_may_happen_again_starts_from_scratch(lab: Lab, provider: Server) -> None:
    orders(lab, on_cut_off="restart")
    lab.eval(env={"DIE_AT": "milk 1"}, check=-9)
    provider.reset()
    done = lab.eval()
    assert 'a #1: order({"thing":"milk 1"}) (call ' in done.err and "starts from scratch" in done.err
    assert tool_calls(lab) == {"tea 0": 2, "tea 1": 2, "milk 0": 2, "milk 1": 2}
    assert provider.stats()["asked"] == {f"{what}{more}": 1 for what in ("tea", "milk") for more in ("", " #1", " #2")}
    assert json.loads((done.run / "results.json").read_text())["trials"][0]["status"] == "passed"
    assert kept(done.run)[0]["usage"]["requests"] == 6
    assert lab.eval().asked == 0


CUT_OFF = '''
import asyncio, os, signal
from pathlib import Path

async def order(thing: str) -> str:
    """Buy something; the first process dies when so many trials are at it."""
    if os.environ.get("DIE"):
        calls = Path(__file__).with_name("calls.txt")
        with calls.open("a") as file:
            file.write(f"{thing}\\n")
        if len(calls.read_text().splitlines()) == int(os.environ["DIE"]):
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.Event().wait()
    return f"bought {thing}"
'''


@pytest.mark.faults
def test_restarted_trials_do_not_count_as_failures_of_the_target(lab: Lab) -> None:
    """Restart as many trials in a row as would stop the run if each were a failure of the target."""
    orders(lab, on_cut_off="restart")
    (lab.folder / "shop.py").write_text(CUT_OFF)
    lab.rows = [{"id": f"s{number}", "question": f"tea {number}", "expected": "x"} for number in range(30)]
    lab.spec |= {"follow_ups": [], "limits": {"concurrency": 25}}
    lab.eval(env={"DIE": "25"}, check=-9)
    done = lab.eval()
    assert done.err.count("was cut off, and may or may not have happened; the trial starts from scratch") == 25
    errors = kept(done.run, "errors")
    assert len(errors) == 25 and not any(error["final"] for error in errors)
    assert len(kept(done.run)) == 30


@pytest.mark.faults
@pytest.mark.parametrize("elsewhere", [False, True])
def test_records_before_a_restart_never_count_again(lab: Lab, provider: Server, elsewhere: bool) -> None:
    orders(lab, on_cut_off="restart")
    lab.eval(env={"DIE_AT": "milk 1"}, check=-9)
    (lab.folder / "calls.txt").unlink()
    run = run_dir(lab.folder)
    steps = kept(run, "steps")
    first_turn = [step for step in steps if step["turn"] == 1]
    stopped = lab.eval("--token-budget", tokens(steps) + tokens(first_turn), check=3)
    assert "starts from scratch" in stopped.err and [step["kind"] for step in kept(run, "steps")][-1] == "turn"
    assert tool_calls(lab) == {"tea 0": 1, "tea 1": 1}

    if elsewhere:  # another run, which has the calls of the unfinished conversation from this one
        lab.spec["graders"] = [{"type": "exact", "name": "another"}]
        lab.spec["trials"] = 2
    done = lab.eval()
    assert (done.run != run) == elsewhere
    assert "starts from scratch" not in done.err
    times = 2 if elsewhere else 1
    assert tool_calls(lab) == {"tea 0": times, "tea 1": times, "milk 0": times, "milk 1": times}


def tokens(steps: list[dict[str, Any]]) -> int:
    return sum(step["usage"]["input_tokens"] + step["usage"]["output_tokens"] for step in steps)


STATEFUL = """
import os, signal
from pathlib import Path

heard = {}
log = Path(__file__).with_name("calls.txt")

def note(what):
    with log.open("a") as file:
        file.write(what + "\\n")

def save(context):
    note(f"save {context.turn}")
    return heard[context.sample_id]

def restore(state, context):
    note(f"restore {context.turn}")
    heard[context.sample_id] = list(state)

def reply(prompt, context):
    own = heard.setdefault(context.sample_id, [])
    if context.turn == 1:
        own.clear()
    own.append(prompt)
    context.model(" ".join(own))
    if os.environ.get("DIE_AT") == prompt:
        os.kill(os.getpid(), signal.SIGKILL)
    return " ".join(own)
"""


@pytest.mark.faults
def test_state_hooks_restore_an_agents_state_once_and_only_when_needed(lab: Lab, provider: Server) -> None:
    use(lab, STATEFUL, state={"save": "agent.py:save", "restore": "agent.py:restore"})
    lab.spec |= {"follow_ups": ["2", "3", "4"], "prompt": "1"}
    lab.eval(env={"DIE_AT": "3"}, check=-9)
    assert (lab.folder / "calls.txt").read_text().splitlines() == ["save 1", "save 2"]
    done = lab.eval()
    assert (lab.folder / "calls.txt").read_text().splitlines() == ["save 1", "save 2", "restore 3", "save 3", "save 4"]
    (output,) = kept(done.run)
    assert output["output"] == "1 2 3 4" and output["state"] == ["1", "2", "3", "4"]
    assert provider.stats()["asked"] == {"1": 1, "1 2": 1, "1 2 3": 1, "1 2 3 4": 1}


@pytest.mark.faults
def test_state_hooks_restore_the_state_before_a_turn_is_retried(lab: Lab, provider: Server) -> None:
    source = STATEFUL.replace(
        'if os.environ.get("DIE_AT") == prompt:\n        os.kill(os.getpid(), signal.SIGKILL)',
        'if prompt == "2" and not log.with_name("once").exists():\n'
        '        log.with_name("once").touch()\n        raise RuntimeError("stumbled")',
    )
    use(lab, source, state={"save": "agent.py:save", "restore": "agent.py:restore"})
    lab.spec |= {"follow_ups": ["2"], "prompt": "1"}
    done = lab.eval()
    assert (lab.folder / "calls.txt").read_text().splitlines() == ["save 1", "restore 2", "save 2"]
    assert kept(done.run)[0]["output"] == "1 2"
    assert provider.stats()["asked"] == {"1": 1, "1 2": 1}


def test_the_state_of_a_reply_is_passed_to_the_next_turn(lab: Lab) -> None:
    use(
        lab,
        "def reply(prompt, context):\n"
        "    seen = (context.state or 0) + 1\n"
        "    return {'output': str(seen), 'state': seen}\n",
    )
    lab.spec["follow_ups"] = ["again", "again"]
    assert [message["content"] for message in kept(lab.eval().run)[0]["messages"][1::2]] == ["1", "2", "3"]


# Budgets


def test_the_usage_of_an_agents_calls_is_counted_once(lab: Lab, provider: Server) -> None:
    use(lab, AGENT)
    lab.rows = [{"id": f"s{number}", "question": f"q{number}", "expected": "x"} for number in range(6)]
    lab.spec["limits"] = {"concurrency": 1}
    first = lab.eval("--limit", "1")
    usage = kept(first.run)[0]["usage"]
    each = usage["input_tokens"] + usage["output_tokens"]
    remove(first.run)
    done = lab.eval("--token-budget", 3 * each, check=3)
    assert len(kept(done.run)) == 3
    done = lab.eval("--token-budget", 5 * each, check=3)
    assert len(kept(done.run)) == 5
