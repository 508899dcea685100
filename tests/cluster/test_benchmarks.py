"""Benchmarks by name on a real Slurm: compiled where they are submitted, asked and graded where they run."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.clusters import GUIDE_CONFIGURATION, GUIDE_TASKS
from tests.support.hub import write_hub
from tests.support.launching import Site, free_port
from tests.support.running import environment, holdfast, metrics, run_dir, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.slurm import Cluster

PROFILE = """
[wandb]
project = "nemotron"
entity = "my-team"

[MY-CLUSTER]
executor = "slurm"
account = "my-account"
partition = "main"
tunnel = "ssh"
host = "cluster"
remote_job_dir = "{base}"
python = "{python}"
"""
SUBJECTS = 13
"""of `mmlu_str_other`; all 57, and more than one example for each question, take the embedded model minutes"""
DEPLOY = """
import os, threading, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.hostnames = {weights!r}, int(os.environ["HOLDFAST_PORT"]), ["127.0.0.1"]
params.n_parallel, params.n_ctx, params.n_gpu_layers = 1, 2048, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
threading.Event().wait()
"""
"""one slot, so that the examples of a prompt are computed once and not for each choice"""


@pytest.fixture
def site(tmp_path: Path, sshd: Cluster) -> Site:
    """A cluster behind ssh, whose nodes have neither lm-eval nor the data nor anything compiled."""
    pytest.importorskip("xllamacpp")
    weights = pytest.importorskip("holdfast.targets.embedded")._weights("local/smollm2-135m")
    site = Site(tmp_path, sshd, sshd.ssh())
    write_hub(tmp_path / "hub")
    (tmp_path / "deploy.py").write_text(DEPLOY.format(weights=str(weights)))
    for name in ("lm_eval", "datasets"):
        (tmp_path / "missing").mkdir(exist_ok=True)
        (tmp_path / "missing" / f"{name}.py").write_text("raise ImportError(f'{__name__} is not installed here')\n")
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\nunset HOLDFAST_DATA\nexport HOLDFAST_HOME={tmp_path}/node PYTHONPATH={tmp_path}/missing\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    (tmp_path / "env.toml").write_text(PROFILE.format(base=site.base, python=python))
    (tmp_path / "nano.yaml").write_text(GUIDE_CONFIGURATION)
    return site


@contextmanager
def served(site: Site) -> Iterator[str]:
    """Serve the model here as jobs do, and yield its URL."""
    port = free_port()
    command, env = [sys.executable, str(site.folder / "deploy.py")], environment(HOLDFAST_PORT=str(port))
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: is_healthy(port), "the server")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.kill()


def is_healthy(port: int) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10):
        return True
    return False


def variables(site: Site) -> dict[str, str]:
    return {
        "HOLDFAST_HOME": str(site.folder / "home"),
        "HOLDFAST_DATA": str(site.folder / "hub"),
        "HOLDFAST_SSH_CONFIG": str(site.lab.ssh_config),
        "HF_DATASETS_CACHE": str(site.folder / "hf"),
        "WANDB_API_KEY": "0123456789abcdef" * 3,
    }


def numbers(run: Path) -> dict[str, Any]:
    """Return what a run says about the model, without what it says of the server."""
    report = metrics(run)
    return {key: report[key] for key in ("benchmark", "score", "outputs", "coverage")}


def test_a_configuration_with_names_of_benchmarks_gives_the_numbers_of_a_local_run(site: Site) -> None:
    params = "nemo_evaluator_config.config.params"
    holdfast(
        *("eval", "-c", "nano", "--batch", "MY-CLUSTER"),
        *("~execution.gres", f"deployment.port={free_port()}", "export.env_vars.WANDB_MODE=lit:offline"),
        f"deployment.command={sys.executable} {site.folder}/deploy.py",
        f"evaluation.{params}.limit_samples=1",
        f"evaluation.{params}.extra.num_fewshot=1",
        f"evaluation.tasks.adlr_mmlu.{params}.task=mmlu_str_other",
        cwd=site.folder,
        env=variables(site),
    )
    with served(site) as base_url:
        local = ("-m", "checkpoint", f"target.base_url={base_url}", "--limit", "1", "benchmark.num_fewshot=1")
        holdfast("eval", GUIDE_TASKS[0], *local, "benchmark.task=mmlu_str_other", cwd=site.folder, env=variables(site))
        holdfast("eval", *GUIDE_TASKS[1:], *local, cwd=site.folder, env=variables(site))

    (invocation,) = site.registry.all()
    for number, name in enumerate(GUIDE_TASKS):
        state = site.await_over(invocation, task=number)
        samples = SUBJECTS if name == "adlr_mmlu" else 1
        assert (state.phase, state.done, state.errors) == ("done", samples, 0), site.logs(invocation)
        (run,) = (site.base / "evaluations" / name).glob("checkpoint-*")
        assert numbers(run) == numbers(run_dir(site.folder, name))
        assert numbers(run)["coverage"] == 1
        assert run.samefile(state.run_dir or "")
    assert site.logs(invocation).count("export to wandb: done") == len(GUIDE_TASKS), site.logs(invocation)
    assert not (site.folder / "node" / "benchmarks").exists(), "nodes compile nothing"
