"""Notes about work before a run that takes its time: reading names, compiling."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from holdfast.display.terminal import echo, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def _write(message: str) -> None:
    echo(f"note: {message}", err=True)


_writer: Final[ContextVar[Callable[[str], None]]] = ContextVar("writer", default=_write)


def note(message: str) -> None:
    """Tell the user what is being done: on standard error, unless `notes_to` says otherwise."""
    _writer.get()(message)


def show_step(text: str) -> None:
    """Show the current step of the work on a terminal; an empty text clears the line."""
    if sys.stderr.isatty() and _writer.get() is _write:
        sys.stderr.write(f"\r\x1b[K{printable(text, '')}")
        sys.stderr.flush()


@contextmanager
def notes_to(write: Callable[[str], None]) -> Iterator[None]:
    """Pass notes to a function, for output that programs read."""
    token = _writer.set(write)
    try:
        yield
    finally:
        _writer.reset(token)
