"""What trackers of experiments have in common: flat numbers, flat configuration, settings for the time of a call."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.export.run_reader import RunReader
    from holdfast.store.rundir import Manifest

_LONGEST = 20
"""lists up to this long are taken apart"""

_SETTINGS = ("threshold", "weight")
"""numbers of metrics.json that were not measured"""


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """`score`, `correct/score`, `correct/low`, `usage/input_tokens` …; what is not known is left out."""
    found = {name: metrics[name] for name in ("score", "passed", "coverage", "samples", "total", "outputs", "graded")}
    blocks = {**metrics["metrics"], "overall": metrics["overall"] or {}}
    blocks |= {name: metrics[name] for name in ("usage", "judge_usage", "timing")}
    for block, values in blocks.items():
        found |= {f"{block}/{name}": value for name, value in values.items() if name not in _SETTINGS}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """A configuration as names with dots and texts; long lists stay whole."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and 0 < len(value) <= _LONGEST and any(isinstance(inner, dict) for inner in value):
        for number, inner in enumerate(value):
            yield from flat(inner, f"{name}.{number}")
    elif name:
        yield name, value if isinstance(value, str) else msgspec.json.encode(value).decode()


def shown_name(manifest: Manifest) -> str:
    """How a run is called where people read it."""
    return f"{manifest.name} · {manifest.target}"


def stable_id(manifest: Manifest) -> str:
    """The same for every export of a run, and for no other run's."""
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', manifest.name).strip('-')[:40] or 'eval'}-{manifest.id}"


def about(reader: RunReader) -> dict[str, Any]:
    """What a run says of itself beside its eval."""
    manifest = reader.manifest
    return {
        "run": manifest.id,
        "path": str(reader.rundir.path.resolve()),
        "target": manifest.target,
        "version": manifest.holdfast,
        "created": manifest.created,
        "finished": reader.rundir.finished,
        "dataset": manifest.dataset,
    }


@contextmanager
def environment(**defaults: str) -> Iterator[None]:
    """Settings that a library reads from the environment, for the time of a call; what the user has set stays."""
    ours = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
