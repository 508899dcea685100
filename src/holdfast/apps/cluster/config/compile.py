"""Compile a configuration and a profile into a launch: which models to serve and to measure, on which machines.

`compile_launch` reads files and does nothing else: no connection, no submission, no file written.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from holdfast.apps.cluster.config.compose import compose, find_config, read_config, split_overrides
from holdfast.apps.cluster.config.executor import executor_problem, load_executor
from holdfast.apps.cluster.config.launch import Container, Launch, Server, TaskFile
from holdfast.apps.cluster.config.no_effect import keys_without_effect
from holdfast.apps.cluster.config.profiles import folder_problem, load_profile
from holdfast.apps.cluster.config.schema import (
    DEPLOYMENTS,
    DESTINATIONS,
    ApiEndpoint,
    AuxiliaryBlock,
    DeploymentBlock,
    EvaluationBlock,
    ExecutionBlock,
    LaunchBlock,
    LaunchExportBlock,
    LaunchTargetBlock,
    RunBlock,
    WandbBlock,
    walltime_seconds,
)
from holdfast.apps.cluster.config.servers import (
    auxiliary_blocks,
    check_ports,
    container_mounts,
    default_model,
    fill_base_command,
    fill_references,
    needed_nodes,
    read_auxiliaries,
    read_deployment,
    served_version,
    settle_gpus,
    settle_nodes,
    spread_over_gpus,
)
from holdfast.apps.cluster.config.tasks import MOVED, Endpoint, TaskReader, move_keys
from holdfast.apps.cluster.config.tree import COMMAND_LINE, Tree
from holdfast.apps.cluster.config.variables import WANDB_KEY, EnvVar, add_wandb_server, place_wandb_server, read_scope
from holdfast.errors import Problem, suggest
from holdfast.spec.document import format_location
from holdfast.spec.formats import is_eval
from holdfast.spec.load import parse_override
from holdfast.spec.schema import Block, Findings, validate_block
from holdfast.spec.suite import Suite, find_evals
from holdfast.store.rundir import RunPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.apps.cluster.config.executor import ExecutorRules
    from holdfast.apps.cluster.config.launch import Task
    from holdfast.apps.cluster.config.profiles import Profile
    from holdfast.spec.document import Document, Location
    from holdfast.spec.formats import TaskProvider
    from holdfast.spec.load import Override

_Model = TypeVar("_Model", bound=Block)
RESERVED_FLAGS = {
    **dict.fromkeys(("job-name", "J"), "jobs are found by their names; subproject goes into their comments"),
    "comment": "write execution.sbatch_comment",
    **dict.fromkeys(("output", "o", "error", "e", "open-mode"), "`holdfast logs` reads what jobs print"),
    **dict.fromkeys(("array", "a"), "write execution.workers"),
    **dict.fromkeys(("dependency", "d", "kill-on-invalid-dep"), "jobs wait for the ones they continue"),
    **dict.fromkeys(("parsable", "wait", "W", "test-only", "wrap"), "sbatch must answer with the job's id"),
}
"""options of sbatch that users cannot set, and what to do instead"""


@dataclass(frozen=True)
class LaunchRequest:
    """The arguments of `holdfast eval -c CONFIG --run PROFILE -t TASK … key=value …`."""

    config: str | Path | Suite
    """a path, a name in the configuration folder, or a suite"""
    profile: str | None = None
    """a table of env.toml; None for a preview, or for a configuration that needs no profile"""
    overrides: Sequence[str] = ()
    """`key=value`; if `config` is an eval file or a suite, keys outside a configuration's sections are the evals'"""
    tasks: Sequence[str] = ()
    """the tasks to run; if `config` is an eval file or a suite, the samples, as without a cluster"""
    eval_overrides: Sequence[Override] = ()
    """apply to every eval file"""
    exports: Sequence[str] = ()
    """destinations in addition to execution.auto_export"""
    options: RunPolicy = field(default_factory=RunPolicy)
    detached: bool = False
    """True for --batch, False for --run"""
    cwd: Path = field(default_factory=Path.cwd)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    providers: Sequence[TaskProvider] | None = None
    """look up tasks by name; None: the providers of installed packages"""


def compile_launch(request: LaunchRequest) -> Launch:
    """Compile the launch that a command asks for.

    Compose the configuration, read its sections, describe what all jobs share, read the tasks, and check the whole.
    Raises UsageError or ConfigError, the latter with everything that is wrong, by file and line. Has no side effects.
    """
    source = _find_source(request)
    config = _read_sections(request, source)
    job = _describe_job(config)
    tasks = _read_tasks(config, job)
    _check(config, job)
    _keep_selected(config.tree, tasks, source.eval_overrides)
    return Launch(
        name=source.path.stem,
        path=source.path,
        profile=source.profile,
        env=config.run.env,
        execution=config.execution,
        executor=config.executor,
        host=_ssh_host(config),
        nodes=job.nodes,
        tasks=tasks,
        shared=job.shared,
        variables=(*job.variables, *(variable for task in tasks for variable in task.variables)),
        notices=config.findings.notices,
        tree=config.tree,
    )


@dataclass(frozen=True)
class _Source:
    """The files that a request names, and its overrides, separated."""

    path: Path
    profile: Profile | None
    suite: Suite | None
    document: Document | None
    """the content of `path`; None for a suite"""
    overrides: Sequence[str]
    """of the configuration"""
    eval_overrides: tuple[Override, ...]
    selection: Sequence[str]
    """the tasks to run; all if empty"""


def _find_source(request: LaunchRequest) -> _Source:
    """Find the files, and separate the overrides of evals from the configuration's."""
    config = request.config
    suite = config if isinstance(config, Suite) else None
    path = _suite_path(config) if isinstance(config, Suite) else find_config(config, request.cwd, request.environ)
    profile = None if request.profile is None else load_profile(request.profile, request.cwd, request.environ)
    document = None if suite is not None else read_config(path, request.cwd)
    overrides, selection, eval_overrides = request.overrides, request.tasks, tuple(request.eval_overrides)
    if document is None or is_eval(document.data):
        overrides, inner = split_overrides(overrides)
        samples: list[Override] = [(("dataset", "ids"), list(selection))] if selection else []
        eval_overrides, selection = (*samples, *eval_overrides, *map(parse_override, inner)), ()
    return _Source(path, profile, suite, document, overrides, eval_overrides, selection)


def _suite_path(suite: Suite) -> Path:
    """Return the file that stands for a suite: its own, or its first eval's."""
    return find_evals(suite)[0] if suite.document is None or suite.document.path is None else suite.document.path


@dataclass(frozen=True)
class _Configuration:
    """A composed configuration, with its sections and what was found in them."""

    request: LaunchRequest
    source: _Source
    tree: Tree
    used: frozenset[str]
    """keys that other values refer to"""
    findings: Findings
    executor: ExecutorRules
    run: RunBlock
    execution: ExecutionBlock
    deployment: DeploymentBlock
    target: LaunchTargetBlock
    export: LaunchExportBlock

    @property
    def destinations(self) -> tuple[str, ...]:
        """The destinations of finished runs."""
        automatic = self.execution.auto_export
        return tuple(dict.fromkeys(automatic.destinations)) if automatic.enabled else ()


def _read_sections(request: LaunchRequest, source: _Source) -> _Configuration:
    """Compose and validate the sections; raises ConfigError if one of them cannot be read."""
    composed = compose(
        source.path,
        source.overrides,
        source.profile,
        request.cwd,
        request.environ,
        detached=request.detached,
        suite=source.suite,
        document=source.document,
    )
    findings = Findings(composed.notices)
    tree = move_keys(composed.tree, MOVED, findings)
    _add_exports(tree, request.exports)
    _drop_own_keys(tree, composed.used, findings)

    validate_block(LaunchBlock, tree.data, (), tree, findings.problems)
    _read_block(tree, findings, EvaluationBlock, "evaluation")
    run = _read_block(tree, findings, RunBlock, "run")
    execution = _read_block(tree, findings, ExecutionBlock, "execution")
    deployment = _read_block(tree, findings, DeploymentBlock, "deployment")
    target = _read_block(tree, findings, LaunchTargetBlock, "target") or LaunchTargetBlock()
    export = _read_block(tree, findings, LaunchExportBlock, "export") or LaunchExportBlock()
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
    executor = load_executor(execution.type)
    return _settle(
        _Configuration(
            request, source, tree, composed.used, findings, executor, run, execution, deployment, target, export
        )
    )


def _read_block(tree: Tree, findings: Findings, model: type[_Model], section: str) -> _Model | None:
    data = tree.get(section)
    if data is None:
        return None
    return cast("_Model | None", validate_block(model, data, (section,), tree, findings.problems))


def _add_exports(tree: Tree, names: Sequence[str]) -> None:
    """Add destinations from the command line to the configuration's."""
    location = ("execution", "auto_export")
    if not names or not isinstance(tree.get("execution"), dict):
        return
    block = tree.get(*location)
    listed = block if isinstance(block, list) else block.get("destinations") if isinstance(block, dict) else None
    disabled = isinstance(block, dict) and block.get("enabled") is False
    destinations = [*(listed if isinstance(listed, list) and not disabled else []), *names]
    tree.put(location, list(dict.fromkeys(destinations)), COMMAND_LINE)


def _drop_own_keys(tree: Tree, used: frozenset[str], findings: Findings) -> None:
    """Remove user-defined keys; interpolation has already copied their values.

    In the block of a server, such a key without a reference is noted, unless it looks like a misspelt key.
    """
    for name in [key for key in tree.data if key not in LaunchBlock.known_keys() and key in used]:
        tree.remove((name,))
    named = tree.get("auxiliary_deployments")
    servers: list[tuple[Location, type[DeploymentBlock]]] = [(("deployment",), DeploymentBlock)]
    servers += [
        (("auxiliary_deployments", name), AuxiliaryBlock) for name in (named if isinstance(named, dict) else ())
    ]
    for location, model in servers:
        block, fields = tree.get(*location), model.known_keys()
        for name in [key for key in block if key not in fields] if isinstance(block, dict) else ():
            place = (*location, name)
            if format_location(place) not in used:
                if any(abs(len(name) - len(other)) <= 2 for other in get_close_matches(name, fields, n=1)):
                    continue
                findings.notice(tree, place, "no effect here, because nothing refers to it")
            tree.remove(place)


def _settle(config: _Configuration) -> _Configuration:
    """Make numbers of nodes, instances and GPUs fit together, and fill in the output folder and the W&B server."""
    tree, executor, findings = config.tree, config.executor, config.findings
    execution = settle_nodes(tree, config.execution, config.deployment, executor, findings)
    serves = config.deployment.type != "none" or any(auxiliary_blocks(tree, Findings()))
    execution = settle_gpus(tree, execution, executor, findings, serves=serves)
    base = config.run.env.remote_job_dir
    if execution.output_dir is None and base and not executor.shares_files:
        execution = execution.model_copy(update={"output_dir": f"{base}/evaluations"})
    nodes = execution.num_nodes // execution.num_instances
    deployment = spread_over_gpus(tree, config.deployment, ("deployment",), execution.gpus_per_node, nodes, findings)
    deployment = fill_base_command(tree, deployment)
    place_wandb_server(tree, config.request.environ, exports="wandb" in config.destinations)
    return replace(config, execution=execution, deployment=deployment)


@dataclass(frozen=True)
class _Job:
    """The settings that all jobs of a launch share."""

    shared: TaskFile
    nodes: int
    variables: tuple[EnvVar, ...]
    """of servers and exports"""


def _describe_job(config: _Configuration) -> _Job:
    """Describe servers, exports and options of jobs."""
    tree, execution, env = config.tree, config.execution, config.run.env
    deployment, server_variables = read_deployment(tree, config.deployment, execution, env, config.findings)
    auxiliary: list[Server] = []
    for server, variables in read_auxiliaries(tree, execution, env, config.executor, config.findings):
        auxiliary.append(server)
        server_variables += variables
    servers = (*(() if deployment is None else (deployment,)), *auxiliary)
    if not config.executor.allocates_nodes:
        check_ports(tree, servers, config.findings)
    fill_references(tree, auxiliary, config.findings)
    nodes = needed_nodes(execution.num_nodes, servers)
    export_env, export_config = _read_exports(config)
    main_options, worker_options = config.executor.job_options(execution, env, nodes=nodes, serves=bool(servers))
    shared = TaskFile(
        executor=execution.type,
        mode=execution.mode,
        options=_resolve_output_path(config),
        deployment=deployment,
        auxiliary=tuple(auxiliary),
        workers=execution.workers,
        walltime=walltime_seconds(execution.walltime),
        margin=execution.margin,
        max_walltime=walltime_seconds(execution.max_walltime) if execution.max_walltime else None,
        env=_visible_gpus(execution.evaluation_gpu_visible),
        export=config.destinations,
        export_env={variable.name: str(variable) for variable in export_env.values()},
        export_config=export_config,
        pre_cmd=tree.get("evaluation", "pre_cmd"),
        post_cmd=tree.get("evaluation", "post_cmd"),
        setup_lines=(*(env.setup_lines or []), *(env.startup_commands or [])),
        main_options=main_options,
        worker_options=worker_options,
    )
    return _Job(shared, nodes, (*server_variables, *export_env.values()))


def _read_exports(config: _Configuration) -> tuple[dict[str, EnvVar], dict[str, Any]]:
    """Return the variables and the settings of exports; W&B also needs a login and a project."""
    tree, findings, block = config.tree, config.findings, config.export
    for name in config.destinations:
        if name not in DESTINATIONS:
            message = f"unknown destination {name!r}{suggest(name, DESTINATIONS)}; one of {', '.join(DESTINATIONS)}"
            findings.wrong(tree, ("execution", "auto_export"), message)
    if block.gsheets is not None:
        findings.wrong(tree, ("export", "gsheets"), "not supported; use one of wandb, mlflow, local")
    variables = read_scope(tree, findings, "export")
    written = block.model_dump(exclude_none=True, exclude_unset=True)
    settings = {name: written.get(name, {}) for name in config.destinations}
    if "wandb" in config.destinations:
        settings["wandb"] |= _read_wandb(config, variables)
    return variables, settings


def _read_wandb(config: _Configuration, variables: dict[str, EnvVar]) -> dict[str, Any]:
    """Return project and entity on W&B, from `export.wandb` or else the profile, and add them to the variables."""
    tree, block, profile = config.tree, config.export.wandb, config.run.wandb
    wandb = WandbBlock(
        project=(block.project if block else None) or profile.project,
        entity=(block.entity if block else None) or profile.entity,
    )
    if wandb.project is None:
        message = "results go to W&B, and no project is named: write [wandb] project = … into env.toml"
        report = config.findings.notice if config.source.profile is None else config.findings.wrong
        report(tree, ("export", "wandb") if block else ("execution", "auto_export"), message)
    variables.setdefault(WANDB_KEY, EnvVar(WANDB_KEY, "host", WANDB_KEY, "results go to W&B"))
    add_wandb_server(tree, variables)
    for key, value in wandb:
        if value is not None:
            origin = tree.origin(("export" if block else "run", "wandb", key))
            name = f"WANDB_{key.upper()}"
            variables.setdefault(name, EnvVar(name, "lit", value, origin))
    return wandb.model_dump(exclude_none=True)


def _visible_gpus(visible: bool | str | None) -> dict[str, str]:
    """Return the variables that hide GPUs of the job from the evaluation."""
    return {} if visible is None or visible is True else {"CUDA_VISIBLE_DEVICES": f"lit:{visible or ''}"}


def _resolve_output_path(config: _Configuration) -> RunPolicy:
    """Return the options of runs, with an absolute folder for results on this machine."""
    options = config.request.options
    if options.output_path is None or not config.executor.shares_files:
        return options
    return msgspec.structs.replace(
        options, output_path=str(config.request.cwd / Path(options.output_path).expanduser())
    )


def _read_tasks(config: _Configuration, job: _Job) -> tuple[Task, ...]:
    """Read the selected tasks."""
    source = config.source
    reader = TaskReader(
        tree=config.tree,
        findings=config.findings,
        shared=job.shared,
        endpoint=_endpoint(config.deployment, config.target.api_endpoint),
        variables=read_scope(config.tree, config.findings, "evaluation"),
        container=_evaluation_container(config),
        folder=source.path.parent,
        cwd=config.request.cwd,
        providers=config.request.providers,
        overrides=source.eval_overrides,
        environ=config.request.environ,
    )
    return reader.read(source.selection)


def _endpoint(block: DeploymentBlock, asked: ApiEndpoint) -> Endpoint:
    """Return the model that the tasks measure."""
    serves = block.type != "none"
    return Endpoint(
        model=block.served_model_name if serves else asked.model_id,
        default_model=default_model(block) if serves else None,
        base_url=None if serves else asked.url,
        api_key_env=asked.api_key_name,
        type=asked.type,
        stream=asked.stream,
        version=served_version(block),
    )


def _evaluation_container(config: _Configuration) -> Container | None:
    """Return how tasks with an image of their own are started; None if no program for that is named."""
    execution = config.execution
    if execution.container_engine is None or not config.executor.is_local:
        return None
    home = {str(Path.home()): str(Path.home())} if execution.mounts.mount_home else {}
    return Container(
        image="",
        engine=execution.container_engine,
        options=tuple(shlex.split(execution.extra_docker_args or "")),
        mounts=container_mounts(config.run.env, {**home, **execution.mounts.evaluation}),
    )


def _check(config: _Configuration, job: _Job) -> None:
    """Check sections against each other, note keys without effect, and raise ConfigError if anything is wrong."""
    tree, findings, source = config.tree, config.findings, config.source
    changes_target = any(key == ("target", "model") for key, _ in source.eval_overrides)
    if job.shared.deployment is not None and (changes_target or (source.suite is not None and source.suite.targets)):
        message = "the served model is the one evaluated; set deployment.served_model_name=…"
        findings.problems.append(Problem("command line: target.model", message))
    for name in config.execution.sbatch_extra_flags:
        flag = name.lstrip("-").replace("_", "-")
        if flag in RESERVED_FLAGS:
            findings.wrong(tree, ("execution", "sbatch_extra_flags", name), f"is reserved: {RESERVED_FLAGS[flag]}")
    for place, folder in (
        ("--output-path", job.shared.options.output_path),
        (tree.where(("run", "env", "remote_job_dir")), config.run.env.remote_job_dir),
        (tree.where(("execution", "output_dir")), config.execution.output_dir),
    ):
        if folder is not None and (message := folder_problem(folder, config.executor) or ""):
            findings.problems.append(Problem(place, message))
    if not config.executor.is_local and config.run.env.tunnel == "ssh" and config.execution.hostname is None:
        findings.wrong(tree, ("execution", "hostname"), 'is missing: tunnel = "ssh" needs a host to connect to')
    findings.add_notices(keys_without_effect(tree, config.used, config.executor))
    if source.profile is not None and source.profile.foreign:
        names = ", ".join(source.profile.foreign)
        findings.add_notices(
            [f"{source.profile.place}: {names}: no effect here, because it is for dgxcloud and lepton"]
        )
    findings.raise_problems()


def _ssh_host(config: _Configuration) -> str | None:
    """Return the host to connect to; None to submit from this machine."""
    if config.executor.is_local:
        return None
    host, tunnel = config.execution.hostname, config.run.env.tunnel
    this_machine = (None, "localhost", "127.0.0.1", config.request.environ.get("HOSTNAME"))
    return host if (tunnel == "ssh" if tunnel else host not in this_machine) else None


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
