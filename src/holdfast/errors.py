"""Every error Holdfast raises, one tree.

HoldfastError
├── UsageError            exit 2: the command, a file or the data are wrong; nothing was done
│   ├── ConfigError       something in the eval file, with its line
│   ├── DataError         something in the dataset, with file and line
│   ├── ManifestError     a run directory whose manifest.json cannot be read
│   ├── ResultsError      a run directory whose metrics.json or results.json cannot be read
│   └── VersionError      a file of a version that this Holdfast does not read
├── RunHeld               exit 4: another process holds this run
│   └── RunBeingFinished  all work is done, and that process writes the report
├── Interrupted           exit 130 or 143: told to stop
├── ClusterError          exit 3: a cluster's program refused or failed
├── Unreachable           exit 3: no answer from the cluster; says nothing about jobs, which may be running
├── ExportFailed          exit 3: a run could not be handed on; the run itself is whole
├── Fault                 exit 3: will hit every trial (no key, no model, no server, no disk); stops admission
└── AttemptError          one attempt at a turn or a grade failed; retried by class, never a score

A message says what is wrong and where; `remedy` says what to do. `BudgetReached` is no error, but stops a run too.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

FaultKind = Literal["auth", "no_model", "refused", "quota", "disk", "rejected", "dataset_changed", "lease_lost"]
AttemptKind = Literal["connection", "rate_limit", "server", "timeout", "bad_reply", "bad_request", "agent", "grader"]


class HoldfastError(Exception):
    """The root of all of them."""

    exit_code = 2

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return self.message if self.remedy is None else f"{self.message}\nhint: {self.remedy}"


class UsageError(HoldfastError):
    """The command line asks for something that cannot be done."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a file: where it is and what it is."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


class ConfigError(UsageError):
    """The eval file is wrong. Carries every problem found, not only the first."""

    def __init__(self, problems: Sequence[Problem], *, remedy: str | None = None) -> None:
        self.problems = tuple(sorted(problems, key=_line))
        super().__init__("\n".join(map(str, self.problems)), remedy=remedy)


def _line(problem: Problem) -> tuple[str, int]:
    """Sort key: problems of one file by their lines, those without a line last."""
    found = re.match(r"(.*?):(\d+)(?=:|$)", problem.where)
    return (found[1], int(found[2])) if found else (problem.where.partition(":")[0], sys.maxsize)


class DataError(UsageError):
    """A dataset, or one of its rows, is wrong."""

    def __init__(self, where: str, message: str, *, remedy: str | None = None) -> None:
        super().__init__(f"{where}: {message}", remedy=remedy)


class ManifestError(UsageError):
    """`manifest.json` is damaged; `holdfast repair` sets it aside, and the next `holdfast eval` writes it again."""


class ResultsError(UsageError):
    """`metrics.json` or `results.json` is damaged; both can be written again from the journals."""


class VersionError(UsageError):
    """A file of ours is of another major version, or says none that can be read."""


class RunHeld(HoldfastError):
    """Another process is writing this run."""

    exit_code = 4


class RunBeingFinished(RunHeld):
    """Another process is writing the report of this run, whose work is done."""


class ExportFailed(HoldfastError):
    """Another tool, or the way to it, did not take a run; nothing of the run is touched by that."""

    exit_code = 3


class Interrupted(HoldfastError):
    """A signal told the run to stop; everything that finished is on disk."""

    def __init__(self, signal_number: int) -> None:
        super().__init__("interrupted")
        self.exit_code = 128 + signal_number


@dataclass(frozen=True)
class BudgetReached:
    """A limit the user set was met."""

    message: str
    remedy: str
    option: str = ""
    """of the command line, such as `--max-time`"""
    raised: str = ""
    """a value for it with which the run would get further"""


class ClusterError(HoldfastError):
    """A program on the cluster answered, and the answer is no."""

    exit_code = 3


class Unreachable(HoldfastError):
    """Nobody answered: ssh, or Slurm's controller behind it. What was asked is unknown, never "failed" or "none"."""

    exit_code = 3


class Fault(HoldfastError):
    """Every further trial would fail the same way, so none is started."""

    exit_code = 3

    def __init__(self, kind: FaultKind, message: str, *, remedy: str | None = None, status: int | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.kind = kind
        self.status = status
        self.body: Any = None
        """what the server answered with that status, where it was JSON"""


class AttemptError(HoldfastError):
    """One attempt failed through no fault of the answer. The trial stays pending."""

    exit_code = 3

    def __init__(
        self,
        kind: AttemptKind,
        message: str,
        *,
        remedy: str | None = None,
        status: int | None = None,
        retry: bool = True,
        retry_after: float | None = None,
        usage: Any = None,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.usage = usage
        """what the failed attempt has used all the same, where that is known"""
        self.kind = kind
        self.status = status
        self.body: Any = None
        """what the server answered with that status, where it was JSON"""
        self.traceback: str | None = None
        """of the user's code that raised"""
        self.retry = retry
        self.retry_after = retry_after
