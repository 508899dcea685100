"""The brake stops a run early: nothing new starts, and what is in flight may end."""

from __future__ import annotations

import asyncio

from holdfast.errors import BudgetReached, Fault, Interrupted, Waiting

Reason = Fault | BudgetReached | Interrupted | Waiting


class Brake:
    """Stops admission once, and keeps the first reason for that."""

    def __init__(self) -> None:
        self.reason: Reason | None = None
        self._event = asyncio.Event()

    @property
    def pulled(self) -> bool:
        """True once nothing new may start."""
        return self.reason is not None

    def pull(self, reason: Reason) -> None:
        """Stop admission for a reason."""
        if self.reason is None:
            self.reason = reason
            self._event.set()

    async def sleep(self, seconds: float) -> bool:
        """Sleep; return True if the brake was pulled meanwhile."""
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
            return True
        except TimeoutError:
            return False

    async def wait_for(self, task: asyncio.Task[None]) -> None:
        """Wait until a task has ended or the brake is pulled."""
        pulled = asyncio.create_task(self._event.wait())
        try:
            await asyncio.wait([task, pulled], return_when=asyncio.FIRST_COMPLETED)
        finally:
            pulled.cancel()
