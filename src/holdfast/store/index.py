"""Index of a run directory, read once when the run is opened and updated as the run goes on.

Transcripts stay on disk: the index holds the place and usage of each output, and its verdicts, in packed tables.
"""

from __future__ import annotations

from array import array
from contextlib import suppress
from heapq import merge
from math import fsum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec

from holdfast.errors import Fault
from holdfast.store.answers import KIND_CODES, AnswerClass, answer_kind
from holdfast.store.damage import Damage, cut_damage
from holdfast.store.index_table import OutputTable, VerdictTable
from holdfast.store.lines import LineRef, is_sound, read_blocks, scan
from holdfast.store.records import (
    CallIntent,
    ErrorRecord,
    Grade,
    GradeStatus,
    Mark,
    Output,
    Step,
    Timing,
    Together,
    Usage,
    describe_call,
)
from holdfast.store.refs import OutputRef, VerdictRef, moments
from holdfast.store.run_files import UNREADABLE
from holdfast.store.shared import journal_size, lender_of, run_of, settle, unwanted_keys
from holdfast.store.step_places import StepPlaces

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator
    from pathlib import Path

    from holdfast.store.records import OnCutOff

T = TypeVar("T")

_FEWEST_PERIODS: Final = 1 << 14
"""periods of work from which on they are merged now and then"""


class Spent(msgspec.Struct):
    """Usage of a run so far, over all its processes: outputs, judges and failed attempts."""

    tokens: int = 0
    requests: int = 0
    cost: float = 0.0
    unpriced: int = 0
    """number of trials and grades without a known price"""
    unmetered: int = 0
    """number of trials and grades that do not report their tokens"""
    _starts: array[float] = msgspec.field(default_factory=lambda: array("d"))
    _ends: array[float] = msgspec.field(default_factory=lambda: array("d"))
    """periods of work, merged where they overlap as far as the next limit"""
    _merge_at: int = _FEWEST_PERIODS

    def add(self, usage: Usage, times: int = 1) -> None:
        """Add the usage of a trial or grade."""
        if usage.input_tokens is None or usage.output_tokens is None:
            self.unmetered += times
        self.tokens += times * ((usage.input_tokens or 0) + (usage.output_tokens or 0))
        self.requests += times * usage.requests
        if usage.cost is None:
            self.unpriced += times
        else:
            self.cost += times * usage.cost

    def take_back(self, usage: Usage) -> None:
        """Subtract usage that is counted elsewhere."""
        self.add(usage, -1)

    def add_time(self, started: float, ended: float) -> None:
        """Add a period of work; periods may overlap and come in any order."""
        self._starts.append(started)
        self._ends.append(ended)
        if len(self._starts) >= self._merge_at:
            self.periods()

    def add_grade(self, usage: Usage | None, time: float, seconds: float) -> None:
        """Add a grade: the usage of its judge, and its time if noticeable."""
        if usage is not None:
            self.add(usage)
        if seconds >= 0.001:
            self.add_time(time - seconds, time)

    @property
    def seconds(self) -> float:
        """Wall time with work in flight, without the pauses between processes."""
        return fsum(ended - started for started, ended in self.periods())

    def periods(self) -> list[tuple[float, float]]:
        """Return the periods with work in flight, in order and without overlaps. There are few, however long a run."""
        merged: list[tuple[float, float]] = []
        for started, ended in sorted(zip(self._starts, self._ends, strict=True)):
            if merged and started <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], ended)
            elif ended > started:
                merged.append((started, ended))
        self._starts, self._ends = (array("d", [period[side] for period in merged]) for side in (0, 1))
        self._merge_at = max(_FEWEST_PERIODS, 2 * len(merged))
        return merged


class Index(msgspec.Struct):
    """Everything that a resumed run needs from its records."""

    outputs: OutputTable = msgspec.field(default_factory=OutputTable)
    verdicts: VerdictTable = msgspec.field(default_factory=VerdictTable)
    """by grade key"""
    attempts: dict[str, int] = {}
    """failed attempts of the target by generation key"""
    failed_at: dict[str, float] = {}
    """when the last of these attempts failed"""
    uncertain: set[str] = set()
    """keys of trials whose last attempt stopped because a person has to settle a call"""
    grader_attempts: dict[tuple[str, str], int] = {}
    """failed attempts of graders by generation key and the grader's name"""
    steps: dict[str, list[LineRef]] = {}
    """calls of conversations that have no output yet, by generation key"""
    intents: set[str] = set()
    """keys of those with calls that must not be made twice"""
    spent: Spent = msgspec.field(default_factory=Spent)
    damage: list[Damage] = []
    origin: str = ""
    """names the cached index of which this one is a continuation; empty if it is none"""
    new_bytes: int = 0
    """bytes of journals that the cached index does not cover"""

    @property
    def begun(self) -> tuple[Container[str], ...]:
        """Containers of the keys of trials that were begun, those with recorded calls first."""
        return self.steps, self.attempts

    def reserve(self, trials: int, graders: int) -> None:
        """Make room for the outputs of so many trials, each with verdicts of so many graders."""
        self.outputs.reserve(trials)
        self.verdicts.reserve(trials * graders)

    def note_failure(self, key: str, kind: str, time: float) -> None:
        """Note why an attempt at a trial failed. Attempts may be read in any order; the last one counts."""
        before = self.failed_at.get(key, -1.0)
        if time > before:
            self.failed_at[key] = time
            self.uncertain.discard(key)
        if time >= before and kind == "uncertain":
            self.uncertain.add(key)

    def needs_step(self, key: str) -> bool:
        """Return True if recorded calls of a conversation may be needed: no output holds them and is final."""
        return not self.outputs.is_final(key)


class OutputHead(msgspec.Struct):
    """The fields of an output that the index uses."""

    key: str
    digest: str
    usage: Usage
    timing: Timing
    stop: str
    answer: AnswerClass
    marks: list[Mark] = []
    stopped_by: str | None = None
    source: str | None = None
    row: str | None = None

    @property
    def kind(self) -> str:
        """Kind of the answer, as the index holds it."""
        return answer_kind(self.answer, self.stop)

    def ref(self, line: LineRef) -> OutputRef:
        """Return the index's reference to an output on the given line."""
        timing = self.timing
        marks = moments(self.marks, self.usage, timing.seconds)
        return OutputRef(
            line, self.digest, self.usage, timing.seconds, marks, self.stopped_by, timing.started, self.row, self.kind
        )


class GradeHead(msgspec.Struct):
    """The fields of a grade that the index uses."""

    grade_key: str
    status: GradeStatus
    score: float | None
    usage: Usage | None = None
    source: str | None = None
    time: float = 0.0
    seconds: float = 0.0
    counts: tuple[int, ...] | None = None
    grader: str = ""
    turn: int | None = None
    together: Together | None = None

    @property
    def verdict(self) -> VerdictRef:
        """The verdict, as the index holds it."""
        return VerdictRef(self.status, self.score, self.usage, self.time, self.counts, self.together)


class StepHead(msgspec.Struct):
    """The fields of a recorded call that the index uses."""

    key: str
    kind: str
    usage: Usage
    time: float
    seconds: float
    source: str | None = None


class ErrorHead(msgspec.Struct):
    """The fields of a failed attempt that the index, summaries and followers of a run use."""

    key: str
    where: str
    time: float
    seconds: float
    usage: Usage | None = None
    sample: str = ""
    trial: int = 1
    kind: str = ""
    message: str = ""
    final: bool = False
    row: str | msgspec.UnsetType = msgspec.UNSET


_decoders: Final[dict[type, msgspec.json.Decoder[Any]]] = {}


def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Return the decoder of a kind of record, made when it is first needed: a new run has no records yet."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    return decoder


def read_output_head(line: bytes) -> OutputHead | None:
    """Decode the head of an output line; None if the line is not an output."""
    try:
        return _decoder(OutputHead).decode(line)
    except UNREADABLE:
        return None


def read_grade_head(line: bytes) -> GradeHead | None:
    """Decode the head of a grade line; None if the line is not a grade."""
    try:
        return _decoder(GradeHead).decode(line)
    except UNREADABLE:
        return None


def read_error_head(line: bytes) -> ErrorHead | None:
    """Decode the head of an error line; None if the line is not an error."""
    try:
        return _decoder(ErrorHead).decode(line)
    except UNREADABLE:
        return None


def read_output(ref: OutputRef) -> Output:
    """Read the whole record of a reference."""
    output, lender = decode_line(Output, ref.line), lender_of(ref.line.path)
    return output if lender is None or output.source else msgspec.structs.replace(output, source=lender)


def decode_line(kind: type[T], line: LineRef, data: bytes | None = None) -> T:
    """Read a line as a record; raise Fault if it is damaged, or not such a record. `data` is a line that is sound."""
    data = check_line(line, line.read()) if data is None else data
    try:
        return _decoder(kind).decode(data)
    except UNREADABLE as error:
        raise _damaged(line, f"not a record of Holdfast ({error})") from error


def check_line(line: LineRef, data: bytes) -> bytes:
    """Return the bytes of a line if they are sound; raise Fault if not.

    Lines that a cached index refers to were verified when the index was made, which may be long ago.
    """
    if is_sound(data):
        return data
    raise _damaged(line, "a damaged line")


def _damaged(line: LineRef, reason: str) -> Fault:
    return Fault(
        "disk",
        f"{line.path}: {reason} at byte {line.offset}",
        remedy=f"Set it aside with `holdfast repair {run_of(line.path)}`; the same command then does its work again.",
    )


def read_values(journals: Iterable[Path], graders: Container[str]) -> dict[str, Any]:
    """Read the `value` in the details of these graders' verdicts, by grade key; of several verdicts the latest counts.

    The index does not hold them, since few runs have metrics that are not made of scores.
    """
    values: dict[str, Any] = {}
    times: dict[str, float] = {}
    for path in journals:
        for line in scan(path):
            head = read_grade_head(line.data) if line.sound else None
            if head is None or head.grader not in graders or times.get(head.grade_key, 0.0) > head.time:
                continue
            times[head.grade_key] = head.time
            details = msgspec.json.decode(line.data)["details"]
            values[head.grade_key] = details.get("value") if isinstance(details, dict) else None
    return values


def read_steps(lines: Iterable[LineRef]) -> list[Step]:
    """Read the valid recorded calls of a conversation, in the order in which they were made.

    If several workers ran the conversation, its lines may be passed in another order, file by file.
    """
    return _in_effect(_in_order(lines))


def _in_order(lines: Iterable[LineRef]) -> list[Step]:
    by_file: dict[Path, list[Step]] = {}
    for line in lines:
        by_file.setdefault(line.path, []).append(decode_line(Step, line))
    return list(merge(*by_file.values(), key=lambda step: step.time))


def _in_effect(recorded: Iterable[Step]) -> list[Step]:
    """Leave out calls that a decision took back."""
    steps: list[Step] = []
    for step in recorded:
        if step.kind == "restart":
            steps.clear()
        elif step.kind == "settle":  # the call is to be made again: forget that it was about to be made
            steps = [each for each in steps if each.kind != "intent" or _call_of(each) != _call_of(step)]
        else:
            steps.append(step)
    return steps


def _call_of(step: Step) -> tuple[int, str, int]:
    return step.turn, step.request, step.nth


def is_decision(step: Step) -> bool:
    """Return True for a record of what became of calls that were cut off."""
    return step.kind in ("settle", "restart") or (step.kind == "tool" and bool(step.response.get("settled")))


def cut_off_calls(steps: Iterable[Step]) -> list[Step]:
    """Return the intents of calls without a result, in turns that have not ended: they may or may not have happened."""
    recorded = list(steps)
    results = {_call_of(step) for step in recorded if step.kind == "tool"}
    ended = {step.turn for step in recorded if step.kind == "turn"}
    return [
        step for step in recorded if step.kind == "intent" and step.turn not in ended and _call_of(step) not in results
    ]


def why_uncertain(cut_off: Iterable[Step], intents: Iterable[Step]) -> str:
    """Return which calls leave a trial uncertain, for people; empty if what their tools say decides.

    `cut_off` are the intents of calls that were cut off, and `intents` all intents of the trial.
    """
    undecided = [step for step in cut_off if _on_cut_off(step) != "error_result"]
    return "" if all(_on_cut_off(step) == "restart" for step in intents) else describe_cut_off(undecided)


def describe_cut_off(calls: Iterable[Step]) -> str:
    """Return for people which calls were cut off; empty if there are none."""
    names = [describe_call(step) for step in calls]
    were = "was" if len(names) == 1 else "were"
    return f"{'; '.join(names)} {were} cut off, and may or may not have happened" if names else ""


def _on_cut_off(intent: Step) -> OnCutOff:
    return msgspec.convert(intent.response, CallIntent).on_cut_off


def uncertain_trials(index: Index, *, running: bool = False) -> dict[str, str]:
    """Return the trials that wait for a person, by key, each with the calls that may have happened.

    A call without a result was cut off, also if a kill left no time to record an error. If the run is `running`, such a
    call may be in flight, so that only errors count. The text is empty if only an error on record says what happened.
    """
    uncertain = {}
    for key in index.intents | index.uncertain:
        if key in index.outputs:
            continue
        recorded = _in_order(index.steps.get(key, ()))
        steps = _in_effect(recorded)
        try:
            why = why_uncertain(cut_off_calls(steps), [step for step in steps if step.kind == "intent"])
        except msgspec.ValidationError:
            why = "a recorded call cannot be read, and may or may not have happened"
        failed_at = index.failed_at[key] if key in index.uncertain else None
        stopped = failed_at is not None and not any(is_decision(step) and step.time >= failed_at for step in recorded)
        if stopped or (why and not running):
            uncertain[key] = why
    return uncertain


def load_index(
    files: Callable[[str], Iterable[Path]],
    *,
    repair: Path | None,
    tails_only: bool = False,
    verify: bool = False,
) -> Index:
    """Read all journals of a run.

    `files` returns the journal files of a kind. If `repair` is a folder, damaged bytes are moved there and cut out of
    the journals; this needs the run's lease. If it is None, they are skipped. With `tails_only`, only unfinished last
    lines are cut off, so that no line moves. With `verify`, a line has to be a whole record, not only in the fields
    that the index uses.
    """
    reader = IndexReader(verify=verify)
    reader.read(files, durable=repair is not None)
    index = reader.take_steps()
    if repair is not None and cut_damage(index, repair, tails_only=tails_only):
        damage = index.damage
        index = load_index(files, repair=repair, verify=verify)
        index.damage = [*damage, *index.damage]
    return index


class Extent(NamedTuple):
    """How far a journal was read."""

    last: int
    """where the last line begins"""
    end: int


class AmbiguousOrderError(Exception):
    """Which line counts depends on lines that were read earlier, in another order than that of the files."""


class IndexReader:
    """Reads journals into an index, from their beginning or behind what the index already holds."""

    def __init__(self, index: Index | None = None, *, verify: bool = False) -> None:
        self.index = Index() if index is None else index
        self._verify = verify
        """decode whole records, to see whether they can be"""
        self.extents: dict[Path, Extent] = {}
        """how far each journal was read"""
        self.steps: list[Entry] = []
        """calls of conversations that may need them"""
        self.new_bytes = 0
        self.replaced = False
        """a line stands for another one with the same key"""

    def read(self, files: Callable[[str], Iterable[Path]], *, durable: bool) -> None:
        """Read the journals, except that `take_steps` has to be called for the calls.

        `durable`: read from the medium, not from cached pages. Raises AmbiguousOrderError where the journals have to be
        read from their beginning.
        """
        index, resumed = self.index, bool(self.extents)
        has_steps = any(path.exists() for path in files("steps"))
        for kind in KINDS:
            paths = [path for path in files(kind.name) if path.exists()]
            # Of equal keys in one file the last counts; with several files, their order and times decide.
            ambiguous = resumed and (len(paths) > 1 or (kind.name == "outputs" and has_steps))
            if kind.name == "steps":
                self.steps = [step for step in self.steps if index.needs_step(step.head.key)]
            for path in paths:
                before = self.extents.get(path, Extent(0, 0))
                for entry in self._entries(path, kind, before, durable=durable):  # those that `add` left
                    if not kind.take(index, entry):
                        self.replaced = True
                        if ambiguous:
                            raise AmbiguousOrderError
                self.new_bytes += self.extents.get(path, before).end - before.end

    def _entries(self, path: Path, kind: Kind, read: Extent, *, durable: bool) -> Iterator[Entry]:
        """Take the sound lines of a journal behind those that were read; yield those that need a closer look.

        Calls are kept for later.
        """
        if durable:
            settle(path)
        decode, last, end = kind.decode_in(path), *read
        add = kind.adder(self.index, path)
        places = StepPlaces(path) if durable and kind.name == "steps" else None  # whoever holds the lease may note them
        with suppress(FileNotFoundError):
            size = journal_size(path)  # before reading: another process may finish its last line meanwhile
            for block in read_blocks(path, end, size):
                all_sound = block.all_sound()
                if places is not None:
                    places.add(block.offset + block.starts[0], block.data[block.starts[0] : block.ends[-1] + 1])
                for start, data in zip(block.starts, block.lines(), strict=True):
                    offset = block.offset + start
                    if all_sound or is_sound(data):
                        try:
                            if self._verify:
                                _decoder(kind.record).decode(data)
                            head = decode(data)
                        except UNREADABLE:
                            pass  # sound, but not a record of Holdfast
                        else:
                            if head is None or (add is not None and add(offset, len(data), head)):
                                continue
                            entry = Entry(LineRef(path, offset, len(data)), head)
                            if kind.take is not _take_step:
                                yield entry
                            elif self.index.needs_step(head.key):
                                self.steps.append(entry)
                            continue
                    self.index.damage.append(Damage(path, offset, len(data) + 1, torn=False))
                last, end = block.offset + block.starts[-1], block.offset + block.ends[-1] + 1
            if end < size:
                self.index.damage.append(Damage(path, end, size - end, torn=True))
        if end > read.end:
            self.extents[path] = Extent(last, end)

    def take_steps(self) -> Index:
        """Add the calls to the index, which is complete then."""
        for step in self.steps:
            _take_step(self.index, step)
        return self.index


class Entry(NamedTuple):
    """A sound line of a journal: its place, and the fields that the index uses."""

    line: LineRef
    head: Any


class Kind(NamedTuple):
    """A kind of journal."""

    name: str
    head: type[OutputHead | GradeHead | ErrorHead | StepHead]
    """the fields of its lines that the index uses"""
    record: type[Output | Grade | ErrorRecord | Step]
    """its lines"""
    take: Callable[[Index, Entry], bool]
    """adds a line to an index; returns False if the index had an output or verdict with its key"""
    adder: Callable[[Index, Path], Callable[[int, int, Any], bool] | None] = lambda _, __: None
    """makes what adds most lines of a file, by offset, length and head, in less time; False: `take` has to"""

    def decode_in(self, path: Path) -> Callable[[bytes], Any]:
        """Return the decoder of lines in a file; it returns None for an output that is not of this run."""
        decode_head: Callable[[bytes], Any] = _decoder(self.head).decode
        lender = lender_of(path)
        if lender is None:
            return decode_head
        unwanted = unwanted_keys(path) if self.name == "outputs" else frozenset()

        def decode(line: bytes) -> Any:
            head = decode_head(line)
            head.source = head.source or lender
            return None if unwanted and head.key in unwanted else head

        return decode


def _take_output(index: Index, entry: Entry) -> bool:
    head: OutputHead = entry.head
    is_new = keep_output(index, entry)
    if head.source is None:  # a copied output was paid for in the other run
        index.spent.add(head.usage)
        index.spent.add_time(head.timing.started, head.timing.started + head.timing.seconds)
    return is_new


def _output_adder(index: Index, path: Path) -> Callable[[int, int, OutputHead], bool]:
    add_plain, file, spent = index.outputs.add_plain, index.outputs.number_of(path), index.spent

    def add(offset: int, length: int, head: OutputHead) -> bool:
        usage, seconds, started = head.usage, head.timing.seconds, head.timing.started
        if head.marks or head.stopped_by is not None:
            return False
        facts = head.digest, usage, seconds, started, head.row, KIND_CODES[head.kind]
        if not add_plain(head.key, file, offset, length, *facts):
            return False
        if head.source is None:
            spent.add(usage)
            spent.add_time(started, started + seconds)
        return True

    return add


def keep_output(index: Index, entry: Entry) -> bool:
    """Add an output; return True if it is the first of its trial.

    Of several outputs of a trial the one that was begun last counts; within a file, the last one.

    So an output that was repeated on purpose counts, in whichever file it is. An output that a suspended worker writes
    after it wakes up was begun before that of the worker that took over, and is ignored.
    """
    ref: OutputRef = entry.head.ref(entry.line)
    earlier = index.outputs.add(entry.head.key, ref)
    if earlier is not None and (earlier.line.path == ref.line.path or _order(earlier) < _order(ref)):
        index.outputs[entry.head.key] = ref
    return earlier is None


def _order(ref: OutputRef) -> tuple[bool, float, str]:
    """Return a sort key: what was done in this run comes after what it shares, whatever the clocks said."""
    return lender_of(ref.line.path) is None, ref.started, str(ref.line.path)


def _take_step(index: Index, entry: Entry) -> bool:
    head: StepHead = entry.head
    keep_step(index, entry)
    if head.key not in index.outputs and head.source is None:
        index.spent.add(head.usage)
        index.spent.add_time(head.time - head.seconds, head.time)
    return True


def keep_step(index: Index, entry: Entry) -> None:
    """Add a call, unless its conversation has an output that no checkpoint cut short."""
    if index.needs_step(entry.head.key):
        index.steps.setdefault(entry.head.key, []).append(entry.line)
        if entry.head.kind == "intent":
            index.intents.add(entry.head.key)


def _take_grade(index: Index, entry: Entry) -> bool:
    head: GradeHead = entry.head
    is_new = keep_verdict(index, head)
    if head.source is None:
        index.spent.add_grade(head.usage, head.time, head.seconds)
    return is_new


def _grade_adder(index: Index, _: Path) -> Callable[[int, int, GradeHead], bool]:
    add_plain, spent = index.verdicts.add_plain, index.spent

    def add(_: int, __: int, head: GradeHead) -> bool:
        if head.counts is not None or head.together is not None:
            return False
        if not add_plain(head.grade_key, head.status, head.score, head.usage, head.time):
            return False
        if head.source is None:
            spent.add_grade(head.usage, head.time, head.seconds)
        return True

    return add


def keep_verdict(index: Index, head: GradeHead) -> bool:
    """Add a verdict; return True if it is the first. Of several the latest counts, in whichever file it is."""
    verdict = head.verdict
    earlier = index.verdicts.add(head.grade_key, verdict)
    if earlier is not None and earlier.time <= verdict.time:
        index.verdicts[head.grade_key] = verdict
    return earlier is None


def _take_error(index: Index, entry: Entry) -> bool:
    head: ErrorHead = entry.head
    index.spent.add_time(head.time - head.seconds, head.time)
    if head.usage is not None:
        index.spent.add(head.usage)
    if head.where == "target":
        index.attempts[head.key] = index.attempts.get(head.key, 0) + 1
        index.note_failure(head.key, head.kind, head.time)
    else:
        pair = head.key, head.where
        index.grader_attempts[pair] = index.grader_attempts.get(pair, 0) + 1
    return True


KINDS: Final = (  # calls last: outputs tell which of them are needed
    Kind("outputs", OutputHead, Output, _take_output, _output_adder),
    Kind("grades", GradeHead, Grade, _take_grade, _grade_adder),
    Kind("errors", ErrorHead, ErrorRecord, _take_error),
    Kind("steps", StepHead, Step, _take_step),
)
