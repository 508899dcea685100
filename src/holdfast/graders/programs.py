"""Graders that run code: a user's program, or assertions. The code runs in a sandbox, as strict as this machine allows.

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
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, Self

import msgspec
from msgspec import UnsetType
from msgspec.structs import replace
from pydantic import Field, model_validator
from xxhash import xxh3_64_hexdigest

from holdfast import containment
from holdfast.containment.program import running
from holdfast.errors import AttemptError
from holdfast.graders.expected import expected_value, share
from holdfast.graders.tool_calls import NOT_SEEN, calls_of
from holdfast.graders.types import Verdict, WaitingGrader
from holdfast.graders.worker import OUTSIDE
from holdfast.spec.fingerprint import check_program, command_files, named_file
from holdfast.spec.grader_schema import Measure, OnTimeout, TextBlock
from holdfast.spec.schema import Names, Seconds
from holdfast.spec.template import is_template
from holdfast.store.blobs import describe_partial, restore
from holdfast.store.lease import is_running, start_token, this_system

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from holdfast.graders.types import Case
    from holdfast.spec.eval import Origin

_TOOL_CALLS: Final = re.compile(r"\btool_calls\b")
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


class ProgramGrader(TextBlock):
    """Runs a program whose exit code is the verdict."""

    type: Literal["program"]
    command: str = Field(min_length=1)
    """Program to run: a file in the eval file's folder, or a program on the `PATH`."""
    args: tuple[str, ...] = ()
    """Arguments, as templates over the row; a list gives several arguments. An argument that names a file in the eval
    file's folder stands for that file."""
    timeout: Seconds = 30
    """Time limit of the program."""
    on_timeout: OnTimeout = "fail"
    """The result of a timeout: a failed check with score 0 (`fail`), or an `error` that the next command retries."""
    network: bool = False
    """Allow access to the network."""

    templates: ClassVar[tuple[str, ...]] = ("args",)
    instead: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"command": "the program is part of the key; its `args` take values of the row"}
    )
    runs_code: ClassVar[bool] = True

    @property
    def program(self) -> tuple[str, ...]:
        """The program and its arguments."""
        return (self.command, *self.args)


class Program(Confined):
    """Scores 1 if the program exits with code 0, else 0."""

    schema = ProgramGrader
    block: ProgramGrader

    def __init__(self, block: ProgramGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._folder = origin.folder
        if origin.spec.workspace is None or "/" not in block.command:  # otherwise the agent may create the program
            check_program(block.command, origin.folder, origin.where())

    @classmethod
    def identity(cls, block: ProgramGrader, origin: Origin) -> dict[str, Any]:
        """Add the contents of the files that the command names."""
        return {**block.identity(), "files": command_files(origin.folder, (block.command, *block.args))}

    async def judge(self, case: Case) -> Verdict:
        """Run the program with the output on standard input; its standard output is the feedback."""
        block = self.block
        arguments = [self._resolve(block.command)]
        for written in block.args:
            arguments += self._arguments(written, case)
        if any("\0" in argument for argument in arguments):
            raise AttemptError("grader", "an argument holds a NUL character", retry=False)
        async with restored_workspace(case) as sandbox:
            ran = await run_in(sandbox, arguments, case.text(block), block.timeout, network=block.network)
        if ran.killed is not None:
            return check_failure(case, _killed(ran, block.on_timeout))
        feedback = ran.out.strip() or ("" if ran.code == 0 else ran.err.strip()[-1000:])
        details = {"exit_code": ran.code, "stderr": ran.err.strip()[-1000:], "isolation": ran.isolation}
        return check_failure(case, Verdict(float(ran.code == 0), feedback or f"exit code {ran.code}", details))

    def _resolve(self, argument: str) -> str:
        """Return the full path of a file in the eval's folder, so that no trial can replace it."""
        path = named_file(self._folder, argument)
        return argument if path is None else str(path.resolve())

    def _arguments(self, written: str, case: Case) -> list[str]:
        """Render an argument; a list gives several. A template never names a file, which would be in no key."""
        if not is_template(written):
            return [self._resolve(written)]
        value = expected_value(written, case.sample.fields)
        values = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(each, str | int | float) for each in values):
            raise AttemptError("grader", f"{written!r} gives {value!r:.80} for this row, not a text", retry=False)
        return [str(each) for each in values]


class CodeGrader(TextBlock):
    """Evaluates expressions that must be true."""

    type: Literal["code"]
    assertions: Names = Field(min_length=1)
    """Expressions that must be true, each of which is one check."""
    language: Literal["python", "javascript"] = "python"
    """Language of the expressions. `javascript` needs `node`."""
    timeout: Seconds = 30
    """Time limit for all assertions together."""
    on_timeout: OnTimeout = "fail"
    """The result of a timeout: a failed check with score 0 (`fail`), or an `error` that the next command retries."""

    templates: ClassVar[tuple[str, ...]] = ()
    instead: ClassVar[Mapping[str, str]] = MappingProxyType({"assertions": "write sample['FIELD']"})

    @property
    def measures(self) -> tuple[Measure, ...]:
        """The time, if an assertion uses it. It is hidden from other assertions."""
        return ("seconds",) if any("duration_ms" in assertion for assertion in self.assertions) else ()

    @model_validator(mode="after")
    def _are_expressions(self) -> Self:
        if self.language == "python":
            for assertion in self.assertions:
                try:
                    compile(assertion.strip(), "assertion", "eval")
                except (SyntaxError, ValueError) as error:
                    raise ValueError(f"not a Python expression: {assertion!r} ({error})") from error
        return self


class Code(Confined):
    """Scores the share of assertions that are true."""

    schema = CodeGrader
    block: CodeGrader

    def __init__(self, block: CodeGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("assertions.py"))]
        if block.language == "javascript":
            self._command.append("javascript")
            if shutil.which("node") is None:
                raise origin.error("needs node, which is not on the PATH")

    async def judge(self, case: Case) -> Verdict:
        """Evaluate the assertions in child processes. If these end early or give no results, the output has failed."""
        if calls_of(case.output) is None and any(_TOOL_CALLS.search(text) for text in self.block.assertions):
            return NOT_SEEN
        names = _names(case, case.text(self.block), timed="seconds" in self.block.measures)
        question = {"assertions": self.block.assertions, "names": names}
        async with restored_workspace(case) as sandbox:
            ran = await run_in(sandbox, self._command, msgspec.json.encode(question).decode(), self.block.timeout)
        ready, _, answer = ran.out.partition("\n")
        if ready != "ready":
            how = ran.killed or f"exit code {ran.code}"
            message = f"the assertions could not be evaluated: {how}: {ran.err[-400:].strip()}"
            raise AttemptError("grader", message, retry=False)
        if ran.killed is not None:
            return check_failure(case, _killed(ran, self.block.on_timeout))
        results: list[tuple[bool, str]] = []
        with suppress(msgspec.MsgspecError):
            results = msgspec.json.decode(answer, type=list[tuple[bool, str]])
        if len(results) != len(self.block.assertions):
            reason = f"exit code {ran.code} before all assertions were evaluated"
            return check_failure(case, Verdict(0.0, reason, {"exit_code": ran.code, "isolation": ran.isolation}))
        failures = [
            f"{assertion.strip()} ({error})" if error else f"not true: {assertion.strip()}"
            for assertion, (holds, error) in zip(self.block.assertions, results, strict=True)
            if not holds
        ]
        return check_failure(case, share(len(results), failures, {"isolation": ran.isolation}))


def _killed(ran: ProgramResult, on_timeout: str) -> Verdict:
    """Return the verdict on a program that was killed: the output made it loop or crash."""
    assert ran.killed is not None
    if ran.timed_out and on_timeout == "error":
        raise AttemptError("timeout", ran.killed, retry=False)
    ended = {"exit_code": None, "killed": ran.killed, "stderr": ran.err.strip()[-1000:], "isolation": ran.isolation}
    return Verdict(0.0, ran.killed, ended)


def _names(case: Case, text: str, *, timed: bool) -> dict[str, Any]:
    """Return the names that assertions can use; the duration only if it is part of the key."""
    output = case.output
    calls = calls_of(output)
    return {
        "output": text,
        "sample": dict(case.sample.fields),
        "messages": case.messages,
        "transcript": case.messages,
        "tool_calls": [
            {"name": call.name, "arguments": call.arguments if call.raw is None else call.raw, "result": call.result}
            for call in calls or ()
        ],
        "errors": [],
        "outcome": {},
        **({"duration_ms": output.timing.seconds * 1000} if timed else {}),
    }
