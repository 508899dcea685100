"""The gate of an eval file: its baseline is looked up before a run begins, and it is evaluated after the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import ConfigError, HoldfastError, Problem, UsageError
from holdfast.report.compare import read_scores
from holdfast.report.gate import Rules, check_gate, check_minima
from holdfast.report.run_view import RunView
from holdfast.spec.eval_schema import MAX_DROP
from holdfast.store.catalog import find_run
from holdfast.store.metrics import Check, GateOutcome
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.spec.eval import Eval
    from holdfast.store.metrics import Metrics


def find_baseline(spec: Eval, runs_dir: Path) -> RunDir | None:
    """Return the run that the gate names; raise ConfigError if it does not exist or is not finished."""
    if spec.gate is None or spec.gate.baseline is None:
        return None
    name = spec.gate.baseline
    beside = spec.folder / name  # as for all paths of an eval file
    try:
        rundir = RunDir(beside if (beside / "manifest.json").exists() else find_run(name, runs_dir))
    except UsageError as error:
        problem, remedy = error.message, error.remedy
    else:
        if rundir.finished:
            return rundir
        problem = f"{rundir.path} is not finished: it has no metrics.json"
        remedy = "Finish it with the `holdfast eval` command that began it."
    refused = ConfigError([Problem(spec.document.where(("gate", "baseline")), problem)])
    refused.remedy = remedy
    raise refused


def evaluate_gate(spec: Eval, rundir: RunDir, metrics: Metrics, runs_dir: Path) -> GateOutcome:
    """Check a finished run against the gate of its eval."""
    block = spec.gate
    assert block is not None
    if block.baseline is None:
        checks = check_minima(metrics, block.minima)
    else:
        margin = MAX_DROP if block.max_drop is None else block.max_drop
        rules = Rules(margin, block.confidence, block.inconclusive, minima=block.minima)
        try:
            baseline = find_baseline(spec, runs_dir)
            assert baseline is not None
            checks = check_gate(read_scores(RunView(rundir)), read_scores(RunView(baseline)), rules)
        except HoldfastError as error:  # it was there when the run began
            message = f"baseline {block.baseline}: {error.message}"
            lost = Check(what="baseline", passed=False, warning=False, message=message)
            checks = [*check_minima(metrics, block.minima), lost]
    return GateOutcome(passed=all(check.passed for check in checks), baseline=block.baseline, checks=checks)
