"""Bring run directories of earlier versions up to date, under their lease.

Every version so far reads the lines of the journals as they are: only the version in the `.json` files is rewritten,
the rest of their bytes stays.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.errors import ManifestError, UsageError
from holdfast.store.durable import overwrite
from holdfast.store.lease import RunLease
from holdfast.store.manifest import decode_manifest
from holdfast.store.records import SCHEMA_VERSION
from holdfast.store.run_files import LONGEST_LINE, UNREADABLE, read_file
from holdfast.versions import check_version, parse_version

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.store.rundir import RunDir

_VERSION = re.compile(rb'("schemaVersion"\s*:\s*)"[^"]*"')
_OPENING = re.compile(rb"\s*\{(\s*)")


def is_run(path: Path) -> bool:
    """True if a directory is, or was, a run."""
    return (path / "manifest.json").exists() or (path / "outputs.jsonl").exists()


def find_outdated(rundir: RunDir) -> dict[Path, str | None]:
    """Return the files of an earlier version, each with its version; raise if the run must not be changed."""
    if not rundir.manifest.exists():
        raise UsageError(
            f"{rundir.path} has no manifest.json", remedy="The `holdfast eval` command that began the run writes it."
        )
    versions: dict[Path, str | None] = {}
    for path in (rundir.results, rundir.metrics, rundir.manifest):
        if not path.exists():
            continue
        try:
            if path == rundir.manifest:
                decode_manifest(read_file(path, LONGEST_LINE))
            written = msgspec.json.decode(read_file(path, LONGEST_LINE), type=dict[str, Any]).get("schemaVersion")
            version = parse_version("0.0" if written is None else written)
        except (*UNREADABLE, ValueError) as error:
            remedy = (
                f"Set it aside with: holdfast repair {rundir.path}"
                if path == rundir.manifest
                else "Delete it and run its `holdfast eval` command, which writes it again."
            )
            raise ManifestError(f"{path}: damaged ({error})", remedy=remedy) from error
        if version < parse_version(SCHEMA_VERSION):
            versions[path] = written
        else:
            check_version(path, written, SCHEMA_VERSION, rundir.path)
    return versions


def upgrade(rundir: RunDir) -> dict[Path, str | None]:
    """Write the current version into files with an earlier version or none, and return them. Raises RunHeld."""
    if not find_outdated(rundir):
        return {}
    lease = RunLease(rundir.lease, lost=lambda: None)
    lease.acquire(0)
    try:
        versions = find_outdated(rundir)
        for path in versions:
            overwrite(path, _with_version(read_file(path, LONGEST_LINE)), like=path)
        return versions
    finally:
        lease.release()


def _with_version(data: bytes) -> bytes:
    before = msgspec.json.decode(data)
    entry = b'"schemaVersion": "%b"' % SCHEMA_VERSION.encode()
    if "schemaVersion" in before:
        after = _VERSION.sub(rb'\g<1>"%b"' % SCHEMA_VERSION.encode(), data, count=1)
    else:
        after = _OPENING.sub(lambda match: b"{%b%b,%b" % (match[1], entry, match[1] or b" "), data, count=1)
    expected = {**before, "schemaVersion": SCHEMA_VERSION}
    try:
        if msgspec.json.decode(after) == expected:
            return after
    except msgspec.DecodeError:
        pass  # the file was edited, and its keys are in another order
    return msgspec.json.format(msgspec.json.encode(expected), indent=2)
