"""Versions of Holdfast's files, MAJOR.MINOR: one rule for every file that is read.

A file of the same major version is accepted, with a notice if its minor version is newer. Another major version, or an
invalid one, is refused with what to do. docs/versions.md is the promise to users.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from holdfast.errors import VersionError

_WRITTEN = re.compile(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})")


class Version(NamedTuple):
    """A version; 1.9 sorts before 1.10."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


def parse_version(written: object) -> Version:
    """Parse a version from a file; raise ValueError if it is invalid. YAML reads a bare 1.0 as a number."""
    match = _WRITTEN.fullmatch(str(written)) if isinstance(written, str | float) else None
    if match is None:
        raise ValueError(f'{written!r} is not a version: write MAJOR.MINOR in quotes, for example "1.0"')
    return Version(int(match[1]), int(match[2]))


def check_version(where: object, written: object, ours: str) -> str | None:
    """Check a file's version: return a notice if it is newer than ours, raise VersionError if it is not supported.

    `where` names the version in messages.
    """
    if written is None:
        raise VersionError(
            f"{where}: has no schemaVersion, so Holdfast did not write it",
            remedy="Restore the file, or run its `holdfast eval` command with --fresh.",
        )
    try:
        version = parse_version(written)
    except ValueError as error:
        raise VersionError(f"{where}: {error}", remedy=f'This Holdfast writes schemaVersion: "{ours}".') from error
    mine = parse_version(ours)
    if version.major != mine.major:
        newer = "Upgrade Holdfast: pip install --upgrade holdfast-evals"
        older = "Use the release of Holdfast that the file was written for."
        raise VersionError(
            f"{where}: this Holdfast reads version {ours}, not {version}", remedy=newer if version > mine else older
        )
    if version.minor > mine.minor:
        return (
            f"{where}: version {version} is newer than this Holdfast, which knows {ours}; upgrade Holdfast to be safe"
        )
    return None
