"""Modules imported at first use: every test process collects all tests, and few of them need the slow ones."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class LazyModule:
    """Stands for a module, and imports it when one of its names is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):  # pytest looks for its marks in everything that a test module has
            raise AttributeError(name)
        return getattr(import_module(self._name), name)
