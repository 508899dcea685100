"""Marks on the fields of schemas: keys that are read, and have no effect under some condition.

nproc_per_node: Annotated[int | None, NoEffect("nothing is started by torchrun")] = None
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class NoEffect:
    """The key has no effect: always, or only on this machine, or only on a cluster."""

    why: str
    where: Literal["everywhere", "local", "cluster"] = "everywhere"


@dataclass(frozen=True)
class DerivedCommand:
    """The key is only used for the derived commands of these types of server."""

    types: tuple[str, ...]


@dataclass(frozen=True)
class ThroughExecution:
    """The key of a profile is only used where this key of `execution` refers to it."""

    key: str


CLUSTER_ONLY = NoEffect("it is for a cluster, and this runs on this machine", "local")
EXPORTS_ITSELF = NoEffect("Holdfast exports by itself, where the job runs")
NO_CONTAINER = NoEffect("the evaluation runs in no container, and sees the paths of the node")
DERIVED = DerivedCommand(("vllm", "vllm_ray", "sglang", "trtllm"))
LOCAL_ONLY = NoEffect("it is for this machine; on a cluster all tasks are queued at once", "cluster")
NO_TORCHRUN = NoEffect("nothing is started by torchrun; tasks of a node are ntasks_per_node")
OTHER_TOOLS = NoEffect("it is for other tools")
OTHER_VARIABLES = NoEffect("variables stand in env_vars of the task, or of evaluation")
SENT_WITH_EVAL = NoEffect("the folder of each eval file is sent")
SET_BY_EVAL = NoEffect("the eval file says what is asked and how it is graded")
SPREAD_BY_HOLDFAST = NoEffect("requests are spread over the instances by Holdfast itself")
TEXT_ONLY = NoEffect("only chat and completions are asked")
