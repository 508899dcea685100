"""Targets of all four kinds: their requests, their answers, and that secrets stay secret."""

from __future__ import annotations

import json
import re
import stat
import sys
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import holdfast
from holdfast.dialects.types import TokenCounts
from holdfast.errors import ConfigError, UsageError
from holdfast.spec.eval_schema import Price
from holdfast.spec.providers import PROVIDERS
from holdfast.targets.prices import Prices
from tests.support.running import environment, lines
from tests.support.running import holdfast as run_command
from tests.support.specs import write_spec
from tests.support.workflow import Answer, workflow

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES = [{"id": "a", "q": "one two", "expected": "one two"}, {"id": "b", "q": "three", "expected": "four"}]


@pytest.fixture
def evaluate(tmp_path: Path) -> Any:
    def run(target: Any, **keys: Any) -> Any:
        defaults = {
            "name": "e",
            "samples": SAMPLES,
            "prompt": "{{ q }}",
            "graders": [{"type": "exact"}],
            "limits": {"retries": 0},
            "runs_dir": tmp_path / "runs",
        }
        return holdfast.evaluate(target=target, **{**defaults, **keys})

    return run


def outputs(run: Any) -> Any:
    return {entry["sample"]: entry for entry in lines(run.path / "outputs.jsonl")}


def errors(run: Any) -> Any:
    return [(entry["kind"], entry["message"]) for entry in lines(run.path / "errors.jsonl")]


def completion(text: Any, **more: Any) -> Any:
    """A chat completion."""
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}], **more}


class TestModel:
    def test_the_request_has_model_params_and_messages_and_the_reply_is_the_output(self, evaluate: Any) -> None:
        with workflow(lambda asked: completion(asked.body["messages"][-1]["content"])) as service:
            run = evaluate(
                {"model": "m", "base_url": f"{service.url}/v1", "params": {"temperature": 0.5, "stop": ["x"]}},
                system="Be {{ expected }}.",
            )
        assert run.finished and run.score == 0.5
        first = next(asked for asked in service.asked if asked.body["messages"][-1]["content"] == "one two")
        assert first.path == "/v1/chat/completions"
        assert first.body == {
            "model": "m",
            "temperature": 0.5,
            "stop": ["x"],
            "messages": [{"role": "system", "content": "Be one two."}, {"role": "user", "content": "one two"}],
        }
        kept = outputs(run)["a"]
        assert kept["messages"] == [*first.body["messages"], {"role": "assistant", "content": "one two"}]
        assert (kept["output"], kept["stop"], kept["turns"], kept["attempt"]) == ("one two", "stop", 1, 1)

    def test_completions_send_one_prompt(self, evaluate: Any) -> None:
        with workflow(
            lambda asked: {"choices": [{"text": asked.body["prompt"], "finish_reason": "length"}]}
        ) as service:
            run = evaluate({"model": "m", "base_url": service.url, "api": "completions"}, system="S")
        assert {asked.path for asked in service.asked} == {"/completions"}
        assert outputs(run)["a"]["output"] == "S\n\none two" and outputs(run)["a"]["stop"] == "length"

    def test_tokens_cost_and_requests_are_counted(self, evaluate: Any) -> None:
        with workflow(lambda _: completion("x", usage={"prompt_tokens": 1000, "completion_tokens": 100})) as service:
            run = evaluate({"model": "gpt-4o-mini", "base_url": service.url})
        expected = {"input_tokens": 1000, "output_tokens": 100, "requests": 1, "cost": pytest.approx(0.00021)}
        assert outputs(run)["a"]["usage"] == expected
        usage = run.metrics.usage
        assert (usage.input_tokens, usage.output_tokens, usage.requests) == (2000, 200, 2)
        assert usage.cost == pytest.approx(0.00042)

    def test_own_prices_go_before_the_table_and_unknown_ones_are_unknown(self, evaluate: Any) -> None:
        with workflow(lambda _: completion("x", usage={"prompt_tokens": 10, "completion_tokens": 10})) as service:
            target = {"model": "gpt-4o", "base_url": service.url}
            own = evaluate(target, name="own", prices={"gpt-4o": {"input": 1e5, "output": 0}})
            assert outputs(own)["a"]["usage"]["cost"] == 1
            unknown = evaluate({**target, "model": "nobody-knows"}, name="unknown")
            assert unknown.metrics.usage.cost is None and unknown.metrics.usage.input_tokens == 20

    @pytest.mark.parametrize(
        "reply",
        [
            {},
            [],
            "text",
            None,
            {"choices": []},
            {"choices": [{}]},
            {"choices": [{"message": {"content": ["parts"]}}]},
            {"choices": [{"message": "text"}]},
            {"choices": None},
        ],
        ids=json.dumps,
    )
    def test_a_reply_without_an_answer_is_an_error_and_not_an_empty_answer(self, evaluate: Any, reply: Any) -> None:
        with workflow(lambda _: reply) as service:
            run = evaluate({"model": "m", "base_url": service.url})
        assert not run.finished and outputs(run) == {}
        assert {kind for kind, _ in errors(run)} == {"bad_reply"}

    def test_a_reply_nested_without_end_is_an_error_of_its_trial(self, evaluate: Any) -> None:
        with workflow(lambda _: Answer(raw=b"[" * 100_000)) as service:
            run = evaluate({"model": "m", "base_url": service.url})
        assert {kind for kind, _ in errors(run)} == {"bad_reply"} and run.exit_code == 3

    def test_an_answer_of_nothing_but_thoughts_is_an_empty_answer(self, evaluate: Any) -> None:
        with workflow(lambda _: {"choices": [{"message": {"content": None}, "finish_reason": "length"}]}) as service:
            run = evaluate({"model": "m", "base_url": service.url})
        assert run.finished and (outputs(run)["a"]["output"], outputs(run)["a"]["stop"]) == ("", "length")

    def test_tool_calls_and_reasoning_are_kept(self, evaluate: Any) -> None:
        message = {"content": None, "tool_calls": [{"id": "1"}], "reasoning_content": "hm", "extra": 1}
        with workflow(lambda _: {"choices": [{"message": message, "finish_reason": "tool_calls"}]}) as service:
            run = evaluate({"model": "m", "base_url": service.url})
        assert outputs(run)["a"]["output"] == "" and outputs(run)["a"]["stop"] == "tool_calls"
        assert outputs(run)["a"]["messages"][-1] == {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1"}],
            "reasoning_content": "hm",
            "extra": 1,
        }

    @pytest.mark.parametrize(
        ("strip", "reply", "expected"),
        [
            (True, {"content": "<think>\none?\n</think>\n\none two\n"}, ("one two", "one?")),
            (True, {"content": "first</think>second</think>one two"}, ("one two", "first</think>second")),
            (True, {"content": "<think>without end"}, ("<think>without end", None)),
            (True, {"content": "<think>a</think>b", "reasoning_content": "hm"}, ("<think>a</think>b", None)),
            (True, {"content": "one two"}, ("one two", None)),
            ({"unfinished": "drop"}, {"content": "<think>without end"}, ("", "without end")),
            ({"start": "[", "end": "]"}, {"content": "[a]<think>"}, ("<think>", "a")),
            (False, {"content": "<think>a</think>b"}, ("<think>a</think>b", None)),
        ],
    )
    def test_reasoning_in_the_text_is_taken_out_if_the_eval_asks_for_it(
        self, evaluate: Any, strip: Any, reply: Any, expected: Any
    ) -> None:
        with workflow(lambda _: {"choices": [{"message": reply, "finish_reason": "stop"}]}) as service:
            run = evaluate({"model": "m", "base_url": service.url, "strip_reasoning": strip})
        output = outputs(run)["a"]
        assert (output["output"], output["messages"][-1].get("reasoning")) == expected
        assert run.metrics.score == (0.5 if expected[0] == "one two" else 0), "as the grader saw it"

    def test_the_address_may_come_from_the_environment(self, evaluate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        with workflow(lambda _: completion("x")) as service:
            monkeypatch.setenv("OPENAI_BASE_URL", f"{service.url}/base/")
            assert evaluate({"model": "m"}).finished
        assert {asked.path for asked in service.asked} == {"/base/chat/completions"}

    def test_without_a_key_the_public_api_is_not_even_asked(
        self, evaluate: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        with pytest.raises(UsageError, match="OPENAI_API_KEY is not set"):
            evaluate({"model": "m"})
        assert not (tmp_path / "runs").exists()

    def test_the_named_api_key_is_sent_and_no_header_without_one(
        self, evaluate: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MY_KEY", "sk-mine")
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        with workflow(lambda _: completion("x")) as service:
            evaluate({"model": "m", "base_url": service.url, "api_key_env": "MY_KEY"}, name="with")
            assert {asked.headers["authorization"] for asked in service.asked} == {"Bearer sk-mine"}
            service.asked.clear()
            evaluate({"model": "m", "base_url": service.url}, name="without")
            assert not any("authorization" in asked.headers for asked in service.asked)


AGENT = """\
import asyncio
import holdfast

def text(prompt): return prompt.upper()
async def later(prompt, messages, sample, context):
    assert messages[-1] == {"role": "user", "content": prompt}
    return f"{sample['q']} {context.trial} {context.turn} {context.sample_id} {context.params['k']} {context.seed}"
def reply(prompt):
    return holdfast.Reply(
        text="done",
        messages=[{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, {"role": "tool", "content": "r"},
                  {"role": "assistant", "content": "done"}],
        stop="finished",
        state={"files": ["a"]},
    )
def mapping(prompt):
    usage = {"prompt_tokens": 3, "output_tokens": 4, "requests": 2, "cost": 0.5}
    return {"output": "done", "usage": usage, "stop": "max", "tool_calls": [{"id": "1"}], "state": {"k": (1, 2)}}
SEARCH = {"id": "1", "function": {"name": "search", "arguments": "{}"}}
CALLS = {"calls": [SEARCH], "none": [], "unknown": None}
def lists_calls(prompt): return {"output": "x", "tool_calls": CALLS[prompt]}
def has_messages(prompt):
    calls = CALLS[prompt]
    messages = calls and [{"role": "assistant", "content": "x", "tool_calls": calls}]
    return {"output": "x", "messages": messages}
def has_both(prompt):
    known = {} if CALLS[prompt] is None else {"messages": [{"role": "assistant", "content": "x"}]}
    return {"output": "x", "tool_calls": CALLS[prompt], **known}
def wrong_calls(prompt): return {"output": "x", "tool_calls": "search"}
def wrong_messages(prompt): return {"output": "x", "messages": ["x"]}
def no_stop(prompt): return {"output": "x", "stop": None}
def only_messages(prompt): return {"messages": [{"role": "assistant", "content": "last"}]}
def everything(**all): return ",".join(sorted(all))
class Agent:
    def __call__(self, prompt): return "called"
agent = Agent()

def raises(prompt): raise ValueError("broken tool")
def exits(prompt): raise SystemExit(1)
def cancels(prompt): raise asyncio.CancelledError
async def cancels_later(prompt): raise asyncio.CancelledError
def interrupts(prompt): raise KeyboardInterrupt
async def interrupts_later(prompt): raise KeyboardInterrupt
def number(prompt): return 5
def none(prompt): return None
def no_text(prompt): return {"answer": "x"}
def not_text(prompt): return holdfast.Reply(text=5)
def unkeepable(prompt): return holdfast.Reply(text="x", state=object())
def surrogate(prompt): return "\\ud800"
def wrong_usage(prompt): return {"output": "x", "usage": {"input_tokens": "many"}}
def mutates(prompt, messages, sample):
    messages.clear(); sample.clear()
    return "done"
"""


FLAKY = """\
from pathlib import Path

def reply(prompt):
    if prompt == "three" and not (Path(__file__).parent / "mended").exists():
        raise OSError("down")
    return prompt
"""


@pytest.fixture
def agent(tmp_path: Path, evaluate: Any) -> Any:
    (tmp_path / "agent.py").write_text(AGENT)

    def run(name: Any, /, **keys: Any) -> Any:
        params = keys.pop("params", {})
        return evaluate({"python": f"{tmp_path}/agent.py:{name}", "params": params}, **keys)

    return run


class TestPython:
    def test_a_value_that_is_not_a_text_is_kept_with_its_json_and_is_part_of_the_digest(self, evaluate: Any) -> None:
        answers: list[Any] = [{"n": 1, "of": [True, None]}, 2.5]

        def give_value(prompt: str) -> Any:
            return {"output": answers[prompt == "three"]}

        def give_text(prompt: str) -> Any:
            return holdfast.Reply(text="2.5" if prompt == "three" else "{}")

        run = evaluate(give_value, graders=[{"type": "exact", "expected": '{"n":1,"of":[true,null]}'}])
        assert {name: (entry["output"], entry["value"]) for name, entry in outputs(run).items()} == {
            "a": ('{"n":1,"of":[true,null]}', answers[0]),
            "b": ("2.5", 2.5),
        }
        assert [row["status"] for row in run.results()] == ["passed", "failed"]
        other = outputs(evaluate(give_text))["b"]
        assert other["output"] == "2.5" and "value" not in other
        assert other["digest"] != outputs(run)["b"]["digest"]

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("text", "ONE TWO"),
            ("agent", "called"),
            ("only_messages", "last"),
            ("everything", "context,messages,prompt,sample"),
            ("mutates", "done"),
        ],
    )
    def test_the_result_of_the_function_is_the_answer(self, agent: Any, name: str, expected: str) -> None:
        run = agent(name)
        assert run.finished and outputs(run)["a"]["output"] == expected
        assert outputs(run)["a"]["messages"][0] == {"role": "user", "content": "one two"}

    def test_a_function_gets_the_values_that_its_parameters_name(self, agent: Any) -> None:
        kept = outputs(agent("later", params={"k": "v"}, trials=2))
        assert kept["a"]["output"].startswith("one two ") and " a v " in kept["a"]["output"]

    def test_the_seed_depends_only_on_sample_and_trial(self, agent: Any) -> None:
        def seeds(**keys: Any) -> Any:
            run = agent("later", params={"k": "v"}, trials=2, **keys)
            return {(e["sample"], e["trial"]): e["output"].split()[-1] for e in lines(run.path / "outputs.jsonl")}

        first = seeds(name="first")
        assert len(set(first.values())) == 4
        assert seeds(name="second", samples=SAMPLES[::-1], limits={"concurrency": 1}) == first

    def test_a_reply_may_say_more_than_a_text(self, agent: Any) -> None:
        kept = outputs(agent("reply"))["a"]
        assert (kept["output"], kept["stop"], kept["state"]) == ("done", "finished", {"files": ["a"]})
        assert [message["role"] for message in kept["messages"]] == ["user", "assistant", "tool", "assistant"]

    def test_a_dict_may_be_returned(self, agent: Any) -> None:
        kept = outputs(agent("mapping"))["a"]
        assert (kept["output"], kept["stop"], kept["state"]) == ("done", "max", {"k": [1, 2]})
        assert kept["usage"] == {"input_tokens": 3, "output_tokens": 4, "requests": 2, "cost": 0.5}
        assert kept["messages"][-1] == {"role": "assistant", "content": "done", "tool_calls": [{"id": "1"}]}

    @pytest.mark.parametrize("name", ["lists_calls", "has_messages", "has_both"])
    def test_an_empty_list_of_calls_means_that_no_call_was_made(self, agent: Any, name: str) -> None:
        run = agent(
            name,
            samples=[{"id": name_, "q": name_} for name_ in ("calls", "none", "unknown")],
            graders=[{"type": "tool_calls", "name": "used", "required_tools": ["search"]}],
        )
        verdicts = {entry["sample"]: entry["status"] for entry in lines(run.path / "grades.jsonl")}
        assert verdicts == {"calls": "passed", "none": "failed", "unknown": "skipped"}

    def test_a_missing_stop_is_the_usual_one(self, agent: Any) -> None:
        assert outputs(agent("no_stop"))["a"]["stop"] == "stop"

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("raises", "ValueError: broken tool"),
            ("wrong_calls", "`tool_calls` of the reply is not a list of objects: search"),
            ("wrong_messages", "`messages` of the reply is not a list of objects: ['x']"),
            ("exits", "sys.exit(1)"),
            ("cancels", "raised CancelledError"),
            ("cancels_later", "cancelled from inside"),
            ("interrupts", "raised KeyboardInterrupt"),
            ("interrupts_later", "raised KeyboardInterrupt"),
            ("number", "returned int"),
            ("none", "returned NoneType"),
            ("no_text", "has no text"),
            ("not_text", "cannot be serialized as JSON"),
            ("unkeepable", "cannot be serialized as JSON"),
            ("surrogate", "cannot be serialized as JSON"),
            ("wrong_usage", "cannot be serialized as JSON"),
        ],
    )
    def test_an_invalid_reply_is_an_error_of_its_trial_and_not_an_answer(
        self, agent: Any, name: str, words: str
    ) -> None:
        run = agent(name)
        assert run.exit_code == 3 and outputs(run) == {}
        assert {kind for kind, _ in errors(run)} == {"agent"}
        assert all(words in message for _, message in errors(run))

    def test_a_repaired_agent_is_asked_again_for_failed_trials(self, agent: Any, tmp_path: Path) -> None:
        (tmp_path / "flaky.py").write_text(FLAKY)
        keys: dict[str, Any] = {
            "name": "flaky",
            "samples": SAMPLES,
            "prompt": "{{ q }}",
            "target": {"python": f"{tmp_path}/flaky.py:reply"},
            "limits": {"retries": 0},
            "runs_dir": tmp_path / "runs",
        }
        first = holdfast.evaluate(**keys)
        assert not first.finished and list(outputs(first)) == ["a"]
        (tmp_path / "mended").touch()
        second = holdfast.evaluate(**keys)
        assert second.finished and second.path == first.path
        assert (outputs(second)["a"]["attempt"], outputs(second)["b"]["attempt"]) == (1, 2)

    def test_an_unknown_required_parameter_is_refused(self, tmp_path: Path, evaluate: Any) -> None:
        (tmp_path / "a.py").write_text("def reply(question): return ''\n")
        with pytest.raises(
            ConfigError, match=r"(?s)asks for question; no sample has .*ask for prompt, messages, sample, context"
        ):
            evaluate({"python": f"{tmp_path}/a.py:reply"})


class TestHttp:
    def test_the_request_is_rendered_and_the_answer_picked(self, evaluate: Any) -> None:
        with workflow(lambda asked: {"result": {"texts": ["no", asked.body["input"]["message"]]}}) as service:
            run = evaluate(
                {
                    "http": f"{service.url}/run",
                    "request": {"input": {"message": "{{ prompt }}"}, "id": "{{ id }}-{{ trial }}", "k": [5, True]},
                    "response": "result.texts[1]",
                }
            )
        assert run.finished and run.score == 0.5
        first = next(asked for asked in service.asked if asked.body["id"] == "a-1")
        assert first.path == "/run"
        assert first.body == {"input": {"message": "one two"}, "id": "a-1", "k": [5, True]}

    def test_an_answer_that_is_no_text_is_kept_as_json(self, evaluate: Any) -> None:
        with workflow(lambda _: {"value": {"b": [1, 2]}}) as service:
            run = evaluate({"http": service.url, "request": {}, "response": "value"})
        assert outputs(run)["a"]["output"] == '{"b":[1,2]}'

    @pytest.mark.parametrize(
        ("response", "reply", "words"),
        [
            ("value", {"other": 1}, "nothing at 'value'"),
            ("value", {"value": None}, "nothing at 'value'"),
            ("length(value)", {"value": 5}, "does not fit the reply"),
            ("value", Answer(raw=b"<html>"), "not JSON"),
        ],
        ids=["missing", "null", "wrong type", "not JSON"],
    )
    def test_a_reply_without_the_answer_is_an_error(self, evaluate: Any, response: str, reply: Any, words: str) -> None:
        with workflow(lambda _: reply) as service:
            run = evaluate({"http": service.url, "request": {}, "response": response})
        assert run.exit_code == 3 and outputs(run) == {}
        assert all(kind == "bad_reply" and words in message for kind, message in errors(run))

    def test_a_template_that_a_row_cannot_fill_fails_only_its_trial(self, evaluate: Any) -> None:
        samples = [{"id": "a", "q": "x", "n": 0}, {"id": "b", "q": "y", "n": 1}]
        with workflow(lambda asked: {"value": asked.body["share"]}) as service:
            run = evaluate(
                {"http": service.url, "request": {"share": "{{ 1 / n }}"}, "response": "value"},
                samples=samples,
                graders=[],
            )
        assert list(outputs(run)) == ["b"]
        ((kind, message),) = errors(run)
        assert kind == "bad_request" and "cannot render target.request" in message


class TestCommand:
    @pytest.fixture
    def program(self, tmp_path: Path) -> Any:
        def write(body: Any, name: str = "agent") -> Any:
            path = tmp_path / name
            path.write_text(f"#!{sys.executable}\nimport os, sys\n{body}\n")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
            return path

        return write

    def run(self, folder: Path, target: Any, **keys: Any) -> Any:
        """From a file, since a command is run from the file's folder."""
        path = write_spec(folder, samples=SAMPLES, prompt="{{ q }}", target=target, limits={"retries": 0}, **keys)
        return holdfast.evaluate(path, runs_dir=folder / "runs")

    def test_arguments_are_templates_and_what_it_prints_is_the_answer(self, tmp_path: Path, program: Any) -> None:
        program("print(sys.argv[1:], os.path.samefile(os.getcwd(), os.path.dirname(os.path.abspath(__file__))))")
        run = self.run(tmp_path, {"command": ["./agent", "--task", "{{ prompt }}", "{{ id }}/{{ trial }}"]})
        assert outputs(run)["a"]["output"] == "['--task', 'one two', 'a/1'] True"

    def test_nothing_of_a_prompt_is_read_by_a_shell(self, tmp_path: Path, program: Any) -> None:
        program("print(sys.argv[1])")
        nasty = "$(touch hacked); `touch hacked` | x > y && 'q\""
        path = write_spec(
            tmp_path,
            samples=[{"id": "a", "q": nasty, "expected": nasty}],
            prompt="{{ q }}",
            target={"command": ["./agent", "{{ prompt }}"]},
        )
        assert holdfast.evaluate(path, runs_dir=tmp_path / "runs").score == 1
        assert not (tmp_path / "hacked").exists()

    def test_standard_input_is_a_template(self, tmp_path: Path, program: Any) -> None:
        program("print(sys.stdin.read()[::-1])")
        run = self.run(tmp_path, {"command": ["./agent"], "stdin": "<{{ prompt }}>"})
        assert outputs(run)["a"]["output"] == ">owt eno<"

    def test_a_program_that_does_not_read_its_input_is_fine(self, tmp_path: Path, program: Any) -> None:
        program("print('ok')")
        run = self.run(tmp_path, {"command": ["./agent"], "stdin": "x" * 1_000_000})
        assert outputs(run)["a"]["output"] == "ok"

    def test_a_program_fails_with_what_it_wrote_to_standard_error(self, tmp_path: Path, program: Any) -> None:
        program("print('half an answer'); sys.stderr.write('no memory\\n'); sys.exit(7)")
        run = self.run(tmp_path, {"command": ["./agent"]})
        assert run.exit_code == 3 and outputs(run) == {}
        assert set(errors(run)) == {("agent", "./agent ended with 7: no memory")}

    def test_a_program_that_writes_nothing_there_fails_with_the_end_of_its_output(
        self, tmp_path: Path, program: Any
    ) -> None:
        program("print('x' * 1000, 'not logged in'); sys.exit(1)")
        (failed,) = set(errors(self.run(tmp_path, {"command": ["./agent"]})))
        assert failed[1].startswith("./agent ended with 1: xx") and failed[1].endswith("x not logged in")

    @pytest.mark.parametrize("name", ["./missing", "no-such-program-anywhere", "./data.txt"])
    def test_a_program_that_cannot_be_run_is_refused_before_anything_runs(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "data.txt").write_text("not a program")
        with pytest.raises(
            ConfigError, match=r"target\.command: .*(is not a file|is not on the PATH|is not executable)"
        ):
            self.run(tmp_path, {"command": [name]})

    def test_a_program_that_turns_out_not_to_run_stops_the_run_and_says_so(self, tmp_path: Path) -> None:
        (tmp_path / "no-shell.sh").write_text("#!/no/such/shell\n")
        (tmp_path / "no-shell.sh").chmod(0o755)
        run = self.run(tmp_path, {"command": ["./no-shell.sh"]})
        assert run.exit_code == 3 and not run.finished
        assert "./no-shell.sh cannot be run" in run.reason and str(tmp_path) in run.reason

    def test_a_prompt_that_no_program_can_be_given_fails_only_its_trial(self, tmp_path: Path, program: Any) -> None:
        program("print('ok')")
        path = write_spec(
            tmp_path,
            samples=[{"id": "a", "q": "nul \0 byte"}, {"id": "b", "q": "fine"}],
            prompt="{{ q }}",
            target={"command": ["./agent", "{{ prompt }}"]},
            graders=[],
            limits={"retries": 0},
        )
        run = holdfast.evaluate(path, runs_dir=tmp_path / "runs")
        assert list(outputs(run)) == ["b"]
        ((kind, _),) = errors(run)
        assert kind == "agent"


SECRET = "sk-very-secret-0123456789abcdef"


def places_of(secret: Any, folder: Path) -> Any:
    """The files under a folder that hold a text, in their names or in their bytes."""
    return [p for p in folder.rglob("*") if secret in str(p) or (p.is_file() and secret.encode() in p.read_bytes())]


class TestSecrets:
    def command_lines(self) -> Any:
        return [word for process in psutil.process_iter(["cmdline"]) for word in process.info["cmdline"] or []]

    @pytest.mark.parametrize("status", [200, 400, 401, 429, 500])
    def test_an_api_key_is_in_no_file_no_message_and_no_process_list(self, tmp_path: Path, status: int) -> None:
        seen = []

        def answer(asked: Any) -> Any:
            assert asked.headers["authorization"] == f"Bearer {SECRET}"
            seen.extend(word for word in self.command_lines() if SECRET in word)
            key = asked.headers["authorization"]
            return (
                completion("x")
                if status == 200
                else Answer({"error": {"message": f"bad key {key} ({SECRET})"}}, status)
            )

        with workflow(answer) as service:
            write_spec(
                tmp_path,
                target={"model": "m", "base_url": service.url},
                limits={"retries": 1, "trial_timeout": 5, "max_time": "2s"},  # else a rate limit is waited out
                graders=[{"type": "exact"}, {"type": "prompt", "rubric": "r"}]
                if status != 200
                else [{"type": "exact"}],
            )
            done = run_command("eval", "eval.yaml", cwd=tmp_path, env={"OPENAI_API_KEY": SECRET}, check=None)
        assert service.asked and done.returncode == (0 if status == 200 else 3), done.stderr
        assert seen == []
        assert SECRET not in done.stdout + done.stderr
        assert places_of(SECRET, tmp_path) == []

    @pytest.mark.parametrize("header", [SECRET, f"Bearer {SECRET}", "Bearer ${HEADER_TOKEN}"])
    @pytest.mark.parametrize("status", [200, 403])
    def test_the_value_of_a_header_is_secret(self, tmp_path: Path, header: Any, status: int) -> None:
        def answer(asked: Any) -> Any:
            return {"value": "x"} if status == 200 else Answer({"error": asked.headers["x-token"]}, status)

        with workflow(answer) as service:
            path = write_spec(
                tmp_path / "evals",
                target={"http": service.url, "request": {}, "response": "value", "headers": {"X-Token": header}},
            )
            done = run_command("eval", path, cwd=tmp_path, env={"HEADER_TOKEN": SECRET}, check=None)
        assert all(SECRET in asked.headers["x-token"] for asked in service.asked) and service.asked
        assert done.returncode == (0 if status == 200 else 3), done.stderr
        assert SECRET not in done.stdout + done.stderr
        assert places_of(SECRET, tmp_path / "runs") == []

    @pytest.mark.parametrize("status", [200, 400])
    @pytest.mark.parametrize("kind", ["model", "http", "judge"])
    def test_a_password_inside_an_address_is_secret(self, tmp_path: Path, kind: str, status: int) -> None:
        judge = '{"score": 1, "reason": ""}'

        def answer(asked: Any) -> Any:
            refused = status != 200 and "authorization" in asked.headers
            return Answer({}, status) if refused else {**completion(judge), "value": "x"}

        with workflow(answer) as service:
            url = service.url.replace("//", f"//user:{SECRET}@")
            keys: dict[str, Any] = {"target": {"model": "m", "base_url": service.url}}
            if kind == "model":
                keys["target"]["base_url"] = url
            elif kind == "http":
                keys["target"] = {"http": url, "request": {}, "response": "value"}
            else:
                keys["graders"] = [{"type": "prompt", "rubric": "r", "model": "j", "base_url": url}]
            path = write_spec(tmp_path / "evals", **keys)
            done = run_command("eval", path, cwd=tmp_path, check=0 if status == 200 else 3)
        assert any("authorization" in asked.headers for asked in service.asked)
        assert SECRET not in done.stdout + done.stderr
        assert places_of(SECRET, tmp_path / "runs") == []

    @pytest.mark.parametrize("query", [f"?api_key={SECRET}", f"?{SECRET}", "?api_key=${QUERY_KEY}"])
    @pytest.mark.parametrize("status", [200, 403, 500])
    def test_the_query_of_an_address_is_secret(self, tmp_path: Path, query: str, status: int) -> None:
        def answer(asked: Any) -> Any:
            return {"value": "x"} if status == 200 else Answer({"error": f"no {asked.path}"}, status)

        with workflow(answer) as service:
            target = {"http": service.url + query, "request": {}, "response": "value"}
            path = write_spec(tmp_path / "evals", target=target, limits={"retries": 0})
            env = {"QUERY_KEY": SECRET}
            dry = [run_command("eval", path, "-d", *more, cwd=tmp_path, env=env) for more in ([], ["--json"])]
            done = run_command("eval", path, cwd=tmp_path, env=env, check=None)
        assert all(SECRET in asked.path for asked in service.asked) and service.asked
        assert done.returncode == (0 if status == 200 else 3), done.stderr
        for each in (done, *dry):
            assert SECRET not in each.stdout + each.stderr
        assert places_of(SECRET, tmp_path / "runs") == []

    def test_a_dry_run_shows_no_more_than_the_manifest(self, tmp_path: Path) -> None:
        keys: dict[str, Any] = {
            "target": {"http": f"http://u:{SECRET}@127.0.0.1:1/", "request": {}, "headers": {"X-Token": SECRET}}
        }
        keys["baseline"] = {**keys["target"], "headers": {"X-Token": SECRET, "X-Other": "${NAME}"}}
        path = write_spec(tmp_path, **keys)
        for options in ([], ["--json"]):
            stdout = run_command("eval", path, "-d", *options, cwd=tmp_path).stdout
            assert SECRET not in stdout and "(hidden)" in stdout and "${NAME}" in stdout

    def test_another_query_is_another_target_and_is_recognised_from_the_manifest(self, tmp_path: Path) -> None:
        def run(query: Any, *words: Any) -> Any:
            target = {"http": service.url + query, "request": {}, "response": "value"}
            write_spec(tmp_path, target=target)
            return run_command(*(words or ("eval", "eval.yaml")), cwd=tmp_path)

        with workflow(lambda _: {"value": "x"}) as service:
            for query, asked in (("?flow=a", 2), ("?flow=b", 4), ("?flow=a", 4)):
                run(query)
                assert len(service.asked) == asked
            runs = [path.parent for path in tmp_path.glob("runs/e/*/manifest.json")]
            assert len(runs) == 2
            run("?flow=c", "grade", runs[0], "--again")
            assert len(service.asked) == 4

    def test_an_address_may_name_environment_variables(self, tmp_path: Path) -> None:
        with workflow(lambda _: {"value": "x"}) as service:
            path = write_spec(tmp_path, target={"http": "${WHERE}/v1?k=${KEY}", "request": {}, "response": "value"})
            run_command("eval", path, cwd=tmp_path, env={"WHERE": service.url.rstrip("/"), "KEY": "secret"})
            assert {asked.path for asked in service.asked} == {"/v1?k=secret"}
        unset = run_command("eval", path, "--fresh", cwd=tmp_path, env={"KEY": "secret"}, check=2)
        assert "target.http names ${WHERE}, which is not set" in unset.stderr
        wrong = run_command("eval", path, "--fresh", cwd=tmp_path, env={"WHERE": "ftp:/", "KEY": "secret"}, check=2)
        assert "not an HTTP URL after variable substitution" in wrong.stderr


def test_environment_of_tests_has_no_keys_of_the_user() -> None:
    assert {key for key in environment() if key.startswith(("OPENAI_", "HOLDFAST_"))} == {"HOLDFAST_HOME"}


class TestPrices:
    def test_the_table_has_a_date_and_can_be_replaced(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        built_in = Prices("openai/gpt-4o", {})
        assert built_in.usage(TokenCounts(input=1_000_000, output=0)).cost == 2.5 and re.fullmatch(
            r"\d{4}-\d\d-\d\d", built_in.date or ""
        )
        mine = tmp_path / "prices.json"
        mine.write_text('{"date": "2031-01", "models": {"gpt-4o": [1, 2]}}')
        monkeypatch.setenv("HOLDFAST_PRICES", str(mine))
        prices = Prices("openai/gpt-4o", {})
        assert (prices.usage(TokenCounts(input=0, output=1_000_000)).cost, prices.date) == (2, "2031-01")
        assert not Prices("gpt-4.1", {}).known

    def test_a_table_that_cannot_be_read_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOLDFAST_PRICES", str(tmp_path / "gone.json"))
        with pytest.raises(UsageError, match=r"the prices in .*gone.json cannot be read"):
            Prices("gpt-4o", {})

    def test_cached_input_tiers_and_batches_have_rates_of_their_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rates = {"input": [[0, 4], [200_000, 8]], "output": 20, "cache_read": 0.4, "cache_write": 5}
        listed = {"match": ["|", ["=", "m-1"], ["/", r"^m-1-\d{8}$"]], "rates": rates, "batch": {"output": 10}}
        table = {"date": "2031-01-01", "providers": {"anthropic": {"models": [listed]}}}
        (tmp_path / "prices.json").write_text(json.dumps(table))
        monkeypatch.setenv("HOLDFAST_PRICES", str(tmp_path / "prices.json"))
        prices = Prices("anthropic/M-1-20310101", {})

        def cost(**counts: Any) -> float | None:
            return prices.usage(TokenCounts(**counts)).cost

        assert cost(input=1_000, output=100) == pytest.approx((4_000 + 2_000) / 1e6)
        assert cost(input=1_000, output=0, cache_read=900) == pytest.approx((400 + 360) / 1e6)
        assert cost(input=1_000, output=0, cache_write=500) == pytest.approx((2_000 + 2_500) / 1e6)
        assert cost(input=200_000, output=0) == pytest.approx(0.8)
        assert cost(input=200_001, output=0) == pytest.approx(200_001 * 8 / 1e6)
        batched = prices.usage(TokenCounts(input=1_000, output=100), batch=True)
        assert batched.cost == pytest.approx((4_000 + 1_000) / 1e6)
        assert not Prices("anthropic/m-2", {}).known and not Prices("groq/m-1", {}).known

    def test_the_eval_file_has_prices_of_cached_input_too(self) -> None:
        prices = Prices("anthropic/m", {"m": Price(input=10, output=0, cache_read=1)})
        assert prices.usage(TokenCounts(input=1_000, output=0, cache_read=900)).cost == pytest.approx(1_900 / 1e6)

    @pytest.mark.parametrize("prefix", [*PROVIDERS, ""])
    def test_prices_are_of_providers_and_of_names_that_nobody_else_serves(self, prefix: str) -> None:
        names = {
            "": ("gpt-5", "claude-opus-5", "gemini-2.5-pro", "grok-4"),
            "bedrock": ("us.anthropic.claude-opus-5",),
            "vertex": ("gemini-2.5-pro", "claude-opus-5"),
            "openrouter": ("anthropic/claude-opus-5",),
            "groq": ("openai/gpt-oss-20b",),
            "mistral": ("mistral-large-latest",),
            "together": ("meta-llama/Llama-3.3-70B-Instruct-Turbo",),
            "deepseek": ("deepseek-chat",),
            "google": ("gemini-2.5-pro",),
            "anthropic": ("claude-opus-5",),
            "xai": ("grok-4",),
        }
        for name in () if prefix in ("ollama", "vllm") else names.get(prefix, ("gpt-4o",)):
            assert Prices(f"{prefix}/{name}".lstrip("/"), {}).known, name
        for name in ("gpt-oss-20b", "Qwen/Qwen3-8B", "my-model"):
            assert not Prices(name, {}).known
        assert not Prices("vllm/gpt-4o", {}).known

    def test_a_name_that_somebody_gave_to_a_model_of_their_own_has_no_price(self) -> None:
        for name in ("my/gpt-4o", "someone/claude-3-haiku-finetune"):
            assert not Prices(name, {}).known
        for name in ("ft:gpt-4o-mini-2024-07-18:org::id", "x-ai/grok-4", "models/gemini-2.5-pro"):
            assert Prices(name, {}).known
        assert Prices("my/gpt-4o", {"gpt-4o": Price(input=1, output=1)}).known, "asked for in the eval file"

    @pytest.mark.parametrize(
        ("model", "counts", "dollars"),
        [
            ("xai/grok-4", {"input": 10_120, "output": 1_499 + 2_809}, 10_120 * 3 + 4_308 * 15),
            ("gpt-5-mini", {"tier": "flex"}, 1_000 * 0.125 + 100 * 1),
            ("gpt-5-mini", {"tier": "priority"}, 1_000 * 0.45 + 100 * 3.6),
            ("gpt-5-mini", {"tier": "default"}, 1_000 * 0.25 + 100 * 2),
            ("claude-opus-4-5", {"cache_write": 50, "cache_write_long": 40}, 950 * 5 + 10 * 6.25 + 40 * 10 + 2_500),
            ("claude-opus-4-5", {"searches": 2}, 1_000 * 5 + 100 * 25 + 2 * 10_000),
            ("google/gemini-2.5-flash", {"input_audio": 600}, 400 * 0.3 + 600 * 1 + 100 * 2.5),
            ("google/gemini-2.5-pro", {"input_audio": 600}, 1_000 * 1.25 + 100 * 10),
            ("gpt-audio", {"input_audio": 600, "output_audio": 90}, 400 * 2.5 + 600 * 32 + 10 * 10 + 90 * 64),
        ],
    )
    def test_tiers_sounds_long_caches_and_searches_cost_what_they_cost(
        self, model: str, counts: dict[str, Any], dollars: float
    ) -> None:
        prices = Prices(model, {})
        usage = prices.usage(TokenCounts(**{"input": 1_000, "output": 100, **counts}))
        assert usage.cost == pytest.approx(dollars / 1e6) and prices.notices == []

    @pytest.mark.parametrize(
        ("model", "counts", "gap"),
        [
            ("gpt-4o-audio-preview", {"input_audio": 1}, "audio"),
            ("gpt-4o-audio-preview", {"output_audio": 1}, "audio"),
            ("gpt-4-turbo", {"tier": "scale"}, "the service tier 'scale'"),
            ("claude-opus-5", {"tier": "speed fast"}, "the service tier 'speed fast'"),
            ("xai/grok-4", {"searches": 1}, "web searches"),
            ("gemini-2.5-pro", {"unpriced": "web searches"}, "web searches"),
        ],
    )
    def test_what_has_no_price_makes_the_cost_unknown_and_is_named(
        self, model: str, counts: dict[str, Any], gap: str
    ) -> None:
        prices, tokens = Prices(model, {}), TokenCounts(**{"input": 1_000, "output": 100, **counts})
        assert prices.usage(tokens).cost is None
        assert prices.notices == [
            f"the cost of {model} is unknown: no price is known for {gap}; write `prices` in the eval file"
        ]
        written = Prices(model, {model: Price(input=1, output=2, web_search=3)})
        if "unpriced" not in counts:
            assert written.usage(tokens).cost == pytest.approx((1_200 + 3_000 * tokens.searches) / 1e6)
