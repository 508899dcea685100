"""The lines below the table at the end of a command: what it took, what failed, what is missing."""

from __future__ import annotations

import shlex
from math import isclose
from typing import TYPE_CHECKING, Final

from holdfast.display.format import dollars, duration, latency
from holdfast.display.terminal import printable
from holdfast.plan.changes import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.errors import BudgetReached
    from holdfast.report.failures import Alike, Failures
    from holdfast.store.metrics import Metrics
    from holdfast.store.records import Usage
    from holdfast.store.spent import Spent

_SHOWN: Final = 5


def facts(metrics: Metrics, spent: Spent | None, wall: float | None) -> Iterator[str]:
    """List coverage, tokens, cost and time. `spent` is what this run paid itself, `wall` how long this process took."""
    usage, judges = metrics.usage, metrics.judge_usage
    coverage = f"coverage {metrics.coverage:.1%} of {format_count(metrics.total, 'trial')}"
    took = _took(metrics.timing.seconds, wall)
    if judges.requests:
        yield f"{coverage} · {took}"
        yield f"target: {_usage(usage)} · judges: {_usage(judges)}"
    else:
        yield f"{coverage} · {_usage(usage)} · {took}"
    if (paid := _paid(usage, judges, spent)) is not None:
        yield paid
    middle, slow = metrics.timing.trial_seconds_p50, metrics.timing.trial_seconds_p95
    if middle is not None and slow is not None:
        yield f"latency per trial: p50 {latency(middle)}, p95 {latency(slow)}"


def _usage(usage: Usage) -> str:
    tokens = "tokens unknown" if usage.tokens is None else f"{usage.tokens:,} tokens"
    return f"{tokens} · {'cost unknown' if usage.cost is None else dollars(usage.cost)}"


def _took(all_of_it: float, wall: float | None) -> str:
    """Format the time of this process, and that of the whole run where earlier processes had a part in it."""
    if wall is None:
        return duration(all_of_it)
    if all_of_it > wall + max(1.0, wall / 10):
        return f"{duration(wall)} (the whole run: {duration(all_of_it)})"
    return duration(wall)


def _paid(usage: Usage, judges: Usage, spent: Spent | None) -> str | None:
    """Say what this run paid itself, where that is not what its outputs and grades cost."""
    if spent is None:
        return None
    if usage.cost is not None and judges.cost is not None:
        worth = usage.cost + judges.cost
        if spent.unpriced:  # attempts that failed, and were paid for
            return (
                f"this run paid at least {dollars(spent.cost)}: what {spent.unpriced:,} of its requests cost is unknown"
            )
        if dollars(worth) == dollars(spent.cost) or isclose(worth, spent.cost, rel_tol=1e-6):
            return None
        if spent.cost > worth:
            return f"this run paid {dollars(spent.cost)}, {_more_than(dollars(worth))}"
        return f"total {dollars(worth)}, of which this run paid {dollars(spent.cost)}; the rest was reused"
    if usage.tokens is None or judges.tokens is None or spent.unmetered:
        return None
    tokens = usage.tokens + judges.tokens
    if tokens == spent.tokens:
        return None
    if spent.tokens > tokens:
        return f"this run used {spent.tokens:,} tokens, {_more_than(f'{tokens:,}')}"
    return f"of the {tokens:,} tokens this run used {spent.tokens:,} itself; the rest was reused"


def _more_than(worth: str) -> str:
    others = "calls that failed, were repeated or belong to unfinished trials count, too"
    return f"more than the {worth} of its outputs and grades: {others}"


def retried(failures: Failures | None) -> Iterator[str]:
    """Say which attempts were repeated: that is what one sets the concurrency by."""
    if failures is not None and failures.retried:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in failures.retried.most_common())
        were = "attempt was" if failures.retried.total() == 1 else "attempts were"
        yield f"{failures.retried.total():,} {were} retried: {kinds}"


def failed(failures: Failures | None, *, left_out: bool) -> Iterator[str]:
    """Say why trials and grades are missing, the most frequent reason first."""
    for where, groups in (failures.pending if failures is not None else {}).items():
        count = sum(alike.count for alike in groups)
        what = format_count(count, "trial") if where == "target" else f"{format_count(count, 'grade')} of {where}"
        head = f"{what} failed{' and ' + ('was' if count == 1 else 'were') + ' left out' if left_out else ''}:"
        yield from _reasons(head, groups)


def uncertain(failures: Failures | None, run: str) -> Iterator[str]:
    """List the calls that may have happened, and the commands that settle them."""
    trials = [] if failures is None else failures.uncertain
    if not trials:
        return
    yield f"{format_count(len(trials), 'trial')} {'is' if len(trials) == 1 else 'are'} uncertain:"
    for trial in trials[:_SHOWN]:
        yield printable(f"  {trial.sample}/{trial.trial}: {trial.message}", "")
    if len(trials) > _SHOWN:
        yield f"  … and {len(trials) - _SHOWN:,} more; errors.jsonl has them all"
    yield "Find out what happened, and settle each of them with one of these:"
    name = printable(f"{trials[0].sample}/{trials[0].trial}", "")
    for decision, meaning in (
        ('happened:"RESULT"', "the call was made, and returned this (any JSON)"),
        ("again", "the call was not made; make it"),
        ("restart", "begin the trial again, and make all its calls again"),
    ):
        yield f"  holdfast resume {run} --settle {shlex.quote(f'{name}={decision}')}  # {meaning}"


def _reasons(head: str, groups: list[Alike]) -> Iterator[str]:
    if len(groups) == 1:
        yield f"{head} {groups[0]}"
        return
    yield head
    for alike in groups[:_SHOWN]:
        yield f"  {alike}"
    if len(groups) > _SHOWN:
        yield f"  … and {format_count(len(groups) - _SHOWN, 'other reason')}; errors.jsonl has them all"


def missing(so_far: Metrics) -> str:
    """Say what the numbers of an unfinished run do not cover."""
    unmade = so_far.total - so_far.outputs
    parts = []
    if unmade:
        parts.append(
            f"{unmade:,} of {format_count(so_far.total, 'trial')} {'has' if unmade == 1 else 'have'} no output"
        )
    counts = {name: grader.ungraded for name, grader in so_far.graders.items() if grader.ungraded}
    if counts:
        most = sorted(counts, key=lambda name: -counts[name])
        named = ", ".join(f"{name} {counts[name]:,}" for name in most[:_SHOWN])
        more = ", …" if len(most) > _SHOWN else ""
        verb = "has" if len(counts) == 1 else "have"
        parts.append(f"{format_count(len(counts), 'grader')} {verb} no verdict on some outputs ({named}{more})")
    return f"incomplete: {'; '.join(parts) or 'trials are missing'}. Scores cover only what was graded."


def with_raised_limit(command: str, reason: BudgetReached) -> str:
    """Return the command with a limit that lets the run get further."""
    if not reason.option or not command:
        return command
    words = shlex.split(command)
    key = f"limits.{reason.option.removeprefix('--').replace('-', '_')}="
    for number, word in enumerate(words):
        if word == reason.option and number + 1 < len(words):
            words[number + 1] = reason.raised
        elif word.startswith(f"{reason.option}="):
            words[number] = f"{reason.option}={reason.raised}"
        elif word.startswith(key):
            words[number] = key + reason.raised
        else:
            continue
        return shlex.join(words)
    is_eval = words[1:2] == ["eval"]
    return shlex.join([*words, *([reason.option, reason.raised] if is_eval else [key + reason.raised])])
