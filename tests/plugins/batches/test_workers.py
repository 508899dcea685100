"""Batches of several workers: a request that one has submitted is not submitted by another."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast.http.client import Client
from holdfast.plugins.batches.hub import Batches
from holdfast.plugins.batches.ledger import (
    BatchAbandoned,
    BatchCollected,
    BatchIntent,
    BatchStep,
    BatchStore,
    BatchSubmitted,
    BatchUploaded,
    apply,
)
from holdfast.spec.providers import endpoint_of
from holdfast.spec.target_schema import BatchBlock
from holdfast.store.rundir import RunDir
from holdfast.targets.types import ASKER
from tests.support.batches import BatchServer, batch_server
from tests.support.running import wait_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest

    from holdfast.plugins.batches.client import BatchClient

BODY = {"model": "m", "messages": [{"role": "user", "content": "question"}]}


class Attempt:
    """The attempt at a trial that asks."""

    key = "sha256:" + "0" * 64
    where = "target"

    def waiting(self) -> Any:
        return nullcontext()


class Worker:
    """A worker's part in the batches of a run."""

    def __init__(self, batches: Batches, client: BatchClient) -> None:
        self._batches = batches
        self._client = client

    async def ask(self) -> Any:
        """Ask the question until it is answered."""
        running = asyncio.create_task(self._batches.run())
        ASKER.set(Attempt())
        try:
            return await self._client.post(BODY)
        finally:
            running.cancel()


@asynccontextmanager
async def worker(run: Path, name: str, server: BatchServer) -> AsyncIterator[Worker]:
    """Open a worker, which reads the ledgers of all others."""
    journals = run / "workers" / name
    journals.mkdir(parents=True)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            Client(f"{server.url}/chat/completions", {"Authorization": "Bearer the-key"})
        )
        batches = Batches(
            BatchStore(RunDir(run), journals),
            notice=lambda _: None,
            held=lambda: True,
            idle=lambda: True,
            stopping=lambda: False,
            stop=lambda _: None,
            wait=True,
            live_limit=1,
        )
        endpoint = endpoint_of("m", "chat", server.url)
        asking = batches.client(client, endpoint, "/chat/completions", BatchBlock(), "target")
        assert asking is not None
        batches.open()
        yield Worker(batches, asking)


async def take_over(run: Path, server: BatchServer) -> bool:
    """Submit by one worker, which then dies, while another has read its intent; then ask by the other."""
    uploading = threading.Event()
    server.during["upload"] = uploading.wait
    async with worker(run, "a", server) as first:
        asked = asyncio.create_task(first.ask())
        await asyncio.to_thread(wait_for, lambda: "upload" not in server.during, "the first worker's intent")
        async with worker(run, "b", server) as second:
            uploading.set()
            await asyncio.to_thread(wait_for, lambda: server.batches, "the first worker's batch")
            asked.cancel()  # it dies before or after it has noted that the batch is submitted
            server.release()
            _, in_batch = await second.ask()
    return bool(in_batch)


def test_a_batch_submitted_after_another_worker_looked_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_BATCH_DOUBT_SECONDS", "0.5")
    with batch_server() as server:
        server.holds = True
        assert asyncio.run(take_over(tmp_path, server))
        assert server.billed == {"question": 1}
        assert len(server.batches) == 1


INTENT = BatchIntent("i", "server|key", "target", "digest", ("r",), 1.0)
ids = st.sampled_from(["batch_1", "batch_2"])
steps = st.one_of(
    st.just(BatchUploaded("i", "file", 2.0)),
    ids.map(lambda batch: BatchSubmitted("i", batch, 3.0)),
    st.just(BatchCollected("i", "completed", 1, 4.0)),
    st.one_of(st.none(), ids).map(lambda batch: BatchAbandoned("i", "why", 5.0, batch)),
)


@given(st.lists(steps, max_size=3), st.lists(steps, max_size=3))
def test_abandonments_and_submissions_of_two_ledgers_count_in_any_order(
    one: list[BatchStep], other: list[BatchStep]
) -> None:
    ends = []
    for order in ([INTENT, *one, *other], [INTENT, *other, *one]):
        batches: dict[str, Any] = {}
        apply(batches, order)
        ends.append(batches["i"])
    submitted = {step.batch for step in (*one, *other) if isinstance(step, BatchSubmitted)}
    if len(submitted) < 2:  # a batch has one id, unless its search found another's
        assert ends[0].waiting == ends[1].waiting
        assert ends[0].abandoned == ends[1].abandoned
