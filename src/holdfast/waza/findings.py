"""What is found on the way through waza's files: what is wrong, and what is passed over. Nothing goes by in silence."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from holdfast.spec.document import Document, Location

NOTHING: Mapping[str, str] = {}

_TRAPS: Final = {"follow_ups": "follow_up_prompts"}
"""keys as waza's results have them, not its files"""

_ALIKE: Final = 0.8
"""so near a known key is a slip; files in the wild have keys of their own"""


class Findings:
    """Problems and notices, each with its place."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        """nothing outside of this folder is read"""
        self.problems: list[Problem] = []
        self._noticed: dict[tuple[str, str], list[str]] = {}

    def wrong(self, document: Document, location: Location, message: str) -> None:
        """The eval cannot run like this."""
        self.problems.append(Problem(document.where(location), message))

    def notice(self, document: Document, location: Location, message: str) -> None:
        """It runs, but not everything it says has a meaning here."""
        name = str(location[-1]) if location else ""
        places = self._noticed.setdefault((name, message), [])
        if (place := document.where(location)) not in places:
            places.append(place)

    @property
    def notices(self) -> tuple[str, ...]:
        """What was noticed; what is alike in many task files is said once."""
        said = []
        for (_, message), places in self._noticed.items():
            more = f" (and in {len(places) - 1} more places)" if len(places) > 1 else ""
            said.append(f"{places[0]}: {message}{more}")
        return tuple(said)

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
        refused: Mapping[str, str] = NOTHING,
        ignored: Mapping[str, str] = NOTHING,
    ) -> None:
        """Go through the keys of a block: what is not supported is refused, what waza ignores is named.

        A key that nobody knows is passed over, as waza does, unless it looks like a misspelt one.
        """
        for key, value in at(document, location).items():
            place = (*location, key)
            if key in refused:
                self.wrong(document, place, f"not supported: {refused[key]}")
            elif key in ignored:
                if value not in (None, False, [], {}):
                    self.notice(document, place, ignored[key])
            elif key not in known:
                self.unknown(document, place, key, known)

    def unknown(self, document: Document, location: Location, key: str, known: Collection[str]) -> bool:
        """Say of a key that nobody knows it; False when it is taken for a misspelt one, which is a problem."""
        if meant := _TRAPS.get(key) or next(iter(difflib.get_close_matches(key, known, 1, _ALIKE)), None):
            self.wrong(document, location, f"unknown key (did you mean {meant!r}?)")
            return False
        self.notice(document, location, "waza has no such key; it is ignored")
        return True

    def inside(self, document: Document, location: Location, folder: Path, name: str) -> Path | None:
        """A path that the files name, if it stays where it may be read."""
        path = folder / name
        if not path.resolve().is_relative_to(self.root):
            self.wrong(document, location, f"{name!r} leads out of {self.root}")
            return None
        return path


def at(document: Document, location: Location) -> dict[str, Any]:
    """The mapping at a place; an empty one where there is none."""
    found: Any = document.data
    for part in location:
        if isinstance(part, int):
            found = found[part] if isinstance(found, list) else None
        else:
            found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}
