"""Decide whether a run may pass: against a baseline, minimum scores and samples that must pass. Pure functions.

Against a baseline a gate tests, on the samples that both runs have, metric by metric:

- *not worse*: a loss of more than the margin is excluded;
- *worse*: there is a loss by more than chance, and a loss of more than the margin is not excluded;
- *cannot tell*: neither. There are too few samples, and the gate says how many are enough.

The first that holds is the verdict. A system that did not change is `worse` in at most 5 % of the gates, however many
metrics there are: Holm's method corrects the tests, which look only for losses. `not worse` needs no correction, since
all metrics must pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from holdfast.display.format import html_table, html_text
from holdfast.errors import UsageError
from holdfast.report.compare import (
    OVERALL,
    chance_of_loss,
    changed_graders,
    mean_over,
    metric_names,
    read_scores,
    shared_clusters,
    shared_names,
)
from holdfast.report.stats import (
    Z80,
    cluster_parts,
    gaps,
    holm,
    implied_half,
    mean_and_error,
    normal_quantile,
    p_text,
    t_quantile,
)
from holdfast.spec.eval_schema import MAX_DROP, RUN_METRICS
from holdfast.spec.schema import parse_points
from holdfast.store.metrics import Check

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from holdfast.report.compare import ScoredRun
    from holdfast.report.run_view import RunView
    from holdfast.spec.eval_schema import Inconclusive
    from holdfast.store.metrics import Metrics, Verdict

NewPolicy = Literal["ignore", "must-pass"]
RemovedPolicy = Literal["ignore", "warn", "fail"]


@dataclass(frozen=True)
class Rules:
    """Conditions of a gate."""

    max_drop: float = MAX_DROP
    """the margin: how far a metric may fall below the baseline, as a share of 1"""
    confidence: float = 0.95
    inconclusive: Inconclusive = "pass"
    max_regression_pct: float | None = None
    """instead: the allowed loss in percent of the baseline's value, without a test"""
    golden: Collection[str] = ()
    minima: Mapping[str, float] | None = None
    new: NewPolicy = "ignore"
    removed: RemovedPolicy = "warn"

    def __post_init__(self) -> None:
        if not 0.5 < self.confidence < 1:
            raise UsageError(f"confidence {self.confidence:g} is not between 0.5 and 1", remedy="For 95 %, give 0.95.")


@dataclass(frozen=True, repr=False)
class GateResult:
    """The result of a gate, check by check. True if all checks passed."""

    checks: tuple[Check, ...]
    notices: tuple[str, ...] = ()
    """what the gate could not check or test"""
    eval: str = ""
    """name of the eval"""
    baseline: str | None = None
    """target and id of the baseline"""
    confidence: float | None = None
    """of the verdicts; None if nothing was tested"""

    @property
    def passed(self) -> bool:
        """True if all checks passed."""
        return all(check.passed for check in self.checks)

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        failed = [check.message for check in self.checks if not check.passed]
        return f"<gate {'passed' if self else 'failed'}{': ' if failed else ''}{'; '.join(failed)}>"

    def __str__(self) -> str:
        width = max((len(check.what) for check in self.checks if check.verdict), default=0)
        lines: list[str] = []
        for check in self.checks:
            if check.verdict is None:
                lines.append(f"{check.mark}  {check.message}")
                continue
            head, _, hint = check.message.removeprefix(check.what).strip().partition("; ")
            lines.append(f"{check.mark}  {check.what:<{width}}  {head}")
            if hint:
                lines.append(" " * (width + 8) + hint)
        return "\n".join([*lines, self._conclusion])

    def _repr_html_(self) -> str:
        """Return the checks as a table, for notebooks."""
        rows = [(check.mark, check.what, check.message) for check in self.checks]
        return html_text(self._conclusion) + html_table(("", "check", ""), rows)

    @property
    def _conclusion(self) -> str:
        return f"gate {'passed' if self else 'failed'}"


def margin_of(max_drop: float | str | None, max_regression_pct: float | None) -> float:
    """Return the margin that a command or a program asks for."""
    if max_drop is None:
        return MAX_DROP
    if max_regression_pct is not None:
        raise UsageError(
            "a largest drop and a regression in percent exclude each other",
            remedy="Leave out the percentage: it tests nothing.",
        )
    try:
        return float(parse_points(max_drop))
    except ValueError as error:
        raise UsageError(f"max drop: {error}") from None


def gate_run(view: RunView, baseline: RunView | None, rules: Rules, *, golden_rows: bool = True) -> GateResult:
    """Check a finished run. With `golden_rows`, samples whose row has `golden: true` must pass."""
    run, base = read_scores(view), None if baseline is None else read_scores(baseline)
    _check_minima_exist(run.metrics, rules.minima or {})
    golden, notices = set(rules.golden), []
    for each in (view, baseline) if golden_rows else ():
        if each is not None:
            samples, unknown = _golden_rows(each)
            golden |= samples
            if unknown:  # a gate that silently checks less would pass what nobody has approved
                notices.append(
                    f"{each.rundir.path}: the dataset is gone or has changed: which rows say `golden: true` is not "
                    "known; name the golden samples"
                )
    if base is None and not rules.minima and not golden:
        raise UsageError("the gate has nothing to check", remedy="Give it a baseline, a minimum or a golden sample.")
    if base is not None and rules.max_regression_pct is not None:
        notices.append(untested_notice(run, base, rules.max_regression_pct))
    tested = base is not None and rules.max_regression_pct is None
    return GateResult(
        tuple(check_gate(run, base, replace(rules, golden=golden))),
        tuple(notices),
        run.metrics.eval,
        None if base is None else f"{base.metrics.target} {base.metrics.run}",
        rules.confidence if tested else None,
    )


def _check_minima_exist(metrics: Metrics, minima: Mapping[str, float]) -> None:
    for name, minimum in minima.items():
        if metric_value(metrics, name) is None and name not in metrics.graders:
            names = ", ".join([*metrics.graders, *RUN_METRICS])
            raise UsageError(f"there is no metric {name!r}", remedy=f"This run has: {names}.")
        if not 0 <= minimum <= 1:  # also refuses NaN
            raise UsageError(f"minimum of {name}: {minimum:g} is not between 0 and 1", remedy="For 80 %, give 0.8.")


def _golden_rows(view: RunView) -> tuple[set[str], bool]:
    """Return the samples whose row has `golden: true`, and whether some rows could not be read."""
    golden, unknown = set(), False
    for trial in view.trials():
        unknown = unknown or not trial.fields
        if trial.fields.get("golden") is True:
            golden.add(trial.output.sample)
    return golden, unknown


def check_gate(current: ScoredRun, baseline: ScoredRun | None, rules: Rules) -> list[Check]:
    """All checks, golden samples first."""
    checks = [_golden(current, sample) for sample in sorted(rules.golden)]
    checks += check_minima(current.metrics, rules.minima or {})
    if baseline is not None:
        checks += _against(current, baseline, rules)
        checks += _samples(current, baseline, rules)
    return checks


def check_minima(metrics: Metrics, minima: Mapping[str, float]) -> list[Check]:
    """Check that metrics reach their minima, as `gate:` of an eval file and `holdfast gate --min` ask."""
    checks = []
    for name, minimum in minima.items():
        value = metric_value(metrics, name)
        passed = value is not None and value >= minimum
        message = f"{name} is {_shown(value)} (minimum {minimum:g})"
        checks.append(_check(f"min {name}", passed, message, metric=name, value=value, minimum=minimum))
    return checks


def metric_value(metrics: Metrics, name: str) -> float | None:
    """Return a metric by its name: one of the whole run, a grader's, or one of its numbers: `name/pass@2`."""
    value: object
    if name in metrics.shares:
        value = metrics.shares[name]
    elif name in metrics.graders:
        value = metrics.graders[name].score
    else:  # a checkpoint's name has a slash of its own, so the number is what follows the last one
        grader, _, number = name.rpartition("/")
        value = metrics.graders[grader].to_dict().get(number) if grader in metrics.graders else None
    return float(value) if isinstance(value, int | float) else None


def _check(what: str, passed: bool, message: str, *, warning: bool = False, **facts: object) -> Check:
    return Check(what=what, passed=passed, message=message, warning=warning, **facts)  # type: ignore[arg-type]


def _golden(current: ScoredRun, sample: str) -> Check:
    passes = current.passes.get(OVERALL, {}).get(sample)
    if sample not in current.samples:
        return _check(f"golden {sample}", False, f"golden sample {sample} is not in this run")
    if passes is None:
        return _check(f"golden {sample}", False, f"golden sample {sample} has no verdict in this run")
    failed = passes.count(0.0)
    message = (
        f"golden sample {sample} passes"
        if not failed
        else f"golden sample {sample} fails {failed} of {len(passes)} trials"
    )
    return _check(f"golden {sample}", not failed, message)


def _against(current: ScoredRun, baseline: ScoredRun, rules: Rules) -> list[Check]:
    """Check each metric against the baseline, and that there is one to check."""
    names = shared_names(current, baseline)
    allowed = rules.max_regression_pct
    if allowed is None:
        checks = _losses(names, current, baseline, rules)
    else:
        checks = [_fallen(name, current, baseline, allowed) for name in names]
    changed = changed_graders(baseline, current)
    for name in metric_names(baseline):
        if name in changed:
            differences = ", ".join(changed[name])
            message = f"{name} is not the same grader as in the baseline ({differences}): it cannot be compared"
            checks.append(_check(name, False, message, metric=name))
        elif name not in names and name != OVERALL:
            checks.append(_check(name, False, f"{name} is in the baseline and not in this run", metric=name))
    if not checks:
        checks.append(_check("metrics", False, "the two runs have no metric in common: there is nothing to compare"))
    if current.metrics.coverage < 1:  # missing verdicts could hide a loss
        if allowed is None:
            checks.append(_coverage(current, baseline, rules.max_drop))
        else:
            checks.append(_fallen("coverage", current, baseline, allowed))
    return checks


class Loss(NamedTuple):
    """One metric compared with the baseline, on the samples that both runs have."""

    metric: str
    before: float
    value: float
    samples: int
    fell: int
    rose: int
    low: float
    """one-sided bounds of the difference, value minus before"""
    high: float
    stderr: float
    p_value: float
    """chance of so low a difference in a system that did not change"""
    same: bool
    """both runs have the same outputs, with the same scores"""

    @property
    def difference(self) -> float:
        """The value minus the baseline's."""
        return self.value - self.before


def measure_loss(name: str, current: ScoredRun, baseline: ScoredRun, confidence: float) -> Loss | None:
    """Compare a metric with the baseline; None if no sample has a verdict in both runs.

    The bounds are Student's over the differences and two more, +1 and -1. Without these two, few samples that happen
    not to differ would exclude every loss.
    """
    ours, theirs = current.scores[name], baseline.scores[name]
    by_sample = gaps(ours, theirs)
    if not by_sample:
        return None
    clusters = shared_clusters(current, baseline)
    parts = cluster_parts(by_sample, clusters)
    mean, stderr = mean_and_error([*parts, (1.0, 1), (-1.0, 1)])
    half = t_quantile(len(parts) - 1, 2 * confidence - 1) * stderr if len(parts) > 1 else math.inf
    return Loss(
        name,
        mean_over(theirs, by_sample),
        mean_over(ours, by_sample),
        len(by_sample),
        sum(gap < 0 for gap in by_sample.values()),
        sum(gap > 0 for gap in by_sample.values()),
        max(-1.0, mean - half),
        min(1.0, mean + half),
        stderr,
        chance_of_loss(ours, theirs, by_sample, clusters),
        not any(by_sample.values()) and all(current.answers[s] == baseline.answers[s] for s in by_sample),
    )


def _losses(names: Sequence[str], current: ScoredRun, baseline: ScoredRun, rules: Rules) -> list[Check]:
    measured = {name: measure_loss(name, current, baseline, rules.confidence) for name in names}
    losses = [loss for loss in measured.values() if loss is not None]
    adjusted = holm([loss.p_value for loss in losses])
    checks = [judge_loss(loss, p_value, rules, len(losses)) for loss, p_value in zip(losses, adjusted, strict=True)]
    checks += [
        _check(name, False, f"{name}: no sample has a verdict in both runs", metric=name)
        for name, loss in measured.items()
        if loss is None
    ]
    return checks


def judge_loss(loss: Loss, adjusted: float, rules: Rules, metrics: int = 1) -> Check:
    """Return the verdict on a metric, whose p-value is corrected for the number of metrics."""
    margin, level = rules.max_drop, 1 - rules.confidence
    shown = adjusted <= level * (1 + 1e-9)
    verdict: Verdict = "cannot tell"
    if loss.same or loss.low >= -margin:
        verdict = "not worse"
    elif shown:
        verdict = "worse"
    high = loss.high
    if shown != (high < 0) and loss.difference < 0:  # the exact test decides whether there is a loss
        high = loss.difference + implied_half(-loss.difference, 2 * adjusted, 2 * level, differs=shown)
    detectable = (normal_quantile(2 * rules.confidence - 1) + Z80) * loss.stderr
    needed = math.ceil(loss.samples * (detectable / margin) ** 2) if margin else None
    head = f"{loss.metric} {verdict}: {loss.before:.3f} → {loss.value:.3f}"
    apart = f"{_points(loss.difference)} points ({_points(loss.low)} – {_points(high)})"
    if verdict == "worse":
        message = f"{head}, {apart}, p {p_text(loss.p_value, adjusted)}{' (Holm)' if metrics > 1 else ''}"
    elif verdict == "not worse":
        samples = "sample" if loss.samples == 1 else f"{loss.samples:,} samples"
        excluded = f"a loss of more than {_margin(margin)} is excluded"
        message = f"{head}, {f'the same outputs of {samples}' if loss.same else excluded}"
    else:
        message = f"{head}, {apart}; {_can_show(loss.samples, detectable, margin, needed)}"
    return Check(
        what=loss.metric,
        passed=verdict == "not worse" or (verdict == "cannot tell" and rules.inconclusive == "pass"),
        warning=verdict == "cannot tell" and rules.inconclusive == "pass",
        message=message,
        metric=loss.metric,
        value=loss.value,
        before=loss.before,
        verdict=verdict,
        samples=loss.samples,
        fell=loss.fell,
        rose=loss.rose,
        difference=loss.difference,
        low=loss.low,
        high=high,
        p_value=loss.p_value,
        adjusted=adjusted,
        detectable=min(1.0, detectable),
        rows_for_margin=needed,
    )


def _can_show(samples: int, detectable: float, margin: float, needed: int | None) -> str:
    """Say what so many samples can show, and how many the margin needs."""
    are = "1 sample shows" if samples == 1 else f"{samples:,} samples show"
    best = "no loss for sure" if detectable >= 1 else f"a loss of {_margin(round(detectable, 3))} at best"
    return f"{are} {best}" + ("" if needed is None else f"; {_margin(margin)} need {needed:,}")


def _points(value: float) -> str:
    return f"{100 * value:+.1f}".replace("-", "−")


def _margin(value: float) -> str:
    points = f"{100 * value:.4g}"
    return f"{points} point{'' if points == '1' else 's'}"


def _coverage(current: ScoredRun, baseline: ScoredRun, margin: float) -> Check:
    """Check that no more verdicts are missing than the margin allows."""
    now, before = current.metrics.coverage, baseline.metrics.coverage
    fell = before - now
    message = f"coverage {before:.4g} → {now:.4g}"
    message += f", {_margin(round(fell, 4))} lower (allowed: {_margin(margin)})" if fell > 0 else ""
    passed = fell <= margin + 1e-9
    return _check("coverage", passed, message, warning=passed and fell > 0, metric="coverage", value=now, before=before)


def _fallen(name: str, current: ScoredRun, baseline: ScoredRun, allowed: float) -> Check:
    """Check a number against the baseline's, in percent."""
    now, before = metric_value(current.metrics, name), metric_value(baseline.metrics, name)
    if now is None or before is None:
        return _check(name, False, f"{name} is {_shown(now)}; it was {_shown(before)}", metric=name)
    drop = (before - now) / before * 100 if before else 0.0
    message = f"{name} {before:.4g} → {now:.4g}" + (f", {drop:.1f} % lower" if drop > 0 else "")
    passed = drop <= allowed + 1e-9
    return _check(name, passed, f"{message} (allowed: {allowed:g} %)", metric=name, value=now, before=before)


def untested_notice(current: ScoredRun, baseline: ScoredRun, allowed: float) -> str:
    """Say that a percentage is no test, and how often such a gate would fail a system that did not change."""
    rates = [0.0]
    for name in shared_names(current, baseline):
        by_sample = gaps(current.scores[name], baseline.scores[name])
        before = metric_value(baseline.metrics, name)
        moves = [total for total, _ in cluster_parts(by_sample, shared_clusters(current, baseline)) if total]
        if moves and before is not None:
            steps = math.floor(allowed / 100 * before * len(by_sample) + 1e-9) + 0.5
            rates.append(math.erfc(steps / math.sqrt(2 * math.fsum(move * move for move in moves))) / 2)
    often = f": the same system measured twice would fail in about {100 * max(rates):.0f} % of cases"
    return (
        "a regression in percent compares two numbers and tests nothing"
        f"{often if max(rates) >= 0.005 else ''}. A largest drop in points is tested"
    )


def _samples(current: ScoredRun, baseline: ScoredRun, rules: Rules) -> list[Check]:
    checks = []
    new = sorted(current.samples - baseline.samples)
    if new and rules.new == "must-pass":
        failing = [sample for sample in new if 0.0 in current.passes.get(OVERALL, {}).get(sample, [0.0])]
        message = f"{len(failing):,} of {len(new):,} new samples do not pass" + _some(failing)
        checks.append(_check("new samples", not failing, message))
    removed = sorted(baseline.samples - current.samples)
    if removed and rules.removed != "ignore":
        are = "sample is" if len(removed) == 1 else "samples are"
        message = f"{len(removed):,} baseline {are} missing from this run" + _some(removed)
        checks.append(_check("removed samples", rules.removed == "warn", message, warning=rules.removed == "warn"))
    return checks


def _some(samples: list[str]) -> str:
    return f": {', '.join(samples[:5])}{' …' if len(samples) > 5 else ''}" if samples else ""


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
