"""Trials for other tools: transcripts as JSON lines, tables as CSV or Parquet, and names that other tools can hold."""

from __future__ import annotations

import csv
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

import msgspec

from holdfast.report.run_view import Pending
from holdfast.store.files import make_directory, replacing, slug
from holdfast.store.records import SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from holdfast.report.run_view import GradedTrial, RunView

_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "\n")
"""characters that begin a formula, or that spreadsheets skip before one"""
_NUMBER: Final = r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?"
_COLUMNS = (
    *("sample", "trial", "status", "score", "prompt", "output", "error", "answer", "stop"),
    *("input_tokens", "output_tokens", "requests", "cost", "seconds"),
)


def columns(view: RunView) -> list[str]:
    """Return the names of all columns: the common ones, each grader's, and `row.FIELD` for every field of a row."""
    verdicts = [f"{name}.{part}" for name in _names(view).values() for part in ("status", "score", "feedback")]
    return [*_COLUMNS, *verdicts, *(f"row.{name}" for name in view.field_names())]


def rows(view: RunView, *, typed: bool = False) -> Iterator[dict[str, Any]]:
    """Yield a row per trial, with or without an output: prompt, answer, usage, and each grader's verdict.

    All rows have the same columns in the same order. With `typed`, numbers of the dataset's rows stay numbers.
    """
    cell = _typed_cell if typed else _cell
    empty: dict[str, Any] = dict.fromkeys(columns(view))
    names = _names(view)
    for trial in view.everything():
        row = empty | {f"row.{name}": cell(value) for name, value in trial.fields.items()}
        if isinstance(trial, Pending):
            yield {**row, "sample": trial.sample, "trial": trial.trial, "status": "error", "error": trial.error}
            continue
        output, usage = trial.output, trial.output.usage
        row |= {
            "sample": output.sample,
            "trial": output.trial,
            "status": trial.status,
            "score": trial.score,
            "prompt": _cell(output.prompt),
            "output": output.output,
            "answer": output.answer,
            "stop": output.stop,
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
            "requests": usage.requests,
            "cost": usage.cost,
            "seconds": output.timing.seconds,
        }
        for grade in trial.grades:
            row[f"{names[grade.grader]}.status"] = grade.status
            row[f"{names[grade.grader]}.score"] = grade.score
            row[f"{names[grade.grader]}.feedback"] = grade.feedback
        yield row


def _names(view: RunView) -> dict[str, str]:
    """Return the column names of the graders: a grader called `row` must not hide the row's fields."""
    return unique_names(view.graders, taken=("row",))


def _cell(value: Any) -> Any:
    """Return a value of a row as one cell: texts as they are, the rest as JSON."""
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()


def _typed_cell(value: Any) -> Any:
    """Return a value of a row as one cell of a data frame: lists and mappings become JSON."""
    return value if isinstance(value, int | float) else _cell(value)


def write_rows(file: TextIO, rows: Iterable[Iterable[Any]]) -> None:
    """Write rows as CSV, in which no text is a formula to a spreadsheet.

    A spreadsheet computes cells that begin with `=`, `+`, `-` or `@`, and such a formula can send the sheet elsewhere
    or start a program. They get an apostrophe in front, which marks a text to spreadsheets. Numbers stay numbers.
    """
    csv.writer(file).writerows([_not_a_formula(cell) for cell in row] for row in rows)


def _not_a_formula(cell: Any) -> Any:
    if not isinstance(cell, str) or not cell.startswith(_FORMULA) or re.fullmatch(_NUMBER, cell):
        return cell
    return f"'{cell}"


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
    """Return a trial as a line of the transcripts."""
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


def unique_names(names: Iterable[str], form: Callable[[str], str] = str, taken: Iterable[str] = ()) -> dict[str, str]:
    """Map names to their forms; a form that is taken gets a number: `workflow-2`.

    A name that already has its form keeps it, and others give way. Names that differ only in case count as equal, as on
    macOS's file systems.
    """
    names = list(names)
    used = {name.casefold() for name in taken}
    chosen: dict[str, str] = {}
    for name in sorted(names, key=lambda name: form(name) != name):
        candidate, number = form(name), 1
        while candidate.casefold() in used:
            number += 1
            candidate = f"{form(name)}-{number}"
        used.add(candidate.casefold())
        chosen[name] = candidate
    return {name: chosen[name] for name in names}


def write_folder(view: RunView, folder: Path) -> list[Path]:
    """Write results, with the metrics and the eval, and transcripts below a folder of the user's.

    They are `<model>/<dataset>/results_<time>_<id>.json` and, next to it, `samples_<time>_<id>.jsonl`.
    """
    manifest, metrics = view.manifest, view.metrics
    sources = manifest.dataset.source or ["samples"]
    place = folder / slug(manifest.target) / slug(Path(sources[0]).name.partition(".")[0] or manifest.name)
    make_directory(place)
    stamp = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}_{manifest.id}"
    results, samples = place / f"results_{stamp}.json", place / f"samples_{stamp}.jsonl"
    write_samples(view.trials(), samples)
    body = {
        "schemaVersion": SCHEMA_VERSION,
        "run": str(view.rundir.path),
        "finished": metrics is not None,
        "metrics": None if metrics is None else metrics.to_dict(),
        "eval": manifest.eval,
    }
    with replacing(results) as file:
        file.write(msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n")
    return [results, samples]
