"""The index of a run: the content of its journals, by key.

The journals are the only source of truth. An index is made in one way: `RunIndex.read` takes the lines appended since
the last time, whether these are the whole run, the work of other processes, or this process's own latest lines.

Rows are kept in SQLite, in the order of the lines. The rows of a large run are in a published file
(`store.index_files`), which never changes and is only read; rows of lines that were appended since are in a temporary
database with the same tables, which SQLite moves to a temporary file if it grows. A number of rows first wait in
mappings by key, which are all that a small run needs: they go to the database when it is asked for more than keys, or
when there are too many. All records of a key are rows.
A look-up decides which of them counts, so the order in which files are read never matters:

    outputs    in a file, the last output; among several files, the output that began last, and this run's before a
               lender's. So an output that was repeated on purpose counts, and the late output of a suspended worker,
               whose work another worker has taken over, does not
    verdicts   the grader's latest verdict on the same content
"""

from __future__ import annotations

import sqlite3
import tempfile
from binascii import unhexlify
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args
from urllib.parse import quote

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.errors import Fault
from holdfast.store.files import UNREADABLE, check_regular
from holdfast.store.heads import (
    ErrorHead,
    GradeHead,
    Moment,
    OutputHead,
    OutputRef,
    StepHead,
    VerdictKey,
    VerdictRef,
    decoder,
    explain_uncertain,
    moments,
)
from holdfast.store.lines import Damage, LineRef, is_sound, read_blocks
from holdfast.store.records import (
    KIND_CODES,
    KINDS,
    ErrorRecord,
    Grade,
    GradeStatus,
    Output,
    Spent,
    Step,
    Together,
    Usage,
)
from holdfast.store.shared import journal_size, lender_of, settle, unwanted_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Seen = Callable[[str, Any], None]
"""is called with the kind of a journal and the head of each of its lines"""
Key = bytes | str
"""A digest as a database holds it: its 16 bytes, or the text if it is no digest of ours."""

_TAG: Final = "sha256:"
_DIGEST_LENGTH: Final = len(_TAG) + 32
_STATUSES: Final[tuple[GradeStatus, ...]] = get_args(GradeStatus)
_STATUS_CODES: Final = {status: code for code, status in enumerate(_STATUSES)}
_LARGEST: Final = 1 << 62
"""largest number that fits into a database"""
_CACHE_PAGES: Final = 4096
"""pages of 4 KB that a connection holds in memory"""
_AT_ONCE: Final = 256
"""keys that are looked up by one statement"""
_MOST_WAITING: Final = 1 << 16
"""rows that are kept out of the database: about 40 MB"""

_NUMBERS: Final = "input, output, requests, cost"
TABLES: Final = {
    "outputs": f"key, file, at, len, digest, started, seconds, stopped_by, kind, {_NUMBERS}, rest, row, sample, trial, "
    "turns, attempt, stop, first_token, source",
    "verdicts": f"key, file, at, len, place, judged, status, score, time, {_NUMBERS}, rest",
    "steps": f"key, file, at, len, intent, {_NUMBERS}, time, seconds, source",
    "errors": "key, file, at, len, place, kind, time",
}
"""Columns of the tables, after the number of the row; the first four say where a key's line is. SQLite keeps values as
they are, whatever their type."""


def pack(text: str) -> Key:
    """Return a digest as a database holds it."""
    if len(text) != _DIGEST_LENGTH or text[:7] != _TAG:
        return text
    try:
        key = unhexlify(text[7:])
    except ValueError:
        return text
    return key if key.hex() == text[7:] else text  # capital letters would be lost


def unpack(key: Key) -> str:
    """Return a digest as records have it."""
    return key if isinstance(key, str) else _TAG + key.hex()


class _Rest(msgspec.Struct, array_like=True):
    """Fields that few outputs and verdicts have."""

    usage: Usage | None = None
    """if there are more numbers than the columns have"""
    marks: list[tuple[Any, int | None, float]] = []
    """digest, tokens and seconds at the end of each turn"""
    counts: tuple[int, ...] | None = None
    together: Together | None = None


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_rest: Final = msgspec.msgpack.Decoder(_Rest).decode


class Extent(NamedTuple):
    """The position up to which a journal was read."""

    last: int
    """offset of the last line"""
    end: int


class JournalKind(NamedTuple):
    """A kind of journal."""

    name: str
    head: type[OutputHead | GradeHead | ErrorHead | StepHead]
    """the fields of its lines that the index uses"""
    record: type[Output | Grade | ErrorRecord | Step]
    """its lines"""
    table: str


JOURNALS: Final = (
    JournalKind("outputs", OutputHead, Output, "outputs"),
    JournalKind("grades", GradeHead, Grade, "verdicts"),
    JournalKind("errors", ErrorHead, ErrorRecord, "errors"),
    JournalKind("steps", StepHead, Step, "steps"),
)


class TrialCounts(NamedTuple):
    """Trials of a run by how far they are."""

    total: int
    outputs: int
    graded: int
    """outputs with all their verdicts, estimated by the number of verdicts"""


class StaleIndexError(Exception):
    """A journal was cut or replaced since it was read: the index has to be opened again."""


def connect() -> sqlite3.Connection:
    """Return a connection to a private temporary database, to which published ones can be attached."""
    # Look-ups come from threads, one at a time; SQLite itself allows more.
    db = sqlite3.connect("", uri=True, isolation_level=None, check_same_thread=False, cached_statements=64)
    for setting in ("journal_mode=OFF", "synchronous=OFF", f"cache_size={_CACHE_PAGES}", "trusted_schema=OFF"):
        db.execute(f"PRAGMA {setting}")
    return db


def make_tables(db: sqlite3.Connection, schema: str) -> None:
    """Make empty tables, which are not searchable by key yet."""
    for table, columns in TABLES.items():
        db.execute(f"CREATE TABLE {schema}.{table} (id INTEGER PRIMARY KEY, {columns})")


def make_searchable(db: sqlite3.Connection, schema: str) -> None:
    """Let rows be found by key."""
    for table in TABLES:
        db.execute(f"CREATE INDEX IF NOT EXISTS {schema}.{table}_key ON {table} (key)")


class RunIndex:
    """The content of a run's journals, by key. Holds the places of lines, not their texts."""

    def __init__(self, journals: Callable[[str], Iterable[Path]]) -> None:
        """`journals` returns the files of a kind of journal."""
        self._journals = journals
        self._db: sqlite3.Connection | None = None
        """made when there is more to keep than may wait"""
        self._waiting: dict[str, dict[Key, list[tuple[Any, ...]]]] = {table: {} for table in TABLES}
        """by table and key: rows that are not in the database yet"""
        self._waiting_rows = 0
        self.into = "main"
        """the database that gets the rows of lines that are read"""
        self._schemas = {table: ["main"] for table in TABLES}
        """by table: the databases with rows that count"""
        self.files: list[Path] = []
        """journals, by the numbers under which the tables have them"""
        self._numbers: dict[Path, int] = {}
        self._lenders: list[str | None] = []
        """by file: the run that did its work, if it is shared"""
        self._unwanted: dict[int, frozenset[str]] = {}
        """by shared file: keys of outputs that do not belong to this run"""
        self._places: dict[tuple[str, int | None], int] = {}
        """numbers of graders in their places: fingerprint and turn"""
        self.place_keys: list[tuple[str, int | None]] = []
        self.extents: dict[Path, Extent] = {}
        """how far each journal was read"""
        self._last_lines: dict[Path, bytes] = {}
        """the last line of each journal that was read: a journal that was replaced has another one in its place"""
        self.damage: list[Damage] = []
        self.attempts: dict[str, int] = {}
        """failed attempts of the target by generation key"""
        self.failed_at: dict[str, float] = {}
        """when the last of these attempts failed"""
        self.uncertain: set[str] = set()
        """keys of trials whose last attempt stopped because a person has to settle a call"""
        self.grader_attempts: dict[tuple[str, str], int] = {}
        """failed attempts of graders by generation key and the grader's name"""
        self.totals = Spent()
        """without the calls of conversations that have no output"""
        self._dropped: dict[Key, tuple[Path, int]] = {}
        """places of outputs that do not count although nothing replaces them yet"""
        self._ignored_rows = 0
        """number of verdicts that do not count, because they were given before a moment"""
        self._ignored: dict[Path, int] = {}
        """by file: the offset of the first verdict that counts"""
        self._set: str | None = None
        """digest of the outputs for which verdicts on all outputs together count; None: all such verdicts count"""
        self._has_sets = False
        """a verdict on all outputs together was read since the published file"""
        self.rows = dict.fromkeys(TABLES, 0)
        """number of rows of each table: at least as many as different keys"""
        self.published: Path | None = None
        """the published file that this index begins with"""
        self.published_bytes = 0
        """how many bytes of the journals its rows are made of"""

    # Reading

    @property
    def db(self) -> sqlite3.Connection:
        """The connection, with tables for what is read. All rows are in them."""
        if self._db is None:
            self._db = connect()
            make_tables(self._db, "main")
            make_searchable(self._db, "main")
        if self._waiting_rows:
            # Emptied first: storing the rows asks for this property again.
            waiting, self._waiting_rows = self._waiting, 0
            self._waiting = {table: {} for table in TABLES}
            for table, rows in waiting.items():
                self._store(table, [*chain.from_iterable(rows.values())], "main")
        return self._db

    def set_extents(self, extents: dict[Path, Extent]) -> None:
        """Set how far the journals were read for a published file."""
        self.extents = extents
        for path, (last, end) in extents.items():
            self._last_lines[path] = LineRef(path, last, end - last).read()

    def attach(self, path: Path, files: Sequence[Path | None], places: Sequence[tuple[str, int | None]]) -> None:
        """Begin with the rows of a published file.

        `files` are the journals by their numbers; None stands for a lender's journal that is not shared. Rows of a
        kind of journal that the run does not have do not count.
        """
        self.db.execute("ATTACH DATABASE ? AS base", (f"file:{quote(str(path))}?immutable=1&mode=ro",))
        for number, file in enumerate(files):
            self.number_of(file or Path(f"not shared {number}"))
        for by, turn in places:
            self._place(by, turn)
        kinds = {file.name.partition(".")[0] for file in files if file is not None}
        for kind in JOURNALS:
            if kind.name in kinds:
                self._schemas[kind.table].insert(0, "base")
        if "base" in self._schemas["errors"]:
            for key, where, failure, time in self.db.execute("SELECT key, place, kind, time FROM base.errors"):
                self._count_failure(unpack(key), where, failure, time)
        self.published = path

    def counts(self, table: str) -> bool:
        """Return True if rows of the published file count, in a table."""
        return "base" in self._schemas[table]

    def keep_rules_of(self, other: RunIndex) -> None:
        """Leave out the same rows as another index of the same run."""
        self._dropped, self._ignored, self._set = other._dropped, other._ignored, other._set
        self._ignored_rows = other._ignored_rows

    def read(self, *, durable: bool = False, verify: bool = False, seen: Seen | None = None) -> None:
        """Read what was appended to the journals since they were last read.

        `durable`: from the medium, not from cached pages. `verify`: lines have to be whole records, not only in the
        fields that the index uses. `seen` is called with the kind and the head of each line. Raises StaleIndexError if
        a journal has become shorter.
        """
        for kind in JOURNALS:
            for path in self._journals(kind.name):
                self._read_journal(kind, path, durable=durable, verify=verify, seen=seen)

    def _read_journal(self, kind: JournalKind, path: Path, *, durable: bool, verify: bool, seen: Seen | None) -> None:
        size = journal_size(path)  # before reading: another process may finish its last line meanwhile
        last, end = before = self.extents.get(path, Extent(0, 0))
        if size == end:
            if not end:
                check_regular(path)  # a pipe or a device has no size
            return
        # A journal only grows, so its length and the last line that was read show that it is the one that was read.
        if size < end or (end and LineRef(path, last, end - last).read() != self._last_lines.get(path, b"")):
            raise StaleIndexError(path)
        if durable:
            settle(path)
        decode: Callable[[bytes], Any] = decoder(kind.head).decode
        verify_line = decoder(kind.record).decode if verify else None
        number, lent = self.number_of(path), lender_of(path) is not None
        makers: dict[str, Callable[[Any, bool], tuple[Any, ...]]] = {
            "outputs": self._output_cells,
            "grades": self._verdict_cells,
            "steps": self._step_cells,
            "errors": self._error_cells,
        }
        make_cells = makers[kind.name]
        with suppress(FileNotFoundError):
            for block in read_blocks(path, end, size):
                rows, all_sound = [], block.all_sound()
                for start, data in zip(block.starts, block.lines(), strict=True):
                    offset = block.offset + start
                    if all_sound or is_sound(data):
                        try:
                            if verify_line is not None:
                                verify_line(data)
                            head = decode(data)
                            cells = make_cells(head, lent)
                            rows.append((None, pack(head.key), number, offset, len(data), *cells))
                        except (*UNREADABLE, OverflowError):
                            pass  # sound, but not a record of Holdfast
                        else:
                            if seen is not None:
                                seen(kind.name, head)
                            continue
                    self.damage.append(Damage(path, offset, len(data) + 1, torn=False))
                self._insert(kind.table, rows)
                last, end = block.offset + block.starts[-1], block.offset + block.ends[-1] + 1
            if end < size:
                self.damage.append(Damage(path, end, size - end, torn=True))
        if end > before.end:
            self.extents[path] = Extent(last, end)
            self._last_lines[path] = LineRef(path, last, end - last).read()

    def _insert(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
        self.rows[table] += len(rows)
        if self.into != "main":
            self._store(table, rows, self.into)
            return
        waiting = self._waiting[table]
        for row in rows:
            waiting.setdefault(row[1], []).append(row)
        self._waiting_rows += len(rows)
        if self._waiting_rows > _MOST_WAITING:
            _ = self.db  # which takes them

    def _store(self, table: str, rows: Sequence[tuple[Any, ...]], schema: str) -> None:
        """Add rows to the database."""
        if not rows:
            return
        db, marks = self.db, ", ".join("?" * len(rows[0]))
        try:
            db.execute("BEGIN")
            db.executemany(f"INSERT INTO {schema}.{table} VALUES ({marks})", rows)
            db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            remedy = f"Free some space in {tempfile.gettempdir()}, or set TMPDIR. Then run the same command again."
            raise Fault("disk", f"no room for the index of a run: {error}", remedy=remedy) from error

    def number_of(self, path: Path) -> int:
        """Return the number of a journal."""
        number = self._numbers.get(path)
        if number is None:
            number = self._numbers[path] = len(self.files)
            self.files.append(path)
            self._lenders.append(lender_of(path))
            if unwanted := unwanted_keys(path):
                self._unwanted[number] = unwanted
        return number

    def _place(self, by: str, turn: int | None) -> int:
        number = self._places.get((by, turn))
        if number is None:
            number = self._places[by, turn] = len(self.place_keys)
            self.place_keys.append((by, turn))
        return number

    # What a row has after the place of its line. Work that another run has paid for, since its journal is `lent` or its
    # line was copied from a source, adds nothing to the totals.

    def _output_cells(self, head: OutputHead, lent: bool) -> tuple[Any, ...]:
        usage, timing = head.usage, head.timing
        numbers, odd = _numbers_of(usage)
        _check_size(head.trial, head.turns, head.attempt)
        if head.source is None and not lent:
            self.totals.add(usage)
            self.totals.add_time(timing.started, timing.started + timing.seconds)
        rest = None
        if head.marks or odd is not None:
            marks = [(pack(moment.digest), moment.tokens, moment.seconds) for moment in moments(head.marks)]
            rest = _encode(_Rest(odd, marks))
        kind = KIND_CODES[head.kind]
        own = pack(head.digest), timing.started, timing.seconds, head.stopped_by, kind
        return *own, *numbers, rest, *head.facts

    def _verdict_cells(self, head: GradeHead, lent: bool) -> tuple[Any, ...]:
        usage = head.usage
        numbers, odd = _NO_NUMBERS if usage is None else _numbers_of(usage)
        if head.source is None and not lent:
            self.totals.add_grade(usage, head.time, head.seconds)
        rest = None
        if odd is not None or head.counts is not None or head.together is not None:
            self._has_sets = self._has_sets or head.together is not None
            rest = _encode(_Rest(odd, [], head.counts, head.together))
        place, status = self._place(head.by, head.turn), _STATUS_CODES[head.status]
        return place, pack(head.judged), status, head.score, head.time, *numbers, rest

    def _step_cells(self, head: StepHead, lent: bool) -> tuple[Any, ...]:
        numbers, _ = _numbers_of(head.usage)
        source = "" if lent and head.source is None else head.source
        return head.kind == "intent", *numbers, head.time, head.seconds, source

    def _error_cells(self, head: ErrorHead, _: bool) -> tuple[Any, ...]:
        self.totals.add_time(head.time - head.seconds, head.time)
        if head.usage is not None:
            self.totals.add(head.usage)
        self._count_failure(head.key, head.where, head.kind, head.time)
        return head.where, head.kind, head.time

    def _count_failure(self, key: str, where: str, kind: str, time: float) -> None:
        if where == "target":
            self.attempts[key] = self.attempts.get(key, 0) + 1
            self.note_failure(key, kind, time)
        else:
            self.grader_attempts[key, where] = self.grader_attempts.get((key, where), 0) + 1

    def note_failure(self, key: str, kind: str, time: float) -> None:
        """Note why an attempt at a trial failed. Attempts may be read in any order; the last one counts."""
        before = self.failed_at.get(key, -1.0)
        if time > before:
            self.failed_at[key] = time
            self.uncertain.discard(key)
        if time >= before and kind == "uncertain":
            self.uncertain.add(key)

    # Outputs

    def output(self, key: str) -> OutputRef | None:
        """Return the output of a trial; None without an output."""
        if not self.rows["outputs"]:
            return None
        packed = pack(key)
        return self.find_outputs((packed,)).get(packed)

    def find_outputs(self, keys: Sequence[Key]) -> dict[Key, OutputRef]:
        """Return the outputs of many trials by their keys."""
        return {key: self._output_ref(row) for key, row in self.output_rows(keys).items()}

    def output_rows(self, keys: Sequence[Key]) -> dict[Key, tuple[Any, ...]]:
        """Return the rows of the outputs of many trials by their keys."""
        chosen: dict[Key, tuple[Any, ...]] = {}
        repeated: dict[Key, list[tuple[Any, ...]]] = {}
        for row in self._find("outputs", keys):
            key = row[1]
            if self._unwanted and unpack(key) in self._unwanted.get(row[2], ()):
                continue
            if key in chosen:
                repeated.setdefault(key, [chosen[key]]).append(row)
            else:
                chosen[key] = row
        for key, rows in repeated.items():
            chosen[key] = self._latest(rows)
        # An output is dropped by its place, not by its key: one that is recorded later counts again.
        for key in self._dropped.keys() & chosen.keys() if self._dropped else ():
            if self._dropped[key] == (self.files[chosen[key][2]], chosen[key][3]):
                del chosen[key]
        return chosen

    def _latest(self, rows: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
        """Return the output that counts among several of a trial, by the rules of this module."""
        # Within a file the order of lines is the order of events, whatever the clock said. Files of several writers can
        # only be compared by when the trials began: a worker that was suspended ends late, but began early.
        last: dict[int, tuple[Any, ...]] = {}
        for row in rows:
            file = row[2]
            if file not in last or last[file][3] < row[3]:
                last[file] = row
        return max(last.values(), key=lambda row: (self._lenders[row[2]] is None, row[6], str(self.files[row[2]])))

    def _output_ref(self, row: tuple[Any, ...]) -> OutputRef:
        _, _, file, at, length, digest, started, seconds, stopped_by, kind, *numbers, rest = row[:15]
        *others, source = row[15:]
        facts = [*others, source or self._lenders[file]]
        usage, marks = Usage(*numbers), tuple[Moment, ...]()
        if rest is not None:
            rare = _decode_rest(rest)
            usage = rare.usage or usage
            marks = tuple([Moment(unpack(each), tokens, after) for each, tokens, after in rare.marks])
        line, name = LineRef(self.files[file], at, length), unpack(digest)
        return OutputRef(line, name, usage, seconds, marks, stopped_by, started, KINDS[kind], *facts)

    def all_outputs(self) -> Iterator[tuple[str, OutputRef]]:
        """Yield the outputs of all trials with their keys, in no order."""
        for keys in self._all_keys("outputs"):
            for key, ref in self.find_outputs(keys).items():
                yield unpack(key), ref

    def output_keys(self) -> Iterator[list[Key]]:
        """Yield the keys of all outputs, many at a time."""
        return self._all_keys("outputs")

    def count_outputs(self) -> int:
        """Return the number of trials that have an output."""
        if not self.rows["outputs"]:
            return 0
        if not self._unwanted and not self._dropped:
            keys = " UNION ALL ".join(f"SELECT key FROM {schema}.outputs" for schema in self._schemas["outputs"])
            return int(self.db.execute(f"SELECT count(DISTINCT key) FROM ({keys})").fetchone()[0])
        return sum(len(self.output_rows(keys)) for keys in self._all_keys("outputs"))

    def count_so_far(self, total: int, graders_per_trial: float) -> TrialCounts:
        """Count the trials of a run by the number of records, without looking up each of them."""
        outputs = min(total, self.rows["outputs"])
        graded = min(outputs, int(self.rows["verdicts"] / graders_per_trial)) if graders_per_trial else outputs
        return TrialCounts(total, outputs, graded)

    def count_failed(self) -> int:
        """Count the trials without an output whose attempts have failed."""
        return sum(self.output(key) is None for key in self.attempts)

    def stopped_outputs(self) -> list[tuple[str, OutputRef]]:
        """Return the outputs that a checkpoint ended, with their keys."""
        keys = {key for (key,) in self._select("outputs", "SELECT key FROM {} WHERE stopped_by IS NOT NULL")}
        outputs = (self.find_outputs(some) for some in _chunks(sorted(keys, key=str)))
        return [(unpack(key), ref) for some in outputs for key, ref in some.items() if ref.stopped_by is not None]

    def keys_of(self, sample: str, trial: int) -> list[str]:
        """Return the keys of outputs by the sample's id and the trial's number. Looks at all outputs."""
        rows = self._select("outputs", "SELECT key FROM {} WHERE sample = ? AND trial = ?", sample, trial)
        return [unpack(key) for key in dict.fromkeys(key for (key,) in rows)]

    @property
    def has_later_rows(self) -> bool:
        """True if lines were read that the published file does not cover."""
        return sum(extent.end for extent in self.extents.values()) != self.published_bytes

    def may_unfinish(self) -> bool:
        """Return True if a line that was read after the published file may undo what its rows finished.

        That is an output in place of another one, or an error of a grader that was asked again.
        """
        if not self.rows["outputs"] or not self.counts("outputs"):
            return False
        # Rows of the published file and later ones are compared in SQL: their keys may be a million, and one is enough.
        replaced = "SELECT 1 FROM main.outputs WHERE key IN (SELECT key FROM base.outputs) LIMIT 1"
        failed = f"SELECT 1 FROM main.verdicts WHERE status = {_STATUS_CODES['error']} LIMIT 1"
        return any(self.db.execute(sql).fetchone() is not None for sql in (replaced, failed))

    def drop_output(self, key: str, ref: OutputRef) -> None:
        """Discount an output. An output that is recorded later counts again."""
        self._dropped[pack(key)] = ref.line.path, ref.line.offset

    # Verdicts

    def verdicts(self, key: str) -> dict[VerdictKey, VerdictRef]:
        """Return the verdicts on the output of a trial."""
        if not self.rows["verdicts"]:
            return {}
        packed = pack(key)
        return self.find_verdicts((packed,)).get(packed, {})

    def find_verdicts(self, keys: Sequence[Key]) -> dict[Key, dict[VerdictKey, VerdictRef]]:
        """Return the verdicts on the outputs of many trials."""
        verdicts: dict[Key, dict[VerdictKey, VerdictRef]] = {}
        for row in self._find("verdicts", keys):
            _, key, file, at, length, place, judged, status, score, time, *numbers, rest = row
            if self._ignored and at < self._ignored.get(self.files[file], 0):
                continue
            usage = None if numbers[2] is None else Usage(*numbers)
            counts = together = None
            if rest is not None:
                rare = _decode_rest(rest)
                counts, together, usage = rare.counts, rare.together, rare.usage or usage
                if together is not None and self._set is not None and together.digest != self._set:
                    continue
            by, turn = self.place_keys[place]
            line = LineRef(self.files[file], at, length)
            verdict = VerdictRef(_STATUSES[status], score, usage, time, counts, together, line)
            own, name = verdicts.setdefault(key, {}), (by, turn, unpack(judged))
            earlier = own.get(name)
            if earlier is None or _place_in_time(earlier) < _place_in_time(verdict):
                own[name] = verdict
        return verdicts

    def count_verdicts(self) -> int:
        """Return the number of different verdicts, without errors."""
        return sum(
            verdict.status != "error"
            for keys in self._all_keys("verdicts")
            for verdicts in self.find_verdicts(keys).values()
            for verdict in verdicts.values()
        )

    @property
    def has_verdicts(self) -> bool:
        """True if there is a verdict that may count."""
        return self.rows["verdicts"] > self._ignored_rows

    def unusual_verdicts(self, by: str, turn: int | None) -> Iterator[str]:
        """Yield the keys of outputs on which a grader has given verdicts with counts, or on all outputs together."""
        query = "SELECT DISTINCT key FROM {} WHERE rest IS NOT NULL AND place = ?"
        return (unpack(key) for (key,) in self._select("verdicts", query, self._places.get((by, turn))))

    def has_set_verdicts(self) -> bool:
        """Return True if a verdict may be one on all outputs together."""
        return self._has_sets or (
            self.counts("verdicts")
            and any(
                _decode_rest(rest).together is not None
                for (rest,) in self.db.execute("SELECT rest FROM base.verdicts WHERE rest IS NOT NULL")
            )
        )

    def require_set(self, digest: str) -> None:
        """Count verdicts on all outputs together only if they judged the outputs with this digest."""
        self._set = digest

    def ignore_verdicts(self) -> None:
        """Count only verdicts that are recorded from now on."""
        self._ignored = {path: extent.end for path, extent in self.extents.items()}
        self._ignored_rows = self.rows["verdicts"]

    # Calls and failed attempts

    def steps(self, key: str) -> list[LineRef]:
        """Return the places of the recorded calls of a trial, file by file."""
        return self._lines("steps", key)

    def begun(self) -> list[str]:
        """Return the keys of trials that have recorded calls and no output."""
        return self._without_output("SELECT DISTINCT key FROM {}")

    def uncertain_trials(self, *, running: bool = False) -> dict[str, str]:
        """Return the trials that wait for a person, by key, each with the calls that may have happened.

        A call without a result was cut off, also if a kill left no time to record an error. If the run is `running`,
        such a call may be in flight, so that only errors count. The text is empty if only an error on record says what
        happened.
        """
        uncertain = {}
        for key in {*self._without_output("SELECT DISTINCT key FROM {} WHERE intent"), *self.uncertain}:
            if self.output(key) is None:
                failed_at = self.failed_at[key] if key in self.uncertain else None
                why, stopped = explain_uncertain(self.steps(key), failed_at)
                if stopped or (why and not running):
                    uncertain[key] = why
        return uncertain

    def _without_output(self, query: str) -> list[str]:
        keys = list(dict.fromkeys(key for (key,) in self._select("steps", query)))
        with_output = set(chain.from_iterable(self.output_rows(some) for some in _chunks(keys)))
        return [unpack(key) for key in keys if key not in with_output]

    def last_failures(self) -> dict[tuple[str, bool], tuple[float, int, int, LineRef, str]]:
        """Return the last failed attempts, by trial and whether the target failed, else a grader.

        Each is a time, two numbers that decide between equal times, the place of its line, and its kind.
        """
        last: dict[tuple[str, bool], tuple[float, int, int, LineRef, str]] = {}
        for key, file, at, length, place, kind, time in self._select("errors", f"SELECT {TABLES['errors']} FROM {{}}"):
            name = unpack(key), place == "target"
            failure = time, file, at, LineRef(self.files[file], at, length), kind
            if name not in last or last[name][:3] < failure[:3]:
                last[name] = failure
        return last

    def failures(self, key: str) -> list[LineRef]:
        """Return the places of the failed attempts at a trial, of its target and its graders."""
        return self._lines("errors", key)

    def spent(self) -> Spent:
        """Return the run's spending. An output includes the usage of its calls."""
        spent = self.totals.copy()
        # An output that does not count any longer was paid for, too, with its calls.
        begun = [pack(key) for key in self.begun()]
        recorded = {row[1] for some in _chunks(begun) for row in self._find("outputs", some)}
        keys = [key for key in begun if key not in recorded]
        for row in (row for some in _chunks(keys) for row in self._find("steps", some)):
            _, _, _, _, _, _, *numbers, time, seconds, source = row
            if source is None:
                spent.add(Usage(*numbers))
                spent.add_time(time - seconds, time)
        return spent

    # Rows

    def _lines(self, table: str, key: str) -> list[LineRef]:
        rows = sorted(self._find(table, (pack(key),)), key=lambda row: row[2:4])
        return [LineRef(self.files[row[2]], row[3], row[4]) for row in rows]

    def _select(self, table: str, query: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        """Yield what a query selects from each database with rows of a table, which is `{}` in the query."""
        for schema in self._schemas[table] if self.rows[table] else ():
            yield from self.db.execute(query.format(f"{schema}.{table}"), values)

    def _find(self, table: str, keys: Sequence[Key]) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of many keys, each after the row's number."""
        if waiting := self._waiting[table]:
            for key in keys:
                if key in waiting:
                    yield from waiting[key]
        if self._db is None or not self.rows[table]:
            return
        for some in _chunks(keys):
            marks = ",".join("?" * len(some))
            for schema in self._schemas[table]:
                yield from self._db.execute(f"SELECT * FROM {schema}.{table} WHERE key IN ({marks})", some)

    def _all_keys(self, table: str) -> Iterator[list[Key]]:
        """Yield all different keys of a table, many at a time."""
        if not self.rows[table]:
            return
        keys = " UNION ".join(f"SELECT key FROM {schema}.{table}" for schema in self._schemas[table])
        cursor = self.db.execute(keys)  # sorted by key, as look-ups find rows fastest
        while rows := cursor.fetchmany(_AT_ONCE):
            yield [key for (key,) in rows]


def _place_in_time(verdict: VerdictRef) -> tuple[float, str, int]:
    assert verdict.line is not None
    return verdict.time, str(verdict.line.path), verdict.line.offset


def _chunks(keys: Sequence[Key]) -> Iterator[Sequence[Key]]:
    for start in range(0, len(keys), _AT_ONCE):
        yield keys[start : start + _AT_ONCE]


_Numbers = tuple[int | None, int | None, int | None, float | None]
_NO_NUMBERS: Final[tuple[_Numbers, Usage | None]] = (None, None, None, None), None


def _numbers_of(usage: Usage) -> tuple[_Numbers, Usage | None]:
    """Return the numbers of a usage for the columns of a row; also the usage itself if there are more of them."""
    numbers = usage.input_tokens, usage.output_tokens, usage.requests, usage.cost
    _check_size(*numbers)
    more = usage.cache_read_tokens, usage.cache_write_tokens, usage.reasoning_tokens
    if more == (UNSET, UNSET, UNSET):
        return numbers, None
    _check_size(*[number for number in more if not isinstance(number, UnsetType)])
    return numbers, usage


def _check_size(*numbers: float | None) -> None:
    if max(map(abs, filter(None, numbers)), default=0) > _LARGEST:
        raise OverflowError("a number that no record of Holdfast has")
