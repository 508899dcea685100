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
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.errors import UsageError
from holdfast.plan.keys import set_digest
from holdfast.plan.plan import TO_GRADE
from holdfast.store.blobs import Blobs
from holdfast.store.durable import if_present, make_directory
from holdfast.store.index import read_grade_head, read_output_head
from holdfast.store.inputs import Input, append_inputs
from holdfast.store.journal import append_lines
from holdfast.store.lines import LineRef, is_sound, scan_raw, with_source
from holdfast.store.run_files import open_file
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

    from holdfast.data.panels import Panel
    from holdfast.data.survey import Survey
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


class Offer(NamedTuple):
    """A run that may lend."""

    name: str
    rundir: RunDir
    stale: frozenset[int] = frozenset()
    """graders whose verdicts are stale there: a file that their code reads has changed"""


class Inherited(msgspec.Struct, frozen=True):
    """State of a run's trials, as far as the run that it borrows from determines it."""

    known: bytes
    """for each trial: 1 if it is finished, `TO_GRADE`, or 0"""
    usable: int
    """how many outputs of the lender are of this run as they are"""
    missing: array[int]
    """positions of samples whose first trial the lender has not"""
    unwanted: list[str]
    """keys of the lender's other outputs"""
    relabelled: dict[str, str]
    """digests of rows that have changed only in fields that the target does not see, by the keys of outputs"""


class Lender(msgspec.Struct, frozen=True):
    """A run whose journals a new run shares."""

    name: str
    rundir: RunDir
    origin: str
    """names its cached index, if it has one that holds here"""
    lends_grades: bool
    """False if some of its verdicts are stale: then its journals of grades are not shared"""
    recorded: int
    """how many outputs it has"""
    outputs: int
    """how many of them are of this run"""
    journals: list[tuple[str, Path, int]]
    """kind, file, and how many bytes count"""
    missing: array[int]
    """positions of samples whose first trial it has not"""
    unwanted: dict[str, LineRef]
    """its outputs that are not of this run, or not as they are, by key"""
    relabelled: dict[str, str]
    """that of `Inherited`"""
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
    inputs: list[Input] = []
    """files that code read for these records"""

    @property
    def names(self) -> set[str]:
        """Names of the runs that they come from."""
        names = {*self.lenders.values(), *(name for name, _, _ in self.steps)}
        return names if self.shared is None else {*names, self.shared.name}

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
    lenders: Iterable[Offer],
    *,
    grades: bool = True,
    known_done: bytes = b"",
) -> Borrowed:
    """Find missing outputs and grades in other runs, which are given in the order of preference.

    `known_done` is that of `make_plan`: these trials need nothing.
    """
    borrowed = Borrowed()
    lenders = list(lenders)
    if not index.outputs and (shareable := _find_shareable(survey, work, lenders, grades=grades)) is not None:
        borrowed.shared, lent, borrowed.outputs = shareable
        borrowed.lenders = dict.fromkeys(borrowed.outputs, borrowed.shared.name)
        index.outputs, index.new_bytes = lent.outputs, lent.new_bytes
        if grades and borrowed.shared.lends_grades:
            index.verdicts = lent.verdicts
        known_done = borrowed.shared.known_done.replace(bytes([TO_GRADE]), b"\0")
        lenders = [each for each in lenders if each.name != borrowed.shared.name or not borrowed.shared.lends_grades]
    if not lenders:
        return borrowed  # without computing all keys of a large run
    missing: dict[str, int] = {}
    """positions of samples, by the keys of outputs"""
    missing_grades: dict[str, int] = {}
    """graders, by the keys of verdicts"""
    for number, key in work.keys(survey, known_done):
        position = number // work.trials
        ref = index.outputs.get(key) or borrowed.outputs.get(key)
        if ref is None:
            missing[key] = position
        else:
            missing_grades.update(_missing_grade_keys(work, key, ref, index, survey.panels.panel_at(position)))
    shared_files = _shared_files(borrowed.shared)
    for name, rundir, stale in lenders:
        if not missing and not (missing_grades and grades):
            break
        for path in _other_journals(rundir, "outputs", shared_files):
            for offset, line in _hits(path, _KEY, missing.keys()):
                head = read_output_head(line)
                if head is None:
                    continue
                position = missing[head.key]
                row = survey.row_text(position) if survey.asked else None
                ref = head.ref(LineRef(path, offset, len(line)))
                if not work.fits(ref, row):
                    continue
                ref = ref._replace(row=row)
                borrowed.outputs[head.key] = ref
                borrowed.lenders[head.key] = name
                panel = survey.panels.panel_at(position)
                missing_grades.update(_missing_grade_keys(work, head.key, ref, index, panel))
            for key in borrowed.outputs.keys() & missing.keys():
                del missing[key]  # only at the end of the file: of two outputs, the later one counts
        for path in rundir.journals("steps"):
            for offset, line in _hits(path, _KEY, missing.keys() - index.steps.keys()):
                borrowed.steps.append((name, line[_KEY].decode(), LineRef(path, offset, len(line))))
        lent_grades = set[str]()
        for path in _other_journals(rundir, "grades", shared_files) if grades else ():
            for offset, line in _hits(path, _GRADE_KEY, missing_grades.keys()):
                grade = read_grade_head(line)
                if grade is None or grade.status == "error" or missing_grades[grade.grade_key] in stale:
                    continue
                borrowed.verdicts[grade.grade_key] = grade.verdict._replace(time=0.0)
                borrowed.lenders[grade.grade_key] = name
                borrowed.grades[grade.grade_key] = LineRef(path, offset, len(line))
                lent_grades.add(grade.grade_key)
        for key in lent_grades:
            del missing_grades[key]
    return borrowed


def drop_other_sets(index: Index, borrowed: Borrowed) -> None:
    """Remove the verdicts on all outputs of a run together, unless this run has just these outputs."""
    lent = [(key, ref.together) for key, ref in borrowed.verdicts.items() if ref.together is not None]
    own = index.verdicts.of_sets()
    if not own and not lent:
        return
    outputs = {**index.outputs, **borrowed.outputs}
    digest = set_digest((key, ref.digest) for key, ref in outputs.items())
    for key, together in own:
        if together.digest != digest:
            del index.verdicts[key]
    for key, together in lent:
        if together.digest != digest:
            del borrowed.verdicts[key], borrowed.grades[key]


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
        with if_present():
            stat = path.stat()
            if (stat.st_dev, stat.st_ino) not in shared_files:
                yield path


def _find_shareable(
    survey: Survey, work: Work, lenders: Iterable[Offer], *, grades: bool
) -> tuple[Lender, Index, dict[str, OutputRef]] | None:
    """Find a large run whose outputs nearly all belong to this run.

    Return it with its index of these outputs, and with outputs of rows that have changed only for graders.
    """
    for name, rundir, stale in lenders:
        kinds = ("outputs",) if stale else ("grades", "outputs")
        sizes = {(kind, path): journal_size(path) for kind in kinds for path in rundir.journals(kind)}
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
        relabelled = {key: outputs[key]._replace(row=row) for key, row in lent.relabelled.items()}
        unwanted = {key: outputs[key].line for key in lent.unwanted}
        for key in unwanted:
            del outputs[key]
        for spot in index.damage:
            if spot.torn:
                sizes.update({each: spot.offset for each in sizes if each[1] == spot.path})
        journals = [(kind, path, size) for (kind, path), size in sizes.items() if size]
        known_done = lent.known if grades and not stale else b""
        lender = Lender(
            name=name,
            rundir=rundir,
            origin="" if stale else index.origin,
            lends_grades=not stale,
            recorded=recorded,
            outputs=lent.usable,
            journals=journals,
            missing=lent.missing,
            unwanted=unwanted,
            relabelled=lent.relabelled,
            known_done=known_done,
        )
        return lender, index, relabelled
    return None


def look_up(survey: Survey, work: Work, index: Index) -> Inherited:
    """Look up the outputs of all trials in the index of another run."""
    outputs = index.outputs
    marks, missing, relabelled = bytearray(outputs.row_count), array("Q"), dict[str, str]()
    for number, key in work.keys(survey):
        row, position = outputs.row_of(key), number // work.trials
        if row < 0:
            if number % work.trials == 0:
                missing.append(position)
        elif survey.asked and outputs.sample_row_at(row) != survey.row_text(position):
            relabelled[key] = survey.row_text(position)
        else:
            marks[row] = 1
    unwanted = [key for key in outputs if not marks[outputs.row_of(key)]] if 0 in marks else []
    return Inherited(b"", marks.count(1), missing, unwanted, relabelled)


def _is_free(rundir: RunDir) -> bool:
    """Return True if nobody holds a run. A lease counts however old it is: its holder may be alive."""
    return not rundir.lease.exists() and not any(rundir.workers.glob("*/lease"))


def _missing_grade_keys(work: Work, key: str, ref: OutputRef, index: Index, panel: Panel) -> Iterator[tuple[str, int]]:
    for number in panel.graders:
        grade = work.grade_key(key, ref, number)
        if grade is not None:
            verdict = index.verdicts.get(grade)
            if verdict is None or verdict.status == "error":
                yield grade, number


def adopt(borrowed: Borrowed, rundir: RunDir, index: Index) -> None:
    """Bring borrowed records durably into a run's journals, and into its index. The caller holds the run's lease."""
    append_inputs(rundir.path, dict.fromkeys(borrowed.inputs))
    if borrowed.shared is not None:
        _share(borrowed.shared, rundir, index)
    lines = {key: ref.line for key, ref in borrowed.outputs.items()}
    for lender in {line.path for line in (*lines.values(), *(line for _, _, line in borrowed.steps))}:
        # Whole folders: which files a line names is known only by decoding it, and contents are shared anyway.
        Blobs(rundir.files).take_from(run_of(lender) / "files")
    rows = {key: ref.row for key, ref in borrowed.outputs.items() if ref.row is not None}
    for key, line in _copy(lines, borrowed.lenders, rundir.path / "outputs.jsonl", rows):
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

    A file that is gone by now is skipped.
    """
    if not missing:
        return
    keys = {key.encode() for key in missing}
    with if_present():
        for offset, line in scan_raw(path):
            if line[place] in keys and is_sound(line):
                yield offset, line


def _copy(
    lines: Mapping[str, LineRef], lenders: Mapping[str, str], path: Path, rows: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[str, LineRef]]:
    """Append lines of other files to `path`; yield each key with where its line is now, once it is durable.

    `rows` are the digests of the samples' rows as they are here, by key.
    """
    waiting: list[tuple[str, bytes]] = []
    size = 0
    with ExitStack() as stack:
        files: dict[Path, int] = {}
        for number, (key, (source, offset, length)) in enumerate(lines.items(), 1):
            if source not in files:
                files[source] = open_file(source)
                stack.callback(os.close, files[source])
            line = os.pread(files[source], length, offset)
            if is_sound(line):  # its owner may have repaired the file meanwhile, which moves lines
                line = with_source(line, lenders[key], rows.get(key))
                waiting.append((key, line))
                size += len(line)
            if waiting and (size > _CHUNK or number == len(lines)):
                at = append_lines(path, b"".join([line for _, line in waiting]))
                for copied, line in waiting:
                    yield copied, LineRef(path, at, len(line) - 1)
                    at += len(line)
                waiting, size = [], 0
