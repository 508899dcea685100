"""The survey of a dataset: one pass over its rows before a run, which counts, digests and checks them.

Surveys of large datasets are cached (`store.home_db`) in parts of consecutive rows. While the files have the digests
that they had, the parts are joined again. Lines of JSON are divided into parts by their content, so that after a
change, only parts with other lines are made again. A survey for other graders has the same parts: each says which of
the graders' conditions hold for a row. Nothing is cached for rows that name other files, or if graders of plug-ins are
asked.
"""

from __future__ import annotations

import operator
import platform
import sys
from array import array
from collections import deque
from contextlib import suppress
from functools import partial
from itertools import accumulate, chain, count, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest, xxh3_128, xxh3_128_digest

from holdfast import __version__
from holdfast.canonical import digest, digest_bytes
from holdfast.data.checks import Questions, Shape, TemplateChecks
from holdfast.data.columns import RowValues, Groupings, code_for
from holdfast.data.panels import Conditions, Panel, Panels
from holdfast.errors import ConfigError, DataError, HoldfastError
from holdfast.spec.benchmark_tasks import benchmark_tasks
from holdfast.spec.load_graders import GRADERS
from holdfast.spec.row_fields import fields_of_target
from holdfast.store.home_db import HomeDb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from holdfast.data.checks import RowCheck
    from holdfast.data.columns import Grouping
    from holdfast.data.dataset import Dataset, Sample
    from holdfast.data.readers import Row
    from holdfast.spec.load import Eval

_Struct = TypeVar("_Struct", bound=msgspec.Struct)

LARGE: Final = 2 << 20
"""bytes of a dataset's files from which its survey is cached"""
_MOST_SHAPES: Final = 100_000
"""shapes that a survey distinguishes; datasets with more have other names of fields in each row"""
_LONGEST_IDS: Final = (1 << 32) - 1
"""bytes of all ids together, up to which four bytes say where an id ends"""
_ID_SETS: Final = 64
"""sets in which ids are compared, since a single one would take 100 bytes for each"""
_MOST_SURVEYS: Final = 8
"""cached surveys"""
_PART_BITS: Final = 20
"""log2 of the mean number of bytes of a part's lines"""
_LONGEST_PART: Final = 16 << _PART_BITS
_PART_ROWS: Final = 1 << 14
"""rows of a part if they are not lines of JSON"""
_HEADER: Final = b""
"""name of a cached survey's header, next to its parts"""
_BOM: Final = b"\xef\xbb\xbf"


class Ids:
    """The ids of samples, one after the other in one piece of memory."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._ends = array("I")
        """of four bytes each, or of eight if the text is longer than they can say"""

    def add(self, name: str) -> None:
        """Append an id."""
        encoded = name.encode("utf-8", "surrogatepass")
        self._make_room(len(encoded))
        self._text += encoded
        self._ends.append(len(self._text))

    def cut(self, start: int) -> tuple[bytes, bytes]:
        """Return the ids from a position on: their text and their lengths, for `extend`."""
        begin = self._begin(start)
        lengths = array("I", map(operator.sub, self._ends[start:], [begin, *self._ends[start:-1]]))
        return bytes(self._text[begin:]), lengths.tobytes()

    def extend(self, text: bytes, lengths: bytes) -> None:
        """Append ids that `cut` returned."""
        self._make_room(len(text))
        self._ends.extend(islice(accumulate(array("I", lengths), initial=len(self._text)), 1, None))
        self._text += text

    def _make_room(self, size: int) -> None:
        if len(self._text) + size > _LONGEST_IDS and self._ends.typecode == "I":
            self._ends = array("Q", self._ends)

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


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """The survey of consecutive rows to which nothing was objected, whatever rows are before and after them."""

    digests: bytes
    asked: bytes
    ids: tuple[bytes, bytes]
    shapes: list[tuple[tuple[str, ...], Panel, str]]
    """names of fields, which of the survey's conditions hold, and the place of the first row in the part"""
    shape_rows: bytes
    groups: dict[str, tuple[list[str], bytes]]


class SurveyBuilder:
    """Makes a survey, sample by sample, or part by part."""

    def __init__(self, dataset: Dataset, check: RowCheck | None, *, compares: bool) -> None:
        """Take `check` as `make_survey` does. A survey that `compares` refuses rows that all ask the same."""
        spec = dataset.spec
        self.count = 0
        self.has_all_shapes = True
        """False if there are so many shapes that no part can be cut"""
        self._questions = Questions(spec) if compares else None
        self._digests, self._asked, self._ids = bytearray(), bytearray(), Ids()
        self._sees_part = fields_of_target(spec) is not None
        self._checks, self.conditions = TemplateChecks(spec, check), Conditions(spec)
        self._panels, self._groupings = Panels(self.conditions.everyone), Groupings(spec)
        self._shapes: RowValues[Shape] = RowValues()
        self._places: dict[Shape, str] = {}
        self._cut_at = 0
        self._part_places: dict[int, str] = {}
        """since the last cut: the first place of each shape, by its number"""

    def add(self, sample: Sample) -> None:
        """Check the next sample and add it."""
        self._digests += bytes.fromhex(sample.digest[7:])
        if self._sees_part:
            self._asked += bytes.fromhex(sample.asked[7:])
        self._ids.add(sample.id)
        panel = self.conditions.panel_for(sample.fields)
        self._panels.add(panel)
        shape = tuple(sample.fields), panel
        self._checks.look(sample, shape)
        self._groupings.add(sample.fields, sample.where)
        self.compare(sample.fields)
        if len(self._shapes) < _MOST_SHAPES:
            number = self._shapes.add(shape)
            if number not in self._part_places:
                self._part_places[number] = sample.where
                self._places.setdefault(shape, sample.where)
        else:
            self.has_all_shapes = False
        self.count += 1

    def compare(self, fields: Row) -> None:
        """Compare what a row asks with other rows, until two of them differ."""
        if self._questions is not None:
            self._questions.look(fields)
            if self._questions.differ:
                self._questions = None

    @property
    def compares(self) -> bool:
        """True until two rows differ that have to."""
        return self._questions is not None

    def cut(self, relative: Callable[[str], str]) -> _Part:
        """Return the part since the last cut. `relative` makes a place in the part of a place in the dataset."""
        start, self._cut_at = self._cut_at, self.count
        shapes, shape_rows = self._shapes.cut(start)
        places, self._part_places = self._part_places.values(), {}  # both in the order in which shapes first occur
        return _Part(
            digests=bytes(self._digests[start * 16 :]),
            asked=bytes(self._asked[start * 16 :]),
            ids=self._ids.cut(start),
            shapes=[
                (names, self.conditions.holding_in(panel), relative(where))
                for (names, panel), where in zip(shapes, places, strict=True)
            ],
            shape_rows=shape_rows,
            groups=self._groupings.cut(start),
        )

    def take(self, part: _Part, panels: list[Panel], absolute: Callable[[str], str]) -> None:
        """Add a part; `panels` are those of its shapes. `absolute` is the inverse of `relative` in `cut`."""
        self._digests += part.digests
        self._asked += part.asked
        self._ids.extend(*part.ids)
        self._panels.extend(panels, part.shape_rows)
        shapes = [(names, panel) for (names, _, _), panel in zip(part.shapes, panels, strict=True)]
        self._shapes.extend(shapes, part.shape_rows)
        self.has_all_shapes &= len(self._shapes) < _MOST_SHAPES
        fields = {name for names, _ in shapes for name in names}
        self._checks.fields |= fields
        self._groupings.extend(part.groups, fields)
        for shape, (_, _, where) in zip(shapes, part.shapes, strict=True):
            if shape not in self._places:
                self._places[shape] = absolute(where)
        self.count = self._cut_at = len(self._digests) // 16

    def suits(self, names: tuple[str, ...], panel: Panel) -> bool:
        """Return True if rows of a shape have all fields that the graders name, so that rows need no check."""
        return not self._checks.is_doubtful((names, panel))

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
            shapes=self._places,
            groupings=self._groupings.by_field,
            ids=self._ids,
        )


def make_survey(dataset: Dataset, check: RowCheck | None = None) -> Survey:
    """Read everything once: count it, digest it, and refuse what cannot be evaluated.

    `check` yields what is wrong with a row, and where in the eval file.
    """
    builder = SurveyBuilder(dataset, check, compares=dataset.must_differ)
    for sample in dataset.read_and_keep():
        builder.add(sample)
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
    """Return the survey of a dataset, from the cache if it is large."""
    graders = dataset.spec.placed_graders()
    is_small = sum(size for size, _ in dataset.stamp()) < LARGE
    if is_small or dataset.names_files or not all(GRADERS.is_builtin(block.type) for _, block in graders):
        return make_survey(dataset, check)
    with HomeDb() as home:
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


class _Chunk(NamedTuple):
    """Rows whose part of a survey may be in the cache."""

    name: bytes
    """a digest of the rows"""
    path: str = ""
    """the file, if rows are lines: the part then knows places by numbers of lines, from the chunk's first line"""
    first: int = 0
    """the number of the first line"""
    rows: Callable[[], Iterator[tuple[str, Row]]] = partial(iter, ())

    @classmethod
    def of_lines(cls, lines: list[bytes], path: Path, first: int) -> _Chunk:
        """Return a chunk of lines of JSON."""

        def rows() -> Iterator[tuple[str, Row]]:
            decode = msgspec.json.Decoder(dict[str, Any]).decode
            for number, line in enumerate(lines, first):
                if not line.isspace():
                    yield f"{path}:{number}", decode(line)

        return cls(xxh3_128_digest(b"".join(lines)), str(path), first, rows)

    def relative(self, where: str) -> str:
        """Return a place as a part knows it."""
        return str(int(where.rpartition(":")[2]) - self.first) if self.path else where

    def absolute(self, where: str) -> str:
        """Return a place that a part knows as messages name it."""
        return f"{self.path}:{self.first + int(where)}" if self.path else where


class _Header(msgspec.Struct, frozen=True, array_like=True):
    """What a cached survey was made of."""

    files: list[tuple[str, str]]
    """paths and digests of the dataset's files"""
    wheres: list[str]
    """the conditions that its parts know"""
    graders: list[str]
    """digests of the graders for which its rows were checked"""
    parts: list[tuple[bytes, str, int]]
    """`name`, `path` and `first` of the chunks"""


class _CachedSurvey:
    """The survey of an eval's dataset in the cache."""

    def __init__(self, home: HomeDb, dataset: Dataset, check: RowCheck | None) -> None:
        self._home, self._dataset, self._check = home, dataset, check
        spec = dataset.spec
        self._graders = digest([[location, block.model_dump(mode="json")] for location, block in spec.placed_graders()])
        self._wheres = Conditions(spec).wheres
        # A check asks graders about rows, so that it is part of what a survey is made of.
        basis = digest([_basis(spec, dataset), None if check is None else self._graders])
        self._prefix = f"survey {basis.removeprefix('sha256:')} "
        self._own_shelf = self._prefix + digest(self._wheres).removeprefix("sha256:")
        self._shelf, self._header = self._own_shelf, _Header([], self._wheres, [], [])

    def bring_up_to_date(self) -> Survey | None:
        """Return the survey of the files as they are now; None if something is wrong with their rows."""
        stamp = self._dataset.stamp()
        files = [(str(path), _digest_file(path)) for path in self._dataset.files]
        self._choose(files)
        try:
            survey = self._join() if self._header.files == files else None
            return self._renew(files, stamp) if survey is None else survey
        except (HoldfastError, msgspec.DecodeError, ValueError, OSError):
            return None

    def _choose(self, files: list[tuple[str, str]]) -> None:
        """Choose the cached survey of which most can be used."""
        best = (False, False, False, False)
        for shelf in self._home.shelves(self._prefix):
            header = _decode(self._home.get(shelf, _HEADER), _Header)
            if header is not None:
                knows, is_same = set(self._wheres) <= set(header.wheres), header.files == files
                rank = (knows and is_same, knows, is_same, shelf == self._own_shelf)
                if rank > best or not self._header.parts:
                    best, self._shelf, self._header = rank, shelf, header

    def _join(self) -> Survey | None:
        """Join the cached parts without reading a row; None if a part does not serve the eval's graders."""
        builder = SurveyBuilder(self._dataset, self._check, compares=False)
        for name, path, first in self._header.parts:
            part = _decode(self._home.get(self._shelf, name), _Part)
            panels = None if part is None else self._panels_of(part, self._header.wheres, builder)
            if part is None or panels is None:
                return None
            builder.take(part, panels, _Chunk(name, path, first).absolute)
        self._home.touch(self._shelf)
        return builder.conclude()

    def _renew(self, files: list[tuple[str, str]], stamp: tuple[tuple[int, int], ...]) -> Survey | None:
        """Read the dataset, and make the parts that are not in the cache, or do not serve the eval's graders."""
        dataset, header = self._dataset, self._header
        is_same, knows = header.files == files, set(self._wheres) <= set(header.wheres)
        cached = {name for name, _, _ in header.parts}
        builder = SurveyBuilder(dataset, self._check, compares=dataset.must_differ and not is_same)
        places: list[tuple[bytes, str, int]] = []
        entries: dict[bytes, bytes] = {}
        for chunk in _divide(dataset, files):
            part = _decode(self._home.get(self._shelf, chunk.name), _Part) if chunk.name in cached else None
            if part is not None and not knows:
                part = _look(part, chunk, builder.conditions)
            panels = None if part is None else self._panels_of(part, header.wheres if knows else self._wheres, builder)
            if part is None or panels is None:
                for pair in chunk.rows():
                    builder.add(dataset.sample(pair))
                entries[chunk.name] = msgspec.msgpack.encode(builder.cut(chunk.relative))
            else:
                for _, row in islice(chunk.rows(), 2) if builder.compares else ():
                    builder.compare(row)
                builder.take(part, panels, chunk.absolute)
                if self._shelf != self._own_shelf:
                    entries[chunk.name] = msgspec.msgpack.encode(_with_panels(part, panels, builder.conditions))
            places.append((chunk.name, chunk.path, chunk.first))
        survey = builder.conclude()
        if not survey.count or survey.unsendable is not None or survey.ids.may_repeat or dataset.stamp() != stamp:
            return None
        if builder.has_all_shapes:
            graders = [self._graders, *(header.graders if is_same else ())]
            renewed = _Header(files, self._wheres, graders[:_MOST_SURVEYS], places)
            entries[_HEADER] = msgspec.msgpack.encode(renewed)
            self._home.put(self._own_shelf, entries, keep={name for name, _, _ in places}, most=_MOST_SURVEYS)
        return survey

    def _panels_of(self, part: _Part, wheres: list[str], builder: SurveyBuilder) -> list[Panel] | None:
        """Return the panels of a part's shapes; None if rows have to be checked for the eval's graders."""
        is_checked, panels = self._graders in self._header.graders, []
        for names, holding, _ in part.shapes:
            panel = builder.conditions.panel_like(holding, wheres)
            if panel is None or not (is_checked or builder.suits(names, panel)):
                return None
            panels.append(panel)
        return panels


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


def _divide(dataset: Dataset, files: list[tuple[str, str]]) -> Iterator[_Chunk]:
    """Divide a dataset into chunks. The rows of each have to be read before the next chunk comes."""
    if dataset.has_row_per_line:
        for path in dataset.files:
            yield from _divide_lines(path)
        return
    rows = dataset.rows()
    for number in count():
        first = next(rows, None)
        if first is None:
            return
        chunk = chain([first], islice(rows, _PART_ROWS - 1))
        yield _Chunk(xxh3_128_digest(f"{number} {files}".encode()), rows=partial(iter, chunk))
        deque(chunk, maxlen=0)


def _divide_lines(path: Path) -> Iterator[_Chunk]:
    """Divide a file behind lines whose digests are low, more likely behind long ones: after 1 MB on average.

    A line that is added, changed or removed changes the chunk that it is in, and no other one.
    """
    lines: list[bytes] = []
    size, first = 0, 1
    with path.open("rb", buffering=1 << 18) as file:
        for number, line in enumerate(file, 1):
            lines.append(line.removeprefix(_BOM) if number == 1 else line)
            size += len(line)
            if xxh3_64_intdigest(line) < len(line) << (64 - _PART_BITS) or size > _LONGEST_PART:
                yield _Chunk.of_lines(lines, path, first)
                lines, size, first = [], 0, number + 1
    if lines:
        yield _Chunk.of_lines(lines, path, first)


def _look(part: _Part, chunk: _Chunk, conditions: Conditions) -> _Part:
    """Evaluate the graders' conditions for the rows of a part. Rows are neither digested nor checked."""
    shapes: RowValues[Shape] = RowValues()
    places: list[str] = []
    numbers = array(code_for(len(part.shapes)), part.shape_rows)
    for number, (where, row) in zip(numbers, chunk.rows(), strict=True):
        if shapes.add((part.shapes[number][0], conditions.panel_for(row))) == len(places):
            places.append(chunk.relative(where))
    holding = [conditions.holding_in(panel) for _, panel in shapes.values]
    names = [names for names, _ in shapes.values]
    return replace(part, shapes=list(zip(names, holding, places, strict=True)), shape_rows=shapes.cut(0)[1])


def _with_panels(part: _Part, panels: list[Panel], conditions: Conditions) -> _Part:
    """Return a part that knows the conditions of an eval, and no others."""
    shapes = [
        (names, conditions.holding_in(panel), where)
        for (names, _, where), panel in zip(part.shapes, panels, strict=True)
    ]
    return replace(part, shapes=shapes)
