"""`holdfast.evaluate`: the same as the command, from Python."""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib.util
import json
import signal
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.errors import ConfigError, UsageError
from tests.support.running import lines, server, wait_for
from tests.support.specs import write_rows, write_spec
from tests.support.workflow import workflow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SAMPLES = [{"id": f"s{number}", "q": f"word{number}", "expected": f"WORD{number}"} for number in range(12)]


def shout(prompt: Any) -> Any:
    return prompt.upper()


async def shout_later(prompt: Any, context: Any) -> str:
    await asyncio.sleep(0.001 * (5 - int(prompt.removeprefix("word")) % 5))
    return f"{prompt.upper()} {context.trial}"


def is_right(output: Any, expected: Any) -> Any:
    return output == expected


async def starts_right(output: Any, sample: Any) -> Any:
    return holdfast.Verdict(0.5 if output.startswith(sample["expected"]) else 0, "start")


class Checker:
    def __call__(self, output: Any) -> bool:
        return True


@pytest.fixture
def evaluate(tmp_path: Path) -> Any:
    def run(*files: Any, **keys: Any) -> Any:
        arguments = {"runs_dir": tmp_path / "runs", **keys}
        if not files:
            arguments = {"name": "e", "samples": SAMPLES, "prompt": "{{ q }}", **arguments}
        return holdfast.evaluate(*files, **arguments)

    return run


class TestPublicNames:
    def test_the_package_exports_exactly_these_names(self) -> None:
        assert holdfast.__all__ == [
            "AttemptError",
            "Calls",
            "Case",
            "ConfigError",
            "Context",
            "Display",
            "Document",
            "Format",
            "GradedTrial",
            "GraderBlock",
            "HoldfastError",
            "InstantGrader",
            "LimitReached",
            "Metrics",
            "Origin",
            "Override",
            "Pending",
            "Problem",
            "Reply",
            "RowLimits",
            "Run",
            "RunView",
            "Sample",
            "SetVerdict",
            "Target",
            "TargetBlock",
            "Turn",
            "Usage",
            "UsageError",
            "Verdict",
            "WaitingGrader",
            "__version__",
            "compare",
            "evaluate",
            "evaluate_async",
            "gate",
            "load_run",
        ]
        for name in holdfast.__all__:
            assert getattr(holdfast, name) is not None
        assert [name for name in dir(holdfast) if not name.startswith("_")] == [
            name for name in holdfast.__all__ if not name.startswith("_")
        ]

    def test_another_name_is_an_attribute_error(self) -> None:
        with pytest.raises(AttributeError, match="no attribute 'evalute'"):
            holdfast.evalute  # noqa: B018 - asking for it is the test

    def test_importing_the_package_imports_nothing_heavy(self) -> None:
        script = "import holdfast, sys; print([m for m in sys.modules if m.startswith(('holdfast.', 'pydantic'))])"
        assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "[]"

    def test_every_error_is_a_holdfast_error(self) -> None:
        errors = importlib.import_module("holdfast.errors")
        classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)]
        assert len(classes) > 5 and all(issubclass(c, holdfast.HoldfastError) for c in classes)


class TestFunctions:
    def test_a_function_as_target_and_functions_as_graders(self, evaluate: Any) -> None:
        run = evaluate(target=shout, graders=[is_right, starts_right, {"type": "exact"}])
        assert run.finished and run.exit_code == 0 and run.reason is None
        assert list(run.metrics.graders) == ["is_right", "starts_right", "exact"]
        assert (run.metrics.graders["is_right"].score, run.metrics.graders["starts_right"].score) == (
            1,
            0.5,
        )
        assert run.score == pytest.approx(2.5 / 3)
        assert run.metrics.target == "test_api.py:shout"

    def test_results_are_in_the_datasets_order_and_outputs_as_they_finished(self, evaluate: Any) -> None:
        run = evaluate(target=shout_later, graders=[starts_right], trials=2)
        expected = [(f"s{number}", trial) for number in range(12) for trial in (1, 2)]
        assert [(entry["sample"], entry["trial"]) for entry in run.results()] == expected
        kept = [(entry["sample"], entry["trial"]) for entry in run.outputs()]
        assert sorted(kept) == sorted(expected)
        assert [entry["output"] for entry in run.results()][:2] == ["WORD0 1", "WORD0 2"]

    def test_lambdas_of_one_line_are_kept_apart(self, evaluate: Any) -> None:
        run = evaluate(target=lambda prompt: prompt, graders=[lambda output: output.startswith("word")])
        assert run.score == 1 and run.results()[0]["output"] == "word0"

    def test_a_grader_whose_name_is_a_word_of_the_report_gets_another(self, evaluate: Any) -> None:
        def score(output: Any) -> Any:
            return len(output) > 0

        run = evaluate(target=shout, graders=[score])
        assert list(run.metrics.graders) == ["score_function"] and run.score == 1

    def test_a_callable_object_can_be_a_target(self, evaluate: Any) -> None:
        run = evaluate(target=shout, graders=[Checker()])
        assert run.score == 1 and list(run.metrics.graders) == ["Checker"]

    def test_a_function_that_is_not_written_in_python_is_refused(self, evaluate: Any, tmp_path: Path) -> None:
        for target in (len, functools.partial(shout, "x")):
            with pytest.raises(UsageError, match="Holdfast cannot detect"):
                evaluate(target=target)
        assert not (tmp_path / "runs").exists()

    def test_a_changed_function_is_another_run_and_a_comment_is_not(
        self, evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(tmp_path)
        paths = []
        for number, code in enumerate(
            [
                "def reply(prompt):\n    return 'a'\n",
                "# new\ndef reply(prompt):\n    return 'a'\n",
                "def reply(prompt):\n    return 'b'\n",
            ]
        ):
            # Three files of one name, as three states of one file: an imported module cannot be changed.
            paths.append(evaluate(target=imported(tmp_path / str(number) / "agent.py", code).reply).path)
        assert paths[0] == paths[1] != paths[2]


def suffixed(suffix: Any) -> Any:
    def reply(prompt: Any) -> Any:
        return prompt + suffix

    return reply


class Agent:
    def __init__(self, suffix: Any) -> None:
        self.suffix = suffix

    def reply(self, prompt: Any) -> Any:
        return prompt + self.suffix

    def __call__(self, prompt: Any) -> Any:
        return prompt + self.suffix


class TestWhatAFunctionCarries:
    """Two functions that answer differently never share a run, even if their source is the same."""

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (lambda prompt: prompt + "1", lambda prompt: prompt + "2"),
            (suffixed("1"), suffixed("2")),
            (Agent("1").reply, Agent("2").reply),
            (Agent("1"), Agent("2")),
        ],
        ids=["lambdas", "closures", "methods", "objects"],
    )
    def test_a_value_that_a_function_carries_is_part_of_its_key(self, evaluate: Any, one: Any, other: Any) -> None:
        runs = [evaluate(target=target) for target in (one, other, one)]
        assert runs[0].path == runs[2].path != runs[1].path
        assert [run.results()[0]["output"] for run in runs] == ["word01", "word02", "word01"]

    @pytest.mark.parametrize(
        "carried",
        [suffixed(object()), Agent(object()).reply, Agent({1, object()})],
        ids=["closure", "method", "object"],
    )
    def test_a_value_whose_changes_could_go_unnoticed_is_refused(
        self, evaluate: Any, tmp_path: Path, carried: Any
    ) -> None:
        with pytest.raises(UsageError, match=r"(?s)captures (self\.)?suffix.*Use plain values"):
            evaluate(target=carried)
        assert not (tmp_path / "runs").exists()


def imported(path: Any, code: Any) -> Any:
    """A user's module, imported from a file of this code."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CLASSES = """
import dataclasses

calls = []

class Agent:
    suffix = "!"

    def open(self, params):
        calls.append("open")
        self.client = object()

    async def __call__(self, prompt):
        calls.append(prompt)
        self.history = [*getattr(self, "history", []), prompt]
        return prompt.upper() + self.suffix

    def close(self):
        calls.append("close")

class Unhashable(Agent):
    def __eq__(self, other):
        return isinstance(other, Unhashable)

class Empty(Agent):
    def __len__(self):
        return 0

class Slotted:
    __slots__ = ("client", "count", "suffix")

    def __init__(self):
        self.suffix, self.count = "!", 0

    def open(self):
        calls.append("open")
        self.client = object()

    def __call__(self, prompt):
        calls.append(prompt)
        self.count += 1
        return prompt.upper() + self.suffix

    def close(self):
        calls.append("close")

@dataclasses.dataclass
class Fields(Agent):
    suffix: str = "!"
    options: dict = dataclasses.field(default_factory=lambda: {"a": [1]})

class Method(Agent):
    def reply(self, prompt):
        calls.append(prompt)
        self.options = {"n": len(calls)}
        return prompt.upper() + self.suffix

def made(suffix):
    class Made:
        def __call__(self, prompt):
            calls.append(prompt)
            return prompt.upper() + suffix

    return Made

def counting():
    seen = []

    def reply(prompt):
        calls.append(prompt)
        seen.append(prompt)
        return prompt.upper() + "!"

    return reply

class Check:
    def __init__(self):
        self.seen = {}

    def __call__(self, output):
        calls.append("check")
        self.seen[output] = self.seen.get(output, 0) + 1
        return True
"""


class TestClassesAndObjects:
    """A target may be a class, as in a file; an object is the same object after it was used."""

    @pytest.fixture
    def agents(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        module = imported(tmp_path / "held_agents.py", CLASSES)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return module

    @pytest.fixture
    def calls(self, evaluate: Any, agents: Any) -> Any:
        """Evaluate, and return the run with what was called meanwhile."""

        def run(target: Any, **keys: Any) -> Any:
            agents.calls.clear()
            return evaluate(target=target, **keys), list(agents.calls)

        return run

    def test_a_class_is_constructed_opened_and_closed_and_answers_every_prompt_once(
        self, agents: Any, calls: Any
    ) -> None:
        run, called = calls(agents.Agent)
        assert called[0] == "open" and called[-1] == "close"
        assert sorted(called[1:-1]) == sorted(row["q"] for row in SAMPLES)
        assert run.results()[0]["output"] == "WORD0!" and run.metrics.target == "held_agents.py:Agent"
        assert calls(agents.Agent) == (run, [])
        assert calls({"python": agents.Agent, "params": {"a": 1}})[0].path != run.path

    def test_a_class_is_known_by_its_source_as_in_an_eval_file(
        self, evaluate: Any, agents: Any, calls: Any, tmp_path: Path
    ) -> None:
        run, _ = calls(agents.Agent)
        assert evaluate(target={"python": f"{tmp_path / 'held_agents.py'}:Agent"}).path == run.path
        paths = [
            evaluate(target=imported(tmp_path / folder / "held_agents.py", code).Agent).path
            for folder, code in [
                ("comment", "# new" + CLASSES),
                ("method", CLASSES.replace("prompt.upper() + self.suffix", "prompt + self.suffix")),
                ("attribute", CLASSES.replace('suffix = "!"', 'suffix = "?"')),
            ]
        ]
        assert paths[0] == run.path and len({*paths}) == 3

    def test_values_that_a_class_closes_over_are_part_of_its_key(self, agents: Any, calls: Any) -> None:
        runs = [calls(agents.made(suffix)) for suffix in "121"]
        assert runs[0][0] == runs[2][0] != runs[1][0] and [len(called) for _, called in runs] == [12, 12, 0]
        with pytest.raises(UsageError, match=r"captures .*suffix"):
            calls(agents.made(object()))

    @pytest.mark.parametrize("make", [lambda agents: agents.Agent, lambda agents: agents.Agent()])
    def test_a_class_whose_file_was_edited_after_its_import_is_refused(
        self, evaluate: Any, agents: Any, tmp_path: Path, make: Any
    ) -> None:
        (tmp_path / "held_agents.py").write_text(CLASSES.replace("prompt.upper()", "prompt.lower()"))
        with pytest.raises(UsageError, match=r"has changed since .*Agent.* was imported"):
            evaluate(target=make(agents))

    def test_a_class_is_a_target_and_nothing_else(self, agents: Any, calls: Any, tmp_path: Path) -> None:
        for keys in (
            {"graders": [agents.Check]},
            {"graders": [{"type": "python", "function": agents.Check}]},
            {"responder": agents.Agent},
            {"target": {"python": agents.Agent, "tools": [agents.Check]}},
        ):
            with pytest.raises(UsageError, match=r"(?s)is a class; only targets may be classes.*Pass an object"):
                calls(keys.pop("target", agents.Agent), **keys)
        assert not (tmp_path / "runs").exists()

    @pytest.mark.parametrize(
        "make",
        [
            lambda agents: agents.Agent(),
            lambda agents: agents.Unhashable(),
            lambda agents: agents.Empty(),
            lambda agents: agents.Slotted(),
            lambda agents: agents.Fields(),
            lambda agents: agents.Method().reply,
            lambda agents: agents.counting(),
        ],
        ids=["object", "unhashable", "empty", "slots", "dataclass", "method", "closure"],
    )
    def test_a_change_that_a_run_makes_to_an_object_reruns_nothing(self, agents: Any, calls: Any, make: Any) -> None:
        target = make(agents)
        run, called = calls(target)
        assert run.finished and len(called) in (12, 14)
        for _ in range(2):
            assert calls(target) == (run, [])
        more = [*SAMPLES, {"id": "new", "q": "new", "expected": "NEW"}]
        assert [call for call in calls(target, samples=more)[1] if call not in ("open", "close")] == ["new"]
        assert calls(make(agents)) == (run, []), "another object that begins as this one did is the same"

    @pytest.mark.parametrize("name", ["Agent", "Empty", "Slotted", "Fields"])
    def test_a_change_to_an_object_between_two_runs_reruns_everything(self, agents: Any, calls: Any, name: str) -> None:
        target = getattr(agents, name)()
        first, _ = calls(target)
        target.suffix = "?"
        second, called = calls(target)
        assert len(called) == 14 and second.results()[0]["output"] == "WORD0?"
        assert calls(target) == (second, [])
        target.suffix = "!"
        assert calls(target)[0].results()[0]["output"] == "WORD0!"
        assert first.results()[0]["output"] == "WORD0!"

    def test_a_change_inside_an_objects_value_reruns_everything(self, agents: Any, calls: Any) -> None:
        target = agents.Fields()
        first, _ = calls(target)
        target.options["a"].append(2)
        second, called = calls(target)
        assert second.path != first.path and len(called) == 14
        target.options["a"].pop()
        assert calls(target) == (first, [])

    def test_an_attribute_that_a_run_has_made_and_someone_replaced_is_refused_as_at_first(
        self, agents: Any, calls: Any
    ) -> None:
        target = agents.Agent()
        calls(target)
        target.client = [object()]
        with pytest.raises(UsageError, match=r"captures self\.client"):
            calls(target)

    def test_a_run_that_was_refused_or_failed_leaves_an_object_as_it_was(self, agents: Any, calls: Any) -> None:
        target = agents.Agent()
        with pytest.raises(ConfigError):
            calls(target, trials="many")
        target.suffix = "?"
        run, called = calls(target)
        assert len(called) == 14 and run.results()[0]["output"] == "WORD0?"

    def test_a_grader_that_remembers_grades_nothing_again(self, agents: Any, calls: Any) -> None:
        check = agents.Check()
        run, called = calls(agents.Agent, graders=[check])
        assert called.count("check") == 12
        assert calls(agents.Agent, graders=[check]) == (run, [])

    def test_objects_are_not_kept_alive(self, agents: Any, calls: Any) -> None:
        target = agents.Agent()
        calls(target)
        gone = weakref.ref(target)
        del target
        gc.collect()
        assert gone() is None


class TestFilesThatChange:
    """The code that runs is the code that the key covers, in one process as in two."""

    @pytest.fixture
    def by_file(self, evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(sys, "dont_write_bytecode", True)

        def run(file: Any) -> Any:
            return evaluate(target={"python": f"{tmp_path / file}:reply"}, samples=SAMPLES[:1])

        loaded = set(sys.modules)
        yield run
        for name in set(sys.modules) - loaded:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
                del sys.modules[name]

    def test_a_function_whose_file_was_edited_after_its_import_is_refused(self, evaluate: Any, tmp_path: Path) -> None:
        path = tmp_path / "edited_agent.py"
        module = imported(path, "def reply(prompt):\n    return 'old'\n")
        path.write_text("def reply(prompt):\n    return 'new'\n")
        with pytest.raises(UsageError, match=r"(?s)has changed since reply was imported.*importlib\.reload"):
            evaluate(target=module.reply)
        assert not (tmp_path / "runs").exists()

    def test_each_of_two_files_uses_the_helper_next_to_it(self, by_file: Any, tmp_path: Path) -> None:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "its_util.py").write_text(f"word = {name!r}\n")
            (tmp_path / name / "its_agent.py").write_text("from its_util import word\ndef reply(prompt): return word\n")
        outputs = [by_file(f"{name}/its_agent.py").results()[0]["output"] for name in ("one", "two")]
        assert outputs == ["one", "two"]

    def test_an_import_that_failed_leaves_no_half_of_it_behind(self, by_file: Any, tmp_path: Path) -> None:
        path = tmp_path / "half_agent.py"
        path.write_text("def reply(prompt): return 'x'\nraise OSError('not today')\n")
        for _ in range(2):
            with pytest.raises(ConfigError, match="not today"):
                by_file("half_agent.py")
            assert "half_agent" not in sys.modules


class TestFiles:
    def test_arguments_are_laid_over_the_file(self, evaluate: Any, tmp_path: Path) -> None:
        path = write_spec(
            tmp_path, samples=SAMPLES, prompt="{{ q }}", target={"model": "m", "base_url": "http://127.0.0.1:1"}
        )
        run = evaluate(path, target=shout, graders=[is_right], trials=2, name="other")
        assert run.finished and run.score == 1
        assert (run.metrics.eval, run.metrics.trials) == ("other", 2)

    def test_a_file_may_leave_out_what_the_arguments_give(self, evaluate: Any, tmp_path: Path) -> None:
        write_rows(tmp_path / "sub" / "d.jsonl", SAMPLES)
        path = write_spec(tmp_path / "sub", samples=None, target=None, graders=None, prompt="{{ q }}")
        run = evaluate(path, target=shout, dataset="d.jsonl")
        assert run.finished and run.metrics.total == 12, "and paths are relative to the file"

    def test_a_models_name_overrides_the_files_target(self, evaluate: Any, tmp_path: Path) -> None:
        with server() as mock:
            path = write_spec(tmp_path, target={"model": "first", "base_url": mock.base_url})
            run = evaluate(path, target="second")
            assert run.finished and run.metrics.target == "second" and mock.requests == 2

    def test_problems_are_reported_with_the_line_of_the_file(self, evaluate: Any, tmp_path: Path) -> None:
        path = write_spec(tmp_path, trials=0)
        with pytest.raises(ConfigError, match=r"eval\.yaml:\d+: trials"):
            evaluate(path)
        with pytest.raises(ConfigError, match=r"promt: unknown key \(did you mean 'prompt'\?\)"):
            evaluate(path, trials=1, promt="x")

    def test_a_dataset_can_be_given_by_its_path(self, evaluate: Any, tmp_path: Path) -> None:
        write_rows(tmp_path / "d.jsonl", SAMPLES)
        for dataset in (str(tmp_path / "d.jsonl"), tmp_path / "d.jsonl", {"path": str(tmp_path / "d.jsonl")}):
            run = holdfast.evaluate(
                name="e", dataset=dataset, prompt="{{ q }}", target=shout, runs_dir=tmp_path / "runs"
            )
            assert run.metrics.total == 12

    def test_the_command_and_the_function_find_the_same_run(
        self, evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tests.support.running import holdfast as command

        with server() as mock:
            path = write_spec(tmp_path, target={"model": "m", "base_url": mock.base_url})
            run = evaluate(path)
            done = command("eval", path, cwd=tmp_path)
            assert "already finished" in done.stdout and mock.requests == 2
            assert done.stdout.strip().endswith(str(run.path.relative_to(tmp_path)))


class TestRuns:
    def test_repeating_a_call_sends_no_request(self, evaluate: Any) -> None:
        with workflow(lambda asked: {"value": asked.body["p"]}) as service:
            keys: dict[str, Any] = {
                "target": {"http": service.url, "request": {"p": "{{ prompt }}"}, "response": "value"}
            }
            first, second = evaluate(**keys), evaluate(**keys)
            assert first == second and len(service.asked) == 12
            third = evaluate(fresh=True, **keys)
            assert third.path == first.path and len(service.asked) == 24
            archived = list(first.path.parent.glob("archived/*/outputs.jsonl"))
            assert len(archived) == 1 and len(lines(archived[0])) == 12

    def test_an_unfinished_run_says_why_and_what_to_do(self, evaluate: Any) -> None:
        run = evaluate(target={"model": "m", "base_url": "http://127.0.0.1:9/v1"})
        assert (run.finished, run.metrics, run.score, run.exit_code) == (False, None, None, 3)
        assert "refuses connections" in run.reason and "run the same command again" in run.reason

    def test_graders_can_be_left_for_later(self, evaluate: Any) -> None:
        keys: dict[str, Any] = {"target": shout, "graders": [is_right]}
        first = evaluate(skip_graders=True, **keys)
        assert not first.finished and first.exit_code == 0 and len(list(first.outputs())) == 12
        assert evaluate(**keys).score == 1

    def test_runs_are_kept_where_the_environment_says(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        keys: dict[str, Any] = {"name": "e", "samples": SAMPLES[:1], "prompt": "{{ q }}", "target": shout}
        monkeypatch.chdir(tmp_path)
        assert holdfast.evaluate(**keys).path.resolve().is_relative_to(tmp_path / "runs")
        monkeypatch.setenv("HOLDFAST_RUNS_DIR", str(tmp_path / "elsewhere"))
        assert holdfast.evaluate(**keys).path.is_relative_to(tmp_path / "elsewhere")
        assert holdfast.evaluate(**keys, runs_dir=tmp_path / "given").path.is_relative_to(tmp_path / "given")

    def test_a_display_receives_every_event(self, evaluate: Any) -> None:
        from holdfast.display.displays import Display

        class Recorder(Display):
            def __init__(self) -> None:
                self.seen = []

            def begin(self, name: Any, target: Any, path: Any, plan: Any) -> None:
                self.seen.append(("begin", name, plan.to_run))

            def output(self, record: Any) -> None:
                self.seen.append(("output", record.sample))

            def grade(self, record: Any) -> None:
                self.seen.append(("grade", record.sample))

            def end(self) -> None:
                self.seen.append(("end",))

        display = Recorder()
        evaluate(target=shout, graders=[is_right], display=display)
        assert display.seen[0] == ("begin", "e", 12) and display.seen[-1] == ("end",)
        for kind in ("output", "grade"):
            assert sorted(name for what, *name in display.seen if what == kind) == sorted([s["id"]] for s in SAMPLES)
        assert all(display.seen.index(("output", s["id"])) < display.seen.index(("grade", s["id"])) for s in SAMPLES)


class TestEventLoops:
    async def test_evaluate_works_inside_a_running_event_loop(self, evaluate: Any) -> None:
        assert evaluate(target=shout_later, graders=[starts_right]).score == 0.5

    async def test_an_error_inside_a_running_event_loop_is_raised_by_evaluate(
        self, evaluate: Any, tmp_path: Path
    ) -> None:
        with pytest.raises(ConfigError, match="asks for nothing_we_have"):
            evaluate(target=wants_too_much)
        assert not (tmp_path / "runs").exists()

    def test_evaluate_keeps_the_programs_own_signal_handlers(self, evaluate: Any) -> None:
        def mine(*_: Any) -> None:
            """The program's own."""

        before = {number: signal.signal(number, mine) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            evaluate(target=shout)
            assert [signal.getsignal(number) for number in before] == [mine, mine]
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


ASKED: list[str] = []
HOLD = threading.Event()
"""while set, `shout_until_held` answers five prompts and then none"""


async def shout_until_held(prompt: str) -> str:
    ASKED.append(prompt)
    if HOLD.is_set() and len(ASKED) > 5:
        await asyncio.sleep(3600)
    return prompt.upper()


class TestEvaluateAsync:
    @pytest.fixture
    def keys(self, tmp_path: Path) -> Iterator[dict[str, Any]]:
        keys = {"name": "e", "samples": SAMPLES, "prompt": "{{ q }}", "runs_dir": tmp_path}
        HOLD.set()
        yield {**keys, "target": shout_until_held, "limits": {"concurrency": 1}}
        ASKED.clear()
        HOLD.clear()

    async def test_the_event_loop_of_the_caller_is_not_blocked(self, keys: dict[str, Any]) -> None:
        async def release() -> None:
            await asyncio.to_thread(wait_for, lambda: len(ASKED) > 5, "five answers")
            HOLD.clear()

        keys["limits"] = {"concurrency": 1, "turn_timeout": 1}  # the request that is held is asked once more
        run, _ = await asyncio.gather(holdfast.evaluate_async(**keys, graders=[is_right]), release())
        assert run.finished and run.score == 1

    async def test_cancelling_the_call_stops_the_run_and_the_same_call_resumes(
        self, keys: dict[str, Any], tmp_path: Path
    ) -> None:
        call = asyncio.create_task(holdfast.evaluate_async(**keys))
        await asyncio.to_thread(wait_for, lambda: len(ASKED) > 5, "five answers")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        (outputs,) = tmp_path.glob("e/*/outputs.jsonl")
        assert [output["sample"] for output in lines(outputs)] == [f"s{number}" for number in range(5)]
        assert not outputs.with_name("metrics.json").exists() and not outputs.with_name("lease").exists()
        HOLD.clear()
        resumed = await holdfast.evaluate_async(**keys)
        assert resumed.finished and len(ASKED) == len(SAMPLES) + 1, "only the request in flight is repeated"

    async def test_a_timeout_of_the_caller_stops_the_run(self, keys: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as deadline:
                call = holdfast.evaluate_async(**keys)
                asyncio.get_running_loop().run_in_executor(
                    None, wait_for, lambda: len(ASKED) > 5, "five"
                ).add_done_callback(lambda _: deadline.reschedule(asyncio.get_running_loop().time()))
                await call
        assert len(lines(next(tmp_path.glob("e/*/outputs.jsonl")))) == 5

    def test_errors_are_raised_where_the_call_is_awaited(self, keys: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="asks for nothing_we_have"):
            asyncio.run(holdfast.evaluate_async(**{**keys, "target": wants_too_much}))
        assert not list(tmp_path.iterdir())


def wants_too_much(nothing_we_have: Any) -> Any:
    return nothing_we_have


def test_a_run_can_be_read_without_holdfast(evaluate: Any) -> None:
    run = evaluate(target=shout, graders=[is_right])
    assert json.loads((run.path / "metrics.json").read_text()) == run.metrics.to_dict()
    kept = [json.loads(line)["sample"] for line in (run.path / "outputs.jsonl").read_text().splitlines()]
    assert kept == [output["sample"] for output in run.outputs()]


class TestWorkers:
    @pytest.fixture
    def eval_file(self, tmp_path: Path) -> Any:
        (tmp_path / "agent.py").write_text("def reply(prompt):\n    return prompt.upper()\n")
        samples = [{"id": f"s{number}", "q": f"word{number}", "expected": f"WORD{number}"} for number in range(12)]
        return write_spec(tmp_path, samples=samples, prompt="{{ q }}", target={"python": "agent.py:reply"})

    def test_workers_can_be_used_inside_a_running_event_loop(self, evaluate: Any, eval_file: Any) -> None:
        async def notebook() -> Any:
            return evaluate(eval_file, workers=1)

        assert asyncio.run(notebook()).finished

    def test_options_that_workers_cannot_take_are_refused_before_anything_is_written(
        self, evaluate: Any, eval_file: Any, tmp_path: Path
    ) -> None:
        with pytest.raises(UsageError, match=r"cannot be passed to worker processes: .*shout"):
            evaluate(target=shout, graders=[{"type": "exact"}], workers=2)
        with pytest.raises(UsageError, match="at least 1, not"):
            evaluate(eval_file, workers=0)
        assert not (tmp_path / "runs").exists()

    @pytest.mark.parametrize("guarded", [True, False])
    def test_workers_do_not_run_the_script_that_defines_the_function(self, tmp_path: Path, guarded: bool) -> None:
        call = (
            "run = holdfast.evaluate(name='e', samples=[{'id': 'a'}], prompt='x', graders=[{'type': 'text',"
            " 'contains': 'X'}], target={'python': 'script.py:reply'}, workers=2)"
        )
        guard = "if __name__ == '__main__': " if guarded else ""
        (tmp_path / "script.py").write_text(
            "import holdfast\ndef reply(prompt):\n    return prompt.upper()\n"
            f"{guard}{call}\n{guard}print(run.finished, run.score)\n"
        )
        done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
        if guarded:
            assert done.stdout == "True 1.0\n", done.stderr
        else:
            assert done.stdout == "False None\n", done.stderr
            assert 'Put the call under `if __name__ == "__main__":`' in done.stderr


def test_rows_that_fit_no_prompt_do_not_stop_the_others(evaluate: Any) -> None:
    rows = [{"id": f"s{number}", "n": int(not 5 <= number < 30)} for number in range(35)]
    run = evaluate(samples=rows, prompt="{{ 1 // n }}", target=shout, accept_errors=True, limits={"concurrency": 1})
    assert run.exit_code == 0
    assert len(list(run.outputs())) == 10 and len(lines(run.path / "errors.jsonl")) == 25


def test_a_prompt_that_fits_no_row_stops_the_run_before_all_are_tried(evaluate: Any) -> None:
    rows = [{"id": f"s{number}", "n": 0} for number in range(100)]
    run = evaluate(samples=rows, prompt="{{ 1 // n }}", target=shout, limits={"concurrency": 1})
    assert run.exit_code == 3
    assert len(lines(run.path / "errors.jsonl")) == 20
