"""Holdfast evaluates language models and agents, and never loses ground.

The public names, imported on first use so that `holdfast --version` stays fast:

`evaluate`       run an eval from Python and get its `Run`; `evaluate_async` in an async program
`load_run`       read a run from its directory
`compare`        compare two runs on the samples they share
`gate`           check a run against minimum values and a baseline
`Run`            a run: its `Metrics`, results and outputs
`Reply`          what a Python target may return instead of plain text, with its `Usage`
`Verdict`        what a Python grader may return instead of a bool or a number
`Context`        what a Python target may ask for: the trial, recorded calls of models and tools
`Sample`         one row of the dataset
`Display`        the base of a progress display of your own
`HoldfastError`  the base of all errors

For plug-ins (docs/extending.md):

`InstantGrader`, `WaitingGrader`, `GraderBlock`, `Case`  a grader, its keys in the eval file, and what it judges
`SetVerdict`     the verdicts of a grader that looks at all outputs of a run together
`Target`, `TargetBlock`, `Turn`                          a target, its keys in the eval file, and what it answers
`Calls`          recorded calls of models and tools, for targets that make several
`RowLimits`, `LimitReached`                              limits of a row, and a limit of its own that a target reached
`RunView`        a run as an exporter reads it: each trial a `GradedTrial`, or `Pending` without an output
`Format`, `Document`, `Override`                         a format of eval files, and what it translates
`Origin`         the eval file that a grader or target is part of
`AttemptError`   raised if a target cannot answer or a grader cannot judge
`ConfigError`, `Problem`, `UsageError`                   raised for mistakes in a file, or in a command
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.api import evaluate as evaluate
    from holdfast.api import evaluate_async as evaluate_async
    from holdfast.data.dataset import Sample as Sample
    from holdfast.display.displays import Display as Display
    from holdfast.errors import AttemptError as AttemptError
    from holdfast.errors import ConfigError as ConfigError
    from holdfast.errors import HoldfastError as HoldfastError
    from holdfast.errors import LimitReached as LimitReached
    from holdfast.errors import Problem as Problem
    from holdfast.errors import UsageError as UsageError
    from holdfast.graders.types import Case as Case
    from holdfast.graders.types import InstantGrader as InstantGrader
    from holdfast.graders.types import SetVerdict as SetVerdict
    from holdfast.graders.types import Verdict as Verdict
    from holdfast.graders.types import WaitingGrader as WaitingGrader
    from holdfast.report.result import Run as Run
    from holdfast.report.result import compare as compare
    from holdfast.report.result import gate as gate
    from holdfast.report.result import load_run as load_run
    from holdfast.report.run_view import GradedTrial as GradedTrial
    from holdfast.report.run_view import Pending as Pending
    from holdfast.report.run_view import RunView as RunView
    from holdfast.spec.document import Document as Document
    from holdfast.spec.eval import Origin as Origin
    from holdfast.spec.formats import Format as Format
    from holdfast.spec.grader_schema import GraderBlock as GraderBlock
    from holdfast.spec.load import Override as Override
    from holdfast.spec.target_schema import TargetBlock as TargetBlock
    from holdfast.spec.trial_limits import RowLimits as RowLimits
    from holdfast.store.metrics import Metrics as Metrics
    from holdfast.store.records import Usage as Usage
    from holdfast.targets.python import Context as Context
    from holdfast.targets.types import Calls as Calls
    from holdfast.targets.types import Reply as Reply
    from holdfast.targets.types import Target as Target
    from holdfast.targets.types import Turn as Turn
    from holdfast.versions import __version__ as __version__

_HOMES = {
    "AttemptError": "holdfast.errors",
    "Calls": "holdfast.targets.types",
    "Case": "holdfast.graders.types",
    "ConfigError": "holdfast.errors",
    "Context": "holdfast.targets.python",
    "Display": "holdfast.display.displays",
    "Document": "holdfast.spec.document",
    "Format": "holdfast.spec.formats",
    "GradedTrial": "holdfast.report.run_view",
    "GraderBlock": "holdfast.spec.grader_schema",
    "HoldfastError": "holdfast.errors",
    "InstantGrader": "holdfast.graders.types",
    "LimitReached": "holdfast.errors",
    "Metrics": "holdfast.store.metrics",
    "Origin": "holdfast.spec.eval",
    "Override": "holdfast.spec.load",
    "Pending": "holdfast.report.run_view",
    "Problem": "holdfast.errors",
    "Reply": "holdfast.targets.types",
    "RowLimits": "holdfast.spec.trial_limits",
    "Run": "holdfast.report.result",
    "RunView": "holdfast.report.run_view",
    "Sample": "holdfast.data.dataset",
    "SetVerdict": "holdfast.graders.types",
    "Target": "holdfast.targets.types",
    "TargetBlock": "holdfast.spec.target_schema",
    "Turn": "holdfast.targets.types",
    "Usage": "holdfast.store.records",
    "UsageError": "holdfast.errors",
    "Verdict": "holdfast.graders.types",
    "WaitingGrader": "holdfast.graders.types",
    "__version__": "holdfast.versions",
    "compare": "holdfast.report.result",
    "evaluate": "holdfast.api",
    "evaluate_async": "holdfast.api",
    "gate": "holdfast.report.result",
    "load_run": "holdfast.report.result",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
