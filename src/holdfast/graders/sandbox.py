"""Sandbox for graders' programs, as strict as this machine allows.

A program runs in its own session, in a fresh copy of the trial's workspace that is deleted afterwards. It has limits on
time, processor time, memory and file size, and only PATH and LANG of our environment. On Linux, namespaces make
everything but that copy read-only, cut off the network, hide other processes, and end all processes that it started.
Landlock (Linux 5.13 and later) refuses writes and TCP connections even if namespaces are forbidden. Programs can read
every file that the user can read. The sandbox protects from accidents and careless code, not from an attack on the
kernel.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import msgspec
from msgspec import UnsetType
from msgspec.structs import replace
from xxhash import xxh3_64_hexdigest

from holdfast import containment
from holdfast.containment.program import running
from holdfast.errors import AttemptError
from holdfast.graders.types import WaitingGrader
from holdfast.graders.worker import OUTSIDE
from holdfast.store.blobs import describe_partial, restore
from holdfast.store.processes import is_running, start_token, this_system

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from holdfast.graders.types import Case, Verdict

CONFINE: Final = Path(containment.__file__).with_name("confine.py")
_WITHOUT_NAMESPACES: Final = "reaper" if sys.platform.startswith("linux") else "group"
_FILE_BYTES: Final = 256 * 1024 * 1024
"""maximum size of a file that a program may write"""
_MEMORY: Final = 4 << 30
_SHOWN: Final = 64 * 1024
"""bytes of a program's output that are read"""


class Isolation(msgspec.Struct, frozen=True):
    """The restrictions on programs that work on this machine."""

    writes: bool = False
    """they cannot write, create, move or remove files outside their workspace"""
    read_only: bool = False
    """they cannot change modes, owners, times or attributes of files outside their workspace either"""
    processes: bool = False
    """they can signal only processes that they started, and the kernel ends all of these processes with them"""
    network: str = "open"
    """`namespace`: no network; `tcp`: no TCP connections; `open`: the user's network"""

    @property
    def caveat(self) -> str | None:
        """A warning if files outside the workspace are not protected; else None."""
        if self.writes:
            return None
        return (
            "graders' programs can change files outside their workspace here: this system has no Landlock and "
            "allows no namespaces (docs/graders-files.md)"
        )

    @property
    def summary(self) -> str:
        """The restrictions on this machine, as one line for people."""
        if not self.writes:
            files = "files outside their workspace can be changed"
        elif not self.read_only:
            files = "outside their workspace, only modes, owners and times of files can be changed"
        else:
            files = "nothing outside their workspace can be changed"
        processes = (
            "all their processes end with them"
            if self.processes
            else "their processes are looked for and killed after them"
        )
        network = {"namespace": "no network", "tcp": "no TCP connections"}.get(self.network, "the network is open")
        return f"{files}; {processes}; {network}"


@lru_cache(maxsize=1)
def isolation() -> Isolation:
    """Try, once per process, which restrictions work on this machine."""
    try:
        probe = [sys.executable, "-I", "-S", str(CONFINE), "probe", tempfile.gettempdir()]
        tried = subprocess.run(probe, capture_output=True, timeout=30, check=True)
        return msgspec.json.decode(tried.stdout, type=Isolation)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError):
        return Isolation()


class Sandbox(NamedTuple):
    """A temporary folder for one grading."""

    folder: Path
    workspace: Path
    """inside the folder: a copy of the trial's files"""


@asynccontextmanager
async def restored_workspace(case: Case) -> AsyncIterator[Sandbox]:
    """Restore the trial's workspace into a new folder; without a workspace, the folder is empty."""
    folder = Path(tempfile.mkdtemp(prefix=_own_prefix(os.getpid()))).resolve()
    try:
        await _in_thread(lambda: _restore(case, folder / "workspace"))
        yield Sandbox(folder, folder / "workspace")
    finally:
        await _in_thread(lambda: shutil.rmtree(folder, ignore_errors=True))


@lru_cache(maxsize=1)
def _own_prefix(pid: int) -> str:
    """Return the prefix of this process's folders, and remove the folders of processes that were killed.

    The prefix names the process and the system: another container may share the folder for temporary files.
    """
    of_system = f"holdfast-grade-{xxh3_64_hexdigest(this_system().encode())[:8]}-"
    for folder in Path(tempfile.gettempdir()).glob(f"{of_system}*"):
        process, _, token = folder.name.removeprefix(of_system).rpartition("-")[0].partition("-")
        if process.isdigit() and not is_running(int(process), token):
            shutil.rmtree(folder, ignore_errors=True)
    return f"{of_system}{pid}-{start_token(pid)}-"


def _restore(case: Case, workspace: Path) -> None:
    files = case.output.files
    if isinstance(files, UnsetType):
        workspace.mkdir()
        return
    if case.blobs is None:
        raise AttemptError("grader", "the files of this trial are not available", retry=False)
    try:
        restore(files, case.blobs, workspace)
    except (OSError, ValueError) as error:
        raise AttemptError("grader", f"the trial's workspace cannot be restored: {error}", retry=False) from error


def check_failure(case: Case, verdict: Verdict) -> Verdict:
    """Return a verdict; raise AttemptError for a failure that may be due to files that were not kept."""
    partial = case.output.files_partial
    if verdict.score == 1.0 or isinstance(partial, UnsetType):
        return verdict
    raise AttemptError("grader", f"{verdict.feedback}; but {describe_partial(partial)}", retry=False)


async def _in_thread(call: Callable[[], None]) -> None:
    """Run a call in a thread, and wait for its end even when cancelled, so that all files are removed."""
    task = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


class ProgramResult(NamedTuple):
    """The end of a program, and its output."""

    code: int
    out: str
    err: str
    isolation: Isolation
    """the restrictions that were in force"""
    killed: str | None = None
    """why it did not end by itself: `timed out after 10 s`, `killed by SIGSEGV`"""
    timed_out: bool = False


async def run_in(
    sandbox: Sandbox, arguments: Sequence[str], text: str, seconds: float, *, network: bool = False
) -> ProgramResult:
    """Run a program to its end, with a text on standard input; raise AttemptError if it cannot be started.

    The time limit begins when the program does.
    """
    limits = isolation()
    if network:
        limits = replace(limits, network="open")
    paths = [sandbox.folder / name for name in ("in", "out", "err")]
    paths[0].write_text(text, encoding="utf-8", errors="surrogatepass")
    restrictions = {
        "workspace": str(sandbox.workspace),
        **msgspec.to_builtins(limits),
        "seconds": seconds,
        "file_bytes": _FILE_BYTES,
        "memory_bytes": _MEMORY,
    }
    timed_out, code = False, None
    with paths[0].open("rb") as stdin, paths[1].open("wb") as stdout, paths[2].open("wb") as stderr:
        try:
            async with running(
                arguments,
                folder=sandbox.workspace,
                environment=_environment(sandbox.workspace),
                files=(stdin.fileno(), stdout.fileno(), stderr.fileno()),
                kind="pid" if limits.processes else _WITHOUT_NAMESPACES,
                confine=restrictions,
            ) as program:
                code = await asyncio.wait_for(program.wait(), seconds)
        except TimeoutError:
            timed_out = True
        except OSError as error:
            raise AttemptError("grader", f"{arguments[0]} cannot be run: {error.strerror}", retry=False) from error
    out, err = (_beginning(path) for path in paths[1:])
    if timed_out:
        return ProgramResult(-signal.SIGKILL, out, err, limits, f"timed out after {seconds:g} s", timed_out=True)
    if code is None:
        raise AttemptError("grader", f"the process that watches over {arguments[0]} was killed", retry=False)
    if code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        if -code in OUTSIDE:
            raise AttemptError("grader", f"{arguments[0]} was ended from outside by {name}", retry=False)
        return ProgramResult(code, out, err, limits, f"killed by {name}")
    return ProgramResult(code, out, err, limits)


def _environment(workspace: Path) -> dict[str, str]:
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LANG": os.environ.get("LANG", "C.UTF-8")}
    return environment | dict.fromkeys(("HOME", "TMPDIR", "HOLDFAST_WORKSPACE", "WAZA_WORKSPACE_DIR"), str(workspace))


def _beginning(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_SHOWN).decode("utf-8", "replace")


class Confined(WaitingGrader):
    """A grader that runs programs in the sandbox."""

    caveat: str | None = None
    """what this machine's sandbox cannot prevent"""

    async def __aenter__(self) -> Self:
        self.caveat = (await asyncio.to_thread(isolation)).caveat
        return self
