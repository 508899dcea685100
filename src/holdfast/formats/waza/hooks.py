"""Hooks, with working directories relative to the eval's folder."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.formats.waza.findings import WazaFindings
    from holdfast.spec.document import Document, Location


def translate_hooks(findings: WazaFindings, document: Document, folder: Path) -> dict[str, Any]:
    """Return the hooks of an eval.

    A hook runs in its working directory. Without one it runs where its program is found, if that is named by a path,
    else in the eval's folder.
    """
    hooks: dict[str, Any] = copy.deepcopy(findings.block(document, (), "hooks"))
    for when, listed in hooks.items():
        for number, hook in enumerate(listed if isinstance(listed, list) else []):
            place = _place(findings, document, ("hooks", when, number), hook) if isinstance(hook, dict) else None
            if place is not None:
                hook["working_directory"] = os.path.relpath(place.resolve(), folder)
    return hooks


def _place(findings: WazaFindings, document: Document, location: Location, hook: dict[str, Any]) -> Path | None:
    name = hook.get("working_directory")
    if isinstance(name, str) and name:
        place = findings.find(name)
        if place is None:
            findings.notice(document, (*location, "working_directory"), findings.nowhere(name))
        return place
    command = hook.get("command")
    words = command.split() if isinstance(command, str) else command
    program = str(words[0]) if isinstance(words, list) and words else ""
    if "/" not in program or program.startswith("/"):
        return None
    return next((place for place in findings.places if (place / program).is_file()), None)
