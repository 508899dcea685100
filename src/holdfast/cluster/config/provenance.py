"""Nested values that remember where each of them was written.

A configuration has layers: defaults, files, a profile, the command line. Merging keeps the place of the winning layer
for every key, so that messages and the compiled configuration can name it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.spec.document import Document, Location, format_location

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMAND_LINE = "command line"
DEFAULT = "default ("
"""how the places of values from built-in groups begin"""


@dataclass
class Tree:
    """Values, and for each key, item and leaf its origin: `file:line`, `command line`, `default (…)`."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[Location, str] = field(default_factory=dict)

    def get(self, *location: str | int) -> Any:
        """Return the value at a location, or None."""
        node: Any = self.data
        for part in location:
            if isinstance(node, dict):
                node = node.get(part)
            elif isinstance(node, list) and isinstance(part, int) and part < len(node):
                node = node[part]
            else:
                return None
        return node

    def origin(self, location: Location) -> str:
        """Return where a value was written; if that is unknown, where something around it was."""
        while location and location not in self.origins:
            location = location[:-1]
        return self.origins.get(location, "")

    def where(self, location: Location) -> str:
        """Return `file:line: key`, with which messages begin."""
        place, name = self.origin(location), format_location(location)
        return f"{place}: {name}" if place and name else place or name

    def put(self, location: Location, value: Any, origin: str) -> None:
        """Set a value with one origin. Missing mappings are created; a name in a list becomes a mapping."""
        node: Any = self.data
        for depth, part in enumerate(location[:-1]):
            if isinstance(node, dict) and not isinstance(node.get(str(part)), dict | list):
                self._forget(location[: depth + 1])
                node[str(part)] = {}
                self.origins[location[: depth + 1]] = origin
            elif isinstance(node, list) and isinstance(part, int) and not isinstance(node[part], dict | list):
                self.origins[(*location[: depth + 1], "name")] = self.origin(location[: depth + 1])
                node[part] = {"name": node[part]}
            node = node[part]
        self._forget(location)
        node[location[-1]] = copy.deepcopy(value)
        for inner, _ in walk(value, location):
            self.origins[inner] = origin

    def remove(self, location: Location) -> None:
        """Remove a value."""
        node = self.get(*location[:-1])
        del node[location[-1]]
        self._forget(location)

    def over(self, base: Tree) -> Tree:
        """Merge this over `base`: mappings are merged, everything else is replaced. Neither tree changes."""
        merged = Tree(
            copy.deepcopy(base.data), {**base.origins, **({(): self.origins[()]} if () in self.origins else {})}
        )
        _merge(merged, self, ())
        return merged

    def at(self, package: tuple[str, ...]) -> Tree:
        """Return the tree under a key, as the file of a group is under the group's name."""
        data: dict[str, Any] = copy.deepcopy(self.data)
        for part in reversed(package):
            data = {part: data}
        return Tree(data, {(*package, *location): origin for location, origin in self.origins.items()})

    def below(self, location: Location) -> Tree:
        """Return the subtree at a location."""
        inner = self.get(*location)
        depth = len(location)
        origins = {place[depth:]: origin for place, origin in self.origins.items() if place[:depth] == location}
        return Tree(copy.deepcopy(inner) if isinstance(inner, dict) else {}, origins)

    def _forget(self, location: Location) -> None:
        for place in [place for place in self.origins if place[: len(location)] == location]:
            del self.origins[place]


def tree_of(document: Document, name: str, *, lines: bool = True) -> Tree:
    """Return the values of a file with their lines, or with the name of the file alone."""
    numbers = document.lines if lines and document.lines else {}
    origins: dict[Location, str] = {}
    for location, _ in walk(document.data, ()):
        if not location:
            continue
        nearest = location
        while nearest and not numbers.get(nearest):
            nearest = nearest[:-1]
        origins[location] = f"{name}:{numbers[nearest]}" if nearest else name
    return Tree(copy.deepcopy(document.data), origins)


def walk(value: Any, location: Location) -> Iterator[tuple[Location, Any]]:
    """Yield every value with its location, containers before their contents."""
    yield location, value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield from walk(below, (*location, key))


def leaves(value: Any, location: Location = ()) -> Iterator[tuple[Location, Any]]:
    """Yield the values that contain no others."""
    return ((place, inner) for place, inner in walk(value, location) if not isinstance(inner, dict | list) or not inner)


def _merge(merged: Tree, top: Tree, location: Location) -> None:
    for key, value in top.get(*location).items():
        place = (*location, key)
        if isinstance(value, dict) and isinstance(merged.get(*place), dict):
            _merge(merged, top, place)
            continue
        merged.put(place, value, top.origin(place))
        for inner, _ in walk(value, place):
            merged.origins[inner] = top.origin(inner)
