"""Versions of Holdfast's files, MAJOR.MINOR: one rule for all files that are read.

A file of the same major version is accepted, with a notice if its minor version is newer. Another major version, or an
invalid one, is refused, and the error names the command to run. docs/versions.md lists the changes of each version.
"""

from __future__ import annotations

import re
import shlex
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


def check_version(where: object, written: object, ours: str, path: object = None) -> str | None:
    """Check a file's version: return a notice if it is newer than ours, raise VersionError if it is not supported.

    `where` names the version in messages; `path` is the argument of `holdfast migrate` in hints.
    """
    if written is None:
        raise VersionError(
            f"{where}: has no schemaVersion: it was written before files had versions", remedy=migrate_remedy(path)
        )
    try:
        version = parse_version(written)
    except ValueError as error:
        raise VersionError(f"{where}: {error}", remedy=f'This Holdfast writes schemaVersion: "{ours}".') from error
    mine = parse_version(ours)
    if version.major != mine.major:
        remedy = migrate_remedy(path)
        if version > mine:
            remedy = f"Upgrade Holdfast: the file is newer. ({migrate_command(path)} updates older files only.)"
        raise VersionError(f"{where}: this Holdfast reads version {ours}, not {version}", remedy=remedy)
    if version.minor > mine.minor:
        return (
            f"{where}: version {version} is newer than this Holdfast, which knows {ours}; upgrade Holdfast to be safe"
        )
    return None


def migrate_command(path: object) -> str:
    """Return the command that brings a file up to date."""
    return f"holdfast migrate {'FILE' if path is None else shlex.quote(str(path))}"


def migrate_remedy(path: object) -> str:
    """Return a hint with the command that brings a file up to date."""
    return f"Update it with: {migrate_command(path)}"
