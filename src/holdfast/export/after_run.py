"""Copies of a finished run that an eval file and a command ask for, beside its exports.

Results and transcripts in a folder of the user's are `<model>/<dataset>/results_<time>_<id>.json` and, beside it,
`samples_<time>_<id>.jsonl`.
"""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import HoldfastError
from holdfast.export.nat import write_nat
from holdfast.export.samples import write_samples
from holdfast.report.run_view import RunView
from holdfast.store.durable import make_directory, replacing, slug
from holdfast.store.records import SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.spec.load import Eval
    from holdfast.store.rundir import RunDir


def write_copies(rundir: RunDir, *, log_samples: bool, output_path: Path | None) -> list[Path]:
    """Write what a command asks for, and return the files; OSError where that cannot be done."""
    if not (log_samples or output_path):
        return []  # reading a run takes its time
    view = RunView(rundir)
    written: list[Path] = []
    if log_samples:
        written.append(rundir.path / "samples.jsonl")
        write_samples(view.trials(), written[0])
    if output_path:
        written += write_folder(view, output_path)
    return written


def write_nat_copy(rundir: RunDir, spec: Eval, failed: Callable[[str], None]) -> list[Path]:
    """Write `output.nat` of a finished run, and return the files. A failure is reported and fails nothing."""
    if (nat := spec.output.nat) is None or not rundir.finished:
        return []
    folder = spec.folder / nat.dir
    try:
        # The lines again too: where all was reused, nothing was written while it ran.
        return write_nat(RunView(rundir), folder, nat.step_filter, lines=True)
    except (HoldfastError, OSError) as error:
        again = f"holdfast export {shlex.quote(str(rundir.path))} --to nat -o DIR"
        hint = f"The run itself is complete. Repeat the export with: {again}"
        failed(f"output.nat: cannot write {folder}: {error}\n  {hint}")
        return []


def write_folder(view: RunView, folder: Path) -> list[Path]:
    """Write both; the results have the metrics and the eval that gave them."""
    manifest = view.manifest
    sources = manifest.dataset.source or ["samples"]
    place = folder / slug(manifest.target) / slug(Path(str(sources[0])).name.partition(".")[0] or manifest.name)
    make_directory(place)
    stamp = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}_{manifest.id}"
    results, samples = place / f"results_{stamp}.json", place / f"samples_{stamp}.jsonl"
    write_samples(view.trials(), samples)
    metrics = view.metrics
    body = {
        "schemaVersion": SCHEMA_VERSION,
        "run": str(view.rundir.path),
        "finished": metrics is not None,
        "metrics": None if metrics is None else metrics.to_dict(),
        "eval": manifest.eval,
    }
    with replacing(results) as file:
        file.write(msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n")
    return [results, samples]
