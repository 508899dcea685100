"""The trials of a run: verdicts by the present thresholds, one join for the report and for every reader; and all trials
with their outputs and verdicts, in the dataset's order, a batch at a time.

In most runs graders give few different verdicts. Outputs on which all verdicts are equal share one `JudgedOutput`, so
that whoever counts can count equal ones together.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from holdfast.graders.build import grader_class, grader_places, threshold
from holdfast.plan.plan import look_up
from holdfast.report.stats import ExactSum
from holdfast.store.files import open_file
from holdfast.store.heads import ErrorHead, check_line, decode_head
from holdfast.store.index import unpack
from holdfast.store.lines import LineBlock, LineRef, scan
from holdfast.store.metrics import Rule
from holdfast.store.records import GradeStatus, Usage, apply_threshold

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from holdfast.data.columns import Panel
    from holdfast.graders.build import GraderPlace
    from holdfast.plan.identity import RunIdentity
    from holdfast.plan.plan import TrialRecords, Work
    from holdfast.spec.eval import Eval
    from holdfast.store.heads import OutputRef, VerdictRef
    from holdfast.store.index import RunIndex
    from holdfast.store.rundir import RunDir

TrialStatus = Literal["passed", "failed", "error", "skipped", "not_reached", "pending", "uncertain"]
"""`pending`: the trial has no output, or its graders have not been asked yet; `uncertain`: the trial has no output, and
a person has to settle a call that may have happened"""
BandState = Literal["passed", "failed", "error", "not_reached", "pending", "skipped"]


class Judged(NamedTuple):
    """A grader's verdict on an output."""

    status: GradeStatus
    score: float | None
    recorded: VerdictRef | None = None
    """None if the conversation ended before this checkpoint"""


class JudgedOutput(msgspec.Struct, frozen=True, eq=False):
    """An output with its verdicts. It is compared by identity, which makes it a fast key of mappings."""

    verdicts: dict[int, Judged | None]
    """by number of the graders that apply; None is a verdict that is still to come"""
    status: GradeStatus
    score: float | None

    def score_of(self, grader: int) -> float | None:
        """Return the score that a grader gave; None if it gave none."""
        verdict = self.verdicts.get(grader)
        return None if verdict is None else verdict.score


_NOT_REACHED: Final = Judged("not_reached", None)


def judge_output(
    work: Work,
    places: Sequence[GraderPlace],
    recorded: Iterable[tuple[int, VerdictRef | None]],
    panel: Panel,
    measured: Container[int] = (),
) -> JudgedOutput:
    """Join an output with the verdicts of the graders that look at its row, which `Work.verdicts` returns.

    `measured` are the graders of which all verdicts are measurements.
    """
    verdicts: dict[int, Judged | None] = dict.fromkeys(panel.graders, _NOT_REACHED)
    for number, verdict in recorded:
        if verdict is None:
            verdicts[number] = None
            continue
        if number in measured:
            verdict = as_measurement(verdict)
        status = apply_threshold(work.slots[number].threshold, verdict.status, verdict.score)
        verdicts[number] = Judged(status, verdict.score, verdict)
    return JudgedOutput(verdicts, *combine_verdicts([places[number] for number in verdicts], [*verdicts.values()]))


def combine_verdicts(
    places: Sequence[GraderPlace], verdicts: Sequence[Judged | None]
) -> tuple[GradeStatus, float | None]:
    """Return status and score of a trial: passed if every grader passes, and the final graders' weighted mean.

    Graders of weight 0 are reported and decide nothing. A failed checkpoint makes the trial fail, whatever the final
    graders say. A checkpoint that ended the conversation, even one of weight 0, leaves a score of 0. A verdict of None
    is still to come.
    """
    passed, scored, cut_short, objected = True, False, False, False
    weights: list[float] = []
    weighted: list[float] = []
    for place, verdict in zip(places, verdicts, strict=True):
        if verdict is None or verdict.status == "error":
            return "error", None
        status, score, _ = verdict
        objected = objected or status == "failed"
        cut_short = cut_short or (status == "not_reached" and place.turn is None)
        weight = place.block.weight
        if weight == 0:
            continue
        passed = passed and status != "failed"
        if score is not None:
            scored = True
            if place.turn is None:
                weights.append(weight)
                weighted.append(weight * score)
    if cut_short and objected:
        return "failed", 0.0
    if not scored:
        return "skipped", None
    total = sum(weights)
    return "passed" if passed else "failed", sum(weighted) / total if total else None


def gravest(statuses: Iterable[TrialStatus]) -> BandState:
    """Return the status of a checkpoint from the statuses of its graders."""
    present = frozenset(statuses)
    order: tuple[BandState, ...] = ("error", "failed", "pending", "passed", "not_reached")
    return next((status for status in order if status in present), "skipped")


def measured_graders(work: Work, places: Sequence[GraderPlace], index: RunIndex) -> frozenset[int]:
    """Return the graders of which all verdicts are measurements, because some are.

    Scores of a part of a grader's scale would be a wrong mean.
    """
    return frozenset(
        number
        for number, place in enumerate(places)
        if not place.votes and grader_class(place.block).one_scale and _measures(work, number, index)
    )


def _measures(work: Work, number: int, index: RunIndex) -> bool:
    """Return True if a verdict of a grader that counts has counts."""
    slot = work.slots[number]
    for key in index.unusual_verdicts(slot.fingerprint, slot.turn):
        ref = index.output(key)
        verdict_key = None if ref is None else work.verdict_key(ref, number)
        verdict = None if verdict_key is None else index.verdicts(key).get(verdict_key)
        if verdict is not None and verdict.counts is not None:
            return True
    return False


def as_measurement(verdict: VerdictRef) -> VerdictRef:
    """Return a verdict without its score; errors stay as they are."""
    return verdict if verdict.score is None else verdict._replace(status="skipped", score=None)


def grading_rules(spec: Eval) -> dict[str, Rule]:
    """Return the thresholds and weights of an eval's graders, which turn recorded scores into a report."""
    return {
        place.name: Rule(threshold(place.block), place.block.weight, place.combine if place.votes else None)
        for place in grader_places(spec)
    }


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


class UsageTally:
    """Tokens and costs; one unknown makes the sum unknown."""

    def __init__(self) -> None:
        self._input = self._output = self._requests = 0
        self._cost = ExactSum()
        self._tokens_known = self._cost_known = True

    def add(self, usage: Usage) -> None:
        """Add the usage of one trial or grade."""
        if usage.input_tokens is None or usage.output_tokens is None:
            self._tokens_known = False
        self._input += usage.input_tokens or 0
        self._output += usage.output_tokens or 0
        self._requests += usage.requests
        if usage.cost is None:
            self._cost_known = False
        else:
            self._cost.add(usage.cost)

    def summary(self) -> Usage:
        """Return the sums."""
        return Usage(
            self._input if self._tokens_known else None,
            self._output if self._tokens_known else None,
            self._requests,
            self._cost.value if self._cost_known else None,
        )


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


def read_error_heads(rundir: RunDir) -> Iterator[ErrorHead]:
    """Yield the heads of the failed attempts of a run, which are enough to count them."""
    for path in rundir.journals("errors"):
        for line in scan(path):
            if line.sound and (head := decode_head(ErrorHead, line.data)) is not None:
                yield head
