"""Trials that somebody wants to see, by their status or by one grader's; and samples, by their ids."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from holdfast.errors import UsageError
from holdfast.report.run_view import GradedTrial
from holdfast.report.timeline import trial_status

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.report.run_view import Pending, RunView
    from holdfast.store.metrics import ResultGrade
    from holdfast.store.records import Grade

    Trial = GradedTrial | Pending

_FEW: Final = 50
"""trials that are read one by one rather than in a pass over the whole run"""
_LISTED: Final = 10
"""ids that an error lists"""


@dataclass(frozen=True)
class Criteria:
    """Statuses that trials must have, or that the verdicts of one grader must have."""

    statuses: tuple[str, ...] = ("failed", "error", "uncertain")
    graders: tuple[str, ...] = ()
    """names as metrics have them, of which one must match; empty: the trial as a whole"""
    answer: str | None = None
    """class that the answer must have"""

    def __call__(self, status: str, answer: str | None, verdicts: Mapping[str, Grade | ResultGrade]) -> bool:
        """Return True if a trial is wanted. A missing verdict counts as an error if the trial has an error."""
        if self.answer is not None and answer != self.answer:
            return False
        if not self.graders:
            return status in self.statuses
        missing = "error" if status == "error" else ""
        return any((verdicts[name].status if name in verdicts else missing) in self.statuses for name in self.graders)


def find_graders(view: RunView, name: str) -> tuple[str, ...]:
    """Return the graders of a name. The name of a checkpoint's grader may omit the turn."""
    names = tuple(each for each in view.graders if each == name or each.endswith(f"/{name}"))
    if not names:
        raise UsageError(f"no grader {name!r}", remedy=f"The run has: {', '.join(view.graders) or 'none'}.")
    return names


class Chosen:
    """The wanted trials of a run, and the number of trials by status."""

    def __init__(self, view: RunView, criteria: Criteria) -> None:
        self._view = view
        self.counts: Counter[str] = Counter()
        """trials by status"""
        self.verdicts: dict[str, Counter[str]] = {name: Counter() for name in view.graders}
        """verdicts by grader and status, only of an unfinished run: finished runs have them in their metrics"""
        self._names: list[tuple[str, int]] = []
        for sample, number, status, answer, verdicts in _statuses(view):
            self.counts[status] += 1
            if view.metrics is None:
                for name, verdict in verdicts.items():
                    self.verdicts[name][verdict.status] += 1
            if criteria(status, answer, verdicts):
                self._names.append((sample, number))

    def __len__(self) -> int:
        return len(self._names)

    def trials(self, most: int | None = None) -> Iterator[Trial]:
        """Yield the first wanted trials, at most `most`."""
        names = self._names[:most]
        if len(names) <= _FEW:
            trials = (self._view.trial(sample, number) for sample, number in names)
            yield from (trial for trial in trials if trial is not None)
            return
        left = set(names)
        for trial in self._view.everything():
            if _name(trial) in left:
                yield trial
                left.remove(_name(trial))
                if not left:
                    return


def _statuses(view: RunView) -> Iterator[tuple[str, int, str, str | None, Mapping[str, Grade | ResultGrade]]]:
    """Yield sample, trial, status, answer class and verdicts: as reported if the run is finished, else as of now."""
    if view.metrics is not None:
        for result in view.rundir.iterate_results():
            yield result.sample, result.trial, result.status, result.answer, result.grades
        return
    for trial in view.everything():
        grades = trial.grades if isinstance(trial, GradedTrial) else []
        key = trial.output.key if isinstance(trial, GradedTrial) else trial.key
        status = trial_status(trial, view.failed_attempts(key))
        answer = trial.output.answer if isinstance(trial, GradedTrial) else None
        yield *_name(trial), status, answer, {grade.grader: grade for grade in grades}


def _name(trial: Trial) -> tuple[str, int]:
    of = trial.output if isinstance(trial, GradedTrial) else trial
    return of.sample, of.trial


def sample_ids(view: RunView) -> dict[str, None]:
    """Return the ids of all samples, in the dataset's order."""
    return dict.fromkeys(sample for sample, *_ in _statuses(view))


def find_sample(view: RunView, name: str) -> tuple[str, int | None]:
    """Return the sample that a name stands for, and the trial if it says which.

    The name is an id or the beginning of one, with or without `/TRIAL`. An id may itself contain slashes.
    """
    if view.trial(name, 1) is not None:
        return name, None
    head, _, tail = name.rpartition("/")
    trial = int(tail) if head and tail.isdecimal() else None
    if trial is not None and view.trial(head, 1) is not None:
        return head, _check_trial(view, trial)
    ids = sample_ids(view)
    for beginning, number in ((name, None), *([(head, trial)] if trial is not None else [])):
        matches = [each for each in ids if beginning and each.startswith(beginning)]
        if len(matches) == 1:
            return matches[0], None if number is None else _check_trial(view, number)
        if matches:
            raise UsageError(
                f"{name!r} is ambiguous, it matches {len(matches):,} samples: {_listed(matches)}",
                remedy="Give more of the id.",
            )
    close = get_close_matches(name, list(ids)[:100_000], n=5, cutoff=0.5)
    hint = f"Did you mean {', '.join(close)}?" if close else f"There are: {_listed(list(ids))}."
    raise UsageError(f"no sample {name!r} in {view.rundir.path}", remedy=hint)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", …" if len(names) > _LISTED else "")


def _check_trial(view: RunView, number: int) -> int:
    trials = view.manifest.trials
    if not 1 <= number <= trials:
        raise UsageError(
            f"no trial {number}: the run has {trials} per sample", remedy=f"Give a number from 1 to {trials}."
        )
    return number
