"""The requests of one model that are answered in batches, and those who wait for the answers.

`BatchClient.post` takes a request as `Client.post` does, and returns when its batch has been answered.
"""

from __future__ import annotations

import asyncio
import os
import time
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

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


class _Hub(Protocol):
    """The batches of a run, as a client sees them."""

    busy: set[str]
    """requests that are being made"""
    live: asyncio.Semaphore
    """limits the requests that are made outside of batches"""

    @property
    def folder(self) -> Path:
        """The folder of batches that are files."""
        ...

    def take(self, name: str) -> LineRef | None:
        """Take a result that is on disk; each is given out once."""
        ...

    def flight_of(self, name: str) -> Flight | None:
        """Return the batch in which a request waits; raise Fault if this account cannot see it."""
        ...

    def was_left(self, name: str) -> bool:
        """Return True if a batch has left a request unanswered."""
        ...


class BatchClient:
    """Makes the requests of one model in batches; with `then: live`, directly if a batch left them unanswered."""

    def __init__(
        self, hub: _Hub, client: Client, endpoint: ModelEndpoint, path: str, block: BatchBlock | None, where: str
    ) -> None:
        """`block` is None for a model that is asked live, in a run that has batches from before."""
        self._hub = hub
        self._client = client
        self._block = block
        self.where = where
        self.api: BatchApi
        if block is not None and block.via == "files":
            self.api, self.account = FileBatches(client, hub.folder, path), FILES
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
        while name in self._hub.busy:  # an equal request of the same trial, which is another one all the same
            number += 1
            name = f"{base}-{number}"
        self._hub.busy.add(name)
        try:
            return await self._post(name, body, len(data) + 200, asker)
        finally:
            self._hub.busy.discard(name)

    async def _post(self, name: str, body: Any, size: int, asker: Asker) -> tuple[Any, bool]:
        while True:
            result: LineRef | object | None = self._hub.take(name)
            if result is None:
                flight = self._hub.flight_of(name)
                if flight is None and self._goes_alone(name):
                    async with self._hub.live:
                        return await self._client.post(body), False
                with asker.waiting():
                    result = await self._wait(
                        name, BatchRequest(body, size, asyncio.get_running_loop().create_future()), flight
                    )
            if result is not AGAIN:
                return self._read(result), True  # type: ignore[arg-type]  # everything but `AGAIN` is a place

    def _goes_alone(self, name: str) -> bool:
        return self._block is None or (self._block.then == "live" and self._hub.was_left(name))

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
