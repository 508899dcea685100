"""Every key that a configuration or a profile may have does something, is refused, or is named as one that does not."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from holdfast.apps.cluster.config import schema as fields
from holdfast.apps.cluster.config.launch import Container
from holdfast.apps.cluster.config.profiles import OTHER_KEYS
from holdfast.apps.cluster.remote.submit import preview
from holdfast.errors import ConfigError, UsageError
from tests.support.clusters import launched, lay_out, write

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.apps.cluster.config.launch import Launch
    from holdfast.spec.schema import Block

BLOCKS: dict[str, type[Block]] = {
    "": fields.LaunchBlock,
    "run": fields.RunBlock,
    "run.env": fields.ProfileBlock,
    "execution": fields.ExecutionBlock,
    "execution.mounts": fields.MountsBlock,
    "execution.deployment": fields.DeploymentTasks,
    "execution.auto_export": fields.AutoExportBlock,
    "deployment": fields.DeploymentBlock,
    "deployment.endpoints": fields.EndpointsBlock,
    "auxiliary_deployments.judge": fields.AuxiliaryBlock,
    "target.api_endpoint": fields.ApiEndpoint,
    "evaluation": fields.EvaluationBlock,
    "evaluation.nemo_evaluator_config": fields.EvaluatorConfig,
    "evaluation.nemo_evaluator_config.config": fields.TaskConfig,
    "evaluation.nemo_evaluator_config.config.params": fields.Params,
    "evaluation.tasks.0": fields.TaskBlock,
    "export": fields.LaunchExportBlock,
    "export.wandb": fields.LaunchWandbExport,
    "export.mlflow": fields.LaunchMlflowExport,
}
VALUES: dict[str, Any] = {
    "run.env.executor": "slurm",
    "run.env.time": "00:30:00",
    "run.env.build_time": "00:30:00",
    "run.env.tunnel": "local",
    "run.env.packager": "git",
    "run.env.mounts": ["/a:/b"],
    "run.env.lustre_mount": "/a:/b",
    "run.env.env_vars": {"A": "b"},
    "execution.type": "lcoal",
    "execution.walltime": "00:30:00",
    "execution.max_walltime": "09:00:00",
    "execution.output_dir": "/elsewhere",
    "execution.mounts.auxiliary": {"judge": {"/a": "/b"}},
    "auxiliary_deployments": {"judge": {"type": "none"}},
    "execution.num_instances": 2,
    "execution.num_nodes": 4,
    "execution.gres": "gpu:4",
    "execution.mode": "parallel",
    "execution.container_engine": "podman",
    "execution.sbatch_extra_flags": {"qos": "high"},
    "execution.proxy": {"type": "haproxy"},
    "execution.proxy.type": "haproxy",
    "execution.proxy.config": {"haproxy_port": 5},
    "execution.auto_export": ["mlflow"],
    "export.wandb.mode": "offline",
    "execution.auto_export.destinations": ["csv"],
    "execution.auto_export.enabled": False,
    "execution.evaluation_gpu_visible": "0,1",
    "execution.env_vars": {"evaluation": {"A": "lit:b"}},
    "execution.mounts": {"deployment": {"/a": "/b"}},
    "execution.mounts.deployment": {"/a": "/b"},
    "execution.mounts.evaluation": {"/a": "/b"},
    "execution.deployment": {"n_tasks": 3},
    "deployment.type": "sglang",
    "deployment.gpu_memory_utilization": 0.5,
    "deployment.endpoints": {"chat": "/x/chat/completions"},
    "deployment.endpoints.chat": "/x/chat/completions",
    "deployment.multiple_instances": True,
    "target.api_endpoint.url": "http://127.0.0.1:9/v1",
    "target.api_endpoint.type": "completions",
    "target.api_endpoint.adapter_config": {"custom_system_prompt": "Be brief."},
    "evaluation.tasks": [{"name": "hellaswag"}],
    "evaluation.nemo_evaluator_config.config": {"params": {"top_p": 0.5}},
    "evaluation.nemo_evaluator_config.config.params": {"top_p": 0.5},
    "evaluation.nemo_evaluator_config.target": {"api_endpoint": {"model_id": "x"}},
    "evaluation.nemo_evaluator_config.config.params.top_p": 0.5,
    "evaluation.tasks.0.name": "hellaswag",
    "evaluation.tasks.0.eval": "evals/hellaswag.yaml",
    "evaluation.tasks.0.overrides": {"trials": 3},
    "evaluation.tasks.0.endpoint_type": "completions",
    "export.wandb.log_mode": "multi_task",
    "export.local.format": "csv",
    "export.local": {"format": "csv"},
    "export.mlflow": {"run_name": "x"},
    "run.env.remote_job_dir": "/other",
    "execution": {"type": "slurm", "workers": 3},
    "deployment": {"type": "none"},
    "evaluation": {"tasks": ["hellaswag"]},
    "target": {"api_endpoint": {"stream": True}},
    "export": {"gsheets": {}},
    "export.gsheets": {"a": 1},
    "run": {"env": {"mem": "3G"}},
    "run.env": {"mem": "3G"},
    "run.wandb": {"project": "another"},
    "export.wandb": {"project": "another"},
}
"""a value that is another one than the configuration's, for keys to which a word or a number does not fit"""
CONFIG = """\
execution: {type: slurm, auto_export: {destinations: [wandb, mlflow]}}
deployment: {type: vllm, hf_model_handle: org/model, served_model_name: served, cache_path: /c}
auxiliary_deployments: {judge: {type: vllm, hf_model_handle: org/judge, served_model_name: judge, cache_path: /c}}
evaluation: {tasks: [{name: mmlu}]}
env_vars: {OPENAI_API_KEY: host:OPENAI_API_KEY}
"""
VALUES |= {
    f"auxiliary_deployments.judge{key.removeprefix('deployment')}": value
    for key, value in VALUES.items()
    if key.startswith("deployment.")
}


def value_for(key: str, block: type[Block]) -> Any:
    name = key.rpartition(".")[2]
    if key in VALUES:
        return VALUES[key]
    annotation = str(block.model_fields[name].annotation) if name in block.model_fields else ""
    if name.endswith("env_vars"):
        return {"A": "lit:b"}
    if "dict" in annotation and name != "data":
        return {"config": {"params": {"top_p": 0.5}}} if name in ("nemo_evaluator_config", "config") else {"a": "b"}
    if "list" in annotation or "Lines" in annotation:
        return ["x"]
    return True if "bool" in annotation else 3 if "int" in annotation or "float" in annotation else "x"


def effect(launch: Launch) -> Any:
    """Return everything that reaches the cluster: tasks, scripts, the transport and the settings of images."""
    env = launch.env
    way = (launch.host, launch.execution.username, env.identity, env.remote_job_dir)
    build = (env.build_partition, env.build_time, env.build_include_gpus, env.python)
    return [msgspec.to_builtins([dataclasses.asdict(each) for each in preview(launch)]), way, build]


KEYS = sorted(
    f"{place}.{name}".lstrip(".")
    for place, block in BLOCKS.items()
    for name in (*block.model_fields, *getattr(block, "ignored", ()))
    if (place, name) not in (("run.env", "container"), ("execution", "type"))  # another name, and what is asked anyway
)


def test_no_key_is_ignored_silently(tmp_path: Path) -> None:
    folder = lay_out(tmp_path, keys=CONFIG)
    write(
        folder / "env.toml", '[wandb]\nproject = "p"\n[p]\nexecutor = "slurm"\nremote_job_dir = "/jobs"\nhost = "h"\n'
    )
    before = effect(launched(folder, "keys", "p"))
    silent, refused = set(), {}
    for key in KEYS:
        place, _, name = key.rpartition(".")
        try:
            launch = launched(folder, "keys", "p", f"{key}={json.dumps(value_for(key, BLOCKS[place]))}")
        except UsageError as error:
            refused[key] = error.message
            continue
        notices = "\n".join(launch.notices)
        if (
            effect(launch) == before
            and name not in notices
            and f"{place.partition('.config')[0]}: no effect" not in notices
        ):
            silent.add(key)
    assert len(KEYS) > 200
    # Each partition has an effect with either --run or --batch; the profile decides the executor.
    assert silent == {"run.env.run_partition", "run.env.batch_partition", "run.env.executor"}
    assert set(refused) == {"export", "export.gsheets", "export.wandb.to", "export.mlflow.to"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "execution.cpu_partition=low",
            "execution.cpu_partition: no effect here, because only further workers go there",
        ),
        ("execution.mounts.evaluation={/a: /b}", "because the evaluation runs in no container"),
        ("deployment.haproxy_port=5009", "because requests are spread over the instances by Holdfast itself"),
        ("evaluation.tasks.0.dataset_dir=/d", "write overrides: {dataset.path: …}"),
        ("target.api_endpoint.url=http://127.0.0.1:9/v1", "the served model is the one evaluated"),
        ("export.wandb.log_mode=multi_task", "`holdfast export` has no such option"),
        ("run.env.nproc_per_node=8", "because nothing is started by torchrun"),
    ],
)
def test_a_key_without_effect_is_named_with_its_reason(tmp_path: Path, override: str, message: str) -> None:
    folder = lay_out(tmp_path, keys=CONFIG)
    assert message in "\n".join(launched(folder, "keys", "BIG", override).notices)


def test_a_key_that_another_one_refers_to_has_an_effect(tmp_path: Path) -> None:
    served = "type: generic, image: i, served_model_name: s, tensor_parallel_size: 4"
    text = "execution: {{type: slurm}}\ndeployment: {{{}, command: '{}'}}\nevaluation: {{tasks: [mmlu]}}\n"
    folder = lay_out(
        tmp_path,
        used=text.format(served, "serve ${deployment.tensor_parallel_size}"),
        idle=text.format(served, "serve"),
    )
    assert "tensor_parallel_size" not in "\n".join(launched(folder, "used", "here").notices)
    assert "deployment.tensor_parallel_size: no effect here, because the command is given as a whole" in "\n".join(
        launched(folder, "idle", "here").notices
    )


def test_keys_for_slurm_and_for_other_executors_are_named(tmp_path: Path) -> None:
    folder = lay_out(tmp_path)
    more = "\n".join(f'{key} = "x"' for key in OTHER_KEYS[:2])
    write(folder / "env.toml", f'[here]\nexecutor = "local"\npartition = "batch"\ntime = "1h"\n{more}\n')
    notices = launched(folder, "hosted", "here", environ={"API_KEY": "k"}).notices
    assert "env.toml:3: run.env.partition, run.env.time: no effect here, because it is for a cluster, and" in "\n".join(
        notices
    )
    names = ", ".join(sorted(OTHER_KEYS[:2]))
    assert f"env.toml:1: {names}: no effect here, because it is for dgxcloud and lepton" in notices


def test_the_image_of_a_task_and_its_mounts_count_if_a_program_starts_it(tmp_path: Path) -> None:
    task = "evaluation: {tasks: [{name: mmlu, container: 'tools:2'}]}\n"
    folder = lay_out(tmp_path, boxed="execution: {type: local}\ndeployment: {type: none}\n" + task)
    write(folder / "env.toml", '[here]\nexecutor = "local"\nmounts = ["/data"]\n')
    key = "env_vars.OPENAI_API_KEY=lit:k"
    mounts, engine = "execution.mounts.evaluation={/a: '/b:ro'}", "execution.container_engine=podman"
    plain = launched(folder, "boxed", "here", mounts, key)
    assert plain.tasks[0].file.container is None
    assert "container is not needed" in "\n".join(plain.notices)
    assert "because the evaluation runs in no container" in "\n".join(plain.notices)
    boxed = launched(folder, "boxed", "here", mounts, key, engine, "execution.extra_docker_args=--init")
    assert boxed.tasks[0].file.container == Container(
        image="tools:2", engine="podman", options=("--init",), mounts=("/data:/data", "/a:/b:ro")
    )
    assert not boxed.notices


def test_a_comment_and_a_subproject_reach_the_job(tmp_path: Path) -> None:
    folder = lay_out(tmp_path, keys=CONFIG)
    overrides = ("execution.sbatch_comment=for the paper", "execution.subproject=nano")
    (each,) = preview(launched(folder, "keys", "BIG", *overrides))
    assert "#SBATCH --comment='nano for the paper'" in each.main


@pytest.mark.parametrize("flag", ["job-name", "comment", "output", "array", "dependency", "J"])
def test_options_of_sbatch_that_holdfast_needs_are_refused(tmp_path: Path, flag: str) -> None:
    folder = lay_out(tmp_path, keys=CONFIG)
    with pytest.raises(ConfigError, match=f"sbatch_extra_flags.{flag}: is reserved"):
        launched(folder, "keys", "BIG", f"execution.sbatch_extra_flags={{{flag}: x}}")


@pytest.mark.parametrize(("written", "seen"), [(False, "lit:"), ("0,1", "lit:0,1"), (True, None), (None, None)])
def test_the_evaluation_sees_the_selected_gpus(tmp_path: Path, written: object, seen: str | None) -> None:
    folder = lay_out(tmp_path, keys=CONFIG)
    (each,) = preview(launched(folder, "keys", "BIG", f"execution.evaluation_gpu_visible={json.dumps(written)}"))
    assert each.task.env.get("CUDA_VISIBLE_DEVICES") == seen
