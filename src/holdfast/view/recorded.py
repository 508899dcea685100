"""Columns of a run that is not finished, from its journals, extended as they grow.

Rows are in the dataset's order, followed by outputs whose row is gone. A trial with one output line and one line for
each verdict is judged as its lines are read. Whatever is unusual (several outputs of a trial, several verdicts of a
grader, lines in several files) is judged from all lines of the trial, which are looked for again. Both ways end in
`RunView.judge`.
"""

from __future__ import annotations

from array import array
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from xxhash import xxh3_64_hexdigest

from holdfast.data.dataset import Dataset
from holdfast.data.panels import Conditions, Panel
from holdfast.errors import HoldfastError
from holdfast.report.trial_facts import LastFailures, output_facts, set_missing, set_output, set_verdicts
from holdfast.store.catalog import find_uncertain, is_running
from holdfast.store.index import Entry, GradeHead, Index, keep_output, keep_verdict, read_error_head
from holdfast.store.lines import LineRef, is_sound, scan, scan_raw
from holdfast.store.run_files import UNREADABLE
from holdfast.store.shared import journal_size, lender_of, unwanted_keys
from holdfast.store.trial_table import CODES, TrialTable, key_bytes, key_text, status_column

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableMapping
    from pathlib import Path

    from holdfast.data.dataset import Sample
    from holdfast.report.run_view import RunView
    from holdfast.store.lines import Line
    from holdfast.store.refs import OutputRef, VerdictRef

_BATCH: Final = 2048
"""lines of a journal that are read before it is the turn of another journal"""
_MOST_WAITING: Final = 100_000
"""outputs whose verdicts are expected, and kept in memory"""
_ALL_SEEN: Final = 255
"""in the column `seen`: further verdicts on a trial need all its lines"""
_UNDECIDED: Final = frozenset({CODES["pending"], CODES["ungraded"], CODES["error"], CODES["uncertain"]})
_KEY: Final = slice(len('{"key":"'), len('{"key":"sha256:') + 32)
"""the key in each line of a journal"""


class JournalMark(msgspec.Struct):
    """How far a journal was read."""

    file: str
    inode: int
    read: int = 0
    """bytes"""
    last: int = 0
    """offset of the last line that was read"""
    checksum: str = ""
    """of that line"""


class RecordedNotes(msgspec.Struct):
    """The journals that a table was made from."""

    journals: list[JournalMark] = []
    panels: list[tuple[tuple[int, ...], list[int]]] = []
    """graders, and unsure ones, of the different panels of rows"""
    uncertain: set[str] = set()
    """keys of trials in which a call was cut off, when nobody was working on the run"""
    loose: list[str] = []
    """keys whose lines have no row: of an output that does not count, or of verdicts before their output"""


class _KeyedGrade(GradeHead, kw_only=True, gc=False):
    key: str


_grade: Final = msgspec.json.Decoder(_KeyedGrade)


class StaleColumnsError(Exception):
    """The columns no longer match the journals, or lack what is needed: they have to be built again."""


class _Reader(NamedTuple):
    """A journal that is being read."""

    mark: JournalMark
    begun: int
    size: int
    """bytes to be read"""
    path: Path

    def share(self) -> float:
        """Return the share that was read."""
        return (self.mark.read - self.begun) / self.size


class JournalReader:
    """Reads the journals of a run into a table."""

    def __init__(self, view: RunView, table: TrialTable | None = None, notes: RecordedNotes | None = None) -> None:
        self._view = view
        self._root = view.rundir.path
        self._new, self._begun = table is None, False
        self.table = TrialTable(view.graders) if table is None else table
        self.notes = notes or RecordedNotes()
        self._marks = {mark.file: mark for mark in self.notes.journals}
        self._panels: list[Panel | None] = [None]
        for graders, unsure in self.notes.panels:
            self._panels.append(Panel(tuple(graders), frozenset(unsure)))
        self._loose = set(map(bytes.fromhex, self.notes.loose))
        self._rows: dict[bytes, int] = {}
        self._verdicts: dict[bytes, dict[str, VerdictRef]] = {}
        """verdicts on outputs that are not completely judged, by key"""
        self._refs: dict[int, OutputRef] = {}
        self._failures = LastFailures()
        self._unwanted: dict[Path, frozenset[str]] = {}
        self._touched: dict[int, None] = {}
        """rows that have to be judged again"""
        self._looked_at: tuple[list[int], set[str]] | None = None
        """the sizes of the journals of calls, and what they told"""
        self._unusual: set[bytes] = set()
        """keys of trials of which all lines have to be looked for"""

    def grow(self, progress: Callable[[float], None] = lambda _: None) -> int:
        """Read what is new in the journals, and return how many rows have changed.

        Raises StaleColumnsError if a journal is not what it was.
        """
        journals, uncertain = self._journals(), self._find_uncertain()
        if not self._new and uncertain == self.notes.uncertain and all(mark.read == size for mark, size, _ in journals):
            return 0
        if not self._begun:
            self._begin()
            self._begun = True
        for key in uncertain ^ self.notes.uncertain:
            row = self._rows.get(key_bytes(key))
            if row is not None and not self.table["at"][row]:
                self._touched[row] = None
        self.notes.uncertain = uncertain
        changed = set(self._touched)
        for kind, path, lines in self._new_lines(journals, progress):
            file = str(path.relative_to(self._root))
            for line in lines:
                self._take(kind, path, file, line)
            changed.update(self._touched)
            for row in [row for row in self._touched if self._is_complete(row)]:
                self._judge(row)
            if len(self._refs) > _MOST_WAITING:
                self._refs.clear()
        for row in list(self._touched):
            self._judge(row)
        changed |= self._judge_unusual()
        if len(self._verdicts) > _MOST_WAITING:
            self._verdicts.clear()
        for mark, _, path in journals:
            mark.checksum = _checksum(path, mark)
        self.notes.loose = [key.hex() for key in self._loose]
        self._new = False
        return len(changed)

    def _find_uncertain(self) -> set[str]:
        """Return the keys of trials in which a call was cut off. If somebody was killed, only recorded calls tell."""
        rundir = self._view.rundir
        sizes = [journal_size(path) for path in rundir.journals("steps") if path.exists()]
        if not sizes or is_running(rundir):
            self._looked_at = None
            return set()
        if self._looked_at is None or self._looked_at[0] != sizes:
            self._looked_at = sizes, find_uncertain(rundir)
        return self._looked_at[1]

    def _begin(self) -> None:
        """Make the rows of a new table, or prepare a stored one for further lines."""
        if self._new:
            self._read_dataset()
            return
        self.table.thaw()
        self._rows = self.table.keys()
        self._failures.read(self._view.rundir.journals("errors"))

    def _read_dataset(self) -> None:
        """Make a row for each trial of the dataset's samples; without a dataset, outputs are listed as they come."""
        samples, trials, keys, panels = list[str](), list[int](), list[str](), array("H")
        with suppress(HoldfastError):
            for sample, panel in self._samples():
                for trial in range(1, self._view.manifest.trials + 1):
                    key = self._view.work.key(sample.asked, trial)
                    self._rows[key_bytes(key)] = len(samples)
                    samples.append(sample.id)
                    trials.append(trial)
                    keys.append(key)
                    panels.append(panel)
        self.table.extend(samples, trials, keys)
        self.table["status"].frombytes(bytes([CODES["pending"]]) * len(samples))
        self.table["panel"].extend(panels)
        self.table.pad()

    def _samples(self) -> Iterator[tuple[Sample, int]]:
        """Yield the samples of the dataset, each with the number of its panel."""
        conditions, numbers = Conditions(self._view.spec), dict[Panel, int]()
        for sample in Dataset(self._view.spec):
            number = 0
            if sample.fields:
                panel = conditions.panel_for(sample.fields)
                number = numbers.setdefault(panel, len(self._panels))
                if number == len(self._panels):
                    self._panels.append(panel)
                    self.notes.panels.append((panel.graders, sorted(panel.unsure)))
            yield sample, number

    def _journals(self) -> list[tuple[JournalMark, int, Path]]:
        """Return the journals with how far they were read, and their sizes."""
        journals = []
        rundir, present = self._view.rundir, set()
        for kind in ("outputs", "grades", "errors"):
            for path in rundir.journals(kind):
                file = str(path.relative_to(self._root))
                try:
                    stat, size = path.stat(), journal_size(path)
                except FileNotFoundError:
                    continue
                present.add(file)
                mark = self._marks.get(file)
                if mark is None:
                    mark = self._marks[file] = JournalMark(file, stat.st_ino)
                    self.notes.journals.append(mark)
                elif mark.inode != stat.st_ino or size < mark.read or _checksum(path, mark) != mark.checksum:
                    raise StaleColumnsError
                journals.append((mark, size, path))
        if self._marks.keys() - present:
            raise StaleColumnsError
        return journals

    def _new_lines(
        self, journals: list[tuple[JournalMark, int, Path]], progress: Callable[[float], None]
    ) -> Iterator[tuple[str, Path, list[Line]]]:
        """Yield new lines of all journals, in batches.

        Whatever is furthest behind comes first: so an output and its verdicts come soon after each other.
        """
        total = max(1, sum(size - mark.read for mark, size, _ in journals))
        begun = sum(mark.read for mark, _, _ in journals)
        readers = [_Reader(mark, mark.read, max(1, size - mark.read), path) for mark, size, path in journals]
        lines = {reader.path: self._lines(reader.path, reader.mark) for reader in readers}
        while readers:
            reader = min(readers, key=_Reader.share)
            batch = list(islice(lines[reader.path], _BATCH))
            if batch:
                yield reader.path.name.partition(".")[0], reader.path, [line for line in batch if line.sound]
                progress(min(1.0, (sum(each.read for each in self._marks.values()) - begun) / total))
            else:
                readers.remove(reader)

    def _lines(self, path: Path, mark: JournalMark) -> Iterator[Line]:
        for line in scan(path, mark.read):
            if not line.whole:
                return
            mark.read, mark.last = line.offset + len(line.data) + 1, line.offset
            yield line

    def _take(self, kind: str, path: Path, file: str, line: Line) -> None:
        with suppress(*UNREADABLE):  # sound, but not a record of Holdfast
            if kind == "outputs":
                self._take_output(path, file, line)
            elif kind == "grades":
                self._take_grade(line)
            else:
                self._take_error(path, line)

    def _take_output(self, path: Path, file: str, line: Line) -> None:
        facts = output_facts.decode(line.data)
        if (lender := lender_of(path)) is not None:
            facts.source = facts.source or lender
            if facts.key in self._unwanted_in(path):
                return
        key, table = key_bytes(facts.key), self.table
        row = self._rows.get(key)
        if key in self._loose or (row is not None and (table["at"][row] or not self._has_all_verdicts(row, key))):
            self._unusual.add(key)
            return
        ref = facts.ref(LineRef(path, line.offset, len(line.data)))
        if not self._view.work.fits(ref):
            self._loose.add(key)
            return
        if row is None:
            row = self._rows[key] = table.append(facts.sample, facts.trial, key)
        set_output(table, row, facts, ref.line, file)
        self._refs[row] = ref
        self._touched[row] = None

    def _unwanted_in(self, path: Path) -> frozenset[str]:
        """Return the keys in a shared journal that are not of this run."""
        if path not in self._unwanted:
            self._unwanted[path] = unwanted_keys(path)
        return self._unwanted[path]

    def _take_grade(self, line: Line) -> None:
        head = _grade.decode(line.data)
        key = key_bytes(head.key)
        row = self._rows.get(key)
        if row is None:
            self._loose.add(key)
            return
        verdicts = self._verdicts.setdefault(key, {})
        if head.grade_key in verdicts or not self._has_all_verdicts(row, key):
            self._unusual.add(key)
            return
        verdicts[head.grade_key] = head.verdict
        self.table["seen"][row] = min(len(verdicts), _ALL_SEEN)
        if self.table["at"][row]:
            self._touched[row] = None

    def _take_error(self, path: Path, line: Line) -> None:
        head = read_error_head(line.data)
        if head is not None:
            self._failures.add(head, path, line.offset)
            row = self._rows.get(key_bytes(head.key))
            if row is not None and self.table["status"][row] in _UNDECIDED:
                self._touched[row] = None

    def _has_all_verdicts(self, row: int, key: bytes) -> bool:
        """Return True if all verdicts on a trial that were read are still in memory."""
        seen: int = self.table["seen"][row]
        return seen != _ALL_SEEN and seen == len(self._verdicts.get(key, ()))

    def _is_complete(self, row: int) -> bool:
        return len(self._verdicts.get(self.table.key_at(row), ())) >= len(self.table.graders) > 0

    def _judge(self, row: int) -> None:
        """Write what is known of a trial by now into its row."""
        self._touched.pop(row)
        table, key = self.table, self.table.key_at(row)
        if not table["at"][row]:
            text = key_text(key)
            failure, uncertain = self._failures.of_target.get(text), text in self.notes.uncertain
            set_missing(table, row, failure, self._root, uncertain=uncertain)
        elif not self._has_all_verdicts(row, key):
            self._unusual.add(key)
        else:
            ref = self._refs.pop(row, None) or self._read_ref(row)
            self._set_verdicts(row, key, ref, dict(self._verdicts.get(key, {})))
            if all(table[status_column(number)][row] != CODES["ungraded"] for number in range(len(table.graders))):
                self._verdicts.pop(key, None)
            else:
                self._refs[row] = ref

    def _read_ref(self, row: int) -> OutputRef:
        file, offset = self.table.file_and_offset(self.table["at"][row])
        line = LineRef(self._root / file, offset, self.table["length"][row])
        return output_facts.decode(line.read()).ref(line)

    def _set_verdicts(self, row: int, key: bytes, ref: OutputRef, verdicts: MutableMapping[str, VerdictRef]) -> None:
        table, text = self.table, key_text(key)
        failure = self._failures.of_graders.get(text)
        judged = self._view.judge(text, ref, self._panels[table["panel"][row]], verdicts)[1]
        set_verdicts(table, row, judged, failure, self._root)

    def _judge_unusual(self) -> set[int]:
        """Judge trials from all their lines, which are looked for in the journals; returns their rows."""
        if not self._unusual:
            return set()
        index, facts = Index(), {}
        for path, offset, data in self._lines_of_unusual("outputs"):
            line, each = LineRef(path, offset, len(data)), output_facts.decode(data)
            each.source = each.source or lender_of(path)
            keep_output(index, Entry(line, each))
            facts[line] = each
        for _, _, data in self._lines_of_unusual("grades"):
            keep_verdict(index, _grade.decode(data))
        rows = set()
        for key in sorted(self._unusual):
            ref = index.outputs.get(key_text(key))
            row = self._rows.get(key)
            if ref is None or not self._view.work.fits(ref):
                if row is not None and self.table["at"][row]:
                    raise StaleColumnsError  # the output that was shown does not count any more
                self._loose.add(key)
                continue
            if row is None:
                row = self._rows[key] = self.table.append(facts[ref.line].sample, facts[ref.line].trial, key)
            set_output(self.table, row, facts[ref.line], ref.line, str(ref.line.path.relative_to(self._root)))
            self._set_verdicts(row, key, ref, index.verdicts)
            self.table["seen"][row] = _ALL_SEEN
            self._verdicts.pop(key, None)
            self._loose.discard(key)
            rows.add(row)
        self._unusual.clear()
        return rows

    def _lines_of_unusual(self, kind: str) -> Iterator[tuple[Path, int, bytes]]:
        keys = {key_text(key).encode() for key in self._unusual}
        for path in self._view.rundir.journals(kind):
            for offset, data in scan_raw(path):
                if data[_KEY] in keys and is_sound(data):
                    yield path, offset, data


def _checksum(path: Path, mark: JournalMark) -> str:
    """Return the checksum of the last line that was read of a journal."""
    return xxh3_64_hexdigest(LineRef(path, mark.last, mark.read - mark.last).read())


def read_everything(view: RunView) -> TrialTable:
    """Return the columns of any run, in the order of `RunView.everything`."""
    table = TrialTable(view.graders)
    conditions = Conditions(view.spec)
    root = view.rundir.path
    failures = LastFailures()
    failures.read(view.rundir.journals("errors"))
    uncertain = find_uncertain(view.rundir, running=is_running(view.rundir))
    for sample, trial, key, ref, _ in view.rows():
        raw_key = key_bytes(key)
        if ref is None:
            assert sample is not None
            row = table.append(sample.id, trial, raw_key)
            set_missing(table, row, failures.of_target.get(key), root, uncertain=key in uncertain)
        else:
            facts = output_facts.decode(ref.line.read())
            row = table.append(facts.sample, facts.trial, raw_key)
            set_output(table, row, facts, ref.line, str(ref.line.path.relative_to(root)))
            panel = None if sample is None or not sample.fields else conditions.panel_for(sample.fields)
            set_verdicts(table, row, view.judge(key, ref, panel)[1], failures.of_graders.get(key), root)
    return table
