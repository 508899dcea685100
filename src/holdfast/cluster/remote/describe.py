"""A task of a launch as its jobs get it: `task.json` and the scripts; without side effects, so that it can be shown."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from holdfast.cluster.config.walltime import walltime_seconds
from holdfast.cluster.remote.invocation import DeploymentFile, TaskFile, TaskPlace
from holdfast.cluster.remote.scripts import job_options, main_script, margin, worker_script

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from holdfast.cluster.config.launch import Execution, Launch
    from holdfast.cluster.config.servers import Deployment
    from holdfast.cluster.config.tasks import Task
    from holdfast.cluster.config.variables import EnvVar


def runs_place(launch: Launch, base: str) -> str:
    """Where runs go: `output_dir`; else `runs` in the folder for everything; on this machine where they always go."""
    where = launch.execution
    if where.executor == "slurm":
        return where.output_dir or f"{base}/runs"
    own = f"{base}/runs" if where.remote_job_dir else os.environ.get("HOLDFAST_RUNS_DIR") or "runs"
    return str(Path.cwd() / Path(where.output_dir or own).expanduser())


def describe_task(
    launch: Launch,
    task: Task,
    place: TaskPlace,
    *,
    invocation: str,
    python: str,
    images: Mapping[str, str | None],
    eval_file: str,
    runs_dir: str,
    overrides: tuple[tuple[tuple[str, ...], Any], ...],
) -> TaskFile:
    """A task as its jobs get it; without side effects, so that a preview can show it."""
    where = launch.execution
    deployment = _deployment_file(launch.deployment, where, images)
    auxiliary = [_deployment_file(served, where, images) for served in launch.auxiliary]
    main, worker = job_options(where, serves=deployment is not None or bool(auxiliary))
    settings = launch.export.fields.model_dump(exclude_none=True, exclude_unset=True)
    if launch.wandb is not None:
        settings["wandb"] = settings.get("wandb", {}) | launch.wandb.model_dump(exclude_none=True)
    return TaskFile(
        invocation=invocation,
        number=place.number,
        name=task.name,
        executor=where.executor,
        mode=where.mode,
        python=python,
        eval_file=eval_file,
        overrides=overrides,
        options=replace(launch.options, fresh=False, retry_failed=False) if task.twin else launch.options,
        runs_dir=runs_dir,
        deployment=deployment,
        auxiliary=tuple(served for served in auxiliary if served is not None),
        workers=where.workers,
        walltime=walltime_seconds(where.walltime),
        margin=margin(where.walltime),
        max_walltime=walltime_seconds(where.max_walltime) if where.max_walltime else None,
        env={**_gpus(where.gpu_visible), **_variables(task.env)},
        export=launch.export.destinations,
        export_env=_variables(launch.export.env),
        export_config=settings,
        pre_cmd=task.pre_cmd,
        post_cmd=task.post_cmd,
        setup_lines=where.setup_lines,
        main_options=main,
        worker_options=worker,
    )


def _deployment_file(served: Deployment, where: Execution, images: Mapping[str, str | None]) -> DeploymentFile | None:
    if not served.serves or not served.command:
        return None
    return DeploymentFile(
        name=served.name,
        prefix=served.prefix,
        command=served.command,
        pre_cmd=served.pre_cmd,
        image=images[served.name],
        mounts=tuple(map(str, served.mounts)),
        mount_home=where.mount_home,
        port=served.port,
        model=served.served_model_name,
        base_path=served.base_url("x").partition(f"x:{served.port}")[2],
        endpoints={name: path for name, path in served.endpoints.items() if name != "health"},
        health_path=served.health_path,
        health_status=served.health_status,
        # As many as there are nodes, as configurations for several instances have it, is one for each node.
        tasks=None if served.tasks == served.nodes else served.tasks,
        instances=served.instances,
        nodes=served.nodes,
        readiness_seconds=where.readiness_timeout,
        env=_variables(served.env),
    )


def _variables(variables: Iterable[EnvVar]) -> dict[str, str]:
    return {variable.name: str(variable) for variable in variables}


def _gpus(visible: bool | str | None) -> dict[str, str]:
    """What the evaluation is told of the job's GPUs."""
    if visible is None or visible is True:
        return {}
    return {"CUDA_VISIBLE_DEVICES": f"lit:{visible or ''}"}


@dataclass(frozen=True)
class Preview:
    """What would be submitted for one task."""

    task: TaskFile
    main: str
    worker: str | None


def preview(launch: Launch) -> list[Preview]:
    """The scripts, with what is only known at submission in angle brackets. Has no side effects."""
    base = launch.execution.remote_job_dir or str(Path.cwd() / ".holdfast")
    named = launch.env.python
    found = []
    for at, task in enumerate(launch.tasks):
        place = TaskPlace(f"{base}/holdfast/<id>", at)
        made = describe_task(
            launch,
            task,
            place,
            invocation="<id>",
            python=named or f"{base}/holdfast/env/<digest>/bin/python",
            images={each.name: each.image for each in (launch.deployment, *launch.auxiliary)},
            eval_file=f"{base}/holdfast/bundles/<digest>/{task.eval_file.name}",
            runs_dir=runs_place(launch, base),
            overrides=task.overrides,
        )
        worker = worker_script(made, place) if made.workers > 1 else None
        found.append(Preview(made, main_script(made, place), worker))
    return found
