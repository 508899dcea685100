"""Format numbers and progress for people, and tables for notebooks.

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

    from holdfast.display.types import SuiteCell
    from holdfast.plan.plan import Plan
    from holdfast.plan.progress import Progress, RateLimit
    from holdfast.store.spent import Spent


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


def interval_text(low: float | None, high: float | None, form: str = ".3f") -> str:
    """Format an interval, or a dash."""
    return "–" if low is None or high is None else f"{low:{form}} – {high:{form}}"


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


def tokens(spent: Spent) -> str:
    """Format the tokens of a run; an unknown part is shown as unknown."""
    if not spent.unmetered:
        return f"{spent.tokens:,} tokens"
    return f"{spent.tokens:,} tokens + unknown" if spent.tokens else "tokens unknown"


def money(spent: Spent) -> str:
    """Format the cost of a run; an unknown cost is shown as unknown, not as zero."""
    if not spent.unpriced:
        return dollars(spent.cost)
    return f"{dollars(spent.cost)} + unknown" if spent.cost else "cost unknown"


def inside(progress: Progress) -> list[str]:
    """List turns and calls so far: in long trials, no other number may change for minutes."""
    counts = ((progress.turns, "turn"), (progress.calls, "call"))
    return [f"{count:,} {what}{'s' * (count != 1)}" for count, what in counts if count]


def rate(per_second: float) -> str:
    """Format a rate per second, or per minute or hour if it is low; return an empty text for 0."""
    if per_second <= 0:
        return ""
    for factor, unit in ((1, "s"), (60, "min")):
        if per_second * factor >= 1:
            return f"{per_second * factor:.1f}/{unit}"
    return f"{per_second * 3600:.1f}/h"


def pace(progress: Progress) -> list[str]:
    """Describe the rate and the time left, if known."""
    eta = progress.eta
    return [part for part in (rate(progress.rate), "" if eta is None else f"{duration(eta)} left") if part]


def scores(progress: Progress, most: int = 6) -> list[str]:
    """List each grader's running score with the number of its verdicts; of many graders, the slowest."""
    names = [name for name, counts in progress.graders.items() if counts.scored]
    shown = set(sorted(names, key=lambda name: progress.graders[name].grades)[:most])
    parts = [
        f"{name} {share(counts.score)} ({counts.scored:,})"
        for name, counts in progress.graders.items()
        if name in shown
    ]
    return [*parts, *([f"{len(names) - most:,} more graders"] if len(names) > most else [])]


def spending(progress: Progress) -> list[str]:
    """List tokens and cost so far, once there are any."""
    spent = progress.spent
    return [tokens(spent), money(spent)] if spent.tokens or spent.cost else []


def trouble(progress: Progress) -> list[str]:
    """List what has gone wrong so far: requests that wait, failed attempts, answers that are not whole."""
    parts = list(progress.batches)
    parts += [rate_limit_text(where, limit) for where, limit in progress.rate_limits.items() if limit.waiting]
    if progress.retried:
        others = progress.backing_off - sum(limit.waiting for limit in progress.rate_limits.values())
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in progress.retried.most_common())
        parts.append(f"retried: {kinds}" + (f" ({others:,} waiting)" if others > 0 else ""))
    if partial := progress.kinds.total() - progress.kinds["whole"]:
        parts.append(f"not whole: {format_count(partial, 'answer')}")
    if failed := progress.given_up - progress.uncertain:
        parts.append(f"failed: {format_count(failed, 'trial')}")
    if progress.uncertain:
        parts.append(f"uncertain: {format_count(progress.uncertain, 'trial')}")
    if progress.failed_grades:
        graders = ", ".join(f"{name} {count:,}" for name, count in progress.failed_grades.most_common())
        parts.append(f"failed grades: {graders}")
    return parts


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


def in_flight(progress: Progress) -> list[str]:
    """Describe how full the window is. A rate limit may have lowered it below what is already in flight."""
    if progress.in_flight > progress.limit > 0:
        return [f"{progress.in_flight} in flight, limit lowered to {progress.limit}"]
    return [f"{progress.in_flight} of {progress.limit} in flight"] if progress.limit else []


def plan_lines(name: str, target: str, path: str, plan: Plan, cell: SuiteCell | None = None) -> str:
    """Return the two lines that are shown before a run starts; a run of a suite is named as in the suite."""
    head = f"{name} · {target}" if cell is None else f"{cell.place} {cell.eval} · {cell.target}"
    return f"{head} · {path}\n{plan}"


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
