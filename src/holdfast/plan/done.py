"""Finished trials of a large run, stored beside its cached index: `.index/done`.

To find out which of a million trials are finished, all their keys have to be computed. The result holds for the records
of the cached index, as long as the rows and the graders are the same. Records that came later can only finish further
trials, unless one of them replaces a record of the cache: then nothing is known.

The digests of the rows are stored, too, so that a run that borrows from this one computes the keys of rows that differ.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections import Counter
from contextlib import suppress
from itertools import chain, compress, groupby, product, repeat
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.canonical import digest
from holdfast.data.columns import code_for
from holdfast.data.matching import WIDTH, CommonRows, match_rows
from holdfast.plan.keys import grade_key
from holdfast.plan.plan import TO_GRADE, places_of
from holdfast.plan.reuse import Inherited
from holdfast.store.run_files import UNREADABLE, open_binary
from holdfast.store.rundir import INDEX

if TYPE_CHECKING:
    from typing import BinaryIO

    from holdfast.data.panels import Panel
    from holdfast.data.survey import Survey
    from holdfast.plan.identity import RunIdentity
    from holdfast.plan.plan import Work
    from holdfast.store.index import Index
    from holdfast.store.rundir import RunDir

_NAME: Final = "done"
_MAGIC: Final = b"holdfast done 4\n"
_CHUNK: Final = 1 << 20
"""bytes of digests that are compared at once"""


class _Header(msgspec.Struct, array_like=True):
    basis: str
    """digest of everything that the result depends on"""
    byte_order: str
    origin: str
    """the cached index"""
    work: str
    trials: int
    rows: int
    kinds: list[list[Any]]
    """for each of the different panels: what the keys of its graders' verdicts are made of"""
    stops: bool
    """a verdict may end a conversation, so that others are not needed"""
    has_panels: bool
    """with the panel of each row; else all rows have the first"""
    has_asked: bool
    """with digests of the parts of rows that the target sees"""


def read_done(identity: RunIdentity, rundir: RunDir, index: Index) -> bytes:
    """Return `Plan.done` for the records of the cached index that an index continues; empty if it is not known."""
    if not index.origin:
        return b""
    with suppress(OSError, ValueError, *UNREADABLE), open_binary(rundir.path / INDEX / _NAME) as file:
        header = _read(file)
        if header.basis == _basis(identity, index):
            return file.read(header.rows * header.trials)
    return b""


def write_done(identity: RunIdentity, rundir: RunDir, index: Index, done: bytes) -> None:
    """Store `Plan.done` of an index that is as it was cached."""
    if not index.origin or index.new_bytes or not done or index.verdicts.of_sets():
        return  # a new output makes verdicts on all outputs together invalid
    from holdfast.store.cache_file import write_cache

    survey, work = identity.survey, identity.work
    kinds, rows = survey.panels.packed()
    header = _Header(
        basis=_basis(identity, index),
        byte_order=sys.byteorder,
        origin=index.origin,
        work=work.digest,
        trials=work.trials,
        rows=survey.count,
        kinds=[_signs(work, kind) for kind in kinds],
        stops=_may_stop(work),
        has_panels=any(rows),
        has_asked=bool(survey.asked),
    )
    body: list[bytes | memoryview] = [done, survey.digests, survey.asked]
    if header.has_panels:
        body.append(memoryview(rows).cast("B"))
    with suppress(OSError):
        write_cache(rundir.path / INDEX / _NAME, _MAGIC, msgspec.msgpack.encode(header), body)


def inherit_done(survey: Survey, work: Work, lender: RunDir, index: Index) -> Inherited | None:
    """Return what is known of a run's trials from a lender and its index; None if all keys have to be looked at.

    Only rows that one of both has not, and trials that are not finished there, are looked up by their keys.
    """
    if not index.origin or _may_stop(work):
        return None
    with suppress(OSError, ValueError, EOFError, *UNREADABLE), open_binary(lender.path / INDEX / _NAME) as file:
        header = _read(file)
        if (header.origin, header.work, header.trials) != (index.origin, work.digest, work.trials) or header.stops:
            return None
        done = file.read(header.rows * header.trials)
        same, digests = _read_digests(file, header.rows * WIDTH, survey)
        asked = digests
        if header.has_asked:
            file.seek(same * WIDTH, os.SEEK_CUR)
            asked = file.read((header.rows - same) * WIDTH)
        panels = array(code_for(len(header.kinds)))
        if header.has_panels:
            panels.fromfile(file, header.rows)
        else:
            panels.frombytes(bytes(panels.itemsize * header.rows))
        return _inherit(survey, work, index, _Lent(header, done, survey, same, digests, asked, panels))
    return None


def _read_digests(file: BinaryIO, size: int, survey: Survey) -> tuple[int, bytes]:
    """Return how many rows at the beginning are the same as those of a survey, or fewer, and the digests of the rest.

    Most runs differ little, and 16 bytes for each row are not needed twice.
    """
    place = 0
    while place < size:
        chunk = file.read(min(_CHUNK, size - place))
        if not chunk:
            raise EOFError
        if chunk != survey.digests[place : place + len(chunk)]:
            return place // WIDTH, chunk + file.read(size - place - len(chunk))
        place += len(chunk)
    return place // WIDTH, b""


class _Lent(msgspec.Struct, frozen=True):
    """The contents of a lender's file."""

    header: _Header
    done: bytes
    survey: Survey
    """of the run that borrows"""
    same: int
    """rows at the beginning that are those of the survey"""
    digests: bytes
    """of the other rows"""
    asked: bytes
    """`Sample.asked` of these"""
    panels: array[int]

    def matches(self) -> list[CommonRows]:
        """Return the rows that both runs have."""
        same, others = self.same, match_rows(self.digests, self.survey.digests[self.same * WIDTH :])
        beyond = [CommonRows(match.new + same, match.old + same, match.length) for match in others]
        return [CommonRows(0, 0, same), *beyond] if same else beyond

    def known_of(self, match: CommonRows, work: Work, state: int) -> bytes:
        """Return what is known of the trials of rows that both runs have; `state` is that of trials to be graded."""
        trials, (kinds, rows) = work.trials, self.survey.panels.packed()
        done = self.done[match.old * trials : (match.old + match.length) * trials]
        lent, own = self.panels[match.old : match.old + match.length], rows[match.new : match.new + match.length]
        graded = {
            (theirs, ours): all(sign in self.header.kinds[theirs] for sign in _signs(work, kinds[ours]))
            for theirs, ours in set(zip(lent, own, strict=True))
        }
        if all(graded.values()):
            return done
        ungraded = done.replace(b"\x01", bytes([state]))
        if not any(graded.values()):
            return ungraded
        known = bytearray()
        for is_graded, pairs in groupby(zip(lent, own, strict=True), graded.__getitem__):
            end = len(known) + trials * sum(1 for _ in pairs)
            known += (done if is_graded else ungraded)[len(known) : end]
        return bytes(known)

    def explains(self, work: Work, index: Index) -> bool:
        """Return True if every verdict of the lender is one of its graders on its rows: there are no others."""
        trials, kinds = self.header.trials, self.header.kinds
        panels = chain.from_iterable(repeat(panel, trials) for panel in self.panels) if trials > 1 else self.panels
        counts = Counter(compress(panels, self.done))
        verdicts = sum(count * len(kinds[panel]) for panel, count in counts.items())
        for number in places_of(0, self.done) if verdicts < len(index.verdicts) else ():
            row, trial = divmod(number, trials)
            key = work.key(self.asked_at(row), trial + 1)
            ref = index.outputs.get(key)
            for fingerprint, turn, measures, reads_row in kinds[self.panels[row]] if ref is not None else ():
                if turn is not None or measures:
                    return False
                verdicts += (
                    grade_key(key, ref.digest, fingerprint, row=ref.row if reads_row else None) in index.verdicts
                )
        return verdicts == len(index.verdicts)

    def asked_at(self, position: int) -> str:
        """Return `Sample.asked` of a row of the lender."""
        if position < self.same:
            return "sha256:" + self.survey.asked_at(position).hex()
        start = (position - self.same) * WIDTH
        return "sha256:" + self.asked[start : start + WIDTH].hex()


def _inherit(survey: Survey, work: Work, index: Index, lent: _Lent) -> Inherited | None:
    trials, outputs = work.trials, index.outputs
    state = TO_GRADE if lent.explains(work, index) else 0
    known, gone = bytearray(survey.count * trials), bytearray(b"\x01" * lent.header.rows)
    for match in lent.matches():
        known[match.new * trials : (match.new + match.length) * trials] = lent.known_of(match, work, state)
        gone[match.old : match.old + match.length] = bytes(match.length)
    usable, missing, relabelled = len(known) - known.count(0), array("Q"), dict[str, str]()
    for number, key in work.keys(survey, bytes(known)):
        row, position = outputs.row_of(key), number // trials
        if row < 0:
            if number % trials == 0:
                missing.append(position)
        elif survey.asked and outputs.sample_row_at(row) != survey.row_text(position):
            relabelled[key] = survey.row_text(position)
        else:
            usable += 1
    rows = map(lent.asked_at, places_of(1, bytes(gone)))
    keys = (work.key(row, trial) for row, trial in product(rows, range(1, trials + 1)))
    unwanted = [key for key in keys if key in outputs]
    if usable + len(unwanted) != len(outputs):
        return None  # the lender has outputs of other rows, which may be those of this run
    return Inherited(bytes(known), usable, missing, unwanted, relabelled)


def _signs(work: Work, panel: Panel) -> list[Any]:
    """Return what the keys of a panel's verdicts are made of, beside the outputs."""
    slots = [work.slots[number] for number in panel.graders]
    return [[slot.fingerprint, slot.turn, list(slot.measures), slot.reads_row] for slot in slots if not slot.votes]


def _may_stop(work: Work) -> bool:
    return any(slot.stops for slot in work.slots)


def _read(file: BinaryIO) -> _Header:
    from holdfast.store.cache_file import read_header

    header = msgspec.msgpack.decode(read_header(file, _MAGIC)[0], type=_Header)
    if header.byte_order != sys.byteorder:
        raise ValueError("another byte order")
    return header


def _basis(identity: RunIdentity, index: Index) -> str:
    survey, work = identity.survey, identity.work
    return digest([index.origin, survey.digest, survey.panels.fingerprint(), msgspec.to_builtins(work)])
