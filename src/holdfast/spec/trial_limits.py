"""The limits of one trial, and whether reaching them scores.

A limit that scores changes a result, so it is part of the trial's key; a limit that only guards is not. Default values
are in no key, so writing them out changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from holdfast.spec.eval_schema import Limits, TrialLimitsBlock
from holdfast.spec.schema import is_embedded

if TYPE_CHECKING:
    from holdfast.spec.eval import Eval
    from holdfast.spec.eval_schema import OnLimit


LimitName = Literal["time_limit", "token_limit", "cost_limit", "call_limit"]
"""the `stop` of an output that a limit ended"""


class TimeLeft(NamedTuple):
    """A limit of time, and how much of it is left."""

    seconds: float
    limit: float
    key: str
    """under `limits`"""
    default: bool
    """the file does not set it"""


class TrialLimits(msgspec.Struct, frozen=True):
    """The limits of a trial, with all defaults filled in. None: there is no such limit."""

    turn_time: float | None
    """seconds for one reply, if reaching them scores; otherwise time-outs are errors"""
    time: float | None
    """seconds for all replies"""
    tokens: int | None
    cost: float | None
    calls: int | None
    on_limit: OnLimit
    on_exit: OnLimit
    defaults: frozenset[str]
    """`turn_timeout` and `trial_timeout`, unless the file sets them"""
    time_key: str
    """the key of `limits` that `time` comes from"""
    guarded: bool
    """time-outs of attempts are errors, which are retried"""

    def time_left(self, turns: float, turn: float) -> TimeLeft | None:
        """Return the limit of time that is nearest, given the seconds of earlier turns, and of this one so far."""
        limits = []
        if self.turn_time is not None:
            limits.append((self.turn_time - turn, self.turn_time, "turn_timeout"))
        if self.time is not None:
            limits.append((self.time - turns - turn, self.time, self.time_key))
        nearest = min(limits, default=None)
        return None if nearest is None else TimeLeft(*nearest, default=nearest[2] in self.defaults)

    def describe(self, stop: LimitName, time: TimeLeft | None) -> str:
        """Describe the limit that was reached, with the key that sets it."""
        match stop:
            case "token_limit":
                return f"the limit of {self.tokens:,} tokens is reached (limits.trial.tokens)"
            case "cost_limit":
                return f"the limit of ${self.cost:g} is reached (limits.trial.cost)"
            case "call_limit":
                return f"the limit of {self.calls:,} model calls is reached (limits.trial.calls)"
        assert time is not None
        default = ", by default" if time.default else ""
        return f"the time limit of {time.limit:g} s is reached (limits.{time.key}{default})"


def is_agent(spec: Eval) -> bool:
    """Return True for an agent, a program or a function with a workspace: the files it leaves can be graded."""
    return spec.target.works_alone and spec.workspace is not None


def with_defaults(limits: Limits, spec: Eval) -> Limits:
    """Return limits with the time that an eval's target needs, if the file sets none."""
    return limits.with_time(patient=is_agent(spec) or any(map(is_embedded, spec.models())))


def trial_limits(spec: Eval) -> TrialLimits:
    """Return the limits of an eval's trials."""
    limits, trial = spec.limits, spec.limits.trial or TrialLimitsBlock()
    on_limit = limits.on_limit or _default(spec)
    # `trial` by itself does not change what a time-out means.
    scores_time = on_limit == "score" and spec.target.works_alone and (is_agent(spec) or limits.on_limit == "score")
    return TrialLimits(
        turn_time=limits.turn_timeout if scores_time else None,
        time=trial.time or (limits.trial_timeout if scores_time else None),
        tokens=trial.tokens,
        cost=trial.cost,
        calls=trial.calls,
        on_limit=on_limit,
        on_exit=limits.on_exit or ("score" if is_agent(spec) else "error"),
        defaults=frozenset({"turn_timeout", "trial_timeout"} - limits.model_fields_set),
        time_key="trial_timeout" if trial.time is None else "trial.time",
        guarded=not scores_time and (trial.time is None or "turn_timeout" in limits.model_fields_set),
    )


def _default(spec: Eval) -> OnLimit:
    return "score" if is_agent(spec) or spec.limits.trial is not None else "error"


def time_beside_target(spec: Eval) -> tuple[float, float]:
    """Return the time limits of one attempt and of all attempts of a judge or a hook, which are not agents."""
    limits, written = spec.limits, spec.limits.model_fields_set
    usual = limits if any(map(is_embedded, spec.models())) else Limits()
    return (
        limits.turn_timeout if "turn_timeout" in written else usual.turn_timeout,
        limits.trial_timeout if "trial_timeout" in written else usual.trial_timeout,
    )


def limits_identity(spec: Eval) -> dict[str, Any]:
    """Return the limits that can change an output, unless they have their defaults."""
    limits, identity = trial_limits(spec), dict[str, Any]()
    if limits.on_limit == "score":
        if spec.limits.trial is not None and (written := spec.limits.trial.model_dump(exclude_none=True)):
            identity["trial"] = written
        if limits.turn_time is not None:
            usual = with_defaults(Limits(trial=spec.limits.trial), spec)
            if limits.turn_time != usual.turn_timeout:
                identity["turn_timeout"] = limits.turn_time
            if limits.time_key == "trial_timeout" and limits.time != usual.trial_timeout:
                identity["trial_timeout"] = limits.time
    if limits.on_limit != _default(spec):
        identity["on_limit"] = limits.on_limit
    if (limits.on_exit == "score") != is_agent(spec):
        identity["on_exit"] = limits.on_exit
    return identity
