"""Holdfast's own directory of this user."""

from __future__ import annotations

import os
from pathlib import Path


def home_directory() -> Path:
    """Return `$HOLDFAST_HOME`, by default `~/.holdfast`."""
    return Path(os.environ.get("HOLDFAST_HOME") or Path.home() / ".holdfast")
