"""Suites on the command line: what is wrong is said with file and line, before anything runs."""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from holdfast.report.suite import _table
from tests.support.running import holdfast, module_server, write_eval
from tests.support.specs import command

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.running import Server

provider = module_server()


@pytest.fixture
def refused(monkeypatch: Any, capsys: Any, tmp_path: Path) -> Any:
    """Type a command in a folder with two evals; return what it says on being refused."""
    for name in ("first", "second"):
        write_eval(tmp_path, "http://127.0.0.1:9/v1", name=name)

    def refuse(*words: Any) -> str:
        ended = command(monkeypatch, capsys, tmp_path, "eval", *words)
        assert ended.code == 2, ended
        assert "Traceback" not in ended.err and not (tmp_path / "runs").exists()
        return str(ended.err)

    return refuse


def test_a_notice_about_an_eval_is_shown_once_and_is_in_every_log(tmp_path: Path, provider: Server) -> None:
    idle = {"type": "exact", "name": "idle", "where": "question == 'none'"}
    path = write_eval(tmp_path, provider.base_url, rows=1, graders=[{"type": "exact"}, idle])
    words = ("eval", path, "-m", "a", "-m", "b")
    notice = "applies to no row"
    assert holdfast(*words, "--dry-run", cwd=tmp_path).stdout.count(notice) == 1
    assert holdfast(*words, cwd=tmp_path).stderr.count(notice) == 1
    logs = [log.read_text() for log in tmp_path.glob("runs/e/*/run.log")]
    assert len(logs) == 2 and all(notice in log for log in logs)


SUITE = """\
suite: both
evals:
  - first.yaml
  - second.yaml
targets:
  - a
  - b
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("targets:", "target:", "suite.yaml:5: target: unknown key (did you mean 'targets'?)"),
        ("- second.yaml", "- first.yaml", "suite.yaml:4: evals[1]: a second eval called 'first'"),
        ("- second.yaml", "- third.yaml", "suite.yaml:4: evals[1]: no such file: third.yaml"),
        ("- second.yaml", "- thrid", "suite.yaml:4: evals[1]: no eval file 'thrid', and no task of that name"),
        ("- second.yaml", "- suite.yaml", "suite.yaml: is a suite, and a suite is made of eval files"),
        ("- b", "- a", "suite.yaml:7: targets[1]: a second target called 'a'"),
        ("- b", "- {python: agent.py:f}", "suite.yaml:7: targets[1]: needs a `label`"),
        ("- b", "- {label: x, model: a, python: agent.py:f}", "suite.yaml:7: targets[1]: a target is one of model"),
        ("suite: both", "suite: ''", "suite.yaml:1: suite: "),
        ("suite: both", "suite: both\noverrides: {trails: 3}", "suite.yaml:2: overrides.trails: unknown key"),
        (
            "suite: both",
            "suite: both\naverage: {over: [frist]}",
            "suite.yaml:2: average.over[0]: there is no eval 'frist'",
        ),
        ("suite: both", "suite: both\naverage: {over: [first], metric: f1}", "the eval 'first' has no grader 'f1'"),
        (
            "suite: both",
            "suite: both\naverage: {over: [first], weights: {second: 1}}",
            "weights.second: is not in `over`",
        ),
        ("suite: both", "suite: both\naverage: {over: [first], weights: {first: 0}}", "a number above 0, not 0"),
        ("suite: both", "suite: both\nschemaVersion: '9.0'", "9.0"),
    ],
)
def test_mistakes_in_a_suite_file_are_named_with_their_line(
    refused: Any, tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in SUITE
    (tmp_path / "suite.yaml").write_text(SUITE.replace(old, new, 1))
    assert message in refused("suite.yaml")


def test_all_mistakes_are_named_at_once(refused: Any, tmp_path: Path) -> None:
    text = SUITE.replace("- first.yaml", "- {eval: first.yaml, overrides: {trials: 0}}")
    (tmp_path / "suite.yaml").write_text(text.replace("- second.yaml", "- {eval: second.yaml, overrides: {trails: 1}}"))
    message = refused("suite.yaml")
    assert (
        "suite.yaml:3: evals[0].overrides.trials: " in message
        and "suite.yaml:4: evals[1].overrides.trails: " in message
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["first.yaml", "third.yaml"], "no such file: third.yaml"),
        (["first.yaml", "first.yaml"], "a second eval called 'first'"),
        (["first.yaml", "-m", "a", "-m", "a"], "-m a is given twice"),
        (["first.yaml", "second.yaml", "--baseline-model", "a"], "--baseline-model is for one eval and one model"),
        (["first.yaml", "second.yaml", "baseline={model: b}"], "a suite has no baselines"),
        (["first.yaml", "second.yaml", "--force-squash"], "--force-squash is for configurations of clusters"),
        (["first.yaml", "second.yaml", "trails=3"], "trails: unknown key (did you mean 'trials'?)"),
    ],
)
def test_mistakes_on_the_command_line_are_named(refused: Any, words: list[str], message: str) -> None:
    assert message in refused(*words)


def test_a_file_with_an_equals_sign_is_an_eval(tmp_path: Path, provider: Server) -> None:
    for name in ("n=1", "n=2"):
        write_eval(tmp_path, provider.base_url, rows=2, name=name)
    plan = holdfast("eval", "n=1.yaml", "n=2.yaml", "trials=2", "--dry-run", "--json", cwd=tmp_path).stdout
    assert [(cell["name"], cell["total"]) for cell in json.loads(plan)["cells"]] == [("n=1", 4), ("n=2", 4)]


@pytest.mark.parametrize(
    ("width", "models", "columns"),
    [
        (80, 2, ["eval", "large", "95 %", "small", "95 %"]),
        (60, 2, ["eval", "large", "small"]),
        (60, 4, ["eval", "target", "score", "95 % interval"]),
        (30, 4, ["eval", "target", "score"]),
    ],
)
def test_the_table_leaves_out_columns_before_it_cuts_a_number(width: int, models: int, columns: list[str]) -> None:
    targets = ["large-instruct-70b", "small-instruct-7b", "third-instruct-7b", "fourth-instruct-7b"][:models]
    cells = {(row, target): ("0.712 *", "0.690 – 0.733") for row in ("mmlu", "gsm8k") for target in targets}
    screen = io.StringIO()
    Console(width=width, file=screen).print(_table("suite", cells, targets, width))
    text = screen.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    assert text.count("0.712 *") == len(cells)
    assert text.count("0.690 – 0.733") == (len(cells) if "95 %" in " ".join(columns) else 0)
    heads = [line.strip("┃").split("┃") for line in text.splitlines() if line.startswith("┃")]
    titles = [" ".join("".join(parts).split()) for parts in zip(*heads, strict=True)]
    assert [title.startswith(column) for title, column in zip(titles, columns, strict=True)] == [True] * len(columns)


def test_a_suite_is_a_launch_of_several_tasks(tmp_path: Path, provider: Server) -> None:
    home = {"HOLDFAST_HOME": str(tmp_path / "home")}
    for name in ("first", "second"):
        write_eval(tmp_path, provider.base_url, rows=3, name=name, prompt=f"{name} {{{{ question }}}}")
    provider.reset()
    (tmp_path / "suite.yaml").write_text(SUITE)
    (tmp_path / "env.toml").write_text(f'[here]\nexecutor = "local"\npython = "{sys.executable}"\n')
    ended = holdfast("eval", "suite.yaml", "--run", "here", "--limit", "2", cwd=tmp_path, env=home)
    assert provider.requests == 4 * 2, ended.stdout
    holdfast("eval", "first.yaml", "second.yaml", "-m", "a", "-m", "b", "--limit", "2", cwd=tmp_path)
    assert provider.requests == 4 * 2, "the tasks are the runs of the suite"
    plan = holdfast(
        "eval", "second.yaml", "-m", "a", "-m", "c/d", "--batch", "here", "-d", "--json", cwd=tmp_path, env=home
    )
    assert [task["name"] for task in json.loads(plan.stdout)["tasks"]] == ["second-a", "second-c-d"]
    for words, message in (
        (["--max-cost", "1"], "the budget of a suite does not work on a cluster"),
        (
            ["deployment.type=generic", "deployment.command=serve"],
            "the served model is the one evaluated",
        ),
    ):
        done = holdfast("eval", "suite.yaml", "--batch", "here", *words, cwd=tmp_path, env=home, check=2)
        assert message in done.stderr
    (tmp_path / "config.yaml").write_text("execution: {type: local}\nevaluation: {tasks: [first.yaml]}\n")
    done = holdfast("eval", "config.yaml", "-m", "a", "-m", "b", "--batch", "here", cwd=tmp_path, env=home, check=2)
    assert "several models need eval files or a suite file" in done.stderr
