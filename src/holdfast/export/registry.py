"""One way to every destination, which notes in the run's `exports.json` how each export went.

So those that failed can be done again by name, and those that are up to date are not done twice.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from holdfast.errors import ExportFailed, HoldfastError
from holdfast.spec.redact import without_secrets
from holdfast.spec.schema import FileExport
from holdfast.store.durable import make_directory, replacing
from holdfast.store.records import SCHEMA_VERSION
from holdfast.versions import check_version

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from holdfast.report.run_view import RunView
    from holdfast.spec.load import Eval
    from holdfast.spec.schema import ExportBlock
    from holdfast.store.rundir import RunDir

_EXPORTERS: Final = {
    "csv": "tables:write_csv",
    "parquet": "tables:write_parquet",
    "samples": "samples:write_transcripts",
    "junit": "junit:write_junit",
    "html": "html:write_html",
    "nat": "nat:write_nat",
    "flexeval": "flexeval:write_flexeval",
    "waza": "waza:write_waza",
    "wandb": "wandb:export_wandb",
    "mlflow": "mlflow:export_mlflow",
}
"""Imported when used: W&B and MLflow are heavy."""


class Exported(NamedTuple):
    """What came of an export."""

    where: list[str]
    """files, folders or addresses"""
    notes: list[str]
    """what people should know, a command to type among it"""


class Entry(msgspec.Struct, omit_defaults=True, frozen=True):
    """How the last export to a destination went."""

    state: Literal["done", "failed"]
    time: str
    options: dict[str, Any]
    of: str = ""
    """digest of the `metrics.json` that was exported; empty for a run that was not finished"""
    where: list[str] = []
    """addresses, and paths seen from the run directory"""
    notes: list[str] = []
    error: str = ""


class _Version(msgspec.Struct, kw_only=True):
    schema_version: str = msgspec.field(name="schemaVersion", default=SCHEMA_VERSION)


class _File(_Version, kw_only=True):
    exports: dict[str, Entry]


def read_entries(rundir: RunDir) -> dict[str, Entry]:
    """What `exports.json` says, by destination; nothing where there is none or it cannot be read."""
    try:
        data = _file(rundir).read_bytes()
        check_version(_file(rundir), msgspec.json.decode(data, type=_Version).schema_version, SCHEMA_VERSION)
        return msgspec.json.decode(data, type=_File).exports
    except (OSError, msgspec.DecodeError):
        return {}


def export(view: RunView, block: ExportBlock) -> Exported:
    """Export a run, and note how it went. Raises UsageError or ExportFailed."""
    rundir, options = view.rundir, _options(block)
    try:
        done = _exporter(block)(view)
    except Exception as error:  # libraries of others raise what they like
        message = _without_passwords(str(error).strip())
        _note(rundir, block.to, Entry("failed", _now(), options, _digest(rundir), error=message))
        if isinstance(error, HoldfastError):
            raise
        name = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        raise ExportFailed(f"cannot export to {block.to}: {name}{message}") from error
    _note(rundir, block.to, Entry("done", _now(), options, _digest(rundir), _seen(rundir, done.where), done.notes))
    return done


def export_finished(
    rundir: RunDir, spec: Eval, done: Callable[[str, Exported], None], failed: Callable[[str], None]
) -> None:
    """What the eval file asks for after a run. A failure is told and noted, and never more than that."""
    from holdfast.report.run_view import RunView

    try:
        entries = read_entries(rundir)
    except HoldfastError as error:
        failed(str(error))
        return
    for block in (in_folder(block, spec.folder) for block in spec.exports):
        if is_done(rundir, block, entries):
            continue
        try:
            done(block.to, export(RunView(rundir), block))
        except (HoldfastError, OSError) as error:
            failed(f"{error}\n  The run itself is complete. Repeat the export with: {again(rundir, block.to)}")


def is_done(rundir: RunDir, block: ExportBlock, entries: Mapping[str, Entry]) -> bool:
    """Whether that export of a finished run was done, of these numbers and with these options, and is still there."""
    known = entries.get(block.to)
    if known is None or not rundir.finished:
        return False
    wanted = ("done", _digest(rundir), _options(block))
    return (known.state, known.of, known.options) == wanted and _there(rundir, known)


def in_folder(block: ExportBlock, folder: Path) -> ExportBlock:
    """With its own folder, where it names one, seen from another."""
    if isinstance(block, FileExport) and block.dir is not None:
        return block.model_copy(update={"dir": str((folder / block.dir).resolve())})
    return block


def again(rundir: RunDir, name: str) -> str:
    """The command that does an export again."""
    return shlex.join(["holdfast", "export", str(rundir.path), "--to", name])


def _exporter(block: ExportBlock) -> Callable[[RunView], Exported]:
    module, _, name = _EXPORTERS[block.to].partition(":")
    function = getattr(import_module(f"holdfast.export.{module}"), name)
    if not isinstance(block, FileExport):
        return lambda view: function(view, block)

    def write(view: RunView) -> Exported:
        folder = Path(block.dir) if block.dir else view.rundir.path / "export" / block.to
        make_directory(folder)
        return Exported([str(path) for path in function(view, folder)], [])

    return write


def _options(block: ExportBlock) -> dict[str, Any]:
    """As they are noted: found again from wherever the next command is given."""
    return without_secrets(in_folder(block, Path.cwd()).model_dump(exclude={"to"}, exclude_unset=True))


def _without_passwords(text: str) -> str:
    """A library's message may hold the address it was given, or the key."""
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"):
        if secret := os.environ.get(name):
            text = text.replace(secret, "(hidden)")
    return re.sub(r"//[^/@\s]+@", "//", text)


def _seen(rundir: RunDir, places: list[str]) -> list[str]:
    """Places as they can be found again when the run has been moved."""
    own = rundir.path.resolve()
    return [place if "://" in place else os.path.relpath(Path(place).resolve(), own) for place in places]


def _there(rundir: RunDir, entry: Entry) -> bool:
    """Whether what was written is still there; an address is taken to be."""
    return all("://" in place or (rundir.path / place).exists() for place in entry.where)


def _note(rundir: RunDir, name: str, entry: Entry) -> None:
    entries = {**read_entries(rundir), name: entry}
    with replacing(_file(rundir)) as file:
        file.write(msgspec.json.format(msgspec.json.encode(_File(exports=entries)), indent=2) + b"\n")


def _file(rundir: RunDir) -> Path:
    return rundir.path / "exports.json"


def _digest(rundir: RunDir) -> str:
    try:
        return hashlib.sha256(rundir.metrics.read_bytes()).hexdigest()[:32]
    except FileNotFoundError:
        return ""


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
