"""Exit codes, and the tree of all errors that Holdfast raises.

HoldfastError
├── UsageError            exit 2: the command, a file or the data are wrong; nothing was done
│   ├── ConfigError       something in the eval file, with its line
│   ├── DataError         something in the dataset, with file and line
│   ├── NoSuchRun         a name that no run on this machine has
│   ├── QueryError        a filter of trials, with the position of the mistake
│   ├── ManifestError     a run directory whose manifest.json cannot be read
│   ├── ResultsError      a run directory whose metrics.json or results.json cannot be read
│   └── VersionError      a file of a version that this Holdfast does not read
├── RunFileError          exit 3: a file of a run that is not a regular file, or too large; also an OSError
├── RunHeld               exit 4: another process holds this run
│   └── RunBeingFinished  all trials are finished, and that process writes the report
├── Interrupted           exit 130 or 143: stopped by a signal
├── ClusterError          exit 3: a cluster's program refused or failed
├── Unreachable           exit 3: no answer from the cluster; its jobs may be running all the same
├── ExportFailed          exit 3: a run could not be exported; the run itself is complete
├── Fault                 exit 3: would hit every trial (no key, no model, no server, no disk); stops admission
└── AttemptError          exit 3: one attempt at a turn or a grade failed; retried by kind, never scored
    ├── LimitReached      a target reached a limit of its own; may be scored (`limits.on_limit`)
    ├── ProgramExited     a program ended by itself with an exit code other than 0; may be scored (`limits.on_exit`)
    ├── RestartTrial      a trial that cannot continue starts again
    └── Uncertain         a call that must not happen twice may have happened; a person settles it

A message names the problem and its place; `remedy` says what to do. `BudgetReached` and `Waiting` are not errors, but
also stop a run.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Exit:
    """The exit codes of commands. After a signal, a command exits with 128 plus the signal's number."""

    FINISHED: Final = 0
    GATE_FAILED: Final = 1
    """finished, but a gate is not met; also for a check that found something"""
    USAGE: Final = 2
    """the command, a file or the data are wrong; nothing was done"""
    UNFINISHED: Final = 3
    """something is left: trials that failed, a budget that is spent, a fault, or a bug; the same command goes on"""
    HELD: Final = 4
    """another process holds the run"""
    WAITING: Final = 5
    """everything that is left waits for batches (`--no-wait`)"""
    CONTINUES: Final = 75
    """a job that its successor continues: EX_TEMPFAIL"""
    INTERRUPTED: Final = 130
    """by Ctrl-C"""
    BROKEN_PIPE: Final = 141
    """the reader of the output is gone"""
    TERMINATED: Final = 143


COMPLETE: Final = (Exit.FINISHED, Exit.GATE_FAILED)
"""exit codes of finished runs"""
_SEVERITY: Final = (
    *(Exit.TERMINATED, Exit.INTERRUPTED, Exit.USAGE, Exit.UNFINISHED),
    *(Exit.HELD, Exit.WAITING, Exit.GATE_FAILED, Exit.FINISHED),
)


def worst_exit_code(codes: Iterable[int]) -> int:
    """Return the most severe of several exit codes."""
    return min(codes, key=_SEVERITY.index)


def suggest(word: str, names: Iterable[str]) -> str:
    """Return the closest name as the end of a message; empty if no name is close."""
    import difflib

    close = difflib.get_close_matches(word, list(names), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


FaultKind = Literal["auth", "no_model", "refused", "quota", "disk", "rejected", "dataset_changed", "lease_lost"]
AttemptKind = Literal[
    "connection", "rate_limit", "server", "timeout", "bad_reply", "bad_request", "agent", "grader", "uncertain"
]


def with_hint(message: str, hint: str | None, indent: str = "") -> str:
    """Append a hint to a message, on its own line."""
    return f"{message}\n{indent}hint: {hint}" if hint else message


class HoldfastError(Exception):
    """The base class of all errors of Holdfast."""

    exit_code: int = Exit.USAGE

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return with_hint(self.message, self.remedy)


class UsageError(HoldfastError):
    """A request that cannot be fulfilled: the command line, a file or the data are wrong."""


class Problem(NamedTuple):
    """A mistake in a file: its place and a message."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


class ConfigError(UsageError):
    """The eval file is wrong. Carries all problems, not only the first."""

    def __init__(self, problems: Sequence[Problem], *, remedy: str | None = None) -> None:
        self.problems = tuple(sorted(problems, key=_line))
        super().__init__("\n".join(map(str, self.problems)), remedy=remedy)


def _line(problem: Problem) -> tuple[str, int]:
    """Return a sort key: by file and line, problems without a line last."""
    match = re.match(r"(.*?):(\d+)(?=:|$)", problem.where)
    return (match[1], int(match[2])) if match else (problem.where.partition(":")[0], sys.maxsize)


class DataError(UsageError):
    """A dataset, or one of its rows, is wrong."""

    def __init__(self, where: str, message: str, *, remedy: str | None = None) -> None:
        super().__init__(f"{where}: {message}", remedy=remedy)


class QueryError(UsageError):
    """A filter of trials cannot be parsed, or names something that the run does not have."""

    def __init__(self, message: str, position: int, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.position = position
        """of the mistake in the filter, in characters from 0"""


class NoSuchRun(UsageError):
    """No run on this machine has that name."""


class ManifestError(UsageError):
    """`manifest.json` is damaged; `holdfast repair` sets it aside, and the next `holdfast eval` writes it again."""


class ResultsError(UsageError):
    """`metrics.json` or `results.json` is damaged; both can be written again from the journals."""


class VersionError(UsageError):
    """A file of Holdfast has another major version, or no valid version."""


class RunFileError(HoldfastError, OSError):
    """A file of a run directory is a pipe, a device or the like, or larger than any file of a run.

    It is also an OSError, so that callers that can do without the file treat it as unreadable.
    """

    exit_code: int = Exit.UNFINISHED


class RunHeld(HoldfastError):
    """Another process is writing this run."""

    exit_code: int = Exit.HELD


class RunBeingFinished(RunHeld):
    """Another process is writing the report of this run; all trials are finished."""


class ExportFailed(HoldfastError):
    """An export failed: the other tool refused it or could not be reached. The run itself is unchanged."""

    exit_code: int = Exit.UNFINISHED


class Interrupted(HoldfastError):
    """A signal stopped the run; everything that finished is on disk."""

    def __init__(self, signal_number: int) -> None:
        super().__init__("interrupted")
        self.exit_code = 128 + signal_number


class BudgetReached(NamedTuple):
    """A limit that the user set is reached."""

    message: str
    remedy: str
    option: str = ""
    """option of the command line, such as `--max-time`"""
    raised: str = ""
    """a higher value of the option, with which the run would continue"""


class Waiting(NamedTuple):
    """Everything that is left waits for batches at a provider, and the user chose not to wait."""

    message: str


class ClusterError(HoldfastError):
    """A program on the cluster refused or failed."""

    exit_code: int = Exit.UNFINISHED


class Unreachable(HoldfastError):
    """Neither ssh nor Slurm's controller answered. The state of jobs is unknown, never "failed" or "none"."""

    exit_code: int = Exit.UNFINISHED


class Fault(HoldfastError):
    """A failure that every further trial would share, so none is started."""

    exit_code: int = Exit.UNFINISHED

    def __init__(
        self,
        kind: FaultKind,
        message: str,
        *,
        remedy: str | None = None,
        status: int | None = None,
        away: bool = False,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.kind = kind
        self.status = status
        self.away = away
        """True if the server cannot be reached, as during a restart; the same request may succeed later"""
        self.body: Any = None
        """JSON body of the server's error response, if it had one"""


class AttemptError(HoldfastError):
    """A failed attempt that says nothing about the answer. The trial stays pending."""

    exit_code: int = Exit.UNFINISHED

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
        """tokens and cost of the failed attempt, if known"""
        self.kind = kind
        self.status = status
        self.body: Any = None
        """JSON body of the server's error response, if it had one"""
        self.traceback: str | None = None
        """traceback of the user's code that raised"""
        self.retry = retry
        self.retry_after = retry_after


class LimitReached(AttemptError):
    """A target reached a limit of its own. With `limits.on_limit: score`, what it has done by then is graded."""

    def __init__(
        self, limit: Literal["time", "tokens", "cost", "calls"], message: str = "", *, output: str = ""
    ) -> None:
        kind: AttemptKind = "timeout" if limit == "time" else "agent"
        super().__init__(kind, message or f"the target has reached its limit: {limit}", retry=False)
        self.limit = limit
        self.output = output
        """the answer so far"""


class ProgramExited(AttemptError):
    """A program ended by itself with an exit code other than 0."""

    def __init__(self, message: str, code: int, output: str) -> None:
        super().__init__("agent", message)
        self.code = code
        self.output = output
        """its standard output"""


class RestartTrial(AttemptError):
    """A trial cannot continue from its record and may restart, since every call in it may happen twice."""


class Uncertain(AttemptError):
    """A call that must not happen twice may have happened: the trial stays pending until a person settles the call."""

    def __init__(self, message: str) -> None:
        super().__init__("uncertain", message, retry=False)
