"""Problems and notices about waza's files. Nothing is ignored silently."""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from holdfast.spec.schema import Findings

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from holdfast import Document
    from holdfast.spec.document import Location

NOTHING: Mapping[str, str] = {}

_TRAPS: Final = {"follow_ups": "follow_up_prompts"}
"""keys of waza's results that its eval files do not have"""

_ALIKE: Final = 0.8
"""similarity from which an unknown key counts as a typing error; other unknown keys are common"""


class WazaFindings(Findings):
    """Problems and notices, each with its place, and the files that an eval names."""

    def __init__(self, root: Path, folder: Path) -> None:
        super().__init__()
        self.root = root.resolve()
        """the project; a file outside it is read only if it is named from the working directory"""
        self._places: dict[Path, str] = {folder.resolve(): "the eval's folder"}
        self._places.setdefault(self.root, "the project")
        self._places.setdefault(Path.cwd(), "the working directory")
        self.strict: Path | None = None
        """a file in which an unknown key is a problem: a scenario eval"""

    @property
    def places(self) -> tuple[Path, ...]:
        """Folders in which relative names are looked up: the eval's folder, the project and the working directory."""
        return tuple(self._places)

    def block(self, document: Document, location: Location, key: str) -> dict[str, Any]:
        """Return a mapping inside a mapping; an empty one if there is none."""
        value = at(document, location).get(key)
        if value is not None and not isinstance(value, dict):
            self.wrong(document, (*location, key), "must be a mapping of keys to values")
        return value if isinstance(value, dict) else {}

    def blocks(
        self, document: Document, location: Location, form: str = "mappings"
    ) -> Iterator[tuple[Location, dict[str, Any]]]:
        """Yield the mappings of a list, each with its location; an entry that is no mapping is an empty one.

        `form` describes the entries, for messages.
        """
        listed = at(document, location[:-1]).get(str(location[-1])) or []
        if not isinstance(listed, list):
            self.wrong(document, location, f"must be a list of {form}")
            return
        for number in range(len(listed)):
            yield (*location, number), at(document, (*location, number))

    def is_number(
        self, value: Any, document: Document, location: Location, least: int, most: float = math.inf
    ) -> TypeGuard[int]:
        """Return True for a whole number in a range; report anything else."""
        if type(value) is int and least <= value <= most:
            return True
        limits = f"from {least}" if most == math.inf else f"from {least} to {most}"
        self.wrong(document, location, f"must be a number {limits}, not {value!r}")
        return False

    def texts(self, document: Document, location: Location) -> list[str]:
        """Return a list of texts; a single text counts as a list of one."""
        value = at(document, location[:-1]).get(str(location[-1]))
        value = [value] if isinstance(value, str) else value
        if value is None:
            return []
        if isinstance(value, list) and all(isinstance(text, str | int | float) for text in value):
            return [str(text) for text in value]
        self.wrong(document, location, "must be a list of texts")
        return []

    def keys(
        self,
        document: Document,
        location: Location,
        allowed: Collection[str],
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
            elif key not in allowed and self.unknown(document, place, key, allowed) and document.path == self.strict:
                self.wrong(document, place, "unknown key; in a scenario eval that is an error")

    def unknown(self, document: Document, location: Location, key: str, allowed: Collection[str]) -> bool:
        """Report an unknown key; return False if it looks misspelt, which is a problem."""
        if suggestion := _TRAPS.get(key) or next(iter(difflib.get_close_matches(key, allowed, 1, _ALIKE)), None):
            self.wrong(document, location, f"unknown key (did you mean {suggestion!r}?)")
            return False
        self.notice(document, location, "waza has no such key; it is ignored")
        return True

    def inside(self, document: Document, location: Location, folder: Path, name: str) -> Path | None:
        """Return a path below a folder; report a problem if it is outside the project."""
        path = folder / name
        if not path.resolve().is_relative_to(self.root):
            self.wrong(document, location, f"{name!r} is outside {self.root}")
            return None
        return path

    def find(self, name: str) -> Path | None:
        """Return the file or folder of a name, from the first place that has it.

        The places are the eval's folder, the project's root and the working directory. Only a name that is looked up
        in the working directory may be outside the project, and then only inside that directory.
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
        """Read the file that `find` finds; if `name` is a folder, the file `inside` it."""
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
        """Explain why `find` did not find a file, and list the places."""
        if any((place / name).exists() for place in self._places):
            return f"{name!r} is outside the project, {self.root}, and the working directory"
        places = ", ".join(f"{place} ({label})" for place, label in self._places.items())
        return f"no such file: {name!r}; looked in {places}"


def at(document: Document, location: Location) -> dict[str, Any]:
    """Return the mapping at a location; an empty one if there is none."""
    value: Any = document.data
    for part in location:
        if isinstance(part, int):
            value = value[part] if isinstance(value, list) else None
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}
