"""The choice of a display: by name, or by the environment of the process."""

from __future__ import annotations

import sys
from typing import Final

from holdfast.display.types import Display
from holdfast.errors import UsageError

KINDS: Final = ("rich", "plain", "json", "none")


def make_display(name: str | None) -> Display:
    """The display of a command: by default a live one on a terminal, lines elsewhere."""
    from holdfast.display.text import Events, Plain, Quiet

    kind = name or ("rich" if sys.stderr.isatty() else "plain")
    if kind not in KINDS:
        raise UsageError(f"there is no display {kind!r}", remedy=f"Choose one of {', '.join(KINDS)}.")
    if kind == "rich":
        from holdfast.display.live import LiveDisplay

        return LiveDisplay()
    return Events() if kind == "json" else Plain() if kind == "plain" else Quiet()


def display_for_python(display: str | Display | None) -> Display:
    """The display of a call from Python: by default live on a terminal, lines in a notebook, else only notices."""
    if display is None:
        display = "rich" if _on_terminal() else "plain" if _in_notebook() else "none"
    if isinstance(display, str):
        return make_display(display)
    if not isinstance(display, Display):
        raise UsageError(
            f"display is {display!r}",
            remedy=f"Choose one of {', '.join(KINDS)}, or pass a holdfast.Display of your own.",
        )
    return display


def _on_terminal() -> bool:
    return bool(getattr(sys.stderr, "isatty", bool)())


def _in_notebook() -> bool:
    """Tell whether this process is a notebook kernel, which shows standard error below a cell."""
    return "ipykernel" in sys.modules or "google.colab" in sys.modules
