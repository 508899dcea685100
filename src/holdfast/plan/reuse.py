"""Reuse of outputs and grades of other runs, by their keys.

Only runs with the same conversation and target can have them, as their manifests show. A new run that needs nearly all
outputs of a large one shares its journals (`store.shared`). Then journals are searched for the keys that are still
missing, nearest run first, until no key is missing. Matching lines are copied into the new run with a note of their
source. Either way the other run may be deleted.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path  # noqa: TC003 - msgspec reads it
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.errors import UsageError
from holdfast.plan.plan import TO_GRADE, find_verdict
from holdfast.store.blobs import Blobs
from holdfast.store.durable import make_directory
from holdfast.store.index import read_grade_head, read_output_head
from holdfast.store.journal import append_lines
from holdfast.store.lines import LineRef, is_sound, scan_raw, with_source
from holdfast.store.rundir import RunDir  # noqa: TC001 - msgspec reads it
from holdfast.store.shared import (
    StaleJournalError,
    journal_size,
    lender_of,
    run_of,
    share,
    shared_folder,
    unwanted_keys,
    write_unwanted,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Set

    from holdfast.data.dataset import Survey
    from holdfast.data.panels import Panel
    from holdfast.plan.plan import Work
    from holdfast.store.index import Index
    from holdfast.store.refs import OutputRef, VerdictRef

_KEY: Final = slice(8, 47)
"""position of a line's key: after `{"key":"`"""
_GRADE_KEY: Final = slice(62, 101)
"""position of a grade's key: after `","grade_key":"`"""
_CHUNK: Final = 8 << 20
SHARED_BYTES: Final = 1 << 20
"""bytes of outputs from which on a run's journals are shared; fewer are copied"""
_SHARED_PART: Final = 0.95
"""part of a run's outputs that has to be wanted, so that the others are not worth mentioning"""


class Inherited(msgspec.Struct, frozen=True):
    """State of a run's trials, as far as the run that it borrows from determines it."""

    known: bytes
    """for each trial: 1 if it is finished, `TO_GRADE`, or 0"""
    usable: int
    """how many outputs of the lender are of this run"""
    missing: array[int]
    """positions of samples whose first trial the lender has not"""
    unwanted: list[str]
    """keys of the lender's other outputs"""


class Lender(msgspec.Struct, frozen=True):
    """A run whose journals a new run shares."""

    name: str
    rundir: RunDir
    origin: str
    """names its cached index, if it has one"""
    recorded: int
    """how many outputs it has"""
    outputs: int
    """how many of them are of this run"""
    journals: list[tuple[str, Path, int]]
    """kind, file, and how many bytes count"""
    missing: array[int]
    """positions of samples whose first trial it has not"""
    unwanted: dict[str, LineRef]
    """its outputs that are not of this run, by key"""
    known_done: bytes
    """that of `make_plan`; empty if all keys have to be looked at"""


class Borrowed(msgspec.Struct):
    """Records of other runs that are valid here."""

    shared: Lender | None = None
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
        runs = Counter(self.lenders[key] for key in self.outputs)
        if self.shared is not None:
            runs[self.shared.name] += self.shared.outputs
        return runs

    def __bool__(self) -> bool:
        return bool(self.shared or self.outputs or self.verdicts or self.steps)


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
    if not index.outputs and (shareable := _find_shareable(survey, work, lenders, grades=grades)) is not None:
        borrowed.shared, lent = shareable
        index.outputs, index.new_bytes = lent.outputs, lent.new_bytes
        if grades:
            index.verdicts = lent.verdicts
        known_done = borrowed.shared.known_done.replace(bytes([TO_GRADE]), b"\0")
        lenders = [each for each in lenders if each[0] != borrowed.shared.name]
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
    shared_files = _shared_files(borrowed.shared)
    for name, rundir in lenders:
        if not missing and not (missing_grades and grades):
            break
        for path in _other_journals(rundir, "outputs", shared_files):
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
        for path in _other_journals(rundir, "grades", shared_files) if grades else ():
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


def _shared_files(shared: Lender | None) -> set[tuple[int, int]]:
    """Return what names the files that are shared as a whole: another run may share the same ones."""
    files = set()
    for _, path, length in [] if shared is None else shared.journals:
        with suppress(OSError):
            stat = path.stat()
            if stat.st_size == length:
                files.add((stat.st_dev, stat.st_ino))
    return files


def _other_journals(rundir: RunDir, kind: str, shared_files: Set[tuple[int, int]]) -> Iterator[Path]:
    """Yield the journals of a run that are not shared already."""
    for path in rundir.journals(kind):
        with suppress(OSError):
            stat = path.stat()
            if (stat.st_dev, stat.st_ino) not in shared_files:
                yield path


def _find_shareable(
    survey: Survey, work: Work, lenders: Iterable[tuple[str, RunDir]], *, grades: bool
) -> tuple[Lender, Index] | None:
    """Find a large run whose outputs nearly all belong to this run; return it with its index of these outputs."""
    for name, rundir in lenders:
        sizes = {(kind, path): journal_size(path) for kind in ("grades", "outputs") for path in rundir.journals(kind)}
        if sum(size for (kind, _), size in sizes.items() if kind == "outputs") < SHARED_BYTES:
            continue
        index = rundir.load(repair=False)
        if not _is_free(rundir) or index.outputs.stopped():
            continue  # a writer may cut off what it cannot sync; of conversations that ended early, not all may fit
        from holdfast.plan.done import inherit_done  # of large runs

        outputs, recorded = index.outputs, len(index.outputs)
        lent = inherit_done(survey, work, rundir, index) or look_up(survey, work, index)
        if lent.usable < _SHARED_PART * recorded:
            continue
        unwanted = {key: outputs[key].line for key in lent.unwanted}
        for key in unwanted:
            del outputs[key]
        for spot in index.damage:
            if spot.torn:
                sizes.update({each: spot.offset for each in sizes if each[1] == spot.path})
        journals = [(kind, path, size) for (kind, path), size in sizes.items() if size]
        known_done = lent.known if grades else b""
        lender = Lender(name, rundir, index.origin, recorded, lent.usable, journals, lent.missing, unwanted, known_done)
        return lender, index
    return None


def look_up(survey: Survey, work: Work, index: Index) -> Inherited:
    """Look up the outputs of all trials in the index of another run."""
    outputs = index.outputs
    marks, missing, usable = bytearray(outputs.row_count), array("Q"), 0
    for number, keys in work.all_keys(survey):
        rows = [row for key in keys if (row := outputs.row_of(key)) >= 0]
        for row in rows:
            marks[row] = 1
        usable += bool(rows)
        if not rows and number % work.trials == 0:
            missing.append(number // work.trials)
    unwanted = [key for key in outputs if not marks[outputs.row_of(key)]] if 0 in marks else []
    return Inherited(b"", usable, missing, unwanted)


def _is_free(rundir: RunDir) -> bool:
    """Return True if nobody holds a run. A lease counts however old it is: its holder may be alive."""
    return not rundir.lease.exists() and not any(rundir.workers.glob("*/lease"))


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
    """Bring borrowed records durably into a run's journals, and into its index. The caller holds the run's lease."""
    if borrowed.shared is not None:
        _share(borrowed.shared, rundir, index)
    lines = {key: ref.line for key, ref in borrowed.outputs.items()}
    for lender in {line.path for line in (*lines.values(), *(line for _, _, line in borrowed.steps))}:
        # Whole folders: which files a line names is known only by decoding it, and contents are shared anyway.
        Blobs(rundir.files).take_from(run_of(lender) / "files")
    for key, line in _copy(lines, borrowed.lenders, rundir.path / "outputs.jsonl"):
        index.outputs[key] = borrowed.outputs[key]._replace(line=line)
    calls = {f"{number}": line for number, (_, _, line) in enumerate(borrowed.steps)}
    names = {f"{number}": name for number, (name, _, _) in enumerate(borrowed.steps)}
    for number, line in _copy(calls, names, rundir.path / "steps.jsonl"):
        index.steps.setdefault(borrowed.steps[int(number)][1], []).append(line)
    for key, _ in _copy(borrowed.grades, borrowed.lenders, rundir.path / "grades.jsonl"):
        index.verdicts[key] = borrowed.verdicts[key]


def _share(shared: Lender, rundir: RunDir, index: Index) -> None:
    """Share the journals of another run. Outputs come last: until they are there, nothing counts as shared."""
    places: dict[Path, Path] = {}
    for number, (kind, journal, length) in enumerate(shared.journals):
        folder = shared_folder(rundir.path, lender_of(journal) or shared.name)
        try:
            if kind == "outputs":
                write_unwanted(folder, {*shared.unwanted, *unwanted_keys(journal)})
            make_directory(folder)
            places[journal] = share(journal, length, kind, number, folder)
        except (FileNotFoundError, StaleJournalError) as error:
            raise UsageError(
                f"{shared.name}, whose outputs this run reuses, has just been removed or changed",
                remedy="Run the same command again.",
            ) from error
        Blobs(rundir.files).take_from(run_of(journal) / "files")
    index.outputs.use_files([places.get(path, path) for path in index.outputs.files])
    if shared.origin:
        from holdfast.store.index_cache import IndexCache  # which small runs need not import

        cache = IndexCache(rundir)
        cache.share(shared.rundir, shared.origin, places)
        index.origin = cache.origin


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
