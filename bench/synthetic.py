"""A large finished run, written without asking any model: real keys, real lines, a real report.

    python bench/synthetic.py FOLDER [--trials 1000000] [--missing 10]

Two graders, one of them a judge with feedback; one trial for each row; replies of about 600 bytes, lines in the order
in which 64 requests in flight would have finished.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.canonical import digest
from holdfast.plan.identity import identify, new_manifest
from holdfast.report.metrics import write_report
from holdfast.spec.load import load_eval
from holdfast.store.heads import Moment
from holdfast.store.records import Grade, Output, Timing, Usage, classify_answer, to_line

if TYPE_CHECKING:
    from holdfast.plan.plan import Slot
    from holdfast.store.rundir import RunDir

WORDS = Path(__file__).read_text().split()
"""what replies are made of"""
LEVELS = ("easy", "medium", "hard")
RARE = " ".join(("needle", "stack"))
"""in one reply of 100,000"""


def write_run(
    folder: Path,
    trials: int,
    *,
    report: bool = True,
    judge: bool = True,
    missing: int = 0,
    base_url: str = "http://127.0.0.1:9/v1",
) -> RunDir:
    """Write an eval, its dataset and a run of it; without `report`, one that is not finished.

    Without `judge` there is one grader. The outputs and grades of the last rows are `missing`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "data.jsonl").open("w") as file:
        for number in range(trials):
            row = {"id": f"s{number}", "question": f"question {number}", "expected": "4", "level": LEVELS[number % 3]}
            file.write(json.dumps(row) + "\n")
    spec = {
        "schemaVersion": "1.0",
        "name": "bench",
        "dataset": {"path": "data.jsonl"},
        "target": {"model": "none", "base_url": base_url},
        "prompt": "{{ question }}",
        "graders": [
            {"type": "exact", "name": "correct"},
            {"type": "prompt", "name": "judge", "model": "none", "prompt": "Rate: {{ output }}", "threshold": 0.5},
        ][: 2 if judge else 1],
        "by": ["level"],
    }
    (folder / "bench.yaml").write_text(json.dumps(spec))
    identity = identify(load_eval(folder / "bench.yaml"))
    rundir = identity.directory(folder / "runs")
    rundir.write_manifest(new_manifest(identity))
    _write_journals(identity, rundir, trials - missing)
    if report:
        write_report(identity, rundir, rundir.load(repair=True))
    return rundir


def _write_journals(identity, rundir, count: int) -> None:
    rng = random.Random(12)
    slots: tuple[Slot, ...] = identity.work.slots
    order = list(range(count))
    order.sort(key=lambda number: number + rng.random() * 64)
    outputs = (rundir.path / "outputs.jsonl").open("wb", buffering=1 << 20)
    grades = (rundir.path / "grades.jsonl").open("wb", buffering=1 << 20)
    with outputs, grades:
        for place, number in enumerate(order):
            output = _output(identity, number, place, rng)
            outputs.write(to_line(output))
            for name, slot in zip(("correct", "judge"), slots, strict=False):
                grades.write(to_line(_grade(output, name, slot, rng)))


def _output(identity, number: int, place: int, rng: random.Random) -> Output:
    key = identity.work.key("sha256:" + identity.survey.asked_at(number).hex(), 1)
    start = rng.randrange(len(WORDS))
    words = (WORDS * 2)[start : start + rng.randrange(25, 110)]
    text = " ".join(words) + (f" {RARE}" if number % 100_000 == 77_777 else "")
    messages = [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": text}]
    seconds = round(rng.expovariate(0.5), 4)
    stop = "stop" if rng.random() < 0.95 else "length"
    return Output(
        key=key,
        sample=f"s{number}",
        trial=1,
        attempt=1 if rng.random() < 0.98 else 2,
        messages=messages,
        output=text,
        turns=1,
        stop=stop,
        answer=classify_answer(stop, empty=False),
        usage=Usage(50, len(words), 1, round(0.00001 * len(words), 7)),
        timing=Timing(1.8e9 + place / 50, seconds, round(seconds / 4, 4)),
        digest=digest(messages),
        row=identity.survey.row_text(number),
    )


def _grade(output: Output, name: str, slot: Slot, rng: random.Random) -> Grade:
    score = float(rng.random() < 0.6) if name == "correct" else round(rng.random(), 2)
    return Grade(
        key=output.key,
        sample=output.sample,
        trial=1,
        grader=name,
        type="exact" if name == "correct" else "prompt",
        by=slot.fingerprint,
        turn=None,
        judged=slot.judged(Moment(output.digest, None, output.timing.seconds), output.row),
        status="passed" if score >= 0.5 else "failed",
        score=score,
        weight=1.0,
        feedback="" if name == "correct" else " ".join(WORDS[:20]),
        details=None,
        seconds=0.1,
        usage=None if name == "correct" else Usage(100, 20, 1, 0.001),
        time=output.timing.started + output.timing.seconds,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a large run.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=1_000_000)
    parser.add_argument("--missing", type=int, help="without the judge, the report and the outputs of this many rows")
    arguments = parser.parse_args()
    gc.disable()
    if arguments.missing is None:
        print(write_run(arguments.folder, arguments.trials).path)
    else:
        print(write_run(arguments.folder, arguments.trials, report=False, judge=False, missing=arguments.missing).path)
