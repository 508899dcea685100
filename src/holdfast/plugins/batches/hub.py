"""The hub of a run's batch clients: submits batches, asks about them, and hands out their results.

A batch is submitted when everything in flight waits for one. This process or a later one waits for its results.
Nothing is paid for twice, because of the order of steps in the `ledger` and of these rules:

1. A request is named by the trial's key and its own digest. Before it is put into a batch, it is looked up in the
   results on disk and in the batches under way, including other processes' batches.
2. If it is unknown whether a batch was submitted, the provider is asked for it, and its requests wait meanwhile. The
   batch is abandoned only if it does not appear for a while.
3. A batch belongs to the account that submitted it. If the present account cannot see it, its requests are refused.
4. A batch that takes too long is cancelled, and its end awaited, before its requests are made again.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from holdfast import AttemptError, Usage
from holdfast.errors import Fault, Waiting
from holdfast.plugins.batches.client import AGAIN, LONGEST_PAUSE, BatchClient, BatchPool, Flight
from holdfast.plugins.batches.ledger import (
    Batch,
    BatchAbandoned,
    BatchCollected,
    BatchIntent,
    BatchStore,
    BatchSubmitted,
    BatchUploaded,
    now,
    result_lines,
)
from holdfast.plugins.batches.providers import BatchProblem, Look, batch_api_of, glance, same_answers
from holdfast.store.files import advice_for, make_directory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from holdfast.http.client import Client
    from holdfast.plugins.batches.client import BatchRequest
    from holdfast.spec.providers import ModelEndpoint
    from holdfast.spec.target_schema import BatchBlock
    from holdfast.store.lines import LineRef
    from holdfast.store.rundir import RunDir

_LOOK_SECONDS: Final = 0.25
_DOUBT_SECONDS: Final = 60.0
"""how long a batch may take to appear in the provider's list after it was submitted; $HOLDFAST_BATCH_DOUBT_SECONDS"""
_STALE_SECONDS: Final = 900.0
"""age of an intent whose batch would have appeared long ago"""
_AT_ONCE: Final = 256
"""results that are handed out before others get their turn"""
_PAID: Final = Usage(requests=1)
"""of a request that was run, and whose answer is lost"""


class _Results(NamedTuple):
    """The results of a batch."""

    seen: set[str]
    """requests with a result"""
    answers: dict[str, list[LineRef]]
    """by request: the places of its answers"""
    conflicts: set[str]
    """requests with answers that differ"""


class Batches:
    """The batches of a run, for all who ask for them in this process."""

    def __init__(
        self,
        store: BatchStore,
        *,
        notice: Callable[[str], None],
        held: Callable[[], bool],
        idle: Callable[[], bool],
        stopping: Callable[[], bool],
        stop: Callable[[Fault | Waiting], None],
        wait: bool,
        live_limit: int,
        forget: bool = False,
    ) -> None:
        """`idle` returns True if nothing in flight could make a request. With `forget`, results on disk are ignored."""
        self._store = store
        self._notice = notice
        self._held = held
        self._idle = idle
        self._stopping = stopping
        self._stop = stop
        self._wait = wait
        self._forget = forget
        self._pool = BatchPool(store.folder, live_limit)
        self._clients: list[BatchClient] = []
        self._flights: dict[str, Flight] = {}
        self._trouble_shown = False
        self._exchange = asyncio.Lock()
        """held while a batch is submitted, or its results are stored"""

    def client(
        self, client: Client, endpoint: ModelEndpoint, path: str, block: BatchBlock | None, where: str
    ) -> BatchClient | None:
        """Return a client for batches of a model, whose single requests `client` makes; None if it has no batches.

        `block` is None for a model that is asked live, in a run that has batches from before.
        """
        in_files = block is not None and block.via == "files"
        if not in_files and batch_api_of(endpoint) is None:
            return None
        joined = BatchClient(self._pool, client, endpoint, path, block, where)
        self._clients.append(joined)
        return joined

    def open(self) -> None:
        """Read the ledgers and the results, once all clients have joined."""
        for batch in self._store.refresh().values():
            self._know(batch)

    def _know(self, batch: Batch) -> None:
        """Take a batch from the ledgers into account."""
        intent = batch.intent.intent
        if batch.waiting and intent not in self._flights:
            self._add(Flight(batch, self._client_for(batch)))
        elif batch.collected is not None and not self._forget:
            self._index(batch)

    def _index(self, batch: Batch) -> None:
        """Note where the answers of a collected batch are. Errors do not count: their requests are made again."""
        with suppress(FileNotFoundError):  # removed once the run was finished
            results = self._read(batch)
            for name, refs in results.answers.items():
                if name not in results.conflicts:
                    self._pool.answers.setdefault(name, []).append(refs[0])
            self._pool.left |= set(batch.intent.requests) - results.seen

    def _read(self, batch: Batch) -> _Results:
        """Read which requests of a batch the file of its results answers."""
        seen: set[str] = set()
        answers: dict[str, list[LineRef]] = {}
        for ref, line in result_lines(self._store.results(batch)):
            name, answered = self._name(batch, line)
            if name is not None:
                seen.add(name)
            if name is not None and answered:
                answers.setdefault(name, []).append(ref)
        several = {name: refs for name, refs in answers.items() if len(refs) > 1}
        conflicts = {name for name, refs in several.items() if not same_answers(ref.read() for ref in refs)}
        return _Results(seen, answers, conflicts)

    @staticmethod
    def _name(batch: Batch, line: bytes) -> tuple[str | None, bool]:
        """Return the name of the request that a line of results is of, if it is one of the batch."""
        seen = glance(line)
        if seen is None:
            return None, False
        name, _, mark = seen[0].rpartition("-")
        return (name if mark == batch.intent.intent[:8] else None), seen[1]

    def _client_for(self, batch: Batch) -> BatchClient | None:
        """Return the client that may ask for a batch: one with its account, or else one of its server."""
        server = batch.intent.account.rpartition("|")[0]
        same = [client for client in self._clients if client.account == batch.intent.account]
        return next(iter([*same, *(each for each in self._clients if each.server == server)]), None)

    def _add(self, flight: Flight) -> None:
        self._flights[flight.batch.intent.intent] = flight
        for name in flight.batch.intent.requests:
            self._pool.flights[name] = flight

    def _remove(self, flight: Flight) -> None:
        self._flights.pop(flight.batch.intent.intent, None)
        for name in flight.batch.intent.requests:
            if self._pool.flights.get(name) is flight:
                del self._pool.flights[name]

    def summary(self) -> list[str]:
        """Describe the batches that somebody waits for."""
        return [f"waiting for batch {flight}" for flight in self._flights.values() if flight.waiters]

    async def run(self) -> None:
        """Submit, ask and hand out, until cancelled."""
        quiet = 0
        try:
            while True:
                await self._look_at_flights()
                if self._stopping():
                    self._drop_unsent()
                for client in self._clients:
                    await self._submit(client, whole=True)
                quiet = quiet + 1 if self._idle() else 0
                if quiet > 1:
                    await self._use_pause()
                await asyncio.sleep(_LOOK_SECONDS)
        except Fault as fault:
            self._stop(fault)
        except OSError as error:
            self._stop(Fault("disk", f"cannot keep the record of batches: {error}", remedy=advice_for(error)))

    def leave(self) -> None:
        """Let nobody wait for a batch any longer: another process collects it."""
        self._drop_unsent()
        for flight in self._flights.values():
            for future in flight.waiters.values():
                future.cancel()
            flight.waiters.clear()

    async def settle(self) -> None:
        """Return when no batch is being submitted, and no results are being stored."""
        async with self._exchange:
            pass

    async def _use_pause(self) -> None:
        """Submit the requests that have gathered; without any, leave unless the user wants to wait."""
        unsent = sum(len(client.unsent) for client in self._clients)
        if unsent and not self._stopping():
            self._catch_up()
            for client in self._clients:
                await self._submit(client, whole=False)
        elif not self._wait and not unsent and any(flight.waiters for flight in self._flights.values()):
            looked = all(flight.look or flight.batch.id is None for flight in self._flights.values() if flight.waiters)
            if looked:
                self._stop(Waiting("; ".join(self.summary())))

    def _drop_unsent(self) -> None:
        """Cancel the requests that were not submitted: the run is stopping."""
        for client in self._clients:
            for request in client.unsent.values():
                request.future.cancel()
            client.unsent.clear()

    def _catch_up(self) -> None:
        """Read what other workers have submitted and collected: one may have died with a request of ours."""
        before = {intent: (batch.collected, batch.abandoned) for intent, batch in self._store.batches.items()}
        for intent, batch in self._store.refresh().items():
            if batch.waiting or before.get(intent) != (batch.collected, batch.abandoned):
                self._know(batch)
        for client in self._clients:
            for name in [name for name in client.unsent if name in self._pool.flights or self._pool.answers.get(name)]:
                request = client.unsent.pop(name)
                if not request.future.done():
                    request.future.set_result(AGAIN)

    async def _submit(self, client: BatchClient, *, whole: bool) -> None:
        """Submit the requests that a client has gathered; with `whole`, only full batches."""
        while client.unsent and time.monotonic() >= client.not_before and not self._stopping():
            group, full = client.next_group()
            if whole and not full:
                return
            if not self._held():
                raise Fault("lease_lost", "another process has taken over this run")
            async with self._exchange:
                await self._send(client, group)

    async def _send(self, client: BatchClient, group: dict[str, BatchRequest]) -> None:
        """Submit one batch: record the intent, upload, submit, and record the id."""
        number = secrets.token_hex(8)
        spool = self._store.spool(number)
        try:
            digest = await asyncio.to_thread(
                client.api.write,
                spool,
                (client.api.line(f"{name}-{number[:8]}", msgspec.json.encode(r.body)) for name, r in group.items()),
            )
            intent = BatchIntent(number, client.account, client.where, digest, tuple(group), now())
            await self._store.write(intent)
            flight = Flight(self._store.batches[number], client)
            for name in group:
                if (request := client.unsent.pop(name, None)) is not None:
                    flight.waiters[name] = request.future
            self._add(flight)
            await self._hand_over(client, flight, spool)
        finally:
            with suppress(OSError):
                spool.unlink()

    async def _hand_over(self, client: BatchClient, flight: Flight, spool: Path) -> None:
        number, api = flight.batch.intent.intent, client.api
        uploaded = None
        try:
            if api.uploads:
                uploaded = await api.upload(spool, number)
                await self._store.write(BatchUploaded(number, uploaded, now()))
        except (AttemptError, Fault) as error:
            await self._give_up(client, flight, error)
            return
        if self._stopping() or not self._held():
            await self._abandon(flight, "the run stopped before it was submitted")
            return
        try:
            batch = await api.submit(spool, uploaded, number)
        except (AttemptError, Fault) as error:
            if _was_refused(error):
                await self._give_up(client, flight, error)
            else:
                self._notice(f"it is unknown whether a batch was submitted, which will be found out: {error.message}")
            return
        await self._store.write(BatchSubmitted(number, batch, now()))
        client.failures = 0
        count = len(flight.batch.intent.requests)
        about = f"{count:,} request{'s' * (count != 1)} of {client.where}"
        self._notice(f"{api.verb} batch {batch} with {about}{api.advice(batch)}")

    async def _give_up(self, client: BatchClient, flight: Flight, error: AttemptError | Fault) -> None:
        """Abandon a batch that the provider did not accept. Its requests are submitted again later, or fail."""
        await self._store.write(BatchAbandoned(flight.batch.intent.intent, error.message, now()))
        self._remove(flight)
        if isinstance(error, Fault) or not error.retry:
            remedy = error.remedy
            if error.status == 404:
                remedy = "This server has no batches: remove `batch` from the eval file."
            flight.fail(Fault("rejected", error.message, remedy=remedy))
            return
        self._postpone(client, error)
        flight.release()

    def _postpone(self, client: BatchClient, error: AttemptError) -> None:
        client.failures += 1
        delay = error.retry_after or min(LONGEST_PAUSE, 2.0**client.failures)
        client.not_before = time.monotonic() + delay
        if client.failures in (1, 10):
            self._notice(f"cannot submit a batch; trying again: {error.message}")

    async def _look_at_flights(self) -> None:
        """Ask about batches that somebody here waits for. Other batches belong to workers that may still be alive."""
        for flight in list(self._flights.values()):
            if not flight.waiters or flight.refused is not None or flight.client is None:
                continue
            if time.monotonic() >= flight.next_look:
                flight.schedule()
                try:
                    if flight.batch.id is None:
                        await self._settle(flight, flight.client)
                    if flight.batch.id is not None:
                        await self._poll(flight, flight.client)
                except AttemptError as error:
                    self._tell_once(error)
                except Fault as fault:
                    if fault.kind == "refused":  # the network may be back in a minute
                        self._tell_once(fault)
                    elif fault.status in (401, 403, 404):
                        flight.refuse(f": {fault.message}")
                    else:
                        raise

    def _tell_once(self, error: AttemptError | Fault) -> None:
        if not self._trouble_shown:
            self._trouble_shown = True
            self._notice(f"cannot ask about batches; trying again: {error.message}")

    async def look(self) -> dict[str, str]:
        """Ask once about all batches under way, and store the results of those that have ended.

        Nothing is submitted, cancelled or given up. Return the state of each, by intent. The caller holds the run's
        lease, so no other process is about to submit one of these batches.
        """
        return {intent: await self._state(flight) for intent, flight in list(self._flights.items())}

    async def _state(self, flight: Flight) -> str:
        batch, client = flight.batch, flight.client
        if client is None:
            return "not visible to this account"
        try:
            if batch.id is None and client.account == batch.intent.account:
                await self._find(flight, client)
            if batch.id is None:
                return "not found at the provider, which may not show it yet"
            look = await self._ask(flight, client)
            if look.ended and look.files:
                await self._collect(flight, client, look)
        except (AttemptError, Fault) as error:
            return f"unknown: {error.message}"
        return flight.progress if look.problem is None else f"{look.status}: {look.problem.message}"

    async def _settle(self, flight: Flight, client: BatchClient) -> None:
        """Find out what became of a batch without an id."""
        batch = flight.batch
        self._store.refresh()  # its writer may have got further before it died
        if batch.id is not None:
            return
        if client.api.uploads and batch.file is None:
            await self._abandon(flight, "it was not submitted")
            return
        if client.account != batch.intent.account:
            flight.refuse()
            return
        if flight.doubt_until is None:
            fresh = time.time() - max(batch.sent, batch.intent.time) < _STALE_SECONDS
            flight.doubt_until = time.monotonic() + (_doubt_seconds() if fresh else 0.0)
        sighting = await self._find(flight, client)
        if not sighting and time.monotonic() >= flight.doubt_until:
            await self._abandon(flight, "the provider has no such batch")

    async def _find(self, flight: Flight, client: BatchClient) -> bool:
        """Look for a batch without an id at the provider; return whether it is there, or may be."""
        batch = flight.batch
        others = {each.id for each in self._store.batches.values() if each.id is not None}
        sighting = await client.api.find(batch, others)
        if isinstance(sighting, Look):
            await self._store.write(BatchSubmitted(batch.intent.intent, sighting.id, now(), adopted=True))
            self._notice(f"batch {sighting.id} was submitted before the last process ended")
        return bool(sighting)

    async def _abandon(self, flight: Flight, why: str) -> None:
        await self._store.write(BatchAbandoned(flight.batch.intent.intent, why, now(), flight.batch.id))
        self._remove(flight)
        flight.release()

    async def _ask(self, flight: Flight, client: BatchClient) -> Look:
        assert flight.batch.id is not None
        look = await client.api.look(flight.batch.id)
        self._trouble_shown = False
        if flight.look is not None and look.done != flight.look.done:
            flight.since = time.monotonic()
        flight.look = look
        return look

    async def _poll(self, flight: Flight, client: BatchClient) -> None:
        batch = flight.batch
        assert batch.id is not None
        look = await self._ask(flight, client)
        if look.ended and look.problem is not None and not look.files:
            await self._refused_whole(flight, client, look.problem)
        elif look.ended:
            await self._collect(flight, client, look)
        elif client.late(batch) and not flight.cancelled_here:
            await client.api.cancel(batch.id)
            flight.cancelled_here = True
            self._notice(f"batch {batch.id} has taken longer than max_wait and is being cancelled")

    async def _refused_whole(self, flight: Flight, client: BatchClient, problem: BatchProblem) -> None:
        """Handle a batch that the provider refused as a whole."""
        batch = flight.batch
        await self._store.write(BatchAbandoned(batch.intent.intent, problem.message, now(), batch.id))
        self._remove(flight)
        message = f"batch {batch.id} failed: {problem.message}"
        if problem.full:
            self._postpone(client, AttemptError("rate_limit", message))
        elif not problem.lines:
            flight.fail(Fault("rejected", message, remedy="Fix what it says, then run the same command again."))
        else:
            for number in problem.lines:
                name = batch.intent.requests[number] if 0 <= number < len(batch.intent.requests) else ""
                flight.answer(name, AttemptError("bad_request", message, retry=False))
        flight.release()

    async def _collect(self, flight: Flight, client: BatchClient, look: Look) -> None:
        """Store the results of a batch, and hand them out."""
        batch = flight.batch
        path = self._store.results(batch)
        async with self._exchange:
            await asyncio.to_thread(make_directory, path.parent)
            results = await self._download(batch, client, look)
            seen = results.seen
            await self._store.write(BatchCollected(batch.intent.intent, look.status, len(seen), now()))
        self._remove(flight)
        self._notice(
            f"batch {batch.id} is {look.status}: {len(seen):,} of {len(batch.intent.requests):,} requests have a result"
        )
        self._refuse_conflicts(flight, results.conflicts)
        lost = look.results is not None and len(seen) < look.results
        handled, handed_out = set(results.conflicts), 0
        for ref, line in result_lines(path):
            name, answered = self._name(batch, line)
            result = None if name is None else client.api.read(line)
            if name is None or result is None or name in handled or (name in results.answers and not answered):
                continue
            if not result.run:
                seen.discard(name)
                continue
            handled.add(name)
            if flight.answer(name, ref):
                handed_out += 1
                if handed_out % _AT_ONCE == 0:
                    await asyncio.sleep(0)
            elif answered:
                self._pool.answers.setdefault(name, []).append(ref)
        self._hand_back(flight, look, set(batch.intent.requests) - seen, lost=lost)

    async def _download(self, batch: Batch, client: BatchClient, look: Look) -> _Results:
        """Store the results of a batch; fetch them again if the provider counts more."""
        pause = _LOOK_SECONDS
        for last in (False, False, True):
            await client.api.download(look, self._store.results(batch))
            results = self._read(batch)
            if last or look.results is None or len(results.seen) >= min(look.results, len(batch.intent.requests)):
                break
            self._notice(
                f"batch {batch.id} has {look.results:,} results, of which {len(results.seen):,} have arrived; "
                "they are fetched again"
            )
            await asyncio.sleep(pause)
            pause *= 4
        return results

    def _refuse_conflicts(self, flight: Flight, names: set[str]) -> None:
        """Raise an error for requests that have several answers: nobody knows which one is theirs."""
        if names:
            requests = "1 request" if len(names) == 1 else f"{len(names):,} requests"
            self._notice(f"batch {flight.batch.id} has different answers to {requests}, which will be asked again")
        for name in names:
            message = f"batch {flight.batch.id} has different answers to this request, under one custom_id"
            flight.answer(name, AttemptError("bad_reply", message, usage=_PAID))

    def _hand_back(self, flight: Flight, look: Look, unanswered: set[str], *, lost: bool) -> None:
        """Decide about the requests that a batch has not answered; `lost`: the provider counts more results."""
        if look.status in ("expired", "cancelled", "canceled"):
            self._pool.left |= unanswered
        if look.cancelled and not flight.cancelled_here and flight.waiters:
            flight.fail(
                Fault(
                    "rejected",
                    f"batch {look.id} was cancelled before {len(unanswered):,} of its requests were answered",
                    remedy="The same command submits them again.",
                )
            )
        elif look.status in ("expired", "cancelled", "canceled"):
            flight.release()
        else:
            message = f"batch {look.id} has no result for this request"
            flight.fail(AttemptError("server", message, usage=_PAID if lost else None))


def open_batches(rundir: RunDir, journals: Path, **options: Any) -> Batches:
    """Return the batches of a run; `journals` is the folder of this process's ledger, `options` as for `Batches`."""
    return Batches(BatchStore(rundir, journals), **options)


def _doubt_seconds() -> float:
    return float(os.environ.get("HOLDFAST_BATCH_DOUBT_SECONDS") or _DOUBT_SECONDS)


def _was_refused(error: AttemptError | Fault) -> bool:
    """Return True if a request certainly had no effect."""
    if isinstance(error, Fault):
        return True
    return error.status is not None and error.status < 500 and error.status not in (408, 409)
