"""Run directories of earlier versions, brought up to date under their lease.

The lines of the journals are read as they are by every version so far: only the version that the `.json` files say
is written anew, the rest of their bytes stays.
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
from holdfast.versions import check_version, parse_version

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.store.rundir import RunDir

_VERSION = re.compile(rb'("schemaVersion"\s*:\s*)"[^"]*"')
_OPENING = re.compile(rb"\s*\{(\s*)")


def is_run(path: Path) -> bool:
    """Tell whether a directory is, or was, a run."""
    return (path / "manifest.json").exists() or (path / "outputs.jsonl").exists()


def outdated(rundir: RunDir) -> dict[Path, str | None]:
    """Return the files of an earlier version, with their version; refuse a run that must not be changed."""
    if not rundir.manifest.exists():
        raise UsageError(
            f"{rundir.path} has no manifest.json", remedy="The `holdfast eval` command that began the run writes it."
        )
    files: dict[Path, str | None] = {}
    for path in (rundir.results, rundir.metrics, rundir.manifest):
        if not path.exists():
            continue
        try:
            if path == rundir.manifest:
                decode_manifest(path.read_bytes())
            written = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]).get("schemaVersion")
            version = parse_version("0.0" if written is None else written)
        except (msgspec.DecodeError, ValueError) as error:
            remedy = (
                f"Set it aside with: holdfast repair {rundir.path}"
                if path == rundir.manifest
                else "Delete it and run its `holdfast eval` command, which writes it again."
            )
            raise ManifestError(f"{path}: damaged ({error})", remedy=remedy) from error
        if version < parse_version(SCHEMA_VERSION):
            files[path] = written
        else:
            check_version(path, written, SCHEMA_VERSION, rundir.path)
    return files


def upgrade(rundir: RunDir) -> dict[Path, str | None]:
    """Write the present version into files of an earlier one, and return these files. Raises RunHeld."""
    if not outdated(rundir):
        return {}
    lease = RunLease(rundir.lease, lost=lambda: None)
    lease.acquire(0)
    try:
        files = outdated(rundir)
        for path in files:
            overwrite(path, _with_version(path.read_bytes()), like=path)
        return files
    finally:
        lease.release()


def _with_version(data: bytes) -> bytes:
    before = msgspec.json.decode(data)
    field = b'"schemaVersion": "%b"' % SCHEMA_VERSION.encode()
    if "schemaVersion" in before:
        after = _VERSION.sub(rb'\g<1>"%b"' % SCHEMA_VERSION.encode(), data, count=1)
    else:
        after = _OPENING.sub(lambda match: b"{%b%b,%b" % (match[1], field, match[1] or b" "), data, count=1)
    expected = {**before, "schemaVersion": SCHEMA_VERSION}
    try:
        if msgspec.json.decode(after) == expected:
            return after
    except msgspec.DecodeError:
        pass  # a file that somebody has written anew, in another order
    return msgspec.json.format(msgspec.json.encode(expected), indent=2)
