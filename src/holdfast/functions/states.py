"""The state of objects that are passed from Python: their values are part of the key, changes by a run are not.

An agent that opens a client, counts its calls or fills a cache is the same agent in the next run. Changes between two
runs are noticed.
"""

from __future__ import annotations

import weakref
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass
class _State:
    values: dict[str, Any]
    """the values that identify the object"""
    marks_after_run: dict[str, object] | None = None
    """marks of the values at the end of the last run; None while a run uses the object"""


_states: dict[int, tuple[Callable[[], Any], _State]] = {}
"""by the object's `id`: objects need not be hashable"""


def recall(owner: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that identify an object: those of its first use, and those changed between runs."""
    state = _find(owner)
    if state is None:
        return dict(values)
    identity = dict(state.values)
    if state.marks_after_run is None:
        return identity
    marks = _marks(values)
    for name in {*state.marks_after_run, *marks}:
        if state.marks_after_run.get(name) != marks.get(name):
            identity.pop(name, None)
            if name in values:
                identity[name] = values[name]
    return identity


def keep(owner: Any, values: Mapping[str, Any]) -> None:
    """Keep the values that identify an object while a run uses it."""
    number = id(owner)
    alive: Callable[[], Any]
    try:
        alive = weakref.ref(owner, lambda _: _states.pop(number, None))
    except TypeError:  # it has only slots: kept alive, since another object could get its id
        alive = lambda: owner  # noqa: E731
    _states[number] = alive, _State(deepcopy(dict(values)))


def release(owner: Any, values: Mapping[str, Any]) -> None:
    """Note the values of an object at the end of a run."""
    if (state := _find(owner)) is not None:
        state.marks_after_run = _marks(values)


def _find(owner: Any) -> _State | None:
    alive, state = _states.get(id(owner), (lambda: None, None))
    return state if alive() is owner else None


def _marks(values: Mapping[str, Any]) -> dict[str, object]:
    return {name: _mark(value) for name, value in values.items()}


def _mark(value: Any) -> object:
    """Return a mark that tells a value from others: its content, or its identity."""
    try:
        return msgspec.json.encode(value, order="deterministic")
    except (TypeError, ValueError, RecursionError):
        return type(value), id(value)
