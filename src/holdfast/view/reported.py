"""Columns of a finished run: verdicts from `results.json`, in its order, and everything else from the outputs."""

from __future__ import annotations

import gc
import re
from array import array
from contextlib import contextmanager, nullcontext
from itertools import chain, islice, repeat
from operator import attrgetter
from struct import iter_unpack
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from holdfast.store.index import Entry, Index, keep_output, read_output_head
from holdfast.store.lines import LineRef
from holdfast.view.facts import LastFailures, set_failure, set_missing
from holdfast.view.outputs import COLUMNS, NO_OUTPUT, column_of, output_files, place_and_length, reading_outputs
from holdfast.view.table import CODES, NAN, TrialTable, field_column, score_column, split_place, status_column

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.report.run_view import RunView
    from holdfast.store.rundir import RunDir
    from holdfast.view.outputs import OutputRows

_BLOCK: Final = 1 << 20
"""bytes of results that are decoded at once"""
_LAST: Final = b"\n]}\n"
"""the end of `results.json`"""
_NOT_IN_STRUCTS: Final = re.compile(r"[\\\"\x00-\x1f]")
"""characters that no field of a struct may have in its name"""
_WAITING: Final = 1024
"""outputs that are taken at once"""
Verdict = Literal["passed", "failed", "error", "skipped", "not_reached"]


class _Grade(msgspec.Struct, frozen=True, gc=False):
    status: Verdict | Literal[""] = ""
    """empty for a grader that does not look at the row"""
    score: float | None = None


_VERDICT_CODES: Final = {"": 0, **CODES}
_ERROR: Final = CODES["error"]


def known(values: list[Any]) -> list[float]:
    """Return numbers with NaN for those that are unknown."""
    return [NAN if value is None else value for value in values] if None in values else values


def read_reported(
    view: RunView, dataset: Any, progress: Callable[[float], None], outputs: Callable[[], OutputRows] | None
) -> TrialTable | None:
    """Return the columns of a finished run; None if its report does not fit its journals, which then decide.

    `dataset` is the present state of the dataset, for the columns of the fields by which results are broken down.
    `outputs` returns the outputs where somebody reads them already.
    """
    metrics = view.metrics
    if metrics is None or not view.rundir.results.exists():
        return None
    sizes = view.rundir.journal_bytes()
    if any(getattr(metrics.timing, name) not in (None, size) for name, size in sizes.items()):
        return None
    with _without_collector(), nullcontext(outputs) if outputs else reading_outputs(view.rundir) as read_outputs:
        results = _Results(view, dataset)
        try:
            return _join(view.rundir, results, read_outputs()) if results.read(progress) else None
        except ValueError:
            return None  # a helper process has failed


@contextmanager
def _without_collector() -> Iterator[None]:
    """Switch the garbage collector off: a million short-lived objects without cycles cost it half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Results:
    """The columns of `results.json`, in which each trial is a line."""

    def __init__(self, view: RunView, dataset: Any) -> None:
        self._view = view
        self.table = TrialTable(view.graders)
        self.table.files = output_files(view.rundir)  # as the outputs number them
        for name in view.spec.by:
            self.table.set_field(name, [""], array("I"), dataset)
        self.present = bytearray()
        """a byte of 1 for each trial that has an output"""
        self._graders = [f"grader{number}" for number in range(len(self.table.graders))]
        self._fields = [f"field{number}" for number in range(len(view.spec.by))]
        self._failures = LastFailures()
        self._failures.read(view.rundir.journals("errors"))

    def _decoder(self) -> msgspec.json.Decoder[list[Any]]:
        grades = msgspec.defstruct(
            "Grades",
            [(name, _Grade, _Grade()) for name in self._graders],
            rename=dict(zip(self._graders, self.table.graders, strict=True)),
            gc=False,
        )
        breakdown = msgspec.defstruct(
            "Breakdown",
            [(name, str, "") for name in self._fields],
            rename=dict(zip(self._fields, self._view.spec.by, strict=True)),
            frozen=True,
            gc=False,
        )
        result = msgspec.defstruct(
            "Result",
            [
                ("sample", str),
                ("trial", int),
                ("key", str),
                ("status", Verdict),
                ("score", float | None),
                ("output", msgspec.Raw),
                ("grades", grades),
                ("by", breakdown, breakdown()),
            ],
            gc=False,
        )
        return msgspec.json.Decoder(list[result])  # type: ignore[valid-type]

    def read(self, progress: Callable[[float], None]) -> bool:
        """Read the file; returns False where it is written otherwise, or says too little."""
        if any(_NOT_IN_STRUCTS.search(name) for name in (*self._view.graders, *self._view.spec.by)):
            return False
        decode = self._decoder().decode
        size = max(1, self._view.rundir.results.stat().st_size)
        with self._view.rundir.results.open("rb") as file:
            if not file.readline().endswith(b'"trials":[\n'):
                return False
            rest = b""
            while block := file.read(_BLOCK):
                progress(min(1.0, file.tell() / size))
                trials = bytearray(b"[")
                trials += rest
                trials += block
                end = trials.rfind(b",\n")
                if trials.endswith(_LAST):
                    rest, trials[-len(_LAST) :] = b"", b"]"
                elif end < 0:
                    rest = bytes(trials[1:])
                    continue
                else:
                    rest, trials[end:] = bytes(trials[end + 2 :]), b"]"
                try:
                    if not self._add(decode(trials)):
                        return False
                except msgspec.DecodeError:
                    return False
        return not rest

    def _add(self, batch: list[Any]) -> bool:
        """Add trials; returns False if the results do not tell which graders looked at one of them."""
        table, first = self.table, len(self.table)
        table.extend([each.sample for each in batch], [each.trial for each in batch], [each.key for each in batch])
        statuses = bytes([CODES[each.status] for each in batch])
        table["status"].frombytes(statuses)
        table.fill("score", known([each.score for each in batch]))
        every_grades = [each.grades for each in batch]
        for number, name in enumerate(self._graders):
            verdicts = list(map(attrgetter(name), every_grades))
            table[status_column(number)].frombytes(bytes([_VERDICT_CODES[verdict.status] for verdict in verdicts]))
            table.fill(score_column(number), known([verdict.score for verdict in verdicts]))
        for field, name in zip(self._fields, self._view.spec.by, strict=True):
            column = field_column(name)
            table.fill(column, table.codes(column, list(map(attrgetter(f"by.{field}"), batch))))
        for name in ("error", "error_at"):
            table[name].frombytes(bytes(len(batch) * table[name].itemsize))
        self.present += b"\1" * len(batch)
        errors = [row for row, code in enumerate(statuses) if code == _ERROR] if _ERROR in statuses else ()
        return all(self._explain_error(first + row, batch[row]) for row in errors)

    def _explain_error(self, row: int, result: Any) -> bool:
        """Tell a trial without an output from one whose verdicts failed or are still to come; False if unsure."""
        table, root = self.table, self._view.rundir.path
        if bytes(result.output) == b"null":
            self.present[row] = 0
            set_missing(table, row, self._failures.of_target.get(result.key), root)
            return True
        failure = self._failures.of_graders.get(result.key)
        set_failure(table, row, failure, root)
        columns = [table[status_column(number)] for number in range(len(table.graders))]
        if failure is None and all(column[row] != CODES["error"] for column in columns):
            table["status"][row] = CODES["ungraded"]
        absent = [number for number, column in enumerate(columns) if not column[row]]
        for number in absent:
            columns[number][row] = CODES["ungraded"]
        return all(self._view.places[number].block.where is None for number in absent)


def _join(rundir: RunDir, results: _Results, outputs: OutputRows) -> TrialTable | None:
    """Fill the columns of the results with those of their outputs; None if there is an output too many or too few."""
    table = results.table
    joined: bytes | bytearray | None = _in_order(table, outputs)
    if joined is None:
        chosen = _choose_outputs(rundir, table.files, outputs)
        joined = b"".join([chosen.pop(key, NO_OUTPUT) for key in _keys(table)])
        if chosen:
            return None
    for name in COLUMNS:
        table[name].frombytes(column_of(joined, name))
    if bytes(map(bool, table["at"])) != results.present:
        return None
    for name, codes in outputs.values.items():
        table.values[name] = list(codes)
    table.pad()
    return table


def _keys(table: TrialTable) -> Iterator[bytes]:
    return chain.from_iterable(iter_unpack("16s", table["keys"]))


def _in_order(table: TrialTable, outputs: OutputRows) -> bytearray | None:
    """Return the rows of the outputs in the order of the table; None if a key has several, or is not in the table.

    Outputs are nearly in this order, since requests are sent in it. So few wait for their turn, and the dict of those
    that do stays in the processor's cache.
    """
    keys, pairs = _keys(table), outputs.pairs()
    waiting = dict(islice(pairs, _WAITING))
    parts = []
    while block := list(islice(keys, _WAITING)):
        waiting.update(islice(pairs, _WAITING))
        parts.append(b"".join(map(waiting.pop, block, repeat(NO_OUTPUT))))
    waiting.update(pairs)
    joined = bytearray(b"").join(parts)
    places = array("Q", column_of(joined, "at"))
    if len(places) - places.count(0) + len(waiting) != len(outputs):
        return None  # one output has replaced another
    for row in [row for row, place in enumerate(places) if not place] if waiting else ():
        if (late := waiting.pop(table.key_at(row), None)) is not None:
            joined[row * len(late) : (row + 1) * len(late)] = late
    return None if waiting else joined


def _choose_outputs(rundir: RunDir, files: list[str], outputs: OutputRows) -> dict[bytes, bytes]:
    """Return the output that counts for each key, as the index chooses it where there are several."""
    chosen = dict(outputs.pairs())
    if len(chosen) == len(outputs):
        return chosen
    rows: dict[bytes, list[bytes]] = {}
    for key, row in outputs.pairs():
        rows.setdefault(key, []).append(row)
    for key, several in rows.items():
        if len(several) > 1:
            index, by_line = Index(), {}
            for (place, length), row in sorted((place_and_length(row), row) for row in several):
                file, offset = split_place(place)
                line = LineRef(rundir.path / files[file], offset, length)
                if (head := read_output_head(line.read())) is not None:
                    keep_output(index, Entry(line, head))
                    by_line[line] = row
            chosen[key] = by_line[next(iter(index.outputs.values())).line]
    return chosen
