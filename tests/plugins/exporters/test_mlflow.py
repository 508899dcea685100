"""MLflow, against a real tracking server: what is there afterwards is what the run holds, once."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.forking import Forked
from tests.support.lab import Lab, rows
from tests.support.running import Server, environment, holdfast, metrics, module_server, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

START = 180.0
"""seconds: it imports half of the world"""


@pytest.fixture(scope="module")
def tracking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a tracking server with a database and artefacts of its own."""
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (folder / "log").open("wb") as log:
        process = Forked(
            [sys.executable, "-m", "tests.support.mlflow_server", folder, str(port)],
            cwd=folder,
            env=environment(),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"

    def healthy() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        wait_for(healthy, "MLflow's server", START)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # a session of its own, with whatever it started
        process.wait()


provider = module_server()


@pytest.fixture
def lab(tmp_path: Path, provider: Server) -> Lab:
    """Named after its folder, so that each test has an experiment of its own."""
    lab = Lab(tmp_path, provider, rows=rows(4), spec={"name": tmp_path.name, "trials": 2})
    lab.spec["graders"].append({"type": "text", "name": 'says "it" @ once', "contains": "question"})
    return lab


def export(run: Path, *options: str, check: int = 0, **env: str) -> Any:
    return holdfast("export", run, "--to", "mlflow", *options, cwd=run.parent, env=env, check=check)


def ask(tracking: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The server itself, not through MLflow's client."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{tracking}/{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def runs_in(tracking: str, experiment: str) -> list[dict[str, Any]]:
    """The runs of an experiment, with their values by name."""
    name = urllib.parse.quote(experiment)
    details = ask(tracking, f"api/2.0/mlflow/experiments/get-by-name?experiment_name={name}")["experiment"]
    asked = {"experiment_ids": [details["experiment_id"]]}
    runs = ask(tracking, "api/2.0/mlflow/runs/search", asked).get("runs", [])
    kinds = ("metrics", "params", "tags")
    return [
        run["info"] | {kind: {pair["key"]: pair["value"] for pair in run["data"].get(kind, [])} for kind in kinds}
        for run in runs
    ]


def artefact(tracking: str, run: dict[str, Any], name: str) -> Any:
    return ask(tracking, f"get-artifact?path={name}&run_id={run['run_id']}")


def holds(tracking: str, lab: Lab, run: Path) -> dict[str, Any]:
    """The one run of the experiment, which says what ours says."""
    (there,) = runs_in(tracking, lab.spec["name"])
    report = metrics(run)
    for name, stored in (("correct", "correct"), ('says "it" @ once', "says _it_ _at_ once")):
        for value in ("score", "low", "high", "n", "pass@2"):
            assert there["metrics"][f"{stored}/{value.replace('@', '_at_')}"] == report["metrics"][name][value]
    assert (there["metrics"]["score"], there["metrics"]["coverage"]) == (report["score"], 1.0)
    assert there["params"]["target.model"] == "test-model" and there["params"]["trials"] == "2"
    assert there["tags"]["holdfast.run"] == run.name.rpartition("-")[2] and there["status"] == "FINISHED"
    for name in ("manifest.json", "metrics.json", "results.json"):
        assert artefact(tracking, there, name) == json.loads((run / name).read_text())
    table = artefact(tracking, there, "trials.json")
    read = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    results = json.loads((run / "results.json").read_text())["trials"]
    assert [(row["sample"], row["trial"], row["status"], row["score"], row["output"]) for row in read] == [
        (entry["sample"], entry["trial"], entry["status"], entry["score"], entry["output"]) for entry in results
    ]
    return there


def test_repeated_exports_leave_one_current_run(lab: Lab, tracking: str) -> None:
    """One story, and so one server, whichever worker tells it."""
    run = lab.eval("--skip-graders").run
    assert "not finished" in export(run, MLFLOW_TRACKING_URI=tracking).stderr
    (begun,) = runs_in(tracking, lab.spec["name"])
    assert begun["status"] == "RUNNING" and "score" not in begun["metrics"]

    lab.eval()
    options = ["tags={team: x}", "description=why", "extra_metadata={commit: abc}", "run_name=mine"]
    done = export(run, f"tracking_uri={tracking}", *options)
    there = holds(tracking, lab, run)
    place = f"{tracking}/#/experiments/{there['experiment_id']}/runs/{there['run_id']}"
    assert there["run_id"] == begun["run_id"] and done.stdout == f"exported to mlflow: {place}\n"
    assert (there["tags"]["team"], there["tags"]["commit"]) == ("x", "abc")
    assert (there["tags"]["mlflow.note.content"], there["run_name"]) == ("why", "mine")

    lab.spec["graders"][0]["threshold"] = 0.5  # the same run, with other numbers
    by_itself = f"output.export=[{{to: mlflow, tracking_uri: '{tracking}', tags: {{by: itself}}}}]"
    done = lab.eval(by_itself)
    assert done.run == run and f"exported to mlflow: {place}" in done.out
    assert holds(tracking, lab, run)["tags"]["by"] == "itself"
    assert "exported" not in lab.eval(by_itself).out, "it is there already"


def test_a_server_that_refuses_fails_no_eval_and_is_asked_again(lab: Lab) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and nobody listens
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        exports = f"output.export=[{{to: mlflow, tracking_uri: '{nobody}'}}, junit]"
        done = lab.eval(exports, env={"MLFLOW_TRACKING_USERNAME": "u", "MLFLOW_TRACKING_PASSWORD": "topsecret"})
        assert "warning: cannot export to mlflow" in done.err and "Traceback" not in done.err
        assert f"holdfast export {done.run.relative_to(lab.folder)} --to mlflow" in done.err
        assert metrics(done.run)["coverage"] == 1.0
        assert (done.run / "export" / "junit" / "junit.xml").exists(), "one failure is not the next one's"
        noted = json.loads((done.run / "exports.json").read_text())["exports"]
        assert noted["junit"]["state"] == "done"
        assert noted["mlflow"]["state"] == "failed" and "refused" in noted["mlflow"]["error"]
        again = holdfast("export", done.run, "--failed", cwd=lab.folder, check=3).stderr
        assert again.startswith("error: cannot export to mlflow") and str(closed.getsockname()[1]) in again
    assert not any(b"topsecret" in path.read_bytes() for path in done.run.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "MLFLOW_TRACKING_URI"),
        (["tracking_uri=http://me:topsecret@127.0.0.1:1"], "MLFLOW_TRACKING_PASSWORD"),
        (["tracking_url=http://127.0.0.1:1"], "did you mean 'tracking_uri'?"),
    ],
)
def test_wrong_options_are_reported(lab: Lab, options: list[str], message: str) -> None:
    run = lab.eval().run
    done = export(run, *options, check=2)
    assert message in done.stderr and "topsecret" not in done.stderr
