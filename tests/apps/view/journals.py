"""Run directories with any journals: what processes write, and what crashes and disks leave behind."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from hypothesis import strategies as st
from msgspec import UNSET

from holdfast.canonical import digest
from holdfast.plan.identity import identify, new_manifest
from holdfast.report.metrics import write_report
from holdfast.spec.load import load_eval
from holdfast.spec.schema import SCHEMA_VERSION
from holdfast.store.heads import Moment
from holdfast.store.records import ErrorRecord, Grade, Mark, Output, Timing, Usage, to_line

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.plan.identity import RunIdentity
    from holdfast.store.records import GradeStatus, Record
    from holdfast.store.rundir import RunDir

ROWS: list[dict[str, Any]] = [
    {"id": "s0", "question": "zero", "expected": "0", "level": "easy"},
    {"id": "s1", "question": 'ÉTÉ "one"', "expected": ["1", "one"], "level": "hard"},
    {"id": "s 2", "question": "two\nlines", "expected": "2", "level": "hard", "tag": {"kind": "odd"}},
]
GONE = {"id": "gone", "question": "gone", "expected": "9", "level": "hard"}
"""a row that outputs are of and the dataset does not have"""
TRIALS = 2
GRADERS = ("checkpoint@1/polite", "correct", "strict")
WRITERS = ("", "workers/a", "workers/a+b")
TEXTS = ("Yes, of course.", 'he said "no"\n', "ÜBER \\n alles", "content")


class WriteOutput(NamedTuple):
    """An output of a trial is appended."""

    writer: str
    sample: int
    trial: int
    text: int
    stopped: bool
    """by the checkpoint after the first turn"""
    fits: bool
    """the checkpoint that stopped it is the present one"""
    started: int
    attempt: int
    known: bool
    """the usage is"""


class WriteGrade(NamedTuple):
    """A verdict on an output is appended."""

    writer: str
    output: WriteOutput
    grader: int
    status: GradeStatus
    score: float | None
    time: int | None
    valid: bool
    """the key belongs to the current grader"""
    name: str
    """at that time"""


class WriteError(NamedTuple):
    """A failed attempt is appended."""

    writer: str
    sample: int
    trial: int
    where: str
    kind: str


class WriteBytes(NamedTuple):
    """A damaged line, or without a newline one that is not finished."""

    writer: str
    kind: str
    data: bytes


Event = WriteOutput | WriteGrade | WriteError | WriteBytes

_writers = st.sampled_from(WRITERS)
_samples = st.integers(0, len(ROWS))
_trials = st.integers(1, TRIALS)
outputs = st.builds(
    WriteOutput,
    _writers,
    _samples,
    _trials,
    st.integers(0, len(TEXTS) - 1),
    st.booleans(),
    st.booleans() | st.just(True),
    st.integers(0, 3),
    st.integers(1, 3),
    st.booleans(),
)
_verdicts = st.sampled_from(["passed", "failed", "error", "skipped"])


def _grades(output: WriteOutput) -> st.SearchStrategy[WriteGrade]:
    return st.builds(
        WriteGrade,
        _writers,
        st.just(output),
        st.integers(0, len(GRADERS) - 1),
        _verdicts,
        st.none() | st.sampled_from([0.0, 0.5, 0.7, 1.0]),
        st.none() | st.integers(0, 3),
        st.booleans() | st.just(True),
        st.sampled_from(["polite", "renamed"]),
    )


def _graded(output: WriteOutput) -> st.SearchStrategy[list[Event]]:
    return st.lists(_grades(output), max_size=4).map(lambda grades: [output, *grades])


_places = st.sampled_from(["target", "strict"])
errors = st.builds(WriteError, _writers, _samples, _trials, _places, st.sampled_from(["timeout", "agent"]))
noise = st.builds(
    WriteBytes,
    _writers,
    st.sampled_from(["outputs", "grades", "errors"]),
    st.sampled_from([b"garbage\n", b'{"key":"sha256:torn', b'{"key":"x","sum":"0"}\n', b"\n"]),
)
events: st.SearchStrategy[list[Event]] = st.lists(
    outputs.flatmap(_graded) | st.lists(errors, min_size=1, max_size=2) | noise.map(lambda each: [each]), max_size=12
).map(lambda groups: [event for group in groups for event in group])


def whole_trial(sample: int, trial: int, text: int = 0, score: float = 1.0) -> list[Event]:
    """Return what a trial without trouble writes."""
    output = WriteOutput("", sample, trial, text, False, True, 0, 1, True)
    return [output, *(WriteGrade("", output, n, "passed", score, 1, True, "polite") for n in range(len(GRADERS)))]


@dataclass
class JournaledRun:
    """A run directory without a process."""

    folder: Path
    identity: RunIdentity = field(init=False)
    rundir: RunDir = field(init=False)

    def __post_init__(self) -> None:
        with (self.folder / "data.jsonl").open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in ROWS)
        self.identity = identify(load_eval(self.write_eval()))
        self.rundir = self.identity.directory(self.folder / "runs")
        self.rundir.write_manifest(new_manifest(self.identity))

    def write_eval(self, threshold: float = 0.6) -> Path:
        """Write the eval; a threshold is in no key."""
        spec = {
            "schemaVersion": SCHEMA_VERSION,
            "name": "e",
            "dataset": {"path": "data.jsonl"},
            "target": {"model": "m", "base_url": "http://127.0.0.1:9/v1"},
            "prompt": "{{ question }}",
            "follow_ups": ["and now?"],
            "trials": TRIALS,
            "by": ["level"],
            "checkpoints": [
                {
                    "after_turn": 1,
                    "on_failure": "stop",
                    "graders": [{"type": "text", "name": "polite", "contains": ["please"], "threshold": 0.6}],
                }
            ],
            "graders": [
                {"type": "exact", "name": "correct", "threshold": threshold},
                {"type": "text", "name": "strict", "contains": ["yes"], "where": 'level == "hard"', "weight": 2},
            ],
        }
        path = self.folder / "e.yaml"
        path.write_text(json.dumps(spec))
        return path

    def append(self, event: Event) -> None:
        """Append what a writer writes."""
        if isinstance(event, WriteBytes):
            self._append(event.writer, event.kind, event.data)
        elif isinstance(event, WriteOutput):
            self._append(event.writer, "outputs", to_line(self._output(event)))
        elif isinstance(event, WriteGrade):
            self._append(event.writer, "grades", to_line(self._grade(event)))
        else:
            self._append(event.writer, "errors", to_line(self._error(event)))

    def _append(self, writer: str, kind: str, data: bytes) -> None:
        path = self.rundir.path / writer / f"{kind}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)

    def report(self, threshold: float = 0.6) -> None:
        """Finish the run with what there is, as `--accept-errors` does."""
        identity = identify(load_eval(self.write_eval(threshold)))
        assert identity.id == self.identity.id
        index = self.rundir.load(repair=False)
        identity.work.drop_unfit(index)
        write_report(identity, self.rundir, index)

    def _key(self, sample: int, trial: int) -> str:
        raw = digest(GONE) if sample == len(ROWS) else "sha256:" + self.identity.survey.asked_at(sample).hex()
        return self.identity.work.key(raw, trial)

    def _row(self, sample: int) -> str:
        return digest(GONE)[7:23] if sample == len(ROWS) else self.identity.survey.row_text(sample)

    def _output(self, event: WriteOutput) -> Output:
        text = TEXTS[event.text]
        question = [*ROWS, GONE][event.sample]["question"]
        answer = {"role": "assistant", "content": text}
        first = [{"role": "user", "content": question}, answer]
        messages = first if event.stopped else [*first, {"role": "user", "content": "and now?"}, answer]
        usage = Usage(10, 5 + event.text, 1, 0.5) if event.known else Usage(None, 3, 1, None)
        marks = [Mark(2, digest(first), usage=usage, seconds=0.5)]
        if not event.stopped:
            marks.append(Mark(4, digest(messages), usage=usage, seconds=1.0))
        output = Output(
            key=self._key(event.sample, event.trial),
            sample=[*ROWS, GONE][event.sample]["id"],
            trial=event.trial,
            attempt=event.attempt,
            messages=messages,
            output=text,
            turns=len(marks),
            stop="checkpoint@1" if event.stopped else "stop",
            answer=("whole", "cut", "empty")[event.text % 3],
            usage=usage,
            timing=Timing(100.0 + event.started, 1.0 + event.started, 0.1 if event.known else None),
            digest=digest(messages),
            marks=marks,
            row=self._row(event.sample) if self.identity.survey.asked else UNSET,
        )
        if event.stopped:
            stop = self.identity.work.stop_digest(1) if event.fits else digest("changed")
            return Output(**{name: getattr(output, name) for name in output.__struct_fields__} | {"stopped_by": stop})
        return output

    def _grade(self, event: WriteGrade) -> Grade:
        output, slot = self._output(event.output), self.identity.work.slots[event.grader]
        first = output.marks[0]
        moment = Moment(first.digest if slot.turn == 1 else output.digest, None, 1.0)
        if not event.valid:
            slot = slot._replace(fingerprint=digest("another grader"))
        score = event.score if event.status in ("passed", "failed") else None
        grade = Grade(
            key=output.key,
            sample=output.sample,
            trial=output.trial,
            grader=event.name,
            type="text",
            by=slot.fingerprint,
            turn=slot.turn,
            judged=slot.judged(moment, self._row(event.output.sample)),
            status=event.status,
            score=score,
            weight=1.0,
            feedback="because",
            details=None,
            seconds=0.0,
        )
        if event.time is None:
            return grade
        return Grade(**{name: getattr(grade, name) for name in grade.__struct_fields__} | {"time": float(event.time)})

    def _error(self, event: WriteError) -> Record:
        sample = [*ROWS, GONE][event.sample]["id"]
        return ErrorRecord(
            key=self._key(event.sample, event.trial),
            sample=sample,
            trial=event.trial,
            attempt=1,
            where=event.where,
            kind=event.kind,
            message=f"{sample} failed",
            status=None,
            time=1.0,
            seconds=0.0,
            final=False,
        )
