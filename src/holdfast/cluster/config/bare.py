"""An eval file by itself is a configuration too: of one task, with nothing served and the profile's defaults."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.errors import ConfigError
from holdfast.formats import is_eval
from holdfast.spec.document import read_document

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from holdfast.cluster.config.provenance import Tree
    from holdfast.spec.document import Document

OUTER = ("run", "execution", "deployment", "evaluation", "export", "env_vars")
"""where an override of a lone eval file changes the configuration around it, and not the eval"""


def read_lone(path: Path) -> Document | None:
    """An eval file that stands for a configuration; None where it is one, or cannot be read, which is said later."""
    with suppress(ConfigError):
        document = read_document(path)
        return document if is_eval(document) else None
    return None


def around(document: Document, path: Path, cwd: Path) -> Tree:
    """The configuration that stands around a lone eval file."""
    from holdfast.cluster.config.profiles import (
        shown,  # not needed to tell one from the other, which every command does
    )
    from holdfast.cluster.config.provenance import Tree, walk

    name = document.data.get("name")
    task = {"name": name if isinstance(name, str) and name.strip() else path.stem, "eval": str(path.resolve())}
    data = {"execution": {}, "deployment": {"type": "none"}, "evaluation": {"tasks": [task]}}
    file = shown(path, cwd)
    return Tree(data, {location: file for location, _ in walk(data, ()) if location})


def divide(overrides: Iterable[str]) -> tuple[list[str], list[str]]:
    """`a.b=c` for the configuration around a lone eval file, and for the eval file."""
    outer: list[str] = []
    inner: list[str] = []
    for text in overrides:
        path = text.lstrip("+~").partition("=")[0].split(".")
        ours = path[0] in OUTER or path[:2] == ["target", "api_endpoint"]
        (outer if ours else inner).append(text)
    return outer, inner
