"""Exporters that follow a run's journals while the run is going on, and keep a copy up to date."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.plan.identity import RunIdentity
    from holdfast.store.rundir import RunDir


class LiveExporter(Protocol):
    """Follows a run from `start` to `close`. Its failures are notices and change neither the run nor its exit code."""

    def start(self) -> None:
        """Begin to follow the run; return at once."""
        ...

    def close(self) -> None:
        """Copy what has been recorded meanwhile, and stop. The run's journals are closed by then."""
        ...


def live_exporters(identity: RunIdentity, rundir: RunDir, notice: Callable[[str], None]) -> list[LiveExporter]:
    """Return the exporters that an eval asks for."""
    if identity.spec.output.nat is None:
        return []
    from holdfast.export.mirror import NatMirror

    return [NatMirror(rundir, identity.id, identity.spec, identity.dataset, identity.work, notice)]
