"""Inputs of waza's evals: files searched in several folders, repositories, mocked servers, an environment."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import evaluate
from holdfast.data.dataset import Sample
from holdfast.graders.build import build_graders
from holdfast.graders.types import Case
from holdfast.plan.identity import identify
from holdfast.spec.target_schema import ScriptedTool
from holdfast.targets.tools import ToolContext, scripted_tool
from tests.support.breaking import kept
from tests.support.running import holdfast, run_dir, server
from tests.support.specs import output_of
from tests.support.waza import EVAL, TASK, load, notices, refused, rows, tree

if TYPE_CHECKING:
    from holdfast.spec.eval import Eval

WAZA = Path(__file__).parents[2] / "fixtures" / "waza"

SKILL = "---\nname: s\ndescription: Bakes sourdough bread.\n---\n"
GRADERS = """\
graders:
  - {type: trigger, name: trigger, config: {skill_path: skills/s, mode: negative}}
  - {type: diff, name: diff, config: {expected_files: [{path: a.txt, snapshot: snaps/a.txt}]}}
  - {type: json_schema, name: schema, config: {schema_file: schemas/x.json}}
  - {type: prompt, name: judge, rubric: rubrics/kind.md, model: j}
"""
FILES = {
    "skills/s/SKILL.md": SKILL,
    "snaps/a.txt": "hello",
    "schemas/x.json": '{"type": "object"}',
    "rubrics/kind.md": "---\nversion: 1\n---\nIs it {{ kind }}?\n",
}


def put(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def keys(spec: Eval) -> dict[str, Any]:
    identity: dict[str, Any] = identify(spec).contents.graders
    return identity


# Where files are found


def test_files_are_found_from_the_evals_folder_the_project_or_the_working_directory_and_give_one_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    identities = []
    for number, place in enumerate(("project/evals/e", "project", "elsewhere")):
        top = tmp_path / str(number)
        path = tree(top / "project" / "evals" / "e", tasks_a_yaml=TASK + GRADERS)
        (top / "project" / ".waza.yaml").write_text("")
        put(top / place, FILES)
        (top / "elsewhere").mkdir(exist_ok=True)
        monkeypatch.chdir(top / "elsewhere")
        spec = load(path)
        assert len(build_graders(spec)) == 5
        identities.append(keys(spec))
        assert json.dumps(spec.document.data).count(str(tmp_path)) == 0  # where they were found is on no record
    assert identities[0] == identities[1] == identities[2]
    assert (
        identities[0]["judge"]["rubric"] == "{% raw %}Is it {{ kind }}?{% endraw %}"
    )  # waza's rubrics are no templates


def test_keys_are_those_of_graders_that_name_the_files(tmp_path: Path) -> None:
    path = tree(tmp_path / "waza", tasks_a_yaml=TASK + GRADERS)
    put(tmp_path / "waza", FILES)
    ours = tmp_path / "ours" / "eval.yaml"
    put(tmp_path / "ours", FILES)
    ours.write_text(
        "schemaVersion: '1.0'\nname: o\nprompt: x\ntarget: {mock: waza}\nworkspace: {}\nsamples: [{id: a}]\n"
        + GRADERS.replace("prompt, name: judge, rubric: rubrics/kind.md, model: j", "exact, name: e, expected: y")
    )
    theirs, named = keys(load(path)), keys(load(ours))
    for name in ("trigger", "diff", "schema"):
        assert theirs[name] == {**named[name], "where": 'id == "one"'}


def test_an_eval_runs_from_the_projects_root_as_waza_does(tmp_path: Path) -> None:
    tree(tmp_path / "evals" / "e", tasks_a_yaml=TASK + GRADERS.partition("  - {type: diff")[0])
    (tmp_path / ".git").mkdir()
    put(tmp_path, FILES)
    holdfast("eval", "evals/e/eval.yaml", cwd=tmp_path)
    run = run_dir(tmp_path, "small")
    (tmp_path / "skills" / "s" / "SKILL.md").unlink()
    holdfast("grade", run, "--again", cwd=tmp_path)  # the run holds all that its graders need
    assert json.loads((run / "metrics.json").read_text())["metrics"]["trigger"]["score"] == 1.0


@pytest.mark.parametrize(
    ("grader", "place", "name"),
    [
        (
            "{type: trigger, name: t, config: {skill_path: no.md, mode: positive}}",
            "config.skill_path",
            "no.md",
        ),
        ("{type: diff, name: d, config: {expected_files: [{path: a, snapshot: s}]}}", "config.expected_files", "s"),
        ("{type: json_schema, name: j, config: {schema_file: x.json}}", "config.schema_file", "x.json"),
        ("{type: prompt, name: p, rubric: r.md, model: j}", "rubric", "r.md"),
        ("{type: script, name: s, script: check.py}", "script", "check.py"),
    ],
)
def test_a_file_that_is_nowhere_is_named_with_the_places_that_were_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grader: str, place: str, name: str
) -> None:
    path = tree(tmp_path / "p" / "e", tasks_a_yaml=f"{TASK}graders:\n  - {grader}\n")
    (tmp_path / "p" / ".waza.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    message = refused(path)
    assert f"tasks/a.yaml:5: graders[0].{place}: no such file: {name!r}; looked in " in message
    assert (
        f"{tmp_path}/p/e (the eval's folder), {tmp_path}/p (the project), {tmp_path} (the working directory)" in message
    )


def test_a_name_never_leads_out_of_the_project_and_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "SKILL.md").write_text(SKILL)
    grader = "{type: trigger, name: t, config: {skill_path: ../SKILL.md, mode: negative}}"
    path = tree(tmp_path / "e", tasks_a_yaml=f"{TASK}graders:\n  - {grader}\n")
    monkeypatch.chdir(tmp_path / "e")
    assert "skill_path: '../SKILL.md' is outside the project" in refused(path)
    (tmp_path / ".git").mkdir()
    assert keys(load(path))["t"]["type"] == "trigger"


def test_a_program_of_the_projects_is_run_and_its_content_is_in_the_key(tmp_path: Path) -> None:
    grader = "{type: program, name: p, config: {command: python3, args: [scripts/check.py]}}"
    path = tree(tmp_path / "evals" / "e", tasks_a_yaml=f"{TASK}graders:\n  - {grader}\n")
    (tmp_path / ".git").mkdir()
    put(tmp_path, {"scripts/check.py": "import sys\nsys.exit('Mock' not in sys.stdin.read())\n"})
    before = keys(load(path))["p"]
    holdfast("eval", path, cwd=tmp_path)
    assert json.loads((run_dir(tmp_path, "small") / "metrics.json").read_text())["metrics"]["p"]["score"] == 1.0
    put(tmp_path, {"scripts/check.py": "raise SystemExit(1)\n"})
    assert keys(load(path))["p"] != before


def test_a_hook_runs_where_its_working_directory_or_its_program_is_found(tmp_path: Path) -> None:
    hooks = """\
hooks:
  before_run: [{command: sh -c pwd>here, working_directory: tools}, {command: ./tools/note.sh}]
  before_task: [{command: "true", working_directory: evals/e}]
  after_run: [{command: "true", working_directory: nowhere}]
"""
    path = tree(tmp_path / "evals" / "e", eval_yaml=EVAL + hooks)
    (tmp_path / ".git").mkdir()
    put(tmp_path, {"tools/note.sh": "#!/bin/sh\npwd > noted\n"})
    (tmp_path / "tools" / "note.sh").chmod(0o755)
    spec = load(path)
    assert [hook.working_directory for hook in spec.hooks.before_run] == ["../../tools", "../.."]
    assert spec.hooks.before_task[0].working_directory == "."
    assert "eval.yaml:9: hooks.after_run[0].working_directory: no such file: 'nowhere'" in notices(spec)
    holdfast("eval", path, cwd=tmp_path)
    assert (tmp_path / "noted").read_text().strip() == str(tmp_path)


def test_tasks_and_tables_are_found_alike(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    path = tree(tmp_path / "e", eval_yaml=EVAL.replace("tasks/*.yaml", "shared/t.yaml"))
    put(tmp_path, {"shared/t.yaml": TASK})
    assert list(rows(load(path))) == ["one"]
    table = tree(tmp_path / "t", eval_yaml=EVAL.replace('tasks: ["tasks/*.yaml"]', "tasks_from: shared/t.csv"))
    put(tmp_path, {"shared/t.csv": "id,prompt\na,hello\n"})
    assert rows(load(table))["a"]["prompt"] == "hello"


# Fixtures and instructions


def test_fixtures_are_found_in_the_evals_folder_and_instructions_in_the_fixtures() -> None:
    about, tides = "Write a report.\n", "Metres, please.\n"
    for target in ("target.mock=waza", "target.model=m", 'target.command=["true"]'):
        tasks = rows(load(WAZA / "harbour" / "eval.yaml", target))
        assert tasks["boats"]["files"] == {"boats.txt": "gull\ntern\n", "AGENTS.md": about}
        files = {"high.txt": "3.1\n", "low.txt": "0.4\n", "AGENTS.md": about, "tides.md": tides}
        assert tasks["tides"]["files"] == files
    asked = rows(load(WAZA / "harbour" / "eval.yaml", "target.model=m"))
    assert asked["boats"]["system"] == "Write a report."
    assert asked["tides"]["system"] == "Write a report.\n\nMetres, please."


def test_a_scenario_runs_with_its_fixtures_and_instructions_in_the_workspace(tmp_path: Path) -> None:
    shutil.copytree(WAZA / "harbour", tmp_path / "harbour")
    agent = '[sh, -c, "(ls; cat AGENTS.md) > report.txt"]'
    done = holdfast("eval", "harbour/eval.yaml", f"target.command={agent}", "--export", "waza", cwd=tmp_path)
    metrics = json.loads((run_dir(tmp_path, "harbour-log") / "metrics.json").read_text())
    assert metrics["passed"] == 1.0 and metrics["coverage"] == 1.0
    assert "requirements: is for waza's own reports" in done.stderr
    results = json.loads((run_dir(tmp_path, "harbour-log") / "export" / "waza" / "results.json").read_text())
    assert (results["summary"]["succeeded"], results["skill"]) == (2, "")


WRONG_FIXTURES = {
    "no/such/dir": "no such file or folder: 'no/such/dir'; looked in {0} (the eval's folder), {0}/fixtures",
    "../a.txt": "must be the path of a file or folder below the eval's folder, not '../a.txt'",
    "/etc/hostname": "must be the path of a file or folder below the eval's folder, not '/etc/hostname'",
    "'.'": "must be the path of a file or folder below the eval's folder, not '.'",
    "''": "must be the path of a file or folder below the eval's folder, not ''",
    "[a]": "must be the path of a file or folder below the eval's folder, not ['a']",
}


@pytest.mark.parametrize("fixture", WRONG_FIXTURES)
def test_a_fixture_that_cannot_be_read_is_an_error(fixture: str, tmp_path: Path) -> None:
    task = f"id: one\ninputs:\n  prompt: Look.\n  context: {{fixture: {fixture}}}\n"
    problem = refused(tree(tmp_path, tasks_a_yaml=task))
    assert f"tasks/a.yaml:4: inputs.context.fixture: {WRONG_FIXTURES[fixture].format(tmp_path)}" in problem


def test_a_fixture_that_is_only_below_fixtures_is_found_and_named(tmp_path: Path) -> None:
    path = tree(tmp_path, tasks_a_yaml="id: one\ninputs: {prompt: Look., context: {fixture: a.txt}}\n")
    put(tmp_path, {"fixtures/a.txt": "below"})
    spec = load(path)
    assert rows(spec)["one"]["files"] == {"a.txt": "below"}
    assert "waza looks in the eval's folder" in notices(spec)


def test_instructions_that_are_not_among_the_fixtures_are_an_error_with_every_target(tmp_path: Path) -> None:
    eval_yaml = EVAL.replace("executor: mock", "executor: mock, instruction_files: [more.md]")
    path = tree(tmp_path, eval_yaml=eval_yaml, tasks_b_yaml=TASK.replace("one", "two"))
    put(tmp_path, {"more.md": "Be brief."})
    for overrides in ([], ["target.model=m"]):
        problem = refused(path, *overrides)
        looked = f"no such file: 'more.md'; looked in {tmp_path}/fixtures, the folder of fixtures"
        assert problem.count(f"eval.yaml:3: config.instruction_files: {looked}") == 1
    put(tmp_path, {"context/more.md": "Be brief."})
    task = f"{TASK}context_dir: context\n"
    files = rows(load(tree(tmp_path, eval_yaml=eval_yaml, tasks_a_yaml=task, tasks_b_yaml="id: x\nenabled: false\n")))
    assert files["one"]["files"] == {"more.md": "Be brief."}


# Empty prompts


def test_an_empty_prompt_is_asked_of_the_mock_executor_and_of_a_model(tmp_path: Path) -> None:
    path = tree(tmp_path, tasks_a_yaml=TASK.replace("Hello.", '""'))
    holdfast("eval", path, cwd=tmp_path)
    assert kept(run_dir(tmp_path, "small"))[0]["output"] == "Mock response for: \nTask: One"
    assert rows(load(tree(tmp_path / "null", tasks_a_yaml="id: x\ninputs: {prompt: }\n")))["x"]["prompt"] == ""
    with server(answer="mock") as provider:
        holdfast("eval", path, "-m", "m", f"target.base_url={provider.base_url}", "--runs-dir", "r", cwd=tmp_path)
        assert provider.requests == 1


# Scenarios


def test_a_scenario_eval_runs_without_a_skill(tmp_path: Path) -> None:
    path = tree(tmp_path, eval_yaml='schemaVersion: "2.0"\nscenario: keep\n' + EVAL.replace("skill: s\n", ""))
    spec = load(path)
    assert spec.document.data["metadata"]["waza"]["scenario"] == "keep"
    assert list(rows(spec)) == ["one"]


# Repositories, working directories, environments


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with two commits, of which the first is tagged `old`."""
    folder = tmp_path / "repo"
    put(folder, {"lib/a.txt": "first\n", "run.sh": "#!/bin/sh\n"})
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("lib/a.txt")
    (folder / "b.bin").write_bytes(b"\xff\x00")
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}

    def git(*arguments: str) -> None:
        author = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", *author, *arguments], cwd=folder, check=True, capture_output=True, env=environment)

    git("init", "-q", ".")
    git("add", "-A")
    git("commit", "-qm", "one")
    git("tag", "old")
    put(folder, {"lib/a.txt": "second\n"})
    git("commit", "-qam", "two")
    put(folder, {"lib/a.txt": "not committed\n"})
    return folder


def with_repository(folder: Path, source: object, more: str = "", commit: str = "") -> Path:
    repos = f"repos: [{{type: worktree, source: {source}, dest: code{commit}}}]"
    return tree(folder, tasks_a_yaml=f"id: one\ninputs:\n  prompt: Look.\n  {repos}\n{more}")


def test_the_files_of_a_commit_are_in_the_workspace(tmp_path: Path, repository: Path) -> None:
    path = with_repository(tmp_path / "e", repository)
    spec = load(path)
    assert rows(spec)["one"]["checkout"] == {
        "code/b.bin": {"base64": "/wA="},
        "code/lib/a.txt": "second\n",
        "code/run.sh": {"text": "#!/bin/sh\n", "executable": True},
    }
    assert "the 3 files of" in notices(spec) and "1 links and submodules are left out" in notices(spec)
    assert (
        rows(load(with_repository(tmp_path / "e", repository, commit=", commit: old")))["one"]["checkout"][
            "code/lib/a.txt"
        ]
        == "first\n"
    )
    grader = (
        "graders: [{type: file, name: f, config: {content_patterns: [{path: code/lib/a.txt, must_match: [second]}]}}]\n"
    )
    holdfast("eval", with_repository(tmp_path / "e", "../repo", grader), cwd=tmp_path)
    run = run_dir(tmp_path, "small")
    assert json.loads((run / "metrics.json").read_text())["passed"] == 1.0
    files = kept(run)[0]["files"]
    assert files["code/run.sh"].endswith("+x") and not files["code/lib/a.txt"].endswith("+x")
    assert "Analyzed" not in kept(run)[0]["output"]  # waza's mock executor shows fixtures, not repositories


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("repos: [{type: clone, source: x, dest: y}]", "inputs.repos[0].type: not supported: 'clone'"),
        ("repos: [{type: worktree, source: SOURCE, dest: y}]", "inputs.repos[0].source: no such file: 'SOURCE'"),
        ("repos: [{type: worktree, source: ., dest: ../y}]", "inputs.repos[0].dest: names a folder of the workspace"),
        (
            "repos: [{type: worktree, source: ., dest: y}]",
            "inputs.repos[0]: . at HEAD cannot be read: fatal: not",
        ),
        ("workdir: ../x", "inputs.workdir: names a folder of the workspace, without `..`"),
        ("workdir: x", "inputs.workdir: there is no folder 'x' among the task's files"),
    ],
)
def test_files_that_cannot_be_put_into_the_workspace_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: str, message: str
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert f"tasks/a.yaml:4: {message}" in refused(
        tree(tmp_path, tasks_a_yaml=f"id: x\ninputs:\n  prompt: x\n  {inputs}\n")
    )


AROUND = """\
id: one
inputs:
  prompt: Where?
  files: [{path: sub/f.txt, content: x}]
  workdir: sub
  environment: {WHO: "Ada {{ 1 }}"}
"""


def test_a_command_starts_in_the_workdir_with_the_environment(tmp_path: Path) -> None:
    path = tree(tmp_path, tasks_a_yaml=AROUND, tasks_b_yaml="id: two\ninputs: {prompt: x}\n")
    holdfast("eval", path, 'target.command=[sh, -c, "echo [$WHO]; basename $PWD; ls"]', cwd=tmp_path)
    lines = {output["sample"]: output["output"].split("\n") for output in kept(run_dir(tmp_path, "small"))}
    assert lines["one"] == ["[Ada {{ 1 }}]", "sub", "f.txt"]
    assert lines["two"][0] == "[]" and lines["two"][1] != "sub"


def test_a_target_that_has_no_workdir_or_environment_is_named(tmp_path: Path) -> None:
    path = tree(tmp_path, tasks_a_yaml=AROUND)
    spec = load(path, "target.model=m")
    assert "inputs.workdir: a model has no working directory" in notices(spec)
    assert "inputs.environment: has no effect" in notices(spec) and "environment" not in rows(spec)["one"]
    assert rows(load(path, "target.python=agent.py:reply"))["one"]["workdir"] == "sub"
    request = 'target={http: "http://127.0.0.1:1", request: {}}'
    assert "inputs.workdir: not supported: a workflow behind HTTP has no workspace" in refused(path, request)
    secret = tree(tmp_path / "s", tasks_a_yaml=AROUND.replace("WHO", "MY_TOKEN"))
    assert "inputs.environment.MY_TOKEN: keys are not written into files" in refused(secret, "target.command=[true]")


# Mocked servers


MOCKS = """\
mcp_mocks:
  - name: inventory
    fixtures: mocks
    tools:
      count:
        description: Count things.
        input_schema: {type: object, properties: {kind: {type: string}}, required: [kind]}
        responses:
          - {match: {kind: pear}, return: {n: 3}}
          - {match_regex: {kind: "^Hello"}, return: two}
          - {match_schema: {required: [fail]}, error: out of order}
"""


@pytest.fixture
def mocked(tmp_path: Path) -> Path:
    """An eval with a mocked server."""
    put(tmp_path, {"mocks/look.json": '{"responses": [{"return": [1]}]}'})
    return tree(tmp_path, eval_yaml=EVAL + MOCKS)


def test_the_mock_executor_needs_no_mocked_servers_as_in_waza(mocked: Path) -> None:
    spec = load(mocked)
    assert "mcp_mocks: the mock executor calls no tools, here as in waza" in notices(spec)
    assert spec.target == load(tree(mocked.parent)).target


def test_a_mocked_server_answers_a_model(tmp_path: Path, mocked: Path) -> None:
    with server(tool_calls=2, answer="mock") as provider:
        holdfast("eval", mocked, "-m", "m", f"target.base_url={provider.base_url}", cwd=tmp_path)
    (output,) = kept(run_dir(tmp_path, "small"))
    results = [(message["name"], message["content"]) for message in output["messages"] if message["role"] == "tool"]
    assert results == [("inventory-look", "[1]"), ("inventory-count", '"two"')]
    before = identify(load(mocked, "target.model=m")).work.digest
    mocked.write_text(mocked.read_text().replace("return: two", "return: three"))
    assert identify(load(mocked, "target.model=m")).work.digest != before


def _agent(prompt: str, context: Any) -> str:
    return f"mock {context.tool('inventory-count', {'kind': prompt})}"


def test_a_mocked_server_answers_a_function_given_from_python(tmp_path: Path, mocked: Path) -> None:
    done = evaluate(mocked, target=_agent, runs_dir=tmp_path / "runs")
    assert done.finished
    assert kept(run_dir(tmp_path, "small"))[0]["output"] == 'mock "two"'


def test_a_scripted_tool_gives_the_first_response_that_fits() -> None:
    block = ScriptedTool.model_validate(
        {
            "name": "count",
            "responses": [
                {"match": {"kind": "pear"}, "result": {"n": 3}},
                {"match_regex": {"kind": "^ap"}, "result": "two"},
                {"match_schema": {"required": ["fail"]}, "error": "out of order"},
            ],
        }
    )
    tool = scripted_tool(block, "here")

    def answer(**arguments: Any) -> str:
        return asyncio.run(tool.run(arguments, ToolContext({}, 1, 1, None, "")))  # type: ignore[arg-type]

    assert answer(kind="pear") == '{"n":3}'
    assert answer(kind="pear", more=1).startswith("Error: no response")
    assert answer(kind="apple", more=1) == "two"
    assert answer(fail=True) == "Error: out of order"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: inventory", "name: ' '", "mcp_mocks[0].name: is missing"),
        ("fixtures: mocks", "fixtures: nowhere", "mcp_mocks[0].fixtures: no such file: 'nowhere'"),
        ("return: two", "sequence: []", "mcp_mocks[0].tools.count: not supported in a mocked tool: sequence"),
    ],
)
def test_a_wrong_mock_is_named(mocked: Path, old: str, new: str, message: str) -> None:
    mocked.write_text(mocked.read_text().replace(old, new))
    assert message in refused(mocked)


def test_mocks_are_rejected_for_targets_that_bring_their_own_tools(mocked: Path) -> None:
    message = refused(mocked, "target.command=[true]")
    assert "eval.yaml:6: mcp_mocks: not supported with target.command, which brings its own tools" in message


COMMANDS = """\
command_mocks:
  - name: az
    expect_calls: 3
    responses:
      - {args: [login], stdout: {ok: true}}
      - {args_regex: [show, "x.*"], fixture: shown.txt, stderr: careful, exit_code: 3}
      - {args: [where], workdir: sub, environment: {WHO: Ada}, stdout: here}
  - {name: real-program, responses: [{args: [], stdout: not so real}]}
"""


def commands(folder: Path) -> Path:
    """Write an eval with mocked commands; one of its tasks has others."""
    put(folder, {"shown.txt": "a fixture"})
    files = "files: [{path: sub/f, content: x}], environment: {WHO: Ada}"
    own = "id: two\ncommand_mocks: [{name: az, responses: [{args_regex: ['.*'], stdout: own}]}]\ninputs: {prompt: x}\n"
    task = TASK.replace("{prompt: Hello.}", f"{{prompt: Hello., {files}}}")
    return tree(folder, eval_yaml=EVAL + COMMANDS, tasks_a_yaml=task, tasks_b_yaml=own)


def test_mocked_commands_are_first_on_the_path_of_a_program(tmp_path: Path) -> None:
    agent = "az login; echo; az show xy; echo $?; cd sub 2>/dev/null; az where; echo mock"
    holdfast("eval", commands(tmp_path), f'target.command=[sh, -c, "{agent}"]', cwd=tmp_path)
    run = run_dir(tmp_path, "small")
    lines = {output["sample"]: output["output"].split("\n") for output in kept(run)}
    assert lines["one"] == ['{"ok":true}', "a fixture3", "heremock"]
    assert lines["two"][0] == "own" and lines["two"][-1] == "ownmock"
    metrics = json.loads((run / "metrics.json").read_text())["metrics"]
    assert metrics["command_mock/az"]["score"] == 1.0  # of the one task that says how often


def test_a_mocked_command_called_too_often_or_unexpectedly_fails(tmp_path: Path) -> None:
    agent = "az unknown; echo $?; echo mock"
    holdfast("eval", commands(tmp_path), "-t", "one", f'target.command=[sh, -c, "{agent}"]', cwd=tmp_path)
    run = run_dir(tmp_path, "small")
    assert kept(run)[0]["output"] == "127\nmock"
    assert json.loads((run / "metrics.json").read_text())["metrics"]["command_mock/az"]["score"] == 0.0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: az", "name: ../az", "command_mocks[0].name: names a program"),
        ("name: az", "name: python3", "command_mocks[0].name: names a program, and not env or python3"),
        ("name: real-program", "name: az", "command_mocks[1].name: duplicate program name 'az'"),
        ("args: [login]", "stderr: x", "command_mocks[0].responses[0]: needs either args or args_regex"),
        ("exit_code: 3", "exit_code: 300", "command_mocks[0].responses[1].exit_code: must be a number from 0 to 255"),
        ("workdir: sub", "workdir: /sub", "command_mocks[0].responses[2].workdir: names a folder of the workspace"),
        ("fixture: shown.txt", "fixture: no.txt", "command_mocks[0].responses[1].fixture: no such file: 'no.txt'"),
        ("expect_calls: 3", "expect_calls: many", "command_mocks[0].expect_calls: must be a number from 0"),
    ],
)
def test_a_wrong_command_mock_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = commands(tmp_path)
    path.write_text(path.read_text().replace(old, new, 1))
    assert message in refused(path, "target.command=[true]")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("limits.retries=1", "the mock executor runs no commands, here as in waza"),
        ("target.model=m", "target.model runs"),
    ],
)
def test_mocked_commands_are_rejected_for_targets_that_run_none(tmp_path: Path, override: str, reason: str) -> None:
    assert f"eval.yaml:6: command_mocks: not supported: {reason}" in refused(commands(tmp_path), override)


# Tool policies


AGENT = "---\nname: a\ntools: {tools}\n---\nReview code.\n"


@pytest.mark.parametrize(("tools", "patterns"), [("[bash, my-tool]", ["(?i)^bash$", r"(?i)^my\-tool$"]), ("[]", [])])
def test_the_tools_of_an_agent_file_are_the_only_ones_allowed(tmp_path: Path, tools: str, patterns: list[str]) -> None:
    path = tree(tmp_path, eval_yaml=EVAL.replace("executor: mock", "executor: mock, skill_directories: [agents]"))
    put(tmp_path, {"agents/a.agent.md": AGENT.replace("{tools}", tools)})
    spec = load(path)
    grader: Any = spec.graders[-1]
    assert (grader.name, grader.restricts) == ("agent_tools_implicit", True)
    assert [name.pattern for name in grader.allow_only] == patterns
    assert "allows these tools only" in notices(spec)
    assert rows(load(path, "target.model=m"))["one"]["system"] == "Review code."
    own = "graders: [{type: tool_constraint, name: own, config: {reject_tools: [{tool: rm}]}}]"
    path.write_text(path.read_text().replace("graders: [{type: text, name: any, config: {contains: [mock]}}]", own))
    assert [grader.name for grader in load(path).graders] == ["own"]


@pytest.mark.parametrize(
    ("written", "patterns"),
    [("[]", []), ("[{tool: bash}, edit]", ["(?i)^bash$", "(?i)^edit$"])],
)
def test_allow_only_has_whole_names_and_an_empty_list_allows_no_tool(
    tmp_path: Path, written: str, patterns: list[str]
) -> None:
    grader = f"{{type: tool_constraint, name: c, config: {{allow_only: {written}}}}}"
    block: Any = load(tree(tmp_path, tasks_a_yaml=f"{TASK}graders:\n  - {grader}\n")).graders[-1]
    assert block.restricts and [name.pattern for name in block.allow_only] == patterns


AS_WAZA = """\
graders:
  - {type: action_sequence, name: order, config: {expected_actions: [a, b], matching_mode: exact_match}}
  - {type: tool_calls, name: calls, config: {expect: [{tool: READ}, {tool: read_}], required_tools: ["{{ x }}"]}}
  - {type: tool_constraint, name: rules, config: {reject_tools: [{tool: bash|sh, command_pattern: "RM {{"}]}}
  - {type: text, name: braces, config: {regex_match: ['\\{{2} x', "{{ .Vars.x }}"], contains: ["{% raw %}"]}}
  - {type: code, name: code, config: {assertions: ["'{{ x }}' not in output"]}}
"""


def test_graders_mean_what_they_mean_in_waza(tmp_path: Path) -> None:
    spec = load(tree(tmp_path, tasks_a_yaml=TASK + AS_WAZA))
    calls = [{"id": name, "function": {"name": name}} for name in ("b", "a", "read_file")]
    messages = [{"role": "assistant", "tool_calls": calls}]
    output = output_of("{{ x {{ .Vars.x }} {% raw %}", messages=messages)
    case = Case(Sample("one", {"x": "b"}, "sha256:0", "here"), output)
    graders: list[Any] = build_graders(spec)[-5:]
    assert [grader.check(case).score for grader in graders[:4]] == [
        pytest.approx(0.8),  # F1, although the order is wrong
        pytest.approx(2 / 3),  # names are patterns that ignore case, and one call meets both; `{{ x }}` was not called
        1,
        1,
    ]
    assert graders[2].block.reject_tools[0].tool.pattern == "(?i)bash|sh"
    assert graders[4].block.assertions == ("'{{ x }}' not in output",)


# The rest


def test_a_responder_needs_instructions_and_may_have_checkpoints_beyond_its_replies(tmp_path: Path) -> None:
    responder = "id: x\ninputs:\n  prompt: x\n  responder: {model: m, instructions: '  ', max_followups: 1}\n"
    assert "inputs.responder.instructions: must say who the user is" in refused(tree(tmp_path, tasks_a_yaml=responder))
    played = EVAL.replace("executor: mock", "executor: mock, model: gpt-5")
    nobody = responder.replace("'  '", "You are Ada.").replace("model: m, ", "")
    spec = load(tree(tmp_path / "model", eval_yaml=played, tasks_a_yaml=nobody))
    assert spec.responder is not None and spec.responder.model == "gpt-5"
    assert "responder.model=MODEL" in refused(tree(tmp_path / "none", tasks_a_yaml=nobody))
    later = "checkpoints: [{after_turn: 5, graders: [{type: text, contains: [x]}]}]\n"
    spec = load(tree(tmp_path, tasks_a_yaml=responder.replace("'  '", "You are Ada.") + later))
    assert [point.after_turn for point in spec.checkpoints] == [5]


def test_posix_classes_are_read(tmp_path: Path) -> None:
    grader = '{type: text, name: t, config: {regex_match: ["^Mock[[:space:]]response"]}}'
    holdfast("eval", tree(tmp_path, tasks_a_yaml=f"{TASK}graders:\n  - {grader}\n"), cwd=tmp_path)
    assert json.loads((run_dir(tmp_path, "small") / "metrics.json").read_text())["metrics"]["t"]["score"] == 1.0
