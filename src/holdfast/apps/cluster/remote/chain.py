"""The `slurm` executor. The jobs of a task form a chain: `main`, `main-2`, … each is queued before the last one works.

A successor depends on its predecessor failing (`afternotok`): by its time limit, by preemption, with its node, or
killed. If the predecessor succeeds, Slurm itself removes the successor. A predecessor that was cancelled (`scancel`)
counts as failed for Slurm, but means stop: the successor checks for it before it does anything.

Workers are an array: `workers`, `workers-2`, … Only a main job that has work for them queues them. Workers without
a running main job would hold nodes for nothing.

Batch scripts contain no secrets and no logic. All that a job does is in `holdfast.apps.cluster.job`, because a shell
with traps loses signals, and Python does not.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from holdfast.apps.cluster.remote.executor import Executor, job_command
from holdfast.apps.cluster.remote.ledger import JobScript, Ledger, Submitter
from holdfast.apps.cluster.remote.slurm import JobName, Slurm
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.apps.cluster.config.launch import TaskFile
    from holdfast.apps.cluster.config.schema import ExecutionBlock, ProfileBlock
    from holdfast.apps.cluster.remote.invocation import TaskFolder
    from holdfast.apps.cluster.remote.ledger import Job
    from holdfast.apps.cluster.remote.slurm import JobState
    from holdfast.apps.cluster.remote.transport import Transport

_GPUS = ("gres", "gpus", "gpus-per-node", "gpus-per-task", "exclusive")
"""options of sbatch that give a job GPUs"""


class Chain:
    """The jobs of one task."""

    def __init__(self, submitter: Submitter, invocation: str, place: TaskFolder) -> None:
        self.submitter = submitter
        self.invocation = invocation
        self.place = place

    def submit_main(self, after: str | None = None) -> Job:
        """Queue the main job, or one that continues when job `after` fails."""
        options = [] if after is None else [f"--dependency=afternotok:{after}", "--kill-on-invalid-dep=yes"]
        return self._submit("main", self.place.script, options, after)

    def submit_workers(self) -> Job:
        """Queue the array of worker jobs."""
        return self._submit("workers", self.place.worker_script, [])

    def _submit(self, role: str, script: str, options: list[str], after: str | None = None) -> Job:
        text = self.submitter.ledger.transport.read(script)
        name = _numbered(self.invocation, self.place.number, role, len(self.known(role)) + 1)
        return self.submitter.submit(JobScript(name, text, script, comment_of(text), options, after))

    def known(self, role: str) -> list[Job]:
        """Return all jobs of a role that were ever intended."""
        return [job for job in self.submitter.ledger.jobs() if is_role(job.intent.name, self.place.number, role)]

    def states(self) -> list[JobState]:
        """Return the jobs of the task that Slurm lists: active ones, and those that ended a few minutes ago."""
        jobs = self.submitter.slurm.jobs(invocation=self.invocation)
        return [job for job in jobs if (name := JobName.parse(job.name)) and name.task == self.place.number]

    def was_cancelled(self, job: Job, listed: Sequence[JobState]) -> bool:
        """Return True if Slurm reports that a user cancelled this job; preemption and time limits do not count.

        `listed` are the jobs that Slurm lists, as by `states`.
        """
        states = [state for state in listed if (state.name, state.id) == (job.intent.name, job.id)]
        if not states:
            accounted = self.submitter.slurm.query_accounting([job.intent.name], since=job.intent.time) or []
            states = [state for state in accounted if state.id == job.id]
        return any(state.state == "cancelled" for state in states)


def is_role(name: str, task: int, role: str) -> bool:
    """Return True for the name of a job of this task and role; it may be a later one, such as `main-2`."""
    parsed = JobName.parse(name)
    return parsed is not None and parsed.task == task and re.fullmatch(rf"{role}(-\d+)?", parsed.role) is not None


def _numbered(invocation: str, task: int, role: str, number: int) -> JobName:
    return JobName(invocation, task, role if number == 1 else f"{role}-{number}")


class SlurmExecutor(Executor):
    """Submits jobs with sbatch."""

    name = "slurm"
    queues_successors = True

    def job_options(
        self, execution: ExecutionBlock, env: ProfileBlock, *, nodes: int, serves: bool
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the options of sbatch for the main job and for worker jobs."""
        return sbatch_options(execution, env, nodes=nodes, serves=serves)

    def start(self, ledger: Ledger, task: TaskFile, place: TaskFolder) -> list[Job]:
        """Queue the jobs of one task."""
        return self.start_all(ledger, [(task, place)])

    def start_all(self, ledger: Ledger, tasks: Sequence[tuple[TaskFile, TaskFolder]]) -> list[Job]:
        """Queue the main job of each task."""
        if not tasks:
            return []
        known = ledger.jobs()
        _, files = ledger.transport.read_tree(ledger.directory, ("job.sh",))
        scripts = []
        for task, place in tasks:
            text = files[str(PurePosixPath(place.script).relative_to(place.invocation))]
            earlier = sum(is_role(job.intent.name, place.number, "main") for job in known)
            name = _numbered(task.invocation, place.number, "main", earlier + 1)
            scripts.append(JobScript(name, text, place.script, comment_of(text)))
        return Submitter(Slurm(ledger.transport), ledger).submit_all(scripts)

    def states(
        self, transport: Transport, invocation: str, jobs: Sequence[Job], *, mine: bool = True, history: bool = False
    ) -> list[JobState]:
        """Return the jobs that squeue lists; with `history` also the `jobs` that only sacct knows."""
        slurm = Slurm(transport)
        states = slurm.jobs(invocation=invocation, mine=mine)
        listed = {(state.name, state.id) for state in states}
        forgotten = [job for job in jobs if job.id is not None and (job.intent.name, job.id) not in listed]
        if history and forgotten:
            names = sorted({job.intent.name for job in forgotten})
            older = slurm.query_accounting(names, since=min(job.intent.time for job in forgotten)) or []
            states += [state for state in older if (state.name, state.id) not in listed]
        return states

    def cancel(self, transport: Transport, states: Sequence[JobState]) -> None:
        """Cancel jobs by id and name together: ids are reused."""
        Slurm(transport).cancel(ids={state.handle: state.name for state in states})

    def settle(self, ledger: Ledger) -> list[Job]:
        """Adopt jobs that sbatch created without its answer arriving, and disown intents without a job."""
        return Submitter(Slurm(ledger.transport), ledger).reconcile().doubtful

    def job_id(self) -> str:
        """Return the id of this Slurm job; of the array for a member of one."""
        return os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ["SLURM_JOB_ID"]


def main_script(task: TaskFile, place: TaskFolder) -> str:
    """Return the script of the main job, which serves the model, if the task does so, and works."""
    return _script(task, place, "main", f"{place.logs}/slurm-%j.log", task.main_options)


def worker_script(task: TaskFile, place: TaskFolder) -> str:
    """Return the script of the array of worker jobs, members 1, 2 …"""
    array = f"--array=1-{max(1, task.workers - 1)}"
    return _script(task, place, "worker", f"{place.logs}/slurm-%A_%a.log", (array, "--requeue", *task.worker_options))


def _script(task: TaskFile, place: TaskFolder, role: str, log: str, options: Iterable[str]) -> str:
    pattern = "/".join(part.replace("%", "%%") for part in log.split("/")[:-1]) + "/" + log.rpartition("/")[2]
    lines = [
        "#!/bin/bash",
        *(directive(option) for option in (f"--output={pattern}", "--open-mode=append", *options)),
        f"# {' '.join(task.name.split())}: task {task.number} of {task.invocation}, {role}",
        "trap '' USR2",  # which may come before Python listens, and would kill
        *task.setup_lines,
        f"exec {shlex.join(job_command(task, place, role))}",
    ]
    return "\n".join(lines) + "\n"


def directive(option: str) -> str:
    """Return an option of sbatch as a line of a script, quoted if necessary."""
    if "\n" in option or "\r" in option:
        raise UsageError(f"an option of sbatch has a line break: {option!r}")
    name, equals, value = option.partition("=")
    return f"#SBATCH {name}{equals}{shlex.quote(value) if equals else ''}"


def comment_of(script: bytes) -> str:
    """Return the comment in a script, which follows the intent in the comment of its job."""
    comment = re.search(r"^#SBATCH --comment=(.*)$", script.decode(errors="replace"), re.MULTILINE)
    return " ".join(shlex.split(comment[1])) if comment else ""


def sbatch_options(
    execution: ExecutionBlock, env: ProfileBlock, *, nodes: int, serves: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the options of sbatch for the main job and for worker jobs, which get no GPUs if a server has them."""
    flags = {"exclusive": True, **execution.sbatch_extra_flags} if env.exclusive else execution.sbatch_extra_flags
    extra = {
        _flag(name): f"--{_flag(name)}" if value is True else f"--{_flag(name)}={value}"
        for name, value in flags.items()
        if value not in (None, False)
    }
    signal = [] if "signal" in extra else [f"--signal=B:USR2@{execution.margin:d}"]
    project = None if execution.subproject == "holdfast" else execution.subproject
    comment = " ".join(filter(None, (project, execution.sbatch_comment)))
    account = _options(account=execution.account, comment=comment)
    size = _options(cpus_per_task=env.cpus_per_task, mem=env.mem)
    gpus = _options(gres=execution.gres) or _options(gpus_per_node=execution.gpus_per_node)
    main = [
        *account,
        *_options(partition=execution.partition, time=execution.walltime),
        *signal,
        *_options(nodes=nodes, ntasks_per_node=execution.ntasks_per_node),
        *gpus,
        *size,
        *extra.values(),
    ]
    partition = (execution.cpu_partition if serves else None) or execution.partition
    worker = [
        *account,
        *_options(partition=partition, time=execution.walltime),
        *signal,
        "--nodes=1",
        "--ntasks=1",
        *([] if serves else gpus),
        *size,
        *(option for name, option in extra.items() if not serves or name not in _GPUS),
    ]
    return tuple(main), tuple(worker)


def _flag(name: str) -> str:
    return name.lstrip("-").replace("_", "-")


def _options(**values: object) -> list[str]:
    """Return options of sbatch, without those that have no value."""
    return [f"--{_flag(name)}={value}" for name, value in values.items() if value]
