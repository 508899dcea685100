"""The copies of a run that an eval file and a command ask for beside its exports, where they say."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError
from holdfast.export.folder import write_folder
from holdfast.export.nat import write_nat
from holdfast.export.run_reader import RunReader
from holdfast.export.samples import write_samples

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from holdfast.spec.load import Eval
    from holdfast.store.rundir import RunDir


def write_copies(rundir: RunDir, *, log_samples: bool, output_path: Path | None) -> list[Path]:
    """Write what a command asks for, and return the files; OSError where that cannot be done."""
    if not (log_samples or output_path):
        return []  # reading a run takes its time
    reader = RunReader(rundir)
    written: list[Path] = []
    if log_samples:
        written.append(rundir.path / "samples.jsonl")
        write_samples(reader.trials(), written[0])
    if output_path:
        written += write_folder(reader, output_path)
    return written


def write_nat_copy(rundir: RunDir, spec: Eval, failed: Callable[[str], None]) -> list[Path]:
    """Write `output.nat` of a finished run, and return the files. A failure is reported and fails nothing."""
    if (nat := spec.output.nat) is None or not rundir.finished:
        return []
    folder = spec.folder / nat.dir
    try:
        # The lines again too: where all was reused, nothing was written while it ran.
        return write_nat(RunReader(rundir), folder, nat.step_filter, lines=True)
    except (HoldfastError, OSError) as error:
        hint = f"The run itself is whole. Again: holdfast export {shlex.quote(str(rundir.path))} --to nat -o DIR"
        failed(f"output.nat: cannot write {folder}: {error}\n  {hint}")
        return []
