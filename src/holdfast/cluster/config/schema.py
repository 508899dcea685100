"""What a configuration for a cluster may say, one model per block, in both dialects of the launcher's files.

Keys of the older dialect that the newer one refuses are read too: `execution.env_vars`,
`deployment.multiple_instances`, `auto_export.enabled`, a task's `config`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from holdfast.cluster.config.profiles import Lines, ProfileBlock, WandbBlock
from holdfast.cluster.config.walltime import Walltime  # noqa: TC001 - pydantic reads it
from holdfast.spec.schema import EXPORTS, Block, Seconds

DESTINATIONS = (*EXPORTS, "local")
ONE_LINE = r"^[^\n\r]*$"
DEPLOYMENTS = ("none", "generic", "vllm", "sglang", "nim", "trtllm")


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
    """`run:`, what a configuration and the profile say about the place; the rest is written by other tools."""

    env: ProfileBlock = ProfileBlock()
    wandb: WandbBlock = WandbBlock()
    model: str | None = None
    data: Any = None
    mode: str | None = None
    profile: str | None = None
    cli: dict[str, Any] | None = None
    recipe: dict[str, Any] | None = None


class MountsBlock(Block):
    """`execution.mounts`: host path to path in the container, for the server and for the evaluation."""

    deployment: MountTable = Field(default_factory=dict)
    evaluation: MountTable = Field(default_factory=dict)
    auxiliary: dict[str, MountTable] = Field(default_factory=dict)
    mount_home: bool = False


class DeploymentTasks(Block):
    """`execution.deployment`."""

    n_tasks: int | None = Field(default=None, ge=1)


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
    destinations: list[str] = Field(default_factory=list)
    launcher_install_cmd: str | None = None
    export_image: str | None = None
    export_mounts: Any = None


class ExecutionBlock(Block):
    """`execution:`, for Slurm and for this machine."""

    type: str
    hostname: str | None = None
    username: str | None = None
    account: str | None = None
    partition: str | None = None
    cpu_partition: str | None = None
    output_dir: str | None = None
    """where runs go; default: `evaluations` in remote_job_dir"""
    num_nodes: int = Field(default=1, ge=1)
    num_instances: int = Field(default=1, ge=1)
    """servers of the model; the nodes are shared out among them"""
    ntasks_per_node: int = Field(default=1, ge=1)
    gpus_per_node: int | None = Field(default=None, ge=0)
    gres: str | None = None
    walltime: Walltime = "01:00:00"
    max_walltime: Walltime | None = "120:00:00"
    """of all the jobs that go on with each other, together"""
    endpoint_readiness_timeout: Seconds | None = None
    """how long the server may take to start; default: the walltime"""
    workers: int = Field(default=1, ge=1)
    """processes that share the work of each run"""
    subproject: str | None = Field(default=None, pattern=ONE_LINE)
    """in the comments of jobs, which are known by names of ours"""
    sbatch_comment: str | None = Field(default=None, pattern=ONE_LINE)
    sbatch_extra_flags: dict[str, str | int | bool | None] = Field(default_factory=dict)
    deployment: DeploymentTasks = DeploymentTasks()
    mounts: MountsBlock = MountsBlock()
    proxy: ProxyBlock | None = None
    auto_export: Annotated[AutoExportBlock, BeforeValidator(_auto_export)] = AutoExportBlock()
    evaluation_gpu_visible: bool | str | None = None
    """of the GPUs of a job: all, none or some, as in "0,1"; None: nothing is said"""
    env_vars: dict[str, Any] | None = None
    """older dialect: {deployment, evaluation, export}"""
    mode: Literal["sequential", "parallel"] = "sequential"
    """this machine only"""
    extra_docker_args: str | None = None
    """this machine only"""


class EndpointsBlock(Block):
    """Paths of the server."""

    chat: str | None = None
    completions: str | None = None
    health: str | None = None
    embedding: str | None = None
    ranking: str | None = None


class DeploymentBlock(Block):
    """`deployment:`, the server of the model."""

    type: str
    image: str | None = None
    command: str | None = None
    base_command: str | None = None
    """what the derived command begins with instead of its own"""
    port: int = Field(default=8000, ge=1, le=65535)
    served_model_name: str | None = None
    checkpoint_path: str | None = None
    hf_model_handle: str | None = None
    cache_path: str | None = None
    tensor_parallel_size: int | None = Field(default=None, ge=1)
    pipeline_parallel_size: int | None = Field(default=None, ge=1)
    data_parallel_size: int | None = Field(default=None, ge=1)
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    extra_args: str | None = None
    env_vars: dict[str, Any] | None = None
    pre_cmd: str | None = None
    distributed_executor_backend: str | None = None
    endpoints: EndpointsBlock = EndpointsBlock()
    health_check_path: str | None = None
    health_check_status: int = 200
    haproxy_port: int | None = None
    multiple_instances: bool | None = None
    """older dialect: one server per node, or per so many nodes"""
    nodes_per_instance: int | None = Field(default=None, ge=1)

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
    """of its own, besides execution.num_nodes; default: one per instance"""
    num_instances: int = Field(default=1, ge=1)
    n_tasks: int | None = Field(default=None, ge=1)
    env_prefix: str | None = Field(default=None, pattern=r"^[A-Za-z_]\w*$")
    """of the variables that say where it is; default: its name in upper case"""


class ApiEndpoint(Block):
    """`target.api_endpoint`, a model that is there already."""

    api_key_name: str | None = None
    model_id: str | None = None
    stream: bool | None = None
    type: Literal["chat", "vlm", "completions", "completions_logprob", "embedding", "undefined"] | None = None
    url: str | None = Field(default=None, pattern=r"^https?://[^/\s]+")
    adapter_config: dict[str, Any] | None = None


class TargetBlock(Block):
    """`target:`."""

    api_endpoint: ApiEndpoint = ApiEndpoint()


class Params(Block):
    """`config.params` of a task."""

    limit_samples: int | float | None = Field(default=None, gt=0)
    max_new_tokens: int | None = Field(default=None, ge=1)
    max_retries: int | None = Field(default=None, ge=0)
    parallelism: int | None = Field(default=None, ge=1)
    task: str | None = None
    temperature: float | None = Field(default=None, ge=0)
    request_timeout: Seconds | None = None
    top_p: float | None = Field(default=None, ge=0, le=1)
    extra: dict[str, Any] | None = None


class TaskConfig(Block):
    """`config` of nemo_evaluator_config."""

    type: str | None = None
    output_dir: str | None = None
    supported_endpoint_types: Lines | None = None
    required_capabilities: Any = None
    params: Params = Params()


class EvaluatorConfig(Block):
    """`nemo_evaluator_config`, for all tasks or for one."""

    config: TaskConfig = TaskConfig()
    target: TargetBlock = TargetBlock()
    metadata: dict[str, Any] | None = None


class TaskBlock(Block):
    """One of `evaluation.tasks`."""

    name: str = Field(min_length=1)
    """an eval file, or a name it is looked up by"""
    eval: str | None = None
    """the eval file, where the name is to be another one"""
    overrides: dict[str, Any] | None = None
    """keys of the eval file (`trials: 3`, `limits.concurrency: 8`)"""
    container: str | None = None
    endpoint_type: str | None = None
    env_vars: dict[str, Any] | None = None
    nemo_evaluator_config: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    """older name of nemo_evaluator_config"""
    dataset_dir: str | None = None
    dataset_mount_path: str = "/datasets"
    pre_cmd: str | None = None
    post_cmd: str | None = None


class EvaluationBlock(Block):
    """`evaluation:`; its tasks are read one by one."""

    tasks: Annotated[list[Any], AfterValidator(_some)]
    nemo_evaluator_config: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    env_vars: dict[str, Any] | None = None
    pre_cmd: str | None = None
    post_cmd: str | None = None


class _Destination(Block):
    copy_logs: bool | None = None
    copy_artifacts: bool | None = None
    only_required: bool | None = None
    log_metrics: list[str] | None = None
    log_logs: bool | None = None
    log_artifacts: bool | None = None
    job_dirs: list[str] | None = None


class WandbExport(_Destination):
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


class MlflowExport(_Destination):
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


class ExportBlock(_Destination):
    """`export:`."""

    wandb: WandbExport | None = None
    mlflow: MlflowExport | None = None
    local: LocalExport | None = None
    gsheets: dict[str, Any] | None = None
    env_vars: dict[str, Any] | None = None


class LaunchBlock(Block):
    """The top of a configuration; its sections are read by their own models."""

    run: dict[str, Any] = Field(default_factory=dict)
    execution: dict[str, Any]
    deployment: dict[str, Any]
    evaluation: dict[str, Any]
    target: dict[str, Any] | None = None
    export: dict[str, Any] | None = None
    env_vars: dict[str, Any] | None = None
    auxiliary_deployments: dict[str, Any] | None = None
    user_config_path: str | None = None
    dry_run: bool | None = None
    output_dir: str | None = None
    task_filters: Any = None
