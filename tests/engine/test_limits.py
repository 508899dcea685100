"""Limits of a trial that score, exit codes, budgets inside trials, and workspaces that are too large."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import tracemalloc
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from holdfast.engine.replay import Replay
from holdfast.engine.retry import Retrier
from holdfast.engine.workspace import Workspace
from holdfast.errors import ConfigError
from holdfast.plan.identity import identify
from holdfast.spec.eval_schema import Limits
from holdfast.spec.load import load_eval
from holdfast.spec.trial_limits import time_beside_target, trial_limits
from holdfast.store import blobs as store
from holdfast.store.blobs import Blobs, Ignored, Snapshots
from holdfast.store.records import Step, Usage, to_line
from holdfast.targets.build import agents_at_once, concurrency_of
from tests.support.breaking import (
    kept,
    metrics_bytes,
    nothing_left,  # noqa: F401 - a fixture
)
from tests.support.lab import Lab
from tests.support.running import Server, environment, module_server, run_dir, start, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

provider = module_server(tool_calls=9)
"""A model that echoes: a call of one word takes two tokens. Offered tools, it calls them nine times."""


@pytest.fixture
def lab(tmp_path: Path, provider: Server) -> Iterator[Lab]:
    provider.reset()
    graders = [{"type": "file", "name": "made", "must_exist": ["done.txt"]}]
    yield Lab(
        tmp_path,
        provider,
        rows=[{"id": "a", "question": "tea"}],
        spec={"workspace": {}, "graders": graders},
    )
    provider.control(latency=0, status=200, fail={}, holds_after=-1)


CLIENT = """
import json, os, sys, urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

here = Path(__file__).parent

def ask(prompt):
    body = {"model": "own", "messages": [{"role": "user", "content": prompt}]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]
"""


def use(lab: Lab, source: str, **limits: Any) -> None:
    """A program that asks with nothing but Python."""
    (lab.folder / "agent.py").write_text(CLIENT + source)
    command = [sys.executable, "agent.py", "{{ prompt }}"]
    lab.spec["target"] = {"command": command, "base_url": lab.provider.base_url}
    lab.spec["prices"] = {"own": {"input": 1e6, "output": 0}}  # one dollar per call of one word
    lab.spec["limits"] = {"retries": 0, **limits}


FORTY = """
Path("done.txt").write_text("done")
print("begun", flush=True)
for number in range(40):
    print(ask(f"c{number}"), flush=True)
"""


def shell(lab: Lab, script: str, **limits: Any) -> None:
    (lab.folder / "agent.sh").write_text(script)
    lab.spec["target"] = {"command": ["sh", "agent.sh", "{{ prompt }}"], "proxy": False}
    lab.spec["limits"] = {"retries": 0, **limits}


def numbers(run: Path) -> dict[str, Any]:
    return json.loads((run / "metrics.json").read_text())


# Time


SLOW = """
echo started >> "$OLDPWD/starts.txt"
echo done > done.txt
echo "hello $1"
[ "$1" = slow ] && sleep 600
exit 0
"""


def test_an_agent_that_runs_out_of_time_is_graded_by_what_it_has_done(lab: Lab) -> None:
    shell(lab, SLOW.replace("$OLDPWD", str(lab.folder)), turn_timeout=5)
    lab.rows = [{"id": "fast", "question": "fast"}, {"id": "slow", "question": "slow"}]
    lab.spec["graders"].append({"type": "text", "name": "said", "contains": ["fast"]})
    done = lab.eval()
    scores = {name: block["score"] for name, block in numbers(done.run)["metrics"].items()}
    assert scores == {"made": 1.0, "said": 0.5} and numbers(done.run)["coverage"] == 1.0
    answers = numbers(done.run)["answers"]
    assert (answers["whole"], answers["limited"]) == (1, 1) and sum(answers.values()) == 2
    slow = next(output for output in kept(done.run) if output["sample"] == "slow")
    assert (slow["stop"], slow["answer"], slow["output"]) == ("time_limit", "limited", "hello slow")
    assert "done.txt" in slow["files"] and "the time limit of 5 s is reached" in slow["stop_detail"]
    assert "1 of 2 answers is not whole: 1 ended at the time limit" in done.out
    assert "limits.turn_timeout" in lab.do("show", done.run, "slow").out

    starts = (lab.folder / "starts.txt").read_text()
    assert "already finished" in lab.eval().out and (lab.folder / "starts.txt").read_text() == starts
    assert starts.splitlines() == ["started"] * 2  # the attempt was not repeated either


def test_a_time_limit_can_be_an_error_and_is_then_in_no_key(lab: Lab) -> None:
    shell(lab, SLOW.replace("$OLDPWD", str(lab.folder)), turn_timeout=3, on_limit="error")
    lab.rows = [{"id": "slow", "question": "slow"}]
    done = lab.eval(check=3)
    run = run_dir(lab.folder)
    assert kept(run) == [] and "no answer within 3 s (turn_timeout)" in done.out + done.err
    key = identify(load_eval(lab.eval_file)).id
    lab.spec["limits"]["turn_timeout"] = 4
    lab.write()
    assert identify(load_eval(lab.eval_file)).id == key


def test_a_model_that_does_not_answer_is_not_the_agents_fault(lab: Lab, provider: Server) -> None:
    use(lab, FORTY, turn_timeout=5)
    provider.control(holds_after=0)
    done = lab.eval(check=3)
    assert kept(run_dir(lab.folder)) == [] and "a model call had no answer for" in done.out + done.err


@pytest.mark.parametrize("kind", ["async def", "def"])
def test_a_function_whose_model_does_not_answer_is_not_scored(kind: str, lab: Lab, provider: Server) -> None:
    awaited = "await " if kind.startswith("async") else ""
    (lab.folder / "agent.py").write_text(
        f"{kind} reply(prompt, context):\n    return ({awaited}context.model(prompt, model='own')).text\n"
    )
    lab.spec["target"] = {"python": "agent.py:reply", "base_url": provider.base_url}
    lab.spec["limits"] = {"retries": 0, "turn_timeout": 3}
    provider.control(holds_after=0)
    done = lab.eval(check=3)
    assert kept(run_dir(lab.folder)) == [] and "a model call had no answer for" in done.out + done.err


SHORT_DEFAULT = """
from holdfast.spec import eval_schema
eval_schema.AGENT_TURN = 3.0
from holdfast.apps.cli.main import main
main()
"""


def test_a_limit_that_nobody_set_is_named(lab: Lab) -> None:
    """The default is an hour: this command has a shorter one."""
    shell(lab, SLOW.replace("$OLDPWD", str(lab.folder)))
    lab.rows = [{"id": "slow", "question": "slow"}]
    lab.write()
    command = [sys.executable, "-c", SHORT_DEFAULT, "eval", lab.eval_file.name]
    done = subprocess.run(command, cwd=lab.folder, env=environment(), capture_output=True, text=True, check=True)
    assert "limits.turn_timeout, by default" in kept(run_dir(lab.folder))[0]["stop_detail"]
    assert done.stderr.count("a default time limit has ended a trial") == 1


def test_a_time_out_says_whether_the_eval_has_set_it() -> None:
    async def message(limits: Limits, seconds: float, deadline: float) -> str:
        retrier = Retrier(limits, None, None, None, SimpleNamespace(outputs=0))  # type: ignore[arg-type]
        return retrier._timeout(seconds, 0.0, deadline, TimeoutError()).message

    assert "(turn_timeout: 120 s by default)" in asyncio.run(message(Limits(), 120, 600))
    assert "(trial_timeout: 600 s by default)" in asyncio.run(message(Limits(), 120, 114))
    assert asyncio.run(message(Limits(turn_timeout=90), 90, 600)).endswith("(turn_timeout)")


def test_agents_have_time_and_the_machine_to_themselves(lab: Lab) -> None:
    use(lab, FORTY)
    lab.write()
    spec = load_eval(lab.eval_file)
    assert (spec.limits.turn_timeout, spec.limits.trial_timeout) == (3600, 6 * 3600)
    assert concurrency_of(spec) == agents_at_once() and 1 <= agents_at_once() <= 8
    assert time_beside_target(spec) == (120, 600)  # judges are no agents
    limits = trial_limits(spec)
    assert (limits.on_limit, limits.on_exit, limits.turn_time) == ("score", "score", 3600)
    lab.spec["limits"]["trial"] = {"time": "3h"}
    lab.write()
    limits = trial_limits(load_eval(lab.eval_file))
    assert (limits.turn_time, limits.time) == (3 * 3600, 3 * 3600)  # no default cuts it short
    del lab.spec["workspace"], lab.spec["limits"]["trial"]
    lab.spec["graders"] = [{"type": "exact", "name": "x", "expected": "x"}]
    lab.write()
    spec = load_eval(lab.eval_file)
    assert (spec.limits.turn_timeout, concurrency_of(spec)) == (120, 64)
    assert (trial_limits(spec).on_limit, trial_limits(spec).on_exit) == ("error", "error")
    lab.spec["limits"]["trial"] = {"calls": 3}
    lab.write()
    limits = trial_limits(load_eval(lab.eval_file))
    assert (limits.on_limit, limits.turn_time, limits.time, limits.guarded) == ("score", None, None, True)


def test_programs_and_functions_are_told_when_their_time_is_up(lab: Lab) -> None:
    shell(lab, 'echo done > done.txt; echo "$HOLDFAST_DEADLINE"', turn_timeout=1000)
    before = time.time()
    told = int(kept(lab.eval().run)[0]["output"])
    assert before + 990 < told < time.time() + 1000
    (lab.folder / "agent.py").write_text("def reply(prompt, context):\n    return str(context.deadline)\n")
    lab.spec["target"] = {"python": "agent.py:reply"}
    assert before + 990 < float(kept(lab.eval().run)[0]["output"]) < time.time() + 1000


def step(request: str, end: float, seconds: float, turn: int = 1) -> Step:
    return Step("k", "a", 1, turn, "model", request, 1, None, Usage(1, 1, 1, 0.0), end, seconds)


def test_time_before_a_crash_counts_and_calls_at_the_same_time_count_once() -> None:
    steps = [step("x", 110.0, 10.0), step("y", 112.0, 8.0), step("z", 130.0, 5.0), step("other", 200.0, 50.0, turn=2)]
    replay = Replay(None, None, steps, print)  # type: ignore[arg-type]
    asyncio.run(replay.begin_attempt(1))
    assert replay.recorded_seconds == pytest.approx(17.0)  # from 100 to 112, and from 125 to 130


def test_the_time_of_a_model_with_tools_scores_only_as_a_limit_of_the_trial(lab: Lab, provider: Server) -> None:
    functions(lab, "tools")
    (lab.folder / "tools.py").write_text(TOOL.replace("return text", "import time; time.sleep(600)"))
    lab.spec["limits"] = {"retries": 0, "trial": {"time": 3}}
    (output,) = kept(lab.eval().run)
    assert (output["stop"], output["answer"]) == ("time_limit", "limited")
    assert not trial_limits(load_eval(lab.eval_file)).guarded  # else a time-out of the same length would come first
    lab.spec["limits"] = {"retries": 0, "turn_timeout": 3}
    assert "no answer within 3 s (turn_timeout)" in lab.eval(check=3).out


# Tokens, cost and calls


@pytest.mark.parametrize(
    ("limit", "stop", "calls"),
    [({"calls": 5}, "call_limit", 5), ({"tokens": 7}, "token_limit", 4), ({"cost": 2.5}, "cost_limit", 3)],
)
def test_a_trial_ends_at_its_limit_with_what_it_has(lab: Lab, limit: Any, stop: str, calls: int) -> None:
    use(lab, FORTY, trial=limit)
    done = lab.eval()
    (output,) = kept(done.run)
    assert (done.asked, output["usage"]["requests"], output["stop"]) == (calls, calls, stop)
    assert output["output"].split() == ["begun", *(f"c{number}" for number in range(calls))]
    assert numbers(done.run)["metrics"]["made"]["score"] == 1.0
    assert numbers(done.run)["answers"]["limited"] == 1


def test_calls_at_the_same_time_do_not_exceed_the_limit(lab: Lab, provider: Server) -> None:
    provider.control(latency=0.2)
    use(lab, "with ThreadPoolExecutor(8) as pool:\n    list(pool.map(ask, 'abcdefgh'))\n", trial={"calls": 5})
    done = lab.eval()
    (output,) = kept(done.run)
    assert (done.asked, output["stop"], output["usage"]["requests"]) == (5, "call_limit", 5)


TOOL = "def look(text: str) -> str:\n    '''Look.'''\n    return text\n"
FUNCTION = """
def plain(prompt, context):
    (context.workspace / "done.txt").write_text("done")
    return " ".join(context.model(f"c{number}").text for number in range(40))

async def waiting(prompt, context):
    (context.workspace / "done.txt").write_text("done")
    return " ".join([(await context.model(f"c{number}")).text for number in range(40)])
"""


def functions(lab: Lab, kind: str) -> None:
    (lab.folder / "agent.py").write_text(FUNCTION)
    (lab.folder / "tools.py").write_text(TOOL)
    target = {"base_url": lab.provider.base_url}
    if kind == "tools":
        lab.spec["target"] = {**target, "model": "own", "tools": [{"python": "tools.py:look"}]}
    else:
        lab.spec["target"] = {**target, "python": f"agent.py:{kind}", "params": {"model": "own"}}
    lab.spec["prices"] = {"own": {"input": 1e6, "output": 0}}


@pytest.mark.parametrize("kind", ["plain", "waiting", "tools"])
def test_limits_hold_for_functions_and_models_with_tools(lab: Lab, kind: str) -> None:
    functions(lab, kind)
    lab.spec["limits"] = {"retries": 0, "trial": {"calls": 3}}
    done = lab.eval()
    (output,) = kept(done.run)
    assert (done.asked, output["stop"], output["usage"]["requests"]) == (3, "call_limit", 3)
    if kind == "tools":
        assert sum(bool(message.get("tool_calls")) for message in output["messages"]) == 3


SUB_AGENT = """
import json, urllib.request

def reply(prompt, context):
    def delegate(count):
        return [ask(context.base_url, f"sub{number}") for number in range(count)]

    context.model("first")
    context.tool(delegate, {"count": 3})
    return context.model("last").text

def ask(url, prompt):
    body = {"model": "own", "messages": [{"role": "user", "content": prompt}]}
    request = urllib.request.Request(url + "/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]
"""


def test_a_tool_that_asks_through_the_proxy_does_not_wait_for_itself(lab: Lab) -> None:
    functions(lab, "plain")
    (lab.folder / "agent.py").write_text(SUB_AGENT)
    lab.spec["target"]["python"] = "agent.py:reply"
    lab.spec["limits"] = {"retries": 0, "trial": {"calls": 2, "time": "10m"}}
    (output,) = kept(lab.eval().run)
    assert (output["stop"], output["usage"]["requests"]) == ("call_limit", 4)  # and not the one after the tool


def test_a_limit_ends_the_conversation_and_counts_over_all_turns(lab: Lab) -> None:
    use(lab, "Path('done.txt').touch()\nprint(ask(sys.argv[1]), ask('again'))\n", trial={"calls": 3})
    lab.spec["follow_ups"] = ["milk", "sugar"]
    done = lab.eval()
    (output,) = kept(done.run)
    assert (done.asked, output["turns"], output["stop"], output["usage"]["requests"]) == (3, 2, "call_limit", 3)


@pytest.mark.faults
def test_a_limited_trial_that_is_killed_ends_where_it_would_have_ended(lab: Lab, provider: Server) -> None:
    use(lab, FORTY, trial={"calls": 5, "time": 3000})
    whole = lab.eval("--runs-dir", "whole").run
    provider.control(holds_after=3)
    provider.reset()
    process = start("eval", lab.eval_file.name, cwd=lab.folder)
    wait_for(lambda: provider.requests == 4, "the fourth call")
    process.kill()
    process.communicate()
    provider.control(holds_after=-1)
    done = lab.eval()
    assert provider.stats()["asked"] == {"c0": 1, "c1": 1, "c2": 1, "c3": 2, "c4": 1}
    first, second = (
        {name: kept(run)[0][name] for name in ("stop", "output", "messages", "usage", "files", "digest")}
        for run in (whole, done.run)
    )
    assert first == second and first["stop"] == "call_limit"
    assert metrics_bytes(whole) == metrics_bytes(done.run)


@pytest.mark.faults
def test_the_time_of_calls_before_a_crash_is_taken_off_the_agents_time(lab: Lab, provider: Server) -> None:
    note = "(here / 'deadline').write_text(os.environ['HOLDFAST_DEADLINE'])\n"
    use(lab, note + "Path('done.txt').touch()\nprint(ask('one'), ask('two'))\n", turn_timeout=1000)
    provider.control(holds_after=1)
    lab.write()
    process = start("eval", lab.eval_file.name, cwd=lab.folder)
    wait_for(lambda: provider.requests == 2, "the second call")
    process.kill()
    process.communicate()
    provider.control(holds_after=-1)
    journal = run_dir(lab.folder) / "steps.jsonl"
    (recorded,) = kept(run_dir(lab.folder), "steps")
    recorded = {name: value for name, value in recorded.items() if name != "sum"}
    journal.write_bytes(to_line(msgspec.convert({**recorded, "seconds": 500.0}, Step)))  # as if it had been slow
    began = time.time()
    done = lab.eval()
    assert done.asked == 1 and kept(done.run)[0]["stop"] == "stop"
    assert began + 400 < int((lab.folder / "deadline").read_text()) < began + 600


def test_reaching_a_limit_can_be_an_error(lab: Lab) -> None:
    use(lab, FORTY, trial={"calls": 2}, on_limit="error")
    done = lab.eval(check=3)
    assert kept(run_dir(lab.folder)) == [] and done.asked == 2
    assert "the limit of 2 model calls is reached (limits.trial.calls)" in done.out
    assert lab.eval(check=3).asked == 0


def test_a_trial_without_model_calls_is_not_limited_by_them_and_others_are(lab: Lab) -> None:
    use(
        lab,
        "Path('done.txt').touch()\n[print(ask('x')) for _ in range(9) if sys.argv[1] == 'ask']\n",
        trial={"calls": 2},
    )
    lab.rows = [{"id": "silent", "question": "nothing"}, {"id": "asks", "question": "ask"}]
    done = lab.eval()
    assert "no model call of a trial was seen, so limits.trial.calls did not apply to it" in done.err
    assert {output["sample"]: output["stop"] for output in kept(done.run)} == {"silent": "stop", "asks": "call_limit"}


def test_a_limit_that_cannot_be_enforced_is_named(lab: Lab, provider: Server) -> None:
    with provider.controlled(usage=False):
        use(lab, "Path('done.txt').touch()\nprint(ask('x'))\n", trial={"tokens": 5})
        assert "limits.trial.tokens cannot be enforced" in lab.eval().err


# Exit codes


EXITS = """
case "$1" in
  three) echo done > done.txt; echo "not finished"; exit 3;;
  killed) echo done > done.txt; kill -KILL $$;;
  memory) echo done > done.txt; exit 137;;
  absent) echo done > done.txt; no-such-program-anywhere;;
  usage) echo "unknown option" >&2; exit 2;;
  fine) echo done > done.txt;;
esac
"""


def test_an_exit_code_scores_if_the_program_chose_it_and_has_done_something(lab: Lab) -> None:
    shell(lab, EXITS)
    names = ("three", "killed", "memory", "absent", "usage", "fine")
    lab.rows = [{"id": name, "question": name} for name in names]
    lab.eval(check=3)
    run = run_dir(lab.folder)
    stops = {output["sample"]: output["stop"] for output in kept(run)}
    assert stops == {"three": "exit:3", "fine": "stop"}
    three = next(output for output in kept(run) if output["sample"] == "three")
    assert (three["answer"], three["output"]) == ("exited", "not finished") and "ended with 3" in three["stop_detail"]
    assert {error["sample"] for error in kept(run, "errors")} == {"killed", "memory", "absent", "usage"}
    lab.eval("--accept-errors")
    assert numbers(run)["answers"]["exited"] == 1 and numbers(run)["metrics"]["made"]["n"] == 2


def test_an_exit_code_can_be_an_error(lab: Lab) -> None:
    shell(lab, EXITS, on_exit="error")
    lab.rows = [{"id": "three", "question": "three"}]
    lab.eval(check=3)
    assert kept(run_dir(lab.folder)) == []


@pytest.mark.parametrize("ending", ["sys.exit(1)", "__import__('time').sleep(600)"])
def test_an_agent_that_fails_or_waits_in_an_outage_is_never_scored(lab: Lab, provider: Server, ending: str) -> None:
    use(
        lab,
        f"Path('done.txt').touch()\nprint('half', flush=True)\ntry:\n    ask('x')\nexcept OSError:\n    {ending}\n",
        turn_timeout=8,
    )
    provider.control(status=500)
    lab.eval(check=3)
    run = run_dir(lab.folder)
    assert kept(run) == [] and {error["kind"] for error in kept(run, "errors")} == {"server"}


# Budgets of the run


@pytest.mark.parametrize("kind", ["command", "plain", "waiting", "tools"])
def test_a_budget_holds_inside_a_trial_which_resumes_in_the_middle(lab: Lab, provider: Server, kind: str) -> None:
    if kind == "command":
        use(lab, FORTY)
    else:
        functions(lab, kind)
    cost = ("--max-cost", "3") if kind == "command" else ("--token-budget", "6")
    stopped = lab.eval(*cost, check=3)
    run = run_dir(lab.folder)
    spent = kept(run, "steps")
    used = sum(step["usage"]["cost" if kind == "command" else "input_tokens"] for step in spent)
    assert stopped.asked == len([step for step in spent if step["kind"] == "model"]) <= 3 <= used
    assert kept(run) == [] and kept(run, "errors") == [] and "budget reached" in stopped.out + stopped.err

    done = lab.eval()  # with no budget: nothing that was paid for is asked again
    assert max(provider.stats()["answered"].values()) == 1 or kind == "tools"
    (output,) = kept(done.run)
    assert (output["stop"], output["usage"]["requests"]) == ("stop", stopped.asked + done.asked)


GIVES_UP = """
from threading import Thread
import time
Path("done.txt").touch()
Thread(target=ask, args=("slow",), daemon=True).start()
time.sleep(4)
try:
    urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/models", timeout=1)
except OSError:
    print("gave up", flush=True)
os._exit(CODE)
"""


@pytest.mark.parametrize("code", ["0", "1"])
def test_an_agent_that_gives_up_a_call_over_budget_is_not_scored(lab: Lab, provider: Server, code: str) -> None:
    use(lab, GIVES_UP.replace("CODE", code))
    provider.control(holds_after=0)
    stopped = lab.eval("--max-time", "2s", check=3)  # which is over when the agent asks again
    run = run_dir(lab.folder)
    assert kept(run) == [] and kept(run, "errors") == [] and "budget reached" in stopped.out + stopped.err


# Keys


def test_limits_that_score_are_in_the_key_and_the_plan_says_so(lab: Lab) -> None:
    use(lab, FORTY, trial={"calls": 2})
    lab.eval()
    lab.spec["limits"]["trial"]["calls"] = 3
    assert any("limits changed: limits.trial.calls 2 → 3" in reason for reason in _reasons(lab))
    lab.spec["limits"] = {"retries": 3, "concurrency": 1, "trial": {"calls": 2}, "turn_timeout": "1h"}
    assert lab.plan()["to_run"] == 0  # an hour is the default
    lab.spec["limits"]["turn_timeout"] = "2h"
    assert any("limits changed: limits.turn_timeout" in reason for reason in _reasons(lab))
    lab.spec["limits"] = {"trial": {"calls": 2}, "on_exit": "error"}
    assert any("limits.on_exit" in reason for reason in _reasons(lab))
    lab.spec["limits"] = {"trial": {"calls": 2}}
    lab.spec["workspace"] = {"ignore": ["cache"]}
    assert any("workspace changed" in reason for reason in _reasons(lab))


def _reasons(lab: Lab) -> list[str]:
    plan = lab.plan()
    assert plan["to_run"] == 1
    return [json.dumps(plan, ensure_ascii=False)]


@pytest.mark.parametrize(
    ("target", "limits", "problem"),
    [
        ({"model": "m"}, {"trial": {"tokens": 5}}, "the target's model calls are not seen"),
        ({"model": "m"}, {"on_limit": "score"}, "only agents, programs and functions"),
        ({"command": ["sh"], "proxy": False}, {"trial": {"calls": 5}}, "the target's model calls are not seen"),
        ({"python": "agent.py:plain"}, {"on_exit": "score"}, "has no exit code"),
        ({"command": ["sh"]}, {"trial": {"time": "soon"}}, "a duration such as"),
        ({"command": ["sh"]}, {"trial": {"cost": 0}}, "greater than 0"),
        ({"command": ["sh"]}, {"on_limit": "ignore"}, "score"),
        ({"command": ["sh"]}, {"trial": {"token": 5}}, "did you mean 'tokens'"),
    ],
)
def test_limits_that_mean_nothing_are_refused(lab: Lab, target: Any, limits: Any, problem: str) -> None:
    functions(lab, "plain")
    lab.spec |= {"target": {"base_url": "http://127.0.0.1:1", **target}, "limits": limits}
    lab.write()
    with pytest.raises(ConfigError, match=problem):
        load_eval(lab.eval_file)


# Workspaces


LARGE = """
echo done > done.txt
mkdir -p node_modules/x data
head -c 300000 /dev/zero > node_modules/x/index.js
head -c 200000 /dev/zero > data/large.bin
head -c 1000 /dev/zero > data/small.bin
echo "finished"
"""


def test_of_a_large_workspace_the_small_files_are_kept_and_graded(lab: Lab) -> None:
    shell(lab, LARGE)
    lab.spec["workspace"] = {"max_size": "100KB", "ignore": ["node_modules"]}
    check = {"type": "program", "command": "sh"}
    lab.spec["graders"] += [
        {"type": "file", "name": "small", "must_exist": ["data/small.bin"], "must_not_exist": ["nothing"]},
        {"type": "file", "name": "large", "must_exist": ["data/large.bin"]},
        {**check, "name": "passes", "args": ["-c", "test -e done.txt"]},
        {**check, "name": "fails", "args": ["-c", "test -e data/large.bin"]},
    ]
    done = lab.eval(check=3)
    run = run_dir(lab.folder)
    (output,) = kept(run)
    assert set(output["files"]) == {"data/small.bin", "done.txt"}
    assert output["files_partial"] == {"count": 1, "bytes": 200000, "paths": ["data/large.bin"]}
    verdicts = {grade["grader"]: grade for grade in kept(run, "grades")}
    assert {name: grade["status"] for name, grade in verdicts.items()} == {
        "made": "passed",
        "small": "passed",
        "large": "error",
        "passes": "passed",
        "fails": "error",
    }
    assert "data/large.bin was not kept" in verdicts["large"]["feedback"]
    assert "a workspace is larger than workspace.max_size" in done.err
    assert "1 file (200,000 bytes) was left out" in lab.do("show", run, "a").out

    lab.spec["workspace"] = {"ignore": ["node_modules"]}
    done = lab.eval()
    (output,) = kept(done.run)
    assert "files_partial" not in output and "data/large.bin" in output["files"]


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        ("node_modules/a/b.js", True),
        ("deep/node_modules/b.js", True),
        ("app.log", True),
        ("deep/app.log", True),
        ("build/cache/x", True),
        ("other/build/cache/x", False),
        ("src/node_modules.py", False),
        ("top.txt", True),
        ("deep/top.txt", False),
    ],
)
def test_ignored_names_are_at_any_depth_and_ignored_paths_at_the_top(path: str, ignored: bool) -> None:
    assert (path in Ignored(["node_modules/", "*.log", "build/cache", "/top.txt"])) == ignored


def test_ignored_files_are_gone_when_a_workspace_is_restored_but_for_initial_ones(tmp_path: Path) -> None:
    blobs, ignored = Blobs(tmp_path / "files"), Ignored(["cache"])
    start = {"cache/first": blobs.keep(b"1"), "plain": blobs.keep(b"2")}
    workspace = Workspace(blobs, start, tmp_path / "work", ignored, 1 << 20)
    workspace.begin()
    (tmp_path / "work" / "cache" / "second").write_text("3")
    files = workspace.keep()
    assert set(files) == {"plain"} and not workspace.changed
    workspace.go_back_to(files)
    names = {path.relative_to(tmp_path / "work").as_posix() for path in (tmp_path / "work").rglob("*")}
    assert names == {"plain", "cache", "cache/first"}


def test_a_grader_of_ignored_files_is_refused_or_an_error(lab: Lab) -> None:
    shell(lab, "echo done > done.txt")
    lab.rows = [{"id": "a", "question": "x", "path": "cache/out.txt"}]
    lab.spec["workspace"] = {"ignore": ["cache"]}
    lab.spec["graders"].append({"type": "file", "name": "cached", "must_not_exist": ["cache/out.txt"]})
    assert "cache/out.txt is not kept, because workspace.ignore leaves it out" in lab.eval(check=2).err
    lab.spec["graders"][-1]["must_not_exist"] = ["{{ path }}"]
    lab.eval(check=3)
    verdicts = {grade["grader"]: grade["status"] for grade in kept(run_dir(lab.folder), "grades")}
    assert verdicts == {"made": "passed", "cached": "error"}


def test_large_files_are_kept_and_restored_a_piece_at_a_time(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "work", Blobs(tmp_path / "files")
    folder.mkdir()
    size = 32 << 20
    with (folder / "large").open("wb") as file:
        file.truncate(size)
    tracemalloc.start()
    try:
        files = Snapshots(folder, blobs, Ignored([]), 1 << 30).take()
        store.restore(files, blobs, tmp_path / "copy")
        store.restore(files, blobs, tmp_path / "copy")
        assert tracemalloc.get_traced_memory()[1] < size / 4
    finally:
        tracemalloc.stop()
    assert (tmp_path / "copy" / "large").stat().st_size == size


def test_unchanged_files_are_read_once_unless_their_times_may_be_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, blobs, read = tmp_path / "work", Blobs(tmp_path / "files"), list[str]()
    folder.mkdir()
    (folder / "a").write_text("a")
    (folder / "b").write_text("b")
    keep = Blobs.keep_file
    monkeypatch.setattr(Blobs, "keep_file", lambda blobs, path: read.append(path.name) or keep(blobs, path))
    snapshots = Snapshots(folder, blobs, Ignored([]), 1 << 20)
    snapshots.take()
    assert snapshots.take(trust_times=True) and read == ["a", "b"] * 2  # written only just now
    monkeypatch.setattr(store, "_SETTLED", -1.0)  # as if a while had passed
    snapshots.take()
    read.clear()
    (folder / "b").write_text("c")
    files = snapshots.take(trust_times=True)
    assert read == ["b"] and blobs.read(files["b"]) == b"c" and blobs.read(files["a"]) == b"a"
    read.clear()
    assert snapshots.take() == files and read == ["a", "b"]  # the end of a turn trusts no times
