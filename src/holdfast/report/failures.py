"""Why trials and grades of a run are missing, and how many attempts were retried, from its `errors.jsonl`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from holdfast.display.format import one_line, without_details
from holdfast.graders.build import grader_places
from holdfast.store.calls import is_decision
from holdfast.store.heads import ErrorHead, decode_head, decode_line
from holdfast.store.lines import scan
from holdfast.store.records import Step, named_sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.plan.identity import RunIdentity
    from holdfast.store.heads import OutputRef
    from holdfast.store.index import RunIndex
    from holdfast.store.rundir import RunDir

_MOST_BYTES: Final = 64_000_000
"""of `errors.jsonl`: a longer one is not read only to be summed up"""
_NAMED: Final = 3


@dataclass
class Alike:
    """Failures that differ in nothing but names and numbers."""

    message: str
    """of the first"""
    count: int = 0
    samples: list[str] = field(default_factory=list)
    """the first few, and `…` where there are more"""
    same: bool = True
    """all have the same message to the letter"""

    def add(self, message: str, sample: str) -> None:
        """Count one more."""
        self.count += 1
        self.same = self.same and message == self.message
        if sample not in self.samples and len(self.samples) <= _NAMED:
            self.samples.append(sample if len(self.samples) < _NAMED else "…")

    def __str__(self) -> str:
        similar = "" if self.same else " and similar"
        return f"{self.count:,}× {self.message}{similar} ({', '.join(self.samples)})"


@dataclass
class Failures:
    """Failures of a run, over all its processes."""

    retried: Counter[str] = field(default_factory=Counter)
    """attempts that were retried, by class"""
    pending: dict[str, list[Alike]] = field(default_factory=dict)
    """what is missing because its last attempt failed: `target` or a grader's name, to the most frequent first"""
    uncertain: list[ErrorHead] = field(default_factory=list)
    """trials that wait for a person, who has to settle calls that may have happened"""


def read_failures(rundir: RunDir, identity: RunIdentity, index: RunIndex, most_bytes: int = _MOST_BYTES) -> Failures:
    """Read what failed and is still missing, and count what was retried."""
    failures = Failures()
    last: dict[tuple[str, str], ErrorHead] = {}
    if sum(path.stat().st_size for path in rundir.journals("errors") if path.exists()) > most_bytes:
        return failures
    for head in read_error_heads(rundir):
        if head.final:
            if (earlier := last.get((head.key, head.where))) is None or earlier.time <= head.time:
                last[head.key, head.where] = head
        else:
            failures.retried[head.kind] += 1
    groups: dict[str, dict[str, Alike]] = {}
    pending = _Pending(identity, index)
    for (key, where), head in sorted(last.items(), key=lambda item: item[1].time):
        if pending(key, where):
            if head.kind == "uncertain":
                if not _is_settled(head, index):
                    failures.uncertain.append(head)
                continue
            message = one_line(head.message)
            alike = groups.setdefault(where, {}).setdefault(without_details(message), Alike(message))
            alike.add(message, named_sample(head.sample, head.row))
    for where in sorted(groups, key=lambda where: where != "target"):  # trials come before grades
        failures.pending[where] = sorted(groups[where].values(), key=lambda alike: -alike.count)
    return failures


def _is_settled(head: ErrorHead, index: RunIndex) -> bool:
    """Return True if an uncertain trial was settled, and has not continued yet."""
    steps = (decode_line(Step, line) for line in index.steps(head.key))
    return any(step.time >= head.time and is_decision(step) for step in steps)


class _Pending:
    """Tells whether what a failed attempt was to give is still missing."""

    def __init__(self, identity: RunIdentity, index: RunIndex) -> None:
        self._work = identity.work
        self._index = index
        self._slots: dict[str, list[int]] = {}
        """graders by the name under which their failures are recorded, which those of a checkpoint may share"""
        for number, place in enumerate(grader_places(identity.spec)):
            self._slots.setdefault(place.block.name, []).append(number)

    def __call__(self, key: str, where: str) -> bool:
        ref = self._index.output(key)
        if where == "target" or ref is None:
            return where == "target" and ref is None
        return any(self._lacks(key, ref, number) for number in self._slots.get(where, ()))

    def _lacks(self, key: str, ref: OutputRef, number: int) -> bool:
        """Tell whether a grader that looks at an output has no verdict on it."""
        verdict_key = self._work.verdict_key(ref, number)
        verdict = None if verdict_key is None else self._index.verdicts(key).get(verdict_key)
        return verdict_key is not None and (verdict is None or verdict.status == "error")


def read_error_heads(rundir: RunDir) -> Iterator[ErrorHead]:
    """Yield the failed attempts of a run as far as they are counted."""
    for path in rundir.journals("errors"):
        for line in scan(path):
            if line.sound and (head := decode_head(ErrorHead, line.data)) is not None:
                yield head
