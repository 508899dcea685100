"""Transcripts as one readable JSONL: a line per trial with its row, its conversation and its verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.store.durable import replacing

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from holdfast.report.run_view import GradedTrial, RunView

_VERDICT = ("grader", "type", "turn", "status", "score", "feedback", "details")


def write_samples(trials: Iterable[GradedTrial], path: Path) -> None:
    """Write transcripts atomically, in the order of the trials."""
    encode = msgspec.json.Encoder().encode
    with replacing(path) as file:
        for trial in trials:
            file.write(encode(as_line(trial)) + b"\n")


def write_transcripts(view: RunView, folder: Path) -> list[Path]:
    """Write `samples.jsonl`."""
    path = folder / "samples.jsonl"
    write_samples(view.trials(), path)
    return [path]


def as_line(trial: GradedTrial) -> dict[str, Any]:
    """Return a trial as one line has it."""
    output = trial.output
    return {
        "sample": output.sample,
        "trial": output.trial,
        "status": trial.status,
        "score": trial.score,
        "fields": trial.fields,
        "messages": output.messages,
        "output": output.output,
        "answer": output.answer,
        "stop": output.stop,
        "usage": output.usage,
        "seconds": output.timing.seconds,
        "grades": [{name: getattr(grade, name) for name in _VERDICT} for grade in trial.grades],
    }
