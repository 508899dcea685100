"""`output.export`: what an eval file asks for after a run. It changes no key, and its failure no exit code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import holdfast as library
from tests.support.lab import Lab
from tests.support.running import Server, holdfast, metrics, module_server

if TYPE_CHECKING:
    from pathlib import Path


provider = module_server()


@pytest.fixture
def lab(tmp_path: Path, provider: Server) -> Lab:
    return Lab(tmp_path, provider)


def noted(run: Path) -> dict[str, Any]:
    exports: dict[str, Any] = json.loads((run / "exports.json").read_text())["exports"]
    return exports


def test_a_finished_run_is_exported_once_and_again_when_it_has_changed(lab: Lab) -> None:
    plain = lab.eval().run
    lab.spec["output"] = {"export": ["junit", {"to": "csv", "dir": "tables"}]}
    done = lab.eval()
    assert done.run == plain and done.work == (0, {}), "it is in no key"
    junit, table = plain / "export" / "junit" / "junit.xml", lab.folder / "tables" / "trials.csv"
    assert done.out.count("wrote ") == 2 and junit.exists() and table.exists()
    assert {name: entry["state"] for name, entry in noted(plain).items()} == {"junit": "done", "csv": "done"}
    assert "wrote " not in lab.eval().out, "both are up to date"
    junit.unlink()
    assert lab.eval().out.count("wrote ") == 1, "what is gone is written again"
    lab.spec["graders"][0]["weight"] = 2
    assert lab.eval().out.count("wrote ") == 2, "other numbers"


def test_an_unfinished_run_is_not_exported_until_grading_finishes_it(lab: Lab) -> None:
    lab.spec["output"] = {"export": ["junit"]}
    run = lab.eval("--skip-graders").run
    assert not (run / "exports.json").exists()
    holdfast("grade", run, cwd=lab.folder)
    assert (run / "export" / "junit" / "junit.xml").exists()


def test_a_failure_leaves_the_exit_code_and_is_done_again_by_name(lab: Lab) -> None:
    lab.spec["output"] = {"export": [{"to": "junit", "dir": "out"}, {"to": "csv", "dir": "out"}, "html"]}
    (lab.folder / "out").write_text("a file")
    done = lab.eval(check=0)
    assert done.err.count("warning: cannot export to") == 2 and "Traceback" not in done.err
    assert metrics(done.run)["coverage"] == 1.0
    states = {name: entry["state"] for name, entry in noted(done.run).items()}
    assert states == {"junit": "failed", "csv": "failed", "html": "done"}
    assert "out" in noted(done.run)["csv"]["error"]
    (lab.folder / "out").unlink()
    holdfast("export", done.run, "--to", "csv", cwd=lab.folder)
    assert (lab.folder / "out" / "trials.csv").exists(), "where it should have been"
    again = holdfast("export", done.run, "--failed", cwd=lab.folder.parent)
    assert again.stdout.count("wrote ") == 1 and (lab.folder / "out" / "junit.xml").exists()
    assert {entry["state"] for entry in noted(done.run).values()} == {"done"}


def test_an_export_by_name_can_be_left_out_where_nothing_has_changed(lab: Lab) -> None:
    run = lab.eval().run

    def export(*words: str) -> str:
        return str(holdfast("export", run, "--to", "csv", "--if-changed", *words, cwd=lab.folder).stdout)

    assert "wrote " in export()
    before = (run / "exports.json").read_bytes()
    assert "csv: already up to date" in export() and (run / "exports.json").read_bytes() == before
    assert "wrote " in export("-o", "elsewhere"), "other options"
    (lab.folder / "elsewhere" / "trials.csv").unlink()
    assert "wrote " in export("-o", "elsewhere"), "what is gone is written again"


def test_a_baseline_has_its_own_files(lab: Lab) -> None:
    lab.spec["output"] = {"export": [{"to": "junit", "dir": "out"}]}
    lab.eval("--baseline-model", "other")
    names = [path.read_text().partition("testsuite name=")[2][:20] for path in sorted(lab.folder.rglob("junit.xml"))]
    assert len(names) == 2 and names[0] != names[1]


@pytest.mark.parametrize(
    ("export", "message"),
    [
        (["juint"], "unknown exporter 'juint' (did you mean 'junit'?)"),
        ([{"dir": "x"}], "needs `to`"),
        ([{"to": "wandb", "projct": "x"}], "unknown key (did you mean 'project'?)"),
        ([{"to": "mlflow", "tracking_uri": "http://u:p@h"}], "MLFLOW_TRACKING_PASSWORD"),
        (["junit", {"to": "junit"}], "duplicate export to junit"),
        ([{"to": ["junit"]}], "unknown exporter \"['junit']\""),
    ],
)
def test_wrong_exports_are_reported_before_anything_runs(lab: Lab, export: list[Any], message: str) -> None:
    lab.spec["output"] = {"export": export}
    done = lab.eval(check=2)
    assert message in done.err and "output.export" in done.err and done.asked == 0


def test_from_python_a_failure_is_a_warning(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lab.folder)
    lab.spec["output"] = {"export": ["csv", {"to": "junit", "dir": "out"}]}
    lab.write()
    (lab.folder / "out").write_text("a file")
    with pytest.warns(RuntimeWarning, match="cannot export to junit"):
        run = library.evaluate("e.yaml")
    assert run.finished and run.exit_code == 0
    assert {name: entry["state"] for name, entry in noted(run.path).items()} == {"csv": "done", "junit": "failed"}


def test_a_folder_named_once_is_not_remembered(lab: Lab) -> None:
    run = lab.eval().run
    holdfast("export", run, "--to", "csv", "-o", "there", cwd=lab.folder)
    assert (lab.folder / "there" / "trials.csv").exists()
    holdfast("export", run, "--to", "csv", cwd=lab.folder)
    assert (run / "export" / "csv" / "trials.csv").exists()


@pytest.mark.parametrize(
    "arguments", [[], ["--to", "csv", "--failed"], ["--failed", "project=x"], ["--to", "wandb", "-o", "x"]]
)
def test_contradictory_arguments_are_refused(lab: Lab, arguments: list[str]) -> None:
    run = lab.eval().run
    assert holdfast("export", run, *arguments, cwd=lab.folder, check=2).stderr


def test_nat_files_are_written_after_a_call_from_python_and_after_grading(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(lab.folder)
    lab.spec["output"] = {"nat": {"dir": "nat"}}
    written = {"workflow_output.json", "workflow_output.jsonl", "correct_output.json"}
    lab.write()
    run = library.evaluate("e.yaml", display="none")
    assert run.finished and written <= {path.name for path in (lab.folder / "nat").iterdir()}
    for path in (lab.folder / "nat").iterdir():
        path.unlink()
    holdfast("grade", run.path, "graders.0.weight=2", cwd=lab.folder)
    assert written <= {path.name for path in (lab.folder / "nat").iterdir()}
