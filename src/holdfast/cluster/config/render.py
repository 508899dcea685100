"""Render the compiled configuration as YAML, with the place of every value. It can be run again as it is."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from holdfast.cluster.config.interpolate import escape
from holdfast.cluster.config.provenance import Tree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.cluster.config.launch import Launch
    from holdfast.spec.document import Location

TITLE = "Compiled Configuration"
ORDER = ("run", "execution", "deployment", "auxiliary_deployments", "target", "env_vars", "evaluation", "export")
_PLAIN = re.compile(r"[A-Za-z/_][\w/.+@%-]*(?: [\w/.+@%-]+)*|host:\w+|runtime:\w+")
_WORDS = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")


def compiled_yaml(launch: Launch, *, places: bool = True) -> str:
    """Return the whole configuration, with the origin of each value as a comment."""
    return "\n".join(text for _, text in compiled_sections(launch, places=places)) + "\n"


def compiled_sections(launch: Launch, *, places: bool = True) -> list[tuple[str, str]]:
    """Return the configuration by section. It contains no secrets: variables appear by their names."""
    tree = Tree(_without_unset(launch.tree.data), launch.tree.origins)
    sections: list[tuple[str, str]] = []
    for name in sorted(tree.data, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
        lines = list(_lines(tree, {name: tree.data[name]}, (), 0, places=places))
        width = min(max((len(text) for text, place in lines if place), default=0), 60)
        shown = [f"{text:<{width}}  # {place}" if place else text for text, place in lines]
        sections.append((name, "\n".join(shown)))
    return sections


def _without_unset(data: dict[str, Any]) -> dict[str, Any]:
    """Leave out the keys of `run` that are not set."""
    run = {}
    for key, block in data.get("run", {}).items():
        kept = {name: value for name, value in block.items() if value is not None} if isinstance(block, dict) else block
        if kept not in ({}, None):
            run[key] = kept
    if isinstance(run.get("env"), dict) and "container_image" in run["env"]:
        run["env"].pop("container", None)
    rest = {key: value for key, value in data.items() if key != "run"}
    return {"run": run, **rest} if run else rest


def _lines(tree: Tree, node: Any, location: Location, depth: int, *, places: bool) -> Iterator[tuple[str, str]]:
    """Yield lines of YAML, each with the place of its value."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in pairs:
        place = (*location, key)
        lead = "  " * depth + (f"{_scalar(key)}:" if isinstance(key, str) else "-")
        if isinstance(value, dict | list) and value:
            if isinstance(key, int) and isinstance(value, dict):
                inner = list(_lines(tree, value, place, depth + 1, places=places))
                first, origin = inner[0]
                yield "  " * depth + "- " + first.lstrip(), origin
                yield from inner[1:]
            else:
                yield lead, ""
                yield from _lines(tree, value, place, depth + 1, places=places)
        else:
            yield f"{lead} {_scalar(value)}", tree.origin(place) if places else ""


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    text = escape(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return json.dumps(text, ensure_ascii=False)
