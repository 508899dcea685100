"""Settle calls that were cut off, by a person's decision: `holdfast resume RUN --settle SAMPLE/TRIAL=DECISION`.

A decision is recorded as a step before anything else happens. `happened:JSON` is the result of the call, `again` takes
back the intent, so that the conversation makes the call when it gets there, and `restart` drops the trial's record. All
decisions of a command are checked before the first is written.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.data.dataset import Dataset
from holdfast.display.format import one_line
from holdfast.errors import Fault, UsageError
from holdfast.store.files import advice_for
from holdfast.store.heads import call_id, cut_off_calls, decode_line, describe_call, is_decision, read_steps
from holdfast.store.journal import append_lines
from holdfast.store.records import NO_USAGE, CallIntent, Step, ToolResponse, to_line, to_milliseconds
from holdfast.targets.tools import as_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.engine.session import Session

_DECISION: Final = re.compile(r"(?:#([0-9a-f]+))?=(?:(again|restart)|happened:(.*))", re.DOTALL)
"""what follows the name of a trial: the beginning of a call's id, and the decision"""
_NAMED: Final = re.compile(rf"(.*?)/(\d{{1,9}}){_DECISION.pattern}", re.DOTALL)
_SHOWN: Final = 5
_HOW: Final = "Use SAMPLE/TRIAL=happened:JSON, SAMPLE/TRIAL=again or SAMPLE/TRIAL=restart"


class _Trial(NamedTuple):
    """A trial without an output, with its record."""

    key: str
    sample: str
    trial: int
    steps: list[Step]
    """since the trial began, or restarted"""
    cut_off: list[Step]

    @property
    def name(self) -> str:
        return f"{self.sample}/{self.trial}"

    def can_be_settled(self, verb: str | None) -> bool:
        """Return True if a call was cut off. A trial whose state is lost can also restart, if a person says so."""
        return bool(self.cut_off) or (verb == "restart" and any(step.kind == "intent" for step in self.steps))


class _Decision(NamedTuple):
    """A person's decision about calls of a trial."""

    trial: _Trial
    verb: str
    """`happened`, `again` or `restart`"""
    calls: list[Step]
    """intents of the calls; empty for a restart"""
    result: Any = None
    """of a call that happened"""


def settle(run: Session) -> None:
    """Record the decisions in a run's options; raise UsageError, and record nothing, if one of them is wrong."""
    begun = [
        _Trial(key, steps[0].sample, steps[0].trial, steps, cut_off_calls(steps))
        for key in run.index.begun()
        if (steps := read_steps(run.index.steps(key)))
    ]
    typed = [_read(text, begun, run) for text in dict.fromkeys(run.options.settle)]
    decisions = [decision for decision in typed if decision is not None]
    _check_once(decisions)
    for decision in decisions:
        _append(run, _steps(decision))
        calls = ", ".join(map(describe_call, decision.calls)) or "the trial begins again"
        run.notice(f"{decision.trial.name}: {decision.verb}: {calls}")
    run.plan = msgspec.structs.replace(run.plan, uncertain=len(run.index.uncertain_trials()))


def _read(text: str, begun: Sequence[_Trial], run: Session) -> _Decision | None:
    """Parse a decision; None if it was carried out before, as when a command is repeated.

    Names of trials are compared literally, since ids may contain anything.
    """
    shown = f"--settle {one_line(text)}"
    trials = [trial for trial in begun if text.startswith(trial.name)]
    matches = [(trial, match) for trial in trials if (match := _DECISION.fullmatch(text.removeprefix(trial.name)))]
    if len(matches) > 1:  # such as samples `a` and `a/1=happened:b`
        names = " and ".join(trial.name for trial, _ in matches)
        raise UsageError(f"{shown}: this can mean {names}", remedy=f"Settle one of them another way. {_HOW}.")
    if not matches or not matches[0][0].can_be_settled(matches[0][1][2]):
        _refuse_unless_settled(text, begun, run)
        return None
    trial, match = matches[0]
    prefix, verb, result = match.groups()
    calls = [step for step in trial.cut_off if _id(step).startswith(prefix or "")]
    if prefix and not calls:
        raise UsageError(f"{shown}: {trial.name} has no such call", remedy=_calls_of(trial))
    if verb == "restart":
        return _Decision(trial, "restart", [])
    if verb == "again":
        return _Decision(trial, "again", calls)
    if len(calls) > 1:
        raise UsageError(f"{shown}: {len(calls)} calls were cut off, one result is given", remedy=_calls_of(trial))
    try:
        return _Decision(trial, "happened", calls, msgspec.json.decode(result))
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(
            f"{shown}: the result is not JSON: {error}",
            remedy=f"A text needs quotes, which the shell removes: --settle '{trial.name}=happened:\"done\"'",
        ) from error


def _refuse_unless_settled(text: str, begun: Sequence[_Trial], run: Session) -> None:
    """Raise UsageError for a decision about a trial that is not uncertain, unless the trial was settled before."""
    if (named := _NAMED.fullmatch(text)) is None:
        raise UsageError(f"--settle {one_line(text)}: this is not a decision about a trial", remedy=f"{_HOW}.")
    sample, trial = named[1], int(named[2])
    if _was_settled(run, sample, trial):
        run.notice(f"{sample}/{trial} was settled before; it continues from its record")
        return
    uncertain = [trial.name for trial in begun if trial.cut_off]
    names = ", ".join([*uncertain[:_SHOWN], *(["…"] if len(uncertain) > _SHOWN else [])])
    raise UsageError(
        f"--settle {one_line(text)}: trial {trial} of {sample!r} is not uncertain",
        remedy=f"Uncertain trials: {names}." if names else "No trial of this run is: resume it without --settle.",
    )


def _was_settled(run: Session, sample: str, trial: int) -> bool:
    """Return True for a trial that has a decision on record, even if it has an output by now."""
    if not 1 <= trial <= run.spec.trials:
        return False
    row = next((row for row in Dataset(run.spec) if row.id == sample), None)
    if row is None:
        return False
    key = run.identity.work.key(row.asked, trial)
    return any(is_decision(decode_line(Step, line)) for line in run.index.steps(key))


def _check_once(decisions: Sequence[_Decision]) -> None:
    """Raise UsageError if two decisions are about the same call."""
    seen: set[tuple[str, str]] = set()
    restarted = {decision.trial.key for decision in decisions if decision.verb == "restart"}
    for decision in decisions:
        calls = {(decision.trial.key, _id(step)) for step in decision.calls} or {(decision.trial.key, "")}
        if calls & seen or (decision.calls and decision.trial.key in restarted):
            raise UsageError(f"--settle: there are two decisions about {decision.trial.name}", remedy="Give one.")
        seen |= calls


def _id(step: Step) -> str:
    return call_id(step.key, step.turn, step.request, step.nth)


def _calls_of(trial: _Trial) -> str:
    named = "; ".join(f"{trial.name}#{_id(step)[:12]}=… for {describe_call(step)}" for step in trial.cut_off)
    return f"Settle each by its id: {named}."


def _steps(decision: _Decision) -> list[Step]:
    """Return the record of a decision."""
    last = decision.trial.steps[-1]
    # Steps are ordered by time, and the calls may come from a machine whose clock is ahead.
    now = max(to_milliseconds(time.time()), last.time)
    if decision.verb == "restart":
        return [Step(last.key, last.sample, last.trial, 0, "restart", "", 1, None, NO_USAGE, now, 0.0)]
    return [
        msgspec.structs.replace(intent, time=now, seconds=0.0, source=UNSET, **_changes(decision, intent))
        for intent in decision.calls
    ]


def _changes(decision: _Decision, intent: Step) -> dict[str, Any]:
    """Return how the record of a decision differs from the intent."""
    if decision.verb == "again":
        return {"kind": "settle", "response": {"decision": "again"}}
    call = msgspec.convert(intent.response, CallIntent)
    result = as_text(decision.result) if isinstance(call.function, UnsetType) else decision.result
    response = ToolResponse(call.tool, call.arguments, result, settled="happened")
    return {"kind": "tool", "response": msgspec.to_builtins(response)}


def _append(run: Session, steps: Sequence[Step]) -> None:
    """Append steps to the run's journal, all of them or none, and to the index."""
    path = run.journals / "steps.jsonl"
    lines = [to_line(step) for step in steps]
    try:
        append_lines(path, b"".join(lines))
    except OSError as error:
        raise Fault("disk", f"cannot write {path}: {error.strerror or error}", remedy=advice_for(error)) from error
    run.index.read()
