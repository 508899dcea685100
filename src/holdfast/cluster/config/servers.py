"""The servers that are known: the command each is started with, and what it must be told. Pure text."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.cluster.config.variables import EnvVar

if TYPE_CHECKING:
    from holdfast.cluster.config.schema import DeploymentBlock

CHECKPOINT = "/checkpoint"
"""where checkpoint_path is in the container"""
CACHE = "/cache"
"""where cache_path is in the container"""


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
        """Whether there is a server to start."""
        return self.type != "none"

    def base_url(self, host: str) -> str:
        """What a target's base_url is when the server runs there: the chat path without its last two parts."""
        path = self.endpoints.get("chat") or self.endpoints.get("completions") or "/v1/chat/completions"
        return f"http://{host}:{self.port}{api_root(path)}"


def api_root(path: str) -> str:
    """`/v1` of `/v1/chat/completions/`: what an OpenAI client puts its own paths after."""
    return path.rstrip("/").removesuffix("/completions").removesuffix("/chat")


def served_version(block: DeploymentBlock) -> str | None:
    """What a server serves, in words that change with it: the replies of one checkpoint are not those of another.

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
    """What a server is told by variables; the configuration may say otherwise."""
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
    """What a server lacks to know its model; None where it knows."""
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
