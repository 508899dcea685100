"""A run made ready for its workers, in a process of its own: what it reads and imports is the user's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.cluster import layout
from holdfast.cluster.layout import TaskPlace
from holdfast.cluster.transport import Here
from holdfast.display.text import Plain, say
from holdfast.engine.options import Options
from holdfast.engine.run import Outcome
from holdfast.engine.setup import identify
from holdfast.engine.shared import prepare
from holdfast.errors import HoldfastError, RunHeld
from holdfast.spec.fields import ModelTarget
from holdfast.spec.load import load_eval
from holdfast.store.claims import newest_round
from holdfast.store.holding import live_workers
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from holdfast.engine.shared import Shared
    from holdfast.spec.load import Eval


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """How a run stands before it is worked on."""

    run_dir: str = ""
    exit_code: int | None = None
    """of a run that is finished, or wants nothing more; else None"""
    total: int = 0
    done: int = 0
    slots: float = 0
    """verdicts that a trial needs, on average"""
    exports: bool = False
    """whether the eval file asks for exports of a run that is finished"""
    error: str = ""
    """why it cannot be worked on"""


def prepare_task(folder: Path, base_url: str | None) -> int:
    """Share out what is left of a task's run, and say so on standard output."""
    try:
        found = _prepare(folder, base_url)
    except HoldfastError as error:
        found = Prepared(error=str(error), exit_code=error.exit_code)
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    return 0


def _prepare(folder: Path, base_url: str | None) -> Prepared:
    place = TaskPlace.of(folder)
    task = layout.read_task(Here(pauses=()), place)
    overrides = list(task.overrides)
    spec = load_eval(Path(task.eval_file), overrides)
    if base_url is not None and isinstance(spec.target, ModelTarget):
        spec = load_eval(Path(task.eval_file), [*overrides, (("target", "base_url"), base_url)])
    # Where a server is started anew nobody can be at work: whoever is still there leaves. Else workers may be joined.
    patience = -1.0 if task.deployment else 0.0
    command = f"holdfast resume {task.invocation}"
    try:
        return _described(spec, _share(spec, task.runs_dir, task.workers, patience, command))
    except RunHeld:
        found = identify(spec)
        rundir = found.directory(Path(task.runs_dir))
        if newest_round(rundir) is not None and list(live_workers(rundir)):
            total = found.survey.count * spec.trials
            return Prepared(run_dir=str(rundir.path), total=total, slots=found.survey.panels.mean)
        return _described(spec, _share(spec, task.runs_dir, task.workers, -1.0, command))


def _share(spec: Eval, runs_dir: str, workers: int, patience: float, command: str) -> Outcome | Shared:
    return prepare(spec, Options(runs_dir=Path(runs_dir), wait=patience), workers, Plain(), command=command)


def _described(spec: Eval, shared: Outcome | Shared) -> Prepared:
    if isinstance(shared, Outcome):
        plan, reason = shared.plan, shared.reason
        error = "" if reason is None or shared.metrics is not None else str(reason)
        run_dir = str(shared.rundir.path)
        return Prepared(
            run_dir=run_dir,
            exit_code=shared.exit_code,
            total=plan.total,
            done=plan.finished,
            exports=bool(spec.exports),
            error=error,
        )
    plan, slots = shared.plan, shared.found.survey.panels.mean
    done = plan.finished + plan.reused
    run_dir = str(shared.rundir.path)
    return Prepared(run_dir=run_dir, total=plan.total, done=done, slots=slots)


def export_task(folder: Path, run_dir: Path) -> int:
    """The exports that the eval file asks for; 3 when one of them failed."""
    from holdfast.export.exporting import export_finished

    task = layout.read_task(Here(pauses=()), TaskPlace.of(folder))
    failures: list[str] = []
    spec = load_eval(Path(task.eval_file), task.overrides)
    export_finished(RunDir(run_dir), spec, lambda name, done: say(f"{name}: {' '.join(done.where)}"), failures.append)
    for failure in failures:
        say(failure)
    return 3 if failures else 0
