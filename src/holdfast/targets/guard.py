"""A guard around the target of a plug-in: whatever it returns or raises, a run goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from holdfast.errors import Fault, HoldfastError
from holdfast.functions import describe_error, user_error
from holdfast.targets.python import settle_reply
from holdfast.targets.types import Target

if TYPE_CHECKING:
    from holdfast.spec.eval import Origin
    from holdfast.targets.types import Reply, Turn


class GuardedTarget(Target):
    """Turns exceptions of the plug-in into errors of a trial."""

    def __init__(self, target: Target, origin: Origin) -> None:
        super().__init__(target.block, origin)
        self._target = target

    async def __aenter__(self) -> Self:
        try:
            await self._target.__aenter__()
        except HoldfastError:
            raise
        except Exception as error:
            message = f"the target {self.block.kind!r} cannot be opened: {describe_error(error)}"
            raise Fault("rejected", message, remedy="Fix it, then run the same command again.") from error
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._target.__aexit__(*details)

    async def reply(self, turn: Turn) -> Reply:
        """Return the target's reply, once it is known to be one."""
        try:
            return settle_reply(await self._target.reply(turn))
        except HoldfastError:
            raise
        except Exception as error:
            raise user_error("agent", error) from error
