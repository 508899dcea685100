"""Holdfast evaluates language models and agents, and never loses ground.

The public names, imported on first use so that `holdfast --version` stays fast:

`evaluate`       run an eval from Python and get its `Run`
`Run`            the finished run: its numbers, results and outputs
`Reply`          what a Python target may return instead of plain text
`Verdict`        what a Python grader may return instead of a bool or a number
`Display`        the base of a progress display of your own
`HoldfastError`  the base of all errors
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.api import evaluate as evaluate
    from holdfast.display.types import Display as Display
    from holdfast.errors import HoldfastError as HoldfastError
    from holdfast.export.result import Run as Run
    from holdfast.graders.types import Verdict as Verdict
    from holdfast.targets.types import Reply as Reply

__version__ = "0.1.0"

_HOMES = {
    "Display": "holdfast.display.types",
    "HoldfastError": "holdfast.errors",
    "Reply": "holdfast.targets.types",
    "Run": "holdfast.export.result",
    "Verdict": "holdfast.graders.types",
    "evaluate": "holdfast.api",
}

__all__ = ["Display", "HoldfastError", "Reply", "Run", "Verdict", "__version__", "evaluate"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
