"""Conversations of several turns: what is said, who says it, and how they go on after a crash."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.conversation.simulated_user import Malformed, read_decision
from holdfast.targets.types import Reply
from tests.support.breaking import kept
from tests.support.judges import judges
from tests.support.lab import Lab
from tests.support.running import Server, lines, module_server, server, start, wait_for
from tests.support.specs import command, write_spec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS = [
    {"id": "a", "question": "hello", "turns": ["hello", "and then?", "thanks"], "expected": "thanks"},
    {"id": "b", "question": "good day", "turns": ["good day", "bye"], "expected": "bye"},
]


provider = module_server()


@pytest.fixture(scope="module")
def user() -> Iterator[Server]:
    """The server of the model that plays the user."""
    with server(answer='{"action": "stop"}') as running:
        yield running


@pytest.fixture
def lab(tmp_path: Path, provider: Server) -> Lab:
    return Lab(tmp_path, provider, rows=[dict(row) for row in ROWS])


def contents_of(run: Path) -> dict[str, list[str]]:
    """Return the contents of all messages by sample, and check that user and target take turns."""
    contents = {}
    for output in kept(run):
        spoken = [message for message in output["messages"] if message["role"] != "system"]
        assert [message["role"] for message in spoken] == ["user", "assistant"] * output["turns"]
        contents[output["sample"]] = [message["content"] for message in spoken]
    return contents


def echoed(*prompts: str) -> list[str]:
    """A conversation with a target that says everything again."""
    return [prompt for prompt in prompts for _ in range(2)]


def results(run: Path) -> dict[str, dict[str, Any]]:
    return {entry["sample"]: entry for entry in json.loads((run / "results.json").read_text())["trials"]}


# Follow-ups


def test_follow_ups_are_templates_over_the_row_and_are_sent_in_order(lab: Lab) -> None:
    lab.spec |= {"system": "You serve {{ id }}.", "follow_ups": ["more, {{ id }}", "{{ turns[-1] }}"]}
    done = lab.eval()
    assert done.asked == 6
    assert contents_of(done.run) == {
        "a": echoed("hello", "more, a", "thanks"),
        "b": echoed("good day", "more, b", "bye"),
    }
    for output in kept(done.run):
        assert output["turns"] == 3 and output["output"] == output["messages"][-1]["content"]
        assert output["messages"][0] == {"role": "system", "content": f"You serve {output['sample']}."}
        assert [mark["end"] for mark in output["marks"]] == [3, 5, 7]


@pytest.mark.parametrize("follow_ups", ["turns[1:]", "{{ turns[1:] }}"])
def test_rows_may_contain_follow_ups(lab: Lab, follow_ups: str) -> None:
    lab.spec["follow_ups"] = follow_ups
    done = lab.eval()
    assert contents_of(done.run) == {"a": echoed("hello", "and then?", "thanks"), "b": echoed("good day", "bye")}
    assert done.asked == 5


def test_follow_ups_of_a_row_are_texts_and_never_templates(lab: Lab) -> None:
    lab.rows = [{"id": "a", "question": "hello", "turns": ["", "{{ id }} {% raw"], "expected": "{{ id }} {% raw"}]
    lab.spec["follow_ups"] = "turns[1:]"
    done = lab.eval()
    assert contents_of(done.run) == {"a": echoed("hello", "{{ id }} {% raw")}
    assert results(done.run)["a"]["status"] == "passed"


def test_text_graders_see_the_last_reply_and_no_earlier_one(lab: Lab) -> None:
    lab.spec["follow_ups"] = "turns[1:]"
    lab.spec["graders"] = [
        {"type": "exact", "name": "last"},
        {"type": "text", "name": "first", "contains": ["hello"]},
    ]
    entries = results(lab.eval().run)
    assert entries["a"]["grades"]["last"]["status"] == "passed"
    assert entries["a"]["grades"]["first"]["status"] == "failed"


@pytest.mark.parametrize("wrong", ["one text", [1, 2], {"a": "b"}, None])
def test_invalid_follow_ups_of_a_row_are_an_error_of_its_trial_only(lab: Lab, wrong: Any) -> None:
    lab.rows = [{**ROWS[0], "more": wrong}, {**ROWS[1], "more": ["bye"]}]
    lab.spec["follow_ups"] = "more"
    done = lab.eval(check=3)
    assert contents_of(done.run) == {"b": echoed("good day", "bye")}
    assert done.asked == 2
    (error,) = lines(done.run / "errors.jsonl")
    assert (error["sample"], error["kind"], error["final"]) == ("a", "bad_request", True)
    assert "not a list of texts" in error["message"] and "data.jsonl:1" in error["message"]


# A simulated user

PLAYED = {"python": "user.py:user", "max_followups": 2}
DIRECTED = {"model": "m", "instructions": "be brief", "max_followups": 2}


def use_responder(lab: Lab, body: str, **keys: Any) -> None:
    (lab.folder / "user.py").write_text(f"def user(messages, sample, turn):\n    {body}\n")
    lab.spec["responder"] = {"python": "user.py:user", "max_followups": 3, **keys}


def test_a_function_plays_the_user_until_it_returns_none(lab: Lab) -> None:
    use_responder(lab, "return f\"{sample['id']}{turn}{len(messages)}\" if turn < 3 else None", max_followups=9)
    done = lab.eval()
    assert contents_of(done.run) == {"a": echoed("hello", "a12", "a24"), "b": echoed("good day", "b12", "b24")}
    assert done.asked == 6
    assert {step["kind"] for step in kept(done.run, "steps")} == {"turn", "responder"}


def test_a_simulated_user_replies_at_most_max_followups_times(lab: Lab) -> None:
    use_responder(lab, "return f'reply {turn}'", max_followups=2)
    assert contents_of(lab.eval().run)["a"] == echoed("hello", "reply 1", "reply 2")


def test_stop_when_ends_the_conversation_before_the_user_is_asked(lab: Lab) -> None:
    use_responder(lab, "return f'reply {turn}'", max_followups=9, stop_when="id == 'b' or output == 'reply 2'")
    assert contents_of(lab.eval().run) == {"a": echoed("hello", "reply 1", "reply 2"), "b": echoed("good day")}


def test_a_simulated_user_that_raises_is_asked_again(lab: Lab) -> None:
    use_responder(
        lab,
        "from pathlib import Path; p = Path(__file__).with_name(sample['id'])\n"
        "    if not p.exists():\n        p.touch()\n        raise RuntimeError('lost my words')\n"
        "    return None",
    )
    done = lab.eval()
    assert done.asked == 2  # the target's turns are not repeated for it
    assert contents_of(done.run) == {"a": echoed("hello"), "b": echoed("good day")}
    errors = lines(done.run / "errors.jsonl")
    assert Counter(error["sample"] for error in errors) == {"a": 1, "b": 1}
    assert all("the responder raised RuntimeError: lost my words" in error["message"] for error in errors)


def test_a_failing_simulated_user_leaves_the_trial_pending_and_its_turns_safe(lab: Lab) -> None:
    use_responder(
        lab,
        "from pathlib import Path\n"
        "    if sample['id'] == 'a' and not Path(__file__).with_name('mended').exists():\n        return 7\n"
        "    return None",
    )
    done = lab.eval(check=3)
    assert done.asked == 2
    (error,) = lines(done.run / "errors.jsonl")
    assert (error["sample"], error["kind"]) == ("a", "agent") and "returned int, not a text or None" in error["message"]

    (lab.folder / "mended").touch()
    assert lab.eval().asked == 0
    assert contents_of(done.run) == {"a": echoed("hello"), "b": echoed("good day")}


def model_user(lab: Lab, user: Server, decision: dict[str, str] | str, **keys: Any) -> None:
    user.control(answer=decision if isinstance(decision, str) else json.dumps(decision))
    user.reset()
    lab.spec["responder"] = {
        "model": "user-model",
        "base_url": user.base_url,
        "instructions": "You are {{ id }}, in a hurry.",
        "max_followups": 2,
        **keys,
    }


def test_a_model_plays_the_user(lab: Lab, user: Server) -> None:
    model_user(lab, user, {"action": "reply", "message": "go on"})
    done = lab.eval()
    assert contents_of(done.run) == {"a": echoed("hello", "go on", "go on"), "b": echoed("good day", "go on", "go on")}
    assert done.asked == 6 and user.requests == 4  # nobody asks it after its last reply
    assert "[user]\nhello\n\n[assistant]\nhello" in user.stats()["asked"]
    usage = [output["usage"]["requests"] for output in kept(done.run)]
    assert usage == [5, 5]  # the user's requests cost too


def test_a_model_that_plays_the_user_sees_answers_and_not_the_steps_on_the_way(
    lab: Lab, provider: Server, user: Server
) -> None:
    model_user(lab, user, {"action": "reply", "message": "go on"})
    (lab.folder / "tools.py").write_text("def look(word: str):\n    return word.upper()\n")
    lab.spec["target"] |= {"tools": [{"python": "tools.py:look"}]}
    lab.rows = lab.rows[:1]
    with provider.controlled(tool_calls=2):
        lab.eval()
    first = "[user]\nhello\n\n[assistant]\nhello: HELLO 0; HELLO 1"
    second = f"{first}\n\n[user]\ngo on\n\n[assistant]\ngo on: GO ON 0; GO ON 1"
    assert list(user.stats()["asked"]) == [first, second]


STOPS = [
    *(
        'So be it. {"action": "stop", "reason": "done"}',
        '```json\n{"action": "stop"}\n```',
        "STOP",
        "DONE.",
        "**STOP**",
    ),
    *("[STOP]", "###STOP###", "Thank you, that is all.\nSTOP", "Bye! ###STOP###", "<think>reply?</think>STOP"),
]
REPLIES = [
    *((text, text) for text in ("My number is 4711.", "Please do not stop.", "Done.", "Use {braces}, or [brackets]")),
    *((f"{speaker} It is 4711.", "It is 4711.") for speaker in ("[user]\n", "User:", "<think>I should stop</think>")),
    ('Well: {"action": "reply", "message": "My number\nis 4711."}', "My number\nis 4711."),
    ('```json\n{"action": "reply", "message": "STOP"}\n```', "STOP"),
]
MALFORMED = [
    ("", "gave no decision: ''"),
    ('{"action": "reply", "message": "go', "gave no decision: '{"),
    ('{"message": "go on"}', "gave no decision: '{"),
    ('{"action": "reply", "message": " "}', "a reply needs a `message`"),
    ('{"action": "wait"}', "`action` is 'wait', not reply, stop or abstain"),
    ('{"action": "stop"} {"action": "reply", "message": "no"}', "gave several decisions"),
    ("<think>I could say", "gave no decision"),
]


@pytest.mark.parametrize(("text", "message"), [*((text, None) for text in STOPS), *REPLIES])
def test_a_plain_text_is_the_users_message_and_a_lone_stop_ends_the_conversation(
    text: str, message: str | None
) -> None:
    assert read_decision(Reply(text=text)) == message


@pytest.mark.parametrize(("text", "message"), MALFORMED)
def test_a_reply_that_is_not_a_decision_is_not_sent(text: str, message: str) -> None:
    with pytest.raises(Malformed, match=re.escape(message)):
        read_decision(Reply(text=text))


def test_a_model_that_plays_the_user_in_plain_text(lab: Lab, user: Server) -> None:
    model_user(lab, user, "My number is 4711.", max_followups=1)
    lab.rows = lab.rows[:1]
    assert contents_of(lab.eval().run) == {"a": echoed("hello", "My number is 4711.")} and user.requests == 1


def test_a_model_that_plays_the_user_may_stop(lab: Lab, user: Server) -> None:
    model_user(lab, user, "STOP")
    assert contents_of(lab.eval().run) == {"a": echoed("hello"), "b": echoed("good day")}


def test_a_malformed_decision_is_shown_to_the_model_once(lab: Lab) -> None:
    def answer(body: Any) -> str:
        return '{"action": "reply", "message": "go on"}' if len(body["messages"]) > 2 else '{"action": "rep'

    with judges(answer) as model:
        lab.spec["responder"] = {**DIRECTED, "max_followups": 1, "base_url": model.base_url}
        lab.rows = lab.rows[:1]
        done = lab.eval()
        assert contents_of(done.run) == {"a": echoed("hello", "go on")}
        first, second = model.bodies
        assert second["messages"][:2] == first["messages"]
        assert second["messages"][2] == {"role": "assistant", "content": '{"action": "rep'}
        assert "gave no decision" in second["messages"][3]["content"]
        assert '{"action": "stop", "reason"' in second["messages"][3]["content"]
        assert [output["usage"]["requests"] for output in kept(done.run)] == [4], "both were paid for"


def test_a_model_that_never_decides_is_asked_only_twice(lab: Lab) -> None:
    cut = {"message": {"role": "assistant", "content": "My number is"}, "finish_reason": "length"}
    with judges(lambda _: cut) as model:
        lab.spec["responder"] = {**DIRECTED, "base_url": model.base_url}
        lab.rows = lab.rows[:1]
        run = lab.eval(check=3).run
        assert len(model.bodies) == 2
        (error,) = lines(run / "errors.jsonl")
        assert "the simulated user's reply was cut off at its token limit" in error["message"]
        assert error["usage"]["requests"] == 2


@pytest.mark.parametrize(
    ("decision", "kind", "message"),
    [
        ({"action": "abstain", "reason": "not my part"}, "agent", "abstained: not my part"),
        ({"action": "reply", "message": " "}, "bad_reply", "a reply needs a `message`"),
    ],
)
def test_a_model_that_cannot_play_the_user_is_an_error_and_not_a_wrong_answer(
    lab: Lab, user: Server, decision: Any, kind: str, message: str
) -> None:
    model_user(lab, user, decision)
    lab.spec["limits"] = {"retries": 0}
    run = lab.eval(check=3).run
    assert kept(run) == []
    errors = lines(run / "errors.jsonl")
    assert {error["sample"] for error in errors} == {"a", "b"}
    assert all(error["kind"] == kind and message in error["message"] for error in errors)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"responder": PLAYED, "follow_ups": ["x"]}, "either follow_ups or a responder, not both"),
        ({"responder": PLAYED, "follow_ups": "turns[1:]"}, "either follow_ups or a responder, not both"),
        ({"responder": {"model": "m", "max_followups": 2}}, "needs instructions"),
        ({"responder": {"max_followups": 2}}, "needs instructions"),
        ({"responder": {**PLAYED, **DIRECTED}}, "not both"),
        ({"responder": {**DIRECTED, "max_followups": 0}}, "max_followups"),
        ({"responder": {"model": "m", "instructions": "be brief"}}, "max_followups"),
        ({"responder": {**DIRECTED, "stop_when": "output =="}}, "not a valid expression"),
        ({"follow_ups": "turns["}, "not a valid expression"),
        ({"follow_ups": ["{{ question"]}, "not a valid template"),
    ],
)
def test_an_impossible_conversation_is_rejected_when_the_file_is_read(
    keys: dict[str, Any], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    (tmp_path / "user.py").write_text("def user(messages):\n    return None\n")
    path = write_spec(tmp_path, **keys)
    ended = command(monkeypatch, capsys, tmp_path, "eval", path.name)
    assert ended.code == 2
    assert message in ended.err and "eval.yaml:" in ended.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({"prompt": "{{ messages }}"}, "a list"),
        ({"system": "Rules: {{ rules }}"}, "an object"),
        ({"follow_ups": ["and {{ messages[1:] }}?"]}, "a list"),
    ],
)
def test_lists_and_objects_are_not_sent_as_python_literals(
    keys: dict[str, Any], kind: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    rows = [
        {"id": "a", "messages": "as a text", "rules": "be kind", "expected": "x"},
        {"id": "b", "messages": [{"role": "user", "content": "hi"}], "rules": {"be": "kind"}, "expected": "x"},
    ]
    path = write_spec(tmp_path, samples=rows, **{"prompt": "hello", **keys})
    for option in ("--dry-run", "--fresh"):
        ended = command(monkeypatch, capsys, tmp_path, "eval", path.name, option)
        assert ended.code == 2 and f"cannot insert {kind} into text" in ended.err and "| tojson" in ended.err
        assert "eval.yaml:" in ended.err and not (tmp_path / "runs").exists()
    meant = {"prompt": "{{ rules | tojson }} {% for m in messages %}{{ m }}{% endfor %} {{ messages[0] }}"}
    lists = [{"id": "c", "messages": ["one", "two"], "rules": {"be": "kind"}, "expected": "x"}]
    path = write_spec(tmp_path, samples=lists, **meant)
    assert command(monkeypatch, capsys, tmp_path, "eval", path.name, "--dry-run").code == 0


# Going on in the middle


def dying_agent(lab: Lab, turn: int) -> None:
    """An agent that says in which life it speaks, and takes the whole process with it once, before its reply."""
    (lab.folder / "agent.py").write_text(
        "import os, signal\n"
        "from pathlib import Path\n"
        "died = Path(__file__).with_name('died')\n"
        "def reply(prompt, context):\n"
        f"    if context.turn == {turn} and not died.exists():\n"
        "        died.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    with died.with_name('calls.txt').open('a') as calls:\n"
        "        calls.write('call\\n')\n"
        "    return ('second' if died.exists() else 'first') + ' life: ' + prompt\n"
    )
    lab.spec["target"] = {"python": "agent.py:reply"}


@pytest.mark.faults
def test_an_agent_that_answers_differently_after_a_crash_still_finishes(lab: Lab) -> None:
    lab.rows = [{"id": "a", "question": "1", "expected": "second life: 4"}]
    lab.spec["follow_ups"] = ["2", "3", "4"]
    dying_agent(lab, turn=3)
    assert lab.eval(check=-9).asked == 2
    done = lab.eval()
    assert done.asked == 2
    assert contents_of(done.run)["a"][1::2] == ["first life: 1", "first life: 2", "second life: 3", "second life: 4"]
    assert results(done.run)["a"]["status"] == "passed"
    assert [step["turn"] for step in kept(done.run, "steps")] == [1, 2, 3, 4]


@pytest.mark.faults
def test_a_simulated_user_is_not_asked_again_after_a_crash(lab: Lab) -> None:
    lab.rows = [{"id": "a", "question": "1", "expected": "x"}]
    use_responder(
        lab,
        "from pathlib import Path\n"
        "    with Path(__file__).with_name('decisions.txt').open('a') as decisions:\n"
        "        decisions.write(f'{turn}\\n')\n"
        "    return f'reply {turn}' if turn < 4 else None",
        max_followups=9,
    )
    dying_agent(lab, turn=3)
    lab.eval(check=-9)
    done = lab.eval()
    assert (lab.folder / "decisions.txt").read_text().split() == ["1", "2", "3", "4"]
    assert contents_of(done.run)["a"][::2] == ["1", "reply 1", "reply 2", "reply 3"]


def test_a_conversation_given_up_halfway_continues_with_the_next_command(lab: Lab) -> None:
    lab.rows = [{"id": "a", "question": "1", "expected": "3"}]
    lab.spec |= {"follow_ups": ["2", "3"], "limits": {"retries": 0}}
    lab.use_agent(
        "from pathlib import Path\n"
        "def answer(prompt):\n"
        "    if prompt == '3' and not Path(__file__).with_name('mended').exists():\n"
        "        raise RuntimeError('tired')\n"
        "    return prompt\n"
    )
    first = lab.eval(check=3)
    assert first.asked == 3 and kept(first.run) == []
    assert [step["turn"] for step in kept(first.run, "steps")] == [1, 2]

    (lab.folder / "tools" / "mended").touch()
    second = lab.eval()
    assert second.run == first.run and second.asked == 1
    assert contents_of(second.run) == {"a": echoed("1", "2", "3")}
    assert kept(second.run)[0]["attempt"] == 2


# Budgets


def short_talks(lab: Lab, conversations: int) -> None:
    """Conversations of four turns, three tokens each."""
    lab.rows = [{"id": f"s{number}", "expected": "and 4"} for number in range(conversations)]
    lab.spec |= {"prompt": "{{ id }} 1", "follow_ups": ["and 2", "and 3", "and 4"], "limits": {"concurrency": 1}}


def kill_after(lab: Lab, provider: Server, steps: int) -> Path:
    """Kill the eval in the middle of the call after so many; the run it leaves."""
    lab.write()
    asked = provider.requests
    process = start("eval", lab.eval_file.name, cwd=lab.folder)
    wait_for(lambda: provider.requests - asked > steps, "the call in flight")
    process.kill()
    process.communicate()
    (run,) = lab.runs.glob("e/*/")
    return run


@pytest.mark.faults
def test_the_plan_counts_conversations_that_continue_halfway(tmp_path: Path) -> None:
    with server(latency=0.1) as slow:
        lab = Lab(tmp_path, slow)
        short_talks(lab, 4)
        kill_after(lab, slow, 2)
        assert "4 to run, 1 of them from the middle" in lab.do("eval", "e.yaml", "--dry-run").out


@pytest.mark.faults
def test_a_budget_counts_the_calls_of_an_unfinished_conversation_once(tmp_path: Path) -> None:
    with server(latency=0.1) as slow:
        lab = Lab(tmp_path, slow)
        short_talks(lab, 4)
        run = kill_after(lab, slow, 6)
        slow.control(latency=0)
        spent = 3 * len(kept(run, "steps"))
        assert len(kept(run)) == 1 and 12 < spent < 24, "killed in the middle of the second conversation"

        stopped = lab.eval("--token-budget", spent, check=3)
        assert stopped.asked == 0
        assert f"--token-budget {spent} ({spent} tokens used)" in stopped.out

        stopped = lab.eval("--token-budget", "36", check=3)
        assert stopped.asked == 12 - spent // 3
        assert "--token-budget 36 (36 tokens used)" in stopped.out
        assert {output["sample"] for output in kept(run)} == {"s0", "s1", "s2"}
        assert lab.eval().asked == 4
