"""Facts of a trial, written into the columns of its row: where its line is, what it used, how it was judged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.store.index import OutputHead, read_error_head
from holdfast.store.lines import LineRef, scan
from holdfast.store.trial_table import CODES, NAN, score_column, status_column

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from holdfast.report.verdicts import JudgedOutput
    from holdfast.store.index import ErrorHead
    from holdfast.store.trial_table import TrialTable


class OutputFacts(OutputHead, kw_only=True, gc=False):
    """The fields of an output that have columns, besides those that grading needs."""

    sample: str
    trial: int
    attempt: int
    turns: int


output_facts: Final = msgspec.json.Decoder(OutputFacts)


class Failure(NamedTuple):
    """The last failed attempt at a trial: when it failed, its kind, and where its line is."""

    time: float
    kind: str
    path: Path
    offset: int


class LastFailures:
    """Failed attempts of a run by trial; of several, the last one counts."""

    def __init__(self) -> None:
        self.of_target: dict[str, Failure] = {}
        self.of_graders: dict[str, Failure] = {}

    def read(self, paths: Iterable[Path]) -> None:
        """Read whole journals of errors."""
        for path in paths:
            for line in scan(path):
                if line.sound and (head := read_error_head(line.data)) is not None:
                    self.add(head, path, line.offset)

    def add(self, head: ErrorHead, path: Path, offset: int) -> None:
        """Add a failed attempt."""
        failures = self.of_target if head.where == "target" else self.of_graders
        earlier = failures.get(head.key)
        if earlier is None or (earlier.time, earlier.path, earlier.offset) < (head.time, path, offset):
            failures[head.key] = Failure(head.time, head.kind, path, offset)


def set_output(table: TrialTable, row: int, facts: OutputFacts, line: LineRef, file: str) -> None:
    """Write what an output says into its row."""
    usage, timing = facts.usage, facts.timing
    table.set(
        row,
        at=table.place(file, line.offset),
        length=line.length,
        turns=facts.turns,
        tokens=_known(usage.tokens),
        input_tokens=_known(usage.input_tokens),
        output_tokens=_known(usage.output_tokens),
        cost=_known(usage.cost),
        seconds=timing.seconds,
        first_token=_known(timing.first_token),
        started=timing.started,
        attempt=facts.attempt,
        stop=table.code("stop", facts.stop),
        answer=table.code("answer", facts.answer),
        source=table.code("source", facts.source or ""),
        stopped=0 if facts.stopped_by is None else len(facts.marks) or 1,
    )


def _known(value: float | None) -> float:
    return NAN if value is None else value


def verdict_columns(graders: int) -> list[str]:
    """Return the names of the columns of `verdict_values`."""
    return ["status", "score", *(name(number) for number in range(graders) for name in (status_column, score_column))]


def verdict_values(judged: JudgedOutput, graders: int, failure: Failure | None) -> list[float]:
    """Return status and score of an output, and of each grader. `failure` is the last one of a grader at it."""
    status: str = judged.status
    if (
        status == "error"
        and failure is None
        and all(each is None or each.status != "error" for each in judged.verdicts.values())
    ):
        status = "ungraded"
    values: list[float] = [CODES[status], _known(judged.score)]
    for number in range(graders):
        verdict = judged.verdicts.get(number)
        if verdict is not None:
            values += CODES[verdict.status], _known(verdict.score)
        else:
            values += CODES["ungraded"] if number in judged.verdicts else 0, NAN
    return values


def set_verdicts(table: TrialTable, row: int, judged: JudgedOutput, failure: Failure | None, root: Path) -> None:
    """Write status, score and verdicts of an output into its row, and the failed attempt that explains an error."""
    graders = len(table.graders)
    table.set(row, **dict(zip(verdict_columns(graders), verdict_values(judged, graders, failure), strict=True)))
    set_failure(table, row, failure if table["status"][row] == CODES["error"] else None, root)


def set_missing(table: TrialTable, row: int, failure: Failure | None, root: Path, *, uncertain: bool = False) -> None:
    """Write that a row has no output: an error if an attempt at it has failed, as in reports, else pending.

    `uncertain`: a call was cut off, although no failed attempt says so.
    """
    uncertain = uncertain or (failure is not None and failure.kind == "uncertain")
    table.set(row, status=CODES["uncertain" if uncertain else "pending" if failure is None else "error"])
    set_failure(table, row, failure, root)


def set_failure(table: TrialTable, row: int, failure: Failure | None, root: Path) -> None:
    """Write the failed attempt that explains why a row has no output or no verdict."""
    if failure is None:
        table.set(row, error=0, error_at=0)
    else:
        place = table.place(str(failure.path.relative_to(root)), failure.offset)
        table.set(row, error=table.code("error", failure.kind), error_at=place)
