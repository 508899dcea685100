"""The brake wakes whoever waits for something that it makes superfluous."""

from __future__ import annotations

import asyncio

from holdfast.engine.brake import Brake
from holdfast.errors import Fault


def test_waiting_for_a_task_ends_with_the_task_or_the_brake() -> None:
    async def wait() -> None:
        brake, step = Brake(), asyncio.Event()
        task = asyncio.create_task(_until(step))
        waiting = asyncio.create_task(brake.wait_for(task))
        await asyncio.sleep(0)
        assert not waiting.done()
        step.set()
        await waiting
        assert task.done() and not brake.pulled
        endless = asyncio.create_task(_until(asyncio.Event()))
        waiting = asyncio.create_task(brake.wait_for(endless))
        await asyncio.sleep(0)
        brake.pull(Fault("disk", "full"))
        await waiting
        assert not endless.done(), "it may be needed for closing"
        endless.cancel()

    asyncio.run(asyncio.wait_for(wait(), 60))


async def _until(event: asyncio.Event) -> None:
    await event.wait()
