"""A compiled configuration.

`TaskFile` and `Server` are what jobs get, as `task.json`. The compiler fills in what the configuration says; submission
adds what is known only on the cluster. A new setting is one field here, and the line that reads it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.store.rundir import RunPolicy

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.apps.cluster.config.executor import ExecutorRules
    from holdfast.apps.cluster.config.profiles import Profile
    from holdfast.apps.cluster.config.schema import ExecutionBlock, ProfileBlock
    from holdfast.apps.cluster.config.tree import Tree
    from holdfast.apps.cluster.config.variables import EnvVar
    from holdfast.spec.eval import Eval

SCHEMA_VERSION: Final = "1.0"
"""of the files of an invocation"""
CHECKPOINT: Final = "/checkpoint"
"""`checkpoint_path` in the container of a server, read-only"""
CACHE: Final = "/cache"
"""`cache_path` in the container of a server"""
PORT: Final = "HOLDFAST_PORT"
"""the variable that holds the port of a server"""
NIM_PORT: Final = "NIM_SERVER_PORT"
"""the variable from which a NIM reads its port"""


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """An image in which a part of a local job runs."""

    image: str
    engine: str
    """`podman` or `docker`"""
    options: tuple[str, ...] = ()
    """further options for the engine's `run`"""
    mounts: tuple[str, ...] = ()
    """`source:target[:options]`"""


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """A server that a task starts: of the model, or of another model that the eval needs, such as a judge."""

    name: str = "deployment"
    """begins the name of its log"""
    prefix: str = ""
    """begins the names of the variables that hold its URLs; empty for the server of the measured model"""
    command: str
    """for a shell"""
    pre_cmd: str | None = None
    """runs before the command, in the same container"""
    image: str | None = None
    """None: a plain process on the node"""
    engine: str | None = None
    """`podman` or `docker`, which starts the image on this machine; None: pyxis does, if it is installed"""
    engine_options: tuple[str, ...] = ()
    """further options for the engine's `run`"""
    mounts: tuple[str, ...] = ()
    """`source:target[:options]`"""
    mount_home: bool = False
    port: int = 8000
    any_port: bool = False
    """True if another port may be used when this one is taken: `on_port` can set it"""
    model: str | None = None
    base_path: str = "/v1"
    endpoints: dict[str, str] = {}
    """its paths: chat, completions …"""
    health_path: str = "/health"
    health_status: int = 200
    tasks: int | None = None
    """processes that start one instance; None: one per node"""
    instances: int = 1
    nodes: int = 1
    """of all instances together"""
    readiness_seconds: float | None = None
    """how long it may take to start; None: the walltime"""
    env: dict[str, str] = {}
    """host:NAME, lit:VALUE, runtime:NAME"""

    def on_port(self, port: int) -> Server:
        """Return the server with another port in its command and variables, if it may have any."""
        if not self.any_port:
            return self
        command = re.sub(rf"(?<=--port ){self.port}\b", str(port), self.command)
        env = {name: f"lit:{port}" if name == NIM_PORT else value for name, value in self.env.items()}
        return msgspec.structs.replace(self, command=command, env=env, port=port)


class TaskFile(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the jobs of a task need to know. Contains no secrets."""

    schemaVersion: str = SCHEMA_VERSION  # noqa: N815 - as in all our files
    invocation: str = "<id>"
    number: int = 0
    name: str = ""
    executor: str = "slurm"
    mode: str = "sequential"
    """of the local executor: whether tasks wait for the tasks before them"""
    python: str = "<python>"
    """the interpreter that has this version of Holdfast"""
    eval_file: str = ""
    """in a bundle on the cluster; an eval file of another tool is there as our own eval, in JSON"""
    overrides: tuple[tuple[tuple[str, ...], Any], ...] = ()
    options: RunPolicy = RunPolicy()
    runs_dir: str = "<runs>"
    deployment: Server | None = None
    auxiliary: tuple[Server, ...] = ()
    container: Container | None = None
    """in which the evaluation runs; None: it is a plain process"""
    workers: int = 1
    walltime: float = 3600
    """seconds of one job"""
    margin: float = 120
    """seconds before its end at which a job stops cleanly"""
    max_walltime: float | None = None
    """seconds of all jobs together"""
    env: dict[str, str] = {}
    export: tuple[str, ...] = ()
    """destinations of a finished run"""
    export_env: dict[str, str] = {}
    export_config: dict[str, Any] = {}
    pre_cmd: str | None = None
    post_cmd: str | None = None
    setup_lines: tuple[str, ...] = ()
    """shell, before anything else in the job"""
    main_options: tuple[str, ...] = ()
    """options of sbatch for the main job, which serves and works"""
    worker_options: tuple[str, ...] = ()
    """options of sbatch for worker jobs"""

    @property
    def served(self) -> tuple[Server, ...]:
        """All servers, the measured model's first."""
        return (*(() if self.deployment is None else (self.deployment,)), *self.auxiliary)


@dataclass(frozen=True)
class Task:
    """One eval to run."""

    file: TaskFile
    """as its jobs get it, without what is only known at submission"""
    number: int
    """among the tasks of this name, from 0"""
    eval_file: Path
    spec: Eval = field(repr=False, compare=False)
    """the eval file with the overrides applied; it was checked, so it is what is sent"""
    translated: bool = False
    """`spec` was translated from another tool's file"""
    variables: tuple[EnvVar, ...] = ()

    @property
    def name(self) -> str:
        """Its name in the configuration."""
        return self.file.name

    @property
    def id(self) -> str:
        """`gsm8k.0`, by which `-t` selects only this task."""
        return f"{self.name}.{self.number}"

    def is_run_of(self, other: Task) -> bool:
        """Return True if both tasks are the same run."""
        return (self.eval_file, self.file.overrides) == (other.eval_file, other.file.overrides)


@dataclass(frozen=True)
class Launch:
    """A compiled configuration. Secrets are named, not included."""

    name: str
    path: Path
    profile: Profile | None
    env: ProfileBlock
    """`run.env`: the profile, with what the configuration and the command line override"""
    execution: ExecutionBlock
    """with numbers of nodes and GPUs that fit together"""
    executor: ExecutorRules
    """what runs the jobs"""
    host: str | None
    """the login node to connect to through ssh; None: submit from this machine"""
    nodes: int
    """of one job"""
    tasks: tuple[Task, ...]
    shared: TaskFile
    """what all tasks have in common"""
    variables: tuple[EnvVar, ...]
    """the environment variables of all parts; `check_environment` checks that they are set"""
    notices: tuple[str, ...]
    """older keys, and keys without effect"""
    tree: Tree = field(repr=False, compare=False)
    """the configuration itself, with the place of each value"""

    @property
    def servers(self) -> tuple[Server, ...]:
        """All servers, the measured model's first."""
        return self.shared.served
