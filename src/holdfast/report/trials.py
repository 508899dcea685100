"""The trials of a run with their outputs and verdicts, in the dataset's order, a batch at a time.

In most runs the graders look at whole outputs and give few different verdicts. Such verdicts are looked up in the index
column by column, and where all verdicts on two outputs are equal, they are joined once. Any other output is judged
alone. Either way `judge_output` joins, as for every reader of a run.
"""

from __future__ import annotations

from array import array
from functools import cache
from itertools import repeat
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.plan.keys import generation_digests, grade_digests
from holdfast.report.tally import UsageTally
from holdfast.report.verdicts import JudgedOutput, judge_output
from holdfast.store.index_table import UNKNOWN, OutputFields

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.data.panels import Panel
    from holdfast.graders.build import GraderPlace
    from holdfast.plan.identity import RunIdentity
    from holdfast.plan.plan import Slot
    from holdfast.store.index import Index
    from holdfast.store.index_table import PackedTable, PackedUsage
    from holdfast.store.refs import OutputRef, VerdictRef

NO_OUTPUT: Final = JudgedOutput({}, "error", None)
"""a trial without an output"""
_BATCH: Final = 256
"""trials that are looked up at once"""
_BATCH_BYTES: Final = 1 << 22
"""length of the lines of a batch, unless one sample has more: their answers are in memory at the same time"""
_MOST_JUDGED: Final = 1 << 12
"""different combinations of verdicts that are kept"""

_Finished = tuple[int, OutputFields]
"""the number of a trial with an output in its batch, and what the index holds of the output"""


class TrialBatch(NamedTuple):
    """All trials of some samples: those of the first sample, then those of the second, and so on."""

    positions: range
    """of the samples"""
    keys: list[str]
    rows: list[int]
    """of the outputs in the index; -1 without an output"""
    fields: list[OutputFields]
    """of those trials that have an output, what the index holds of it"""
    judged: list[JudgedOutput]
    """one object for all outputs with equal verdicts; its `recorded` are those of one of these outputs"""


class TrialReader:
    """One pass over all trials, in which usage and durations are added up."""

    def __init__(self, identified: RunIdentity, index: Index, places: Sequence[GraderPlace]) -> None:
        self._survey, self._work = identified.survey, identified.work
        self._index, self._places = index, places
        self.usage, self.judges = UsageTally(), UsageTally()
        self.seconds = array("d")
        """durations of the trials"""
        self._judged: dict[tuple[object, ...], JudgedOutput] = {}
        """by the number of the panel and a mark of each verdict"""
        self._slots = cache(self._plain_slots)

    def batches(self) -> Iterator[TrialBatch]:
        """Yield all trials."""
        step = max(1, _BATCH // self._work.trials)
        for start in range(0, self._survey.count, step):
            yield from self._batches(range(start, min(start + step, self._survey.count)))

    def _batches(self, positions: range) -> Iterator[TrialBatch]:
        keys, rows = self._find_outputs(positions)
        numbers = [number for number, row in enumerate(rows) if row >= 0]
        fields = self._index.outputs.fields_at([rows[number] for number in numbers])
        if len(positions) > 1 and sum([each[2] for each in fields]) > _BATCH_BYTES:
            middle = len(positions) // 2
            yield from self._batches(positions[:middle])
            yield from self._batches(positions[middle:])
            return
        batch = TrialBatch(positions, keys, rows, fields, [NO_OUTPUT] * len(keys))
        self._judge(batch, list(zip(numbers, fields, strict=True)))
        yield batch

    def _find_outputs(self, positions: range) -> tuple[list[str], list[int]]:
        """Return the keys of the trials of some samples, and the rows of their outputs."""
        work, survey, outputs = self._work, self._survey, self._index.outputs
        asked = survey.asked_digests[16 * positions.start : 16 * positions.stop]
        raw_keys = generation_digests(asked, work.trials, work.digest)
        return ["sha256:" + raw.hex() for raw in raw_keys], outputs.rows_of(raw_keys)

    def _judge(self, batch: TrialBatch, finished: list[_Finished]) -> None:
        """Set the verdicts on the outputs of a batch, and add up the usage of both."""
        outputs, trials = self._index.outputs, self._work.trials
        _add_usage(
            self.usage, outputs, [batch.rows[number] for number, _ in finished], [each[3:7] for _, each in finished]
        )
        self.seconds.extend([each[7] for _, each in finished])
        panels, panel_numbers = self._survey.panels.packed()
        if len(panels) == 1:
            self._judge_alike(batch, 0, finished)
            return
        by_panel: dict[int, list[_Finished]] = {}
        for each in finished:
            by_panel.setdefault(panel_numbers[batch.positions[each[0] // trials]], []).append(each)
        for panel, group in by_panel.items():
            self._judge_alike(batch, panel, group)

    def _judge_alike(self, batch: TrialBatch, panel_number: int, finished: list[_Finished]) -> None:
        """Set the verdicts on the outputs of rows with one panel."""
        verdicts, outputs, judged = self._index.verdicts, self._index.outputs, self._judged
        panel = self._survey.panels.packed()[0][panel_number]
        slots = self._slots(panel)
        if slots is None or (outputs.rare and any(outputs.has_odd_digest(batch.rows[n]) for n, _ in finished)):
            for number, _ in finished:
                batch.judged[number] = self._judge_alone(batch, number, panel)
            return
        keys, digests = [batch.keys[number] for number, _ in finished], [each[0] for _, each in finished]
        columns: list[list[object]] = []
        for slot in slots:
            sample_rows = [each[9] for _, each in finished] if slot.reads_row else None
            rows = verdicts.rows_of(grade_digests(keys, digests, slot.fingerprint, sample_rows))
            fields = verdicts.fields_at(rows)
            _add_usage(self.judges, verdicts, rows, [each and each[1:5] for each in fields])
            # A verdict with counts is equal to no other one.
            columns.append(
                [
                    row if verdicts.rare and row in verdicts.rare else each and (each[0], each[5])
                    for row, each in zip(rows, fields, strict=True)
                ]
            )
        if len(judged) > _MOST_JUDGED:
            judged.clear()
        for (number, _), marks in zip(finished, zip(repeat(panel_number), *columns), strict=False):
            equal = judged.get(marks)
            if equal is None:
                equal = judged[marks] = self._join(batch, number, panel)
            batch.judged[number] = equal

    def _plain_slots(self, panel: Panel) -> list[Slot] | None:
        """Return the slots of a panel; None if a verdict's key depends on more than the whole output and the row."""
        slots = [self._work.slots[number] for number in panel.graders]
        return None if any(slot.turn is not None or slot.measures or slot.votes for slot in slots) else slots

    def _judge_alone(self, batch: TrialBatch, number: int, panel: Panel) -> JudgedOutput:
        judged = self._join(batch, number, panel)
        for verdict in judged.verdicts.values():
            if verdict is not None and verdict.recorded is not None and verdict.recorded.usage is not None:
                self.judges.add(verdict.recorded.usage)
        return judged

    def _join(self, batch: TrialBatch, number: int, panel: Panel) -> JudgedOutput:
        ref = self._index.outputs.ref_at(batch.rows[number])
        return judge_output(self._work, self._places, batch.keys[number], ref, self._index.verdicts, panel)


def _add_usage(
    tally: UsageTally,
    table: PackedTable[OutputRef] | PackedTable[VerdictRef],
    rows: Sequence[int],
    packed: Sequence[PackedUsage | None],
) -> None:
    """Add the usage of some rows: that which is packed into them, and that which does not fit into them."""
    known = [each for each in packed if each is not None and each[2] != UNKNOWN]
    if known:
        tally.add_packed(*zip(*known, strict=True))
    if table.rare and len(known) < len(packed):
        for row, each in zip(rows, packed, strict=True):
            if each is not None and each[2] == UNKNOWN and (usage := table.ref_at(row).usage) is not None:
                tally.add(usage)
