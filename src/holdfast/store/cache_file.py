"""Files of caches: a header and what follows it, under one digest. Whatever is torn or damaged is no cache.

Nothing is synced: the digest tells what a power cut has left of a file.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from struct import Struct
from typing import TYPE_CHECKING, BinaryIO, Final

from xxhash import xxh3_128

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FRAME: Final = Struct("<QQ16s")
"""behind the magic word: lengths of the header and of what follows it, and the digest of both"""


def write_cache(path: Path, magic: bytes, header: bytes, body: Sequence[bytes | memoryview] = ()) -> str:
    """Write a cache under a temporary name, rename it in one step, and return its digest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink()
    checksum = xxh3_128(header)
    for part in body:
        checksum.update(part)
    frame = FRAME.pack(len(header), sum(map(len, body)), checksum.digest())
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines([magic + frame + header, *body])
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    return checksum.hexdigest()


def peek_header(file: BinaryIO, magic: bytes) -> bytes:
    """Return the header of a cache, of which nothing but the size is checked. Raises ValueError as `read_header`."""
    return _read_unchecked(file, magic)[0]


def read_header(file: BinaryIO, magic: bytes) -> tuple[bytes, str]:
    """Check a whole cache; return its header and digest, and leave the file at what follows the header.

    Raises ValueError for a file that is not such a cache, or torn, or damaged.
    """
    header, digest = _read_unchecked(file, magic)
    place, checksum = file.tell(), xxh3_128(header)
    while chunk := file.read(1 << 20):
        checksum.update(chunk)
    if checksum.digest() != digest:
        raise ValueError("damaged")
    file.seek(place)
    return header, digest.hex()


def _read_unchecked(file: BinaryIO, magic: bytes) -> tuple[bytes, bytes]:
    """Return the header of a cache, and the digest of all of it."""
    frame = file.read(len(magic) + FRAME.size)
    if len(frame) != len(magic) + FRAME.size or not frame.startswith(magic):
        raise ValueError("not a cache of this version")
    header_size, body_size, digest = FRAME.unpack_from(frame, len(magic))
    if len(frame) + header_size + body_size != os.fstat(file.fileno()).st_size:
        raise ValueError("torn")
    return file.read(header_size), digest
