"""What a launch would find and do, before anything is sent: the plan of a run on this machine, a look at a cluster's.

Nothing is written, here or there. Where nobody could look, that is said.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.cluster.remote.transport import way_to
from holdfast.engine.options import Options
from holdfast.engine.session import preview_run
from holdfast.errors import ClusterError, DataError, HoldfastError, Unreachable
from holdfast.plan.changes import counted
from holdfast.plan.identity import identify

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.cluster.config.launch import Launch
    from holdfast.cluster.config.tasks import Task
    from holdfast.cluster.remote.invocation import TaskFile
    from holdfast.plan.plan import Plan

_LOOK_SECONDS: Final = 30.0


@dataclass(frozen=True)
class Foreseen:
    """What is known of a task's run."""

    samples: int | None = None
    trials: int = 0
    run_dir: str = ""
    plan: Plan | None = None
    """None: nobody could make one from here"""
    finished: bool | None = None
    """None: nobody looked"""
    notes: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """The same for people."""
        if self.samples is not None:
            yield f"{counted(self.samples, 'sample')} × {counted(self.trials, 'trial')}"
        if self.run_dir:
            yield f"run: {self.run_dir}{' (finished)' if self.finished else ''}"
        if self.plan is not None:
            yield str(self.plan)
        yield from self.notes

    def as_dict(self) -> dict[str, Any]:
        """The same for scripts."""
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


class Foresight:
    """Looks ahead for the tasks of a launch. A cluster that does not answer is asked once."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._silent = ""

    def of(self, task: Task, described: TaskFile) -> Foreseen:
        """What running a task would find."""
        spec, asked = task.spec, described.options
        options = Options(runs_dir=Path(described.runs_dir), fresh=asked.fresh, accept_drift=asked.accept_drift)
        try:
            if described.executor == "local":
                found, rundir, plan = preview_run(spec, options)
                return Foreseen(found.survey.count, spec.trials, str(rundir.path), plan, rundir.finished)
            found = identify(spec)
        except DataError as error:
            return Foreseen(notes=[f"its data cannot be read here: {error.message}"])
        except HoldfastError as error:
            return Foreseen(notes=[str(error)])
        run_dir = str(found.directory(options.runs_dir).path)
        finished, note = self._look(run_dir)
        fresh = ["--fresh sets that run aside, and everything runs from scratch"] if asked.fresh else []
        return Foreseen(found.survey.count, spec.trials, run_dir, None, finished, [note, *fresh])

    def _look(self, run_dir: str) -> tuple[bool | None, str]:
        """Whether a run is on the cluster, and finished, and how many outputs it has; or why nobody looked."""
        where = self._launch.execution
        if not run_dir.startswith("/"):
            return None, "not checked: its path is known only on the cluster"
        if self._silent:
            return None, self._silent
        way = way_to(where.hostname if where.ssh else None, where.username, where.identity, pauses=())
        try:
            done = way.check(["sh", "-c", _COUNT, "sh", run_dir], timeout=_LOOK_SECONDS)
        except (Unreachable, ClusterError) as error:
            self._silent = f"not checked: {error.message}"
            return None, self._silent
        state, _, count = done.text.strip().rpartition("\n")[2].partition(" ")
        if state == "none":
            return (
                False,
                f"{way.place}: there is no such run yet; outputs of other runs there are reused where their keys match",
            )
        said = f"{way.place}: {int(count):,} outputs are there"
        return state == "finished", said + (
            "" if state == "finished" else ", and the run continues with what is missing"
        )


_COUNT: Final = """
test -e "$1/manifest.json" || { echo none 0; exit 0; }
count=$(cat -- "$1/outputs.jsonl" "$1"/workers/*/outputs.jsonl 2>/dev/null | wc -l)
test -e "$1/metrics.json" && echo "finished $count" || echo "begun $count"
"""
