"""Who submitted what. A crash at any point leaves no job that nobody knows of, and submits nothing twice.

Everything of an invocation lies in its directory on the cluster, `<remote_job_dir>/holdfast/<id>/`, where any user who
can read it finds it. Jobs are recorded there in `jobs-<writer>.jsonl`: sealed lines, synced before the next step. Each
process writes a file of its own, because appending from two machines to one file is not safe on a network file system.

    intent      before sbatch: the job's name, the digest of its script, who is about to submit it
    submitted   after sbatch: the id Slurm gave
    disowned    whoever came later found no such job: it does not count, and must not work if it appears after all

`sbatch` gets the intent's id as the job's comment, so `reconcile` finds out what became of an intent without an answer.
A job that still lay on its way when it was disowned is told at its start: `Ledger.disowned(os.environ[INTENT])`.

The invocations of this user on this machine are listed in `$HOLDFAST_HOME/invocations` (default `~/.holdfast`), with a
copy of the records. It is a convenience; the directory on the cluster is the truth.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from holdfast.canonical import digest_bytes
from holdfast.errors import ClusterError, UsageError
from holdfast.store.durable import make_directory, replacing
from holdfast.store.lines import is_sound, seal
from holdfast.store.processes import is_running, start_token

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from holdfast.cluster.remote.slurm import JobName, JobState, Slurm
    from holdfast.cluster.remote.transport import Transport

INTENT: Final = "HOLDFAST_INTENT"
"""The environment variable that tells a job the intent it was submitted for."""
NOT_FOUND: Final = "no such job was found"
DOUBT_SECONDS: Final = 120.0
"""How long somebody who may be alive has to submit what they intend, before others may disown it."""


def new_invocation() -> str:
    """The id of a new invocation: 16 hex digits. Its tasks are `<id>.0`, `<id>.1`, …"""
    return secrets.token_hex(8)


class Intent(msgspec.Struct, frozen=True, tag="intent", tag_field="kind"):
    """A job is about to be submitted."""

    intent: str
    name: str
    script: str
    """digest"""
    time: float
    host: str
    pid: int
    after: str | None = None
    """id of the job that this one continues, where it is queued as a successor"""
    start: str = ""
    """the submitting process's start token; empty in records of earlier versions"""


class Submitted(msgspec.Struct, frozen=True, tag="submitted", tag_field="kind"):
    """Slurm took it."""

    intent: str
    job: str
    time: float
    adopted: bool = False
    """found by `reconcile`, not answered by sbatch"""


class Disowned(msgspec.Struct, frozen=True, tag="disowned", tag_field="kind"):
    """It was never submitted, or refused; if it appears after all, it must not work."""

    intent: str
    time: float
    why: str


Record = Intent | Submitted | Disowned


class Job(msgspec.Struct, frozen=True):
    """What the records say of one intent."""

    intent: Intent
    id: str | None = None
    disowned: str | None = None
    """why, if it was and no job of it is known"""

    @property
    def open(self) -> bool:
        """Whether nobody knows yet if there is such a job."""
        return self.id is None and self.disowned is None

    def is_seen_in(self, state: JobState) -> bool:
        """Whether Slurm speaks of this very job. The id proves nothing: ids are used again.

        The comment tells apart jobs of one name. Some clusters keep none, or write one of their own.
        """
        found = re.match(r"[0-9a-f]{16}(?= |$)", state.comment)
        return state.name == self.intent.name and (found is None or found[0] == self.intent.intent)


def fold(records: Sequence[Record]) -> list[Job]:
    """The jobs that records speak of, in the order of their intents. A job that exists was not disowned in time."""
    jobs: dict[str, Job] = {}
    for record in sorted(records, key=lambda record: not isinstance(record, Intent)):
        known = jobs.get(record.intent)
        if isinstance(record, Intent):
            jobs.setdefault(record.intent, Job(record))
        elif known is None:
            continue  # its intent's line is damaged; the job is found by its name
        elif isinstance(record, Submitted):
            jobs[record.intent] = Job(known.intent, record.job)
        elif known.id is None:
            jobs[record.intent] = Job(known.intent, None, record.why)
    return sorted(jobs.values(), key=lambda job: job.intent.time)


class Reconciled(NamedTuple):
    """What became of the intents without an answer."""

    adopted: list[Job]
    disowned: list[Job]
    doubtful: list[Job]
    """whoever intended them may still be about to submit them"""


class Ledger:
    """The record of an invocation's jobs, in its directory on the cluster."""

    def __init__(
        self, transport: Transport, directory: str, *, mirror: Callable[[Sequence[Record]], None] | None = None
    ) -> None:
        """`mirror` is given what is written, after it is; see `Registry.mirror`."""
        self.transport = transport
        self.directory = directory.rstrip("/")
        self._mirror = mirror
        self._file = f"{self.directory}/jobs-{secrets.token_hex(4)}.jsonl"

    def write(self, *records: Record) -> None:
        """Append records; returns once they are on the cluster's medium."""
        self.transport.append(self._file, b"".join(seal(msgspec.json.encode(record)) for record in records))
        if self._mirror is not None:
            self._mirror(records)

    def records(self) -> list[Record]:
        """What all writers have written. A line that is torn or damaged does not count."""
        # The echo: what follows a torn last line must stay a line.
        script = 'for file in "$1"/jobs-*.jsonl; do test -e "$file" || exit 0; cat -- "$file" || exit; echo; done'
        done = self.transport.check(["sh", "-c", script, "sh", self.directory])
        return [msgspec.json.decode(line, type=Record) for line in done.stdout.split(b"\n") if is_sound(line)]

    def jobs(self) -> list[Job]:
        """Every job that was intended."""
        return fold(self.records())

    def disowned(self, intent: str) -> bool:
        """What a job asks at its start: whether nobody counts on it any more, so that it must end without working."""
        return any(isinstance(record, Disowned) and record.intent == intent for record in self.records())


class Submitter:
    """Submits jobs of one invocation so that none is lost and none is submitted twice."""

    def __init__(self, slurm: Slurm, ledger: Ledger) -> None:
        self.slurm = slurm
        self.ledger = ledger

    def submit(
        self,
        name: JobName,
        script: bytes,
        *,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        comment: str = "",
        after: str | None = None,
    ) -> Job:
        """Record the intent, submit, record the id. `comment` stands behind the intent in the job's comment.

        `after` records which job this one continues; making Slurm wait for that job is up to `options`.

        `ClusterError`: Slurm refused, and that is recorded. `Unreachable`: unknown; `reconcile` finds out.
        """
        intent = Intent(
            intent=secrets.token_hex(8),
            name=str(name),
            script=digest_bytes(script),
            time=time.time(),
            host=os.uname().nodename,
            pid=os.getpid(),
            after=after,
            start=start_token(os.getpid()),
        )
        self.ledger.write(intent)
        try:
            job = self.slurm.submit(
                script,
                name=intent.name,
                comment=f"{intent.intent} {comment}".rstrip(),
                options=options,
                env={**(env or {}), INTENT: intent.intent},
            )
        except ClusterError as error:
            self.ledger.write(Disowned(intent.intent, time.time(), error.message))
            raise
        self.ledger.write(Submitted(intent.intent, job, time.time()))
        if self.ledger.disowned(intent.intent):  # we were so slow that somebody gave us up: theirs counts
            self.slurm.cancel(ids={job: intent.name})
            raise ClusterError(
                f"job {job} was cancelled: another process has taken over the submission of {intent.name}"
            )
        return Job(intent, job)

    def reconcile(self, *, doubt: float = DOUBT_SECONDS) -> Reconciled:
        """Find out what became of every intent that has no answer.

        A job of its name and comment is adopted. Where there is none the intent is disowned, unless whoever had it
        may still be at it; so a process that is dead on this machine is given up at once, others after `doubt` seconds.
        """
        known = self.ledger.jobs()
        waiting = [job for job in known if job.open]
        others = {(job.intent.name, job.id) for job in known if job.id is not None}
        adopted = self._adopt(waiting, others)
        found = {job.intent.intent for job in adopted}
        missing = [job for job in waiting if job.intent.intent not in found]
        given_up = [job for job in missing if not _may_live(job.intent, doubt)]
        doubtful = [job for job in missing if job not in given_up]
        if given_up:
            now = time.time()
            self.ledger.write(*(Disowned(job.intent.intent, now, NOT_FOUND) for job in given_up))
            # Looking again after writing: whoever submits writes, then looks. So at least one sees the other.
            late = self._adopt(given_up, others)
            adopted += late
            found = {job.intent.intent for job in late}
        return Reconciled(
            adopted,
            [msgspec.structs.replace(job, disowned=NOT_FOUND) for job in given_up if job.intent.intent not in found],
            doubtful,
        )

    def _adopt(self, waiting: Sequence[Job], others: Collection[tuple[str, str | None]]) -> list[Job]:
        """Record the jobs that Slurm has for these intents; `others` are names and ids of jobs of other intents."""
        if not waiting:
            return []
        names = sorted({job.intent.name for job in waiting})
        since = min(job.intent.time for job in waiting)
        states = [*self.slurm.jobs(names=names), *(self.slurm.accounted(names, since=since) or [])]
        adopted = []
        for job in waiting:
            seen = [state for state in states if job.is_seen_in(state) and (state.name, state.id) not in others]
            if seen:
                self.ledger.write(Submitted(job.intent.intent, seen[0].id, time.time(), adopted=True))
                adopted.append(msgspec.structs.replace(job, id=seen[0].id, disowned=None))
        return adopted


def _may_live(intent: Intent, doubt: float) -> bool:
    """Whether whoever wrote an intent may still be about to submit it."""
    if time.time() - intent.time > doubt:
        return False
    if intent.host != os.uname().nodename:
        return True
    return intent.pid != os.getpid() and is_running(intent.pid, intent.start)


class Invocation(msgspec.Struct, frozen=True):
    """One command that submitted something, as the registry keeps it."""

    id: str
    created: float
    directory: str
    """on the cluster, or here when `host` is None"""
    tasks: tuple[str, ...]
    """what `<id>.0`, `<id>.1`, … are, by name"""
    executor: str = "slurm"
    host: str | None = None
    user: str | None = None
    identity: str | None = None
    profile: str | None = None
    details: dict[str, Any] = {}
    """whatever else the command wants to remember"""
    jobs: tuple[Record, ...] = ()
    """a copy of the records written from this machine"""


class Registry:
    """This user's invocations on this machine, a file each."""

    def __init__(self, folder: Path | None = None) -> None:
        home = Path(os.environ.get("HOLDFAST_HOME") or Path.home() / ".holdfast")
        self.folder = folder or home / "invocations"

    def add(self, invocation: Invocation) -> None:
        """Keep an invocation; one of the same id is replaced."""
        make_directory(self.folder)
        with replacing(self.folder / f"{invocation.id}.json") as file:
            file.write(msgspec.json.format(msgspec.json.encode(invocation)) + b"\n")

    def remove(self, invocation: str) -> None:
        """Forget an invocation of which nothing was submitted."""
        (self.folder / f"{invocation}.json").unlink(missing_ok=True)

    def get(self, invocation: str) -> Invocation:
        """The invocation of this very id."""
        path = self.folder / f"{invocation}.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=Invocation)
        except FileNotFoundError:
            raise UsageError(f"there is no invocation {invocation} in {self.folder}") from None
        except msgspec.DecodeError as error:
            raise UsageError(
                f"{path}: {error}", remedy="Remove it; the run itself is found by its directory on the cluster."
            ) from None

    def all(self) -> list[Invocation]:
        """Every invocation, the newest first."""
        found = [self.get(path.stem) for path in self.folder.glob("*.json") if not path.name.startswith(".")]
        return sorted(found, key=lambda invocation: -invocation.created)

    def resolve(self, text: str) -> tuple[Invocation, int | None]:
        """The invocation, and the task if one is named, that `480d3c89bfe4a55c`, `480d`, `480d.0` mean."""
        found = re.fullmatch(r"([0-9a-f]{1,16})(?:\.(\d+))?", text)
        if found is None:
            raise UsageError(
                f"{text!r} is not the id of an invocation", remedy="Ids are 16 hex digits, with `.0` for a task."
            )
        prefix, task = found[1], None if found[2] is None else int(found[2])
        names = sorted(path.stem for path in self.folder.glob(f"{prefix}*.json"))
        if not names:
            raise UsageError(
                f"there is no invocation {prefix} in {self.folder}",
                remedy="A run of somebody else, or from another machine, is named by its directory on the cluster.",
            )
        if len(names) > 1:
            raise UsageError(
                f"{prefix} is the beginning of {len(names)} ids: {', '.join(names)}", remedy="Give more digits."
            )
        invocation = self.get(names[0])
        if task is not None and task >= len(invocation.tasks):
            raise UsageError(f"{invocation.id} has {len(invocation.tasks)} tasks, from .0; there is no .{task}")
        return invocation, task

    def mirror(self, invocation: str) -> Callable[[Sequence[Record]], None]:
        """What a `Ledger` calls to have its records copied to this invocation."""

        def copy(records: Sequence[Record]) -> None:
            known = self.get(invocation)
            self.add(msgspec.structs.replace(known, jobs=(*known.jobs, *records)))

        return copy
