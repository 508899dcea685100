"""The state of what is handed over from Python: as it is given it belongs to the key, what a run changes does not.

An agent that opens a client, counts its calls or fills a cache is the same agent in the next run. What is changed
between two runs is noticed.
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
    """what its key is made of"""
    left: dict[str, object] | None = None
    """marks of the values as the last run left them; None: it is in use"""


_known: dict[int, tuple[Callable[[], Any], _State]] = {}
"""by the object's `id`: objects need not be hashable"""


def recall(owner: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that identify an object, from those that it has now."""
    state = _find(owner)
    if state is None:
        return dict(values)
    own = dict(state.values)
    if state.left is None:
        return own
    marks = _marks(values)
    for name in {*state.left, *marks}:
        if state.left.get(name) != marks.get(name):
            own.pop(name, None)
            if name in values:
                own[name] = values[name]
    return own


def keep(owner: Any, values: Mapping[str, Any]) -> None:
    """Keep the values that identify an object while a run uses it."""
    number = id(owner)
    alive: Callable[[], Any]
    try:
        alive = weakref.ref(owner, lambda _: _known.pop(number, None))
    except TypeError:  # it has nothing but slots: kept alive, since another object could get its id
        alive = lambda: owner  # noqa: E731
    _known[number] = alive, _State(deepcopy(dict(values)))


def release(owner: Any, values: Mapping[str, Any]) -> None:
    """Note the values with which a run leaves an object."""
    if (state := _find(owner)) is not None:
        state.left = _marks(values)


def _find(owner: Any) -> _State | None:
    alive, state = _known.get(id(owner), (lambda: None, None))
    return state if alive() is owner else None


def _marks(values: Mapping[str, Any]) -> dict[str, object]:
    return {name: _mark(value) for name, value in values.items()}


def _mark(value: Any) -> object:
    """Tell a value from others: by its content, else by which object it is."""
    try:
        return msgspec.json.encode(value, order="deterministic")
    except (TypeError, ValueError, RecursionError):
        return type(value), id(value)
