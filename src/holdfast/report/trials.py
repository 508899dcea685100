"""The trials of a run with their outputs and verdicts, in the dataset's order, a batch at a time.

In most runs graders give few different verdicts. Outputs on which all verdicts are equal share one `JudgedOutput`, so
that whoever counts can count equal ones together.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.plan.plan import look_up
from holdfast.report.tally import UsageTally
from holdfast.report.verdicts import JudgedOutput, judge_output, measured_graders
from holdfast.store.files import open_file
from holdfast.store.heads import check_line
from holdfast.store.index import unpack
from holdfast.store.lines import LineBlock, LineRef

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.graders.build import GraderPlace
    from holdfast.plan.identity import RunIdentity
    from holdfast.plan.plan import TrialRecords
    from holdfast.store.heads import OutputRef, VerdictRef
    from holdfast.store.index import RunIndex

_GAP: Final = 1 << 13
"""bytes between two lines that are read faster than skipped"""
_PIECE: Final = 1 << 18
"""bytes that are read at once, unless a line is longer"""

_Place = tuple[str, int, int, int]
"""path of the file, offset and length of a line, and the number of its output among those asked for"""


class OutputText(msgspec.Struct, gc=False):
    """The field of an output that a report uses."""

    output: str


_output_text = msgspec.json.Decoder(OutputText)


class TextReader:
    """Reads answers, keeping the files open."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}

    def read(self, lines: Sequence[LineRef]) -> list[str]:
        """Return the answers of outputs; raise Fault for a damaged line."""
        texts: dict[int, str] = {}
        piece: list[_Place] = []
        file, start, end = "", 0, 0
        for place in sorted([(str(path), at, length, number) for number, (path, at, length) in enumerate(lines)]):
            other, offset, length, _ = place
            if piece and (other != file or offset > end + _GAP or offset + length > start + _PIECE):
                self._read_piece(piece, texts)
                piece = []
            if not piece:
                file, start = other, offset
            end = offset + length
            piece.append(place)
        if piece:
            self._read_piece(piece, texts)
        return [texts[number] for number in range(len(lines))]

    def _read_piece(self, places: Sequence[_Place], texts: dict[int, str]) -> None:
        """Read lines of one file that are near each other, in their order."""
        file, begin, _, _ = places[0]
        starts = [offset - begin for _, offset, _, _ in places]
        ends = [offset + length - begin for _, offset, length, _ in places]
        block = LineBlock(begin, os.pread(self._open(file), ends[-1], begin), starts, ends)
        lines, decode = block.lines(), _output_text.decode
        if not block.all_sound():
            for start, line in zip(starts, lines, strict=True):
                check_line(LineRef(Path(file), begin + start, len(line)), line)
        for place, line in zip(places, lines, strict=True):
            texts[place[3]] = decode(line).output

    def _open(self, file: str) -> int:
        fd = self._fds.get(file)
        if fd is None:
            fd = self._fds[file] = open_file(file)
        return fd

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


NO_OUTPUT: Final = JudgedOutput({}, "error", None)
"""a trial without an output"""
_BATCH: Final = 256
"""trials that are looked up at once"""
_BATCH_BYTES: Final = 1 << 22
"""length of the lines of a batch, unless one sample has more: their answers are in memory at the same time"""
_MOST_JUDGED: Final = 1 << 12
"""different combinations of verdicts that are kept"""


class TrialBatch(NamedTuple):
    """All trials of some samples: first the first sample's trials, then the second's, and so on."""

    positions: range
    """of the samples"""
    keys: list[str]
    outputs: list[OutputRef | None]
    judged: list[JudgedOutput]
    """one object for all outputs with equal verdicts; its `recorded` comes from one of these outputs"""

    @property
    def recorded(self) -> list[OutputRef]:
        """The outputs of those trials that have one."""
        return [output for output in self.outputs if output is not None]


class TrialReader:
    """One pass over all trials, in which usage and durations are added up."""

    def __init__(self, identified: RunIdentity, index: RunIndex, places: Sequence[GraderPlace]) -> None:
        self._survey, self._work = identified.survey, identified.work
        self._index, self._places = index, places
        self._measured = measured_graders(self._work, places, index)
        self.usage, self.judges = UsageTally(), UsageTally()
        self.seconds = array("d")
        """durations of the trials"""
        self._judged: dict[object, JudgedOutput] = {}
        """by panel and verdicts"""

    def batches(self) -> Iterator[TrialBatch]:
        """Yield all trials."""
        trials = self._work.trials
        step = max(1, _BATCH // trials)
        for start in range(0, self._survey.count, step):
            positions = range(start, min(start + step, self._survey.count))
            numbers = range(positions.start * trials, positions.stop * trials)
            yield from self._batches(positions, list(look_up(self._survey, self._work, self._index, numbers)))

    def _batches(self, positions: range, records: Sequence[TrialRecords]) -> Iterator[TrialBatch]:
        length = sum([each.output.line.length for each in records if each.output is not None])
        if len(positions) > 1 and length > _BATCH_BYTES:
            middle = len(positions) // 2
            yield from self._batches(positions[:middle], records[: middle * self._work.trials])
            yield from self._batches(positions[middle:], records[middle * self._work.trials :])
            return
        keys, outputs = [unpack(each.key) for each in records], [each.output for each in records]
        yield TrialBatch(positions, keys, outputs, [self._judge(each) for each in records])

    def _judge(self, records: TrialRecords) -> JudgedOutput:
        """Judge an output, and add up its usage and its judges'."""
        output = records.output
        if output is None:
            return NO_OUTPUT
        self.usage.add(output.usage)
        self.seconds.append(output.seconds)
        position = records.number // self._work.trials
        panel, work = self._survey.panels.panel_at(position), self._work
        verdicts = [*work.verdicts(output, records.verdicts, panel)]
        for number, verdict in verdicts:
            if verdict is not None and verdict.usage is not None and not work.slots[number].votes:
                self.judges.add(verdict.usage)
        mark = (id(panel), *[verdict and (number, *_mark(verdict)) for number, verdict in verdicts])
        judged = self._judged.get(mark)
        if judged is None:
            if len(self._judged) > _MOST_JUDGED:
                self._judged.clear()
            judged = self._judged[mark] = judge_output(work, self._places, verdicts, panel, self._measured)
        return judged


def _mark(verdict: VerdictRef) -> tuple[object, ...]:
    """Return what two equal verdicts have in common. A verdict with counts is equal to no other one."""
    if verdict.counts is None and verdict.together is None:
        score = verdict.score or str(verdict.score)  # 0.0 and -0.0 are equal, and are written differently
        return verdict.status, score
    return (id(verdict),)
