"""Every trial of a run as a row of a table: status, scores, usage and place, for filters, sorting, counts and pages.

A row has the number of its trial in the dataset's order, and outputs whose row is gone follow. Trials that are equal in
everything that is a word (statuses, stop, answer, source, error) share an *outcome*, of which even a run with a million
trials has few: a condition on words selects outcomes first, and counts are sums over outcomes.

The table of a large finished run is published in `.index/` with its report, by the rules of `store.index_files`.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar, get_args
from urllib.parse import quote

import msgspec
from xxhash import xxh3_128_hexdigest

from holdfast.data.panels import Conditions
from holdfast.store.answers import class_of_kind
from holdfast.store.calls import uncertain_trials
from holdfast.store.catalog import is_running
from holdfast.store.files import read_file
from holdfast.store.index import JOURNALS, connect, pack, unpack
from holdfast.store.index_files import (
    INDEX,
    UNUSABLE,
    JournalMark,
    check_journal,
    find_published,
    make_mark,
    publish_file,
    temporary_file,
)
from holdfast.store.shared import journal_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from holdfast.data.dataset import Sample
    from holdfast.data.panels import Panel
    from holdfast.plan.identity import RunIdentity
    from holdfast.report.run_view import RunView
    from holdfast.report.trials import JudgedOutput, TrialBatch
    from holdfast.store.heads import OutputRef
    from holdfast.store.index import Key, RunIndex
    from holdfast.store.lines import LineRef
    from holdfast.store.rundir import RunDir

T = TypeVar("T")

RowStatus = Literal["passed", "failed", "error", "skipped", "not_reached", "pending", "ungraded", "uncertain"]
"""`pending`: no output yet; `ungraded`: verdicts are still to come; `error` if an attempt at either has failed;
`uncertain`: no output, since a person has to settle a call that may have happened"""
STATUSES: Final[tuple[RowStatus, ...]] = get_args(RowStatus)
CODES: Final[dict[str, int]] = {status: code for code, status in enumerate(STATUSES, 1)}
"""numbers of the statuses; 0 is a grader that does not look at the row"""
NUMBERS: Final = (
    *("score", "turns", "tokens", "input_tokens", "output_tokens", "cost", "seconds", "first_token", "started"),
    "attempt",
)
"""numbers of a trial"""
WORDS: Final = ("stop", "answer", "error", "source")
"""words of a trial, besides its statuses"""
_PLACES: Final = ("file", "at", "len", "error_file", "error_at", "error_len")
_BATCH: Final = 256
"""rows that are made at once"""
_MOST_ALIKE: Final = 1 << 12
_NAME: Final = "trials"
"""of the published file"""


class TrialOutcome(NamedTuple):
    """What trials have in common."""

    status: int
    """a code"""
    statuses: bytes
    """codes by grader"""
    stopped: int
    """turn of the checkpoint that ended the conversation, else 0"""
    has_output: bool
    stop: str = ""
    answer: str = ""
    error: str = ""
    source: str = ""


class Failure(NamedTuple):
    """The last failed attempt at a trial."""

    kind: str
    line: LineRef


class TrialTable:
    """The trials of one run."""

    def __init__(self, graders: Sequence[str]) -> None:
        self.graders = list(graders)
        self.db = connect()
        self.name = "main.trials"
        """of the table in SQL"""
        self.outcomes: list[TrialOutcome] = []
        self._outcome_numbers: dict[TrialOutcome, int] = {}
        self._alike: dict[tuple[object, ...], tuple[TrialOutcome, list[float | None]]] = {}
        """outcomes and scores of outputs that are equal in all that these are made of"""
        self.files: list[Path] = []
        """journals, by their numbers"""
        self._file_numbers: dict[Path, int] = {}
        self.panels: list[Panel | None] = [None]
        """the graders of rows, by the number under which the table has them"""
        self._panel_numbers: dict[Panel | None, int] = {None: 0}
        self.rows = 0
        self.fields: dict[str, tuple[list[str], str]] = {}
        """by name of a field of the rows: its values, and the table of their numbers"""
        self._field_tables = 0

    def attach(self, path: Path, outcomes: Iterable[TrialOutcome], files: Sequence[Path]) -> None:
        """Take the rows of a published table, which cannot be changed."""
        self.db.execute("ATTACH DATABASE ? AS base", (f"file:{quote(str(path))}?immutable=1&mode=ro",))
        self.name, self.files = "base.trials", list(files)
        self.outcomes = list(outcomes)

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        scores = [score_column(number) for number in range(len(self.graders))]
        return ["n", "key", "sample", "trial", "panel", "outcome", *NUMBERS, *_PLACES, *scores]

    def create(self) -> None:
        """Make the empty table."""
        columns = ", ".join(self.columns[1:])
        self.db.execute(f"CREATE TABLE main.trials (n INTEGER PRIMARY KEY, {columns})")

    def put(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add rows, or replace those with the same number."""
        marks = ", ".join("?" * len(self.columns))
        self.db.execute("BEGIN")
        self.db.executemany(f"INSERT OR REPLACE INTO main.trials VALUES ({marks})", rows)
        self.db.execute("COMMIT")

    def outcome(self, outcome: TrialOutcome) -> int:
        """Return the number of an outcome."""
        number = self._outcome_numbers.get(outcome)
        if number is None:
            number = self._outcome_numbers[outcome] = len(self.outcomes)
            self.outcomes.append(outcome)
        return number

    def place(self, line: LineRef | None) -> tuple[int | None, int | None, int | None]:
        """Return the place of a line for the columns of a row."""
        if line is None:
            return None, None, None
        number = self._file_numbers.get(line.path)
        if number is None:
            number = self._file_numbers[line.path] = len(self.files)
            self.files.append(line.path)
        return number, line.offset, line.length

    def row_of(
        self,
        number: int,
        key: str,
        sample: str,
        trial: int,
        panel: Panel | None,
        ref: OutputRef | None,
        judged: JudgedOutput | None,
        *,
        failure: Failure | None = None,
        uncertain: bool = False,
    ) -> tuple[Any, ...]:
        """Return the row of a trial; `failure` is the last one of its target, or of a grader if it has an output."""
        if ref is None or judged is None:
            uncertain = uncertain or (failure is not None and failure.kind == "uncertain")
            status = "uncertain" if uncertain else "pending" if failure is None else "error"
            outcome = TrialOutcome(
                CODES[status], bytes(len(self.graders)), 0, False, error=failure.kind if failure else ""
            )
            numbers: list[Any] = [None] * (len(NUMBERS) + 3)
            scores: list[float | None] = [None] * len(self.graders)
        else:
            usage, failure_kind = ref.usage, None if failure is None else failure.kind
            alike = judged, ref.stop, ref.kind, ref.source, ref.stopped, failure_kind
            if alike not in self._alike:
                if len(self._alike) > _MOST_ALIKE:
                    self._alike.clear()
                self._alike[alike] = self._judge(ref, judged, failure)
            outcome, scores = self._alike[alike]
            numbers = [
                judged.score,
                ref.turns,
                usage.tokens,
                usage.input_tokens,
                usage.output_tokens,
                usage.cost,
                ref.seconds,
                ref.first_token,
                ref.started,
                ref.attempt,
                *self.place(ref.line),
            ]
        error = self.place(failure.line if failure is not None and outcome.error else None)
        return (number, pack(key), sample, trial, self._panel(panel), self.outcome(outcome), *numbers, *error, *scores)

    def _panel(self, panel: Panel | None) -> int:
        number = self._panel_numbers.setdefault(panel, len(self.panels))
        if number == len(self.panels):
            self.panels.append(panel)
        return number

    def _judge(
        self, ref: OutputRef, judged: JudgedOutput, failure: Failure | None
    ) -> tuple[TrialOutcome, list[float | None]]:
        verdicts = judged.verdicts
        status: str = judged.status
        failed = any(verdict is not None and verdict.status == "error" for verdict in verdicts.values())
        if status == "error" and failure is None and not failed:
            status = "ungraded"
        codes, scores = bytearray(len(self.graders)), list[float | None]([None] * len(self.graders))
        for number, verdict in verdicts.items():
            codes[number] = CODES["ungraded" if verdict is None else verdict.status]
            scores[number] = None if verdict is None else verdict.score
        outcome = TrialOutcome(
            CODES[status],
            bytes(codes),
            ref.stopped,
            True,
            ref.stop,
            class_of_kind(ref.kind),
            failure.kind if failure is not None and status == "error" else "",
            ref.source or "",
        )
        return outcome, scores

    # Reading

    def select(self, what: str, where: str = "1 ORDER BY n", values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """Return columns of the rows for which an SQL condition holds, by default of all in their order."""
        return iter(self.db.execute(f"SELECT {what} FROM {self.name} AS trials WHERE {where}", values))

    def find(self, sample: str, trial: int) -> int | None:
        """Return the number of a trial's row."""
        rows = self.select("n", "sample = ? AND trial = ? ORDER BY n LIMIT 1", (sample, trial))
        return next((number for (number,) in rows), None)

    def numbers_of(self, keys: Sequence[Key]) -> dict[Key, int]:
        """Return the numbers of rows by their keys."""
        self.db.execute("CREATE INDEX IF NOT EXISTS main.trials_key ON trials (key)")
        numbers: dict[Key, int] = {}
        for start in range(0, len(keys), _BATCH):
            some = keys[start : start + _BATCH]
            numbers |= dict(self.select("key, n", f"key IN ({','.join('?' * len(some))})", some))
        return numbers

    def set_field(self, name: str, values: list[str], numbers: Iterable[tuple[int, int]]) -> None:
        """Keep the values of a field of the rows: all values, and the number of each row's value."""
        self._field_tables += 1
        table = f"field{self._field_tables}"
        self.db.execute(f"CREATE TABLE main.{table} (n INTEGER PRIMARY KEY, value)")
        self.db.execute("BEGIN")
        self.db.executemany(f"INSERT INTO main.{table} VALUES (?, ?)", numbers)
        self.db.execute("COMMIT")
        self.fields[name] = values, table

    def forget_fields(self) -> None:
        """Forget the values of fields, which have to be read again."""
        for _, table in self.fields.values():
            with suppress(sqlite3.OperationalError):  # somebody is reading it
                self.db.execute(f"DROP TABLE main.{table}")
        self.fields.clear()


def score_column(grader: int) -> str:
    """Return the name of the column of a grader's scores."""
    return f"score{grader}"


class TableFiller:
    """Fills the table of a run from its index, and updates rows as the run goes on."""

    def __init__(self, view: RunView) -> None:
        self._view = view
        self.table = TrialTable(view.graders)
        self._failures = self._read_failures()
        self._uncertain = self._find_uncertain()

    def fill(self, progress: Callable[[float], None]) -> None:
        """Make a row for each trial of the dataset, if it can be read, and for each output without a row."""
        table, view, conditions = self.table, self._view, Conditions(self._view.spec)
        table.create()
        total = max(1, view.manifest.dataset.count * view.manifest.trials)
        rows, with_output = view.keyed_rows(), 0
        while some := list(islice(rows, _BATCH)):
            names = []
            for sample, trial, key in some:
                panel = conditions.panel_for(sample.fields) if sample.fields else None
                names.append(_Name(key, sample.id, trial, panel, sample))
            with_output += self._put(range(table.rows, table.rows + len(names)), names)
            table.rows += len(names)
            progress(min(1.0, table.rows / total))
        if with_output < view.index.count_outputs():
            self._add_others(key for some in view.index.output_keys() for key in some)

    def _add_others(self, keys: Iterable[Key]) -> None:
        """Add the outputs of trials that have no row yet, in the order in which they began."""
        others: list[tuple[float, str]] = []
        for some in _in_batches(list(keys)):
            known = self.table.numbers_of(some)
            outputs = self._view.index.find_outputs([key for key in some if key not in known])
            others += [(ref.started, unpack(key)) for key, ref in outputs.items()]
        for began in _in_batches(sorted(others)):
            outputs = self._view.index.find_outputs([pack(key) for _, key in began])
            refs = [(key, outputs[pack(key)]) for _, key in began]
            names = [_Name(key, ref.sample, ref.trial, None, None) for key, ref in refs]
            self._put(range(self.table.rows, self.table.rows + len(names)), names)
            self.table.rows += len(names)

    def update(self, keys: Iterable[str]) -> int:
        """Make the rows of trials again after something was recorded of them; return how many rows were made.

        A trial becomes uncertain also if its process dies.
        """
        changed = set(keys)
        uncertain = self._find_uncertain()
        changed |= uncertain.keys() ^ self._uncertain.keys()
        self._uncertain = uncertain
        if not changed:
            return 0
        self._failures, table = self._read_failures(), self.table
        numbers = table.numbers_of([pack(key) for key in changed])
        for some in _in_batches(sorted(numbers.values())):
            marks = ",".join("?" * len(some))
            rows = table.select("n, key, sample, trial, panel", f"n IN ({marks}) ORDER BY n", some)
            names = {
                number: _Name(unpack(key), sample, trial, table.panels[panel], None)
                for number, key, sample, trial, panel in rows
            }
            self._put([*names], [*names.values()])
        before = table.rows
        self._add_others(key for key in map(pack, changed) if key not in numbers)
        return len(numbers) + table.rows - before

    def _put(self, numbers: Sequence[int], names: Sequence[_Name]) -> int:
        """Make the rows of trials; return how many have an output."""
        view, table = self._view, self.table
        keys = [pack(name.key) for name in names]
        outputs = view.index.find_outputs(keys)
        verdicts = view.index.find_verdicts([*outputs])
        rows, with_output = [], 0
        for number, name, packed in zip(numbers, names, keys, strict=True):
            ref, panel, sample, trial = outputs.get(packed), name.panel, name.sample, name.trial
            judged = None
            if ref is not None:
                with_output += 1
                if name.row is not None and not view.is_of(ref, name.row):
                    panel, sample, trial = None, ref.sample, ref.trial  # the row has changed since it was graded
                _, judged = view.judge(ref, panel, verdicts.get(packed, {}))
            failure, uncertain = self._failures.get((name.key, ref is None)), name.key in self._uncertain
            rows.append(
                table.row_of(number, name.key, sample, trial, panel, ref, judged, failure=failure, uncertain=uncertain)
            )
        table.put(rows)
        return with_output

    def _read_failures(self) -> dict[tuple[str, bool], Failure]:
        last = self._view.index.last_failures()
        return {name: Failure(kind, line) for name, (_, _, _, line, kind) in last.items()}

    def _find_uncertain(self) -> dict[str, str]:
        return uncertain_trials(self._view.index, running=is_running(self._view.rundir))


class _Name(NamedTuple):
    """A trial, and the graders that look at it."""

    key: str
    sample: str
    trial: int
    panel: Panel | None
    row: Sample | None


def _in_batches(values: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), _BATCH):
        yield values[start : start + _BATCH]


class _Content(msgspec.Struct):
    """What a published table is about."""

    graders: list[str]
    outcomes: list[TrialOutcome]
    files: list[str]
    """relative to the run directory"""
    rows: int
    journals: list[JournalMark]
    report: str
    """digest of metrics.json"""


class ReportedTable:
    """The table of a large run, filled while its report is written. Nothing that happens to it concerns the report."""

    def __init__(self, identified: RunIdentity, index: RunIndex, graders: Sequence[str]) -> None:
        self._survey, self._trials = identified.survey, identified.work.trials
        self._table: TrialTable | None = TrialTable(graders)
        """None: there is no room for it"""
        self._table.create()
        self._outputs = 0
        last = index.last_failures()
        self._failures = {name: Failure(kind, line) for name, (_, _, _, line, kind) in last.items()}

    def add(self, batch: TrialBatch, samples: Iterable[str]) -> None:
        """Add the trials of a batch, of which the ids of the samples are passed."""
        if self._table is None:
            return
        first = batch.positions.start * self._trials
        trials = zip(batch.keys, samples, batch.outputs, batch.judged, strict=True)
        rows = [
            self._table.row_of(
                number,
                key,
                sample,
                number % self._trials + 1,
                self._survey.panels.panel_at(number // self._trials),
                ref,
                judged,
                failure=self._failures.get((key, ref is None)),
            )
            for number, (key, sample, ref, judged) in enumerate(trials, first)
        ]
        try:
            self._table.put(rows)
        except sqlite3.Error:
            self._table = None
        else:
            self._table.rows += len(rows)
            self._outputs += len(batch.recorded)

    def publish(self, rundir: RunDir, index: RunIndex) -> None:
        """Publish the table, after the report was written, unless the run has outputs whose rows are gone."""
        if self._table is not None and self._outputs == index.count_outputs():
            publish_table(self._table, rundir, index)


def publish_table(table: TrialTable, rundir: RunDir, index: RunIndex) -> None:
    """Publish the table of a run whose report was just written. If that is impossible, there is none."""
    folder, temporary = rundir.path / INDEX, None
    with suppress(*UNUSABLE):
        temporary = temporary_file(folder)
        table.db.execute("VACUUM main INTO ?", (str(temporary),))
        marks = [make_mark(rundir.path, path, extent) for path, extent in index.extents.items()]
        content = _Content(
            table.graders,
            table.outcomes,
            [str(path.relative_to(rundir.path)) for path in table.files],
            table.rows,
            [mark for mark in marks if mark is not None],
            _report_digest(rundir),
        )
        publish_file(folder, _NAME, temporary, content)
        return
    if temporary is not None:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def open_published_table(rundir: RunDir, graders: Sequence[str], *, check: bool = True) -> TrialTable | None:
    """Return the published table of a finished run; None if there is none that fits. `check` its content."""
    with suppress(*UNUSABLE):
        path, content = find_published(rundir.path / INDEX, _NAME, _Content, check=check)
        sizes = {str(file.relative_to(rundir.path)) for kind in JOURNALS for file in rundir.journals(kind.name)}
        grown = [mark for mark in content.journals if journal_size(rundir.path / mark.path) != mark.end]
        if content.report != _report_digest(rundir) or content.graders != list(graders) or grown:
            return None
        for mark in content.journals:
            check_journal(rundir.path, mark)
        if not sizes.issuperset(content.files):  # somebody else may have made it
            return None
        table = TrialTable(graders)
        table.attach(path, content.outcomes, [rundir.path / file for file in content.files])
        table.rows = content.rows
        return table
    return None


def _report_digest(rundir: RunDir) -> str:
    return xxh3_128_hexdigest(read_file(rundir.metrics))
