"""Versions of our files, MAJOR.MINOR: one rule for all that are read.

The same major version is accepted, a newer minor one with a word about it. Another major version, or none that can be
read, is refused with the command to type. What changed in which version: docs/versions.md.
"""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

from holdfast.errors import VersionError

_WRITTEN = re.compile(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})")


class Version(NamedTuple):
    """A version, in the order of versions: 1.9 comes before 1.10."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


def parse_version(written: object) -> Version:
    """A version as it stands in a file; a ValueError says what is wrong with it. YAML reads a bare 1.0 as a number."""
    match = _WRITTEN.fullmatch(str(written)) if isinstance(written, str | float) else None
    if match is None:
        raise ValueError(f'{written!r} is not a version: write MAJOR.MINOR in quotes, for example "1.0"')
    return Version(int(match[1]), int(match[2]))


def check_version(where: object, written: object, ours: str, path: object = None) -> str | None:
    """What to say of a file's version: nothing, or that it is newer than ours. Raises VersionError where it is refused.

    `where` names the version in messages, `path` is what `holdfast migrate` is given.
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
    """What to type."""
    return f"holdfast migrate {'FILE' if path is None else shlex.quote(str(path))}"


def migrate_remedy(path: object) -> str:
    """The same as an error's last line."""
    return f"Update it with: {migrate_command(path)}"
