"""Why a run stops before all is done. Stopping means: nothing new starts; what is in flight may end."""

from __future__ import annotations

import asyncio

from holdfast.errors import BudgetReached, Fault, Interrupted

Reason = Fault | BudgetReached | Interrupted


class Brake:
    """Pulled once; the first reason stays."""

    def __init__(self) -> None:
        self.reason: Reason | None = None
        self._event = asyncio.Event()

    @property
    def pulled(self) -> bool:
        """Whether nothing new may start."""
        return self.reason is not None

    def pull(self, reason: Reason) -> None:
        """Stop admission."""
        if self.reason is None:
            self.reason = reason
            self._event.set()

    async def sleep(self, seconds: float) -> bool:
        """Sleep; True when that was cut short by the brake."""
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
            return True
        except TimeoutError:
            return False
