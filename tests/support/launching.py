"""Launches on the lab's Slurm: a folder with profile, configuration and eval, and what became of them."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cluster import layout
from holdfast.cluster.chain import Chain
from holdfast.cluster.config import compile_launch
from holdfast.cluster.launch import submit
from holdfast.cluster.layout import State, TaskPlace
from holdfast.cluster.slurm import Slurm
from holdfast.cluster.submission import Ledger, Registry, Submitter
from tests.support.running import wait_for, write_eval

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.cluster.config import Launch
    from holdfast.cluster.slurm import JobState
    from holdfast.cluster.submission import Invocation
    from holdfast.cluster.transport import Transport
    from tests.support.slurm import Lab

PATIENCE = 90.0


def calmly(condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    """As `wait_for`, where looking is work for the machine that is waited for."""

    def look() -> Any:
        time.sleep(0.1)
        return condition()

    return wait_for(look, what, patience)


@dataclass
class Site:
    """Somebody's folder, and the cluster they use."""

    folder: Path
    lab: Lab
    transport: Transport
    base: Path = field(init=False)

    def __post_init__(self) -> None:
        self.base = self.folder / "cluster"
        self.registry = Registry(self.folder / "home" / "invocations")

    def write(
        self,
        base_url: str | None,
        *,
        rows: int = 20,
        profile: str = "",
        deployment: dict[str, Any] | None = None,
        execution: dict[str, Any] | None = None,
        **keys: Any,
    ) -> None:
        """The files of a launch of one task."""
        write_eval(self.folder / "evals", base_url or "http://127.0.0.1:9/v1", rows=rows, **keys)
        (self.folder / "env.toml").write_text(
            f'[lab]\nexecutor = "slurm"\npartition = "main"\nremote_job_dir = "{self.base}"\n'
            f'python = "{sys.executable}"\ntime = "00:10:00"\n{profile}\n'
            f'[here]\nexecutor = "local"\nremote_job_dir = "{self.base}"\npython = "{sys.executable}"\n'
        )
        config = {
            "execution": {"type": "slurm", **(execution or {})},
            "deployment": deployment or {"type": "none"},
            "evaluation": {"tasks": ["evals/e.yaml"]},
        }
        (self.folder / "nano.yaml").write_text(json.dumps(config))

    def compiled(self, *overrides: str, profile: str = "lab", **environ: str) -> Launch:
        """The launch."""
        return compile_launch("nano", profile, overrides, (), self.folder, {"PWD": str(self.folder), **environ})

    def submit(self, *overrides: str, profile: str = "lab", **environ: str) -> Invocation:
        """Submit it."""
        launch = self.compiled(*overrides, profile=profile, **environ)
        return submit(launch, environ, transport=self.transport, registry=self.registry)

    def place(self, invocation: Invocation, task: int = 0) -> TaskPlace:
        """Where a task's files are."""
        return TaskPlace(invocation.directory, task)

    def chain(self, invocation: Invocation, task: int = 0) -> Chain:
        """The jobs of a task."""
        ledger = Ledger(self.lab.here, invocation.directory)
        return Chain(Submitter(Slurm(self.lab.here), ledger), invocation.id, self.place(invocation, task))

    def state(self, invocation: Invocation, task: int = 0) -> State:
        """How far a task is."""
        path = Path(self.place(invocation, task).state)
        return layout.decode(path.read_bytes(), State, str(path)) if path.exists() else State()

    def attempts(self, invocation: Invocation) -> list[layout.AttemptRecord]:
        """The attempts of the first task."""
        return layout.read_attempts(self.lab.here, self.place(invocation))

    def await_over(self, invocation: Invocation, patience: float = PATIENCE, task: int = 0) -> State:
        """The state a task ends in."""
        try:
            calmly(lambda: self.state(invocation, task).phase in layout.OVER, "the end", patience)
        except AssertionError:
            raise AssertionError(f"{self.state(invocation, task)}\n{self.logs(invocation)}") from None
        return self.state(invocation, task)

    def await_done(self, invocation: Invocation, count: int) -> State:
        """The state once so many trials are done."""
        try:
            calmly(lambda: self.state(invocation).done >= count, f"{count} trials")
        except AssertionError:
            raise AssertionError(f"{self.state(invocation)}\n{self.logs(invocation)}") from None
        return self.state(invocation)

    def running(self, invocation: Invocation, role: str) -> list[JobState]:
        """The jobs of a role that run."""
        return [job for job in self.chain(invocation).live(role) if job.state == "running"]

    def logs(self, invocation: Invocation) -> str:
        """All that was said."""
        paths = sorted(Path(invocation.directory).rglob("*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')}" for path in paths)

    def slurm(self, *argv: str) -> str:
        """One of Slurm's programs."""
        return self.lab.here.check(list(argv)).text

    def metrics(self, state: State) -> dict[str, Any]:
        """The numbers of a run."""
        assert state.run_dir is not None
        found: dict[str, Any] = json.loads((Path(state.run_dir) / "metrics.json").read_bytes())
        return found
