"""Models of a cluster configuration, one per block, in both dialects of the launcher's files.

Keys of the older dialect that the newer one rejects are read too: `execution.env_vars`,
`deployment.multiple_instances`, `auto_export.enabled`, a task's `config`.

No key is ignored silently. Keys of the launcher that never have an effect here are listed in `ignored` of their block;
keys without effect in some launches have a mark, `NoEffect`. `no_effect` reports both, each with its reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from holdfast.plugins.exporters.mlflow import MlflowExport
from holdfast.plugins.exporters.wandb import WandbExport
from holdfast.spec.document import parse_duration
from holdfast.spec.eval_schema import EXPORTERS
from holdfast.spec.schema import Block, Seconds

DESTINATIONS = (*EXPORTERS, "local")
ONE_LINE = r"^[^\n\r]*$"
DEPLOYMENTS = ("none", "generic", "vllm", "vllm_ray", "sglang", "nim", "trtllm")
BASE_COMMAND = "<base command>"
"""stands for the derived command of the server in values that refer to `deployment.base_command`"""


@dataclass(frozen=True, eq=False)
class NoEffect:
    """A mark on a field: the key has no effect in some launches; `no_effect` knows in which."""

    why: str


@dataclass(frozen=True)
class DerivedCommand:
    """A mark on a field: only the derived commands of these types of server use the key."""

    types: tuple[str, ...]


@dataclass(frozen=True)
class ThroughExecution:
    """A mark on a field of a profile: the key is used only if this key of `execution` refers to it."""

    key: str


CLUSTER_ONLY = NoEffect("it is for a cluster, and this runs on this machine")
LOCAL_ONLY = NoEffect("it is for this machine; on a cluster all tasks are queued at once")
UNSERVED = NoEffect("deployment.type is `none`, so nothing is served")
NO_SERVER = NoEffect(UNSERVED.why)
NO_OTHERS = NoEffect("there are no auxiliary_deployments")
SERVED = NoEffect("the served model is the one evaluated")
ONE_WORKER = NoEffect("only further workers go there, and execution.workers is 1; exports run in the main job")
ONE_INSTANCE = NoEffect("multiple_instances is not set")
PLAIN_PROCESS = NoEffect("on this machine the server is a plain process without execution.container_engine")
NO_CONTAINER = NoEffect("no container is started")
NO_SERVER_CONTAINER = NoEffect(NO_CONTAINER.why)
NO_TASK_CONTAINER = NoEffect("the evaluation runs in no container, and sees the paths of the node")
NO_ENGINE = NoEffect("neither podman nor docker is started")
BUILT_WITHOUT_GPUS = NoEffect("build_include_gpus is not set")
DERIVED = DerivedCommand(("vllm", "vllm_ray", "sglang", "trtllm"))

EXPORTS_ITSELF = "Holdfast itself exports, in the job"
NO_OPTION = "`holdfast export` has no such option"
OTHER_TOOLS = "it is for other tools"
SENT_WITH_EVAL = "the folder of each eval file is sent"
SET_BY_EVAL = "the eval file says what is asked and how it is graded"
SPREAD_BY_HOLDFAST = "requests are spread over the instances by Holdfast itself"


class LauncherBlock(Block):
    """A block with keys of the launcher that are read, whatever their values, and have no effect."""

    ignored: ClassVar[dict[str, str]] = {}
    """each with the reason"""

    @classmethod
    def known_keys(cls) -> list[str]:
        """Return all keys that the block may have."""
        return [*cls.model_fields, *cls.ignored]

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if key not in cls.ignored} if isinstance(data, dict) else data


def walltime(value: Any) -> Any:
    """Normalize a time to `HH:MM:SS`, which every Slurm command reads alike."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return value
    seconds = walltime_seconds(value)
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def walltime_seconds(value: str | int) -> int:
    """Return the length of a time in seconds; ValueError if it is not one."""
    text = str(value).strip().lower()
    parts = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if parts is None:
        if not re.fullmatch(r"[\d.\s]+[hms][\d.\shmin]*s?", text):
            raise ValueError('a time must be written as "HH:MM:SS", "D-HH:MM:SS", a number of minutes, or 4h')
        seconds = int(parse_duration(text))
    elif parts[1] is not None:  # after days come hours
        days, hours, minutes, rest = (int(part or 0) for part in parts.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    else:
        numbers = [int(part) for part in parts.groups()[1:] if part is not None]
        if len(numbers) < 3:  # minutes, or minutes and seconds
            numbers = [0, *numbers, *([0] if len(numbers) == 1 else [])]
        seconds = numbers[0] * 3600 + numbers[1] * 60 + numbers[2]
    if seconds <= 0:
        raise ValueError("a time must be longer than 0")
    return seconds


Walltime = Annotated[str, BeforeValidator(walltime)]
"""a time as Slurm writes it: minutes, `MM:SS`, `HH:MM:SS`, `D-HH:MM:SS`; also `90m` and `4h`"""


MOUNT = re.compile(r"[^:\s]+(:[^:\s]+(:[\w,+-]+)?)?")


def _list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Mounts = Annotated[list[Annotated[str, Field(pattern=rf"^{MOUNT.pattern}$")]], BeforeValidator(_list)]
Lines = Annotated[list[str], BeforeValidator(_list)]


class ProfileBlock(LauncherBlock):
    """Keys of a profile, and of `run.env` in a configuration."""

    ignored: ClassVar = {
        "nproc_per_node": "nothing is started by torchrun; tasks of a node are ntasks_per_node",
        "run_command": "a job runs Holdfast",
        "packager": SENT_WITH_EVAL,
        "packager_include_pattern": SENT_WITH_EVAL,
        "runtime": "a job runs Holdfast in its own environment",
        "build_image": "images are imported by the cluster's own enroot",
        "build_cache_dir": "images are kept in containers below remote_job_dir",
    }
    executor: str | None = None
    """Where jobs run: on a `slurm` cluster, or on this machine (`local`)."""
    account: Annotated[str | None, CLUSTER_ONLY, ThroughExecution("account")] = None
    """As for `sbatch`."""
    partition: Annotated[str | None, CLUSTER_ONLY, ThroughExecution("partition")] = None
    """As for `sbatch`."""
    run_partition: Annotated[str | None, CLUSTER_ONLY] = None
    """Partition for `--run`, or for `--batch`. Default: `partition`."""
    batch_partition: Annotated[str | None, CLUSTER_ONLY] = None
    """Partition for `--run`, or for `--batch`. Default: `partition`."""
    nodes: Annotated[int | None, CLUSTER_ONLY, ThroughExecution("num_nodes")] = Field(default=None, ge=1)
    """As for `sbatch`."""
    ntasks_per_node: Annotated[int | None, CLUSTER_ONLY, ThroughExecution("ntasks_per_node")] = Field(
        default=None, ge=1
    )
    """As for `sbatch`."""
    gpus_per_node: Annotated[int | None, CLUSTER_ONLY, ThroughExecution("gpus_per_node")] = Field(default=None, ge=0)
    """As for `sbatch`."""
    cpus_per_task: Annotated[int | None, CLUSTER_ONLY] = Field(default=None, ge=1)
    """As for `sbatch`."""
    time: Annotated[Walltime | None, CLUSTER_ONLY, ThroughExecution("walltime")] = None
    """Time limit of a job, such as `04:00:00`, `1-12:00:00` or `4h`."""
    mem: Annotated[str | int | None, CLUSTER_ONLY] = None
    """As for `sbatch`."""
    exclusive: Annotated[bool | None, CLUSTER_ONLY] = None
    """Request whole nodes."""
    container_image: str | None = None
    """Image for the server: a Docker reference, or a `.sqsh` file."""
    container: str | None = None
    """Image for the server: a Docker reference, or a `.sqsh` file."""
    mounts: Annotated[Mounts | None, NO_CONTAINER] = None
    """Mounts for containers, each `source:target` or `source:target:ro`."""
    lustre_mount: Annotated[str | None, NO_CONTAINER] = Field(default=None, pattern=rf"^{MOUNT.pattern}$")
    """One more of them."""
    env_vars: dict[str, str | int | float | bool] | None = None
    """Environment variables for every part of the job."""
    startup_commands: Annotated[Lines | None, CLUSTER_ONLY] = None
    """Shell lines to run at the beginning of a job."""
    setup_lines: Annotated[Lines | None, CLUSTER_ONLY] = None
    """Shell lines to run at the beginning of a job."""

    tunnel: Annotated[Literal["ssh", "local"] | None, CLUSTER_ONLY] = None
    """`ssh` needs `host` and `remote_job_dir`; `local` submits from this machine."""
    host: Annotated[str | None, CLUSTER_ONLY, ThroughExecution("hostname")] = None
    """Login node, user and private key, as for ssh."""
    user: Annotated[str | None, CLUSTER_ONLY, ThroughExecution("username")] = None
    """Login node, user and private key, as for ssh."""
    identity: Annotated[str | None, CLUSTER_ONLY] = None
    """Login node, user and private key, as for ssh."""
    remote_job_dir: str | None = None
    """Folder on the cluster for jobs, runs and images."""
    python: str | None = None
    """Interpreter on the cluster that has Holdfast. Default: Holdfast is installed there."""

    build_partition: Annotated[str | None, CLUSTER_ONLY] = None
    """`partition` and `time` of jobs that import images."""
    build_time: Annotated[Walltime | None, CLUSTER_ONLY] = None
    """`partition` and `time` of jobs that import images."""
    build_include_gpus: Annotated[bool | None, CLUSTER_ONLY] = None
    """Request GPUs for these jobs."""
    build_gpus_per_node: Annotated[int | None, CLUSTER_ONLY, BUILT_WITHOUT_GPUS] = Field(default=None, ge=0)
    """GPUs per node for these jobs."""

    @model_validator(mode="after")
    def _one_image(self) -> ProfileBlock:
        if self.container and self.container_image and self.container != self.container_image:
            raise ValueError("container and container_image mean the same; give one of them")
        return self


class WandbBlock(Block):
    """`[wandb]`: the project on Weights & Biases."""

    project: str | None = None
    """Project on Weights & Biases."""
    entity: str | None = None
    """User or team on Weights & Biases."""
    base_url: str | None = None
    """Address of the W&B server, whose API key is passed. Default: the login's."""


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


class RunBlock(LauncherBlock):
    """`run:`, the values of the profile. Other tools write the rest."""

    ignored: ClassVar = dict.fromkeys(("model", "data", "mode", "profile", "cli", "recipe"), OTHER_TOOLS)
    env: ProfileBlock = ProfileBlock()
    """What the profile says; keys here are overridden by the profile."""
    wandb: WandbBlock = WandbBlock()
    """Project, entity and server, from `[wandb]` of `env.toml`."""


class MountsBlock(Block):
    """`execution.mounts`: host path to path in the container, for the server and for the evaluation."""

    deployment: Annotated[MountTable, NO_SERVER_CONTAINER] = Field(default_factory=dict)
    """Mounts for the server's container, as `source: target`."""
    evaluation: Annotated[MountTable, NO_TASK_CONTAINER] = Field(default_factory=dict)
    """Mounts for the containers of tasks."""
    auxiliary: Annotated[dict[str, MountTable], NO_OTHERS] = Field(default_factory=dict)
    """Mounts for the containers of auxiliary servers, by their names."""
    mount_home: Annotated[bool, NO_CONTAINER] = False
    """Mount the home directory into the containers."""


class DeploymentTasks(Block):
    """`execution.deployment`."""

    n_tasks: Annotated[int | None, UNSERVED] = Field(default=None, ge=1)
    """Processes to start a server with. Default: one per node."""


class AutoExportBlock(LauncherBlock):
    """`execution.auto_export`: destinations of finished runs."""

    ignored: ClassVar = dict.fromkeys(
        ("launcher_install_cmd", "partition", "export_image", "export_mounts"), EXPORTS_ITSELF
    )
    enabled: bool = True
    """Whether results are exported."""
    destinations: list[str] = Field(default_factory=list)
    """Formats of `holdfast export --to`, and `local`, which leaves results where they are."""


class ExecutionBlock(LauncherBlock):
    """`execution:`, for Slurm and for this machine."""

    ignored: ClassVar = {"proxy": SPREAD_BY_HOLDFAST}
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
    cpu_partition: Annotated[str | None, CLUSTER_ONLY, NO_SERVER, ONE_WORKER] = None
    """Partition for worker jobs if a server has the GPUs. The NeMo Evaluator launcher uses it for export jobs; here
    exports run in the main job."""
    output_dir: str | None = None
    """Folder for runs. Default: `evaluations` in `remote_job_dir`; with `local`, the usual runs directory."""
    num_nodes: Annotated[int, CLUSTER_ONLY] = Field(default=1, ge=1)
    """Nodes of a job, and Slurm tasks per node."""
    num_instances: Annotated[int, UNSERVED] = Field(default=1, ge=1)
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
    endpoint_readiness_timeout: Annotated[Seconds | None, NO_SERVER] = None
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
    auto_export: Annotated[AutoExportBlock, BeforeValidator(_auto_export)] = AutoExportBlock()
    """Destinations of finished runs, such as `[wandb]`: formats of `holdfast export --to`."""
    evaluation_gpu_visible: bool | str | None = None
    """GPUs that the evaluation sees: `true`, `false`, or a list such as `"0,1"`. Default: all GPUs of the job."""
    env_vars: dict[str, Any] | None = None
    """Older spelling of `env_vars` under `deployment`, `evaluation` and `export`."""
    mode: Annotated[Literal["sequential", "parallel"], LOCAL_ONLY] = "sequential"
    """Local only: run tasks one after another or at once."""
    container_engine: Annotated[Literal["podman", "docker"] | None, LOCAL_ONLY] = None
    """Local only: program that starts images. Default: servers are plain processes."""
    extra_docker_args: Annotated[str | None, LOCAL_ONLY, NO_ENGINE] = None
    """Local only: further options for `podman run` or `docker run`."""

    @property
    def margin(self) -> int:
        """How many seconds before its time limit a job stops cleanly: two minutes, less for short jobs."""
        return min(120, walltime_seconds(self.walltime) // 4)


class EndpointsBlock(Block):
    """Paths of the server."""

    chat: str | None = None
    """Path of chat completions."""
    completions: str | None = None
    """Path of completions."""
    health: str | None = None
    """Path that answers once the server is ready."""
    embedding: str | None = None
    """Path of embeddings."""
    ranking: str | None = None
    """Path of ranking."""


class DeploymentBlock(LauncherBlock):
    """`deployment:`, the server of the model."""

    ignored: ClassVar = {"haproxy_port": SPREAD_BY_HOLDFAST}
    type: str
    """Kind of server: `none`, `generic` (your own command), `vllm`, `vllm_ray` (on several nodes), `sglang`, `nim` or
    `trtllm`."""
    image: Annotated[str | None, PLAIN_PROCESS] = None
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
    """Default: all GPUs of its nodes; if their number is unknown, 8 if `defaults:` selects the group, else 1."""
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
    multiple_instances: bool | None = None
    """Older spelling of `execution.num_instances`: one server per node, or per `nodes_per_instance`."""
    nodes_per_instance: Annotated[int | None, ONE_INSTANCE] = Field(default=None, ge=1)
    """Older spelling: nodes of each server, with `multiple_instances`."""

    @model_validator(mode="before")
    @classmethod
    def _joined(cls, data: Any) -> Any:
        """`extra_args` may be a list."""
        if isinstance(data, dict) and isinstance(data.get("extra_args"), list):
            return {**data, "extra_args": " ".join(map(str, data["extra_args"]))}
        return data


class AuxiliaryBlock(DeploymentBlock):
    """One of `auxiliary_deployments`: a judge or a simulated user, served in addition to the model."""

    ignored: ClassVar = {
        **DeploymentBlock.ignored,
        **dict.fromkeys(("multiple_instances", "nodes_per_instance"), "num_instances says how many there are"),
    }
    num_nodes: int | None = Field(default=None, ge=1)
    """Nodes of its own, in addition to `execution.num_nodes`. Default: one per instance."""
    num_instances: int = Field(default=1, ge=1)
    """Number of servers, among which the nodes are divided."""
    n_tasks: int | None = Field(default=None, ge=1)
    """Processes to start it with. Default: one per node."""
    env_prefix: str | None = Field(default=None, pattern=r"^[A-Za-z_]\w*$")
    """Prefix of the variables that hold its URLs. Default: its name in upper case."""


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
    url: Annotated[str | None, SERVED] = Field(default=None, pattern=r"^https?://[^/\s]+")
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
    """`limits.turn_timeout` of the eval file. `limits.trial_timeout` is raised if it would be shorter."""
    top_p: float | None = Field(default=None, ge=0, le=1)
    """`target.params.top_p` of the eval file."""
    extra: dict[str, Any] | None = None
    """`num_fewshot` and `tokenizer` of a benchmark. No effect on eval files, which define what is asked."""


class TaskConfig(LauncherBlock):
    """`config` of nemo_evaluator_config."""

    ignored: ClassVar = dict.fromkeys(
        ("type", "output_dir", "supported_endpoint_types", "required_capabilities", "extra"), SET_BY_EVAL
    )
    params: Params = Params()
    """Values that override keys of the eval file."""


class EvaluatorConfig(LauncherBlock):
    """`nemo_evaluator_config`, for all tasks or for one."""

    ignored: ClassVar = {
        "metadata": SET_BY_EVAL,
        "env_vars": "variables stand in env_vars of the task, or of evaluation",
    }
    config: TaskConfig = TaskConfig()
    """Values that override keys of the eval file."""
    target: LaunchTargetBlock = LaunchTargetBlock()
    """Settings of the endpoint."""


class TaskBlock(LauncherBlock):
    """One of `evaluation.tasks`."""

    ignored: ClassVar = {"dataset_mount_path": f"{NO_TASK_CONTAINER.why}; write overrides: {{dataset.path: …}}"}
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


_DESTINATION = dict.fromkeys(
    (
        *("copy_logs", "copy_artifacts", "only_required", "log_metrics", "log_logs", "log_artifacts", "job_dirs"),
        *("log_mode", "run_id"),
    ),
    NO_OPTION,
)


class LaunchWandbExport(LauncherBlock, WandbExport):
    """`export.wandb`: the options of the export, and keys of the launcher."""

    ignored: ClassVar = _DESTINATION
    to: Literal["wandb"] = "wandb"


class LaunchMlflowExport(LauncherBlock, MlflowExport):
    """`export.mlflow`: the options of the export, and keys of the launcher."""

    ignored: ClassVar = _DESTINATION | dict.fromkeys(
        ("log_config_params", "log_config_params_max_depth", "skip_existing", "exclude_patterns"), NO_OPTION
    )
    to: Literal["mlflow"] = "mlflow"


class LaunchExportBlock(LauncherBlock):
    """`export:`."""

    ignored: ClassVar = {
        **dict.fromkeys(_DESTINATION, "an export takes the whole run"),
        "local": "runs are files already, in execution.output_dir; --export csv writes tables",
    }
    wandb: LaunchWandbExport | None = None
    mlflow: LaunchMlflowExport | None = None
    gsheets: dict[str, Any] | None = None
    env_vars: dict[str, Any] | None = None


class LaunchBlock(LauncherBlock):
    """The top of a configuration; its sections are read by their own models."""

    ignored: ClassVar = dict.fromkeys(("user_config_path", "dry_run", "output_dir", "task_filters"), OTHER_TOOLS)
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
