"""Where the container of a server sees its files."""

from __future__ import annotations

from typing import Final

CHECKPOINT: Final = "/checkpoint"
"""the weights of `checkpoint_path`, read-only"""
CACHE: Final = "/cache"
"""the folder of `cache_path`, for downloads"""
