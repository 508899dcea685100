"""What an invocation is doing: put together from its files and from Slurm, each read once, and written by nobody.

A word on what is known. `state.json` is what the main job saw last; Slurm knows which jobs there are. Where one of them
is silent the picture says so: a task is `interrupted` only when Slurm was asked and has no job for it, and `unknown`
when it could not be asked. Nobody is called failed because a network was down.
"""

from __future__ import annotations

import os
import tarfile
import time
from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from msgspec.structs import replace

from holdfast.cluster.remote import invocation as layout
from holdfast.cluster.remote.invocation import AttemptRecord, End, InvocationFile, State, TaskPlace
from holdfast.cluster.remote.ledger import NOT_FOUND, Record, Registry, fold
from holdfast.cluster.remote.slurm import ACTIVE, JobName, JobState, Slurm
from holdfast.errors import ClusterError, Unreachable, UsageError
from holdfast.store.durable import make_directory, replacing
from holdfast.store.lines import is_sound

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from holdfast.cluster.remote.ledger import Job
    from holdfast.cluster.remote.transport import Transport
    from holdfast.cluster.watch.find import Subject

FRESH_SECONDS: Final = 120.0
"""How old `state.json` may be for its word to count where the jobs cannot be seen."""

Status = Literal[
    "unsubmitted",
    "pending",
    "starting",
    "deploying",
    "running",
    "draining",
    "finishing",
    "done",
    "stopped",
    "interrupted",
    "unknown",
]
LIVE: Final[frozenset[Status]] = frozenset({"pending", "starting", "deploying", "running", "draining", "finishing"})
"""Something happens by itself."""


class JobPicture(msgspec.Struct, frozen=True):
    """One job, or one member of an array."""

    name: str
    role: str
    id: str | None
    """None: whether it was submitted is not known"""
    state: str
    """as `slurm.State`; `gone` where Slurm has forgotten it"""
    active: bool
    why: str = ""
    """why it is pending"""
    node: str = ""
    elapsed: float | None = None
    start: float | None = None


class TaskPicture(msgspec.Struct, frozen=True):
    """One task."""

    id: str
    name: str
    status: Status
    reason: str = ""
    done: int = 0
    total: int | None = None
    errors: int = 0
    rate: float = 0.0
    """trials per second"""
    eta: float | None = None
    """seconds"""
    attempt: int = 0
    run_dir: str | None = None
    updated: float | None = None
    """when its main job last said so"""
    exit_code: int | None = None
    jobs: tuple[JobPicture, ...] = ()


class Picture(msgspec.Struct, frozen=True):
    """An invocation at one moment."""

    id: str
    place: str
    directory: str
    tasks: tuple[TaskPicture, ...]
    executor: str = "slurm"
    profile: str | None = None
    user: str = ""
    created: float | None = None
    looked: float = 0.0
    stop: str | None = None
    """what `holdfast kill` left, if it was called"""
    unreachable: str | None = None
    """why the cluster, or its Slurm, could not be asked; what is said is then what was known last"""

    @property
    def live(self) -> bool:
        """Whether something happens by itself."""
        return any(task.status in LIVE for task in self.tasks)


class Files(msgspec.Struct, frozen=True):
    """The small files of an invocation, as they were at one moment."""

    invocation: InvocationFile
    states: dict[int, State]
    attempts: dict[int, list[AttemptRecord]]
    jobs: list[Job]
    stop: str | None
    stopped: frozenset[int]
    """tasks that were told to stop, each for itself"""
    mine: bool
    """whether it is this user's, there"""


_SNAPSHOT: Final = r"""
cd -- "$1" 2>/dev/null || exit 44
id -u; stat -c %u .
find . -maxdepth 2 -type f -readable \( -name invocation.json -o -name stop -o -name 'jobs-*.jsonl' \
    -o -name state.json -o -name attempts.jsonl \) -print0 | tar --null -T - -cf - --ignore-failed-read 2>/dev/null
true
"""


def read_files(transport: Transport, directory: str) -> Files:
    """Read them in one go. Files that come and go meanwhile, and torn lines, do not count."""
    done = transport.run(["sh", "-c", _SNAPSHOT, "sh", directory])
    if done.code == 44:
        raise UsageError(f"{transport.place}: {directory} is gone, or may not be entered")
    me, owner, packed = done.stdout.split(b"\n", 2)
    found: dict[str, bytes] = {}
    with suppress(tarfile.TarError), tarfile.open(fileobj=BytesIO(packed)) as tar:
        for member in tar:
            if (file := tar.extractfile(member)) is not None:
                found[member.name.removeprefix("./")] = file.read()
    path = layout.invocation_path(directory)
    if "invocation.json" not in found:
        raise UsageError(f"{transport.place}: {path} is not there, or may not be read")
    invocation = layout.decode(found["invocation.json"], InvocationFile, path)
    numbers = range(len(invocation.tasks))
    states: dict[int, State] = {}
    for number in numbers:
        if (data := found.get(f"{number}/state.json")) is not None:
            states[number] = layout.decode(data, State, TaskPlace(directory, number).state)
    records = [
        msgspec.json.decode(line, type=Record)
        for name, data in found.items()
        if name.startswith("jobs-")
        for line in data.split(b"\n")
        if is_sound(line)
    ]
    stop = found.get("stop")
    return Files(
        invocation,
        states,
        {number: layout.decode_attempts(found.get(f"{number}/attempts.jsonl", b"")) for number in numbers},
        fold(records),
        None if stop is None else stop.decode(errors="replace").strip(),
        frozenset(number for number in numbers if f"{number}/stop" in found),
        me == owner,
    )


def look(subject: Subject, registry: Registry | None = None) -> Picture:
    """What it is doing now; where nobody answers, what was known last, and why that is all."""
    try:
        files = read_files(subject.transport, subject.directory)
    except Unreachable as error:
        return last_known(subject, error.message, registry)
    silent = None
    states: list[JobState] | None = None
    try:
        states = jobs_of(subject.transport, files)
    except (Unreachable, ClusterError) as error:
        silent = error.message
    picture = put_together(subject, files, states, silent)
    if silent is None:
        _Seen(registry or Registry()).keep(picture)
    return _of_task(picture, subject.task)


def _of_task(picture: Picture, task: int | None) -> Picture:
    if task is None:
        return picture
    chosen = tuple(one for one in picture.tasks if one.id.endswith(f".{task}"))
    return replace(picture, tasks=chosen)


def jobs_of(transport: Transport, files: Files) -> list[JobState]:
    """What Slurm, or this machine, knows of an invocation's jobs."""
    if files.invocation.executor == "local":
        return _processes(files)
    slurm = Slurm(transport)
    states = slurm.jobs(invocation=files.invocation.id, mine=files.mine)
    known = {(state.name, state.id) for state in states}
    forgotten = [job for job in files.jobs if job.id is not None and (job.intent.name, job.id) not in known]
    if forgotten:
        names = sorted({job.intent.name for job in forgotten})
        older = slurm.accounted(names, since=min(job.intent.time for job in forgotten)) or []
        states += [state for state in older if (state.name, state.id) not in known]
    return states


def _processes(files: Files) -> list[JobState]:
    """The processes of an invocation that runs on this machine, those that are alive."""
    from holdfast.cluster.remote.local import is_alive

    elsewhere = {job.intent.host for job in files.jobs} - {os.uname().nodename}
    if elsewhere:
        raise Unreachable(f"its processes are on {', '.join(sorted(elsewhere))}, and this is {os.uname().nodename}")
    now = time.time()
    return [
        JobState(
            id=job.id,
            task=None,
            name=job.intent.name,
            comment=job.intent.intent,
            user=files.invocation.user,
            state="running",
            said="RUNNING",
            nodes=job.intent.host,
            start=job.intent.time,
            elapsed=now - job.intent.time,
        )
        for job in files.jobs
        if job.id is not None and is_alive(job.id)
    ]


def put_together(
    subject: Subject, files: Files, states: Sequence[JobState] | None, silent: str | None = None
) -> Picture:
    """The picture; `states` are None where Slurm could not be asked."""
    invocation = files.invocation
    pictures = _job_pictures(files.jobs, states)
    tasks = []
    for number, name in enumerate(invocation.tasks):
        own = tuple(job for job in pictures if (parts := JobName.parse(job.name)) and parts.task == number)
        state = files.states.get(number, State())
        status, reason = _status(files, number, state, own, silent)
        left = None if state.total is None else max(0, state.total - state.done)
        moving = status in ("running", "draining") and state.rate > 0 and left is not None
        tasks.append(
            TaskPicture(
                id=f"{invocation.id}.{number}",
                name=name,
                status=status,
                reason=reason,
                done=state.done,
                total=state.total,
                errors=state.errors,
                rate=state.rate if status in LIVE else 0.0,
                eta=left / state.rate if moving and left is not None else None,
                attempt=state.attempt,
                run_dir=state.run_dir,
                updated=state.updated or None,
                exit_code=state.exit_code,
                jobs=own,
            )
        )
    return Picture(
        id=invocation.id,
        place=subject.transport.place,
        directory=subject.directory,
        tasks=tuple(tasks),
        executor=invocation.executor,
        profile=invocation.profile,
        user=invocation.user,
        created=invocation.created,
        looked=time.time(),
        stop=files.stop,
        unreachable=silent,
    )


def _job_pictures(known: Sequence[Job], states: Sequence[JobState] | None) -> list[JobPicture]:
    pictures: list[JobPicture] = []
    told: set[tuple[str, str]] = set()
    for job in known:
        role = parts.role if (parts := JobName.parse(job.intent.name)) else ""
        seen = [s for s in states or () if job.is_seen_in(s) and job.id in (None, s.id)]
        pictures += [_seen_job(state, role) for state in seen]
        told.update((state.name, state.handle) for state in seen)
        if not seen and job.disowned is None:
            word = "unknown" if states is None or job.id is None else "gone"
            pictures.append(JobPicture(job.intent.name, role, job.id, word, active=word == "unknown"))
    for state in states or ():  # of whom no sound line speaks
        if (state.name, state.handle) not in told and (parts := JobName.parse(state.name)):
            pictures.append(_seen_job(state, parts.role))
    return pictures


def _seen_job(state: JobState, role: str) -> JobPicture:
    return JobPicture(
        name=state.name,
        role=role,
        id=state.handle,
        state=state.state,
        active=state.state in ACTIVE,
        why=state.why,
        node=state.nodes,
        elapsed=state.elapsed,
        start=state.start,
    )


def _status(
    files: Files, number: int, state: State, jobs: Sequence[JobPicture], silent: str | None
) -> tuple[Status, str]:
    """The one word for a task, and the reason."""
    if state.phase == "done":
        return "done", state.reason
    if state.phase == "stopped":
        return "stopped", state.reason
    if silent is not None:
        return "unknown", silent
    main = [job for job in jobs if job.role.startswith("main")]
    if any(job.state in ("running", "completing") for job in main):
        return ("starting" if state.phase == "waiting" else state.phase), state.reason
    waiting = [job for job in main if job.active]
    if waiting:
        # The first of them: a requeued job waits for its own reason, and its successor only for that job.
        known = [job for job in waiting if job.state != "unknown"]
        return "pending", known[0].why if known else "whether its job was submitted is not known yet"
    if not files.mine and (jobs or state.updated) and not any(job.state != "gone" for job in jobs):
        if state.updated > time.time() - FRESH_SECONDS:
            return ("starting" if state.phase == "waiting" else state.phase), state.reason
        return "unknown", f"jobs of {files.invocation.user} are not shown to you, and its files are silent"
    if files.stop is not None or number in files.stopped:
        return "stopped", "stopped by `holdfast kill`"
    if not jobs:
        return "unsubmitted", _why_never(files, number)
    return "interrupted", _why_none(files, number, main)


def _why_never(files: Files, number: int) -> str:
    """Why no job was ever submitted: Slurm's own word, where it refused one."""
    own = [job for job in files.jobs if (name := JobName.parse(job.intent.name)) and name.task == number]
    refused = [job.disowned for job in own if job.disowned and job.disowned != NOT_FOUND]
    return f"Slurm refused it: {refused[-1]}" if refused else "no job of it was submitted"


def _why_none(files: Files, number: int, main: Sequence[JobPicture]) -> str:
    """Why no job is left, as far as can be told."""
    last = files.attempts[number][-1] if files.attempts[number] else None
    if isinstance(last, End):
        return f"the last attempt ended: {last.why}"
    words = [job.state.replace("_", " ") for job in main if job.state != "gone"]
    return f"no job is left; the last one: {words[-1]}" if words else "no job is left"


class _Seen:
    """What was seen last of each invocation, for when nobody answers."""

    def __init__(self, registry: Registry) -> None:
        self._folder: Path = registry.folder.parent / "seen"

    def keep(self, picture: Picture) -> None:
        with suppress(OSError):  # a convenience
            make_directory(self._folder)
            with replacing(self._folder / f"{picture.id}.json") as file:
                file.write(msgspec.json.encode(picture))

    def get(self, invocation: str) -> Picture | None:
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode((self._folder / f"{invocation}.json").read_bytes(), type=Picture)
        return None


def settled(subject: Subject, registry: Registry | None = None) -> Picture | None:
    """What was seen last, if nothing can have changed since: all tasks are done. Nobody is asked."""
    last = None if subject.known is None else _Seen(registry or Registry()).get(subject.known.id)
    return last if last is not None and all(task.status == "done" for task in last.tasks) else None


def last_known(subject: Subject, why: str, registry: Registry | None = None, *, reached: bool = False) -> Picture:
    """What was known last, every word of which may be out of date, and why there is nothing newer."""
    known = subject.known
    invocation = known.id if known else subject.directory.rstrip("/").rpartition("/")[2]
    last = _Seen(registry or Registry()).get(invocation)
    if last is None:
        names = known.tasks if known else ()
        last = Picture(
            id=invocation,
            place=subject.transport.place,
            directory=subject.directory,
            tasks=tuple(TaskPicture(f"{invocation}.{n}", name, "unknown", why) for n, name in enumerate(names)),
            executor=known.executor if known else "slurm",
            profile=known.profile if known else None,
            created=known.created if known else None,
        )
    tasks = [
        task if task.status in ("done", "stopped") else replace(task, status="unknown", reason=why, eta=None)
        for task in last.tasks
    ]
    return _of_task(replace(last, tasks=tuple(tasks), unreachable=None if reached else why), subject.task)
