"""Preview a launch: what would be submitted, and what already exists. Nothing is written, here or on the cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.cluster.remote.invocation import TaskFolder
from holdfast.cluster.remote.scripts import main_script, worker_script
from holdfast.cluster.remote.submit import base_folder, connect_launch, place_task, runs_folder
from holdfast.engine.options import Options
from holdfast.engine.session import preview_run
from holdfast.errors import ClusterError, DataError, HoldfastError, Unreachable
from holdfast.plan.changes import format_count
from holdfast.plan.identity import identify

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.cluster.config.launch import Launch, TaskFile
    from holdfast.cluster.config.tasks import Task
    from holdfast.plan.plan import Plan

_LOOK_SECONDS: Final = 30.0


@dataclass(frozen=True)
class JobPreview:
    """A task file and the scripts that would be submitted."""

    task: TaskFile
    main: str
    worker: str | None


def preview(launch: Launch) -> list[JobPreview]:
    """Return task files and scripts, with what is only known at submission in angle brackets."""
    base = base_folder(launch)
    previews = []
    for number, task in enumerate(launch.tasks):
        place = TaskFolder(f"{base}/holdfast/<id>", number)
        file = place_task(
            task.file,
            place,
            {server.name: server.image for server in launch.servers},
            python=launch.env.python or f"{base}/holdfast/env/<digest>/bin/python",
            eval_file=f"{base}/holdfast/bundles/<digest>/{task.eval_file.name}",
            runs_dir=runs_folder(launch, base),
        )
        worker = worker_script(file, place) if file.workers > 1 else None
        previews.append(JobPreview(file, main_script(file, place), worker))
    return previews


@dataclass(frozen=True)
class RunPreview:
    """The run of a task before its submission."""

    samples: int | None = None
    trials: int = 0
    run_dir: str = ""
    plan: Plan | None = None
    """None: it cannot be made here"""
    finished: bool | None = None
    """None: unknown"""
    notes: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield the lines that people see."""
        if self.samples is not None:
            yield f"{format_count(self.samples, 'sample')} × {format_count(self.trials, 'trial')}"
        if self.run_dir:
            yield f"run: {self.run_dir}{' (finished)' if self.finished else ''}"
        if self.plan is not None:
            yield str(self.plan)
        yield from self.notes

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that scripts see."""
        counts = ("total", "finished", "reused", "to_grade", "to_run")
        plan = None if self.plan is None else {name: getattr(self.plan, name) for name in counts}
        return {
            "samples": self.samples,
            "trials": self.trials,
            "run": self.run_dir,
            "already_finished": self.finished,
            "plan": plan,
            "notes": self.notes,
        }


class RunPreviews:
    """Previews the runs of a launch. A cluster that does not answer is asked once."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._unreachable = ""

    def preview(self, task: Task, file: TaskFile) -> RunPreview:
        """Return what the run of a task would start from."""
        spec, options = task.spec, file.options
        engine = Options(runs_dir=Path(file.runs_dir), fresh=options.fresh, accept_drift=options.accept_drift)
        try:
            if self._launch.executor.shares_files:
                identity, rundir, plan = preview_run(spec, engine)
                return RunPreview(identity.survey.count, spec.trials, str(rundir.path), plan, rundir.finished)
            identity = identify(spec)
        except DataError as error:
            return RunPreview(notes=[f"its data cannot be read here: {error.message}"])
        except HoldfastError as error:
            return RunPreview(notes=[str(error)])
        run_dir = str(identity.directory(engine.runs_dir).path)
        finished, note = self._look(run_dir)
        fresh = ["--fresh sets that run aside, and everything runs from scratch"] if options.fresh else []
        return RunPreview(identity.survey.count, spec.trials, run_dir, None, finished, [note, *fresh])

    def _look(self, run_dir: str) -> tuple[bool | None, str]:
        """Return whether a run on the cluster is finished, and a note about it; None if this is unknown."""
        if not run_dir.startswith("/"):
            return None, "not checked: its path is known only on the cluster"
        if self._unreachable:
            return None, self._unreachable
        transport = connect_launch(self._launch, pauses=())
        try:
            answer = transport.check(["sh", "-c", _COUNT, "sh", run_dir], timeout=_LOOK_SECONDS)
        except (Unreachable, ClusterError) as error:
            self._unreachable = f"not checked: {error.message}"
            return None, self._unreachable
        state, _, count = answer.text.strip().rpartition("\n")[2].partition(" ")
        if state == "none":
            note = "there is no such run yet; outputs of other runs there are reused where their keys match"
            return False, f"{transport.host}: {note}"
        note = f"{transport.host}: {int(count):,} outputs are there"
        return state == "finished", note if state == "finished" else f"{note}, and the run continues from there"


_COUNT: Final = """
test -e "$1/manifest.json" || { echo none 0; exit 0; }
count=$(cat -- "$1/outputs.jsonl" "$1"/workers/*/outputs.jsonl "$1"/shared/*/outputs.*.jsonl 2>/dev/null | wc -l)
test -e "$1/metrics.json" && echo "finished $count" || echo "begun $count"
"""
