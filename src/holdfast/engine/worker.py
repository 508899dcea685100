"""A run shared out among workers, on one machine or on many that see the same disk.

prepare      one process alone: manifest, what other runs can lend, and the chunks of what is left
run_worker   any number of them: claim a chunk, do it, claim the next; each writes only below `workers/<id>/`
             the first to find all done makes the report, alone; the others stand by, and do it where that one dies
"""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from holdfast.engine.log import Noting, RunLog
from holdfast.engine.run import already_finished, check_prices, go_on, run_loop, say_notices
from holdfast.engine.setup import Opened, Parts, located, open_run
from holdfast.engine.sources import Chunks
from holdfast.errors import Fault, RunHeld, UsageError
from holdfast.plan.history import with_outputs_of
from holdfast.plan.identity import identify
from holdfast.plan.plan import Plan, left_over, make_plan
from holdfast.report.outcome import Outcome
from holdfast.spec.load import eval_of_run, target_name
from holdfast.spec.redact import without_secrets
from holdfast.spec.schema import one_or_all
from holdfast.store.claims import Claims, Round, begin_round, check_worker_id, cut, newest_round
from holdfast.store.durable import slug
from holdfast.store.index import load_index
from holdfast.store.lease import RunLease
from holdfast.store.run_lock import await_workers, finish, is_being_finished, join, stand_by
from holdfast.store.tail import Follower

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from holdfast.display.types import Display
    from holdfast.engine.options import Options
    from holdfast.plan.identity import Identified
    from holdfast.spec.load import Eval
    from holdfast.store.rundir import RunDir


class Shared(NamedTuple):
    """A run that workers may join."""

    found: Identified
    rundir: RunDir
    plan: Plan


def prepare(
    spec: Eval,
    options: Options,
    workers: int,
    display: Display,
    *,
    command: str = "",
    log_samples: bool = False,
    output_path: Path | None = None,
) -> Outcome | Shared:
    """Open a run, or go on with it, and share out what is left among about so many workers.

    Returns how it ended where there is nothing to share out, else what workers may join from now on.
    """
    check_prices(spec, generates=True)
    _refuse_secrets(spec)
    found, rundir = located(spec, options)
    if (done := already_finished(found, rundir, options)) is not None:
        return done
    parts = Parts.build(found, options)
    noting = Noting(display, RunLog(rundir.log))
    say_notices(spec, noting, found)
    opened = open_run(found, options, noting.notice)
    try:
        if (done := already_finished(found, rundir, options)) is not None:
            return done
        left = list(left_over(found.survey, found.work, opened.index, grades=not options.skip_graders))
        if not left:
            return go_on(opened, parts, options, noting)
        if rundir.finished:
            rundir.reopen()
        noting.log.open()
        plan = Round(
            chunks=cut(left, workers),
            eval=spec.document.data,
            folder=str(spec.folder.resolve()),
            eval_file=str(spec.document.path.resolve()) if spec.document.path else None,
            accept_errors=options.accept_errors,
            skip_graders=options.skip_graders,
            log_samples=log_samples,
            output_path=str(output_path.resolve()) if output_path else None,
            command=command,
        )
        place = begin_round(rundir, plan)
        noting.log.write(f"shared out in {place.name}: {len(left)} trials in {len(plan.chunks)} chunks; {opened.plan}")
        return Shared(found, rundir, opened.plan)
    finally:
        opened.lease.release()


def _refuse_secrets(spec: Eval) -> None:
    if without_secrets(spec.document.data) != spec.document.data:
        raise UsageError(
            "workers read the eval from the run directory, where no secrets are stored",
            remedy="Name an environment variable where a header, a password or a URL's query is written out: ${NAME}",
        )


def worker_id() -> str:
    """A name for a worker that was given none."""
    return f"{slug(os.uname().nodename)[:40]}-{os.getpid()}-{secrets.token_hex(3)}"


def shared_eval(
    rundir: RunDir, concurrency: int | str | None = None, base_urls: Sequence[str] = ()
) -> tuple[Eval, Round, Path]:
    """The eval that a run's workers run, how it was shared out, and where that is written."""
    newest = newest_round(rundir)
    if newest is None:
        raise UsageError(
            f"{rundir.path} has no distributed work to join",
            remedy="`holdfast eval FILE --workers N` distributes what is left and starts N workers.",
        )
    place, plan = newest
    target = plan.eval.get("target", {})
    # An agent that does not say itself where its model is asks where the model is served too, by way of our proxy.
    asks = "model" in target or (("python" in target or "command" in target) and not target.get("base_url"))
    served = one_or_all(base_urls) if asks else None
    given = ((("limits", "concurrency"), concurrency), (("target", "base_url"), served))
    overrides = [(key, value) for key, value in given if value is not None]
    return eval_of_run(plan.eval, plan.folder, plan.eval_file, overrides), plan, place


def run_worker(
    rundir: RunDir,
    worker: str,
    options: Options,
    display: Display,
    concurrency: int | str | None = None,
    base_urls: Sequence[str] = (),
) -> Outcome:
    """Work on a run that was shared out, until nothing is left of it, and make the report if nobody else does.

    `base_urls` are where the model is served as this worker sees it; they are in no key.
    """
    check_worker_id(worker)
    manifest = rundir.read_manifest()
    if manifest is None:
        raise UsageError(f"{rundir.path} is not a run directory: it has no manifest.json")
    try:
        spec, plan, place = shared_eval(rundir, concurrency, base_urls)
    except UsageError:
        if rundir.finished:  # as a job finds it that is started again too late
            return Outcome(rundir, _NO_PLAN, rundir.read_metrics(), None, already=True)
        raise
    options = replace(options, accept_errors=plan.accept_errors, skip_graders=plan.skip_graders)
    found = with_outputs_of((rundir, manifest), identify(spec))
    if found.place is None:
        raise Fault(
            "dataset_changed",
            f"the eval has changed since its work was distributed in {rundir.path}",
            remedy=f"Distribute it again: {plan.command}",
        )
    if (done := already_finished(found, rundir, options)) is not None:
        return done
    parts = Parts.build(found, options)
    noting = Noting(display, RunLog(rundir.workers / worker / "run.log"))
    opened = Opened(found, rundir, None, load_index(lambda _: (), mend=None), _NO_PLAN, worker=worker)  # type: ignore[arg-type]  # filled below

    def lost() -> None:
        opened.lost = True

    try:
        opened.lease = join(rundir, worker, options.wait, noting.notice, lost)
    except RunHeld:
        if not is_being_finished(rundir):
            raise
        opened.lease = RunLease(rundir.lease)  # not taken: all is done
        return finish_run(opened, options, noting)
    try:
        # Looked at again: it may have been finished while we waited to join.
        if (done := already_finished(found, rundir, options)) is not None:
            return done
        chunks = _begin(opened, plan, place, noting)
        outcome = _work(opened, chunks, parts, options, noting)
        if outcome.reason is not None or not chunks.all_done:
            return outcome
        return finish_run(opened, options, noting)
    finally:
        opened.lease.release()


_NO_PLAN = Plan(0, 0, 0, 0, 0)


def _begin(opened: Opened, plan: Round, place: Path, noting: Noting) -> Chunks:
    """Read what is there. Of files only our own are mended: the others' owners may be writing them."""
    found, rundir, worker = opened.identified, opened.rundir, opened.worker
    assert worker is not None
    own = opened.writes
    opened.index = load_index(
        lambda name: [own / f"{name}.jsonl", *sorted(rundir.workers.glob(f"{worker}+*/{name}.jsonl"))],
        mend=own / "set-aside",
        tails_only=True,  # others may know where our lines are
    )
    for damage in opened.index.damage:
        noting.notice(f"{worker}: {damage}")
    follower = Follower(rundir, opened.index, own=worker)
    follower.refresh()
    opened.index.outputs = {key: ref for key, ref in opened.index.outputs.items() if found.work.fits(ref)}
    opened.plan = make_plan(found.survey, found.work, opened.index)
    return Chunks(opened, plan, Claims(place, len(plan.chunks), worker, rundir), follower)


def _work(opened: Opened, chunks: Chunks, parts: Parts, options: Options, display: Noting) -> Outcome:
    spec, rundir = opened.identified.spec, opened.rundir
    display.log.open()
    display.begin(spec.name, target_name(spec.target), str(rundir.path), opened.plan)
    display.log.write(f"begin worker={opened.worker} pid={os.getpid()} {opened.plan}")
    try:
        loop, reason = run_loop(opened, parts, options, display, chunks)
    except BaseException as error:
        display.log.write(f"end {str(error) or type(error).__name__}")
        raise
    else:
        display.log.write(f"end {reason or 'nothing left to start'}")
    finally:
        display.end()
    return Outcome(rundir, loop.progress.left, None, opened.index.spent, reason, skipped_graders=options.skip_graders)


def finish_run(opened: Opened, options: Options, display: Noting) -> Outcome:
    """Make the report of a run whose chunks are all done. Grades what is left to grade.

    Where another process does so, stay until it has: if it dies over that, it is for us to do.
    """
    found, rundir, own = opened.identified, opened.rundir, opened.lease
    lease = finish(rundir)
    who = str(RunLease(rundir.lease).holder or "another worker")
    own.release()
    if lease is None and (lease := stand_by(rundir, options.cancelled.is_set, display.notice)) is None:
        index = rundir.load(mend=False)
        plan = make_plan(found.survey, found.work, index)
        return Outcome(rundir, plan, None, index.spent, skipped_graders=options.skip_graders, finisher=who)
    try:
        await_workers(rundir)
        alone = replace(options, grade_only=True, fresh=False, retry_failed=False, again=False)
        parts = Parts.build(found, alone)
        noting = Noting(display, RunLog(rundir.log))
        if (done := already_finished(found, rundir, alone)) is None:
            done = go_on(open_run(found, alone, noting.notice, lease), parts, alone, noting)
        return replace(done, grade_only=False)
    finally:
        lease.release()
