"""The files of an invocation: their names, their contents, and how they are read and written.

    <directory>/                       BASE/holdfast/<id>
        invocation.json                `InvocationFile`: what was submitted
        secrets.env                    mode 0600; values of variables, by their names on the submitting machine;
                                       removed when all tasks are done
        jobs-*.jsonl                   see `ledger`
        stop                           present: no job continues
        submitting/                    present: a process submits jobs, see `ledger`
        <n>/                           a task
            task.json                  `TaskFile`: everything that its jobs need to know
            job.sh, worker.sh          the batch scripts
            attempts.jsonl             `Begin` and `End` of each start, sealed lines
            state.json                 `State`: its progress
            stop                       present: no job continues this task
            endpoint.json              `EndpointFile`: work is offered, and the model's address; else absent
            logs/                      main-<job>-<restart>.log, deployment-…, worker-<i>-…, slurm-<job>.log, export.log
                                       and <name>-… of auxiliary servers

Jobs read and write them as files; commands through a `Transport`.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import msgspec

from holdfast.apps.cluster.config.launch import SCHEMA_VERSION, TaskFile
from holdfast.apps.cluster.remote.transport import Here
from holdfast.engine.attached import Ended
from holdfast.errors import UsageError, VersionError
from holdfast.store.files import make_directory, replacing
from holdfast.store.lines import is_sound, seal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from holdfast.apps.cluster.remote.transport import Transport

Phase = Literal["waiting", "deploying", "running", "draining", "finishing", "done", "stopped"]
OVER: Final[frozenset[Phase]] = frozenset({"done", "stopped"})
"""phases after which nothing happens without a user"""
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class InvocationFile(msgspec.Struct, frozen=True, kw_only=True):
    """The submission of one command. Contains no secrets."""

    schemaVersion: str = SCHEMA_VERSION  # noqa: N815 - as in all our files
    id: str
    created: float
    user: str
    host: str
    """the machine on which the command ran"""
    holdfast: str
    executor: str
    profile: str | None = None
    tasks: tuple[str, ...]
    """their names; task n is in the folder n"""
    base: str
    """the profile's remote_job_dir"""
    config: dict[str, Any]
    """the compiled configuration"""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a task, as its main job saw it last."""

    schemaVersion: str = SCHEMA_VERSION  # noqa: N815 - as in all our files
    phase: Phase = "waiting"
    done: int = 0
    """trials with an output and all verdicts"""
    total: int | None = None
    """None: not known yet"""
    errors: int = 0
    """trials that failed in this job"""
    rate: float = 0.0
    """trials per second"""
    reason: str = ""
    """why the task stopped, or what it waits for"""
    attempt: int = 0
    """from 1"""
    job: str | None = None
    run_dir: str | None = None
    """None: not known yet"""
    exit_code: int | None = None
    """of the run, once the task is over: 0 finished, 1 a gate was not met, 3 not finished"""
    updated: float = 0.0


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin", tag_field="kind"):
    """A job has begun."""

    attempt: int
    job: str
    restart: int = 0
    node: str
    time: float
    done: int = 0
    records: int = 0
    """bytes of the run's journals: more means progress"""


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end", tag_field="kind"):
    """A job has ended. A killed job has no such line."""

    attempt: int
    job: str
    time: float
    done: int = 0
    records: int = 0
    why: str
    goes_on: bool = False
    """True if another job follows without a user"""


StartRecord = Begin | End


class EndpointFile(msgspec.Struct, frozen=True, kw_only=True):
    """Work in `run_dir` is offered to all workers; `base_url` is the address of the model, if this job serves it."""

    serial: int
    """grows whenever work is offered again"""
    job: str
    run_dir: str
    host: str
    port: int | None = None
    model: str | None = None
    base_url: str | tuple[str, ...] | None = None
    """several if the model has several instances"""
    env: dict[str, str] = {}
    """variables with the URLs of the other servers"""

    @property
    def base_urls(self) -> tuple[str, ...]:
        """The URLs of the model; none if this job does not serve it."""
        return (self.base_url,) if isinstance(self.base_url, str) else self.base_url or ()


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run before the work, or after it, as the process that does it writes to its standard output."""

    run_dir: str = ""
    exit_code: int | None = None
    """of a run with nothing left to do; else None"""
    total: int = 0
    done: int = 0
    slots: float = 0
    """verdicts that a trial needs, on average"""
    copies: bool = False
    """True if the eval file or the command asks for copies of a finished run"""
    report: str = ""
    """the table of a finished run"""
    missed: tuple[str, ...] = ()
    """the gates that were not met, with their values"""
    error: str = ""
    """why there can be no work"""


class Worked(msgspec.Struct, frozen=True, kw_only=True):
    """How the main job's own work ended, as the process that did it writes to its standard output."""

    ended: Ended = Ended()
    finished: Prepared | None = None
    """the finished run; None if something is left, or if another worker finishes it"""


class TaskFolder:
    """The folder of a task, and the paths of its files. Nothing is read or written."""

    def __init__(self, directory: str | Path, number: int) -> None:
        self.invocation = str(directory).rstrip("/")
        self.number = number
        self.path = f"{self.invocation}/{number}"
        self.task = f"{self.path}/task.json"
        self.script = f"{self.path}/job.sh"
        self.worker_script = f"{self.path}/worker.sh"
        self.starts = f"{self.path}/attempts.jsonl"
        self.state = f"{self.path}/state.json"
        self.endpoint = f"{self.path}/endpoint.json"
        self.logs = f"{self.path}/logs"
        self.secrets = f"{self.invocation}/secrets.env"
        self.stops = (f"{self.invocation}/stop", f"{self.path}/stop")

    @classmethod
    def of(cls, folder: str | Path) -> TaskFolder:
        """Return the place of a folder."""
        path = Path(folder).absolute()
        if not path.name.isdigit():
            raise UsageError(f"{folder} is not the folder of a task: those are called 0, 1, 2 …")
        return cls(path.parent, int(path.name))


def invocation_path(directory: str) -> str:
    """Return the path of an invocation's invocation.json."""
    return f"{directory.rstrip('/')}/invocation.json"


def read_invocation(transport: Transport, directory: str) -> InvocationFile:
    """Read what was submitted. FileNotFoundError if the directory does not belong to an invocation."""
    return decode(transport.read(invocation_path(directory)), InvocationFile, invocation_path(directory))


def read_task(transport: Transport, place: TaskFolder) -> TaskFile:
    """Read a task."""
    return decode(transport.read(place.task), TaskFile, place.task)


def read_state(transport: Transport, place: TaskFolder) -> State:
    """Read the progress of a task; a task without a job so far is waiting."""
    try:
        return decode(transport.read(place.state), State, place.state)
    except FileNotFoundError:
        return State()


def read_starts(transport: Transport, place: TaskFolder) -> list[StartRecord]:
    """Read the starts so far. Torn and damaged lines do not count."""
    try:
        return decode_starts(transport.read(place.starts))
    except FileNotFoundError:
        return []


def decode_starts(data: bytes) -> list[StartRecord]:
    """Decode attempts.jsonl, without torn and damaged lines."""
    return [msgspec.json.decode(line, type=StartRecord) for line in data.split(b"\n") if is_sound(line)]


def write_stop(transport: Transport, directory: str, why: str) -> None:
    """Stop an invocation or a task: no job begins anything after this."""
    transport.append(f"{directory.rstrip('/')}/stop", f"{time.time():.0f} {why}\n".encode())


def remove_stops(transport: Transport, directories: Iterable[str]) -> None:
    """Let stopped invocations or tasks continue."""
    transport.check(["rm", "-f", "--", *(f"{directory.rstrip('/')}/stop" for directory in directories)])


def write_state(place: TaskFolder, state: State) -> None:
    """Replace state.json in one step, from a job."""
    write(Path(place.state), msgspec.structs.replace(state, updated=time.time()))


def append_start(place: TaskFolder, record: StartRecord) -> None:
    """Add a line, on the medium when this returns. Only the main job of a task writes this file."""
    Here(pauses=()).append(place.starts, seal(msgspec.json.encode(record)))


def write(path: Path, content: msgspec.Struct) -> None:
    """Write a file in one step."""
    make_directory(path.parent)
    with replacing(path) as file:
        file.write(encode(content))


def encode(content: msgspec.Struct) -> bytes:
    """Return the bytes of a file, formatted for people."""
    return msgspec.json.format(msgspec.json.encode(content)) + b"\n"


def decode(data: bytes, kind: type[_Struct], path: str) -> _Struct:
    """Decode a file."""
    try:
        content = msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{path}: {error}", remedy="It was changed or damaged; the run itself is not touched."
        ) from None
    version = str(getattr(content, "schemaVersion", SCHEMA_VERSION))
    if version.partition(".")[0] != SCHEMA_VERSION.partition(".")[0]:
        raise VersionError(f"{path} is of version {version}; this Holdfast reads {SCHEMA_VERSION}")
    return content


def write_secrets(values: Mapping[str, str]) -> bytes:
    """Return the bytes of secrets.env: NAME="value", with JSON strings as values, which may contain anything."""
    return b"".join(b"%b=%b\n" % (name.encode(), msgspec.json.encode(value)) for name, value in sorted(values.items()))


def read_secrets(data: bytes) -> dict[str, str]:
    """Return the values by name."""
    values = {}
    for line in data.splitlines():
        name, equals, value = line.partition(b"=")
        if equals:
            values[name.decode()] = msgspec.json.decode(value, type=str)
    return values


def load_secrets(place: TaskFolder) -> dict[str, str]:
    """Return the secrets of an invocation; none once they were removed, when a late worker has nothing to do."""
    try:
        return read_secrets(Path(place.secrets).read_bytes())
    except FileNotFoundError:
        return {}


def remove_secrets(place: TaskFolder) -> None:
    """Remove the secrets of an invocation, if all of its tasks are done; the others may still be resumed."""
    here = Here(pauses=())
    tasks = read_invocation(here, place.invocation).tasks
    states = (read_state(here, TaskFolder(place.invocation, number)) for number in range(len(tasks)))
    if all(state.phase == "done" for state in states):
        Path(place.secrets).unlink(missing_ok=True)


def log_name(kind: str, job: str, restart: int = 0, instance: int = 0) -> str:
    """Return the name of a log: `main-12-0.log`, `worker-3-12-0.log`, `deployment-12-0-1.log` of a second instance."""
    number = f"-{instance}" if instance else ""
    return f"{kind}-{re.sub(r'[^0-9A-Za-z_]+', '_', job)}-{restart}{number}.log"
