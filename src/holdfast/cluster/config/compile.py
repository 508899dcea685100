"""A launch: what to serve, what to measure and where, compiled from a configuration and a profile, and checked.

`compile_launch` is the way in. It reads files and nothing else: no connection, no submission, no file written.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from holdfast.cluster.config.compose import compose, divide, find_config, known_executor, read_lone
from holdfast.cluster.config.launch import Execution, Export, Launch
from holdfast.cluster.config.legacy import MOVED, in_newer_words
from holdfast.cluster.config.no_effect import unused
from holdfast.cluster.config.options import RunOptions
from holdfast.cluster.config.profiles import Profile, ProfileBlock, WandbBlock, folder_problem, load_profile
from holdfast.cluster.config.provenance import COMMAND_LINE
from holdfast.cluster.config.schema import (
    DEPLOYMENTS,
    DESTINATIONS,
    DeploymentBlock,
    EvaluationBlock,
    ExecutionBlock,
    ExportBlock,
    LaunchBlock,
    RunBlock,
    TargetBlock,
)
from holdfast.cluster.config.servers import (
    Deployment,
    Mount,
    check_instances,
    check_ports,
    fill_references,
    missing_model,
    needed_nodes,
    over_gpus,
    prefix_of,
    read_auxiliary,
    served_version,
    server_command,
    server_env,
    server_mounts,
    settle_gpus,
    settle_nodes,
)
from holdfast.cluster.config.tasks import Endpoint, Task, TaskProvider, TaskReader, installed_providers
from holdfast.cluster.config.variables import WANDB_KEY, EnvVar, read_variables
from holdfast.errors import ConfigError, Problem
from holdfast.spec.overrides import parse_override
from holdfast.spec.schema import Block
from holdfast.spec.validation import suggest, validate_block

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.cluster.config.provenance import Tree
    from holdfast.spec.document import Location
    from holdfast.spec.overrides import Override

_Model = TypeVar("_Model", bound=Block)
SCOPES = ("deployment", "evaluation", "export")
PROJECT = "holdfast"
"""the subproject of those who name none"""
RESERVED_FLAGS = {
    **dict.fromkeys(("job-name", "J"), "jobs are found by their names; subproject goes into their comments"),
    "comment": "write execution.sbatch_comment",
    **dict.fromkeys(("output", "o", "error", "e", "open-mode"), "`holdfast logs` reads what jobs say"),
    **dict.fromkeys(("array", "a"), "write execution.workers"),
    **dict.fromkeys(("dependency", "d", "kill-on-invalid-dep"), "jobs wait for the ones they continue"),
    **dict.fromkeys(("parsable", "wait", "W", "test-only", "wrap"), "sbatch must answer with the job's id"),
}
"""options of sbatch that cannot be given, and what to do instead"""


def compile_launch(
    config: str | Path,
    profile_name: str | None = None,
    overrides: Sequence[str] = (),
    tasks: Sequence[str] = (),
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    detached: bool = False,
    laid: Sequence[Override] = (),
    options: RunOptions | None = None,
    exports: Sequence[str] = (),
    providers: Sequence[TaskProvider] | None = None,
) -> Launch:
    """The launch that `holdfast eval -c CONFIG --run PROFILE -t TASK … key=value …` asks for.

    `config` is a path or a name in the configuration folder, `profile_name` a table of env.toml (None: none, for a
    preview or a configuration that says everything itself), `detached` whether it is --batch rather than --run. `laid`
    are values for keys of every eval file, `exports` destinations beside those of execution.auto_export.

    Where `config` is an eval file the overrides are its own, but for those of the configuration's sections, and `tasks`
    are samples, as they are without a cluster. Raises UsageError or ConfigError, the latter with everything that is
    wrong, by file and line. Has no side effects.
    """
    cwd = Path.cwd() if cwd is None else cwd
    environ = os.environ if environ is None else environ
    path = find_config(config, cwd, environ)
    profile = None if profile_name is None else load_profile(profile_name, cwd, environ)
    if read_lone(path) is not None:
        overrides, inner = divide(overrides)
        chosen: list[Override] = [(("dataset", "ids"), list(tasks))] if tasks else []
        laid, tasks = (*chosen, *laid, *map(parse_override, inner)), ()
    composed = compose(path, overrides, profile, cwd, environ, detached=detached)
    notices = list(composed.notices)
    tree = in_newer_words(composed.tree, MOVED, notices)
    _also_export(tree, exports)
    reader = _Reader(tree, profile, [], notices, composed.used, tuple(laid))
    installed = installed_providers() if providers is None else providers
    return reader.launch(path, cwd, tasks, installed, environ, options or RunOptions())


@dataclass(frozen=True)
class _Reader:
    """A compiled configuration being checked; what is wrong is gathered, and raised at the end."""

    tree: Tree
    profile: Profile | None
    problems: list[Problem]
    notices: list[str]
    used: frozenset[str]
    """keys that others refer to"""
    laid: tuple[Override, ...]

    def launch(
        self,
        path: Path,
        cwd: Path,
        wanted: Sequence[str],
        providers: Sequence[TaskProvider],
        environ: Mapping[str, str],
        options: RunOptions,
    ) -> Launch:
        top = self.block(LaunchBlock)
        run = self.block(RunBlock, "run")
        execution = self.block(ExecutionBlock, "execution")
        deployment = self.block(DeploymentBlock, "deployment")
        self.block(EvaluationBlock, "evaluation")
        target = self.block(TargetBlock, "target")
        export = self.block(ExportBlock, "export") or ExportBlock()
        self.check_types()
        if not (top and run and execution and deployment):
            raise ConfigError(self.problems)

        execution = settle_nodes(self.tree, execution, deployment, self.problems, self.notices)
        execution = settle_gpus(self.tree, execution, self.problems)
        each = execution.num_nodes // execution.num_instances
        deployment = over_gpus(self.tree, deployment, ("deployment",), execution.gpus_per_node, each)
        served = self.deployment(deployment, execution, run.env)
        auxiliary = self.auxiliary(execution, run.env)
        if execution.type == "local":
            check_ports(self.tree, served, auxiliary, self.problems)
        fill_references(self.tree, auxiliary, self.problems)
        reader = TaskReader(
            tree=self.tree,
            endpoint=self.endpoint(deployment, target),
            shared_env=self.variables(run.env, "evaluation"),
            folder=path.parent,
            cwd=cwd,
            providers=providers,
            problems=self.problems,
            notices=self.notices,
            laid=self.laid,
            environ=environ,
            serves=served.serves,
        )
        self.refuse_another_model(served)
        tasks = reader.read(wanted)
        made = self.execution(execution, run.env, environ, needed_nodes(execution.num_nodes, served, auxiliary))
        self.notices.extend(unused(self.tree, self.used))
        if self.profile is not None and self.profile.foreign:
            names = ", ".join(self.profile.foreign)
            self.notices.append(f"{self.profile.place}: {names}: no effect here, because it is for dgxcloud and lepton")
        exports, wandb = self.export(execution, export, run)
        if options.output_path is not None and made.executor == "local":
            options = msgspec.structs.replace(options, output_path=str(cwd / Path(options.output_path).expanduser()))
        for place, folder in (
            ("--output-path", options.output_path),
            (self.tree.where(("run", "env", "remote_job_dir")), made.remote_job_dir),
            (self.tree.where(("execution", "output_dir")), made.output_dir),
        ):
            if folder is not None and (wrong := folder_problem(folder, made.executor)):
                self.problems.append(Problem(place, wrong))
        if self.problems:
            raise ConfigError(list(dict.fromkeys(self.problems)))
        self.keep_chosen(tasks)
        return Launch(
            name=path.stem,
            path=path,
            profile=self.profile,
            env=run.env,
            execution=made,
            deployment=served,
            auxiliary=auxiliary,
            tasks=tasks,
            export=exports,
            wandb=wandb,
            notices=tuple(dict.fromkeys(self.notices)),
            options=options,
            tree=self.tree,
        )

    def block(self, model: type[_Model], *location: str) -> _Model | None:
        data = self.tree.get(*location) if location else self.tree.data
        if data is None and location:
            return model.model_construct() if location[0] in ("target", "export") else None
        return cast("_Model | None", validate_block(model, data, location, self.tree, self.problems))

    def refuse_another_model(self, served: Deployment) -> None:
        if served.serves and any(key == ("target", "model") for key, _ in self.laid):
            said = "the model that is measured is the one that is served; name it with deployment.served_model_name=…"
            self.problems.append(Problem("command line: target.model", said))

    def check_types(self) -> None:
        wrong = known_executor(self.tree.get("execution", "type"))
        if wrong:
            self.problems.append(Problem(self.tree.where(("execution", "type")), wrong))
        kind = self.tree.get("deployment", "type")
        if kind not in DEPLOYMENTS:
            said = f"unknown type {kind!r}{suggest(str(kind), DEPLOYMENTS)}; one of {', '.join(DEPLOYMENTS)}"
            self.problems.append(Problem(self.tree.where(("deployment", "type")), said))

    def deployment(self, block: DeploymentBlock, execution: ExecutionBlock, env: ProfileBlock) -> Deployment:
        if block.type == "none":
            return Deployment("none", instances=0)
        made = self.served(block, ("deployment",), self.variables(env, "deployment"))
        return replace(
            made,
            instances=execution.num_instances,
            nodes=execution.num_nodes,
            tasks=execution.deployment.n_tasks,
            mounts=self.mounts(env, execution.mounts.deployment, made.mounts),
        )

    def auxiliary(self, execution: ExecutionBlock, env: ProfileBlock) -> tuple[Deployment, ...]:
        """The servers beside that of the model."""
        found = []
        for name, block, here in read_auxiliary(self.tree, self.problems):
            instances, nodes = block.num_instances, block.num_nodes or block.num_instances
            check_instances(self.tree, here, block, (instances, nodes), execution.type, self.problems)
            spread = over_gpus(self.tree, block, here, execution.gpus_per_node, nodes // instances)
            made = self.served(spread, here, self.variables(env, "auxiliary_deployments", name))
            made = replace(made, name=name, prefix=prefix_of(name, block), instances=instances, nodes=nodes)
            mounts = self.mounts(env, execution.mounts.auxiliary.get(name, {}), made.mounts)
            found.append(replace(made, tasks=block.n_tasks, mounts=mounts))
        return tuple(found)

    def served(self, block: DeploymentBlock, here: Location, env: dict[str, EnvVar]) -> Deployment:
        """A server as its block describes it, without what the job says of it."""
        if missing := missing_model(block):
            self.problems.append(Problem(self.tree.where(here), missing))
        if block.served_model_name is None and here == ("deployment",):
            said = "is not given: the server is asked for the model that each eval file names"
            self.notices.append(f"{self.tree.where((*here, 'served_model_name'))}: {said}")
        paths = {name: value for name, value in block.endpoints if value}
        return Deployment(
            type=block.type,
            image=block.image,
            command=server_command(block),
            pre_cmd=block.pre_cmd,
            port=block.port,
            served_model_name=block.served_model_name,
            checkpoint_path=block.checkpoint_path,
            endpoints=paths,
            health_path=block.health_check_path or paths.get("health", "/health"),
            health_status=block.health_check_status,
            mounts=server_mounts(block),
            env=tuple({**server_env(block), **env}.values()),
        )

    def endpoint(self, block: DeploymentBlock, target: TargetBlock | None) -> Endpoint:
        """What the tasks measure."""
        asked = (target or TargetBlock()).api_endpoint
        if block.type != "none":
            version = served_version(block)
            return Endpoint(block.served_model_name, None, asked.api_key_name, asked.type, asked.stream, version)
        return Endpoint(asked.model_id, asked.url, asked.api_key_name, asked.type, asked.stream)

    def variables(self, env: ProfileBlock, scope: str, *inner: str) -> dict[str, EnvVar]:
        """The variables of a scope: the profile's, those for all, the older dialect's, the scope's own."""
        found = read_variables(self.tree, ("run", "env", "env_vars"), self.problems, self.notices, bare="lit")
        older = self.tree.get("execution", "env_vars")
        if isinstance(older, dict):
            said = "is of the older dialect: write env_vars under deployment, evaluation and export"
            self.notices.append(f"{self.tree.where(('execution', 'env_vars'))}: {said}")
            for name in sorted(set(older) - set(SCOPES)):
                message = f"unknown key{suggest(name, SCOPES)}; known here: {', '.join(SCOPES)}"
                self.problems.append(Problem(self.tree.where(("execution", "env_vars", name)), message))
        for location in (("env_vars",), ("execution", "env_vars", scope), (scope, *inner, "env_vars")):
            found |= read_variables(self.tree, location, self.problems, self.notices)
        key = self.tree.get("target", "api_endpoint", "api_key_name")
        if scope == "evaluation" and isinstance(key, str):
            found.setdefault(
                key, EnvVar(key, "host", key, self.tree.origin(("target", "api_endpoint", "api_key_name")))
            )
        return found

    def mounts(self, env: ProfileBlock, own: dict[str, str], first: tuple[Mount, ...] = ()) -> tuple[Mount, ...]:
        """Mounts of one container; of two at the same place the configuration's wins over the profile's."""
        everywhere = [*(env.mounts or []), *([env.lustre_mount] if env.lustre_mount else [])]
        listed = [_mount(text) for text in everywhere] + list(first)
        for source, target in own.items():
            path, _, options = target.partition(":")
            listed.append(Mount(source, path, options))
        return tuple({mount.target: mount for mount in listed}.values())

    def execution(self, block: ExecutionBlock, env: ProfileBlock, environ: Mapping[str, str], nodes: int) -> Execution:
        output = block.output_dir
        if output is None and env.remote_job_dir and block.type == "slurm":
            output = f"{env.remote_job_dir}/evaluations"
        flags = {"exclusive": True, **block.sbatch_extra_flags} if env.exclusive else block.sbatch_extra_flags
        here = (None, "localhost", "127.0.0.1", environ.get("HOSTNAME"))
        ssh = env.tunnel == "ssh" if env.tunnel else block.hostname not in here
        if block.type == "slurm" and env.tunnel == "ssh" and block.hostname is None:
            said = 'is missing: tunnel = "ssh" needs a host to connect to'
            self.problems.append(Problem(self.tree.where(("execution", "hostname")), said))
        for name in block.sbatch_extra_flags:
            if _flag(name) in RESERVED_FLAGS:
                place = self.tree.where(("execution", "sbatch_extra_flags", name))
                self.problems.append(Problem(place, f"is reserved: {RESERVED_FLAGS[_flag(name)]}"))
        project = None if block.subproject == PROJECT else block.subproject
        lines = [*([env.setup_lines] if isinstance(env.setup_lines, str) else env.setup_lines or [])]
        return Execution(
            executor=block.type,
            ssh=ssh and block.type == "slurm",
            hostname=block.hostname,
            username=block.username,
            identity=env.identity,
            remote_job_dir=env.remote_job_dir,
            output_dir=output,
            account=block.account,
            partition=block.partition,
            cpu_partition=block.cpu_partition,
            walltime=block.walltime,
            max_walltime=block.max_walltime,
            nodes=nodes,
            tasks_per_node=block.ntasks_per_node,
            gres=block.gres,
            gpus_per_node=block.gpus_per_node,
            cpus_per_task=env.cpus_per_task,
            mem=None if env.mem is None else str(env.mem),
            sbatch_flags={name: value for name, value in flags.items() if value not in (None, False)},
            comment=" ".join(filter(None, (project, block.sbatch_comment))) or None,
            workers=block.workers,
            readiness_timeout=block.endpoint_readiness_timeout,
            mount_home=block.mounts.mount_home,
            setup_lines=(*lines, *(env.startup_commands or [])),
            auto_export=_destinations(block),
            gpu_visible=block.evaluation_gpu_visible,
            mode=block.mode,
        )

    def export(self, execution: ExecutionBlock, block: ExportBlock, run: RunBlock) -> tuple[Export, WandbBlock | None]:
        """Where results go, and W&B's project and entity where they go there."""
        destinations = _destinations(execution)
        for name in destinations:
            if name not in DESTINATIONS:
                said = f"unknown destination {name!r}{suggest(name, DESTINATIONS)}; one of {', '.join(DESTINATIONS)}"
                self.problems.append(Problem(self.tree.where(("execution", "auto_export")), said))
        if block.gsheets is not None:
            said = "not supported; use one of wandb, mlflow, local"
            self.problems.append(Problem(self.tree.where(("export", "gsheets")), said))
        env = self.variables(run.env, "export")
        if "wandb" not in destinations:
            return Export(destinations, block, tuple(env.values())), None
        project = (block.wandb.project if block.wandb else None) or run.wandb.project
        entity = (block.wandb.entity if block.wandb else None) or run.wandb.entity
        if project is None:
            said = "results go to W&B, and no project is named: write [wandb] project = … into env.toml"
            place = self.tree.where(("export", "wandb") if block.wandb else ("execution", "auto_export"))
            if self.profile is None:
                self.notices.append(f"{place}: {said}")
            else:
                self.problems.append(Problem(place, said))
        env.setdefault(WANDB_KEY, EnvVar(WANDB_KEY, "host", WANDB_KEY, "results go to W&B"))
        for key, value in (("project", project), ("entity", entity)):
            name, written = f"WANDB_{key.upper()}", ("export" if block.wandb else "run", "wandb", key)
            if value is not None:
                env.setdefault(name, EnvVar(name, "lit", value, self.tree.origin(written)))
        return Export(destinations, block, tuple(env.values())), WandbBlock(project=project, entity=entity)

    def keep_chosen(self, tasks: tuple[Task, ...]) -> None:
        """Leave the chosen tasks in the compiled configuration, each with its file, so that it can be run again."""
        listed: list[Any] = self.tree.get("evaluation", "tasks")
        files = {(task.name, task.number): task.eval_file for task in tasks}
        numbers: dict[str, int] = {}
        kept: list[tuple[Any, str]] = []
        for at, raw in enumerate(listed):
            entry: dict[str, Any] = {"name": raw} if isinstance(raw, str) else raw
            number = numbers[entry["name"]] = numbers.get(entry["name"], -1) + 1
            if (entry["name"], number) in files:
                file = str(files[entry["name"], number])
                said = {".".join(key): value for key, value in self.laid}
                laid = {"overrides": {**(entry.get("overrides") or {}), **said}} if said else {}
                kept.append((entry | {"eval": file} | laid, self.tree.origin(("evaluation", "tasks", at))))
        self.tree.put(("evaluation", "tasks"), [entry for entry, _ in kept], self.tree.origin(("evaluation", "tasks")))
        for at, (entry, origin) in enumerate(kept):
            self.tree.put(("evaluation", "tasks", at), entry, origin)


def _also_export(tree: Tree, names: Sequence[str]) -> None:
    """Destinations from the command line, beside those that the configuration has."""
    here = ("execution", "auto_export")
    if not names or not isinstance(tree.get("execution"), dict):
        return
    block = tree.get(*here)
    known = block if isinstance(block, list) else block.get("destinations") if isinstance(block, dict) else None
    off = isinstance(block, dict) and block.get("enabled") is False
    listed = [*(known if isinstance(known, list) and not off else []), *names]
    tree.put(here, list(dict.fromkeys(listed)), COMMAND_LINE)


def _destinations(block: ExecutionBlock) -> tuple[str, ...]:
    return tuple(dict.fromkeys(block.auto_export.destinations)) if block.auto_export.enabled else ()


def _flag(name: str) -> str:
    return name.lstrip("-").replace("_", "-")


def _mount(text: str) -> Mount:
    source, _, rest = text.partition(":")
    target, _, options = rest.partition(":")
    return Mount(source, target or source, options)
