"""Grading of all outputs of a run together, by graders that look at the whole set.

Such a grader is asked once, when every trial has an output; with `--accept-errors`, when nothing is left to run. Its
verdicts carry the digest of the outputs and count for these alone: if an output changes, the set is graded again. A
set is graded as a whole or not at all: after a crash, or if one output could not be judged, the grader is asked about
all of them again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from holdfast.errors import AttemptError, Fault
from holdfast.graders.build import refuse_unsure
from holdfast.graders.types import Case, SetVerdict
from holdfast.plan.changes import format_count
from holdfast.plan.keys import set_digest
from holdfast.plan.plan import PendingTrial, check_sample
from holdfast.store.blobs import Blobs
from holdfast.store.heads import read_output
from holdfast.store.records import Together

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.engine.grading import Grading
    from holdfast.engine.recorder import Recorder
    from holdfast.engine.retry import Retrier
    from holdfast.engine.session import Session
    from holdfast.graders.types import Verdict
    from holdfast.store.records import Output


class Sets:
    """Asks the graders that look at all outputs of a run together."""

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
        except AttemptError as error:  # told once, and not for each output
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
        """Return why it is not known whether the grader looks at a row."""
        if number in trial.panel.unsure:
            try:
                refuse_unsure(self._grading.block(number), trial.sample.fields)
            except AttemptError as error:
                return error
        return None

    def _read(self, trial: PendingTrial) -> Output:
        assert trial.output is not None
        return read_output(trial.output)
