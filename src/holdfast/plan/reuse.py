"""Reuse of outputs and grades of other runs, by their keys.

Only runs with the same conversation and target, according to their manifests, can lend. A new run that needs nearly all
outputs of a large one shares its journals (`store.shared`). Then journals are searched for the keys that are still
missing, nearest run first, until no key is missing. Matching lines are copied into the new run with a note of their
source. Either way the other run may be deleted.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Set  # noqa: TC003 - msgspec reads it
from contextlib import ExitStack, suppress
from pathlib import Path  # noqa: TC003 - msgspec reads it
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.errors import UsageError
from holdfast.plan.finished import Inherited, inherit_finished
from holdfast.plan.inputs import Input, append_inputs
from holdfast.plan.keys import set_digest
from holdfast.plan.plan import look_up
from holdfast.store.blobs import Blobs
from holdfast.store.files import if_present, make_directory, open_file
from holdfast.store.heads import GradeHead, OutputHead, OutputRef, VerdictKey, VerdictRef, decode_head
from holdfast.store.index import RunIndex, pack, unpack
from holdfast.store.index_files import share_published
from holdfast.store.journal import append_lines
from holdfast.store.lines import LineRef, is_sound, scan_raw, with_source
from holdfast.store.records import KEY_PLACE
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
    from collections.abc import Container, Iterable, Iterator

    from holdfast.data.columns import Panel
    from holdfast.data.survey import Survey
    from holdfast.plan.plan import Verdicts, Work

_CHUNK: Final = 8 << 20
_TICK: Final = 0.001
"""the least difference of two times in records"""
SHARED_BYTES: Final = 1 << 20
"""minimum size of outputs, in bytes, for sharing a run's journals; smaller ones are copied"""
_SHARED_PART: Final = 0.95
"""minimum share of a run's outputs that must be wanted for sharing its journals"""


class Offer(NamedTuple):
    """A run that may lend."""

    name: str
    rundir: RunDir
    stale: frozenset[int] = frozenset()
    """graders whose verdicts are stale there: a file that their code reads has changed"""


class Lender(msgspec.Struct, frozen=True):
    """A run whose journals a new run shares."""

    name: str
    rundir: RunDir
    index: RunIndex
    """its records that this run can use unchanged"""
    lends_grades: bool
    """False if some of its verdicts are stale: then its journals of grades are not shared"""
    recorded: int
    """number of its outputs"""
    outputs: int
    """number of its outputs that this run can use unchanged"""
    journals: list[tuple[str, Path, int]]
    """kind, file, and how many bytes count"""
    missing: array[int]
    """positions of samples whose first trial it lacks"""
    unwanted: dict[str, LineRef]
    """by key: its outputs that this run cannot use, or not unchanged"""
    relabelled: Set[str]
    """keys of outputs of rows that have changed only in fields that the target does not see"""
    known_done: bytes
    """a 1 for each trial that is known to be finished by its records; may be empty"""


class Borrowed(msgspec.Struct):
    """Records of other runs that are valid here."""

    shared: Lender | None = None
    outputs: dict[str, OutputRef] = {}
    lenders: dict[str, str] = {}
    """the runs that the outputs come from"""
    verdicts: dict[str, dict[VerdictKey, VerdictRef]] = {}
    """by the key of the output"""
    verdict_lenders: dict[tuple[str, VerdictKey], str] = {}
    steps: list[tuple[str, LineRef]] = []
    """calls of conversations that no run has finished: lender and line"""
    inputs: list[Input] = []
    """files that code read for these records"""

    @property
    def names(self) -> set[str]:
        """Names of the lenders."""
        names = {*self.lenders.values(), *self.verdict_lenders.values(), *(name for name, _ in self.steps)}
        return names if self.shared is None else {*names, self.shared.name}

    @property
    def index(self) -> RunIndex | None:
        """The records of the run whose journals are shared, if there is one."""
        return None if self.shared is None else self.shared.index

    @property
    def runs(self) -> Counter[str]:
        """Number of outputs by run."""
        runs = Counter(self.lenders.values())
        if self.shared is not None:
            runs[self.shared.name] += self.shared.outputs
        return runs

    def __bool__(self) -> bool:
        return bool(self.shared or self.outputs or self.verdicts or self.steps)


def borrow(
    survey: Survey,
    work: Work,
    index: RunIndex,
    lenders: Iterable[Offer],
    *,
    grades: bool = True,
    known_done: bytes = b"",
) -> Borrowed:
    """Find missing outputs and grades in other runs, in the order of preference.

    Trials that are marked in `known_done` need nothing.
    """
    borrowed = Borrowed()
    lenders = list(lenders)
    records = index
    # Sharing is tried first: a link costs nothing, and a copy of a large run takes gigabytes. Only a run without
    # outputs can share, since the lender's records are then looked at in place of its own.
    if not index.rows["outputs"] and (shareable := _find_shareable(survey, work, lenders, grades=grades)) is not None:
        borrowed.shared, borrowed.outputs = shareable
        known_done = borrowed.shared.known_done  # from now on, the lender's records are looked at, not this run's
        borrowed.lenders = dict.fromkeys(borrowed.outputs, borrowed.shared.name)
        records = borrowed.shared.index
        if not grades:
            records.ignore_verdicts()
        # Verdicts in shared journals are on record. If a lender's grades are not shared, some of them may still fit.
        lenders = [each for each in lenders if each.name != borrowed.shared.name or not borrowed.shared.lends_grades]
    if not lenders:
        return borrowed  # without computing all keys of a large run
    missing: dict[str, int] = {}
    """positions of samples, by the keys of their missing outputs"""
    lacking: dict[str, dict[VerdictKey, _Lacking]] = {}
    """missing verdicts, by the keys of the outputs"""

    def note_missing_verdicts(key: str, ref: OutputRef, verdicts: Verdicts, position: int) -> None:
        if grades and (some := _missing_verdicts(work, ref, verdicts, survey.panels.panel_at(position))):
            lacking[key] = some

    # What is on record decides what is asked of lenders, whether or not it is shared. Trials are not looked up in the
    # lenders: few of them are missing as a rule, so searching the journals for their keys needs no index of a run that
    # may never have been indexed.
    for number, packed, output, verdicts in look_up(survey, work, records, work.numbers(survey, known_done)):
        key, position = unpack(packed), number // work.trials
        ref = output or borrowed.outputs.get(key)
        if ref is None:
            missing[key] = position
        else:
            note_missing_verdicts(key, ref, verdicts, position)
    shared_files = _shared_files(borrowed.shared)
    for name, rundir, stale in lenders:
        if not missing and not lacking:
            break
        for path in _other_journals(rundir, "outputs", shared_files):
            for offset, line in _hits(path, missing.keys()):
                head = decode_head(OutputHead, line)
                if head is None:
                    continue
                position = missing[head.key]
                row = survey.row_text(position) if survey.asked else None
                ref = head.ref(LineRef(path, offset, len(line)))
                if not work.fits(ref, row):
                    continue
                # The copy gets the digest of the row as it is here, so that a verdict of a grader that reads rows is
                # lent only if the row is the same. Other verdicts fit whatever only graders see.
                borrowed.outputs[head.key] = ref = ref._replace(row=row)
                borrowed.lenders[head.key] = name
                note_missing_verdicts(head.key, ref, {}, position)
            for key in borrowed.outputs.keys() & missing.keys():
                del missing[key]  # only at the end of the file: of two outputs, the later one counts
        # Calls of trials without an output are lent, so that a conversation goes on where it stopped. A trial that has
        # begun here keeps its own: two records of one call would contradict each other.
        for path in rundir.journals("steps"):
            for offset, line in _hits(path, missing.keys() - set(index.begun())):
                borrowed.steps.append((name, LineRef(path, offset, len(line))))
        if grades:
            _borrow_verdicts(borrowed, lacking, name, stale, _other_journals(rundir, "grades", shared_files))
    return borrowed


def _borrow_verdicts(
    borrowed: Borrowed,
    lacking: dict[str, dict[VerdictKey, _Lacking]],
    lender: str,
    stale: Container[int],
    journals: Iterable[Path],
) -> None:
    """Find missing verdicts in the journals of a run; of several equal ones the last counts."""
    lent: dict[tuple[str, VerdictKey], None] = {}
    for path in journals:
        for offset, line in _hits(path, lacking.keys()):
            head = decode_head(GradeHead, line)
            if head is None or head.status == "error":
                continue
            missing = lacking[head.key].get(head.verdict_key)
            if missing is None or missing.grader in stale:
                continue
            place = LineRef(path, offset, len(line))
            # The latest verdict counts, so the copy has to be later than an error that this run has recorded.
            time = max(head.time, missing.failed_at + _TICK)
            verdict = VerdictRef(head.status, head.score, head.usage, time, head.counts, head.together, place)
            borrowed.verdicts.setdefault(head.key, {})[head.verdict_key] = verdict
            borrowed.verdict_lenders[head.key, head.verdict_key] = lender
            lent[head.key, head.verdict_key] = None
    for key, verdict_key in lent:
        del lacking[key][verdict_key]
        if not lacking[key]:
            del lacking[key]


def choose_set(index: RunIndex, borrowed: Borrowed | None = None) -> None:
    """Keep verdicts on all outputs together only if they judged exactly the outputs of this run."""
    borrowed = borrowed or Borrowed()
    lent = [
        (key, verdict_key, verdict.together)
        for key, verdicts in borrowed.verdicts.items()
        for verdict_key, verdict in verdicts.items()
        if verdict.together is not None
    ]
    records = borrowed.shared.index if borrowed.shared else index
    if not lent and not records.has_set_verdicts():
        return
    outputs = {**dict(records.all_outputs()), **borrowed.outputs}
    digest = set_digest((key, ref.digest) for key, ref in outputs.items())
    records.require_set(digest)
    index.require_set(digest)
    for key, verdict_key, together in lent:
        if together.digest != digest:
            del borrowed.verdicts[key][verdict_key], borrowed.verdict_lenders[key, verdict_key]


def _shared_files(shared: Lender | None) -> set[tuple[int, int]]:
    """Return an id of each file that is shared as a whole: another run may share the same file."""
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
) -> tuple[Lender, dict[str, OutputRef]] | None:
    """Find a large run whose outputs nearly all belong to this run.

    Return it with outputs of rows that have changed only for graders: these cannot be shared unchanged.
    """
    for name, rundir, stale in lenders:
        kinds = ("outputs",) if stale else ("grades", "outputs")
        sizes = {(kind, path): journal_size(path) for kind in kinds for path in rundir.journals(kind)}
        if sum(size for (kind, _), size in sizes.items() if kind == "outputs") < SHARED_BYTES:
            continue
        index = rundir.load(repair=False)
        if not _is_free(rundir) or index.stopped_outputs():
            continue  # a writer may cut off what it cannot sync; of conversations that ended early, not all may fit
        inherited = inherit_finished(survey, work, rundir, index)
        match = _match_outputs(survey, work, index, inherited)
        if match.usable < _SHARED_PART * match.recorded:
            continue
        relabelled = {key: ref._replace(row=row) for key, (ref, row) in match.relabelled.items()}
        # From here on, the index is what the new run will read once the journals are shared.
        for key, ref in match.unwanted.items():
            index.drop_output(key, ref)
        if stale:
            index.ignore_verdicts()
        for spot in index.damage:
            if spot.torn:  # an unfinished last line is its writer's to finish or to cut off
                sizes.update({each: spot.offset for each in sizes if each[1] == spot.path})
        lender = Lender(
            name=name,
            rundir=rundir,
            index=index,
            lends_grades=not stale,
            recorded=match.recorded,
            outputs=match.usable,
            journals=[(kind, path, size) for (kind, path), size in sizes.items() if size],
            missing=match.missing,
            unwanted={key: ref.line for key, ref in match.unwanted.items()},
            relabelled=relabelled.keys(),
            known_done=inherited.done if grades and not stale else b"",
        )
        return lender, relabelled
    return None


class _Match(NamedTuple):
    """How another run's outputs match the trials of this run."""

    recorded: int
    """number of the other run's outputs"""
    usable: int
    """number of these outputs that this run can use unchanged"""
    missing: array[int]
    """positions of samples whose first trial the other run lacks"""
    relabelled: dict[str, tuple[OutputRef, str]]
    """by key: outputs of rows that have changed only in fields that the target does not see, and the rows' digests"""
    unwanted: dict[str, OutputRef]
    """by key: outputs that this run cannot use, or not unchanged"""


def _match_outputs(survey: Survey, work: Work, index: RunIndex, inherited: Inherited) -> _Match:
    """Look up the outputs of all trials in another run's index, except those that are known to be usable."""
    missing, relabelled, usable = array("Q"), dict[str, tuple[OutputRef, str]](), inherited.done.count(1)
    for number, key, ref, _ in look_up(survey, work, index, work.numbers(survey, inherited.done)):
        position = number // work.trials
        if ref is None:
            if number % work.trials == 0:
                missing.append(position)
        elif survey.asked and ref.row != survey.row_text(position):
            relabelled[unpack(key)] = ref, survey.row_text(position)
        else:
            usable += 1
    recorded = index.count_outputs()
    unwanted = {key: ref for key, (ref, _) in relabelled.items()}
    # Outputs of rows that are only there account for nearly all others, and to find those all keys are computed.
    gone = [key for digest in inherited.gone for key in work.packed_keys_of(f"sha256:{digest.hex()}")]
    unwanted |= {unpack(key): ref for key, ref in index.find_outputs(gone).items()}
    if usable + len(unwanted) < recorded:
        own = set(work.packed_keys(survey, work.numbers(survey)))
        unwanted |= {key: ref for key, ref in index.all_outputs() if pack(key) not in own}
    return _Match(recorded, usable, missing, relabelled, unwanted)


def _is_free(rundir: RunDir) -> bool:
    """Return True if nobody holds a run. A lease counts however old it is: its holder may be alive."""
    return not rundir.lease.exists() and not any(rundir.workers.glob("*/lease"))


class _Lacking(NamedTuple):
    """A verdict that an output lacks."""

    grader: int
    failed_at: float = 0.0
    """when the grader last failed at it"""


def _missing_verdicts(work: Work, ref: OutputRef, verdicts: Verdicts, panel: Panel) -> dict[VerdictKey, _Lacking]:
    """Return the verdicts that an output lacks."""
    missing = {}
    for number in panel.graders:
        key = work.verdict_key(ref, number)
        if key is not None and ((verdict := verdicts.get(key)) is None or verdict.status == "error"):
            missing[key] = _Lacking(number, 0.0 if verdict is None else verdict.time)
    return missing


def adopt(borrowed: Borrowed, rundir: RunDir) -> None:
    """Bring borrowed records durably into a run's journals. The caller holds the run's lease."""
    append_inputs(rundir.path, dict.fromkeys(borrowed.inputs))
    if borrowed.shared is not None:
        _share(borrowed.shared, rundir)
    outputs = [_Copied(ref.line, borrowed.lenders[key], row=ref.row) for key, ref in borrowed.outputs.items()]
    steps = [_Copied(line, lender) for lender, line in borrowed.steps]
    grades = [
        _Copied(verdict.line, borrowed.verdict_lenders[key, verdict_key], time=verdict.time)
        for key, verdicts in borrowed.verdicts.items()
        for verdict_key, verdict in verdicts.items()
        if verdict.line is not None
    ]
    for lender in {each.line.path for each in (*outputs, *steps)}:
        # Whole folders: which files a line names is known only by decoding it, and contents are shared anyway.
        Blobs(rundir.files).take_from(run_of(lender) / "files")
    for kind, lines in (("outputs", outputs), ("steps", steps), ("grades", grades)):
        _copy(lines, rundir.path / f"{kind}.jsonl")


def _share(shared: Lender, rundir: RunDir) -> None:
    """Share the journals of another run. Outputs come last: until they are there, nothing counts as shared."""
    links: dict[Path, Path] = {}
    for number, (kind, journal, length) in enumerate(shared.journals):
        folder = shared_folder(rundir.path, lender_of(journal) or shared.name)
        try:
            if kind == "outputs":
                write_unwanted(folder, {*shared.unwanted, *unwanted_keys(journal)})
            make_directory(folder)
            links[journal] = share(journal, length, kind, number, folder)
        except (FileNotFoundError, StaleJournalError) as error:
            raise UsageError(
                f"{shared.name}, whose outputs this run reuses, has just been removed or changed",
                remedy="Run the same command again.",
            ) from error
        Blobs(rundir.files).take_from(run_of(journal) / "files")
    share_published(shared.rundir, rundir, links)


def _hits(path: Path, keys: Set[str]) -> Iterator[tuple[int, bytes]]:
    """Yield the sound lines about some trials, decoding no others. A file that is gone by now is skipped."""
    if not keys:
        return
    encoded = {key.encode() for key in keys}
    with if_present():
        for offset, line in scan_raw(path):
            if line[KEY_PLACE] in encoded and is_sound(line):
                yield offset, line


class _Copied(NamedTuple):
    """A line that is copied from another run."""

    line: LineRef
    lender: str
    row: str | None = None
    """the digest of the output's row here, if it has one"""
    time: float | None = None
    """the time of a verdict here"""


def _copy(lines: Iterable[_Copied], path: Path) -> None:
    """Append lines of other files durably to `path`, each with its lender."""
    waiting: list[bytes] = []
    size = 0
    with ExitStack() as stack:
        files: dict[Path, int] = {}
        for (source, offset, length), lender, row, time in lines:
            if source not in files:
                files[source] = open_file(source)
                stack.callback(os.close, files[source])
            line = os.pread(files[source], length, offset)
            if is_sound(line):  # its owner may have repaired the file meanwhile, which moves lines
                waiting.append(with_source(line, lender, row=row, time=time))
                size += len(waiting[-1])
            if size > _CHUNK:
                append_lines(path, b"".join(waiting))
                waiting, size = [], 0
        if waiting:
            append_lines(path, b"".join(waiting))
