"""What is found on the way through waza's files: what is wrong, and what is passed over. Nothing goes by in silence."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.spec import findings

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from holdfast.spec.document import Document, Location

NOTHING: Mapping[str, str] = {}

_TRAPS: Final = {"follow_ups": "follow_up_prompts"}
"""keys as waza's results have them, not its files"""

_ALIKE: Final = 0.8
"""so near a known key is a slip; files in the wild have keys of their own"""


class Findings(findings.Findings):
    """Problems and notices, each with its place, and the files that an eval names."""

    def __init__(self, root: Path, folder: Path) -> None:
        super().__init__()
        self.root = root.resolve()
        """the project; files outside of it are read only where they are named from the working directory"""
        self._places: dict[Path, str] = {folder.resolve(): "the eval's folder"}
        self._places.setdefault(self.root, "the project")
        self._places.setdefault(Path.cwd(), "the working directory")
        self.strict: Path | None = None
        """a file in which an unknown key is a problem: a scenario eval"""

    @property
    def places(self) -> tuple[Path, ...]:
        """Where relative names are looked up: the eval's folder, the project and the working directory."""
        return tuple(self._places)

    def block(self, document: Document, location: Location, key: str) -> dict[str, Any]:
        """A mapping inside a mapping; an empty one where there is none."""
        found = at(document, location).get(key)
        if found is not None and not isinstance(found, dict):
            self.wrong(document, (*location, key), "is a mapping of keys to values")
        return found if isinstance(found, dict) else {}

    def texts(self, document: Document, location: Location) -> list[str]:
        """A list of texts; one text counts as a list of one."""
        found = at(document, location[:-1]).get(str(location[-1]))
        found = [found] if isinstance(found, str) else found
        if found is None:
            return []
        if isinstance(found, list) and all(isinstance(text, str | int | float) for text in found):
            return [str(text) for text in found]
        self.wrong(document, location, "is a list of texts")
        return []

    def keys(
        self,
        document: Document,
        location: Location,
        known: Collection[str],
        *,
        ignored: Mapping[str, str] = NOTHING,
    ) -> None:
        """Check the keys of a block, and name those that have no effect.

        An unknown key is ignored with a notice, as in waza, unless it looks misspelt or the file is strict.
        """
        for key, value in at(document, location).items():
            place = (*location, key)
            if key in ignored:
                if value not in (None, False, [], {}):
                    self.notice(document, place, ignored[key])
            elif key not in known and self.unknown(document, place, key, known) and document.path == self.strict:
                self.wrong(document, place, "unknown key; in a scenario eval that is an error")

    def unknown(self, document: Document, location: Location, key: str, known: Collection[str]) -> bool:
        """Report an unknown key; return False where it looks misspelt, which is a problem."""
        if meant := _TRAPS.get(key) or next(iter(difflib.get_close_matches(key, known, 1, _ALIKE)), None):
            self.wrong(document, location, f"unknown key (did you mean {meant!r}?)")
            return False
        self.notice(document, location, "waza has no such key; it is ignored")
        return True

    def inside(self, document: Document, location: Location, folder: Path, name: str) -> Path | None:
        """Return a path below one folder; report a problem where it leads out of the project."""
        path = folder / name
        if not path.resolve().is_relative_to(self.root):
            self.wrong(document, location, f"{name!r} leads out of {self.root}")
            return None
        return path

    def find(self, name: str) -> Path | None:
        """Return the file or folder of a name, from the first place that has it.

        The places are the eval's folder, the project's root and the working directory. Only a name that is looked up
        in the working directory may lead to a file outside of the project, and not out of that directory.
        """
        for place in self.places:
            path = place / name
            try:
                there, target = path.exists(), path.resolve()
            except (OSError, ValueError):
                continue
            if there and (target.is_relative_to(self.root) or (place == Path.cwd() and target.is_relative_to(place))):
                return path
        return None

    def read(self, document: Document, location: Location, name: str, inside: str = "") -> bytes | None:
        """Return what is in a file, looked up as `find` does; `inside` is its name where `name` is a folder."""
        path = self.find(name)
        if path is not None and inside and path.is_dir():
            path = path / inside
        if path is None or not path.is_file():
            self.wrong(document, location, self.nowhere(f"{name}/{inside}" if path is not None else name))
            return None
        try:
            return path.read_bytes()
        except OSError as error:
            self.wrong(document, location, f"{path} cannot be read: {error.strerror or error}")
            return None

    def nowhere(self, name: str) -> str:
        """Say why `find` did not find a file, and where it was looked for."""
        if any((place / name).exists() for place in self._places):
            return f"{name!r} leads out of the project, {self.root}, and of the working directory"
        places = ", ".join(f"{place} ({label})" for place, label in self._places.items())
        return f"no such file: {name!r}; looked in {places}"


def at(document: Document, location: Location) -> dict[str, Any]:
    """The mapping at a place; an empty one where there is none."""
    found: Any = document.data
    for part in location:
        if isinstance(part, int):
            found = found[part] if isinstance(found, list) else None
        else:
            found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}
