"""Find keys that are read and have no effect in this launch, each with the reason: nothing is ignored silently.

The schemas list keys that never have an effect, and mark keys that have no effect in some launches. The functions here
add reasons that name other values. Values of built-in groups do not count, nor do keys that others refer to, as in
`${deployment.port}`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from holdfast.apps.cluster.config import schema
from holdfast.apps.cluster.config.schema import (
    AuxiliaryBlock,
    DeploymentBlock,
    DerivedCommand,
    EvaluatorConfig,
    ExecutionBlock,
    LaunchBlock,
    LauncherBlock,
    LaunchExportBlock,
    LaunchTargetBlock,
    NoEffect,
    ProfileBlock,
    RunBlock,
    TaskBlock,
    ThroughExecution,
)
from holdfast.apps.cluster.config.servers import api_root
from holdfast.apps.cluster.config.tree import COMMAND_LINE, DEFAULT
from holdfast.spec.document import format_location
from holdfast.spec.schema import Block

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.apps.cluster.config.executor import ExecutorRules
    from holdfast.apps.cluster.config.tree import Tree
    from holdfast.spec.document import Location

Rule = tuple[str, str]
"""a key as users write it, and why it has no effect"""


def keys_without_effect(tree: Tree, referenced: frozenset[str], executor: ExecutorRules) -> Iterator[str]:
    """Yield a line for each reason, with the keys and the place of the first one."""
    server, images = _images(tree, executor)
    marks = {mark for mark, holds in _conditions(tree, executor, server, images).items() if holds}
    rules = (
        *_server_rules(tree),
        *_profile_rules(tree, referenced, executor, server, images),
        *_export_rules(tree),
        *_block_rules(tree, marks),
    )
    reasons: dict[str, list[Location]] = {}
    reported: set[Location] = set()
    for key, why in rules:
        location: Location = tuple(int(part) if part.isdigit() else part for part in key.split("."))
        if tree.get(*location) in (None, {}, []) or tree.origin(location).startswith(DEFAULT) or key in referenced:
            continue
        if not any(location[:depth] in reported for depth in range(1, len(location) + 1)):  # the first reason counts
            reported.add(location)
            reasons.setdefault(why, []).append(location)
    for why, locations in reasons.items():
        names = ", ".join(map(format_location, locations))
        yield f"{tree.origin(locations[0])}: {names}: no effect here, because {why}"


def _images(tree: Tree, executor: ExecutorRules) -> tuple[str | None, list[str]]:
    """Return the image of the model server, and all images that are started; without an image, plain processes."""
    engine = _engine(tree, executor)
    starts_containers = executor.starts_containers or engine is not None
    server = tree.get("deployment", "image") if _serves(tree) and starts_containers else None
    others = [block.get("image") for block in _auxiliary(tree).values()] if starts_containers else []
    tasks = [tree.get("evaluation", "tasks", number, "container") for number in range(_task_count(tree)) if engine]
    return server, [image for image in (server, *others, *tasks) if image]


def _conditions(tree: Tree, executor: ExecutorRules, server: str | None, images: list[str]) -> dict[NoEffect, bool]:
    """Return which marks hold: the marked keys have no effect in this launch."""
    serves, serves_others, engine = _serves(tree), bool(_auxiliary(tree)), _engine(tree, executor)
    containers = [tree.get("evaluation", "tasks", number, "container") for number in range(_task_count(tree))]
    return {
        schema.CLUSTER_ONLY: executor.is_local,
        schema.LOCAL_ONLY: not executor.is_local,
        schema.UNSERVED: not serves,
        schema.NO_SERVER: not (serves or serves_others),
        schema.NO_OTHERS: not serves_others,
        schema.SERVED: serves,
        schema.ONE_WORKER: serves and tree.get("execution", "workers") in (None, 1),
        schema.ONE_INSTANCE: not tree.get("deployment", "multiple_instances"),
        schema.PLAIN_PROCESS: not (executor.starts_containers or engine is not None),
        schema.NO_CONTAINER: not images,
        schema.NO_SERVER_CONTAINER: server is None,
        schema.NO_TASK_CONTAINER: engine is None or not any(containers),
        schema.NO_ENGINE: engine is None or not images,
        schema.BUILT_WITHOUT_GPUS: not tree.get("run", "env", "build_include_gpus"),
    }


def _serves(tree: Tree) -> bool:
    return bool(tree.get("deployment", "type") != "none")


def _engine(tree: Tree, executor: ExecutorRules) -> Any:
    return tree.get("execution", "container_engine") if executor.is_local else None


def _auxiliary(tree: Tree) -> dict[str, Any]:
    """Return the auxiliary servers."""
    section = tree.get("auxiliary_deployments")
    blocks = section.items() if isinstance(section, dict) else ()
    return {name: block for name, block in blocks if isinstance(block, dict) and block.get("type") != "none"}


def _task_count(tree: Tree) -> int:
    tasks = tree.get("evaluation", "tasks")
    return len(tasks) if isinstance(tasks, list) else 0


def _block_rules(tree: Tree, marks: set[NoEffect]) -> Iterator[Rule]:
    """Yield keys that the schemas list or mark."""
    tasks = [f"evaluation.tasks.{number}" for number in range(_task_count(tree))]
    models: list[tuple[str, type[Block]]] = [
        ("run", RunBlock),
        ("", LaunchBlock),
        ("execution", ExecutionBlock),
        ("deployment", DeploymentBlock),
        *((f"auxiliary_deployments.{name}", AuxiliaryBlock) for name in _auxiliary(tree)),
        ("target", LaunchTargetBlock),
        *((f"{place}.{name}", EvaluatorConfig) for place in ("evaluation", *tasks) for name in _SETTINGS),
        *((place, TaskBlock) for place in tasks),
        ("export", LaunchExportBlock),
    ]
    for place, model in models:
        for key, mark in _marks(model, place):
            if isinstance(mark, str):
                yield key, mark
            elif isinstance(mark, NoEffect) and mark in marks:
                yield key, mark.why


_SETTINGS = ("nemo_evaluator_config", "config")


def _marks(model: type[Block], place: str) -> Iterator[tuple[str, object]]:
    """Yield the marks of a model's fields and of the models inside it, and the reasons of ignored keys."""
    for name, why in model.ignored.items() if issubclass(model, LauncherBlock) else ():
        yield f"{place}.{name}".lstrip("."), why
    for name, field in model.model_fields.items():
        key = f"{place}.{name}".lstrip(".")
        yield from ((key, mark) for mark in field.metadata)
        for kind in get_args(field.annotation) or (field.annotation,):
            if isinstance(kind, type) and issubclass(kind, Block):
                yield from _marks(kind, key)


def _server_rules(tree: Tree) -> Iterator[Rule]:
    """Yield keys of servers that are not started, or that their commands do not use."""
    for name, block in _auxiliary(tree).items():
        yield from _command_rules(f"auxiliary_deployments.{name}", block, AuxiliaryBlock)
    if not _serves(tree):
        yield from (
            (f"deployment.{name}", schema.UNSERVED.why) for name in DeploymentBlock.known_keys() if name != "type"
        )
        yield "execution.env_vars.deployment", schema.UNSERVED.why
        return
    yield "target.api_endpoint.model_id", schema.SERVED.why
    yield from _command_rules("deployment", tree.get("deployment"), DeploymentBlock)
    yield from ((f"deployment.endpoints.{name}", "only chat and completions are asked") for name in _UNUSED_ENDPOINTS)
    chat, completions = (tree.get("deployment", "endpoints", name) for name in ("chat", "completions"))
    if chat and completions and api_root(chat) != api_root(completions):
        yield "deployment.endpoints.completions", f"both endpoints use the base path of chat: {chat}"


_UNUSED_ENDPOINTS = ("embedding", "ranking")


def _command_rules(place: str, block: dict[str, Any], model: type[DeploymentBlock]) -> Iterator[Rule]:
    """Yield keys that the command of a server does not use."""
    kind, command = str(block.get("type")), block.get("command") or block.get("base_command")
    why = "the command is given as a whole" if command else f"{kind} is started without it"
    for key, mark in _marks(model, place):
        is_whole = command is not None and not (key == f"{place}.base_command" and block.get("command") is None)
        if isinstance(mark, DerivedCommand) and (is_whole or kind not in mark.types):
            yield key, why
    if block.get("checkpoint_path") is not None:
        yield f"{place}.hf_model_handle", "checkpoint_path is given, and that is the model"


def _profile_rules(
    tree: Tree, referenced: frozenset[str], executor: ExecutorRules, server: str | None, images: list[str]
) -> Iterator[Rule]:
    """Yield keys of the profile that another value replaces."""
    for key, mark in _marks(ProfileBlock, "run.env") if not executor.is_local else ():
        if isinstance(mark, ThroughExecution):
            value, origin = tree.get("execution", mark.key), tree.origin(("execution", mark.key))
            if str(tree.get(*key.split("."))) != str(value) and origin != COMMAND_LINE:
                yield key, f"execution.{mark.key} is {value} ({origin})"
    if "run.env.container" not in referenced and tree.get("run", "env", "container_image") not in images:
        why = f"deployment.image is {images[0]}" if server is not None else "no container is started from it"
        yield "run.env.container_image", why if images else schema.NO_CONTAINER.why


def _export_rules(tree: Tree) -> Iterator[Rule]:
    """Yield settings of destinations to which nothing goes."""
    automatic = tree.get("execution", "auto_export")
    enabled = isinstance(automatic, dict) and automatic.get("enabled", True)
    listed: Any = automatic.get("destinations") if isinstance(automatic, dict) and enabled else automatic
    for name in ("wandb", "mlflow"):
        if name not in (listed if isinstance(listed, list) else []):
            yield f"export.{name}", f"nothing goes there by itself: write execution.auto_export: [{name}]"
