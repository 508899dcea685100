"""Tools of model targets: how a Python function is described to a model, and how its calls are answered."""

from __future__ import annotations

import asyncio
import enum
import json
import re
import shutil
import sys
from typing import TYPE_CHECKING, Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import evaluate
from holdfast.dialects.chat import StreamedCalls
from holdfast.errors import ConfigError
from holdfast.targets.tools import ToolContext, function_tool, limit_text
from tests.support.breaking import kept
from tests.support.lab import Lab
from tests.support.running import ROOT, Server, module_server
from tests.support.specs import command, write_spec
from tests.support.workflow import workflow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.workflow import Asked

CONTEXT = ToolContext({"id": "a"}, 1, 2, None, "c")


provider = module_server(tool_calls=2)


@pytest.fixture
def lab(tmp_path: Path, provider: Server) -> Iterator[Lab]:
    provider.reset()
    yield Lab(tmp_path, provider, rows=[{"id": "a", "question": "tea", "expected": "x"}])
    provider.control(tool_calls=2)


def use(lab: Lab, source: str, *names: str, **keys: Any) -> None:
    (lab.folder / "tools.py").write_text(source)
    tools = [{"python": f"tools.py:{name}"} for name in names or ("tool",)]
    lab.spec["target"] = {"model": "gpt-4o-mini", "base_url": lab.provider.base_url, "tools": tools, **keys}


def results(run: Path) -> list[str]:
    return [message["content"] for message in kept(run)[0]["messages"] if message["role"] == "tool"]


def run_tool(function: Any, **arguments: Any) -> str:
    return asyncio.run(function_tool(function, "record", "here").run(arguments, CONTEXT))  # type: ignore[arg-type]


# What a model is told


class Unit(enum.Enum):
    C = "celsius"
    F = "fahrenheit"


def google(city: str, days: int = 3, unit: Literal["c", "f"] = "c", tags: list[str] | None = None) -> str:
    """Forecast the weather.

    As good as anybody can.

    Args:
        city (str): where,
            as precisely as you can
        days: how far
        tags: any of: sun, rain

    Returns:
        a text
    """
    return f"{city} {days} {unit} {tags}"


def sphinx(city: str, unit: Optional[Unit] = None) -> str:  # noqa: UP045 - as people write it
    """Forecast the weather.

    :param str city: where
    :param unit: of the thermometer
    :returns: a text
    """
    return f"{city} {unit}"


def test_a_google_docstring_and_the_signature_say_what_a_tool_takes() -> None:
    offer = function_tool(google, "record", "here").definition()
    assert offer["type"] == "function" and offer["function"]["name"] == "google"
    assert offer["function"]["description"] == "Forecast the weather.\n\nAs good as anybody can."
    schema = offer["function"]["parameters"]
    assert schema["type"] == "object" and schema["required"] == ["city"]
    city, days, unit, tags = (schema["properties"][name] for name in ("city", "days", "unit", "tags"))
    assert (city["type"], city["description"]) == ("string", "where, as precisely as you can")
    assert (days["type"], days["default"], days["description"]) == ("integer", 3, "how far")
    assert unit["enum"] == ["c", "f"] and "description" not in unit
    assert tags["anyOf"][0] == {"type": "array", "items": {"type": "string"}}
    assert tags["description"] == "any of: sun, rain"


def test_a_sphinx_docstring_describes_parameters() -> None:
    offer = function_tool(sphinx, "record", "here").definition()["function"]
    assert offer["description"] == "Forecast the weather."
    properties = offer["parameters"]["properties"]
    assert properties["city"]["description"] == "where"
    assert properties["unit"]["description"] == "of the thermometer"
    assert "celsius" in json.dumps(offer["parameters"])


def test_a_tool_without_types_or_docstring_takes_anything() -> None:
    def tool(anything: Any, more: int = 1) -> Any:
        return [anything, more]

    offer = function_tool(tool, "record", "here").definition()["function"]
    assert offer["description"] == "" and offer["parameters"]["required"] == ["anything"]
    assert run_tool(tool, anything={"deep": [1]}) == '[{"deep":[1]},1]'


def test_parameters_may_have_any_name() -> None:
    def tool(schema: str, json: int, _hidden: bool = False, model_config: str = "m") -> str:
        return f"{schema} {json} {_hidden} {model_config}"

    offer = function_tool(tool, "record", "here").definition()["function"]["parameters"]
    assert list(offer["properties"]) == ["schema", "json", "_hidden", "model_config"]
    assert run_tool(tool, schema="s", json=1, _hidden=True) == "s 1 True m"


def test_a_tool_without_parameters_and_one_with_only_a_context() -> None:
    def none() -> str:
        return "none"

    def own(context: ToolContext) -> str:
        return f"{context.sample['id']} {context.turn}"

    for function in (none, own):
        parameters = function_tool(function, "record", "here").parameters
        assert parameters == {"type": "object", "properties": {}}
    assert run_tool(none) == "none" and run_tool(own) == "a 2"


def test_functions_that_cannot_be_tools_are_refused() -> None:
    def positional(a: int, /) -> None: ...

    def starred(*several: int) -> None: ...

    def strange(a: ToolContext | asyncio.Event) -> None: ...

    for function in (positional, starred, strange):
        with pytest.raises(ConfigError, match="here: "):
            function_tool(function, "record", "here")


# What becomes of a call


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "city: Field required"),
        (
            {"city": "Rome", "days": "many"},
            "days: Input should be a valid integer, unable to parse string as an integer",
        ),
        ({"city": "Rome", "unit": "k"}, "unit: Input should be 'c' or 'f'"),
        ({"city": "Rome", "town": "Rome"}, "town: Extra inputs are not permitted"),
    ],
)
def test_wrong_arguments_are_reported_to_the_model(arguments: dict[str, Any], message: str) -> None:
    assert run_tool(google, **arguments) == f"Error: wrong arguments: {message}"


def test_arguments_are_converted_to_their_types() -> None:
    assert run_tool(sphinx, city="Rome", unit="celsius") == "Rome Unit.C"
    assert run_tool(google, city="Rome", days="5", tags=["a"]) == "Rome 5 c ['a']"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1}, '{"a":1}'),
        (None, ""),
        (1.5, "1.5"),
        (complex(1, 2), "(1+2j)"),
        ([{1}], "[[1]]"),
        ("half a letter \udcff", "half a letter ?"),
    ],
)
def test_results_are_handed_over_as_texts(value: Any, text: str) -> None:
    assert run_tool(lambda: value) == text


def test_a_model_calls_tools_until_it_answers(lab: Lab) -> None:
    use(
        lab,
        "def tool(word: str):\n    return word.upper()\n\n"
        "async def other(number: int, context):\n    return f\"{context.sample['id']} {context.turn} {number}\"\n",
        "tool",
        "other",
    )
    done = lab.eval()
    (output,) = kept(done.run)
    assert results(done.run) == ["TEA 0", "a 1 1"]
    assert output["output"] == "tea: TEA 0; a 1 1" and output["stop"] == "stop"
    assert [message["role"] for message in output["messages"]] == ["user", *["assistant", "tool"] * 2, "assistant"]
    for asked, answered in ((1, 2), (3, 4)):
        (call,) = output["messages"][asked]["tool_calls"]
        assert output["messages"][answered]["tool_call_id"] == call["id"]
        assert output["messages"][answered]["name"] == call["function"]["name"]
    assert output["usage"]["requests"] == 3 and output["usage"]["cost"] > 0


def test_the_traceback_of_a_tool_is_recorded_without_secrets_and_not_shown_to_the_model(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_API_KEY", "sk-very-secret-1")
    deep = "def deep(word):\n    raise ValueError(f'no {word}: sk-very-secret-1 \\udc80')\n"
    use(lab, f"{deep}def tool(word: str):\n    return deep(word)\n")
    lab.write()
    run = evaluate(lab.eval_file, runs_dir=lab.runs)
    assert results(run.path)[0] == "Error: tools.py:2: ValueError: no tea 0: (hidden: $SHOP_API_KEY) ?"
    steps = [step["response"] for step in kept(run.path, "steps") if step["kind"] == "tool"]
    assert [step["result"] for step in steps] == results(run.path)
    trace = steps[0]["traceback"]
    assert trace.startswith("Traceback (most recent call last)")
    assert trace.endswith("ValueError: no tea 0: (hidden: $SHOP_API_KEY) ?")
    assert 'tools.py", line 4, in tool' in trace and "return deep(word)" in trace
    assert "holdfast/functions" not in trace and "holdfast/targets" not in trace
    assert "Traceback" not in (run.path / "outputs.jsonl").read_text()
    assert not any("sk-very-secret" in path.read_text() for path in run.path.glob("*.json*"))


@given(st.text(max_size=2000), st.integers(256, 1500))
def test_a_limited_text_fits_and_says_what_is_left_out(text: str, most: int) -> None:
    limited, size = limit_text(text, most), len(text.encode())
    if size <= most:
        assert limited == text
        return
    assert len(limited.encode()) <= most
    parts = re.fullmatch(r"(.*)\n\[… ([\d,]+) of ([\d,]+) bytes left out …\]\n(.*)", limited, re.DOTALL)
    assert parts is not None
    start, left_out, whole, end = parts.groups()
    assert text.startswith(start) and text.endswith(end)
    assert int(whole.replace(",", "")) == size
    assert int(left_out.replace(",", "")) == size - len((start + end).encode())


@pytest.mark.parametrize("kind", ["python", "raised", "scripted", "mcp"])
def test_long_results_of_tools_are_cut_for_the_model_and_on_disk(kind: str, lab: Lab) -> None:
    size = 600_000
    raised = f"raise ValueError('x' * {size})" if kind == "raised" else f"return 'ab' * {size // 2}"
    use(lab, f"def tool():\n    {raised}\n")
    if kind == "scripted":
        scripted = {"name": "tool", "responses": [{"result": "ab" * (size // 2)}]}
        lab.spec["target"]["tools"] = [{"scripted": scripted}]
    if kind == "mcp":
        pytest.importorskip("mcp")
        shutil.copy(ROOT / "tests/support/plain_mcp.py", lab.folder)
        (lab.folder / "server.py").write_text(
            "from plain_mcp import MCPServer\n"
            "server = MCPServer('long')\n"
            "@server.tool()\n"
            f"def tool() -> str:\n    {raised}\n"
            "server.run()\n"
        )
        lab.spec["target"]["tools"] = [{"mcp": {"command": [sys.executable, "server.py"]}}]
    run = lab.eval("target.max_steps=2").run
    for result in results(run):
        assert 60_000 < len(result.encode()) <= 65_536 and " bytes left out …]" in result
    assert all(path.stat().st_size < 300_000 for path in run.rglob("*.jsonl"))
    shorter = lab.eval("target.max_steps=2", "target.tools.0.max_result=1000").run
    assert shorter != run and max(len(result.encode()) for result in results(shorter)) <= 1000


def test_max_steps_ends_a_turn_and_says_so(lab: Lab, provider: Server) -> None:
    use(lab, "def tool(word: str):\n    return word\n", max_steps=3)
    provider.control(tool_calls=100)
    done = lab.eval()
    (output,) = kept(done.run)
    assert done.asked == 3 and output["stop"] == "max_steps" and output["output"] == ""
    assert len(results(done.run)) == 3, "each call has its result, so that the conversation can go on"


def test_several_calls_in_one_message_unknown_tools_and_broken_arguments(tmp_path: Path) -> None:
    calls = [
        {"id": "1", "function": {"name": "double", "arguments": '{"number": 4}'}},
        {"id": "2", "function": {"name": "halve", "arguments": "{}"}},
        {"id": "3", "function": {"name": "double", "arguments": "{number: 4}"}},
        {"id": "4", "function": {"name": "double", "arguments": "[4]"}},
        {"id": "5", "function": {"name": "double", "arguments": None}},
        {"id": "6", "function": {"name": "double", "arguments": {"number": 5}}},
    ]
    offered: list[Any] = []
    sent: list[Any] = []

    def complete(request: Asked) -> Any:
        offered.append(request.body["tools"])
        sent.append(request.body["messages"])
        content: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": calls}
        if sent[-1][-1]["role"] == "tool":
            content = {"role": "assistant", "content": "done"}
        return {"choices": [{"message": content, "finish_reason": "stop"}]}

    (tmp_path / "tools.py").write_text("def double(number: int):\n    return 2 * number\n")
    with workflow(complete) as service:
        target = {"model": "m", "base_url": f"{service.url}/v1", "tools": [{"python": "tools.py:double"}]}
        path = write_spec(tmp_path, samples=[{"id": "a", "question": "?", "expected": "done"}], target=target)
        done = evaluate(path, runs_dir=tmp_path / "runs")
    (output,) = kept(done.path)
    assert "calls" not in output, "the messages hold them all"
    messages = output["messages"]
    assert messages[-1]["content"] == "done" and len(offered) == 2
    assert messages[1]["content"] is None and sent[1][1]["content"] is None, "given back as the model said it"
    assert [message.get("tool_call_id") for message in messages[2:-1]] == list("123456")
    content = [message["content"] for message in messages[2:-1]]
    assert content[0] == "8" and content[5] == "10"
    assert content[1] == "Error: there is no tool called 'halve'; there are: double"
    assert content[2].startswith("Error: the arguments are not a JSON object: '{number: 4}'")
    assert content[3].startswith("Error: the arguments are not a JSON object: [4]")
    assert content[4] == "Error: wrong arguments: number: Field required"


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param(((0, "x", "f", ""), (0, "", "", '{"a"'), (0, "", "", ": 1}"), (1, "y", "g", "{}")), id="usual"),
        pytest.param(((None, "x", "f", '{"a": 1}'), (None, "y", "g", "{}")), id="without numbers"),
        pytest.param(((0, "x", "f", '{"a": 1}'), (0, "y", "g", "{}")), id="all numbered 0"),
        pytest.param(((0, "x", "f", '{"a"'), (0, "", "", ": 1}"), (0, "y", "g", ""), (0, "", "", "{}")), id="pieces"),
        pytest.param(((0, "x", "f", '{"a"'), (0, "x", "f", ": 1}"), (1, "y", "g", "{}")), id="repeated in each piece"),
        pytest.param(((0, "x", "f", '{"a"'), (0, "z", "", ": 1}"), (1, "y", "g", "{}")), id="a new id for each piece"),
        pytest.param(((1, "y", "g", "{}"), (0, "x", "f", '{"a": 1}')), id="out of order"),
    ],
)
def test_pieces_of_streamed_calls_are_joined(pieces: tuple[tuple[int | None, str, str, str], ...]) -> None:
    calls = StreamedCalls()
    for number, id_, name, arguments in pieces:
        calls.add({"index": number, "id": id_, "function": {"name": name, "arguments": arguments}})
    assert [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls.all()] == [
        ("x", "f", '{"a": 1}'),
        ("y", "g", "{}"),
    ]


def test_calls_of_one_name_without_ids_are_distinguished_by_their_arguments() -> None:
    calls = StreamedCalls()
    for arguments in ('{"a"', ": 1}", '{"a": 2}'):
        calls.add({"index": 0, "function": {"name": "f", "arguments": arguments}})
    assert [call["function"]["arguments"] for call in calls.all()] == ['{"a": 1}', '{"a": 2}']


# Keys

TOOL = "import helper\n\ndef tool(word: str):\n    return helper.shout(word)\n"


def test_a_tools_code_and_max_steps_are_in_the_key_and_how_it_is_replayed_is_not(lab: Lab) -> None:
    (lab.folder / "helper.py").write_text("def shout(word):\n    return word.upper()\n")
    use(lab, TOOL)
    lab.eval()
    lab.spec["target"]["tools"][0] |= {"replay": "again", "per": "run"}
    assert lab.plan()["to_run"] == 0
    lab.spec["target"]["tools"][0] |= {"replay": "never", "on_cut_off": "error_result"}
    assert lab.plan()["to_run"] == 0

    lab.edit("helper.py", "upper", "lower")
    changed = lab.plan()
    assert changed["to_run"] == 1 and changed["reasons"] == ["helper.py changed"]
    lab.edit("helper.py", "lower", "upper")
    assert lab.plan()["to_run"] == 0

    lab.spec["target"]["max_steps"] = 5
    changed = lab.plan()
    assert changed["to_run"] == 1 and changed["reasons"] == ["target.max_steps 20 → 5"]
    del lab.spec["target"]["max_steps"]
    lab.spec["target"]["tools"][0]["max_result"] = 1000  # which changes what the model sees
    assert lab.plan()["to_run"] == 1
    del lab.spec["target"]["tools"][0]["max_result"]
    lab.spec["target"]["tools"][0]["version"] = "2"
    assert lab.plan()["to_run"] == 1


def test_a_model_without_tools_has_the_key_it_had_before_there_were_any(lab: Lab) -> None:
    lab.eval()
    lab.spec["target"] |= {"tools": [], "max_steps": 3}
    assert lab.plan()["to_run"] == 0


# What is refused


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"tools": [{}]}, "either a `python` function, an `mcp` server or a `scripted` tool"),
        (
            {"tools": [{"python": "t.py:f", "mcp": {"url": "http://x"}}]},
            "either a `python` function, an `mcp` server or a `scripted` tool",
        ),
        ({"tools": [{"mcp": {}}]}, "either a `command` or a `url`"),
        ({"tools": [{"mcp": {"command": ["x"], "url": "http://x"}}]}, "either a `command` or a `url`"),
        ({"tools": [{"mcp": {"command": ["x"], "env": {"API_KEY": "sk-1"}}}]}, "keys are not written into files"),
        ({"tools": [{"python": "t.py:f", "only": ["f"]}]}, "`only` picks among the tools of an mcp server"),
        ({"tools": [{"python": "t.py:f"}], "api": "completions"}, "cannot call tools with `api: completions`"),
        ({"tools": [{"python": "t.py:f"}], "max_steps": 0}, "max_steps"),
        ({"tools": [{"python": "t.py:missing"}]}, "has no function 'missing'"),
        ({"tools": [{"python": "t.py:f"}, {"python": "t.py:f"}]}, "two tools called 'f'"),
        ({"tools": [{"python": "t.py:g"}]}, "tools are called with names"),
        ({"tools": [{"python": "t.py:h"}]}, "cannot be read"),
        ({"tools": [{"mcp": {"url": "http://x/${NO_SUCH_VARIABLE}"}}]}, "NO_SUCH_VARIABLE"),
    ],
)
def test_tools_that_cannot_be_are_refused_with_their_line_before_anything_is_asked(
    target: dict[str, Any], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    (tmp_path / "t.py").write_text("def f(a): ...\ndef g(*a): ...\ndef h(a: 'Nowhere'): ...\n")
    path = write_spec(tmp_path, target={"model": "m", "base_url": "http://127.0.0.1:9/v1", **target})
    ended = command(monkeypatch, capsys, tmp_path, "eval", path.name)
    assert ended.code == 2, ended
    assert message in ended.err and "eval.yaml:" in ended.err
