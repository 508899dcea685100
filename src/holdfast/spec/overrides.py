"""Overrides of the eval file from the command line: `a.b=value`."""

from __future__ import annotations

from typing import Any

from holdfast.errors import UsageError
from holdfast.spec.document import read_value
from holdfast.spec.schema import as_dataset
from holdfast.spec.validation import suggest

Override = tuple[tuple[str, ...], Any]
"""a path of keys, and its value"""


def parse_override(text: str) -> Override:
    """Parse `limits.retries=2` into a path and a value; the value is read as YAML."""
    path, equals, value = text.partition("=")
    if not equals or not path or not all(path.split(".")):
        raise UsageError(
            f"{text!r} is not an override",
            remedy="Write overrides as key=value, for example limits.concurrency=8 or dataset.limit=100.",
        )
    from ruamel.yaml.error import YAMLError

    keys = tuple(path.split("."))
    if keys == ("gate", "baseline"):
        return keys, value or None  # an id: YAML would read 12345678 and 5e031122 as numbers
    if value.lstrip().startswith("{{"):
        return keys, value  # a template: YAML would read it as nested mappings
    try:
        parsed = read_value(value) if value else None
    except (YAMLError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{text!r}: the value is not valid YAML", remedy="Quote the value, as in 'key=\"a, b\"'."
        ) from error
    if isinstance(parsed, dict) and not value.lstrip().startswith("{"):
        return keys, value  # `Answer in the form: N` is a text; mappings are written with braces here
    return keys, parsed


def apply_override(data: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set a value in place, creating mappings on the way. A list is indexed by number, graders also by name."""
    if path[0] == "dataset" and len(path) > 1:
        data["dataset"] = as_dataset(data.get("dataset"))
    node: Any = data
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(node, list):
            position = _position(node, part, path[: depth + 1])
            if last:
                node[position] = value
            else:
                node = node[position]
        elif isinstance(node, dict):
            if last:
                config = node.get("config")
                if isinstance(config, dict) and part in config:
                    config[part] = value  # parameters of a grader that are written here would hide the override
                else:
                    node[part] = value
            elif not isinstance(node.get(part), dict | list):
                node[part] = {}
                node = node[part]
            else:
                node = node[part]


def _position(node: list[Any], part: str, path: tuple[str, ...]) -> int:
    if part.isdigit() and int(part) < len(node):
        return int(part)
    for position, inner in enumerate(node):
        if isinstance(inner, dict) and part in (inner.get("name"), inner.get("type")):
            return position
    names = [str(inner.get("name") or inner.get("type")) for inner in node if isinstance(inner, dict)]
    listed = f"there are {', '.join(names)}" if names and len(names) == len(node) else f"the list has {len(node)}"
    raise UsageError(f"{'.'.join(path)}: there is no such entry{suggest(part, names)}; {listed}")
