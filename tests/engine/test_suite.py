"""A suite: ordinary runs one after the other, with one budget, one plan, one display and one table."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.lab import rows
from tests.support.lazy import LazyModule
from tests.support.running import (
    Server,
    ask_to_stop,
    holdfast,
    lines,
    metrics,
    module_server,
    start,
    wait_for,
    write_eval,
)

if TYPE_CHECKING:
    from pathlib import Path

stats = LazyModule("scipy.stats")

provider = module_server()

ROWS = 6
TOKENS = 3
"""of each trial: a prompt of two words, and one token for the reply"""
AGENTS = """
def number(prompt):
    return int(prompt.split()[-1])

def all_right(prompt):
    return prompt

def half_right(prompt):
    return prompt if number(prompt) % 2 else "?"

def nearly_right(prompt):
    return "?" if number(prompt) < 2 else prompt
"""


@pytest.fixture
def folder(tmp_path: Path, provider: Server) -> Path:
    """Two evals with six rows each."""
    for name in ("first", "second"):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({**row, "question": f"{name} {n}"}) + "\n" for n, row in enumerate(rows(ROWS)))
        )
        write_eval(
            tmp_path,
            provider.base_url,
            name=name,
            dataset={"path": f"{name}.jsonl"},
            limits={"concurrency": 1, "retries": 0},
        )
    provider.control(latency=0.0)
    provider.reset()
    return tmp_path


def write_suite(folder: Path, **keys: Any) -> Path:
    """Write a suite of both evals with two models."""
    suite = {"suite": "both", "evals": ["first.yaml", "second.yaml"], "targets": ["a", "b"], **keys}
    path = folder / "suite.yaml"
    path.write_text(json.dumps(suite, indent=1))
    return path


def table(stdout: str) -> dict[str, list[str]]:
    """The cells of the last table by the name of their row."""
    cells_by_eval: dict[str, list[str]] = {}
    for line in stdout.splitlines():
        if line.startswith("┏"):
            cells_by_eval = {}
        elif line.startswith("│"):
            name, *cells = (cell.strip() for cell in line.strip("│").split("│"))
            cells_by_eval[name] = cells
    return cells_by_eval


def test_each_cell_is_an_ordinary_run_and_nothing_is_asked_twice(folder: Path, provider: Server) -> None:
    command = ("eval", "first.yaml", "second.yaml", "-m", "a", "-m", "b")
    stdout = holdfast(*command, cwd=folder).stdout
    assert provider.requests == 4 * ROWS
    runs = {f"{path.parent.parent.name}/{path.parent.name[0]}" for path in folder.glob("runs/*/*/metrics.json")}
    assert runs == {"first/a", "first/b", "second/a", "second/b"}
    again = holdfast(*command, cwd=folder)
    assert provider.requests == 4 * ROWS and again.stdout.count("finished before") == 4
    assert table(again.stdout) == table(stdout)
    holdfast("eval", "second.yaml", "-m", "b", cwd=folder)
    assert provider.requests == 4 * ROWS, "a single eval finds the run of the suite"
    holdfast(*command, "-m", "c", cwd=folder)
    assert provider.requests == 6 * ROWS


def test_a_suite_file_says_the_same(folder: Path, provider: Server) -> None:
    holdfast("eval", write_suite(folder), cwd=folder)
    assert provider.requests == 4 * ROWS
    holdfast("eval", "first.yaml", "second.yaml", "-m", "a", "-m", "b", cwd=folder)
    assert provider.requests == 4 * ROWS
    holdfast("eval", "suite.yaml", "-m", "c", "--limit", "2", cwd=folder)
    assert provider.requests == 4 * ROWS + 2 * 2, "models of the command line replace the file's"


def test_evals_without_models_keep_their_own_targets(folder: Path, provider: Server) -> None:
    stdout = holdfast("eval", "first.yaml", "second.yaml", cwd=folder).stdout
    assert provider.requests == 2 * ROWS and "test-model" in stdout
    assert table(stdout).keys() == {"first", "second"}


def test_overrides_of_the_suite_the_eval_and_the_command_line(folder: Path, provider: Server) -> None:
    small = {"eval": "first.yaml", "name": "small", "overrides": {"dataset.limit": 2}}
    evals = ["first.yaml", small, "second.yaml"]
    suite = write_suite(folder, evals=evals, targets=["a"], overrides={"dataset.limit": 4})
    plan = json.loads(holdfast("eval", suite, "--dry-run", "--json", cwd=folder).stdout)
    assert {cell["name"]: cell["total"] for cell in plan["cells"]} == {"first": 4, "small": 2, "second": 4}
    plan = json.loads(holdfast("eval", suite, "dataset.limit=1", "--dry-run", "--json", cwd=folder).stdout)
    assert [cell["total"] for cell in plan["cells"]] == [1, 1, 1]


def test_a_target_keeps_keys_of_the_eval_file_and_adds_its_own(folder: Path) -> None:
    hot = {"label": "hot", "model": "a", "params": {"temperature": 1}}
    stdout = holdfast("eval", write_suite(folder, targets=["a", hot]), cwd=folder).stdout
    manifests = [json.loads(path.read_text()) for path in folder.glob("runs/first/*/manifest.json")]
    params = sorted(str(manifest["identity"]["target"]["params"]) for manifest in manifests)
    assert params == ["{'temperature': 1}", "{}"]
    assert re.search(r"┃\s+a ┃.*┃\s+hot ┃", stdout)


def test_a_dry_run_plans_all_cells(folder: Path, provider: Server) -> None:
    holdfast("eval", "first.yaml", "-m", "a", cwd=folder)
    holdfast("eval", "second.yaml", "-m", "a", "--limit", "2", cwd=folder)
    asked, suite = provider.requests, write_suite(folder)
    stdout = holdfast("eval", suite, "--dry-run", cwd=folder).stdout
    assert "│ first  │ a      │      6 │        6 │     0 │     0 │   0 │" in stdout
    assert "│ second │ a      │      6 │        0 │     2 │     0 │   4 │" in stdout
    assert "│ 4 runs │        │     24 │        6 │     2 │     0 │  16 │" in stdout
    plan = json.loads(holdfast("eval", suite, "--dry-run", "--json", cwd=folder).stdout)
    assert plan["totals"] == {"total": 24, "finished": 6, "reused": 2, "to_grade": 0, "to_run": 16}
    assert [cell["already_finished"] for cell in plan["cells"]] == [True, False, False, False]
    assert provider.requests == asked


@pytest.mark.parametrize("asked", [ROWS, ROWS + 2], ids=["what is in flight completes a cell", "within a cell"])
def test_ctrl_c_starts_no_further_run_and_names_the_command(folder: Path, provider: Server, asked: int) -> None:
    provider.control(holds_after=asked - 1)
    suite = write_suite(folder)
    process = start("eval", suite, cwd=folder)
    wait_for(lambda: provider.requests == asked, "a request of the first or second cell")
    ask_to_stop(process)
    provider.control(holds_after=-1)
    out, _ = process.communicate()
    assert process.returncode == 130
    assert provider.requests == asked and len(list(folder.glob("runs/*/*/metrics.json"))) == 1
    assert "not started" in table(out)["second"]
    assert f"Resume with:\n  holdfast eval {suite}" in out
    holdfast("eval", suite, cwd=folder)
    assert provider.requests == 4 * ROWS


def test_all_cells_and_processes_share_a_budget(folder: Path, provider: Server) -> None:
    budget = TOKENS * ROWS + TOKENS * 2
    suite = write_suite(folder)
    stdout = holdfast("eval", suite, "--token-budget", str(budget), cwd=folder, check=3).stdout
    assert provider.requests == ROWS + 2, "the second cell gets what the first one left"
    assert f"budget reached: --token-budget {budget} ({budget} tokens used)" in stdout
    assert table(stdout)["second"][0] == "0 % done" and table(stdout)["first"][2] == "33 % done"
    holdfast("eval", suite, "--token-budget", str(budget), cwd=folder, check=3)
    assert provider.requests == ROWS + 2, "what earlier processes spent counts"
    raised = re.search(r"^  holdfast eval .*--token-budget (\d+)$", stdout, re.MULTILINE)
    assert raised is not None and int(raised[1]) >= 4 * ROWS * TOKENS
    holdfast("eval", suite, "--token-budget", raised[1], cwd=folder)
    assert provider.requests == 4 * ROWS


def test_the_budget_of_a_suite_file_also_holds_for_workers(folder: Path, provider: Server) -> None:
    suite = write_suite(folder, limits={"token_budget": TOKENS * (ROWS + 2)})
    holdfast("eval", suite, "--workers", "1", cwd=folder, check=3)
    assert provider.requests == ROWS + 2
    manifest = json.loads(next(folder.glob("runs/first/b-*/manifest.json")).read_text())
    assert "token_budget" not in manifest["eval"]["limits"], "the run itself has no such limit"


def test_the_limit_of_one_eval_does_not_stop_the_others(folder: Path, provider: Server) -> None:
    evals = [{"eval": "first.yaml", "overrides": {"limits.token_budget": TOKENS * 2}}, "second.yaml"]
    stdout = holdfast("eval", write_suite(folder, evals=evals, targets=["a"]), cwd=folder, check=3).stdout
    assert provider.requests == 2 + ROWS
    assert table(stdout) == {"first": ["33 % done", "–"], "second": ["0.000", "0.000 – 0.390"]}


def test_a_cell_whose_server_is_down_does_not_stop_the_others(folder: Path, provider: Server) -> None:
    down = {"label": "down", "model": "b", "base_url": "http://127.0.0.1:1/v1"}
    suite = write_suite(folder, targets=[down, "a"])
    stdout = holdfast("eval", suite, cwd=folder, check=3).stdout
    assert provider.requests == 2 * ROWS and stdout.count("stopped: 127.0.0.1:1 refuses connections") == 2
    assert [cells[0] for cells in table(stdout).values()] == ["0 % done"] * 2
    assert "2 runs of the suite are not finished. Resume with:" in stdout
    down["base_url"] = provider.base_url
    holdfast("eval", write_suite(folder, targets=[down, "a"]), cwd=folder)
    assert provider.requests == 4 * ROWS


def test_the_worst_cell_decides_the_exit_code(folder: Path) -> None:
    gated = {"eval": "first.yaml", "overrides": {"gate.score": 0.9}}
    stdout = holdfast("eval", write_suite(folder, evals=[gated, "second.yaml"]), cwd=folder, check=1).stdout
    assert stdout.count("gate not met: score") == 2 and "not finished" not in stdout
    down = {"label": "down", "model": "c", "base_url": "http://127.0.0.1:1/v1"}
    holdfast("eval", write_suite(folder, evals=[gated], targets=["a", down]), cwd=folder, check=3)


def test_programs_see_which_cell_runs(folder: Path) -> None:
    done = holdfast("eval", write_suite(folder), "--display", "json", cwd=folder)
    events = [json.loads(line) for line in done.stderr.splitlines()]
    cells = [event for event in events if event["event"] == "cell"]
    assert [(cell["number"], cell["eval"], cell["target"], cell["done"]) for cell in cells] == [
        (1, "first", "a", 0),
        (2, "first", "b", 6),
        (3, "second", "a", 12),
        (4, "second", "b", 18),
    ]
    assert {(cell["cells"], cell["trials"]) for cell in cells} == {(4, 24)}
    ended = [event for event in events if event["event"] == "cell_end"]
    assert [event["metrics"]["eval"] for event in ended] == ["first", "first", "second", "second"]
    assert events[-1]["event"] == "end" and events[-1]["exit_code"] == 0 and events[-1]["reason"] == "finished"
    plain = holdfast("eval", "suite.yaml", "-m", "c", "--display", "plain", cwd=folder)
    assert "1/2 first · c · runs/first/c-" in plain.stderr and "2/2 second · c · " in plain.stderr


@pytest.fixture
def agents(folder: Path) -> Path:
    """Three agents: always right, right on odd rows, and wrong on the first two rows of many."""
    (folder / "agents.py").write_text(AGENTS)
    for name, count in (("first", 12), ("second", 40)):
        (folder / f"{name}.jsonl").write_text(
            "".join(
                json.dumps({"id": f"s{n}", "question": f"row {n}", "expected": f"row {n}"}) + "\n" for n in range(count)
            )
        )
    names = ("all_right", "half_right", "nearly_right")
    write_suite(folder, targets=[{"label": name, "python": f"agents.py:{name}"} for name in names])
    return folder


def test_cells_that_differ_from_the_best_are_marked_after_holms_correction(agents: Path) -> None:
    stdout = holdfast("eval", "suite.yaml", cwd=agents).stdout
    # Samples that only the best one answers: 6 of 12 and 2 of 12; 20 of 40 and 2 of 40.
    p_values = [stats.binomtest(count, count).pvalue for count in (6, 2, 20, 2)]
    adjusted, highest = [0.0] * 4, 0.0
    for rank, place in enumerate(sorted(range(4), key=lambda place: p_values[place])):
        highest = adjusted[place] = max(highest, (4 - rank) * p_values[place])
    marks = [value < 0.05 for value in adjusted]
    assert p_values[0] < 0.05 and marks == [False, False, True, False], "uncorrected, the first would be marked"
    first, second = table(stdout)["first"], table(stdout)["second"]
    assert (first[0], first[2], first[4]) == ("1.000", "0.500", "0.833")
    assert (second[0], second[2], second[4]) == ("1.000", "0.500 *", "0.950")
    assert "p < 0.05 after Holm's correction over 4 comparisons" in stdout
    low, high = (metrics(next(agents.glob("runs/first/*half_right*")))["overall"][end] for end in ("low", "high"))
    assert first[3] == f"{low:.3f} – {high:.3f}"


def test_averages_need_a_rule_of_the_suite(agents: Path) -> None:
    assert "average" not in holdfast("eval", "suite.yaml", cwd=agents).stdout
    suite = json.loads((agents / "suite.yaml").read_text())
    suite["average"] = {"over": ["first", "second"], "weights": {"second": 3}}
    (agents / "suite.yaml").write_text(json.dumps(suite))
    averages = table(holdfast("eval", "suite.yaml", cwd=agents).stdout)["average (2 evals)"]
    assert averages[::2] == ["1.000", "0.500", f"{(10 / 12 + 3 * 38 / 40) / 4:.3f}"]
    errors = [
        metrics(next(agents.glob(f"runs/{name}/*half_right*")))["overall"]["stderr"] for name in ("first", "second")
    ]
    half = stats.norm.ppf(0.975) * (errors[0] ** 2 + (3 * errors[1]) ** 2) ** 0.5 / 4
    assert averages[3] == f"{0.5 - half:.3f} – {0.5 + half:.3f}"


def test_cells_with_other_graders_are_not_compared(folder: Path, provider: Server) -> None:
    judge = {"type": "prompt", "name": "judge", "rubric": "Is it right?"}
    spec = json.loads((folder / "first.yaml").read_text())
    (folder / "first.yaml").write_text(json.dumps({**spec, "graders": [judge]}))
    with provider.controlled(answer="judge"):
        stdout = holdfast("eval", "first.yaml", "-m", "a", "-m", "b", cwd=folder).stdout
    assert "is not compared with a: grader `judge` differs" in " ".join(stdout.split())


def test_copies_of_the_results_do_not_overwrite_each_other(folder: Path) -> None:
    holdfast("eval", write_suite(folder), "--output-path", "copies", cwd=folder)
    assert len(list(folder.glob("copies/**/results_*.json"))) == 4


def test_exports_of_several_targets_have_folders_of_their_own(folder: Path) -> None:
    exports = {"output.export": [{"to": "junit", "dir": "reports"}]}
    holdfast("eval", write_suite(folder, evals=["first.yaml"], overrides=exports), cwd=folder)
    assert sorted(path.name for path in (folder / "reports").iterdir()) == ["a", "b"]


def test_outputs_are_graded_in_the_run_of_their_cell(folder: Path) -> None:
    stdout = holdfast("eval", write_suite(folder), "--skip-graders", cwd=folder).stdout
    assert table(stdout)["first"][::2] == ["not graded"] * 2
    holdfast("eval", "suite.yaml", cwd=folder)
    assert all(len(lines(path)) == ROWS for path in folder.glob("runs/*/*/grades.jsonl"))
