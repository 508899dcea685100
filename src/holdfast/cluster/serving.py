"""The server of a model inside a job: started, waited for, watched, and gone when the job is."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.cluster.deployments import CACHE, CHECKPOINT
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from holdfast.cluster.layout import DeploymentFile

_LOOK_SECONDS: Final = 0.25
_PORT_SECONDS: Final = 20.0
"""how long the server of an attempt that has just ended may take to leave the port"""
_LAST_LINES: Final = 15


class ServerFailed(HoldfastError):
    """The server did not start, or has died."""

    exit_code = 3


class Server:
    """One server, in a process group of its own.

    A small process beside it reads a pipe from us, and ends the group when that ends: when we do, however we go.
    """

    def __init__(self, deployment: DeploymentFile, log: Path, env: Mapping[str, str], nodes: int) -> None:
        self.deployment = deployment
        self.log = log
        self._env = env
        self._nodes = nodes
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None

    def start(self, said: Callable[[str], None]) -> None:
        """Start it. Somebody else's server on its port would be measured instead, so that is refused."""
        end = time.monotonic() + _PORT_SECONDS
        while _listens(self.deployment.port):
            if time.monotonic() > end:
                raise ServerFailed(
                    f"port {self.deployment.port} of {socket.gethostname()} is taken by another process",
                    remedy="Choose another deployment.port, or ask for whole nodes (exclusive).",
                )
            time.sleep(_LOOK_SECONDS)
        line = server_line(self.deployment, self._nodes, pyxis=bool(self.deployment.image) and has_pyxis())
        if self.deployment.image and "--container-image" not in line:
            said(f"no pyxis here: {self.deployment.image} is not used, the server runs as a plain process")
        reader, self._pipe = os.pipe()
        guard = f"(trap '' TERM; cat <&{reader} >/dev/null; kill -TERM 0; sleep 10; kill -KILL 0) & exec {reader}<&-; "
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                ["bash", "-c", guard + line],  # noqa: S607 - as the cluster has it
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(self._env),
                start_new_session=True,
                pass_fds=(reader,),
            )
        os.close(reader)

    def await_ready(self, seconds: float, told: Callable[[], bool]) -> bool:
        """Wait until it answers; False when we are told to stop meanwhile. `ServerFailed`: it died or is too slow."""
        deployment = self.deployment
        url = f"http://127.0.0.1:{deployment.port}{deployment.health_path}"
        end = time.monotonic() + seconds
        while not told():
            self.check()
            if _status(url) == deployment.health_status:
                self.check()
                return True
            if time.monotonic() > end:
                raise ServerFailed(f"the server did not answer {url} within {seconds:.0f} s:\n{self.last_lines()}")
            time.sleep(_LOOK_SECONDS)
        return False

    def check(self) -> None:
        """Raise when it is dead."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise ServerFailed(f"the server has ended ({how}); its last lines:\n{self.last_lines()}")

    def last_lines(self) -> str:
        """What it said last."""
        with suppress(OSError):
            text = self.log.read_bytes()[-20_000:].decode(errors="replace")
            return "\n".join(f"  | {line}" for line in text.splitlines()[-_LAST_LINES:]) or "  | (nothing)"
        return "  | (no log)"

    def stop(self) -> None:
        """End the whole group: kindly, then not."""
        if self._process is None:
            return
        for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
                break
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the guard, which ignores the first
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        self._process = None


def server_line(deployment: DeploymentFile, nodes: int, *, pyxis: bool) -> str:
    """The shell command of a server: as it is, or over several nodes or in a container by srun."""
    line = f"{deployment.pre_cmd}\n{deployment.command}" if deployment.pre_cmd else deployment.command
    if not pyxis and nodes == 1:
        return line
    tasks = deployment.tasks or nodes
    words = ["srun", "--overlap", f"--nodes={nodes}", f"--ntasks={tasks}", "--kill-on-bad-exit=1"]
    if pyxis:
        words.append(f"--container-image={deployment.image}")
        if deployment.mounts:
            words.append(f"--container-mounts={','.join(deployment.mounts)}")
        words.append("--container-mount-home" if deployment.mount_home else "--no-container-mount-home")
    return shlex.join([*words, "bash", "-c", line])


def plain(deployment: DeploymentFile) -> DeploymentFile:
    """A server without a container, to which `/checkpoint` and `/cache` are the folders that a container has there."""
    pairs = [mount.split(":")[:2] for mount in deployment.mounts]
    known = {target: source for source, target in pairs if target in (CHECKPOINT, CACHE)}

    def at_home(text: str) -> str:
        for target, source in known.items():
            text = re.sub(rf"(?<![\w./-]){target}(?![\w.-])", lambda _, path=source: path, text)  # type: ignore[misc]
        return text

    return msgspec.structs.replace(
        deployment,
        command=at_home(deployment.command),
        pre_cmd=at_home(deployment.pre_cmd) if deployment.pre_cmd else None,
        env={name: at_home(value) for name, value in deployment.env.items()},
    )


def has_pyxis() -> bool:
    """Whether srun here knows containers."""
    try:
        argv = ["srun", "--help"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "--container-image" in done.stdout


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _status(url: str) -> int | None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by way of a proxy
    try:
        with opener.open(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError):
        return None
