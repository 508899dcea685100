"""Between the engine and the target of a plug-in: whatever it returns or raises, a run goes on."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace

from holdfast.errors import Fault, HoldfastError
from holdfast.functions import describe_error, user_errors
from holdfast.spec.plugins import load_reference
from holdfast.targets.python import settle_reply
from holdfast.targets.types import PROXY, Target

if TYPE_CHECKING:
    from holdfast.data.dataset import Sample
    from holdfast.spec.eval import Origin
    from holdfast.spec.trial_limits import RowLimits
    from holdfast.targets.proxy import Proxy
    from holdfast.targets.types import Reply, Turn


class GuardedTarget(Target):
    """Turns exceptions of the plug-in into errors of a trial, and opens the proxy if its block asks for one."""

    def __init__(self, target: Target, origin: Origin) -> None:
        super().__init__(target.block, origin)
        self._target = target
        self._proxy: Proxy | None = None
        if target.block.proxied:
            self._proxy = load_reference(PROXY)(target.block, origin.spec.prices)
        self._opened = AsyncExitStack()

    def limits(self, sample: Sample) -> RowLimits | None:
        """Return the limits that the plug-in has for a row."""
        with user_errors("agent", passed=(HoldfastError,)):
            return self._target.limits(sample)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opening:
            if self._proxy is not None:
                await opening.enter_async_context(self._proxy)
            try:
                await opening.enter_async_context(self._target)
            except HoldfastError:
                raise
            except Exception as error:
                message = f"the target {self.block.kind!r} cannot be opened: {describe_error(error)}"
                raise Fault("rejected", message, remedy="Fix it, then run the same command again.") from error
            self._opened = opening.pop_all()
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._opened.aclose()

    @property
    def final_notices(self) -> list[str]:
        """What the proxy has to report."""
        return [] if self._proxy is None else self._proxy.final_notices

    async def reply(self, turn: Turn) -> Reply:
        """Return the target's reply, once it is known to be one. Its model calls go through the proxy meanwhile."""
        calls = turn.calls
        if self._proxy is None or calls is None:
            return await self._reply(turn)
        with self._proxy.serving(calls) as url:
            return await self._reply(replace(turn, base_url=url, environment=self._proxy.variables(calls)))

    async def _reply(self, turn: Turn) -> Reply:
        with user_errors("agent", passed=(HoldfastError,)):
            return settle_reply(await self._target.reply(turn))
