"""Tool graders see every call of a turn once, in order, and report turns whose calls are unknown."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from holdfast.store.records import ToolCall
from holdfast.targets.trace import Trace, as_listed, read_calls
from tests.support.breaking import kept
from tests.support.lab import Lab
from tests.support.running import Server, module_server, run_dir
from tests.support.specs import command, grade

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

provider = module_server(tool_calls=2)
"""A model that calls two tools before its answer, if it is offered tools."""

GRADERS = [
    {"type": "tool_calls", "name": "used", "min_calls": 1},
    {"type": "behavior", "name": "none", "max_tool_calls": 0},
    {"type": "tool_constraint", "name": "forbidden", "reject_tools": [{"tool": "calc"}]},
    {"type": "action_sequence", "name": "order", "expected_actions": ["calc"], "matching_mode": "in_order_match"},
    {"type": "skill_invocation", "name": "skill", "forbidden_skills": ["calc"]},
    {"type": "code", "name": "code", "assertions": ["len(tool_calls) < 9"]},
]


@pytest.fixture
def lab(tmp_path: Path, provider: Server) -> Iterator[Lab]:
    provider.reset()
    provider.control(tool_calls=2, calls=[])
    created = Lab(tmp_path, provider, rows=[{"id": "a", "question": "tea", "expected": "x"}])
    created.spec["graders"] = GRADERS
    yield created
    provider.control(tool_calls=2, calls=[])


def agent(lab: Lab, source: str, **keys: Any) -> None:
    (lab.folder / "agent.py").write_text(CLIENT + source)
    lab.spec["target"] = {"python": "agent.py:reply", "base_url": lab.provider.base_url, **keys}


def scores(run: Path) -> dict[str, float | None]:
    return {grade["grader"]: grade["score"] for grade in kept(run, "grades")}


CLIENT = '''
import json, urllib.request

OFFERED = [{"type": "function", "function": {"name": "calc", "parameters": {
    "type": "object", "properties": {"sum": {"type": "string"}}, "required": ["sum"]}}}]

def calc(sum):
    return "= " + sum

def ask(base, messages, tools=True, path="/chat/completions", **more):
    body = {"model": "m", "messages": messages, **({"tools": OFFERED} if tools else {}), **more}
    request = urllib.request.Request(base + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        text = response.read().decode()
    return text if more.get("stream") else json.loads(text)["choices"][0]["message"]

def loop(base, prompt):
    """An agent of its own: asks and calls until there is an answer; the whole history."""
    messages = [{"role": "user", "content": prompt}]
    while True:
        messages.append(ask(base, messages))
        if not messages[-1].get("tool_calls"):
            return messages
        for call in messages[-1]["tool_calls"]:
            said = calc(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
'''

AGENTS = """
from holdfast import Reply

def reply(prompt, context):
    return globals()[context.sample_id](prompt, context)

def adds_a_title(prompt, context):
    said = loop(context.base_url, prompt)[-1]['content']
    ask(context.base_url, [{'role': 'user', 'content': 'a title'}], tools=False)
    return said

def asks_a_subagent(prompt, context):
    found = loop(context.base_url, prompt)[-1]['content']
    answer = ask(context.base_url, [{'role': 'user', 'content': found}], tools=False)
    return answer['content']

def compacts_its_history(prompt, context):
    history = loop(context.base_url, prompt)
    short = [{'role': 'user', 'content': f'{prompt}, so far: {history[-1]["content"]}'}]
    return ask(context.base_url, short, tools=False)['content']

def asks_and_calls_by_context(prompt, context):
    messages = [{'role': 'user', 'content': prompt}]
    while True:
        said = context.model(messages, model='m', tools=OFFERED).messages[-1]
        messages.append(said)
        if not said.get('tool_calls'):
            return said['content']
        for call in said['tool_calls']:
            found = context.tool(calc, json.loads(call['function']['arguments']))
            messages.append({'role': 'tool', 'tool_call_id': call['id'], 'content': found})

def only_calls(prompt, context):
    return context.tool(calc, {'sum': 'tea 0'}) + context.tool(calc, {'sum': 'tea 1'})

def fails(prompt, context):
    def calc(sum):
        raise ValueError(sum)
    for number in range(2):
        try:
            context.tool(calc, {'sum': f'tea {number}'})
        except ValueError:
            pass
    return 'no use'

def returns_messages(prompt, context):
    return Reply(text='done', messages=loop(context.base_url, prompt)[1:])
"""
CALLED = [{"turn": 1, "name": "calc", "arguments": {"sum": f"tea {n}"}, "result": f"= tea {n}"} for n in (0, 1)]


def test_each_call_is_seen_once_and_in_order_whatever_the_agent_does_after_it(lab: Lab) -> None:
    agent(lab, AGENTS)
    names = re.findall(r"^def (?!reply)(\w+)", AGENTS, re.MULTILINE)
    lab.rows = [{"id": name, "question": "tea", "expected": "x"} for name in names]
    run = lab.eval().run
    outputs = {output["sample"]: output for output in kept(run)}
    for name in names:
        listed = as_listed(read_calls(outputs[name]["messages"]), 1)
        calls = outputs[name].get("calls") or msgspec.to_builtins(listed)
        assert [{**call, "result": call.get("result", f"= tea {at}")} for at, call in enumerate(calls)] == CALLED, name
        assert name == "fails" or all("result" in call for call in calls)
        graded = {grade["grader"]: grade["score"] for grade in kept(run, "grades") if grade["sample"] == name}
        assert graded == {"used": 1, "none": 0, "forbidden": 0, "order": 2 / 3, "skill": 1, "code": 1}, name
    in_messages = {name for name in names if "calls" not in outputs[name]}
    assert in_messages == {"asks_and_calls_by_context", "returns_messages"}


def test_a_call_that_ends_the_agent_is_seen_streamed_or_not(lab: Lab, provider: Server) -> None:
    submit = [{"id": "s", "type": "function", "function": {"name": "calc", "arguments": '{"sum": "last"}'}}]
    provider.control(tool_calls=0, calls=submit)
    for stream in (False, True):
        agent(
            lab,
            "def reply(prompt, context):\n"
            f"    ask(context.base_url, [{{'role': 'user', 'content': prompt}}], stream={stream})\n"
            "    return 'submitted'\n",
        )
        done = lab.eval()
        assert kept(done.run)[0]["calls"] == [{"turn": 1, "name": "calc", "arguments": {"sum": "last"}}]
        assert scores(done.run)["used"] == 1 and scores(done.run)["forbidden"] == 0


TURNS = (
    "def reply(prompt, context):\n"
    "    if context.turn == 2:\n"
    "        return 'nothing to do'\n"
    "    context.tool(calc, {'sum': prompt})\n"
    "    return loop(context.base_url, prompt)[-1]['content']\n"
)


@pytest.mark.faults
def test_a_killed_conversation_has_the_calls_of_an_uninterrupted_one(lab: Lab, monkeypatch: Any, capsys: Any) -> None:
    agent(lab, TURNS)
    lab.spec |= {
        "follow_ups": ["more", "tea"],
        "checkpoints": [{"after_turn": 2, "graders": [{"type": "tool_calls", "name": "two", "max_calls": 3}]}],
    }
    assert lab.many_lives() >= 5
    run = run_dir(lab.folder)
    (output,) = kept(run)
    first = ["tea", "tea 0", "tea 1"]
    called = [(call["turn"], call["arguments"]["sum"]) for call in output["calls"]]
    assert called == [(turn, text) for turn in (1, 3) for text in first]
    assert [call["result"] for call in output["calls"]] == ["= tea", "= tea 0", "= tea 1"] * 2
    assert scores(run)["two"] == 1

    for kind in ("html", "waza"):
        assert command(monkeypatch, capsys, run, "export", run, "--to", kind).code == 0
    assert (run / "export" / "html" / "report.html").read_text().count("all tool calls") == 2
    (results,) = (run / "export" / "waza").glob("*.json")
    digest = json.loads(results.read_text())["tasks"][0]["runs"][0]["session_digest"]
    assert digest["tool_call_count"] == 6 and digest["tool_calls"][1] == {"name": "calc", "arguments": {"sum": "tea 0"}}


NOT_SEEN: dict[str, Any] = {
    "a function that only returns a text": {"python": "agent.py:plain"},
    "a program without the proxy": {"command": [sys.executable, "-c", "print('done')"], "proxy": False},
    "a program that never comes to the proxy": {"command": [sys.executable, "-c", "print('done')"]},
    "an HTTP workflow": {"http": "", "request": {"input_message": "{{ prompt }}"}, "response": "value"},
}


@pytest.mark.parametrize("kind", NOT_SEEN)
def test_graders_of_unknown_calls_are_reported_as_checking_nothing(
    lab: Lab, kind: str, monkeypatch: Any, capsys: Any
) -> None:
    agent(
        lab,
        "def plain(prompt):\n    return 'done'\n",
    )
    target = dict(NOT_SEEN[kind])
    if "http" in target:
        target["http"] = f"{lab.provider.base_url.removesuffix('/v1')}/generate"
    lab.spec["target"] = {**({} if "http" in target else {"base_url": lab.provider.base_url}), **target}
    lab.spec["graders"] = [*GRADERS, {"type": "behavior", "name": "quick", "max_duration_ms": 1e9}]
    lab.write()
    done = command(monkeypatch, capsys, lab.folder, "eval", "e.yaml")
    run = run_dir(lab.folder)
    assert kept(run)[0]["calls"] == [{"turn": 1, "name": None}]
    grades = {grade["grader"]: grade for grade in kept(run, "grades")}
    assert grades.pop("quick")["status"] == "passed"
    assert {grade["status"] for grade in grades.values()} == {"skipped"}
    assert "does not report its tool calls" in grades["none"]["feedback"]
    assert "`used`, `none`" in done.out + done.err and "checked nothing" in done.out + done.err


def test_targets_that_report_calls_are_judged_when_they_made_no_calls(lab: Lab) -> None:
    agent(lab, "def reply(prompt, context):\n    return 'without a tool'\n")
    for target in (lab.spec["target"], {"model": "m", "base_url": lab.provider.base_url}):
        lab.spec["target"] = target
        done = lab.eval()
        assert scores(done.run) == {"used": 0, "none": 1, "forbidden": 1, "order": 0, "skill": 1, "code": 1}
        assert "calls" not in kept(done.run)[0]


def test_graders_read_the_listed_calls_instead_of_the_messages(tmp_path: Path) -> None:
    calls = [ToolCall(1, "calc", {"sum": 1}), ToolCall(1, "calc", "no JSON")]
    block = {"type": "tool_calls", "min_calls": 2, "forbidden_tools": ["other"]}
    assert grade(tmp_path, block, "done", fields={"calls": calls}).score == 1
    assert grade(tmp_path, block, "done").score == 0.5


# What passes by


def chat(*calls: tuple[str, str, str], content: Any = None) -> dict[str, Any]:
    asked = [{"id": i, "function": {"name": name, "arguments": arguments}} for i, name, arguments in calls]
    return {"role": "assistant", "content": content, "tool_calls": asked}


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def seen(trace: Trace) -> list[tuple[str | None, Any, Any]]:
    return [
        (call.name, call.arguments, call.result)
        for call in as_listed(trace.calls({step: step for step in range(9)}), 1)
    ]


USER = {"role": "user", "content": "go"}


def test_calls_in_examples_and_earlier_turns_do_not_count_for_this_turn() -> None:
    trace = Trace()
    history = [chat(("1", "f", "{}")), result("1", "old"), USER]
    trace.request(history)
    trace.response(0, "a", [chat(("1", "f", "{}"))])  # some servers number each answer's calls anew
    trace.request([*history, chat(("1", "f", "{}")), result("1", "new")])
    assert seen(trace) == [("f", {}, "new")]
    messages, complete = trace.transcript("done")
    assert complete and [message.get("content") for message in messages] == [None, "new", "done"]


def test_calls_repeated_with_other_ids_and_spaces_are_the_same_calls() -> None:
    trace = Trace()
    trace.response(0, "a", [chat(("1", "f", '{"a": 1}'), ("2", "f", '{"a": 1}'))])
    again = [USER, chat(("x", "f", '{"a":1}'), ("y", "f", '{"a":1}')), result("x", "one"), result("y", "two")]
    for _ in range(2):
        trace.request(again)
    assert seen(trace) == [("f", {"a": 1}, "one"), ("f", {"a": 1}, "two")]


def test_a_client_that_asks_the_same_twice_does_not_call_twice_but_a_poll_does() -> None:
    trace = Trace()
    for step in (0, 1):
        trace.response(step, "a", [chat(("1", "poll", "{}"))])
    assert len(seen(trace)) == 1
    trace.request([USER, chat(("1", "poll", "{}")), result("1", "wait")])
    trace.response(2, "b", [chat(("1", "poll", "{}"))])
    trace.request(
        [
            USER,
            *[chat(("1", "poll", "{}")), result("1", "wait")],
            chat(("1", "poll", "{}")),
            result("1", "ok"),
        ]
    )
    assert seen(trace) == [("poll", {}, "wait"), ("poll", {}, "ok")]


def test_a_call_written_by_the_agent_counts_after_the_last_user_message() -> None:
    trace = Trace()
    trace.request([USER, chat(("own", "look", "{}")), result("own", "seen")])
    assert seen(trace) == [("look", {}, "seen")]


def test_calls_keep_the_recorded_order_whichever_returns_first() -> None:
    trace = Trace()
    trace.response(1, "b", [chat(("2", "second", "{}"))])
    trace.response(0, "a", [chat(("1", "first", "{}"))])
    assert [name for name, _, _ in seen(trace)] == ["first", "second"]


def test_results_of_calls_with_one_id_go_to_the_call_before_them() -> None:
    messages = [chat(("1", "f", "{}")), result("1", "a"), chat(("1", "g", "[4]")), result("1", "b")]
    assert [(call.name, call.arguments, call.result) for call in read_calls(messages)] == [
        ("f", {}, "a"),
        ("g", "[4]", "b"),
    ]
