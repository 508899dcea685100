"""Sources of trials for the loop: all that are left, or for a worker chunk after chunk.

A worker claims chunks, and gives them back or marks them as done. It claims the next chunk while it starts the last
trials of the one before, so that the window stays full. If no chunk is free the worker waits, since a chunk becomes
free again when its owner dies or leaves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Final

from holdfast.data.dataset import dataset_changed
from holdfast.data.readers import LineStart
from holdfast.errors import DataError, Fault
from holdfast.plan.plan import check_sample, find_pending
from holdfast.store.lease import LEASE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.data.dataset import Sample
    from holdfast.data.readers import Row
    from holdfast.engine.brake import Brake
    from holdfast.engine.session import Session
    from holdfast.plan.plan import PendingTrial
    from holdfast.store.claims import Claims, Round


_AHEAD: Final = 8
"""the next chunk is claimed when fewer trials than this are ready"""
_LOOK_SECONDS: Final = min(0.5, LEASE_SECONDS / 10)
_LONGEST_PAUSE: Final = 4 * _LOOK_SECONDS
"""between two looks for a chunk"""
_FOLLOW_SECONDS: Final = 10.0
"""how often a worker reads what the others have spent, for budgets"""


class Supply:
    """The trials of a process that has the run to itself."""

    def __init__(self, trials: Iterator[PendingTrial]) -> None:
        self._trials = trials
        self.arrived: Callable[[], None] = lambda: None
        """called when trials have arrived"""

    def next(self) -> PendingTrial | None:
        """Return the next trial; None if there is none at the moment."""
        return next(self._trials, None)

    def ended(self, pending: PendingTrial) -> None:
        """Note that a trial is on disk, or given up."""

    @property
    def settled(self) -> bool:
        """True if no more trials are about to arrive."""
        return True

    async def more(self, brake: Brake) -> bool:
        """Wait for more trials while none is in flight; return False if none will come or the brake is pulled."""
        return False

    async def close(self) -> None:
        """Release what was not started."""


class Chunks(Supply):
    """The trials of a worker, chunk by chunk."""

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
        """True unless a chunk is being claimed. Chunks of other workers may become free at any later time."""
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
        """Mark a chunk as done when its last trial has ended. That is one rename for many trials, so it may block."""
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
            await asyncio.to_thread(self._session.index.read)
            self._session.spent.become(self._session.index.spent())

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_FOLLOW_SECONDS)
            with suppress(OSError):  # the next read sees it
                await self._catch_up()


class _Rows:
    """Reads the samples of chunks.

    If each row is a line, reading begins where the chunk does. Otherwise it goes forward while chunks come in order,
    else from the beginning; no samples are made of the rows between chunks, which are those of other workers.
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
