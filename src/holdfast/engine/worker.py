"""A run that several workers share, on one machine or on many that see the same disk.

prepare      one process: writes the manifest, borrows from other runs, and cuts what is left into chunks
run_worker   any number of processes: claim a chunk, work through it, claim the next; each writes only below
             `workers/<id>/`. The first to find everything done writes the report; the others wait, and take over if
             that process dies
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import deque
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec.structs import replace

from holdfast.data.dataset import dataset_changed
from holdfast.data.readers import LineStart, find_line_starts
from holdfast.engine.loop import Supply
from holdfast.engine.run import complete, open_run, report_estimate, work
from holdfast.engine.session import Finisher, Worker, open_session
from holdfast.errors import DataError, Fault, RunBeingFinished, UsageError
from holdfast.plan.history import match_outputs
from holdfast.plan.identity import identify
from holdfast.plan.plan import Plan, check_sample, find_pending, make_plan, unfinished_trials
from holdfast.report.outcome import Outcome
from holdfast.spec.load import eval_of_run
from holdfast.spec.redact import without_secrets
from holdfast.spec.schema import one_or_all
from holdfast.store.claims import Claims, Round, begin_round, check_worker_id, cut, newest_round
from holdfast.store.files import slug
from holdfast.store.lease import LEASE_SECONDS, RunLease
from holdfast.store.run_lock import await_workers, finish, stand_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.data.dataset import Sample
    from holdfast.data.readers import Row
    from holdfast.display.displays import Display
    from holdfast.engine.admission import Brake
    from holdfast.engine.session import Options, Session
    from holdfast.plan.identity import RunIdentity
    from holdfast.plan.plan import PendingTrial
    from holdfast.spec.eval import Eval
    from holdfast.store.rundir import RunDir


class SharedRun(NamedTuple):
    """A run that workers may join."""

    identity: RunIdentity
    rundir: RunDir
    plan: Plan


def prepare(spec: Eval, options: Options, workers: int, display: Display) -> Outcome | SharedRun:
    """Open a run, and cut what is left into chunks for about `workers` workers, which may then join.

    Returns the outcome if nothing is left for workers.
    """
    _refuse_secrets(spec)
    with open_run(spec, options, display) as run:
        if run.finished is not None:
            return run.finished
        identity, rundir = run.identity, run.rundir
        unfinished = list(unfinished_trials(identity.survey, identity.work, run.index, grades=not options.skip_graders))
        if not unfinished:
            return complete(run)
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
            command=options.command,
            **options.policy | {"output_path": options.output_path and str(Path(options.output_path).resolve())},
        )
        name = begin_round(rundir, claim_round).name
        run.log.write(f"divided in {name}: {len(unfinished)} trials in {len(chunks)} chunks; {run.plan}")
        report_estimate(run)
        return SharedRun(identity, rundir, run.plan)


def _starts(identity: RunIdentity, chunks: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return where chunks begin in the dataset's files, so that no worker reads the rows before its own."""
    if not identity.dataset.has_row_per_line:
        return []
    return [*find_line_starts(identity.dataset.files, (first // identity.work.trials for first, _ in chunks))]


def _with_limits(spec: Eval) -> dict[str, Any]:
    """Return the eval's document with its effective limits, capped by the suite's remaining budget."""
    limits = spec.limits.model_dump(exclude_unset=True)
    return {**spec.document.data, "limits": limits} if limits else spec.document.data


def _refuse_secrets(spec: Eval) -> None:
    if without_secrets(spec.document.data) != spec.document.data:
        raise UsageError(
            "workers read the eval from the run directory, which stores no secrets",
            remedy="Name an environment variable instead of writing out a header, a password or a URL's query: ${NAME}",
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
    # An agent that names no model server asks the one given here, through our proxy.
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
    """Work on a shared run until nothing is left, and write the report unless another process does.

    `base_urls` are the addresses of the model as this worker sees it; they are in no key.
    """
    check_worker_id(worker)
    manifest = rundir.read_manifest()
    if manifest is None:
        raise UsageError(f"{rundir.path} is not a run directory: it has no manifest.json")
    try:
        spec, claim_round, folder = shared_eval(rundir, concurrency, base_urls)
    except UsageError:
        if rundir.finished:  # a job was restarted too late
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

    try:
        with open_session(Worker(identity, options, worker), display) as run:
            if run.finished is not None:
                return run.finished
            chunks = Chunks(run, claim_round, Claims(folder, len(claim_round.chunks), worker, rundir))
            remaining, reason = work(run, chunks)
            if reason is None and chunks.all_done:
                return finish_run(identity, rundir, options, display, run.notice, run.lease)
            spent = run.spent
            return Outcome(rundir, remaining, None, spent, reason, skipped_graders=options.skip_graders)
    except RunBeingFinished:  # that process may die before it has finished
        return finish_run(identity, rundir, options, display, display.notice)


def finish_run(
    identity: RunIdentity,
    rundir: RunDir,
    options: Options,
    display: Display,
    notice: Callable[[str], None],
    worker_lease: RunLease | None = None,
) -> Outcome:
    """Write the report of a run whose chunks are all done, after grading what is left to grade.

    If another process does so, wait for it, and take over if it dies. `worker_lease` is released once this
    process holds the run's lease, or knows who does.
    """
    lease = finish(rundir)
    finisher = str(RunLease(rundir.lease).holder or "another worker")
    if worker_lease is not None:
        worker_lease.release()
    if lease is None and (lease := stand_by(rundir, options.cancelled.is_set, notice)) is None:
        plan, spent = Plan(identity.survey.count, identity.work.trials, 0, 0, 0), None
        if not rundir.finished:  # else the numbers are not needed, and reading a large run takes long
            index = rundir.load(repair=False)
            plan, spent = make_plan(identity.survey, identity.work, index), index.spent()
        return Outcome(rundir, plan, None, spent, skipped_graders=options.skip_graders, finisher=finisher)
    try:
        await_workers(rundir)
        with open_session(Finisher(identity, options, lease), display) as run:
            return replace(run.finished or complete(run), grade_only=False)
    finally:
        lease.release()


_AHEAD: Final = 8
"""the next chunk is claimed when fewer trials than this are ready"""
_LOOK_SECONDS: Final = min(0.5, LEASE_SECONDS / 10)
_LONGEST_PAUSE: Final = 4 * _LOOK_SECONDS
"""between two looks for a chunk"""
_FOLLOW_SECONDS: Final = 10.0
"""how often a worker reads what the others have spent, for budgets"""


class Chunks(Supply):
    """The trials of a worker, chunk by chunk.

    The next chunk is claimed while the last trials of the previous one start, so that the window stays full. If no
    chunk is free, the worker waits: a chunk becomes free when its owner dies or leaves.
    """

    def __init__(self, session: Session, claim_round: Round, claims: Claims) -> None:
        super().__init__(iter(()))
        self._session = session
        self._round = claim_round
        self._claims = claims
        self._rows = _Rows(session, claim_round)
        self._ready: deque[PendingTrial] = deque()
        self._chunk_of: dict[str, int] = {}
        """by trial in progress: its chunk"""
        self._open: dict[int, int] = {}
        """by chunk: how many of its trials have not ended"""
        self._task: asyncio.Task[None] | None = None
        self._found_none = False
        """no chunk was free at the last look"""
        self._over = False
        self._failure: Fault | DataError | None = None
        self._woken = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        limits = session.identity.spec.limits
        self._has_budget = limits.max_cost is not None or limits.token_budget is not None
        self._following: asyncio.Task[None] | None = None

    @property
    def settled(self) -> bool:
        """True unless a chunk is being claimed. Chunks of other workers may become free at any time."""
        return self._task is None or self._found_none

    @property
    def all_done(self) -> bool:
        """True once all chunks of the round are done, by any worker."""
        return self._over

    def next(self) -> PendingTrial | None:
        """Return the next trial of the claimed chunks, and claim ahead."""
        if self._failure is not None:
            raise self._failure
        if len(self._ready) < _AHEAD and not self._over:
            self._claim_ahead()
        return self._ready.popleft() if self._ready else None

    def ended(self, pending: PendingTrial) -> None:
        """Mark a chunk as done when its last trial has ended: one rename for many trials, so it may block."""
        chunk = self._chunk_of.pop(pending.key)
        self._open[chunk] -= 1
        if not self._open[chunk]:
            del self._open[chunk]
            self._claims.finish(chunk)
            self._woken.set()

    async def more(self, brake: Brake) -> bool:
        """Wait for a chunk."""
        while not (self._ready or self._over or self._failure or brake.pulled):
            await brake.wait_for(self._claim_ahead())
        return bool(self._ready or self._failure) and not brake.pulled

    def _claim_ahead(self) -> asyncio.Task[None]:
        """Start claiming a chunk, unless that is in progress."""
        if self._following is None and self._has_budget:
            self._following = asyncio.create_task(self._follow())
        if self._task is None:
            self._task = asyncio.create_task(self._fetch())
        return self._task

    async def close(self) -> None:
        """Give back unfinished chunks, so that other workers can take them at once."""
        tasks = [task for task in (self._task, self._following) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for chunk in self._open:
            await asyncio.to_thread(self._claims.give_back, chunk)

    async def _fetch(self) -> None:
        try:
            self._found_none, pause = False, _LOOK_SECONDS
            while not self._over and not await self._claim_one():
                self._found_none = True
                self._woken.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), pause)
                pause = min(_LONGEST_PAUSE, 1.5 * pause)
        except (Fault, DataError) as error:
            self._failure = error
        except OSError as error:
            self._failure = Fault(
                "disk", f"cannot claim a chunk: {error}", remedy="Fix the disk, then rerun the same command to resume."
            )
        except Exception as error:  # whoever waits for a chunk must be told
            self._failure = Fault("rejected", f"cannot claim a chunk: {error!r}")
        finally:
            self._task = None
        self.arrived()

    async def _claim_one(self) -> bool:
        """Claim a chunk with unfinished trials; return False if none is free at the moment."""
        while True:
            claim = await asyncio.to_thread(self._claims.take)
            if claim is None:
                self._over = self._claims.over
                return False
            chunk, begun_before = claim
            self._open[chunk] = 0  # claimed, so it is given back if the worker has to stop now
            if begun_before:
                await self._catch_up()
            trials = await asyncio.to_thread(self._rows.pending, chunk)
            if self._round.skip_graders:
                trials = [pending for pending in trials if pending.output is None]
            if not trials:
                del self._open[chunk]
                await asyncio.to_thread(self._claims.finish, chunk)
                continue
            self._open[chunk] = len(trials)
            self._chunk_of.update((pending.key, chunk) for pending in trials)
            self._ready.extend(trials)
            return True

    async def _catch_up(self) -> None:
        """Read what the other workers have done and spent."""
        async with self._one_at_a_time:
            session = self._session
            session.index = await asyncio.to_thread(session.rundir.follow, session.index)
            session.spent.become(session.index.spent())

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_FOLLOW_SECONDS)
            with suppress(OSError):  # the next read sees it
                await self._catch_up()


class _Rows:
    """Reads the samples of chunks.

    If each row is a line, reading starts at the chunk's first line. Otherwise rows are read in order, and again from
    the beginning if chunks are not in order; rows of other workers' chunks are skipped without making samples.
    """

    def __init__(self, session: Session, claim_round: Round) -> None:
        self._session = session
        self._round = claim_round
        self._rows: Iterator[tuple[str, Row]] = iter(())
        self._next: int | None = None
        """position of the row that comes next; None: nothing was read yet"""
        self._last: tuple[int, Sample] | None = None
        """the sample that was read last; the next chunk may have further trials of it"""

    def pending(self, chunk: int) -> list[PendingTrial]:
        """Return the unfinished trials of a chunk."""
        identity, (first, end) = self._session.identity, self._round.chunks[chunk]
        per_sample = identity.work.trials
        unfinished: list[PendingTrial] = []
        self._go_to(first // per_sample, chunk)
        for position, sample in self._between(first // per_sample, (end - 1) // per_sample):
            panel = identity.survey.panels.panel_at(position)
            numbers = range(max(first, position * per_sample), min(end, (position + 1) * per_sample))
            unfinished += find_pending(sample, panel, identity.work, self._session.index, numbers)
        return unfinished

    def _go_to(self, first: int, chunk: int) -> None:
        """Move to the first row of a chunk, unless it is the row that comes next or was read last."""
        dataset = self._session.identity.dataset
        if self._next == first or (self._last is not None and self._last[0] == first):
            return
        if chunk < len(self._round.starts):
            self._rows, self._next = dataset.rows_from(LineStart(*self._round.starts[chunk])), first
        elif self._next is None or self._next > first:
            self._rows, self._next = dataset.rows(), 0
        deque(islice(self._rows, first - self._next), maxlen=0)

    def _between(self, first: int, last: int) -> Iterator[tuple[int, Sample]]:
        identity = self._session.identity
        if self._last is not None and self._last[0] == first:
            yield self._last
            first += 1
        for position in range(first, last + 1):
            self._next = position + 1
            row = next(self._rows, None)
            if row is None:
                raise dataset_changed("it has fewer rows now")
            self._last = position, check_sample(identity.dataset.sample(row), identity.survey, position)
            yield self._last
