"""Find keys that are read and have no effect in this launch, each with the reason: nothing is ignored silently.

The schemas list keys that never have an effect, and mark keys that have no effect in some launches. The functions here
add reasons that name other values. Values of built-in groups do not count, nor do keys that others refer to, as in
`${deployment.port}`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from holdfast.apps.cluster.config.schema import (
    NO_CONTAINER,
    SERVED,
    UNSERVED,
    AuxiliaryBlock,
    DeploymentBlock,
    DerivedCommand,
    EvaluatorConfig,
    ExecutionBlock,
    Facts,
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
    facts, images = _survey(tree, executor)
    rules = (
        *_server_rules(tree, facts),
        *_profile_rules(tree, referenced, facts, images),
        *_export_rules(tree),
        *_block_rules(tree, facts),
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


def _survey(tree: Tree, executor: ExecutorRules) -> tuple[Facts, list[str]]:
    """Return the facts of a launch, and the images that are started, the model server's first."""
    serves = tree.get("deployment", "type") != "none"
    engine = tree.get("execution", "container_engine") if executor.is_local else None
    starts_containers = executor.starts_containers or engine is not None
    server = tree.get("deployment", "image") if serves and starts_containers else None
    others = [block.get("image") for block in _auxiliary(tree).values()] if starts_containers else []
    tasks = [tree.get("evaluation", "tasks", number, "container") for number in range(_task_count(tree)) if engine]
    images = [image for image in (server, *others, *tasks) if image]
    facts = Facts(
        is_local=executor.is_local,
        serves=serves,
        serves_others=bool(_auxiliary(tree)),
        several_workers=tree.get("execution", "workers") not in (None, 1),
        multiple_instances=bool(tree.get("deployment", "multiple_instances")),
        starts_containers=starts_containers,
        has_engine=engine is not None,
        server_image=server is not None,
        task_image=any(tasks),
        any_image=bool(images),
        build_includes_gpus=bool(tree.get("run", "env", "build_include_gpus")),
    )
    return facts, images


def _auxiliary(tree: Tree) -> dict[str, Any]:
    """Return the auxiliary servers."""
    section = tree.get("auxiliary_deployments")
    blocks = section.items() if isinstance(section, dict) else ()
    return {name: block for name, block in blocks if isinstance(block, dict) and block.get("type") != "none"}


def _task_count(tree: Tree) -> int:
    tasks = tree.get("evaluation", "tasks")
    return len(tasks) if isinstance(tasks, list) else 0


def _block_rules(tree: Tree, facts: Facts) -> Iterator[Rule]:
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
            elif isinstance(mark, NoEffect) and mark.when(facts):
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


def _server_rules(tree: Tree, facts: Facts) -> Iterator[Rule]:
    """Yield keys of servers that are not started, or that their commands do not use."""
    for name, block in _auxiliary(tree).items():
        yield from _command_rules(f"auxiliary_deployments.{name}", block, AuxiliaryBlock)
    if not facts.serves:
        yield from ((f"deployment.{name}", UNSERVED.why) for name in DeploymentBlock.known_keys() if name != "type")
        yield "execution.env_vars.deployment", UNSERVED.why
        return
    yield "target.api_endpoint.model_id", SERVED.why
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


def _profile_rules(tree: Tree, referenced: frozenset[str], facts: Facts, images: list[str]) -> Iterator[Rule]:
    """Yield keys of the profile that another value replaces."""
    for key, mark in _marks(ProfileBlock, "run.env") if not facts.is_local else ():
        if isinstance(mark, ThroughExecution):
            value, origin = tree.get("execution", mark.key), tree.origin(("execution", mark.key))
            if str(tree.get(*key.split("."))) != str(value) and origin != COMMAND_LINE:
                yield key, f"execution.{mark.key} is {value} ({origin})"
    if "run.env.container" not in referenced and tree.get("run", "env", "container_image") not in images:
        why = f"deployment.image is {images[0]}" if facts.server_image else "no container is started from it"
        yield "run.env.container_image", why if images else NO_CONTAINER.why


def _export_rules(tree: Tree) -> Iterator[Rule]:
    """Yield settings of destinations to which nothing goes."""
    automatic = tree.get("execution", "auto_export")
    enabled = isinstance(automatic, dict) and automatic.get("enabled", True)
    listed: Any = automatic.get("destinations") if isinstance(automatic, dict) and enabled else automatic
    for name in ("wandb", "mlflow"):
        if name not in (listed if isinstance(listed, list) else []):
            yield f"export.{name}", f"nothing goes there by itself: write execution.auto_export: [{name}]"
