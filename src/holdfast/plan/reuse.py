"""Reuse of outputs and grades of other runs, by their keys.

Only runs with the same conversation and target can have them, as their manifests show. Their journals are searched for
the missing keys, nearest run first, until no key is missing. Matching lines are copied into the new run with a note of
their source, so that the other run may be deleted.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.plan.plan import find_verdict
from holdfast.store.blobs import Blobs
from holdfast.store.index import read_grade_head, read_output_head
from holdfast.store.journal import append_lines
from holdfast.store.lines import LineRef, is_sound, scan_raw, with_source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Set
    from pathlib import Path

    from holdfast.data.dataset import Survey
    from holdfast.data.panels import Panel
    from holdfast.plan.plan import Work
    from holdfast.store.index import Index
    from holdfast.store.refs import OutputRef, VerdictRef
    from holdfast.store.rundir import RunDir

_KEY: Final = slice(8, 47)
"""position of a line's key: after `{"key":"`"""
_GRADE_KEY: Final = slice(62, 101)
"""position of a grade's key: after `","grade_key":"`"""
_CHUNK: Final = 8 << 20


class Borrowed(msgspec.Struct):
    """Records of other runs that are valid here."""

    outputs: dict[str, OutputRef] = {}
    verdicts: dict[str, VerdictRef] = {}
    lenders: dict[str, str] = {}
    """by key of an output or grade: the run that it comes from"""
    steps: list[tuple[str, str, LineRef]] = []
    """calls of conversations that no run has finished: lender, key and line"""
    grades: dict[str, LineRef] = {}
    """by grade key: the line of the verdict"""

    @property
    def runs(self) -> Counter[str]:
        """Number of outputs by run."""
        return Counter(self.lenders[key] for key in self.outputs)

    def __bool__(self) -> bool:
        return bool(self.outputs or self.verdicts or self.steps)


def borrow(
    survey: Survey,
    work: Work,
    index: Index,
    lenders: Iterable[tuple[str, RunDir]],
    *,
    grades: bool = True,
    known_done: bytes = b"",
) -> Borrowed:
    """Find missing outputs and grades in other runs, which are given by name in the order of preference.

    `known_done` is that of `make_plan`: these trials need nothing.
    """
    borrowed = Borrowed()
    lenders = list(lenders)
    if not lenders:
        return borrowed  # without computing all keys of a large run
    missing: dict[str, Panel] = {}
    missing_grades: set[str] = set()
    twins: dict[str, str] = {}
    """by key: the other key of the same output or grade, where there are two"""
    for number, keys in work.all_keys(survey, known_done):
        panel = survey.panels.panel_at(number // work.trials)
        own_key = next((key for key in keys if key in index.outputs), None)
        if own_key is None:
            missing.update(dict.fromkeys(keys, panel))
            _note_twins(twins, keys)
        else:
            missing_grades.update(_missing_grade_keys(work, own_key, index.outputs[own_key], index, panel, twins))
    for name, rundir in lenders:
        if not missing and not (missing_grades and grades):
            break
        for path in rundir.journals("outputs"):
            for offset, line in _hits(path, _KEY, missing.keys()):
                head = read_output_head(line)
                if head is None:
                    continue
                ref = head.ref(LineRef(path, offset, len(line)))
                panel = missing[head.key]
                if not work.fits(ref, panel):
                    continue
                borrowed.outputs[head.key] = ref
                borrowed.lenders[head.key] = name
                missing_grades.update(_missing_grade_keys(work, head.key, ref, index, panel, twins))
            for key in borrowed.outputs.keys() & missing.keys():
                missing.pop(key, None)  # only at the end of the file: of two outputs, the later one counts
                missing.pop(twins.get(key, ""), None)
        for path in rundir.journals("steps"):
            for offset, line in _hits(path, _KEY, missing.keys() - index.steps.keys()):
                borrowed.steps.append((name, line[_KEY].decode(), LineRef(path, offset, len(line))))
        for path in rundir.journals("grades") if grades else ():
            for offset, line in _hits(path, _GRADE_KEY, missing_grades):
                grade = read_grade_head(line)
                if grade is None or grade.status == "error":
                    continue
                borrowed.verdicts[grade.grade_key] = grade.verdict._replace(time=0.0)
                borrowed.lenders[grade.grade_key] = name
                borrowed.grades[grade.grade_key] = LineRef(path, offset, len(line))
                missing_grades.discard(grade.grade_key)
                missing_grades.discard(twins.get(grade.grade_key, ""))
    return borrowed


def _note_twins(twins: dict[str, str], keys: tuple[str, ...]) -> None:
    if len(keys) == 2:
        twins |= {keys[0]: keys[1], keys[1]: keys[0]}


def _missing_grade_keys(
    work: Work, key: str, ref: OutputRef, index: Index, panel: Panel, twins: dict[str, str]
) -> Iterator[str]:
    for number in panel.graders:
        keys = work.grade_keys(key, ref, number, panel)
        verdict = find_verdict(keys, index.verdicts)
        if verdict is None or verdict.status == "error":
            _note_twins(twins, keys)
            yield from keys


def adopt(borrowed: Borrowed, rundir: RunDir, index: Index) -> None:
    """Copy borrowed records durably into a run's journals, and into its index. The caller holds the run's lease."""
    lines = {key: ref.line for key, ref in borrowed.outputs.items()}
    for lender in {line.path for line in (*lines.values(), *(line for _, _, line in borrowed.steps))}:
        # Whole folders: which files a line names is known only by decoding it, and contents are shared anyway.
        run = lender.parent.parent.parent if lender.parent.parent.name == "workers" else lender.parent
        Blobs(rundir.files).take_from(run / "files")
    for key, line in _copy(lines, borrowed.lenders, rundir.path / "outputs.jsonl"):
        index.outputs[key] = borrowed.outputs[key]._replace(line=line)
    calls = {f"{number}": line for number, (_, _, line) in enumerate(borrowed.steps)}
    names = {f"{number}": name for number, (name, _, _) in enumerate(borrowed.steps)}
    for number, line in _copy(calls, names, rundir.path / "steps.jsonl"):
        index.steps.setdefault(borrowed.steps[int(number)][1], []).append(line)
    for key, _ in _copy(borrowed.grades, borrowed.lenders, rundir.path / "grades.jsonl"):
        index.verdicts[key] = borrowed.verdicts[key]


def _hits(path: Path, place: slice, missing: Set[str]) -> Iterator[tuple[int, bytes]]:
    """Yield the sound lines whose key is in `missing`, reading the key from its fixed position.

    A file that cannot be read is skipped.
    """
    if not missing:
        return
    keys = {key.encode() for key in missing}
    with suppress(OSError):
        for offset, line in scan_raw(path):
            if line[place] in keys and is_sound(line):
                yield offset, line


def _copy(lines: Mapping[str, LineRef], lenders: Mapping[str, str], path: Path) -> Iterator[tuple[str, LineRef]]:
    """Append lines of other files to `path`; yield each key with where its line is now, once it is durable."""
    waiting: list[tuple[str, bytes]] = []
    size = 0
    with ExitStack() as stack:
        files: dict[Path, int] = {}
        for number, (key, (source, offset, length)) in enumerate(lines.items(), 1):
            if source not in files:
                files[source] = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, files[source])
            line = os.pread(files[source], length, offset)
            if is_sound(line):  # its owner may have repaired the file meanwhile, which moves lines
                line = with_source(line, lenders[key])
                waiting.append((key, line))
                size += len(line)
            if waiting and (size > _CHUNK or number == len(lines)):
                at = append_lines(path, b"".join([line for _, line in waiting]))
                for copied, line in waiting:
                    yield copied, LineRef(path, at, len(line) - 1)
                    at += len(line)
                waiting, size = [], 0
