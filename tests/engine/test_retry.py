"""One timer limits the time of many attempts, as asyncio's own time-outs would; the brake wakes whoever waits."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.engine.admission import Brake
from holdfast.engine.retry import TimeLimits
from holdfast.errors import Fault


async def forever(limits: TimeLimits, when: float) -> str:
    try:
        with limits.at(when):
            await asyncio.get_running_loop().create_future()
    except TimeoutError as error:
        assert isinstance(error.__cause__, asyncio.CancelledError)
        return "late"
    return "done"


async def test_each_attempt_ends_at_its_own_limit() -> None:
    limits, loop = TimeLimits(), asyncio.get_running_loop()
    now = loop.time()
    patient = asyncio.create_task(forever(limits, now + 600))
    await asyncio.sleep(0)  # the timer is set for the later limit first
    hasty = [asyncio.create_task(forever(limits, now + after)) for after in (0.01, 0.0, -1.0)]
    assert await asyncio.gather(*hasty) == ["late"] * 3
    assert not patient.done()
    patient.cancel()


async def test_an_attempt_that_ends_in_time_is_not_cancelled_and_shares_the_timer() -> None:
    limits, loop = TimeLimits(), asyncio.get_running_loop()
    timers = 0
    make = limits._set_timer

    def count(when: float) -> None:
        nonlocal timers
        timers += 1
        make(when)

    limits._set_timer = count  # type: ignore[method-assign]
    for _ in range(1000):
        with limits.at(loop.time() + 600):
            await asyncio.sleep(0)
    assert timers == 1
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


async def test_a_cancellation_from_elsewhere_is_not_a_time_out() -> None:
    limits, loop = TimeLimits(), asyncio.get_running_loop()
    task = asyncio.create_task(forever(limits, loop.time() + 600))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_suspended_limit_does_not_count_and_a_moved_one_does() -> None:
    limits, loop = TimeLimits(), asyncio.get_running_loop()
    with pytest.raises(TimeoutError), limits.at(loop.time() - 1) as limit:
        limit.reschedule(None)
        for _ in range(10):
            await asyncio.sleep(0)
        limit.reschedule(loop.time())
        await loop.create_future()


async def test_waiting_for_a_task_ends_with_the_task_or_the_brake() -> None:
    async with asyncio.timeout(60):
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


async def _until(event: asyncio.Event) -> None:
    await event.wait()
