"""waza's eval files run as they are: what becomes of each part, and what is said of what has no meaning here."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.errors import UsageError
from holdfast.plan.identity import identify
from tests.support.breaking import kept
from tests.support.lab import Lab
from tests.support.running import ROOT, Server, lines, run_dir, server
from tests.support.running import holdfast as run_command
from tests.support.specs import write_spec
from tests.support.waza import EVAL, TASK, load, refused, rows, tree

if TYPE_CHECKING:
    from pathlib import Path


DATA = ROOT / "tests" / "fixtures" / "waza"

CHECKPOINT = "{after_turn: 1, graders: [{type: text, contains: [x]}]}"


def graded(run: Path) -> dict[str, dict[str, Any]]:
    return {
        f"{entry['sample']}#{entry['trial']}": entry
        for entry in json.loads((run / "results.json").read_text())["trials"]
    }


# The whole of it


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of the kitchen eval, from a folder of its own that has gone since, and what was said on the way."""
    folder = tmp_path_factory.mktemp("kitchen")
    shutil.copytree(DATA / "kitchen", folder / "kitchen")
    done = run_command("eval", "kitchen/eval.yaml", cwd=folder)
    shutil.rmtree(folder / "kitchen")
    return run_dir(folder, "kitchen"), done.stderr


def test_an_eval_with_the_mock_executor_passes_and_fails_as_its_files_say(kitchen: tuple[Path, str]) -> None:
    results = graded(kitchen[0])
    assert {name: entry["status"] for name, entry in results.items()} == {
        "soup#1": "passed",
        "soup#2": "passed",
        "talk#1": "passed",
        "talk#2": "passed",
        "dessert#1": "failed",
        "dessert#2": "failed",
    }
    assert set(results["soup#1"]["grades"]) == {
        "polite",
        "_output_contains",
        "_output_not_contains",
        "_output_contains_any",
        "soup/for_guest",
    }
    assert set(results["talk#1"]["grades"]) == {"checkpoint@1/hears", "checkpoint@2/hears", "polite", "talk/for_guest"}
    assert results["dessert#1"]["grades"]["chocolate"]["score"] == 0.5
    assert results["dessert#1"]["score"] == pytest.approx((2 * 1.0 + 0.5) / 3)  # polite weighs 2


def test_the_mock_executor_says_what_it_was_asked_what_the_task_says_and_the_files(kitchen: tuple[Path, str]) -> None:
    outputs = {output["sample"]: output for output in kept(kitchen[0])}
    assert outputs["soup"]["output"] == (
        "Mock response for: Cook a soup for Ada (soup)\n"
        "Task: A soup for a guest\n"
        "Description: The pantry decides.\n"
        "Context:\n  fixture: pantry\n  vegan: true\n"
        "Analyzed 2 file(s):\n  - shelf.txt\none leek\n\n  - note.md\nNo salt, please."
    )
    assert set(outputs["soup"]["files"]) == {"shelf.txt", "note.md"}
    assert outputs["talk"]["turns"] == 3
    assert outputs["talk"]["output"].startswith("Mock response for: Thank you.")


def test_keys_without_effect_are_named_with_their_places(kitchen: tuple[Path, str]) -> None:
    for notice in (
        "kitchen/eval.yaml:17: config.max_attempts: a wrong answer is never asked again",
        "kitchen/eval.yaml:18: config.fail_fast: every task is run",
        "kitchen/eval.yaml:19: metrics: not measured (nor by waza): task_completion",
        "kitchen/eval.yaml:28: tasks: not run, since `enabled: false`: 90-off.yaml",
        "kitchen/tasks/10-soup.yaml:18: expected.outcomes: is not graded",
        "kitchen/tasks/10-soup.yaml:20: expected.behavior: is not graded",
        "kitchen/tasks/10-soup.yaml:23: graders[0].type: 'regex' is an older kind",
        "kitchen/trigger_tests.yaml: 3 prompts are left out",
    ):
        assert notice in kitchen[1]
        assert notice in (kitchen[0] / "run.log").read_text()


def test_a_run_is_graded_again_and_compared_from_its_directory_alone(kitchen: tuple[Path, str]) -> None:
    run = kitchen[0]
    before = (run / "results.json").read_bytes()
    run_command("grade", run, "--again", cwd=run)
    assert (run / "results.json").read_bytes() == before
    assert "A dessert" not in run_command("compare", run, run, cwd=run).stdout
    gate = run_command("gate", run, "--min", "score=0.5", cwd=run)
    assert "golden sample soup passes" in gate.stdout


def test_config_becomes_trials_limits_and_groups(kitchen: tuple[Path, str]) -> None:
    spec = load(DATA / "kitchen" / "eval.yaml")
    assert spec.trials == 2
    assert (spec.limits.turn_timeout, spec.limits.trial_timeout, spec.limits.concurrency) == (45, 600, 3)
    by_id = rows(spec)
    assert by_id["soup"]["group"] == "first" and by_id["soup"]["golden"] is True
    assert "group" not in by_id["dessert"] and "golden" not in by_id["dessert"]


def test_parallel_false_is_one_after_the_other_and_the_longest_time_out_holds(tmp_path: Path) -> None:
    path = tree(
        tmp_path,
        eval_yaml=EVAL.replace("executor: mock", "executor: mock, parallel: false"),
        tasks_b_yaml="id: two\ntimeout_seconds: 400\ninputs: {prompt: x, follow_up_prompts: [y]}\n",
    )
    spec = load(path)
    assert (spec.limits.concurrency, spec.limits.turn_timeout, spec.limits.trial_timeout) == (1, 400, 1600)
    assert any("tasks/b.yaml:2: timeout_seconds: one time-out holds" in notice for notice in spec.document.notices)


def test_the_project_file_gives_defaults(tmp_path: Path) -> None:
    path = tree(tmp_path, eval_yaml=EVAL.replace("timeout_seconds: 30, ", ""))
    (tmp_path / ".waza.yaml").write_text("defaults: {timeout: 77, workers: 5, judgeModel: j}\ntokens: {}\n")
    spec = load(path)
    assert (spec.limits.turn_timeout, spec.limits.concurrency) == (77, 5)
    assert any(".waza.yaml:1: defaults: defaults taken from .waza.yaml" in notice for notice in spec.document.notices)


def test_an_eval_runs_from_python_with_a_function_as_its_target(tmp_path: Path) -> None:
    path = tree(tmp_path, eval_yaml=EVAL.replace("executor: mock", "executor: copilot-sdk"))
    done = holdfast.evaluate(path, target=_agent, runs_dir=tmp_path / "runs")
    assert done.finished and done.score == 1.0


def _agent(prompt: str) -> str:
    return f"no mock: {prompt}"


# Templates and tables


def test_a_table_gives_a_task_per_row_of_its_range(tmp_path: Path) -> None:
    by_id = rows(load(DATA / "table" / "eval.yaml"))
    assert {name: row["prompt"] for name, row in by_id.items()} == {
        "b": "Serve Cy {{ 7 * 7 }} the soup",
        "Third": "Serve\nDi",
    }
    assert by_id["b"]["name"] == "Second"


def test_the_content_of_a_row_is_never_rendered_as_a_template(tmp_path: Path) -> None:
    shutil.copytree(DATA / "table", tmp_path / "table")
    run_command("eval", "table/eval.yaml", cwd=tmp_path)
    outputs = {output["sample"]: output["output"] for output in kept(run_dir(tmp_path, "table"))}
    assert outputs["b"] == "Mock response for: Serve Cy {{ 7 * 7 }} the soup\nTask: Second"


def test_graders_look_for_braces_as_they_are_written(tmp_path: Path) -> None:
    task = TASK.replace("Hello.", "'a {{\"{{\"}}b}} c'") + 'graders: [{type: text, name: t, contains: ["a {{b}} c"]}]\n'
    run_command("eval", tree(tmp_path, tasks_a_yaml=task), cwd=tmp_path)
    assert graded(run_dir(tmp_path, "small"))["one#1"]["status"] == "passed"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("{{.Vars.guest}}", "tasks/a.yaml:3: inputs.prompt: there is no variable 'guest'; the eval has no inputs"),
        ("{{.Iteration}}", "tasks/a.yaml:3: inputs.prompt: {{.Iteration}} differs from trial to trial"),
        ("{{if .Vars.x}}", "tasks/a.yaml:3: inputs.prompt: {{if .Vars.x}} is more of Go's templates than is read"),
    ],
)
def test_a_template_that_cannot_be_filled_is_named_with_its_line(tmp_path: Path, prompt: str, message: str) -> None:
    assert message in refused(tree(tmp_path, tasks_a_yaml=TASK.replace("Hello.", f"'{prompt}'")))


def test_a_row_of_a_table_is_named_by_its_line(tmp_path: Path) -> None:
    path = tree(
        tmp_path,
        eval_yaml=EVAL.replace('tasks: ["tasks/*.yaml"]', "tasks_from: t.csv"),
        t_csv="id,prompt\na,hello\nb,{{.Vars.nobody}}\n",
    )
    assert "t.csv:3: inputs.prompt: there is no variable 'nobody'; inputs have: id, prompt" in refused(path)


# What is refused, with the file and the line in which it stands


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("name: x\ninputs: {prompt: x}\n", "a.yaml: id: a task needs an id"),
        ("id: x\n", "a.yaml: inputs.prompt: a task needs inputs.prompt"),
        ("id: x\ninputs:\n  prompt: x\n  prompt_file: p.md\n", "a.yaml:4: inputs.prompt_file: give either"),
        ("id: x\ninputs:\n  prompt_file: ../p.md\n", "a.yaml:3: inputs.prompt_file: must be a path below"),
        ("id: x\ncommand_mocks: [{a: 1}]\ninputs: {prompt: x}\n", "a.yaml:2: command_mocks: not supported"),
        ("id: x\ninputs:\n  prompt: x\n  follow_ups: [y]\n", "a.yaml:4: inputs.follow_ups: unknown key (did you mean"),
        ("id: x\nexpected: {output_contain: [a]}\ninputs: {prompt: x}\n", "a.yaml:2: expected.output_contain: unknown"),
        (
            "id: x\ninputs: {prompt: x, files: [{path: ../../up.txt}]}\n",
            "a.yaml:2: inputs.files[0].path: '../../up.txt' is outside",
        ),
        (
            "id: x\ninputs: {prompt: x, files: [{path: ../eval.yaml}]}\n",
            "inputs.files[0].path: '../eval.yaml' is outside the workspace",
        ),
        (
            "id: x\ninputs:\n  prompt: x\n  responder: {instructions: y}\n",
            "a.yaml:4: inputs.responder.max_followups: must be a number from 1, not None",
        ),
        (
            "id: x\ninputs:\n  prompt: x\n  follow_up_prompts: [a]\n  responder: {instructions: y, max_followups: 2}\n",
            "a.yaml:5: inputs.responder: give either follow_up_prompts or a responder",
        ),
        (
            "id: x\ninputs:\n  prompt: x\n  responder: {instructions: y, max_followups: 2}\n",
            "a.yaml:4: inputs.responder: needs a `model` that plays the user",
        ),
        ("id: x\ninputs: [prompt\n", "a.yaml:3: not valid YAML"),
        (
            "graders:\n  - {type: tool, name: t}\n",
            "a.yaml:4: graders[0].type: waza has no grader `tool`: write `type: tool_calls`",
        ),
        ("graders:\n  - {type: smells, name: t}\n", "a.yaml:4: graders[0].type: unknown grader type 'smells'"),
        ("graders:\n  - type: text\n    name: t\n    config: {}\n", "a.yaml:4: graders[0]: checks nothing"),
        (
            "graders:\n  - type: text\n    config:\n      keywords: [a]\n",
            "a.yaml:6: graders[0].config.keywords: unknown parameter of 'text', which checks nothing else",
        ),
        (
            "graders:\n  - type: text\n    config:\n      contain: [a]\n",
            "a.yaml:6: graders[0].config.contain: unknown parameter of 'text', which checks nothing else (did",
        ),
        ("graders:\n  - type: regex\n    config:\n      must_match: ['(']\n", "not a regular expression: '('"),
        ("graders:\n  - {ref: shared}\n", "a.yaml:4: graders[0].ref: not supported"),
        (
            "graders:\n  - {type: prompt, name: j, rubric: correctness}\n",
            "a.yaml:4: graders[0].rubric: not supported: waza's own rubric 'correctness'",
        ),
        (
            "graders:\n  - {type: prompt, name: j, rubric: Is it kind?}\n",
            "a.yaml:4: graders[0]: needs a model to judge with: add config.judge_model=MODEL to the command",
        ),
        (
            "checkpoints:\n  - after_turn: 2\n    graders: [{type: text, contains: [x]}]\n",
            "a.yaml:4: checkpoints[0].after_turn: 2 is never reached: the task has at most 1 turns",
        ),
        (
            f"checkpoints:\n  - {CHECKPOINT}\n  - {CHECKPOINT}\n",
            "a.yaml:5: checkpoints[1].after_turn: duplicate checkpoint after turn 1",
        ),
        (
            "checkpoints:\n  - after_turn: 1\n    graders:\n      - {type: text}\n",
            "a.yaml:6: checkpoints[0].graders[0]: checks nothing",
        ),
        (
            "checkpoints: [{after_turn: 1, on_failure: run, graders: [{type: text}]}]\n",
            "a.yaml:3: checkpoints[0].on_failure: must be continue or stop, not 'run'",
        ),
    ],
)
def test_a_wrong_task_is_refused_with_its_file_and_line(tmp_path: Path, task: str, message: str) -> None:
    whole = task if task.startswith(("id:", "name:")) else f"id: x\ninputs: {{prompt: x}}\n{task}"
    assert message in refused(tree(tmp_path, tasks_a_yaml=whole))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("skill: s", 'skill: s\nschemaVersion: "3.0"', "eval.yaml:3: schemaVersion: waza's evals are read in versions"),
        (
            "skill: s",
            'skill: s\nschemaVersion: "2.0"',
            "eval.yaml:3: schemaVersion: waza's evals are read in versions 1.x",
        ),
        ("skill: s", "skill: s\nschemaVersion: 1.1.0", "eval.yaml:3: schemaVersion: '1.1.0' is not a version"),
        ("skill: s", "skill: s\nschemaVersion: 1", "eval.yaml:3: schemaVersion: 1 is not a version"),
        ("skill: s", 'schemaVersion: "1.1"\nscenario: w', "a scenario eval has schemaVersion \"2.0\", not '1.1'"),
        ("skill: s", 'schemaVersion: "2.0"\nscenario: " "', "`scenario` names the workflow, and is not empty"),
        ("skill: s", 'schemaVersion: "2.0"\nscenario: w\nzebra: 1', "eval.yaml:4: zebra: unknown key; in a scenario"),
        ("skill: s", "skill: s\ncommand_mocks: [{name: m}]", "eval.yaml:3: command_mocks: not supported"),
        ("skill: s", "skill: s\ngrader: []", "eval.yaml:3: grader: unknown key (did you mean 'graders'?)"),
        ("name: small", "description: x", "eval.yaml: name: is missing"),
        ("tasks/*.yaml", "tasks/z.yaml", "eval.yaml:5: tasks[0]: no such file: 'tasks/z.yaml'"),
        ("tasks/*.yaml", "tasks/z*.yaml", "eval.yaml:5: tasks: there is no task to run"),
        ("tasks/*.yaml", "../out.yaml", "eval.yaml:5: tasks[0]: '../out.yaml' is outside"),
        (
            "trials_per_task: 1",
            "trials_per_task: 0",
            "eval.yaml:3: config.trials_per_task: must be a number from 1",
        ),
        ("skill: s", "skill: s\nhooks: {before_run: [{command: ''}]}", "eval.yaml:3: hooks.before_run[0]"),
    ],
)
def test_a_wrong_eval_is_refused_with_its_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    (tmp_path / "out.yaml").write_text(TASK)
    assert message in refused(tree(tmp_path / "e", eval_yaml=EVAL.replace(old, new)))


def test_all_problems_in_all_files_are_reported_at_once(tmp_path: Path) -> None:
    message = refused(
        tree(
            tmp_path,
            tasks_a_yaml="id: x\ninputs: {prompt: x, workdir: y}\n",
            tasks_b_yaml="inputs: {prompt: x}\n",
            eval_yaml=EVAL.replace("skill: s", "command_mocks: [{name: m}]"),
        )
    )
    assert "a.yaml:2" in message and "b.yaml" in message and "eval.yaml:2" in message


def test_two_tasks_of_one_id_are_refused_and_a_file_matched_twice_runs_once(tmp_path: Path) -> None:
    message = refused(tree(tmp_path / "ids", tasks_b_yaml=TASK))
    assert "tasks/b.yaml:1: id: task id 'one' is already used in" in message and "tasks/a.yaml" in message
    spec = load(tree(tmp_path / "twice", eval_yaml=EVAL.replace('"tasks/*.yaml"', '"tasks/*.yaml", tasks/a.yaml')))
    assert list(rows(spec)) == ["one"]
    assert any("matched a second time" in message for message in spec.document.notices)


def test_unknown_keys_are_named_and_ignored_as_in_waza(tmp_path: Path) -> None:
    task = "id: x\nowner: me\ninputs: {prompt: x, repo_id: 7, environment: {A: b}}\nexpected: {zzz: 1}\n"
    notices = load(tree(tmp_path, tasks_a_yaml=task, eval_yaml=EVAL + "zebra: 1\n")).document.notices
    for message in (
        "eval.yaml:6: zebra: waza has no such key; it is ignored",
        "tasks/a.yaml:2: owner: waza has no such key",
        "tasks/a.yaml:3: inputs.repo_id: waza has no such key",
        "tasks/a.yaml:3: inputs.environment: has no effect: the mock executor",
        "tasks/a.yaml:4: expected.zzz: waza has no such key",
    ):
        assert any(message in notice for notice in notices), message


def test_a_notice_about_many_tasks_is_shown_once(tmp_path: Path) -> None:
    tasks = {f"tasks_t{n}_yaml": f"id: t{n}\nexpected: {{outcomes: [x]}}\ninputs: {{prompt: x}}\n" for n in range(5)}
    notices = load(tree(tmp_path, **tasks)).document.notices
    (notice,) = [notice for notice in notices if "outcomes" in notice]
    assert notice.startswith(f"{tmp_path}/tasks/t0.yaml:2: expected.outcomes: is not graded")
    assert notice.endswith("(and in 4 more places)")


def test_a_task_without_any_grader_is_not_passed_but_named(tmp_path: Path) -> None:
    path = tree(tmp_path, eval_yaml=re.sub(r"graders: .*\n", "", EVAL))
    done = run_command("eval", path, cwd=tmp_path)
    assert "tasks/a.yaml: has no graders: it is run and not graded" in done.stderr
    assert json.loads((run_dir(tmp_path, "small") / "metrics.json").read_text())["passed"] is None


# Graders


def test_names_are_kept_where_they_are_unique(tmp_path: Path) -> None:
    def task(name: str) -> str:
        check = f"[{{type: text, name: same, contains: [{name}]}}, {{type: text, name: of_{name}, contains: [x]}}]"
        twice = "[{type: text, contains: [a]}, {type: text, contains: [b]}]"
        return (
            f"id: {name}\ninputs: {{prompt: p}}\ngraders: {check}\ncheckpoints: [{{after_turn: 1, graders: {twice}}}]\n"
        )

    eval_yaml = EVAL.replace("name: any", "name: score")
    spec = load(tree(tmp_path, eval_yaml=eval_yaml, tasks_a_yaml=task("a"), tasks_b_yaml=task("b")))
    assert [grader.name for grader in spec.graders] == ["eval/score", "a/same", "of_a", "b/same", "of_b"]
    assert [[grader.name for grader in point.graders] for point in spec.checkpoints] == [
        ["a/text", "a/text#2"],
        ["b/text", "b/text#2"],
    ]
    assert [grader.where for grader in spec.graders[:2]] == [None, 'id == "a"']


def test_parameters_are_read_under_config_and_next_to_the_type_and_older_kinds_too(tmp_path: Path) -> None:
    task = TASK + (
        "graders:\n"
        "  - {type: text, name: plain, contains: [hello]}\n"
        "  - {type: keyword, name: keyword, config: {must_contain: [hello], must_not_contain: [bye]}}\n"
        "  - {type: regex, name: regex, config: {must_match: [Hello], must_not_match: [Bye]}, weight: -1}\n"
    )
    spec = load(tree(tmp_path, tasks_a_yaml=task))
    graders = {grader.name: grader for grader in spec.graders}
    assert [graders[name].type for name in ("plain", "keyword", "regex")] == ["text"] * 3
    assert (graders["keyword"].contains, graders["keyword"].not_contains) == (["hello"], ["bye"])  # type: ignore[attr-defined]
    assert graders["regex"].regex_match == ["Hello"] and graders["regex"].weight == 1  # type: ignore[attr-defined]
    assert graders["regex"].dialect == "re2", "as Go reads patterns"  # type: ignore[attr-defined]


def test_a_parameter_that_a_kind_does_not_have_is_named_and_passed_over(tmp_path: Path) -> None:
    grader = "{type: behavior, name: b, config: {max_tool_calls: 3, max_tokens: 0, skip_if_no_digest: true}}"
    spec = load(tree(tmp_path, tasks_a_yaml=f"{TASK}graders:\n  - {grader}\n"))
    block = spec.graders[1]
    assert (block.max_tool_calls, block.max_tokens) == (3, None)  # type: ignore[attr-defined]
    for message in ("config.skip_if_no_digest: waza has no such key", "config.max_tokens: 0 is no limit, as in waza"):
        assert any(f"tasks/a.yaml:5: graders[0].{message}" in notice for notice in spec.document.notices)


KINDS = """\
id: files
inputs: {prompt: look, files: [{path: a/b.txt, content: hello}]}
graders:
  - {type: code, name: code, config: {assertions: ["len(output) > 3", "'Mock' in output"]}}
  - {type: file, name: file, config: {must_exist: [a/b.txt], content_patterns: [{path: a/b.txt, must_match: [h.l]}]}}
  - {type: diff, name: diff, config: {context_dir: old, expected_files: [{path: a/b.txt, snapshot: b.txt}]}}
  - {type: program, name: program, config: {command: grep, args: [-q, Mock]}}
  - {type: script, name: script, script: check.py}
  - {type: json_schema, name: json_schema, config: {schema: {type: object}}}
  - {type: behavior, name: behavior, config: {forbidden_tools: [rm]}}
  - {type: action_sequence, name: actions, config: {expected_actions: [x], matching_mode: any_order_match}}
  - {type: skill_invocation, name: skills, config: {required_skills: [x], mode: any_order}}
  - {type: tool_calls, name: calls, config: {forbidden_tools: [x]}}
  - {type: tool_constraint, name: constraint, config: {reject_tools: [{tool: bash, command_pattern: rm}]}}
  - {type: trigger, name: trigger, config: {skill_path: SKILL.md, mode: negative}}
"""


def test_every_kind_of_grader_judges_what_the_mock_executor_says(tmp_path: Path) -> None:
    path = tree(tmp_path, tasks_a_yaml=KINDS)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "b.txt").write_text("hello")
    (tmp_path / "check.py").write_text("import sys\nsys.exit('Mock' not in sys.stdin.read())\n")
    (tmp_path / "SKILL.md").write_text("---\nname: s\ndescription: Bakes sourdough bread.\n---\n")
    run_command("eval", path, cwd=tmp_path)
    grades = graded(run_dir(tmp_path, "small"))["files#1"]["grades"]
    failed = {"json_schema", "actions", "skills"}
    assert {name for name, grade in grades.items() if grade["status"] == "failed"} == failed
    assert {name for name, grade in grades.items() if grade["status"] == "passed"} == {
        "any",
        "code",
        "file",
        "diff",
        "program",
        "script",
        "behavior",
        "calls",
        "constraint",
        "trigger",
    }


TRIGGERED = """
def reply(prompt):
    skill = "cook" if "Cook" in prompt or "time" in prompt else None
    call = {"id": "1", "type": "function", "function": {"name": "skill", "arguments": '{"skill": "cook"}'}}
    said = {"role": "assistant", "content": "hears " + prompt}
    calls = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1"}]
    return {"output": said["content"], "messages": [*calls, said] if skill else [said]}
"""


def test_triggers_are_measured_of_an_agent_that_says_which_skills_it_uses(tmp_path: Path) -> None:
    shutil.copytree(DATA / "kitchen", tmp_path / "kitchen")
    (tmp_path / "kitchen" / "agent.py").write_text(TRIGGERED)
    agent = "target.python=agent.py:reply"
    done = run_command("eval", "kitchen/eval.yaml", agent, "--trials", "1", "--export", "waza", cwd=tmp_path, check=1)
    assert "trigger_accuracy/should_trigger is 0.5 (minimum 0.9)" in done.stdout + done.stderr
    run = run_dir(tmp_path, "kitchen")
    by_id = graded(run)
    assert {name: by_id[f"trigger/{name}#1"]["grades"].keys() for name in (1, 3)} == {
        1: {"trigger_accuracy/should_trigger"},
        3: {"trigger_accuracy/should_not_trigger"},
    }
    assert [by_id[f"trigger/{number}#1"]["status"] for number in (1, 2, 3)] == ["passed", "failed", "failed"]
    assert "trigger_accuracy/should_trigger" not in by_id["soup#1"]["grades"]
    results = json.loads((run / "export" / "waza" / "results.json").read_text())
    assert len(results["tasks"]) == 3
    measure = results["metrics"]["trigger_accuracy"]
    assert (measure["value"], measure["passed"]) == (pytest.approx(1.0 / 2.5), False)


def test_the_judge_of_the_config_judges(tmp_path: Path) -> None:
    eval_yaml = EVAL.replace("executor: mock", "executor: mock, judge_model: judge-x")
    task = TASK + "graders: [{type: llm, name: kind, config: {rubric: Is it kind?}}]\n"
    spec = load(tree(tmp_path, eval_yaml=eval_yaml, tasks_a_yaml=task))
    assert (spec.graders[1].type, spec.graders[1].model) == ("prompt", "judge-x")  # type: ignore[attr-defined]


# Targets


def test_wazas_own_executor_is_refused_with_the_command_to_type(tmp_path: Path) -> None:
    path = tree(tmp_path, eval_yaml=EVAL.replace("executor: mock", "executor: copilot-sdk, model: gpt-5"))
    message = refused(path)
    assert f"{path}:3: config.executor: the executor 'copilot-sdk' is waza's own" in message
    assert f"holdfast eval {path} -m gpt-5" in message and "target.command=" in message
    assert load(path, "target.command=[./agent]").target.label == "agent"


def test_any_target_is_measured_by_override(tmp_path: Path, provider: Server) -> None:
    path = tree(tmp_path, eval_yaml=EVAL.replace("contains: [mock]", "contains: [hello]"))
    run_command("eval", path, "-m", "m", f"target.base_url={provider.base_url}", cwd=tmp_path)
    assert provider.requests == 1
    run_command("eval", path, 'target.command=[sh, -c, "echo hello from $PWD"]', cwd=tmp_path)
    runs = sorted(run.name.rpartition("-")[0] for run in (tmp_path / "runs" / "small").iterdir())
    assert runs == ["m", "sh"]


def test_keys_of_wazas_own_are_overridden_too(tmp_path: Path) -> None:
    path = tree(tmp_path, tasks_a_yaml=TASK.replace("Hello.", '"{{.Vars.who}}"'))
    spec = load(path, "config.trials_per_task=3", "inputs.who=Eve", "limits.retries=1")
    assert (spec.trials, rows(spec)["one"]["prompt"], spec.limits.retries) == (3, "Eve", 1)


def test_a_model_gets_the_skill_and_its_text_is_in_the_key(tmp_path: Path, provider: Server) -> None:
    path = tree(
        tmp_path,
        eval_yaml=EVAL.replace("executor: mock", "executor: mock, skill_directories: [skills]"),
        tasks_b_yaml="id: two\ninputs: {prompt: x}\ninstruction_files: [more_md.md]\n",
    )
    (tmp_path / "fixtures").mkdir()
    (tmp_path / "fixtures" / "more_md.md").write_text("Be {{ brief }}.")
    skill = tmp_path / "skills" / "s" / "SKILL.md"
    skill.parent.mkdir(parents=True)
    skill.write_text("---\nname: s\ndescription: d\n---\nCook {{ well }}.\n")
    model = ["-m", "m", f"target.base_url={provider.base_url}"]
    done = run_command("eval", path, *model, cwd=tmp_path)
    assert "skills/s/SKILL.md stands before the conversation" in done.stderr
    system_messages = {output["sample"]: output["messages"][0] for output in kept(run_dir(tmp_path, "small"))}
    assert system_messages == {
        "one": {"role": "system", "content": "Cook {{ well }}."},
        "two": {"role": "system", "content": "Cook {{ well }}.\n\nBe {{ brief }}."},
    }
    skill.write_text("Cook better.\n")
    run_command("eval", path, *model, cwd=tmp_path)
    assert provider.requests == 4  # in waza the edited skill would still have been served from its cache
    run_command("eval", path, *model, "config.inject_skill_body=false", cwd=tmp_path)
    assert provider.requests == 6
    assert "system" not in rows(load(path))["one"]  # the mock executor is told nothing


def test_a_skill_that_is_required_has_to_be_there(tmp_path: Path) -> None:
    path = tree(tmp_path, eval_yaml=EVAL.replace("executor: mock", "executor: mock, required_skills: [r]"))
    assert "eval.yaml:3: config.required_skills: there is no SKILL.md of 'r'" in refused(path, "target.model=m")


def test_a_missing_fixture_is_named_and_the_task_runs_without_it(tmp_path: Path) -> None:
    path = tree(tmp_path, tasks_a_yaml="id: x\ninputs: {prompt: x, files: [{path: gone.txt}]}\n")
    spec = load(path)
    assert rows(spec)["x"]["files"] == {}
    assert any(
        "tasks/a.yaml:2: inputs.files[0].path: there is no gone.txt" in notice for notice in spec.document.notices
    )


def test_binary_files_are_copied_whole_into_the_workspace(tmp_path: Path) -> None:
    path = tree(tmp_path, tasks_a_yaml="id: x\ncontext_dir: things\ninputs: {prompt: x, files: [{path: sub/b.bin}]}\n")
    (tmp_path / "things" / "sub").mkdir(parents=True)
    (tmp_path / "things" / "sub" / "b.bin").write_bytes(b"\xff\x00\xfe")
    run_command("eval", path, 'target.command=[sh, -c, "wc -c < sub/b.bin; echo mock"]', cwd=tmp_path)
    (output,) = kept(run_dir(tmp_path, "small"))
    assert output["output"].split() == ["3", "mock"]


# Conversations


RESPONDER = """\
id: played
inputs:
  prompt: Good day.
  responder: {model: player, instructions: "You are {{.Vars.who}}.", max_followups: 2}
checkpoints:
  - {after_turn: 1, graders: [{type: text, name: first, contains: [good]}]}
  - {after_turn: 3, graders: [{type: text, name: third, contains: [good]}]}
"""


def test_a_responder_belongs_to_its_task_and_an_unreached_checkpoint_is_counted(tmp_path: Path) -> None:
    eval_yaml = EVAL.replace("skill: s", "inputs: {who: Eve}").replace("contains: [mock]", "contains: [o]")
    path = tree(tmp_path, eval_yaml=eval_yaml, tasks_r_yaml=RESPONDER, tasks_t_yaml=_follow_ups("t", 2))
    with server() as target, server(answer='{"action": "stop", "reason": "done"}') as user:
        model = ["-m", "m", f"target.base_url={target.base_url}", f"responder.base_url={user.base_url}"]
        run_command("eval", path, *model, cwd=tmp_path)
        assert (target.requests, user.requests) == (1 + 3 + 1, 1)
    run = run_dir(tmp_path, "small")
    played = {row["id"]: row for row in json.loads((run / "manifest.json").read_text())["eval"]["samples"]}["played"]
    assert (played["instructions"], played["max_followups"]) == ("You are Eve.", 2)
    results = graded(run)
    assert results["played#1"]["grades"]["checkpoint@3/third"] == {"status": "not_reached", "score": None}
    assert set(results["t#1"]["grades"]) == {"any"}


def _follow_ups(name: str, count: int) -> str:
    return f"id: {name}\ninputs: {{prompt: one, follow_up_prompts: {[f'more {n}' for n in range(count)]}}}\n"


# Choosing tasks


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        (["-t", "soup"], ["soup"]),
        (["-t", "A *"], ["soup", "talk", "dessert"]),
        (["-t", "so*", "-t", "tal?"], ["soup", "talk"]),
        (["--tags", "course:*"], ["soup", "talk"]),
        (["--tags", "sweet", "--tags", "long"], ["talk", "dessert"]),
        (["-t", "s*", "--tags", "course:*"], ["soup"]),
        (["--tags", "course:*", "--limit", "1"], ["soup"]),
    ],
)
def test_tasks_are_chosen_by_name_id_and_tag(tmp_path: Path, options: list[str], chosen: list[str]) -> None:
    shutil.copytree(DATA / "kitchen", tmp_path / "kitchen")
    run_command("eval", "kitchen/eval.yaml", "--trials", "1", *options, cwd=tmp_path)
    run = run_dir(tmp_path, "kitchen")
    assert [name.partition("#")[0] for name in graded(run)] == chosen
    names = json.loads((run / "metrics.json").read_text())["metrics"]
    assert ("chocolate" in names) == ("dessert" in chosen)  # graders of other tasks stay away


def test_a_choice_of_nothing_is_an_error_that_names_the_tasks(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no task matches 'zzz'\nhint: Tasks: one\."):
        load(tree(tmp_path), "dataset.ids=zzz")


@pytest.mark.parametrize("inline", [True, False])
def test_samples_of_native_evals_are_selected_alike(tmp_path: Path, inline: bool) -> None:
    samples = [
        {"id": "a1", "question": "x", "tags": ["t"], "expected": "y"},
        {"id": "a2", "question": "x", "tags": "u", "expected": "y"},
        {"id": "b1", "name": "other", "question": "x", "expected": "y"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    dataset = {} if inline else {"dataset": {"path": "rows.jsonl"}, "samples": None}
    path = write_spec(tmp_path, **({"samples": samples} if inline else dataset))

    def chosen(*overrides: str) -> list[str]:
        return [sample.id for sample in identify(load(path, *overrides)).dataset]

    assert chosen("dataset.ids=a*") == ["a1", "a2"]
    assert chosen("dataset.ids=[a1, oth*]") == ["a1", "b1"]
    assert chosen("dataset.tags=[t, u]") == ["a1", "a2"]
    assert chosen("dataset.ids='*1'", "dataset.tags=t") == ["a1"]
    assert chosen("dataset.ids=a*", "dataset.limit=1") == ["a1"]
    assert identify(load(path, "dataset.ids=a*")).id != identify(load(path)).id


# Hooks


def _note(word: str, *, fails: bool = False) -> str:
    return f"{{command: sh note.sh {word}, error_on_fail: {str(fails).lower()}}}"


NOTE = (
    'echo "$1 ${HOLDFAST_SAMPLE:--} ${HOLDFAST_TRIAL:--}" >> notes.txt\ncase "$1" in bad*) echo oh no; exit 7;; esac\n'
)


def hooked(folder: Path, **hooks: str) -> Path:
    block = "hooks:\n" + "".join(f"  {name}: [{hook}]\n" for name, hook in hooks.items())
    path = tree(folder, eval_yaml=EVAL.replace("trials_per_task: 1", "trials_per_task: 2") + block)
    (folder / "note.sh").write_text(NOTE)
    return path


def test_hooks_run_around_the_run_and_around_each_trial(tmp_path: Path) -> None:
    path = hooked(
        tmp_path,
        before_run=_note("begin"),
        before_task=_note("before"),
        after_task=_note("after"),
        after_run=_note("bad-end", fails=True),
    )
    done = run_command("eval", path, "--concurrency", "1", cwd=tmp_path)
    assert (tmp_path / "notes.txt").read_text().splitlines() == [
        "begin - -",
        "before one 1",
        "after one 1",
        "before one 2",
        "after one 2",
        "bad-end - -",
    ]
    assert "hooks.after_run: sh ended with 7: oh no" in done.stderr
    run_command("eval", path, cwd=tmp_path)
    run_command("grade", run_dir(tmp_path, "small"), "--again", cwd=tmp_path)
    assert len((tmp_path / "notes.txt").read_text().splitlines()) == 6  # nothing was left to run


def test_a_hook_that_must_not_fail_before_a_trial_makes_it_an_error_and_never_a_score(tmp_path: Path) -> None:
    path = hooked(tmp_path, before_task=_note("bad", fails=True))
    run_command("eval", path, cwd=tmp_path, check=3)
    run = run_dir(tmp_path, "small")
    assert not kept(run) and not (run / "metrics.json").exists()
    assert {error["message"] for error in lines(run / "errors.jsonl")} == {"hooks.before_task: sh ended with 7: oh no"}
    (tmp_path / "note.sh").write_text("exit 0\n")
    run_command("eval", path, cwd=tmp_path)
    assert run_dir(tmp_path, "small") == run and len(kept(run)) == 2  # hooks are in no key


def test_a_hook_that_fails_before_every_trial_stops_the_run(tmp_path: Path, provider: Server) -> None:
    lab = Lab(tmp_path, provider)
    lab.rows = [{"id": f"s{number}", "question": f"{number}", "expected": ""} for number in range(50)]
    lab.spec["hooks"] = {"before_task": [{"command": "sh note.sh bad", "error_on_fail": True}]}
    (tmp_path / "note.sh").write_text(NOTE)
    stopped = lab.eval("--concurrency", 4, check=3)
    assert "all of the first 20 attempts failed: hooks.before_task: sh ended with 7: oh no" in stopped.out
    assert "Fix the hook" in stopped.out
    assert len((tmp_path / "notes.txt").read_text().splitlines()) < 30  # those in flight at the twentieth, and no more
    assert provider.requests == 0
    (tmp_path / "note.sh").write_text("exit 0\n")
    lab.eval()
    assert provider.requests == 50


def test_a_hook_that_must_not_fail_before_the_run_stops_it(tmp_path: Path) -> None:
    path = hooked(tmp_path, before_run=_note("bad", fails=True), after_run=_note("end"))
    done = run_command("eval", path, cwd=tmp_path, check=3)
    assert "hooks.before_run: sh ended with 7: oh no" in done.stderr and "Fix the hook" in done.stderr
    assert (tmp_path / "notes.txt").read_text() == "bad - -\n"


def test_a_hook_that_may_fail_is_reported_and_exit_codes_define_failure(tmp_path: Path) -> None:
    allowed = "{command: [sh, note.sh, bad-but], exit_codes: [0, 7], error_on_fail: true}"
    path = hooked(tmp_path, before_run=_note("bad"), before_task=allowed)
    done = run_command("eval", path, cwd=tmp_path)
    assert "hooks.before_run: sh ended with 7: oh no" in done.stderr and "before_task: sh" not in done.stderr


def test_native_evals_have_hooks_too(tmp_path: Path, provider: Server) -> None:
    lab = Lab(tmp_path, provider)
    lab.spec["hooks"] = {"before_run": [{"command": ["missing-program"]}], "after_task": [{"command": "touch done"}]}
    done = lab.eval()
    assert "hooks.before_run: missing-program cannot be run" in done.err
    assert (tmp_path / "done").exists()
