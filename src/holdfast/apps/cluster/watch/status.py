"""Report the status of an invocation, from its files and its executor.

Nothing is written, except what became of a submission whose answer is overdue: otherwise nobody would ask before the
next `resume`.

`state.json` is what the main job saw last; the executor knows which jobs there are. A task is `interrupted` only if the
executor was asked and has no job for it, and `unknown` if it could not be asked. No task is called failed because a
network was down.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from msgspec.structs import asdict, replace

from holdfast.apps.cluster.remote import invocation as layout
from holdfast.apps.cluster.remote.executor import find_executor
from holdfast.apps.cluster.remote.invocation import End, InvocationFile, StartRecord, State, TaskFolder
from holdfast.apps.cluster.remote.ledger import NOT_FOUND, Ledger, jobs_in, overdue
from holdfast.apps.cluster.remote.registry import InvocationRegistry
from holdfast.apps.cluster.remote.slurm import JobName, JobState
from holdfast.apps.cluster.watch.find import subject_from
from holdfast.errors import ClusterError, Unreachable, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from holdfast.apps.cluster.remote.ledger import Job
    from holdfast.apps.cluster.remote.slurm import State as SlurmState
    from holdfast.apps.cluster.remote.transport import Transport
    from holdfast.apps.cluster.watch.find import Subject

FRESH_SECONDS: Final = 120.0
"""how old `state.json` may be to count if the jobs cannot be seen"""

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
"""something happens without a user"""


class TaskPicture(State, frozen=True, kw_only=True):
    """One task: its progress as its main job saw it last, and what is known besides."""

    id: str
    name: str
    status: Status
    eta: float | None = None
    """seconds"""
    jobs: tuple[JobState, ...] = ()


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
    """the mark that `holdfast kill` left, if any"""
    unreachable: str | None = None
    """why the cluster, or its Slurm, could not be asked; the rest is then the last known status"""

    @property
    def live(self) -> bool:
        """True if something happens without a user."""
        return any(task.status in LIVE for task in self.tasks)


class Files(msgspec.Struct, frozen=True):
    """The small files of an invocation, as they were at one moment."""

    invocation: InvocationFile
    states: dict[int, State]
    starts: dict[int, list[StartRecord]]
    jobs: list[Job]
    stop: str | None
    stopped: frozenset[int]
    """tasks that were stopped one by one"""
    mine: bool
    """True if the invocation belongs to this user"""


_SMALL_FILES: Final = ("invocation.json", "stop", "jobs-*.jsonl", "state.json", "attempts.jsonl")


def read_files(transport: Transport, directory: str) -> Files:
    """Read the small files of an invocation at once. Files that come and go meanwhile, and torn lines, do not count."""
    try:
        mine, contents = transport.read_tree(directory, _SMALL_FILES)
    except FileNotFoundError:
        raise UsageError(f"{transport.host}: {directory} does not exist or is not accessible") from None
    path = layout.invocation_path(directory)
    if "invocation.json" not in contents:
        raise UsageError(f"{transport.host}: {path} does not exist, or cannot be read")
    invocation = layout.decode(contents["invocation.json"], InvocationFile, path)
    numbers = range(len(invocation.tasks))
    states: dict[int, State] = {}
    for number in numbers:
        if (data := contents.get(f"{number}/state.json")) is not None:
            states[number] = layout.decode(data, State, TaskFolder(directory, number).state)
    stop = contents.get("stop")
    return Files(
        invocation,
        states,
        {number: layout.decode_starts(contents.get(f"{number}/attempts.jsonl", b"")) for number in numbers},
        jobs_in(contents),
        None if stop is None else stop.decode(errors="replace").strip(),
        frozenset(number for number in numbers if f"{number}/stop" in contents),
        mine,
    )


def look(subject: Subject, registry: InvocationRegistry | None = None) -> Picture:
    """Return the current status, or the last known status and the reason if the cluster does not answer."""
    registry = registry or InvocationRegistry()
    try:
        files = read_files(subject.transport, subject.directory)
    except Unreachable as error:
        return last_status(subject, error.message, registry)
    unreachable = None
    states: list[JobState] | None = None
    try:
        if files.mine and overdue(files.jobs):
            find_executor(files.invocation.executor).settle(Ledger(subject.transport, subject.directory))
            files = read_files(subject.transport, subject.directory)
        states = jobs_of(subject.transport, files)
    except (Unreachable, ClusterError) as error:
        unreachable = error.message
    picture = describe(subject, files, states, unreachable)
    if unreachable is None:
        _Cache(registry).put(picture)
    return _select_task(picture, subject.task)


def look_at_all(registry: InvocationRegistry | None = None) -> list[Picture]:
    """Return the status of all invocations of this user, the newest first.

    Clusters are not asked about finished invocations, and only once if they do not answer.
    """
    registry = registry or InvocationRegistry()
    unreachable: dict[tuple[str | None, str | None], str] = {}
    pictures = []
    for entry in registry.all():
        subject, address = subject_from(entry), (entry.host, entry.user)
        try:
            picture = final_status(subject, registry)
            if picture is None and address in unreachable:
                picture = last_status(subject, unreachable[address], registry)
            picture = picture or look(subject, registry)
        except UsageError as error:  # its directory is gone, for example
            picture = last_status(subject, error.message, registry, reached=True)
        if picture.unreachable:
            unreachable[address] = picture.unreachable
        pictures.append(picture)
    return pictures


def _select_task(picture: Picture, task: int | None) -> Picture:
    if task is None:
        return picture
    tasks = tuple(each for each in picture.tasks if each.id.endswith(f".{task}"))
    return replace(picture, tasks=tasks)


def jobs_of(transport: Transport, files: Files) -> list[JobState]:
    """Return the jobs of an invocation as its executor sees them."""
    executor = find_executor(files.invocation.executor)
    return executor.states(transport, files.invocation.id, files.jobs, mine=files.mine, history=True)


def describe(
    subject: Subject, files: Files, states: Sequence[JobState] | None, unreachable: str | None = None
) -> Picture:
    """Describe an invocation; `states` is None if the executor could not be asked."""
    invocation = files.invocation
    known = _known_jobs(files.jobs, states)
    tasks = []
    for number, name in enumerate(invocation.tasks):
        jobs = tuple(job for job in known if (parts := JobName.parse(job.name)) and parts.task == number)
        state = files.states.get(number, State())
        status, reason = _status(files, number, state, jobs, unreachable)
        pending = None if state.total is None else max(0, state.total - state.done)
        progressing = status in ("running", "draining") and state.rate > 0
        progress = asdict(state) | {"reason": reason, "rate": state.rate if status in LIVE else 0.0}
        eta = pending / state.rate if progressing and pending is not None else None
        task = TaskPicture(id=f"{invocation.id}.{number}", name=name, status=status, eta=eta, jobs=jobs, **progress)
        tasks.append(task)
    return Picture(
        id=invocation.id,
        place=subject.transport.host,
        directory=subject.directory,
        tasks=tuple(tasks),
        executor=invocation.executor,
        profile=invocation.profile,
        user=invocation.user,
        created=invocation.created,
        looked=time.time(),
        stop=files.stop,
        unreachable=unreachable,
    )


def _known_jobs(jobs: Sequence[Job], states: Sequence[JobState] | None) -> list[JobState]:
    """Join the ledger's jobs with the executor's."""
    known: list[JobState] = []
    for job in jobs:
        matches = [state for state in states or () if job.matches(state) and job.id in (None, state.id)]
        if not matches and job.disowned is None:
            word: SlurmState = "unknown" if states is None or job.id is None else "gone"
            matches = [JobState(job.id or "", None, job.intent.name, "", word)]
        known += matches
    matched = {(state.name, state.handle) for state in known}
    # Those whose lines in the ledger are damaged.
    return known + [state for state in states or () if state.role and (state.name, state.handle) not in matched]


def _status(
    files: Files, number: int, state: State, jobs: Sequence[JobState], unreachable: str | None
) -> tuple[Status, str]:
    """Return the status of a task, and the reason."""
    if state.phase == "done":
        return "done", state.reason
    if state.phase == "stopped":
        return "stopped", state.reason
    if unreachable is not None:
        return "unknown", unreachable
    main = [job for job in jobs if job.role.startswith("main")]
    if any(job.state in ("running", "completing") for job in main):
        return ("starting" if state.phase == "waiting" else state.phase), state.reason
    waiting = [job for job in main if job.active]
    if waiting:
        # The first of them: a requeued job waits for its own reason, and its successor only for that job.
        submitted = [job for job in waiting if job.state != "unknown"]
        return "pending", submitted[0].why if submitted else "it is not known yet whether its job was submitted"
    if not files.mine and (jobs or state.updated) and not any(job.state != "gone" for job in jobs):
        if state.updated > time.time() - FRESH_SECONDS:
            return ("starting" if state.phase == "waiting" else state.phase), state.reason
        return "unknown", f"jobs of {files.invocation.user} are not visible to you, and its files are old"
    if files.stop is not None or number in files.stopped:
        return "stopped", "stopped by `holdfast kill`"
    if not jobs:
        return "unsubmitted", _why_unsubmitted(files, number)
    return "interrupted", _why_interrupted(files, number, jobs)


def _why_unsubmitted(files: Files, number: int) -> str:
    """Return why no job was ever submitted: the executor's message, if it refused one."""
    jobs = [job for job in files.jobs if (name := JobName.parse(job.intent.name)) and name.task == number]
    refused = [job.disowned for job in jobs if job.disowned and job.disowned != NOT_FOUND]
    return f"Slurm refused it: {refused[-1]}" if refused else "no job was submitted"


def _why_interrupted(files: Files, number: int, jobs: Sequence[JobState]) -> str:
    """Return why no main job is left, if this is known, and how many workers have not noticed it yet."""
    last = files.starts[number][-1] if files.starts[number] else None
    states = [job.state.replace("_", " ") for job in jobs if job.role.startswith("main") and job.state != "gone"]
    workers = sum(job.active for job in jobs)
    if isinstance(last, End):
        reason = f"the last main job ended: {last.why}"
    else:
        reason = f"no {'main ' if workers else ''}job is left" + (f"; the last one: {states[-1]}" if states else "")
    left = "1 worker job is left, which ends by itself"
    if workers > 1:
        left = f"{workers} worker jobs are left, which end by themselves"
    return f"{reason}; {left}" if workers else reason


class _Cache:
    """The last status of each invocation, for when the cluster does not answer."""

    def __init__(self, registry: InvocationRegistry) -> None:
        self._folder: Path = registry.folder.parent / "seen"

    def put(self, picture: Picture) -> None:
        with suppress(OSError):  # not essential
            layout.write(self._folder / f"{picture.id}.json", picture)

    def get(self, invocation: str) -> Picture | None:
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode((self._folder / f"{invocation}.json").read_bytes(), type=Picture)
        return None


def final_status(subject: Subject, registry: InvocationRegistry) -> Picture | None:
    """Return the last status if all tasks are done, so that nothing can have changed. The cluster is not asked."""
    last = None if subject.entry is None else _Cache(registry).get(subject.entry.id)
    return last if last is not None and all(task.status == "done" for task in last.tasks) else None


def last_status(subject: Subject, why: str, registry: InvocationRegistry, *, reached: bool = False) -> Picture:
    """Return the last status, all of which may be out of date, and why there is nothing newer."""
    entry = subject.entry
    invocation = entry.id if entry else subject.directory.rstrip("/").rpartition("/")[2]
    last = _Cache(registry).get(invocation)
    if last is None:
        names = entry.tasks if entry else ()
        last = Picture(
            id=invocation,
            place=subject.transport.host,
            directory=subject.directory,
            tasks=tuple(
                TaskPicture(id=f"{invocation}.{n}", name=name, status="unknown", reason=why)
                for n, name in enumerate(names)
            ),
            executor=entry.executor if entry else "slurm",
            profile=entry.profile if entry else None,
            created=entry.created if entry else None,
        )
    tasks = [
        task if task.status in ("done", "stopped") else replace(task, status="unknown", reason=why, eta=None)
        for task in last.tasks
    ]
    return _select_task(replace(last, tasks=tuple(tasks), unreachable=None if reached else why), subject.task)
