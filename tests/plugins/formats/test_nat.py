"""NeMo Agent Toolkit in this process: configurations as evals, workflows as targets, evaluators as graders."""

from __future__ import annotations

import importlib
import json
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML

from holdfast.data.dataset import Dataset
from holdfast.errors import ConfigError
from holdfast.plugins.nat.steps import messages_of, usage_of
from holdfast.spec.document import read_document
from holdfast.spec.formats import load_any
from holdfast.spec.schema import SCHEMA_VERSION
from tests.support.nat import install_components, nat_project
from tests.support.running import PATIENCE, holdfast, lines, metrics, run_dir, wait_for
from tests.support.specs import command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.nat import Nat


def edit(path: Path, **changes: Any) -> None:
    """Change values of a YAML file, each named by its path with two underscores between the keys."""
    yaml = YAML()
    data = yaml.load(path.read_text())
    for place, value in changes.items():
        *parents, last = place.split("__")
        node = data
        for part in parents:
            node = node[part]
        node[last] = value
    with path.open("w") as file:
        yaml.dump(data, file)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[Path], str]:
    """Return a function that returns the plan of the command, which is made without NAT."""

    def dry_run(config: Path) -> str:
        monkeypatch.setattr(sys, "path", [str(config.parent / "installed"), *sys.path])
        importlib.invalidate_caches()
        done = command(monkeypatch, capsys, config.parent, "eval", config, "--dry-run")
        assert done.code == 0, done.err
        return done.out + done.err

    return dry_run


def events(folder: Path) -> list[str]:
    """Return the actions of the workflow in order."""
    path = folder / "events.txt"
    return path.read_text().splitlines() if path.exists() else []


def test_a_configuration_runs_as_it_is_and_reruns_only_what_a_change_concerns(
    nat: Nat, tmp_path: Path, plan: Callable[[Path], str]
) -> None:
    config = nat_project(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "other_output.json").write_text("of an earlier `nat eval`")
    done = nat("eval", config, cwd=tmp_path)
    assert events(tmp_path) == ["open", "call", "call", "close"], "rows of another kind are left out"
    assert "config.yml:11: eval.general.output.cleanup: nothing is deleted" in done.stdout + done.stderr

    run = run_dir(tmp_path, "powers_agent")
    output = next(line for line in lines(run / "outputs.jsonl") if line["sample"] == "1")
    called, result, answer = output["messages"][1:]
    assert called["tool_calls"][0]["function"] == {"name": "power", "arguments": "7"}
    assert (result["role"], result["content"], answer["content"]) == ("tool", "49", "the answer is 49")
    assert output["usage"] == {"input_tokens": 10, "output_tokens": 3, "requests": 1, "cost": None}
    kinds = [step["payload"]["event_type"] for step in output["trace"]]
    assert kinds[0] == "WORKFLOW_START" and "LLM_END" in kinds and kinds.count("FUNCTION_END") == 2

    grades = {line["sample"]: line for line in lines(run / "grades.jsonl")}
    assert {name: grade["score"] for name, grade in grades.items()} == {"1": 1.0, "2": 0.0}
    assert grades["1"]["details"]["reasoning"] == {"steps": kinds, "asked": "what is 7"}
    assert metrics(run)["score"] == 0.5
    written = json.loads((tmp_path / "out" / "workflow_output.json").read_text())
    assert [row["generated_answer"] for row in written] == ["the answer is 49", "the answer is 9"]
    assert "sk-test" not in (run / "manifest.json").read_text()
    assert "sk-test" not in (tmp_path / "out" / "config_effective.yml").read_text()
    files = {path.name for path in (tmp_path / "out").glob("*_output.json*")}
    assert files == {
        *("workflow_output.json", "workflow_output.jsonl", "contains_output.json"),
        "other_output.json.bak",
    }, "files of different runs are not mixed"

    assert "2 finished" in plan(config)
    edit(config, llms__judge__base_url="http://127.0.0.1:10/v1", llms__judge__api_key="sk-other")
    assert "2 finished" in plan(config)
    edit(config, llms__judge__model_name="judge-2")
    assert "2 to grade (grader `contains` changed)" in plan(config)
    edit(config, llms__judge__model_name="judge-1", functions__power__exponent=3)
    assert "2 to run (target.config.functions.power.exponent 2 → 3" in plan(config)
    edit(config, functions__power__exponent=2)
    code = tmp_path / "installed" / "powers.py"
    code.write_text(code.read_text().replace("the answer is", "it is"))
    assert "2 to run (powers.py changed" in plan(config)


def test_an_evaluators_error_is_never_a_score_and_other_scales_are_declared(nat: Nat, tmp_path: Path) -> None:
    nat_project(tmp_path)
    moods: dict[str, dict[str, Any]] = {"raises": {}, "reports": {}, "hides": {}, "7.0": {}, "nan": {}}
    moods |= {"4.0": {"range": [0, 5]}, "6.0": {"range": [0, 5]}, "16.5": {"measure": True}, "8.0": {"measure": False}}
    spec = {
        "schemaVersion": SCHEMA_VERSION,
        "name": "moods",
        "samples": [{"id": "a", "question": "what is 7", "expected": "49"}],
        "target": {"nat": "config.yml", "override": {"functions.power.exponent": 3}},
        "prompt": "{{ question }}",
        "graders": [
            {"type": "tool_calls", "required_tools": ["power"]},
            {"type": "text", "contains": "343"},
            {"type": "nat", "name": "contains"},
            *(
                {"type": "nat", "name": mood, "evaluator": {"_type": "mood", "mood": mood}, **keys}
                for mood, keys in moods.items()
            ),
        ],
    }
    (tmp_path / "moods.yaml").write_text(json.dumps(spec))
    done = nat("eval", "moods.yaml", cwd=tmp_path, check=3)
    assert "skipped every output" not in done.stdout + done.stderr, "a measurement is no grader that checked nothing"
    run = run_dir(tmp_path, "moods")
    grades = {line["grader"]: line for line in lines(run / "grades.jsonl")}
    verdicts = {name: (grade["status"], grade["score"]) for name, grade in grades.items()}
    assert verdicts == {
        "tool_calls": ("passed", 1.0),
        "text": ("passed", 1.0),
        "contains": ("failed", 0.0),
        "raises": ("error", None),
        "reports": ("error", None),
        "hides": ("error", None),
        "nan": ("error", None),
        "4.0": ("passed", 0.8),
        "6.0": ("error", None),
        "16.5": ("skipped", None),
        "8.0": ("error", None),
        "7.0": ("skipped", None),
    }
    errors = {line["where"]: line["message"] for line in lines(run / "errors.jsonl")}
    assert errors["raises"].endswith("ConnectionError: the judge is down")
    assert "8.0 is not between 0 and 1: give the grader its `range: [lowest, highest]`" in errors["8.0"]
    assert "6.0 is not between 0 and 5: correct its `range`" in errors["6.0"]
    assert "grader `7.0` has no score: some of its values are labels, or are not between 0 and 1" in done.stdout
    assert grades["16.5"]["details"] == {"value": 16.5, "reasoning": "as it was told"}


def test_a_part_of_the_object_that_a_workflow_returns_may_be_the_answer(nat: Nat, tmp_path: Path) -> None:
    install_components(tmp_path, "kinds")
    (tmp_path / "config.yml").write_text("workflow: {_type: gives, kind: object}")
    spec = {
        "schemaVersion": SCHEMA_VERSION,
        "name": "parts",
        "samples": [{"id": "a", "question": "why", "expected": 3}],
        "target": {"nat": "config.yml", "result_json_path": "$.n"},
        "prompt": "{{ question }}",
        "graders": [
            {"type": "nat", "name": "sees", "evaluator": {"_type": "sees"}},
            {"type": "nat", "name": "templates", "evaluator": {"_type": "sees"}, "expected": "{{ [expected, 'b'] }}"},
            {"type": "exact", "expected": "3"},
        ],
    }
    (tmp_path / "parts.yaml").write_text(json.dumps(spec))
    nat("eval", "parts.yaml", cwd=tmp_path)
    run = run_dir(tmp_path, "parts")
    (output,) = lines(run / "outputs.jsonl")
    assert (output["output"], output["value"]) == ("3", 3)
    grades = {line["grader"]: line for line in lines(run / "grades.jsonl")}
    seen = {name: grades[name]["details"]["reasoning"] for name in ("sees", "templates")}
    assert (seen["sees"]["output"], seen["sees"]["expected"]) == ("3", "3")
    assert seen["templates"]["expected"] == "[3, 'b']"
    assert grades["exact"]["status"] == "passed"
    done = nat("eval", "parts.yaml", "target.result_json_path=$[", cwd=tmp_path, check=2)
    assert "target.result_json_path: '$[' is not a JSONPath" in done.stderr


def test_without_the_profiler_its_files_are_left_out_and_the_package_is_named(nat: Nat, tmp_path: Path) -> None:
    config = nat_project(tmp_path)
    edit(config, eval__general__profiler={"base_metrics": True})
    code = (
        "import sys; sys.modules['nat.plugins.profiler'] = None\n"  # as if it were not installed
        "from pathlib import Path; from holdfast.spec.formats import load_any\n"
        "from holdfast.spec.document import read_document\n"
        "print(*load_any(read_document(Path('config.yml'))).notices, sep='\\n')\n"
    )
    done = nat.python("-c", code, cwd=tmp_path)
    assert "config.yml:" in done.stdout and "pip install nvidia-nat-profiler" in done.stdout, done.stderr


def test_a_workflow_is_closed_after_a_signal(nat: Nat, tmp_path: Path) -> None:
    config = nat_project(tmp_path)
    rows = [{"id": 1, "question": "please wait", "answer": "", "kind": "easy"}]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    process = nat.start("eval", config, cwd=tmp_path)
    try:
        wait_for(lambda: "call" in events(tmp_path), "a call in flight", patience=5 * PATIENCE)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 143
    assert events(tmp_path) == ["open", "call", "close"]
    assert "Traceback" not in err and "never awaited" not in err and "was destroyed" not in err


def test_a_configuration_that_nat_refuses_is_named_before_anything_runs(nat: Nat, tmp_path: Path) -> None:
    config = nat_project(tmp_path)
    edit(config, workflow___type="powers_agnet")
    done = nat("eval", config, cwd=tmp_path, check=2)
    assert "config.yml:" in done.stderr and "powers_agnet" in done.stderr and "powers_agent" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_without_nat_the_packages_to_install_are_named(tmp_path: Path) -> None:
    config = nat_project(tmp_path)
    done = holdfast("eval", config, cwd=tmp_path, check=2)
    assert "needs NeMo Agent Toolkit" in done.stderr
    assert "pip install nvidia-nat-core nvidia-nat-eval nvidia-nat-profiler" in done.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval__general__dataset___type": "xls"}, "eval.general.dataset._type: not supported: xls: Excel files"),
        ({"eval__general__dataset___type": "custom"}, "eval.general.dataset._type: not supported: custom: a custom"),
        ({"eval__general__dataset__s3": {"bucket": "b"}}, "eval.general.dataset.s3: not supported: nothing is downl"),
        ({"eval__general__output__s3": {"bucket": "b"}}, "eval.general.output.s3: not supported: nothing is uploaded"),
        ({"eval__general__output__custom_scripts": {"a": {}}}, "eval.general.output.custom_scripts: not supported"),
        ({"eval__general__per_input_user_id": False}, "per_input_user_id: not supported: each trial runs as a user"),
        ({"eval__general__dataset__structure": {"question": "q"}}, "dataset.structure.question: unknown key"),
        ({"functionz": {}}, "functionz: unknown key (did you mean 'functions'?)"),
        ({"eval": None}, "eval: is missing; to evaluate the workflow with other data, write an eval file"),
        ({"base": "gone.yml"}, "gone.yml: no such file"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_unsupported_keys_are_refused_by_name_with_the_reason(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = nat_project(tmp_path)
    edit(config, **changes)
    with pytest.raises(ConfigError) as refused:
        load_any(read_document(config))
    assert message in str(refused.value)
    assert f"{config}:" in str(refused.value)


def test_refused_keys_can_be_unset_on_the_command_line(tmp_path: Path) -> None:
    config = nat_project(tmp_path)
    edit(config, eval__general__output__custom_scripts={"a": {"script": "a.py"}})
    spec = load_any(read_document(config), [(("eval", "general", "output", "custom_scripts"), None)])
    assert spec.limits.concurrency == 3


def test_keys_that_nat_ignores_are_ignored_and_named(tmp_path: Path) -> None:
    config = nat_project(tmp_path)
    edit(config, eval__general__verbose=True, eval__general__concurrency=3, eval__output={}, eval__general__output__a=1)
    notices = "\n".join(load_any(read_document(config)).notices)
    assert "eval.general.verbose: NAT has no such key: no effect" in notices
    assert "eval.general.concurrency: NAT has no such key (did you mean 'max_concurrency'?): no effect" in notices
    assert "eval.output: NAT has no such key" in notices and "eval.general.output.a: NAT has no such key" in notices


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv"])
def test_rows_are_those_that_the_configuration_selects_under_its_own_names(kind: str, tmp_path: Path) -> None:
    config = nat_project(tmp_path)
    rows = [{"key": f"k{number}", "ask": f"what is {number}", "truth": number, "level": number} for number in range(4)]
    rows.append({"key": "k4", "ask": " ", "truth": 4, "level": 3})  # NAT leaves out rows without a question
    texts = {
        "json": json.dumps(rows),
        "jsonl": "\n".join(map(json.dumps, rows)),
        "csv": "key,ask,truth,level\n" + "\n".join(",".join(map(str, row.values())) for row in rows),
    }
    (tmp_path / "rows.txt").write_text(texts[kind])
    dataset = {
        "_type": kind,
        "file_path": "rows.txt",
        "id_key": "key",
        "structure": {"question_key": "ask", "answer_key": "truth"},
        "filter": {
            "allowlist": {"field": {"level": [1, "[23]"], "unknown": ["x"]}},
            "denylist": {"field": {"key": ["k2"]}},
        },
    }
    edit(config, eval__general__dataset=dataset)
    spec = load_any(read_document(config))
    assert [sample.id for sample in Dataset(spec)] == ["k1", "k3"]
    assert spec.prompt == "{{ ask }}"
    block = {key: dataset[key] for key in ("_type", "id_key", "structure")}
    assert spec.graders[0].model_dump()["dataset"] == block


def test_a_configuration_may_extend_another_and_take_texts_from_files(
    tmp_path: Path, plan: Callable[[Path], str]
) -> None:
    nat_project(tmp_path)
    (tmp_path / "prompt.md").write_text("Answer briefly.")
    above = tmp_path / "above.yml"
    above.write_text("base: config.yml\nworkflow: {model_name: small, prompt: 'file://prompt.md'}\n")
    before = plan(above)
    assert "2 trials of 2 samples: 2 to run" in before
    spec = load_any(read_document(above))
    assert (spec.name, [grader.name for grader in spec.graders]) == ("powers_agent", ["contains"])


def test_evaluators_get_the_calls_of_targets_that_report_no_steps(nat: Nat, tmp_path: Path) -> None:
    nat_project(tmp_path)
    (tmp_path / "agent.py").write_text(
        "def reply(prompt):\n"
        "    call = {'id': 'c', 'function': {'name': 'search', 'arguments': '{\"query\": \"kelp\"}'}}\n"
        "    asked = {'role': 'assistant', 'content': None, 'tool_calls': [call]}\n"
        "    found = {'role': 'tool', 'tool_call_id': 'c', 'content': 'seaweed'}\n"
        "    answer = {'role': 'assistant', 'content': 'It is seaweed.'}\n"
        "    return {'output': 'It is seaweed.', 'messages': [asked, found, answer]}\n"
    )
    grader = {"type": "nat", "name": "contains", "config_file": "config.yml"}
    spec = {
        "schemaVersion": SCHEMA_VERSION,
        "name": "e",
        "samples": [{"id": "a", "question": "What is kelp?", "expected": "seaweed"}],
        "target": {"python": "agent.py:reply"},
        "prompt": "{{ question }}",
        "graders": [grader],
    }
    (tmp_path / "e.yaml").write_text(json.dumps(spec))
    nat("eval", "e.yaml", cwd=tmp_path)
    (grade,) = lines(run_dir(tmp_path) / "grades.jsonl")
    assert grade["score"] == 1.0
    assert grade["details"]["reasoning"]["steps"] == ["LLM_END", "TOOL_END", "LLM_END"]
    assert events(tmp_path) == [], "only the evaluator is built, not the workflow of its configuration"


def test_a_tool_that_is_reported_twice_counts_once_and_unfinished_calls_count() -> None:
    def step(kind: str, name: str, key: str, **data: Any) -> dict[str, Any]:
        framework = "langchain" if name == "chain" else None
        return {"payload": {"event_type": kind, "framework": framework, "name": name, "UUID": key, "data": data}}

    trace = [
        step("FUNCTION_START", "<workflow>", "w", input="hi"),
        step("FUNCTION_START", "chain", "c", input="hi"),
        step("TOOL_START", "search", "t", input="{'query': 'kelp'}"),
        step("FUNCTION_START", "search", "f", input={"query": "kelp"}),
        step("FUNCTION_END", "search", "f", input={"query": "kelp"}, output="seaweed"),
        step("TOOL_END", "search", "t", input="{'query': 'kelp'}", output={"content": "seaweed", "type": "tool"}),
        step("TOOL_START", "order", "o", input='{"count": 1}'),
        step("LLM_END", "m", "l", output="done"),
    ]
    first, result, second, answer = messages_of(trace, "done")
    assert first["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"query":"kelp"}'}
    assert result["content"] == "seaweed"
    assert second["tool_calls"][0]["function"] == {"name": "order", "arguments": '{"count": 1}'}
    assert answer == {"role": "assistant", "content": "done"}
    usage = usage_of(trace)
    assert (usage.requests, usage.input_tokens) == (1, None), "a call that does not say what it used is unknown"
