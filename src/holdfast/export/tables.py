"""One row per trial, as CSV or Parquet."""

from __future__ import annotations

import csv
import io
from itertools import islice
from typing import TYPE_CHECKING, Any

from holdfast.errors import UsageError
from holdfast.store.files import replacing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.export.reading import RunReader


def rows(reader: RunReader) -> Iterator[dict[str, Any]]:
    """A row per trial: what it said and used, and each grader's verdict."""
    graders = reader.graders
    for trial in reader.trials():
        output, usage = trial.output, trial.output.usage
        row: dict[str, Any] = {
            "sample": output.sample,
            "trial": output.trial,
            "status": trial.status,
            "score": trial.score,
            "output": output.output,
            "stop": output.stop,
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
            "requests": usage.requests,
            "cost": usage.cost,
            "seconds": output.timing.seconds,
        }
        found = {grade.grader: grade for grade in trial.grades}
        for name in graders:
            grade = found.get(name)
            row[f"{name}.status"] = grade.status if grade else None
            row[f"{name}.score"] = grade.score if grade else None
            row[f"{name}.feedback"] = grade.feedback if grade else None
        yield row


def write_csv(reader: RunReader, folder: Path) -> list[Path]:
    """`trials.csv`."""
    path = folder / "trials.csv"
    with replacing(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        writer = None
        for row in rows(reader):
            if writer is None:
                writer = csv.DictWriter(text, list(row))
                writer.writeheader()
            writer.writerow(row)
        text.detach()
    return [path]


def write_parquet(reader: RunReader, folder: Path) -> list[Path]:
    """`trials.parquet`."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise UsageError("writing Parquet needs pyarrow", remedy="pip install pyarrow") from None
    path = folder / "trials.parquet"
    kinds = {"trial": arrow.int64(), "input_tokens": arrow.int64(), "output_tokens": arrow.int64()}
    kinds |= {"requests": arrow.int64(), "score": arrow.float64(), "cost": arrow.float64(), "seconds": arrow.float64()}
    with replacing(path) as file:
        writer = None
        waiting = rows(reader)
        while batch := list(islice(waiting, 1024)):
            if writer is None:
                fields = [
                    (name, arrow.float64() if name.endswith(".score") else kinds.get(name, arrow.string()))
                    for name in batch[0]
                ]
                schema = arrow.schema(fields)
                writer = parquet.ParquetWriter(file, schema)
            writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
        if writer is None:
            raise UsageError(f"{reader.rundir.path} has no outputs to export")
        writer.close()
    return [path]
