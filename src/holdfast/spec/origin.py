"""The origin of a grader or a target: its eval file, and its place there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.errors import ConfigError, Problem

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.spec.document import Location
    from holdfast.spec.load import Eval


class Origin(NamedTuple):
    """An eval, and the location of one of its blocks."""

    spec: Eval
    location: Location

    @property
    def folder(self) -> Path:
        """The folder that relative paths of the eval file start from."""
        return self.spec.folder

    def where(self, *keys: str | int) -> str:
        """Return `file:line: key` of the block, or of a key in the block, for messages."""
        return self.spec.document.where((*self.location, *keys))

    def read(self, name: str) -> bytes:
        """Read a file of the eval's folder; raises ConfigError where that fails."""
        return file_inside(self.folder, name, self.where())

    def read_schema(self, name: str) -> dict[str, Any]:
        """Read a JSON Schema from a file of the eval's folder; raises ConfigError where there is none."""
        try:
            schema = msgspec.json.decode(self.read(name))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self.error(f"{name} is not a JSON Schema: {error}") from error
        if not isinstance(schema, dict):
            raise self.error(f"{name} is not a JSON Schema: it is not an object")
        return schema

    def error(self, message: str, hint: str | None = None) -> ConfigError:
        """Make an error that names the block's place in the eval file."""
        return ConfigError([Problem(self.where(), message)], remedy=hint)


def file_inside(folder: Path, name: str, where: str) -> bytes:
    """Return the content of a file of the eval's folder; `where` is the place in the eval file, for messages."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ConfigError([Problem(where, f"{name} is outside the eval file's folder")])
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            [Problem(where, f"{path} cannot be read: {error.strerror or error}")],
            remedy="Paths are relative to the eval file's folder.",
        ) from error
