"""The samples of an eval: selected, named, digested; streamed as often as they are needed."""

from __future__ import annotations

import heapq
import re
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import sha256
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from xxhash import xxh3_64_intdigest

from holdfast.canonical import digest, digest_bytes, encode_sorted
from holdfast.data.panels import Conditions, Panels
from holdfast.data.readers import Layout, Row, find_files, hub_commit, read_hub, read_rows
from holdfast.errors import ConfigError, DataError, Fault, Problem
from holdfast.spec.schema import HttpTarget
from holdfast.spec.selection import Selection
from holdfast.spec.template import RENDER_ERRORS, NotText, Template, TemplateError, expression, texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from holdfast.data.panels import Panel, Stale
    from holdfast.spec.document import Location
    from holdfast.spec.load import Eval

_SENT = ("system", "prompt", "follow_ups")
"""templates whose text is sent to the target as it comes out"""
_TEXT = re.compile(r"\.(jsonl|ndjson|json|csv|tsv)\b", re.IGNORECASE)

_MOST_SHAPES = 100_000


class Sample(NamedTuple):
    """One row of the dataset."""

    id: str
    fields: Row
    digest: str
    where: str
    """file and line, for messages"""
    typed: bool = False
    """its HTTP request holds values that are no texts: a number of the row, the list of messages"""

    @property
    def is_nameless(self) -> bool:
        """True if the row has no id, so that its digest is the sample's id."""
        return self.id == self.digest[7:19]


@dataclass(frozen=True)
class Survey:
    """The result of one pass over the dataset."""

    count: int
    digest: str
    """of the selected samples in their order"""
    digests: bytes
    """16 bytes per sample, to notice a row that changes under a running eval"""
    panels: Panels
    """which graders look at which sample"""
    unsendable: ConfigError | None = None
    """the reason why no new run can be started: a list or an object would be sent as a text"""
    typed: bytes = b""
    """a 1 for each sample whose HTTP request holds values that are no texts; empty where there is none"""
    shapes: dict[tuple[tuple[str, ...], Panel], str] = field(default_factory=dict, repr=False)
    """the sets of fields that rows have, each with the graders that look at them and the place of the first such row"""

    def of(self, position: int) -> bytes:
        """The digest of the sample at a position, as bytes."""
        return self.digests[position * 16 : position * 16 + 16]

    def is_typed(self, position: int) -> bool:
        """Tell whether the request of the sample at a position holds values other than texts."""
        return bool(self.typed) and self.typed[position] == 1


class Dataset:
    """The samples of an eval. Iterating streams them from the files again."""

    def __init__(self, spec: Eval) -> None:
        self._eval = spec
        self._block = spec.dataset
        # Text formats hold no NaN. SlowChecks it would be written as null, which canonical JSON, though slower, is not.
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
        """The files that the rows come from, for the manifest."""
        return list(self._block.path) if self._block else ["samples"]

    def __iter__(self) -> Iterator[Sample]:
        rows = self._selected()
        if self._block is None:
            return map(self._sample, rows)
        if self._block.shuffle is not None:
            rows = self._shuffled(rows, self._block.shuffle)
        stop = None if self._block.limit is None else self._block.offset + self._block.limit
        return map(self._sample, islice(rows, self._block.offset, stop))

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Sizes and times of the files: while they stay, so do the rows."""
        if self._block is None or self._hub_path() is not None:
            return ()
        try:
            stats = [path.stat() for path in self._files(self._block.path)]
        except (OSError, DataError):
            return ((-1, -1),)
        return tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)

    def survey(self, stale: Mapping[int, Stale] = MappingProxyType({})) -> Survey:
        """Read everything once: count it, digest it, and refuse what cannot be evaluated.

        `stale` is handed on to `Conditions`.
        """
        whole, digests, ids = sha256(), bytearray(), array("Q")
        typed = bytearray()
        checks, conditions = _TemplateChecks(self._eval), Conditions(self._eval, stale)
        panels = Panels(conditions.everyone)
        shapes: dict[tuple[tuple[str, ...], Panel], str] = {}
        count = 0
        for sample in self:
            raw = bytes.fromhex(sample.digest[7:])
            digests += raw
            whole.update(raw)
            ids.append(xxh3_64_intdigest(sample.id.encode("utf-8", "surrogatepass")))
            panel = conditions.of(sample.fields)
            panels.add(panel)
            checks.look(sample, panel)
            if len(shapes) < _MOST_SHAPES:
                shapes.setdefault((tuple(sample.fields), panel), sample.where)
            typed.append(sample.typed)
            count += 1
        if count == 0:
            raise DataError(", ".join(self.source), self._why_empty())
        checks.conclude()
        if len(set(ids)) < count:
            self._name_duplicate()
        return Survey(
            count=count,
            digest="sha256:" + whole.hexdigest()[:32],
            digests=bytes(digests),
            panels=panels,
            unsendable=checks.unsendable(),
            typed=bytes(typed) if any(typed) else b"",
            shapes=shapes,
        )

    def _why_empty(self) -> str:
        rows = sum(1 for _ in self._rows())
        if rows == 0 or self._block is None:
            return "no samples: the dataset is empty"
        filters = {name: getattr(self._block, name) for name in ("where", "ids", "tags", "offset")}
        shown = ", ".join(f"{name}: {value}" for name, value in filters.items() if value)
        return f"no samples: of {rows:,} {'row' if rows == 1 else 'rows'}, `{shown}` keeps none"

    def _name_duplicate(self) -> None:
        seen: dict[str, str] = {}
        for sample in self:
            if sample.id in seen:
                same = f"the same row as {seen[sample.id]}, and neither has an id"
                named = f"sample id {sample.id!r} is already used at {seen[sample.id]}"
                raise DataError(
                    sample.where,
                    same if sample.digest[7:19] == sample.id else named,
                    remedy="Ids name samples: make them unique, or set dataset.id to a field that is.",
                )
            seen[sample.id] = sample.where

    def _hub_path(self) -> str | None:
        path = self._block.path[0] if self._block else ""
        return path.removeprefix("hf://") if path.startswith("hf://") else None

    def _files(self, paths: list[str]) -> list[Path]:
        return find_files(paths, self._eval.folder, self._eval.document.where(("dataset", "path")))

    def _rows(self) -> Iterator[tuple[str, Row]]:
        if self._block is None:
            document = self._eval.document
            for number, row in enumerate(self._eval.samples or []):
                yield document.where(("samples", number)), row
        elif (name := self._hub_path()) is not None:
            yield from read_hub(name, self._block.split, self._block.subset, self.revision or "main")
        else:
            block = self._block
            layout = Layout(block.format, block.delimiter, block.encoding, block.field)
            for path in self._files(block.path):
                yield from read_rows(path, layout)

    def _selected(self) -> Iterator[tuple[str, Row]]:
        if self._where is None and self._selection is None:
            yield from self._rows()
            return
        selection = self._selection
        for where, row in self._rows():
            if selection is not None and not selection.takes(row, self._sample((where, row)).id):
                continue
            try:
                chosen = self._where is None or self._where(row)
            except RENDER_ERRORS as error:
                raise DataError(where, f"dataset.where cannot be evaluated for this row: {error}") from error
            if chosen:
                yield where, row

    def _shuffled(self, rows: Iterator[tuple[str, Row]], seed: int) -> Iterator[tuple[str, Row]]:
        """Order rows by a digest of seed and row: adding a row never reorders the others. Kept rows are in memory."""
        assert self._block is not None
        salt = b"%d:" % seed
        keyed = ((sha256(salt + encode_sorted(row[1])).digest(), place, row) for place, row in enumerate(rows))
        if self._block.limit is None:
            ordered = sorted(keyed, key=lambda item: item[:2])
        else:
            keep = self._block.offset + self._block.limit
            ordered = heapq.nsmallest(keep, keyed, key=lambda item: item[:2])
        return (row for _, _, row in ordered)

    def _sample(self, located: tuple[str, Row]) -> Sample:
        where, row = located
        try:
            encoded = encode_sorted(row)
            content = digest(row) if self._has_nan and b"null" in encoded else digest_bytes(encoded)
        except (TypeError, ValueError) as error:  # from Python anything may come
            raise DataError(where, f"cannot be serialized as JSON: {error}") from error
        name = self._block.id if self._block else None
        if name is not None and row.get(name) is None:
            raise DataError(where, f"has no field {name!r}, which dataset.id names")
        value = row.get(name or "id")
        name = content[7:19] if value is None else str(value)
        return Sample(name, row, content, where, self._request.is_typed(row))

    @cached_property
    def _request(self) -> _Request:
        return _Request(self._eval)


def _rendered(compiled: Template, variables: Row, fields: Row) -> str:
    return compiled.render({**fields, **variables})


class _TemplateChecks:
    """Checks templates and graders' `where` against rows, so that a missing variable is reported before a run."""

    def __init__(self, spec: Eval) -> None:
        self._document = spec.document
        self._fields: set[str] = set()
        self._missing: dict[Location, tuple[str, str, frozenset[str]]] = {}
        self._templates: list[tuple[Location, Callable[[Row], Any], frozenset[str], int | None]] = []
        self._not_texts: dict[Location, str] = {}
        self._graders = list(spec.placed_graders())
        numbers = {location: number for number, (location, _) in enumerate(self._graders)}
        for location, source, given in spec.templates():
            compiled = Template(source, texts_only=location[0] in _SENT)
            if needed := compiled.names - given:
                given_too = dict.fromkeys(compiled.names - needed, "")
                grader = numbers.get(location[:-1])
                self._templates.append((location, partial(_rendered, compiled, given_too), needed, grader))

    def look(self, sample: Sample, panel: Panel) -> None:
        fields = sample.fields.keys()
        self._fields |= fields
        for location, fill_in, needed, grader in self._templates:
            unfit = not needed <= fields or (location[0] in _SENT and _any_nested(sample.fields, needed))
            if unfit and (grader is None or grader in panel.graders):
                self._try(sample, location, fill_in, needed)
        for number in panel.unsure:
            location, block = self._graders[number]
            condition = expression(block.where or "")
            if not condition.names <= fields:
                self._try(sample, (*location, "where"), condition, condition.names)

    def _try(self, sample: Sample, location: Location, fill_in: Callable[[Row], Any], needed: frozenset[str]) -> None:
        missing = needed - sample.fields.keys()
        try:
            fill_in(sample.fields)
        except NotText as error:
            self._not_texts.setdefault(location, f"{sample.where}: {error}")
        except TemplateError as error:
            if missing:
                self._missing.setdefault(location, (sample.where, str(error), missing))
        except RENDER_ERRORS:
            return  # no matter of a missing field: an error of that trial, when it comes to it

    def conclude(self) -> None:
        problems = []
        for location, (where, message, names) in self._missing.items():
            nowhere = sorted(names - self._fields)
            if nowhere:
                fields = ", ".join(sorted(self._fields))
                problem = f"no sample has a field {', '.join(map(repr, nowhere))}; they have: {fields}"
            else:
                problem = f"{where}: {message}"
            problems.append(Problem(self._document.where(location), problem))
        if problems:
            raise ConfigError(problems)

    def unsendable(self) -> ConfigError | None:
        """Report templates that would send a list or an object as a text."""
        problems = [Problem(self._document.where(location), message) for location, message in self._not_texts.items()]
        return ConfigError(problems, remedy=NotText.hint) if problems else None


def _any_nested(fields: Row, names: Iterable[str]) -> bool:
    return any(isinstance(fields.get(name), list | tuple | dict) for name in names)


class _Request:
    """The values in the body that an HTTP target is sent: all texts, or not."""

    _VARIABLES: Final[Row] = {"prompt": "", "messages": [{"role": "user", "content": ""}], "trial": 1}
    """stands for what a request takes from the conversation"""

    def __init__(self, spec: Eval) -> None:
        block = spec.target
        sources = texts(block.request) if isinstance(block, HttpTarget) else ()
        templates = [Template(source) for source in sources if "{{" in source]
        self._templates = [compiled for compiled in templates if compiled.names - self._VARIABLES.keys()]
        """those that depend on the row"""
        fixed = [compiled for compiled in templates if compiled not in self._templates]
        self._always = any(self._gives_value(compiled, self._VARIABLES) for compiled in fixed)

    def is_typed(self, fields: Row) -> bool:
        """Tell whether the request for a row holds anything but texts."""
        if self._always or not self._templates:
            return self._always
        variables = {**fields, **self._VARIABLES}
        return any(self._gives_value(compiled, variables) for compiled in self._templates)

    @staticmethod
    def _gives_value(compiled: Template, variables: Row) -> bool:
        with suppress(*RENDER_ERRORS):  # it is the trial's error, when it comes to it
            return not isinstance(compiled.value(variables), str)
        return False


def changed_under_us(where: str) -> Fault:
    """The dataset is no longer what the survey saw."""
    return Fault(
        "dataset_changed",
        f"the dataset changed while the eval was running ({where})",
        remedy="Finished work is kept. Run the same command again to make a new plan from the changed data.",
    )
