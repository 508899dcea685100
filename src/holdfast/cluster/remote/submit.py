"""From a compiled configuration to jobs: everything is put on the cluster, then submitted, and nothing twice.

`submit` begins an invocation, `start_attempt` goes on with one, from its files alone.
"""

from __future__ import annotations

import getpass
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

import holdfast
from holdfast.cluster.config.provenance import DEFAULT
from holdfast.cluster.config.variables import check_environment, host_value
from holdfast.cluster.remote import images as squash
from holdfast.cluster.remote import invocation as layout
from holdfast.cluster.remote import local
from holdfast.cluster.remote.bundle import collect, copies_in
from holdfast.cluster.remote.chain import Chain
from holdfast.cluster.remote.describe import describe_task, runs_place
from holdfast.cluster.remote.install import ensure_python, needed_extras
from holdfast.cluster.remote.invocation import InvocationFile, State, TaskFile, TaskPlace
from holdfast.cluster.remote.ledger import Invocation, Ledger, Registry, Submitter, fold, new_invocation
from holdfast.cluster.remote.scripts import main_script, worker_script
from holdfast.cluster.remote.slurm import Slurm
from holdfast.cluster.remote.transport import File, Ssh, Transport, way_to
from holdfast.errors import ClusterError, Unreachable, UsageError
from holdfast.store.durable import slug

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from holdfast.cluster.config.launch import Launch
    from holdfast.cluster.config.servers import Deployment
    from holdfast.cluster.config.tasks import Task
    from holdfast.cluster.remote.ledger import Job, Record


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
        jobs = fold(registry.get(number).jobs)
        refused = [job for job in jobs if job.disowned is not None]
        said = [error.remedy or (_what_was_asked(launch) if refused else None)]
        if len(refused) < len(jobs):
            said.append(_what_is_left(number, jobs))
        else:  # there is nothing to look after
            registry.remove(number)
            transport.run(["rm", "-rf", "--", directory])
        error.remedy = "\n  ".join(filter(None, said)) or None
        raise
    return registry.get(number)


def _what_is_left(number: str, jobs: Sequence[Job]) -> str:
    """What to do where a submission ended halfway. An intent without an answer may be a job, so it counts as one."""
    known = [f"{job.intent.name} is job {job.id}" for job in jobs if job.id is not None]
    how = f"is submitted ({', '.join(known)})" if known else "may be submitted"
    return (
        f"Part of {number} {how}: `holdfast status {number}` shows it, `holdfast resume {number}` continues with the "
        f"rest, `holdfast kill {number}` ends it."
    )


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
                remedy="Wait two minutes, then run the same command again.",
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
        raise UsageError(f"{transport.place}: {directory} is not an invocation: it has no invocation.json") from None


def _reset(transport: Transport, place: TaskPlace, state: State) -> None:
    """A task that has ended may begin again."""
    if state.phase in layout.OVER:
        fresh = msgspec.structs.replace(state, phase="waiting", reason="", exit_code=None, updated=time.time())
        script = 'umask 022; cat >"$1.new" && sync -- "$1.new" && mv -T -- "$1.new" "$1"'
        transport.check(["sh", "-c", script, "sh", place.state], input=layout.encode(fresh))


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
    extras = needed_extras([task.spec for task in launch.tasks], launch.export.destinations)
    return ensure_python(transport, base, extras, say)


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
            say(f"[info] --force-squash: {image} is squashed already; it is made again from a Docker reference only")
        return image
    if transport.run(["sh", "-c", "srun --help | grep -q -e --container-image"]).code != 0:
        say(
            f"[info] no pyxis on {transport.place} (srun has no --container-image): {image} is neither squashed nor "
            "used, the server runs as a plain process of the node, with what is installed there"
        )
        return None
    return squash.ensure_image(transport, Slurm(transport), image, base, launch=launch, force=force, say=say)


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
    where, spec = launch.execution, task.spec
    bundle = collect(spec, task.eval_file, translated=task.translated)
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
