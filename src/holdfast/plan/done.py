"""Finished trials of a large run, stored beside its cached index: `.index/done`.

To find out which of a million trials are finished, all their keys have to be computed. The result holds for the records
of the cached index, as long as the rows and the graders are the same. Records that came later can only finish further
trials, unless one of them replaces a record of the cache: then nothing is known.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.canonical import digest
from holdfast.store.rundir import INDEX

if TYPE_CHECKING:
    from holdfast.plan.identity import RunIdentity
    from holdfast.store.index import Index
    from holdfast.store.rundir import RunDir

_NAME: Final = "done"
_MAGIC: Final = b"holdfast done 1\n"


def read_done(identity: RunIdentity, rundir: RunDir, index: Index) -> bytes:
    """Return `Plan.done` for the records of the cached index that an index continues; empty if it is not known."""
    if not index.origin or identity.work.typed_digest is not None:  # which of two keys counts depends on all records
        return b""
    from holdfast.store.cache_file import read_header

    with suppress(OSError, ValueError), (rundir.path / INDEX / _NAME).open("rb") as file:
        header, _ = read_header(file, _MAGIC)
        if header.decode() == _basis(identity, index):
            return file.read()
    return b""


def write_done(identity: RunIdentity, rundir: RunDir, index: Index, done: bytes) -> None:
    """Store `Plan.done` of an index that is as it was cached."""
    if not index.origin or index.new_bytes or not done:
        return
    from holdfast.store.cache_file import write_cache

    with suppress(OSError):
        write_cache(rundir.path / INDEX / _NAME, _MAGIC, _basis(identity, index).encode(), [done])


def _basis(identity: RunIdentity, index: Index) -> str:
    survey, work = identity.survey, identity.work
    return digest([index.origin, survey.digest, survey.panels.fingerprint(), msgspec.to_builtins(work)])
