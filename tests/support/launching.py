"""Launches on the lab's Slurm: a folder with profile, configuration and eval, and what became of them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from holdfast.apps.cluster.config.compile import LaunchRequest, compile_launch
from holdfast.apps.cluster.remote import invocation as layout
from holdfast.apps.cluster.remote.chain import Chain, is_role
from holdfast.apps.cluster.remote.invocation import State, TaskFolder
from holdfast.apps.cluster.remote.ledger import Ledger, Submitter
from holdfast.apps.cluster.remote.registry import InvocationRegistry
from holdfast.apps.cluster.remote.slurm import Slurm
from holdfast.apps.cluster.remote.submit import submit
from tests.support.invocations import env_of
from tests.support.running import wait_for, write_eval

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.apps.cluster.config.launch import Launch
    from holdfast.apps.cluster.remote.registry import Invocation
    from holdfast.apps.cluster.remote.slurm import JobState
    from holdfast.apps.cluster.remote.transport import Transport
    from tests.support.slurm import Cluster

PATIENCE = 300.0


def calmly(condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    """Wait like `wait_for`, but poll rarely, since polling loads the machine."""
    return wait_for(condition, what, patience, pause=0.1)


def free_port(count: int = 1) -> int:
    """A port at which nobody listens, and the ones after it."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        with ExitStack() as taken, suppress(OSError, OverflowError):
            for number in range(count):
                taken.enter_context(socket.socket()).bind(("127.0.0.1", first + number))
            return first


def deployment(
    folder: Path, *, code: str = "", port: int | None = None, name: str = "asked", says: str | None = None
) -> dict[str, Any]:
    """A server that echoes, or `says` something: it counts in `<name>.txt` what it was asked, over all its lives.

    Further instances count in `<name>-1.txt` …; `pid_of` and `node_of` know of the last life.
    """
    script = folder / f"serve-{name}.py"
    script.write_text(SERVER.format(stem=str(folder / name), code=code, says=says))
    return {
        "type": "generic",
        "command": f"{sys.executable} {script}",
        "port": port or free_port(),
        "served_model_name": "test-model",
        "health_check_path": "/health",
    }


def pid_of(counts: Path) -> int:
    """The process that counts there."""
    return int(Path(f"{counts}.life").read_text().split()[0])


def node_of(counts: Path) -> str:
    """The node it is on, by Slurm's name."""
    return Path(f"{counts}.life").read_text().split()[1]


SERVER = """
import json, os, pathlib, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
instance = os.environ["INSTANCE_ID"]
path = {stem!r} + (f"-{{instance}}" if instance != "0" else "") + ".txt"
counts = open(path, "a")
pathlib.Path(path + ".life").write_text(f"{{os.getpid()}} {{os.environ.get('SLURMD_NODENAME', 'here')}}")
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def do_GET(self):
        self.reply(200 if self.path == "/health" else 404, {{}})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        counts.write(text.replace(chr(10), " ") + chr(10)); counts.flush()
        time.sleep(0.05)
        said = {{"role": "assistant", "content": {says!r} or text}}
        self.reply(200, {{"id": "r", "object": "chat.completion", "created": 1, "model": body["model"],
            "choices": [{{"index": 0, "message": said, "finish_reason": "stop"}}]}})
    def reply(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status); self.send_header("Content-Length", str(len(data))); self.end_headers()
        self.wfile.write(data)
{code}
print("serving", flush=True)
ThreadingHTTPServer(("127.0.0.1", int(os.environ["HOLDFAST_PORT"])), Handler).serve_forever()
"""


@dataclass
class Site:
    """Somebody's folder, and the cluster they use."""

    folder: Path
    lab: Cluster
    transport: Transport
    base: Path = field(init=False)

    def __post_init__(self) -> None:
        self.base = self.folder / "cluster"
        self.registry = InvocationRegistry(self.folder / "home" / "invocations")

    def write(
        self,
        base_url: str | None,
        *,
        rows: int = 20,
        profile: str = "",
        deployment: dict[str, Any] | None = None,
        execution: dict[str, Any] | None = None,
        auxiliary: dict[str, Any] | None = None,
        task: dict[str, Any] | None = None,
        **keys: Any,
    ) -> None:
        """The files of a launch of one task."""
        write_eval(self.folder / "evals", base_url or "http://127.0.0.1:9/v1", rows=rows, **keys)
        (self.folder / "env.toml").write_text(
            f'[lab]\nexecutor = "slurm"\npartition = "main"\nremote_job_dir = "{self.base}"\n'
            f'python = "{sys.executable}"\ntime = "00:10:00"\n{profile}\n'
            f'[here]\nexecutor = "local"\nremote_job_dir = "{self.base}"\npython = "{sys.executable}"\n'
        )
        config = {
            "execution": {"type": "slurm", **(execution or {})},
            "deployment": deployment or {"type": "none"},
            **({"auxiliary_deployments": auxiliary} if auxiliary else {}),
            "evaluation": {"tasks": [{"name": "evals/e.yaml", **task} if task else "evals/e.yaml"]},
        }
        (self.folder / "nano.yaml").write_text(json.dumps(config))

    def compiled(self, *overrides: str, profile: str = "lab", **environ: str) -> Launch:
        """The launch."""
        variables = {"PWD": str(self.folder), **environ}
        return compile_launch(LaunchRequest("nano", profile, overrides, cwd=self.folder, environ=variables))

    def submit(self, *overrides: str, profile: str = "lab", **environ: str) -> Invocation:
        """Submit it."""
        launch = self.compiled(*overrides, profile=profile, **environ)
        return submit(launch, environ, transport=self.transport, registry=self.registry)

    def env(self, **programs: str) -> dict[str, str]:
        """The environment of commands; a program by name is replaced by a shell script, to which it is REAL."""
        folder = self.folder / "bin"
        folder.mkdir(exist_ok=True)
        for name, text in programs.items():
            (folder / name).write_text(f"#!/bin/sh\nREAL={shutil.which(name)}\n{text}\n")
            (folder / name).chmod(0o755)
        return env_of(self.lab, self.folder / "home", PATH=f"{folder}:{os.environ['PATH']}")

    def place(self, invocation: Invocation, task: int = 0) -> TaskFolder:
        """Return the folder of a task."""
        return TaskFolder(invocation.directory, task)

    def chain(self, invocation: Invocation, task: int = 0) -> Chain:
        """The jobs of a task."""
        ledger = Ledger(self.lab.here, invocation.directory)
        return Chain(Submitter(Slurm(self.lab.here), ledger), invocation.id, self.place(invocation, task))

    def live(self, invocation: Invocation, role: str) -> list[JobState]:
        """The jobs of a role that may still run."""
        return [job for job in self.chain(invocation).states() if job.active and is_role(job.name, 0, role)]

    def state(self, invocation: Invocation, task: int = 0) -> State:
        """Return the state of a task."""
        path = Path(self.place(invocation, task).state)
        return layout.decode(path.read_bytes(), State, str(path)) if path.exists() else State()

    def attempts(self, invocation: Invocation) -> list[layout.StartRecord]:
        """The attempts of the first task."""
        return layout.read_starts(self.lab.here, self.place(invocation))

    def await_over(self, invocation: Invocation, patience: float = PATIENCE, task: int = 0) -> State:
        """The state a task ends in."""
        try:
            calmly(lambda: self.state(invocation, task).phase in layout.OVER, "the end", patience)
        except AssertionError:
            raise AssertionError(f"{self.state(invocation, task)}\n{self.logs(invocation)}") from None
        return self.state(invocation, task)

    def await_done(self, invocation: Invocation, count: int) -> State:
        """The state once so many trials are done."""
        try:
            calmly(lambda: self.state(invocation).done >= count, f"{count} trials")
        except AssertionError:
            raise AssertionError(f"{self.state(invocation)}\n{self.logs(invocation)}") from None
        return self.state(invocation)

    def running(self, invocation: Invocation, role: str) -> list[JobState]:
        """The jobs of a role that run."""
        return [job for job in self.live(invocation, role) if job.state == "running"]

    def logs(self, invocation: Invocation) -> str:
        """Return the text of all logs."""
        paths = sorted(Path(invocation.directory).rglob("*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')}" for path in paths)

    def kill(self, invocation: Invocation, role: str, task: int = 0) -> None:
        """Kill the processes of a task's main job or workers, as a crash would; Slurm sees a failed job."""
        for process in self.processes(invocation, role, task):
            process.kill()

    def processes(self, invocation: Invocation, role: str, task: int = 0) -> list[psutil.Process]:
        """Return the processes of a task's main job or workers, without their children, once there are any.

        A job that Slurm calls running may not have come to its last line yet.
        """
        words = ["holdfast.apps.cluster.job", self.place(invocation, task).path, "--role", role]

        def look() -> list[psutil.Process]:
            return [
                process for process in psutil.process_iter(["cmdline"]) if words == (process.info["cmdline"] or [])[-4:]
            ]

        processes: list[psutil.Process] = calmly(look, f"a {role} of {invocation.id}", 60)
        return processes

    def slurm(self, *argv: str) -> str:
        """One of Slurm's programs."""
        return self.lab.here.check(list(argv)).text

    def metrics(self, state: State) -> dict[str, Any]:
        """The numbers of a run."""
        assert state.run_dir is not None
        report: dict[str, Any] = json.loads((Path(state.run_dir) / "metrics.json").read_bytes())
        return report
