"""Grade each output as soon as it is on disk.

Instant graders run at once, unless a check could take long. Long checks, judges and users' functions have workers and a
short queue: a slow judge slows down generation instead of filling memory. If a judge is unavailable, only its own
grades are missing: outputs are still generated, and are graded later.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from holdfast.engine.admission import Halted
from holdfast.engine.retry import Streak
from holdfast.errors import AttemptError, Fault
from holdfast.graders.build import SlowChecks, refuse_unsure
from holdfast.graders.types import Case, SetVerdict
from holdfast.plan.changes import format_count
from holdfast.plan.keys import set_digest
from holdfast.plan.plan import PendingTrial, check_sample, combine_votes
from holdfast.spec.grader_schema import is_judge
from holdfast.spec.regex import Slow
from holdfast.store.blobs import Blobs
from holdfast.store.heads import Moment, read_output, ref_of
from holdfast.store.records import Grade, GradeStatus, Together, to_microseconds, to_milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from typing_extensions import TypeIs

    from holdfast.engine.recorder import Recorder
    from holdfast.engine.retry import Retrier
    from holdfast.engine.session import Session
    from holdfast.graders.types import InstantGrader, Verdict, WaitingGrader
    from holdfast.plan.plan import Work
    from holdfast.spec.grader_schema import GraderBlock
    from holdfast.store.heads import VerdictRef
    from holdfast.store.index import RunIndex
    from holdfast.store.records import Output


class Grading:
    """Runs the graders of a run, each in its slot of the plan: after a turn, or at the end."""

    def __init__(
        self,
        graders: Sequence[InstantGrader | WaitingGrader],
        work: Work,
        index: RunIndex,
        retrier: Retrier,
        recorder: Recorder,
        width: int,
        notice: Callable[[str], None],
        batch_width: int | None = None,
    ) -> None:
        """At most `width` verdicts are asked for at once, or `batch_width` if judges are asked in batches."""
        self._graders = graders
        self._instant = [grader if _is_instant(grader) else None for grader in graders]
        self._work = work
        self.checkpoints = frozenset(slot.turn for slot in work.slots if slot.turn) if graders else frozenset()
        """the turns after which graders look at a conversation"""
        self._all_new = not index.has_verdicts and all(slot.turn is None for slot in work.slots)
        """no output that this process generates can have a verdict already"""
        self._retrier = retrier
        self._recorder = recorder
        self._notice = notice
        self.down: dict[int, Fault] = {}
        """unavailable graders, and why"""
        self._streaks = {
            number: Streak(proven=False)
            for number, grader in enumerate(graders)
            if is_judge(grader.block)  # the others cost nothing, and fail for one row at a time
        }
        self._width = batch_width or width
        self._queue: asyncio.Queue[tuple[Case, PendingTrial, int]] = asyncio.Queue(maxsize=2 * self._width)
        self._elsewhere = SlowChecks()
        self._at_once = None if batch_width is None else asyncio.Semaphore(width)
        """limits graders that do not ask in batches"""
        for caveat in dict.fromkeys(filter(None, (getattr(grader, "caveat", None) for grader in graders))):
            notice(caveat)
        self._workers: list[asyncio.Task[None]] = []
        self._idle = 0
        """workers that wait for work"""

    async def grade(self, case: Case, pending: PendingTrial) -> None:
        """Obtain the verdicts that an output lacks. Waits only if the queue is full."""
        if not self._graders:
            return
        if pending.missing:
            await self._grade_turns(case, pending)
        slots = self._work.slots
        if pending.output is None and self._all_new:
            missing = tuple([number for number in pending.panel.graders if not slots[number].votes])
        else:
            ref = pending.output or ref_of(case.output)
            missing = self._work.missing(ref, self._recorder.verdicts(pending.key), pending.panel)
            self._recorder.forget_verdicts(pending.key)
        self._recorder.expect_grades(pending.key, missing)
        for number in missing:
            if slots[number].turn is not None:
                continue  # the checkpoint could not judge: the trial stays pending for it
            if self._graders[number].looks_at_all:
                continue  # asked when all outputs exist
            grader = self._instant[number]
            if grader is not None and (record := self._check(grader, case, pending, number)) is not None:
                self._recorder.grade(record, instant=True)
            elif not self._retrier.halted:
                if self._idle <= self._queue.qsize() and len(self._workers) < self._width:
                    self._workers.append(asyncio.create_task(self._serve()))
                await self._put((case, pending, number))

    @property
    def set_graders(self) -> list[int]:
        """The numbers of the graders that look at all outputs of the run together."""
        slots = self._work.slots
        return [n for n, grader in enumerate(self._graders) if grader.looks_at_all and slots[n].turn is None]

    def block(self, number: int) -> GraderBlock:
        """Return the block of a grader."""
        return self._graders[number].block

    def name(self, number: int) -> str:
        """Return the name of a grader."""
        return self.block(number).name

    async def ask_about_all(self, number: int, cases: Sequence[Case]) -> SetVerdict:
        """Return the verdict of a grader on all outputs; raise AttemptError if it cannot judge."""
        grader = self._graders[number]
        assert not _is_instant(grader)
        self._retrier.begin_work()
        try:
            return await grader.judge_all(cases)
        except (AttemptError, Fault):
            raise
        except Exception as error:  # an answer that breaks a grader must not end the run
            raise _raised(error) from error
        finally:
            self._retrier.end_work()

    def disable(self, number: int, fault: Fault) -> None:
        """Stop asking a grader, and report why."""
        if number not in self.down:
            self.down[number] = fault
            self._notice(f"grader {self.name(number)!r} is disabled; outputs are still recorded: {fault}")

    async def _grade_turns(self, case: Case, pending: PendingTrial) -> None:
        """Obtain the missing verdicts of checkpoints, up to one that stops the conversation: nothing follows it."""
        for turn in sorted({self._work.slots[number].turn or 0 for number in pending.missing} - {0}):
            if await self.after_turn(turn, _as_of(case, turn), pending):
                break

    async def _put(self, work: tuple[Case, PendingTrial, int]) -> None:
        if not self._queue.full():
            self._queue.put_nowait(work)
            return
        self._retrier.end_work()  # judges may wait for a batch, which is submitted only when nothing is at work
        try:
            await self._queue.put(work)
        finally:
            self._retrier.begin_work()

    async def after_turn(self, turn: int, case: Case, pending: PendingTrial) -> bool:
        """Run the graders of a checkpoint and record their verdicts; return True if the conversation has to end.

        A grader that cannot judge does not end it: the trial stays pending for that grade.
        """
        stops = False
        for number in pending.panel.graders if self._graders else ():
            slot = self._work.slots[number]
            if slot.turn != turn:
                continue
            verdict = self._verdict(case, pending, number)
            result = None if verdict is None else (verdict.status, verdict.score)
            if (verdict is None or verdict.status == "error") and not slot.votes:
                grader = self._instant[number]
                record = None if grader is None else self._check(grader, case, pending, number)
                if record is None and number not in self.down:
                    record = await self._judge_for_trial(case, pending, number)
                if record is not None:
                    await self._recorder.grade_now(record)
                    result = (record.status, record.score)
            stops = stops or (slot.stops and result is not None and slot.fails(*result))
        return stops

    async def _judge_for_trial(self, case: Case, pending: PendingTrial, number: int) -> Grade | None:
        """Return a verdict that a trial waits for. Meanwhile only the judge counts as at work."""
        self._retrier.end_work()
        try:
            return await self._judge(case, pending, number)
        finally:
            self._retrier.begin_work()

    async def finish(self) -> None:
        """Return when the queue is empty."""
        await self._queue.join()

    def halt(self) -> None:
        """Drop queued grades, which stay pending, and complete the ones in progress."""
        while not self._queue.empty():
            self._queue.get_nowait()
            self._queue.task_done()

    def abandon(self) -> None:
        """Stop at once. Grades that are queued or in progress stay pending."""
        for worker in self._workers:
            worker.cancel()
        self.halt()

    async def close(self) -> None:
        """Stop the workers."""
        self.abandon()
        await asyncio.gather(*self._workers, return_exceptions=True)
        await self._elsewhere.close()

    async def _serve(self) -> None:
        while True:
            self._idle += 1
            case, pending, number = await self._queue.get()
            self._idle -= 1
            try:
                if number not in self.down:
                    async with self._turn_of(number):
                        record = await self._judge(case, pending, number)
                    if record is not None:
                        self._recorder.grade(record)
            finally:
                self._queue.task_done()

    def _turn_of(self, number: int) -> AbstractAsyncContextManager[None]:
        """Limit how many graders work at once, except those in batches, which only wait."""
        limited = self._at_once is not None and getattr(self._graders[number].block, "batch", None) is None
        return self._at_once if limited and self._at_once is not None else nullcontext()

    def _check(self, grader: InstantGrader, case: Case, pending: PendingTrial, number: int) -> Grade | None:
        """Return the verdict of an instant grader; None if its check could take long."""
        started = time.monotonic()
        try:
            if number in pending.panel.unsure:
                refuse_unsure(grader.block, case.sample.fields)
            result: Verdict | AttemptError = grader.check(case)
        except Slow:
            return None
        except AttemptError as error:
            result = error
        except Exception as error:  # an answer that breaks a grader must not end the run
            result = _raised(error)
        if isinstance(result, AttemptError):
            self._retrier.failed(result, pending, grader.block.name, started, final=True)
        return self.record(case, pending, number, result, time.monotonic() - started)

    async def _judge(self, case: Case, pending: PendingTrial, number: int) -> Grade | None:
        """Return the verdict of a grader that waits; None if it is unavailable or the run is halted."""
        if self._retrier.halted:
            return None
        self._retrier.begin_work()
        try:
            return await self._ask(case, pending, number)
        finally:
            self._retrier.end_work()

    async def _ask(self, case: Case, pending: PendingTrial, number: int) -> Grade | None:
        grader = self._graders[number]
        name = grader.block.name
        started, deadline = time.monotonic(), self._retrier.deadline()

        async def verdict() -> Verdict:
            return grader.check(case) if _is_instant(grader) else await grader.judge(case)

        async def judge() -> Verdict:
            if number in pending.panel.unsure:
                refuse_unsure(grader.block, case.sample.fields)
            return await self._elsewhere.complete(verdict)

        async def judge_once() -> Verdict:
            try:
                return await judge()
            except AttemptError as error:
                self._retrier.failed(error, pending, name, started, final=True)
                raise

        earlier = self._verdict(case, pending, number)
        # An output that could not be judged before is no evidence of an outage: if only such remain, each is tried.
        streak = None if earlier is not None and earlier.status == "error" else self._streaks.get(number)
        try:
            # Retries and the time limit of turns are for graders that ask a service; the others have their own limits.
            limited = _is_instant(grader) or hasattr(grader.block, "timeout")
            result: Verdict | AttemptError = await (
                judge_once() if limited else self._retrier.grader(judge, pending, name, deadline, streak)
            )
        except AttemptError as error:
            result = error
        except Halted:
            return None
        except Fault as fault:
            self.disable(number, fault)
            return None
        except Exception as error:  # else the worker would die, and the queue would never become empty
            result = _raised(error)
            self._retrier.failed(result, pending, name, started, final=True)
        return self.record(case, pending, number, result, time.monotonic() - started - deadline.in_batches)

    def _verdict(self, case: Case, pending: PendingTrial, number: int) -> VerdictRef | None:
        """Return a grader's verdict on an output, if there is one."""
        slot = self._work.slots[number]
        if slot.votes:
            votes = [self._verdict(case, pending, vote) for vote in slot.votes]
            return combine_votes(votes, slot.combine, slot.threshold)
        key = slot.fingerprint, slot.turn, self._judged(case, pending, number)
        return None if self._all_new else self._recorder.verdicts(pending.key).get(key)

    def _judged(self, case: Case, pending: PendingTrial, number: int) -> str:
        """Return the digest of what a grader judges of an output."""
        output, slot = case.output, self._work.slots[number]
        tokens = output.usage.tokens if slot.measures else None
        return slot.judged(Moment(output.digest, tokens, output.timing.seconds), pending.sample.row)

    def record(
        self, case: Case, pending: PendingTrial, number: int, result: Verdict | AttemptError, seconds: float
    ) -> Grade:
        """Return the record of a verdict, or of the error that stands for it."""
        block, slot = self._graders[number].block, self._work.slots[number]
        status: GradeStatus = "error"
        counts: tuple[int, ...] | UnsetType = UNSET
        if isinstance(result, AttemptError):
            score, feedback, details, usage = None, result.message, {"kind": result.kind}, None
        else:
            score, feedback, details, usage = result.score, result.feedback, result.details, result.usage
            counts = UNSET if result.counts is None else result.counts
            status = "skipped" if score is None else "passed" if _passes(result, slot.threshold) else "failed"
        return Grade(
            key=pending.key,
            sample=pending.sample.id,
            trial=pending.trial,
            grader=block.name,
            type=block.type,
            by=slot.fingerprint,
            turn=slot.turn,
            judged=self._judged(case, pending, number),
            status=status,
            score=score,
            weight=block.weight,
            feedback=feedback,
            details=details,
            seconds=to_microseconds(seconds),
            usage=usage,
            time=to_milliseconds(time.time()),
            counts=counts,
        )


def _as_of(case: Case, turn: int | None) -> Case:
    """Return the output as it was after a turn: grades are the same during the conversation and later."""
    output = case.output
    if turn is None or isinstance(output.marks, UnsetType):
        return case
    mark = output.marks[turn - 1]
    messages = output.messages[: mark.end]
    calls, trace = output.calls, output.trace
    text = str(messages[-1].get("content") or "") if isinstance(mark.output, UnsetType) else mark.output
    output_then = replace(
        output,
        messages=messages,
        output=text,
        turns=turn,
        digest=mark.digest,
        state=None,
        files=mark.files,
        files_partial=mark.files_partial,
        value=mark.value,
        calls=UNSET if isinstance(calls, UnsetType) else [call for call in calls if call.turn <= turn],
        trace=UNSET if isinstance(trace, UnsetType) or isinstance(mark.trace, UnsetType) else trace[: mark.trace],
        usage=output.usage if isinstance(mark.usage, UnsetType) else mark.usage,
        timing=output.timing if isinstance(mark.seconds, UnsetType) else replace(output.timing, seconds=mark.seconds),
    )
    return replace(case, output=output_then)


def _passes(verdict: Verdict, threshold: float | None) -> bool:
    """Return the grader's decision, or else apply the threshold. Reports apply any threshold."""
    if verdict.passed is not None:
        return verdict.passed
    assert verdict.score is not None and threshold is not None
    return verdict.score >= threshold


def _raised(error: Exception) -> AttemptError:
    return AttemptError("grader", f"{type(error).__name__}: {error}", retry=False)


def _is_instant(grader: InstantGrader | WaitingGrader) -> TypeIs[InstantGrader]:
    return hasattr(grader, "check")


class Sets:
    """Asks the graders that look at all outputs of a run together.

    Such a grader is asked once every trial has an output; with `--accept-errors`, once nothing is left to run. Its
    verdicts carry the digest of the outputs: if an output changes, the whole set is graded again. So it is after a
    crash, or if one output could not be judged.
    """

    def __init__(self, session: Session, grading: Grading, recorder: Recorder, retrier: Retrier) -> None:
        self._session = session
        self._grading = grading
        self._recorder = recorder
        self._retrier = retrier
        self._blobs = Blobs(session.rundir.files)

    async def grade(self) -> None:
        """Grade what the set graders have not graded yet, unless outputs are still missing."""
        self._session.refresh()
        trials, index = list(self._trials()), self._session.index
        lacking = sum(trial.output is None for trial in trials)
        digest: str | None = None
        for number in self._grading.set_graders:
            members = [trial for trial in trials if trial.output is not None and number in trial.panel.graders]
            if not any(self._lacks(trial, number) for trial in members):
                continue
            if lacking and not self._session.options.accept_errors:
                self._session.notice(
                    f"grader {self._grading.name(number)!r} looks at all outputs together: it is asked when "
                    f"{format_count(lacking, 'more trial')} {'has' if lacking == 1 else 'have'} an output, or with "
                    "--accept-errors"
                )
                continue
            digest = digest or set_digest((key, ref.digest) for key, ref in index.all_outputs())
            await self._grade(number, members, digest)

    def _trials(self) -> Iterator[PendingTrial]:
        identity, index = self._session.identity, self._session.index
        survey, work = identity.survey, identity.work
        for position, sample in enumerate(identity.dataset):
            check_sample(sample, survey, position)
            panel = survey.panels.panel_at(position)
            for trial in range(1, work.trials + 1):
                key = work.key(sample.asked, trial)
                yield PendingTrial(sample, trial, key, index.output(key), (), panel)

    def _lacks(self, trial: PendingTrial, number: int) -> bool:
        assert trial.output is not None
        verdicts = self._session.index.verdicts(trial.key)
        return number in self._session.identity.work.missing(trial.output, verdicts, trial.panel)

    async def _grade(self, number: int, members: Sequence[PendingTrial], digest: str) -> None:
        """Ask a grader about the outputs, and record its verdict on each."""
        started, name = time.monotonic(), self._grading.name(number)
        unsure = {trial.key: error for trial in members if (error := self._unsure(trial, number)) is not None}
        asked = [trial for trial in members if trial.key not in unsure]
        cases = {trial.key: Case(trial.sample, self._read(trial), self._blobs) for trial in members}
        results: dict[str, Verdict | AttemptError] = {**unsure}
        verdict = SetVerdict([])
        try:
            if asked:
                verdict = await self._grading.ask_about_all(number, [cases[trial.key] for trial in asked])
            results |= zip((trial.key for trial in asked), verdict.verdicts, strict=True)
        except AttemptError as error:  # reported once, not for each output
            self._retrier.failed(error, asked[0], name, started, final=True)
            results |= dict.fromkeys((trial.key for trial in asked), error)
        except Fault as fault:
            self._grading.disable(number, fault)
            return
        else:
            for trial in members:
                if isinstance(result := results[trial.key], AttemptError):
                    self._retrier.failed(result, trial, name, started, final=True)
        judged = not any(isinstance(result, AttemptError) for result in results.values())
        together = Together(digest, verdict.score, verdict.details) if judged else Together(digest)
        for trial in members:
            result = results[trial.key]
            grade = self._grading.record(cases[trial.key], trial, number, result, time.monotonic() - started)
            self._recorder.grade(replace(grade, together=together))

    def _unsure(self, trial: PendingTrial, number: int) -> AttemptError | None:
        """Return the error if it is unknown whether the grader looks at a row."""
        if number in trial.panel.unsure:
            try:
                refuse_unsure(self._grading.block(number), trial.sample.fields)
            except AttemptError as error:
                return error
        return None

    def _read(self, trial: PendingTrial) -> Output:
        assert trial.output is not None
        return read_output(trial.output)
