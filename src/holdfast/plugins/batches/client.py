"""The requests of one model that are answered in batches, and those who wait for the answers.

`BatchClient.post` takes a request as `Client.post` does, and returns when its batch has been answered.
"""

from __future__ import annotations

import asyncio
import os
import time
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from holdfast import AttemptError
from holdfast.errors import Fault
from holdfast.plugins.batches.providers import FILES, FileBatches, batch_api_of
from holdfast.spec.redact import shown_url
from holdfast.targets.types import ASKER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.http.client import Client
    from holdfast.plugins.batches.ledger import Batch
    from holdfast.plugins.batches.providers import BatchApi, Look
    from holdfast.spec.providers import ModelEndpoint
    from holdfast.spec.target_schema import BatchBlock
    from holdfast.store.lines import LineRef
    from holdfast.targets.types import Asker


AGAIN: Final = object()
"""stands for the result of a request that was not run"""
LONGEST_PAUSE: Final = 60.0
"""between two questions about a batch"""


class BatchRequest(NamedTuple):
    """A request that waits to be submitted."""

    body: Any
    size: int
    future: asyncio.Future[LineRef | object]


class BatchPool:
    """Which requests of a run are being made, wait in a batch, were answered, or were left unanswered."""

    def __init__(self, folder: Path, live_limit: int) -> None:
        self.folder = folder
        """of the results, and of batches that are files"""
        self.live = asyncio.Semaphore(live_limit)
        """limits the requests that are made outside of batches"""
        self.busy: set[str] = set()
        """requests that are being made"""
        self.flights: dict[str, Flight] = {}
        """by request"""
        self.answers: dict[str, list[LineRef]] = {}
        """by request: results that nobody has asked for yet; each is given out once"""
        self.left: set[str] = set()
        """requests that a batch has left unanswered"""

    def flight_of(self, name: str) -> Flight | None:
        """Return the batch in which a request waits; raise Fault if this account cannot see it."""
        flight = self.flights.get(name)
        if flight is not None and (flight.refused is not None or flight.client is None):
            raise copy_error(flight.refused or flight.refuse())
        return flight


class BatchClient:
    """Makes the requests of one model in batches; with `then: live`, directly if a batch left them unanswered."""

    def __init__(
        self, pool: BatchPool, client: Client, endpoint: ModelEndpoint, path: str, block: BatchBlock | None, where: str
    ) -> None:
        """`block` is None for a model that is asked live, in a run that has batches from before."""
        self._pool = pool
        self._client = client
        self._block = block
        self.where = where
        self.api: BatchApi
        if block is not None and block.via == "files":
            self.api, self.account = FileBatches(client, pool.folder, path), FILES
        else:
            api = batch_api_of(endpoint)
            assert api is not None
            self.api = api(client, endpoint.urls[0], path)
            key = os.environ.get(endpoint.key_env, "")
            self.account = f"{shown_url(endpoint.urls[0])}|{sha256(key.encode()).hexdigest()[:12]}"
        self.server = self.account.rpartition("|")[0]
        self.unsent: dict[str, BatchRequest] = {}
        self.not_before = 0.0
        self.failures = 0
        """to submit a batch, in a row"""

    @property
    def _size(self) -> int:
        size = None if self._block is None else self._block.size
        return min(self.api.most_requests, size or self.api.most_requests)

    def late(self, batch: Batch) -> bool:
        """Return True if a batch has taken longer than the user wants to wait."""
        longest = None if self._block is None else self._block.max_wait
        return longest is not None and time.time() - batch.sent > longest

    def next_group(self) -> tuple[dict[str, BatchRequest], bool]:
        """Return the next requests that fit into one batch, and whether it is full with them."""
        group: dict[str, BatchRequest] = {}
        total = 0
        for name, request in self._pending():
            total += request.size
            if group and total > self.api.most_bytes:
                return group, True
            group[name] = request
            if len(group) == self._size:
                return group, True
        return group, False

    def _pending(self) -> Iterator[tuple[str, BatchRequest]]:
        for name, request in list(self.unsent.items()):
            if request.future.done():
                del self.unsent[name]  # its trial was cancelled
            else:
                yield name, request

    async def post(self, body: Any) -> tuple[Any, bool]:
        """Return the reply to a request, and whether it comes from a batch."""
        asker = ASKER.get()
        data = msgspec.json.encode(body)
        base = f"{asker.key.rpartition(':')[2][:24]}-{sha256(asker.where.encode() + b'|' + data).hexdigest()[:24]}"
        name, number = base, 1
        while name in self._pool.busy:  # an equal request of the same trial, which is another one all the same
            number += 1
            name = f"{base}-{number}"
        self._pool.busy.add(name)
        try:
            return await self._post(name, body, len(data) + 200, asker)
        finally:
            self._pool.busy.discard(name)

    async def _post(self, name: str, body: Any, size: int, asker: Asker) -> tuple[Any, bool]:
        while True:
            refs = self._pool.answers.get(name)
            result: LineRef | object | None = refs.pop() if refs else None
            if result is None:
                flight = self._pool.flight_of(name)
                if flight is None and self._goes_alone(name):
                    async with self._pool.live:
                        return await self._client.post(body), False
                with asker.waiting():
                    result = await self._wait(
                        name, BatchRequest(body, size, asyncio.get_running_loop().create_future()), flight
                    )
            if result is not AGAIN:
                return self._read(result), True  # type: ignore[arg-type]  # everything but `AGAIN` is a place

    def _goes_alone(self, name: str) -> bool:
        return self._block is None or (self._block.then == "live" and name in self._pool.left)

    async def _wait(self, name: str, request: BatchRequest, flight: Flight | None) -> LineRef | object:
        if flight is None:
            self.unsent[name] = request
        else:
            flight.waiters[name] = request.future
        try:
            return await request.future
        finally:
            if self.unsent.get(name) is request:
                del self.unsent[name]

    def _read(self, ref: LineRef) -> Any:
        result = self.api.read(ref.read())
        if result is None:
            raise AttemptError("bad_reply", f"a result of a batch cannot be read: {ref.path}")
        if result.error is not None:
            raise result.error
        return self._client.check(result.reply)


class Flight:
    """A batch whose results are still to come."""

    def __init__(self, batch: Batch, client: BatchClient | None) -> None:
        self.batch = batch
        self.client = client
        """None: no client of this process has the account"""
        self.doubt_until: float | None = None
        """by the monotonic clock: when a batch that does not appear counts as never submitted; None: not looked for"""
        self.waiters: dict[str, asyncio.Future[LineRef | object]] = {}
        self.look: Look | None = None
        self.since = time.monotonic()
        self.next_look = 0.0
        self.cancelled_here = False
        self.refused: Fault | None = None

    def __str__(self) -> str:
        return f"{self.batch.name}: {self.progress}"

    @property
    def progress(self) -> str:
        """How far the batch is, in words."""
        count = len(self.batch.intent.requests)
        if self.look is None:
            return f"? of {count:,} done"
        if self.look.total in (0, count):
            return f"{self.look.done:,} of {count:,} done"
        return f"{self.look.done / self.look.total:.0%} of {count:,} done"

    def schedule(self) -> None:
        """Ask again later: soon at first, ever more rarely while nothing changes."""
        age = time.monotonic() - self.since
        self.next_look = time.monotonic() + min(LONGEST_PAUSE, max(1.0, age / 10))

    def answer(self, name: str, outcome: LineRef | object | AttemptError | Fault) -> bool:
        """Hand a result or an error to whoever waits for a request; return False if nobody does."""
        future = self.waiters.pop(name, None)
        if future is None or future.done():
            return False
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
        return True

    def fail(self, error: AttemptError | Fault) -> None:
        """Raise an error for everybody who waits for this batch."""
        for name in list(self.waiters):
            self.answer(name, copy_error(error))

    def refuse(self, reason: str = "") -> Fault:
        """Raise an error for everybody who waits for this batch, which this account cannot see."""
        batch = self.batch
        server, _, key = batch.intent.account.rpartition("|")
        about = f"batch {batch.name} ({len(batch.intent.requests):,} requests)"
        message = f"{about} was submitted to {server} with the key {key}, and this account does not see it{reason}"
        remedy = (
            "Set that key and server again to collect the batch. To give the batch up, and pay for its requests once "
            "more: holdfast batches RUN --abandon"
        )
        if batch.intent.account == FILES:
            message = f"{about} was written to a file, whose answers are still to come"
            remedy = "Set `batch: {via: files}` again to collect it. To give it up: holdfast batches RUN --abandon"
        self.refused = Fault("rejected", message, remedy=remedy)
        self.fail(self.refused)
        return self.refused

    def release(self) -> None:
        """Let everybody who waits for this batch ask again."""
        for name in list(self.waiters):
            self.answer(name, AGAIN)


def copy_error(error: AttemptError | Fault) -> AttemptError | Fault:
    """Return an error for one of many who get it: each raise adds to an error's traceback."""
    if isinstance(error, Fault):
        return Fault(error.kind, error.message, remedy=error.remedy, status=error.status, away=error.away)
    return AttemptError(
        error.kind, error.message, remedy=error.remedy, status=error.status, retry=error.retry, usage=error.usage
    )
