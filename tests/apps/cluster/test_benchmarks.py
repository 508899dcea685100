"""Benchmarks by name on a real Slurm: compiled where they are submitted, asked and graded where they run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.clusters import GUIDE_CONFIGURATION
from tests.support.hub import write_hub
from tests.support.launching import Site, free_port
from tests.support.running import ROOT, holdfast, metrics, run_dir, server

if TYPE_CHECKING:
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
SAMPLES = {"adlr_mmlu": 13, "hellaswag": 1}
"""of the guide's benchmarks one that is generated, with the subjects of `mmlu_str_other`, and one of likelihoods

What any other one asks and counts is compared with lm-eval where it is compiled, in tests/plugins/benchmarks.
"""
KEY = "0123456789abcdef" * 3
DEPLOY = f"""
import asyncio, os, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.support.server import Settings, serve
os.dup2(os.pipe()[0], 0)  # at whose end it would stop serving
asyncio.run(serve(Settings(), int(os.environ["HOLDFAST_PORT"])))
"""
"""the test server: what it says about a prompt is the same wherever it runs"""


@pytest.fixture
def site(tmp_path: Path, sshd: Cluster) -> Site:
    """A cluster reached through ssh, whose nodes have neither lm-eval nor the data nor anything compiled."""
    site = Site(tmp_path, sshd, sshd.ssh())
    write_hub(tmp_path / "hub")
    (tmp_path / "deploy.py").write_text(DEPLOY)
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


def variables(site: Site) -> dict[str, str]:
    return {
        "HOLDFAST_HOME": str(site.folder / "home"),
        "HOLDFAST_DATA": str(site.folder / "hub"),
        "HOLDFAST_SSH_CONFIG": str(site.lab.ssh_config),
        "WANDB_API_KEY": KEY,
    }


def numbers(run: Path) -> dict[str, Any]:
    """Return what a run says about the model, without what it says of the server."""
    report = metrics(run)
    return {key: report[key] for key in ("benchmark", "score", "outputs", "coverage")}


def test_a_configuration_with_names_of_benchmarks_gives_the_numbers_of_a_local_run(site: Site) -> None:
    params = "nemo_evaluator_config.config.params"
    submitted = holdfast(
        *("eval", "-c", "nano", "--batch", "MY-CLUSTER", *(word for name in SAMPLES for word in ("-t", name))),
        *("~execution.gres", f"deployment.port={free_port()}", "export.env_vars.WANDB_MODE=lit:offline"),
        *(f"deployment.command={sys.executable} {site.folder}/deploy.py", "deployment.health_check_path=/v1/models"),
        f"evaluation.{params}.limit_samples=1",
        f"evaluation.{params}.extra.num_fewshot=1",
        f"evaluation.tasks.adlr_mmlu.{params}.task=mmlu_str_other",
        cwd=site.folder,
        env=variables(site),
    )
    assert "note: detected a W&B login, setting WANDB_API_KEY" in submitted.stdout
    with server() as model:
        local = ("-m", "checkpoint", f"target.base_url={model.base_url}", "--limit", "1", "benchmark.num_fewshot=1")
        holdfast("eval", "adlr_mmlu", *local, "benchmark.task=mmlu_str_other", cwd=site.folder, env=variables(site))
        holdfast("eval", "hellaswag", *local, cwd=site.folder, env=variables(site))

    (invocation,) = site.registry.all()
    for number, (name, samples) in enumerate(SAMPLES.items()):
        state = site.await_over(invocation, task=number)
        assert (state.phase, state.done, state.errors) == ("done", samples, 0), site.logs(invocation)
        (run,) = (site.base / "evaluations" / name).glob("checkpoint-*")
        assert numbers(run) == numbers(run_dir(site.folder, name))
        assert numbers(run)["coverage"] == 1
        assert run.samefile(state.run_dir or "")
    logs = site.logs(invocation)
    assert logs.count("export to wandb: done") == len(SAMPLES), logs
    assert KEY not in submitted.stdout + submitted.stderr + logs
    assert not (site.folder / "node" / "benchmarks").exists(), "nodes compile nothing"
