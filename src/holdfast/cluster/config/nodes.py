"""How many nodes and GPUs a launch has, and how servers are shared out among them, where nobody says so.

What is settled is put into the configuration, with the place it comes from; what cannot be is added to `problems`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

from holdfast.cluster.config.provenance import DEFAULT
from holdfast.cluster.config.schema import DeploymentBlock
from holdfast.errors import Problem

if TYPE_CHECKING:
    from holdfast.cluster.config.provenance import Tree
    from holdfast.cluster.config.schema import ExecutionBlock
    from holdfast.spec.document import Location

_Deployment = TypeVar("_Deployment", bound=DeploymentBlock)


def settle_nodes(
    tree: Tree, execution: ExecutionBlock, block: DeploymentBlock, problems: list[Problem], notices: list[str]
) -> ExecutionBlock:
    """How many instances there are, and nodes to share out among them: one each, where nobody says so."""
    instances = execution.num_instances
    if block.multiple_instances is not None:
        if block.multiple_instances and instances == 1:
            instances = max(1, execution.num_nodes // (block.nodes_per_instance or 1))
        said = f"is of the older dialect: read as execution.num_instances={instances}"
        notices.append(f"{tree.where(('deployment', 'multiple_instances'))}: {said}")
    nodes, here = execution.num_nodes, ("execution", "num_nodes")
    unsaid = tree.get(*here) is None or (_by_default(tree, here) and "←" not in tree.origin(here))
    if instances > 1 and unsaid and execution.type != "local":
        nodes = instances
        tree.put(here, nodes, tree.origin(("execution", "num_instances")))
    execution = execution.model_copy(update={"num_instances": instances, "num_nodes": nodes})
    check_instances(tree, ("execution",), block, (instances, nodes), execution.type, problems)
    return execution


def check_instances(
    tree: Tree,
    here: Location,
    block: DeploymentBlock,
    counts: tuple[int, int],
    executor: str,
    problems: list[Problem],
) -> None:
    """Whether so many instances can be had on so many nodes, which `counts` are."""
    instances, nodes = counts
    said = None
    if executor == "local":
        if instances > 1 and block.type not in ("none", "generic") and block.command is None:
            said = "several on this machine need a command of yours: type generic, with $HOLDFAST_PORT in it"
    elif block.type != "none" and nodes % instances:
        said = f"{nodes} nodes cannot be shared out among {instances} instances"
        said += f": write a multiple of {instances} as num_nodes ({tree.origin((*here, 'num_nodes'))})"
    if said is not None:
        problems.append(Problem(tree.where((*here, "num_instances")), said))


def settle_gpus(tree: Tree, execution: ExecutionBlock, problems: list[Problem]) -> ExecutionBlock:
    """One number of GPUs, by gres where that is given."""
    match = re.search(r"gpu(?::[A-Za-z][\w.-]*)?:(\d+)", execution.gres or "")
    if match is None or execution.gpus_per_node == int(match[1]):
        return execution
    here = ("execution", "gpus_per_node")
    if execution.gpus_per_node is not None and not _by_default(tree, here):
        said = f"{execution.gpus_per_node} and gres {execution.gres} say different things; give one of them"
        problems.append(Problem(tree.where(here), said))
    tree.put(here, int(match[1]), tree.origin(("execution", "gres")))
    return execution.model_copy(update={"gpus_per_node": int(match[1])})


def over_gpus(tree: Tree, block: _Deployment, here: Location, gpus: int | None, nodes: int) -> _Deployment:
    """A server spread over the GPUs of its nodes, where nobody says how."""
    place = (*here, "tensor_parallel_size")
    if not gpus or block.tensor_parallel_size is None or not _by_default(tree, place):
        return block
    spread = (block.pipeline_parallel_size or 1) * (block.data_parallel_size or 1)
    size = max(1, min(gpus, gpus * nodes // spread))
    group = tree.origin(place).partition(" ← ")[0]
    tree.put(place, size, f"{group} ← {tree.origin(('execution', 'gpus_per_node'))}")
    return block.model_copy(update={"tensor_parallel_size": size})


def _by_default(tree: Tree, location: Location) -> bool:
    """Whether nobody but a group that comes with Holdfast says so."""
    return tree.origin(location).startswith(DEFAULT)
