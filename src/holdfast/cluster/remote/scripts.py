"""The batch scripts, as text that a task's description determines. No secret is in them, and no logic.

Everything a job does is in `holdfast.cluster.job.node`: a shell that has traps loses signals, Python does not.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.cluster.config.launch import Execution
    from holdfast.cluster.remote.invocation import TaskFile, TaskPlace

MARGIN_SECONDS = 120
"""how long before its time limit a job is told to stop; less where that is short"""
_GPUS = ("gres", "gpus", "gpus-per-node", "gpus-per-task", "exclusive")


def main_script(task: TaskFile, place: TaskPlace) -> str:
    """The job that serves the model, if that is to be done, and works."""
    return _script(task, place, "main", f"{place.logs}/slurm-%j.log", task.main_options)


def worker_script(task: TaskFile, place: TaskPlace) -> str:
    """The array of those that work beside it: members 1, 2 …"""
    array = f"--array=1-{max(1, task.workers - 1)}"
    return _script(task, place, "worker", f"{place.logs}/slurm-%A_%a.log", (array, "--requeue", *task.worker_options))


def _script(task: TaskFile, place: TaskPlace, role: str, log: str, options: Iterable[str]) -> str:
    pattern = "/".join(part.replace("%", "%%") for part in log.split("/")[:-1]) + "/" + log.rpartition("/")[2]
    lines = [
        "#!/bin/bash",
        *(directive(option) for option in (f"--output={pattern}", "--open-mode=append", *options)),
        f"# {' '.join(task.name.split())}: task {task.number} of {task.invocation}, {role}",
        "trap '' USR2",  # which may come before Python listens, and would kill
        *task.setup_lines,
        f"exec {shlex.join([task.python, '-m', 'holdfast.cluster.job.node', place.path, '--role', role])}",
    ]
    return "\n".join(lines) + "\n"


def directive(option: str) -> str:
    """An option of sbatch as a line of a script; quoted where it has to be."""
    if "\n" in option or "\r" in option:
        raise UsageError(f"an option of sbatch has a line break: {option!r}")
    name, equals, value = option.partition("=")
    return f"#SBATCH {name}{equals}{shlex.quote(value) if equals else ''}"


def comment_of(script: bytes) -> str:
    """What a script wants in the comment of its job, where what the job is known by comes first."""
    found = re.search(r"^#SBATCH --comment=(.*)$", script.decode(errors="replace"), re.MULTILINE)
    return " ".join(shlex.split(found[1])) if found else ""


def job_options(execution: Execution, *, serves: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The options of sbatch for the main job and for its workers, which get no GPUs where a server has them."""
    flags = {name.lstrip("-").replace("_", "-"): value for name, value in execution.sbatch_flags.items()}
    signal = () if "signal" in flags else (f"--signal=B:USR2@{margin(execution.walltime):d}",)
    extra = {name: f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()}
    gpus: list[str] = []
    if execution.gres:
        gpus = [f"--gres={execution.gres}"]
    elif execution.gpus_per_node:
        gpus = [f"--gpus-per-node={execution.gpus_per_node}"]
    account = [
        *([f"--account={execution.account}"] if execution.account else []),
        *([f"--comment={execution.comment}"] if execution.comment else []),
    ]
    size = [
        *([f"--cpus-per-task={execution.cpus_per_task}"] if execution.cpus_per_task else []),
        *([f"--mem={execution.mem}"] if execution.mem else []),
    ]
    main = [
        *account,
        *([f"--partition={execution.partition}"] if execution.partition else []),
        f"--time={execution.walltime}",
        *signal,
        f"--nodes={execution.nodes}",
        f"--ntasks-per-node={execution.tasks_per_node}",
        *gpus,
        *size,
        *extra.values(),
    ]
    partition = (execution.cpu_partition if serves else None) or execution.partition
    worker = [
        *account,
        *([f"--partition={partition}"] if partition else []),
        f"--time={execution.walltime}",
        *signal,
        "--nodes=1",
        "--ntasks=1",
        *([] if serves else gpus),
        *size,
        *(option for name, option in extra.items() if not serves or name not in _GPUS),
    ]
    return tuple(main), tuple(worker)


def margin(walltime: str) -> int:
    """Seconds before the time limit at which a job stops in good order."""
    from holdfast.cluster.config.walltime import walltime_seconds

    return min(MARGIN_SECONDS, walltime_seconds(walltime) // 4)
