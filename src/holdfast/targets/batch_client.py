"""The client of a model whose requests are answered in batches."""

from __future__ import annotations

import asyncio
import os
import time
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.errors import AttemptError
from holdfast.spec.redact import shown_url
from holdfast.targets.asking import ASKER
from holdfast.targets.batch_apis import batch_api_of
from holdfast.targets.batch_files import ACCOUNT, FileBatches
from holdfast.targets.batches import AGAIN, BatchRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.spec.providers import ModelEndpoint
    from holdfast.spec.target_schema import BatchBlock
    from holdfast.store.batches import Batch
    from holdfast.store.lines import LineRef
    from holdfast.targets.asking import Asker
    from holdfast.targets.batch_apis import BatchApi
    from holdfast.targets.batches import Batches, Flight
    from holdfast.targets.client import Client


class BatchClient:
    """Makes the requests of one model in batches, or alone where that is what remains."""

    def __init__(
        self, hub: Batches, client: Client, endpoint: ModelEndpoint, path: str, block: BatchBlock | None, where: str
    ) -> None:
        """`block` is None for a model that is asked live, in a run that has batches from before."""
        self._hub = hub
        self._client = client
        self._block = block
        self.where = where
        self.api: BatchApi
        if block is not None and block.via == "files":
            self.api, self.account = FileBatches(client, hub.folder, path), ACCOUNT
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
        hub.join(self)

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
        base = f"{_hex(asker.key)[:24]}-{sha256(asker.where.encode() + b'|' + data).hexdigest()[:24]}"
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
                    result = await self._wait(name, BatchRequest(body, size, _new_future()), flight)
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


def _hex(key: str) -> str:
    """Return the digits of a key."""
    return key.rpartition(":")[2]


def _new_future() -> asyncio.Future[LineRef | object]:
    return asyncio.get_running_loop().create_future()
