"""Damaged bytes of journals: noticed when a journal is read, and moved out of it by a process that holds the lease."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from holdfast.store.files import make_directory, open_file, replacing
from holdfast.store.shared import lender_of, unseal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from holdfast.store.index import RunIndex


class Damage(msgspec.Struct, frozen=True):
    """Bytes of a journal file that are not a sound line."""

    path: Path
    offset: int
    length: int
    torn: bool
    """an unfinished last line, left by a process that was killed while writing"""

    @property
    def what(self) -> str:
        """Human-readable description."""
        return "an unfinished last line" if self.torn else "a damaged line"

    @property
    def lender(self) -> str | None:
        """The run that owns the file, if it is shared."""
        return lender_of(self.path)

    def __str__(self) -> str:
        if self.lender is not None:
            return f"{self.lender}: {self.what} at byte {self.offset} of its journal; its work counts as not done here"
        return f"{self.path.name}: {self.what} at byte {self.offset} was set aside; its work counts as not done"


def cut_damage(index: RunIndex, aside: Path, *, tails_only: bool = False) -> bool:
    """Move damaged bytes out of the journals; return True if lines moved, so that the index is to be read again."""
    damage = index.damage = [spot for spot in index.damage if spot.torn or not tails_only]
    own = [spot for spot in damage if spot.lender is None]
    for path in {spot.path for spot in own}:
        _cut_out(path, [spot for spot in own if spot.path == path], aside)
    if all(spot.torn for spot in own):
        return False
    index.damage = own  # damage in a shared file is noticed again
    return True


def _cut_out(path: Path, damage: list[Damage], aside: Path) -> None:
    make_directory(aside)
    unseal(path)
    with os.fdopen(open_file(path, os.O_RDWR), "r+b") as file:
        with (aside / path.name).open("ab") as backup:
            for spot in damage:
                file.seek(spot.offset)
                _copy(file.read, backup.write, spot.length - 1)
                backup.write(file.read(1).rstrip(b"\n") + b"\n")
            backup.flush()
            os.fsync(backup.fileno())
        if all(spot.torn for spot in damage):
            file.truncate(damage[0].offset)
            os.fsync(file.fileno())
            return
        with replacing(path) as repaired:
            position = 0
            for start, length in [(spot.offset, spot.length) for spot in damage] + [(path.stat().st_size, 0)]:
                file.seek(position)
                _copy(file.read, repaired.write, start - position)
                position = start + length


def _copy(read: Callable[[int], bytes], write: Callable[[bytes], int], length: int) -> None:
    while length > 0 and (chunk := read(min(length, 1 << 20))):
        write(chunk)
        length -= len(chunk)
