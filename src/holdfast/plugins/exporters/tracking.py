"""Helpers of the experiment trackers: flat numbers, flat configuration, temporary settings."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.spec.eval_schema import ExportBlock
from holdfast.store.metrics import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast import Metrics, RunView
    from holdfast.store.rundir import Manifest


class TrackerExport(ExportBlock):
    """A destination that is a service."""

    description: str | None = None
    """Description of the run."""
    extra_metadata: dict[str, Any] = {}
    """Further values to record with the configuration."""


_LONGEST = 20
"""lists up to this long are taken apart"""


def numbers(metrics: Metrics) -> dict[str, float]:
    """Flatten to `score`, `correct/score`, `usage/input_tokens`, `by/subject/algebra/correct` …

    Unknown numbers are left out.
    """
    data = metrics.to_dict()
    flat = {name: data[name] for name in ("score", "passed", "coverage", "samples", "total", "outputs", "graded")}
    blocks = {**data["metrics"], "overall": data["overall"] or {}}
    blocks |= {name: data[name] for name in ("answers", "usage", "judge_usage", "timing")}
    for block, values in blocks.items():
        flat |= {f"{block}/{name}": value for name, value in values.items() if name not in Rule._fields}
    for field, value, grader, group in metrics.value_scores():
        flat[f"by/{field}/{value}/{grader}"] = group.score
    for task, results in {} if metrics.benchmark is None else metrics.benchmark.results.items():
        flat |= {f"benchmark/{task}/{name}": value for name, value in results.items()}
    return {name: value for name, value in flat.items() if isinstance(value, int | float)}


def flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield a configuration as dotted names with texts; long lists stay whole."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and 0 < len(value) <= _LONGEST and any(isinstance(inner, dict) for inner in value):
        for number, inner in enumerate(value):
            yield from flat(inner, f"{name}.{number}")
    elif name:
        yield name, value if isinstance(value, str) else msgspec.json.encode(value).decode()


def shown_name(manifest: Manifest) -> str:
    """Return the name of a run for people."""
    return f"{manifest.name} · {manifest.target}"


def stable_id(manifest: Manifest) -> str:
    """Return an id that all exports of a run share, and no other run has."""
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', manifest.name).strip('-')[:40] or 'eval'}-{manifest.id}"


def about(view: RunView) -> dict[str, Any]:
    """Describe a run, apart from its eval."""
    manifest = view.manifest
    return {
        "run": manifest.id,
        "path": str(view.rundir.path.resolve()),
        "target": manifest.target,
        "version": manifest.holdfast,
        "created": manifest.created,
        "finished": view.rundir.finished,
        "dataset": msgspec.to_builtins(manifest.dataset),
    }


@contextmanager
def environment(**defaults: str) -> Iterator[None]:
    """Set environment variables for a library during a call; variables that are already set stay."""
    ours = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
