"""Run Slurm's programs, and read their output in one form: 22.05 to 25.11, with or without accounting.

A job is identified by its name, `hf-<invocation>.<task>.<role>`, and its comment, the intent it was submitted for. Its
id is no identity: a controller that was killed forgets jobs it has acknowledged and gives their ids to others. So jobs
are looked up by name, and cancelled by name, or by id and name together.

Jobs are read with `squeue --format`, whose fields have been the same for ten years; its JSON has not. Finished jobs
stay there for some minutes (MinJobAge); after that only `sacct` knows them, if there is accounting.

A controller that does not answer is `Unreachable`: that is neither "no jobs" nor "failed".
"""

from __future__ import annotations

import re
import shlex
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from holdfast.apps.cluster.remote.transport import TIMEOUT
from holdfast.errors import ClusterError, Unreachable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from holdfast.apps.cluster.remote.transport import Completed, Transport

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
    "gone",
]
"""`gone`: Slurm has forgotten the job"""
ACTIVE: Final[frozenset[State]] = frozenset({"pending", "running", "completing", "requeued", "unknown"})
"""states of jobs that may still run; an unknown state counts as one"""

_WORDS: Final[dict[State, str]] = {
    "pending": "PENDING RESV_DEL_HOLD",
    "running": "RUNNING CONFIGURING SUSPENDED STOPPED RESIZING SIGNALING",
    "completing": "COMPLETING STAGE_OUT",
    "completed": "COMPLETED",
    "failed": "FAILED",
    "cancelled": "CANCELLED REVOKED",
    "timeout": "TIMEOUT DEADLINE",
    "preempted": "PREEMPTED",
    "node_fail": "NODE_FAIL BOOT_FAIL LAUNCH_FAILED",
    "out_of_memory": "OUT_OF_MEMORY",
    "requeued": "REQUEUED REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT",
}
"""Slurm's words for each state"""
_STATES: Final = {word: state for state, words in _WORDS.items() for word in words.split()}

_REASONS: Final = (
    ("Priority", "other jobs are ahead of it in the queue"),
    ("Resources", "it is next, and waits until enough nodes are free"),
    ("QOSMaxJobsPerUser", "you run as many jobs as your QOS allows; it starts when one of them ends"),
    ("QOSMaxSubmitJobPerUser", "you have submitted as many jobs as your QOS allows"),
    ("QOSMaxWallDuration", "its time limit is longer than your QOS allows; ask for less time"),
    ("QOS", "it exceeds a limit of its QOS; it waits until other jobs of that QOS end"),
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
    ("JobHeldUser", "held by its owner; release with `scontrol release`"),
    ("JobHeldAdmin", "held by an administrator; ask them"),
    ("launch failed requeued held", "it could not be started, and is held by Slurm; release with `scontrol release`"),
    ("job requeued in held state", "it was requeued, and is held by Slurm; release with `scontrol release`"),
    ("JobHoldMaxRequeue", "it was requeued too often, and is held by Slurm; release with `scontrol release`"),
    ("BeginTime", "it starts at its time; after a requeue that is some two minutes later"),
    ("JobArrayTaskLimit", "as many members of its array run as are allowed at once"),
    ("Licenses", "it waits for a licence to become free"),
    ("NodeDown", "a node it needs is down"),
    ("Prolog", "its node is being prepared"),
    ("Cleaning", "it is being requeued, and its last start is still being cleaned up"),
    ("None", "Slurm has not looked at it yet"),
)


def explain(reason: str) -> str:
    """Return why a job is pending as a sentence, or else in Slurm's own word."""
    plain = reason.strip("()").replace("_", " ").lower()
    for word, sentence in _REASONS:
        if plain.startswith(word.lower()):
            return sentence
    return f"Slurm says {reason}"


class JobState(msgspec.Struct, frozen=True):
    """A job, or a member of an array, as Slurm describes it."""

    id: str
    """of the job; of the whole array for a member"""
    task: int | None
    """index in the array"""
    name: str
    comment: str
    state: State
    reason: str = ""
    """why it is pending, in Slurm's own word; see `why`"""
    nodes: str = ""
    start: float | None = None
    """seconds since the epoch; for a pending job the planned start, if Slurm knows it"""
    elapsed: float | None = None
    """seconds"""

    @property
    def handle(self) -> str:
        """The id in Slurm's programs: `12`, or `12_3` for a member of an array."""
        return self.id if self.task is None else f"{self.id}_{self.task}"

    @property
    def role(self) -> str:
        """The role in its name; empty for a job that is not one of Holdfast."""
        name = JobName.parse(self.name)
        return "" if name is None else name.role

    @property
    def active(self) -> bool:
        """True if the job may still run."""
        return self.state in ACTIVE

    @property
    def why(self) -> str:
        """Why the job is pending, as a sentence."""
        return explain(self.reason) if self.state in ("pending", "requeued") and self.reason else ""


class JobName(NamedTuple):
    """The parts of the name of a job."""

    invocation: str
    task: int
    role: str

    def __str__(self) -> str:
        return f"hf-{self.invocation}.{self.task}.{self.role}"

    @classmethod
    def parse(cls, name: str) -> JobName | None:
        """Parse a name; None if the job is not one of Holdfast."""
        match = re.fullmatch(r"hf-([0-9a-f]{16})\.(\d+)\.([a-z0-9-]+)", name)
        return None if match is None else cls(match[1], int(match[2]), match[3])


class Submission(NamedTuple):
    """A script that is to be submitted."""

    name: str
    comment: str
    script: str | bytes
    """the path of a file on the cluster, or the text itself"""
    options: Sequence[str] = ()
    env: Mapping[str, str] = MappingProxyType({})
    """for the script, unless the options forbid it; everybody sees it in the process list"""

    @property
    def command(self) -> bytes:
        """The shell command that submits it, and that ends the shell if it fails."""
        words = [*("env", *(f"{key}={value}" for key, value in self.env.items())), "sbatch", "--parsable"]
        words += [*self.options, f"--job-name={self.name}", f"--comment={self.comment}"]
        if isinstance(self.script, str):
            return f"{shlex.join([*words, self.script])} </dev/null || exit\n".encode()
        return f"{shlex.join(words)} <<'{_END}' || exit\n".encode() + self.script + f"\n{_END}\n".encode()


SUBMIT_SECONDS: Final = 10.0
"""how long sbatch may take for each of several jobs"""
_NEXT: Final = "=== next job ==="
_END: Final = "=== end of the script ==="
_SEPARATOR: Final = "\x1f"
_FIELDS: Final = ("%F", "%K", "%j", "%k", "%T", "%r", "%N", "%S", "%M")
# Users' own settings must neither hide jobs nor change the format of times.
_PLAIN: Final = (
    "env",
    *(f"-u{name}" for name in ("SLURM_CLUSTERS", "SQUEUE_ACCOUNT", "SQUEUE_LICENSES", "SQUEUE_NAMES")),
    *(f"-u{name}" for name in ("SQUEUE_PARTITION", "SQUEUE_QOS", "SQUEUE_STATES", "SQUEUE_USERS", "SQUEUE_SORT")),
    "SLURM_TIME_FORMAT=%s",
)
_IS_OVER: Final = re.compile(r"Invalid job id|already completing|has finished")
_UNREACHABLE: Final = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection (refused|reset|timed out)|Communication"
    r"|Zero Bytes were transmitted|Transport endpoint|not responding|Unable to establish|Protocol authentication"
    r"|failed to fetch config|Slurm backup controller|Unable to contact slurmdbd|Temporarily unavailable",
    re.IGNORECASE,
)


class Slurm:
    """Slurm as one user sees it, through a transport."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def submit(self, submissions: Sequence[Submission]) -> tuple[list[str], ClusterError | Unreachable | None]:
        """Submit scripts in one round trip until one fails; return the ids, and the failure.

        After ClusterError the next job was refused, and those after it were not tried. After Unreachable it is unknown
        which of the others were submitted.
        """
        # A line before each sbatch ends the script if nobody reads it: then at most one job is in transit.
        commands = [f"echo '{_NEXT}'\n".encode() + submission.command for submission in submissions]
        ids: list[str] = []
        try:
            completed = self.transport.run(
                ["sh"], input=b"".join(commands), timeout=TIMEOUT + SUBMIT_SECONDS * len(commands), once=True
            )
            outputs = completed.text.split(f"{_NEXT}\n")[1:]
            ids.extend(map(self._read_id, outputs if completed.code == 0 else outputs[:-1]))
            self._check(completed, "sbatch")
        except (ClusterError, Unreachable) as error:
            return ids, error
        return ids, None

    def _read_id(self, output: str) -> str:
        job = re.search(r"^(\d+)(?:;\S+)?$", output.strip(), re.MULTILINE)
        if job is None:
            raise Unreachable(f"{self.transport.host}: sbatch succeeded, but named no job: {output.strip()!r}")
        return job[1]

    def jobs(
        self, *, invocation: str | None = None, names: Collection[str] | None = None, mine: bool = True
    ) -> list[JobState]:
        """List the jobs of an invocation, or of these names, that are active or finished recently.

        `mine=False` includes jobs of other users.
        """
        if names is not None and not names:
            return []
        argv = [*_PLAIN, "squeue", "--noheader", "--array", "--states=all", f"--format={_SEPARATOR.join(_FIELDS)}"]
        if names is not None:
            argv.append(f"--name={','.join(names)}")
        if mine:
            argv.append("--me")
        listing = self._check(self.transport.run(argv), "squeue")
        jobs = [job for line in listing.text.splitlines() if (job := read_squeue(line)) is not None]
        if invocation is not None:
            jobs = [job for job in jobs if job.name.startswith(f"hf-{invocation}.")]
        if names is not None:
            jobs = [job for job in jobs if job.name in names]  # a name with a comma would have asked for more
        return jobs

    def query_accounting(self, names: Collection[str], *, since: float) -> list[JobState] | None:
        """List the jobs of these names with `sacct`, also long after their end; None without accounting.

        Accounting learns of a job's end some seconds late, and of its comment only if the cluster stores comments.
        """
        if not names:
            return []
        argv = [
            *(*_PLAIN, "sacct", "--noheader", "--parsable2", f"--delimiter={_SEPARATOR}", "--allocations"),
            *(f"--name={','.join(names)}", f"--starttime=now-{max(0, int(time.time() - since)) + 3600}seconds"),
            "--format=JobID,JobName,Comment,State,NodeList,Start,ElapsedRaw",
        ]
        listing = self.transport.run(argv)
        if listing.code == 127 or "accounting storage is disabled" in listing.stderr:
            return None
        self._check(listing, "sacct")
        jobs = [job for line in listing.text.splitlines() if (job := read_sacct(line)) is not None]
        return [job for job in jobs if job.name in names]

    def cancel(self, names: Iterable[str] = (), *, ids: Mapping[str, str] | None = None) -> None:
        """Cancel this user's jobs of these names, and single jobs or members of arrays: `ids` maps ids to names.

        Slurm itself compares id and name, so a job that reuses an id is not touched. Jobs that have ended are no error.
        """
        handles: dict[str, list[str]] = {name: [] for name in names}
        for handle, name in (ids or {}).items():
            handles.setdefault(name, []).append(handle)
        if wrong := [name for name in handles if JobName.parse(name) is None]:
            raise ValueError(f"not a job of ours: {wrong[0]!r}")  # an empty name would mean every job
        # In this order: see `kill`. One that fails must not keep the others from being cancelled.
        lines = [shlex.join(["scancel", "--me", f"--name={name}", "--", *own]) for name, own in handles.items()]
        script = "".join(f"{line} </dev/null || code=$?\n" for line in lines)
        completed = self.transport.run(["sh"], input=f"code=0\n{script}exit $code\n".encode())
        errors = [line for line in completed.stderr.splitlines() if not _IS_OVER.search(line)]
        if completed.code != 0 and (errors or completed.code == 127):
            self._check(completed._replace(stderr="\n".join(errors)), "scancel")

    def _check(self, completed: Completed, program: str) -> Completed:
        if completed.code == 0:
            return completed
        lines = (line.strip() for line in completed.stderr.splitlines())
        message = " ".join(filter(None, lines)) or f"exit code {completed.code}"
        place = self.transport.host
        if completed.code == 127:
            raise ClusterError(
                f"{place}: there is no {program}",
                remedy="Slurm's programs must be on the PATH of a non-login shell.",
            )
        if _UNREACHABLE.search(message):
            raise Unreachable(
                f"{place}: {message}", remedy="Slurm's controller does not answer; running jobs continue without it."
            )
        raise ClusterError(f"{place}: {message}")


def read_squeue(line: str) -> JobState | None:
    """Parse a line of `squeue`; None for anything else, such as a greeting."""
    parts = line.split(_SEPARATOR)
    if len(parts) != len(_FIELDS):
        return None
    job, task, name, comment, word, reason, nodes, start, elapsed = parts
    state = read_state(word)
    return JobState(
        id=job,
        task=int(task) if task.isdigit() else None,
        name=name,
        comment="" if comment == "(null)" else comment,
        state=state,
        reason=reason if state in ("pending", "requeued") else "",
        nodes=nodes,
        start=_time(start),
        elapsed=_duration(elapsed),
    )


def read_sacct(line: str) -> JobState | None:
    """Parse a line of `sacct`; None for anything else, and for members of an array that have not started."""
    parts = line.split(_SEPARATOR)
    if len(parts) != 7:
        return None
    handle, name, comment, state, nodes, start, elapsed = parts
    ids = re.fullmatch(r"(\d+)(?:_(\d+))?", handle)
    if ids is None:
        return None
    return JobState(
        id=ids[1],
        task=None if ids[2] is None else int(ids[2]),
        name=name,
        comment=comment,
        state=read_state(state),
        nodes="" if nodes == "None assigned" else nodes,
        start=_time(start),
        elapsed=float(elapsed) if elapsed.isdigit() else None,
    )


def read_state(text: str) -> State:
    """Parse Slurm's word for a state: `CANCELLED by 1000` and `CANCELLED+` are cancelled."""
    word = re.match(r"[A-Z_]*", text)
    return _STATES.get(word[0] if word else "", "unknown")


def _time(text: str) -> float | None:
    return float(text) if text.isdigit() and int(text) > 0 else None


def _duration(text: str) -> float | None:
    """Return the seconds of `1-02:03:04`, `2:03:04` or `3:04`."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
