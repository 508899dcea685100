"""Model servers: their commands, auxiliary servers, and how they share nodes and GPUs. Pure text.

The evaluation finds a server of `auxiliary_deployments`, such as a judge, through the variables `JUDGE_URL`,
`JUDGE_CHAT_URL` and `JUDGE_MODEL_ID`; an eval file names the first as `base_url: ${JUDGE_URL}`. Its URL differs
from job to job and is never part of a key. `type: none` leaves a server out.
"""

from __future__ import annotations

import re
import shlex
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

from holdfast.apps.cluster.config.launch import CACHE, CHECKPOINT, NIM_PORT, PORT, Server
from holdfast.apps.cluster.config.schema import BASE_COMMAND, DEPLOYMENTS, AuxiliaryBlock, DeploymentBlock
from holdfast.apps.cluster.config.tree import DEFAULT, leaves
from holdfast.apps.cluster.config.variables import EnvVar, read_scope
from holdfast.errors import suggest
from holdfast.spec.schema import validate_block

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from holdfast.apps.cluster.config.executor import ExecutorRules
    from holdfast.apps.cluster.config.schema import ExecutionBlock, ProfileBlock
    from holdfast.apps.cluster.config.tree import Tree
    from holdfast.spec.document import Location
    from holdfast.spec.schema import Findings


def api_root(path: str) -> str:
    """Return `/v1` for `/v1/chat/completions/`: the path that an OpenAI client puts its own paths after."""
    return path.rstrip("/").removesuffix("/completions").removesuffix("/chat")


def served_version(block: DeploymentBlock) -> str | None:
    """Describe the model that a server serves, so that keys change with it: checkpoints do not share replies.

    The port, the image and the distribution over GPUs do not count; the image of a NIM does, as it contains the model.
    """
    if block.type == "none":
        return None
    command = None if block.command is None else re.sub(rf"\b{block.port}\b", "PORT", block.command.strip())
    image = block.image if block.type == "nim" else None
    parts = (block.checkpoint_path or block.hf_model_handle, image, command, block.extra_args)
    return " ".join(text for text in parts if text) or None


def default_model(block: DeploymentBlock) -> str | None:
    """Return the model's name in requests by default: the checkpoint's, or else the handle on Hugging Face."""
    return PurePosixPath(block.checkpoint_path or "").name or block.hf_model_handle


def read_deployment(
    tree: Tree, block: DeploymentBlock, execution: ExecutionBlock, env: ProfileBlock, findings: Findings
) -> tuple[Server | None, list[EnvVar]]:
    """Return the server of the measured model, if there is one, and its variables."""
    if block.type == "none":
        return None, []
    if block.served_model_name is None:
        message = "is not given: the server is asked for the model that each eval file names"
        if (name := default_model(block)) is not None:
            message += f", and by benchmarks for {name}"
        findings.notice(tree, ("deployment", "served_model_name"), message)
    mounts = container_mounts(env, execution.mounts.deployment, block)
    size = _Size(execution.num_instances, execution.num_nodes, execution.deployment.n_tasks)
    return _read_server(tree, block, ("deployment",), mounts, execution, size, findings)


def read_auxiliaries(
    tree: Tree, execution: ExecutionBlock, env: ProfileBlock, executor: ExecutorRules, findings: Findings
) -> Iterator[tuple[Server, list[EnvVar]]]:
    """Yield the other servers, such as a judge's, each with its variables."""
    for name, block, location in auxiliary_blocks(tree, findings):
        size = _Size(block.num_instances, block.num_nodes or block.num_instances, block.n_tasks)
        _check_instances(tree, location, block, size.instances, size.nodes, executor, findings)
        nodes = size.nodes // size.instances
        spread = spread_over_gpus(tree, block, location, execution.gpus_per_node, nodes, findings)
        mounts = container_mounts(env, execution.mounts.auxiliary.get(name, {}), spread)
        prefix = _prefix_of(name, block)
        yield _read_server(tree, spread, location, mounts, execution, size, findings, prefix)


class _Size(NamedTuple):
    instances: int
    nodes: int
    """of all instances together"""
    tasks: int | None


def _read_server(
    tree: Tree,
    block: DeploymentBlock,
    location: tuple[str, ...],
    mounts: tuple[str, ...],
    execution: ExecutionBlock,
    size: _Size,
    findings: Findings,
    prefix: str = "",
) -> tuple[Server, list[EnvVar]]:
    """Return the server of a block as jobs get it, and its variables."""
    variables = read_scope(tree, findings, *location)
    _check_model(tree, block, location, findings)
    paths = {kind: path for kind, path in block.endpoints if path}
    chat = paths.get("chat") or paths.get("completions") or "/v1/chat/completions"
    server = Server(
        name=location[-1],
        prefix=prefix,
        command=server_command(block) or "",
        pre_cmd=block.pre_cmd,
        image=block.image,
        engine=execution.container_engine if block.image else None,
        engine_options=tuple(shlex.split(execution.extra_docker_args or "")),
        mounts=mounts,
        mount_home=execution.mounts.mount_home,
        port=block.port,
        any_port=block.command is None or PORT in block.command,
        model=block.served_model_name,
        base_path=api_root(chat),
        endpoints={kind: path for kind, path in paths.items() if kind != "health"},
        health_path=block.health_check_path or paths.get("health", "/health"),
        health_status=block.health_check_status,
        # Configurations for several instances write the number of nodes to mean one process per node.
        tasks=None if size.tasks == size.nodes else size.tasks,
        instances=size.instances,
        nodes=size.nodes,
        readiness_seconds=execution.endpoint_readiness_timeout,
        env={variable.name: str(variable) for variable in (server_env(block) | variables).values()},
    )
    return server, list(variables.values())


def server_command(block: DeploymentBlock) -> str | None:
    """Return the command line of a server: the one in its block, else one derived from its type."""
    if block.command is not None:
        return block.command.strip() if block.type != "none" else None
    base = _base_command(block)
    return _over_ray(base, block) if base is not None and block.type == "vllm_ray" else base


def _base_command(block: DeploymentBlock) -> str | None:
    """Return the command that starts the server itself; None for types without one."""
    if block.base_command not in (None, BASE_COMMAND):
        return block.base_command
    if block.type == "nim":  # pyxis runs no entry point of an image
        line = "/opt/nvidia/nvidia_entrypoint.sh /opt/nim/start_server.sh"
    elif block.type in _PROGRAMS:
        line = _program_line(block, _PROGRAMS[block.type])
    else:
        return None
    return f"{line} {block.extra_args}" if block.extra_args else line


class _Program(NamedTuple):
    """The program of a type of server, and its options for keys of the block."""

    start: str
    sizes: tuple[str, str, str, str]
    """for the tensor-, pipeline- and data-parallel size, and the share of GPU memory"""
    end: str = ""


_VLLM_SIZES: Final = (
    *("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--gpu-memory-utilization"),
)
_TRTLLM_SIZES: Final = ("--tp_size", "--pp_size", "", "--kv_cache_free_gpu_memory_fraction")
_PROGRAMS: Final = {
    "vllm": _Program("vllm serve", _VLLM_SIZES, "--trust-remote-code"),
    "vllm_ray": _Program("vllm serve", _VLLM_SIZES, "--trust-remote-code"),
    "sglang": _Program(
        "python3 -m sglang.launch_server --model-path", ("--tp-size", "--pp-size", "--dp-size", "--mem-fraction-static")
    ),
    "trtllm": _Program(
        "mpirun --allow-run-as-root --oversubscribe trtllm-serve serve",
        _TRTLLM_SIZES,
        "--backend pytorch --trust_remote_code",
    ),
}


def _program_line(block: DeploymentBlock, program: _Program) -> str:
    sizes = (
        *(block.tensor_parallel_size, block.pipeline_parallel_size, block.data_parallel_size),
        block.gpu_memory_utilization,
    )
    options = {
        "--host": "0.0.0.0",  # noqa: S104 - the evaluation may run on another node of the job
        "--port": block.port,
        "--served-model-name": None if block.type == "trtllm" else block.served_model_name,
        **{option: size for option, size in zip(program.sizes, sizes, strict=True) if option},
        "--distributed-executor-backend": block.distributed_executor_backend if block.type == "vllm" else None,
    }
    words = [f"{option} {shlex.quote(str(value))}" for option, value in options.items() if value is not None]
    model = shlex.quote(CHECKPOINT if block.checkpoint_path else str(block.hf_model_handle))
    return " ".join(filter(None, (program.start, model, *words, program.end)))


def fill_base_command(tree: Tree, block: DeploymentBlock) -> DeploymentBlock:
    """Return the block with the derived command wherever values refer to it, also in the tree."""
    if block.base_command != BASE_COMMAND:
        return block
    base = _base_command(block) or ""
    tree.remove(("deployment", "base_command"))
    for location, text in list(leaves(tree.data)):
        if isinstance(text, str) and BASE_COMMAND in text:
            tree.put(location, text.replace(BASE_COMMAND, base), tree.origin(location))
    return block.model_copy(update={"base_command": None, "command": tree.get("deployment", "command")})


def container_mounts(
    env: ProfileBlock, table: Mapping[str, str], block: DeploymentBlock | None = None
) -> tuple[str, ...]:
    """List the mounts of a container: the profile's, checkpoint and cache of a server, and `execution.mounts`.

    Each is `source:target[:options]`, as pyxis and Docker write it. Of two mounts at the same target the later counts.
    """
    listed = [*(env.mounts or []), *([env.lustre_mount] if env.lustre_mount else [])]
    if block is not None and block.checkpoint_path:
        listed.append(f"{block.checkpoint_path}:{CHECKPOINT}:ro")
    if block is not None and block.cache_path:
        listed.append(f"{block.cache_path}:{CACHE}")
    listed += [f"{source}:{target}" for source, target in table.items()]
    mounts: dict[str, str] = {}
    for source, target, *options in (text.split(":") if ":" in text else (text, text) for text in listed):
        mounts[target] = ":".join((source, target, *options))
    return tuple(mounts.values())


def server_env(block: DeploymentBlock) -> dict[str, EnvVar]:
    """Return the default environment variables of a server; the configuration may override them."""
    origin = f"default (deployment/{block.type})"
    values: dict[str, str] = {}
    if block.type == "nim":
        values = {"NIM_SERVED_MODEL_NAME": str(block.served_model_name), NIM_PORT: str(block.port)}
        if block.cache_path:
            values["NIM_CACHE_PATH"] = CACHE
    elif block.cache_path:
        values = {"HF_HOME": f"{CACHE}/huggingface"}
    return {name: EnvVar(name, "lit", value, origin) for name, value in values.items()}


def _check_model(tree: Tree, block: DeploymentBlock, location: Location, findings: Findings) -> None:
    """Report a server whose derived command has no model to serve."""
    derived = block.command is None and block.base_command is None and block.type in _PROGRAMS
    if derived and not block.checkpoint_path and not block.hf_model_handle:
        message = f"{block.type} needs checkpoint_path (a folder) or hf_model_handle (a name on Hugging Face)"
        findings.wrong(tree, location, message)


def _over_ray(base: str, block: DeploymentBlock) -> str:
    """Return the script that each node of an instance runs: the first one serves when Ray has all the others."""
    backend = shlex.quote(block.distributed_executor_backend or "ray")
    return f"""\
set -euo pipefail
IFS=, read -ra addresses <<< "$ALL_NODE_IPS"
export VLLM_HOST_IP="${{addresses[$PROC_ID]:-$MASTER_IP}}"
if [ "$PROC_ID" -ne 0 ]; then
    until ray start --address="$MASTER_IP:{_RAY_PORT}" --node-ip-address="$VLLM_HOST_IP" --block; do sleep 5; done
    exit
fi
ray start --head --port={_RAY_PORT} --node-ip-address="$VLLM_HOST_IP"
export RAY_ADDRESS="$MASTER_IP:{_RAY_PORT}"
until [ "$(ray status | grep -c node_)" -ge "$NODES_PER_INSTANCE" ]; do sleep 5; done
{base} --distributed-executor-backend {backend}"""


_RAY_PORT: Final = 6379
SECTION: Final = "auxiliary_deployments"
_LOGS: Final = ("main", "worker", "deployment", "slurm", "export")
"""names of other logs"""
_REFERENCE: Final = re.compile(rf"{SECTION}\.([\w-]+)\.(\w+)")
_TAKEN: Final = ("SLURM", "HOLDFAST", "OPENAI_BASE")
"""prefixes of variables that mean something else"""
_URLS: Final = ("base_url", "http", "url")
"""keys of an eval file whose values may name variables"""


def auxiliary_blocks(tree: Tree, findings: Findings) -> Iterator[tuple[str, AuxiliaryBlock, tuple[str, ...]]]:
    """Yield the auxiliary servers, by name and with their location."""
    section = tree.get(SECTION)
    prefixes: dict[str, str] = {}
    types = [kind for kind in DEPLOYMENTS if kind != "none"]
    for name, data in section.items() if isinstance(section, dict) else ():
        location = (SECTION, str(name))
        kind = data.get("type") if isinstance(data, dict) else None
        if kind == "none":
            continue
        if not re.fullmatch(r"[A-Za-z][\w-]*", name) or name in _LOGS:
            findings.wrong(tree, location, f"invalid name: use letters, digits, - and _, and not {', '.join(_LOGS)}")
            continue
        if kind not in types and isinstance(data, dict):
            message = "needs a type: " if kind is None else f"unknown type {kind!r}{suggest(str(kind), types)}; "
            findings.wrong(tree, location, f"{message}one of {', '.join(types)}")
            continue
        block = cast("AuxiliaryBlock | None", validate_block(AuxiliaryBlock, data, location, tree, findings.problems))
        if block is None:
            continue
        prefix = _prefix_of(name, block)
        if prefix in prefixes or prefix in _TAKEN:
            owner = prefixes.get(prefix, "another program")
            findings.wrong(
                tree, location, f"its variables would be {prefix}_…, which {owner} has; give it an env_prefix"
            )
        prefixes[prefix] = name
        yield name, block, location


def _prefix_of(name: str, block: AuxiliaryBlock) -> str:
    """Return the prefix of the variables that hold its URL and model, such as JUDGE."""
    return block.env_prefix or name.upper().replace("-", "_")


def needed_nodes(nodes: int, servers: Sequence[Server]) -> int:
    """Return how many nodes a job has: one share per server, or `nodes` if nothing is served."""
    return sum(server.nodes for server in servers) or nodes


def check_ports(tree: Tree, servers: Sequence[Server], findings: Findings) -> None:
    """Report servers that would share a port, which they cannot on one machine."""
    owners: dict[int, str] = {}
    for server in servers:
        ports = [server.port + number for number in range(server.instances)]
        for port in [port for port in ports if port in owners][:1]:
            message = f"port {port} is also used by {owners[port]} on this machine; give each its own"
            findings.wrong(tree, (SECTION, server.name, "port"), message)
        owners |= dict.fromkeys(ports, server.name if server.prefix else "the model")


def fill_references(tree: Tree, auxiliary: Sequence[Server], findings: Findings) -> None:
    """Replace `auxiliary_deployments.judge.base_url` in a task's overrides by the variable that holds it in the job.

    The name of a model is known, and is written out. A URL may be used only in values that are not part of a key.
    """
    servers = {server.name: server for server in auxiliary}
    tasks = tree.get("evaluation", "tasks")
    for number, task in enumerate(tasks if isinstance(tasks, list) else ()):
        overrides = task.get("overrides") if isinstance(task, dict) else None
        for path, text in list(leaves(overrides)) if isinstance(overrides, dict) else ():
            match = _REFERENCE.fullmatch(text) if isinstance(text, str) else None
            if match is None:
                continue
            try:
                value = _resolve_reference(match[1], match[2], str(path[-1]).rpartition(".")[2], servers)
            except ValueError as error:
                location: Location = ("evaluation", "tasks", number, "overrides", *path)
                findings.wrong(tree, location, f"{text}: {error}")
                continue
            node: Any = overrides
            for part in path[:-1]:
                node = node[part]
            node[path[-1]] = value


def _resolve_reference(name: str, attribute: str, key: str, servers: Mapping[str, Server]) -> str:
    """Return the value of a reference in the override `key`; ValueError if it refers to nothing."""
    if name not in servers:
        raise ValueError(f"there is no {name!r} in {SECTION}{suggest(name, servers)}")
    server = servers[name]
    attributes = ["model_id", "base_url", *(f"{kind}_url" for kind in server.endpoints)]
    if attribute not in attributes:
        raise ValueError(f"unknown key {attribute!r}{suggest(attribute, attributes)}; one of {', '.join(attributes)}")
    if attribute == "model_id":
        return server.model or ""
    if key not in _URLS:
        raise ValueError(
            f"differs from job to job, so it cannot be part of what is measured; read ${server.prefix}_URL instead, "
            "or give it as a base_url"
        )
    return f"${{{server.prefix}_{'URL' if 'base_url' in (attribute, key) else attribute.upper()}}}"


_Deployment = TypeVar("_Deployment", bound=DeploymentBlock)


def settle_nodes(
    tree: Tree, execution: ExecutionBlock, block: DeploymentBlock, executor: ExecutorRules, findings: Findings
) -> ExecutionBlock:
    """Return the execution with its numbers of instances and nodes; by default each instance has one node."""
    instances = execution.num_instances
    if block.multiple_instances is not None:
        if block.multiple_instances and instances == 1:
            instances = max(1, execution.num_nodes // (block.nodes_per_instance or 1))
        message = f"deprecated: use execution.num_instances={instances}"
        findings.notice(tree, ("deployment", "multiple_instances"), message)
    nodes, location = execution.num_nodes, ("execution", "num_nodes")
    unset = tree.get(*location) is None or (_is_default(tree, location) and "←" not in tree.origin(location))
    if instances > 1 and unset and executor.allocates_nodes:
        nodes = instances
        tree.put(location, nodes, tree.origin(("execution", "num_instances")))
    execution = execution.model_copy(update={"num_instances": instances, "num_nodes": nodes})
    _check_instances(tree, ("execution",), block, instances, nodes, executor, findings)
    return execution


def _check_instances(
    tree: Tree,
    location: Location,
    block: DeploymentBlock,
    instances: int,
    nodes: int,
    executor: ExecutorRules,
    findings: Findings,
) -> None:
    """Report a problem if this many instances do not fit on this many nodes, or not on this machine."""
    message = None
    if not executor.allocates_nodes:
        if instances > 1 and block.type not in ("none", "generic") and block.command is None:
            message = "several instances on this machine need a command: type generic, with $HOLDFAST_PORT in it"
    elif block.type != "none" and nodes % instances:
        message = f"{nodes} nodes cannot be divided among {instances} instances"
        message += f": write a multiple of {instances} as num_nodes ({tree.origin((*location, 'num_nodes'))})"
    if message is not None:
        findings.wrong(tree, (*location, "num_instances"), message)


def settle_gpus(
    tree: Tree, execution: ExecutionBlock, executor: ExecutorRules, findings: Findings, *, serves: bool
) -> ExecutionBlock:
    """Return the execution with the number of GPUs that gres gives.

    The GPUs and whole nodes of the group are for servers, and its gres gives way to gpus_per_node.
    """
    before, needless = execution, executor.is_local or not serves
    if needless or execution.gpus_per_node is not None:
        execution = _drop_default(tree, execution, "gres")
    if needless:
        execution = _drop_default(tree, execution, "sbatch_extra_flags", "exclusive")
    if not executor.is_local and not serves and execution != before:
        dropped = ["exclusive", *([f"gres {before.gres}"] if execution.gres != before.gres else [])]
        message = f"{' and '.join(dropped)} of the group: not requested, because nothing is served"
        findings.notice(tree, ("execution",), message)
    match = re.search(r"gpu(?::[A-Za-z][\w.-]*)?:(\d+)", execution.gres or "")
    if match is None or execution.gpus_per_node == int(match[1]):
        return execution
    location = ("execution", "gpus_per_node")
    if execution.gpus_per_node is not None and not _is_default(tree, location):
        findings.wrong(tree, location, f"{execution.gpus_per_node} contradicts gres {execution.gres}; give one of them")
    tree.put(location, int(match[1]), tree.origin(("execution", "gres")))
    return execution.model_copy(update={"gpus_per_node": int(match[1])})


def _drop_default(tree: Tree, execution: ExecutionBlock, *key: str) -> ExecutionBlock:
    """Return the execution without a value of the group, unless the profile gave it."""
    location = ("execution", *key)
    if tree.get(*location) is None or not _is_default(tree, location) or "←" in tree.origin(location):
        return execution
    tree.put(location, None, tree.origin(location))
    return execution.model_copy(update={key[0]: tree.get("execution", key[0])})


def spread_over_gpus(
    tree: Tree, block: _Deployment, location: Location, gpus: int | None, nodes: int, findings: Findings
) -> _Deployment:
    """Return the block with a tensor parallel size that uses all GPUs of the nodes, unless the user gave one."""
    place = (*location, "tensor_parallel_size")
    derived = block.type in _PROGRAMS and (block.command is None or BASE_COMMAND in block.command)
    if not gpus or not derived or block.tensor_parallel_size is None or not _is_default(tree, place):
        return block
    spread = (block.pipeline_parallel_size or 1) * (block.data_parallel_size or 1)
    size = max(1, min(gpus, gpus * nodes // spread))
    group = tree.origin(place).partition(" ← ")[0]
    if size != block.tensor_parallel_size > 1:
        message = f"is {size}, all GPUs of its nodes, and not the group's {block.tensor_parallel_size}"
        findings.notice(tree, place, message)
    tree.put(place, size, f"{group} ← {tree.origin(('execution', 'gpus_per_node'))}")
    return block.model_copy(update={"tensor_parallel_size": size})


def _is_default(tree: Tree, location: Location) -> bool:
    """Return True if the value is a default that ships with Holdfast."""
    return tree.origin(location).startswith(DEFAULT)
