"""Model servers: their commands, the servers beside them, and how they share nodes and GPUs. Pure text.

The evaluation finds a server of `auxiliary_deployments`, such as a judge, through the variables `JUDGE_URL`,
`JUDGE_CHAT_URL` and `JUDGE_MODEL_ID`; an eval file names the first as `base_url: ${JUDGE_URL}`. Its URL differs
from job to job and is never part of a key. `type: none` leaves a server out.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from holdfast.cluster.config.mounts import CACHE, CHECKPOINT
from holdfast.cluster.config.provenance import DEFAULT, leaves
from holdfast.cluster.config.schema import DEPLOYMENTS, AuxiliaryBlock, DeploymentBlock
from holdfast.cluster.config.variables import EnvVar
from holdfast.errors import Problem
from holdfast.spec.validation import suggest, validate_block

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.cluster.config.provenance import Tree
    from holdfast.cluster.config.schema import ExecutionBlock
    from holdfast.spec.document import Location


@dataclass(frozen=True)
class Mount:
    """A path of the host inside a container."""

    source: str
    target: str
    options: str = ""

    def __str__(self) -> str:
        """As pyxis and Docker write it."""
        return ":".join(filter(None, (self.source, self.target, self.options)))


@dataclass(frozen=True)
class Deployment:
    """The server of the model, or none; or that of something else the tasks need."""

    type: str
    name: str = "deployment"
    prefix: str = ""
    """of the variables that say where it is; empty: it serves the model"""
    image: str | None = None
    command: str | None = None
    """the whole command line, for a shell; None where nothing is served"""
    pre_cmd: str | None = None
    """runs before it, in the same container"""
    port: int = 8000
    served_model_name: str | None = None
    checkpoint_path: str | None = None
    endpoints: dict[str, str] = field(default_factory=dict)
    """paths of the server: chat, completions, health …"""
    health_path: str = "/health"
    health_status: int = 200
    instances: int = 1
    """how many of it, each on its own nodes"""
    nodes: int = 1
    """of all instances together"""
    tasks: int | None = None
    """processes to start one instance with; None: one per node"""
    mounts: tuple[Mount, ...] = ()
    env: tuple[EnvVar, ...] = ()

    @property
    def serves(self) -> bool:
        """True if a server has to be started."""
        return self.type != "none"

    def base_url(self, host: str) -> str:
        """Return the `base_url` of targets for a server on this host: the chat path without its last two parts."""
        path = self.endpoints.get("chat") or self.endpoints.get("completions") or "/v1/chat/completions"
        return f"http://{host}:{self.port}{api_root(path)}"


def api_root(path: str) -> str:
    """`/v1` of `/v1/chat/completions/`: what an OpenAI client puts its own paths after."""
    return path.rstrip("/").removesuffix("/completions").removesuffix("/chat")


def served_version(block: DeploymentBlock) -> str | None:
    """Describe the model that a server serves, so that keys change with it: checkpoints do not share replies.

    How it is spread over GPUs, the port and the image do not count; the image of a NIM does, for the model is in it.
    """
    if block.type == "none":
        return None
    own = None if block.command is None else re.sub(rf"\b{block.port}\b", "PORT", block.command.strip())
    image = block.image if block.type == "nim" else None
    said = (block.checkpoint_path or block.hf_model_handle, image, own, block.extra_args)
    return " ".join(text for text in said if text) or None


def server_command(block: DeploymentBlock) -> str | None:
    """The command line of a deployment: the one that is given, else the one of its type."""
    if block.command is not None:
        return block.command.strip() if block.type != "none" else None
    words = {"vllm": _vllm, "sglang": _sglang, "nim": _nim, "trtllm": _trtllm}.get(block.type)
    if words is None:
        return None
    base, *options = words(block)
    line = " ".join([block.base_command or base, *(shlex.quote(word) for word in options)])
    return f"{line} {block.extra_args}" if block.extra_args else line


def server_mounts(block: DeploymentBlock) -> tuple[Mount, ...]:
    """The checkpoint, read-only, and the cache."""
    wanted = ((block.checkpoint_path, CHECKPOINT, "ro"), (block.cache_path, CACHE, ""))
    return tuple(Mount(source, target, options) for source, target, options in wanted if source)


def server_env(block: DeploymentBlock) -> dict[str, EnvVar]:
    """Return the default environment variables of a server; the configuration may override them."""
    origin = f"default (deployment/{block.type})"
    told: dict[str, str] = {}
    if block.type == "nim":
        told = {"NIM_SERVED_MODEL_NAME": str(block.served_model_name), "NIM_SERVER_PORT": str(block.port)}
        if block.cache_path:
            told["NIM_CACHE_PATH"] = CACHE
    elif block.cache_path:
        told = {"HF_HOME": f"{CACHE}/huggingface"}
    return {name: EnvVar(name, "lit", value, origin) for name, value in told.items()}


def missing_model(block: DeploymentBlock) -> str | None:
    """Return the error message for a server without a model; None if it has one."""
    derived = block.command is None and block.type in ("vllm", "sglang", "trtllm")
    if derived and not block.checkpoint_path and not block.hf_model_handle:
        return f"{block.type} needs checkpoint_path (a folder) or hf_model_handle (a name on Hugging Face)"
    return None


def _model(block: DeploymentBlock) -> str:
    return CHECKPOINT if block.checkpoint_path else str(block.hf_model_handle)


def _options(*pairs: tuple[str, object]) -> list[str]:
    return [word for option, value in pairs if value is not None for word in (option, str(value))]


def _vllm(block: DeploymentBlock) -> list[str]:
    return [
        "vllm serve",
        _model(block),
        *_options(
            ("--host", "0.0.0.0"),  # noqa: S104 - the evaluation may run on another node of the job
            ("--port", block.port),
            ("--served-model-name", block.served_model_name),
            ("--tensor-parallel-size", block.tensor_parallel_size),
            ("--pipeline-parallel-size", block.pipeline_parallel_size),
            ("--data-parallel-size", block.data_parallel_size),
            ("--gpu-memory-utilization", block.gpu_memory_utilization),
            ("--distributed-executor-backend", block.distributed_executor_backend),
        ),
    ]


def _sglang(block: DeploymentBlock) -> list[str]:
    return [
        "python3 -m sglang.launch_server",
        *_options(
            ("--model-path", _model(block)),
            ("--host", "0.0.0.0"),  # noqa: S104 - as above
            ("--port", block.port),
            ("--served-model-name", block.served_model_name),
            ("--tp-size", block.tensor_parallel_size),
            ("--pp-size", block.pipeline_parallel_size),
            ("--dp-size", block.data_parallel_size),
            ("--mem-fraction-static", block.gpu_memory_utilization),
        ),
    ]


def _trtllm(block: DeploymentBlock) -> list[str]:
    return [
        "trtllm-serve serve",
        _model(block),
        *_options(
            ("--host", "0.0.0.0"),  # noqa: S104 - as above
            ("--port", block.port),
            ("--tp_size", block.tensor_parallel_size),
            ("--pp_size", block.pipeline_parallel_size),
            ("--kv_cache_free_gpu_memory_fraction", block.gpu_memory_utilization),
        ),
    ]


def _nim(_: DeploymentBlock) -> list[str]:
    return ["/opt/nim/start_server.sh"]  # pyxis does not run an image's own entry point


SECTION: Final = "auxiliary_deployments"
_LOGS: Final = ("main", "worker", "deployment", "slurm", "export")
"""what other logs are called"""
_REFERENCE: Final = re.compile(rf"{SECTION}\.([\w-]+)\.(\w+)")
_TAKEN: Final = ("SLURM", "HOLDFAST", "OPENAI_BASE")
"""prefixes of variables that mean something else"""
_URLS: Final = ("base_url", "http", "url")
"""keys of an eval file whose values may name variables"""


def read_auxiliary(tree: Tree, problems: list[Problem]) -> Iterator[tuple[str, AuxiliaryBlock, Location]]:
    """Each by its name and with its place; what is wrong with one is added to `problems`."""
    listed = tree.get(SECTION)
    prefixes: dict[str, str] = {}
    for name, raw in listed.items() if isinstance(listed, dict) else ():
        here: Location = (SECTION, name)
        kinds = [kind for kind in DEPLOYMENTS if kind != "none"]
        kind = raw.get("type") if isinstance(raw, dict) else None
        if kind == "none":
            continue
        said = None
        if not re.fullmatch(r"[A-Za-z][\w-]*", name) or name in _LOGS:
            said = f"is not a valid name: use letters, digits, - and _, and not {', '.join(_LOGS)}"
        elif kind not in kinds and isinstance(raw, dict):
            said = "needs a type: " if kind is None else f"unknown type {kind!r}{suggest(str(kind), kinds)}; "
            said += f"one of {', '.join(kinds)}"
        if said is not None:
            problems.append(Problem(tree.where(here), said))
            continue
        block = cast("AuxiliaryBlock | None", validate_block(AuxiliaryBlock, raw, here, tree, problems))
        if block is None:
            continue
        prefix = prefix_of(name, block)
        if prefix in prefixes or prefix in _TAKEN:
            whose = prefixes.get(prefix, "another program")
            message = f"its variables would be {prefix}_…, as those of {whose}; give it an env_prefix"
            problems.append(Problem(tree.where(here), message))
        prefixes[prefix] = name
        yield name, block, here


def prefix_of(name: str, block: AuxiliaryBlock) -> str:
    """Return the prefix of the variables that hold its URL and model, such as JUDGE."""
    return block.env_prefix or name.upper().replace("-", "_")


def needed_nodes(nodes: int, served: Deployment, auxiliary: Sequence[Deployment]) -> int:
    """The nodes of a job: the model's, if it serves one, and those of the servers beside it."""
    beside = sum(each.nodes for each in auxiliary)
    return nodes + beside if served.serves or not beside else beside


def check_ports(tree: Tree, served: Deployment, auxiliary: Sequence[Deployment], problems: list[Problem]) -> None:
    """On one machine every server needs a port of its own."""
    taken = {served.port + number: "the model" for number in range(served.instances)}
    for each in auxiliary:
        own = [each.port + number for number in range(each.instances)]
        for port in [port for port in own if port in taken][:1]:
            said = f"{port} is the port of {taken[port]} too, on this machine; give each its own"
            problems.append(Problem(tree.where((SECTION, each.name, "port")), said))
        taken |= dict.fromkeys(own, each.name)


def fill_references(tree: Tree, auxiliary: Sequence[Deployment], problems: list[Problem]) -> None:
    """`auxiliary_deployments.judge.base_url` in a task's overrides becomes the variable that says it in the job.

    The model's name is known, and written out. A URL may stand only where it is in no key.
    """
    known = {each.name: each for each in auxiliary}
    tasks = tree.get("evaluation", "tasks")
    for at, task in enumerate(tasks if isinstance(tasks, list) else ()):
        overrides = task.get("overrides") if isinstance(task, dict) else None
        for place, text in list(leaves(overrides)) if isinstance(overrides, dict) else ():
            match = _REFERENCE.fullmatch(text) if isinstance(text, str) else None
            if match is None:
                continue
            here: Location = ("evaluation", "tasks", at, "overrides", *place)
            found = _meant(match[1], match[2], str(place[-1]).rpartition(".")[2], known)
            if isinstance(found, Problem):
                problems.append(Problem(tree.where(here), f"{text}: {found.message}"))
                continue
            node: Any = overrides
            for part in place[:-1]:
                node = node[part]
            node[place[-1]] = found


def _meant(name: str, what: str, key: str, known: dict[str, Deployment]) -> str | Problem:
    if name not in known:
        return Problem("", f"there is no {name!r} in {SECTION}{suggest(name, known)}")
    served = known[name]
    words = ["model_id", "base_url", *(f"{kind}_url" for kind in served.endpoints if kind != "health")]
    if what not in words:
        return Problem("", f"unknown key {what!r}{suggest(what, words)}; one of {', '.join(words)}")
    if what == "model_id":
        return served.served_model_name or ""
    if key not in _URLS:
        said = f"differs from job to job, so it cannot be part of what is measured; read ${served.prefix}_URL instead"
        return Problem("", f"{said}, or give it as a base_url")
    return f"${{{served.prefix}_{'URL' if 'base_url' in (what, key) else what.upper()}}}"


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
    """Report a problem if this many instances do not fit on this many nodes; `counts` holds both."""
    instances, nodes = counts
    said = None
    if executor == "local":
        if instances > 1 and block.type not in ("none", "generic") and block.command is None:
            said = "several on this machine need a command of yours: type generic, with $HOLDFAST_PORT in it"
    elif block.type != "none" and nodes % instances:
        said = f"{nodes} nodes cannot be divided among {instances} instances"
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
        said = f"{execution.gpus_per_node} and gres {execution.gres} contradict each other; give one of them"
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
    """Return True if the value is a default that ships with Holdfast."""
    return tree.origin(location).startswith(DEFAULT)
