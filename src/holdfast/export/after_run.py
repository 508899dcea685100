"""Everything that is written of a run after it has ended, whichever command or call ran it.

Live exports and `exports` of the eval file are for finished runs, and a failure there is a warning: the run is whole,
and the command that exports again is named. What a command line asks for is written of unfinished runs too.

Results and transcripts in a folder of the user's are `<model>/<dataset>/results_<time>_<id>.json` and, beside it,
`samples_<time>_<id>.jsonl`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import HoldfastError, UsageError, with_hint
from holdfast.store.durable import make_directory, replacing, slug
from holdfast.store.records import SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from holdfast.report.run_view import RunView
    from holdfast.spec.eval import Eval
    from holdfast.store.rundir import RunDir


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
    """Write what the eval file asks for of a finished run, then what the command asks for.

    `report` is called with a line for each file or address, `warn` with each failure of what the eval file asks for.
    `log_samples` writes the transcripts into the run directory, `output_path` is a folder for results and transcripts,
    `exports` names exporters. A failure of these raises UsageError or ExportFailed.
    """
    finished = rundir.finished
    if not (log_samples or output_path or exports or (finished and (spec.exports or spec.live_exports))):
        return  # imports below, and reading a run, take their time
    from holdfast.export import registry
    from holdfast.report.run_view import RunView

    view = RunView(rundir)
    if finished:
        _write_live_exports(view, spec, report, warn)
    if finished and spec.exports:
        _export_finished(view, spec, report, warn)
    if log_samples or output_path:
        try:
            _report_files(_write_copies(view, log_samples, output_path), report)
        except OSError as error:
            remedy = f"The run is complete in {rundir.path}; choose another folder and run the same command."
            raise UsageError(f"cannot write the copies for other tools: {error}", remedy=remedy) from error
    for name in exports:
        registry.describe(name, registry.export(view, registry.export_block(view, name)), report)


def _report_files(paths: Iterable[Path], report: Callable[[str], None]) -> None:
    for path in paths:
        report(f"wrote {path}")


def _write_live_exports(view: RunView, spec: Eval, report: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Write the copies of live exporters once more: where all was reused, nothing was written while it ran."""
    from holdfast.export.live import live_exporter
    from holdfast.export.registry import export_command

    for name, block in spec.live_exports.items():
        folder = spec.folder / block.dir
        try:
            _report_files(live_exporter(name).write(view, folder, block), report)
        except (HoldfastError, OSError) as error:
            hint = f"The run itself is complete. Repeat the export with: {export_command(view.rundir, name)} -o DIR"
            warn(with_hint(f"output.{name}: cannot write {folder}: {error}", hint))


def _export_finished(view: RunView, spec: Eval, report: Callable[[str], None], warn: Callable[[str], None]) -> None:
    from holdfast.export import registry

    rundir = view.rundir
    try:
        entries = registry.read_entries(rundir)
    except HoldfastError as error:
        warn(str(error))
        return
    for block in (registry.in_folder(block, spec.folder) for block in spec.exports):
        if registry.is_done(rundir, block, entries):
            continue
        try:
            registry.describe(block.to, registry.export(view, block), report)
        except (HoldfastError, OSError) as error:
            hint = f"The run itself is complete. Repeat the export with: {registry.export_command(rundir, block.to)}"
            warn(with_hint(str(error), hint))


def _write_copies(view: RunView, log_samples: bool, output_path: Path | None) -> list[Path]:
    from holdfast.export.samples import write_samples

    written: list[Path] = []
    if log_samples:
        written.append(view.rundir.path / "samples.jsonl")
        write_samples(view.trials(), written[0])
    if output_path:
        written += write_folder(view, output_path)
    return written


def write_folder(view: RunView, folder: Path) -> list[Path]:
    """Write results, with the metrics and the eval, and transcripts below a folder."""
    from holdfast.export.samples import write_samples

    manifest, metrics = view.manifest, view.metrics
    sources = manifest.dataset.source or ["samples"]
    place = folder / slug(manifest.target) / slug(Path(sources[0]).name.partition(".")[0] or manifest.name)
    make_directory(place)
    stamp = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}_{manifest.id}"
    results, samples = place / f"results_{stamp}.json", place / f"samples_{stamp}.jsonl"
    write_samples(view.trials(), samples)
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
