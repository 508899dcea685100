"""The samples of an eval: selected, named, digested; streamed as often as they are needed."""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import DecodeError
from msgspec.json import decode, encode

from holdfast.canonical import digest, digest_bytes, encode_sorted
from holdfast.data.messages import RowMessages
from holdfast.data.readers import Layout, Row, find_files, hub_commit, read_hub, read_rows
from holdfast.errors import ConfigError, DataError, Fault, Problem
from holdfast.spec.eval import fields_of_target
from holdfast.spec.eval_schema import Selection
from holdfast.spec.template import RENDER_ERRORS, TemplateError, expression
from holdfast.store.lines import find_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from holdfast.data.messages import Attachment
    from holdfast.data.readers import LineStart
    from holdfast.spec.eval import Eval

_TEXT = re.compile(r"\.(jsonl|ndjson|json|csv|tsv)\b", re.IGNORECASE)

_MOST_KEPT: Final = 4 << 20
"""bytes of rows that the survey keeps in memory, so that they are read once"""
_JSON_LINES: Final = (".jsonl", ".ndjson")
_MARGIN: Final = 1 << 20
"""bytes before the likely place of a row where the search for it begins"""


class Sample(NamedTuple):
    """One row of the dataset."""

    id: str
    fields: Row
    digest: str
    """of the whole row, with the contents of its files"""
    where: str
    """file and line, for messages"""
    asked: str = ""
    """digest of the id and the part of the row that the target sees; of the whole row if it has no id"""
    files: Mapping[str, Attachment] = MappingProxyType({})
    """files in the messages of the row, by their source"""

    @property
    def row(self) -> str:
        """The first 16 digits of the digest, which tell versions of a row apart."""
        return self.digest[7:23]

    @property
    def is_nameless(self) -> bool:
        """True if the row has no id, so that a digest of the row serves as its id."""
        return self.id == self.digest[7:19]


class Dataset:
    """The samples of an eval."""

    def __init__(self, spec: Eval, *, must_differ: bool = False) -> None:
        """With `must_differ`, rows that all ask the same are refused by the survey: the target sees nothing else."""
        self.spec = spec
        self.must_differ = must_differ
        self._kept: list[Sample] | None = None
        """the samples of the last survey, if they are few and nobody has taken them yet"""
        self._kept_stamp: tuple[tuple[int, int], ...] = ()
        self._read_bytes = 0
        """length of the rows that were read in this pass"""
        self._block = spec.dataset
        # Text formats hold no NaN. Others need canonical JSON, which is slower but does not encode NaN as null.
        paths = self._block.path if self._block else ["samples"]
        self._has_nan = not all(_TEXT.search(path) for path in paths)
        self._where = None
        self._selection = None
        if self._block and (self._block.ids or self._block.tags):
            self._selection = Selection(self._block.ids, self._block.tags)
        if self._block and self._block.where:
            try:
                self._where = expression(self._block.where)
            except TemplateError as error:
                where = spec.document.where(("dataset", "where"))
                raise ConfigError([Problem(where, f"not a valid expression: {error}")]) from error

    @cached_property
    def revision(self) -> str | None:
        """The commit of a Hugging Face dataset, else None."""
        path = self._hub_path()
        return hub_commit(path, self._block.revision) if path and self._block else None

    @property
    def source(self) -> list[str]:
        """Paths of the dataset, for the manifest."""
        return list(self._block.path) if self._block else ["samples"]

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples: once as the survey has read them, if they are few, and else from the files again."""
        kept = self._take_kept()
        return self._read() if kept is None else iter(kept)

    def pick(self, is_needed: Callable[[int], bool]) -> Iterator[Sample | None]:
        """Yield the samples as iterating does, but None for positions that are not needed, which saves making these."""
        kept = self._take_kept()
        if kept is not None:
            yield from (sample if is_needed(position) else None for position, sample in enumerate(kept))
        else:
            for position, row in enumerate(self.rows()):
                yield self.sample(row) if is_needed(position) else None

    def _take_kept(self) -> list[Sample] | None:
        kept, self._kept = self._kept, None
        return kept if kept is not None and self.stamp() == self._kept_stamp else None

    def _read(self) -> Iterator[Sample]:
        self._read_bytes = 0
        return map(self.sample, self.rows())

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Stream the rows of the samples, each with its place: for readers that make samples of a few of them."""
        rows = self._selected()
        if self._block is None:
            return rows
        if self._block.shuffle is not None:
            rows = self._shuffled(rows, self._block.shuffle)
        limits = self._block.limit is not None or self._block.offset > 0
        if (limits and self._block.limit_by is not None) or isinstance(self._block.limit, float):
            return self._limited(rows)
        stop = None if self._block.limit is None else self._block.offset + self._block.limit
        return islice(rows, self._block.offset, stop)

    def rows_from(self, start: LineStart) -> Iterator[tuple[str, Row]]:
        """Stream the rows from a line on, if `has_row_per_line`."""
        path, *others = self.files[start.file :]
        yield from read_rows(path, self._layout, start)
        for path in others:
            yield from read_rows(path, self._layout)

    def _limited(self, rows: Iterator[tuple[str, Row]]) -> Iterator[tuple[str, Row]]:
        """Yield the rows within `offset` and `limit` of each value of the field `limit_by`, or of all rows."""
        assert self._block is not None
        limit, offset = self._block.limit, self._block.offset
        limits: dict[bytes, float] = {}
        if isinstance(limit, float):  # a share of rows that have to be counted first
            counts = Counter(self._limited_value(row) for _, row in self._selected())
            limits = {value: math.ceil((count - offset) * limit) for value, count in counts.items()}
        seen: Counter[bytes] = Counter()
        for where, row in rows:
            value = self._limited_value(row)
            place = seen[value] - offset
            seen[value] += 1
            if place >= 0 and (limit is None or place < limits.get(value, limit)):
                yield where, row

    def _limited_value(self, row: Row) -> bytes:
        assert self._block is not None
        return b"" if self._block.limit_by is None else encode_sorted(row.get(self._block.limit_by))

    @property
    def files(self) -> list[Path]:
        """The files that rows are read from; none for rows in the eval file or on the hub."""
        return [] if self._block is None or self._hub_path() is not None else self._files(self._block.path)

    @property
    def names_files(self) -> bool:
        """True if rows may name files, whose contents are part of their digests."""
        return self._messages is not None

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Return sizes and times of the files. While these stay equal, so do the rows."""
        if self._block is None or self._hub_path() is not None:
            return ()
        try:
            stats = [path.stat() for path in self._files(self._block.path)]
        except (OSError, DataError):
            return ((-1, -1),)
        return tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)

    def read_and_keep(self) -> Iterator[Sample]:
        """Yield the samples from the files. If they are few, they are kept for the next one who iterates."""
        kept: list[Sample] | None = []
        stamp = self.stamp()
        for sample in self._read():
            if kept is not None:
                kept.append(sample)
                if self._read_bytes > _MOST_KEPT:
                    kept = None
            yield sample
        self._kept, self._kept_stamp = kept, stamp

    def why_empty(self) -> str:
        """Explain why there are no samples."""
        rows = sum(1 for _ in self._rows())
        if rows == 0 or self._block is None:
            return "no samples: the dataset is empty"
        filters = {name: getattr(self._block, name) for name in ("where", "ids", "tags", "offset")}
        shown = ", ".join(f"{name}: {value}" for name, value in filters.items() if value)
        return f"no samples: of {rows:,} {'row' if rows == 1 else 'rows'}, none matches `{shown}`"

    def find(self, name: str, near: float = 0.0) -> Sample | None:
        """Return the sample of an id; None if there is no such sample.

        Where all rows of JSON lines are selected, the id is looked for in the files' bytes: a row at the end of a large
        file is there at once. `near` is the share of the rows before it, if known.
        """
        if self._block is not None and self._selects_all and self._hub_path() is None:
            for pair in self._rows_naming(name, near if self._block.shuffle is None else 0.0):
                sample = self.sample(pair)
                if sample.id == name:
                    return sample
        return next((sample for sample in self if sample.id == name), None)

    @property
    def _selects_all(self) -> bool:
        block = self._block
        return block is None or not (block.limit or block.offset or block.where or self._selection)

    @property
    def has_row_per_line(self) -> bool:
        """True if each line of the files is a sample, in their order: all rows of JSON lines."""
        block = self._block
        if block is None or not self._selects_all or block.shuffle is not None or not self._layout.is_utf8:
            return False
        return all(path.suffix.lower() in _JSON_LINES for path in self.files) and block.format in (None, "jsonl")

    def _rows_naming(self, name: str, near: float) -> Iterator[tuple[str, Row]]:
        """Yield rows that may have an id, from files of JSON lines as most programs write them."""
        import json  # which no run needs

        assert self._block is not None
        field = encode(self._block.id or "id")
        numbers = [field + separator + name.encode() for separator in (b": ", b":")] if name.isdecimal() else []
        needles = list(dict.fromkeys([encode(name), json.dumps(name).encode(), *numbers]))
        paths = self._files(self._block.path)
        lines = [path for path in paths if path.suffix in _JSON_LINES]
        for path in lines if self._block.format in (None, "jsonl") else ():
            start = int(near * path.stat().st_size) - _MARGIN if len(paths) == 1 else 0
            for needle in needles:
                for _, line in find_lines(path, needle, start):
                    with suppress(DecodeError):  # else the survey of the run would have refused the file
                        row = decode(line)
                        if isinstance(row, dict):
                            yield str(path), row

    @property
    def _layout(self) -> Layout:
        block = self._block
        return Layout() if block is None else Layout(block.format, block.delimiter, block.encoding, block.field)

    def _hub_path(self) -> str | None:
        path = self._block.path[0] if self._block else ""
        return path.removeprefix("hf://") if path.startswith("hf://") else None

    def _files(self, paths: list[str]) -> list[Path]:
        return find_files(paths, self.spec.folder, self.spec.document.where(("dataset", "path")))

    def _rows(self) -> Iterator[tuple[str, Row]]:
        if self._block is None:
            document = self.spec.document
            for number, row in enumerate(self.spec.samples or []):
                yield document.where(("samples", number)), row
        elif (name := self._hub_path()) is not None:
            yield from read_hub(name, self._block.split, self._block.subset, self.revision or "main")
        else:
            for path in self._files(self._block.path):
                yield from read_rows(path, self._layout)

    def _selected(self) -> Iterator[tuple[str, Row]]:
        if self._where is None and self._selection is None:
            yield from self._rows()
            return
        selection = self._selection
        for where, row in self._rows():
            if selection is not None and not selection.takes(row, self.sample((where, row)).id):
                continue
            try:
                chosen = self._where is None or self._where(row)
            except RENDER_ERRORS as error:
                raise DataError(where, f"dataset.where cannot be evaluated for this row: {error}") from error
            if chosen:
                yield where, row

    def _shuffled(self, rows: Iterator[tuple[str, Row]], seed: int) -> Iterator[tuple[str, Row]]:
        """Order rows by a digest of seed and row, so that a new row never reorders the others. Holds rows in memory."""
        assert self._block is not None
        salt = b"%d:" % seed
        keyed = ((sha256(salt + encode_sorted(pair[1])).digest(), place, pair) for place, pair in enumerate(rows))
        if self._block.limit is None or self._block.limit_by is not None or isinstance(self._block.limit, float):
            ordered = sorted(keyed, key=lambda item: item[:2])
        else:
            keep = self._block.offset + self._block.limit
            ordered = heapq.nsmallest(keep, keyed, key=lambda item: item[:2])
        return (pair for _, _, pair in ordered)

    def sample(self, pair: tuple[str, Row]) -> Sample:
        """Make the sample of a row and its place."""
        where, row = pair
        try:
            encoded = encode_sorted(row)
            content = self._digest(row, encoded)
            self._read_bytes += len(encoded)
        except (TypeError, ValueError) as error:  # rows from Python may hold any object
            raise DataError(where, f"cannot be serialized as JSON: {error}") from error
        name = self._block.id if self._block else None
        if name is not None and row.get(name) is None:
            raise DataError(where, f"has no field {name!r}, which dataset.id names")
        value = row.get(name or "id")
        files = {} if self._messages is None else self._messages.files(row, where)
        if files:
            content = digest([content, [file.digest for file in files.values()]])
        if value is None:
            return Sample(content[7:19], row, content, where, content, files)
        return Sample(str(value), row, content, where, self._asked(str(value), row, content, where, files), files)

    def _asked(self, name: str, row: Row, content: str, where: str, files: Mapping[str, Attachment]) -> str:
        """Return the digest of the part of a row that the target sees."""
        if self._fields is None:
            return content
        asked: dict[str, Any] = {"id": name, "fields": {field: row[field] for field in self._fields if field in row}}
        if self._messages is not None:
            try:
                asked["messages"] = self._messages.contents(row, where, files)
            except RENDER_ERRORS:
                return content  # reported with the templates, or an error of the trial when it runs
        return self._digest(asked, encode_sorted(asked))

    def _digest(self, value: dict[str, Any], encoded: bytes) -> str:
        return digest(value) if self._has_nan and b"null" in encoded else digest_bytes(encoded)

    @cached_property
    def _fields(self) -> list[str] | None:
        """The fields that the target sees; None for whole rows."""
        fields = fields_of_target(self.spec)
        return None if fields is None else sorted(fields)

    @cached_property
    def _messages(self) -> RowMessages | None:
        """The messages of the eval; None if rows cannot have files in them."""
        messages = RowMessages(self.spec)
        return messages if messages.may_have_files else None


def dataset_changed(where: str) -> Fault:
    """Return the fault of a dataset that differs from its survey."""
    return Fault(
        "dataset_changed",
        f"the dataset changed while the eval was running ({where})",
        remedy="Finished work is kept. Run the same command again to make a new plan from the changed data.",
    )
