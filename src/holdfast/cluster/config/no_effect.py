"""Keys that are read and have no effect in this launch, each with the reason: nothing is ignored in silence.

What somebody wrote counts, not what a group that comes with Holdfast says; nor what another key refers to, as in
`${deployment.port}`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.cluster.config.provenance import COMMAND_LINE, DEFAULT
from holdfast.cluster.config.schema import DeploymentBlock, EvaluatorConfig, TaskConfig
from holdfast.cluster.config.servers import api_root
from holdfast.spec.document import dotted
from holdfast.spec.load_exports import export_schema

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.cluster.config.provenance import Tree
    from holdfast.spec.document import Location

Rule = tuple[str, str]
"""a key as users write it, and why it has no effect"""

_NO_CONTAINER = "the evaluation runs in no container, and sees the paths of the node"
_OTHER_TOOLS = "it is for other tools"
_SPREAD_HERE = "requests are spread over the instances by Holdfast itself"
ALWAYS: tuple[Rule, ...] = (
    ("run.env.nproc_per_node", "nothing is started by torchrun; tasks of a node are ntasks_per_node"),
    ("run.env.run_command", "a job runs Holdfast"),
    ("run.env.packager", "the folder of each eval file is sent"),
    ("run.env.packager_include_pattern", "the folder of each eval file is sent"),
    ("run.env.runtime", "a job runs Holdfast in its own environment"),
    ("run.env.build_image", "images are imported by the cluster's own enroot"),
    ("run.env.build_cache_dir", "images are kept in containers below remote_job_dir"),
    *((f"run.{name}", _OTHER_TOOLS) for name in ("model", "data", "mode", "profile", "cli", "recipe")),
    *((name, _OTHER_TOOLS) for name in ("user_config_path", "dry_run", "output_dir", "task_filters")),
    ("execution.mounts.evaluation", _NO_CONTAINER),
    ("execution.proxy", _SPREAD_HERE),
    ("deployment.haproxy_port", _SPREAD_HERE),
    *(
        (f"execution.auto_export.{name}", "Holdfast exports by itself, where the job runs")
        for name in ("launcher_install_cmd", "export_image", "export_mounts")
    ),
    ("execution.extra_docker_args", "no Docker is started"),
    ("deployment.endpoints.embedding", "only chat and completions are asked"),
    ("deployment.endpoints.ranking", "only chat and completions are asked"),
)
SLURM_ONLY = (
    *("hostname", "username", "account", "partition", "cpu_partition", "walltime", "num_nodes", "ntasks_per_node"),
    *("gres", "gpus_per_node", "subproject", "sbatch_comment", "sbatch_extra_flags"),
)
"""keys of execution that mean nothing on this machine"""
PROFILE_SLURM_ONLY = (
    *("account", "partition", "run_partition", "batch_partition", "nodes", "ntasks_per_node", "gpus_per_node", "time"),
    *("cpus_per_task", "mem", "exclusive", "tunnel", "host", "user", "identity"),
    *("build_partition", "build_time", "build_include_gpus", "build_gpus_per_node"),
    *("setup_lines", "startup_commands"),
)
BY_REFERENCE = {
    "account": "account",
    "partition": "partition",
    "time": "walltime",
    "nodes": "num_nodes",
    "ntasks_per_node": "ntasks_per_node",
    "gpus_per_node": "gpus_per_node",
    "host": "hostname",
    "user": "username",
}
"""keys of a profile that take effect only where execution refers to them"""
SPREAD = (
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "gpu_memory_utilization"),
    *("distributed_executor_backend", "hf_model_handle", "base_command", "extra_args"),
)
"""keys of a deployment that only a derived command is made of"""
TAKEN = {
    "vllm": frozenset(SPREAD),
    "sglang": frozenset(SPREAD) - {"distributed_executor_backend"},
    "trtllm": frozenset(SPREAD) - {"distributed_executor_backend", "data_parallel_size"},
    "nim": frozenset({"base_command", "extra_args"}),
}


def unused(tree: Tree, used: frozenset[str]) -> Iterator[str]:
    """What to say: one line for each reason, with the place of the first key."""
    reasons: dict[str, list[Location]] = {}
    for location, why in _Looking(tree, used).found():
        reasons.setdefault(why, []).append(location)
    for why, places in reasons.items():
        names = ", ".join(dict.fromkeys(dotted(place) for place in places))
        yield f"{tree.origin(places[0])}: {names}: no effect here, because {why}"


@dataclass(frozen=True)
class _Looking:
    tree: Tree
    used: frozenset[str]

    def found(self) -> Iterator[tuple[Location, str]]:
        for key, why in self.rules():
            location: Location = tuple(int(part) if part.isdigit() else part for part in key.split("."))
            value = self.tree.get(*location)
            by_default = self.tree.origin(location).startswith(DEFAULT)
            if value not in (None, {}, []) and not by_default and key not in self.used:
                yield location, why

    def rules(self) -> Iterator[Rule]:
        yield from ALWAYS
        yield from self.of_the_place()
        yield from self.of_the_server()
        yield from self.of_tasks()
        yield from self.of_exports()

    def of_the_place(self) -> Iterator[Rule]:
        get = self.tree.get
        if get("execution", "type") == "local":
            why = "it is for Slurm, and this runs on this machine"
            yield from ((f"execution.{name}", why) for name in SLURM_ONLY)
            yield from ((f"run.env.{name}", why) for name in PROFILE_SLURM_ONLY)
            return
        yield "execution.mode", "it is for this machine; on a cluster all tasks are queued at once"
        if not get("run", "env", "build_include_gpus"):
            yield "run.env.build_gpus_per_node", "build_include_gpus is not set"
        for name, own in BY_REFERENCE.items():
            given, taken = get("run", "env", name), get("execution", own)
            place = self.tree.origin(("execution", own))
            if str(given) != str(taken) and place != COMMAND_LINE:
                yield f"run.env.{name}", f"execution.{own} is {taken} ({place})"

    def of_the_server(self) -> Iterator[Rule]:
        get, kind = self.tree.get, self.tree.get("deployment", "type")
        named = (get("auxiliary_deployments") or {}).items()
        beside = [block for _, block in named if isinstance(block, dict) and block.get("type") != "none"]
        for name, block in named:
            if block in beside:
                yield from self.of_command(f"auxiliary_deployments.{name}", block)
                said = "num_instances says how many there are"
                yield f"auxiliary_deployments.{name}.multiple_instances", said
                yield f"auxiliary_deployments.{name}.nodes_per_instance", said
                yield f"auxiliary_deployments.{name}.haproxy_port", _SPREAD_HERE
        if not beside:
            yield "execution.mounts.auxiliary", "nothing is served beside the model"
        if not get("deployment", "multiple_instances"):
            yield "deployment.nodes_per_instance", "multiple_instances is not set"
        if kind == "none":
            why = "nothing is served: deployment.type is none"
            yield from ((f"deployment.{name}", why) for name in DeploymentBlock.model_fields if name != "type")
            yield from ((f"execution.{name}", why) for name in ("num_instances", "deployment.n_tasks"))
            if not beside:
                yield from ((f"execution.{name}", why) for name in ("cpu_partition", "endpoint_readiness_timeout"))
            yield "execution.env_vars.deployment", why
        else:
            why = "the model that is measured is the one that is served"
            yield "target.api_endpoint.url", why
            yield "target.api_endpoint.model_id", why
            if get("execution", "workers") in (None, 1):
                yield "execution.cpu_partition", "only further workers go there: execution.workers is 1"
            yield from self.of_command("deployment", get("deployment"))
            chat, completions = (get("deployment", "endpoints", name) for name in ("chat", "completions"))
            if chat and completions and api_root(chat) != api_root(completions):
                yield "deployment.endpoints.completions", f"both are asked below one path, that of chat: {chat}"
        image = get("deployment", "image")
        if get("execution", "type") == "local" and kind != "none":
            yield "deployment.image", "on this machine the server is a plain process"
            image = None
        elsewhere = [block.get("image") for block in beside if get("execution", "type") != "local"]
        images = [name for name in (None if kind == "none" else image, *elsewhere) if name]
        if kind == "none" or image is None:
            why = "no container is started"
            yield "execution.mounts.deployment", why
            if not images:
                yield "execution.mounts.mount_home", why
                yield from ((f"run.env.{name}", why) for name in ("mounts", "lustre_mount"))
        if "run.env.container" not in self.used and get("run", "env", "container_image") not in images:
            said = f"deployment.image is {image}" if image in images else "no container is started from it"
            yield "run.env.container_image", said if images else "no container is started"

    def of_command(self, place: str, block: dict[str, Any]) -> Iterator[Rule]:
        kind, command = block.get("type"), block.get("command")
        taken = frozenset() if command is not None else TAKEN.get(str(kind), frozenset())
        own = "the command is given as a whole" if command else f"{kind} is started without it"
        yield from ((f"{place}.{name}", own) for name in SPREAD if name not in taken)
        if block.get("checkpoint_path") is not None:
            yield f"{place}.hf_model_handle", "checkpoint_path is given, and that is the model"

    def of_tasks(self) -> Iterator[Rule]:
        listed = self.tree.get("evaluation", "tasks")
        for number in range(len(listed) if isinstance(listed, list) else 0):
            for name in ("dataset_dir", "dataset_mount_path"):
                said = f"{_NO_CONTAINER}; write overrides: {{dataset.path: …}}"
                yield f"evaluation.tasks.{number}.{name}", said
            yield from self.of_evaluator(f"evaluation.tasks.{number}")
        yield from self.of_evaluator("evaluation")

    def of_evaluator(self, place: str) -> Iterator[Rule]:
        why = "the eval file says what is asked and how it is graded"
        for name in ("nemo_evaluator_config", "config"):
            yield from ((f"{place}.{name}.{key}", why) for key in EvaluatorConfig.model_fields if key == "metadata")
            yield from ((f"{place}.{name}.config.{key}", why) for key in TaskConfig.model_fields if key != "params")
            if self.tree.get("deployment", "type") != "none":
                yield f"{place}.{name}.target.api_endpoint.url", "the model that is measured is the one that is served"

    def of_exports(self) -> Iterator[Rule]:
        exports = self.tree.get("export")
        automatic = self.tree.get("execution", "auto_export")
        enabled = isinstance(automatic, dict) and automatic.get("enabled", True)
        listed: Any = automatic.get("destinations") if isinstance(automatic, dict) and enabled else automatic
        going = listed if isinstance(listed, list) else []
        for name, block in exports.items() if isinstance(exports, dict) else ():
            if name in ("wandb", "mlflow") and isinstance(block, dict):
                if name not in going:
                    yield f"export.{name}", f"nothing goes there by itself: write execution.auto_export: [{name}]"
                    continue
                known = export_schema(name).model_fields
                why = f"`holdfast export --to {name}` has no such option"
                yield from ((f"export.{name}.{key}", why) for key in block if key not in known)
            elif name == "local":
                yield "export.local", "runs are files already, in execution.output_dir; --export csv writes tables"
            elif name not in ("env_vars", "gsheets"):
                yield f"export.{name}", "an export takes the whole run"
