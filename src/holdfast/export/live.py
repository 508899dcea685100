"""Exporters that follow a run's journals while the run is going on, and keep a copy up to date."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.plan.identity import RunIdentity
    from holdfast.store.rundir import RunDir


_NAT: Final = "holdfast.formats.nat.mirror:NatMirror"
"""writes `output.nat`"""


class LiveExporter(Protocol):
    """Follows a run from `start` to `close`. Its failures are warnings and change neither the run nor its exit code."""

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
    module, _, name = _NAT.partition(":")
    mirror = getattr(import_module(module), name)
    return [mirror(rundir, identity.id, identity.spec, identity.dataset, identity.work, notice)]
