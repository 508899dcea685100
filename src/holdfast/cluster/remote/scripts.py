"""Write the batch scripts of a task. They contain no secrets and no logic.

Everything that a job does is in `holdfast.cluster.job`: a shell with traps loses signals, Python does not.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from holdfast.cluster.remote.executor import job_command
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.cluster.config.launch import TaskFile
    from holdfast.cluster.config.profiles import ProfileBlock
    from holdfast.cluster.config.schema import ExecutionBlock
    from holdfast.cluster.remote.invocation import TaskFolder

_GPUS = ("gres", "gpus", "gpus-per-node", "gpus-per-task", "exclusive")


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
    from holdfast.cluster.config.walltime import margin  # with pydantic, which jobs do without

    flags = {"exclusive": True, **execution.sbatch_extra_flags} if env.exclusive else execution.sbatch_extra_flags
    extra = {
        _flag(name): f"--{_flag(name)}" if value is True else f"--{_flag(name)}={value}"
        for name, value in flags.items()
        if value not in (None, False)
    }
    signal = [] if "signal" in extra else [f"--signal=B:USR2@{margin(execution.walltime):d}"]
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
