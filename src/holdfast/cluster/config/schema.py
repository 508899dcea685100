"""Models of a cluster configuration, one per block, in both dialects of the launcher's files.

Keys of the older dialect that the newer one rejects are read too: `execution.env_vars`,
`deployment.multiple_instances`, `auto_export.enabled`, a task's `config`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from holdfast.cluster.config.marks import (
    CLUSTER_ONLY,
    DERIVED,
    EXPORTS_ITSELF,
    LOCAL_ONLY,
    OTHER_TOOLS,
    OTHER_VARIABLES,
    SET_BY_EVAL,
    SPREAD_BY_HOLDFAST,
    TEXT_ONLY,
    DerivedCommand,
)
from holdfast.cluster.config.profiles import Lines, ProfileBlock, WandbBlock
from holdfast.cluster.config.walltime import Walltime  # noqa: TC001 - pydantic reads it
from holdfast.spec.exports import EXPORTERS
from holdfast.spec.schema import Block, Seconds

DESTINATIONS = (*EXPORTERS, "local")
ONE_LINE = r"^[^\n\r]*$"
DEPLOYMENTS = ("none", "generic", "vllm", "vllm_ray", "sglang", "nim", "trtllm")
BASE_COMMAND = "<base command>"
"""stands for the derived command of the server in values that refer to `deployment.base_command`"""


def _auto_export(value: Any) -> Any:
    return {"destinations": value} if isinstance(value, list) else value


def _mounts(value: Any) -> Any:
    """`{source: target}`, also from a list of `source:target`."""
    if isinstance(value, list):
        return {source: target or source for source, _, target in (str(item).partition(":") for item in value)}
    return value


def _some(tasks: list[Any]) -> list[Any]:
    if not tasks:
        raise ValueError("there is no task: name eval files, as in `tasks: [gsm8k.yaml]`")
    return tasks


MountTable = Annotated[dict[str, str], BeforeValidator(_mounts)]


class RunBlock(Block):
    """`run:`, the values of the profile. Other tools write the rest."""

    env: ProfileBlock = ProfileBlock()
    """What the profile says; keys here are overridden by the profile."""
    wandb: WandbBlock = WandbBlock()
    """Project, entity and server, from `[wandb]` of `env.toml`."""
    model: Annotated[str | None, OTHER_TOOLS] = None
    """No effect: read by other tools."""
    data: Annotated[Any, OTHER_TOOLS] = None
    """No effect: read by other tools."""
    mode: Annotated[str | None, OTHER_TOOLS] = None
    """No effect: read by other tools."""
    profile: Annotated[str | None, OTHER_TOOLS] = None
    """No effect: read by other tools."""
    cli: Annotated[dict[str, Any] | None, OTHER_TOOLS] = None
    """No effect: read by other tools."""
    recipe: Annotated[dict[str, Any] | None, OTHER_TOOLS] = None
    """No effect: read by other tools."""


class MountsBlock(Block):
    """`execution.mounts`: host path to path in the container, for the server and for the evaluation."""

    deployment: MountTable = Field(default_factory=dict)
    """Mounts for the server's container, as `source: target`."""
    evaluation: MountTable = Field(default_factory=dict)
    """Mounts for the containers of tasks."""
    auxiliary: dict[str, MountTable] = Field(default_factory=dict)
    """Mounts for the containers of auxiliary servers, by their names."""
    mount_home: bool = False
    """Mount the home directory into the containers."""


class DeploymentTasks(Block):
    """`execution.deployment`."""

    n_tasks: int | None = Field(default=None, ge=1)
    """Processes to start a server with. Default: one per node."""


class ProxyConfig(Block):
    """`execution.proxy.config`."""

    haproxy_port: int = 5009
    health_check_path: str | None = None
    health_check_status: int = 200


class ProxyBlock(Block):
    """`execution.proxy`, in front of several instances."""

    type: Literal["haproxy"] = "haproxy"
    image: str | None = None
    config: ProxyConfig = ProxyConfig()


class AutoExportBlock(Block):
    """`execution.auto_export`, where results go by themselves when all is done."""

    enabled: bool = True
    """Whether results are exported."""
    destinations: list[str] = Field(default_factory=list)
    """Formats of `holdfast export --to`, and `local`, which leaves results where they are."""
    launcher_install_cmd: Annotated[str | None, EXPORTS_ITSELF] = None
    """No effect: Holdfast exports by itself."""
    partition: Annotated[str | None, EXPORTS_ITSELF] = None
    """No effect: Holdfast exports by itself."""
    export_image: Annotated[str | None, EXPORTS_ITSELF] = None
    """No effect: Holdfast exports by itself."""
    export_mounts: Annotated[Any, EXPORTS_ITSELF] = None
    """No effect: Holdfast exports by itself."""


class ExecutionBlock(Block):
    """`execution:`, for Slurm and for this machine."""

    type: str
    """`slurm` or `local`. The profile's `executor` decides."""
    hostname: Annotated[str | None, CLUSTER_ONLY] = None
    """`host`, `user`, `account` and `partition` of the profile."""
    username: Annotated[str | None, CLUSTER_ONLY] = None
    """`host`, `user`, `account` and `partition` of the profile."""
    account: Annotated[str | None, CLUSTER_ONLY] = None
    """`host`, `user`, `account` and `partition` of the profile."""
    partition: Annotated[str | None, CLUSTER_ONLY] = None
    """`host`, `user`, `account` and `partition` of the profile."""
    cpu_partition: Annotated[str | None, CLUSTER_ONLY] = None
    """Partition for workers beside a server, which need no GPU. In the NeMo Evaluator launcher it is that of export
    jobs; here exports run in the main job."""
    output_dir: str | None = None
    """Folder for runs. Default: `evaluations` in `remote_job_dir`; with `local`, the usual runs directory."""
    num_nodes: Annotated[int, CLUSTER_ONLY] = Field(default=1, ge=1)
    """Nodes of a job, and Slurm tasks per node."""
    num_instances: int = Field(default=1, ge=1)
    """Model servers, among which the nodes are divided."""
    ntasks_per_node: Annotated[int, CLUSTER_ONLY] = Field(default=1, ge=1)
    """Nodes of a job, and Slurm tasks per node."""
    gpus_per_node: Annotated[int | None, CLUSTER_ONLY] = Field(default=None, ge=0)
    """GPUs per node."""
    gres: Annotated[str | None, CLUSTER_ONLY] = None
    """Generic resources, as for `sbatch`."""
    walltime: Annotated[Walltime, CLUSTER_ONLY] = "01:00:00"
    """Time limit of one job."""
    max_walltime: Walltime | None = "120:00:00"
    """Time limit of a chain of jobs."""
    endpoint_readiness_timeout: Seconds | None = None
    """Time that a server has to start. Default: `walltime`."""
    workers: int = Field(default=1, ge=1)
    """Worker processes that share a run."""
    subproject: Annotated[str | None, CLUSTER_ONLY] = Field(default=None, pattern=ONE_LINE)
    """Text for the comments of jobs."""
    sbatch_comment: Annotated[str | None, CLUSTER_ONLY] = Field(default=None, pattern=ONE_LINE)
    """Text for the comments of jobs."""
    sbatch_extra_flags: Annotated[dict[str, str | int | bool | None], CLUSTER_ONLY] = Field(default_factory=dict)
    """Further options of `sbatch`, such as `{qos: high, exclusive: true}`."""
    deployment: DeploymentTasks = DeploymentTasks()
    """`{n_tasks: N}`: processes to start a server with. Default: one per node."""
    mounts: MountsBlock = MountsBlock()
    """Mounts for containers: `{deployment: {source: target}, evaluation: {…}, auxiliary: {judge: {…}}, mount_home:
    false}`."""
    proxy: Annotated[ProxyBlock | None, SPREAD_BY_HOLDFAST] = None
    """No effect: Holdfast distributes requests among instances itself."""
    auto_export: Annotated[AutoExportBlock, BeforeValidator(_auto_export)] = AutoExportBlock()
    """Destinations of finished runs, such as `[wandb]`: formats of `holdfast export --to`."""
    evaluation_gpu_visible: bool | str | None = None
    """GPUs that the evaluation sees: `true`, `false`, or a list such as `"0,1"`. Default: those of the job."""
    env_vars: dict[str, Any] | None = None
    """Older spelling of `env_vars` under `deployment`, `evaluation` and `export`."""
    mode: Annotated[Literal["sequential", "parallel"], LOCAL_ONLY] = "sequential"
    """Local only: run tasks one after another or at once."""
    container_engine: Annotated[Literal["podman", "docker"] | None, LOCAL_ONLY] = None
    """Local only: program that starts images. Default: servers are plain processes."""
    extra_docker_args: Annotated[str | None, LOCAL_ONLY] = None
    """Local only: further options for `podman run` or `docker run`."""


class EndpointsBlock(Block):
    """Paths of the server."""

    chat: str | None = None
    """Path of chat completions."""
    completions: str | None = None
    """Path of completions."""
    health: str | None = None
    """Path that answers once the server is ready."""
    embedding: Annotated[str | None, TEXT_ONLY] = None
    """Path of embeddings."""
    ranking: Annotated[str | None, TEXT_ONLY] = None
    """Path of ranking."""


class DeploymentBlock(Block):
    """`deployment:`, the server of the model."""

    type: str
    """Kind of server: `none`, `generic` (your own command), `vllm`, `vllm_ray` (on several nodes), `sglang`, `nim` or
    `trtllm`."""
    image: str | None = None
    """Docker reference, or a `.sqsh` file. Default: the server is a plain process."""
    command: str | None = None
    """The whole command. Required for `generic`, derived for other types."""
    base_command: Annotated[str | None, DerivedCommand(("vllm", "vllm_ray", "sglang", "trtllm", "nim"))] = None
    """The command instead of the derived one; `${deployment.base_command}` in a `command` of your own."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port of the server."""
    served_model_name: str | None = None
    """Name of the model in requests."""
    checkpoint_path: str | None = None
    """Folders of the model and for caches, which the server sees as `/checkpoint` and `/cache`."""
    hf_model_handle: Annotated[str | None, DERIVED] = None
    """Name of the model on Hugging Face."""
    cache_path: str | None = None
    """Folders of the model and for caches, which the server sees as `/checkpoint` and `/cache`."""
    tensor_parallel_size: Annotated[int | None, DERIVED] = Field(default=None, ge=1)
    """Default: all GPUs of its nodes; if their number is unknown, 8 where `defaults:` selects the group, else 1."""
    pipeline_parallel_size: Annotated[int | None, DERIVED] = Field(default=None, ge=1)
    """Pipeline stages, or data-parallel replicas."""
    data_parallel_size: Annotated[int | None, DerivedCommand(("vllm", "vllm_ray", "sglang"))] = Field(
        default=None, ge=1
    )
    """Pipeline stages, or data-parallel replicas."""
    gpu_memory_utilization: Annotated[float | None, DERIVED] = Field(default=None, gt=0, le=1)
    """Share of GPU memory to use."""
    extra_args: Annotated[str | None, DerivedCommand(("vllm", "vllm_ray", "sglang", "trtllm", "nim"))] = None
    """Arguments to append to the derived command."""
    env_vars: dict[str, Any] | None = None
    """Environment variables of the server."""
    pre_cmd: str | None = None
    """Shell command to run before the server."""
    distributed_executor_backend: Annotated[str | None, DerivedCommand(("vllm", "vllm_ray"))] = None
    """Backend of a server that spans nodes."""
    endpoints: EndpointsBlock = EndpointsBlock()
    """Paths: `chat`, `completions`, `health`, `embedding`, `ranking`."""
    health_check_path: str | None = None
    """Path to poll until the server is ready."""
    health_check_status: int = 200
    """HTTP status that means ready."""
    haproxy_port: Annotated[int | None, SPREAD_BY_HOLDFAST] = None
    """No effect: Holdfast distributes requests among instances itself."""
    multiple_instances: bool | None = None
    """Older spelling of `execution.num_instances`: one server per node, or per `nodes_per_instance`."""
    nodes_per_instance: int | None = Field(default=None, ge=1)
    """Older spelling: nodes of each server, with `multiple_instances`."""

    @model_validator(mode="before")
    @classmethod
    def _joined(cls, data: Any) -> Any:
        """`extra_args` may be a list."""
        if isinstance(data, dict) and isinstance(data.get("extra_args"), list):
            return {**data, "extra_args": " ".join(map(str, data["extra_args"]))}
        return data


class AuxiliaryBlock(DeploymentBlock):
    """One of `auxiliary_deployments`: a judge, a simulated user, served beside the model."""

    num_nodes: int | None = Field(default=None, ge=1)
    """Nodes of its own, in addition to `execution.num_nodes`. Default: one per instance."""
    num_instances: int = Field(default=1, ge=1)
    """Number of servers, among which the nodes are divided."""
    n_tasks: int | None = Field(default=None, ge=1)
    """Processes to start it with. Default: one per node."""
    env_prefix: str | None = Field(default=None, pattern=r"^[A-Za-z_]\w*$")
    """Prefix of the variables that say where it is served. Default: its name in upper case."""


class ApiEndpoint(Block):
    """`target.api_endpoint`, a model that is there already."""

    api_key_name: str | None = None
    """Environment variable that holds the API key."""
    model_id: str | None = None
    """Name of the model."""
    stream: bool | None = None
    """Stream replies."""
    type: Literal["chat", "vlm", "completions", "completions_logprob", "embedding", "undefined"] | None = None
    """Kind of endpoint."""
    url: str | None = Field(default=None, pattern=r"^https?://[^/\s]+")
    """URL of the endpoint."""
    adapter_config: dict[str, Any] | None = None
    """Settings of the launcher's adapter, of which `custom_system_prompt`, `params_to_add` and
    `process_reasoning_traces` are used."""


class LaunchTargetBlock(Block):
    """`target:`."""

    api_endpoint: ApiEndpoint = ApiEndpoint()
    """Where a model is served already: `{url, model_id, api_key_name, type}`."""


class Params(Block):
    """`config.params` of a task."""

    limit_samples: int | float | None = Field(default=None, gt=0)
    """`dataset.limit` of the eval file: a number, or a share below 1. For benchmarks it holds for each subtask."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """`target.params.max_tokens` of the eval file."""
    max_retries: int | None = Field(default=None, ge=0)
    """`limits.retries` of the eval file."""
    parallelism: int | None = Field(default=None, ge=1)
    """`limits.concurrency` of the eval file."""
    task: str | None = None
    """`benchmark.task` of a benchmark. No effect on eval files, which define what is asked."""
    temperature: float | None = Field(default=None, ge=0)
    """`target.params.temperature` of the eval file."""
    request_timeout: Seconds | None = None
    """`limits.turn_timeout` of the eval file. `limits.trial_timeout` is raised where it would be shorter."""
    top_p: float | None = Field(default=None, ge=0, le=1)
    """`target.params.top_p` of the eval file."""
    extra: dict[str, Any] | None = None
    """`num_fewshot` and `tokenizer` of a benchmark. No effect on eval files, which define what is asked."""


class TaskConfig(Block):
    """`config` of nemo_evaluator_config."""

    type: Annotated[str | None, SET_BY_EVAL] = None
    """No effect: the eval file defines what is asked."""
    output_dir: Annotated[str | None, SET_BY_EVAL] = None
    """No effect: runs go to `execution.output_dir`."""
    supported_endpoint_types: Annotated[Lines | None, SET_BY_EVAL] = None
    """No effect: the eval file defines what is asked."""
    required_capabilities: Annotated[Any, SET_BY_EVAL] = None
    """No effect: the eval file defines what is asked."""
    extra: Annotated[dict[str, Any] | None, SET_BY_EVAL] = None
    """No effect: the eval file defines what is asked."""
    params: Params = Params()
    """Values that override keys of the eval file."""


class EvaluatorConfig(Block):
    """`nemo_evaluator_config`, for all tasks or for one."""

    config: TaskConfig = TaskConfig()
    """Values that override keys of the eval file."""
    target: LaunchTargetBlock = LaunchTargetBlock()
    """Settings of the endpoint."""
    metadata: Annotated[dict[str, Any] | None, SET_BY_EVAL] = None
    """No effect: the eval file defines what is asked."""
    env_vars: Annotated[dict[str, Any] | None, OTHER_VARIABLES] = None
    """No effect: variables stand in `env_vars` of the task, or of `evaluation`."""


class TaskBlock(Block):
    """One of `evaluation.tasks`."""

    name: str = Field(min_length=1)
    """Path of an eval file, or a name to look it up by."""
    eval: str | None = None
    """Path of the eval file, if `name` is only a name."""
    overrides: dict[str, Any] | None = None
    """Keys of the eval file to override, such as `{trials: 3}`."""
    container: str | None = None
    """Local only: image in which the task runs, with `execution.container_engine`."""
    endpoint_type: str | None = None
    """API to call: `chat` or `completions`."""
    env_vars: dict[str, Any] | None = None
    """Environment variables of this task."""
    nemo_evaluator_config: dict[str, Any] | None = None
    """Settings of the launcher for this task."""
    config: dict[str, Any] | None = None
    """Older name of `nemo_evaluator_config`."""
    dataset_dir: str | None = None
    """Folder with the datasets of a benchmark, on the machine that submits."""
    dataset_mount_path: str = "/datasets"
    """No effect: the evaluation runs in no container."""
    pre_cmd: str | None = None
    """Shell command to run before or after this task."""
    post_cmd: str | None = None
    """Shell command to run before or after this task."""


class EvaluationBlock(Block):
    """`evaluation:`; its tasks are read one by one."""

    tasks: Annotated[list[Any], AfterValidator(_some)]
    """Tasks to run: each the name or path of an eval file, or a mapping."""
    nemo_evaluator_config: dict[str, Any] | None = None
    """Settings of the launcher for all tasks. Those of a task take precedence."""
    config: dict[str, Any] | None = None
    """Older name of `nemo_evaluator_config`."""
    env_vars: dict[str, Any] | None = None
    """Environment variables of all tasks."""
    pre_cmd: str | None = None
    """Shell command to run before each task."""
    post_cmd: str | None = None
    """Shell command to run after each task."""


class _Destination(Block):
    copy_logs: bool | None = None
    copy_artifacts: bool | None = None
    only_required: bool | None = None
    log_metrics: list[str] | None = None
    log_logs: bool | None = None
    log_artifacts: bool | None = None
    job_dirs: list[str] | None = None


class LaunchWandbExport(_Destination):
    """`export.wandb`."""

    entity: str | None = None
    project: str | None = None
    log_mode: Literal["per_task", "multi_task"] = "per_task"
    name: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: Lines = Field(default_factory=list)
    description: str | None = None
    extra_metadata: dict[str, Any] = Field(default_factory=dict)
    run_id: str | None = None


class LaunchMlflowExport(_Destination):
    """`export.mlflow`."""

    tracking_uri: str | None = None
    experiment_name: str | None = None
    log_config_params: bool | None = None
    log_config_params_max_depth: int | None = None
    skip_existing: bool | None = None
    run_name: str | None = None
    description: str | None = None
    tags: dict[str, Any] = Field(default_factory=dict)
    extra_metadata: dict[str, Any] = Field(default_factory=dict)
    exclude_patterns: list[str] = Field(default_factory=list)


class LocalExport(_Destination):
    """`export.local`."""

    output_dir: str | None = None
    format: Literal["json", "csv"] = "json"
    output_filename: str | None = None


class LaunchExportBlock(_Destination):
    """`export:`."""

    wandb: LaunchWandbExport | None = None
    mlflow: LaunchMlflowExport | None = None
    local: LocalExport | None = None
    gsheets: dict[str, Any] | None = None
    env_vars: dict[str, Any] | None = None


class LaunchBlock(Block):
    """The top of a configuration; its sections are read by their own models."""

    run: dict[str, Any] = Field(default_factory=dict)
    """What the profile says, and values for other tools."""
    execution: dict[str, Any]
    """Where and how jobs run."""
    deployment: dict[str, Any]
    """The model server."""
    evaluation: dict[str, Any]
    """The tasks."""
    target: dict[str, Any] | None = None
    """A model that is served already, with `deployment: {type: none}`."""
    export: dict[str, Any] | None = None
    """Options of export destinations."""
    env_vars: dict[str, Any] | None = None
    """Environment variables for every part of the job."""
    auxiliary_deployments: dict[str, Any] | None = None
    """Further servers, by name: for a judge or a simulated user."""
    user_config_path: Annotated[str | None, OTHER_TOOLS] = None
    """No effect: read by other tools."""
    dry_run: Annotated[bool | None, OTHER_TOOLS] = None
    """No effect: read by other tools."""
    output_dir: Annotated[str | None, OTHER_TOOLS] = None
    """No effect: read by other tools."""
    task_filters: Annotated[Any, OTHER_TOOLS] = None
    """No effect: read by other tools."""
