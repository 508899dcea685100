"""From a compiled configuration to jobs: everything is put on the cluster, then submitted, and nothing twice.

`submit` begins an invocation, `start_attempt` goes on with one, from its files alone; `follow` shows how it goes.
"""

from __future__ import annotations

import getpass
import os
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

import holdfast
from holdfast.cluster import layout, local, squash
from holdfast.cluster.chain import Chain
from holdfast.cluster.environment import check_environment, host_value
from holdfast.cluster.layout import DeploymentFile, InvocationFile, State, TaskFile, TaskPlace
from holdfast.cluster.script import job_options, main_script, margin, worker_script
from holdfast.cluster.ship import collect, copies_in, ensure_python, needed_extras
from holdfast.cluster.slurm import Slurm
from holdfast.cluster.submission import Invocation, Ledger, Registry, Submitted, Submitter, new_invocation
from holdfast.cluster.transport import File, Ssh, Transport, way_to
from holdfast.cluster.tree import DEFAULT
from holdfast.cluster.walltime import walltime_seconds
from holdfast.errors import ClusterError, Unreachable, UsageError
from holdfast.formats import load_any
from holdfast.spec.document import read_document
from holdfast.store.files import slug

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from holdfast.cluster.config import Execution, Launch
    from holdfast.cluster.deployments import Deployment
    from holdfast.cluster.environment import EnvVar
    from holdfast.cluster.submission import Job, Record
    from holdfast.cluster.tasks import Task

_FOLLOW_SECONDS: Final = 1.0
_AGAIN_SECONDS: Final = 15.0
_ASK_SECONDS: Final = 5.0
"""how often Slurm is asked why a job waits"""
_LOST_SECONDS: Final = 60.0
"""how long a task may have no job, before whoever follows it is told"""


def transport_of(launch: Launch) -> Transport:
    """The way to where a launch runs."""
    where = launch.execution
    return way_to(where.hostname if where.ssh else None, where.username, where.identity)


def submit(
    launch: Launch,
    environ: Mapping[str, str],
    *,
    say: Callable[[str], None] = lambda _: None,
    force_squash: bool = False,
    transport: Transport | None = None,
    registry: Registry | None = None,
) -> Invocation:
    """Put everything in place, submit every task, and return what the registry now knows."""
    check_environment(launch.variables(), environ)
    transport = transport or transport_of(launch)
    registry = registry or Registry()
    base = _base(launch, transport)
    launch = _settled(launch, transport)
    python = _python(launch, transport, base, say)
    served = (launch.deployment, *launch.auxiliary)
    images = {each.name: _image(launch, each, transport, base, say, force=force_squash) for each in served}
    number = new_invocation()
    directory = f"{base}/holdfast/{number}"
    tasks = []
    for at, task in enumerate(launch.tasks):
        place = TaskPlace(directory, at)
        tasks.append((place, _task_file(launch, task, place, number, python, images, transport, base)))
    described = _invocation_file(launch, number, base)
    _put_invocation(transport, directory, described, tasks, _secrets(launch, environ))
    over_ssh = isinstance(transport, Ssh)
    known = Invocation(
        id=number,
        created=described.created,
        directory=directory,
        tasks=described.tasks,
        executor=launch.execution.executor,
        host=launch.execution.hostname if over_ssh else None,
        user=launch.execution.username if over_ssh else None,
        identity=launch.execution.identity if over_ssh else None,
        profile=described.profile,
    )
    registry.add(known)
    try:
        start_attempt(transport, directory, mirror=registry.mirror(number))
    except Unreachable as error:
        error.remedy = f"Everything is in place in {directory}; `holdfast resume {number}` submits what is not."
        raise
    except ClusterError as error:
        if not any(isinstance(record, Submitted) for record in registry.get(number).jobs):
            registry.remove(number)  # there is nothing to look after
            transport.run(["rm", "-rf", "--", directory])
        error.remedy = error.remedy or _what_was_asked(launch)
        raise
    return registry.get(number)


def _what_was_asked(launch: Launch) -> str:
    """Where everything is written that Slurm may refuse a job for."""
    names = ("partition", "account", "walltime", "num_nodes", "ntasks_per_node", "gres", "gpus_per_node")
    said = []
    for name in (*names, "sbatch_extra_flags"):
        value, origin = launch.tree.get("execution", name), launch.tree.origin(("execution", name))
        if value and (" ← " in origin or not origin.startswith(DEFAULT)):
            said.append(f"{name} {value} ({origin.rpartition(' ← ')[2]})")
    check = f"; `holdfast doctor {launch.profile.name}` tries them out" if launch.profile else ""
    return f"Slurm was asked for {', '.join(said) or 'nothing in particular'}{check}."


def start_attempt(
    transport: Transport,
    directory: str,
    *,
    tasks: Iterable[int] | None = None,
    mirror: Callable[[Sequence[Record]], None] | None = None,
) -> list[Job]:
    """Submit the tasks (all, if none is named) that are not done and have no live main job; from the files alone.

    Intents without an answer are settled first. `ClusterError` while somebody may still be submitting them.
    """
    invocation = _read(transport, directory)
    ledger = Ledger(transport, directory, mirror=mirror)
    submitter = Submitter(Slurm(transport), ledger) if invocation.executor == "slurm" else None
    if submitter is not None and any(job.open for job in ledger.jobs()):
        doubtful = submitter.reconcile().doubtful
        if doubtful:
            who = ", ".join(f"{job.intent.host} (pid {job.intent.pid})" for job in doubtful)
            raise ClusterError(
                f"{invocation.id} may be being submitted just now, by {who}",
                remedy="Wait two minutes, then give the same command again.",
            )
    started = []
    for number in range(len(invocation.tasks)) if tasks is None else tasks:
        place = TaskPlace(directory, number)
        state = layout.read_state(transport, place)
        if state.phase == "done":
            continue
        task = layout.read_task(transport, place)
        if submitter is None:
            if not local.live_jobs(ledger, number):
                _reset(transport, place, state)
                started.append(local.start(ledger, task, place))
            continue
        chain = Chain(submitter, invocation.id, place)
        if chain.live("main"):
            continue
        _reset(transport, place, state)
        # The workers first: a main job that begins at once and finds none would queue them too.
        if task.workers > 1 and not chain.live("workers"):
            started.append(chain.submit_workers())
        started.append(chain.submit_main())
    return started


def _read(transport: Transport, directory: str) -> InvocationFile:
    try:
        return layout.read_invocation(transport, directory)
    except FileNotFoundError:
        raise UsageError(f"{transport.place}: {directory} is no invocation: it has no invocation.json") from None


def _reset(transport: Transport, place: TaskPlace, state: State) -> None:
    """A task that has ended may begin again."""
    if state.phase in layout.OVER:
        fresh = msgspec.structs.replace(state, phase="waiting", reason="", exit_code=None, updated=time.time())
        script = 'umask 022; cat >"$1.new" && sync -- "$1.new" && mv -T -- "$1.new" "$1"'
        transport.check(["sh", "-c", script, "sh", place.state], input=layout.encode(fresh))


def follow(transport: Transport, invocation: Invocation, write: Callable[[str], None]) -> int:
    """Show the main logs of all tasks until all are over; the worst exit code of theirs."""
    followed = [_Followed(transport, invocation, number) for number in range(len(invocation.tasks))]
    while True:
        try:
            for each in followed:
                each.show(write)
        except Unreachable as error:
            write(f"[info] {error.message}; jobs are not affected by this, trying again")
            time.sleep(_AGAIN_SECONDS)
            continue
        if all(each.over for each in followed):
            return max((each.code for each in followed), default=0)
        time.sleep(_FOLLOW_SECONDS)


class _Followed:
    """One task that somebody watches."""

    def __init__(self, transport: Transport, invocation: Invocation, number: int) -> None:
        self._transport = transport
        self._invocation = invocation
        self._place = TaskPlace(invocation.directory, number)
        self._lead = f"[{invocation.tasks[number]}] " if len(invocation.tasks) > 1 else ""
        self._read: dict[str, int] = {}
        self._rest = b""
        self._seen = time.monotonic()
        self._asked = 0.0
        self._waits = ""
        self.over = False
        self.code = 3

    def show(self, write: Callable[[str], None]) -> None:
        """What is new, and whether that was all."""
        if self.over:
            return
        state = layout.read_state(self._transport, self._place)
        names = self._transport.run(["ls", self._place.logs]).text.split()
        for name in layout.logs_of(names, "main"):
            new = self._transport.read(f"{self._place.logs}/{name}", self._read.get(name, 0))
            self._read[name] = self._read.get(name, 0) + len(new)
            *lines, self._rest = (self._rest + new).split(b"\n")
            for line in lines:
                write(f"{self._lead}{line.decode(errors='replace')}")
        if state.phase in layout.OVER:
            self.over, self.code = True, 3 if state.exit_code is None else state.exit_code
            return
        if state.phase == "waiting" and self._invocation.executor == "slurm":
            self._say_why_it_waits(write)
        if state.updated and time.time() - state.updated < _LOST_SECONDS / 2:
            self._seen = time.monotonic()
        elif time.monotonic() - self._seen > _LOST_SECONDS:
            self._seen = time.monotonic()
            if not self._has_jobs():
                for name in layout.logs_of(names, "slurm")[-1:]:  # what was said before Python could say anything
                    said = self._transport.read(f"{self._place.logs}/{name}").decode(errors="replace")
                    write("\n".join(f"{self._lead}| {line}" for line in said.splitlines()[-15:]))
                write(f"{self._lead}no job of it is left; `holdfast resume {self._invocation.id}` goes on")
                self.over = True

    def _say_why_it_waits(self, write: Callable[[str], None]) -> None:
        """Slurm's reason in words, whenever it is another one."""
        if time.monotonic() - self._asked < _ASK_SECONDS:
            return
        self._asked = time.monotonic()
        ledger = Ledger(self._transport, self._invocation.directory)
        chain = Chain(Submitter(Slurm(self._transport), ledger), self._invocation.id, self._place)
        try:
            live = chain.live("main")
        except ClusterError as error:
            write(f"{self._lead}[info] why it waits cannot be asked: {error.message}")
            self._asked = float("inf")
            return
        waits = bool(live) and all(job.state == "pending" for job in live)
        why = f"job {live[0].handle} is pending: {live[0].why}" if waits and live[0].why else ""
        if why and why != self._waits:
            write(f"{self._lead}[info] {why}")
        self._waits = why or self._waits

    def _has_jobs(self) -> bool:
        ledger = Ledger(self._transport, self._invocation.directory)
        if self._invocation.executor != "slurm":
            return bool(local.live_jobs(ledger, self._place.number))
        return bool(Chain(Submitter(Slurm(self._transport), ledger), self._invocation.id, self._place).live("main"))


_AT_HOME: Final = 'case "$1" in "~"|"~/"*) set -- "$HOME${1#\\~}";; esac; '


def _base(launch: Launch, transport: Transport) -> str:
    """The folder for everything, absolute, and there."""
    wanted = launch.execution.remote_job_dir or str(Path.cwd() / ".holdfast")
    script = _AT_HOME + 'mkdir -p -- "$1" && cd -- "$1" && pwd'
    return transport.check(["sh", "-c", script, "sh", wanted]).text.strip()


def _settled(launch: Launch, transport: Transport) -> Launch:
    """With `~` of the cluster's folders spelt out, which nobody does later."""

    def spelt_out(path: str | None) -> str | None:
        if path is None or not path.startswith("~") or launch.execution.executor == "local":
            return path
        return transport.check(["sh", "-c", _AT_HOME + 'printf %s "$1"', "sh", path]).text

    return replace(
        launch,
        execution=replace(launch.execution, output_dir=spelt_out(launch.execution.output_dir)),
        options=msgspec.structs.replace(launch.options, output_path=spelt_out(launch.options.output_path)),
    )


def _python(launch: Launch, transport: Transport, base: str, say: Callable[[str], None]) -> str:
    """The interpreter of the jobs."""
    named = launch.env.python
    if named:
        done = transport.run([named, "-c", "import holdfast; print(holdfast.__version__)"])
        if done.code != 0:
            raise ClusterError(f"{transport.place}: {named} has no Holdfast: {done.stderr.strip().splitlines()[-1:]}")
        if done.text.strip() != holdfast.__version__:
            say(f"[info] {named} has Holdfast {done.text.strip()}, this is {holdfast.__version__}")
        return named
    if launch.execution.executor == "local":
        import sys

        return sys.executable
    specs = [load_any(read_document(task.eval_file), task.overrides) for task in launch.tasks]
    say(f"[info] Holdfast {holdfast.__version__} on {transport.place}: installed once per version")
    return ensure_python(transport, base, needed_extras(specs, launch.export.destinations))


def _image(
    launch: Launch, served: Deployment, transport: Transport, base: str, say: Callable[[str], None], *, force: bool
) -> str | None:
    """The image of a server, squashed where it is a reference and that can be done."""
    image = served.image
    if not served.serves or image is None or launch.execution.executor != "slurm":
        if force:
            say("[info] --force-squash: nothing is squashed, because no server is started in a container")
        return image
    if image.endswith(".sqsh"):
        if force:
            say(f"[info] --force-squash: {image} is squashed already; it is made anew from a Docker reference only")
        return image
    if transport.run(["sh", "-c", "srun --help | grep -q -e --container-image"]).code != 0:
        say(
            f"[info] no pyxis on {transport.place} (srun has no --container-image): {image} is neither squashed nor "
            "used, the server runs as a plain process of the node, with what is installed there"
        )
        return None
    return squash.ensure_image(transport, Slurm(transport), image, base, launch=launch, force=force, say=say)


def _variables(variables: Iterable[EnvVar]) -> dict[str, str]:
    return {variable.name: str(variable) for variable in variables}


def _gpus(visible: bool | str | None) -> dict[str, str]:
    """What the evaluation is told of the job's GPUs."""
    if visible is None or visible is True:
        return {}
    return {"CUDA_VISIBLE_DEVICES": f"lit:{visible or ''}"}


def _secrets(launch: Launch, environ: Mapping[str, str]) -> dict[str, str]:
    """Values by the names they have here: two parts may give one name to different ones."""
    found = {v.value: host_value(v, environ) for v in launch.variables() if v.kind == "host"}
    return {name: value for name, value in found.items() if value is not None}


def _task_file(
    launch: Launch,
    task: Task,
    place: TaskPlace,
    invocation: str,
    python: str,
    images: Mapping[str, str | None],
    transport: Transport,
    base: str,
) -> TaskFile:
    where = launch.execution
    spec = load_any(read_document(task.eval_file), task.overrides)
    bundle = collect(spec, task.eval_file)
    sent = bundle.send(transport, base)
    runs_dir = runs_place(launch, base)
    # What was read from another tool's file has the overrides in it already.
    overrides = () if bundle.translated else task.overrides
    copies = spec.folder.resolve() if where.executor == "local" else Path(runs_dir, slug(spec.name))
    return describe_task(
        launch,
        task,
        place,
        invocation=invocation,
        python=python,
        images=images,
        eval_file=f"{sent}/{bundle.eval_file}",
        runs_dir=runs_dir,
        overrides=(*overrides, *bundle.overrides(spec, sent), *copies_in(spec, copies)),
    )


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
        options=launch.options,
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


def _invocation_file(launch: Launch, number: str, base: str) -> InvocationFile:
    return InvocationFile(
        id=number,
        created=time.time(),
        user=getpass.getuser(),
        host=socket.gethostname(),
        holdfast=holdfast.__version__,
        executor=launch.execution.executor,
        profile=launch.profile.name if launch.profile else None,
        tasks=tuple(task.name for task in launch.tasks),
        base=base,
        config=launch.tree.data,
    )


def _put_invocation(
    transport: Transport,
    directory: str,
    described: InvocationFile,
    tasks: Sequence[tuple[TaskPlace, TaskFile]],
    secrets: Mapping[str, str],
) -> None:
    """The whole directory appears at once."""
    files = {
        "invocation.json": File(layout.encode(described)),
        "secrets.env": File(layout.write_secrets(secrets), 0o600),
    }
    for place, task in tasks:
        files[f"{place.number}/task.json"] = File(layout.encode(task))
        files[f"{place.number}/job.sh"] = File(main_script(task, place).encode(), 0o755)
        files[f"{place.number}/logs/.keep"] = File(b"")
        if task.workers > 1:
            files[f"{place.number}/worker.sh"] = File(worker_script(task, place).encode(), 0o755)
    arrived = transport.put(files, f"{Path(directory).parent}/arriving")
    transport.check(["sh", "-c", 'rm -f -- "$1/.whole" && mv -T -- "$1" "$2"', "sh", arrived, directory])


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
