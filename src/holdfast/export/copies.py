"""The copies of a run that an eval file and a command ask for beside its exports, where they say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.export.folder import write_folder
from holdfast.export.nat import write_nat
from holdfast.export.reading import RunReader
from holdfast.export.samples import write_samples

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.spec.load import Eval
    from holdfast.store.rundir import RunDir


def write_copies(rundir: RunDir, spec: Eval, *, log_samples: bool, output_path: Path | None) -> list[Path]:
    """Write them, and return the files; OSError where that cannot be done. `output.nat` is of finished runs only."""
    nat = spec.output.nat if rundir.finished else None
    if not (log_samples or output_path or nat):
        return []  # reading a run takes its time
    reader = RunReader(rundir)
    written: list[Path] = []
    if log_samples:
        written.append(rundir.path / "samples.jsonl")
        write_samples(reader.trials(), written[0])
    if output_path:
        written += write_folder(reader, output_path)
    if nat:
        # The lines again too: where all was reused, nothing was written while it ran.
        written += write_nat(reader, spec.folder / nat.dir, nat.step_filter, lines=True)
    return written
