"""The right to write a run: a lease file with a heartbeat, which also works between machines.

A process takes a lease by creating the file, which fails if the file exists. The file names its holder and a random
token; the holder rewrites it a few times per lease, and reads its token back before it writes anything else. A holder
that is known to be dead is replaced at once: its process on this machine has ended, or its Slurm job has. Any other
holder is replaced once its file has not changed for a whole lease. That is observed, never computed: what counts is a
change within a lease by this process's own clock, whatever the clock of the other machine says.

Only four operations are used, which every file system has: create exclusively, read, write, rename. Not `flock`,
which network file systems do not share between machines; not hard links or an exchange of two names, which NFS, SMB,
exFAT or FUSE refuse; not inode numbers, which FUSE may change; not the time of a file, which exFAT rounds to two
seconds and NFS caches for up to a minute. Opening a file is what makes NFS look at the server, so leases are read.

Replacing a holder, step by step:

1. read the file: it still has the bytes that were watched
2. rename it to a name of our own: of several contenders, one succeeds
3. read what was renamed: if it is not what was watched, its holder has returned or another process was faster, and
   the bytes are put back, by creating the file exclusively
4. create the file, as anybody else may who comes at this moment

A holder whose file is missing for the instant between 2 and 3 looks again before it gives up. Tokens, not files, decide
who holds the lease, so at each moment at most one process does; a process that lost it finds out before its next write.

Process ids are reused, so what names a process also holds a start token: the time at which the process was started, as
the system counts it. On Linux that is the number of clock ticks since boot in `/proc/PID/stat`; elsewhere the start in
seconds, from `ps`.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import shlex
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.errors import RunHeld, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence


def _lease_seconds() -> float:
    text = os.environ.get("HOLDFAST_LEASE_SECONDS") or "30"
    try:
        if 1 <= (seconds := float(text)) < math.inf:
            return seconds
    except ValueError:
        pass
    raise UsageError(f"HOLDFAST_LEASE_SECONDS is {text!r}; expected a number of seconds, at least 1")


LEASE_SECONDS: Final = _lease_seconds()
"""Seconds without a heartbeat after which other machines take a run from this process."""
HELD_REMEDY: Final = "Wait for it with --wait (or HOLDFAST_LOCK_TIMEOUT=seconds), or stop it first."
_NAMELESS_SECONDS: Final = 2.0
"""Seconds that a lease may name no holder, since it may be in the middle of being written."""
_ASK_SECONDS: Final = 10.0
"""Seconds between two questions to Slurm about the jobs of holders, at least."""
_ANSWER_SECONDS: Final = 20
"""Seconds that Slurm has to answer."""
_MOST_BYTES: Final = 4096
# Not NODE_FAIL: processes of a node that Slurm cannot reach, or of a requeued job, may still run.
_ENDED: Final = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY", "PREEMPTED"})


_PROC: Final = Path("/proc")


class SlurmJob(msgspec.Struct, frozen=True):
    """The Slurm job of a holder: a process on another node cannot be looked up, but its job can.

    The name is a part of the identity, since a controller that was killed may reuse ids.
    """

    id: str
    """unique also for each member of an array"""
    name: str


class Holder(msgspec.Struct, frozen=True):
    """The process that holds a run: the content of a lease."""

    host: str
    pid: int
    since: float
    finishing: bool = False
    """all trials are finished, and the process writes the report"""
    start: str = ""
    """the process's start token"""
    system: str = ""
    """the boot and the PID namespace that the process id belongs to: two containers may have the same host name"""
    job: SlurmJob | None = None
    """the Slurm job that the process belongs to"""
    lease: float = LEASE_SECONDS
    """seconds after which a holder without a heartbeat is replaced"""
    token: str = ""
    beat: int = 0
    """the holder's monotonic clock in nanoseconds at its last heartbeat"""

    @property
    def _is_of_this_system(self) -> bool:
        return self.host == os.uname().nodename and self.system == this_system()

    @property
    def is_here(self) -> bool:
        """True if the process runs on this machine."""
        return self._is_of_this_system and is_running(self.pid, self.start)

    @property
    def is_dead(self) -> bool:
        """True if this is the holder's machine and the process has ended."""
        return self._is_of_this_system and not is_running(self.pid, self.start)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"


class RunLease:
    """The right to write one run directory, or one worker's part of it."""

    def __init__(self, path: Path, *, lost: Callable[[], None] = lambda: None, finishing: bool = False) -> None:
        self._path = path
        self._lost = lost
        self._finishing = finishing
        self._own: Holder | None = None
        """this process, while it holds the lease"""
        self._released = Event()
        self.inherited = False
        """this object removed the lease of a dead holder"""
        self._seen: bytes | None = None
        """the content of the file when this object last looked"""
        self._seen_holder: Holder | None = None
        self._seen_since = math.inf
        self._alive_at = -math.inf
        """when a heartbeat was last observed"""

    def acquire(self, wait: float, notice: Callable[[str], None] = lambda _: None) -> None:
        """Take the lease, waiting up to `wait` seconds for a live holder, or forever if `wait` is negative."""
        if take_leases([self], notice, wait=wait):
            raise RunHeld(f"another process holds this run: {self.describe()}", remedy=HELD_REMEDY)

    def take_if_dead(self) -> bool:
        """Take the lease if it is free or its holder is known to be dead; never wait.

        A holder without a heartbeat is known to be dead once this object has been asked over a whole lease. Raises
        RunHeld if the lease of a dead holder cannot be removed.
        """
        self._look()
        if self._seen is not None and not (self._seen_is_dead and self.discard()):
            return False
        return self._create()

    def _look(self) -> None:
        """Observe the lease: a change since the last look is a heartbeat, or another holder."""
        content = _read(self._path)
        if content != self._seen:
            now = time.monotonic()
            if None not in (content, self._seen):
                self._alive_at = now
            self._seen, self._seen_since, self._seen_holder = content, now, _decode(content)

    @property
    def _patience(self) -> float:
        """Seconds without a heartbeat after which the holder that was seen is dead."""
        return _NAMELESS_SECONDS if self._seen_holder is None else self._seen_holder.lease

    @property
    def _silent_seconds(self) -> float:
        return time.monotonic() - self._seen_since

    @property
    def _seen_is_dead(self) -> bool:
        holder = self._seen_holder
        return self._silent_seconds >= self._patience or (holder is not None and holder.is_dead)

    @property
    def is_overdue(self) -> bool:
        """True if this object has looked for half a lease and seen no heartbeat: there are three in a lease."""
        return self._seen is not None and self._silent_seconds >= self._patience / 2

    @property
    def seen_job(self) -> SlurmJob | None:
        """The Slurm job of the holder that this object saw last."""
        return None if self._seen_holder is None else self._seen_holder.job

    def shows_life(self) -> bool:
        """Return True if the holder has shown a heartbeat lately; False while that is being watched."""
        self._look()
        holder = self._seen_holder
        if holder is not None and holder.is_here:  # so its clock is this machine's
            age = (time.monotonic_ns() - holder.beat) / 1e9
            if 0 <= age < self._patience / 2:
                return True
        return time.monotonic() - self._alive_at < self._patience / 2

    def discard(self) -> bool:
        """Remove the lease that this object saw last, whose holder is dead; False if it is another one by now."""
        aside = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}.tmp")
        dead, self._seen = self._seen, None
        if dead is None or _read(self._path) != dead:
            return False
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return False  # another contender was faster
        except PermissionError as error:
            path = shlex.quote(str(self._path))
            raise RunHeld(
                f"{self._describe(self._seen_holder)} has ended, and its lease cannot be removed: {error.strerror}",
                remedy=f"Remove it by hand, then run the same command again: rm {path}",
            ) from error
        try:
            content = _read(aside)
            if content != dead:
                if content and _decode(content) is not None:  # else its creator is yet to write it, and will notice
                    _write_new(self._path, content)
                return False
        finally:
            with suppress(OSError):
                aside.unlink()
        self.inherited = True
        return True

    def _create(self) -> bool:
        pid = os.getpid()
        own = Holder(
            host=os.uname().nodename,
            pid=pid,
            since=time.time(),
            finishing=self._finishing,
            start=start_token(pid),
            system=this_system(),
            job=this_slurm_job(),
            lease=LEASE_SECONDS,
            token=secrets.token_hex(16),
        )
        if not _write_new(self._path, _content(own)):
            return False
        self._own = own
        if not self.still_held():  # this process was frozen between creating the file and writing it
            self._own = None
            return False
        self._released = Event()
        Thread(target=self._beat, args=(own, self._released), name="holdfast-lease", daemon=True).start()
        return True

    def _beat(self, own: Holder, released: Event) -> None:
        """Send heartbeats until the lease is released or lost; the body of a thread."""
        while not released.wait(own.lease / 3):
            try:
                alive = self._touch(own)
            except OSError:
                continue  # a disk that fails costs a heartbeat, and there are more in a lease
            if not alive and not self.still_held() and not released.is_set():
                self._lost()
                return

    def _touch(self, own: Holder) -> bool:
        """Send a heartbeat; False if the lease is not there, or is another process's."""
        try:
            # Opened each time: what NFS clients write arrives when they close, and the name may be another file's now.
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            if own.token.encode() not in os.read(fd, _MOST_BYTES):
                return False
            os.pwrite(fd, _content(own), 0)
            return True
        finally:
            os.close(fd)

    def still_held(self) -> bool:
        """Return True if the lease file still belongs to this process. A contender may move it away for an instant."""
        if self._own is None:
            return False
        token = self._own.token.encode()
        for pause in (0.0, 0.02, 0.1, 0.3):
            if pause:
                time.sleep(pause)
            with suppress(OSError):
                if token in (_read(self._path) or b""):
                    return True
        return False

    def release(self) -> None:
        """Release the lease. If the disk prevents that, the end of this process releases it: see `take_if_dead`."""
        if self._own is not None:
            self._released.set()
            with suppress(OSError):
                if self.still_held():  # otherwise it belongs to the new holder
                    self._path.unlink()
            self._own = self._seen = None

    @property
    def holder(self) -> Holder | None:
        """The current holder, if it can be read."""
        with suppress(OSError):
            return _decode(_read(self._path))
        return None

    def describe(self) -> str:
        """Describe the holder, for messages."""
        return self._describe(self.holder)

    def _describe(self, holder: Holder | None) -> str:
        return str(holder or f"an unknown process ({self._path})")


def _read(path: Path) -> bytes | None:
    """Read a lease; None if it does not exist."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return os.read(fd, _MOST_BYTES)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ESTALE:  # NFS: another machine has just removed it
            return None
        raise


def _decode(content: bytes | None) -> Holder | None:
    if content:
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.json.decode(content, type=Holder)
    return None


def _content(holder: Holder) -> bytes:
    """Encode a holder with its heartbeat. The length is constant for a holder, so that it can be written in place."""
    line = msgspec.json.encode(msgspec.structs.replace(holder, beat=time.monotonic_ns()))
    unpadded = len(msgspec.json.encode(msgspec.structs.replace(holder, beat=0)))
    return line.ljust(unpadded + 20) + b"\n"


def _write_new(path: Path, content: bytes) -> bool:
    """Create a lease with this content; False if it exists."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    try:
        try:
            if os.write(fd, content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)
    except OSError:
        with suppress(OSError):
            path.unlink()
        raise
    return True


def take_leases(
    leases: Iterable[RunLease], notice: Callable[[str], None] = lambda _: None, *, wait: float = 0
) -> list[RunLease]:
    """Take all leases that are free or whose holders are dead, and return those that live processes hold.

    All are watched at the same time, and Slurm is asked once about the jobs of all, so many dead holders take no longer
    than one. Waits up to `wait` seconds for live holders, or forever if `wait` is negative. Raises RunHeld if the lease
    of a dead holder cannot be removed.
    """
    held = [lease for lease in leases if not lease.take_if_dead()]
    end = time.monotonic() + (wait if wait >= 0 else math.inf)
    if held and wait != 0:
        notice(f"waiting for {', '.join(lease.describe() for lease in held)}, which holds this run")
    asked, warned = -math.inf, False
    while held:
        silent = [lease for lease in held if not lease.shows_life()]
        now = time.monotonic()
        if not silent and now >= end:
            break
        if not warned and (overdue := [lease for lease in silent if lease.is_overdue]):
            warned = True
            notice(describe_silence(overdue))
        if silent and now - asked >= _ASK_SECONDS:
            asked = now
            _discard_ended(silent)
        else:
            time.sleep(0.1)
        held = [lease for lease in held if not lease.take_if_dead()]
    return held


def describe_silence(overdue: Sequence[RunLease]) -> str:
    """Announce that leases without a heartbeat will be taken over."""
    first, more = overdue[0].describe(), len(overdue) - 1
    who = f"{first}, which holds this run, has" if not more else f"{first} and {more} more, which hold this run, have"
    seconds = max(lease._patience for lease in overdue) / 2
    return f"{who} no heartbeat; taking over unless it returns within {seconds:.0f} s"


def _discard_ended(leases: Iterable[RunLease]) -> None:
    """Remove the leases whose holders' Slurm jobs have ended."""
    jobs = {lease: lease.seen_job for lease in leases}
    ended = which_ended({job for job in jobs.values() if job is not None})
    for lease, job in jobs.items():
        if job in ended:
            lease.discard()


def this_slurm_job() -> SlurmJob | None:
    """Return the job that this process runs in."""
    job, name = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_JOB_NAME")
    return SlurmJob(job, name) if job and name else None


def which_ended(jobs: Collection[SlurmJob]) -> set[SlurmJob]:
    """Ask Slurm once which of the jobs have ended.

    A job that Slurm does not know, or not for sure, is left to its heartbeat. So are all if Slurm does not answer.
    """
    if not jobs:
        return set()
    ids = ",".join(sorted({job.id for job in jobs}))
    argv = ["squeue", "--noheader", "--states=all", f"--jobs={ids}", "--format=%A %T %j"]
    try:
        listing = subprocess.run(argv, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return set()
    rows = (line.split(" ", 2) for line in listing.splitlines())
    ended = {SlurmJob(row[0], row[2].strip()) for row in rows if len(row) == 3 and row[1] in _ENDED}
    return ended & set(jobs)


def is_held(path: Path) -> bool:
    """Return True if a process seems to hold the lease, judging by one look. This is for display.

    For a holder on another machine it depends on that machine's clock; `take_leases` does not.
    """
    try:
        holder = _decode(_read(path))
        if holder is not None and holder.is_dead:
            return False
        return time.time() - path.stat().st_mtime <= (LEASE_SECONDS if holder is None else holder.lease)
    except FileNotFoundError:
        return False
    except OSError:
        return True


class _Status(msgspec.Struct, frozen=True):
    ended: bool
    """a zombie: it has ended, and its parent has not noticed"""
    token: str


def this_system() -> str:
    """Identify the boot of this machine and the namespace that its process ids belong to; empty without `/proc`."""
    with suppress(OSError):
        boot = (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
        return f"{boot}/{(_PROC / 'self' / 'ns' / 'pid').stat().st_ino}"
    return ""


def start_token(pid: int) -> str:
    """Return the start token of a process; empty if there is no such process, or the system does not report it."""
    status = _status(pid)
    return "" if status is None else status.token


def is_running(pid: int, token: str) -> bool:
    """Return True if the process with this id and start token runs on this machine.

    Only the id is compared if the system did not report the start, then or now.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    status = _status(pid)
    return status is None or (not status.ended and _is_same(token, status.token))


def _is_same(token: str, current: str) -> bool:
    """Compare start tokens. Some systems compute the start from the uptime, so seconds may be off by one."""
    return not token or abs(int(token) - int(current)) <= 1


def _status(pid: int) -> _Status | None:
    """Look up a process; None if the system reports nothing about it."""
    if (_PROC / "self").exists():
        with suppress(OSError):
            # The name, in parentheses, may contain anything.
            fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
            return _Status(fields[0] in "ZX", fields[19])
        return None
    import calendar  # which Linux does not need

    try:
        process = subprocess.run(
            ["ps", "-o", "stat=,lstart=", "-p", str(pid)],  # noqa: S607 - where it is differs
            env={**os.environ, "LC_ALL": "C", "TZ": "UTC"},
            capture_output=True,
            text=True,
            check=False,
        )
        state, _, start = process.stdout.strip().partition(" ")
        seconds = calendar.timegm(time.strptime(start.strip(), "%a %b %d %H:%M:%S %Y"))
    except (OSError, ValueError):
        return None
    return _Status(state.startswith("Z"), str(seconds))
