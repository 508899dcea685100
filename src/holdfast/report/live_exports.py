"""Exports of a run: copies that follow its journals while it works, and all others once it has ended.

Most runs export nothing, so exporters are imported only if a run asks for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from holdfast.spec.eval_schema import LIVE_EXPORTERS
from holdfast.spec.plugins import load_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from holdfast.plan.identity import RunIdentity
    from holdfast.report.run_view import RunView
    from holdfast.spec.eval import Eval
    from holdfast.spec.eval_schema import LiveExport
    from holdfast.store.rundir import RunDir

_EXPORT: Final = "holdfast.report.exports:export_asked"


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


def export_after_run(
    rundir: RunDir,
    spec: Eval,
    report: Callable[[str], None],
    warn: Callable[[str], None],
    *,
    log_samples: bool = False,
    output_path: Path | None = None,
    exports: Sequence[str] = (),
) -> None:
    """Write what the eval file asks for of a finished run, then what the command asks for, also of an unfinished one.

    `report` is called with a line for each file or address, `warn` with each failure of what the eval file asks for:
    the run is whole, and the command that exports again is named. `log_samples` writes the transcripts into the run
    directory, `output_path` is a folder for results and transcripts, `exports` names exporters. A failure of these
    raises UsageError or ExportFailed.
    """
    if log_samples or output_path or exports or (rundir.finished and (spec.exports or spec.live_exports)):
        load_reference(_EXPORT)(
            rundir, spec, report, warn, log_samples=log_samples, output_path=output_path, exports=exports
        )
