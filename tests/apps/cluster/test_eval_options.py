"""An eval file by itself, and every option of `holdfast eval`, on a cluster: done there, or refused."""

from __future__ import annotations

import json
import re
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.apps.cluster.config.compile import LaunchRequest, compile_launch
from holdfast.apps.cluster.config.launch import Server
from holdfast.apps.cluster.job.servers import without_container
from holdfast.apps.cluster.remote.bundle import collect, copies_in, load_sent, send_bundles
from holdfast.apps.cluster.remote.registry import InvocationRegistry
from holdfast.apps.cluster.remote.submit import RunPreviews, preview
from holdfast.apps.cluster.remote.transport import Here
from holdfast.plan.identity import identify
from holdfast.spec.document import read_document
from holdfast.spec.formats import load_any
from tests.support.launching import Site, calmly
from tests.support.running import holdfast, lines, metrics, run_dir, server, start, write_eval

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.slurm import Cluster

WAZA = """\
name: kitchen
skill: cook
config: {trials_per_task: 2, executor: mock}
graders: [{type: program, name: shelf, config: {command: ./look.sh}}]
tasks: ["tasks/*.yaml"]
"""
TASK = """\
id: soup
name: A soup
inputs: {prompt: Cook a soup, files: [{path: leek.txt}]}
expected: {output_contains: [green]}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    (project / "env.toml").write_text(f'[here]\nexecutor = "local"\npython = "{sys.executable}"\n')
    return project


def run(folder: Path, *arguments: str | Path, check: int = 0) -> str:
    done = holdfast("eval", *arguments, cwd=folder, env={"HOLDFAST_HOME": str(folder.parent / "home")}, check=check)
    return str(done.stdout + done.stderr)


def write_waza(folder: Path) -> Path:
    for name, text in {
        "eval.yaml": WAZA,
        "tasks/soup.yaml": TASK,
        "fixtures/leek.txt": "a green leek",
        "look.sh": "#!/bin/sh\ntest -e leek.txt\n",
    }.items():
        path = folder / "waza" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "waza" / "look.sh").chmod(0o755)
    return folder / "waza" / "eval.yaml"


def test_a_preview_reports_variables_that_are_not_set_here(folder: Path) -> None:
    with server() as model:
        write_eval(folder, model.base_url, rows=2)
        shown = run(folder, "e.yaml", "--run", "here", "--dry-run", "env_vars.A=host:NOT_SET_HERE", check=2)
    assert "Task 0: e" in shown, "the preview comes first"
    assert "command line: A is host:NOT_SET_HERE, and NOT_SET_HERE is not set here" in shown


def test_an_eval_file_by_itself_is_one_task_and_the_same_run(folder: Path) -> None:
    with server() as model:
        write_eval(folder, model.base_url, rows=6)
        output = run(folder, "e.yaml", "--run", "here", "limits.concurrency=2", "execution.workers=2")
        done = run_dir(folder)
        table = run(folder, "e.yaml").partition("from scratch.\n")[2].partition("latency")[0]
        assert table.startswith("e · ") and table in output  # as on this machine
        assert model.requests == 6
        assert metrics(done)["total"] == 6
        assert "6 finished" in run(folder, "-c", "e.yaml", "--run", "here", "-d")  # the plan of this machine
        run(folder, "-c", "e", "--batch", "here", "-d")  # also by its name
        assert "already finished" in run(folder, "e.yaml")
        assert model.requests == 6


def test_t_selects_samples_for_an_eval_file_by_itself(folder: Path) -> None:
    with server() as model:
        write_eval(folder, model.base_url)
        assert "2 samples × 3 trials" in run(folder, "e.yaml", "--run", "here", "-t", "s[34]", "-d", "trials=3")
        assert "4 samples × 2 trials" in run(folder, "e.yaml", "--run", "here", "--limit", "4", "--trials", "2", "-d")
        assert model.requests == 0


def test_wazas_evals_run_on_a_cluster_and_are_the_same_run_there(folder: Path, slurm: Cluster) -> None:
    site = Site(folder, slurm, slurm.here)
    site.write(None)
    path = write_waza(folder)
    there = ("eval", path, "--run", "lab")
    env = {"SLURM_CONF": slurm.env["SLURM_CONF"], "HOLDFAST_HOME": str(folder / "home")}
    stdout = holdfast(*there, cwd=folder, env=env).stdout
    assert "coverage 100.0% of 2 trials" in stdout
    runs = site.base / "evaluations"
    again = run(folder, path, "--runs-dir", runs)
    assert "already finished" in again, again
    planned = json.loads(holdfast(*there, "-d", "--json", cwd=folder, env=env).stdout)
    assert planned["tasks"][0]["already_finished"] is True
    assert planned["tasks"][0]["notes"] == ["this machine: 2 outputs are there"]


def test_modules_and_workspaces_next_to_the_folder_travel_with_it(tmp_path: Path) -> None:
    for name, text in {
        "agents/agent.py": "from parts.inner import word\n\n\ndef reply(prompt):\n    return word\n",
        "agents/parts/__init__.py": "",
        "agents/parts/inner.py": "word = 'x'\n",
        "start/a.txt": "a",
    }.items():
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / name).write_text(text)
    target = {"python": "../agents/agent.py:reply"}
    path = write_eval(tmp_path / "p" / "evals", "", target=target, workspace={"folder": "../start"})
    spec = load_any(read_document(path))
    bundle = collect(spec, path)
    assert {"agents/agent.py", "agents/parts/inner.py", "start/a.txt", "evals/e.yaml"} <= set(bundle.files)
    sent = send_bundles([bundle], Here(pauses=()), str(tmp_path / "cluster"))[0]
    assert identify(load_sent(tmp_path / sent / bundle.eval_file, ())).id == identify(spec).id


def test_copies_are_written_on_the_machine_of_the_run(folder: Path) -> None:
    with server() as model:
        write_eval(
            folder, model.base_url, rows=3, output={"nat": {"dir": "nat"}, "export": [{"to": "csv", "dir": "t"}]}
        )
        options = ("--log-samples", "--output-path", "copies", "--export", "junit", "--trials", "2")
        run(folder, "e.yaml", "--run", "here", *options)
        place = run_dir(folder)
        assert len(lines(place / "samples.jsonl")) == 6
        assert list((folder / "copies").rglob("results_*.json"))
        assert list((place / "export" / "junit").iterdir())
        assert (folder / "nat" / "workflow_output.jsonl").exists()
        assert list((folder / "t").iterdir())
        bundles = folder / ".holdfast" / "holdfast" / "bundles"
        assert not list(bundles.rglob("nat")), "a bundle is what was sent, and stays so"


def test_options_of_a_run_hold_in_its_jobs(folder: Path) -> None:
    with server() as model:
        write_eval(folder, model.base_url, rows=4)
        output = run(folder, "e.yaml", "--run", "here", "--runs-dir", "other", "--skip-graders")
        (place,) = (folder / "other" / "e").iterdir()
        assert f"not graded, as asked: `holdfast grade {place}` grades it" in output
        assert len(lines(place / "workers" / "main" / "outputs.jsonl")) == 4
        run(folder, "e.yaml", "--run", "here", "--runs-dir", "other")
        assert (model.requests, metrics(place)["score"]) == (4, 0.5)
        model.control(status=400)
        run(folder, "e.yaml", "--run", "here", "--runs-dir", "other", "--fresh", check=3)
        assert model.requests > 4
        run(folder, "e.yaml", "--run", "here", "--runs-dir", "other", "--accept-errors")
        assert metrics(place)["coverage"] == 0
        newest = max((folder / ".holdfast" / "holdfast").glob("*/0/state.json"), key=lambda path: path.stat().st_mtime)
        state = json.loads(newest.read_text())
        assert (state["phase"], state["done"], state["total"], state["errors"]) == ("done", 0, 4, 4)
        model.control(status=200)
        run(folder, "e.yaml", "--run", "here", "--runs-dir", "other", "--retry-failed")
        assert metrics(place)["coverage"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--baseline-model", "m"], "--baseline-model does not work on a cluster"),
        (["--display", "json"], "--display json: jobs show plain logs"),
        (["--json"], "--json needs --dry-run"),
        (["--batch", "here"], "not both"),
    ],
)
def test_an_option_that_cannot_be_followed_is_refused(folder: Path, options: list[str], message: str) -> None:
    write_eval(folder, "http://127.0.0.1:9/v1")
    assert message in run(folder, "e.yaml", "--run", "here", *options, check=2)
    assert not (folder / ".holdfast").exists()


def test_another_model_than_the_served_one_is_refused(folder: Path) -> None:
    write_eval(folder, "http://127.0.0.1:9/v1")
    serving = {"type": "generic", "command": "serve", "served_model_name": "m"}
    config: dict[str, Any] = {
        "execution": {"type": "local"},
        "deployment": serving,
        "evaluation": {"tasks": ["e.yaml"]},
    }
    (folder / "c.yaml").write_text(json.dumps(config))
    output = run(folder, "c.yaml", "--run", "here", "-m", "other", check=2)
    assert "set deployment.served_model_name=…" in output


def test_following_shows_why_a_job_is_pending(tmp_path: Path, slurm: Cluster) -> None:
    site = Site(tmp_path, slurm, slurm.here)
    site.write("http://127.0.0.1:9/v1", execution={"num_nodes": 9, "sbatch_comment": "for the paper"})
    env = {"SLURM_CONF": slurm.env["SLURM_CONF"], "HOLDFAST_HOME": str(tmp_path / "home")}
    command = start("eval", "-c", "nano", "--run", "lab", cwd=tmp_path, env=env)
    assert command.stdout is not None
    line = next(line for line in command.stdout if "is pending" in line)
    assert re.search(r"note: job \d+ is pending: .*partition.*; ask for (less|fewer)", line)  # two words of Slurm's
    command.send_signal(signal.SIGINT)
    assert command.wait(60) == 130
    command.communicate()
    (invocation,) = InvocationRegistry(tmp_path / "home" / "invocations").all()
    (job,) = site.live(invocation, "main")
    assert job.comment.endswith(" for the paper")
    (intended,) = site.chain(invocation).known("main")
    assert intended.matches(job)
    holdfast("kill", invocation.id, cwd=tmp_path, env=env)
    calmly(lambda: not site.live(invocation, "main"), "the end of the job")


def test_a_preview_reports_a_cluster_that_does_not_answer(folder: Path) -> None:
    profile = '[far]\nexecutor = "slurm"\ntunnel = "ssh"\nhost = "nobody.invalid"\nremote_job_dir = "/jobs"\n'
    (folder / "env.toml").write_text(profile)
    write_eval(folder, "http://127.0.0.1:9/v1", rows=4)
    output = run(folder, "e.yaml", "--run", "far", "-d")
    assert "4 samples × 1 trial" in output
    assert "not checked: nobody.invalid" in output


def test_without_a_container_a_server_gets_the_real_path_of_its_checkpoint() -> None:
    mounts = ("/lustre/ckpt:/checkpoint:ro", "/lustre/c:/cache", "/data:/d")
    served = Server(
        command="serve /checkpoint --tokenizer /checkpoint/tok --log /d/checkpoint /checkpoints",
        mounts=mounts,
        env={"HF_HOME": "lit:/cache/huggingface"},
    )
    server = without_container(served)
    assert server.command == "serve /lustre/ckpt --tokenizer /lustre/ckpt/tok --log /d/checkpoint /checkpoints"
    assert server.env == {"HF_HOME": "lit:/lustre/c/huggingface"}


def test_a_server_without_a_model_name_is_asked_for_the_models_of_the_evals(folder: Path) -> None:
    write_eval(folder, "http://127.0.0.1:9/v1")
    served = "defaults: [{deployment: generic}]\ndeployment: {command: serve}\nexecution: {type: local}\n"
    (folder / "c.yaml").write_text(f"{served}evaluation: {{tasks: [e.yaml]}}\n")
    assert "the server is asked for the model that each eval file names" in run(folder, "c.yaml", "--run", "here", "-d")


def test_a_misspelt_section_and_an_empty_list_are_named(folder: Path) -> None:
    write_eval(folder, "http://127.0.0.1:9/v1")
    (folder / "c.yaml").write_text("executon: {type: local}\nevaluation: {tasks: []}\n")
    assert "c.yaml:1: executon: unknown key (did you mean 'execution'?)" in run(
        folder, "c.yaml", "--run", "here", check=2
    )
    (folder / "c.yaml").write_text("deployment: {type: none}\nevaluation: {tasks: []}\n")
    assert "there is no task: name eval files" in run(folder, "c.yaml", "--run", "here", check=2)


def test_tasks_that_are_one_run_and_wazas_own_keys_are_understood(folder: Path) -> None:
    write_waza(folder)
    task = "{name: 'a / b', eval: waza/eval.yaml, overrides: {config.trials_per_task: 3}}"
    (folder / "c.yaml").write_text(f"deployment: {{type: none}}\nevaluation: {{tasks: [{task}, {task}]}}\n")
    output = run(folder, "c.yaml", "--run", "here", "-d")
    assert "the task a / b.1 is the same run as a / b.0, and uses its results: nothing runs twice" in output
    assert output.count("1 sample × 3 trials") == 2


def test_of_tasks_that_share_a_run_only_the_first_starts_fresh(folder: Path) -> None:
    with server() as model:
        write_eval(folder, model.base_url, rows=4)
        (folder / "c.yaml").write_text("deployment: {type: none}\nevaluation: {tasks: [e.yaml, e.yaml]}\n")
        run(folder, "c.yaml", "--run", "here", "--fresh")
        assert model.requests == 4
        model.control(status=400)
        run(folder, "c.yaml", "--run", "here", "--fresh", "--accept-errors")
        before = model.requests
        run(folder, "c.yaml", "--run", "here", "--retry-failed", "--accept-errors")
        assert model.requests == before + 4


def test_folders_for_copies_are_named_as_the_cluster_has_them(tmp_path: Path) -> None:
    output = {"nat": {"dir": "../nat"}, "export": [{"to": "csv", "dir": "a/../t"}, {"to": "junit"}]}
    spec = load_any(read_document(write_eval(tmp_path / "evals", "http://127.0.0.1:9/v1", output=output)))
    (tmp_path / "here").mkdir()
    (tmp_path / "lustre").symlink_to(tmp_path / "here")  # on this machine; on the cluster it is a folder
    moved = dict(copies_in(spec, tmp_path / "lustre" / "e"))
    assert moved[("output", "nat", "dir")] == str(tmp_path / "lustre" / "nat")
    assert moved[("output", "export")] == [{"to": "csv", "dir": str(tmp_path / "lustre" / "e" / "t")}, {"to": "junit"}]


def test_a_dry_run_reports_the_actual_problem(folder: Path) -> None:
    with server() as model:
        write_eval(folder, model.base_url, rows=4)
        run(folder, "e.yaml")
    (run_dir(folder) / "manifest.json").write_text("{")
    output = run(folder, "e.yaml", "--run", "here", "-d")
    assert "manifest.json" in output and "holdfast repair" in output
    assert "its data cannot be read here" not in output
    (folder / "data.jsonl").unlink()
    assert "its data cannot be read here" in run(folder, "e.yaml", "--run", "here", "-d")


def test_the_checked_eval_is_the_one_that_is_sent(tmp_path: Path) -> None:
    path = write_waza(tmp_path)
    (tmp_path / "env.toml").write_text('[here]\nexecutor = "local"\n')
    launch = compile_launch(LaunchRequest(path, "here", ["trials=3"], cwd=tmp_path, environ={}))
    (task,) = launch.tasks
    path.write_text("tasks: [")  # meanwhile
    (ahead,) = preview(launch)
    assert RunPreviews(launch).preview(task, ahead.task).trials == 3
    bundle = collect(task.spec, task.eval_file, translated=task.translated)
    sent = send_bundles([bundle], Here(pauses=()), str(tmp_path / "cluster"))[0]
    assert load_sent(tmp_path / sent / bundle.eval_file, ()).trials == 3


def test_log_lines_of_tasks_with_the_same_name_have_different_prefixes(folder: Path) -> None:
    (folder / "square.py").write_text("def reply(prompt):\n    return prompt\n")
    write_eval(folder, "", rows=2, target={"python": "square.py:reply"})
    chat = "{name: chat, eval: e.yaml, overrides: {trials: %d}}"
    tasks = f"{chat % 1}, {chat % 2}, {{name: other, eval: e.yaml, overrides: {{trials: 3}}}}"
    (folder / "c.yaml").write_text(f"deployment: {{type: none}}\nevaluation: {{tasks: [{tasks}]}}\n")
    output = run(folder, "c.yaml", "--run", "here")
    for lead, trials in (("[chat.0]", 2), ("[chat.1]", 4), ("[other]", 6)):
        assert f"{lead} coverage 100.0% of {trials} trials" in output


def test_without_omegaconf_a_configuration_names_the_package_to_install(folder: Path) -> None:
    (folder / "hidden").mkdir()
    (folder / "hidden" / "omegaconf.py").write_text("raise ImportError\n")
    write_eval(folder, "http://127.0.0.1:9/v1")
    config = {"execution": {"type": "slurm"}, "deployment": {"type": "none"}, "evaluation": {"tasks": ["e.yaml"]}}
    (folder / "c.yaml").write_text(json.dumps(config))
    stderr = holdfast("eval", "c.yaml", "-d", cwd=folder, env={"PYTHONPATH": str(folder / "hidden")}, check=2).stderr
    assert "pip install omegaconf" in stderr
