"""Content decides what a result is stored under, and nothing else does."""

from __future__ import annotations

import gzip
import json
import shutil
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast.canonical import canonical, digest
from holdfast.data.dataset import Dataset
from holdfast.data.survey import make_survey
from holdfast.plan.keys import generation_key, run_id
from holdfast.spec.document import Document
from holdfast.spec.load import build_eval
from holdfast.spec.template import normal_form, template
from holdfast.store.heads import Moment
from holdfast.targets.build import target_identity
from tests.support.specs import EVAL, ROWS, load, who, write_rows

if TYPE_CHECKING:
    from pathlib import Path

numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
leaves = st.none() | st.booleans() | numbers | st.text(max_size=8) | st.sampled_from([0, 1, "", "1", "a"])
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
rows = st.dictionaries(st.text(min_size=1, max_size=6), leaves, min_size=1, max_size=5)


def reordered(value: Any, choose: Any) -> Any:
    """Return a value with the keys of its mappings in another order."""
    if isinstance(value, dict):
        keys = choose(st.permutations(list(value)))
        return {key: reordered(value[key], choose) for key in keys}
    return [reordered(inner, choose) for inner in value] if isinstance(value, list) else value


def with_floats(value: Any) -> Any:
    """Return a value with its whole numbers as floats where a float can hold them."""
    if isinstance(value, dict):
        return {key: with_floats(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_floats(inner) for inner in value]
    return float(value) if type(value) is int and int(float(value)) == value else value


def same(one: Any, other: Any) -> Any:
    """Report whether two values are equal in JSON: 1 is 1.0, but not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


class TestCanonicalJson:
    @given(st.data())
    def test_the_order_of_keys_does_not_matter(self, data: Any) -> None:
        value = data.draw(values)
        assert canonical(reordered(value, data.draw)) == canonical(value)

    @given(values)
    def test_1_and_1_0_are_equal(self, value: Any) -> None:
        assert canonical(with_floats(value)) == canonical(value)

    @given(values, values)
    def test_values_have_the_same_digest_exactly_when_they_are_the_same(self, one: Any, other: Any) -> None:
        assert (digest(one) == digest(other)) == same(one, other)

    @given(values)
    def test_canonical_json_reads_back_as_the_same_value(self, value: Any) -> None:
        assert same(json.loads(canonical(value)), value)

    def test_the_digest_is_tagged_and_can_be_made_with_any_tool(self) -> None:
        assert (
            digest({"b": [1.0, None], "a": "ä"})
            == "sha256:" + sha256('{"a":"ä","b":[1,null]}'.encode()).hexdigest()[:32]
        )

    def test_numbers_that_json_cannot_represent_differ(self) -> None:
        assert len({digest(value) for value in (float("nan"), float("inf"), float("-inf"), None)}) == 4


class TestKeyFunctions:
    @given(st.tuples(rows, st.integers(1, 99), values), st.tuples(rows, st.integers(1, 99), values))
    def test_a_generation_key_tells_rows_trials_and_work_apart(self, one: Any, other: Any) -> None:
        assume(any(not same(a, b) for a, b in zip(one, other, strict=True)))
        keys = {generation_key(digest(row), trial, digest(work)) for row, trial, work in (one, other)}
        assert len(keys) == 2

    @given(st.text(), values, st.text(), values)
    def test_a_run_id_is_eight_hex_digits_of_name_and_parts(
        self, name: Any, parts: Any, other_name: Any, other_parts: Any
    ) -> None:
        run = run_id(name, {"p": parts})
        assert len(run) == 8 and set(run) <= set("0123456789abcdef")
        assert (run_id(other_name, {"p": other_parts}) == run) == (name == other_name and same(parts, other_parts))


def generation_keys(identity: Any) -> Any:
    return [
        identity.work.key(sample.asked, trial)
        for sample in identity.dataset
        for trial in range(1, identity.work.trials + 1)
    ]


def verdict_keys(identity: Any) -> Any:
    """Return what the verdicts on one output are found by, row by row."""
    moment = Moment(digest("an output"), None, 1.0)
    return [
        (identity.work.key(sample.asked, 1), slot.fingerprint, slot.turn, slot.judged(moment, sample.row))
        for sample in identity.dataset
        for slot in identity.work.slots
    ]


def graders_of(identity: Any) -> Any:
    return [slot.fingerprint for slot in identity.work.slots]


MODEL = EVAL["target"]


@pytest.fixture
def base(tmp_path: Path) -> Any:
    return who(tmp_path / "base")


class TestWhatAGenerationKeyReactsTo:
    @pytest.mark.parametrize(
        "change",
        [
            {"prompt": "{{ question }} Think."},
            {"system": "You are careful."},
            {"target": {**MODEL, "model": "other-model"}},
            {"target": {**MODEL, "params": {"temperature": 0.5}}},
            {"target": {**MODEL, "api": "completions"}},
            {"target": {**MODEL, "version": "2"}},
            {"target": {**MODEL, "identity": "url"}},
            {"samples": [{**row, "question": row["question"] + "?"} for row in ROWS]},
        ],
        ids=["prompt", "system", "model", "params", "api", "version", "identity", "row"],
    )
    def test_everything_that_can_change_an_answer_changes_every_key_and_the_run(
        self, tmp_path: Path, base: Any, change: Any
    ) -> None:
        changed = who(tmp_path / "changed", **change)
        assert not set(generation_keys(changed)) & set(generation_keys(base))
        assert changed.id != base.id

    def test_another_base_url_is_another_model_only_where_identity_says_so(self, tmp_path: Path) -> None:
        by_url = [
            who(tmp_path / name, target={"model": "m", "base_url": f"http://{name}/v1", "identity": "url"})
            for name in ("one", "two")
        ]
        assert by_url[0].work.digest != by_url[1].work.digest

    def test_an_address_from_the_environment_is_an_address_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        digests = []
        for url in ("http://one/v1", "http://one/v1/", "http://user:password@one/v1", "http://two/v1"):
            monkeypatch.setenv("OPENAI_BASE_URL", url)
            digests.append(who(tmp_path, target={"model": "m", "identity": "url"}).work.digest)
        assert digests[0] == digests[1] == digests[2] != digests[3]

    @settings(max_examples=20)
    @given(rows, rows)
    def test_rows_have_the_same_key_exactly_when_they_are_the_same(
        self, tmp_path_factory: pytest.TempPathFactory, one: Any, other: Any
    ) -> None:
        folder = tmp_path_factory.getbasetemp() / "rows"
        keys = [
            verdict_keys(who(folder, samples=[row], prompt="hello", graders=[{"type": "exact", "expected": "x"}]))
            for row in (one, dict(reversed(one.items())), other)
        ]
        assert keys[0] == keys[1]
        assert (keys[0] == keys[2]) == (json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True))


unusual = st.fixed_dictionaries(
    {"n": st.sampled_from(["1", 1, [1], None])},
    optional={name: st.just("1") for name in ("expected", "answer", "ground_truth", "target")},
)


class TestKeysOfOneRow:
    @settings(max_examples=30)
    @given(st.lists(unusual, min_size=1, max_size=3), st.lists(unusual, max_size=3))
    def test_keys_do_not_depend_on_the_other_rows(
        self, tmp_path_factory: pytest.TempPathFactory, some: Any, more: Any
    ) -> None:
        folder = tmp_path_factory.getbasetemp() / "others"
        folder.mkdir(exist_ok=True)
        (folder / "checks.py").write_text("def check(output, expected=None, ground_truth=None): return True\n")
        graders = [{"type": "exact", "expected": "{{ n }}"}, {"type": "python", "function": "checks.py:check"}]
        target = {"http": "http://127.0.0.1:1", "request": {"n": "{{ n }}"}}

        def keys(rows: Any) -> Any:
            named = [{"id": str(number), **row} for number, row in enumerate(rows)]
            identity = who(folder, samples=named, prompt="hello", graders=graders, target=target)
            return list(zip(generation_keys(identity), *([iter(verdict_keys(identity))] * 2), strict=True))

        assert keys([*some, *more])[: len(some)] == keys(some)


class TestWhatNoKeyReactsTo:
    @pytest.mark.parametrize(
        "change",
        [
            {"limits": {"concurrency": 3}},
            {"limits": {"concurrency": "auto"}},
            {"limits": {"turn_timeout": 5, "trial_timeout": "1h"}},
            {"limits": {"retries": 0}},
            {"limits": {"max_cost": 1, "token_budget": 10, "max_time": "2h"}},
            {"target": {**MODEL, "base_url": "http://elsewhere:9/v1"}},
            {"target": {**MODEL, "api_key_env": "OTHER_KEY"}},
            {"target": {**MODEL, "stream": True}},
            {"gate": {"exact": 0.9}},
            {"prices": {"test-model": {"input": 1, "output": 2}}},
            {"graders": [{"type": "exact", "weight": 5}]},
            {"graders": [{"type": "exact", "threshold": 0.25}]},
            {"graders": [{"type": "exact", "config": {"strip": True}}]},
            {"schemaVersion": "1.0", "trials": 1},
        ],
        ids=lambda change: json.dumps(change)[:60],
    )
    def test_limits_paths_and_thresholds_are_in_no_key(self, tmp_path: Path, base: Any, change: Any) -> None:
        changed = who(tmp_path / "changed", **change)
        assert generation_keys(changed) == generation_keys(base)
        assert graders_of(changed) == graders_of(base)
        assert changed.id == base.id

    def test_the_api_key_is_in_no_key(self, tmp_path: Path, base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-something-else")
        assert who(tmp_path / "changed").id == base.id

    def test_the_judges_address_is_in_no_fingerprint_but_its_model_and_rubric_are(self, tmp_path: Path) -> None:
        judge = {"type": "prompt", "rubric": "good?", "model": "judge", "base_url": "http://a/v1"}

        def fingerprint(name: Any, **change: Any) -> Any:
            return graders_of(who(tmp_path / name, graders=[{**judge, **change}]))[0]

        first = fingerprint("first")
        assert fingerprint("url", base_url="http://b/v1", api_key_env="K") == first
        others = [
            fingerprint("rubric", rubric="bad?"),
            fingerprint("model", model="other"),
            fingerprint("params", params={"temperature": 1}),
            fingerprint("transcript", transcript="all"),
        ]
        assert len({first, *others}) == 5


class TestWhatAGradeKeyReactsTo:
    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ({"type": "exact"}, {"type": "exact", "ignore_case": True}),
            ({"type": "exact"}, {"type": "exact", "expected": "{{ question }}"}),
            ({"type": "text", "contains": "a"}, {"type": "text", "contains_cs": "a"}),
            ({"type": "text", "regex_match": "a"}, {"type": "text", "regex_match": "b"}),
            ({"type": "choice"}, {"type": "choice", "choices": "AB"}),
            ({"type": "number"}, {"type": "number", "tolerance": 0.1}),
            ({"type": "number"}, {"type": "exact"}),
            (
                {"type": "json_schema", "schema": {"type": "object"}},
                {"type": "json_schema", "schema": {"type": "array"}},
            ),
        ],
        ids=lambda block: block["type"],
    )
    def test_a_changed_parameter_grades_again_without_generating(self, tmp_path: Path, one: Any, other: Any) -> None:
        before, after = who(tmp_path / "1", graders=[one]), who(tmp_path / "2", graders=[other])
        assert graders_of(before) != graders_of(after)
        assert generation_keys(before) == generation_keys(after)


AGENT = '''\
import helper
from tools.search import find

def reply(prompt):
    """Answer."""
    return helper.clean(prompt)
'''


@pytest.fixture
def agent(tmp_path: Path) -> Any:
    folder = tmp_path / "agent"
    (folder / "tools").mkdir(parents=True)
    (folder / "agent.py").write_text(AGENT)
    (folder / "helper.py").write_text("from tools import words\n\ndef clean(text):\n    return text\n")
    (folder / "tools" / "__init__.py").write_text("")
    (folder / "tools" / "search.py").write_text("def find(x):\n    return x\n")
    (folder / "tools" / "words.py").write_text("WORDS = ['a']\n")
    (folder / "unused.py").write_text("X = 1\n")
    return folder


PYTHON = {"python": "agent.py:reply"}


class TestPythonCodeInKeys:
    def edited(self, agent: Any, file: Any, old: Any, new: Any) -> Any:
        before = who(agent, target=PYTHON)
        path = agent / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        return before, who(agent, target=PYTHON)

    @pytest.mark.parametrize(
        ("file", "old", "new"),
        [
            ("agent.py", "helper.clean(prompt)", "helper.clean(prompt) + '!'"),
            ("agent.py", '"""Answer."""', '"""Reply."""'),
            ("helper.py", "return text", "return text.strip()"),
            ("tools/search.py", "return x", "return [x]"),
            ("tools/words.py", "['a']", "['b']"),
            ("tools/__init__.py", "", "LEVEL = 2\n"),
        ],
        ids=["the function", "its docstring", "an import", "a package's module", "an import of an import", "a package"],
    )
    def test_a_changed_function_or_local_import_changes_the_key(
        self, agent: Any, file: str, old: str, new: str
    ) -> None:
        before, after = self.edited(agent, file, old, new)
        assert not set(generation_keys(before)) & set(generation_keys(after))

    @pytest.mark.parametrize(
        ("file", "old", "new"),
        [
            ("agent.py", "import helper\n", "# a comment\nimport helper  # another\n\n\n"),
            ("agent.py", "    return helper", "        # deep comment\n    return helper"),
            ("helper.py", "return text\n", "return text  # unchanged\n"),
            ("unused.py", "X = 1", "X = 2"),
        ],
        ids=["comment", "indented comment", "comment in an import", "a file nobody imports"],
    )
    def test_a_comment_or_a_file_that_is_not_imported_runs_nothing(
        self, agent: Any, file: str, old: str, new: str
    ) -> None:
        before, after = self.edited(agent, file, old, new)
        assert before.id == after.id
        assert generation_keys(before) == generation_keys(after)

    def test_params_version_and_the_functions_name_are_in_the_key(self, agent: Any) -> None:
        (agent / "agent.py").write_text(AGENT + "\n\nanswer = reply\n")
        targets = [PYTHON, {**PYTHON, "params": {"n": 1}}, {**PYTHON, "version": "2"}, {"python": "agent.py:answer"}]
        assert len({who(agent, target=target).work.digest for target in targets}) == 4

    def test_the_code_is_read_and_never_run_to_make_a_key(self, agent: Any) -> None:
        (agent / "agent.py").write_text("raise SystemExit('imported')\n" + AGENT)
        assert who(agent, target=PYTHON).id

    def test_a_python_graders_source_is_only_in_its_own_fingerprint(self, agent: Any) -> None:
        graders = [{"type": "python", "function": "helper.py:clean"}, {"type": "exact"}]
        before = who(agent, graders=graders)
        (agent / "helper.py").write_text("def clean(output):\n    return True\n")
        after = who(agent, graders=graders)
        assert graders_of(before)[0] != graders_of(after)[0]
        assert graders_of(before)[1] == graders_of(after)[1]
        assert generation_keys(before) == generation_keys(after)


HTTP = {"http": "http://h/run", "request": {"input": "{{ prompt }}"}, "response": "value"}


class TestWorkflowsAndProgramsInKeys:
    @pytest.mark.parametrize(
        "change",
        [
            {"http": "http://h/other"},
            {"request": {"input": "{{ prompt }}", "k": 3}},
            {"response": "answer"},
            {"version": "2"},
        ],
        ids=["url", "request", "response", "version"],
    )
    def test_url_request_response_and_version_of_a_workflow_are_in_the_key(self, tmp_path: Path, change: Any) -> None:
        digests = [who(tmp_path, target=target).work.digest for target in (HTTP, {**HTTP, **change})]
        assert digests[0] != digests[1]

    def test_headers_are_not(self, tmp_path: Path) -> None:
        other = {**HTTP, "headers": {"Authorization": "Bearer ${TOKEN}"}}
        assert who(tmp_path, target=HTTP).id == who(tmp_path, target=other).id

    def test_a_programs_arguments_input_and_version_are_in_the_key(self, tmp_path: Path) -> None:
        blocks = [
            {"command": ["./agent", "{{ prompt }}"]},
            {"command": ["./agent", "-v", "{{ prompt }}"]},
            {"command": ["./agent", "{{ prompt }}"], "stdin": "{{ prompt }}"},
            {"command": ["./agent", "{{ prompt }}"], "version": "2"},
        ]
        assert len({who(tmp_path, target=block).work.digest for block in blocks}) == 4

    @pytest.mark.parametrize("edited", ["agent", "notes.txt"])
    def test_files_of_the_folder_that_a_command_names_are_in_the_key_by_content(
        self, tmp_path: Path, edited: str
    ) -> None:
        for name in ("agent", "notes.txt", "unnamed.txt"):
            (tmp_path / name).write_text("one")
        target = {"command": ["./agent", "notes.txt", "{{ prompt }}"]}
        before = who(tmp_path, target=target).work.digest
        (tmp_path / "unnamed.txt").write_text("two")
        assert who(tmp_path, target=target).work.digest == before
        (tmp_path / edited).write_text("two")
        assert who(tmp_path, target=target).work.digest != before


class TestPathsAreInNoKey:
    def test_the_spelling_of_a_path_does_not_matter(self, agent: Any) -> None:
        write_rows(agent / "data.jsonl", ROWS)
        identities = [
            who(agent, samples=None, dataset={"path": data}, target={"python": function})
            for data, function in (
                ("data.jsonl", "agent.py:reply"),
                ("./data.jsonl", "./agent.py:reply"),
                ("tools/../data.jsonl", "tools/../agent.py:reply"),
                (str(agent / "data.jsonl"), str(agent / "agent.py:reply")),
                ("dat*.jsonl", "agent.py:reply"),
            )
        ]
        assert len({one.id for one in identities}) == 1
        assert len({str(one.directory(agent).path) for one in identities}) == 1

    def test_a_folder_that_moves_keeps_its_keys(self, agent: Any, tmp_path: Path) -> None:
        write_rows(agent / "data.jsonl", ROWS)
        keys: dict[str, Any] = {"samples": None, "dataset": {"path": "data.jsonl"}, "target": PYTHON}
        before = who(agent, **keys)
        shutil.copytree(agent, tmp_path / "moved" / "elsewhere")
        assert who(tmp_path / "moved" / "elsewhere", **keys).id == before.id

    def test_rows_have_the_same_keys_in_every_file_format(self, tmp_path: Path, base: Any) -> None:
        plain = write_rows(tmp_path / "rows.jsonl", ROWS)
        (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
        (tmp_path / "list.json").write_text(json.dumps(ROWS))
        (tmp_path / "table.csv").write_text(
            "expected,id,question\n" + "".join(f"{row['expected']},{row['id']},{row['question']}\n" for row in ROWS)
        )
        for file in ("rows.jsonl", "packed.jsonl.gz", "list.json", "table.csv"):
            assert who(tmp_path, samples=None, dataset={"path": file}).id == base.id, file

    def test_the_order_of_rows_is_part_of_the_run_and_not_of_trials(self, tmp_path: Path, base: Any) -> None:
        turned = who(tmp_path / "turned", samples=ROWS[::-1])
        assert set(generation_keys(turned)) == set(generation_keys(base))
        assert turned.id != base.id


def test_a_sample_is_digested_alike_by_survey_and_stream(tmp_path: Path) -> None:
    spec = load(tmp_path)
    survey = make_survey(Dataset(spec))
    assert [survey.row_at(number).hex() for number in range(2)] == [
        s.digest.removeprefix("sha256:") for s in Dataset(spec)
    ]


def test_files_of_another_eval_are_not_in_a_targets_key(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "import importlib\nimportlib.import_module('json')\ndef reply(prompt): return prompt\n"
    )
    (tmp_path / "hooks.py").write_text("def save(context): return 1\ndef restore(state, context): pass\n")
    rows = [{"id": "a"}]
    common = {"name": "e", "samples": rows, "prompt": "x", "graders": []}
    plain = {"python": "agent.py:reply"}
    state = {**plain, "state": {"save": "hooks.py:save", "restore": "hooks.py:restore"}}
    alone = target_identity(build_eval(Document({**common, "target": plain}), tmp_path))
    target_identity(build_eval(Document({**common, "target": state}), tmp_path))
    assert target_identity(build_eval(Document({**common, "target": plain}), tmp_path)) == alone


spaces = st.text(" \n", max_size=3)
words = st.sampled_from(
    [
        ("a",),
        ("b", ".", "c"),
        ("a", "|", "upper"),
        ("'x  y'", "~", "a"),
        ("a", "if", "a", "else", "1.5"),
        ("a", "[", "0", "]"),
    ]
)
pieces = st.one_of(
    st.sampled_from(["text", " ", "\n", "a }} b", "{# a note #}", "{% raw %}{{ a }}{% endraw %}"]),
    st.tuples(st.sampled_from(["", "-"]), words, st.sampled_from(["", "-"])),
)


class TestSpellingOfTemplates:
    @given(st.lists(pieces, max_size=5), st.data())
    def test_spaces_inside_of_braces_are_in_no_key_and_all_else_that_is_sent_is(self, parts: Any, data: Any) -> None:
        def spelled(gap: Any) -> str:
            return "".join(
                part
                if isinstance(part, str)
                else "{{" + part[0] + gap() + f" {gap()}".join(part[1]) + gap() + part[2] + "}}"
                for part in parts
            )

        one, other = spelled(lambda: " "), spelled(lambda: data.draw(spaces))
        assert normal_form(one) == normal_form(other)
        fields = {"a": "A", "b": {"c": "C"}}
        assert template(normal_form(one)).render(fields) == template(one).render(fields)

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("{{ a }} b", "{{ a }}  b"),
            ("{{ a }}\n", "{{ a }}"),
            ("{{ 'x y' }}", "{{ 'x  y' }}"),
            ("{{ a }}", "{% raw %}{{ a }}{% endraw %}"),
            ("{{ a -}} b", "{{ a }} b"),
        ],
    )
    def test_what_renders_differently_has_another_key(self, one: str, other: str) -> None:
        assert normal_form(one) != normal_form(other)

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ({"prompt": "{{ question }}"}, {"prompt": "{{question}}"}),
            ({"prompt": "{{ question | upper }}"}, {"prompt": "{{question|upper}}"}),
            ({"system": "{% if question %}x{% endif %}"}, {"system": "{%if question  %}x{%endif%}"}),
            ({"follow_ups": ["{{ question }}"]}, {"follow_ups": ["{{question}}"]}),
            ({"history": "[ ]"}, {"history": "[]"}),
            ({"target": {**MODEL, "params_from": "{'a': 1}"}}, {"target": {**MODEL, "params_from": "{ 'a' : 1 }"}}),
            (
                {"target": {"http": "http://h", "request": {"q": "{{ prompt }}"}}},
                {"target": {"http": "http://h", "request": {"q": "{{prompt}}"}}},
            ),
            ({"graders": [{"type": "exact"}]}, {"graders": [{"type": "exact", "expected": "{{expected}}"}]}),
            (
                {"graders": [{"type": "exact", "where": "question == 'x'"}]},
                {"graders": [{"type": "exact", "where": "question=='x'"}]},
            ),
        ],
        ids=["prompt", "filter", "statement", "follow-up", "expression", "params", "request", "grader", "where"],
    )
    def test_an_eval_that_is_only_spelled_differently_is_the_same_run(
        self, tmp_path: Path, one: Any, other: Any
    ) -> None:
        assert who(tmp_path / "one", **one).id == who(tmp_path / "other", **other).id
