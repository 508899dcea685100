"""Recorded calls of a conversation: which of them are in effect, and which were cut off."""

from __future__ import annotations

from heapq import merge
from typing import TYPE_CHECKING

import msgspec

from holdfast.store.heads import decode_line
from holdfast.store.records import CallIntent, Step, describe_call

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from holdfast.store.index import RunIndex
    from holdfast.store.lines import LineRef
    from holdfast.store.records import OnCutOff


def read_steps(lines: Iterable[LineRef]) -> list[Step]:
    """Read the valid recorded calls of a conversation, in the order in which they were made.

    If several workers ran the conversation, its lines may be passed in another order, file by file.
    """
    return _in_effect(_in_order(lines))


def _in_order(lines: Iterable[LineRef]) -> list[Step]:
    by_file: dict[Path, list[Step]] = {}
    for line in lines:
        by_file.setdefault(line.path, []).append(decode_line(Step, line))
    return list(merge(*by_file.values(), key=lambda step: step.time))


def _in_effect(recorded: Iterable[Step]) -> list[Step]:
    """Leave out calls that a decision took back."""
    steps: list[Step] = []
    for step in recorded:
        if step.kind == "restart":
            steps.clear()
        elif step.kind == "settle":  # the call is to be made again: forget that it was about to be made
            steps = [each for each in steps if each.kind != "intent" or _call_of(each) != _call_of(step)]
        else:
            steps.append(step)
    return steps


def _call_of(step: Step) -> tuple[int, str, int]:
    return step.turn, step.request, step.nth


def is_decision(step: Step) -> bool:
    """Return True for a record of what became of calls that were cut off."""
    return step.kind in ("settle", "restart") or (step.kind == "tool" and bool(step.response.get("settled")))


def cut_off_calls(steps: Iterable[Step]) -> list[Step]:
    """Return the intents of calls without a result, in turns that have not ended: they may or may not have happened."""
    recorded = list(steps)
    results = {_call_of(step) for step in recorded if step.kind == "tool"}
    ended = {step.turn for step in recorded if step.kind == "turn"}
    return [
        step for step in recorded if step.kind == "intent" and step.turn not in ended and _call_of(step) not in results
    ]


def why_uncertain(cut_off: Iterable[Step], intents: Iterable[Step]) -> str:
    """Describe the calls that leave a trial uncertain; empty if their tools' settings decide.

    `cut_off` are the intents of calls that were cut off, and `intents` all intents of the trial.
    """
    undecided = [step for step in cut_off if _on_cut_off(step) != "error_result"]
    return "" if all(_on_cut_off(step) == "restart" for step in intents) else describe_cut_off(undecided)


def describe_cut_off(calls: Iterable[Step]) -> str:
    """Describe the calls that were cut off; empty if there are none."""
    names = [describe_call(step) for step in calls]
    were = "was" if len(names) == 1 else "were"
    return f"{'; '.join(names)} {were} cut off, and may or may not have happened" if names else ""


def _on_cut_off(intent: Step) -> OnCutOff:
    return msgspec.convert(intent.response, CallIntent).on_cut_off


def uncertain_trials(index: RunIndex, *, running: bool = False) -> dict[str, str]:
    """Return the trials that wait for a person, by key, each with the calls that may have happened.

    A call without a result was cut off, also if a kill left no time to record an error. If the run is `running`, such a
    call may be in flight, so that only errors count. The text is empty if only an error on record says what happened.
    """
    uncertain = {}
    for key in index.intents() | index.uncertain:
        if index.output(key) is not None:
            continue
        failed_at = index.failed_at[key] if key in index.uncertain else None
        why, stopped = explain_uncertain(index.steps(key), failed_at)
        if stopped or (why and not running):
            uncertain[key] = why
    return uncertain


def explain_uncertain(lines: Iterable[LineRef], failed_at: float | None) -> tuple[str, bool]:
    """Return why a trial is uncertain, and True if it stopped for that reason at `failed_at` and was not settled."""
    recorded = _in_order(lines)
    steps = _in_effect(recorded)
    try:
        why = why_uncertain(cut_off_calls(steps), [step for step in steps if step.kind == "intent"])
    except msgspec.ValidationError:
        why = "a recorded call cannot be read, and may or may not have happened"
    stopped = failed_at is not None and not any(is_decision(step) and step.time >= failed_at for step in recorded)
    return why, stopped
