"""Exporters that follow a run's journals while the run is going on, and keep a copy up to date."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from holdfast.spec.exports import LIVE_EXPORTERS
from holdfast.spec.plugins import load_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from holdfast.plan.identity import RunIdentity
    from holdfast.report.run_view import RunView
    from holdfast.spec.exports import LiveExport
    from holdfast.store.rundir import RunDir


class LiveExporter(Protocol):
    """Follows a run from `start` to `close`. Its failures are warnings and change neither the run nor its exit code."""

    schema: ClassVar[type[LiveExport]]
    """the keys of its block under `output`"""

    def __init__(self, block: Any, identity: RunIdentity, rundir: RunDir, notice: Callable[[str], None]) -> None: ...

    def start(self) -> None:
        """Begin to follow the run; return at once."""
        ...

    def close(self) -> None:
        """Copy what has been recorded meanwhile, and stop. The run's journals are closed by then."""
        ...

    @classmethod
    def write(cls, view: RunView, folder: Path, block: Any) -> Iterable[Path]:
        """Write the copy of a finished run, and return its files."""
        ...


def live_exporter(name: str) -> type[LiveExporter]:
    """Return the exporter of a key under `output`."""
    kind: type[LiveExporter] = load_reference(LIVE_EXPORTERS[name])
    return kind


def live_exporters(identity: RunIdentity, rundir: RunDir, notice: Callable[[str], None]) -> list[LiveExporter]:
    """Return the exporters that an eval asks for."""
    blocks = identity.spec.live_exports
    return [live_exporter(name)(block, identity, rundir, notice) for name, block in blocks.items()]
