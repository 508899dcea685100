"""Launches: both dialects give the same form, what is wrong is named, secrets stay names, and it can be run again."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.apps.cluster.config.compile import LaunchRequest, compile_launch
from holdfast.apps.cluster.config.schema import DeploymentBlock
from holdfast.apps.cluster.config.servers import server_command
from holdfast.apps.cluster.config.tree import compiled_yaml
from holdfast.apps.cluster.config.variables import EnvVar, check_environment, host_values, wandb_login
from holdfast.errors import ConfigError, UsageError
from holdfast.plugins.benchmarks.native import SAMPLES
from holdfast.plugins.exporters.wandb import detect
from holdfast.spec.document import read_value
from holdfast.spec.load import load_eval
from tests.support.clusters import NEWER, OLDER, PROFILES, launched, lay_out, write

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.apps.cluster.config.launch import Launch, Server

NEWER_NOTICE = (
    "env.toml:14: run.env.container_image: no effect here, because deployment.image is vllm/vllm-openai:latest"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return lay_out(tmp_path)


def refused(folder: Path, config: str, *overrides: str, profile: str | None = "BIG", **more: Any) -> str:
    with pytest.raises(UsageError) as caught:
        launched(folder, config, profile, *overrides, **more)
    return str(caught.value)


def deployment_of(launch: Launch) -> Server:
    assert launch.shared.deployment is not None
    return launch.shared.deployment


def test_the_older_dialect(folder: Path) -> None:
    launch = launched(folder, "older", "BIG")
    run = launch.execution
    assert (run.type, launch.host, run.username) == ("slurm", "login.example.com", "me")
    assert (run.account, run.partition, run.walltime, run.max_walltime) == ("acct", "batch", "04:00:00", "120:00:00")
    assert (launch.nodes, run.ntasks_per_node, run.gres, run.gpus_per_node) == (2, 1, "gpu:8", 8)
    assert run.output_dir == "/lustre/me/jobs/evaluations"
    assert launch.env.remote_job_dir == "/lustre/me/jobs"
    assert launch.shared.export == ("wandb",)
    served = deployment_of(launch)
    assert served.image == "registry.example.com/served:2"
    assert served.command == "bash -c 'serve /checkpoint/ --gpus ${GPUS}'"
    assert (served.port, served.model, served.health_path) == (1235, "nano", "/v1/health")
    assert (served.instances, served.nodes, served.tasks) == (2, 2, None)
    assert list(served.mounts) == ["/lustre:/lustre", "/lustre/ckpt:/checkpoint:ro", "/scratch:/data"]
    assert served.env == {"HF_HOME": "lit:/cache/hf"}
    assert served.base_path == "/v1"
    assert [task.id for task in launch.tasks] == ["mmlu.0", "hellaswag.0"]
    assert launch.tasks[0].file.env == {"HF_HOME": "lit:/lustre/hf", "HF_TOKEN": "host:HF_TOKEN"}
    assert launch.shared.export_env == {
        "HF_HOME": "lit:/lustre/hf",
        "WANDB_BASE_URL": "lit:https://api.wandb.ai",
        "WANDB_API_KEY": "host:WANDB_API_KEY",
        "WANDB_PROJECT": "lit:nano",
        "WANDB_ENTITY": "lit:team",
    }
    assert launch.shared.export_config["wandb"] == {"project": "nano", "entity": "team"}


def test_older_keys_and_keys_without_effect_are_reported(folder: Path) -> None:
    notices = "\n".join(launched(folder, "older", "BIG").notices)
    line = OLDER.splitlines().index("  multiple_instances: true") + 1
    assert f"config/older.yaml:{line}: deployment.multiple_instances: deprecated" in notices
    assert "execution.num_instances=2" in notices
    assert "execution.env_vars: deprecated" in notices
    assert "HF_TOKEN without a prefix is read as host:HF_TOKEN" in notices
    assert "/cache/hf without a prefix is read as lit:/cache/hf" in notices
    assert "config.params.extra: has no effect" in notices
    assert "not needed, Holdfast keeps every reply and counts by itself: use_caching, caching_dir" in notices
    assert launched(folder, "newer", "BIG").notices == (NEWER_NOTICE,)


def test_instances_without_nodes_have_one_each(folder: Path) -> None:
    launch = launched(folder, "newer", None, "execution.num_instances=2")
    assert (launch.nodes, deployment_of(launch).nodes, deployment_of(launch).instances) == (2, 2, 2)
    assert "num_nodes: 2" in compiled_yaml(launch.tree)
    wider = launched(folder, "newer", None, "execution.num_instances=2", "execution.num_nodes=4")
    assert (wider.nodes, deployment_of(wider).nodes) == (4, 4)
    assert launched(folder, "newer", "BIG", "execution.num_instances=2").nodes == 2, "the profile says so"
    assert "(command line)" in refused(folder, "newer", "execution.num_instances=2", "execution.num_nodes=1")


JUDGE = "type: vllm, hf_model_handle: org/judge, served_model_name: judge"


def test_auxiliary_servers_have_nodes_of_their_own(folder: Path) -> None:
    text = NEWER.replace("  - _self_\n", "  - deployment/vllm@auxiliary_deployments.judge\n  - _self_\n", 1)
    text += "auxiliary_deployments:\n  judge: {hf_model_handle: org/judge, served_model_name: judge, num_nodes: 2,\n"
    text += "    env_vars: {A: 'lit:b'}, port: 9000}\n  user: {type: generic, command: serve, served_model_name: u,\n"
    text += "    image: i, env_prefix: SIMULATED}\n"
    write(folder / "config" / "judged.yaml", text)
    launch = launched(folder, "judged", "BIG")
    judge, user = launch.shared.auxiliary
    assert (launch.nodes, deployment_of(launch).nodes, judge.nodes, user.nodes) == (2 + 2 + 1, 2, 2, 1)
    assert (judge.name, judge.prefix, user.prefix) == ("judge", "JUDGE", "SIMULATED")
    assert judge.command.startswith("vllm serve org/judge --host 0.0.0.0 --port 9000 --served-model-name judge")
    assert "--tensor-parallel-size 8" in judge.command, "all GPUs of a node"
    assert judge.env == {"HF_HOME": "lit:/lustre/hf", "HF_TOKEN": "host:HF_TOKEN", "A": "lit:b"}
    assert deployment_of(launch).command != judge.command
    assert "VLLM_LOGGING_LEVEL" not in judge.env, "which is for the model's server"
    again = write(folder / "again" / "again.yaml", compiled_yaml(launch.tree))
    second = launched(folder, str(again), environ={})
    assert second.shared.auxiliary == launch.shared.auxiliary
    assert second.nodes == 5


def test_an_auxiliary_server_may_be_left_out(folder: Path) -> None:
    text = NEWER.replace("  - _self_\n", "  - deployment/vllm@auxiliary_deployments.judge\n  - _self_\n", 1)
    write(folder / "config" / "off.yaml", text + "auxiliary_deployments: {judge: {type: none, port: 9}}\n")
    launch = launched(folder, "off", "BIG")
    assert (launch.shared.auxiliary, launch.nodes) == ((), 2)


def test_older_instances_may_span_nodes(folder: Path) -> None:
    launch = launched(folder, "older", "BIG", "execution.num_nodes=4", "deployment.nodes_per_instance=2")
    assert (deployment_of(launch).instances, deployment_of(launch).nodes) == (2, 4)


def test_a_launch_with_only_a_judge_needs_no_nodes_for_the_model(folder: Path) -> None:
    launch = launched(folder, "hosted", None, "execution.type=slurm", f"auxiliary_deployments.judge={{{JUDGE}}}")
    assert launch.nodes == 1


def test_on_one_machine_two_servers_cannot_have_one_port(folder: Path) -> None:
    local = ("execution={type: local}", f"auxiliary_deployments={{judge: {{{JUDGE}}}}}")
    message = refused(folder, "newer", *local, profile=None)
    assert "auxiliary_deployments.judge.port: port 8000 is also used by the model" in message
    fine = launched(folder, "newer", None, *local, "auxiliary_deployments.judge.port=8001")
    assert fine.shared.auxiliary[0].port == 8001
    message = refused(folder, "newer", *local, "execution.num_instances=2", profile=None)
    assert "type generic, with $HOLDFAST_PORT in it" in message


@pytest.mark.parametrize(
    ("key", "reference", "meant"),
    [
        ("target.base_url", "judge.base_url", "${JUDGE_URL}"),
        ("target.base_url", "judge.chat_url", "${JUDGE_URL}"),
        ("target.model", "judge.model_id", "judge"),
    ],
)
def test_references_to_servers_in_overrides(folder: Path, key: str, reference: str, meant: str) -> None:
    task = f"evaluation.tasks=[{{name: mmlu, overrides: {{{key}: auxiliary_deployments.{reference}}}}}]"
    launch = launched(folder, "newer", "BIG", f"auxiliary_deployments.judge={{{JUDGE}}}", task)
    assert dict(launch.tasks[0].file.overrides)[tuple(key.split("."))] == meant


@pytest.mark.parametrize(
    ("key", "reference", "message"),
    [
        ("target.base_url", "jugde.base_url", "there is no 'jugde' in auxiliary_deployments (did you mean 'judge'?)"),
        ("target.base_url", "judge.chat_ulr", "unknown key 'chat_ulr' (did you mean 'chat_url'?)"),
        ("target.params.at", "judge.chat_url", "differs from job to job, so it cannot be part of what is measured"),
    ],
)
def test_references_that_mean_nothing(folder: Path, key: str, reference: str, message: str) -> None:
    task = f"evaluation.tasks=[{{name: mmlu, overrides: {{{key}: auxiliary_deployments.{reference}}}}}]"
    assert message in refused(folder, "newer", f"auxiliary_deployments.judge={{{JUDGE}}}", task)


def test_the_newer_dialect(folder: Path) -> None:
    launch = launched(folder, "newer", "BIG")
    assert launch.execution.output_dir == "/lustre/out"
    assert (launch.nodes, launch.execution.gpus_per_node) == (2, 8)
    assert launch.shared.export == ("wandb",)
    assert [task.id for task in launch.tasks] == ["mmlu.0", "mmlu.1", "hellaswag.0"]
    assert deployment_of(launch).env == {
        "HF_HOME": "lit:/lustre/hf",
        "HF_TOKEN": "host:HF_TOKEN",
        "VLLM_LOGGING_LEVEL": "lit:DEBUG",
    }
    assert launch.tasks[0].file.env["HF_TOKEN"] == "host:OTHER_TOKEN"
    assert launch.tasks[1].file.env["HF_TOKEN"] == "host:HF_TOKEN"
    assert launch.tasks[2].file.env["CACHE"] == "runtime:SLURM_TMPDIR"
    assert (("target", "api"), "completions") in launch.tasks[1].file.overrides
    assert launch.shared.export_config["wandb"] == {"project": "p", "entity": "team"}


def test_a_hosted_model_is_measured_at_its_url(folder: Path) -> None:
    launch = launched(folder, "hosted")
    assert (launch.execution.type, launch.host) == ("local", None)
    assert launch.shared.deployment is None
    (task,) = launch.tasks
    assert dict(task.file.overrides) == {
        ("target", "model"): "org/hosted",
        ("target", "base_url"): "https://api.example.com/v1",
        ("target", "api_key_env"): "API_KEY",
        ("target", "api"): "chat",
    }
    assert task.file.env == {"API_KEY": "host:API_KEY"}


def test_params_become_keys_of_the_eval(folder: Path) -> None:
    param = "evaluation.nemo_evaluator_config.config.params"
    adapter = "evaluation.nemo_evaluator_config.target.api_endpoint.adapter_config"
    launch = launched(
        folder,
        "hosted",
        None,
        f"{param}.limit_samples=1",
        f"{param}.temperature=0.6",
        f"{param}.max_new_tokens=64",
        f"{param}.top_p=0.9",
        f"{param}.parallelism=4",
        f"{param}.request_timeout=300",
        f"{param}.max_retries=2",
        f"{adapter}.custom_system_prompt=Think.",
        f"{adapter}.params_to_add={{seed: 7}}",
    )
    (task,) = launch.tasks
    spec = load_eval(task.eval_file, task.file.overrides)
    assert spec.samples is not None
    assert len(spec.samples) == 1
    assert spec.target.model_dump()["params"] == {"temperature": 0.6, "max_tokens": 64, "top_p": 0.9, "seed": 7}
    assert (spec.limits.concurrency, spec.limits.turn_timeout, spec.limits.retries) == (4, 300, 2)
    assert spec.system == "Think."


def test_a_task_overrides_settings_of_all_tasks_and_a_long_request_timeout_extends_the_trial(folder: Path) -> None:
    first, second = launched(folder, "older", "BIG").tasks
    assert dict(first.file.overrides)["target", "params", "max_tokens"] == 64
    assert ("target", "params", "max_tokens") not in dict(second.file.overrides)
    limits = load_eval(second.eval_file, second.file.overrides).limits
    assert limits.turn_timeout == 6000
    assert limits.trial_timeout == 6000 * 4


def test_overrides_of_a_task_are_keys_of_the_eval_or_of_the_oldest_dialect(folder: Path) -> None:
    text = "{trials: 3, limits.concurrency: 8, config.params.temperature: 0.5}"
    (task,) = launched(folder, "hosted", None, f"evaluation.tasks=[{{name: mmlu, overrides: {text}}}]").tasks
    overrides = dict(task.file.overrides)
    assert overrides["trials",] == 3
    assert overrides["limits", "concurrency"] == 8
    assert overrides["target", "params", "temperature"] == 0.5


def test_an_eval_whose_target_is_no_model_keeps_its_own(folder: Path) -> None:
    write(folder / "agent.py", "def reply(prompt):\n    return prompt\n")
    text = (folder / "evals" / "mmlu.yaml").read_text().replace("{model: some-model}", '{python: "agent.py:reply"}')
    write(folder / "evals" / "agent.yaml", text)
    launch = launched(folder, "hosted", None, "evaluation.tasks=[agent]")
    assert launch.tasks[0].file.overrides == ()
    assert "its target is not a model, so these have no effect: target.model" in "\n".join(launch.notices)


def test_an_eval_without_a_target_measures_the_model_that_is_served_or_hosted(folder: Path) -> None:
    text = (folder / "evals" / "mmlu.yaml").read_text().replace("target: {model: some-model}\n", "")
    write(folder / "evals" / "open.yaml", text)
    launch = launched(folder, "hosted", None, "evaluation.tasks=[open]")
    assert (("target", "model"), "org/hosted") in launch.tasks[0].file.overrides
    write(folder / "e.yaml", text)
    assert "target: is missing" in refused(folder, "e.yaml", profile="here")


def test_another_checkpoint_is_another_model_even_under_the_same_name(folder: Path) -> None:
    def version(*overrides: str) -> Any:
        return dict(launched(folder, "newer", "BIG", *overrides).tasks[2].file.overrides).get(("target", "version"))

    assert version() == version("deployment.port=9") == version("deployment.tensor_parallel_size=2") == "org/model"
    assert version("deployment.checkpoint_path=/ckpt/step-2") == "/ckpt/step-2"
    assert version("deployment.extra_args=--quantization fp8") == "org/model --quantization fp8"
    mine = ("deployment.type=generic", "deployment.hf_model_handle=null")
    one = version(*mine, "deployment.command=serve one --port 8000")
    assert (
        one == version(*mine, "deployment.command=serve one --port 9", "deployment.port=9") == "serve one --port PORT"
    )
    text = (folder / "evals" / "hellaswag.yaml").read_text().replace("some-model}", 'some-model, version: "mine"}')
    write(folder / "evals" / "hellaswag.yaml", text)
    assert version() is None, "the eval has its own word for it"


def test_keys_of_earlier_launchers_are_moved_with_a_notice(folder: Path) -> None:
    config = "evaluation.nemo_evaluator_config.config"
    launch = launched(
        folder,
        "newer",
        "BIG",
        f"{config}.params.max_tokens=99",
        f"{config}.target.api_endpoint.adapter_config.custom_system_prompt=Think.",
        f"{config}.target.api_endpoint.adapter_config.use_system_prompt=true",
        "execution.auto_export={destinations: [wandb], configs: {wandb: {name: moved, project: older}}}",
        "export.wandb.project=newer",
        "deployment.env_vars.HF_TOKEN=$host:OTHER",
    )
    overrides = dict(launch.tasks[2].file.overrides)
    assert overrides["target", "params", "max_tokens"] == 99
    assert overrides["system",] == "Think."
    assert "wandb" in launch.shared.export_config
    assert launch.shared.export_config["wandb"] == {"name": "moved", "project": "newer", "entity": "team"}
    assert deployment_of(launch).env["HF_TOKEN"] == "host:OTHER"
    notices = "\n".join(launch.notices)
    for old in ("config.params.max_tokens", "config.target", "execution.auto_export.configs"):
        assert f"{old}: deprecated: use " in notices


@pytest.mark.parametrize(
    ("selectors", "ids"),
    [
        ([], ["mmlu.0", "mmlu.1", "hellaswag.0"]),
        (["mmlu"], ["mmlu.0", "mmlu.1"]),
        (["mmlu.1"], ["mmlu.1"]),
        (["hellaswag", "mmlu.0"], ["mmlu.0", "hellaswag.0"]),
    ],
)
def test_tasks_are_chosen_by_name_and_number(folder: Path, selectors: list[str], ids: list[str]) -> None:
    assert [task.id for task in launched(folder, "newer", "BIG", tasks=selectors).tasks] == ids


def test_a_task_given_as_a_path_is_chosen_by_its_name(folder: Path) -> None:
    for name in ("mmlu", "evals/mmlu.yaml", "mmlu.0"):
        assert len(launched(folder, "hosted", tasks=[name]).tasks) == 1


def test_an_unknown_task_is_refused_with_the_available_ones(folder: Path) -> None:
    message = refused(folder, "newer", tasks=["mmul"])
    assert message == "-t mmul: no such task (did you mean 'mmlu'?); there are mmlu, mmlu, hellaswag"


def test_an_eval_is_looked_for_in_the_documented_order(folder: Path) -> None:
    order = [folder / "evals" / "mmlu.yaml", folder / "mmlu.yaml", folder / "config" / "evals" / "mmlu.yaml"]
    for path in order:
        write(path, (folder / "evals" / "hellaswag.yaml").read_text())
        (task,) = launched(folder, "newer", "BIG", tasks=["mmlu.0"]).tasks
        assert task.eval_file == path


def test_a_task_without_a_file_lists_the_paths_that_were_tried(folder: Path) -> None:
    message = refused(folder, "newer", "evaluation.tasks=[hellasswag]")
    assert "command line: evaluation.tasks[0].name: no eval file 'hellasswag', and no task of that name" in message
    for place in ("config/evals/hellasswag.yaml", "/hellasswag.yaml", "evals/hellasswag.yaml"):
        assert place in message
    assert "did you mean 'hellaswag'?" in message


def test_a_provider_resolves_tasks_by_name(folder: Path) -> None:
    def provider(name: str) -> Path | None:
        return folder / "evals" / "hellaswag.yaml" if name == "ours" else None

    asked = LaunchRequest("newer", "BIG", ["evaluation.tasks=[ours]"], cwd=folder, environ={}, providers=[provider])
    launch = compile_launch(asked)
    assert launch.tasks[0].eval_file.name == "hellaswag.yaml"
    with pytest.raises(ConfigError, match="no eval file 'other', and no task of that name"):
        compile_launch(replace(asked, overrides=["evaluation.tasks=[other]"]))


def test_mistakes_in_an_eval_are_reported_before_submission(folder: Path) -> None:
    write(folder / "evals" / "bad.yaml", "name: bad\nsampels: []\n")
    assert "bad.yaml:2: sampels: unknown key (did you mean 'samples'?)" in refused(
        folder, "newer", "evaluation.tasks=[bad]"
    )
    message = refused(folder, "newer", "evaluation.tasks=[{name: mmlu, overrides: {trails: 2}}]")
    assert "trails: unknown key (did you mean 'trials'?)" in message


PARAM = "evaluation.nemo_evaluator_config.config.params"
ADAPTER = "evaluation.nemo_evaluator_config.target.api_endpoint.adapter_config"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("execution.acount=x", "command line: execution.acount: unknown key (did you mean 'account'?)"),
        (f"{PARAM}.temprature=1", "config.params.temprature: unknown key (did you mean 'temperature'?)"),
        (f"{PARAM}.limit_samples=2.5", "is a number of samples, or a share of them below 1"),
        (f"{ADAPTER}={{interceptors: [], use_caching: true}}", "exclude each other"),
        ("evaluation.tasks=[]", "evaluation.tasks: "),
        ("evaluation.tasks.mmlu.endpoint_type=embedding", "endpoint type 'embedding' is not supported"),
        ("execution.workers=0", "execution.workers: should be greater than or equal to 1, not 0"),
        ("execution.walltime=soon", "execution.walltime: a time must be written as"),
        ("execution.type=slrum", "unknown executor 'slrum' (did you mean 'slurm'?)"),
        ("deployment.hf_model_handle=null", "vllm needs checkpoint_path (a folder) or hf_model_handle"),
        ("execution.num_instances=3", "2 nodes cannot be divided among 3 instances"),
        ("execution={type: slurm, gres: 'gpu:4', gpus_per_node: 8}", "8 contradicts gres gpu:4"),
        ("execution.auto_export=[wadnb]", "unknown destination 'wadnb' (did you mean 'wandb'?)"),
        ("export.gsheets={}", "export.gsheets: not supported; use one of wandb, mlflow, local"),
        ("auxiliary_deployments.judge={type: vllm}", "auxiliary_deployments.judge.served_model_name: must be given"),
        ("auxiliary_deployments.judge={port: 1}", "auxiliary_deployments.judge: needs a type: one of generic, vllm"),
        ("auxiliary_deployments.main={type: vllm, served_model_name: j}", "main: invalid name"),
        (f"auxiliary_deployments.j={{{JUDGE}, num_nodes: 3, num_instances: 2}}", "j.num_instances: 3 nodes cannot"),
        (
            f"auxiliary_deployments.judge={{{JUDGE}, env_prefix: SLURM}}",
            "its variables would be SLURM_…, which another program has",
        ),
        (
            f"auxiliary_deployments={{a-b: {{{JUDGE}}}, a_b: {{{JUDGE}}}}}",
            "command line: auxiliary_deployments.a_b: its variables would be A_B_…, which a-b has",
        ),
        ("env_vars.A=null", "env_vars.A: needs a value: host:NAME, lit:VALUE or runtime:NAME"),
        ("env_vars.A=host:1x", "host: takes the name of a variable, not '1x'"),
        ("env_vars.MY_API_KEY=lit:sk-0123456789abcdef", "secrets do not belong in files: write host:MY_API_KEY"),
    ],
)
def test_each_mistake_is_reported_at_its_place(folder: Path, override: str, expected: str) -> None:
    message = refused(folder, "newer", override)
    assert expected in message
    assert "sk-0123456789abcdef" not in message


@pytest.mark.parametrize("section", ["run", "run.env.env_vars", "evaluation.tasks.mmlu", "auxiliary_deployments.judge"])
def test_a_section_of_another_shape_is_refused_by_name(folder: Path, section: str) -> None:
    message = refused(folder, "newer", f"{section}=7")
    assert section.replace(".mmlu", "[0]").removeprefix("evaluation.nemo") in message


@pytest.mark.parametrize("key", ["execution.output_dir", "run.env.remote_job_dir"])
def test_a_folder_of_the_cluster_is_a_whole_path_or_one_in_your_own_home(folder: Path, key: str) -> None:
    for path in ("/x", "~", "~/x"):
        launch = launched(folder, "newer", "BIG", f'{key}="{path}"')
        assert getattr(launch.env if key.startswith("run.env") else launch.execution, key.rpartition(".")[2]) == path
    for path in ("~bob", "~bob/x", "x", "./x"):
        message = refused(folder, "newer", f"{key}={path}")
        assert f"command line: {key}: {path!r} is a folder of the cluster: give an absolute path" in message
    assert f"command line: {key}: '~bob/x': give" in refused(folder, "newer", f"{key}=~bob/x", profile="here")


@pytest.mark.parametrize("key", ["execution.subproject", "execution.sbatch_comment"])
def test_a_comment_of_jobs_is_one_line(folder: Path, key: str) -> None:
    assert f"command line: {key}: " in refused(folder, "newer", f'{key}="a\\n#SBATCH --account=other"')


def test_all_problems_are_reported_with_file_and_line(folder: Path) -> None:
    write(
        folder / "config" / "bad.yaml", NEWER.replace("  output_dir: /lustre", "  output_dri: /lustre") + "exprot: 1\n"
    )
    problems = refused(folder, "bad").splitlines()
    assert any(line.startswith("config/bad.yaml:8: execution.output_dri: unknown key") for line in problems)
    assert any(
        line.startswith(f"config/bad.yaml:{len(NEWER.splitlines()) + 1}: exprot: unknown key") for line in problems
    )


def test_unsupported_settings_that_would_change_answers_are_reported(folder: Path) -> None:
    notices = "\n".join(launched(folder, "newer", "BIG", f"{ADAPTER}.params_to_remove=[seed]").notices)
    assert "adapter_config.params_to_remove: not supported; may change the answers" in notices
    assert launched(folder, "newer", "BIG", f"{ADAPTER}.params_to_remove=[]").notices == (NEWER_NOTICE,)


@pytest.mark.parametrize(
    ("adapter", "stripped"),
    [
        ("{process_reasoning_traces: true}", {}),
        ("{use_reasoning: true, end_reasoning_token: '</t>'}", {"end": "</t>"}),
        ("{use_reasoning: true, include_if_reasoning_not_finished: false}", {"unfinished": "drop"}),
        ("{interceptors: [{name: reasoning, config: {start_reasoning_token: '<t>'}}]}", {"start": "<t>"}),
        ("{interceptors: [{name: reasoning, enabled: false}, endpoint]}", None),
        ("{process_reasoning_traces: false, start_reasoning_token: '<t>'}", None),
    ],
)
def test_reasoning_is_stripped_if_a_configuration_asks_for_it(
    folder: Path, adapter: str, stripped: dict[str, str] | None
) -> None:
    launch = launched(folder, "newer", "BIG", f"{ADAPTER}={adapter}")
    overrides = dict(launch.tasks[0].file.overrides)
    assert overrides.get(("target", "strip_reasoning")) == stripped
    assert launch.notices == (NEWER_NOTICE,)


def test_interceptors_mean_what_the_older_keys_mean(folder: Path) -> None:
    modified = "{name: payload_modifier, config: {params_to_add: {seed: 7}, params_to_remove: [n]}}"
    listed = f"[{modified}, {{name: system_message, config: {{system_message: Think.}}}}, caching, {{name: nvcf}}]"
    launch = launched(folder, "newer", "BIG", f"{ADAPTER}.interceptors={listed}")
    overrides = dict(launch.tasks[0].file.overrides)
    assert (overrides["system",], overrides["target", "params", "seed"]) == ("Think.", 7)
    notices = "\n".join(launch.notices)
    assert "interceptors[0]: params_to_remove: not supported; may change the answers" in notices
    assert "interceptors[3]: nvcf: not supported" in notices and "caching" not in notices


@pytest.mark.parametrize(
    ("hostname", "tunnel", "ssh"),
    [
        ("there", None, True),
        ("there", "ssh", True),
        ("there", "local", False),
        ("login", None, False),
        ("localhost", None, False),
    ],
)
def test_ssh_is_used_if_the_host_is_another(folder: Path, hostname: str, tunnel: str | None, ssh: bool) -> None:
    write(
        folder / "env.toml",
        '[p]\nexecutor = "slurm"\nremote_job_dir = "/x"\n' + (f'tunnel = "{tunnel}"\nhost = "h"' if tunnel else ""),
    )
    launch = launched(folder, "newer", "p", f"execution.hostname={hostname}", environ={"HOSTNAME": "login"})
    assert (launch.host is not None) is ssh


def test_sbatch_options_and_the_rest_of_the_profile_are_passed_on(folder: Path) -> None:
    more = (
        'exclusive = true\ncpus_per_task = 4\nmem = "0"\nsetup_lines = "module load x"\nstartup_commands = ["date"]\n'
    )
    write(folder / "env.toml", f'[p]\nexecutor = "slurm"\nlustre_mount = "/l:/l"\n{more}')
    flags = "execution.sbatch_extra_flags={qos: high, requeue: false}"
    launch = launched(folder, "newer", "p", flags, "execution.workers=4", "execution.endpoint_readiness_timeout=20m")
    task = launch.shared
    assert {"--exclusive", "--qos=high", "--cpus-per-task=4", "--mem=0"} <= set(task.main_options)
    assert not [option for option in task.main_options if "requeue" in option]
    assert (task.workers, task.setup_lines) == (4, ("module load x", "date"))
    assert deployment_of(launch).readiness_seconds == 1200
    assert deployment_of(launch).mounts == ("/l:/l",)


def test_gpus_are_read_from_gres_and_a_model_is_spread_over_them(folder: Path) -> None:
    run = launched(folder, "newer", None, "execution.gres=gpu:h100:4")
    assert run.execution.gpus_per_node == 4
    assert "--tensor-parallel-size 4 " in deployment_of(run).command
    spread = launched(folder, "newer", None, "execution.gres=gpu:8", "deployment.data_parallel_size=4")
    assert "--tensor-parallel-size 2 " in deployment_of(spread).command
    launch = launched(folder, "newer", "BIG", "deployment.tensor_parallel_size=3")
    assert "--tensor-parallel-size 3 " in deployment_of(launch).command


def test_the_group_asks_for_gpus_whole_nodes_and_all_gpus_of_them(folder: Path) -> None:
    write(folder / "env.toml", '[p]\nexecutor = "slurm"\n[q]\nextends = "p"\ngpus_per_node = 4\nexclusive = false\n')
    launch = launched(folder, "newer", "p")
    assert {"--gres=gpu:8", "--exclusive"} <= set(launch.shared.main_options)
    assert "--tensor-parallel-size 8 " in deployment_of(launch).command
    assert not {"--gres=gpu:8", "--exclusive"} & set(launch.shared.worker_options), "a server has them"

    smaller = launched(folder, "newer", "q")
    assert "--gpus-per-node=4" in smaller.shared.main_options
    assert not {"--gres=gpu:8", "--exclusive"} & set(smaller.shared.main_options)
    assert "--tensor-parallel-size 4 " in deployment_of(smaller).command
    assert "deployment.tensor_parallel_size: is 4, all GPUs of its nodes, and not the group's 8" in str(smaller.notices)
    off = launched(folder, "newer", "p", "execution.gres=null", "execution.sbatch_extra_flags.exclusive=false")
    assert not {"--gres=gpu:8", "--exclusive"} & set(off.shared.main_options)
    assert "--tensor-parallel-size 8 " in deployment_of(off).command


def test_gpus_of_the_group_are_only_for_servers(folder: Path) -> None:
    hosted = ["deployment=none", "target.api_endpoint.model_id=m", "target.api_endpoint.url=http://h/v1"]
    launch = launched(folder, "newer", "base", *hosted)
    assert not [option for option in launch.shared.main_options if "gpu" in option or "exclusive" in option]
    message = "execution: exclusive and gres gpu:8 of the group: not requested, because nothing is served"
    assert message in "\n".join(launch.notices)
    asked = launched(folder, "newer", "base", *hosted, "execution.gres=gpu:2")
    assert "--gres=gpu:2" in asked.shared.main_options
    typed = "execution: {type: slurm}\ndeployment: {type: vllm, hf_model_handle: o/m, served_model_name: s}\n"
    write(folder / "config" / "typed.yaml", f"{typed}evaluation: {{tasks: [mmlu]}}\n")
    without_list = launched(folder, "typed", "base")
    assert not [option for option in without_list.shared.main_options if "gpu" in option or "exclusive" in option]
    assert "--tensor-parallel-size 1 " in deployment_of(without_list).command


def test_vllm_on_several_nodes_is_connected_by_ray(folder: Path) -> None:
    text = NEWER.replace("deployment: vllm", "deployment: vllm_ray")
    write(folder / "config" / "ray.yaml", text.replace("output_dir: /lustre/out", "output_dir: /o\n  num_nodes: 2"))
    launch = launched(folder, "ray", "base", "deployment.pipeline_parallel_size=2")
    served = deployment_of(launch)
    assert (launch.nodes, served.nodes, served.instances) == (2, 2, 1)
    assert "--tensor-parallel-size 8 --pipeline-parallel-size 2 " in served.command
    assert served.command.endswith("--trust-remote-code --distributed-executor-backend ray")
    assert served.env["VLLM_ENGINE_READY_TIMEOUT_S"] == "lit:3600"
    given = deployment_of(launched(folder, "ray", "base", "deployment.base_command=serve it"))
    assert given.command.endswith("\nserve it --distributed-executor-backend ray")


def test_values_may_refer_to_user_defined_keys(folder: Path) -> None:
    text = NEWER.replace(
        "hf_model_handle: org/model", "hf_model_handle: ${mine.model}\n  local_size: 4\n  stray_key: 1"
    )
    text = text.replace("evaluation:\n", 'evaluation:\n  pre_cmd: "serve --size ${deployment.local_size} ${port}"\n')
    write(folder / "config" / "own.yaml", text + "mine: {model: org/own}\nport: 9000\n")
    launch = launched(folder, "own", "BIG")
    assert "vllm serve org/own " in deployment_of(launch).command
    assert launch.shared.pre_cmd == "serve --size 4 9000"
    assert "deployment.stray_key: no effect here, because nothing refers to it" in str(launch.notices)
    assert "local_size" not in str(launch.notices)
    again = write(folder / "again.yaml", compiled_yaml(launch.tree))
    assert launched(folder, str(again)).shared == launch.shared
    write(folder / "config" / "stray.yaml", NEWER + "mine: {model: org/own}\n")
    assert "mine: unknown key" in refused(folder, "stray")


def test_a_users_command_may_contain_the_derived_one(folder: Path) -> None:
    launch = launched(folder, "newer", "BIG", "deployment.command='prepare && ${deployment.base_command} --more'")
    command = deployment_of(launch).command
    assert command.startswith("prepare && vllm serve org/model --host 0.0.0.0 --port 8000 ")
    assert "--tensor-parallel-size 8" in command and command.endswith("--trust-remote-code --more")
    again = write(folder / "again.yaml", compiled_yaml(launch.tree))
    assert deployment_of(launched(folder, str(again))).command == command


def test_a_placeholder_is_no_secret(folder: Path) -> None:
    launch = launched(folder, "newer", "BIG", "env_vars.DUMMY_API_KEY=lit:placeholdervalue")
    assert deployment_of(launch).env["DUMMY_API_KEY"] == "lit:placeholdervalue"
    secret = "env_vars.DUMMY_API_KEY=lit:sk-0123456789abcdef"
    assert "secrets do not belong in files" in refused(folder, "newer", secret)


@pytest.mark.parametrize(
    ("block", "command"),
    [
        (
            {"type": "vllm", "hf_model_handle": "o/m", "served_model_name": "s", "tensor_parallel_size": 8},
            (
                "vllm serve o/m --host 0.0.0.0 --port 8000 --served-model-name s --tensor-parallel-size 8"
                " --trust-remote-code"
            ),
        ),
        (
            {"type": "vllm", "checkpoint_path": "/c", "base_command": "python -m x", "extra_args": ["--a", "1"]},
            "python -m x",
        ),
        (
            {"type": "sglang", "checkpoint_path": "/c", "served_model_name": "a b", "data_parallel_size": 2},
            (
                "python3 -m sglang.launch_server --model-path /checkpoint --host 0.0.0.0 --port 8000"
                " --served-model-name 'a b' --dp-size 2"
            ),
        ),
        (
            {"type": "trtllm", "checkpoint_path": "/c", "port": 9, "pipeline_parallel_size": 2, "extra_args": "--x"},
            (
                "mpirun --allow-run-as-root --oversubscribe trtllm-serve serve /checkpoint --host 0.0.0.0 --port 9"
                " --pp_size 2 --backend pytorch --trust_remote_code --x"
            ),
        ),
        ({"type": "nim", "served_model_name": "s"}, "/opt/nvidia/nvidia_entrypoint.sh /opt/nim/start_server.sh"),
        ({"type": "generic", "command": " serve it\n"}, "serve it"),
        ({"type": "vllm", "command": "mine", "extra_args": "--x"}, "mine"),
        ({"type": "none", "command": "x"}, None),
    ],
)
def test_the_command_of_each_server(block: dict[str, Any], command: str | None) -> None:
    assert server_command(DeploymentBlock(**block)) == command


def test_a_nim_gets_its_model_name_through_variables(folder: Path) -> None:
    launch = launched(folder, "newer", "BIG", "deployment=nim", "deployment.image=nim:1", "deployment.cache_path=/nim")
    env = deployment_of(launch).env
    assert env["NIM_SERVED_MODEL_NAME"] == "lit:served"
    assert env["NIM_CACHE_PATH"] == "lit:/cache"
    assert "/nim:/cache" in deployment_of(launch).mounts
    assert deployment_of(launch).health_path == "/v1/health/ready"


def test_host_variables_must_be_set_at_submission(folder: Path) -> None:
    launch = launched(folder, "newer", "BIG")
    everything = {"HF_TOKEN": "a", "OTHER_TOKEN": "b", "WANDB_API_KEY": "c"}
    check_environment(launch.variables, everything)
    with pytest.raises(ConfigError) as caught:
        check_environment(launch.variables, {"HF_TOKEN": "a", "WANDB_API_KEY": "c"})
    line = NEWER.splitlines().index('      env_vars: {HF_TOKEN: "host:OTHER_TOKEN"}') + 1
    assert str(caught.value).startswith(
        f"config/newer.yaml:{line}: HF_TOKEN is host:OTHER_TOKEN, and OTHER_TOKEN is not set here"
    )


def test_variables_of_wandb_take_the_values_of_env_toml(folder: Path) -> None:
    names = "WANDB_API_KEY: WANDB_API_KEY, WANDB_PROJECT: WANDB_PROJECT, WANDB_ENTITY: 'host:WANDB_ENTITY'"
    text = OLDER.replace("WANDB_API_KEY: WANDB_API_KEY", names).replace("HF_TOKEN: HF_TOKEN", names)
    write(folder / "config" / "logged.yaml", text)
    launch = launched(folder, "logged", "BIG", environ={"PWD": "/x", "WANDB_PROJECT": "another"})
    expected = {
        "WANDB_API_KEY": "host:WANDB_API_KEY",
        "WANDB_BASE_URL": "lit:https://api.wandb.ai",
        "WANDB_PROJECT": "lit:nano",
        "WANDB_ENTITY": "lit:team",
    }
    assert launch.shared.export_env == {"HF_HOME": "lit:/lustre/hf", **expected}
    assert launch.tasks[0].file.env == {"HF_HOME": "lit:/lustre/hf", **expected}
    check_environment(launch.variables, {"WANDB_API_KEY": "k"})
    write(folder / "env.toml", PROFILES.replace('project = "nano"\n', ""))
    unset = launched(folder, "logged", "BIG", "export.wandb.project=p")
    with pytest.raises(ConfigError, match="WANDB_PROJECT is host:WANDB_PROJECT, and WANDB_PROJECT is not set here"):
        check_environment(unset.variables, {"WANDB_API_KEY": "k"})


def test_an_api_key_that_the_job_would_lack_is_reported_before_submission(folder: Path) -> None:
    config = "execution: {type: local}\ndeployment: {type: none}\nevaluation: {tasks: [{name: mmlu}]}\n"
    write(folder / "config" / "keyless.yaml", config)
    key = "env_vars.OPENAI_API_KEY=host:OPENAI_API_KEY"
    message = refused(folder, "keyless", profile=None)
    assert "mmlu.yaml:" in message and "target: needs OPENAI_API_KEY, which the job does not have" in message
    assert "write `env_vars: {OPENAI_API_KEY: host:OPENAI_API_KEY}`" in message and f"`{key}` in the command" in message
    launched(folder, "keyless", None, key)
    launched(folder, "evals/mmlu.yaml", "here", key)  # an eval file by itself
    launched(folder, "keyless", None, "deployment={type: generic, command: serve, served_model_name: m}")

    elsewhere = "target.api_endpoint.url=https://h.example/v1"  # perhaps it needs none
    assert not launched(folder, "keyless", None, elsewhere).notices
    judge = "{type: prompt, rubric: kind, model: judge, base_url: https://api.openai.com/v1}"
    judge = f"evaluation.tasks.mmlu.overrides={{graders: [{judge}]}}"
    assert "graders[0]: needs OPENAI_API_KEY" in refused(folder, "keyless", elsewhere, judge, profile=None)
    (notice,) = launched(folder, "keyless", None, elsewhere, environ={"OPENAI_API_KEY": "k"}).notices
    assert "target: OPENAI_API_KEY is set here, and not in the job: write `env_vars:" in notice


def test_the_variables_of_a_models_provider_are_asked_for(folder: Path) -> None:
    config = "execution: {type: local}\ndeployment: {type: none}\nevaluation: {tasks: [{name: mmlu}]}\n"
    write(folder / "config" / "keyless.yaml", config)
    model = "target.api_endpoint.model_id=anthropic/claude-x"
    message = refused(folder, "keyless", model, profile=None)
    assert "target: needs ANTHROPIC_API_KEY, which the job does not have" in message
    assert "OPENAI_API_KEY" not in message
    launched(folder, "keyless", None, model, "env_vars.ANTHROPIC_API_KEY=host:ANTHROPIC_API_KEY")
    azure = refused(folder, "keyless", "target.api_endpoint.model_id=azure/my-gpt", profile=None)
    assert "needs AZURE_OPENAI_ENDPOINT" in azure and "needs AZURE_OPENAI_API_KEY" in azure
    served = "deployment={type: generic, command: serve, served_model_name: mistral/m}"
    target = launched(folder, "keyless", None, served).tasks[0].spec.target
    assert target.model_dump()["base_url"] == "${OPENAI_BASE_URL}", "the job's own server, whatever the name looks like"


def test_a_missing_login_is_reported_with_a_remedy(folder: Path) -> None:
    launch = launched(folder, "newer", "BIG")
    with pytest.raises(UsageError) as caught:
        check_environment(launch.variables, {"HF_TOKEN": "a", "OTHER_TOKEN": "b", "HOME": str(folder)})
    assert "no W&B login was found" in str(caught.value)
    assert "`wandb login`" in str(caught.value)
    assert "[wandb] in env.toml" in str(caught.value)


def test_the_login_is_the_one_that_wandb_keeps(folder: Path) -> None:
    netrc = write(folder / ".netrc", "machine api.wandb.ai\n  login user\n  password from-netrc\n")
    netrc.chmod(0o600)
    assert detect({"HOME": str(folder)}).api_key == "from-netrc"
    assert detect({"HOME": str(folder), "WANDB_API_KEY": "from-variable"}).api_key == "from-variable"
    assert detect({"HOME": str(folder), "WANDB_BASE_URL": "https://wandb.example.com"}).api_key is None
    assert detect({"NETRC": str(netrc)}).api_key == "from-netrc"
    key = EnvVar("WANDB_API_KEY", "host", "WANDB_API_KEY")
    assert host_values([key], {"HOME": str(folder)}) == {"WANDB_API_KEY": "from-netrc"}
    launch = launched(folder, "newer", "BIG")
    check_environment(launch.variables, {"HF_TOKEN": "a", "OTHER_TOKEN": "b", "HOME": str(folder)})


COMPANY = "https://wandb.company.example"
URL = "WANDB_BASE_URL"


class TestServerOfWandb:
    """The address of a W&B server travels with the key of that server, and with no other."""

    @pytest.fixture(autouse=True)
    def logged_in(self, folder: Path) -> None:
        """As `wandb login --host` leaves it, on a machine that has a login to the public service too."""
        write(folder / ".config" / "wandb" / "settings", f"[default]\nbase_url = {COMPANY}\n")
        entries = (("wandb.company.example", "of-company"), ("api.wandb.ai", "of-public"))
        text = "".join(f"machine {host}\n  login user\n  password {key}\n" for host, key in entries)
        write(folder / ".netrc", text).chmod(0o600)

    @staticmethod
    def launched(folder: Path, *overrides: str, **environ: str) -> tuple[Launch, dict[str, str]]:
        environ = {"PWD": str(folder), "HOME": str(folder), "HF_TOKEN": "a", "OTHER_TOKEN": "b", **environ}
        return launched(folder, "newer", "BIG", *overrides, environ=environ), environ

    def test_the_server_is_passed_with_the_key_and_shown(self, folder: Path) -> None:
        launch, environ = self.launched(folder)
        assert launch.shared.export_env[URL] == f"lit:{COMPANY}"
        assert host_values(launch.variables, environ)["WANDB_API_KEY"] == "of-company"
        (line,) = [line for line in compiled_yaml(launch.tree).splitlines() if COMPANY in line]
        assert "base_url:" in line and line.endswith(str(folder / ".config" / "wandb" / "settings"))
        assert URL not in deployment_of(launch).env, "the server does not get the key"

    def test_the_server_in_env_toml_wins_over_the_login(self, folder: Path) -> None:
        write(folder / "env.toml", PROFILES.replace("[wandb]\n", '[wandb]\nbase_url = "https://api.wandb.ai"\n'))
        launch, environ = self.launched(folder)
        assert launch.shared.export_env[URL] == "lit:https://api.wandb.ai"
        assert host_values(launch.variables, environ)["WANDB_API_KEY"] == "of-public"

    @pytest.mark.parametrize("part", ["env_vars", "run.env.env_vars", "export.env_vars"])
    def test_a_server_in_the_configuration_gets_its_own_key(self, folder: Path, part: str) -> None:
        launch, environ = self.launched(folder, f"+{part}.{URL}=lit:https://api.wandb.ai")
        assert launch.shared.export_env[URL] == "lit:https://api.wandb.ai"
        assert host_values(launch.variables, environ)["WANDB_API_KEY"] == "of-public"

    def test_every_part_that_gets_the_key_gets_the_server(self, folder: Path) -> None:
        launch, _ = self.launched(
            folder, "execution.auto_export=[]", "+evaluation.env_vars.WANDB_API_KEY=host:WANDB_API_KEY"
        )
        assert launch.tasks[0].file.env[URL] == f"lit:{COMPANY}"
        launch, _ = self.launched(folder, "execution.auto_export=[]")
        assert URL not in launch.tasks[0].file.env

    @pytest.mark.parametrize(
        ("overrides", "environ", "message"),
        [
            ([f"+env_vars.{URL}=lit:https://a.example"], {}, "`wandb login --host https://a.example`"),
            ([f"+env_vars.{URL}=runtime:{URL}"], {}, f"is for {COMPANY}, and"),
            (
                [f"+env_vars.{URL}=lit:https://a.example"],
                {"WANDB_API_KEY": "k", URL: "https://b.example"},
                "(WANDB_API_KEY) is for https://b.example, and",
            ),
            (
                [f"+env_vars.{URL}=lit:https://a.example"],
                {"WANDB_API_KEY": "of-company"},
                "is the login for wandb.company.example, and the server is https://a.example",
            ),
            (
                [
                    f"+export.env_vars.{URL}=lit:https://a.example",
                    "+evaluation.env_vars.WANDB_API_KEY=host:WANDB_API_KEY",
                ],
                {},
                "different W&B servers",
            ),
            ([f"+env_vars.{URL}=host:MY_SERVER"], {}, "MY_SERVER is not set here"),
        ],
    )
    def test_a_server_gets_no_other_servers_key(
        self, folder: Path, overrides: list[str], environ: dict[str, str], message: str
    ) -> None:
        launch, environ = self.launched(folder, *overrides, **environ)
        with pytest.raises((UsageError, ConfigError), match=re.escape(message)):
            check_environment(launch.variables, environ)

    def test_a_key_in_the_environment_goes_to_the_server_in_the_configuration(self, folder: Path) -> None:
        launch, environ = self.launched(folder, f"+env_vars.{URL}=lit:https://a.example", WANDB_API_KEY="k")
        login = wandb_login(launch.variables, environ)
        assert (login.api_key, login.base_url) == ("k", "https://a.example")


def test_a_missing_project_is_an_error_with_a_profile_and_a_remark_without(folder: Path) -> None:
    write(folder / "env.toml", '[p]\nexecutor = "slurm"\n')
    text = NEWER.replace("  wandb: {project: p}\n", "  wandb: {}\n")
    write(folder / "config" / "w.yaml", text)
    message = "results go to W&B, and no project is named: write [wandb] project"
    assert message in refused(folder, "w", profile="p")
    assert message in "\n".join(launched(folder, "w").notices)


@pytest.mark.parametrize("config", ["older", "newer", "hosted"])
def test_the_compiled_configuration_can_be_run_again(folder: Path, config: str) -> None:
    profile = None if config == "hosted" else "BIG"
    first = launched(folder, config, profile, "execution.workers=2", environ={"PWD": "/x", "HOSTNAME": "login"})
    again = write(folder / "again" / "again.yaml", compiled_yaml(first.tree))
    second = launched(folder, str(again), environ={})
    assert second.execution == first.execution
    assert (second.shared, second.nodes) == (first.shared, first.nodes)
    assert [task.file for task in second.tasks] == [task.file for task in first.tasks]
    assert read_value(compiled_yaml(second.tree)) == read_value(compiled_yaml(first.tree))


def test_the_compiled_configuration_says_where_each_value_comes_from(folder: Path) -> None:
    overrides = ("execution.workers=2", "evaluation.tasks.hellaswag.overrides.trials=3")
    shown = compiled_yaml(launched(folder, "newer", "BIG", *overrides, tasks=["hellaswag"]).tree)
    for line, place in {
        "workers: 2": "command line",
        "trials: 3": "command line",
        "- name: hellaswag": "config/newer.yaml:21",
        "account: acct": "default (execution/slurm/default) ← env.toml:7",
        "output_dir: /lustre/out": "config/newer.yaml:8",
        "max_walltime:": "default (execution/slurm/default)",
        "HF_TOKEN: host:HF_TOKEN": "config/newer.yaml:6",
    }.items():
        matching = [text for text in shown.splitlines() if text.strip().startswith(line)]
        assert any(text.endswith(f"# {place}") for text in matching)
    assert "mmlu" not in shown
    sections = read_value(compiled_yaml(launched(folder, "newer", "BIG").tree))
    assert list(sections) == ["run", "execution", "deployment", "env_vars", "evaluation", "export"]


def test_the_compiled_configuration_contains_no_secret(folder: Path) -> None:
    secrets = {"HF_TOKEN": "hush-1", "OTHER_TOKEN": "hush-2", "WANDB_API_KEY": "hush-3"}
    launch = launched(folder, "newer", "BIG", environ=secrets)
    assert "hush" not in compiled_yaml(launch.tree) + repr(launch) + "".join(launch.notices)


def test_nothing_is_written(folder: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    variables_before = dict(os.environ)
    launched(folder, "older", "BIG")
    launched(folder, "hosted")
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before
    assert dict(os.environ) == variables_before


def test_benchmarks_are_asked_for_the_served_checkpoint_unless_the_server_names_its_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(folder / "home"))
    write(
        folder / "config" / "unnamed.yaml",
        "execution: {type: slurm}\ndeployment: {type: generic, command: serve, checkpoint_path: /ckpt/nano}\n"
        "evaluation: {tasks: [mmlu-sample]}\n",
    )

    def models(*overrides: str) -> list[str]:
        tasks = launched(folder, "unnamed", "BIG", *overrides).tasks
        return [dict(task.file.overrides)["target", "model"] for task in tasks]

    assert models() == ["nano"]
    assert models("deployment.served_model_name=mine") == ["mine"]
    assert models("deployment.hf_model_handle=org/model", "deployment.checkpoint_path=null") == ["org/model"]
    assert models("evaluation.tasks.0.overrides={target.model: other}") == ["other"]
    notices = "\n".join(launched(folder, "unnamed", "BIG").notices)
    assert "deployment.served_model_name: is not given" in notices and "by benchmarks for nano" in notices
    message = refused(folder, "unnamed", "deployment.checkpoint_path=null")
    assert "deployment.served_model_name: must be given: it is the model that benchmarks ask the server for" in message
    assert "names no model to measure; name it with -m MODEL" in refused(folder, "unnamed", "deployment.type=none")


def test_dataset_dir_names_the_datasets_of_a_benchmark(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(folder / "home"))
    write(
        folder / "config" / "copied.yaml",
        "execution: {type: slurm}\ndeployment: {type: generic, command: serve, served_model_name: m}\n"
        "evaluation: {tasks: [{name: humaneval, dataset_dir: data}]}\n",
    )
    rows = folder / "config" / "data" / "test.jsonl"
    message = refused(folder, "copied")
    assert f"{rows.parent}: no rows of the split 'test'" in message
    write(rows, (SAMPLES / "humaneval.jsonl").read_text())
    launch = launched(folder, "copied", "BIG")
    assert [task.spec.dataset.path for task in launch.tasks if task.spec.dataset] == [[str(rows)]]
    assert not any("dataset_dir" in notice for notice in launch.notices)
