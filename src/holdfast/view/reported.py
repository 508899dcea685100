"""Columns of a finished run: verdicts from `results.json`, in its order, and everything else from the outputs.

The two are read at the same time, the outputs of a large run by a helper process. Run as a program, this module is
that helper: it stores the columns of the outputs, in the order of their lines, in a file.
"""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from array import array
from contextlib import contextmanager, suppress
from itertools import accumulate, islice
from operator import add, itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from holdfast.store.index import Entry, Index, keep_output, read_output_head
from holdfast.store.lines import LineRef, is_sound
from holdfast.view.facts import LastFailures, output_facts, set_failure
from holdfast.view.table import CODES, NAN, NUMBERS, TrialTable, field_column, score_column, status_column

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from holdfast.report.run_view import RunView
    from holdfast.store.rundir import RunDir
    from holdfast.view.facts import OutputFacts

_BATCH: Final = 512
"""lines that are decoded before their columns are written"""
_NOT_IN_STRUCTS: Final = re.compile(r"[\\\"\x00-\x1f]")
"""characters that no field of a struct may have in its name"""
_NEWLINE: Final = ord("\n")
_LARGE: Final = 32 << 20
"""bytes of outputs from which on a helper process reads them"""
_OF_OUTPUT: Final = (*(name for name in NUMBERS if name != "score"), "stop", "source", "stopped", "at", "length")
"""columns that outputs fill"""

Verdict = Literal["passed", "failed", "error", "skipped", "not_reached"]


class _Grade(msgspec.Struct, gc=False):
    status: Verdict
    score: float | None


def read_reported(view: RunView, dataset: Any, progress: Callable[[float], None]) -> TrialTable | None:
    """Return the columns of a finished run; None if its report does not fit its journals, which then decide.

    `dataset` is the present state of the dataset, for the columns of the fields by which results are broken down.
    """
    metrics = view.metrics
    if metrics is None or not view.rundir.results.exists():
        return None
    sizes = view.rundir.journal_bytes()
    if any(getattr(metrics.timing, name) not in (None, size) for name, size in sizes.items()):
        return None
    with _without_collector(), _reading_outputs(view.rundir, sizes["outputs_bytes"]) as outputs:
        table = _read_results(view, dataset, progress)
        return None if table is None else _join(view, table, outputs())


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


@contextmanager
def _reading_outputs(rundir: RunDir, size: int) -> Iterator[Callable[[], TrialTable | None]]:
    """Begin to read the outputs; yields a function that returns their columns, None if that failed."""
    if size < _LARGE:
        yield lambda: read_outputs(rundir.path, rundir.journals("outputs"))
        return
    with TemporaryDirectory(prefix="holdfast-view-") as folder:
        file = Path(folder) / "outputs"
        with subprocess.Popen([sys.executable, "-m", "holdfast.view.reported", rundir.path, file]) as process:
            try:
                yield lambda: TrialTable.load(file) if process.wait() == 0 else None
            finally:
                process.kill()


def read_outputs(root: Path, paths: Iterable[Path]) -> TrialTable:
    """Return the columns of all outputs in journals, in the order of their lines."""
    table = TrialTable(())
    for path in paths:
        start = table.place(str(path.relative_to(root)), 0)
        with suppress(FileNotFoundError), path.open("rb", buffering=1 << 20) as journal:
            while lines := list(islice(journal, _BATCH)):
                starts = list(accumulate(map(len, lines), initial=start))
                sound = [
                    (place, len(line) - 1, facts)
                    for place, line in zip(starts, lines, strict=False)
                    if line[-1] == _NEWLINE and is_sound(line[:-1]) and (facts := _output_facts(line)) is not None
                ]
                _add_outputs(table, sound)
                start = starts[-1]
    return table


def _output_facts(line: bytes) -> OutputFacts | None:
    try:
        return output_facts.decode(line)
    except msgspec.DecodeError:
        return None  # sound, but not an output


def _add_outputs(table: TrialTable, batch: list[tuple[int, int, OutputFacts]]) -> None:
    every = [facts for _, _, facts in batch]
    table.extend([each.sample for each in every], [each.trial for each in every], [each.key for each in every])
    usages, timings = [facts.usage for facts in every], [facts.timing for facts in every]
    inputs = _known([usage.input_tokens for usage in usages])
    outputs = _known([usage.output_tokens for usage in usages])
    columns: dict[str, Sequence[Any]] = {
        "turns": [facts.turns for facts in every],
        "attempt": [facts.attempt for facts in every],
        "tokens": list(map(add, inputs, outputs)),
        "input_tokens": inputs,
        "output_tokens": outputs,
        "cost": _known([usage.cost for usage in usages]),
        "seconds": [timing.seconds for timing in timings],
        "first_token": _known([timing.first_token for timing in timings]),
        "started": [timing.started for timing in timings],
        "stop": _codes(table, "stop", [facts.stop for facts in every]),
        "source": _codes(table, "source", [facts.source or "" for facts in every]),
        "stopped": [0 if facts.stopped_by is None else len(facts.marks) or 1 for facts in every],
        "at": [place for place, _, _ in batch],
        "length": [length for _, length, _ in batch],
    }
    for name, values in columns.items():
        table[name].extend(array(table[name].typecode, values))


def _known(values: list[Any]) -> list[float]:
    return [NAN if value is None else value for value in values] if None in values else values


def _codes(table: TrialTable, name: str, values: list[str]) -> list[int]:
    codes = {value: table.code(name, value) for value in dict.fromkeys(values)}
    return [codes[value] for value in values]


def _read_results(view: RunView, dataset: Any, progress: Callable[[float], None]) -> TrialTable | None:
    """Return the columns of `results.json`, of which each trial is a line; None where it is written otherwise."""
    if any(_NOT_IN_STRUCTS.search(name) for name in (*view.graders, *view.spec.by)):
        return None
    table = TrialTable(view.graders)
    for path in view.rundir.journals("outputs"):
        table.place(str(path.relative_to(view.rundir.path)), 0)  # as the columns of the outputs number them
    for name in view.spec.by:
        table.set_field(name, [""], array("I"), dataset)
    fields = [f"grader{number}" for number in range(len(table.graders))]
    grades = msgspec.defstruct(
        "Grades",
        [(field, _Grade | None, None) for field in fields],
        rename=dict(zip(fields, table.graders, strict=True)),
        gc=False,
    )
    breakdown = msgspec.defstruct(
        "Breakdown",
        [(f"field{number}", str | None, None) for number in range(len(view.spec.by))],
        rename={f"field{number}": name for number, name in enumerate(view.spec.by)},
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
            ("by", breakdown | None, None),
        ],
        gc=False,
    )
    decode = msgspec.json.Decoder(result).decode
    failures = LastFailures()
    failures.read(view.rundir.journals("errors"))
    size, done = max(1, view.rundir.results.stat().st_size), 0
    with view.rundir.results.open("rb", buffering=1 << 20) as file:
        if not file.readline().endswith(b'"trials":[\n'):
            return None
        last = False
        while not last and (lines := list(islice(file, _BATCH))):
            done += sum(map(len, lines))
            progress(min(1.0, done / size))
            while lines and lines[-1].strip() in (b"", b"]}"):
                lines.pop()
                last = True
            try:
                batch = [decode(line[:-2] if line.endswith(b",\n") else line) for line in lines]
            except msgspec.DecodeError:
                return None
            if not _add_results(view, table, fields, batch, failures):
                return None
    return table if last else None


def _add_results(view: RunView, table: TrialTable, fields: list[str], batch: list[Any], failures: LastFailures) -> bool:
    """Add trials; returns False if the results do not tell which graders looked at one of them."""
    first = len(table)
    table.extend([each.sample for each in batch], [each.trial for each in batch], [each.key for each in batch])
    table["status"].extend(array("B", [CODES[each.status] for each in batch]))
    table["score"].extend(array("d", _known([each.score for each in batch])))
    for number, field in enumerate(fields):
        verdicts = [getattr(each.grades, field) for each in batch]
        codes = [0 if verdict is None else CODES[verdict.status] for verdict in verdicts]
        scores = [NAN if verdict is None or verdict.score is None else verdict.score for verdict in verdicts]
        table[status_column(number)].extend(array("B", codes))
        table[score_column(number)].extend(array("d", scores))
    for name in ("error", "error_at"):
        table[name].frombytes(bytes(len(batch) * table[name].itemsize))
    for number, name in enumerate(view.spec.by):
        values = [getattr(each.by, f"field{number}", None) or "" for each in batch]
        table[field_column(name)].extend(array("I", _codes(table, field_column(name), values)))
    return all(
        _explain_error(view, table, row, each, failures)
        for row, each in enumerate(batch, first)
        if each.status == "error"
    )


def _explain_error(view: RunView, table: TrialTable, row: int, result: Any, failures: LastFailures) -> bool:
    """Tell a trial without an output from one whose verdicts failed or are still to come; False if that is unsure."""
    if bytes(result.output) == b"null":
        table["status"][row] = CODES["pending"]
        set_failure(table, row, failures.of_target.get(result.key), view.rundir.path)
        return True
    failure = failures.of_graders.get(result.key)
    set_failure(table, row, failure, view.rundir.path)
    columns = [table[status_column(number)] for number in range(len(table.graders))]
    if failure is None and all(column[row] != CODES["error"] for column in columns):
        table["status"][row] = CODES["ungraded"]
    absent = [number for number, column in enumerate(columns) if not column[row]]
    for number in absent:
        columns[number][row] = CODES["ungraded"]
    return all(view.places[number].block.where is None for number in absent)


def _join(view: RunView, table: TrialTable, outputs: TrialTable | None) -> TrialTable | None:
    """Fill the columns of the results with those of their outputs; None if there is an output too many or too few."""
    if outputs is None or outputs.files != table.files[: len(outputs.files)]:
        return None
    chosen = _choose_outputs(view.rundir, outputs)
    keys = bytes(table["keys"])
    places = [chosen.get(keys[start : start + 16]) for start in range(0, len(keys), 16)]
    with_output = [status != CODES["pending"] for status in table["status"]]
    if [place is not None for place in places] != with_output or sum(with_output) != len(chosen):
        return None
    order = [len(outputs) if place is None else place for place in places]
    table.values["stop"], table.values["source"] = outputs.values["stop"], outputs.values["source"]
    pick = itemgetter(*order, -1)  # two values at least, else it returns one and not a tuple
    for name in _OF_OUTPUT:
        values = [*outputs[name], NAN if name in NUMBERS else 0]
        table[name].extend(array(table[name].typecode, pick(values)[:-1]))
    table.pad()
    return table


def _choose_outputs(rundir: RunDir, outputs: TrialTable) -> dict[bytes, int]:
    """Return the output that counts for each key, as the index chooses it where there are several."""
    chosen = outputs.keys()
    if len(chosen) == len(outputs):
        return chosen
    rows: dict[bytes, list[int]] = {}
    for row in range(len(outputs)):
        rows.setdefault(outputs.key_at(row), []).append(row)
    for key, several in rows.items():
        if len(several) > 1:
            index, by_line = Index(), {}
            for row in several:
                file, offset = outputs.file_and_offset(outputs["at"][row])
                line = LineRef(rundir.path / file, offset, outputs["length"][row])
                if (head := read_output_head(line.read())) is not None:
                    keep_output(index, Entry(line, head))
                    by_line[line] = row
            chosen[key] = by_line[next(iter(index.outputs.values())).line]
    return chosen


def main() -> None:
    """Store the columns of the outputs of a run, in the order of their lines, in a file."""
    from holdfast.store.rundir import RunDir

    rundir, file = RunDir(Path(sys.argv[1])), Path(sys.argv[2])
    gc.disable()
    read_outputs(rundir.path, rundir.journals("outputs")).save(file)


if __name__ == "__main__":
    main()
