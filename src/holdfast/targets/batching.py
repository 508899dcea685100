"""The interface to batches, which the core can do without: `holdfast.plugins.batches` is loaded when a run needs it."""

from __future__ import annotations

from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

from holdfast.spec.plugins import load_reference

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from holdfast.http.client import Client
    from holdfast.spec.providers import ModelEndpoint
    from holdfast.spec.target_schema import BatchBlock
    from holdfast.store.rundir import RunDir

_PARTS: Final = {
    "hub": "holdfast.plugins.batches.hub:open_batches",
    "problem": "holdfast.plugins.batches.providers:batch_problem",
    "most_requests": "holdfast.plugins.batches.providers:most_requests",
    "lines": "holdfast.plugins.batches.collecting:batch_lines",
}


class Asker(Protocol):
    """The attempt at a trial or a grade that makes a request, which names the request in a batch."""

    key: str
    """of the trial"""
    where: str
    """`target`, or the grader's name"""

    def waiting(self) -> AbstractContextManager[None]:
        """Suspend time limits while the request waits for its batch, which may take a day."""
        ...


ASKER: Final[ContextVar[Asker]] = ContextVar("asker")
"""set by the engine for each attempt"""


class BatchedClient(Protocol):
    """Makes the requests of one model in batches."""

    async def post(self, body: Any) -> tuple[Any, bool]:
        """Return the reply to a request, and whether it comes from a batch."""
        ...


class BatchHub(Protocol):
    """The batches of a run, for all models that it asks."""

    def client(
        self, client: Client, endpoint: ModelEndpoint, path: str, block: BatchBlock | None, where: str
    ) -> BatchedClient | None:
        """Return a client for batches of a model, whose single requests `client` makes; None if it has no batches."""
        ...

    def open(self) -> None:
        """Read what earlier processes have submitted and collected, once all clients are there."""
        ...

    async def run(self) -> None:
        """Submit batches and hand out their results, until cancelled."""
        ...

    async def settle(self) -> None:
        """Return when no batch is being submitted, and no results are being stored."""
        ...

    def leave(self) -> None:
        """Let nobody wait for a batch any longer: another process collects it."""
        ...

    def summary(self) -> list[str]:
        """Describe the batches that somebody waits for."""
        ...


def open_batches(rundir: RunDir, journals: Path, **options: Any) -> BatchHub:
    """Return the batches of a run; options as for `holdfast.plugins.batches.hub.Batches`."""
    hub: BatchHub = load_reference(_PARTS["hub"])(rundir, journals, **options)
    return hub


def batch_problem(block: BatchBlock, model: str, endpoint: ModelEndpoint) -> str | None:
    """Return why a model cannot be asked in batches; None if it can."""
    problem: str | None = load_reference(_PARTS["problem"])(block, model, endpoint)
    return problem


def most_requests(endpoint: ModelEndpoint) -> int:
    """Return how many requests one batch may have."""
    most: int = load_reference(_PARTS["most_requests"])(endpoint)
    return most


def batch_lines(rundir: RunDir, states: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """Describe the batches of a run that have no results yet; `states` has their progress, by intent."""
    if rundir.has_batches:
        yield from load_reference(_PARTS["lines"])(rundir, states)
