"""Slurm's own programs, read as one normal form: 22.05 to 25.11, with or without accounting.

A job is known by its name, `hf-<invocation>.<task>.<role>`, and its comment, the intent it was submitted for. Its id is
only where Slurm keeps it: a controller that was killed forgets jobs it has acknowledged and gives their ids to others.
So jobs are looked up by name, and cancelled by name, or by id and name together.

Jobs are read with `squeue --format`, whose fields have been the same for ten years; its JSON has not. Finished jobs
stay there for some minutes (MinJobAge); after that only `sacct` knows them, where there is accounting.

A controller that does not answer is `Unreachable`: that is neither "no jobs" nor "failed".
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from holdfast.errors import ClusterError, Unreachable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from holdfast.cluster.remote.transport import Completed, Transport

State = Literal[
    "pending",
    "running",
    "completing",
    "completed",
    "failed",
    "cancelled",
    "timeout",
    "preempted",
    "node_fail",
    "out_of_memory",
    "requeued",
    "unknown",
]
ACTIVE: Final[frozenset[State]] = frozenset({"pending", "running", "completing", "requeued", "unknown"})
"""States after which something may still happen. What is not understood counts among them."""

_STATES: Final[dict[str, State]] = {
    "PENDING": "pending",
    "RUNNING": "running",
    "CONFIGURING": "running",
    "SUSPENDED": "running",
    "STOPPED": "running",
    "RESIZING": "running",
    "SIGNALING": "running",
    "COMPLETING": "completing",
    "STAGE_OUT": "completing",
    "COMPLETED": "completed",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "node_fail",
    "BOOT_FAIL": "node_fail",
    "LAUNCH_FAILED": "node_fail",
    "OUT_OF_MEMORY": "out_of_memory",
    "REQUEUED": "requeued",
    "REQUEUE_FED": "requeued",
    "REQUEUE_HOLD": "requeued",
    "SPECIAL_EXIT": "requeued",
    "RESV_DEL_HOLD": "pending",
}

_REASONS: Final = (
    ("Priority", "other jobs are ahead of it in the queue"),
    ("Resources", "it is next, and waits until enough nodes are free"),
    ("QOSMaxJobsPerUser", "you run as many jobs as your QOS allows; it starts when one of them ends"),
    ("QOSMaxSubmitJobPerUser", "you have submitted as many jobs as your QOS allows"),
    ("QOSMaxWallDuration", "its time limit is longer than your QOS allows; ask for less time"),
    ("QOS", "it would pass a limit of its QOS; it waits until other jobs of that QOS end"),
    ("AssocMaxJobs", "your account runs as many jobs as it may; it starts when one of them ends"),
    ("AssocMaxWallDuration", "its time limit is longer than your account allows; ask for less time"),
    ("AssocGrpCPUMinutes", "your account has used up its CPU time"),
    ("AssocGrpCpuLimit", "your account's jobs use as many CPUs as they may; it starts when one of them ends"),
    ("AssocGrpGRES", "your account's jobs use as many GPUs as they may; it starts when one of them ends"),
    ("AssocGrp", "your account's jobs together use as much as they may; it starts when one of them ends"),
    ("AccountNotAllowed", "the partition does not take jobs of this account; change account or partition"),
    ("InvalidAccount", "Slurm does not know this account; correct it in the profile"),
    ("InvalidQOS", "Slurm does not know this QOS; correct it in the profile"),
    ("PartitionTimeLimit", "its time limit is longer than the partition allows; ask for less time"),
    ("PartitionNodeLimit", "it asks for more nodes than the partition has or allows; ask for fewer"),
    ("PartitionDown", "the partition is closed for now"),
    ("PartitionInactive", "the partition is switched off; choose another"),
    ("PartitionConfig", "the partition can never give what it asks for; ask for less"),
    ("BadConstraints", "no node has what it asks for; change what it asks for"),
    ("ReqNodeNotAvail", "a node it needs is down, drained or reserved, perhaps for maintenance before its time limit"),
    ("Nodes required for job are DOWN", "nodes it needs are down, drained or reserved for others"),
    ("Reservation", "it waits for its reservation to begin"),
    (
        "DependencyNeverSatisfied",
        "a job it depends on ended in another way than required; it will never start, so cancel it",
    ),
    ("Dependency", "it waits for another job to end"),
    ("JobHeldUser", "its owner holds it; `scontrol release` lets it go"),
    ("JobHeldAdmin", "an administrator holds it; ask them"),
    ("launch failed requeued held", "it could not be started, and Slurm holds it; `scontrol release` lets it go"),
    ("job requeued in held state", "it was requeued, and Slurm holds it; `scontrol release` lets it go"),
    ("JobHoldMaxRequeue", "it was requeued too often, and Slurm holds it; `scontrol release` lets it go"),
    ("BeginTime", "it starts at its time; after a requeue that is some two minutes later"),
    ("JobArrayTaskLimit", "as many members of its array run as are allowed at once"),
    ("Licenses", "it waits for a licence to become free"),
    ("NodeDown", "a node it needs is down"),
    ("Prolog", "its node is being prepared"),
    ("Cleaning", "it is being requeued, and its last attempt is still being cleaned up"),
    ("None", "Slurm has not looked at it yet"),
)


def explain(reason: str) -> str:
    """Why a job is pending, as a sentence for people; Slurm's own word for it where there is none."""
    plain = reason.strip("()").replace("_", " ").lower()
    for word, sentence in _REASONS:
        if plain.startswith(word.lower()):
            return sentence
    return f"Slurm says {reason}"


class JobState(msgspec.Struct, frozen=True):
    """What Slurm knows about one job, or one member of an array."""

    id: str
    """of the job; of the whole array for a member"""
    task: int | None
    """index in the array"""
    name: str
    comment: str
    user: str
    state: State
    said: str
    """Slurm's own word for the state"""
    reason: str = ""
    """why it is pending, in Slurm's word; see `why`"""
    nodes: str = ""
    partition: str = ""
    submitted: float | None = None
    start: float | None = None
    """seconds since the epoch; of a pending job when Slurm means to start it, if it knows"""
    elapsed: float | None = None
    """seconds"""
    exit_code: int | None = None
    """of a finished job, where it can be learnt"""
    signal: int | None = None
    """that ended it"""

    @property
    def handle(self) -> str:
        """How Slurm's programs name it: `12`, or `12_3` for a member of an array."""
        return self.id if self.task is None else f"{self.id}_{self.task}"

    @property
    def active(self) -> bool:
        """Whether it may still run."""
        return self.state in ACTIVE

    @property
    def why(self) -> str:
        """The reason it is pending, as a sentence."""
        return explain(self.reason) if self.state in ("pending", "requeued") and self.reason else ""


class JobName(NamedTuple):
    """The parts of a name of ours."""

    invocation: str
    task: int
    role: str

    def __str__(self) -> str:
        return f"hf-{self.invocation}.{self.task}.{self.role}"

    @classmethod
    def parse(cls, name: str) -> JobName | None:
        """A name of ours in its parts; None for everybody else's."""
        found = re.fullmatch(r"hf-([0-9a-f]{16})\.(\d+)\.([a-z0-9-]+)", name)
        return None if found is None else cls(found[1], int(found[2]), found[3])


_SEPARATOR: Final = "\x1f"
_FIELDS: Final = ("%F", "%K", "%j", "%k", "%u", "%T", "%r", "%N", "%P", "%V", "%S", "%M")
# What users set for themselves must hide no job from us, nor change how a time is written.
_PLAIN: Final = (
    "env",
    *(f"-u{name}" for name in ("SLURM_CLUSTERS", "SQUEUE_ACCOUNT", "SQUEUE_LICENSES", "SQUEUE_NAMES")),
    *(f"-u{name}" for name in ("SQUEUE_PARTITION", "SQUEUE_QOS", "SQUEUE_STATES", "SQUEUE_USERS", "SQUEUE_SORT")),
    "SLURM_TIME_FORMAT=%s",
)
_SILENT: Final = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection refused|Connection timed out|Communication"
    r"|Zero Bytes were transmitted|Transport endpoint|not responding|Unable to establish|Protocol authentication"
    r"|failed to fetch config|Slurm backup controller|Unable to contact slurmdbd|Temporarily unavailable",
    re.IGNORECASE,
)


class Slurm:
    """Slurm as one user sees it, wherever `transport` leads."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def submit(
        self,
        script: bytes | str,
        *,
        name: str,
        comment: str,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Submit a script (its text as bytes, or the path of a file on the cluster) and return the job's id.

        `ClusterError`: Slurm refused. `Unreachable`: nobody knows whether the job was submitted; look for its name.
        `env` is seen by the script, unless the options forbid it, and by everybody in the process list.
        """
        done = self.transport.run(
            [
                *("env", *(f"{key}={value}" for key, value in (env or {}).items())),
                *("sbatch", "--parsable", *options, f"--job-name={name}", f"--comment={comment}"),
                *(() if isinstance(script, bytes) else (script,)),
            ],
            input=script if isinstance(script, bytes) else b"",
            once=True,
        )
        self._check(done, "sbatch")
        found = re.search(r"^(\d+)(?:;\S+)?$", done.text.strip(), re.MULTILINE)
        if found is None:
            raise Unreachable(f"{self.transport.place}: sbatch succeeded, but named no job: {done.text.strip()!r}")
        return found[1]

    def jobs(
        self, *, invocation: str | None = None, names: Collection[str] | None = None, mine: bool = True
    ) -> list[JobState]:
        """The jobs of an invocation, or of these names, that the controller knows: active and lately finished ones.

        `mine=False` also looks at other people's, for whoever looks at a colleague's run.
        """
        if names is not None and not names:
            return []
        argv = [*_PLAIN, "squeue", "--noheader", "--array", "--states=all", f"--format={_SEPARATOR.join(_FIELDS)}"]
        if names is not None:
            argv.append(f"--name={','.join(names)}")
        if mine:
            argv.append("--me")
        done = self._check(self.transport.run(argv), "squeue")
        jobs = [job for line in done.text.splitlines() if (job := read_squeue(line)) is not None]
        if invocation is not None:
            jobs = [job for job in jobs if job.name.startswith(f"hf-{invocation}.")]
        if names is not None:
            jobs = [job for job in jobs if job.name in names]  # a name with a comma would have asked for more
        return self._with_exit_codes(jobs)

    def _with_exit_codes(self, jobs: list[JobState]) -> list[JobState]:
        """Finished jobs with what they ended with, which versions of `squeue` write differently."""
        ids = sorted({job.id for job in jobs if not job.active})
        if not ids:
            return jobs
        script = 'for id; do scontrol --oneliner show job "$id"; done 2>/dev/null; true'
        shown = self.transport.run(["sh", "-c", script, "sh", *ids]).text
        codes = dict(filter(None, map(read_exit_code, shown.splitlines())))
        return [
            job
            if job.active or (job.name, job.handle) not in codes
            else msgspec.structs.replace(
                job, exit_code=codes[job.name, job.handle][0], signal=codes[job.name, job.handle][1] or None
            )
            for job in jobs
        ]

    def accounted(self, names: Collection[str], *, since: float) -> list[JobState] | None:
        """What `sacct` knows of the jobs of these names, also long after their end; None where there is no accounting.

        It learns of a job's end some seconds late, and of its comment only where the cluster keeps comments.
        """
        if not names:
            return []
        argv = [
            *(*_PLAIN, "sacct", "--noheader", "--parsable2", f"--delimiter={_SEPARATOR}", "--allocations"),
            *(f"--name={','.join(names)}", f"--starttime=now-{max(0, int(time.time() - since)) + 3600}seconds"),
            "--format=JobID,JobName,Comment,User,State,NodeList,Partition,Submit,Start,ElapsedRaw,ExitCode",
        ]
        done = self.transport.run(argv)
        if done.code == 127 or "accounting storage is disabled" in done.stderr:
            return None
        self._check(done, "sacct")
        jobs = [job for line in done.text.splitlines() if (job := read_sacct(line)) is not None]
        return [job for job in jobs if job.name in names]

    def cancel(self, names: Iterable[str] = (), *, ids: Mapping[str, str] | None = None) -> None:
        """Cancel this user's jobs of these names, and single jobs or members of arrays: `ids` says which name each has.

        Slurm itself compares id and name, so an id that has become somebody else's is left alone. Jobs that have
        ended are no error.
        """
        asked: list[tuple[str, list[str]]] = [(name, []) for name in names]
        asked += [(name, [handle]) for handle, name in (ids or {}).items()]
        for name, handles in asked:
            if JobName.parse(name) is None:
                raise ValueError(f"not a job of ours: {name!r}")  # an empty name would mean every job
            done = self.transport.run(["scancel", "--me", f"--name={name}", "--", *handles])
            if done.code != 0 and not re.search(r"Invalid job id|already completing|has finished", done.stderr):
                self._check(done, "scancel")

    def _check(self, done: Completed, program: str) -> Completed:
        if done.code == 0:
            return done
        said = " ".join(line.strip() for line in done.stderr.splitlines() if line.strip()) or f"exit code {done.code}"
        place = self.transport.place
        if done.code == 127:
            raise ClusterError(
                f"{place}: there is no {program}",
                remedy="Slurm's programs must be on the PATH of a shell that is not a login shell.",
            )
        if _SILENT.search(said):
            raise Unreachable(
                f"{place}: {said}", remedy="Slurm's controller does not answer; running jobs continue without it."
            )
        raise ClusterError(f"{place}: {said}")


def read_squeue(line: str) -> JobState | None:
    """A line of `squeue` in our format; None for anything else, such as a greeting."""
    parts = line.split(_SEPARATOR)
    if len(parts) != len(_FIELDS):
        return None
    job, task, name, comment, user, said, reason, nodes, partition, submitted, start, elapsed = parts
    state = read_state(said)
    return JobState(
        id=job,
        task=int(task) if task.isdigit() else None,
        name=name,
        comment="" if comment == "(null)" else comment,
        user=user,
        state=state,
        said=said,
        reason=reason if state in ("pending", "requeued") else "",
        nodes=nodes,
        partition=partition,
        submitted=_time(submitted),
        start=_time(start),
        elapsed=_duration(elapsed),
    )


def read_sacct(line: str) -> JobState | None:
    """A line of `sacct` in our format; None for anything else, and for the members of an array not yet started."""
    parts = line.split(_SEPARATOR)
    if len(parts) != 11:
        return None
    handle, name, comment, user, said, nodes, partition, submitted, start, elapsed, ended = parts
    found = re.fullmatch(r"(\d+)(?:_(\d+))?", handle)
    if found is None:
        return None
    state = read_state(said)
    code, _, signal = ended.partition(":")
    over = state not in ACTIVE
    return JobState(
        id=found[1],
        task=None if found[2] is None else int(found[2]),
        name=name,
        comment=comment,
        user=user,
        state=state,
        said=said,
        nodes="" if nodes == "None assigned" else nodes,
        partition=partition,
        submitted=_time(submitted),
        start=_time(start),
        elapsed=float(elapsed) if elapsed.isdigit() else None,
        exit_code=int(code) if over and code.isdigit() else None,
        signal=(int(signal) or None) if over and signal.isdigit() else None,
    )


def read_exit_code(line: str) -> tuple[tuple[str, str], tuple[int, int]] | None:
    """Name and handle, exit code and signal, out of a line of `scontrol --oneliner show job`."""
    job = re.search(r"(?:^JobId=\d+ ArrayJobId=|^JobId=)(\d+)", line)
    task = re.search(r" ArrayTaskId=(\d+) ", line)
    name = re.search(r" JobName=(\S+)", line)
    code = re.search(r" ExitCode=(\d+):(\d+)", line)
    if job is None or name is None or code is None:
        return None
    handle = job[1] if task is None else f"{job[1]}_{task[1]}"
    return (name[1], handle), (int(code[1]), int(code[2]))


def read_state(said: str) -> State:
    """Slurm's word for a state as ours: `CANCELLED by 1000` and `CANCELLED+` are cancelled."""
    word = re.match(r"[A-Z_]*", said)
    return _STATES.get(word[0] if word else "", "unknown")


def _time(text: str) -> float | None:
    return float(text) if text.isdigit() and int(text) > 0 else None


def _duration(text: str) -> float | None:
    """Seconds of `1-02:03:04`, `2:03:04` or `3:04`."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
