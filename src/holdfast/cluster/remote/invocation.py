"""The files of an invocation: what each is called, what it says, and how it is read and written.

    <directory>/                       BASE/holdfast/<id>
        invocation.json                `InvocationFile`: what was asked for
        secrets.env                    mode 0600; values of variables by the names they have where it was submitted
        jobs-*.jsonl                   see `submission`
        stop                           present: nobody goes on
        <n>/                           a task
            task.json                  `TaskFile`: everything that its jobs must know
            job.sh, worker.sh          the batch scripts
            attempts.jsonl             `Begin` and `End` of each attempt, sealed lines
            state.json                 `State`: how far it is
            stop                       present: nobody goes on with this task
            endpoint.json              `EndpointFile`: there is work, and where the model is; removed when there is not
            logs/                      main-<job>-<restart>.log, deployment-…, worker-<i>-…, slurm-<job>.log, export.log
                                       and <name>-… of what is served beside the model

Those on the cluster read and write them as files; everybody else through a `Transport`.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import msgspec

from holdfast.cluster.config.options import RunOptions
from holdfast.errors import UsageError, VersionError
from holdfast.store.durable import make_directory, replacing
from holdfast.store.lines import is_sound, seal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.cluster.remote.transport import Transport

SCHEMA_VERSION: Final = "1.0"
Phase = Literal["waiting", "deploying", "running", "draining", "finishing", "done", "stopped"]
OVER: Final[frozenset[Phase]] = frozenset({"done", "stopped"})
"""phases after which nothing happens by itself"""
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class InvocationFile(msgspec.Struct, frozen=True, kw_only=True):
    """What one command asked for. Holds no secret."""

    schemaVersion: str = SCHEMA_VERSION  # noqa: N815 - as in all our files
    id: str
    created: float
    user: str
    host: str
    """where the command was given"""
    holdfast: str
    executor: str
    profile: str | None = None
    tasks: tuple[str, ...]
    """their names; task n is in the folder n"""
    base: str
    """the profile's remote_job_dir"""
    config: dict[str, Any]
    """the compiled configuration"""


class DeploymentFile(msgspec.Struct, frozen=True, kw_only=True):
    """A server that a task starts for itself: of the model, or of a judge or whatever else it needs."""

    name: str = "deployment"
    """of its log; one that serves something else than the model is called so"""
    prefix: str = ""
    """of the variables that say where it is; empty: it serves the model"""
    command: str
    pre_cmd: str | None = None
    image: str | None = None
    """None: a plain process on the node"""
    mounts: tuple[str, ...] = ()
    mount_home: bool = False
    port: int = 8000
    model: str | None = None
    base_path: str = "/v1"
    endpoints: dict[str, str] = {}
    """its paths: chat, completions …"""
    health_path: str = "/health"
    health_status: int = 200
    tasks: int | None = None
    """processes to start one instance with; None: one per node"""
    instances: int = 1
    nodes: int | None = None
    """of all its instances together; None: all of the job's"""
    readiness_seconds: float | None = None
    env: dict[str, str] = {}
    """host:NAME, lit:VALUE, runtime:NAME"""


class TaskFile(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the jobs of a task must know. Holds no secret."""

    schemaVersion: str = SCHEMA_VERSION  # noqa: N815
    invocation: str
    number: int
    name: str
    executor: str = "slurm"
    mode: str = "sequential"
    """of the local executor: whether it waits for the tasks before it"""
    python: str
    """the interpreter that has this version of Holdfast"""
    eval_file: str
    """on the cluster, in a bundle; one of another tool's kind is there as the eval of ours that it is, in JSON"""
    overrides: tuple[tuple[tuple[str, ...], Any], ...] = ()
    options: RunOptions = RunOptions()
    runs_dir: str
    deployment: DeploymentFile | None = None
    auxiliary: tuple[DeploymentFile, ...] = ()
    workers: int = 1
    walltime: float = 3600
    """seconds of one job"""
    margin: float = 120
    """seconds before its end at which a job stops in good order"""
    max_walltime: float | None = None
    """seconds of all jobs together"""
    env: dict[str, str] = {}
    export: tuple[str, ...] = ()
    """destinations, when all is done"""
    export_env: dict[str, str] = {}
    export_config: dict[str, Any] = {}
    pre_cmd: str | None = None
    post_cmd: str | None = None
    setup_lines: tuple[str, ...] = ()
    main_options: tuple[str, ...] = ()
    """of sbatch, for the job that serves and works"""
    worker_options: tuple[str, ...] = ()
    """the same for those that only work"""

    @property
    def served(self) -> tuple[DeploymentFile, ...]:
        """All that it serves, the model first."""
        return (*(() if self.deployment is None else (self.deployment,)), *self.auxiliary)


class State(msgspec.Struct, frozen=True, kw_only=True):
    """How far a task is, as its main job saw it last."""

    schemaVersion: str = SCHEMA_VERSION  # noqa: N815
    phase: Phase = "waiting"
    done: int = 0
    """trials with an output and all verdicts"""
    total: int | None = None
    """None: not known yet"""
    errors: int = 0
    """trials that were given up in this attempt"""
    rate: float = 0.0
    """trials per second"""
    reason: str = ""
    """why it stopped, or what it waits for"""
    attempt: int = 0
    """from 1"""
    job: str | None = None
    run_dir: str | None = None
    """None: not known yet"""
    exit_code: int | None = None
    """of the run, once it is over: 0 finished, 1 a gate was not met, 3 not finished"""
    updated: float = 0.0


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin", tag_field="kind"):
    """A job has begun an attempt."""

    attempt: int
    job: str
    restart: int = 0
    node: str
    time: float
    done: int = 0
    records: int = 0
    """bytes of the run's journals: more of them is ground gained"""


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end", tag_field="kind"):
    """It has ended it in good order. One that was killed has no such line."""

    attempt: int
    job: str
    time: float
    done: int = 0
    records: int = 0
    why: str
    goes_on: bool = False
    """whether a further attempt follows by itself"""


AttemptRecord = Begin | End


class EndpointFile(msgspec.Struct, frozen=True, kw_only=True):
    """There is work to share in `run_dir`; `base_url` is where this attempt serves the model, if it does."""

    serial: int
    """grows whenever work is shared out anew"""
    job: str
    run_dir: str
    host: str
    port: int | None = None
    model: str | None = None
    base_url: str | tuple[str, ...] | None = None
    """several where the model has several instances"""
    env: dict[str, str] = {}
    """where everything else is that this attempt serves"""

    @property
    def base_urls(self) -> tuple[str, ...]:
        """Where the model is, once or more; nothing where this attempt does not serve it."""
        return (self.base_url,) if isinstance(self.base_url, str) else self.base_url or ()


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """How a run stands before it is worked on, as the process that prepared it says on its standard output."""

    run_dir: str = ""
    exit_code: int | None = None
    """of a run that is finished, or wants nothing more; else None"""
    total: int = 0
    done: int = 0
    slots: float = 0
    """verdicts that a trial needs, on average"""
    copies: bool = False
    """whether the eval file or the command asks for copies of a run that has ended"""
    report: str = ""
    """the numbers of a finished run, as they are shown to a person"""
    missed: tuple[str, ...] = ()
    """the gates that were not met, each with its value"""
    error: str = ""
    """why it cannot be worked on"""


class TaskPlace:
    """The folder of a task, by its path; nothing is read or written by naming its files."""

    def __init__(self, directory: str | Path, number: int) -> None:
        self.invocation = str(directory).rstrip("/")
        self.number = number
        self.path = f"{self.invocation}/{number}"
        self.task = f"{self.path}/task.json"
        self.script = f"{self.path}/job.sh"
        self.worker_script = f"{self.path}/worker.sh"
        self.attempts = f"{self.path}/attempts.jsonl"
        self.state = f"{self.path}/state.json"
        self.endpoint = f"{self.path}/endpoint.json"
        self.logs = f"{self.path}/logs"
        self.secrets = f"{self.invocation}/secrets.env"
        self.stops = (f"{self.invocation}/stop", f"{self.path}/stop")

    @classmethod
    def of(cls, folder: str | Path) -> TaskPlace:
        """The place whose folder this is."""
        path = Path(folder).absolute()
        if not path.name.isdigit():
            raise UsageError(f"{folder} is not the folder of a task: those are called 0, 1, 2 …")
        return cls(path.parent, int(path.name))


def invocation_path(directory: str) -> str:
    """Where an invocation says what it is."""
    return f"{directory.rstrip('/')}/invocation.json"


def read_invocation(transport: Transport, directory: str) -> InvocationFile:
    """What an invocation was asked for. FileNotFoundError where the directory is none."""
    return decode(transport.read(invocation_path(directory)), InvocationFile, invocation_path(directory))


def read_task(transport: Transport, place: TaskPlace) -> TaskFile:
    """A task as its jobs know it."""
    return decode(transport.read(place.task), TaskFile, place.task)


def read_state(transport: Transport, place: TaskPlace) -> State:
    """How far a task is; one that no job has begun waits."""
    try:
        return decode(transport.read(place.state), State, place.state)
    except FileNotFoundError:
        return State()


def read_attempts(transport: Transport, place: TaskPlace) -> list[AttemptRecord]:
    """The attempts so far. A torn or damaged line does not count."""
    try:
        return decode_attempts(transport.read(place.attempts))
    except FileNotFoundError:
        return []


def decode_attempts(data: bytes) -> list[AttemptRecord]:
    """The sound lines of attempts.jsonl."""
    return [msgspec.json.decode(line, type=AttemptRecord) for line in data.split(b"\n") if is_sound(line)]


def is_stopped(transport: Transport, directory: str) -> bool:
    """Whether somebody has told the invocation, or the task, that has this directory to stop."""
    return transport.exists(f"{directory.rstrip('/')}/stop")


def write_stop(transport: Transport, directory: str, why: str) -> None:
    """Tell it: no job begins anything after this."""
    transport.append(f"{directory.rstrip('/')}/stop", f"{time.time():.0f} {why}\n".encode())


def remove_stop(transport: Transport, directory: str) -> None:
    """Let it go on."""
    transport.check(["rm", "-f", "--", f"{directory.rstrip('/')}/stop"])


def write_state(place: TaskPlace, state: State) -> None:
    """On the cluster itself: replace state.json in one step."""
    write(Path(place.state), msgspec.structs.replace(state, updated=time.time()))


def append_attempt(place: TaskPlace, record: AttemptRecord) -> None:
    """On the cluster itself: add a line, on the medium when this returns. Only a task's main job writes it."""
    from holdfast.cluster.remote.transport import Here

    Here(pauses=()).append(place.attempts, seal(msgspec.json.encode(record)))


def write(path: Path, content: msgspec.Struct) -> None:
    """Write one of these files in one step."""
    make_directory(path.parent)
    with replacing(path) as file:
        file.write(encode(content))


def encode(content: msgspec.Struct) -> bytes:
    """A file's bytes, for people too."""
    return msgspec.json.format(msgspec.json.encode(content)) + b"\n"


def decode(data: bytes, kind: type[_Struct], path: str) -> _Struct:
    """One of these files out of its bytes."""
    try:
        found = msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{path}: {error}", remedy="It was changed or damaged; the run itself is not touched."
        ) from None
    version = str(getattr(found, "schemaVersion", SCHEMA_VERSION))
    if version.partition(".")[0] != SCHEMA_VERSION.partition(".")[0]:
        raise VersionError(f"{path} is of version {version}; this Holdfast reads {SCHEMA_VERSION}")
    return found


def write_secrets(values: Mapping[str, str]) -> bytes:
    """The bytes of secrets.env: NAME="value" with the value as JSON, so that it may hold anything."""
    return b"".join(b"%b=%b\n" % (name.encode(), msgspec.json.encode(value)) for name, value in sorted(values.items()))


def read_secrets(data: bytes) -> dict[str, str]:
    """The values by their names."""
    found = {}
    for line in data.splitlines():
        name, equals, value = line.partition(b"=")
        if equals:
            found[name.decode()] = msgspec.json.decode(value, type=str)
    return found


def log_name(kind: str, job: str, restart: int = 0, instance: int = 0) -> str:
    """`main-12-0.log`, `deployment-12-0.log`, `worker-3-12-0.log`; `deployment-12-0-1.log` of a second instance."""
    number = f"-{instance}" if instance else ""
    return f"{kind}-{re.sub(r'[^0-9A-Za-z_]+', '_', job)}-{restart}{number}.log"


def logs_of(names: Sequence[str], kind: str) -> list[str]:
    """The logs of a kind (main, deployment, worker) among file names, in the order of jobs and restarts."""

    def order(name: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", name)]

    return sorted((name for name in names if name.startswith(f"{kind}-") and name.endswith(".log")), key=order)
