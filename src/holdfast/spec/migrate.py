"""Brings an eval file up to date: in place, atomically, with a backup, and without other changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError, Problem, UsageError
from holdfast.spec.document import parse_document, read_text
from holdfast.spec.legacy import earlier_spellings, is_before_versions
from holdfast.spec.rewrite import Add, Assign, Rename, rewrite
from holdfast.spec.schema import SCHEMA_VERSION
from holdfast.store.durable import keep_backup, overwrite
from holdfast.versions import check_version, parse_version

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.spec.document import Document
    from holdfast.spec.rewrite import Change


@dataclass(frozen=True)
class Rewritten:
    """A file before and after its migration."""

    path: Path
    version: str | None
    """that it had"""
    before: str
    after: str
    changes: tuple[str, ...]
    """for the user, each with its place"""

    def save(self) -> Path:
        """Write it; returns where the file as it was is kept."""
        place = self.path.resolve() if self.path.is_symlink() else self.path  # a link stays one
        backup = keep_backup(place)
        if read_text(place) != self.before:
            raise UsageError(f"{self.path} was modified by another process", remedy="Run the same command again.")
        overwrite(place, self.after.encode(), like=place)
        return backup


def migrate(path: Path) -> Rewritten:
    """Return the migration of an eval file, and write nothing; raise ConfigError where it cannot be migrated safely."""
    text = read_text(path)
    document = parse_document(text, path)
    version = document.data.get("schemaVersion")
    if not is_eval(document.data):
        message = "not an eval file: it has no `prompt` with a `dataset` or `samples`"
        raise ConfigError(
            [Problem(str(path), message)], remedy="`holdfast migrate` takes eval files and run directories."
        )
    changes = list(_changes(document, version))
    after = rewrite(text, document, changes) if changes else text
    words = tuple(
        f"{path if isinstance(change, Add) else document.where(change.location)}: {change.message}"
        for change in changes
        if change.message
    )
    return Rewritten(path, None if version is None else str(version), text, after, words)


def is_eval(data: dict[str, Any]) -> bool:
    """Return True for a mapping that is an eval, whatever else is wrong with it."""
    return not {"prompt", "messages"}.isdisjoint(data) and not {"dataset", "samples"}.isdisjoint(data)


def _renamed(data: dict[str, Any]) -> list[Change]:
    """Return the changes for keys that version 1.2 renamed."""
    limits = data.get("limits")
    if not isinstance(limits, dict) or "max_tokens" not in limits:
        return []
    return [Rename(("limits", "max_tokens"), "is now token_budget, the tokens of the whole run", "token_budget")]


def _changes(document: Document, version: object) -> list[Change]:
    where = document.where(("schemaVersion",))
    try:
        before = is_before_versions(version)
    except ValueError as error:
        remedy = f'Write the version it was made for, or today\'s: schemaVersion: "{SCHEMA_VERSION}".'
        raise ConfigError([Problem(where, str(error))], remedy=remedy) from error
    if not before:
        check_version(where, version, SCHEMA_VERSION, document.path)
        if parse_version(version) >= parse_version(SCHEMA_VERSION):
            return []
    changes = [*(earlier_spellings(document.data) if before else ()), *_renamed(document.data)]
    if "schemaVersion" in document.data:
        return [Assign(("schemaVersion",), f"{version} is now {SCHEMA_VERSION}", SCHEMA_VERSION), *changes]
    first = next(iter(document.data))
    return [
        Add((first,), f"schemaVersion {SCHEMA_VERSION} is added", "schemaVersion", SCHEMA_VERSION),
        *changes,
    ]
