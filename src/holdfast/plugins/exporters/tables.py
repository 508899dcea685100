"""Tables of trials for spreadsheets and data frames: CSV and Parquet."""

from __future__ import annotations

import io
from itertools import islice
from typing import TYPE_CHECKING

from holdfast import UsageError
from holdfast.report.tables import columns, rows, write_rows
from holdfast.store.files import replacing

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast import RunView


def write_csv(view: RunView, folder: Path) -> list[Path]:
    """Write `trials.csv`."""
    path = folder / "trials.csv"
    with replacing(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        write_rows(text, [columns(view)])
        write_rows(text, (row.values() for row in rows(view)))
        text.detach()
    return [path]


def write_parquet(view: RunView, folder: Path) -> list[Path]:
    """Write `trials.parquet`."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise UsageError("writing Parquet needs pyarrow", remedy="pip install pyarrow") from None
    path = folder / "trials.parquet"
    names = columns(view)
    kinds = dict.fromkeys(("trial", "input_tokens", "output_tokens", "requests"), arrow.int64())
    kinds |= dict.fromkeys(("score", "cost", "seconds"), arrow.float64())
    kinds |= {name: arrow.float64() for name in names if name.endswith(".score") and not name.startswith("row.")}
    with replacing(path) as file:
        schema = arrow.schema([(name, kinds.get(name, arrow.string())) for name in names])
        remaining = rows(view)
        with parquet.ParquetWriter(file, schema) as writer:
            while batch := list(islice(remaining, 1024)):
                writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
    return [path]
