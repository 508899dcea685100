"""Surveys of large datasets, kept in `$HOLDFAST_HOME/surveys`, so that unchanged rows are not surveyed again.

A survey depends on the bytes of the dataset's files and on what the eval says of rows: selection, templates, conditions
of graders, groupings. The latter is in the name of the stored survey. The files are read and digested each time: while
they are as they were, the survey is used as it is, and the survey of changed JSON lines is brought up to date
(`survey_update`). Nothing is stored for rows that name other files, and where code of the user is asked.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from array import array
from contextlib import suppress
from importlib.metadata import version
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec
from xxhash import xxh3_128

from holdfast import __version__
from holdfast.canonical import digest
from holdfast.data.dataset import Ids, Survey
from holdfast.data.grouping import Grouping
from holdfast.data.panels import Panel, Panels
from holdfast.data.survey_update import read_lines, update_survey
from holdfast.spec.benchmark_tasks import benchmark_tasks
from holdfast.spec.load_graders import GRADERS
from holdfast.spec.target_schema import HttpTarget
from holdfast.spec.template import texts
from holdfast.store.cache_file import read_header, write_cache
from holdfast.store.home import home_directory

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

    from holdfast.data.dataset import Dataset, RowCheck
    from holdfast.spec.load import Eval

_MAGIC: Final = b"holdfast survey 3\n"
_MOST: Final = 8
"""surveys that are kept"""


class _Header(msgspec.Struct, array_like=True):
    byte_order: str
    files: list[tuple[str, str]]
    """paths and digests of the dataset's files"""
    has_lines: bool
    """with the digest of each sample's line"""
    count: int
    digest: str
    kinds: list[Panel]
    shapes: list[tuple[tuple[str, ...], int, str]]
    """names of fields, number of the panel, and place of the first row"""
    values: dict[str, list[str]]
    """by field: the values of its grouping"""
    typed: bool
    ids: int
    """bytes of the ids"""


class _Stored(NamedTuple):
    files: list[tuple[str, str]]
    survey: Survey
    lines: bytes
    """digests of the samples' lines; empty if they are not wanted, or unknown"""


def survey_dataset(spec: Eval, dataset: Dataset, check: RowCheck | None) -> Survey:
    """Return the survey of a dataset, stored or made now. Graders that ask code of the user must not be among it."""
    if dataset.names_files or not all(GRADERS.is_builtin(block.type) for _, block in spec.placed_graders()):
        return dataset.survey(MappingProxyType({}), check)
    stamp = dataset.stamp()
    path = home_directory() / "surveys" / _name(spec)
    # Without a stored survey, the digests of lines will be needed: they are taken together with those of the files.
    lines = read_lines(dataset.files) if dataset.has_row_per_line and not path.exists() else None
    digests = map(_digest, dataset.files) if lines is None else lines.file_digests
    files = list(zip(map(str, dataset.files), digests, strict=True))
    stored = _load(path, files)
    if stored is not None and stored.files == files:
        return stored.survey
    if lines is None and dataset.has_row_per_line:
        lines = read_lines(dataset.files)
    survey = None
    if stored is not None and stored.lines and lines is not None:
        survey = update_survey(spec, dataset, stored.survey, stored.lines, lines, check)
    if survey is None or dataset.stamp() != stamp:
        survey = dataset.survey(MappingProxyType({}), check)
    if survey.unsendable is None and dataset.stamp() == stamp:  # else its files may be others than those digested
        with suppress(OSError):
            _save(path, files, survey, b"" if lines is None else lines.digests)
    del stored, lines
    _release_memory()
    return survey


def _release_memory() -> None:
    """Return what surveying needed to the system: 60 MB at 1,000,000 rows, which glibc keeps for later otherwise."""
    with suppress(OSError, AttributeError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)


def _name(spec: Eval) -> str:
    """Return a digest of everything that a survey depends on, except the dataset's files."""
    tasks = benchmark_tasks(spec.document.data)
    basis: list[Any] = [
        [__version__, platform.python_version(), msgspec.__version__, version("jinja2")],
        str(spec.folder),
        None if spec.dataset is None else spec.dataset.model_dump(mode="json"),
        [[location, text, sorted(names)] for location, text, names in spec.templates()],
        list(spec.row_expressions()),
        [[location, block.model_dump(mode="json")] for location, block in spec.placed_graders()],
        [spec.by, spec.cluster, spec.continuations, None if tasks is None else sorted(tasks.tasks)],
        list(texts(spec.target.request)) if isinstance(spec.target, HttpTarget) else None,
    ]
    return digest(basis).removeprefix("sha256:")


def _digest(path: Path) -> str:
    checksum = xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            checksum.update(chunk)
    return checksum.hexdigest()


def _save(path: Path, files: list[tuple[str, str]], survey: Survey, lines: bytes) -> None:
    kinds, rows = survey.panels.packed()
    ids, ends = survey.ids.packed()
    numbers = {kind: number for number, kind in enumerate(kinds)}
    header = _Header(
        byte_order=sys.byteorder,
        files=files,
        has_lines=bool(lines),
        count=survey.count,
        digest=survey.digest,
        kinds=kinds,
        shapes=[(names, numbers[panel], where) for (names, panel), where in survey.shapes.items()],
        values={field: grouping.values for field, grouping in survey.groupings.items()},
        typed=bool(survey.typed),
        ids=len(ids),
    )
    groups = [memoryview(grouping.packed()).cast("B") for grouping in survey.groupings.values()]
    body: list[bytes | memoryview] = [survey.digests, memoryview(rows).cast("B"), survey.typed, *groups]
    body += [memoryview(ids), memoryview(ends).cast("B")]
    if lines:
        body += [memoryview(survey.shape_rows).cast("B"), lines]
    write_cache(path, _MAGIC, msgspec.msgpack.encode(header), body)
    stored = sorted(path.parent.glob("[0-9a-f]*"), key=lambda each: each.stat().st_mtime)
    for least_used in stored[:-_MOST]:
        least_used.unlink(missing_ok=True)


def _load(path: Path, files: list[tuple[str, str]]) -> _Stored | None:
    """Return a stored survey; None if there is none, or it is torn, damaged or of another version.

    The digests of lines are read where the files are not the same.
    """
    try:
        with path.open("rb") as file:
            data, _ = read_header(file, _MAGIC)
            header = msgspec.msgpack.decode(data, type=_Header)
            if header.byte_order != sys.byteorder:
                return None
            survey, lines = _restore(header, file), b""
            if header.has_lines and header.files != files:
                survey.shape_rows.fromfile(file, survey.count)
                lines = file.read()
        os.utime(path)
    except (OSError, ValueError, EOFError, msgspec.DecodeError):
        return None
    return _Stored(header.files, survey, lines)


def _restore(header: _Header, file: BinaryIO) -> Survey:
    count = header.count
    digests = file.read(16 * count)
    panels = Panels.unpacked(header.kinds, _numbers(file, count, "I"))
    typed = file.read(count) if header.typed else b""
    groupings = {
        field: Grouping.unpacked(values, _numbers(file, count, "I")) for field, values in header.values.items()
    }
    return Survey(
        count=count,
        digest=header.digest,
        digests=digests,
        panels=panels,
        typed=typed,
        shapes={(names, header.kinds[number]): where for names, number, where in header.shapes},
        groupings=groupings,
        ids=Ids(file.read(header.ids), _numbers(file, count, "Q")),
    )


def _numbers(file: BinaryIO, count: int, code: Literal["I", "Q"]) -> array[int]:
    numbers = array(code)
    numbers.fromfile(file, count)
    return numbers
