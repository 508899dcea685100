"""Checks whose work could take forever: it is done in other processes, with a time limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.errors import AttemptError
from holdfast.graders.pool import NoAnswer, Pool
from holdfast.spec.slow import ANSWERS, Slow

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from holdfast.graders.types import Verdict
    from holdfast.spec.slow import Request


class SlowChecks:
    """A pool of processes that do the slow work of checks."""

    def __init__(self) -> None:
        self._pool = Pool("slow_worker.py")

    async def complete(self, check: Callable[[], Awaitable[Verdict]]) -> Verdict:
        """Call a check again and again, each time with one more answer from the pool, until it returns."""
        answers: dict[Request, Any] = {}
        before = ANSWERS.set(answers)
        try:
            while True:
                try:
                    return await check()
                except Slow as slow:
                    answers[slow.request] = await self._ask(slow.request)
        finally:
            ANSWERS.reset(before)

    async def close(self) -> None:
        """Stop the processes."""
        await self._pool.close()

    async def _ask(self, request: Request) -> Any:
        question = {"kind": type(request).__name__, **request._asdict()}
        try:
            return (await self._pool.ask(question, request.seconds))["answer"]
        except NoAnswer as error:
            if error.late:
                raise AttemptError("timeout", request.too_slow, retry=False) from None
            raise AttemptError("grader", f"{type(request).__name__}: {error}", retry=False) from error
