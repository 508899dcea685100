"""Blocks of an eval file that are passed from Python and contain functions.

A function is replaced by a reference, as an eval file has it, and what it carries along becomes the block's version.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast.canonical import digest
from holdfast.errors import UsageError
from holdfast.spec.grader_schema import TAKEN_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.functions.callables import Callables


def capture_grader(grader: Mapping[str, Any] | Callable[..., Any], captured: Callables) -> Any:
    """Return a grader's block. A function by itself is a Python grader with the function's name."""
    named = {"type": "python", "name": _grader_name(grader)} if callable(grader) else {}
    return {**named, **capture_block(grader, "function", captured)}


def capture_block(value: Any, key: str, captured: Callables, *, allow_class: bool = False) -> Any:
    """Return a block with references in place of its functions, which are added to `captured`.

    A function by itself stands for the block that has the function under `key`. With `allow_class`, a class may be
    there too.
    """
    if callable(value):
        value = {key: value}
    if not isinstance(value, Mapping):
        return value  # validating the eval reports what is wrong with it
    block: dict[str, Any] = {}
    versions: list[str] = []

    def capture(inner: Any, *, class_allowed: bool = False) -> Any:
        if inspect.isclass(inner) and not class_allowed:
            raise UsageError(
                f"{inner.__qualname__} is a class; only targets may be classes", remedy="Pass an object of that class."
            )
        if callable(inner):
            inner, version = captured.add(inner)
            versions.extend([] if version is None else [version])
        return inner

    for name, inner in value.items():
        if name == "tools" and isinstance(inner, list | tuple):
            block[name] = [capture_block(tool, "python", captured) for tool in inner]
        elif name == "state" and isinstance(inner, Mapping):
            block[name] = {hook: capture(function) for hook, function in inner.items()}
        else:
            block[name] = capture(inner, class_allowed=allow_class and name == key)
    if versions:
        version = block.get("version")
        block["version"] = versions[0] if len(versions) == 1 and version is None else digest([version, *versions])
    return block


def _grader_name(function: Callable[..., Any]) -> str:
    """Return a function's name, or that of a callable object's class, unless the name has a meaning in reports."""
    name = str(getattr(function, "__name__", type(function).__name__))
    return f"{name}_function" if name in TAKEN_NAMES else name
