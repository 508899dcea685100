"""Surveys of large datasets, kept in `$HOLDFAST_HOME/surveys`, so that unchanged rows are not surveyed again.

A survey depends on the bytes of the dataset's files and on what the eval says of rows: selection, templates,
groupings, graders. The latter is in the name of the stored survey, with that of graders in a part of its own: a survey
for other graders is fitted to those of the eval (`survey_fit`). The files are read and digested each time: while
they are as they were, the survey is used as it is, and the survey of changed JSON lines is brought up to date
(`survey_update`). Nothing is stored for rows that name other files, and where graders of plug-ins are asked.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from array import array
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec
from msgspec.structs import replace
from xxhash import xxh3_128

from holdfast import __version__
from holdfast.canonical import digest
from holdfast.data.dataset import LONGEST_IDS, Ids, Survey
from holdfast.data.grouping import Grouping
from holdfast.data.numbers import code_for
from holdfast.data.panels import Panel, Panels
from holdfast.data.survey_fit import fit_survey
from holdfast.data.survey_update import read_lines, update_survey
from holdfast.spec.benchmark_tasks import benchmark_tasks
from holdfast.spec.eval import fields_of_target
from holdfast.spec.load_graders import GRADERS
from holdfast.store.cache_file import peek_header, read_header, write_cache
from holdfast.store.home import home_directory

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

    from holdfast.data.dataset import Dataset, RowCheck
    from holdfast.spec.eval import Eval

_MAGIC: Final = b"holdfast survey 5\n"
_MOST: Final = 8
"""surveys that are kept"""


class _Header(msgspec.Struct, array_like=True):
    byte_order: str
    files: list[tuple[str, str]]
    """paths and digests of the dataset's files"""
    wheres: list[str | None]
    """of the graders"""
    count: int
    digest: str
    kinds: list[Panel]
    shapes: list[tuple[tuple[str, ...], int, str]]
    """names of fields, number of the panel, and place of the first row"""
    values: dict[str, list[str]]
    """by field: the values of its grouping"""
    has_asked: bool
    """the target sees a part of each row, of which there is a digest, too"""
    ids: int
    """bytes of the ids"""


class _Stored(NamedTuple):
    files: list[tuple[str, str]]
    wheres: list[str | None]
    survey: Survey
    lines: bytes
    """digests of the samples' lines; empty if they are unknown"""


def survey_dataset(spec: Eval, dataset: Dataset, check: RowCheck | None) -> Survey:
    """Return the survey of a dataset, stored or made now; `check` is passed to `Dataset.survey`."""
    if dataset.names_files or not all(GRADERS.is_builtin(block.type) for _, block in spec.placed_graders()):
        return dataset.survey(check)
    survey = _survey(spec, dataset, check)
    _release_memory()
    return replace(survey, shape_rows=array("I"))


def _survey(spec: Eval, dataset: Dataset, check: RowCheck | None) -> Survey:
    """Return a survey that is stored, or made now and stored then."""
    stamp = dataset.stamp()
    path = home_directory() / "surveys" / _name(spec, dataset)
    places = _places(path)
    # Without a stored survey, the digests of lines will be needed: they are taken together with those of the files.
    lines = read_lines(dataset.files) if dataset.has_row_per_line and not places else None
    digests = map(_digest, dataset.files) if lines is None else lines.file_digests
    files = list(zip(map(str, dataset.files), digests, strict=True))
    place = _choose(places, files)
    stored = None if place is None else _load(place, unless=files if place == path else [])
    if stored is not None and place != path:
        stored = _fit(stored, path, files, spec, dataset) if check is None else None
    if stored is not None and stored.files == files:
        return stored.survey
    if lines is None and dataset.has_row_per_line:
        lines = read_lines(dataset.files)
    survey = None
    if stored is not None and stored.lines and lines is not None:
        survey = update_survey(spec, dataset, stored.survey, stored.lines, lines, check)
    if survey is None or dataset.stamp() != stamp:
        survey = dataset.survey(check)
    if survey.unsendable is None and dataset.stamp() == stamp:  # else its files may be others than those digested
        _save(path, files, spec, survey, b"" if lines is None else lines.digests)
    return survey


def _places(path: Path) -> list[Path]:
    """Return the surveys that are stored for the same rows: that of the same graders, then those used last."""
    with suppress(OSError):
        alike = path.parent.glob(path.name.partition("-")[0] + "-*")
        return sorted(alike, key=lambda each: (each == path, each.stat().st_mtime), reverse=True)
    return []


def _choose(places: list[Path], files: list[tuple[str, str]]) -> Path | None:
    """Return the first stored survey of the same files, else the first."""
    for place in places if len(places) > 1 else ():
        with suppress(OSError, ValueError, msgspec.DecodeError), place.open("rb") as file:
            if msgspec.msgpack.decode(peek_header(file, _MAGIC), type=_Header).files == files:
                return place
    return places[0] if places else None


def _fit(stored: _Stored, path: Path, files: list[tuple[str, str]], spec: Eval, dataset: Dataset) -> _Stored | None:
    """Fit a stored survey to the graders of an eval. If rows had to be read for that, the survey is stored, too."""
    survey = fit_survey(stored.survey, stored.wheres, spec, None)
    if survey is None and stored.files == files:
        stamp = dataset.stamp()
        survey = fit_survey(stored.survey, stored.wheres, spec, dataset.rows())
        if survey is not None and dataset.stamp() == stamp:
            _save(path, files, spec, survey, stored.lines)
    return None if survey is None else stored._replace(survey=survey)


def _release_memory() -> None:
    """Return what surveying needed to the system: 60 MB at 1,000,000 rows, which glibc keeps for later otherwise."""
    with suppress(OSError, AttributeError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)


def _name(spec: Eval, dataset: Dataset) -> str:
    """Return digests of everything that a survey depends on, except the dataset's files: without graders, and of them.

    The templates of graders are among these.
    """
    tasks = benchmark_tasks(spec.document.data)
    graders = list(spec.placed_graders())
    locations = {location for location, _ in graders}
    rows: list[Any] = [
        [__version__, platform.python_version(), msgspec.__version__, version("jinja2")],
        str(spec.folder),
        None if spec.dataset is None else spec.dataset.model_dump(mode="json"),
        [[each.location, each.source, sorted(each.variables)] for each in spec.templates() if each.grader is None],
        [each for each in spec.expressions() if each[0][:-1] not in locations],
        [spec.by, spec.cluster, spec.continuations, None if tasks is None else sorted(tasks.tasks)],
        None if (fields := fields_of_target(spec)) is None else sorted(fields),
        dataset.must_differ,
    ]
    basis = rows, [[location, block.model_dump(mode="json")] for location, block in graders]
    return "-".join(digest(part).removeprefix("sha256:") for part in basis)


def _digest(path: Path) -> str:
    checksum = xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            checksum.update(chunk)
    return checksum.hexdigest()


def _save(path: Path, files: list[tuple[str, str]], spec: Eval, survey: Survey, lines: bytes) -> None:
    """Store a survey, and forget the one that was not used for the longest time. What cannot be written is not."""
    kinds, rows = survey.panels.packed()
    ids, ends = survey.ids.packed()
    numbers = {kind: number for number, kind in enumerate(kinds)}
    header = _Header(
        byte_order=sys.byteorder,
        files=files,
        wheres=[block.where for _, block in spec.placed_graders()],
        count=survey.count,
        digest=survey.digest,
        kinds=kinds,
        shapes=[(names, numbers[panel], where) for (names, panel), where in survey.shapes.items()],
        values={field: grouping.values for field, grouping in survey.groupings.items()},
        has_asked=bool(survey.asked),
        ids=len(ids),
    )
    groups = [memoryview(grouping.packed()).cast("B") for grouping in survey.groupings.values()]
    body: list[bytes | memoryview] = [survey.digests, memoryview(rows).cast("B"), survey.asked, *groups]
    body += [memoryview(ids), memoryview(ends).cast("B"), memoryview(survey.shape_rows).cast("B"), lines]
    with suppress(OSError):
        write_cache(path, _MAGIC, msgspec.msgpack.encode(header), body)
        stored = sorted(path.parent.glob("[0-9a-f]*"), key=lambda each: each.stat().st_mtime)
        for least_used in stored[:-_MOST]:
            least_used.unlink(missing_ok=True)


def _load(path: Path, *, unless: list[tuple[str, str]]) -> _Stored | None:
    """Return a stored survey; None if there is none, or it is torn, damaged or of another version.

    The digests of lines are read `unless` they are of these files.
    """
    try:
        with path.open("rb") as file:
            data, _ = read_header(file, _MAGIC)
            header = msgspec.msgpack.decode(data, type=_Header)
            if header.byte_order != sys.byteorder:
                return None
            survey = _restore(header, file)
            lines = b"" if header.files == unless else file.read()
        os.utime(path)
    except (OSError, ValueError, EOFError, msgspec.DecodeError):
        return None
    return _Stored(header.files, header.wheres, survey, lines)


def _restore(header: _Header, file: BinaryIO) -> Survey:
    count = header.count
    digests = file.read(16 * count)
    panels = Panels.unpacked(header.kinds, _numbers(file, count, code_for(len(header.kinds))))
    asked = file.read(16 * count) if header.has_asked else b""
    groupings = {
        field: Grouping.unpacked(values, _numbers(file, count, code_for(len(values))))
        for field, values in header.values.items()
    }
    return Survey(
        count=count,
        digest=header.digest,
        digests=digests,
        panels=panels,
        asked=asked,
        shapes={(names, header.kinds[number]): where for names, number, where in header.shapes},
        groupings=groupings,
        ids=Ids(file.read(header.ids), _numbers(file, count, "I" if header.ids <= LONGEST_IDS else "Q")),
        shape_rows=_numbers(file, count, code_for(len(header.shapes))),
    )


def _numbers(file: BinaryIO, count: int, code: Literal["B", "I", "Q"]) -> array[int]:
    numbers = array(code)
    numbers.fromfile(file, count)
    return numbers
