"""The survey of a dataset: one pass over its rows before a run, which counts, digests and checks them.

A survey is joined from parts of consecutive rows. The parts of large datasets are cached (`store.home`), named by
digests of their rows. Files of JSON lines are divided by their content: after a change, only parts with other lines are
made again. A part knows which conditions of graders hold for its rows, so it serves other graders, too. Nothing is
cached for rows that name other files, or if graders of plug-ins are asked.
"""

from __future__ import annotations

import io
import platform
import sys
from array import array
from collections import deque
from contextlib import suppress
from itertools import accumulate, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128, xxh3_128_digest

from holdfast.canonical import digest, digest_bytes
from holdfast.data.checks import Questions, Shape, TemplateChecks
from holdfast.data.columns import Conditions, Groupings, Panel, Panels, RowValues
from holdfast.errors import ConfigError, DataError, HoldfastError
from holdfast.spec.eval import benchmark_tasks, fields_of_target
from holdfast.spec.load_graders import GRADERS
from holdfast.store.home import HomeDb
from holdfast.versions import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from holdfast.data.checks import RowCheck
    from holdfast.data.columns import Grouping
    from holdfast.data.dataset import Dataset, Sample
    from holdfast.data.readers import Row
    from holdfast.spec.eval import Eval

_Struct = TypeVar("_Struct", bound=msgspec.Struct)

LARGE: Final = 2 << 20
"""bytes of a dataset's files from which its survey is cached"""
_MOST_SHAPES: Final = 100_000
"""shapes that a survey distinguishes; datasets with more have other names of fields in each row"""
_LONGEST_IDS: Final = (1 << 32) - 1
"""bytes of all ids together, up to which four bytes say where an id ends"""
_ID_SETS: Final = 64
"""sets in which ids are compared, since a single one would take 100 bytes for each"""
_MOST_CACHED: Final = 8
"""surveys in the cache"""
_PART_BITS: Final = 20
"""log2 of the mean number of bytes of a part's lines"""
_LONGEST_PART: Final = 16 << _PART_BITS
_PART_ROWS: Final = 1 << 14
"""rows of a part that are not lines of JSON"""
_HEADER: Final = b""
"""name of a cached survey's header, next to its parts"""
_BOM: Final = b"\xef\xbb\xbf"


class Ids:
    """The ids of samples, one after the other in one piece of memory."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._ends = array("I")
        """of four bytes each, or of eight if the text is longer than they can say"""

    def extend(self, text: bytes, lengths: bytes) -> None:
        """Append ids: their text, and an array of its lengths."""
        if len(self._text) + len(text) > _LONGEST_IDS and self._ends.typecode == "I":
            self._ends = array("Q", self._ends)
        self._ends.extend(islice(accumulate(array("I", lengths), initial=len(self._text)), 1, None))
        self._text += text

    def encoded(self, start: int = 0, count: int | None = None) -> Iterator[bytearray]:
        """Yield ids as they are stored."""
        begin, text = self._begin(start), self._text
        for end in self._ends[start : None if count is None else start + count]:
            yield text[begin:end]
            begin = end

    @property
    def may_repeat(self) -> bool:
        """True if an id seems to occur twice: digests of two ids are equal."""
        digests = [array("Q") for _ in range(_ID_SETS)]
        for number in map(xxh3_64_intdigest, self.encoded()):
            digests[number % _ID_SETS].append(number)
        return any(len(set(numbers)) < len(numbers) for numbers in digests)

    def _begin(self, position: int) -> int:
        return self._ends[position - 1] if position else 0

    def __getitem__(self, position: int) -> str:
        return self._text[self._begin(position) : self._ends[position]].decode("utf-8", "surrogatepass")


class Survey(msgspec.Struct, frozen=True):
    """Result of reading the whole dataset once."""

    count: int
    digest: str
    """digest of the selected samples in their order"""
    digests: bytes
    """16 bytes per sample: `Sample.digest`"""
    panels: Panels
    """the graders that apply to each sample"""
    unsendable: ConfigError | None = None
    """set if a new run is impossible: a list or an object would be sent as a text, a row has no continuations, or all
    rows ask the same"""
    asked: bytes = b""
    """16 bytes per sample: `Sample.asked`; empty if the target sees whole rows"""
    shapes: dict[Shape, str] = {}
    """the place of the first row of each shape"""
    groupings: Mapping[str, Grouping] = {}
    """values of the fields by which results are broken down, by field"""
    ids: Ids = msgspec.field(default_factory=Ids)
    """ids of the samples"""

    @property
    def asked_digests(self) -> bytes:
        """`Sample.asked` of all samples, 16 bytes each."""
        return self.asked or self.digests

    def row_at(self, position: int) -> bytes:
        """Return `Sample.digest` of the sample at a position, as bytes."""
        return self.digests[position * 16 : position * 16 + 16]

    def row_text(self, position: int) -> str:
        """Return `Sample.row` of the sample at a position."""
        return self.digests[position * 16 : position * 16 + 8].hex()

    def asked_at(self, position: int) -> bytes:
        """Return `Sample.asked` of the sample at a position, as bytes."""
        return self.asked_digests[position * 16 : position * 16 + 16]


class _Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive rows of a dataset."""

    name: bytes
    """a digest of the rows"""
    first: int
    """number of its first line, or of its first row"""
    path: str = ""
    """the file, if rows are lines"""
    offset: int = 0
    size: int = 0

    def place(self, where: str) -> str:
        """Return a place in the dataset; places in a chunk of lines are their numbers from its first line."""
        return f"{self.path}:{self.first + int(where)}" if self.path else where


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """The survey of a chunk in which nothing is wrong, whatever rows are before and after it."""

    digests: bytes
    asked: bytes
    ids: tuple[bytes, bytes]
    wheres: list[str]
    """conditions of graders"""
    shapes: list[tuple[tuple[str, ...], Panel, str]]
    """names of fields, which of the conditions hold or fail, and the place of the first row in the chunk"""
    shape_rows: bytes
    groups: dict[str, tuple[list[str], bytes]]


class _Builder:
    """Makes parts of samples, and joins parts to a survey."""

    def __init__(self, dataset: Dataset, check: RowCheck | None, *, compares: bool) -> None:
        """Take `check` as `make_survey` does. If it `compares`, rows that all ask the same are refused."""
        spec = dataset.spec
        self._questions = Questions(spec) if compares else None
        self._digests, self._asked, self._ids = bytearray(), bytearray(), Ids()
        self._sees_part = fields_of_target(spec) is not None
        self._checks, self._conditions = TemplateChecks(spec, check), Conditions(spec)
        self._panels, self._groupings = Panels(self._conditions.everyone), Groupings(spec)
        self._shapes: dict[Shape, str] = {}

    @property
    def count(self) -> int:
        """The number of samples so far."""
        return len(self._digests) // 16

    @property
    def compares(self) -> bool:
        """True until two rows differ that have to."""
        return self._questions is not None

    def compare(self, fields: Row) -> None:
        """Compare what a row asks with other rows, until two of them differ."""
        if self._questions is not None:
            self._questions.look(fields)
            if self._questions.differ:
                self._questions = None

    def survey(self, samples: Iterable[Sample]) -> _Part:
        """Check samples and return their part, which is not yet joined."""
        digests, asked, ids, lengths = bytearray(), bytearray(), bytearray(), array("I")
        shapes: RowValues[Shape] = RowValues()
        places: list[str] = []
        groups: dict[str, Grouping] = {field: RowValues() for field in self._groupings.by_field}
        for sample in samples:
            digests += bytes.fromhex(sample.digest[7:])
            if self._sees_part:
                asked += bytes.fromhex(sample.asked[7:])
            name = sample.id.encode("utf-8", "surrogatepass")
            ids += name
            lengths.append(len(name))
            shape = tuple(sample.fields), self._conditions.panel_for(sample.fields)
            if shapes.add(shape) == len(places):
                places.append(sample.where)
            self._checks.look(sample, shape)
            for field, group in groups.items():
                group.add(self._groupings.value_of(field, sample.fields, sample.where))
            if self._questions is not None:
                self.compare(sample.fields)
        return _Part(
            digests=bytes(digests),
            asked=bytes(asked),
            ids=(bytes(ids), lengths.tobytes()),
            wheres=self._conditions.wheres,
            shapes=[
                (names, self._conditions.holding_in(panel), where)
                for (names, panel), where in zip(shapes.values, places, strict=True)
            ],
            shape_rows=shapes.packed().tobytes(),
            groups={field: (group.values, group.packed().tobytes()) for field, group in groups.items()},
        )

    def join(self, part: _Part, chunk: _Chunk | None = None, *, checked: bool = True) -> bool:
        """Add the part of a chunk. Unless its rows were `checked` for the eval's graders, it may be refused.

        It is refused if it does not know a condition of the graders, or if they name a field that some rows lack.
        """
        panels = [self._conditions.panel_like(holding, part.wheres) for _, holding, _ in part.shapes]
        known = [panel for panel in panels if panel is not None]
        shapes = [(names, panel) for (names, _, _), panel in zip(part.shapes, known, strict=False)]
        if len(known) < len(panels) or (not checked and any(map(self._checks.is_doubtful, shapes))):
            return False
        self._digests += part.digests
        self._asked += part.asked
        self._ids.extend(*part.ids)
        self._panels.extend(known, part.shape_rows)
        fields = {name for names, _ in shapes for name in names}
        self._checks.fields |= fields
        self._groupings.extend(part.groups, fields)
        for shape, (_, _, where) in zip(shapes, part.shapes, strict=True):
            if shape not in self._shapes and len(self._shapes) < _MOST_SHAPES:
                self._shapes[shape] = where if chunk is None else chunk.place(where)
        return True

    def conclude(self) -> Survey:
        """Return the survey; raise ConfigError for rows that cannot be evaluated."""
        self._checks.conclude()
        self._groupings.conclude(self._checks.fields)
        same = None if self._questions is None else self._questions.problem(self.count, self._checks.fields)
        digests = bytes(self._digests)
        return Survey(
            count=self.count,
            digest=digest_bytes(digests),
            digests=digests,
            panels=self._panels,
            unsendable=self._checks.unsendable() or same,
            asked=bytes(self._asked),
            shapes=self._shapes,
            groupings=self._groupings.by_field,
            ids=self._ids,
        )


def make_survey(dataset: Dataset, check: RowCheck | None = None) -> Survey:
    """Read everything once: count it, digest it, and refuse what cannot be evaluated.

    `check` yields what is wrong with a row, and the key of the eval file that says so.
    """
    builder = _Builder(dataset, check, compares=dataset.must_differ)
    samples = dataset.read_and_keep()
    while (part := builder.survey(islice(samples, _PART_ROWS))).digests:
        builder.join(part)
    if builder.count == 0:
        raise DataError(", ".join(dataset.source), dataset.why_empty())
    survey = builder.conclude()
    if survey.ids.may_repeat:
        _refuse_duplicates(dataset)
    return survey


def _refuse_duplicates(dataset: Dataset) -> None:
    places: dict[str, str] = {}
    for sample in dataset:
        if sample.id in places:
            duplicate_row = f"duplicate of {places[sample.id]}, and neither row has an id"
            duplicate_id = f"sample id {sample.id!r} is already used at {places[sample.id]}"
            raise DataError(
                sample.where,
                duplicate_row if sample.is_nameless else duplicate_id,
                remedy="Ids name samples: make them unique, or set dataset.id to a field that is.",
            )
        places[sample.id] = sample.where


def survey_dataset(dataset: Dataset, check: RowCheck | None = None) -> Survey:
    """Return the survey of a dataset; of a large one, make only what is not in the cache."""
    graders = dataset.spec.placed_graders()
    is_small = sum(size for size, _ in dataset.stamp()) < LARGE
    if is_small or dataset.names_files or not all(GRADERS.is_builtin(block.type) for _, block in graders):
        return make_survey(dataset, check)
    survey = None
    with HomeDb() as home, suppress(HoldfastError, msgspec.DecodeError, ValueError, OSError):
        survey = _CachedSurvey(home, dataset, check).bring_up_to_date()
    if survey is None:
        survey = make_survey(dataset, check)  # which says what is wrong with the rows
    _release_memory()
    return survey


def _release_memory() -> None:
    """Return what surveying needed to the system: 60 MB at 1,000,000 rows, which glibc keeps for later otherwise."""
    import ctypes

    with suppress(OSError, AttributeError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)


class _Header(msgspec.Struct, frozen=True, array_like=True):
    """The inputs of a cached survey."""

    files: list[tuple[str, str]] = []
    """paths and digests of the dataset's files"""
    graders: list[str] = []
    """digests of the graders for which its rows were checked"""
    chunks: list[_Chunk] = []


class _CachedSurvey:
    """The survey of an eval's dataset in the cache."""

    def __init__(self, home: HomeDb, dataset: Dataset, check: RowCheck | None) -> None:
        self._home, self._dataset, self._check = home, dataset, check
        spec = dataset.spec
        self._graders = digest([[location, block.model_dump(mode="json")] for location, block in spec.placed_graders()])
        # A check asks graders about rows, so that its survey serves no others.
        self._shelf = "survey " + digest([_basis(spec, dataset), None if check is None else self._graders])
        self._files = [(str(path), _digest_file(path)) for path in dataset.files]
        self._stream, self._streamed = dataset.rows(), 0
        self._data: bytes | None = None
        """lines of the chunk that comes next, if they were read to divide them"""

    def bring_up_to_date(self) -> Survey | None:
        """Return the survey of the files as they are now; None if there is something wrong with their rows."""
        home, dataset, stamp = self._home, self._dataset, self._dataset.stamp()
        header = _decode(home.get(self._shelf, _HEADER), _Header) or _Header()
        cached, is_same = {chunk.name for chunk in header.chunks}, header.files == self._files
        builder = _Builder(dataset, self._check, compares=dataset.must_differ and not is_same)
        chunks: list[_Chunk] = []
        new: dict[bytes, bytes] = {}
        for chunk in header.chunks if is_same else self._divide():
            part = _decode(home.get(self._shelf, chunk.name), _Part) if chunk.name in cached else None
            if part is None or not builder.join(part, chunk, checked=self._graders in header.graders):
                part = builder.survey(map(dataset.sample, self._rows_of(chunk)))
                if not part.digests and not chunk.path:
                    break  # there were no rows left
                new[chunk.name] = msgspec.msgpack.encode(part)
                builder.join(part, chunk)
            elif builder.compares:
                for _, row in islice(self._rows_of(chunk), 2):
                    builder.compare(row)
            chunks.append(chunk)
        survey = builder.conclude()
        if is_same and not new:
            home.touch(self._shelf)
            return survey
        if not survey.count or survey.unsendable is not None or survey.ids.may_repeat or dataset.stamp() != stamp:
            return None
        graders = [self._graders, *(header.graders if is_same else ())][:_MOST_CACHED]
        new[_HEADER] = msgspec.msgpack.encode(_Header(self._files, graders, chunks))
        home.put(self._shelf, new, keep={chunk.name for chunk in chunks}, most=_MOST_CACHED)
        return survey

    def _divide(self) -> Iterator[_Chunk]:
        """Divide the dataset into chunks. Unless rows are lines, there is no last one: the others are empty."""
        if self._dataset.has_row_per_line:
            for path in self._dataset.files:
                for chunk, self._data in _divide_lines(path):
                    yield chunk
        else:
            for first in count(step=_PART_ROWS):
                yield _Chunk(xxh3_128_digest(f"{first} {self._files}".encode()), first)

    def _rows_of(self, chunk: _Chunk) -> Iterator[tuple[str, Row]]:
        """Yield the rows of a chunk. Unless they are lines, chunks have to come in their order."""
        if chunk.path:
            yield from _read_lines(chunk, self._data)
        else:
            deque(islice(self._stream, chunk.first - self._streamed), maxlen=0)
            self._streamed = chunk.first + _PART_ROWS
            yield from islice(self._stream, _PART_ROWS)


def _basis(spec: Eval, dataset: Dataset) -> list[Any]:
    """Return everything that a survey depends on, except the dataset's files and the graders with their templates."""
    from importlib.metadata import version  # which small datasets do not need

    tasks = benchmark_tasks(spec.document.data)
    locations = {location for location, _ in spec.placed_graders()}
    return [
        [__version__, platform.python_version(), msgspec.__version__, version("jinja2"), sys.byteorder],
        str(spec.folder),
        None if spec.dataset is None else spec.dataset.model_dump(mode="json"),
        [[each.location, each.source, sorted(each.variables)] for each in spec.templates() if each.grader is None],
        [each for each in spec.expressions() if each[0][:-1] not in locations],
        [spec.by, spec.cluster, spec.continuations, None if tasks is None else sorted(tasks.tasks)],
        None if (fields := fields_of_target(spec)) is None else sorted(fields),
        dataset.must_differ,
    ]


def _decode(data: bytes | None, kind: type[_Struct]) -> _Struct | None:
    with suppress(msgspec.DecodeError):
        return None if data is None else msgspec.msgpack.decode(data, type=kind)
    return None


def _digest_file(path: Path) -> str:
    checksum = xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum.update(block)
    return checksum.hexdigest()


def _divide_lines(path: Path) -> Iterator[tuple[_Chunk, bytes]]:
    """Divide a file after lines whose digests are low, more often after long ones: after 1 MB on average.

    So a line that is added, changed or removed changes the chunk that it is in, and no other one.
    """
    lines: list[bytes] = []
    first, offset, size = 1, 0, 0
    with path.open("rb", buffering=1 << 18) as file:
        for number, line in enumerate(file, 1):
            lines.append(line)
            size += len(line)
            if xxh3_64_intdigest(line) < len(line) << (64 - _PART_BITS) or size > _LONGEST_PART:
                data = b"".join(lines)
                yield _Chunk(xxh3_128_digest(data), first, str(path), offset, size), data
                lines, first, offset, size = [], number + 1, offset + size, 0
    if lines:
        data = b"".join(lines)
        yield _Chunk(xxh3_128_digest(data), first, str(path), offset, size), data


def _read_lines(chunk: _Chunk, data: bytes | None) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a chunk of lines; `data` are its bytes, unless they have to be read."""
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    if data is None:
        with Path(chunk.path).open("rb") as file:
            file.seek(chunk.offset)
            data = file.read(chunk.size)
    for number, line in enumerate(io.BytesIO(data.removeprefix(_BOM) if chunk.first == 1 else data)):
        if not line.isspace():
            yield str(number), decode(line)
