"""The trials of a run as a table that pages select from, kept up to date while the run goes on.

The table of a large finished run was published with its report, and is only read. Any other table is made from the
run's index, in memory or in a temporary file. A large run that no process has indexed is first read by a helper
process, which is this module run as a program: it publishes the index, and of a finished run the table, for this user.

A row number stands for the same trial as long as the dataset stays as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from itertools import islice
from pathlib import Path
from threading import Lock, RLock
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from holdfast.apps.view.search import TextHits
from holdfast.data.columns import as_text
from holdfast.data.dataset import Dataset
from holdfast.errors import HoldfastError, QueryError, suggest
from holdfast.report.run_view import RunView
from holdfast.report.trial_table import (
    NUMBERS,
    STATUSES,
    WORDS,
    RowStatus,
    TableFiller,
    TrialTable,
    open_published_table,
    publish_table,
    score_column,
)
from holdfast.store.files import UNREADABLE
from holdfast.store.heads import ErrorHead, decode_head
from holdfast.store.index import StaleIndexError
from holdfast.store.index_files import bytes_to_publish, journals_size
from holdfast.store.lines import LineRef
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from holdfast.apps.view.query import Query
    from holdfast.data.dataset import Sample
    from holdfast.store.index import Key

T = TypeVar("T")
Progress = Callable[[float], None]
"""called with the share of the work that is done, from 0 to 1; with 0 if it will take a while"""

_MOST_SEARCHES: Final = 8
"""texts whose hits are kept"""
_MOST_COMPUTED: Final = 16
"""results that are kept until a row changes"""
_MOST_FIELDS: Final = 8
"""fields whose values are kept"""
PREVIEW: Final = 300
"""characters of an answer in a row"""
_MOST_VALUES: Final = 10_000
"""maximum number of values of a field that groups rows; with more, it is a text or an id"""
_NICENESS: Final = 5
"""niceness of helper processes, so that a run on the same machine goes first"""


class TrialRow(msgspec.Struct, frozen=True, kw_only=True):
    """A trial in a list."""

    row: int
    """number of the row"""
    sample: str
    """id of the sample"""
    trial: int
    """number of the trial, from 1"""
    status: RowStatus
    score: float | None
    graders: dict[str, tuple[RowStatus, float | None]]
    """status and score by grader, for graders that apply to the row"""
    turns: int | None = None
    tokens: int | None = None
    cost: float | None = None
    """dollars"""
    seconds: float | None = None
    attempt: int | None = None
    answer: str
    """class of the answer; empty without an output"""
    stop: str = ""
    """why the conversation ended, as the target reports it"""
    stopped: int | None = None
    """turn of the checkpoint that ended the conversation"""
    error: str = ""
    """why there is no output or no verdict: kind and message of the last failed attempt"""
    preview: str
    """beginning of the answer"""


class _Answer(msgspec.Struct):
    output: str


_answer: Final = msgspec.json.Decoder(_Answer)


class Helpers:
    """Processes of the viewer that work on runs, because a busy thread would hold up the pages; they end with it."""

    def __init__(self) -> None:
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._ended = False

    def ask(self, module: str, rundir: RunDir) -> Iterator[bytes]:
        """Yield the lines that a module of this package prints about a run, as a program."""
        command = [sys.executable, "-P", "-m", f"holdfast.apps.view.{module}", str(rundir.path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            self._processes.add(process)
            if self._ended:
                process.kill()
            yield from process.stdout
        self._processes.discard(process)
        if self._ended:
            raise CancelledError

    def end(self) -> None:
        """End all helpers."""
        self._ended = True
        for process in [*self._processes]:
            process.kill()


class Snapshot(NamedTuple):
    """The rows that a query selects, as they were when it was asked."""

    rows: array[int]
    """row numbers in order"""
    total: int
    """number of all rows"""
    complete: bool
    """False while the search for a text goes on: ask again for the other rows"""
    generation: int
    """of the columns"""
    query: Query
    where: str
    """the query in SQL, for the table of this generation"""
    values: tuple[Any, ...]
    """the values in it"""


class Columns:
    """The trials of one run. Threads may share them."""

    def __init__(self, rundir: RunDir, helpers: Helpers) -> None:
        self.rundir = rundir
        self.helpers = helpers
        self.lock = RLock()
        """held while the table is read or changed"""
        self.generation = 0
        """grows whenever a row changes"""
        self.snapshots: dict[tuple[str, str, int], Snapshot] = {}
        """answers to the latest queries, by query, order and generation; pages are cut from them"""
        self.view = RunView(rundir)
        self.table = TrialTable(())
        self._filler: TableFiller | None = None
        """updates the table of a run that may go on"""
        self._state: object = None
        self._computed: dict[tuple[int, object], Any] = {}
        """by generation and name"""
        self._fields: dict[str, tuple[TrialTable, list[str], array[int]]] = {}
        """by name of a field: the table whose rows they are of, its values, and the number of each row's value"""
        self._searches: dict[tuple[str, int], TextHits] = {}
        self._refreshing = Lock()

    def open(self, progress: Progress) -> None:
        """Open the published table if it is valid, else make one."""
        view, state, filler = RunView(self.rundir), self._read_state(), None
        table = _published_table(view)
        if table is None and journals_size(self.rundir) >= bytes_to_publish():
            progress(0.0)
            for share in self.helpers.ask("columns", self.rundir):
                progress(float(share))
            table = _published_table(view)
        if table is None:
            filler = TableFiller(view)
            filler.fill(progress)
            table = filler.table
        with self.lock:
            self.view, self.table, self._filler, self._state = view, table, filler, state
        progress(1.0)

    @property
    def settled(self) -> bool:
        """True if the table was published with a report, so that it does not change."""
        return self._filler is None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.table.rows

    def compute(self, name: object, function: Callable[[TrialTable], T]) -> T:
        """Return a function of the table, which is computed again only after a row has changed."""
        with self.lock:
            key = self.generation, name
            if key not in self._computed:
                while len(self._computed) >= _MOST_COMPUTED:
                    del self._computed[next(iter(self._computed))]
                self._computed[key] = function(self.table)
            result: T = self._computed[key]
            return result

    def find(self, sample: str, trial: int) -> int | None:
        """Return the row number of a trial."""
        with self.lock:
            return self.table.find(sample, trial)

    def find_text(self, text: str, wait: float | None) -> tuple[bytes, bool]:
        """Search transcripts and ids for at most `wait` seconds; return a byte of 1 for each row that contains a text.

        Also return True if the search has ended; otherwise it goes on, and the next call returns more.
        """
        with self.lock:
            key = text, self.generation
            if key not in self._searches:
                while len(self._searches) >= _MOST_SEARCHES:
                    self._searches.pop(next(iter(self._searches))).stop()
                self._searches[key] = TextHits(self.table, text)
            hits = self._searches[key]
        return hits.flags(wait)

    def field(self, name: str, position: int = 0) -> tuple[list[str], array[int]]:
        """Return the values of a field of the rows that is not under `by`, and the number of each row's value.

        The value 0 stands for rows that the dataset no longer has. The first call reads the dataset. Raises
        QueryError, for a place in a query, if no row has the field or if it has too many values.
        """
        table = self.table
        kept = self._fields.pop(name, None)
        if kept is None or kept[0] is not table or len(kept[2]) != table.rows:
            kept = table, *self._read_field(table, name, position)
            while len(self._fields) >= _MOST_FIELDS:
                self._fields.pop(next(iter(self._fields)), None)
        self._fields[name] = kept
        return kept[1:]

    def _read_field(self, table: TrialTable, name: str, position: int) -> tuple[list[str], array[int]]:
        numbers: dict[str, int] = {"": 0}
        codes = array("H", bytes(2 * table.rows))
        names: dict[str, None] = {}
        present = False
        try:
            for sample, rows in self._rows_by_sample(table):
                names |= dict.fromkeys(sample.fields)
                value = field_value(sample.fields, name)
                present = present or value is not None
                number = numbers.setdefault(as_text(value), len(numbers))
                for row in rows:
                    codes[row] = number
                if len(numbers) > _MOST_VALUES:
                    break
        except HoldfastError as error:
            raise QueryError(f"the field `{name}` cannot be read: {error.message}", position, error.remedy) from error
        if len(numbers) > _MOST_VALUES:
            message = f"the field `{name}` has more than {_MOST_VALUES:,} different values"
            raise QueryError(message, position, 'Search for its text in quotes instead: `"words"`.')
        if not present:
            known = [*table.graders, *NUMBERS, *WORDS, "sample", "trial", "status", *names]
            fields = f"Fields of the rows are {', '.join(names)}. " if names else ""
            remedy = f"{fields}Numbers are {', '.join(NUMBERS)}, and the graders' scores."
            raise QueryError(f"no row has a field `{name}`{suggest(name, known)}", position, remedy)
        return list(numbers), codes

    def _rows_by_sample(self, table: TrialTable) -> Iterator[tuple[Sample, list[int]]]:
        """Yield the samples of the dataset with the numbers of their rows, which have the keys of their trials."""
        in_order = table.select("key")
        by_key: dict[Key, int] | None = None
        first = 0
        for sample in Dataset(self.view.spec):
            keys = self.view.work.packed_keys_of(sample.asked)
            if by_key is None and [key for (key,) in islice(in_order, len(keys))] == keys:
                yield sample, [*range(first, first + len(keys))]
                first += len(keys)
                continue
            if by_key is None:  # the dataset has changed since
                by_key = dict(table.select("key, n"))
            yield sample, [by_key[key] for key in keys if key in by_key]

    def refresh(self) -> int:
        """Read what the run has written since the last look, and return how many rows are new or have changed."""
        with self._refreshing:
            if self._read_state() == self._state:
                if self._filler is None:
                    return 0
                changed: set[str] = set()
                with suppress(StaleIndexError), self.lock:
                    self.view.index.read(seen=lambda _, head: changed.add(head.key))
                    self.view.work.drop_unfit(self.view.index)
                    rows = self._filler.update(changed)
                    self.generation += bool(rows)
                    return rows
            self.open(_ignore)
            self.generation += bool(self.rows)
            return self.rows

    def _read_state(self) -> object:
        """Return stamps of the report, the dataset and published journals: if one changes, the table is rebuilt."""
        try:
            dataset = Dataset(self.view.spec).stamp() if not self.rundir.finished else ()
        except HoldfastError:
            dataset = ()
        paths = [self.rundir.metrics, self.rundir.manifest]
        if self.rundir.finished:  # its journals no longer change
            paths += [path for kind in ("outputs", "grades") for path in self.rundir.journals(kind)]
        return dataset, [*map(stamp, paths)]

    def close(self) -> None:
        """End searches."""
        with self.lock:
            for hits in self._searches.values():
                hits.stop()
            self._searches.clear()


def stamp(path: Path) -> object:
    """Return a value that changes whenever a file does, or None if the file is missing."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _ignore(share: float) -> None:
    """Ignore the progress."""


def open_columns(rundir: RunDir, progress: Progress = _ignore, helpers: Helpers | None = None) -> Columns:
    """Return the trials of a run."""
    columns = Columns(rundir, helpers or Helpers())
    columns.open(progress)
    return columns


def _published_table(view: RunView) -> TrialTable | None:
    return None if view.metrics is None else open_published_table(view.rundir, view.graders)


def field_value(fields: Mapping[str, Any], name: str) -> Any:
    """Return a field of a row; a name such as `tag.level` is a field, or else the field `level` inside `tag`."""
    if name in fields:
        return fields[name]
    value: Any = fields
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def read_rows(columns: Columns, numbers: Iterable[int]) -> list[TrialRow]:
    """Return rows as lists show them, with the beginnings of their answers."""
    places = list(numbers)
    with columns.lock:
        table = columns.table
        rows: dict[int, TrialRow] = {}
        for start in range(0, len(places), 500):
            some = places[start : start + 500]
            for row in table.select("*", f"n IN ({','.join('?' * len(some))})", some):
                rows[row[0]] = _read_row(table, row)
    return [rows[number] for number in places]


def _read_row(table: TrialTable, row: Sequence[Any]) -> TrialRow:
    values = dict(zip(table.columns, row, strict=True))
    outcome = table.outcomes[values["outcome"]]
    graders: dict[str, tuple[RowStatus, float | None]] = {
        name: (STATUSES[code - 1], values[score_column(number)])
        for number, (name, code) in enumerate(zip(table.graders, outcome.statuses, strict=True))
        if code
    }
    same = ("sample", "trial", "score", "turns", "tokens", "cost", "seconds", "attempt")
    return TrialRow(
        row=values["n"],
        **{name: values[name] for name in same},
        status=STATUSES[outcome.status - 1],
        graders=graders,
        answer=outcome.answer,
        stop=outcome.stop,
        stopped=outcome.stopped or None,
        error=_read_error(_line(table, values, "error_")),
        preview=_preview(_line(table, values, "")),
    )


def _line(table: TrialTable, values: Mapping[str, Any], prefix: str) -> LineRef | None:
    file, at, length = (values[f"{prefix}{name}"] for name in ("file", "at", "len"))
    return None if file is None else LineRef(table.files[file], at, length)


def _preview(line: LineRef | None) -> str:
    if line is None:
        return ""
    try:
        return _answer.decode(line.read()).output[:PREVIEW]
    except UNREADABLE:
        return ""  # the journal has been repaired, which the next look at it notices


def _read_error(line: LineRef | None) -> str:
    head = None if line is None else decode_head(ErrorHead, line.read())
    if head is None:
        return ""
    reason = f"{head.kind}: {head.message}"
    return reason if head.where == "target" else f"{head.where}: {reason}"


def work_apart(work: Callable[[RunDir], None]) -> None:
    """Work on the run that is named on the command line, as a helper process."""
    os.nice(_NICENESS)
    try:
        work(RunDir(Path(sys.argv[1])))
    except KeyboardInterrupt:  # the viewer has ended
        sys.exit(1)


def _publish(rundir: RunDir) -> None:
    """Publish the index of a run, and of a finished run the table; print the share of the table that is made."""
    view = RunView(rundir)
    index = view.index  # which publishes it
    if view.metrics is not None:
        filler = TableFiller(view)
        filler.fill(_write_share)
        publish_table(filler.table, rundir, index, rundir.private_index)


def _write_share(share: float) -> None:
    sys.stdout.buffer.write(b"%f\n" % share)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    work_apart(_publish)
