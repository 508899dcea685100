"""The processes of a job, besides its servers: the evaluation, worker processes, exports and hooks.

Users' code is read and imported only in them, so that it cannot take the job down. A worker job starts `holdfast work`;
a main job starts a process that prepares the run and then works on it, see `evaluate`. Each drains when its standard
input closes, as it does when the job ends, and reports by lines of JSON on its standard output.

Local jobs may start processes in images, with podman or docker. A part of the evaluation sees Holdfast, its
interpreter, the files of its task, and the runs, under the same paths as outside. It also shares the processes, the
network and the host name of this machine, by which the locks of a run name their holders.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

import holdfast
from holdfast.apps.cluster.job.context import POLL_SECONDS, say
from holdfast.apps.cluster.remote.executor import job_command
from holdfast.engine.attached import FINISH
from holdfast.errors import HoldfastError
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from holdfast.apps.cluster.config.launch import Container, TaskFile
    from holdfast.apps.cluster.job.context import JobContext
    from holdfast.apps.cluster.remote.invocation import Prepared, TaskFolder

BEGIN: Final = b"begin\n"
"""what a process that has prepared a run reads on its standard input to work on it"""
_SYSTEM: Final = Path("/usr")
"""the image's own; an interpreter in it is the image's, too"""
_Message = TypeVar("_Message", bound=msgspec.Struct)


def evaluate_command(task: TaskFile, place: TaskFolder, *options: str) -> list[str]:
    """Return the command of a process that evaluates a task."""
    return [task.python, "-m", "holdfast.apps.cluster.job.evaluate", place.path, *options]


class EvaluationProcess:
    """A process of the evaluation, in the task's image if there is one, that knows where the servers are."""

    def __init__(
        self, job: JobContext, part: str, command: Sequence[str], base_urls: Sequence[str], env: Mapping[str, str]
    ) -> None:
        self._job = job
        self.addresses = tuple(base_urls), dict(env)
        variables = {**env, **({"OPENAI_BASE_URL": base_urls[0]} if base_urls else {})}  # others know one URL only
        own = ("PYTHONDONTWRITEBYTECODE", *job.task.env, *variables)
        words, self._container = evaluation_words(job.task, job.place, part, own)
        self._process = subprocess.Popen(
            [*words, *command, *(word for url in base_urls for word in ("--base-url", url))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=job.env(job.task.env, **variables),
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        """the lines of its output that were not received yet, then b"" for its end"""
        self._last = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._process.wait()
        self._lines.put(b"")

    @property
    def exit_code(self) -> int | None:
        """The exit code, once the process has ended."""
        return self._process.poll()

    def receive(self) -> bytes | None:
        """Wait a moment for the next line of the output; return b"" once the process has ended, None if none came."""
        try:
            line = self._lines.get(timeout=POLL_SECONDS)
        except queue.Empty:
            if self.exit_code is None:
                return None
            self._reader.join(5)  # not for longer: an orphaned process may hold the output open
            line = b"" if self._lines.empty() else self._lines.get()
        if not line:
            self._lines.put(line)  # for whoever asks again
        return line

    def has_ended(self) -> bool:
        """Wait a moment for the end of the process, and return True if it has ended."""
        while line := self.receive():
            self._last = line
        return line is not None

    def last_message(self, default: _Message) -> _Message:
        """Return the message in the last line that the process wrote, or the default."""
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(self._last, type=type(default))
        return default

    def send(self, line: bytes) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def terminate(self) -> None:
        """End the process at once."""
        self._process.terminate()
        self._process.wait()

    def drain(self, patience: float = 60.0, *, finish: float = 0.0) -> int:
        """Ask the process to stop, wait, and kill it if it does not.

        Requests in flight get `finish` seconds to complete, unless the job itself is asked to stop first.

        Not by a signal at first: Slurm may have sent one already, and at the second the process would exit at once.
        """
        if finish:
            self.send(FINISH)
        end = time.monotonic() + finish
        while time.monotonic() < end and self._job.signal in (None, signal.SIGUSR2) and self.exit_code is None:
            time.sleep(POLL_SECONDS)
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(patience / 2)
            with suppress(ProcessLookupError):
                self._process.send_signal(number)
        if self._job.task.container is not None:  # it outlives the program that started it
            subprocess.run(["sh", "-c", removal(self._job.task.container.engine, self._container)], check=False)  # noqa: S607
        return self._process.wait()


def container_name(task: TaskFile, part: str) -> str:
    """Return the name of the container of a part of a task."""
    return f"holdfast-{task.invocation}-{task.number}-{part}"


def container_words(container: Container, name: str, variables: Iterable[str], options: Iterable[str]) -> list[str]:
    """Return the words before a command that start it in an image, on the network of this machine.

    Values of variables come from the environment of the command, so that no argument contains a secret.
    """
    words = [container.engine, "run", "--rm", f"--name={name}", "--network=host", "--entrypoint=", *options]
    words += [f"--volume={mount}" for mount in container.mounts]
    words += [f"--env={variable}" for variable in variables]
    return [*words, *container.options, container.image.removeprefix("docker://")]


def removal(engine: str, name: str) -> str:
    """Return shell commands that end a container, if there is one: SIGTERM, after ten seconds SIGKILL."""
    return f"{engine} stop --time=10 {name} >/dev/null 2>&1; {engine} rm --force {name} >/dev/null 2>&1"


def evaluation_words(task: TaskFile, place: TaskFolder, part: str, variables: Iterable[str]) -> tuple[list[str], str]:
    """Return the words before a command of the evaluation, and the name of its container; none if it has no image."""
    container = task.container
    if container is None:
        return [], ""
    options = ["--interactive", "--pid=host", "--uts=host"]
    if container.engine == "docker":  # whose processes would be root's
        options.append(f"--user={os.getuid()}:{os.getgid()}")
    Path(task.runs_dir).mkdir(parents=True, exist_ok=True)
    bundles = Path(place.invocation).parent / "bundles"
    options += [f"--volume={path}:{path}" for path in (place.path, task.runs_dir)]
    options += [f"--volume={path}:{path}:ro" for path in (bundles, *_interpreter_folders())]
    name = container_name(task, f"{part}-{secrets.token_hex(4)}")  # one that still ends may have the same part
    own = [*variables, *(variable for variable in os.environ if variable.startswith("HOLDFAST_"))]
    return container_words(container, name, dict.fromkeys(own), options), name


def _interpreter_folders() -> list[Path]:
    """List the folders of this interpreter and of Holdfast, without those inside others."""
    packages = Path(holdfast.__file__).parents[1]
    prefixes = [Path(prefix) for prefix in (sys.prefix, sys.base_prefix) if Path(prefix) != _SYSTEM]
    folders = {path for prefix in (*prefixes, packages) for path in (prefix, prefix.resolve())}
    return sorted(path for path in folders if not any(other in path.parents for other in folders))


@contextmanager
def child_workers(job: JobContext) -> Iterator[None]:
    """Run the workers of a task as child processes."""
    command = [*job_command(job.task, job.place, "worker"), "--index"]
    workers = [
        subprocess.Popen([*command, str(number)], stdin=subprocess.DEVNULL, start_new_session=True)
        for number in range(1, job.task.workers)
    ]
    try:
        yield
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        for worker in workers:
            try:
                worker.wait(30)
            except subprocess.TimeoutExpired:
                say(f"worker {worker.pid} did not stop; killing it")
                worker.kill()
                worker.wait()


def run_hook(job: JobContext, command: str | None, name: str) -> None:
    """Run a user's shell command before or after the work."""
    if command is None:
        return
    argv = ["bash", "-c", command]
    process = subprocess.run(argv, env=job.env(job.task.env), stdin=subprocess.DEVNULL, check=False)
    if process.returncode != 0:
        raise HoldfastError(f"{name} failed with exit code {process.returncode}")


def export_run(job: JobContext, prepared: Prepared) -> list[str]:
    """Export a run to the configuration's destinations, and write the copies that eval file and command ask for.

    Returns the failures, and what was only written to disk.
    """
    failures: list[str | None] = []
    """of each export, None if it worked"""
    for destination in job.task.export:
        if destination == "local":  # where the run is already
            continue
        options = job.task.export_config.get(destination, {})
        settings = [f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None]
        export = ["holdfast", "export", prepared.run_dir, "--to", destination, "--if-changed", *settings]
        failures.append(_run(job, [job.task.python, "-m", *export], f"to {destination}"))
    if prepared.copies:
        command = evaluate_command(job.task, job.place, "--copy", "--run-dir", prepared.run_dir)
        failures.append(_run(job, command, "as the eval file and the command ask for"))
    if not failures:
        return []
    from holdfast.report.exports import offline_exports  # with pydantic, which jobs without exports do without

    offline = offline_exports(RunDir(Path(prepared.run_dir)))
    for sentence in offline:
        say(sentence)
    return [*(failure for failure in failures if failure), *offline]


def _run(job: JobContext, command: list[str], what: str) -> str | None:
    """Run an export; return its failure, if it failed."""
    log = Path(job.place.logs) / "export.log"
    with log.open("ab") as output:
        process = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=job.env(job.task.export_env),
            check=False,
        )
    if process.returncode == 0:
        say(f"export {what}: done")
        return None
    failure = f"export {what} failed with exit code {process.returncode}; see {log}"
    say(failure)
    return failure
