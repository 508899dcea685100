"""NAT configurations, and the parts of them that a workflow or an evaluator uses.

Only these parts are loaded: a model that only evaluators name is not part of the workflow, so changing the judge reruns
no trial. Secrets, addresses and retries are loaded, but no key depends on them.

NAT finds components through entry points. A package that `pip install -e` installed from a folder may change between
two runs, so it is fingerprinted like other local code. Other installed packages are not. Modules are read, never
imported.
"""

from __future__ import annotations

import copy
import os
import re
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

from holdfast import ConfigError, Problem
from holdfast.canonical import digest_bytes
from holdfast.spec.document import parse_document, read_text
from holdfast.spec.fingerprint import local_module, scan
from holdfast.spec.template import texts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from holdfast import Document
    from holdfast.spec.document import Location

_GROUPS: Final = ("nat.components", "nat.plugins", "nat.evaluators", "nat.authentication_providers")
COMPONENTS: Final = (
    *("functions", "function_groups", "middleware", "llms", "embedders", "memory", "object_stores"),
    *("retrievers", "ttc_strategies", "authentication"),
)
"""sections that hold components by name"""
SECTIONS: Final = frozenset(
    {
        *COMPONENTS,
        *("general", "workflow", "eval", "base"),
        *("optimizer", "finetuning", "trainers", "trainer_adapters", "trajectory_builders"),
    }
)
"""every section of a configuration"""

_FILE: Final = "file://"
_VARIABLE: Final = re.compile(r"\$\{(\w+)")
_SECRET: Final = re.compile(r"(^|_)(api_?key|access_key|secret|secret_key|password|token)$", re.IGNORECASE)
_SECRET_VARIABLE: Final = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")
_PLACES: Final = frozenset({"base_url", "azure_endpoint", "endpoint"})
_PATIENCE: Final = frozenset(
    {
        *("max_retries", "num_retries", "do_auto_retry", "retry_on_status_codes", "retry_on_errors"),
        *("request_timeout", "timeout"),
    }
)


def read_config(path: Path, override: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read a configuration, with the file it extends and the texts it takes from files, and lay values over it.

    Environment variables stay as they are written.
    """
    if not path.is_file():
        raise ConfigError([Problem(str(path), "no such file")], remedy="Paths are relative to the eval file.")
    data = _read_with_base(path, ())
    overlay(data, override or {})
    return data


def overlay(data: dict[str, Any], override: Mapping[str, Any]) -> None:
    """Lay values over a configuration, each at its dotted path."""
    for path, value in override.items():
        *parents, last = path.split(".")
        node = data
        for part in parents:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        node[last] = copy.deepcopy(value)


def workflow_part(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part that the workflow may use: all components but those that only evaluators name."""
    part = {name: data[name] for name in (*COMPONENTS, "workflow") if data.get(name)}
    evaluators = (data.get("eval") or {}).get("evaluators") or {}
    judges = _find_reachable(evaluators, part)
    rest = [data.get("workflow"), *(block for key, block in _components(part) if key not in judges)]
    unused = judges - _find_reachable(rest, part)
    return _without(part, unused)


def evaluator_part(data: Mapping[str, Any], evaluator: Mapping[str, Any]) -> dict[str, Any]:
    """Return the components that an evaluator names, and those that they name in turn."""
    part = {name: data[name] for name in COMPONENTS if data.get(name)}
    return _without(part, {key for key, _ in _components(part)} - _find_reachable(evaluator, part))


def identity_of(part: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return everything in a part that can change a result: values, environment variables, and the components' code."""
    config = {name: _without_unkeyed(value) for name, value in part.items()}
    names = sorted({name for text in texts(config) for name in _VARIABLE.findall(text)})
    shown = [name for name in names if not _SECRET_VARIABLE.search(name.upper())]
    environment = {name: digest_bytes(os.environ.get(name, "").encode()) for name in shown}
    source = _component_sources(_types(config), folder)
    return {"config": config, "source": source, **({"environment": environment} if environment else {})}


def without_secrets(value: Any) -> Any:
    """Return a value with its secrets redacted."""
    if isinstance(value, list):
        return [without_secrets(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {
        key: "***" if inner and _SECRET.search(str(key)) else without_secrets(inner) for key, inner in value.items()
    }


def _read_with_base(path: Path, within: tuple[Path, ...]) -> dict[str, Any]:
    shape = "a NAT configuration is a mapping of sections such as workflow and llms"
    document = parse_document(read_text(path), path, shape)
    data: dict[str, Any] = _fill_in_files(document.data, document, ())
    base = data.pop("base", None)
    if base is None:
        return data
    place = document.where(("base",))
    below = path.parent / str(base)
    if not below.is_file():
        raise ConfigError([Problem(place, f"{below}: no such file")])
    if below.resolve() in (*within, path.resolve()):
        raise ConfigError([Problem(place, "the configuration extends itself")])
    return _merge(_read_with_base(below, (*within, path.resolve())), data)


def _fill_in_files(value: Any, document: Document, location: Location) -> Any:
    """Replace texts that name a file as `file://…` by the content of the file."""
    if isinstance(value, dict):
        return {key: _fill_in_files(inner, document, (*location, key)) for key, inner in value.items()}
    if not (isinstance(value, str) and value.startswith(_FILE)):
        return value
    assert document.path is not None
    path = document.path.parent / value.removeprefix(_FILE)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(document.where(location), f"{path} cannot be read: {error}")]) from error


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _components(part: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield the components of a part, each with its section and name."""
    for section in COMPONENTS:
        blocks = part.get(section)
        if isinstance(blocks, dict):
            yield from (((section, name), block) for name, block in blocks.items())


def _find_reachable(start: Any, part: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Return the components that a value names, directly or through other components."""
    blocks = dict(_components(part))
    reached: set[tuple[str, str]] = set()
    waiting = [start]
    while waiting:
        mentioned = set(texts(waiting.pop()))
        for key in blocks.keys() - reached:
            # A function of a group is named with its group in front: `group__function`, formerly `group.function`.
            if key[1] in mentioned or any(re.match(rf"{re.escape(key[1])}(__|\.)", text) for text in mentioned):
                reached.add(key)
                waiting.append(blocks[key])
    return reached


def _without(part: Mapping[str, Any], unused: set[tuple[str, str]]) -> dict[str, Any]:
    remaining: dict[str, Any] = {}
    for section, blocks in part.items():
        if section in COMPONENTS and isinstance(blocks, dict):
            blocks = {name: block for name, block in blocks.items() if (section, name) not in unused}
        if blocks:
            remaining[section] = blocks
    return remaining


def _without_unkeyed(value: Any) -> Any:
    """Remove the values that are in no key: secrets, addresses, retries and time-outs."""
    if isinstance(value, list):
        return [_without_unkeyed(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    is_model = "_type" in value and ("model_name" in value or "model" in value or "azure_deployment" in value)
    left_out = _PATIENCE | _PLACES if is_model else _PATIENCE
    return {
        key: _without_unkeyed(inner)
        for key, inner in value.items()
        if key not in left_out and _SECRET.search(str(key)) is None
    }


def _types(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for inner in value:
            yield from _types(inner)
    elif isinstance(value, dict):
        if isinstance(value.get("_type"), str):
            yield value["_type"]
        for inner in value.values():
            yield from _types(inner)


def _component_sources(types: Iterable[str], folder: Path) -> dict[str, str]:
    """Return digests of the local modules that register components of these types, and of their imports."""
    names = {kind.rpartition("/")[2] for kind in types}  # `package/name` names a component exactly
    installed = entry_points()
    modules = sorted({point.module for group in _GROUPS for point in installed.select(group=group)})
    digests: dict[str, str] = {}
    for module in modules:
        if module.partition(".")[0] == "nat" or (entry := local_module(module)) is None:
            continue
        read = scan(entry, folder)
        if not any(_registers(path, names) for path in read.files):
            continue
        for name, digest in read.digests.items():
            digests[f"{module.replace('.', '/')}.py" if name == entry.name else name] = digest
    return dict(sorted(digests.items()))


def _registers(path: Path, names: Iterable[str]) -> bool:
    """Return True if a file has one of the names as a literal, like the class of a component's configuration."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return any(f"{quote}{name}{quote}" in text for name in names for quote in "\"'")
