"""Read rows from files as a stream: a million rows are never in memory at once, unless in a `.json` file.

Every reader yields `(where, row)`, `where` being `file:line` for messages.
"""

from __future__ import annotations

import glob
import io
import re
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from holdfast.data.messages import data_url
from holdfast.errors import DataError

if TYPE_CHECKING:
    import csv
    from collections.abc import Callable, Iterable, Iterator, Sequence

Row = dict[str, Any]
Rows = "Iterator[tuple[str, Row]]"

_COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
_FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}


def find_files(patterns: list[str], folder: Path, where: str) -> list[Path]:
    """Find the files of a dataset's paths and globs, globs in sorted order; `where` is the place that names them."""
    files: list[Path] = []
    remedy = f"Paths are relative to the eval file's folder, {folder}."
    for pattern in patterns:
        path = folder / Path(pattern).expanduser()
        if any(mark in pattern for mark in "*?[") and not path.exists():
            # Under `root_dir`, so that a folder called `[old]` is not taken for a pattern.
            names = glob.glob(str(Path(pattern).expanduser()), root_dir=folder, recursive=True)
            matches = [folder / name for name in sorted(names)]
            if not matches:
                raise DataError(where, f"{path}: matches no file", remedy=remedy)
            files.extend(match for match in matches if match.is_file())
        elif not path.exists():
            raise DataError(where, f"{path}: no such file", remedy=remedy)
        else:
            files.append(path)
    return files


class Layout(msgspec.Struct, frozen=True):
    """Options for reading the files of a dataset whose names do not say enough."""

    format: str | None = None
    delimiter: str | None = None
    encoding: str = "utf-8"
    field: str | None = None

    @property
    def is_utf8(self) -> bool:
        """True if text files are in UTF-8."""
        return self.encoding.lower().replace("_", "-") in ("utf-8", "utf8")


class LineStart(NamedTuple):
    """The place in the files of a dataset where a line of JSON begins."""

    file: int
    """position among the dataset's files"""
    number: int
    """from 1, in its file"""
    offset: int


def find_line_starts(files: Sequence[Path], positions: Iterable[int]) -> list[LineStart]:
    """Find lines by their positions among those that are not blank, in ascending order, in one pass over the files.

    Positions after the last line are left out.
    """
    starts: list[LineStart] = []
    remaining = iter(positions)
    next_position, position = next(remaining, None), 0
    for file, path in enumerate(files):
        offset = 0
        with path.open("rb", buffering=1 << 18) as lines:
            for number, line in enumerate(lines, 1):
                if not line.isspace():
                    while next_position == position:
                        starts.append(LineStart(file, number, offset))
                        next_position = next(remaining, None)
                    position += 1
                offset += len(line)
                if next_position is None:
                    return starts
    return starts


def read_rows(path: Path, layout: Layout, start: LineStart | None = None) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a file, in the format of its suffix or the one that the dataset declares.

    Of a file of JSON lines, those from `start` on.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    kind = layout.format or _FORMATS.get(suffixes[-1] if suffixes else "")
    if kind is None:
        raise DataError(
            str(path),
            "cannot tell the format from the name",
            remedy="Set dataset.format to jsonl, json, csv or parquet.",
        )
    for key, value, suitable_kind in (("field", layout.field, "json"), ("delimiter", layout.delimiter, "csv")):
        if value is not None and kind != suitable_kind:
            raise DataError(
                str(path),
                f"dataset.{key} is for {suitable_kind} files, and this one is {kind}",
                remedy=f"Remove dataset.{key}.",
            )
    try:
        yield from _READERS[kind](path, layout) if start is None else _jsonl(path, layout, start.number, start.offset)
    except DataError:
        raise
    except UnicodeDecodeError as error:
        raise _not_decodable(str(path), layout, error) from error
    except LookupError as error:
        raise DataError(str(path), f"cannot be read: {error}", remedy="Check dataset.encoding.") from error
    except FileNotFoundError:
        raise DataError(str(path), "no such file") from None
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise DataError(str(path), f"cannot be read: {error}") from error
    except Exception as error:  # csv, zlib, lzma, zstandard and pyarrow each raise a root class of their own
        packages = ("_csv", "zlib", "lzma", "zstandard", "zstd", "_lzma", "pyarrow")
        if type(error).__module__.partition(".")[0] in packages:
            raise DataError(str(path), f"cannot be read: {error}") from error
        raise


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        import gzip

        file = cast("IO[bytes]", gzip.open(path, "rb"))
    elif suffix == ".bz2":
        import bz2

        file = cast("IO[bytes]", bz2.open(path, "rb"))
    elif suffix == ".xz":
        import lzma

        file = cast("IO[bytes]", lzma.open(path, "rb"))
    elif suffix == ".zst":
        file = cast("IO[bytes]", io.BufferedReader(_Zstandard(path), 1 << 18))
    else:
        file = path.open("rb", buffering=1 << 18)
    with file:
        yield file


class _Zstandard(io.RawIOBase):
    """Reads like `zstandard.open`, but raises for a truncated file, which there looks like a shorter one."""

    def __init__(self, path: Path) -> None:
        import zstandard

        self._file = path.open("rb", buffering=0)
        self._make = zstandard.ZstdDecompressor().decompressobj
        self._frame = self._make()
        self._inside = False
        self._waiting, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._waiting or self._file.read(1 << 13)  # little, since it may decompress to very much
            if not data:
                if self._inside:
                    raise EOFError("the compressed data is truncated")
                return 0
            self._ready = memoryview(self._frame.decompress(data))
            self._inside, self._waiting = not self._frame.eof, self._frame.unused_data
            if self._frame.eof:
                self._frame = self._make()
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _jsonl(path: Path, layout: Layout, first: int = 1, offset: int = 0) -> Iterator[tuple[str, Row]]:
    decode = msgspec.json.Decoder().decode
    with _open(path) as file:
        if offset:
            file.seek(offset)
        for number, line in enumerate(_lines_in_utf8(file, layout), first):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.isspace():
                continue
            where = f"{path}:{number}"
            try:
                row = decode(line)
            except msgspec.DecodeError as error:
                raise _not_json(where, line, error) from error
            except UnicodeDecodeError as error:
                raise _not_decodable(where, layout, error) from error
            yield where, _check_row(row, where)


def _lines_in_utf8(file: IO[bytes], layout: Layout) -> Iterator[bytes]:
    """Yield lines in UTF-8. Lines of a file in UTF-8 are not decoded here."""
    if layout.is_utf8:
        yield from file
        return
    text = io.TextIOWrapper(file, encoding=layout.encoding, newline="\n")
    try:
        for line in text:
            yield line.encode()
    finally:
        text.detach()  # the caller closes the file


def _json(path: Path, layout: Layout) -> Iterator[tuple[str, Row]]:
    with _open(path) as file:
        data = file.read().removeprefix(b"\xef\xbb\xbf")
    try:
        value = msgspec.json.decode(data.decode(layout.encoding))
    except msgspec.DecodeError as error:
        raise _not_json(str(path), data, error) from error
    rows = value
    if layout.field is not None:
        for part in layout.field.split("."):
            rows = rows.get(part) if isinstance(rows, dict) else None
        if rows is None:
            raise DataError(str(path), f"has nothing at dataset.field {layout.field!r}", remedy=_hint_for_keys(value))
    if not isinstance(rows, list):
        inside = f"{layout.field}." if layout.field and isinstance(rows, dict) else ""
        advice = _hint_for_keys(rows if inside else value, inside)
        raise DataError(str(path), "must be a list of objects, not one value", remedy=advice)
    for number, row in enumerate(rows):
        where = f"{path}[{number}]"
        yield where, _check_row(row, where)


def _hint_for_keys(value: Any, inside: str = "") -> str:
    """Return a hint for a file whose top level, or whose value at `inside`, is not a list."""
    lists = [key for key, inner in value.items() if isinstance(inner, list)] if isinstance(value, dict) else []
    if lists:
        return f"Name the field that holds the rows: dataset.field: {inside}{lists[0]}"
    return "If it has one object per line, name it .jsonl or set dataset.format: jsonl."


def _not_json(where: str, data: bytes, error: Exception) -> DataError:
    if match := re.search(rb"[:\[,]\s*(-?(?:NaN|Infinity))\b", data):
        name = match[1].decode()
        return DataError(where, f"not valid JSON: JSON has no {name}", remedy="Write null, or leave the field out.")
    return DataError(where, f"not valid JSON: {error}")


def _not_decodable(where: str, layout: Layout, error: UnicodeDecodeError) -> DataError:
    shown = error.object[max(0, error.start - 20) : error.start + 20]
    return DataError(
        where,
        f"not {layout.encoding.upper()}: byte {error.object[error.start]:#04x} in {shown!r}",
        remedy="Name its encoding, for example dataset.encoding: latin-1, or convert it: iconv -f latin1 -t utf-8.",
    )


def _csv(path: Path, layout: Layout) -> Iterator[tuple[str, Row]]:
    import csv  # which most datasets do not need

    csv.field_size_limit(1 << 30)
    delimiter = layout.delimiter or ("\t" if ".tsv" in map(str.lower, path.suffixes) else ",")
    encoding = "utf-8-sig" if layout.is_utf8 else layout.encoding
    with _open(path) as file, io.TextIOWrapper(file, encoding=encoding, newline="") as text:
        reader = csv.DictReader(text, delimiter=delimiter, strict=True)
        names = reader.fieldnames or []
        guess = next((mark for mark in ";\t|" if mark in names[0]), None) if len(names) == 1 else None
        if layout.delimiter is None and guess is not None:
            quoted = msgspec.json.encode(guess).decode()
            raise DataError(
                f"{path}:1",
                f"the header is one column, {names[0]!r}: its values seem to be separated by {guess!r}",
                remedy=f"Add to the eval file:  dataset: {{path: {path.name}, delimiter: {quoted}}}",
            )
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(f"{path}:1", f"the header names a column twice: {', '.join(map(repr, twice))}")
        for row in _lines_of(reader, path, layout):
            where = f"{path}:{reader.line_num}"
            if None in row:
                raise DataError(where, f"has more values than the header's {len(reader.fieldnames or [])} columns")
            if None in row.values():
                raise DataError(where, f"has fewer values than the header's {len(reader.fieldnames or [])} columns")
            yield where, cast("Row", row)


def _lines_of(reader: csv.DictReader[str], path: Path, layout: Layout) -> Iterator[dict[str | Any, Any]]:
    try:
        yield from reader
    except UnicodeDecodeError as error:
        raise _not_decodable(f"{path}:{reader.line_num + 1}", layout, error) from error


def _parquet(path: Path, _: Layout) -> Iterator[tuple[str, Row]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            str(path),
            "reading Parquet needs pyarrow",
            remedy="Install it with: pip install pyarrow",
        ) from None
    number = 0
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield f"{path}[{number}]", _to_json_types(row)
                number += 1


def _to_json_types(value: Any) -> Any:
    """Convert values to JSON types: dates and decimals become texts, images and recordings `data:` URLs."""
    if isinstance(value, dict):
        if value.keys() == {"bytes", "path"} and isinstance(value["bytes"], bytes | None):  # as on Hugging Face
            return value["path"] if value["bytes"] is None else data_url(value["bytes"])
        return {key: _to_json_types(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_to_json_types(inner) for inner in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _check_row(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(where, f"a row must be an object with named fields, not {type(row).__name__}")
    return row


def read_hub(name: str, split: str, subset: str | None, revision: str) -> Iterator[tuple[str, Row]]:
    """Stream the rows of a Hugging Face dataset at a fixed commit."""
    datasets = _hub_library()
    try:
        stream = datasets.load_dataset(name, subset, split=split, revision=revision, streaming=True)
        if hasattr(stream, "decode"):  # files stay as they are, instead of becoming objects
            stream = stream.decode(False)
        for number, row in enumerate(stream):
            yield f"hf://{name}[{number}]", _to_json_types(row)
    except (OSError, ValueError) as error:
        raise DataError(f"hf://{name}", f"cannot be read: {error}") from error


def hub_commit(name: str, revision: str | None) -> str:
    """Return the current commit of a branch or tag of a Hugging Face dataset."""
    _hub_library()
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return str(HfApi().dataset_info(name, revision=revision).sha)
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise DataError(f"hf://{name}", f"cannot be found: {error}") from error


def _hub_library() -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(
            "hf://", "Hugging Face datasets need the `datasets` package", remedy="pip install datasets"
        ) from None
    return datasets


_READERS: dict[str, Callable[[Path, Layout], Iterator[tuple[str, Row]]]] = {
    "jsonl": _jsonl,
    "json": _json,
    "csv": _csv,
    "parquet": _parquet,
}
