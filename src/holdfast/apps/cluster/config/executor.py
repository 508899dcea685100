"""Executors by name: `slurm`, `local`, and those that installed packages register as `holdfast.executors`.

A configuration needs to know little about its executor; `cluster.remote.executor.Executor` is the whole protocol.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final, Protocol, cast

from holdfast.errors import UsageError
from holdfast.spec.plugins import Registry

if TYPE_CHECKING:
    from holdfast.apps.cluster.config.schema import ExecutionBlock, ProfileBlock

EXECUTORS: Final = Registry(
    "holdfast.executors",
    "executor",
    {
        "slurm": "holdfast.apps.cluster.remote.chain:SlurmExecutor",
        "local": "holdfast.apps.cluster.remote.local:LocalExecutor",
    },
)
UNSUPPORTED: Final = ("docker", "dgxcloud", "lepton")
"""executors of other launchers"""


class ExecutorRules(Protocol):
    """The part of an executor that a configuration needs to know."""

    name: str
    is_local: bool
    """jobs are processes on this machine; sets the defaults of the properties below"""

    @property
    def shares_files(self) -> bool:
        """True if jobs see the files of this machine, under the same paths."""
        return self.is_local

    @property
    def installs_python(self) -> bool:
        """True if Holdfast is installed for the jobs, unless the profile names an interpreter."""
        return not self.is_local

    @property
    def starts_containers(self) -> bool:
        """True if servers are started in their images, and not as plain processes."""
        return not self.is_local

    @property
    def allocates_nodes(self) -> bool:
        """True if a job has nodes of its own, over which its servers are distributed."""
        return not self.is_local

    def job_options(
        self, execution: ExecutionBlock, env: ProfileBlock, *, nodes: int, serves: bool
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the scheduler's options for the main job and for worker jobs; none by default."""
        return (), ()


@cache
def load_executor(name: str) -> ExecutorRules:
    """Return the executor of that name; UsageError for an unknown name."""
    try:
        return cast("ExecutorRules", EXECUTORS.load(name)())
    except ValueError as error:
        raise UsageError(str(error)) from None


def executor_problem(name: object) -> str | None:
    """Return the error message for the name of an executor, or None."""
    if name in UNSUPPORTED:
        return f"{name!r} is not supported; {EXECUTORS.describe()}"
    try:
        load_executor(str(name))
    except UsageError as error:
        return error.message
    return None
