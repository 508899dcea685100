"""The calls of one conversation, recorded before their results are used, and answered from the record after a crash.

A call is known by what it asks and by how many equal ones came before it in the same conversation, so that calls made
side by side may come back in any order. A conversation that asks something else than it did before its crash is not
deterministic: what was recorded beyond that point is of no use, and it goes on live.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from holdfast.canonical import digest
from holdfast.store.records import Step, Usage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from holdfast.engine.keeper import Keeper
    from holdfast.plan.plan import Job


class Steps:
    """The record of one trial's calls."""

    def __init__(self, job: Job, keeper: Keeper, earlier: Iterable[Step], notice: Callable[[str], None]) -> None:
        self._job = job
        self._keeper = keeper
        self._notice = notice
        self._earlier = {(step.kind, step.request, step.nth): step.response for step in earlier}
        self._asked: Counter[tuple[str, str]] = Counter()

    async def call(
        self,
        kind: str,
        turn: int,
        request: Any,
        live: Callable[[], Awaitable[Any]],
        usage: Callable[[Any], Usage] | None = None,
    ) -> Any:
        """The result of a call, as JSON: from the record, or from `live` and then recorded."""
        asked = digest(request)
        self._asked[kind, asked] += 1
        nth = self._asked[kind, asked]
        if (kind, asked, nth) in self._earlier:
            return self._earlier.pop((kind, asked, nth))
        unasked = set(self._earlier)
        begun = time.monotonic()
        response = await live()
        self._drop(unasked & self._earlier.keys(), turn)
        step = Step(
            key=self._job.key,
            sample=self._job.sample.id,
            trial=self._job.trial,
            turn=turn,
            kind=kind,
            request=asked,
            nth=nth,
            response=response,
            usage=Usage() if usage is None else usage(response),
            time=round(time.time(), 3),
            seconds=round(time.monotonic() - begun, 6),
        )
        await self._keeper.step(step)
        return response

    def _drop(self, unasked: set[tuple[str, str, int]], turn: int) -> None:
        """New ground was reached, and calls recorded before were not made again meanwhile, not even side by side."""
        if unasked:
            self._notice(
                f"{self._job.sample.id} #{self._job.trial}: the conversation is not the one it was before it was "
                f"interrupted (turn {turn}); {len(unasked)} recorded calls are of no use, and it goes on from here"
            )
            for call in unasked:
                del self._earlier[call]
