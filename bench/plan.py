"""Measure planning and listing: print a table, and exit with 1 if a promise is missed.

    python bench/plan.py [--quick]

Plans (`--dry-run`) an eval of 100,000 trials beside 10 earlier runs: some lend outputs and grades, some have another
prompt and lend nothing. Lists 1,000 runs (`cache ls`), most of them finished, some not, some damaged. Both are whole
commands, timed from start to end. The runs are made by the store's own code, so they are what `eval` leaves behind.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.plan.identity import RunIdentity, identify, new_manifest
from holdfast.spec.load import load_eval, parse_override
from holdfast.store.heads import Moment
from holdfast.store.records import Grade, Output, Timing, Usage, to_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.data.dataset import Sample

HOLDFAST = [sys.executable, "-m", "holdfast"]
DIGEST = "sha256:" + "d" * 32
ANSWER = "The answer is 42, as far as anyone can tell. " * 8
PLAN_SECONDS, LIST_SECONDS = 5.0, 1.0


class Figure(NamedTuple):
    """One line of the table."""

    what: str
    seconds: float
    maximum: float | None = None
    note: str = ""

    @property
    def ok(self) -> bool:
        """Report whether the promise is kept; a figure without a promise is always fine."""
        return self.maximum is None or self.seconds <= self.maximum


def write_eval(folder: Path, rows: int) -> Path:
    """An eval whose target is never asked."""
    with (folder / "data.jsonl").open("w") as file:
        for number in range(rows):
            file.write(json.dumps({"id": f"s{number}", "question": f"What is {number}?", "expected": "42"}) + "\n")
    spec = {
        "name": "bench",
        "dataset": {"path": "data.jsonl"},
        "target": {"model": "nobody", "base_url": "http://127.0.0.1:1/v1"},
        "prompt": "{{ question }}",
        "graders": [{"type": "number"}],
    }
    path = folder / "bench.yaml"
    path.write_text(json.dumps(spec))
    return path


def make_run(eval_file: Path, *overrides: str) -> Path:
    """A run in which everything is done, as the command would have left it."""
    identity = identify(load_eval(eval_file, [parse_override(text) for text in overrides]))
    rundir = identity.directory(eval_file.parent / "runs")
    rundir.write_manifest(new_manifest(identity))
    with (rundir.path / "outputs.jsonl").open("wb") as outputs, (rundir.path / "grades.jsonl").open("wb") as grades:
        for sample in identity.dataset:
            for trial in range(1, identity.spec.trials + 1):
                write_trial(identity, sample, trial, outputs.write, grades.write)
    metrics = {"score": 1.0, "coverage": 1.0, "outputs": identity.survey.count * identity.spec.trials, "metrics": {}}
    rundir.metrics.write_text(json.dumps(metrics))
    return rundir.path


def write_trial(
    identity: RunIdentity,
    sample: Sample,
    trial: int,
    output: Callable[[bytes], Any],
    grade: Callable[[bytes], Any],
) -> None:
    """An output and its grade."""
    usage = Usage(12, 90, 1, 0.0001)
    messages = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": ANSWER}]
    key = identity.work.key(sample.asked, trial)
    timing, row = Timing(0.0, 0.1), sample.row
    output(
        to_line(Output(key, sample.id, trial, 1, messages, ANSWER, 1, "stop", "whole", usage, timing, DIGEST, row=row))
    )
    slot = identity.work.slots[0]
    by, judged = slot.fingerprint, slot.judged(Moment(DIGEST, None, 0.1), row)
    verdict = "passed", 1.0, 1.0, "", None, 0.0
    grade(to_line(Grade(key, sample.id, trial, "number", "number", by, None, judged, *verdict)))


def spend(repeats: int, *arguments: str, cwd: Path) -> tuple[float, str]:
    """The median of some runs of the command, and what it said."""
    took, stdout = [], ""
    for _ in range(repeats):
        began = time.monotonic()
        stdout = subprocess.run([*HOLDFAST, *arguments], cwd=cwd, check=True, capture_output=True, text=True).stdout
        took.append(time.monotonic() - began)
    return median(took), stdout


def planning(folder: Path, rows: int, repeats: int) -> list[Figure]:
    """`--dry-run` of two trials per row, with most of it done in ten other runs."""
    eval_file = write_eval(folder, rows)
    make_run(eval_file, "trials=1")
    for number in range(4):
        make_run(eval_file, "trials=2", f"dataset.offset={number}", f"dataset.limit={rows // 2}")
    for number in range(5):
        make_run(eval_file, f"prompt=Another {number} {{{{ question }}}}")
    size = sum(path.stat().st_size for path in folder.rglob("*.jsonl"))
    seconds, stdout = spend(repeats, "eval", "bench.yaml", "trials=2", "--dry-run", "--json", cwd=folder)
    plan = json.loads(stdout)
    if not plan["reused"] >= rows * 3 // 2 or not plan["to_run"] or plan["total"] != 2 * rows:
        raise SystemExit(f"not the plan that was meant: {stdout}")
    note = f"{plan['reused']:,} reused, {plan['to_run']:,} to run; {size / 1e6:,.0f} MB of earlier runs"
    return [Figure(f"plan {2 * rows:,} trials, 10 earlier runs", seconds, PLAN_SECONDS, note)]


def listing(folder: Path, runs: int, repeats: int) -> list[Figure]:
    """`cache ls` over many copies of a small run."""
    run = make_run(write_eval(folder, 20))
    manifest = json.loads((run / "manifest.json").read_text())
    for number in range(1, runs):
        name = f"{number:08x}"
        copy = run.parent.parent / f"bench{number % 7}" / f"nobody-{name}"
        shutil.copytree(run, copy)
        (copy / "manifest.json").write_text(json.dumps({**manifest, "id": name}) if number % 50 else "{")
        if number % 10 == 0:
            (copy / "metrics.json").unlink()
    figures = []
    for options in ([], ["--json"], ["--model", "NOBODY", "--status", "finished"]):
        seconds, stdout = spend(repeats, "cache", "ls", *options, cwd=folder)
        listed = len(json.loads(stdout)) if options == ["--json"] else stdout.count("\n") - 1
        if listed != runs and not options[1:]:
            raise SystemExit(f"{listed} runs listed of {runs}")
        what = " ".join(["cache ls", *options])
        figures.append(Figure(f"{what}, {runs:,} runs", seconds, LIST_SECONDS, f"{listed:,} listed"))
    return figures


def table(figures: list[Figure]) -> str:
    """The figures as lines of text."""
    rows = [("what", "measured", "promised", "", "")]
    for figure in figures:
        limit = "" if figure.maximum is None else f"≤ {figure.maximum:g} s"
        verdict = "" if figure.maximum is None else "ok" if figure.ok else "NOT"
        rows.append((figure.what, f"{figure.seconds:.2f} s", limit, verdict, figure.note))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    )


def main() -> int:
    """Measure and say it."""
    parser = argparse.ArgumentParser(description="Measure how long planning and listing take.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the size, once")
    quick = parser.parse_args().quick
    rows, runs, repeats = (5_000, 100, 1) if quick else (50_000, 1_000, 3)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        for part in ("start", "plan", "list"):
            (Path(name) / part).mkdir()
        seconds, _ = spend(repeats, "--version", cwd=Path(name) / "start")
        figures.append(Figure("for scale: holdfast --version", seconds))
        figures += planning(Path(name) / "plan", rows, repeats)
        figures += listing(Path(name) / "list", runs, repeats)
    print(table(figures))
    return 0 if all(figure.ok for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
