"""A run that several workers share, on one machine or on many that see the same disk.

prepare      one process alone: writes the manifest, borrows from other runs, and cuts what is left into chunks
run_worker   any number of processes: claim a chunk, work through it, claim the next; each writes only below
             `workers/<id>/`. The first to find everything done writes the report; the others wait, and take over if
             that process dies
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from holdfast.data.readers import find_line_starts
from holdfast.engine.log import RunLog
from holdfast.engine.session import Loaded, load_run, open_run, open_session
from holdfast.engine.sources import Chunks
from holdfast.errors import Fault, RunBeingFinished, UsageError
from holdfast.plan.history import match_outputs
from holdfast.plan.identity import identify
from holdfast.plan.plan import Plan, estimate_graded, make_plan, unfinished_trials
from holdfast.report.outcome import Outcome
from holdfast.spec.load import eval_of_run
from holdfast.spec.redact import without_secrets
from holdfast.spec.schema import one_or_all
from holdfast.store.claims import Claims, Round, begin_round, check_worker_id, cut, newest_round
from holdfast.store.durable import slug
from holdfast.store.index import load_index
from holdfast.store.lease import RunLease
from holdfast.store.run_lock import await_workers, finish, join, stand_by
from holdfast.store.tail import Follower

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from holdfast.display.types import Display
    from holdfast.engine.options import Options
    from holdfast.plan.identity import RunIdentity
    from holdfast.spec.eval import Eval
    from holdfast.store.index import Index
    from holdfast.store.rundir import RunDir


class SharedRun(NamedTuple):
    """A run that workers may join."""

    identity: RunIdentity
    rundir: RunDir
    plan: Plan


def prepare(spec: Eval, options: Options, workers: int, display: Display) -> Outcome | SharedRun:
    """Open a run, and cut what is left into chunks for about so many workers, which may join when this returns.

    Returns the outcome where nothing is left for workers.
    """
    _refuse_secrets(spec)
    with open_run(spec, options, display) as run:
        if run.finished is not None:
            return run.finished
        identity, rundir = run.identity, run.rundir
        unfinished = list(unfinished_trials(identity.survey, identity.work, run.index, grades=not options.skip_graders))
        if not unfinished:
            return run.complete()
        if rundir.finished:
            rundir.reopen()
        run.log.open()
        chunks = cut(unfinished, workers)
        claim_round = Round(
            chunks=chunks,
            starts=_starts(identity, chunks),
            eval=_with_limits(spec),
            folder=str(spec.folder.resolve()),
            eval_file=str(spec.document.path.resolve()) if spec.document.path else None,
            accept_errors=options.accept_errors,
            skip_graders=options.skip_graders,
            log_samples=options.log_samples,
            output_path=str(options.output_path.resolve()) if options.output_path else None,
            command=options.command,
        )
        name = begin_round(rundir, claim_round).name
        run.log.write(f"divided in {name}: {len(unfinished)} trials in {len(chunks)} chunks; {run.plan}")
        run.report_estimate()
        return SharedRun(identity, rundir, run.plan)


def _starts(identity: RunIdentity, chunks: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return where chunks begin in the dataset's files, so that no worker reads the rows before its own."""
    if not identity.dataset.has_row_per_line:
        return []
    return [*find_line_starts(identity.dataset.files, (first // identity.work.trials for first, _ in chunks))]


def _with_limits(spec: Eval) -> dict[str, Any]:
    """Return the eval's document with the limits in force, which a suite lowers to what is left of its own."""
    limits = spec.limits.model_dump(exclude_unset=True)
    return {**spec.document.data, "limits": limits} if limits else spec.document.data


def _refuse_secrets(spec: Eval) -> None:
    if without_secrets(spec.document.data) != spec.document.data:
        raise UsageError(
            "workers read the eval from the run directory, where no secrets are stored",
            remedy="Name an environment variable where a header, a password or a URL's query is written out: ${NAME}",
        )


def new_worker_id() -> str:
    """Return a unique name for a worker."""
    return f"{slug(os.uname().nodename)[:40]}-{os.getpid()}-{secrets.token_hex(3)}"


def shared_eval(
    rundir: RunDir, concurrency: int | str | None = None, base_urls: Sequence[str] = ()
) -> tuple[Eval, Round, Path]:
    """Return the eval that a run's workers run, the current round of claims, and that round's folder."""
    newest = newest_round(rundir)
    if newest is None:
        raise UsageError(
            f"{rundir.path} has no divided work to join",
            remedy="`holdfast eval FILE --workers N` divides what is left, and starts N workers.",
        )
    folder, claim_round = newest
    target = claim_round.eval.get("target", {})
    # An agent that does not name its model's server asks the server that is given here, through our proxy.
    asks = "model" in target or (("python" in target or "command" in target) and not target.get("base_url"))
    served = one_or_all(base_urls) if asks else None
    values = ((("limits", "concurrency"), concurrency), (("target", "base_url"), served))
    overrides = [(key, value) for key, value in values if value is not None]
    spec = eval_of_run(claim_round.eval, claim_round.folder, claim_round.eval_file, overrides)
    return spec, claim_round, folder


def run_worker(
    rundir: RunDir,
    worker: str,
    options: Options,
    display: Display,
    concurrency: int | str | None = None,
    base_urls: Sequence[str] = (),
) -> Outcome:
    """Work on a shared run until nothing is left of it, and write the report if no other process does.

    `base_urls` are the addresses of the model as this worker sees it; they are in no key.
    """
    check_worker_id(worker)
    manifest = rundir.read_manifest()
    if manifest is None:
        raise UsageError(f"{rundir.path} is not a run directory: it has no manifest.json")
    try:
        spec, claim_round, folder = shared_eval(rundir, concurrency, base_urls)
    except UsageError:
        if rundir.finished:  # as a job finds it that is started again too late
            return Outcome(rundir, Plan(0, 0, 0, 0, 0), rundir.read_metrics(), None, already=True)
        raise
    options = replace(options, accept_errors=claim_round.accept_errors, skip_graders=claim_round.skip_graders)
    identity = match_outputs((rundir, manifest), identify(spec))
    if identity.run_path is None:
        raise Fault(
            "dataset_changed",
            f"the eval is no longer the one whose work was divided in {rundir.path}",
            remedy=f"Divide it again: {claim_round.command}",
        )

    def acquire(rundir: RunDir, notice: Callable[[str], None], lost: Callable[[], None]) -> RunLease:
        return join(rundir, worker, options.wait, notice, lost)

    def load(identity: RunIdentity, _: Options, notice: Callable[[str], None]) -> Loaded:
        return _load_worker(identity, rundir, worker, notice)

    log = RunLog(rundir.workers / worker / "run.log")
    try:
        with open_session(identity, options, display, log, acquire, load, worker=worker) as run:
            if run.finished is not None:
                return run.finished
            chunks = Chunks(run, claim_round, Claims(folder, len(claim_round.chunks), worker, rundir))
            remaining, reason = run.work(chunks)
            if reason is None and chunks.all_done:
                return finish_run(identity, rundir, options, display, run.notice, run.lease)
            spent = run.index.spent
            return Outcome(rundir, remaining, None, spent, reason, skipped_graders=options.skip_graders)
    except RunBeingFinished:  # that process may die over it
        return finish_run(identity, rundir, options, display, display.notice)


def _load_worker(identity: RunIdentity, rundir: RunDir, worker: str, notice: Callable[[str], None]) -> Loaded:
    """Read all records of a run. Only this worker's files are repaired: the others' owners may be writing them."""
    journals = rundir.workers / worker
    own = load_index(
        lambda name: [journals / f"{name}.jsonl", *sorted(rundir.workers.glob(f"{worker}+*/{name}.jsonl"))],
        repair=journals / "set-aside",
        tails_only=True,  # others may know where our lines are
    )
    for damage in own.damage:
        notice(f"{worker}: {damage}")
    reader = rundir.read_index()
    index, follower = reader.index, Follower(rundir, reader, skip_worker=worker)
    identity.work.drop_unfit(index)
    return Loaded(index, _plan(identity, index), follower=follower)


def _plan(identity: RunIdentity, index: Index) -> Plan:
    """Return what is left of a run, without looking up each trial while surely one of them has no output."""
    survey, work = identity.survey, identity.work
    total, outputs = survey.count * work.trials, len(index.outputs)
    if outputs >= total:
        return make_plan(survey, work, index)
    graded = estimate_graded(index, survey.panels.mean)
    return Plan(survey.count, work.trials, finished=graded, to_grade=outputs - graded, to_run=total - outputs)


def finish_run(
    identity: RunIdentity,
    rundir: RunDir,
    options: Options,
    display: Display,
    notice: Callable[[str], None],
    worker_lease: RunLease | None = None,
) -> Outcome:
    """Write the report of a run whose chunks are all done, after grading what is left to grade.

    Where another process does so, wait until it has; if that process dies, take over. `worker_lease` is released as
    soon as nobody can take this process for dead.
    """
    lease = finish(rundir)
    finisher = str(RunLease(rundir.lease).holder or "another worker")
    if worker_lease is not None:
        worker_lease.release()
    if lease is None and (lease := stand_by(rundir, options.cancelled.is_set, notice)) is None:
        plan, spent = Plan(identity.survey.count, identity.work.trials, 0, 0, 0), None
        if not rundir.finished:  # else nobody asks for more: a large run takes long to read, and all workers wait here
            index = rundir.load(repair=False)
            plan, spent = make_plan(identity.survey, identity.work, index), index.spent
        return Outcome(rundir, plan, None, spent, skipped_graders=options.skip_graders, finisher=finisher)
    try:
        await_workers(rundir)
        alone = replace(options, grade_only=True, fresh=False, retry_failed=False, again=False)
        log, held = RunLog(rundir.log), lease
        with open_session(identity, alone, display, log, lambda *_: held, load_run) as run:
            return replace(run.finished or run.complete(), grade_only=False)
    finally:
        lease.release()
