"""Exports of a run: copies that follow its journals while it works, and all others once it has ended.

Most runs export nothing, so exporters are imported only if a run asks for one.

`exports.json` in the run directory records how each export ended: a failed one can be repeated by name, and one that is
up to date is skipped. An export that was only written to disk, because its service could not be reached, is `offline`,
and never up to date.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import msgspec

from holdfast.canonical import digest_bytes
from holdfast.errors import ConfigError, ExportFailed, HoldfastError, Problem, UsageError, with_hint
from holdfast.report.run_view import RunView
from holdfast.report.tables import write_folder, write_transcripts
from holdfast.spec.document import Document
from holdfast.spec.eval_schema import EXPORTERS, LIVE_EXPORTERS, FileExport, PluginExport, export_schema, read_export
from holdfast.spec.load import apply_override, parse_override
from holdfast.spec.plugins import load_reference
from holdfast.spec.redact import without_secrets
from holdfast.store.files import UNREADABLE, make_directory, read_file, remove_leftovers, replacing
from holdfast.store.records import SCHEMA_VERSION
from holdfast.versions import check_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from holdfast.plan.identity import RunIdentity
    from holdfast.spec.eval import Eval
    from holdfast.spec.eval_schema import ExportBlock, LiveExport
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
    view = RunView(rundir)
    if rundir.finished:
        _write_live_exports(view, spec, report, warn)
        _export_finished(view, spec, report, warn)
    try:
        if log_samples:
            _report_files(write_transcripts(view, rundir.path), report)
        if output_path:
            _report_files(write_folder(view, output_path), report)
    except OSError as error:
        remedy = f"The run is complete in {rundir.path}; choose another folder and run the same command."
        raise UsageError(f"cannot write the copies for other tools: {error}", remedy=remedy) from error
    for name in exports:
        describe(name, export(view, export_block(view, name)), report)


def _report_files(paths: Iterable[Path], report: Callable[[str], None]) -> None:
    for path in paths:
        report(f"wrote {path}")


def _write_live_exports(view: RunView, spec: Eval, report: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Write the copies of live exporters once more: if everything was reused, nothing was written during the run."""
    for name, block in spec.live_exports.items():
        folder = spec.folder / block.dir
        try:
            _report_files(live_exporter(name).write(view, folder, block), report)
        except (HoldfastError, OSError) as error:
            hint = f"The run itself is complete. Repeat the export with: {export_command(view.rundir, name)} -o DIR"
            warn(with_hint(f"output.{name}: cannot write {folder}: {error}", hint))


def _export_finished(view: RunView, spec: Eval, report: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Export a run to the destinations of its eval file, except those that are up to date."""
    if not spec.exports:
        return
    rundir = view.rundir
    try:
        entries = read_entries(rundir)
    except HoldfastError as error:
        warn(str(error))
        return
    for block in (in_folder(block, spec.folder) for block in spec.exports):
        if is_done(rundir, block, entries):
            continue
        try:
            describe(block.to, export(view, block), report)
        except (HoldfastError, OSError) as error:
            hint = f"The run itself is complete. Repeat the export with: {export_command(rundir, block.to)}"
            warn(with_hint(str(error), hint))


class Exported(NamedTuple):
    """The result of an export."""

    where: list[str]
    """files, folders or addresses"""
    notes: list[str]
    """what users should know, such as a command to type"""
    offline: str = ""
    """why nothing was sent, if the export was only written to disk"""
    send: str = ""
    """the command that sends it later"""


class Service(Protocol):
    """An exporter that sends runs somewhere. Other exporters are functions that write files into a folder."""

    schema: ClassVar[type[ExportBlock]]
    """the options in an eval file"""

    @staticmethod
    def send(view: RunView, block: Any) -> Exported:
        """Send a run; raise UsageError if something is missing here, and any exception if the service fails."""
        ...


class ExportEntry(msgspec.Struct, omit_defaults=True, frozen=True):
    """The last export to a destination."""

    state: Literal["done", "offline", "failed"]
    time: str
    options: dict[str, Any]
    of: str = ""
    """digest of the `metrics.json` and `gate.json` that were exported; empty for a run that was not finished"""
    where: list[str] = []
    """addresses, and paths relative to the run directory"""
    notes: list[str] = []
    error: str = ""
    """why the export failed, or why nothing was sent"""
    send: str = ""
    """the command that sends an offline export"""


class _Version(msgspec.Struct, kw_only=True):
    schema_version: str = msgspec.field(name="schemaVersion", default=SCHEMA_VERSION)


class _File(_Version, kw_only=True):
    exports: dict[str, ExportEntry]


def read_entries(rundir: RunDir) -> dict[str, ExportEntry]:
    """Read `exports.json`, by destination; return nothing if it is missing or cannot be read."""
    try:
        data = read_file(_file(rundir))
        check_version(_file(rundir), msgspec.json.decode(data, type=_Version).schema_version, SCHEMA_VERSION)
        return msgspec.json.decode(data, type=_File).exports
    except (OSError, *UNREADABLE):
        return {}


def export(view: RunView, block: ExportBlock) -> Exported:
    """Export a run, and record the result. Raises UsageError or ExportFailed."""
    rundir, options = view.rundir, _options(block)
    remove_leftovers(rundir.path)
    try:
        exported = _exporter(block)(view)
    except Exception as error:  # libraries of others raise what they like
        message = _without_passwords(str(error).strip())
        _note(rundir, block.to, ExportEntry("failed", _now(), options, _digest(rundir), error=message))
        if isinstance(error, HoldfastError):
            raise
        name = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        raise ExportFailed(f"cannot export to {block.to}: {name}{message}") from error
    places = _relative(rundir, exported.where)
    state: Literal["done", "offline"] = "offline" if exported.offline else "done"
    entry = ExportEntry(
        state, _now(), options, _digest(rundir), places, exported.notes, exported.offline, exported.send
    )
    _note(rundir, block.to, entry)
    return exported


def unfinished_exports(rundir: RunDir) -> list[str]:
    """Return a sentence for each export that failed, or was only written to disk, with the command to type."""
    failed = [
        f"export to {name} failed: {entry.error.partition(chr(10))[0]}. To repeat it: {export_command(rundir, name)}"
        for name, entry in read_entries(rundir).items()
        if entry.state == "failed"
    ]
    return failed + offline_exports(rundir)


def offline_exports(rundir: RunDir) -> list[str]:
    """Return a sentence for each export that was only written to disk, with the command that sends it."""
    return [
        _describe_offline(name, entry.error, entry.send)
        for name, entry in read_entries(rundir).items()
        if entry.state == "offline"
    ]


def _describe_offline(name: str, why: str, command: str) -> str:
    return f"export to {name} is offline, nothing was sent: {why}. To send it: {command}"


def is_done(rundir: RunDir, block: ExportBlock, entries: Mapping[str, ExportEntry]) -> bool:
    """Return True if an export is up to date: with these numbers and options, and still there."""
    entry = entries.get(block.to)
    if entry is None or not rundir.finished:
        return False
    current = ("done", _digest(rundir), _options(block))
    return (entry.state, entry.of, entry.options) == current and _exists(rundir, entry)


def in_folder(block: ExportBlock, folder: Path) -> ExportBlock:
    """Return the block with its folder, if any, as an absolute path; relative paths start at `folder`."""
    if isinstance(block, FileExport) and block.dir is not None:
        return block.model_copy(update={"dir": str((folder / block.dir).resolve())})
    return block


def export_command(rundir: RunDir, name: str) -> str:
    """Return the command that exports a run again."""
    return shlex.join(["holdfast", "export", str(rundir.path), "--to", name])


def describe(name: str, exported: Exported, report: Callable[[str], None]) -> None:
    """Report where a run was exported to."""
    for place in exported.where:
        report(f"wrote {place}" if "://" not in place else f"exported to {name}: {place}")
    for note in exported.notes:
        report(note)
    if exported.offline:
        report(_describe_offline(name, exported.offline, exported.send))


def export_block(view: RunView, name: str, options: Sequence[str] = (), output: Path | None = None) -> ExportBlock:
    """Return a destination with its options: the eval file's, overridden by the last export's, then by `options`.

    A folder is remembered only until the export has worked: without `output` the next one goes to the default folder.
    """
    spec = view.spec
    data: dict[str, Any] = {}
    for block in spec.exports:
        if block.to == name:
            data |= in_folder(block, spec.folder).model_dump(exclude_unset=True)
    writes_files = issubclass(export_schema(name), FileExport)
    entry = read_entries(view.rundir).get(name)
    if entry is not None and (entry.state != "done" or not writes_files):
        data |= entry.options
    for text in options:
        apply_override(data, *parse_override(text))
    if output is not None:
        if not writes_files:
            raise UsageError(f"{name} writes no files: -o is for formats that do")
        data["dir"] = str(output)
    data["to"] = name
    problems: list[Problem] = []
    chosen = read_export(data, (), Document(data), problems)
    if chosen is None:
        raise ConfigError(problems)
    return chosen


def _exporter(block: ExportBlock) -> Callable[[RunView], Exported]:
    try:
        exporter = EXPORTERS.load(block.to)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if hasattr(exporter, "send"):
        service: type[Service] = exporter
        return lambda view: service.send(view, block)
    assert isinstance(block, FileExport)
    options = (block.model_extra or {}) if isinstance(block, PluginExport) else {}

    def write(view: RunView) -> Exported:
        folder = Path(block.dir) if block.dir else view.rundir.path / "export" / block.to
        make_directory(folder)
        remove_leftovers(folder)
        return Exported([str(place) for place in exporter(view, folder, **options)], [])

    return write


def _options(block: ExportBlock) -> dict[str, Any]:
    """Return the options to record, which must be valid in the folder of any later command."""
    return without_secrets(in_folder(block, Path.cwd()).model_dump(exclude={"to"}, exclude_unset=True))


def _without_passwords(text: str) -> str:
    """Remove secrets from a library's message, which may quote an address or a key."""
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"):
        if secret := os.environ.get(name):
            text = text.replace(secret, "(hidden)")
    return re.sub(r"//[^/@\s]+@", "//", text)


def _relative(rundir: RunDir, places: list[str]) -> list[str]:
    """Return places relative to the run directory, so that they stay valid if the run is moved."""
    folder = rundir.path.resolve()
    return [place if "://" in place else os.path.relpath(Path(place).resolve(), folder) for place in places]


def _exists(rundir: RunDir, entry: ExportEntry) -> bool:
    """Return True if the files are still there; addresses are not checked."""
    return all("://" in place or (rundir.path / place).exists() for place in entry.where)


def _note(rundir: RunDir, name: str, entry: ExportEntry) -> None:
    entries = {**read_entries(rundir), name: entry}
    with replacing(_file(rundir)) as file:
        file.write(msgspec.json.format(msgspec.json.encode(_File(exports=entries)), indent=2) + b"\n")


def _file(rundir: RunDir) -> Path:
    return rundir.path / "exports.json"


def _digest(rundir: RunDir) -> str:
    """Return a digest of the report and the gate's outcome, which exports include."""
    try:
        report = read_file(rundir.metrics)
    except FileNotFoundError:
        return ""
    with suppress(FileNotFoundError):
        report += read_file(rundir.gate)
    return digest_bytes(report).removeprefix("sha256:")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
