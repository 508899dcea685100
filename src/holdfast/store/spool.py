"""Bytes that are set aside and read again: in memory while they are few, then in a temporary file."""

from __future__ import annotations

from contextlib import suppress
from tempfile import SpooledTemporaryFile, gettempdir
from typing import Final

_IN_MEMORY: Final = 1 << 20
"""size in bytes above which the content moves from memory to a file"""


class Spool:
    """A temporary file without a name. Its errors name its folder, so that the user knows which disk is full."""

    def __init__(self) -> None:
        self._file = SpooledTemporaryFile(_IN_MEMORY)

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def write(self, data: bytes) -> None:
        """Write bytes at the current position."""
        try:
            self._file.write(data)
        except OSError as error:
            raise _in_folder(error) from error

    def seek(self, position: int) -> None:
        """Move to a position, after writing what is buffered."""
        try:
            self._file.seek(position)
        except OSError as error:
            raise _in_folder(error) from error

    def tell(self) -> int:
        """Return the current position."""
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes from the current position, or all that follow."""
        return self._file.read(size)

    def close(self) -> None:
        """Remove the file."""
        with suppress(OSError):  # on a full disk, closing tries once more to write
            self._file.close()


def _in_folder(error: OSError) -> OSError:
    return OSError(error.errno, error.strerror, gettempdir())
