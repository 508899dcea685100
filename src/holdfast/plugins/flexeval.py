"""Write flexeval's files: `outputs.jsonl`, one object per trial in the dataset's order, and a flat `metrics.json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.report.tables import unique_names
from holdfast.store.files import make_directory, replacing

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast import GradedTrial, RunView


_FIELDS: Final = ("lm_output", "finish_reason", "extra_info", "references")
"""fields of a row in addition to the graders' scores"""


def write_flexeval(view: RunView, folder: Path) -> list[Path]:
    """Write both files. `metrics.json` marks a finished evaluation: it comes last, and only for finished runs."""
    make_directory(folder)
    written = [folder / "outputs.jsonl"]
    encode = msgspec.json.Encoder().encode
    fields = unique_names(view.graders, taken=_FIELDS)
    with replacing(written[0]) as file:
        for trial in view.trials():
            file.write(encode(_row(trial, fields)) + b"\n")
    metrics = view.metrics
    if metrics is None:
        (folder / "metrics.json").unlink(missing_ok=True)  # of an earlier export, which would now be a lie
        return written
    flat: dict[str, Any] = {"coverage": metrics.coverage}
    for grader, values in metrics.graders.items():
        name = fields[grader]
        flat[name] = values.score
        flat |= {f"{name}-pass@{k}": value for k, value in values.pass_at.items()}
    written.append(folder / "metrics.json")
    with replacing(written[1]) as file:
        file.write(msgspec.json.format(encode(flat), indent=2) + b"\n")
    return written


def _row(trial: GradedTrial, names: dict[str, str]) -> dict[str, Any]:
    """Return one line; `names` are the fields for the graders' scores."""
    output, fields = trial.output, trial.fields
    expected = fields.get("references", fields.get("expected", fields.get("answer")))
    values = expected if isinstance(expected, list) else [] if expected is None else [expected]
    # flexeval's metrics crash on anything but text.
    references = [value if isinstance(value, str) else msgspec.json.encode(value).decode() for value in values]
    row: dict[str, Any] = {
        "lm_output": output.output,
        "finish_reason": output.stop,
        "extra_info": {**trial.fields, "id": output.sample, "trial": output.trial, "messages": output.messages[:-1]},
        "references": references,
    }
    for grade in trial.grades:
        row[names[grade.grader]] = grade.score
    return row
