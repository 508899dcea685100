"""Formats of eval files beside our own, which are read as they are, and files that runs are exported to.

`benchmark` benchmarks by name
`waza`      waza's eval and task files, and its results.json
`nat`       configurations of NeMo Agent Toolkit, its workflows and evaluators, and its output files
`flexeval`  flexeval's outputs.jsonl and metrics.json
`lm_eval`   results and samples of lm-eval
`providers` tasks by name, from installed packages
`suite`     the runs of a suite: its evals, of any format, with its targets

An installed package adds a format of eval files with an entry point of the group `holdfast.formats` that names a
subclass of `Format`. Such packages are imported only for files that are neither ours nor of a built-in format.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import UsageError
from holdfast.spec.load import apply_overrides
from holdfast.spec.plugins import Registry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.spec.document import Document
    from holdfast.spec.eval import Eval
    from holdfast.spec.overrides import Override

FORMATS: Final = Registry(
    "holdfast.formats",
    "format",
    {
        "benchmark": "holdfast.formats.benchmark:BenchmarkFile",
        "waza": "holdfast.formats.waza.format:Waza",
        "nat": "holdfast.formats.nat.format:Nat",
    },
)
"""Eval files of other tools."""

_CONFIGURATION: Final = ("defaults", "execution", "deployment", "evaluation", "services", "benchmarks")
"""keys that only configurations for clusters have"""
_OURS: Final = ("dataset", "samples", "prompt", "messages")
"""keys that eval files of other formats never have"""
_EVAL: Final = (*_OURS, "graders", "responder", "checkpoints")
"""keys that only eval files have"""


class Format:
    """Eval files of another tool."""

    def recognizes(self, data: Mapping[str, Any]) -> bool:
        """Tell whether the content of a file is of this format. It has no data or prompt of ours."""
        raise NotImplementedError

    def translate(self, document: Document, overrides: Sequence[Override]) -> tuple[Document, list[Override]]:
        """Return the eval as a document of ours, and the overrides that are still to be applied to it."""
        raise NotImplementedError

    def check(self, document: Document) -> None:
        """Raise ConfigError for a file of a version that cannot be read."""


def find_format(data: Mapping[str, Any]) -> tuple[str, Format] | None:
    """Return the name and format of another tool's eval file; None for one of ours, and for other files."""
    if is_configuration(data):
        return None
    if "benchmark" not in data and not data.keys().isdisjoint(_OURS):  # which a benchmark refuses by name
        return None
    for name in FORMATS:  # before plug-ins, whose packages need not be looked at then
        if (builtin := _load(name)).recognizes(data):
            return name, builtin
    return next(((name, plugin) for name in FORMATS.plugins if (plugin := _load(name)).recognizes(data)), None)


@cache
def _load(name: str) -> Format:
    try:
        chosen = FORMATS.load(name)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not (isinstance(chosen, type) and issubclass(chosen, Format)):
        raise UsageError(f"the format {name!r} is not a subclass of holdfast.formats.Format")
    return chosen()


def is_configuration(data: Mapping[str, Any]) -> bool:
    """Tell whether a file is a configuration for a cluster."""
    return not data.keys().isdisjoint(_CONFIGURATION)


def is_suite(data: Mapping[str, Any]) -> bool:
    """Tell whether a file is a suite file."""
    return "suite" in data


def is_eval(data: Mapping[str, Any]) -> bool:
    """Tell whether a file is an eval file, of any format that `holdfast eval` reads."""
    return not is_configuration(data) and (not data.keys().isdisjoint(_EVAL) or find_format(data) is not None)


def load_any(document: Document, overrides: Sequence[Override] = ()) -> Eval:
    """Load an eval file of any format, with overrides from the command line."""
    ours, remaining = to_native(document, overrides)
    return apply_overrides(ours, remaining, folder_of(document))


def folder_of(document: Document) -> Path:
    """Return the base of relative paths: the folder of the file, or the current one for a name."""
    return Path.cwd() if document.path is None else document.path.resolve().parent


def to_native(document: Document, overrides: Sequence[Override] = ()) -> tuple[Document, list[Override]]:
    """Return an eval file of any format as a document of ours, and the overrides that are still to be applied."""
    if (foreign := find_format(document.data)) is not None:
        return foreign[1].translate(document, overrides)
    return document, list(overrides)
