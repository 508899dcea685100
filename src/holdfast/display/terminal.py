"""The way to the terminal: everything that commands print goes through here, or through `display.grid`'s console.

Names, messages and answers come from datasets, servers, models and other people's runs. A terminal would obey control
characters in them: clear the screen, set the clipboard, print a line over another. They are spelled out, such as
`\\x1b`, whoever wrote the text; only our own styles reach the terminal as control characters.
"""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UNSAFE: Final = "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
"""control characters, marks that reorder or hide text, and halves of characters"""


def printable(text: str, keep: str = "\n\t") -> str:
    """Spell out characters that a terminal would obey, hide or choke on, such as `\\x1b`, except those in `keep`."""

    def spell(match: re.Match[str]) -> str:
        return match[0] if match[0] in keep else match[0].encode("unicode_escape").decode()

    return text if text.isprintable() else re.sub(UNSAFE, spell, text)


def printable_json(text: str) -> str:
    """Escape these characters in JSON, which changes no value."""
    if text.isprintable():
        return text
    # Line breaks and tabs between tokens are not part of a value, and stay.
    return re.sub(UNSAFE, lambda match: match[0] if match[0] in "\n\r\t" else f"\\u{ord(match[0]):04x}", text)


def echo(message: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a message on standard output, or on standard error."""
    _write(printable(str(message)) + ("\n" if nl else ""), err=err)


def echo_json(text: str | bytes, *, nl: bool = True) -> None:
    """Print JSON on standard output."""
    text = text.decode() if isinstance(text, bytes) else text
    _write(printable_json(text) + ("\n" if nl else ""), err=False)


def _write(text: str, *, err: bool) -> None:
    stream = sys.stderr if err else sys.stdout
    stream.write(text)
    stream.flush()


def _note_on_stderr(message: str) -> None:
    echo(f"note: {message}", err=True)


_note_writer: Final[ContextVar[Callable[[str], None]]] = ContextVar("note_writer", default=_note_on_stderr)


def note(message: str) -> None:
    """Tell the user about slow work before a run: on standard error, unless `notes_to` redirects it."""
    _note_writer.get()(message)


@contextmanager
def notes_to(write: Callable[[str], None]) -> Iterator[None]:
    """Pass notes to a function, for output that programs read."""
    token = _note_writer.set(write)
    try:
        yield
    finally:
        _note_writer.reset(token)


def show_step(text: str) -> None:
    """Show the current step of slow work on a terminal; an empty text clears the line."""
    if sys.stderr.isatty() and _note_writer.get() is _note_on_stderr:
        sys.stderr.write(f"\r\x1b[K{printable(text, '')}")
        sys.stderr.flush()
