"""A real Slurm and a real ssh server for tests: `scripts/lab` starts them, once for all processes of a test run.

`slurm` and `sshd` are shared by everything that runs at the same time: jobs have names of their own, nobody cancels
what is not theirs, and nobody stops a daemon. Whoever must do that takes `own_slurm` or `own_sshd`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from holdfast.apps.cluster.remote.slurm import Submission
from holdfast.apps.cluster.remote.transport import Here, Ssh, Transport
from tests.support.running import ROOT, environment, wait_for
from tests.support.sharing import locked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.apps.cluster.remote.slurm import JobState, Slurm

SCRIPTS = ROOT / "scripts" / "lab"
SHARED = Path(tempfile.gettempdir()) / f"holdfast-lab-{os.getuid()}-{hashlib.sha256(bytes(ROOT)).hexdigest()[:8]}"


@dataclass(frozen=True)
class Cluster:
    """A Slurm and an ssh server that run for the tests, and the folder that holds them."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        """The environment in which Slurm's programs, and ours, find this cluster."""
        return environment(SLURM_CONF=str(self.folder / "slurm.conf"))

    @property
    def ssh_config(self) -> Path:
        """Knows the hosts `cluster` (whoever runs the tests) and, for root, `colleague` (an ordinary account)."""
        return self.folder / "ssh" / "ssh_config"

    @property
    def here(self) -> Here:
        """The way there from the login node."""
        return Here(env=self.env, pauses=())

    def ssh(self, host: str = "cluster") -> Ssh:
        """The way there from outside."""
        return Ssh(host, config=self.ssh_config, pauses=())

    @property
    def impatient(self) -> Here:
        """The way from the login node for somebody who expects no answer, and does not want to wait for none."""
        config = self.folder / "impatient.conf"
        config.write_text((self.folder / "slurm.conf").read_text() + "MessageTimeout=2\n")
        return Here(env={**self.env, "SLURM_CONF": str(config)}, pauses=())

    def script(self, name: str) -> None:
        """Run one of the lab's scripts."""
        subprocess.run([SCRIPTS / name, self.folder], check=True, timeout=120)

    def kill_controller(self) -> None:
        """Kill slurmctld as a power cut would."""
        pid = int((self.folder / "slurmctld.pid").read_text())
        process = psutil.Process(pid)
        assert process.name() == "slurmctld"
        process.send_signal(signal.SIGKILL)
        wait_for(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "the controller's end")


def submit_script(slurm: Slurm, script: bytes | str, **fields: Any) -> str:
    """Submit a script, by its text or its path, and return the id of its job."""
    ids, error = slurm.submit([Submission(script=script, **fields)])
    if error is not None:
        raise error
    return ids[0]


def wait_for_job(slurm: Slurm, name: str, condition: Callable[[JobState], bool]) -> JobState:
    """The one job of a name, once the condition holds."""

    def look() -> JobState | None:
        (job,) = slurm.jobs(names=[name])
        return job if condition(job) else None

    state: JobState = wait_for(look, f"a change of {name}")
    return state


def _start(lab: Cluster, *scripts: str) -> None:
    missing = [name for name in ("slurmctld", "munged", "sshd") if not shutil.which(name, path=_path())]
    if missing:
        pytest.skip(f"{', '.join(missing)} missing; on Debian and Ubuntu scripts/lab/install installs them, as root")
    for script in scripts:
        lab.script(script)


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])


def _users(add: int | None = None, remove: int | None = None) -> set[int]:
    """The test runs that use the shared lab. One that was killed does not count."""
    file = SHARED / "users"
    users = {int(pid) for pid in file.read_text().split()} if file.exists() else set()
    users = {pid for pid in users if psutil.pid_exists(pid)} - {remove} | ({add} if add else set())
    file.write_text(" ".join(map(str, users)))
    return users


def _run_pid() -> int:
    """The process that stands for this test run: with several workers, their parent."""
    return os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()


def _lock() -> AbstractContextManager[None]:
    return locked(SHARED.with_name(f"{SHARED.name}.lock"))


@pytest.fixture(scope="session")
def slurm() -> Cluster:
    """The shared cluster: four nodes, partitions main, low, lowgrace. Stopped by the last test run that uses it."""
    with _lock():
        SHARED.mkdir(exist_ok=True)
        _start(Cluster(SHARED), "slurm-up", "sshd-up")
        _users(add=_run_pid())
    return Cluster(SHARED)


@pytest.fixture(scope="session")
def sshd(slurm: Cluster) -> Cluster:
    """The shared cluster, which has an ssh server."""
    return slurm


@pytest.fixture
def own_slurm() -> Iterator[Cluster]:
    """A cluster with an ssh server for one test that breaks it."""
    with _own("slurm", "sshd") as lab:
        yield lab


@pytest.fixture
def own_sshd() -> Iterator[Cluster]:
    """An ssh server without a Slurm, for one test that breaks it."""
    with _own("sshd") as lab:
        yield lab


@contextmanager
def _own(*parts: str) -> Iterator[Cluster]:
    """Start parts of a lab, and stop them at the end."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-lab-"))
    lab = Cluster(folder)
    try:
        _start(lab, *(f"{part}-up" for part in parts))
        yield lab
    finally:
        for part in reversed(parts):
            lab.script(f"{part}-down")
        shutil.rmtree(folder)


@pytest.fixture(params=["here", "ssh"])
def transport(request: pytest.FixtureRequest, slurm: Cluster) -> Transport:
    """Both ways to the shared cluster."""
    return slurm.here if request.param == "here" else slurm.ssh()


def stop_shared_lab() -> None:
    """At the end of a test run: stop the shared lab unless another run uses it."""
    if "PYTEST_XDIST_WORKER" in os.environ or not SHARED.exists():
        return
    with _lock():
        if os.getpid() in _users() and not _users(remove=os.getpid()):
            Cluster(SHARED).script("sshd-down")
            Cluster(SHARED).script("slurm-down")
            shutil.rmtree(SHARED)
