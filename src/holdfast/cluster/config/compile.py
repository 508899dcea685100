"""Compile a configuration and a profile into a launch: what to serve, what to measure and where.

`compile_launch` reads files and does nothing else: no connection, no submission, no file written.
"""

from __future__ import annotations

import os
import shlex
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import msgspec

from holdfast.cluster.config.compose import compose, find_config, read_config, split_overrides
from holdfast.cluster.config.executor import executor_problem, load_executor
from holdfast.cluster.config.launch import Container, Launch, RunOptions, Server, TaskFile
from holdfast.cluster.config.legacy import MOVED, move_keys
from holdfast.cluster.config.no_effect import keys_without_effect
from holdfast.cluster.config.profiles import WandbBlock, folder_problem, load_profile
from holdfast.cluster.config.provenance import COMMAND_LINE, Tree
from holdfast.cluster.config.schema import (
    DEPLOYMENTS,
    DESTINATIONS,
    AuxiliaryBlock,
    DeploymentBlock,
    EvaluationBlock,
    ExecutionBlock,
    LaunchBlock,
    LaunchExportBlock,
    LaunchTargetBlock,
    RunBlock,
)
from holdfast.cluster.config.servers import (
    build_server,
    check_instances,
    check_ports,
    container_mounts,
    default_model,
    fill_base_command,
    fill_references,
    missing_model,
    needed_nodes,
    prefix_of,
    read_auxiliary,
    served_version,
    settle_gpus,
    settle_nodes,
    spread_over_gpus,
)
from holdfast.cluster.config.tasks import Endpoint, TaskReader
from holdfast.cluster.config.variables import (
    WANDB_KEY,
    EnvVar,
    add_wandb_server,
    place_wandb_server,
    read_variables,
)
from holdfast.cluster.config.walltime import margin, walltime_seconds
from holdfast.errors import Problem
from holdfast.spec.document import format_location
from holdfast.spec.formats import is_eval
from holdfast.spec.overrides import parse_override
from holdfast.spec.schema import Block
from holdfast.spec.suite import Suite, find_evals
from holdfast.spec.validation import Findings, suggest, validate_block

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.cluster.config.executor import ExecutorRules
    from holdfast.cluster.config.profiles import Profile
    from holdfast.cluster.config.tasks import Task
    from holdfast.spec.document import Location
    from holdfast.spec.formats import TaskProvider
    from holdfast.spec.overrides import Override

_Model = TypeVar("_Model", bound=Block)
SCOPES = ("deployment", "evaluation", "export")
"""of environment variables in the older dialect"""
RESERVED_FLAGS = {
    **dict.fromkeys(("job-name", "J"), "jobs are found by their names; subproject goes into their comments"),
    "comment": "write execution.sbatch_comment",
    **dict.fromkeys(("output", "o", "error", "e", "open-mode"), "`holdfast logs` reads what jobs print"),
    **dict.fromkeys(("array", "a"), "write execution.workers"),
    **dict.fromkeys(("dependency", "d", "kill-on-invalid-dep"), "jobs wait for the ones they continue"),
    **dict.fromkeys(("parsable", "wait", "W", "test-only", "wrap"), "sbatch must answer with the job's id"),
}
"""options of sbatch that users cannot set, and what to do instead"""


def compile_launch(
    config: str | Path | Suite,
    profile_name: str | None = None,
    overrides: Sequence[str] = (),
    tasks: Sequence[str] = (),
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    detached: bool = False,
    eval_overrides: Sequence[Override] = (),
    options: RunOptions | None = None,
    exports: Sequence[str] = (),
    providers: Sequence[TaskProvider] | None = None,
) -> Launch:
    """Compile the launch that `holdfast eval -c CONFIG --run PROFILE -t TASK … key=value …` asks for.

    `config` is a path or a name in the configuration folder, or a suite; `profile_name` a table of env.toml (None: a
    preview, or a configuration that needs no profile); `detached` is True for --batch rather than --run.
    `eval_overrides` apply to every eval file, `exports` are destinations beside those of execution.auto_export.

    If `config` is an eval file or a suite, `overrides` apply to the evals, except those of the configuration's
    sections, and `tasks` are samples, as they are without a cluster. Raises UsageError or ConfigError, the latter with
    everything that is wrong, by file and line. Has no side effects.
    """
    cwd = Path.cwd() if cwd is None else cwd
    environ = os.environ if environ is None else environ
    suite = config if isinstance(config, Suite) else None
    path = _suite_path(config) if isinstance(config, Suite) else find_config(config, cwd, environ)
    profile = None if profile_name is None else load_profile(profile_name, cwd, environ)
    document = None if suite is not None else read_config(path, cwd)
    if document is None or is_eval(document.data):
        overrides, inner = split_overrides(overrides)
        selected: list[Override] = [(("dataset", "ids"), list(tasks))] if tasks else []
        eval_overrides, tasks = (*selected, *eval_overrides, *map(parse_override, inner)), ()
    composed = compose(path, overrides, profile, cwd, environ, detached=detached, suite=suite, document=document)
    findings = Findings(composed.notices)
    tree = move_keys(composed.tree, MOVED, findings)
    _add_exports(tree, exports)
    _drop_own_keys(tree, composed.used, findings)

    blocks = _read_blocks(tree, findings)
    executor = load_executor(blocks.execution.type)
    blocks = _settle(tree, blocks, executor, findings)
    execution, env = blocks.execution, blocks.run.env
    place_wandb_server(tree, environ, exports="wandb" in _destinations(execution))
    deployment, auxiliary, server_variables = _read_servers(tree, blocks, executor, findings)
    servers = (*(() if deployment is None else (deployment,)), *auxiliary)
    if not executor.allocates_nodes:
        check_ports(tree, servers, findings)
    fill_references(tree, auxiliary, findings)
    nodes = needed_nodes(execution.num_nodes, servers)
    export_env, export_config = _read_exports(tree, blocks, profile, findings)
    main_options, worker_options = executor.job_options(execution, env, nodes=nodes, serves=bool(servers))
    shared = TaskFile(
        executor=execution.type,
        mode=execution.mode,
        options=_resolve_output_path(options or RunOptions(), cwd, executor),
        deployment=deployment,
        auxiliary=auxiliary,
        workers=execution.workers,
        walltime=walltime_seconds(execution.walltime),
        margin=margin(execution.walltime),
        max_walltime=walltime_seconds(execution.max_walltime) if execution.max_walltime else None,
        env=_visible_gpus(execution.evaluation_gpu_visible),
        export=_destinations(execution),
        export_env={variable.name: str(variable) for variable in export_env.values()},
        export_config=export_config,
        pre_cmd=tree.get("evaluation", "pre_cmd"),
        post_cmd=tree.get("evaluation", "post_cmd"),
        setup_lines=_setup_lines(blocks),
        main_options=main_options,
        worker_options=worker_options,
    )
    reader = TaskReader(
        tree=tree,
        findings=findings,
        shared=shared,
        endpoint=_endpoint(blocks),
        variables=_read_scope(tree, findings, "evaluation"),
        container=_evaluation_container(blocks, executor),
        folder=path.parent,
        cwd=cwd,
        providers=providers,
        overrides=tuple(eval_overrides),
        environ=environ,
    )
    compiled = reader.read(tasks)
    chosen = (suite is not None and suite.targets) or any(key == ("target", "model") for key, _ in eval_overrides)
    if deployment is not None and chosen:
        message = "the served model is the one evaluated; set deployment.served_model_name=…"
        findings.problems.append(Problem("command line: target.model", message))
    _check_flags(tree, execution, findings)
    _check_folders(tree, blocks, shared.options, executor, findings)
    host = _ssh_host(tree, blocks, environ, executor, findings)
    findings.add_notices(keys_without_effect(tree, composed.used, executor))
    if profile is not None and profile.foreign:
        names = ", ".join(profile.foreign)
        findings.add_notices([f"{profile.place}: {names}: no effect here, because it is for dgxcloud and lepton"])
    findings.raise_problems()
    _keep_selected(tree, compiled, eval_overrides)
    return Launch(
        name=path.stem,
        path=path,
        profile=profile,
        env=env,
        execution=execution,
        executor=executor,
        host=host,
        nodes=nodes,
        tasks=compiled,
        shared=shared,
        variables=(
            *server_variables,
            *export_env.values(),
            *(variable for task in compiled for variable in task.variables),
        ),
        notices=findings.notices,
        tree=tree,
    )


def _suite_path(suite: Suite) -> Path:
    """Return the file that stands for a suite: its own, or that of its first eval."""
    return find_evals(suite)[0] if suite.document is None or suite.document.path is None else suite.document.path


def _drop_own_keys(tree: Tree, used: frozenset[str], findings: Findings) -> None:
    """Remove keys of the user's own, whose values are by now where others refer to them.

    Servers may have such keys without a reference too, which is noted, unless it looks like a misspelt key.
    """
    for name in [key for key in tree.data if key not in LaunchBlock.model_fields and key in used]:
        tree.remove((name,))
    named = tree.get("auxiliary_deployments")
    servers: list[tuple[Location, type[DeploymentBlock]]] = [(("deployment",), DeploymentBlock)]
    servers += [
        (("auxiliary_deployments", name), AuxiliaryBlock) for name in (named if isinstance(named, dict) else ())
    ]
    for location, model in servers:
        block, fields = tree.get(*location), model.model_fields
        for name in [key for key in block if key not in fields] if isinstance(block, dict) else ():
            place = (*location, name)
            if format_location(place) not in used:
                if any(abs(len(name) - len(other)) <= 2 for other in get_close_matches(name, fields, n=1)):
                    continue
                findings.notice(tree, place, "no effect here, because nothing refers to it")
            tree.remove(place)


class _Blocks(NamedTuple):
    """The sections of a configuration."""

    run: RunBlock
    execution: ExecutionBlock
    deployment: DeploymentBlock
    target: LaunchTargetBlock
    export: LaunchExportBlock


def _read_blocks(tree: Tree, findings: Findings) -> _Blocks:
    """Validate the sections; raises ConfigError if one of them cannot be read."""
    validate_block(LaunchBlock, tree.data, (), tree, findings.problems)
    _read_block(tree, findings, EvaluationBlock, "evaluation")
    run = _read_block(tree, findings, RunBlock, "run")
    execution = _read_block(tree, findings, ExecutionBlock, "execution")
    deployment = _read_block(tree, findings, DeploymentBlock, "deployment")
    target = _read_block(tree, findings, LaunchTargetBlock, "target")
    export = _read_block(tree, findings, LaunchExportBlock, "export")
    unknown_executor = executor_problem(tree.get("execution", "type"))
    if unknown_executor is not None:
        findings.wrong(tree, ("execution", "type"), unknown_executor)
    kind = tree.get("deployment", "type")
    if kind not in DEPLOYMENTS:
        message = f"unknown type {kind!r}{suggest(str(kind), DEPLOYMENTS)}; one of {', '.join(DEPLOYMENTS)}"
        findings.wrong(tree, ("deployment", "type"), message)
    if run is None or execution is None or deployment is None or unknown_executor is not None:
        findings.raise_problems()
    assert run is not None and execution is not None and deployment is not None
    return _Blocks(run, execution, deployment, target or LaunchTargetBlock(), export or LaunchExportBlock())


def _read_block(tree: Tree, findings: Findings, model: type[_Model], section: str) -> _Model | None:
    data = tree.get(section)
    if data is None:
        return None
    return cast("_Model | None", validate_block(model, data, (section,), tree, findings.problems))


def _settle(tree: Tree, blocks: _Blocks, executor: ExecutorRules, findings: Findings) -> _Blocks:
    """Make numbers of nodes, instances and GPUs fit together, and fill in the output folder."""
    execution = settle_nodes(tree, blocks.execution, blocks.deployment, executor, findings)
    serves = blocks.deployment.type != "none" or any(read_auxiliary(tree, Findings()))
    execution = settle_gpus(tree, execution, executor, findings, serves=serves)
    base = blocks.run.env.remote_job_dir
    if execution.output_dir is None and base and not executor.shares_files:
        execution = execution.model_copy(update={"output_dir": f"{base}/evaluations"})
    nodes = execution.num_nodes // execution.num_instances
    deployment = spread_over_gpus(tree, blocks.deployment, ("deployment",), execution.gpus_per_node, nodes, findings)
    deployment = fill_base_command(tree, deployment)
    return blocks._replace(execution=execution, deployment=deployment)


def _read_servers(
    tree: Tree, blocks: _Blocks, executor: ExecutorRules, findings: Findings
) -> tuple[Server | None, tuple[Server, ...], list[EnvVar]]:
    """Return the server of the model, those beside it, and the variables of all."""
    execution, env = blocks.execution, blocks.run.env
    variables: list[EnvVar] = []
    deployment = None
    if (block := blocks.deployment).type != "none":
        scope = _read_scope(tree, findings, "deployment")
        variables += scope.values()
        _check_model(tree, block, ("deployment",), findings)
        if block.served_model_name is None:
            message = "is not given: the server is asked for the model that each eval file names"
            if (name := default_model(block)) is not None:
                message += f", and by benchmarks for {name}"
            findings.notice(tree, ("deployment", "served_model_name"), message)
        deployment = build_server(
            block,
            scope,
            container_mounts(env, execution.mounts.deployment, block),
            execution,
            instances=execution.num_instances,
            nodes=execution.num_nodes,
            tasks=execution.deployment.n_tasks,
        )
    auxiliary = []
    for name, block, location in read_auxiliary(tree, findings):
        instances, nodes = block.num_instances, block.num_nodes or block.num_instances
        check_instances(tree, location, block, instances, nodes, executor, findings)
        spread = spread_over_gpus(tree, block, location, execution.gpus_per_node, nodes // instances, findings)
        scope = _read_scope(tree, findings, "auxiliary_deployments", name)
        variables += scope.values()
        _check_model(tree, block, location, findings)
        server = build_server(
            spread,
            scope,
            container_mounts(env, execution.mounts.auxiliary.get(name, {}), spread),
            execution,
            name=name,
            prefix=prefix_of(name, block),
            instances=instances,
            nodes=nodes,
            tasks=block.n_tasks,
        )
        auxiliary.append(server)
    return deployment, tuple(auxiliary), variables


def _check_model(tree: Tree, block: DeploymentBlock, location: Location, findings: Findings) -> None:
    if message := missing_model(block):
        findings.wrong(tree, location, message)


def _endpoint(blocks: _Blocks) -> Endpoint:
    """Return the model that the tasks measure."""
    block, asked = blocks.deployment, blocks.target.api_endpoint
    if block.type == "none":
        return Endpoint(
            model=asked.model_id,
            base_url=asked.url,
            api_key_env=asked.api_key_name,
            type=asked.type,
            stream=asked.stream,
        )
    version = served_version(block)
    return Endpoint(
        model=block.served_model_name,
        default_model=default_model(block),
        api_key_env=asked.api_key_name,
        type=asked.type,
        stream=asked.stream,
        version=version,
    )


def _read_scope(tree: Tree, findings: Findings, scope: str, *inner: str) -> dict[str, EnvVar]:
    """Read the variables of a part: the profile's, those of all parts, the older dialect's, and its own."""
    variables = read_variables(tree, ("run", "env", "env_vars"), findings, bare="lit")
    older = tree.get("execution", "env_vars")
    if isinstance(older, dict):
        message = "deprecated: use env_vars under deployment, evaluation and export"
        findings.notice(tree, ("execution", "env_vars"), message)
        for name in sorted(set(older) - set(SCOPES)):
            message = f"unknown key{suggest(name, SCOPES)}; known here: {', '.join(SCOPES)}"
            findings.wrong(tree, ("execution", "env_vars", name), message)
    for location in (("env_vars",), ("execution", "env_vars", scope), (scope, *inner, "env_vars")):
        variables |= read_variables(tree, location, findings)
    key = tree.get("target", "api_endpoint", "api_key_name")
    if scope == "evaluation" and isinstance(key, str):
        origin = tree.origin(("target", "api_endpoint", "api_key_name"))
        variables.setdefault(key, EnvVar(key, "host", key, origin))
    add_wandb_server(tree, variables)
    return variables


def _read_exports(
    tree: Tree, blocks: _Blocks, profile: Profile | None, findings: Findings
) -> tuple[dict[str, EnvVar], dict[str, Any]]:
    """Return the variables and the settings of exports; W&B also needs a login and a project."""
    block, run, destinations = blocks.export, blocks.run, _destinations(blocks.execution)
    for name in destinations:
        if name not in DESTINATIONS:
            message = f"unknown destination {name!r}{suggest(name, DESTINATIONS)}; one of {', '.join(DESTINATIONS)}"
            findings.wrong(tree, ("execution", "auto_export"), message)
    if block.gsheets is not None:
        findings.wrong(tree, ("export", "gsheets"), "not supported; use one of wandb, mlflow, local")
    variables = _read_scope(tree, findings, "export")
    settings = block.model_dump(exclude_none=True, exclude_unset=True)
    if "wandb" not in destinations:
        return variables, settings
    wandb = WandbBlock(
        project=(block.wandb.project if block.wandb else None) or run.wandb.project,
        entity=(block.wandb.entity if block.wandb else None) or run.wandb.entity,
    )
    if wandb.project is None:
        message = "results go to W&B, and no project is named: write [wandb] project = … into env.toml"
        report = findings.notice if profile is None else findings.wrong
        report(tree, ("export", "wandb") if block.wandb else ("execution", "auto_export"), message)
    variables.setdefault(WANDB_KEY, EnvVar(WANDB_KEY, "host", WANDB_KEY, "results go to W&B"))
    add_wandb_server(tree, variables)
    for key, value in wandb:
        if value is not None:
            origin = tree.origin(("export" if block.wandb else "run", "wandb", key))
            name = f"WANDB_{key.upper()}"
            variables.setdefault(name, EnvVar(name, "lit", value, origin))
    settings["wandb"] = settings.get("wandb", {}) | wandb.model_dump(exclude_none=True)
    return variables, settings


def _destinations(execution: ExecutionBlock) -> tuple[str, ...]:
    automatic = execution.auto_export
    return tuple(dict.fromkeys(automatic.destinations)) if automatic.enabled else ()


def _evaluation_container(blocks: _Blocks, executor: ExecutorRules) -> Container | None:
    """Return how tasks with an image of their own are started; None if no program for that is named."""
    execution = blocks.execution
    if execution.container_engine is None or not executor.is_local:
        return None
    home = {str(Path.home()): str(Path.home())} if execution.mounts.mount_home else {}
    mounts = container_mounts(blocks.run.env, {**home, **execution.mounts.evaluation})
    return Container(
        image="",
        engine=execution.container_engine,
        options=tuple(shlex.split(execution.extra_docker_args or "")),
        mounts=tuple(map(str, mounts)),
    )


def _setup_lines(blocks: _Blocks) -> tuple[str, ...]:
    return (*(blocks.run.env.setup_lines or []), *(blocks.run.env.startup_commands or []))


def _visible_gpus(visible: bool | str | None) -> dict[str, str]:
    """Return the variables that hide GPUs of the job from the evaluation."""
    return {} if visible is None or visible is True else {"CUDA_VISIBLE_DEVICES": f"lit:{visible or ''}"}


def _resolve_output_path(options: RunOptions, cwd: Path, executor: ExecutorRules) -> RunOptions:
    if options.output_path is None or not executor.shares_files:
        return options
    return msgspec.structs.replace(options, output_path=str(cwd / Path(options.output_path).expanduser()))


def _check_flags(tree: Tree, execution: ExecutionBlock, findings: Findings) -> None:
    for name in execution.sbatch_extra_flags:
        flag = name.lstrip("-").replace("_", "-")
        if flag in RESERVED_FLAGS:
            findings.wrong(tree, ("execution", "sbatch_extra_flags", name), f"is reserved: {RESERVED_FLAGS[flag]}")


def _check_folders(
    tree: Tree, blocks: _Blocks, options: RunOptions, executor: ExecutorRules, findings: Findings
) -> None:
    for place, folder in (
        ("--output-path", options.output_path),
        (tree.where(("run", "env", "remote_job_dir")), blocks.run.env.remote_job_dir),
        (tree.where(("execution", "output_dir")), blocks.execution.output_dir),
    ):
        if folder is not None and (message := folder_problem(folder, executor)):
            findings.problems.append(Problem(place, message))


def _ssh_host(
    tree: Tree, blocks: _Blocks, environ: Mapping[str, str], executor: ExecutorRules, findings: Findings
) -> str | None:
    """Return the host to connect to; None to submit from this machine."""
    if executor.is_local:
        return None
    host, tunnel = blocks.execution.hostname, blocks.run.env.tunnel
    if tunnel == "ssh" and host is None:
        findings.wrong(tree, ("execution", "hostname"), 'is missing: tunnel = "ssh" needs a host to connect to')
    this_machine = (None, "localhost", "127.0.0.1", environ.get("HOSTNAME"))
    return host if (tunnel == "ssh" if tunnel else host not in this_machine) else None


def _add_exports(tree: Tree, names: Sequence[str]) -> None:
    """Add destinations from the command line to those of the configuration."""
    location = ("execution", "auto_export")
    if not names or not isinstance(tree.get("execution"), dict):
        return
    block = tree.get(*location)
    listed = block if isinstance(block, list) else block.get("destinations") if isinstance(block, dict) else None
    disabled = isinstance(block, dict) and block.get("enabled") is False
    destinations = [*(listed if isinstance(listed, list) and not disabled else []), *names]
    tree.put(location, list(dict.fromkeys(destinations)), COMMAND_LINE)


def _keep_selected(tree: Tree, tasks: Sequence[Task], eval_overrides: Sequence[Override]) -> None:
    """Leave only the selected tasks in the compiled configuration, with their files, so that it can be run again."""
    files = {(task.name, task.number): task.eval_file for task in tasks}
    listed: Location = ("evaluation", "tasks")
    numbers: dict[str, int] = {}
    kept: list[Tree] = []
    for index, data in enumerate(tree.get(*listed)):
        origin = tree.origin((*listed, index))
        entry = Tree({"name": data}, {(): origin}) if isinstance(data, str) else tree.below((*listed, index))
        name = entry.data["name"]
        number = numbers[name] = numbers.get(name, -1) + 1
        if (name, number) in files:
            entry.put(("eval",), str(files[name, number]), origin)
            for key, value in eval_overrides:
                entry.put(("overrides", ".".join(key)), value, COMMAND_LINE)
            kept.append(entry)
    tree.put(listed, [entry.data for entry in kept], tree.origin(listed))
    for index, entry in enumerate(kept):
        tree.origins.update({(*listed, index, *inner): origin for inner, origin in entry.origins.items()})
