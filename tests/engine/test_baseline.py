"""Two models side by side: each in its own run, compared in pairs, never averaged together."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.lab import Lab, rows
from tests.support.lazy import LazyModule
from tests.support.running import Server, lines, metrics, module_server, server

if TYPE_CHECKING:
    from pathlib import Path

numpy = LazyModule("numpy")
stats = LazyModule("scipy.stats")

ROWS = 9
AGENT = """
def first(prompt):
    return prompt


def second(prompt):
    return prompt[: int(prompt[-1])]
"""
GRADERS = "def length(output):\n    return len(output) / 100\n"


provider = module_server()


@pytest.fixture
def lab(tmp_path: Path, provider: Server) -> Lab:
    """Two agents whose answers differ in length, by a score of their length."""
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "score.py").write_text(GRADERS)
    graders = [
        {"type": "python", "name": "length", "function": "score.py:length"},
        {"type": "exact", "name": "correct"},
    ]
    keys: dict[str, Any] = {
        "target": {"python": "agent.py:first"},
        "baseline": {"python": "agent.py:second"},
        "graders": graders,
    }
    return Lab(tmp_path, provider, rows=rows(ROWS), spec=keys)


def two_runs(lab: Lab) -> list[Path]:
    """The run directories, the target's first."""
    return sorted(lab.runs.glob("e/*/"), key=lambda run: "first" not in run.name and "test-model" not in run.name)


def scores(run: Path, grader: str) -> list[float]:
    return [entry["grades"][grader]["score"] for entry in json.loads((run / "results.json").read_text())["trials"]]


def row_of(grader: str, table: str) -> list[str]:
    """The cells of the last table's line about a grader."""
    line = [line for line in table.splitlines() if re.match(rf"│ {grader} ", line)][-1]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_target_and_baseline_have_their_own_runs_and_the_difference_is_paired(lab: Lab) -> None:
    table = lab.eval().out
    first, second = two_runs(lab)
    assert "second" in second.name and all((run / "metrics.json").exists() for run in (first, second))
    ours, theirs = scores(first, "length"), scores(second, "length")
    gaps = numpy.array(ours) - numpy.array(theirs)
    together = 3  # both graders, and passing both, as in `holdfast compare`
    low, high = stats.t.interval(1 - 0.05 / together, ROWS - 1, gaps.mean(), gaps.std(ddof=1) / math.sqrt(ROWS))
    assert gaps.std() > 0 and low > 0
    _, one, other, gap, interval, samples = row_of("length", table)
    assert (one, other) == (f"{numpy.mean(ours):.3f}", f"{numpy.mean(theirs):.3f}"), "two numbers, not their mean"
    assert gap == f"{gaps.mean():+.3f}" and interval == f"{low:+.3f} – {high:+.3f}" and samples == str(ROWS)
    for run, lengths in ((first, ours), (second, theirs)):
        assert metrics(run)["metrics"]["length"]["score"] == pytest.approx(numpy.mean(lengths))
        assert metrics(run)["samples"] == ROWS
    assert re.search(r"agent.py:second\s+\(baseline\)|agent\.py:second \(baseline\)", table)


def test_the_same_command_compares_again_without_any_request(lab: Lab) -> None:
    table = lab.eval().out
    again = lab.eval()
    assert again.work == (0, {})
    assert row_of("length", again.out) == row_of("length", table)


def test_trials_of_one_sample_count_as_one(lab: Lab) -> None:
    table = lab.eval("--trials", 3).out
    assert row_of("length", table)[-1] == str(ROWS)


def test_a_baseline_model_is_named_on_the_command_line(tmp_path: Path, provider: Server) -> None:
    lab = Lab(tmp_path, provider)
    done = lab.eval("--baseline-model", "other-model")
    assert done.asked == 2 * len(lab.rows)
    assert {json.loads((run / "manifest.json").read_text())["target"] for run in two_runs(lab)} == {
        "test-model",
        "other-model",
    }
    assert row_of("correct", done.out)[1:] == ["0.500", "0.500", "+0.000", "–", str(len(lab.rows))]
    lab.rows += rows(1, start=50)
    assert lab.eval("--baseline-model", "other-model").asked == 2, "each reuses its own"
    assert lab.eval("-m", "other-model").asked == 0, "a baseline's run is a run like any other"


def test_the_baseline_inherits_missing_keys_from_the_target(tmp_path: Path, provider: Server) -> None:
    lab = Lab(tmp_path, provider)
    lab.spec["target"]["params"] = {"temperature": 0.3}
    lab.spec["baseline"] = {"model": "other-model"}
    lab.eval()
    params = [json.loads((run / "manifest.json").read_text())["identity"]["target"]["params"] for run in two_runs(lab)]
    assert params == [{"temperature": 0.3}] * 2


def test_target_and_baseline_have_the_same_judge(tmp_path: Path) -> None:
    with server(answer="judge") as model:
        lab = Lab(tmp_path, model, spec={"graders": [{"type": "prompt", "rubric": "polite"}]})
        lab.eval("--baseline-model", "other-model")
    manifests = [json.loads((run / "manifest.json").read_text()) for run in two_runs(lab)]
    assert manifests[0]["fingerprints"]["graders"] == manifests[1]["fingerprints"]["graders"]
    assert {grade["details"]["judge"] for run in two_runs(lab) for grade in lines(run / "grades.jsonl")} == {
        "test-model"
    }


def test_copies_of_target_and_baseline_have_different_names(lab: Lab) -> None:
    lab.spec["output"] = {"nat": {"dir": "nat"}}
    lab.eval("--output-path", "out")
    both = [lab.folder / "nat" / "workflow_output.json", lab.folder / "nat" / "baseline" / "workflow_output.json"]
    first, second = [[row["generated_answer"] for row in json.loads(path.read_text())] for path in both]
    assert first == [row["question"] for row in lab.rows] != second
    assert len(list((lab.folder / "out").rglob("results_*.json"))) == 2


def test_an_unfinished_baseline_is_not_compared_and_exits_3(tmp_path: Path, provider: Server) -> None:
    lab = Lab(tmp_path, provider)
    lab.spec["baseline"] = {"model": "other", "base_url": "http://127.0.0.1:1/v1"}
    done = lab.eval(check=3)
    assert done.asked == len(lab.rows) and "side by side" not in done.out
    assert "Resume with" in done.out
    lab.spec["baseline"]["base_url"] = provider.base_url
    again = lab.eval()
    assert again.asked == len(lab.rows) and "side by side" in again.out


def test_an_unfinished_target_does_not_hide_behind_its_baseline(tmp_path: Path, provider: Server) -> None:
    lab = Lab(tmp_path, provider)
    lab.spec["target"]["base_url"] = "http://127.0.0.1:1/v1"
    lab.spec["baseline"] = {"model": "other", "base_url": provider.base_url}
    done = lab.eval(check=3)
    assert done.asked == len(lab.rows) and "side by side" not in done.out


def test_a_gate_applies_to_the_target_only(lab: Lab) -> None:
    lab.spec["gate"] = {"correct": 0.4}
    assert lab.eval().out
    assert metrics(two_runs(lab)[1])["metrics"]["correct"]["score"] < 0.4
    lab.spec["gate"] = {"correct": 0.9}
    lab.eval(check=1)


@pytest.mark.parametrize("baseline", [{"modle": "x"}, {"model": "x", "python": "agent.py:second"}, {}, "other"])
def test_an_invalid_baseline_is_reported_before_anything_runs(lab: Lab, baseline: Any) -> None:
    lab.spec["baseline"] = baseline
    done = lab.eval(check=2)
    assert "baseline" in done.err and not lab.runs.exists()
