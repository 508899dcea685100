"""`holdfast eval -c CONFIG --run|--batch PROFILE`: show what was compiled, submit it, follow it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.cluster.config import Launch
    from holdfast.cluster.submission import Invocation
    from holdfast.spec.document import Document

SECTIONS = ("execution", "deployment", "evaluation")
"""keys by which a configuration is told from an eval file"""


def is_configuration(document: Document) -> bool:
    """Whether a file is a configuration for a cluster rather than an eval file."""
    return any(key in document.data for key in SECTIONS)


def launch_command(config: str, overrides: tuple[str, ...], given: dict[str, Any]) -> int:
    """Compile, show, and unless that was all submit; attached unless --batch."""
    from holdfast.cluster.config import compile_launch

    if given["run"] and given["batch"]:
        raise UsageError("give --run PROFILE to stay with it, or --batch PROFILE to leave it alone; not both")
    detached = given["batch"] is not None
    launch = compile_launch(config, given["run"] or given["batch"], overrides, given["ids"], detached=detached)
    _show(launch)
    if given["dry_run"]:
        _show_plan(launch)
        return 0
    return _submit(launch, detached=detached, force_squash=given["force_squash"])


def _show(launch: Launch) -> None:
    from holdfast.cluster.show import TITLE, compiled_yaml

    click.echo(TITLE)
    click.echo("─" * len(TITLE))
    click.echo(compiled_yaml(launch), nl=False)
    click.echo()
    for notice in launch.notices:
        click.echo(f"[info] {notice}", err=True)


def _show_plan(launch: Launch) -> None:
    """The scripts, and of each task what is known here."""
    from holdfast.cluster.launch import preview
    from holdfast.errors import HoldfastError

    for each, task in zip(preview(launch), launch.tasks, strict=True):
        click.echo(f"Task {each.task.number}: {task.name} ({task.eval_file})")
        try:
            click.echo(f"  {_size(launch, each.task.number)}")
        except HoldfastError as error:
            click.echo(f"  its data cannot be read here: {error.message}")
        if each.task.executor == "slurm":
            for name, text in (("job.sh", each.main), ("worker.sh", each.worker)):
                if text is not None:
                    click.echo(f"  {name}:")
                    click.echo("".join(f"    {line}\n" for line in text.splitlines()), nl=False)
        if each.task.deployment is not None:
            click.echo(f"  server: {each.task.deployment.command}")
        click.echo()


def _size(launch: Launch, number: int) -> str:
    from holdfast.data.dataset import Dataset
    from holdfast.spec.load import load_eval

    task = launch.tasks[number]
    spec = load_eval(task.eval_file, task.overrides)
    samples = Dataset(spec).survey().count
    return f"{samples:,} samples × {spec.trials} trials; runs go to {launch.execution.output_dir or 'runs'}"


def _submit(launch: Launch, *, detached: bool, force_squash: bool) -> int:
    from holdfast.cluster.environment import WANDB_KEY
    from holdfast.cluster.launch import follow, submit
    from holdfast.cluster.transport import way_to

    if any(variable.value == WANDB_KEY and variable.kind == "host" for variable in launch.variables()):
        from holdfast.cluster.environment import wandb_key

        if wandb_key(os.environ):
            click.echo(f"[info] Detected W&B login, setting {WANDB_KEY}")
    click.echo("Starting evaluation...")
    invocation = submit(launch, os.environ, say=click.echo, force_squash=force_squash)
    click.echo(f"✓ Evaluation submitted: {invocation.id}")
    _say_how_to_follow(invocation)
    if detached:
        return 0
    try:
        return follow(way_to(invocation.host, invocation.user, invocation.identity), invocation, click.echo)
    except KeyboardInterrupt:
        click.echo("\nDetached; the evaluation goes on.", err=True)
        _say_how_to_follow(invocation, err=True)
        return 130


def _say_how_to_follow(invocation: Invocation, *, err: bool = False) -> None:
    click.echo(f"  holdfast status {invocation.id}", err=err)
    click.echo(f"  holdfast logs {invocation.id} -f", err=err)
    click.echo(f"  holdfast kill {invocation.id}", err=err)
    click.echo(f"  {invocation.host or 'this machine'}:{invocation.directory}", err=err)
