"""Collect what is wrong, and what a user should know, while files are read.

Everything is reported at once, each with its place, rather than only the first mistake.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.spec.document import Location
    from holdfast.spec.validation import Placed


class Findings:
    """Problems, which are errors, and notices, which are not."""

    def __init__(self, notices: Iterable[str] = ()) -> None:
        """Begin with notices that are complete sentences."""
        self.problems: list[Problem] = []
        self._complete = list(notices)
        self._noticed: dict[tuple[str, str], list[str]] = {}
        """places by key and message"""

    def wrong(self, document: Placed, location: Location, message: str) -> None:
        """Add a problem at a place."""
        self.problems.append(Problem(document.where(location), message))

    def notice(self, document: Placed, location: Location, message: str) -> None:
        """Add a notice at a place."""
        name = str(location[-1]) if location else ""
        places = self._noticed.setdefault((name, message), [])
        if (place := document.where(location)) not in places:
            places.append(place)

    def add_notices(self, notices: Iterable[str]) -> None:
        """Add notices that are complete sentences."""
        self._complete.extend(notices)

    @property
    def notices(self) -> tuple[str, ...]:
        """Return all notices; equal ones from many places once."""
        lines = list(self._complete)
        for (_, message), places in self._noticed.items():
            more = f" (and in {len(places) - 1} more places)" if len(places) > 1 else ""
            lines.append(f"{places[0]}: {message}{more}")
        return tuple(dict.fromkeys(lines))

    def raise_problems(self) -> None:
        """Raise ConfigError if there are problems."""
        if self.problems:
            raise ConfigError(list(dict.fromkeys(self.problems)))
