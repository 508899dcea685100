"""From a compiled configuration to jobs: everything is put on the cluster, then submitted, and nothing twice.

`submit` begins an invocation, `start_attempt` goes on with one, from its files alone; `follow` shows how it goes.
"""

from __future__ import annotations

import getpass
import importlib.util
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

import holdfast
from holdfast.cluster import layout, local
from holdfast.cluster.chain import Chain
from holdfast.cluster.environment import check_environment, host_value
from holdfast.cluster.layout import DeploymentFile, InvocationFile, State, TaskFile, TaskPlace
from holdfast.cluster.script import job_options, main_script, margin, worker_script
from holdfast.cluster.ship import collect, ensure_python, needed_extras
from holdfast.cluster.slurm import Slurm
from holdfast.cluster.submission import Invocation, Ledger, Registry, Submitter, new_invocation
from holdfast.cluster.transport import File, Ssh, Transport, way_to
from holdfast.cluster.walltime import walltime_seconds
from holdfast.errors import ClusterError, Unreachable, UsageError
from holdfast.spec.load import load_eval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from holdfast.cluster.config import Launch
    from holdfast.cluster.environment import EnvVar
    from holdfast.cluster.submission import Job, Record
    from holdfast.cluster.tasks import Task

_FOLLOW_SECONDS: Final = 1.0
_AGAIN_SECONDS: Final = 15.0
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
    _refuse(launch)
    transport = transport or transport_of(launch)
    registry = registry or Registry()
    base = _base(launch, transport)
    python = _python(launch, transport, base, say)
    launch_image = _image(launch, transport, base, say, force=force_squash)
    number = new_invocation()
    directory = f"{base}/holdfast/{number}"
    tasks = []
    for at, task in enumerate(launch.tasks):
        place = TaskPlace(directory, at)
        tasks.append((place, _task_file(launch, task, place, number, python, launch_image, transport, base)))
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
    return registry.get(number)


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

    def _has_jobs(self) -> bool:
        ledger = Ledger(self._transport, self._invocation.directory)
        if self._invocation.executor != "slurm":
            return bool(local.live_jobs(ledger, self._place.number))
        return bool(Chain(Submitter(Slurm(self._transport), ledger), self._invocation.id, self._place).live("main"))


def _refuse(launch: Launch) -> None:
    """What can be written and not be done."""
    if launch.deployment.instances > 1:
        raise UsageError(
            "execution.num_instances is above 1, and only one server per task can be started",
            remedy="Spread one server over the nodes, or run tasks side by side.",
        )


def _base(launch: Launch, transport: Transport) -> str:
    """The folder for everything, absolute, and there."""
    wanted = launch.execution.remote_job_dir or str(Path.cwd() / ".holdfast")
    script = 'case "$1" in "~"|"~/"*) set -- "$HOME${1#\\~}";; esac; mkdir -p -- "$1" && cd -- "$1" && pwd'
    return transport.check(["sh", "-c", script, "sh", wanted]).text.strip()


def _python(launch: Launch, transport: Transport, base: str, say: Callable[[str], None]) -> str:
    """The interpreter of the jobs."""
    named = launch.profile.fields.python if launch.profile else None
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
    specs = [load_eval(task.eval_file, task.overrides) for task in launch.tasks]
    say(f"[info] Holdfast {holdfast.__version__} on {transport.place}: installed once per version")
    return ensure_python(transport, base, needed_extras(specs, launch.export.destinations))


def _image(launch: Launch, transport: Transport, base: str, say: Callable[[str], None], *, force: bool) -> str | None:
    """The image of the server, squashed where it is a reference and that can be done."""
    image = launch.deployment.image
    if not launch.deployment.serves or image is None or launch.execution.executor != "slurm":
        return image
    if image.endswith(".sqsh") or importlib.util.find_spec("holdfast.cluster.squash") is None:
        return image
    if transport.run(["sh", "-c", "srun --help | grep -q -e --container-image"]).code != 0:
        say(f"[info] no pyxis on {transport.place}: {image} is not used, the server runs as a plain process")
        return None
    from holdfast.cluster import squash  # type: ignore[attr-defined,unused-ignore]

    path: str = squash.ensure_image(transport, Slurm(transport), image, base, launch=launch, force=force, say=say)
    return path


def _variables(variables: Iterable[EnvVar]) -> dict[str, str]:
    return {variable.name: str(variable) for variable in variables}


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
    image: str | None,
    transport: Transport,
    base: str,
) -> TaskFile:
    where = launch.execution
    spec = load_eval(task.eval_file, task.overrides)
    bundle = collect(spec, task.eval_file)
    sent = bundle.send(transport, base)
    return describe_task(
        launch,
        task,
        place,
        invocation=invocation,
        python=python,
        image=image,
        eval_file=f"{sent}/{bundle.eval_file}",
        runs_dir=where.output_dir if where.output_dir and where.executor == "slurm" else f"{base}/runs",
        overrides=(*task.overrides, *bundle.overrides(spec, sent)),
    )


def describe_task(
    launch: Launch,
    task: Task,
    place: TaskPlace,
    *,
    invocation: str,
    python: str,
    image: str | None,
    eval_file: str,
    runs_dir: str,
    overrides: tuple[tuple[tuple[str, ...], Any], ...],
) -> TaskFile:
    """A task as its jobs get it; without side effects, so that a preview can show it."""
    where, served = launch.execution, launch.deployment
    deployment = None
    if served.serves and served.command:
        deployment = DeploymentFile(
            command=served.command,
            pre_cmd=served.pre_cmd,
            image=image,
            mounts=tuple(map(str, served.mounts)),
            mount_home=where.mount_home,
            port=served.port,
            model=served.served_model_name,
            base_path=served.base_url("x").partition(f"x:{served.port}")[2],
            health_path=served.health_path,
            health_status=served.health_status,
            tasks=served.tasks,
            instances=served.instances,
            readiness_seconds=where.readiness_timeout,
            env=_variables(served.env),
        )
    main, worker = job_options(where, serves=deployment is not None)
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
        runs_dir=runs_dir,
        deployment=deployment,
        workers=where.workers,
        walltime=walltime_seconds(where.walltime),
        margin=margin(where.walltime),
        max_walltime=walltime_seconds(where.max_walltime) if where.max_walltime else None,
        env=_variables(task.env),
        export=launch.export.destinations,
        export_env=_variables(launch.export.env),
        export_config=settings,
        pre_cmd=task.pre_cmd,
        post_cmd=task.post_cmd,
        setup_lines=where.setup_lines,
        main_options=main,
        worker_options=worker,
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
    named = launch.profile.fields.python if launch.profile else None
    found = []
    for at, task in enumerate(launch.tasks):
        place = TaskPlace(f"{base}/holdfast/<id>", at)
        made = describe_task(
            launch,
            task,
            place,
            invocation="<id>",
            python=named or f"{base}/holdfast/env/<digest>/bin/python",
            image=launch.deployment.image,
            eval_file=f"{base}/holdfast/bundles/<digest>/{task.eval_file.name}",
            runs_dir=launch.execution.output_dir or f"{base}/runs",
            overrides=task.overrides,
        )
        worker = worker_script(made, place) if made.workers > 1 else None
        found.append(Preview(made, main_script(made, place), worker))
    return found
