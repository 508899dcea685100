"""The servers of a job, of the model and of whatever else it needs: started, waited for, watched, and gone with it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.cluster.config.mounts import CACHE, CHECKPOINT
from holdfast.cluster.remote.transport import Here
from holdfast.errors import HoldfastError, Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from holdfast.cluster.remote.invocation import DeploymentFile

_LOOK_SECONDS: Final = 0.25
_PORT_SECONDS: Final = 20.0
"""how long the server of an attempt that has just ended may take to leave the port"""
_LAST_LINES: Final = 15


class ServerFailed(HoldfastError):
    """The server did not start, or has died."""

    exit_code = 3


class Node(NamedTuple):
    """A node of the job."""

    name: str
    """Slurm's"""
    address: str
    """where it is reached"""


@dataclass(frozen=True)
class Spot:
    """Where one server runs."""

    deployment: DeploymentFile
    instance: int
    nodes: tuple[Node, ...]
    """none: this one, as the job has no other"""
    port: int
    near: bool
    """whether it answers on this very node"""

    def url(self, path: str, near: str = "127.0.0.1") -> str:
        """A path of its; `near` is what this node is called by whoever asks."""
        return f"http://{near if self.near else self.nodes[0].address}:{self.port}{path}"

    @property
    def env(self) -> dict[str, str]:
        """What the server is told of its place."""
        told = {
            "HOLDFAST_PORT": str(self.port),
            "INSTANCE_ID": str(self.instance),
            "INSTANCE_RANK": "0",
            "NUM_INSTANCES": str(self.deployment.instances),
            "NODES_PER_INSTANCE": str(len(self.nodes) or 1),
        }
        if self.nodes:
            addresses = [_ip(node.address) for node in self.nodes]
            first = {"MASTER_IP": addresses[0], "INSTANCE_MASTER_IP": addresses[0]}
            told |= {**first, "ALL_NODE_IPS": ",".join(addresses)}
        return told

    def __str__(self) -> str:
        """As messages name it."""
        name = f"the server {self.deployment.name}" if self.deployment.prefix else "the server"
        several = f" (instance {self.instance}" + (f", {self.nodes[0].name})" if self.nodes else ")")
        return name + (several if self.deployment.instances > 1 else "")


def spots(deployments: Iterable[DeploymentFile], nodes: Sequence[Node], here: str) -> list[Spot]:
    """A place for every server: nodes of its own, in order, where the job has several (`here` is the name of ours).

    Of two that would meet on one address, as on this machine, the second has the next port.
    """
    rest, taken, found = list(nodes), set(), []
    for deployment in deployments:
        size = (deployment.nodes or len(nodes)) // deployment.instances
        for instance in range(deployment.instances):
            own, rest = tuple(rest[:size]), rest[size:]
            if nodes and len(own) < size:
                raise HoldfastError(f"the job has {len(nodes)} nodes, which are too few for its servers")
            address, port = own[0].address if own else "", deployment.port
            while (address, port) in taken:
                port += 1
            taken.add((address, port))
            found.append(Spot(deployment, instance, own, port, not own or own[0].name == here))
    return found


def job_nodes() -> list[Node]:
    """The nodes of this job, where it has several. Without Slurm's answer they are reached by their names."""
    if int(os.environ.get("SLURM_JOB_NUM_NODES") or 1) == 1:
        return []
    here = Here(pauses=())
    names = here.check(["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]).text.split()
    addresses = {}
    with suppress(Unreachable):
        for line in here.run(["scontrol", "--oneliner", "show", "nodes", ",".join(names)]).text.splitlines():
            about = dict(word.partition("=")[::2] for word in line.split() if "=" in word)
            addresses[about.get("NodeName", "")] = about.get("NodeAddr", "")
    return [Node(name, addresses.get(name) or name) for name in names]


def _ip(address: str) -> str:
    try:
        return socket.gethostbyname(address)
    except OSError:
        return address


def await_ready(servers: Sequence[Server], patience: float, told: Callable[[], bool]) -> bool:
    """Wait until all answer; False when we are told to stop meanwhile. `ServerFailed`: one died or is too slow."""
    begun, waiting = time.monotonic(), list(servers)
    while not told():
        ready = [server for server in waiting if server.answers()]
        for server in servers:
            server.check()
        waiting = [server for server in waiting if server not in ready]
        if not waiting:
            return True
        for server in waiting:
            seconds = server.spot.deployment.readiness_seconds or patience
            if time.monotonic() - begun > seconds:
                said = f"{server.spot} did not answer {server.health} within {seconds:.0f} s"
                raise ServerFailed(f"{said}:\n{server.last_lines()}")
        time.sleep(_LOOK_SECONDS)
    return False


def stop_all(servers: Sequence[Server]) -> None:
    """End them side by side: each may take its time."""
    threads = [threading.Thread(target=server.stop) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Server:
    """One server, in a process group of its own.

    A small process beside it reads a pipe from us, and ends the group when that ends: when we do, however we go.
    """

    def __init__(self, spot: Spot, log: Path, env: Mapping[str, str]) -> None:
        self.spot = spot
        self.log = log
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None
        self._reserved: socket.socket | None = None

    def start(self, said: Callable[[str], None], told: Callable[[], bool]) -> bool:
        """Start it; False when we are told to stop before its port is free.

        Another's server on its port would be measured in its place. So a port of this node is reserved first: other
        jobs of ours wait for it, and so do we. One that somebody else has is refused.
        """
        spot, deployment = self.spot, self.spot.deployment
        host = "127.0.0.1" if spot.near else spot.nodes[0].address
        where = f"port {spot.port} of {socket.gethostname() if spot.near else host}"
        waiting = False
        while spot.near and (reserved := _reserve(spot.port)) is None:
            if told():
                return False
            if not waiting:
                said(f"{where} is another job's, whose server has it; {spot} starts when that has ended")
                waiting = True
            time.sleep(_LOOK_SECONDS)
        self._reserved = reserved if spot.near else None
        end = time.monotonic() + _PORT_SECONDS
        while _listens(host, spot.port):
            if told():
                return False
            if time.monotonic() > end:
                raise ServerFailed(
                    f"{where} is taken by another process",
                    remedy="Choose another deployment.port, or ask for whole nodes (exclusive).",
                )
            time.sleep(_LOOK_SECONDS)
        pyxis, names = bool(deployment.image) and has_pyxis(), [node.name for node in spot.nodes]
        alone = not pyxis and spot.near and len(names) == 1
        line = server_line(deployment, len(names) or 1, pyxis=pyxis, names=() if alone else names)
        if deployment.image and not pyxis:
            said(f"no pyxis here: {deployment.image} is not used, {spot} runs as a plain process")
        reader, self._pipe = os.pipe()
        guard = f"(trap '' TERM; cat <&{reader} >/dev/null; kill -TERM 0; sleep 10; kill -KILL 0) & exec {reader}<&-; "
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                ["bash", "-c", guard + line],  # noqa: S607 - as the cluster has it
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**self._env, **spot.env},
                start_new_session=True,
                pass_fds=(reader,),
            )
        os.close(reader)
        return True

    @property
    def health(self) -> str:
        """The URL that says whether it is ready."""
        return self.spot.url(self.spot.deployment.health_path)

    def answers(self) -> bool:
        """Whether it is ready."""
        return _status(self.health) == self.spot.deployment.health_status

    def check(self) -> None:
        """Raise when it is dead."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise ServerFailed(f"{self.spot} has ended ({how}); its last lines:\n{self.last_lines()}")

    def last_lines(self) -> str:
        """What it said last."""
        with suppress(OSError):
            text = self.log.read_bytes()[-20_000:].decode(errors="replace")
            return "\n".join(f"  | {line}" for line in text.splitlines()[-_LAST_LINES:]) or "  | (nothing)"
        return "  | (no log)"

    def stop(self) -> None:
        """End the whole group: kindly, then not."""
        if self._process is not None:
            self._end(self._process)
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience)
                break
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # the guard, which ignores the first
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        self._process = None


def server_line(deployment: DeploymentFile, nodes: int, *, pyxis: bool, names: Sequence[str] = ()) -> str:
    """The shell command of a server: as it is, or by srun, on nodes that are named, on several, in a container."""
    line = f"{deployment.pre_cmd}\n{deployment.command}" if deployment.pre_cmd else deployment.command
    if not pyxis and not names and nodes == 1:
        return line
    tasks = deployment.tasks or nodes
    words = ["srun", "--overlap", f"--nodes={nodes}", f"--ntasks={tasks}", "--kill-on-bad-exit=1"]
    if names:
        words.append(f"--nodelist={','.join(names)}")
    if pyxis:
        words.append(f"--container-image={deployment.image}")
        if deployment.mounts:
            words.append(f"--container-mounts={','.join(deployment.mounts)}")
        words.append("--container-mount-home" if deployment.mount_home else "--no-container-mount-home")
    return shlex.join([*words, "bash", "-c", f"export INSTANCE_RANK=$SLURM_PROCID\n{line}"])


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


def _reserve(port: int) -> socket.socket | None:
    """Have a port of this node for ourselves among all jobs of Holdfast's, as long as this is open; None: another has.

    It is a name in Linux's abstract namespace: of nobody once its holder is gone, however that went.
    """
    held = socket.socket(socket.AF_UNIX)
    try:
        if sys.platform == "linux":
            held.bind(f"\0holdfast-port-{port}")
    except OSError:
        held.close()
        return None
    return held


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def _status(url: str) -> int | None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by way of a proxy
    try:
        with opener.open(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError):
        return None
