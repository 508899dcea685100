"""Choose the display of a run: by name, or one that suits the terminal, notebook or log."""

from __future__ import annotations

import sys
from typing import Final

from holdfast.display.types import Display
from holdfast.errors import UsageError

KINDS: Final = ("rich", "plain", "json", "none")


def make_display(name: str | None) -> Display:
    """Make the display of a command: by default a live one on a terminal, lines elsewhere."""
    from holdfast.display.text import Events, Plain, Quiet

    kind = name or ("rich" if sys.stderr.isatty() else "plain")
    if kind not in KINDS:
        raise UsageError(f"unknown display {kind!r}", remedy=f"Choose one of {', '.join(KINDS)}.")
    if kind == "rich":
        from holdfast.display.live import LiveDisplay

        return LiveDisplay()
    return Events() if kind == "json" else Plain() if kind == "plain" else Quiet()


def display_for_python(display: str | Display | None) -> Display:
    """Make the display of a call from Python: by default live on a terminal, lines in a notebook, else only notices."""
    if display is None:
        display = "rich" if _on_terminal() else "plain" if _in_notebook() else "none"
    if isinstance(display, str):
        return make_display(display)
    if not isinstance(display, Display):
        raise UsageError(
            f"invalid display {display!r}",
            remedy=f"Choose one of {', '.join(KINDS)}, or pass a holdfast.Display of your own.",
        )
    return display


def _on_terminal() -> bool:
    return bool(getattr(sys.stderr, "isatty", bool)())


def _in_notebook() -> bool:
    """True if this process is a notebook kernel, which shows standard error below the cell."""
    return "ipykernel" in sys.modules or "google.colab" in sys.modules
