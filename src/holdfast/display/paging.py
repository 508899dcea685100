"""Long output on a terminal: through the user's pager if it does not fit the screen."""

from __future__ import annotations

import sys
from itertools import chain
from typing import TYPE_CHECKING

import click

from holdfast.display.grid import make_console

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console, RenderableType


def print_paged(pieces: Iterable[RenderableType]) -> None:
    """Print pieces as they come; on a terminal, start `$PAGER` once there is more than a screen of them."""
    console = make_console()
    if not sys.stdout.isatty():
        for piece in pieces:
            console.print(piece)
        return
    texts = _draw(console, pieces)
    screen: list[str] = []
    room = console.height - 1
    for text in texts:
        screen.append(text)
        room -= text.count("\n")
        if room < 0:
            click.echo_via_pager(chain(screen, texts))
            return
    sys.stdout.write("".join(screen))


def _draw(console: Console, pieces: Iterable[RenderableType]) -> Iterator[str]:
    for piece in pieces:
        with console.capture() as capture:
            console.print(piece)
        yield capture.get()
