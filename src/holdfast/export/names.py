"""Names of graders as files and fields of other tools: never two alike, and never one that the tool uses itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def unique_names(names: Iterable[str], form: Callable[[str], str] = str, taken: Iterable[str] = ()) -> dict[str, str]:
    """Map names to their forms; one that is taken gets a number: `workflow-2`.

    A name that has its form already keeps it before others come to have the same. Case alone tells no two apart, as on
    macOS's file systems.
    """
    names = list(names)
    used = {name.casefold() for name in taken}
    chosen: dict[str, str] = {}
    for name in sorted(names, key=lambda name: form(name) != name):
        candidate, number = form(name), 1
        while candidate.casefold() in used:
            number += 1
            candidate = f"{form(name)}-{number}"
        used.add(candidate.casefold())
        chosen[name] = candidate
    return {name: chosen[name] for name in names}
