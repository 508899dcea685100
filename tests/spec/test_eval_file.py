"""The eval file: every documented key is read, and every problem is reported with file and line."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data.dataset import Dataset
from holdfast.data.survey import make_survey
from holdfast.errors import ConfigError, DataError, UsageError
from holdfast.spec.document import parse_duration, read_document
from holdfast.spec.load import apply_override, load_eval, parse_override
from tests.support.specs import ROWS, command, load, who, write_rows, write_spec

if TYPE_CHECKING:
    from pathlib import Path

FULL = """\
schemaVersion: "1.0"
name: gsm8k
dataset:
  path: [test.jsonl, "more/*.jsonl"]
  format: jsonl
  id: question_id
  limit: 100
  offset: 2
  shuffle: 7
  where: level == "hard"
  split: train
  subset: main
  revision: abc
target:
  model: gpt-4o-mini
  base_url: http://127.0.0.1:8000/v1
  api_key_env: MY_KEY
  api: completions
  params: {temperature: 0, max_tokens: 512}
  stream: true
  identity: url
  version: "3"
system: You are careful.
prompt: "{{ question }}"
trials: 3
graders:
  - name: correct
    type: number
    expected: "{{ answer.split('####')[1] }}"
    after: "####"
    tolerance: 0.5
    relative: true
    weight: 2
    threshold: 0.5
  - {type: exact, expected: 5, ignore_case: true, strip: false}
  - {type: choice, expected: 2, choices: ABCD}
  - type: text
    config:
      contains: one
      contains_cs: [two]
      contains_any: [a, b]
      contains_any_cs: [c]
      not_contains: three
      not_contains_cs: four
      regex_match: "^x"
      regex_not_match: ["y$"]
  - {type: json_schema, schema: {type: object}, extract: true}
  - {type: json_schema, name: from file, schema_file: schema.json}
  - {type: python, function: "checks.py:check", expected: "{{ answer }}", params: {k: 1}, version: "1"}
  - {type: prompt, rubric: "Good? {{ output }}", model: judge, base_url: "http://j/v1", api_key_env: J, transcript: all,
     params: {temperature: 1}}
limits: {concurrency: auto, turn_timeout: 90s, trial_timeout: 1h30m, retries: 2,
         max_cost: 20, token_budget: 1000, max_time: 2h}
gate: {correct: 0.8, score: 0.5, passed: 0.1, baseline: 17ff, max_drop: 3pt, confidence: 0.9, inconclusive: fail}
prices: {judge: {input: 1, output: 2}}
"""


def refused(folder: Path, text: Any, *overrides: Any) -> Any:
    """The message about an eval file that is wrong."""
    path = folder / "eval.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_eval(path, [parse_override(override) for override in overrides])
    return str(caught.value)


BASE = """\
name: e
samples: [{id: a, question: q, expected: x}]
target: {model: m}
prompt: "{{ question }}"
graders: [{type: exact}]
"""


class TestWhatIsRead:
    def test_every_documented_key_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "full.yaml"
        path.write_text(FULL)
        spec = load_eval(path)
        assert (spec.name, spec.trials, spec.system) == ("gsm8k", 3, "You are careful.")
        assert spec.dataset.model_dump() == {
            "path": ["test.jsonl", "more/*.jsonl"],
            "format": "jsonl",
            "id": "question_id",
            "limit": 100,
            "limit_by": None,
            "offset": 2,
            "shuffle": 7,
            "where": 'level == "hard"',
            "ids": [],
            "tags": [],
            "delimiter": None,
            "encoding": "utf-8",
            "field": None,
            "split": "train",
            "subset": "main",
            "revision": "abc",
        }
        assert spec.target.model_dump() == {
            "model": "gpt-4o-mini",
            "base_url": "http://127.0.0.1:8000/v1",
            "api_key_env": "MY_KEY",
            "api": "completions",
            "params": {"temperature": 0, "max_tokens": 512},
            "stream": True,
            "reasoning_history": "auto",
            "strip_reasoning": None,
            "json_schema": None,
            "batch": None,
            "identity": "url",
            "version": "3",
            "tools": [],
            "max_steps": 20,
            "params_from": None,
            "tokenizer": None,
            "likelihood": {"form": "auto", "truncate": "never", "max_length": None, "prefix": None},
        }
        assert [grader.name for grader in spec.graders] == [
            "correct",
            "exact",
            "choice",
            "text",
            "json_schema",
            "from file",
            "python",
            "prompt",
        ]
        graders: Any = spec.graders
        number, exact, choice, text, schema, from_file, python, prompt = graders
        assert (number.after, number.tolerance, number.relative, number.weight, number.threshold) == (
            "####",
            0.5,
            True,
            2,
            0.5,
        )
        assert (exact.expected, exact.ignore_case, exact.strip) == (5, True, False)
        assert (choice.expected, choice.choices) == (2, "ABCD")
        assert (text.contains, text.contains_any, text.regex_match) == (["one"], ["a", "b"], ["^x"])
        assert (schema.json_schema, schema.extract, from_file.schema_file) == ({"type": "object"}, True, "schema.json")
        assert (python.function, python.params) == ("checks.py:check", {"k": 1})
        assert (prompt.model, prompt.transcript, prompt.params) == ("judge", "all", {"temperature": 1})
        limits = spec.limits
        assert (limits.concurrency, limits.turn_timeout, limits.trial_timeout) == ("auto", 90, 5400)
        assert (limits.retries, limits.max_cost, limits.token_budget, limits.max_time) == (2, 20, 1000, 7200)
        assert spec.gate is not None and spec.gate.minima == {"correct": 0.8, "score": 0.5, "passed": 0.1}
        assert (spec.gate.baseline, spec.gate.max_drop, spec.gate.confidence) == ("17ff", 0.03, 0.9)
        assert spec.gate.inconclusive == "fail"
        assert (spec.prices["judge"].input, spec.prices["judge"].output) == (1, 2)

    @pytest.mark.parametrize(
        ("target", "name"),
        [
            ({"python": "sub/agent.py:Agent.reply", "params": {"k": 1}, "version": "1"}, "agent.py:Agent.reply"),
            ({"http": "https://h/run", "request": {}, "response": "a.b", "headers": {"X": "y"}}, "https://h/run"),
            ({"command": ["bin/agent", "{{ prompt }}"], "stdin": "{{ question }}"}, "agent"),
        ],
        ids=["python", "http", "command"],
    )
    def test_every_kind_of_target_is_read(self, tmp_path: Path, target: Any, name: str) -> None:
        spec = load(tmp_path, target=target)
        assert {key: value for key, value in spec.target.model_dump().items() if key in target} == target
        assert spec.target.label == name

    def test_omitted_keys_have_the_documented_defaults(self, tmp_path: Path) -> None:
        spec = load(tmp_path)
        assert (spec.trials, spec.system, spec.gate, spec.limits.retries) == (1, None, None, 5)
        assert (spec.limits.turn_timeout, spec.limits.trial_timeout, spec.limits.concurrency) == (120, 600, None)
        assert (spec.target.api_key_env, spec.target.api, spec.target.params) == (None, None, {})
        assert (spec.graders[0].name, spec.graders[0].weight) == ("exact", 1)

    def test_eval_files_are_yaml_1_2(self, tmp_path: Path) -> None:
        (tmp_path / "e.yaml").write_text(
            BASE.replace("question: q", "question: no, on: yes, time: 2024-01-02, octal: 010")
        )
        assert load_eval(tmp_path / "e.yaml").samples == [
            {"id": "a", "question": "no", "on": "yes", "time": "2024-01-02", "octal": 10, "expected": "x"}
        ]

    def test_json_is_yaml_with_its_escapes(self, tmp_path: Path) -> None:
        spec = load(tmp_path, samples=[{"id": "a", "question": "😀 \U0001f600", "expected": "ä"}])
        assert "\\ud83d\\ude00" in (tmp_path / "eval.yaml").read_text()
        assert spec.samples[0]["question"] == "😀 \U0001f600"

    def test_anchors_and_merges_work(self, tmp_path: Path) -> None:
        text = BASE.replace("graders: [{type: exact}]", "x: 1").replace("x: 1\n", "")
        (tmp_path / "e.yaml").write_text(
            text + "graders:\n- &first {type: exact, strip: false}\n- {<<: *first, name: second, ignore_case: true}\n"
        )
        second = load_eval(tmp_path / "e.yaml").graders[1]
        assert (second.type, second.strip, second.ignore_case) == ("exact", False, True)  # type: ignore[attr-defined]

    def test_a_judge_has_the_targets_endpoint_by_default(self, tmp_path: Path) -> None:
        target = {"model": "m", "base_url": "http://t/v1", "api_key_env": "T"}
        own, same, other, elsewhere, embedded = load(
            tmp_path,
            target=target,
            graders=[
                {"type": "prompt", "rubric": "r", "name": "own"},
                {"type": "prompt", "rubric": "r", "name": "same", "model": "m"},
                {"type": "prompt", "rubric": "r", "name": "other", "model": "n"},
                {"type": "prompt", "rubric": "r", "name": "elsewhere", "base_url": "http://j/v1", "api_key_env": "J"},
                {"type": "prompt", "rubric": "r", "name": "embedded", "model": "local/smollm2-135m"},
            ],
        ).graders
        assert (own.model, own.base_url, own.api_key_env) == ("m", "http://t/v1", "T")
        assert (same.model, same.base_url, same.api_key_env) == ("m", "http://t/v1", "T")
        assert (other.model, other.base_url, other.api_key_env) == ("n", "http://t/v1", "T")
        assert (elsewhere.model, elsewhere.base_url, elsewhere.api_key_env) == ("m", "http://j/v1", "J")
        assert embedded.base_url is None


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("old", "new", "line", "words"),
        [
            ("prompt:", "promt:", 4, ["promt: unknown key", "did you mean 'prompt'"]),
            ("{model: m}", "{model: m, temperatur: 0}", 3, ["target.temperatur: unknown key", "known here: model"]),
            ("{model: m}", "{model: m, api_kye_env: K}", 3, ["did you mean 'api_key_env'"]),
            ("{model: m}", "{model: m, api_key: sk-123}", 3, ["not written into files", "api_key_env"]),
            ("{model: m}", "{model: m, python: 'a.py:f'}", 3, ["exactly one of", ", not model and python"]),
            ("{model: m}", "{base_url: x}", 3, ["needs exactly one of model, python, http, command"]),
            ("{model: m}", "{pyton: 'a.py:f'}", 3, ["target: needs exactly one of", "did you mean 'python'?"]),
            ("{model: m}", "{model: ''}", 3, ["target.model"]),
            ("{model: m}", "{model: m, api: chatty}", 3, ["'chat', 'responses'", "'chatty'"]),
            ("{model: m}", "{python: agent}", 3, ["target.python"]),
            ("{model: m}", "{python: agent.py}", 3, ["target.python"]),
            ("{model: m}", "{http: 'ftp://x', request: {}}", 3, ["target.http"]),
            ("{model: m}", "{http: 'http://x'}", 3, ["target.request: is missing"]),
            ("{model: m}", "{command: []}", 3, ["target.command"]),
            ("{model: m}", "{command: './a b'}", 3, ["target.command", "list"]),
            ("{model: m}", "m", 3, ["target: should be a mapping with keys such as model, python, ", "not 'm'"]),
            ("{type: exact}", "{type: exakt}", 5, ["unknown grader type 'exakt'", "did you mean 'exact'"]),
            ("{type: exact}", "{name: x}", 5, ["needs a type", "json_schema"]),
            ("{type: exact}", "{type: exact, ignorecase: true}", 5, ["did you mean 'ignore_case'"]),
            ("{type: exact}", "{type: exact}, {type: exact}", 5, ["duplicate grader name 'exact'"]),
            ("{type: exact}", "{type: exact, name: n}, {type: number, name: n}", 5, ["duplicate grader name 'n'"]),
            *(
                ("{type: exact}", f"{{type: exact, name: {name}}}", 5, [f"'{name}' is reserved for reports"])
                for name in ("overall", "score", "passed", "coverage", "target")
            ),
            ("{type: exact}", "{type: text}", 5, ["checks nothing", "contains", "regex_match"]),
            ("{type: exact}", "{type: text, contains: [], regex_match: []}", 5, ["checks nothing"]),
            ("{type: exact}", "{type: text, contains: ''}", 5, ["checks nothing", "in every answer"]),
            ("{type: exact}", "{type: text, contains: a, regex_match: ['']}", 5, ["checks nothing"]),
            ("{type: exact}", "{type: json_schema}", 5, ["checks nothing: give at least one of schema, schema_file"]),
            ("{type: exact}", "{type: json_schema, schema: {}}", 5, ["checks nothing"]),
            ("{type: exact}", "{type: choice, choices: ''}", 5, ["graders[0].choices"]),
            ("{type: exact}", "{type: prompt, rubric: ''}", 5, ["graders[0].rubric"]),
            ("{type: exact}", "{type: python}", 5, ["graders[0].function: is missing"]),
            ("{type: exact}", "{type: text, regex_match: '('}", 5, ["not a regular expression", "'('"]),
            ("{type: exact}", "{type: text, regex_not_match: '[a'}", 5, ["not a regular expression", "'[a'"]),
            ("{type: exact}", "{type: number, after: '*'}", 5, ["not a regular expression"]),
            ("{type: exact}", "{type: exact, threshold: 2}", 5, ["graders[0].threshold", "less than or equal to 1"]),
            ("{type: exact}", "{type: exact, weight: -1}", 5, ["graders[0].weight"]),
            ("{type: exact}", "{type: text, config: [contains]}", 5, ["graders[0].config", "mapping"]),
            ("{type: exact}", "exact", 5, ["graders[0]", "'exact'"]),
            (
                "{type: exact}",
                "{type: exact, expected: '{{ expected'}",
                5,
                ["graders[0].expected", "not a valid template"],
            ),
            ("{{ question }}", "{{ question", 4, ["prompt: not a valid template"]),
            ("{{ question }}", "{% if %}", 4, ["prompt: not a valid template"]),
            ('prompt: "{{ question }}"', "prompt: ''", 4, ["prompt", "at least 1 character"]),
            ("name: e", "name: ''", 1, ["name"]),
            ("name: e", "name: [e]", 1, ["name: should be text, not a list"]),
            ("name: e", "name: e\ntrials: 0", 2, ["trials", "greater than or equal to 1", "not 0"]),
            ("name: e", "name: e\ntrials: many", 2, ["trials: should be a whole number, not 'many'"]),
            (
                "name: e",
                "name: e\nlimits: {concurrency: many}",
                2,
                ["limits.concurrency: should be a whole number or 'auto', not 'many'"],
            ),
            (
                "name: e",
                "name: e\nlimits: 5",
                2,
                ["limits: should be a mapping with keys such as concurrency, ", "not 5"],
            ),
            ("name: e", "name: e\nlimits: {concurrency: 0}", 2, ["concurrency must be at least 1, or auto"]),
            ("name: e", "name: e\nlimits: {turn_timeout: soon}", 2, ["limits.turn_timeout: a duration such as"]),
            ("name: e", "name: e\nlimits: {retrys: 1}", 2, ["limits.retrys", "did you mean 'retries'"]),
            ("name: e", "name: e\nresponder: {modle: x}", 2, ["responder.modle", "did you mean 'model'"]),
            ("name: e", "name: e\nhooks: {after_run: [{comand: x}]}", 2, ["hooks.after_run[0].comand", "'command'"]),
            ("name: e", "name: e\nprices: {m: {output: -1}}", 2, ["prices.m.output: should be greater", "not -1"]),
            ("{model: m}", "{model: m, tools: [{pyton: f}]}", 3, ["target.tools[0].pyton", "did you mean 'python'"]),
            ("name: e", "name: e\ngate: {exat: 0.5}", 2, ["gate.exat: no grader of this name", "did you mean 'exact'"]),
            ("name: e", "name: e\ngate: {exact: high}", 2, ["gate.exact", "'high'"]),
            ("name: e", "name: e\ngate: {exact: 80}", 2, ["gate.exact: should be less than or equal to 1, not 80"]),
            (
                "name: e",
                "name: e\ngate: {baseline: 12345678}",
                2,
                ["gate.baseline: YAML reads the id of this run"],
            ),
            ("name: e", "name: e\ngate: {max_drop: 0.5}", 2, ["gate.max_drop: 0.5 is ambiguous: write 0.5pt or 50pt"]),
            ("name: e", "name: e\ngate: {confidence: 95}", 2, ["gate.confidence: should be less than 1, not 95"]),
            ("name: e", "name: e\ngate: {inconclusive: x}", 2, ["gate.inconclusive: should be 'pass' or 'fail'"]),
            ("name: e", "name: e\nprices: {m: {input: 1}}", 2, ["prices.m.output: is missing"]),
            (
                "name: e",
                "name: e\ndataset: {path: d.jsonl}",
                3,
                ["samples: give either `dataset` or `samples`, not both"],
            ),
            ("name: e", "name: e\nname: f", 2, ["not valid YAML", "duplicate key"]),
            ("{model: m}", "{model: m, model: n}", 3, ["not valid YAML", "duplicate key"]),
            ("name: e", "name: [e", 2, ["not valid YAML"]),
            ("name: e", "name: e\n\tx: 1", 2, ["not valid YAML"]),
        ],
        ids=lambda value: value if isinstance(value, str) else None,
    )
    def test_an_error_is_reported_with_its_line(
        self, tmp_path: Path, old: Any, new: Any, line: Any, words: Any
    ) -> None:
        assert old in BASE
        message = refused(tmp_path, BASE.replace(old, new, 1))
        assert f"eval.yaml:{line}" in message
        for word in words:
            assert word in message

    @pytest.mark.parametrize("key", ["name", "target", "prompt"])
    def test_a_key_that_must_be_there_is_named(self, tmp_path: Path, key: str) -> None:
        assert f"{key}: is missing" in refused(tmp_path, re.sub(rf"(?m)^{key}:.*\n", "", BASE))

    def test_a_file_without_samples_is_refused_with_what_to_add(self, tmp_path: Path) -> None:
        assert "give either `dataset` or `samples`" in refused(tmp_path, re.sub(r"(?m)^samples:.*\n", "", BASE))

    @pytest.mark.parametrize(
        "dataset", ["{}", "{path: []}", "{path: d.jsonl, limit: 0}", "{path: d.jsonl, formt: csv}"]
    )
    def test_a_dataset_that_names_nothing_is_refused(self, tmp_path: Path, dataset: str) -> None:
        message = refused(tmp_path, re.sub(r"(?m)^samples:.*$", f"dataset: {dataset}", BASE))
        assert "eval.yaml:2: dataset." in message

    def test_all_problems_are_listed_at_once(self, tmp_path: Path) -> None:
        text = """\
nam: e
samples: [{id: a}]
target: {model: m, top: 1}
prompt: hello
trials: 0
graders:
  - type: text
  - type: exakt
"""
        problems = refused(tmp_path, text).splitlines()
        for line, key in (
            (1, "nam: unknown key"),
            (3, "target.top: unknown key"),
            (5, "trials"),
            (7, "graders[0]: checks nothing"),
            (8, "graders[1].type: unknown grader type"),
        ):
            assert any(f"eval.yaml:{line}: {key}" in problem for problem in problems), key
        assert any("name: is missing" in problem for problem in problems)
        assert len(problems) == 6

    def test_a_judge_needs_a_model_if_the_target_is_not_a_model(self, tmp_path: Path) -> None:
        message = refused(
            tmp_path, BASE.replace("{model: m}", "{command: [x]}").replace("{type: exact}", "{type: prompt, rubric: r}")
        )
        assert "graders[0]: needs a `model` to judge with" in message

    @pytest.mark.parametrize(
        ("target", "where"),
        [
            ({"command": ["x", "{{ prompt"]}, "target.command"),
            ({"command": ["x"], "stdin": "{% for %}"}, "target.stdin"),
            ({"http": "http://h", "request": {"a": [{"b": "{{ prompt"}]}}, "target.request"),
        ],
        ids=["command", "stdin", "request"],
    )
    def test_a_bad_template_inside_a_target_is_found_when_the_file_is_read(
        self, tmp_path: Path, target: Any, where: str
    ) -> None:
        with pytest.raises(ConfigError, match=f"{where}: not a valid template"):
            load(tmp_path, target=target)


class TestTemplatesAndRows:
    @pytest.mark.parametrize(
        "keys",
        [
            {"prompt": "{{ qestion }}"},
            {"prompt": "hello", "system": "{{ qestion }}"},
            {"prompt": "hello", "graders": [{"type": "exact", "expected": "{{ qestion }}"}]},
            {"prompt": "hello", "graders": [{"type": "text", "not_contains": ["{{ qestion }}"]}]},
            {"prompt": "hello", "graders": [{"type": "prompt", "rubric": "{{ qestion }} {{ output }} {{ messages }}"}]},
            {"prompt": "hello", "target": {"command": ["x", "{{ qestion }} {{ prompt }}"]}},
            {"prompt": "hello", "target": {"http": "http://h", "request": {"a": ["{{ qestion }}", "{{ trial }}"]}}},
            {"graders": [{"type": "exact", "where": "qestion == 'hello'"}]},
        ],
        ids=["prompt", "system", "expected", "not_contains", "rubric", "command", "request", "where"],
    )
    def test_a_variable_that_no_sample_has_is_named_with_the_fields_there_are(self, tmp_path: Path, keys: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            who(tmp_path, **keys)
        message = str(caught.value)
        assert "no sample has a field 'qestion'; they have: expected, id, question" in message
        assert re.search(r"eval\.yaml:\d+: ", message)

    @pytest.mark.parametrize(
        "where", ["hard", "hard is defined and hard > 2", "{'a': {'b': 1}}.a.b == 1", "question > 2 and hard"]
    )
    def test_a_condition_may_ask_for_a_field_that_some_rows_have(self, tmp_path: Path, where: str) -> None:
        assert who(tmp_path, graders=[{"type": "exact", "where": where}])

    @pytest.mark.parametrize("name", ["output", "messages", "prompt"])
    def test_only_a_rubric_sees_the_answer(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ConfigError, match=f"no sample has a field '{name}'"):
            who(tmp_path, graders=[{"type": "exact", "expected": f"{{{{ {name} }}}}"}])

    def test_a_row_that_lacks_a_field_is_named_with_its_line(self, tmp_path: Path) -> None:
        write_rows(tmp_path / "d.jsonl", [*ROWS, {"id": "c", "expected": "x"}, {"id": "d", "expected": "y"}])
        with pytest.raises(ConfigError) as caught:
            who(tmp_path, samples=None, dataset={"path": "d.jsonl"})
        message = str(caught.value)
        assert "d.jsonl:3" in message and "'question' is undefined" in message
        assert "prompt" in message and "d.jsonl:4" not in message

    def test_a_row_written_by_hand_is_named_with_its_line_in_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "eval.yaml"
        path.write_text(
            "name: e\nsamples:\n  - {id: a, question: q}\n  - {id: b}\ntarget: {model: m}\nprompt: '{{ question }}'\n"
        )
        with pytest.raises(ConfigError, match=r"eval\.yaml:4: samples\[1\]"):
            make_survey(Dataset(load_eval(path)))

    def test_a_default_makes_a_field_optional(self, tmp_path: Path) -> None:
        identity = who(tmp_path, samples=[{"id": "a"}], prompt="{{ hint | default('none') }}", graders=None)
        assert identity.survey.count == 1

    @pytest.mark.parametrize("where", ["level ==", "(", "{{ level }}"])
    def test_a_bad_where_is_refused_with_its_line(self, tmp_path: Path, where: str) -> None:
        write_rows(tmp_path / "d.jsonl", ROWS)
        with pytest.raises(ConfigError, match=r"eval\.yaml:\d+: dataset\.where: not a valid expression"):
            who(tmp_path, samples=None, dataset={"path": "d.jsonl", "where": where})

    def test_a_where_that_a_row_cannot_answer_names_the_row(self, tmp_path: Path) -> None:
        write_rows(tmp_path / "d.jsonl", [{**ROWS[0], "n": 1}, {**ROWS[1], "n": "two"}])
        with pytest.raises(DataError, match=r"d\.jsonl:2: dataset\.where cannot be evaluated"):
            who(tmp_path, samples=None, dataset={"path": "d.jsonl", "where": "n > 0"})

    @pytest.mark.parametrize(
        "attack",
        [
            "{{ ''.__class__.__mro__ }}",
            "{{ question.__init__.__globals__ }}",
            "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        ],
    )
    def test_templates_cannot_reach_out_of_their_sandbox(self, tmp_path: Path, attack: str) -> None:
        from holdfast.spec.template import Template, TemplateError

        with pytest.raises(TemplateError):
            Template(attack).render(ROWS[0])


class TestOverrides:
    @pytest.mark.parametrize(
        ("text", "look", "expected"),
        [
            ("target.model=gpt-5", lambda s: s.target.model, "gpt-5"),
            ("target.params.temperature=0.7", lambda s: s.target.params, {"temperature": 0.7}),
            ("target.params={top_p: 0.5, stop: [a, b]}", lambda s: s.target.params, {"top_p": 0.5, "stop": ["a", "b"]}),
            ("limits.concurrency=auto", lambda s: s.limits.concurrency, "auto"),
            ("graders.0.ignore_case=true", lambda s: s.graders[0].ignore_case, True),
            ("graders.exact.strip=false", lambda s: s.graders[0].strip, False),
            ("graders.mine.contains=[x, y]", lambda s: s.graders[1].contains, ["x", "y"]),
            ("graders=[{type: number}]", lambda s: [g.type for g in s.graders], ["number"]),
            ("gate.exact=0.9", lambda s: s.gate.minima, {"exact": 0.9}),
            ("system=", lambda s: s.system, None),
            ("samples.0.question=new=question", lambda s: s.samples[0]["question"], "new=question"),
            ("target.version=2024-01-02", lambda s: s.target.version, "2024-01-02"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_any_key_can_be_overridden(self, tmp_path: Path, text: str, look: Any, expected: Any) -> None:
        graders = [{"type": "exact"}, {"type": "text", "name": "mine", "contains": "a"}]
        assert look(load(tmp_path, text, graders=graders, system="be brief")) == expected

    @pytest.mark.parametrize("text", ["novalue", "=1", "a..b=1", ".a=1", "a.=1", "a=[1"])
    def test_invalid_overrides_are_refused(self, text: str) -> None:
        with pytest.raises(UsageError, match=re.escape(repr(text))):
            parse_override(text)

    @pytest.mark.parametrize("text", ["graders.5.strip=true", "graders.nobody.strip=true", "samples.x.q=1"])
    def test_an_entry_that_is_not_there_is_refused(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(UsageError, match="there is no such entry"):
            load(tmp_path, text)

    def test_the_entries_that_are_there_are_named(self, tmp_path: Path) -> None:
        graders = [{"type": "exact"}, {"type": "text", "name": "mine", "contains": "a"}]
        with pytest.raises(UsageError, match=r"graders\.min: .*did you mean 'mine'\?\); there are exact, mine"):
            load(tmp_path, "graders.min.contains=b", graders=graders)

    def test_an_override_is_checked_like_the_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"target\.temperatur: unknown key"):
            load(tmp_path, "target.temperatur=1")

    def test_the_last_override_wins_and_the_file_is_not_touched(self, tmp_path: Path) -> None:
        path = write_spec(tmp_path)
        before = path.read_bytes()
        assert load_eval(path, [parse_override("trials=2"), parse_override("trials=4")]).trials == 4
        assert path.read_bytes() == before

    def test_an_override_takes_precedence_over_config(self, tmp_path: Path) -> None:
        grader = {"type": "number", "name": "n", "config": {"tolerance": 1, "threshold": 0.5}}
        spec = load(tmp_path, "graders.n.tolerance=10", "graders.n.weight=2", graders=[grader])
        assert (spec.graders[0].tolerance, spec.graders[0].threshold, spec.graders[0].weight) == (10, 0.5, 2)

    words = st.text("abcxyz_", min_size=1, max_size=4)

    @given(
        st.dictionaries(words, st.integers() | st.dictionaries(words, st.integers(), max_size=2), max_size=3), st.data()
    )
    def test_an_override_sets_its_place_and_no_other(self, data: Any, draw: Any) -> None:
        path = tuple(draw.draw(st.lists(self.words, min_size=1, max_size=3)))
        before = json.loads(json.dumps(data))
        apply_override(data, path, "new")
        node = data
        for part in path:
            node = node[part]
        assert node == "new"
        assert {key: value for key, value in data.items() if key != path[0]} == {
            key: value for key, value in before.items() if key != path[0]
        }


BROKEN = {
    "empty.yaml": b"",
    "list.yaml": b"- a\n- b\n",
    "text.yaml": b"just words\n",
    "latin.yaml": "name: caf\u00e9\n".encode("latin-1"),
    "binary.yaml": bytes(range(256)),
    "half.yaml": b'name: "\\ud83d"\n',
    "wrong.yaml": b"name: e\npromt: x\n",
}


class TestTheCommand:
    """A wrong file gives exit code 2 and its place, and nothing is written."""

    @pytest.mark.parametrize("name", [*BROKEN, "missing.yaml", "folder.yaml"])
    def test_a_file_that_cannot_be_read_as_an_eval_ends_with_two(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: Any
    ) -> None:
        if name == "folder.yaml":
            (tmp_path / name).mkdir()
        elif name in BROKEN:
            (tmp_path / name).write_bytes(BROKEN[name])
        before = sorted(tmp_path.rglob("*"))
        ended = command(monkeypatch, capsys, tmp_path, "eval", name)
        assert ended.code == 2
        assert ended.err.startswith(f"error: {name}") and "Traceback" not in ended.err
        assert ended.out == ""
        assert sorted(tmp_path.rglob("*")) == before

    def test_a_missing_file_is_reported_with_a_hint(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "holdfast init" in command(monkeypatch, capsys, tmp_path, "eval", "missing.yaml").err


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (90, 90),
        ("90", 90),
        ("90s", 90),
        ("5m", 300),
        ("2h", 7200),
        ("1h30m", 5400),
        ("1h 5m 3s", 3903),
        ("1.5h", 5400),
        ("2min", 120),
    ],
)
def test_durations(written: int | str, seconds: int) -> None:
    assert parse_duration(written) == seconds


@pytest.mark.parametrize("written", ["", "soon", "5 apples", "-5s", "h", "5d"])
def test_invalid_durations_are_refused(written: str) -> None:
    with pytest.raises(ValueError, match="a duration such as"):
        parse_duration(written)


def test_lines_are_known_for_every_key(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a:\n  b:\n    - c: 1\n    -\n      d: 2\n")
    document = read_document(path)
    assert document.where(("a", "b", 1, "d")) == f"{path}:5: a.b[1].d"
    assert document.where(("a", "b", 0, "nowhere")) == f"{path}:3: a.b[0].nowhere"
