"""Patterns that could take for ever, matched in processes of their own with a time limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from holdfast.errors import AttemptError
from holdfast.graders.pool import NoAnswer, Pool
from holdfast.spec.regex import ANSWERS, Slow

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from holdfast.graders.types import Verdict
    from holdfast.spec.regex import Request

SECONDS: Final = 5.0
"""for one match"""


class Matching:
    """Completes checks that met a slow pattern."""

    def __init__(self) -> None:
        self._pool = Pool("pattern_worker.py")

    async def complete(self, check: Callable[[], Awaitable[Verdict]]) -> Verdict:
        """Call a check until nothing in it is slow any more: each time a worker has answered one more match."""
        answers: dict[Request, int | None] = {}
        before = ANSWERS.set(answers)
        try:
            while True:
                try:
                    return await check()
                except Slow as slow:
                    answers[slow.request] = await self._match(slow.request)
        finally:
            ANSWERS.reset(before)

    async def close(self) -> None:
        """End the processes."""
        await self._pool.close()

    async def _match(self, request: Request) -> int | None:
        try:
            end: int | None = (await self._pool.ask(request._asdict(), SECONDS))["end"]
        except NoAnswer as error:
            if error.late:
                message = f"the pattern took longer than {SECONDS:g} s: {request.source!r}"
                raise AttemptError("timeout", message, retry=False) from None
            raise AttemptError("grader", "the process that matches patterns has died", retry=False) from error
        return end
