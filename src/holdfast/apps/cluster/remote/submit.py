"""Submit a compiled configuration: put everything on the cluster, then start the jobs, and nothing twice.

`submit` begins an invocation, `start_jobs` continues one, only from its files. `preview` and `RunPreviews` show what
would be submitted and what already exists, and write nothing, here or on the cluster.
"""

from __future__ import annotations

import getpass
import os
import socket
import sys
import time
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

import holdfast
from holdfast.apps.cluster.config.launch import TaskFile
from holdfast.apps.cluster.config.tree import DEFAULT
from holdfast.apps.cluster.config.variables import check_environment, host_values
from holdfast.apps.cluster.remote import invocation as layout
from holdfast.apps.cluster.remote.bundle import collect, copies_in, send_bundles
from holdfast.apps.cluster.remote.chain import main_script, worker_script
from holdfast.apps.cluster.remote.executor import find_executor, select_main_jobs
from holdfast.apps.cluster.remote.images import ensure_image, import_options
from holdfast.apps.cluster.remote.install import ensure_python, needed_extras
from holdfast.apps.cluster.remote.invocation import InvocationFile, State, TaskFolder
from holdfast.apps.cluster.remote.ledger import Ledger, fold, hold_turn, jobs_in
from holdfast.apps.cluster.remote.registry import Invocation, InvocationRegistry, new_invocation
from holdfast.apps.cluster.remote.slurm import Slurm
from holdfast.apps.cluster.remote.transport import Ssh, Transport, connect
from holdfast.apps.cluster.remote.trees import SourceFile
from holdfast.engine.session import Options, preview_run
from holdfast.errors import ClusterError, DataError, HoldfastError, Unreachable, UsageError
from holdfast.plan.changes import format_count
from holdfast.plan.identity import identify
from holdfast.store.files import slug

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from holdfast.apps.cluster.config.launch import Launch, Server, Task
    from holdfast.apps.cluster.remote.ledger import Job, Record
    from holdfast.plan.plan import Plan

_LOOK_SECONDS: Final = 30.0
"""time limit of a look at a run on the cluster, for a preview"""


def connect_launch(launch: Launch, **options: Any) -> Transport:
    """Return the transport to the machine on which a launch is submitted."""
    return connect(launch.host, launch.execution.username, launch.env.identity, **options)


def submit(
    launch: Launch,
    environ: Mapping[str, str],
    *,
    say: Callable[[str], None] = lambda _: None,
    force_squash: bool = False,
    transport: Transport | None = None,
    registry: InvocationRegistry | None = None,
) -> Invocation:
    """Put everything in place, submit every task, and return the registry's entry."""
    check_environment(launch.variables, environ)
    transport = transport or connect_launch(launch)
    registry = registry or InvocationRegistry()
    base = _make_base(launch, transport)
    launch = _expand_home(launch, transport)
    python = _find_python(launch, transport, base, say)
    images = {
        server.name: _find_image(launch, server, transport, base, say, force=force_squash) for server in launch.servers
    }
    if force_squash and not launch.servers:
        say("note: --force-squash: no image is imported, because no server is started in a container")
    number = new_invocation()
    directory = f"{base}/holdfast/{number}"
    tasks = _send_tasks(launch, directory, number, python, images, transport, base)
    invocation_file = _invocation_file(launch, number, base)
    _put_invocation(transport, directory, invocation_file, tasks, _secrets(launch, environ))
    over_ssh = isinstance(transport, Ssh)
    invocation = Invocation(
        id=number,
        created=invocation_file.created,
        directory=directory,
        tasks=invocation_file.tasks,
        executor=launch.execution.type,
        host=launch.execution.hostname if over_ssh else None,
        user=launch.execution.username if over_ssh else None,
        identity=launch.env.identity if over_ssh else None,
        profile=invocation_file.profile,
    )
    registry.add(invocation)
    try:
        start_jobs(transport, directory, mirror=registry.mirror(number))
    except Unreachable as error:
        error.remedy = f"Everything is in place in {directory}; `holdfast resume {number}` submits the rest."
        raise
    except ClusterError as error:
        error.remedy = _settle_refusal(error, launch, registry.get(number), registry, transport)
        raise
    return registry.get(number)


def _settle_refusal(
    error: ClusterError, launch: Launch, invocation: Invocation, registry: InvocationRegistry, transport: Transport
) -> str | None:
    """Return what to do after a refusal. An invocation of which nothing was submitted is removed."""
    jobs = fold(invocation.jobs)
    refused = [job for job in jobs if job.disowned is not None]
    remedies = [error.remedy or (_describe_request(launch) if refused else None)]
    if len(refused) < len(jobs):
        remedies.append(_describe_partial(invocation.id, jobs))
    else:
        registry.remove(invocation.id)
        transport.run(["rm", "-rf", "--", invocation.directory])
    return "\n  ".join(filter(None, remedies)) or None


def _describe_partial(number: str, jobs: Sequence[Job]) -> str:
    """Describe what to do after a partial submission. An intent without an answer may be a job, so it counts as one."""
    submitted = [f"{job.intent.name} is job {job.id}" for job in jobs if job.id is not None]
    how = f"is submitted ({', '.join(submitted)})" if submitted else "may be submitted"
    return (
        f"Part of {number} {how}: `holdfast status {number}` shows it, `holdfast resume {number}` continues with the "
        f"rest, `holdfast kill {number}` ends it."
    )


def _describe_request(launch: Launch) -> str:
    """List everything that Slurm may refuse a job for, with its place."""
    names = ("partition", "account", "walltime", "num_nodes", "ntasks_per_node", "gres", "gpus_per_node")
    parts = []
    for name in (*names, "sbatch_extra_flags"):
        value, origin = launch.tree.get("execution", name), launch.tree.origin(("execution", name))
        asks = name in ("gres", "sbatch_extra_flags") or " ← " in origin or not origin.startswith(DEFAULT)
        if value and asks:
            parts.append(f"{name} {value} ({origin.rpartition(' ← ')[2]})")
    check = f"; `holdfast doctor {launch.profile.name}` tries them out" if launch.profile else ""
    return f"Slurm was asked for {', '.join(parts) or 'nothing in particular'}{check}."


def start_jobs(
    transport: Transport,
    directory: str,
    *,
    tasks: Iterable[int] | None = None,
    mirror: Callable[[Sequence[Record]], None] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Job]:
    """Start the tasks (all, if none is named) that are not done and have no active main job, using only the files.

    Of several processes that do so at once, the second waits for the first, and finds its jobs. Submissions without
    an answer are settled first. ClusterError while another process may still be submitting.
    """
    if not transport.exists(layout.invocation_path(directory)):
        raise UsageError(f"{transport.host}: {directory} is not an invocation: it has no invocation.json")
    with hold_turn(transport, directory, say):
        return _start_jobs(transport, directory, tasks, mirror)


def _start_jobs(
    transport: Transport,
    directory: str,
    tasks: Iterable[int] | None,
    mirror: Callable[[Sequence[Record]], None] | None,
) -> list[Job]:
    _, files = transport.read_tree(directory, ("invocation.json", "task.json", "state.json", "jobs-*.jsonl"))
    path = layout.invocation_path(directory)
    invocation = layout.decode(files["invocation.json"], InvocationFile, path)
    executor = find_executor(invocation.executor)
    ledger = Ledger(transport, directory, mirror=mirror)
    jobs = jobs_in(files)
    if any(job.open for job in jobs) and (doubtful := executor.settle(ledger)):
        processes = ", ".join(f"{job.intent.host} (pid {job.intent.pid})" for job in doubtful)
        raise ClusterError(
            f"{invocation.id}: another process may be submitting it: {processes}",
            remedy="Wait two minutes, then run the same command again.",
        )
    active = select_main_jobs(executor.states(transport, invocation.id, jobs))
    pending: list[tuple[TaskFile, TaskFolder]] = []
    fresh: dict[str, bytes] = {}
    for number in range(len(invocation.tasks)) if tasks is None else tasks:
        place = TaskFolder(directory, number)
        content = files.get(f"{number}/state.json")
        state = State() if content is None else layout.decode(content, State, place.state)
        if state.phase == "done" or number in active:
            continue
        if state.phase in layout.OVER:  # it begins again
            waiting = msgspec.structs.replace(state, phase="waiting", reason="", exit_code=None, updated=time.time())
            fresh[place.state] = layout.encode(waiting)
        pending.append((layout.decode(files[f"{number}/task.json"], TaskFile, place.task), place))
    if fresh:
        transport.replace_files(fresh)
    return executor.start_all(ledger, pending)


_EXPAND_HOME: Final = 'case "$1" in "~"|"~/"*) set -- "$HOME${1#\\~}";; esac; '


# A group of the user's name is a private one, as many systems give to every user. In a folder with the sticky bit, such
# as /tmp, nobody can replace what belongs to others.
_MAKE_BASE: Final = (
    "check=$2; "
    + _EXPAND_HOME
    + """
umask go-w
mkdir -p -- "$1/holdfast" && cd -- "$1" && pwd || exit
test -n "$check" || exit 0
for folder in . holdfast; do
    set -- $(stat -c '%a %U %G' "$folder")
    case $1 in [1357]???) continue ;; esac
    test "$folder" = . || test "$2" = "$(id -un)" || echo "$folder belongs to $2"
    test $((0$1 & 002)) -eq 0 || echo "everybody may write $folder"
    test $((0$1 & 020)) -eq 0 || test "$3" = "$(id -un)" || echo "the group $3 may write $folder"
done
"""
)


def _make_base(launch: Launch, transport: Transport) -> str:
    """Create the folder that everything goes to, and return its absolute path. Jobs run what is in it."""
    check = "" if launch.executor.is_local else "check"  # on a cluster other users have accounts
    base, *exposed = transport.check(["sh", "-c", _MAKE_BASE, "sh", base_folder(launch), check]).text.splitlines()
    if exposed:
        raise ClusterError(
            f"{transport.host}: other users can change what your jobs run: {'; '.join(exposed)}",
            remedy=f"Run `chmod go-w {base} {base}/holdfast` there, or set remote_job_dir to a folder of your own.",
        )
    return base


def base_folder(launch: Launch) -> str:
    """Return the folder that everything goes to, as users name it."""
    return launch.env.remote_job_dir or str(Path.cwd() / ".holdfast")


def _expand_home(launch: Launch, transport: Transport) -> Launch:
    """Expand `~` in folders on the cluster, which nothing does later."""

    @cache
    def expand(path: str | None) -> str | None:
        if path is None or not path.startswith("~") or launch.executor.shares_files:
            return path
        return transport.check(["sh", "-c", _EXPAND_HOME + 'printf %s "$1"', "sh", path]).text

    def with_output_path(file: TaskFile) -> TaskFile:
        options = msgspec.structs.replace(file.options, output_path=expand(file.options.output_path))
        return msgspec.structs.replace(file, options=options)

    return replace(
        launch,
        execution=launch.execution.model_copy(update={"output_dir": expand(launch.execution.output_dir)}),
        tasks=tuple(replace(task, file=with_output_path(task.file)) for task in launch.tasks),
    )


def _find_python(launch: Launch, transport: Transport, base: str, say: Callable[[str], None]) -> str:
    """Return the interpreter of the jobs."""
    if python := launch.env.python:
        completed = transport.run([python, "-c", "import holdfast; print(holdfast.__version__)"])
        if completed.code != 0:
            reason = completed.stderr.strip().splitlines()[-1:]
            raise ClusterError(f"{transport.host}: Holdfast is not installed in {python}: {reason}")
        if (version := completed.text.strip()) != holdfast.__version__:
            say(f"note: {python} has Holdfast {version}, this is {holdfast.__version__}")
        return python
    if not launch.executor.installs_python:
        return sys.executable
    extras = needed_extras([task.spec for task in launch.tasks], launch.shared.export)
    return ensure_python(transport, base, extras, say)


def _find_image(
    launch: Launch, server: Server, transport: Transport, base: str, say: Callable[[str], None], *, force: bool
) -> str | None:
    """Return the image of a server: imported to a .sqsh file if it is a Docker reference and the cluster has pyxis."""
    image = server.image
    if image is None or not launch.executor.starts_containers:
        if force:
            say("note: --force-squash: no image is imported, because no server is started in a container")
        return image
    if image.endswith(".sqsh"):
        if force:
            say(f"note: --force-squash: {image} is a .sqsh file already; only Docker references are imported again")
        return image
    if transport.run(["sh", "-c", "srun --help | grep -q -e --container-image"]).code != 0:
        say(
            f"note: no pyxis on {transport.host} (srun has no --container-image): {image} is neither imported nor "
            "used, the server runs as a plain process of the node, with what is installed there"
        )
        return None
    options = import_options(launch)
    return ensure_image(transport, Slurm(transport), image, base, options=options, force=force, say=say)


def _secrets(launch: Launch, environ: Mapping[str, str]) -> dict[str, str]:
    """Return values by the names that the variables have here: two parts may give one name to different values."""
    return {name: value for name, value in host_values(launch.variables, environ).items() if value is not None}


def _send_tasks(
    launch: Launch,
    directory: str,
    invocation: str,
    python: str,
    images: Mapping[str, str | None],
    transport: Transport,
    base: str,
) -> list[tuple[TaskFolder, TaskFile]]:
    """Send the files of all evals, and return the tasks as their jobs get them."""
    bundles = [collect(task.spec, task.eval_file, translated=task.translated) for task in launch.tasks]
    folders = send_bundles(bundles, transport, base)
    runs_dir = runs_folder(launch, base)
    placed = []
    for index, (task, bundle, folder) in enumerate(zip(launch.tasks, bundles, folders, strict=True)):
        spec, place = task.spec, TaskFolder(directory, index)
        copies = spec.folder.resolve() if launch.executor.shares_files else Path(runs_dir, slug(spec.name))
        # An eval that was translated from another tool's file has its overrides applied already.
        overrides = () if bundle.translated else task.file.overrides
        file = place_task(
            task.file,
            place,
            images,
            invocation=invocation,
            python=python,
            eval_file=f"{folder}/{bundle.eval_file}",
            runs_dir=runs_dir,
            overrides=(*overrides, *bundle.overrides(spec, folder), *copies_in(spec, copies)),
        )
        placed.append((place, file))
    return placed


def place_task(file: TaskFile, place: TaskFolder, images: Mapping[str, str | None], **fields: Any) -> TaskFile:
    """Add to a compiled task what is only known at submission."""

    def with_image(server: Server) -> Server:
        return msgspec.structs.replace(server, image=images[server.name])

    return msgspec.structs.replace(
        file,
        number=place.number,
        deployment=None if file.deployment is None else with_image(file.deployment),
        auxiliary=tuple(map(with_image, file.auxiliary)),
        **fields,
    )


def runs_folder(launch: Launch, base: str) -> str:
    """Return the folder of runs: `output_dir`, else `runs` in the base folder, or this machine's runs directory."""
    output_dir = launch.execution.output_dir
    if not launch.executor.shares_files:
        return output_dir or f"{base}/runs"
    default = f"{base}/runs" if launch.env.remote_job_dir else os.environ.get("HOLDFAST_RUNS_DIR") or "runs"
    return str(Path.cwd() / Path(output_dir or default).expanduser())


def _invocation_file(launch: Launch, number: str, base: str) -> InvocationFile:
    return InvocationFile(
        id=number,
        created=time.time(),
        user=getpass.getuser(),
        host=socket.gethostname(),
        holdfast=holdfast.__version__,
        executor=launch.execution.type,
        profile=launch.profile.name if launch.profile else None,
        tasks=tuple(task.name for task in launch.tasks),
        base=base,
        config=launch.tree.data,
    )


def _put_invocation(
    transport: Transport,
    directory: str,
    invocation: InvocationFile,
    tasks: Sequence[tuple[TaskFolder, TaskFile]],
    secrets: Mapping[str, str],
) -> None:
    """Create the directory of an invocation. It appears with everything in it, or not at all."""
    files = {
        "invocation.json": SourceFile(layout.encode(invocation)),
        "secrets.env": SourceFile(layout.write_secrets(secrets), 0o600),
    }
    for place, task in tasks:
        files[f"{place.number}/task.json"] = SourceFile(layout.encode(task))
        files[f"{place.number}/job.sh"] = SourceFile(main_script(task, place).encode(), 0o755)
        files[f"{place.number}/logs/.keep"] = SourceFile(b"")
        if task.workers > 1:
            files[f"{place.number}/worker.sh"] = SourceFile(worker_script(task, place).encode(), 0o755)
    arrived = transport.put(files, f"{Path(directory).parent}/arriving")
    transport.check(["sh", "-c", 'rm -f -- "$1/.whole" && mv -- "$1" "$2"', "sh", arrived, directory])


@dataclass(frozen=True)
class JobPreview:
    """A task file and the scripts that would be submitted."""

    task: TaskFile
    main: str
    worker: str | None


def preview(launch: Launch) -> list[JobPreview]:
    """Return task files and scripts, with what is only known at submission in angle brackets."""
    base = base_folder(launch)
    previews = []
    for number, task in enumerate(launch.tasks):
        place = TaskFolder(f"{base}/holdfast/<id>", number)
        file = place_task(
            task.file,
            place,
            {server.name: server.image for server in launch.servers},
            python=launch.env.python or f"{base}/holdfast/env/<digest>/bin/python",
            eval_file=f"{base}/holdfast/bundles/<digest>/{task.eval_file.name}",
            runs_dir=runs_folder(launch, base),
        )
        worker = worker_script(file, place) if file.workers > 1 else None
        previews.append(JobPreview(file, main_script(file, place), worker))
    return previews


@dataclass(frozen=True)
class RunPreview:
    """The run of a task before its submission."""

    samples: int | None = None
    trials: int = 0
    run_dir: str = ""
    plan: Plan | None = None
    """None: it cannot be made here"""
    finished: bool | None = None
    """None: unknown"""
    notes: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield the lines that people see."""
        if self.samples is not None:
            yield f"{format_count(self.samples, 'sample')} × {format_count(self.trials, 'trial')}"
        if self.run_dir:
            yield f"run: {self.run_dir}{' (finished)' if self.finished else ''}"
        if self.plan is not None:
            yield str(self.plan)
        yield from self.notes

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that scripts see."""
        counts = ("total", "finished", "reused", "to_grade", "to_run")
        plan = None if self.plan is None else {name: getattr(self.plan, name) for name in counts}
        return {
            "samples": self.samples,
            "trials": self.trials,
            "run": self.run_dir,
            "already_finished": self.finished,
            "plan": plan,
            "notes": self.notes,
        }


class RunPreviews:
    """Previews the runs of a launch. A cluster that does not answer is asked once."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._unreachable = ""

    def preview(self, task: Task, file: TaskFile) -> RunPreview:
        """Return what the run of a task would start from."""
        spec, options = task.spec, file.options
        engine = Options(runs_dir=Path(file.runs_dir), fresh=options.fresh, accept_drift=options.accept_drift)
        try:
            if self._launch.executor.shares_files:
                identity, rundir, plan = preview_run(spec, engine)
                return RunPreview(identity.survey.count, spec.trials, str(rundir.path), plan, rundir.finished)
            identity = identify(spec)
        except DataError as error:
            return RunPreview(notes=[f"its data cannot be read here: {error.message}"])
        except HoldfastError as error:
            return RunPreview(notes=[str(error)])
        run_dir = str(identity.directory(engine.runs_dir).path)
        finished, note = self._look(run_dir)
        fresh = ["--fresh sets that run aside, and everything runs from scratch"] if options.fresh else []
        return RunPreview(identity.survey.count, spec.trials, run_dir, None, finished, [note, *fresh])

    def _look(self, run_dir: str) -> tuple[bool | None, str]:
        """Return whether a run on the cluster is finished, and a note about it; None if this is unknown."""
        if not run_dir.startswith("/"):
            return None, "not checked: its path is known only on the cluster"
        if self._unreachable:
            return None, self._unreachable
        transport = connect_launch(self._launch, pauses=())
        try:
            answer = transport.check(["sh", "-c", _COUNT, "sh", run_dir], timeout=_LOOK_SECONDS)
        except (Unreachable, ClusterError) as error:
            self._unreachable = f"not checked: {error.message}"
            return None, self._unreachable
        state, _, count = answer.text.strip().rpartition("\n")[2].partition(" ")
        if state == "none":
            note = "there is no such run yet; outputs of other runs there are reused where their keys match"
            return False, f"{transport.host}: {note}"
        note = f"{transport.host}: {int(count):,} outputs are there"
        return state == "finished", note if state == "finished" else f"{note}, and the run continues from there"


_COUNT: Final = """
test -e "$1/manifest.json" || { echo none 0; exit 0; }
count=$(cat -- "$1/outputs.jsonl" "$1"/workers/*/outputs.jsonl "$1"/shared/*/outputs.*.jsonl 2>/dev/null | wc -l)
test -e "$1/metrics.json" && echo "finished $count" || echo "begun $count"
"""
