"""Numbers as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.engine.progress import Progress
    from holdfast.plan.plan import Plan
    from holdfast.store.index import Spent


def duration(seconds: float | None) -> str:
    """`1h 02m`, `3m 20s`, `12s`, or `?`."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    if whole >= 60:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{seconds:.1f}s" if seconds < 10 else f"{whole}s"


def byte_count(size: int) -> str:
    """`512 bytes`, `34 kB`, `1.2 MB`."""
    if size < 1000:
        return f"{size} bytes" if size != 1 else "1 byte"
    value, unit = size / 1000, "kB"
    for larger in ("MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}" if value < 10 else f"{value:,.0f} {unit}"


def share(value: float | None) -> str:
    """A score with three digits, or a dash."""
    return "–" if value is None else f"{value:.3f}"


def dollars(cost: float) -> str:
    """Small sums with more digits."""
    return f"${cost:.2f}" if cost >= 1 or cost == 0 else f"${cost:.4f}"


def tokens(spent: Spent) -> str:
    """How many tokens a run has taken, where that is known."""
    if not spent.unmetered:
        return f"{spent.tokens:,} tokens"
    return f"{spent.tokens:,} tokens + unknown" if spent.tokens else "tokens unknown"


def money(spent: Spent) -> str:
    """What a run has cost; an unknown price is said, not counted as nothing."""
    if not spent.unpriced:
        return dollars(spent.cost)
    return f"{dollars(spent.cost)} + unknown" if spent.cost else "cost unknown"


def inside(progress: Progress) -> list[str]:
    """How far trials of many turns or calls have come: they may take minutes, and nothing else would move."""
    counts = ((progress.turns, "turn"), (progress.calls, "call"))
    return [f"{count:,} {what}{'s' * (count != 1)}" for count, what in counts if count]


def plan_lines(name: str, target: str, path: str, plan: Plan) -> str:
    """The two lines before a run starts."""
    return f"{name} · {target} · {path}\n{plan}"
