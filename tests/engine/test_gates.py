"""The gate of an eval file: its outcome is stored, follows the file, and is shown wherever the run is."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

import holdfast as api
from holdfast.store.catalog import list_runs
from tests.support.patterns import answered, finished_run
from tests.support.running import holdfast, wait_for
from tests.support.viewing import viewer

if TYPE_CHECKING:
    from pathlib import Path

MISSED = "correct is 0.8 (minimum 0.9)"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 10 samples, 8 right, which is below its gate."""
    run = finished_run(tmp_path / "place", answered(8, 2))
    gate_again(run, "gate.correct=0.9", code=1)
    return run


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over the same samples with 2 right."""
    return finished_run(tmp_path_factory.mktemp("other") / "place", answered(2, 8))


def gate_again(run: Path, *overrides: str, code: int = 0) -> str:
    """Run the eval of a finished run again with another gate, which asks nobody; return what that prints."""
    before = [(run / name).read_bytes() for name in ("outputs.jsonl", "metrics.json")]
    done = holdfast("eval", "e.yaml", *overrides, cwd=run.parents[2], check=code)
    assert [(run / name).read_bytes() for name in ("outputs.jsonl", "metrics.json")] == before
    return " ".join(f"{done.stdout} {done.stderr}".split())


def stored(run: Path) -> Any:
    return json.loads((run / "gate.json").read_text())


def status(run: Path) -> str:
    (summary,) = list_runs(run.parents[1])
    return summary.status


def test_the_outcome_follows_the_eval_file_without_running_anything(run: Path) -> None:
    assert stored(run) == {
        "schemaVersion": "1.0",
        "passed": False,
        "baseline": None,
        "checks": [
            {
                "what": "min correct",
                "passed": False,
                "warning": False,
                "message": MISSED,
                "metric": "correct",
                "value": 0.8,
                "minimum": 0.9,
            }
        ],
    }
    assert (status(run), api.load_run(run).exit_code) == ("gate failed", 1)
    written = (run / "gate.json").stat().st_mtime_ns
    gate_again(run, "gate.correct=0.9", code=1)
    assert (run / "gate.json").stat().st_mtime_ns == written, "nothing has changed"
    gate_again(run, "gate.correct=0.7")
    assert stored(run)["passed"] is True and (status(run), api.load_run(run).exit_code) == ("finished", 0)
    gate_again(run)
    assert not (run / "gate.json").exists() and status(run) == "finished"


def test_a_failed_gate_is_shown_by_every_command(run: Path) -> None:
    name, folder = run.name.rpartition("-")[2], run.parents[2]

    def say(*words: str) -> str:
        return str(holdfast(*words, cwd=folder).stdout)

    assert "\tgate failed\t" in say("ls") and name in say("ls", "--status", "gate failed")
    assert name not in say("ls", "--status", "finished")
    assert json.loads(say("ls", "--json"))[0]["status"] == "gate failed"
    assert f"gate failed: {MISSED}" in say("show", name)
    shown = json.loads(say("show", name, "--json"))
    assert shown["gate"] == stored(run) and shown["run"]["status"] == "gate failed"
    assert "gate failed" in say("status", name)
    gate_again(run, "gate.correct=0.7")
    assert "gate passed" in say("show", name) and "gate failed" not in say("show", name)


def test_a_failed_gate_is_red_in_exports_which_follow_it(run: Path) -> None:
    name, folder = run.name.rpartition("-")[2], run.parents[2]
    for form in ("junit", "html"):
        holdfast("export", name, "--to", form, "--if-changed", cwd=folder)
    report = run / "export" / "junit" / "junit.xml"
    suite = ElementTree.parse(report).getroot()[0]
    (case,) = [case for case in suite.iter("testcase") if case.get("classname", "").endswith(".gate")]
    failure = case.find("failure")
    assert failure is not None and failure.get("message") == f"gate failed: {MISSED}"
    assert (suite.get("tests"), suite.get("failures")) == ("11", "3"), "10 trials, of which 2 fail, and the gate"
    assert {item.get("name"): item.get("value") for item in suite.iter("property")}["gate"] == "failed"
    page = (run / "export" / "html" / "report.html").read_text()
    assert '<span class="badge failed">gate failed</span> ' + MISSED in page
    gate_again(run, "gate.correct=0.7")
    assert "wrote" in holdfast("export", name, "--to", "junit", "--if-changed", cwd=folder).stdout
    assert "gate failed" not in report.read_text() and 'name="gate" value="passed"' in report.read_text()


def test_a_failed_gate_is_red_on_pages(run: Path) -> None:
    name, badge = run.name.rpartition("-")[2], 'class="badge gate failed"'
    with viewer(run.parents[2]) as view:
        page = view.get(f"/run/{name}").text
        assert badge in page and f"gate failed</span> {MISSED}" in page
        assert view.json(f"/run/{name}.json")["status"] == "gate failed"
        assert badge in view.get("/").text and badge in view.get("/suite").text
        gate_again(run, "gate.correct=0.7")
        wait_for(lambda: view.json(f"/run/{name}.json")["status"] == "finished", "the next look at the run")
        for path in (f"/run/{name}", "/", "/suite"):
            assert "gate failed" not in view.get(path).text
        assert "gate passed" in view.get(f"/run/{name}").text


def test_a_baseline_can_be_named(run: Path, other: Path) -> None:
    """By its path, or by its id below the runs directory."""
    worse = "correct worse: 0.800 → 0.200, −60.0 points (−85.7 – −14.3), p 0.0156"
    ours = other.parents[2]
    beside = shutil.copytree(run, ours / "runs" / "e" / run.name)
    for place in (str(run), f"runs/e/{run.name}", run.name.rpartition("-")[2][:6]):
        assert f"gate not met: {worse}" in gate_again(other, f"gate.baseline={place}", code=1)
        assert stored(other)["baseline"] == place and stored(other)["checks"][-1]["verdict"] == "worse"
    assert "gate not met" not in gate_again(other, f"gate.baseline={run}", "gate.max_drop=90pt")
    unsure = gate_again(run, f"gate.baseline={other}")
    assert "gate:" not in unsure, "it is better"
    assert stored(run)["checks"][0]["verdict"] == "not worse"
    itself = gate_again(other, f"gate.baseline={other}", "gate.inconclusive=fail")
    assert "gate" not in itself.partition("look:")[0], "the same outputs"
    shutil.rmtree(beside)


def test_too_few_samples_are_a_warning_or_a_failure(run: Path, tmp_path: Path) -> None:
    lower = finished_run(tmp_path / "lower", answered(7, 3))
    words = "correct cannot tell: 0.800 → 0.700, −10.0 points ("
    warned = gate_again(lower, f"gate.baseline={run}")
    assert f"gate: {words}" in warned and " at best; 2 points need " in warned
    assert status(lower) == "finished" and stored(lower)["checks"][0]["warning"] is True
    failed = gate_again(lower, f"gate.baseline={run}", "gate.inconclusive=fail", code=1)
    assert f"gate not met: {words}" in failed and status(lower) == "gate failed"


def test_a_baseline_that_is_not_there_is_an_error_before_anything_runs(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    shutil.copytree(run.parents[2], folder)
    shutil.rmtree(folder / "runs")
    spec = json.loads((folder / "e.yaml").read_text())
    ungraded = finished_run(tmp_path / "ungraded", answered(3, 0), flags=("--skip-graders",))
    for baseline, problem in (("ffffff", "no run 'ffffff'"), (str(ungraded), "is not finished")):
        (folder / "e.yaml").write_text(json.dumps({**spec, "gate": {"baseline": baseline}}, indent=1))
        for flags in ((), ("--dry-run",)):
            refused = holdfast("eval", "e.yaml", *flags, cwd=folder, check=2)
            assert "e.yaml:" in refused.stderr and "gate.baseline: " in refused.stderr and problem in refused.stderr
        assert not (folder / "runs").exists()


def test_a_baseline_that_vanished_fails_the_gate(run: Path, other: Path, tmp_path: Path) -> None:
    """It is there when the run begins, and gone, or damaged, when the run is finished."""
    baseline = shutil.copytree(other, tmp_path / "baseline")
    (baseline / "results.json").unlink()
    assert "gate not met: baseline" in gate_again(run, f"gate.baseline={baseline}", code=1)
    assert "results.json: cannot be read" in stored(run)["checks"][0]["message"]


def test_work_on_a_run_forgets_its_gate_until_it_is_finished_again(run: Path) -> None:
    """A run that is being completed is not below its gate, and one with a damaged outcome is not above it."""
    (run / "gate.json").write_text("{")
    assert status(run) == "damaged"
    assert "gate.json: cannot be read" in holdfast("repair", run, cwd=run.parents[2], check=None).stdout
    assert not (run / "gate.json").exists() and status(run) == "unfinished"
    holdfast("eval", "e.yaml", "gate.correct=0.9", cwd=run.parents[2], check=1)
    assert status(run) == "gate failed"
    (run / "metrics.json").unlink()
    assert status(run) == "unfinished"
