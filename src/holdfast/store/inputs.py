"""`inputs.jsonl`: the files that users' code read while it ran, as they were then.

Keys are made before code runs, so they do not contain what it reads. Instead a run's records count only while these
files are as they were. A line is on disk before the first record that may depend on it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from holdfast.store.files import UNREADABLE, make_directory, replacing
from holdfast.store.journal import append_lines
from holdfast.store.lines import scan, seal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from holdfast.store.rundir import RunDir

NAME: Final = "inputs"


class Input(Struct, frozen=True):
    """A file that code read: a line of `inputs.jsonl`."""

    source: str
    """the user's file that read it, relative to the eval's folder"""
    path: str
    """the file, relative to the eval's folder"""
    digest: str | None
    """of its content, or of its code for Python; null if there was no such file; empty if it has changed since"""
    size: int = 0
    """bytes"""
    mtime: int = 0
    """time of its last change, in nanoseconds since the epoch"""
    product: bool | UnsetType = UNSET
    """true if the file is not an input, since the code itself, or a program it starts, writes it"""


_decoder: Final = msgspec.json.Decoder(Input)


def read_inputs(rundir: RunDir) -> list[Input]:
    """Read the inputs of a run, of all its writers."""
    return [each for path in rundir.journals(NAME) for each in _read(path)]


def _read(path: Path) -> Iterator[Input]:
    for line in scan(path):
        with suppress(*UNREADABLE):
            if line.sound:
                yield _decoder.decode(line.data)


def append_inputs(folder: Path, inputs: Iterable[Input]) -> None:
    """Append to the inputs in a folder of journals; return when they are on disk."""
    lines = b"".join(seal(msgspec.json.encode(each)) for each in inputs)
    if lines:
        make_directory(folder)
        append_lines(folder / f"{NAME}.jsonl", lines)


def mend_inputs(folder: Path) -> None:
    """Remove a torn line, which the next one would be appended to. The caller is the only writer."""
    path = folder / f"{NAME}.jsonl"
    lines = list(scan(path))
    if not all(line.sound for line in lines):
        with replacing(path) as file:
            file.write(b"".join(line.data + b"\n" for line in lines if line.sound))
