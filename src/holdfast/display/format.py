"""Format numbers and messages for people, and tables for notebooks.

In HTML every text is escaped: names and messages come from datasets and models.
"""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from holdfast.display.terminal import printable
from holdfast.plan.changes import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.plan.progress import RateLimit


def duration(seconds: float | None) -> str:
    """Format a duration: `1h 02m`, `3m 20s`, `12s`, or `?`."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    if whole >= 60:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{seconds:.1f}s" if seconds < 10 else f"{whole}s"


def byte_count(size: int) -> str:
    """Format a size: `512 bytes`, `34 kB`, `1.2 MB`."""
    if size < 1000:
        return f"{size} bytes" if size != 1 else "1 byte"
    value, unit = size / 1000, "kB"
    for larger in ("MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}" if value < 10 else f"{value:,.0f} {unit}"


def latency(seconds: float) -> str:
    """Format a time that is often below a second: `850ms`, `1.2s`, `3m 20s`."""
    return f"{seconds * 1000:.0f}ms" if seconds < 0.9995 else duration(seconds)


def share(value: float | None) -> str:
    """Format a score with three digits, or a dash."""
    return "–" if value is None else f"{value:.3f}"


def interval_text(low: float | None, high: float | None) -> str:
    """Format an interval, or a dash."""
    return "–" if low is None or high is None else f"{low:.3f} – {high:.3f}"


def difference_interval(low: float | None, high: float | None) -> str:
    """Format the interval of a difference, or a dash. An end that is not 0 never looks like 0."""
    return "–" if low is None or high is None else f"{_signed(low)} – {_signed(high)}"


def _signed(value: float) -> str:
    return f"{value:+.3f}" if abs(value) >= 0.0005 or value == 0 else f"{value:+.1g}"


def dollars(cost: float) -> str:
    """Format a sum in dollars; small sums have more digits, and a tiny sum is not shown as 0."""
    if 0 < cost < 0.00005:
        return "<$0.0001"
    return f"${cost:.2f}" if cost >= 1 or cost == 0 else f"${cost:.4f}"


def rate(per_second: float) -> str:
    """Format a rate per second, or per minute or hour if it is low; return an empty text for 0."""
    if per_second <= 0:
        return ""
    for factor, unit in ((1, "s"), (60, "min")):
        if per_second * factor >= 1:
            return f"{per_second * factor:.1f}/{unit}"
    return f"{per_second * 3600:.1f}/h"


def rate_limit_text(where: str, limited: RateLimit) -> str:
    """Describe a rate limit: whose it is, and how long requests have waited."""
    whom = "" if where == "target" else f" of {where}"
    return (
        f"waiting for a rate limit{whom} for {duration(limited.seconds)} ({format_count(limited.waiting, 'request')})"
    )


def one_line(text: str, most: int = 200) -> str:
    """Put a message on one line, and cut it if it is very long."""
    flat = " ".join(text.split())
    return flat if len(flat) <= most else flat[: most - 1] + "…"


def without_details(message: str) -> str:
    """Strip a message of quoted names and numbers, in which failures with the same cause differ."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "…", message)


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
