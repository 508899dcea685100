"""Tables for notebooks. Every text is escaped: names and messages come from datasets and models."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from holdfast.display.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def html_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table of plain values."""
    head = "".join(f"<th>{escape(printable(column))}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(printable(str(cell)))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_text(text: str) -> str:
    """Return a paragraph of plain text."""
    return f"<p>{escape(printable(text))}</p>"
