"""What a configuration is once it is compiled: one form, whichever dialect it was written in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.cluster.config.schema import ExportBlock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.cluster.config.options import RunOptions
    from holdfast.cluster.config.profiles import Profile, ProfileBlock, WandbBlock
    from holdfast.cluster.config.provenance import Tree
    from holdfast.cluster.config.servers import Deployment
    from holdfast.cluster.config.tasks import Task
    from holdfast.cluster.config.variables import EnvVar


@dataclass(frozen=True)
class Execution:
    """Where the work is done, in one form whichever dialect it was written in."""

    executor: str
    """slurm or local"""
    ssh: bool = False
    """submit through ssh to `hostname`; else from here"""
    hostname: str | None = None
    username: str | None = None
    identity: str | None = None
    remote_job_dir: str | None = None
    output_dir: str | None = None
    """where runs go; None: where they go on this machine"""
    account: str | None = None
    partition: str | None = None
    cpu_partition: str | None = None
    walltime: str = "01:00:00"
    max_walltime: str | None = None
    """of all jobs that go on with each other, together"""
    nodes: int = 1
    tasks_per_node: int = 1
    gres: str | None = None
    gpus_per_node: int | None = None
    """also where gres says it"""
    cpus_per_task: int | None = None
    mem: str | None = None
    sbatch_flags: dict[str, str | int | bool] = field(default_factory=dict)
    """further options of sbatch; True for one without a value"""
    comment: str | None = None
    """what stands in the comments of jobs, after what Holdfast knows them by"""
    workers: int = 1
    readiness_timeout: float | None = None
    """seconds the server may take to start; None: the walltime"""
    mount_home: bool = False
    setup_lines: tuple[str, ...] = ()
    """shell, before anything else in the job"""
    auto_export: tuple[str, ...] = ()
    gpu_visible: bool | str | None = None
    """whether, or which, GPUs of the job the evaluation sees; None: as the job does"""
    mode: str = "sequential"


@dataclass(frozen=True)
class Export:
    """Where results go, and with which variables."""

    destinations: tuple[str, ...] = ()
    """by themselves, when all is done"""
    fields: ExportBlock = field(default_factory=ExportBlock)
    env: tuple[EnvVar, ...] = ()


@dataclass(frozen=True)
class Launch:
    """A configuration compiled: everything is known but secrets, which are only named."""

    name: str
    path: Path
    profile: Profile | None
    env: ProfileBlock
    """`run.env`: the profile, and what the configuration and the command line say instead"""
    execution: Execution
    deployment: Deployment
    auxiliary: tuple[Deployment, ...]
    """served beside the model"""
    tasks: tuple[Task, ...]
    export: Export
    wandb: WandbBlock | None
    """project and entity, where results go to W&B"""
    notices: tuple[str, ...]
    """what a user should know: older keys, and keys that have no effect here"""
    options: RunOptions
    """how the command wants the runs gone about"""
    tree: Tree = field(repr=False, compare=False)
    """the configuration itself, each value with its place"""

    def variables(self) -> Iterator[EnvVar]:
        """Every variable of every part; `environment.check_environment` sees whether they are set."""
        for served in (self.deployment, *self.auxiliary):
            yield from served.env
        yield from self.export.env
        for task in self.tasks:
            yield from task.env
