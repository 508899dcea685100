"""Outputs and verdicts of a run in memory: mappings like `dict`, in about 100 bytes an output and 40 a verdict.

Each row is packed into a fixed number of bytes, and a table of row numbers with open addressing finds it by its key. A
key is a digest, of which the row holds the 16 bytes. What few rows have (marks of turns, counts, unusual usage) is in a
dict beside them. Verdicts have no room for usage until the first that has any, from a judge: then the table is widened.
NaN reads as None, as in a journal line.

The rows are in memory that is mapped for them. It grows in place, and pages that no row is in take none. On the heap,
a table of a million rows would be moved again and again as it grows, and would leave holes of up to 32 MB each.
"""

from __future__ import annotations

from array import array
from binascii import unhexlify
from collections.abc import ItemsView, Iterator, MutableMapping, ValuesView
from hashlib import sha256
from math import isnan, nan
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from struct import Struct
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar, get_args

from msgspec import UNSET

from holdfast.store.answers import KIND_CODES, KINDS
from holdfast.store.lines import LineRef
from holdfast.store.records import GradeStatus, Together, Usage
from holdfast.store.refs import Moment, OutputRef, VerdictRef

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Ref = TypeVar("Ref")

_TAG: Final = "sha256:"
_DIGEST_LENGTH: Final = len(_TAG) + 32
_KEY: Final = 16
"""bytes of a key, with which each row begins"""
UNKNOWN: Final = 0xFFFFFFFF
"""stands for None among numbers of tokens and requests; as the requests of a row, for usage that is not in the row"""
_FILE_SHIFT: Final = 48
_FEWEST_SLOTS: Final = 8
_FEWEST_BYTES: Final = 1 << 14
"""memory that is mapped for rows at first; of this, only pages with rows count"""
_STATUSES: Final[tuple[GradeStatus, ...]] = get_args(GradeStatus)
_CODES: Final = {status: code for code, status in enumerate(_STATUSES)}


def pack_digest(text: str) -> bytes | None:
    """Return the 16 bytes of a digest as Holdfast writes it; None for any other text."""
    if len(text) != _DIGEST_LENGTH or text[:7] != _TAG or not text.islower():
        return None
    try:
        return unhexlify(text[7:])
    except ValueError:
        return None


_MOMENT: Final = Struct("<16sId")
"""a moment of a conversation; one of hundreds of turns has as many"""
_Moments = bytes | tuple[Moment, ...]


def _pack_moments(marks: tuple[Moment, ...]) -> _Moments:
    """Return moments in 28 bytes each, or as they are if one of them does not fit."""
    packed = bytearray()
    for digest, tokens, seconds in marks:
        raw = pack_digest(digest)
        if raw is None or not (tokens is None or 0 <= tokens < UNKNOWN):
            return marks
        packed += _MOMENT.pack(raw, UNKNOWN if tokens is None else tokens, seconds)
    return bytes(packed)


def _unpack_moments(marks: _Moments) -> tuple[Moment, ...]:
    if isinstance(marks, tuple):
        return marks
    parts = _MOMENT.iter_unpack(marks)
    return tuple(
        [Moment(_TAG + raw.hex(), None if tokens == UNKNOWN else tokens, seconds) for raw, tokens, seconds in parts]
    )


_home: Final = Struct("<Q8x").unpack
"""reads where a key belongs"""
_Spot = tuple[bytes, int, int, bool]
"""bytes of a key, its row or -1, its slot, and whether it is no digest. A named tuple would take longer to make"""


class PackedTable(MutableMapping[str, Ref], Generic[Ref]):
    """A mapping from keys to packed rows, in the order in which the keys were added."""

    _layouts: ClassVar[tuple[Struct, ...]]
    """the fields of a row behind its key: at first, and after the table was widened"""

    def __init__(self) -> None:
        self.clear()

    def _use_layout(self, layout: Struct) -> None:
        self._layout, self.width = layout, _KEY + layout.size
        self._homes = Struct(f"<Q{self.width - 8}x")
        """reads where each row's key belongs"""

    def clear(self) -> None:
        """Remove everything."""
        self._use_layout(self._layouts[0])
        self._memory = _map_memory(0)
        """the rows, and room for more"""
        self.row_count = 0
        """number of rows, with those whose keys were removed"""
        self.slots = array("I", bytes(4 * _FEWEST_SLOTS))
        """row numbers from 1, at or behind the place that a key's first bytes name; 0 is a free slot"""
        self.odd_keys: dict[int, str] = {}
        """by row: keys that are not digests. Their rows hold a digest of the key"""
        self.holes: set[int] = set()
        """rows whose keys were removed"""
        self.rare: dict[int, Any] = {}
        """by row: what does not fit into it"""

    @property
    def rows(self) -> memoryview:
        """The packed rows. While this is held, none can be added."""
        return memoryview(self._memory)[: self.row_count * self.width]

    def __len__(self) -> int:
        return self.row_count - len(self.holes)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._find(key)[1] >= 0

    def __getitem__(self, key: str) -> Ref:
        row = self._find(key)[1]
        if row < 0:
            raise KeyError(key)
        return self._unpack(row)

    def get(self, key: str, default: Any = None) -> Any:
        """Return what a key stands for, or the default."""
        row = self._find(key)[1]
        return default if row < 0 else self._unpack(row)

    def __setitem__(self, key: str, ref: Ref) -> None:
        spot = self._find(key)
        row = spot[1]
        if row < 0:
            self._append(key, spot, ref)
            return
        fields, rare = self._pack(ref)
        start = row * self.width
        self._memory[start + _KEY : start + self.width] = fields
        if rare is not None:
            self.rare[row] = rare
        else:
            self.rare.pop(row, None)

    def add(self, key: str, ref: Ref) -> Ref | None:
        """Add a key, unless it is there: then return what it stands for, and change nothing."""
        spot = self._find(key)
        if spot[1] >= 0:
            return self._unpack(spot[1])
        self._append(key, spot, ref)
        return None

    def _add_row(self, raw: bytes, fields: bytes) -> bool:
        """Add a row, unless its key is there; return True if it was added."""
        memory, slots, width, mask = self._memory, self.slots, self.width, len(self.slots) - 1
        place = _home(raw)[0] & mask
        while entry := slots[place]:
            start = (entry - 1) * width
            if memory[start : start + _KEY] == raw:
                return False
            place = (place + 1) & mask
        self._insert(place, raw + fields)
        return True

    def _append(self, key: str, spot: _Spot, ref: Ref) -> None:
        raw, _, slot, odd = spot
        fields, rare = self._pack(ref)
        row = self.row_count
        if odd:
            self.odd_keys[row] = key
        if rare is not None:
            self.rare[row] = rare
        self._insert(slot, raw + fields)

    def _insert(self, slot: int, row: bytes) -> None:
        """Add a packed row whose key belongs into a free slot."""
        start = self.row_count * self.width
        if start + self.width > len(self._memory):
            self._map_more(2 * start)
        self._memory[start : start + self.width] = row
        self.row_count = self.slots[slot] = count = self.row_count + 1
        if 3 * count > 2 * len(self.slots):
            self.reserve(count + 1)

    def _map_more(self, size: int) -> None:
        """Make the memory for rows larger; pages in which there is no row yet take none."""
        try:
            self._memory.resize(size)
        except SystemError:  # the system cannot do that
            larger = _map_memory(size)
            larger[: len(self._memory)] = self._memory[:]
            self._memory = larger

    def __delitem__(self, key: str) -> None:
        _, row, free, _ = self._find(key)
        if row < 0:
            raise KeyError(key)
        slots, mask = self.slots, len(self.slots) - 1
        place = (free + 1) & mask
        while entry := slots[place]:  # move rows that were pushed behind the slot that becomes free
            (home,) = self._homes.unpack_from(self._memory, (entry - 1) * self.width)
            if (place - home) & mask >= (place - free) & mask:
                slots[free], free = entry, place
            place = (place + 1) & mask
        slots[free] = 0
        self.holes.add(row)
        self.rare.pop(row, None)
        self.odd_keys.pop(row, None)

    def __iter__(self) -> Iterator[str]:
        return map(self._key_at, self._live_rows())

    def items(self) -> ItemsView[str, Ref]:
        """Return the keys with what they stand for."""
        return _Items(self)

    def values(self) -> ValuesView[Ref]:
        """Return what the keys stand for."""
        return _Values(self)

    def refs(self) -> Iterator[Ref]:
        """Yield what the keys stand for, row by row: faster than looking up one key after the other."""
        return map(self._unpack, self._live_rows())

    def row_of(self, key: str) -> int:
        """Return the number of a key's row, or -1."""
        return self._find(key)[1]

    def rows_of(self, digests: Iterable[bytes]) -> list[int]:
        """Return what `row_of` returns for keys that are digests, of which the 16 bytes are passed."""
        memory, slots, width, mask = self._memory, self.slots, self.width, len(self.slots) - 1
        number, numbers = int.from_bytes, []
        for raw in digests:
            place = number(raw[:8], "little") & mask
            while entry := slots[place]:
                start = (entry - 1) * width
                if memory[start : start + _KEY] == raw:
                    break
                place = (place + 1) & mask
            numbers.append(entry - 1)
        return numbers

    def ref_at(self, row: int) -> Ref:
        """Return what the key of a row stands for."""
        return self._unpack(row)

    def compact(self) -> None:
        """Forget the rows whose keys were removed."""
        if not self.holes:
            return
        odd_keys, rare, count, width = {}, {}, 0, self.width
        for count, row in enumerate(self._live_rows(), start=1):
            place = count - 1
            self._memory.move(place * width, row * width, width)
            if row in self.odd_keys:
                odd_keys[place] = self.odd_keys[row]
            if row in self.rare:
                rare[place] = self.rare[row]
        self.row_count, self.odd_keys, self.rare, self.holes = count, odd_keys, rare, set()
        self._fill_slots(_slots_for(count))

    def make_rows(self, count: int, width: int) -> None:
        """Make so many rows of a width, which have to be filled; raise ValueError for a width that no layout has."""
        layout = next((layout for layout in self._layouts if _KEY + layout.size == width), None)
        if layout is None:
            raise ValueError("not a width of rows")
        self._use_layout(layout)
        self._memory, self.row_count = _map_memory(count * width), count

    def reserve(self, count: int) -> None:
        """Make room for a number of keys, so that adding them moves none."""
        if (size := _slots_for(count)) > len(self.slots):
            self._fill_slots(size)

    def _fill_slots(self, size: int) -> None:
        """Make so many slots for the rows that there are."""
        self.slots = slots = array("I", [0]) * size
        mask, holes = size - 1, self.holes
        for row, (home,) in enumerate(self._homes.iter_unpack(self.rows)):
            if row not in holes:
                place = home & mask
                while slots[place]:
                    place = (place + 1) & mask
                slots[place] = row + 1

    def _live_rows(self) -> Iterator[int]:
        rows = iter(range(self.row_count))
        return (row for row in rows if row not in self.holes) if self.holes else rows

    def _key_bytes(self, row: int) -> bytes:
        start = row * self.width
        return self._memory[start : start + _KEY]

    def _key_at(self, row: int) -> str:
        odd = self.odd_keys.get(row) if self.odd_keys else None
        return _TAG + self._key_bytes(row).hex() if odd is None else odd

    def _find(self, key: str) -> _Spot:
        raw = pack_digest(key)
        odd = raw is None
        if raw is None:
            raw = sha256(b"odd " + key.encode("utf-8", "surrogatepass")).digest()[:_KEY]
        memory, slots, width, mask = self._memory, self.slots, self.width, len(self.slots) - 1
        place = _home(raw)[0] & mask
        while entry := slots[place]:
            start = (entry - 1) * width
            if memory[start : start + _KEY] == raw and (not odd or self.odd_keys.get(entry - 1) == key):
                return raw, entry - 1, place, odd
            place = (place + 1) & mask
        return raw, -1, place, odd

    def _pack(self, ref: Ref) -> tuple[bytes, Any]:
        """Return the packed fields of a row, and what does not fit into it, else None."""
        raise NotImplementedError

    def _unpack(self, row: int) -> Ref:
        raise NotImplementedError

    def _fields(self, row: int) -> tuple[Any, ...]:
        return self._layout.unpack_from(self._memory, row * self.width + _KEY)


class _Items(ItemsView[str, Ref]):
    _mapping: PackedTable[Ref]

    def __iter__(self) -> Iterator[tuple[str, Ref]]:
        return zip(self._mapping, self._mapping.refs(), strict=True)


class _Values(ValuesView[Ref]):
    _mapping: PackedTable[Ref]

    def __iter__(self) -> Iterator[Ref]:
        return self._mapping.refs()


def _map_memory(size: int) -> mmap:
    return mmap(-1, max(size, _FEWEST_BYTES), flags=MAP_PRIVATE | MAP_ANONYMOUS)


def _slots_for(count: int) -> int:
    """Return how many slots a number of keys needs."""
    size = _FEWEST_SLOTS
    while 2 * size < 3 * count:
        size *= 2
    return size


def _usage(incoming: int, outgoing: int, requests: int, cost: float) -> Usage:
    return Usage(
        None if incoming == UNKNOWN else incoming,
        None if outgoing == UNKNOWN else outgoing,
        requests,
        None if cost != cost else cost,
    )


_NO_NUMBERS: Final = (UNKNOWN, UNKNOWN, UNKNOWN, nan)


def _pack_usage(usage: Usage) -> PackedUsage | None:
    """Return the numbers of a usage as a row holds them; None if they do not fit into it."""
    incoming, outgoing, requests, cost = usage.input_tokens, usage.output_tokens, usage.requests, usage.cost
    if (
        usage.cache_read_tokens is not UNSET
        or usage.cache_write_tokens is not UNSET
        or usage.reasoning_tokens is not UNSET
        or not (incoming is None or 0 <= incoming < UNKNOWN)
        or not (outgoing is None or 0 <= outgoing < UNKNOWN)
        or not 0 <= requests < UNKNOWN
    ):
        return None
    return (
        UNKNOWN if incoming is None else incoming,
        UNKNOWN if outgoing is None else outgoing,
        requests,
        nan if cost is None else cost,
    )


RareOutput = tuple[str | None, Usage | None, _Moments, str | None]
"""digest and usage where they do not fit into a row, marks of turns, and the checkpoint that ended the conversation"""
_NO_ROW: Final = bytes(8)
RareVerdict = tuple[Usage | None, tuple[int, ...] | None, Together | None]
"""usage where it does not fit into a row, counts, and what a grader says of all outputs together"""

_NOTHING_RARE: Final[RareVerdict] = (None, None, None)

PackedUsage = tuple[int, int, int, float]
"""input tokens, output tokens, requests, and the cost or NaN"""
OutputFields = tuple[bytes, int, int, int, int, int, float, float, float, bytes, int]
"""digest, place and length of the line, packed usage, seconds, start, `Output.row`, code of the answer's kind"""
VerdictFields = tuple[int, int, int, int, float, int]
"""status, packed usage, and the bits of the score: unlike the score itself, equal for NaN and not for 0.0 and -0.0"""


class OutputTable(PackedTable[OutputRef]):
    """The outputs of a run by their generation keys."""

    _layouts = (Struct("<16sQIIIIddd8sB"),)

    def clear(self) -> None:
        """Remove everything."""
        super().clear()
        self.files: list[Path] = []
        """journals that the lines are in"""
        self._numbers: dict[Path, int] = {}

    def use_files(self, files: list[Path]) -> None:
        """Set the journals that the file numbers of rows stand for."""
        self.files, self._numbers = files, {path: number for number, path in enumerate(files)}

    def stopped(self) -> list[tuple[str, OutputRef]]:
        """Return the outputs that a checkpoint ended."""
        rows = [row for row, (_, _, _, stopped_by) in self.rare.items() if stopped_by is not None]
        return [(self._key_at(row), self._unpack(row)) for row in rows]  # not of all: each turn would be an object

    def is_final(self, key: str) -> bool:
        """Return True if a key has an output that no checkpoint ended."""
        row = self.row_of(key)
        rare: RareOutput | None = self.rare.get(row)  # as the output itself, each turn would be an object
        return row >= 0 and (rare is None or rare[3] is None)

    def fields_at(self, rows: Iterable[int]) -> list[OutputFields]:
        """Return the fields of rows as they are packed."""
        unpack, memory, width = self._layout.unpack_from, self._memory, self.width
        return [unpack(memory, row * width + _KEY) for row in rows]

    def sample_row_at(self, row: int) -> str:
        """Return `Output.row`; zeros if there is none."""
        return self.fields_at((row,))[0][9].hex()

    def has_odd_digest(self, row: int) -> bool:
        """Return True if the digest of an output is a text that does not fit into its row."""
        rare: RareOutput | None = self.rare.get(row)
        return rare is not None and rare[0] is not None

    def last_lines(self) -> dict[Path, tuple[int, int, int]]:
        """Return where the last line of each journal begins and ends, and how many bytes all its lines take."""
        last, first_bits, total = [0] * len(self.files), (1 << _FILE_SHIFT) - 1, [0] * len(self.files)
        ends = [0] * len(self.files)
        for place, length in Struct(f"<{_KEY + 16}xQI{self.width - _KEY - 28}x").iter_unpack(self.rows):
            file, offset = place >> _FILE_SHIFT, place & first_bits
            total[file] += length + 1
            if offset >= last[file]:
                last[file], ends[file] = offset, offset + length + 1
        return {path: (last[number], ends[number], total[number]) for number, path in enumerate(self.files)}

    def number_of(self, path: Path) -> int:
        """Return the number of a journal."""
        file = self._numbers.get(path)
        if file is None:
            file = self._numbers[path] = len(self.files)
            self.files.append(path)
        return file

    def add_plain(
        self,
        key: str,
        file: int,
        offset: int,
        length: int,
        digest: str,
        usage: Usage,
        seconds: float,
        started: float,
        row: str | None,
        kind: int,
    ) -> bool:
        """Add an output with nothing rare, in half the time of `add`; False: it is there, or has something rare."""
        raw, raw_digest, numbers = pack_digest(key), pack_digest(digest), _pack_usage(usage)
        if raw is None or raw_digest is None or numbers is None:
            return False
        place = file << _FILE_SHIFT | offset
        packed_row = _NO_ROW if row is None else unhexlify(row)
        fields = raw_digest, place, length, *numbers, seconds, started, packed_row, kind
        return self._add_row(raw, self._layout.pack(*fields))

    def _pack(self, ref: OutputRef) -> tuple[bytes, Any]:
        (path, offset, length), digest, usage, seconds, marks, stopped_by, started, row, kind = ref
        place = self.number_of(path) << _FILE_SHIFT | offset
        raw, numbers = pack_digest(digest), _pack_usage(usage)
        rare = None
        if raw is None or numbers is None or marks or stopped_by is not None:
            rare = None if raw else digest, None if numbers else usage, _pack_moments(marks), stopped_by
        numbers = numbers or _NO_NUMBERS
        packed_row = _NO_ROW if row is None else unhexlify(row)
        fields = raw or bytes(16), place, length, *numbers, seconds, started, packed_row, KIND_CODES[kind]
        return self._layout.pack(*fields), rare

    def _unpack(self, row: int) -> OutputRef:
        digest, place, length, *numbers, seconds, started, packed_row, kind = self._fields(row)
        line = LineRef(self.files[place >> _FILE_SHIFT], place & ((1 << _FILE_SHIFT) - 1), length)
        text, usage, marks, stopped_by = _TAG + digest.hex(), None, b"", None
        if self.rare and (rare := self.rare.get(row)) is not None:
            odd, usage, marks, stopped_by = rare
            text = text if odd is None else odd
        usage = usage or _usage(*numbers)
        moments = _unpack_moments(marks) if marks else ()
        sample_row = None if packed_row == _NO_ROW else packed_row.hex()
        return OutputRef(line, text, usage, seconds, moments, stopped_by, started, sample_row, KINDS[kind])


def lines_of(fields: Iterable[OutputFields]) -> list[tuple[int, int, int]]:
    """Return the number of the file of each output's line, its offset and its length."""
    first_bits = (1 << _FILE_SHIFT) - 1
    return [(each[1] >> _FILE_SHIFT, each[1] & first_bits, each[2]) for each in fields]


class VerdictTable(PackedTable[VerdictRef]):
    """The verdicts of a run by their grade keys."""

    _layouts = _NARROW, _WIDE = Struct("<Bdd"), Struct("<BIIIddd")
    _narrow_exact, _wide_exact = Struct("<BQ"), Struct("<BIIIdQ")

    def of_sets(self) -> list[tuple[str, Together]]:
        """Return the keys of verdicts on all outputs of the run together."""
        rows = [(row, together) for row, (_, _, together) in self.rare.items() if together is not None]
        return [(self._key_at(row), together) for row, together in rows]

    def fields_at(self, rows: Iterable[int]) -> list[VerdictFields | None]:
        """Return the fields of rows as they are packed, without the time; None for the row -1."""
        memory, width = self._memory, self.width
        if self._layout is self._WIDE:
            unpack = self._wide_exact.unpack_from
            return [unpack(memory, row * width + _KEY) if row >= 0 else None for row in rows]
        unpack = self._narrow_exact.unpack_from
        pairs = [unpack(memory, row * width + _KEY) if row >= 0 else None for row in rows]
        return [pair and (pair[0], *_NO_NUMBERS, pair[1]) for pair in pairs]

    def _pack(self, ref: VerdictRef) -> tuple[bytes, Any]:
        status, score, usage, time, counts, together = ref
        numbers = None if usage is None else _pack_usage(usage)
        odd_usage = usage if numbers is None else None
        rare = (odd_usage, counts, together)
        return self._pack_fields(status, score, numbers, time), None if rare == _NOTHING_RARE else rare

    def _pack_fields(self, status: GradeStatus, score: float | None, numbers: PackedUsage | None, time: float) -> bytes:
        """Return the packed fields of a row, for which the table is widened if there was no usage before."""
        if score is None:
            score = nan
        if self._layout is self._NARROW:
            if numbers is None:
                return self._NARROW.pack(_CODES[status], score, time)
            self._widen()
        return self._WIDE.pack(_CODES[status], *(numbers or _NO_NUMBERS), score, time)

    def _widen(self) -> None:
        """Make room for usage in all rows, none of which has any."""
        fields = Struct(f"<{_KEY}s{self._NARROW.format[1:]}").iter_unpack(self.rows)
        self.make_rows(self.row_count, _KEY + self._WIDE.size)
        for row, (raw, status, score, time) in enumerate(fields):
            start = row * self.width
            self._memory[start : start + self.width] = raw + self._WIDE.pack(status, *_NO_NUMBERS, score, time)

    def add_plain(self, key: str, status: GradeStatus, score: float | None, usage: Usage | None, time: float) -> bool:
        """Add a verdict with nothing rare, in half the time of `add`; False: it is there, or has something rare."""
        raw, numbers = pack_digest(key), None if usage is None else _pack_usage(usage)
        if raw is None or (usage is not None and numbers is None):
            return False
        return self._add_row(raw, self._pack_fields(status, score, numbers, time))

    def _unpack(self, row: int) -> VerdictRef:
        if self._layout is self._WIDE:
            status, incoming, outgoing, requests, cost, score, time = self._fields(row)
        else:
            status, score, time = self._fields(row)
            incoming, outgoing, requests, cost = _NO_NUMBERS
        usage, counts, together = self.rare.get(row, _NOTHING_RARE) if self.rare else _NOTHING_RARE
        if usage is None and requests != UNKNOWN:
            usage = _usage(incoming, outgoing, requests, cost)
        return VerdictRef(_STATUSES[status], None if isnan(score) else score, usage, time, counts, together)
