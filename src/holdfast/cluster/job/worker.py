"""A worker beside the main job: works whenever there is work, and leaves when there can be none any more."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.cluster.job.node import LOOK_SECONDS, Working, run_hook, say
from holdfast.cluster.remote import invocation as layout
from holdfast.cluster.remote.chain import Chain
from holdfast.cluster.remote.invocation import EndpointFile
from holdfast.cluster.remote.ledger import INTENT, Ledger, Submitter
from holdfast.cluster.remote.slurm import Slurm
from holdfast.cluster.remote.transport import Here
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.cluster.job.node import NodeJob

_ASK_SECONDS: Final = 20.0
_DEATHS: Final = 5
_PAUSE_SECONDS: Final = 5.0
_ALONE_SECONDS: Final = 120.0
"""how long no main job may be there before nobody expects one"""


def work_beside(job: NodeJob) -> int:
    """Work until the run is done, it was stopped, or its main job is over for good."""
    transport = Here(pauses=())
    ledger = Ledger(transport, job.place.invocation)
    if job.task.executor == "slurm" and ledger.disowned(os.environ.get(INTENT, "")):
        say("another process has taken over this submission; nothing to do")
        return 0
    run_hook(job, job.task.pre_cmd, "pre_cmd")
    mains = _Mains(job, Chain(Submitter(Slurm(transport), ledger), job.task.invocation, job.place))
    served = died = 0
    while True:
        if why := _over(job, mains):
            say(f"leaving: {why}")
            return 0
        endpoint = read_endpoint(job)
        if endpoint is None or endpoint.serial <= served:
            time.sleep(LOOK_SECONDS)
            continue
        mains.seen()
        served = endpoint.serial
        code = _work(job, endpoint)
        say(f"worked on {endpoint.run_dir}: exit code {code}")
        if code not in (0, 1, 3) and died < _DEATHS:  # killed, or in somebody's way
            served, died = 0, died + 1
            time.sleep(_PAUSE_SECONDS)


def _work(job: NodeJob, endpoint: EndpointFile) -> int:
    """Work as long as the main job says that there is work."""
    here = seen_from_here(endpoint)
    working = Working(job, endpoint.run_dir, f"w{job.index}", here.base_urls, here.env)
    while working.code is None:
        time.sleep(LOOK_SECONDS)
        if job.must_go:
            return working.drain()
        now = read_endpoint(job)
        # A server that is gone, or another. Where the model is elsewhere, work goes on without the main job.
        serves = endpoint.base_urls or endpoint.env
        if serves and (now is None or now.serial != endpoint.serial):
            return working.drain()
    if (ended := working.ended).kind:
        say(f"{ended.message}")
    return working.code


def seen_from_here(endpoint: EndpointFile) -> EndpointFile:
    """Where everything is, seen from this node."""
    if endpoint.host != os.uname().nodename:
        return endpoint

    def near(text: str) -> str:
        return text.replace(f"//{endpoint.host}:", "//127.0.0.1:")

    env = {name: near(text) for name, text in endpoint.env.items()}
    return msgspec.structs.replace(endpoint, base_url=tuple(map(near, endpoint.base_urls)), env=env)


def read_endpoint(job: NodeJob) -> EndpointFile | None:
    """What the main job offers just now."""
    try:
        data = Path(job.place.endpoint).read_bytes()
    except FileNotFoundError:
        return None
    return layout.decode(data, EndpointFile, job.place.endpoint)


def _over(job: NodeJob, mains: _Mains) -> str | None:
    if job.stopped:
        return "told to stop"
    if job.must_go:
        return f"signal {job.told}"
    state = layout.read_state(Here(pauses=()), job.place) if Path(job.place.state).exists() else layout.State()
    if state.phase in layout.OVER:
        return f"the run is {state.phase}"
    return "the main job is gone" if mains.gone() else None


class _Mains:
    """Whether a main job is there, or may come."""

    def __init__(self, job: NodeJob, chain: Chain) -> None:
        self._job = job
        self._chain = chain
        self._parent = os.getppid()
        self._asked = self._alive = time.monotonic()

    def seen(self) -> None:
        """It has just shown itself."""
        self._alive = time.monotonic()

    def gone(self) -> bool:
        """Whether none has been there for so long that none will come."""
        if self._job.task.executor != "slurm":
            return os.getppid() != self._parent
        now = time.monotonic()
        if now - self._asked > _ASK_SECONDS:
            self._asked = now
            try:
                if self._chain.live("main"):
                    self._alive = now
            except HoldfastError as error:
                say(f"cannot ask Slurm: {error}")
                self._alive = now
        return now - self._alive > _ALONE_SECONDS
