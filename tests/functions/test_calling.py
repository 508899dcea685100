"""Users' functions: called with values that the rows have, loaded once, and reported with their traceback."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.engine.session import Options, preview_run
from holdfast.errors import ConfigError
from holdfast.report.compare import changed_graders, differences, read_scores
from holdfast.report.run_view import RunView
from tests.support.running import holdfast as command
from tests.support.running import lines, run_dir
from tests.support.specs import load, write_rows, write_spec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ECHO = "def reply(prompt): return prompt\n"
NAMES = ["expected", "answer", "ground_truth", "target", "ideal"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A folder of users' files; what they do to this process is undone."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = dict(sys.modules)
    (tmp_path / "echo.py").write_text(ECHO)
    yield tmp_path
    for name in set(sys.modules) - set(before):
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def keys_of(folder: Path, file: str = "echo.py") -> dict[str, Any]:
    target = {"python": f"{folder}/{file}:reply"}
    return {"name": "e", "prompt": "x", "same_prompt": True, "target": target, "runs_dir": folder / "runs"}


def scores(folder: Path, code: Any, row: Any, function: str = "check", **block: Any) -> Any:
    """Return the score of a grader with this code for one row, or the mean of several."""
    (folder / "checks.py").write_text(code)
    run = holdfast.evaluate(
        samples=row if isinstance(row, list) else [row],
        graders=[{"type": "python", "function": f"{folder}/checks.py:{function}", **block}],
        **keys_of(folder),
    )
    assert run.finished, run.reason
    return run.score


class TestExpectedValues:
    """The grader's own `expected`, else the field of the parameter's name, else the first field of a fixed order."""

    @pytest.mark.parametrize("parameter", NAMES)
    def test_a_parameter_finds_the_value_under_any_of_the_names(self, folder: Path, parameter: str) -> None:
        code = f"def check(output, {parameter}): return {parameter} == 'E'\n"
        assert scores(folder, code, [{field: "E"} for field in NAMES]) == 1

    @pytest.mark.parametrize(
        ("parameter", "row", "block"),
        [
            ("ground_truth", {"expected": "1", "answer": "2", "ground_truth": "E"}, {}),
            ("answer", {"expected": "1", "answer": "E"}, {}),
            ("expected", {"answer": "E", "ground_truth": "1", "target": "2", "ideal": "3"}, {}),
            ("target", {"ground_truth": "E", "ideal": "3"}, {}),
            ("ground_truth", {"ground_truth": "1", "q": "E"}, {"expected": "{{ q }}"}),
            ("ground_truth", {"ground_truth": "1"}, {"params": {"ground_truth": "E"}}),
            ("expected", {"expected": "E"}, {}),
        ],
    )
    def test_the_order_is_fixed(self, folder: Path, parameter: str, row: Any, block: Any) -> None:
        assert scores(folder, f"def check(output, {parameter}): return {parameter} == 'E'\n", row, **block) == 1

    def test_null_is_a_value_that_the_row_has(self, folder: Path) -> None:
        code = "def check(output, expected): return expected is None\n"
        assert scores(folder, code, {"expected": None, "answer": "x"}) == 1

    def test_a_default_is_used_if_the_row_has_no_value(self, folder: Path) -> None:
        assert scores(folder, "def check(output, ground_truth='none'): return ground_truth == 'none'\n", {"q": 1}) == 1

    @pytest.mark.parametrize("name", ["target", "category"])
    def test_a_parameter_with_a_default_is_the_authors_unless_it_was_always_offered(
        self, folder: Path, name: str
    ) -> None:
        assert scores(folder, f"def check(output, {name}=0.8): return {name}\n", {name: 0.1}) == 0.8

    def test_any_field_can_be_a_parameter(self, folder: Path) -> None:
        assert scores(folder, "def check(output, category): return category == 'sums'\n", {"category": "sums"}) == 1


class TestForeignSignatures:
    REWARDS = """
def simple(solution_str, ground_truth, extra_info, **kwargs):
    return float(ground_truth in solution_str and extra_info["ground_truth"] == ground_truth)

def full(messages, ground_truth, metadata, **kwargs):
    return float(ground_truth in messages[-1]["content"] and metadata["user_prompt"] in messages[-2]["content"])
"""

    def test_a_dataset_with_its_rewards_file_runs_as_it_is(self, tmp_path: Path) -> None:
        (tmp_path / "rewards.py").write_text(self.REWARDS)
        (tmp_path / "echo.py").write_text(ECHO)
        rows = [
            {"system_prompt": "Be brief.", "user_prompt": f"Say {n}", "ground_truth": str(n if n < 7 else -1)}
            for n in range(10)
        ]
        write_rows(tmp_path / "d.jsonl", rows)
        graders = [{"type": "python", "name": n, "function": f"rewards.py:{n}"} for n in ("simple", "full")]
        write_spec(
            tmp_path,
            samples=None,
            dataset={"path": "d.jsonl"},
            system="{{ system_prompt }}",
            prompt="{{ user_prompt }}",
            target={"python": "echo.py:reply"},
            graders=graders,
        )
        command("eval", "eval.yaml", cwd=tmp_path)
        by_grader = json.loads((run_dir(tmp_path) / "metrics.json").read_text())["metrics"]
        assert {name: values["score"] for name, values in by_grader.items()} == {"simple": 0.7, "full": 0.7}


class TestMissingValues:
    @pytest.mark.parametrize(
        ("code", "message"),
        [
            (
                "def check(output, ground_truth): return True\n",
                r"field ground_truth or expected or answer or target or",
            ),
            ("def check(output, category): return True\n", r"no sample has a field category; they have: id, q"),
            ("async def check(output, expected, **more): return True\n", r"check \(checks\.py:1\) asks for expected"),
        ],
    )
    def test_a_grader_whose_parameter_no_row_has_is_rejected_before_anything_runs(
        self, tmp_path: Path, code: str, message: str
    ) -> None:
        (tmp_path / "checks.py").write_text(code)
        (tmp_path / "echo.py").write_text(ECHO)
        grader = {"type": "python", "function": "checks.py:check"}
        write_spec(
            tmp_path, samples=[{"id": "a", "q": 1}], prompt="x", target={"python": "echo.py:reply"}, graders=[grader]
        )
        done = command("eval", "eval.yaml", cwd=tmp_path, check=2)
        assert re.search(message, done.stderr), done.stderr
        assert "eval.yaml" in done.stderr
        assert ("give the parameter a default" if "category" in code else 'expected: "{{ FIELD }}"') in done.stderr
        assert not (tmp_path / "runs").exists()

    def test_the_first_row_without_the_value_is_named(self, folder: Path) -> None:
        (folder / "checks.py").write_text("def check(output, expected): return True\n")
        write_rows(folder / "d.jsonl", [{"id": "a", "expected": 1}, {"id": "b", "other": 1}])
        grader = {"type": "python", "function": f"{folder}/checks.py:check"}
        keys = keys_of(folder, "echo.py")
        with pytest.raises(ConfigError, match=r"d\.jsonl:2: no field expected or .*it has: id, other"):
            holdfast.evaluate(dataset=folder / "d.jsonl", graders=[grader], **keys)
        run = holdfast.evaluate(dataset=folder / "d.jsonl", graders=[{**grader, "where": "id == 'a'"}], **keys)
        assert run.score == 1, "a row that the grader does not look at need not have it"

    def test_a_target_gets_fields_by_name_and_is_rejected_without_them(self, folder: Path) -> None:
        (folder / "agent.py").write_text("def reply(prompt, topic): return f'{prompt} {topic}'\n")
        keys = keys_of(folder, "agent.py")
        run = holdfast.evaluate(samples=[{"id": "a", "topic": "kelp"}], **keys)
        assert run.results()[0]["output"] == "x kelp"
        with pytest.raises(ConfigError, match=r"reply \(agent\.py:1\) asks for topic; no sample has a field topic"):
            holdfast.evaluate(samples=[{"id": "a", "topics": "kelp"}], **keys)

    def test_a_simulated_user_gets_fields_by_name_too(self, folder: Path) -> None:
        (folder / "user.py").write_text("def say(turn, wish): return wish\n")
        responder = {"python": f"{folder}/user.py:say", "max_followups": 1}
        keys = keys_of(folder, "echo.py")
        run = holdfast.evaluate(samples=[{"wish": "more"}], responder=responder, **keys)
        assert run.results()[0]["output"] == "more"
        with pytest.raises(ConfigError, match="asks for wish"):
            holdfast.evaluate(samples=[{"w": "more"}], responder=responder, **keys)


PLAIN = [{"id": f"p{number}", "answer": "x"} for number in range(4)]
OTHERS = [{"id": f"o{number}", "ideal": "x"} for number in range(4)]


class Grading:
    """An eval with Python graders, over and over, in one folder of runs."""

    CODE = """
from pathlib import Path

def note(name, row):
    with Path(__file__).with_name("asked").open("a") as file:
        file.write(f"{name} {row['id']}\\n")

def check(output, expected, sample):
    note("check", sample)
    return output in (expected, "more")

def early(output, expected, sample):
    note("early", sample)
    return not sample["id"].endswith("1")
"""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "checks.py").write_text(self.CODE)

    def evaluate(self, rows: Any, **keys: Any) -> Any:
        """Plan, then run; return how many trials were to run and to grade, and the calls of the graders."""
        keys = {
            "samples": rows,
            "prompt": "x",
            "same_prompt": True,
            "target": {"python": "echo.py:reply"},
            "graders": [{"type": "python", "function": "checks.py:check"}],
            **keys,
        }
        _, self.rundir, self.plan = preview_run(load(self.folder, **keys), Options(runs_dir=self.folder / "runs"))
        asked = self.folder / "asked"
        asked.write_text("")
        self.run = holdfast.evaluate(write_spec(self.folder, **keys), runs_dir=self.folder / "runs")
        assert self.run.finished and self.run.path == self.rundir.path
        trials = list(RunView(self.rundir).trials())
        assert [trial.output.sample for trial in trials] == [row["id"] for row in rows]
        assert all(trial.grades for trial in trials)
        return self.plan.to_run, self.plan.to_grade, sorted(asked.read_text().splitlines())


@pytest.fixture
def grading(folder: Path) -> Any:
    return Grading(folder)


STOPS = {
    "follow_ups": ["more"],
    "checkpoints": [
        {"after_turn": 1, "on_failure": "stop", "graders": [{"type": "python", "function": "checks.py:early"}]}
    ],
}


class TestOneOtherRow:
    """A row with its expected value under a name of its own changes nothing about the other rows."""

    @pytest.mark.parametrize(("rows", "new"), [(PLAIN, OTHERS[0]), (OTHERS, PLAIN[0])], ids=["other", "plain"])
    def test_only_the_new_row_is_graded(self, grading: Any, rows: Any, new: Any) -> None:
        assert grading.evaluate(rows)[2] == [f"check {row['id']}" for row in rows]
        assert grading.evaluate([*rows, new]) == (1, 0, [f"check {new['id']}"])
        assert "4 reused, 1 to run (1 row new); 4 outputs from" in str(grading.plan)
        assert grading.run.score == 1
        assert grading.evaluate(rows) == (0, 0, []), "and without it everything is there"

    def test_another_row_leaves_conversations_that_a_checkpoint_ended_unchanged(self, grading: Any) -> None:
        assert len(grading.evaluate(PLAIN, **STOPS)[2]) == 4 + 3
        assert grading.evaluate([*PLAIN, OTHERS[0]], **STOPS) == (1, 0, ["check o0", "early o0"])
        assert grading.evaluate([*PLAIN, *OTHERS], **STOPS)[0] == 3

    def test_runs_with_and_without_another_row_have_the_same_grader(self, grading: Any) -> None:
        grading.evaluate(PLAIN)
        first = read_scores(RunView(grading.rundir))
        grading.evaluate([*PLAIN, OTHERS[0]])
        second = read_scores(RunView(grading.rundir))
        assert changed_graders(first, second) == {}
        assert differences(first, second) == ["dataset (samples are paired by id)"]


class TestContradictions:
    @pytest.mark.parametrize(
        ("returned", "threshold", "expected"),
        [
            (
                '{"score": 0.3, "passed": True}',
                None,
                "passed=True with a score of 0.3, and the grader's threshold is 0.5",
            ),
            ('{"score": 0.7, "passed": False}', None, "passed=False with a score of 0.7"),
            ('{"score": None, "passed": True}', None, "passed=True with a score of None"),
            ('{"score": 0.7, "passed": "yes"}', None, "`passed` must be true or false, not 'yes'"),
            ('{"score": 0.3, "passed": True}', 0.25, 0.3),
            ('{"score": 0.7, "passed": True}', None, 0.7),
            ('{"passed": True}', None, 1),
            ('__import__("holdfast").Verdict(0.3, passed=True)', None, "passed=True with a score of 0.3"),
            ('__import__("holdfast").Verdict(0.7, passed=True)', None, 0.7),
        ],
    )
    def test_passed_is_never_ignored(
        self, tmp_path: Path, returned: str, threshold: float | None, expected: float | int | str
    ) -> None:
        from holdfast.errors import AttemptError
        from tests.support.specs import grade

        (tmp_path / "checks.py").write_text(f"def check(output): return {returned}\n")
        block = {"type": "python", "function": "checks.py:check"} | ({"threshold": threshold} if threshold else {})
        verdict = grade(tmp_path, block, "x", expected="x")
        if isinstance(expected, str):
            assert isinstance(verdict, AttemptError) and expected in verdict.message
        else:
            assert verdict.score == expected


class TestTracebacks:
    AGENT = """
def deep(n):
    if n == 0:
        raise ValueError("odd: sk-very-secret-1")
    return deep(n - 1)

def reply(prompt): return deep(3)
async def later(prompt): return deep(1)
def leaves(prompt):
    import sys
    sys.exit("no")
def chained(prompt):
    try:
        {}["x"]
    except KeyError as error:
        raise OSError("no config") from error
def check(output): return deep(2)
def user(turn): return deep(2)
"""

    def errors(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> Any:
        monkeypatch.setenv("SOME_API_KEY", "sk-very-secret-1")
        (folder / "agent.py").write_text(self.AGENT)
        keys = {"target": {"python": f"{folder}/echo.py:reply"}, "limits": {"retries": 0}, **keys}
        run = holdfast.evaluate(name="e", samples=[{"id": "a"}], prompt="x", runs_dir=folder / "runs", **keys)
        (error,) = lines(run.path / "errors.jsonl")
        return error

    @pytest.mark.parametrize("function", ["reply", "later"])
    def test_a_targets_traceback_is_recorded_without_secrets(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, function: str
    ) -> None:
        error = self.errors(folder, monkeypatch, target={"python": f"{folder}/agent.py:{function}"})
        assert error["message"] == "agent.py:4: ValueError: odd: (hidden: $SOME_API_KEY)"
        trace = error["traceback"]
        assert trace.startswith("Traceback (most recent call last)")
        assert trace.endswith("ValueError: odd: (hidden: $SOME_API_KEY)")
        assert f'agent.py", line {7 if function == "reply" else 8}, in {function}' in trace
        assert "return deep(n - 1)" in trace and "holdfast/functions" not in trace and "secret" not in trace

    def test_a_traceback_contains_causes(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trace = self.errors(folder, monkeypatch, target={"python": f"{folder}/agent.py:chained"})["traceback"]
        assert "KeyError: 'x'" in trace and trace.endswith("OSError: no config")
        trace = self.errors(folder, monkeypatch, target={"python": f"{folder}/agent.py:leaves"})["traceback"]
        assert 'sys.exit("no")' in trace and "SystemExit: no" in trace

    def test_graders_and_simulated_users_have_one_as_well(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        grader = {"type": "python", "function": f"{folder}/agent.py:check"}
        assert "in check" in self.errors(folder, monkeypatch, graders=[grader])["traceback"]
        responder = {"python": f"{folder}/agent.py:user", "max_followups": 1}
        assert "in user" in self.errors(folder, monkeypatch, responder=responder)["traceback"]

    def test_a_hook_that_is_a_python_program_has_one_as_well(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code = "def deep(): raise ValueError('odd: sk-very-secret-1')\ndeep()\n" + "# long\n" * 200
        (folder / "hook.py").write_text(code)
        hook = {"command": f"{sys.executable} {folder}/hook.py", "error_on_fail": True}
        error = self.errors(folder, monkeypatch, hooks={"before_task": [hook]})
        assert error["message"].startswith("hooks.before_task") and 'hook.py", line 2' in error["traceback"]
        assert error["traceback"].endswith("ValueError: odd: (hidden: $SOME_API_KEY)")

    def test_a_long_traceback_is_cut_in_the_middle(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "long.py").write_text(
            "def f(n): return f(n - 1) if n else g(0)\ndef g(n): raise ValueError('x' * 20_000)\n"
            "def reply(prompt): return f(3)\n"
        )
        trace = self.errors(folder, monkeypatch, target={"python": f"{folder}/long.py:reply"})["traceback"]
        assert len(trace) < 8100 and "in reply" in trace and trace.endswith("xxx")

    def test_errors_that_are_not_of_users_code_have_none(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        error = self.errors(folder, monkeypatch, target={"command": ["false"]})
        assert "traceback" not in error
