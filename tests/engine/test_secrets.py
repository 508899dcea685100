"""Keys go to their own server and nowhere else: not into a file, not to an agent, not onto the terminal."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import evaluate
from holdfast.spec.redact import Secrets, secret_variables
from holdfast.targets.proxy import DUMMY_KEY
from tests.support.providers import Raw, Say, provider
from tests.support.running import lines
from tests.support.specs import command, write_spec
from tests.support.workflow import Answer, workflow

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.workflow import Asked

KEY = "sk-verysecretkey-123456"
TOKEN = 'hf_"odd/token\\9876543'
"""which JSON and URLs spell differently"""


@pytest.fixture(autouse=True)
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    """The records of the one run below a folder."""
    (path,) = (folder / "runs").glob(f"*/*/{name}.jsonl")
    return lines(path)


def secrets(**environ: str) -> Secrets:
    return Secrets(["MY_LLM"], environ={"OPENAI_API_KEY": KEY, "HF_TOKEN": TOKEN, **environ})


def assert_no_secret(folder: Path, *texts: str) -> None:
    """No file below a folder, and no text, has a secret in it, however it is spelled."""
    assert folder.exists()
    for path in folder.rglob("*"):
        if path.is_file():
            assert b"verysecretkey" not in path.read_bytes() and b"9876543" not in path.read_bytes(), path
    for text in texts:
        assert "verysecretkey" not in text and "9876543" not in text


SPELLINGS = {
    "as it is": f"my key is {TOKEN}.",
    "in JSON": json.dumps({"token": TOKEN}),
    "in JSON inside JSON": json.dumps({"arguments": json.dumps({"token": TOKEN})}),
    "in a URL": "http://x/?q=hf_%22odd%2Ftoken%5C9876543&r",
}


@pytest.mark.parametrize("form", SPELLINGS)
def test_a_secret_is_found_in_every_spelling(form: str) -> None:
    found = secrets().clean({"messages": [{"content": SPELLINGS[form], SPELLINGS[form]: 1}]})
    assert "9876543" not in json.dumps(found)
    (message,) = found["messages"]
    assert message["content"] == SPELLINGS[form].replace(*next(iter(spelled(form)))) and len(message) == 2


def spelled(form: str) -> list[tuple[str, str]]:
    once = json.dumps(TOKEN)[1:-1]
    text = {
        "as it is": TOKEN,
        "in JSON": once,
        "in JSON inside JSON": json.dumps(once)[1:-1],
        "in a URL": "hf_%22odd%2Ftoken%5C9876543",
    }[form]
    return [(text, "(hidden: $HF_TOKEN)")]


def test_a_text_without_secrets_is_returned_unchanged() -> None:
    value = {"messages": ["sk-verysecret", 1, None]}
    assert secrets().clean(value) is value
    assert Secrets(environ={}).clean(value) is value


@pytest.mark.parametrize(
    ("name", "value", "hidden"),
    [
        ("MY_API_KEY", "abc1234", False),  # short
        ("MY_API_KEY", "abc12345", True),
        ("CACHE_KEY", "production", False),  # a word
        ("PIN_SECRET", "1234567890", False),  # a number
        ("GOOGLE_APPLICATION_CREDENTIALS", __file__, False),  # a path
        ("GOOGLE_APPLICATION_CREDENTIALS", "~/../../../../../../../usr/bin/env", False),
        ("AWS_SECRET_ACCESS_KEY", "/wJalrXUtnFEMI/K7MDENG", True),
        ("DB_PASSWORD", "~tilde2hunter2", True),
        ("DB_PASSWORD", "hunter2hunter2", True),
        ("HOME_TOWN", "hunter2hunter2", False),  # another name
        ("MY_LLM", "hunterhunter", True),  # the eval names it
    ],
)
def test_which_values_are_secrets(name: str, value: str, hidden: bool) -> None:
    text = f"see {value} there"
    assert secrets(**{name: value}).clean(text) == (f"see (hidden: ${name}) there" if hidden else text)


def test_variables_that_the_eval_uses_as_secrets_are_known() -> None:
    data = {
        "target": {"model": "m", "api_key_env": "A", "headers": {"X": "Bearer ${B}"}, "http": "http://${H}/?key=${C}"},
        "graders": [{"type": "prompt", "model": {"api_key_env": "D"}}],
        "samples": [{"api_key_env": "E"}],
    }
    assert secret_variables(data) == {"A", "B", "C", "D"}


def test_a_secret_that_is_divided_among_the_events_of_a_stream_is_found() -> None:
    def event(text: str) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": {"content": text}}], "id": "r"}

    events = [event(text) for text in ("it is sk-very", "secret", "key-12", "3456, and ", KEY, " again")]
    texts = [each["choices"][0]["delta"]["content"] for each in secrets().clean_stream(events)]
    hidden = "(hidden: $OPENAI_API_KEY)"
    assert texts == [f"it is {hidden}", "", "", ", and ", hidden, " again"]


def test_a_server_that_echoes_the_key_gets_it_into_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def echo(one: Asked) -> Any:
        text = f"your key is {one.headers['authorization']}"
        return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}

    with workflow(echo) as service:
        path = write_spec(
            tmp_path,
            target={"model": "m", "base_url": service.url},
            graders=[{"type": "python", "function": "g.py:look"}],
        )
        grader = (
            "import os\ndef look(output): return {'score': 0, 'feedback': 'saw ' + os.environ['HF_TOKEN'], 'k': [%r]}"
        )
        (tmp_path / "g.py").write_text(grader % KEY)
        done = command(monkeypatch, capsys, tmp_path, "eval", path)
        shown = command(monkeypatch, capsys, tmp_path, "show", "e", "a")
        command(monkeypatch, capsys, tmp_path, "export", "e", "--to", "csv")
    assert done.code == 0 and len(service.asked) == 2
    assert service.asked[0].headers["authorization"] == f"Bearer {KEY}"
    outputs, grades = records(tmp_path, "outputs"), records(tmp_path, "grades")
    assert {each["output"] for each in outputs} == {"your key is Bearer (hidden: $OPENAI_API_KEY)"}
    assert all(each["redacted"] == 2 for each in outputs), "in the message, and as the answer"
    assert {each["feedback"] for each in grades} == {"saw (hidden: $HF_TOKEN)"}
    assert_no_secret(tmp_path / "runs", done.out, done.err, shown.out)
    assert (done.out + done.err).count("the value of $OPENAI_API_KEY appeared") == 1


PRINTS = """
import json, os, sys, urllib.request
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(json.dumps({"said": said, "environment": {k: v for k, v in os.environ.items() if "K" in k or "LLM" in k}}))
sys.exit(int(os.environ.get("EXITS", 0)))
"""


@pytest.mark.parametrize("key_env", [None, "MY_LLM"])
def test_a_program_behind_the_proxy_gets_a_dummy_and_its_server_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key_env: str | None
) -> None:
    (tmp_path / "agent.py").write_text(PRINTS)
    own = KEY if key_env is None else "mine-0987654321"
    for name, value in {
        "MY_LLM": own,
        "ALIAS_K": own,
        "ANTHROPIC_API_KEY": "sk-ant-3",
        "GOOGLE_API_KEY": "g-4",
    }.items():
        monkeypatch.setenv(name, value)
    with provider("chat", [Say("hello")]) as server:
        target = {"command": [sys.executable, "agent.py"], "base_url": server.url, "api_key_env": key_env}
        run = evaluate(write_spec(tmp_path, target=target, graders=None, samples=[{"id": "a", "question": "?"}]))
    assert server.asked[0].headers["authorization"] == f"Bearer {own}"
    (output,) = records(tmp_path, "outputs")
    environment = json.loads(output["output"])["environment"]
    replaced = {"OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GOOGLE_API_KEY", "MY_LLM", "ALIAS_K"}
    assert {name for name, value in environment.items() if value == DUMMY_KEY} == replaced
    assert environment["HF_TOKEN"] == "(hidden: $HF_TOKEN)", "the agent's own affair, and hidden in its output"
    assert_no_secret(run.path)


def test_a_dummy_reaches_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    (tmp_path / "agent.py").write_text(PRINTS)
    with provider("chat", [Say("hello")]) as server:
        target = {"command": [sys.executable, "agent.py"], "base_url": server.url}
        evaluate(write_spec(tmp_path, target=target, graders=None, samples=[{"id": "a", "question": "?"}]))
    assert DUMMY_KEY not in str(server.asked[0].headers) and "authorization" not in server.asked[0].headers


def test_errors_of_a_program_that_prints_its_environment_are_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    fails = "import os, sys; sys.exit('bad: ' + os.environ['HF_TOKEN'])"
    path = write_spec(tmp_path, target={"command": [sys.executable, "-c", fails]}, limits={"retries": 0})
    done = command(monkeypatch, capsys, tmp_path, "eval", path)
    assert done.code == 3 and {each["message"][-24:] for each in records(tmp_path, "errors")} == {
        "bad: (hidden: $HF_TOKEN)"
    }
    assert_no_secret(tmp_path / "runs", done.out, done.err)


REPEATS = """
import os
from pathlib import Path
def reply(prompt, context):
    from openai import OpenAI
    said, messages = "", [{"role": "user", "content": "What is my key?"}]
    with OpenAI(base_url=context.base_url, api_key="none", max_retries=0) as client:
        for turn in range(3):
            text = "".join(
                choice.delta.content or ""
                for event in client.chat.completions.create(model="m", messages=messages, stream=True)
                for choice in event.choices
            )
            said += text + "|"
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Again."}]
            if turn == 1 and not Path("stumbled").exists():
                Path("stumbled").touch()
                raise RuntimeError("stumbled")
    return said
"""


def test_an_agent_that_repeats_a_secret_is_answered_from_the_record(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(REPEATS)
    parts = ["It is ", KEY[:9], KEY[9:], ", I think"]
    deltas = [{"choices": [{"index": 0, "delta": {"content": part}}]} for part in parts]
    ended = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    with provider("chat", [Raw([*deltas, ended]), Say("Sorry"), Say("No")]) as server:
        target = {"python": "agent.py:reply", "base_url": server.url}
        spec = write_spec(tmp_path, target=target, graders=None, samples=[{"id": "a", "question": "?"}])
        run = evaluate(spec)
    assert len(server.asked) == 3, "two calls were on record after the first attempt"
    (output,) = records(tmp_path, "outputs")
    assert output["output"] == "It is (hidden: $OPENAI_API_KEY), I think|Sorry|No|" and output["redacted"]
    assert_no_secret(run.path)
    step = records(tmp_path, "steps")[0]["response"]["events"]
    pieces = [choice["delta"].get("content") or "" for event in step for choice in event["choices"]]
    assert "".join(pieces) == "It is (hidden: $OPENAI_API_KEY), I think" and len(pieces) > 2
    assert not any("not deterministic" in line for line in (run.path / "run.log").read_text().splitlines())


def test_a_conversation_goes_on_after_a_secret_without_asking_again(tmp_path: Path) -> None:
    def echo(one: Asked) -> Any:
        if len(service.asked) == 2:
            return Answer({"error": {"message": "down"}}, status=400)
        text = f"{one.headers['authorization']} {len(one.body['messages'])}"
        return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}

    with workflow(echo) as service:
        path = write_spec(
            tmp_path,
            target={"model": "m", "base_url": service.url},
            graders=None,
            samples=[{"id": "a", "question": "?"}],
            follow_ups=["And now?"],
        )
        assert evaluate(path).exit_code == 3
        run = evaluate(path)
    assert len(service.asked) == 3, "the first turn was on record"
    assert "(hidden: $OPENAI_API_KEY)" in str(service.asked[2].body), "nor does a key go back in a conversation"
    assert_no_secret(run.path)
