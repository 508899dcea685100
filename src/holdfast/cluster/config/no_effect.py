"""Find keys that are read and have no effect in this launch, each with the reason: nothing is ignored silently.

Keys that never have an effect, or not with this executor, are marked in the schemas (`marks`). The functions here know
what depends on other keys. Values of built-in groups do not count, nor do keys that others refer to, as in
`${deployment.port}`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.cluster.config.marks import NO_CONTAINER, DerivedCommand, NoEffect, ThroughExecution
from holdfast.cluster.config.profiles import ProfileBlock
from holdfast.cluster.config.provenance import COMMAND_LINE, DEFAULT
from holdfast.cluster.config.schema import (
    AuxiliaryBlock,
    DeploymentBlock,
    EvaluatorConfig,
    ExecutionBlock,
    LaunchBlock,
    RunBlock,
    TaskBlock,
)
from holdfast.cluster.config.servers import api_root
from holdfast.spec.document import format_location
from holdfast.spec.exports import export_schema
from holdfast.spec.schema import Block

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.cluster.config.executor import ExecutorRules
    from holdfast.cluster.config.provenance import Tree
    from holdfast.spec.document import Location

Rule = tuple[str, str]
"""a key as users write it, and why it has no effect"""


def keys_without_effect(tree: Tree, referenced: frozenset[str], executor: ExecutorRules) -> Iterator[str]:
    """Yield a line for each reason, with the keys and the place of the first one."""
    rules = (
        *_marked_keys(tree, executor),
        *_executor_rules(tree, executor),
        *_server_rules(tree),
        *_image_rules(tree, referenced, executor),
        *_task_rules(tree),
        *_export_rules(tree),
    )
    reasons: dict[str, list[Location]] = {}
    for key, why in rules:
        location: Location = tuple(int(part) if part.isdigit() else part for part in key.split("."))
        is_default = tree.origin(location).startswith(DEFAULT)
        if tree.get(*location) not in (None, {}, []) and not is_default and key not in referenced:
            reasons.setdefault(why, []).append(location)
    for why, locations in reasons.items():
        names = ", ".join(dict.fromkeys(map(format_location, locations)))
        yield f"{tree.origin(locations[0])}: {names}: no effect here, because {why}"


def _marked_keys(tree: Tree, executor: ExecutorRules) -> Iterator[Rule]:
    """Yield keys by the marks of their fields."""
    models: list[tuple[str, type[Block]]] = [
        ("run", RunBlock),
        ("", LaunchBlock),
        ("execution", ExecutionBlock),
        ("deployment", DeploymentBlock),
    ]
    for place in ("evaluation", *(f"evaluation.tasks.{number}" for number in range(_task_count(tree)))):
        models += [(f"{place}.{name}", EvaluatorConfig) for name in ("nemo_evaluator_config", "config")]
    models += [(f"evaluation.tasks.{number}", TaskBlock) for number in range(_task_count(tree))]
    for place, model in models:
        for key, mark in _marks(model, place):
            if isinstance(mark, NoEffect) and mark.where in ("everywhere", "local" if executor.is_local else "cluster"):
                yield key, mark.why


def _marks(model: type[Block], place: str) -> Iterator[tuple[str, object]]:
    """Yield the marks of a model's fields, and of the models inside it."""
    for name, field in model.model_fields.items():
        key = f"{place}.{name}".lstrip(".")
        yield from ((key, mark) for mark in field.metadata)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Block):
            yield from _marks(field.annotation, key)


def _task_count(tree: Tree) -> int:
    tasks = tree.get("evaluation", "tasks")
    return len(tasks) if isinstance(tasks, list) else 0


def _executor_rules(tree: Tree, executor: ExecutorRules) -> Iterator[Rule]:
    if executor.is_local:
        return
    if not tree.get("run", "env", "build_include_gpus"):
        yield "run.env.build_gpus_per_node", "build_include_gpus is not set"
    for key, mark in _marks(ProfileBlock, "run.env"):
        if isinstance(mark, ThroughExecution):
            value, origin = tree.get("execution", mark.key), tree.origin(("execution", mark.key))
            if str(tree.get(*key.split("."))) != str(value) and origin != COMMAND_LINE:
                yield key, f"execution.{mark.key} is {value} ({origin})"


def _auxiliary(tree: Tree) -> dict[str, Any]:
    """Return the servers beside the model's."""
    section = tree.get("auxiliary_deployments")
    blocks = section.items() if isinstance(section, dict) else ()
    return {name: block for name, block in blocks if isinstance(block, dict) and block.get("type") != "none"}


def _server_rules(tree: Tree) -> Iterator[Rule]:
    kind, auxiliary = tree.get("deployment", "type"), _auxiliary(tree)
    for name, block in auxiliary.items():
        place = f"auxiliary_deployments.{name}"
        yield from _command_rules(place, block, AuxiliaryBlock)
        yield f"{place}.multiple_instances", "num_instances says how many there are"
        yield f"{place}.nodes_per_instance", "num_instances says how many there are"
        yield from (
            (f"{place}.{key}", mark.why)
            for key, field in AuxiliaryBlock.model_fields.items()
            for mark in field.metadata
            if isinstance(mark, NoEffect)
        )
    if not auxiliary:
        yield "execution.mounts.auxiliary", "nothing is served beside the model"
    if not tree.get("deployment", "multiple_instances"):
        yield "deployment.nodes_per_instance", "multiple_instances is not set"
    if kind == "none":
        why = "nothing is served: deployment.type is none"
        yield from ((f"deployment.{name}", why) for name in DeploymentBlock.model_fields if name != "type")
        yield from ((f"execution.{name}", why) for name in ("num_instances", "deployment.n_tasks"))
        if not auxiliary:
            yield from ((f"execution.{name}", why) for name in ("cpu_partition", "endpoint_readiness_timeout"))
        yield "execution.env_vars.deployment", why
        return
    why = "the served model is the one evaluated"
    yield "target.api_endpoint.url", why
    yield "target.api_endpoint.model_id", why
    if tree.get("execution", "workers") in (None, 1):
        why = "only further workers go there, and execution.workers is 1; exports run in the main job"
        yield "execution.cpu_partition", why
    yield from _command_rules("deployment", tree.get("deployment"), DeploymentBlock)
    chat, completions = (tree.get("deployment", "endpoints", name) for name in ("chat", "completions"))
    if chat and completions and api_root(chat) != api_root(completions):
        yield "deployment.endpoints.completions", f"both endpoints use the base path of chat: {chat}"


def _command_rules(place: str, block: dict[str, Any], model: type[DeploymentBlock]) -> Iterator[Rule]:
    """Yield keys that the command of a server does not use."""
    kind, command = str(block.get("type")), block.get("command") or block.get("base_command")
    why = "the command is given as a whole" if command else f"{kind} is started without it"
    for name, field in model.model_fields.items():
        for mark in field.metadata:
            is_whole = command is not None and not (name == "base_command" and block.get("command") is None)
            if isinstance(mark, DerivedCommand) and (is_whole or kind not in mark.types):
                yield f"{place}.{name}", why
    if block.get("checkpoint_path") is not None:
        yield f"{place}.hf_model_handle", "checkpoint_path is given, and that is the model"


def _image_rules(tree: Tree, referenced: frozenset[str], executor: ExecutorRules) -> Iterator[Rule]:
    """Yield keys of containers that are not started."""
    serves = tree.get("deployment", "type") != "none"
    engine = tree.get("execution", "container_engine") if executor.is_local else None
    starts_containers = executor.starts_containers or engine is not None
    if serves and not starts_containers:
        yield "deployment.image", "on this machine the server is a plain process without execution.container_engine"
    image = tree.get("deployment", "image") if serves and starts_containers else None
    others = [block.get("image") for block in _auxiliary(tree).values()] if starts_containers else []
    tasks = [tree.get("evaluation", "tasks", number, "container") for number in range(_task_count(tree)) if engine]
    images = [name for name in (image, *others, *tasks) if name]
    why = "no container is started"
    if not any(tasks):
        yield "execution.mounts.evaluation", NO_CONTAINER.why
    if image is None:
        yield "execution.mounts.deployment", why
    if not images or engine is None:
        yield "execution.extra_docker_args", "neither podman nor docker is started"
    if not images:
        yield "execution.mounts.mount_home", why
        yield "run.env.mounts", why
        yield "run.env.lustre_mount", why
    if "run.env.container" not in referenced and tree.get("run", "env", "container_image") not in images:
        instead = f"deployment.image is {image}" if image else "no container is started from it"
        yield "run.env.container_image", instead if images else why


def _task_rules(tree: Tree) -> Iterator[Rule]:
    numbers = [f"evaluation.tasks.{number}" for number in range(_task_count(tree))]
    for place in numbers:
        yield f"{place}.dataset_mount_path", f"{NO_CONTAINER.why}; write overrides: {{dataset.path: …}}"
    if tree.get("deployment", "type") != "none":
        for place in ("evaluation", *numbers):
            for name in ("nemo_evaluator_config", "config"):
                key = f"{place}.{name}.target.api_endpoint.url"
                yield key, "the served model is the one evaluated"


def _export_rules(tree: Tree) -> Iterator[Rule]:
    exports = tree.get("export")
    automatic = tree.get("execution", "auto_export")
    enabled = isinstance(automatic, dict) and automatic.get("enabled", True)
    listed: Any = automatic.get("destinations") if isinstance(automatic, dict) and enabled else automatic
    destinations = listed if isinstance(listed, list) else []
    for name, block in exports.items() if isinstance(exports, dict) else ():
        if name in ("wandb", "mlflow") and isinstance(block, dict):
            if name not in destinations:
                yield f"export.{name}", f"nothing goes there by itself: write execution.auto_export: [{name}]"
                continue
            why = f"`holdfast export --to {name}` has no such option"
            yield from ((f"export.{name}.{key}", why) for key in block if key not in export_schema(name).model_fields)
        elif name == "local":
            yield "export.local", "runs are files already, in execution.output_dir; --export csv writes tables"
        elif name not in ("env_vars", "gsheets"):
            yield f"export.{name}", "an export takes the whole run"
