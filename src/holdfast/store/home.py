"""This user's own directory of Holdfast, and the mode of files that Holdfast writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from holdfast.errors import UsageError

_REMEDY: Final = "077 lets only you read what is written, 027 also your group."


def home_directory() -> Path:
    """Return `$HOLDFAST_HOME`, by default `~/.holdfast`."""
    return Path(os.environ.get("HOLDFAST_HOME") or Path.home() / ".holdfast")


def apply_umask() -> None:
    """Set the umask of this process, and of all that it starts, to `$HOLDFAST_UMASK`, such as 077."""
    text = os.environ.get("HOLDFAST_UMASK") or ""
    if not text:
        return
    if len(text) > 4 or not set(text) <= set("01234567"):
        raise UsageError(
            f"HOLDFAST_UMASK is {text!r}; expected an octal number",
            remedy=_REMEDY,
        )
    umask = int(text, 8)
    if umask & 0o700:
        raise UsageError(
            f"HOLDFAST_UMASK is {text!r}: you could not read or write your own runs",
            remedy=_REMEDY,
        )
    os.umask(umask)
