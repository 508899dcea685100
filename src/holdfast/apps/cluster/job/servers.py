"""Start, watch and stop the servers of a job: the model's, and others that the eval needs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.apps.cluster.config.launch import CACHE, CHECKPOINT, PORT, Container
from holdfast.apps.cluster.job.context import POLL_SECONDS, StopRequested, say
from holdfast.apps.cluster.job.process import container_name, container_words, removal
from holdfast.apps.cluster.remote.transport import Here
from holdfast.errors import Exit, HoldfastError, Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from holdfast.apps.cluster.config.launch import Server
    from holdfast.apps.cluster.job.context import JobContext

_PORT_SECONDS: Final = 20.0
"""how long the server of a job that has just ended may take to release its port"""
RETURN_SECONDS: Final = 600.0
"""how long a server that refuses connections is waited for, unless `endpoint_readiness_timeout` gives a time"""
_PORTS: Final = 1000
"""how many ports are tried for a server that may have any"""
_LAST_LINES: Final = 15


class ServerFailed(HoldfastError):
    """A server did not start, or has died."""

    exit_code: int = Exit.UNFINISHED


class Node(NamedTuple):
    """A node of the job."""

    name: str
    """in Slurm"""
    address: str
    """for connections"""


class Servers:
    """The servers of a job."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._processes: list[ServerProcess] = []
        self.port_reason = ""
        """why a server waits for its port"""

    @cached_property
    def spots(self) -> list[Spot]:
        """The place of each server."""
        task = self._job.task
        nodes = job_nodes() if task.served and self._job.executor.allocates_nodes else []
        return spots(task.served, nodes, self._job.node)

    @property
    def logs(self) -> list[Path]:
        """The log of each server."""
        return [self._job.log(spot.deployment.name, spot.instance) for spot in self.spots]

    @property
    def started(self) -> bool:
        """True if the servers were started."""
        return bool(self._processes)

    def start(self, show: Callable[[str], None]) -> None:
        """Start all servers and wait until they answer; `show` is told why that takes time.

        Raises StopRequested or ServerFailed.
        """
        count = len(self.spots)
        starting = "the server is starting" if count == 1 else f"{count} servers are starting"
        show(starting)

        def wait_for_port(reason: str) -> None:
            self.port_reason = reason
            say(reason)
            show(reason)

        for index, (spot, log) in enumerate(zip(self.spots, self.logs, strict=True)):
            server = spot.deployment
            if not (server.engine or (server.image and has_pyxis())):
                server = without_container(server)
            taken = {(process.host, process.spot.port) for process in self._processes}
            name = container_name(self._job.task, f"{server.name}-{spot.instance}")
            process = ServerProcess(replace(spot, deployment=server), log, self._job.env, name)
            self._processes.append(process)  # to be stopped whatever happens
            if not process.start(wait_for_port, lambda: self._job.must_stop, taken):
                raise StopRequested
            self.port_reason = ""
            if process.spot.port != spot.port:
                say(f"port {spot.port} is taken; {spot} uses {process.spot.port}")
                self.spots[index] = replace(spot, port=process.spot.port)
        show(f"{starting}; see {self.logs[0]}")
        if not await_ready(self._processes, self._job.task.walltime, lambda: self._job.must_stop):
            raise StopRequested
        for spot in self.spots:
            say(f"{spot} answers at {spot.url(spot.deployment.base_path)}")

    def addresses(self, this_node: str) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the URLs of the model, and variables with the URLs of other servers.

        `this_node` is the name of this node for whoever gets the URLs.
        """
        urls: list[str] = []
        env: dict[str, str] = {}
        for spot in self.spots:
            server, prefix = spot.deployment, spot.deployment.prefix
            url = spot.url(server.base_path, this_node)
            if not prefix:
                urls.append(url)
            elif spot.instance:
                env[f"{prefix}_URL"] += f",{url}"
            else:
                env |= {f"{prefix}_URL": url, f"{prefix}_MODEL_ID": server.model or ""}
                for kind, path in server.endpoints.items():
                    env[f"{prefix}_{kind.upper()}_URL"] = spot.url(path, this_node)
        return tuple(urls), env

    def check(self) -> None:
        """Raise ServerFailed if a server has died."""
        for process in self._processes:
            process.check()

    def await_return(self, must_stop: Callable[[], bool]) -> bool:
        """Wait until all servers answer again; False if the job must stop first.

        Raises ServerFailed if one has died, or does not answer within the time that it has to start.
        """
        return await_ready(self._processes, RETURN_SECONDS, must_stop)

    def stop(self) -> None:
        """Stop all servers at the same time: each may take a while."""
        threads = [threading.Thread(target=process.stop) for process in self._processes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@dataclass(frozen=True)
class Spot:
    """The place of one server: its nodes and its port."""

    deployment: Server
    instance: int
    nodes: tuple[Node, ...]
    """empty: this node, the only one of the job"""
    port: int
    near: bool
    """True if the server answers on this node"""

    def url(self, path: str, near: str = "127.0.0.1") -> str:
        """Return the URL of a path; `near` is the name of this node for whoever uses the URL."""
        return f"http://{near if self.near else self.nodes[0].address}:{self.port}{path}"

    @property
    def env(self) -> dict[str, str]:
        """The variables that tell the server about its place."""
        env = {
            PORT: str(self.port),
            "INSTANCE_ID": str(self.instance),
            "INSTANCE_RANK": "0",
            "PROC_ID": "0",
            "NUM_INSTANCES": str(self.deployment.instances),
            "NODES_PER_INSTANCE": str(len(self.nodes) or 1),
        }
        addresses = [_ip(node.address) for node in self.nodes] or [_ip(socket.gethostname())]
        first = {"MASTER_IP": addresses[0], "INSTANCE_MASTER_IP": addresses[0]}
        return {**env, **first, "ALL_NODE_IPS": ",".join(addresses)}

    def __str__(self) -> str:
        """Return the name that messages use."""
        name = f"the server {self.deployment.name}" if self.deployment.prefix else "the server"
        several = f" (instance {self.instance}" + (f", {self.nodes[0].name})" if self.nodes else ")")
        return name + (several if self.deployment.instances > 1 else "")


def spots(deployments: Iterable[Server], nodes: Sequence[Node], here: str) -> list[Spot]:
    """Assign a place to every server: in a job of several nodes each gets its own, in order. `here` is this node.

    Of two servers that would share an address, as on this machine, the second gets the next port.
    """
    rest, taken, assigned = list(nodes), set(), []
    for deployment in deployments:
        size = deployment.nodes // deployment.instances
        for instance in range(deployment.instances):
            share, rest = tuple(rest[:size]), rest[size:]
            if nodes and len(share) < size:
                raise HoldfastError(f"the job has {len(nodes)} nodes, which are too few for its servers")
            address, port = share[0].address if share else "", deployment.port
            while (address, port) in taken:
                port += 1
            taken.add((address, port))
            assigned.append(Spot(deployment, instance, share, port, not share or share[0].name == here))
    return assigned


def job_nodes() -> list[Node]:
    """List the nodes of this job, if it has several. If Slurm does not answer, their names serve as addresses."""
    if int(os.environ.get("SLURM_JOB_NUM_NODES") or 1) == 1:
        return []
    here = Here(pauses=())
    names = here.check(["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]).text.split()
    addresses = {}
    with suppress(Unreachable):
        for line in here.run(["scontrol", "--oneliner", "show", "nodes", ",".join(names)]).text.splitlines():
            fields = dict(word.partition("=")[::2] for word in line.split() if "=" in word)
            addresses[fields.get("NodeName", "")] = fields.get("NodeAddr", "")
    return [Node(name, addresses.get(name) or name) for name in names]


def _ip(address: str) -> str:
    try:
        return socket.gethostbyname(address)
    except OSError:
        return address


def await_ready(servers: Sequence[ServerProcess], patience: float, must_stop: Callable[[], bool]) -> bool:
    """Wait until all servers answer; False if the job must stop first. ServerFailed: one died or is too slow."""
    begun, waiting = time.monotonic(), list(servers)
    while not must_stop():
        ready = [server for server in waiting if server.answers()]
        for server in servers:
            server.check()
        waiting = [server for server in waiting if server not in ready]
        if not waiting:
            return True
        for server in waiting:
            seconds = server.spot.deployment.readiness_seconds or patience
            if time.monotonic() - begun > seconds:
                raise ServerFailed(
                    f"{server.spot} did not answer {server.health} within {seconds:.0f} s:\n{server.last_lines()}"
                )
        time.sleep(POLL_SECONDS)
    return False


class ServerProcess:
    """One server, in its own process group.

    A small guard process in the group reads a pipe from the job, and kills the group when the pipe closes: when the
    job ends, in whatever way. A container of podman or docker is outside of the group, so the guard removes it by its
    name; one whose guard was killed too is removed when the next job starts the server.
    """

    def __init__(
        self, spot: Spot, log: Path, env: Callable[[Mapping[str, str]], Mapping[str, str]], container: str = ""
    ) -> None:
        """`env` makes an environment of the server's variables."""
        self.spot = spot
        self.log = log
        self._env = env
        self._container = container
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None
        self._reserved: socket.socket | None = None

    @property
    def host(self) -> str:
        """The address of the server as seen from here."""
        return "127.0.0.1" if self.spot.near else self.spot.nodes[0].address

    def start(
        self,
        notify: Callable[[str], None],
        must_stop: Callable[[], bool],
        taken: Collection[tuple[str, int]] = (),
    ) -> bool:
        """Start the server; False if the job must stop before the port is free.

        Another server on the port would be measured instead, so a port of this node is reserved first. If the port is
        taken, a server that may have any port gets the next free one that is not in `taken`. Otherwise it waits for the
        server of another job; a port that another program uses is an error.
        """
        if self.spot.deployment.any_port:
            self._take_free_port(taken)
        elif not self._await_port(notify, must_stop):
            return False
        spot, deployment = self.spot, self.spot.deployment
        engine, names = deployment.engine, [node.name for node in spot.nodes]
        pyxis = bool(deployment.image) and engine is None and has_pyxis()
        alone = not pyxis and spot.near and len(names) == 1
        env = {**self._env(deployment.env), **spot.env}
        own = [name for name in {**deployment.env, **spot.env} if name in env]
        pmix = pyxis and has_pmix()
        size, others = len(names) or 1, () if alone else names
        line = server_line(deployment, size, pyxis=pyxis, pmix=pmix, names=others, variables=own)
        remove = ""
        if engine is not None:
            run = server_words(deployment, self._container, own, gpus=shutil.which("nvidia-smi") is not None)
            remove = f"{removal(engine, self._container)}; "
            line = f"{remove}exec {shlex.join([*run, 'sh', '-c', line])}"
        elif deployment.image and not pyxis:
            notify(f"no pyxis here: {deployment.image} is not used, {spot} runs as a plain process")
        reader, self._pipe = os.pipe()
        ending = f"{remove}kill -TERM 0; sleep 10; kill -KILL 0"
        guard = f"(trap '' TERM; cat <&{reader} >/dev/null; {ending}) & exec {reader}<&-; "
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                ["bash", "-c", guard + line],  # noqa: S607 - as the cluster has it
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
                pass_fds=(reader,),
            )
        os.close(reader)
        return True

    def _take_free_port(self, taken: Collection[tuple[str, int]]) -> None:
        first = self.spot.port
        for port in range(first, min(first + _PORTS, 65536)):
            if (self.host, port) in taken or (self.spot.near and (reserved := _reserve(port)) is None):
                continue
            self._reserved = reserved if self.spot.near else None
            if not _listens(self.host, port):
                self.spot = replace(self.spot, port=port, deployment=self.spot.deployment.on_port(port))
                return
            self._release_port()
        raise ServerFailed(f"none of the ports {first} to {first + _PORTS - 1} of {self.host} is free for {self.spot}")

    def _await_port(self, notify: Callable[[str], None], must_stop: Callable[[], bool]) -> bool:
        """Wait until the port is free; False if the job must stop first."""
        spot = self.spot
        where = f"port {spot.port} of {socket.gethostname() if spot.near else self.host}"
        waiting = False
        while spot.near and (reserved := _reserve(spot.port)) is None:
            if must_stop():
                return False
            if not waiting:
                notify(
                    f"{where} is used by the server of another job; {spot} starts when that has ended. With --port "
                    f"${PORT} in its command it would start at once, at another port"
                )
                waiting = True
            time.sleep(POLL_SECONDS)
        self._reserved = reserved if spot.near else None
        end = time.monotonic() + _PORT_SECONDS
        while _listens(self.host, spot.port):
            if must_stop():
                return False
            if time.monotonic() > end:
                raise ServerFailed(
                    f"{where} is taken by another process",
                    remedy=f"Use ${PORT} in the command, choose another deployment.port, or ask for whole nodes "
                    "(exclusive).",
                )
            time.sleep(POLL_SECONDS)
        return True

    @property
    def health(self) -> str:
        """The URL of its health check."""
        return self.spot.url(self.spot.deployment.health_path)

    def answers(self) -> bool:
        """Return True if the server is ready."""
        return _status(self.health) == self.spot.deployment.health_status

    def check(self) -> None:
        """Raise ServerFailed if the server has ended."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise ServerFailed(f"{self.spot} has ended ({how}); its last lines:\n{self.last_lines()}")

    def last_lines(self) -> str:
        """Return the last lines of its log."""
        with suppress(OSError):
            text = self.log.read_bytes()[-20_000:].decode(errors="replace")
            return "\n".join(f"  | {line}" for line in text.splitlines()[-_LAST_LINES:]) or "  | (nothing)"
        return "  | (no log)"

    def stop(self) -> None:
        """Stop the process group: SIGTERM, then SIGKILL."""
        if self._process is not None:
            self._end(self._process)
        self._release_port()

    def _release_port(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        if (engine := self.spot.deployment.engine) is not None:  # its container is not in the group
            subprocess.run(["sh", "-c", removal(engine, self._container)], check=False)  # noqa: S607
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


def server_line(
    deployment: Server,
    nodes: int,
    *,
    pyxis: bool,
    pmix: bool = False,
    names: Sequence[str] = (),
    variables: Sequence[str] = (),
) -> str:
    """Return the shell command of a server: as it is, or through srun for other nodes or a container.

    `variables` are the names of variables that must keep their values in the container: otherwise the image's own win.
    """
    line = f"{deployment.pre_cmd}\n{deployment.command}" if deployment.pre_cmd else deployment.command
    if not pyxis and not names and nodes == 1:
        return line
    tasks = deployment.tasks or nodes
    words = ["srun", "--overlap", f"--nodes={nodes}", f"--ntasks={tasks}", "--kill-on-bad-exit=1"]
    if pmix:
        words.append("--mpi=pmix")
    if names:
        words.append(f"--nodelist={','.join(names)}")
    if pyxis:
        words.append(f"--container-image={deployment.image}")
        if deployment.mounts:
            words.append(f"--container-mounts={','.join(deployment.mounts)}")
        if variables:
            words.append(f"--container-env={','.join(sorted(variables))}")
        words.append("--container-mount-home" if deployment.mount_home else "--no-container-mount-home")
    return shlex.join([*words, "bash", "-c", f"export INSTANCE_RANK=$SLURM_PROCID PROC_ID=$SLURM_PROCID\n{line}"])


def server_words(server: Server, name: str, variables: Iterable[str], *, gpus: bool) -> list[str]:
    """Return the words that start a program in the image of a server."""
    assert server.engine is not None and server.image is not None
    devices = ["--gpus=all"] if server.engine == "docker" else ["--device=nvidia.com/gpu=all"]
    home = (f"{Path.home()}:{Path.home()}",) if server.mount_home else ()
    container = Container(
        image=server.image, engine=server.engine, options=server.engine_options, mounts=(*server.mounts, *home)
    )
    return container_words(container, name, variables, devices if gpus else ())


def without_container(deployment: Server) -> Server:
    """Return a server with `/checkpoint` and `/cache` replaced by the folders that a container would see there."""
    pairs = [mount.split(":")[:2] for mount in deployment.mounts]
    folders = {target: source for source, target in pairs if target in (CHECKPOINT, CACHE)}

    def translate(text: str) -> str:
        for target, source in folders.items():
            text = re.sub(rf"(?<![\w./-]){target}(?![\w.-])", lambda _, path=source: path, text)  # type: ignore[misc]
        return text

    return msgspec.structs.replace(
        deployment,
        command=translate(deployment.command),
        pre_cmd=translate(deployment.pre_cmd) if deployment.pre_cmd else None,
        env={name: translate(value) for name, value in deployment.env.items()},
    )


def has_pyxis() -> bool:
    """Return True if srun can start containers here."""
    return "--container-image" in (_ask_srun("--help") or "")


def has_pmix() -> bool:
    """Return True if srun can connect processes by PMIx here; `--mpi=list` also lists what cannot be loaded."""
    return _ask_srun("--mpi=pmix", "--overlap", "--nodes=1", "--ntasks=1", "true") is not None


def _ask_srun(*options: str) -> str | None:
    """Return what srun prints; None if it fails."""
    try:
        done = subprocess.run(["srun", *options], capture_output=True, text=True, timeout=30, check=False)  # noqa: S607
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _reserve(port: int) -> socket.socket | None:
    """Reserve a port of this node among all jobs of Holdfast while the socket is open; None if another job has it.

    The reservation is a name in Linux's abstract namespace, which disappears with its holder.
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
    import urllib.error
    import urllib.request  # which a job without servers need not import

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy
    try:
        with opener.open(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError):
        return None
