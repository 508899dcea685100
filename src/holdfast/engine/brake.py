"""The brake stops a run early: nothing new starts, and what is in flight may end.

A fault stops admission: what a trial has begun, its grades included, is completed. So does a budget, except that no
further call of a trial with several calls starts: such a trial resumes in the middle. A user who wants the process to
end halts the run: no request starts any more, also inside a trial or for a grade; requests in flight end.
"""

from __future__ import annotations

import asyncio

from holdfast.errors import BudgetReached, Fault, Interrupted, Waiting

Reason = Fault | BudgetReached | Interrupted | Waiting


class Halted(Exception):
    """No request may start any more; the trial or grade continues in another process, from what is on record."""


class Brake:
    """Stops admission once, and keeps the first reason for that."""

    def __init__(self) -> None:
        self.reason: Reason | None = None
        self.halted = False
        """no request may start any more"""
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

    def halt(self, reason: Reason) -> None:
        """Stop admission, and let no further request start in what is already admitted."""
        self.halted = True
        self.pull(reason)

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
