"""What only running an eval's programs or importing its files can tell: the version of a program, computed imports.

A run asks, and keeps the answer in `$HOLDFAST_HOME/learned`. A plan runs nothing of the eval: it takes the answer that
an earlier run has kept, for exactly this program or file, or notes what stays unknown.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from holdfast.canonical import digest
from holdfast.store.durable import make_directory
from holdfast.store.home import home_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

T = TypeVar("T")

_unknown: Final[ContextVar[list[str] | None]] = ContextVar("_unknown", default=None)
"""notes of what is unknown, while nothing may run; None: all may run"""


@contextmanager
def running_nothing() -> Iterator[None]:
    """Let `learn` run nothing meanwhile."""
    token = _unknown.set([])
    try:
        yield
    finally:
        _unknown.reset(token)


def may_run() -> bool:
    """Return False while nothing of the eval may be started or imported."""
    return _unknown.get() is None


def take_unknown() -> tuple[str, ...]:
    """Return the notes of what has stayed unknown since the last call, because nothing may run."""
    notes = _unknown.get() or []
    taken = tuple(dict.fromkeys(notes))
    notes.clear()
    return taken


def learn(about: Any, kind: type[T], ask: Callable[[], T], unknown: str) -> T | None:
    """Return what `ask` tells by running something; None if nothing may run, and no earlier run has asked.

    `about` identifies what is run, with its content or the look of its file. `unknown` is the note about it.
    """
    path = _place(about)
    notes = _unknown.get()
    if notes is None:
        answer = ask()
        _keep(path, msgspec.json.encode(answer))
        return answer
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        notes.append(unknown)
        return None


def _place(about: Any) -> Path:
    return home_directory() / "learned" / f"{digest(about)[7:39]}.json"


def _keep(path: Path, data: bytes) -> None:
    with suppress(OSError):  # without it, a plan knows less
        if path.exists() and path.read_bytes() == data:
            return
        make_directory(path.parent)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_bytes(data)
        temporary.replace(path)
