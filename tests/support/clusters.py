"""A folder with profiles, configurations and eval files, as somebody who evaluates on a cluster has it."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from holdfast.apps.cluster.config.compile import LaunchRequest, compile_launch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from holdfast.apps.cluster.config.launch import Launch

PROFILES = """\
[wandb]
project = "nano"
entity = "team"

[base]
executor = "slurm"
account = "acct"
partition = "batch"
time = "04:00:00"
tunnel = "ssh"
host = "login.example.com"
user = "me"
remote_job_dir = "/lustre/me/jobs"
container_image = "registry.example.com/nemo:1"

[BIG]
extends = "base"
nodes = 2
gpus_per_node = 8
mounts = ["/lustre:/lustre"]

[BIG.env_vars]
HF_HOME = "/lustre/hf"

[here]
executor = "local"
"""
EVAL = """\
schemaVersion: "1.0"
name: {name}
samples: [{{id: a, question: "1 + 1?", expected: "2"}}]
target: {{model: some-model}}
prompt: "{{{{ question }}}}"
graders: [{{type: exact}}]
"""
OLDER = """\
defaults:
  - execution: slurm/default
  - deployment: generic
  - _self_
run:
  env:
    container: registry.example.com/served:2
    host: ${oc.env:HOSTNAME,localhost}
    account: null
    remote_job_dir: ${oc.env:PWD}/jobs
  wandb:
    entity: null
    project: null
execution:
  type: slurm
  hostname: ${run.env.host}
  account: ${run.env.account}
  output_dir: ${run.env.remote_job_dir}/evaluations
  walltime: ${run.env.time}
  num_nodes: 2
  ntasks_per_node: 1
  gres: gpu:8
  deployment:
    n_tasks: ${execution.num_nodes}
  proxy: {type: haproxy, image: null, config: {haproxy_port: 5009}}
  auto_export:
    enabled: true
    destinations: [wandb]
  env_vars:
    deployment: {HF_HOME: /cache/hf}
    evaluation: {HF_TOKEN: HF_TOKEN}
    export: {WANDB_API_KEY: WANDB_API_KEY}
  mounts:
    deployment: {/scratch: /data}
    evaluation: {/scratch: "/data:ro"}
deployment:
  type: generic
  multiple_instances: true
  image: ${run.env.container}
  health_check_path: /v1/health
  port: 1235
  served_model_name: nano
  checkpoint_path: /lustre/ckpt
  command: >-
    bash -c 'serve /checkpoint/ --gpus \\${GPUS}'
  endpoints: {chat: /v1/chat/completions/, completions: /v1/completions/, health: /v1/health}
evaluation:
  nemo_evaluator_config:
    config:
      params:
        max_retries: 3
        parallelism: 4
        request_timeout: 6000
        limit_samples: null
        extra:
          tokenizer: ${deployment.checkpoint_path}/tokenizer
    target:
      api_endpoint:
        adapter_config: {use_caching: true, caching_dir: /results/cache}
  tasks:
    - name: mmlu
      nemo_evaluator_config: {config: {params: {top_p: 0.0, max_new_tokens: 64}}}
    - name: hellaswag
export:
  wandb:
    entity: ${run.wandb.entity}
    project: ${run.wandb.project}
"""
"""a configuration of the older dialect, with all that the newer one refuses"""
NEWER = """\
defaults:
  - execution: slurm/default
  - deployment: vllm
  - _self_
env_vars:
  HF_TOKEN: host:HF_TOKEN
execution:
  output_dir: /lustre/out
  auto_export: [wandb]
deployment:
  hf_model_handle: org/model
  served_model_name: served
  env_vars: {VLLM_LOGGING_LEVEL: "lit:DEBUG"}
evaluation:
  env_vars: {CACHE: "runtime:SLURM_TMPDIR"}
  tasks:
    - name: mmlu
      env_vars: {HF_TOKEN: "host:OTHER_TOKEN"}
    - name: mmlu
      endpoint_type: completions
    - name: hellaswag
export:
  wandb: {project: p}
"""
HOSTED = """\
execution: {type: local}
deployment: {type: none}
target:
  api_endpoint:
    model_id: org/hosted
    url: https://api.example.com/v1/chat/completions
    api_key_name: API_KEY
    type: chat
evaluation:
  tasks: [evals/mmlu.yaml]
"""
GUIDE_CONFIGURATION = """
execution:
  type: slurm
  hostname: ${run.env.host}
  account: ${run.env.account}
  partition: ${run.env.partition}
  num_nodes: 1
  gres: gpu:8

  auto_export:
    enabled: true
    destinations:
      - wandb

deployment:
  type: generic
  image: ${run.env.container}
  checkpoint_path: /path/to/checkpoint
  command: >-
    python deploy_ray_inframework.py
    --megatron_checkpoint /checkpoint/
    --num_gpus 8

evaluation:
  tasks:
    - name: adlr_mmlu
    - name: adlr_arc_challenge_llama_25_shot
    - name: adlr_winogrande_5_shot
    - name: hellaswag
    - name: openbookqa

export:
  wandb:
    entity: ${run.wandb.entity}
    project: ${run.wandb.project}
"""
"""the example of the guide to `nemotron evaluate`, with all tasks that the guide lists"""
GUIDE_TASKS = ("adlr_mmlu", "adlr_arc_challenge_llama_25_shot", "adlr_winogrande_5_shot", "hellaswag", "openbookqa")


def lay_out(folder: Path, **configs: str) -> Path:
    """The folder, with configurations by name."""
    for name in ("mmlu", "hellaswag"):
        write(folder / "evals" / f"{name}.yaml", EVAL.format(name=name))
    write(folder / "env.toml", PROFILES)
    for name, text in {"older": OLDER, "newer": NEWER, "hosted": HOSTED, **configs}.items():
        write(folder / "config" / f"{name}.yaml", textwrap.dedent(text))
    return folder


def write(path: Path, text: str) -> Path:
    """A file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def launched(
    folder: Path,
    config: str,
    profile: str | None = None,
    *overrides: str,
    tasks: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    detached: bool = False,
) -> Launch:
    """The launch of a configuration in that folder, with no variable set but those given."""
    variables = {"PWD": str(folder)} if environ is None else environ
    request = LaunchRequest(config, profile, overrides, tasks, detached=detached, cwd=folder, environ=variables)
    return compile_launch(request)
