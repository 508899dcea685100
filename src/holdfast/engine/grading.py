"""Grading, as each output lands.

Graders that answer at once are asked at once. Those that wait, for a judge or for a user's function, have workers of
their own and a short queue, so that a slow judge slows generation down instead of filling memory. A judge that
is out of action stops its own grading only: outputs go on being made and kept, and are graded later.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from holdfast.errors import AttemptError, Fault
from holdfast.graders.build import threshold
from holdfast.plan.keys import grade_key
from holdfast.store.records import Grade, GradeStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import TypeIs

    from holdfast.engine.attempts import Attempts
    from holdfast.engine.keeper import Keeper
    from holdfast.graders.types import Case, InstantGrader, Verdict, WaitingGrader
    from holdfast.plan.plan import Job


class Grading:
    """The graders of a run at work."""

    def __init__(
        self,
        graders: Sequence[InstantGrader | WaitingGrader],
        attempts: Attempts,
        keeper: Keeper,
        width: int,
        notice: Callable[[str], None],
    ) -> None:
        self._graders = graders
        self._attempts = attempts
        self._keeper = keeper
        self._notice = notice
        self.down: dict[int, Fault] = {}
        """graders out of action, and why"""
        self._queue: asyncio.Queue[tuple[Case, Job, int]] = asyncio.Queue(maxsize=2 * width)
        waiting = any(not _is_instant(grader) for grader in graders)
        self._workers = [asyncio.create_task(self._work()) for _ in range(width)] if waiting else []

    async def grade(self, case: Case, job: Job) -> None:
        """See to the verdicts a trial lacks; waits only where the judges are behind."""
        if not self._graders:
            return
        self._keeper.owes(job.key, job.missing)
        for number in job.missing:
            grader = self._graders[number]
            if not _is_instant(grader):
                await self._queue.put((case, job, number))
                continue
            started = time.monotonic()
            try:
                result: Verdict | AttemptError = grader.check(case)
            except AttemptError as error:
                result = error
            except Exception as error:  # what an answer does to one grader must not end the run
                result = _raised(error)
            if isinstance(result, AttemptError):
                self._attempts.failed(result, job, grader.block.name, started, final=True)
            self._keep(case, job, number, result, time.monotonic() - started)

    async def finish(self) -> None:
        """Return when all that was asked for is graded, or cannot be."""
        await self._queue.join()

    def abandon(self) -> None:
        """Stop at once: what is queued or under way is graded another time."""
        for worker in self._workers:
            worker.cancel()
        while not self._queue.empty():
            self._queue.get_nowait()
            self._queue.task_done()

    async def close(self) -> None:
        """Stop the workers."""
        self.abandon()
        await asyncio.gather(*self._workers, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            case, job, number = await self._queue.get()
            try:
                if number not in self.down:
                    await self._judge(case, job, number)
            finally:
                self._queue.task_done()

    async def _judge(self, case: Case, job: Job, number: int) -> None:
        grader = self._graders[number]
        assert not _is_instant(grader)
        name = grader.block.name
        started = time.monotonic()
        try:
            result: Verdict | AttemptError = await self._attempts.grader(lambda: grader.judge(case), job, name)
        except AttemptError as error:
            result = error
        except Fault as fault:
            if number not in self.down:
                self.down[number] = fault
                self._notice(f"grader {name!r} is out of action, outputs go on being kept: {fault}")
            return
        except Exception as error:  # a worker that died of it would leave the others waiting for ever
            result = _raised(error)
        self._keep(case, job, number, result, time.monotonic() - started)

    def _keep(self, case: Case, job: Job, number: int, result: Verdict | AttemptError, seconds: float) -> None:
        grader = self._graders[number]
        block = grader.block
        status: GradeStatus = "error"
        if isinstance(result, AttemptError):
            score, feedback, details, usage = None, result.message, {"kind": result.kind}, None
        else:
            score, feedback, details, usage = result.score, result.feedback, result.details, result.usage
            status = "skipped" if score is None else "passed" if score >= threshold(block) else "failed"
        self._keeper.grade(
            Grade(
                key=job.key,
                grade_key=grade_key(job.key, case.output.digest, grader.fingerprint),
                sample=job.sample.id,
                trial=job.trial,
                grader=block.name,
                type=block.type,
                turn=None,
                status=status,
                score=score,
                weight=block.weight,
                feedback=feedback,
                details=details,
                seconds=round(seconds, 6),
                usage=usage,
            )
        )


def _raised(error: Exception) -> AttemptError:
    return AttemptError("grader", f"{type(error).__name__}: {error}", retry=False)


def _is_instant(grader: InstantGrader | WaitingGrader) -> TypeIs[InstantGrader]:
    return hasattr(grader, "check")
