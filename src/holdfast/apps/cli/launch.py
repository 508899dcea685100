"""`holdfast eval -c CONFIG --run|--batch PROFILE`: compile a configuration, submit it, follow it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from holdfast.apps.cli.errors import show_note
from holdfast.apps.cli.suite import suite_of, with_models
from holdfast.apps.cluster.config.compile import LaunchRequest, compile_launch
from holdfast.apps.cluster.config.compose import find_config
from holdfast.apps.cluster.config.tree import TITLE, compiled_yaml
from holdfast.apps.cluster.config.variables import WANDB_KEY, check_environment, wandb_login
from holdfast.apps.cluster.remote.bundle import collect
from holdfast.apps.cluster.remote.submit import RunPreviews, preview, submit
from holdfast.apps.cluster.remote.transport import connect
from holdfast.apps.cluster.watch.logs import follow
from holdfast.display.terminal import echo, echo_json
from holdfast.errors import ConfigError, Exit, UsageError
from holdfast.spec.document import read_document
from holdfast.spec.formats import is_eval, is_suite
from holdfast.spec.suite import Suite, read_suite
from holdfast.store.rundir import RunPolicy

if TYPE_CHECKING:
    from holdfast.apps.cli.eval import EvalFlags
    from holdfast.apps.cluster.config.launch import Launch, Server
    from holdfast.apps.cluster.remote.registry import Invocation


def launch_command(config: str | list[str], overrides: tuple[str, ...], flags: EvalFlags) -> int:
    """Compile and show a configuration, or a suite of several evals, submit it and, with --run, follow it."""
    if flags.run and flags.batch:
        raise UsageError("use either --run PROFILE (follow the logs) or --batch PROFILE (return at once), not both")
    _refuse(flags)
    detached = flags.batch is not None
    source = _find_suite(config, flags) if isinstance(config, str) else suite_of(config, ())
    if isinstance(source, Suite):
        source = with_models(source, flags.models)
        _refuse_budgets(source, flags)
    # `-t` selects tasks of a configuration; only for eval files by themselves it selects samples.
    inner = replace(flags, ids=())
    request = LaunchRequest(
        config=source,
        profile=flags.run or flags.batch,
        overrides=[*_execution_overrides(flags), *overrides],
        tasks=flags.ids,
        eval_overrides=inner.suite_overrides() if isinstance(source, Suite) else inner.overrides(),
        exports=flags.export,
        options=RunPolicy(**flags.policy),
        detached=detached,
    )
    launch = compile_launch(request)
    if flags.dry_run:
        return _preview(launch, flags)
    _refuse_without_profile(launch)
    _show(launch)
    return _submit(launch, detached=detached, force_squash=flags.force_squash)


def _find_suite(config: str, flags: EvalFlags) -> Suite | str:
    """Return the suite that a suite file holds, or that an eval file and several models stand for; else `config`."""
    path = find_config(config, Path.cwd(), os.environ)
    try:
        document = read_document(path)
    except ConfigError:
        return config  # reported where the configuration is composed
    if is_suite(document.data):
        return read_suite(document)
    if len(flags.models) > 1 and is_eval(document.data):
        return suite_of([str(path)], flags.models)
    if len(flags.models) > 1:
        raise UsageError(
            "several models need eval files or a suite file, not a cluster configuration",
            remedy="Add a task for each model, with `overrides: {target.model: …}`.",
        )
    return config


def _refuse_budgets(suite: Suite, flags: EvalFlags) -> None:
    """Refuse budgets of a suite: its jobs run at the same time and do not know of each other."""
    if suite.limits.model_fields_set or flags.max_cost or flags.token_budget or flags.max_time:
        raise UsageError(
            "the budget of a suite does not work on a cluster: each of its runs is a job of its own",
            remedy="Give each run a budget with limits.max_cost=…, limits.token_budget=… or limits.max_time=….",
        )


def _refuse(flags: EvalFlags) -> None:
    """Refuse options that cannot be used in a job."""
    if flags.baseline_model:
        raise UsageError(
            "--baseline-model does not work on a cluster",
            remedy="Add a task of the same eval with `overrides: {target.model: …}`, and use `holdfast compare`.",
        )
    if flags.display not in (None, "plain"):
        raise UsageError(
            f"--display {flags.display}: jobs show plain logs",
            remedy="`holdfast status ID --json` is for scripts; --batch follows no logs.",
        )
    if flags.json and not flags.dry_run:
        raise UsageError("--json needs --dry-run", remedy="`holdfast status ID --json` shows what the jobs are doing.")


def _refuse_without_profile(launch: Launch) -> None:
    """Refuse to submit jobs if no profile names the cluster; a compiled configuration names it under `run.env`."""
    if not launch.executor.is_local and launch.profile is None and launch.env.executor is None:
        raise UsageError(
            f"{launch.path}: execution.type is {launch.execution.type}, and no profile is given",
            remedy="Name a profile with --run or --batch, or preview it with --dry-run.",
        )


def _execution_overrides(flags: EvalFlags) -> list[str]:
    """Return the overrides that options stand for; those written as KEY=VALUE win over them."""
    overrides = []
    if flags.workers:
        overrides.append(f"execution.workers={flags.workers}")
    if flags.runs_dir:
        overrides.append(f"execution.output_dir={json.dumps(str(flags.runs_dir))}")
    return overrides


def _show(launch: Launch) -> None:
    echo(TITLE)
    echo("─" * len(TITLE))
    echo(compiled_yaml(launch.tree), nl=False)
    echo()
    for notice in launch.notices:
        show_note(notice)


def _preview(launch: Launch, flags: EvalFlags) -> int:
    """Show what would be submitted and run, then check the variables. Nothing is sent, and nothing is written."""
    if not flags.json:
        _show(launch)
    tasks, runs = [], RunPreviews(launch)
    for each, task in zip(preview(launch), launch.tasks, strict=True):
        run = runs.preview(task, each.task)
        bundle = collect(task.spec, task.eval_file, translated=task.translated)
        scripts = {"job.sh": each.main, "worker.sh": each.worker} if not launch.executor.is_local else {}
        server = None if each.task.deployment is None else each.task.deployment.command
        servers = {_server_name(served): served.command for served in each.task.served}
        tasks.append(
            {
                "name": task.name,
                "eval": str(task.eval_file),
                **run.as_dict(),
                "files": bundle.as_dict(),
                "server": server,
                "servers": servers,
                "scripts": {name: text for name, text in scripts.items() if text is not None},
            }
        )
        if not flags.json:
            echo(f"Task {each.task.number}: {task.name} ({task.eval_file})")
            echo("".join(f"  {line}\n" for line in [*run.lines(), *bundle.lines()]), nl=False)
            for name, text in scripts.items():
                if text is not None:
                    echo(f"  {name}:")
                    echo("".join(f"    {line}\n" for line in text.splitlines()), nl=False)
            for name, line in servers.items():
                echo(f"  {name}: {line}")
            echo()
    if flags.json:
        echo_json(json.dumps({"notices": launch.notices, "config": launch.tree.data, "tasks": tasks}))
    check_environment(launch.variables, os.environ)  # last, so that a missing variable hides nothing
    return 0


def _server_name(served: Server) -> str:
    several = f" ({served.instances} instances)" if served.instances > 1 else ""
    return (f"server {served.name}" if served.prefix else "server") + several


def _submit(launch: Launch, *, detached: bool, force_squash: bool) -> int:
    if any(variable.value == WANDB_KEY and variable.kind == "host" for variable in launch.variables):
        login = wandb_login(launch.variables, os.environ)
        if login.api_key:
            echo(f"note: detected a W&B login, setting {WANDB_KEY} for {login.base_url}")
    echo("Starting evaluation...")
    invocation = submit(launch, os.environ, say=echo, force_squash=force_squash)
    echo(f"✓ Evaluation submitted: {invocation.id}")
    _show_commands(invocation)
    if detached:
        return 0
    try:
        return follow(connect(invocation.host, invocation.user, invocation.identity), invocation, echo)
    except KeyboardInterrupt:
        echo("\nDetached; the evaluation continues.", err=True)
        _show_commands(invocation, err=True)
        return Exit.INTERRUPTED


def _show_commands(invocation: Invocation, *, err: bool = False) -> None:
    echo(f"  holdfast status {invocation.id}", err=err)
    echo(f"  holdfast logs {invocation.id} -f", err=err)
    echo(f"  holdfast kill {invocation.id}", err=err)
    echo(f"  {invocation.host or 'this machine'}:{invocation.directory}", err=err)
