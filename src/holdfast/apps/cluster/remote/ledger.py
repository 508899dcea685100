"""Record which jobs were submitted. A crash at any point leaves no job unknown, and submits nothing twice.

Everything about an invocation is in its directory on the cluster, `<remote_job_dir>/holdfast/<id>/`, for any user who
can read it. Jobs are recorded there in `jobs-<writer>.jsonl`: sealed lines, synced before the next step. Each
process writes a file of its own, because appending from two machines to one file is not safe on a network file system.

    intent      before sbatch: the job's name, the digest of its script, who is about to submit it
    submitted   after sbatch: the id Slurm gave
    disowned    a later process found no such job: it does not count, and must not work if it appears after all

`sbatch` gets the intent's id as the job's comment, so `reconcile` finds out what became of an intent without an answer.
A job that was still in transit when it was disowned learns so at its start: `Ledger.is_disowned(os.environ[INTENT])`.

Processes take turns to submit. The turn is a directory, `submitting`, next to these files: of several processes that
create it, on whatever machines, one succeeds. A process that is killed leaves it there. The next one takes it over
at once on the same machine, and elsewhere when it has watched it for as long as a submission may take.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.apps.cluster.remote.slurm import SUBMIT_SECONDS, Submission
from holdfast.canonical import digest_bytes
from holdfast.errors import ClusterError, HoldfastError
from holdfast.store.lease import is_running, start_token
from holdfast.store.lines import is_sound, seal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from holdfast.apps.cluster.remote.slurm import JobName, JobState, Slurm
    from holdfast.apps.cluster.remote.transport import Transport

INTENT: Final = "HOLDFAST_INTENT"
"""the environment variable that holds the intent of a job"""
NOT_FOUND: Final = "no such job was found"
_AT_ONCE: Final = 200
"""jobs that are submitted in one round trip"""
DOUBT_SECONDS: Final = 120.0
"""how long a process that may be alive has to submit an intended job, before others may disown it"""

_POLL_SECONDS: Final = 1.0
_TAKEN: Final = 45
_TAKE: Final = f"""
take() {{ mkdir -- "$1" && echo "$2" >"$1/by"; }}
take "$@" 2>/dev/null && exit
# It may have been given back meanwhile; if it cannot be created, the second try says why.
test -d "$1" || {{ take "$@" && exit; }}
test -d "$1" || exit 1
cat -- "$1/by" 2>/dev/null; exit {_TAKEN}
"""
# Only what was seen is taken away: another process may have been faster.
_TAKE_AWAY: Final = """
test "$(cat -- "$1/by" 2>/dev/null)" = "$2" || exit 0
mv -- "$1" "$1.$3" && rm -rf -- "$1.$3"
"""


class Intent(msgspec.Struct, frozen=True, tag="intent", tag_field="kind"):
    """A job is about to be submitted."""

    intent: str
    name: str
    script: str
    """digest"""
    time: float
    host: str
    pid: int
    start: str
    """the submitting process's start token"""
    after: str | None = None
    """id of the job that this one continues, for a successor"""


class Submitted(msgspec.Struct, frozen=True, tag="submitted", tag_field="kind"):
    """Slurm accepted the job."""

    intent: str
    job: str
    time: float
    adopted: bool = False
    """found by `reconcile`, not answered by sbatch"""


class Disowned(msgspec.Struct, frozen=True, tag="disowned", tag_field="kind"):
    """The job was never submitted, or was refused; if it appears after all, it must not work."""

    intent: str
    time: float
    why: str


Record = Intent | Submitted | Disowned


class Job(msgspec.Struct, frozen=True):
    """A job as the records describe it."""

    intent: Intent
    id: str | None = None
    disowned: str | None = None
    """why it was disowned, if no job is known for the intent"""

    @property
    def open(self) -> bool:
        """True if it is unknown whether there is such a job."""
        return self.id is None and self.disowned is None

    def matches(self, state: JobState) -> bool:
        """Return True if Slurm describes this job. The id proves nothing: ids are reused.

        The comment distinguishes jobs of one name. Some clusters keep no comments, or write their own.
        """
        intent = re.match(r"[0-9a-f]{16}(?= |$)", state.comment)
        return state.name == self.intent.name and (intent is None or intent[0] == self.intent.intent)


def fold(records: Sequence[Record]) -> list[Job]:
    """Return the jobs of the records, in the order of their intents. A job that exists was not disowned in time."""
    jobs: dict[str, Job] = {}
    for record in sorted(records, key=lambda record: not isinstance(record, Intent)):
        job = jobs.get(record.intent)
        if isinstance(record, Intent):
            jobs.setdefault(record.intent, Job(record))
        elif job is None:
            continue  # its intent's line is damaged; the job is found by its name
        elif isinstance(record, Submitted):
            jobs[record.intent] = Job(job.intent, record.job)
        elif job.id is None:
            jobs[record.intent] = Job(job.intent, None, record.why)
    return sorted(jobs.values(), key=lambda job: job.intent.time)


def read_records(data: bytes) -> list[Record]:
    """Return the records in lines of a ledger. Torn and damaged lines do not count."""
    return [msgspec.json.decode(line, type=Record) for line in data.split(b"\n") if is_sound(line)]


def jobs_in(files: Mapping[str, bytes]) -> list[Job]:
    """Return the jobs that the files of an invocation record, given by name."""
    return fold([record for name, data in files.items() if name.startswith("jobs-") for record in read_records(data)])


class Reconciled(NamedTuple):
    """The intents without an answer, by what became of them."""

    adopted: list[Job]
    disowned: list[Job]
    doubtful: list[Job]
    """the process that intended them may still be about to submit them"""


class Ledger:
    """The record of an invocation's jobs, in its directory on the cluster."""

    def __init__(
        self, transport: Transport, directory: str, *, mirror: Callable[[Sequence[Record]], None] | None = None
    ) -> None:
        """Pass written records on to `mirror`; see `Registry.mirror`."""
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
        """Return the records of all writers. Torn and damaged lines do not count."""
        return read_records(self.transport.read_all(self.directory, "jobs-*.jsonl"))

    def jobs(self) -> list[Job]:
        """Return every job that was intended."""
        return fold(self.records())

    def disowned(self) -> set[str]:
        """Return the intents that were disowned."""
        return {record.intent for record in self.records() if isinstance(record, Disowned)}

    def is_disowned(self, intent: str) -> bool:
        """Return True if an intent was disowned. A job asks this at its start, and ends if so."""
        return intent in self.disowned()


class JobScript(NamedTuple):
    """A script, and the job that it is for."""

    name: JobName
    text: bytes
    path: str = ""
    """on the cluster, if it lies there"""
    comment: str = ""
    """follows the intent in the job's comment"""
    options: Sequence[str] = ()
    after: str | None = None
    """the id of the job that this one continues; `options` must make Slurm wait for that job"""


class Submitter:
    """Submits jobs of one invocation so that none is lost and none is submitted twice."""

    def __init__(self, slurm: Slurm, ledger: Ledger) -> None:
        self.slurm = slurm
        self.ledger = ledger

    def submit(self, script: JobScript) -> Job:
        """Submit one script, as `submit_all` does."""
        (job,) = self.submit_all([script])
        return job

    def submit_all(self, scripts: Sequence[JobScript]) -> list[Job]:
        """Record intents, submit the scripts, and record their ids: in few round trips, however many they are.

        ClusterError: Slurm refused one, which is recorded; those before it are submitted, those after it are not.
        Unreachable: unknown from there on; `reconcile` finds out.
        """
        submitted: list[Job] = []
        for first in range(0, len(scripts), _AT_ONCE):
            batch = scripts[first : first + _AT_ONCE]
            intents = [new_intent(script.name, script.text, script.after) for script in batch]
            self.ledger.write(*intents)
            submissions = [
                Submission(
                    intent.name,
                    f"{intent.intent} {script.comment}".rstrip(),
                    script.path or script.text,
                    script.options,
                    {INTENT: intent.intent},
                )
                for intent, script in zip(intents, batch, strict=True)
            ]
            ids, error = self.slurm.submit(submissions)
            now = time.time()
            records: list[Record] = [
                Submitted(intent.intent, job, now) for intent, job in zip(intents, ids, strict=False)
            ]
            if isinstance(error, ClusterError):
                refused, *skipped = intents[len(ids) :]
                records.append(Disowned(refused.intent, now, error.message))
                records += [Disowned(intent.intent, now, NOT_FOUND) for intent in skipped]
            self.ledger.write(*records)
            submitted += [Job(intent, job) for intent, job in zip(intents, ids, strict=False)]
            if error is not None:
                raise error
        self._cancel_disowned(submitted)
        return submitted

    def _cancel_disowned(self, jobs: Sequence[Job]) -> None:
        """Cancel jobs that another process has disowned meanwhile, since its own jobs count: this one was too slow."""
        if not jobs:
            return
        disowned = self.ledger.disowned()
        late = {job.id: job.intent.name for job in jobs if job.id is not None and job.intent.intent in disowned}
        if late:
            self.slurm.cancel(ids=late)
            names = ", ".join(late.values())
            raise ClusterError(
                f"job {', '.join(late)} was cancelled: another process has taken over the submission of {names}"
            )

    def reconcile(self, *, doubt: float = DOUBT_SECONDS) -> Reconciled:
        """Find out what became of every intent that has no answer.

        A job of its name and comment is adopted. Without such a job the intent is disowned if it is `overdue`.
        """
        jobs = self.ledger.jobs()
        waiting = [job for job in jobs if job.open]
        others = {(job.intent.name, job.id) for job in jobs if job.id is not None}
        adopted = self._adopt(waiting, others)
        intents = {job.intent.intent for job in adopted}
        missing = [job for job in waiting if job.intent.intent not in intents]
        late = overdue(jobs, doubt)
        disowned = [job for job in missing if job in late]
        doubtful = [job for job in missing if job not in disowned]
        if disowned:
            now = time.time()
            self.ledger.write(*(Disowned(job.intent.intent, now, NOT_FOUND) for job in disowned))
            # Look again after writing. A submitter writes, then looks, so at least one of the two sees the other.
            appeared = self._adopt(disowned, others)
            adopted += appeared
            intents = {job.intent.intent for job in appeared}
        return Reconciled(
            adopted,
            [msgspec.structs.replace(job, disowned=NOT_FOUND) for job in disowned if job.intent.intent not in intents],
            doubtful,
        )

    def _adopt(self, waiting: Sequence[Job], others: Collection[tuple[str, str | None]]) -> list[Job]:
        """Record the jobs that Slurm has for these intents. `others` are names and ids of jobs of other intents."""
        if not waiting:
            return []
        names = sorted({job.intent.name for job in waiting})
        since = min(job.intent.time for job in waiting)
        states = [*self.slurm.jobs(names=names), *(self.slurm.query_accounting(names, since=since) or [])]
        adopted = []
        for job in waiting:
            matches = [state for state in states if job.matches(state) and (state.name, state.id) not in others]
            if matches:
                self.ledger.write(Submitted(job.intent.intent, matches[0].id, time.time(), adopted=True))
                adopted.append(msgspec.structs.replace(job, id=matches[0].id, disowned=None))
        return adopted


def new_intent(name: JobName, script: bytes, after: str | None = None) -> Intent:
    """Return the intent of this process to submit a job."""
    return Intent(
        intent=secrets.token_hex(8),
        name=str(name),
        script=digest_bytes(script),
        time=time.time(),
        host=os.uname().nodename,
        pid=os.getpid(),
        after=after,
        start=start_token(os.getpid()),
    )


def overdue(jobs: Sequence[Job], doubt: float = DOUBT_SECONDS) -> list[Job]:
    """Return the intents without an answer, of all `jobs` of an invocation, whose processes can no longer submit them.

    A process that has died on this machine cannot; any other has `doubt` seconds, and more if it submits many jobs.
    """
    together = Counter((job.intent.host, job.intent.pid) for job in jobs)
    return [
        job
        for job in jobs
        if job.open
        and not _may_submit(job.intent, doubt + SUBMIT_SECONDS * (together[job.intent.host, job.intent.pid] - 1))
    ]


def _may_submit(intent: Intent, doubt: float) -> bool:
    """Return True if the process that wrote an intent may still be about to submit the job."""
    if time.time() - intent.time > doubt:
        return False
    if intent.host != os.uname().nodename:
        return True
    return intent.pid != os.getpid() and is_running(intent.pid, intent.start)


@contextmanager
def hold_turn(transport: Transport, directory: str, say: Callable[[str], None]) -> Iterator[None]:
    """Wait until no other process submits jobs of an invocation, and keep others from doing so."""
    path = f"{directory.rstrip('/')}/submitting"
    pid = os.getpid()
    note = f"{os.uname().nodename} {pid} {start_token(pid)} {secrets.token_hex(4)}"
    seen, since = None, 0.0
    while (holder := _take(transport, path, note)) is not None:
        now = time.monotonic()
        if holder != seen:
            seen, since = holder, now
            say(f"another process is submitting its jobs ({_describe_holder(holder)}); waiting for it")
        if _is_dead(holder) or now - since > DOUBT_SECONDS:
            transport.run(["sh", "-c", _TAKE_AWAY, "sh", path, holder, secrets.token_hex(4)])
        else:
            time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        with suppress(HoldfastError):
            transport.run(["sh", "-c", _TAKE_AWAY, "sh", path, note, secrets.token_hex(4)])


def _take(transport: Transport, path: str, note: str) -> str | None:
    """Try to take the turn; return the note of the process that has it."""
    taken = transport.run(["sh", "-c", _TAKE, "sh", path, note])
    if taken.code == 0:
        return None
    if taken.code != _TAKEN:
        raise ClusterError(f"{transport.host}: {path}: {taken.stderr.strip() or 'cannot be created'}")
    holder = taken.text.strip()
    return None if holder == note else holder  # the answer to the first try may have been lost


def _is_dead(note: str) -> bool:
    host, pid, start = (*note.split(" "), "", "", "")[:3]
    return host == os.uname().nodename and pid.isdigit() and not is_running(int(pid), start)


def _describe_holder(note: str) -> str:
    host, pid = (*note.split(" "), "", "")[:2]
    return f"process {pid} on {host}" if pid else "unknown"
