"""Bytes that are set aside: they come back, and a full disk is named."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import IO, Any

import pytest

from holdfast.store.files import Spool

LARGE = b"x" * (2 << 20)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put temporary files on a disk that is full."""

    def open_full(*_: object, **__: object) -> IO[Any]:
        return Path("/dev/full").open("w+b")

    monkeypatch.setattr(tempfile, "TemporaryFile", open_full)


def test_bytes_are_read_back_from_memory_and_from_a_file() -> None:
    for data in (b"few", LARGE):
        with Spool() as spool:
            spool.write(data)
            spool.write(b"more")
            assert spool.tell() == len(data) + 4
            spool.seek(len(data))
            assert spool.read(2) == b"mo" and spool.read() == b"re"


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_names_the_folder() -> None:
    with Spool() as spool, pytest.raises(OSError) as raised:
        spool.write(LARGE)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, tempfile.gettempdir())


@pytest.mark.usefixtures("full_disk")
def test_buffered_bytes_that_no_longer_fit_name_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.store.files._IN_MEMORY", 1)
    with Spool() as spool, pytest.raises(OSError) as raised:
        spool.write(b"few")
        spool.seek(0)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, tempfile.gettempdir())
