"""Decide whether a run may pass: against a baseline, minimum scores and samples that must pass. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from holdfast.display.notebook import html_table, html_text
from holdfast.errors import UsageError
from holdfast.report.compare import OVERALL, ScoredRun, changed_graders, metric_names, read_scores, shared_names

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from holdfast.report.run_view import RunView
    from holdfast.store.metrics import Metrics

NewPolicy = Literal["ignore", "must-pass"]
RemovedPolicy = Literal["ignore", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One thing the gate looked at."""

    what: str
    passed: bool
    message: str
    warning: bool = False
    """passed, and worth a look all the same"""

    @property
    def mark(self) -> str:
        """`ok`, `warn` or `FAIL`, as wide as the widest of them."""
        return "FAIL" if not self.passed else "warn" if self.warning else "ok  "


@dataclass(frozen=True)
class Rules:
    """Conditions of a gate."""

    max_regression_pct: float = 0.0
    golden: Collection[str] = ()
    minima: Mapping[str, float] | None = None
    new: NewPolicy = "ignore"
    removed: RemovedPolicy = "warn"


@dataclass(frozen=True, repr=False)
class GateResult:
    """The result of a gate, check by check. True if all checks passed."""

    checks: tuple[Check, ...]
    notices: tuple[str, ...] = ()
    """what the gate could not look at"""

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
        return "\n".join([*(f"{check.mark}  {check.message}" for check in self.checks), self._conclusion])

    def _repr_html_(self) -> str:
        """Return the checks as a table, for notebooks."""
        rows = [(check.mark, check.what, check.message) for check in self.checks]
        return html_text(self._conclusion) + html_table(("", "check", ""), rows)

    @property
    def _conclusion(self) -> str:
        return f"gate {'passed' if self else 'failed'}"


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
    return GateResult(tuple(check_gate(run, base, replace(rules, golden=golden))), tuple(notices))


def _check_minima_exist(metrics: Metrics, minima: Mapping[str, float]) -> None:
    for name, minimum in minima.items():
        if metric_value(metrics, name) is None and name not in metrics.graders:
            names = ", ".join([*metrics.graders, "score", "passed", "coverage"])
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
        checks += _regressions(current, baseline, rules.max_regression_pct)
        checks += _samples(current, baseline, rules)
    return checks


def check_minima(metrics: Metrics, minima: Mapping[str, float]) -> list[Check]:
    """Check that metrics reach their minima, as `gate:` of an eval file and `holdfast gate --min` ask."""
    checks = []
    for name, minimum in minima.items():
        value = metric_value(metrics, name)
        passed = value is not None and value >= minimum
        checks.append(Check(f"min {name}", passed, f"{name} is {_shown(value)} (minimum {minimum:g})"))
    return checks


def missed_minima(metrics: Metrics, minima: Mapping[str, float]) -> tuple[str, ...]:
    """Describe the metrics that do not reach their minimum."""
    return tuple(check.message for check in check_minima(metrics, minima) if not check.passed)


def metric_value(metrics: Metrics, name: str) -> float | None:
    """Return a metric by its name: `score`, `passed`, `coverage`, a grader's, or one of its numbers: `name/pass@2`."""
    value: object
    if name in ("score", "passed", "coverage"):
        value = getattr(metrics, name)
    elif name in metrics.graders:
        value = metrics.graders[name].score
    else:  # a checkpoint's name has a slash of its own, so the number is what follows the last one
        grader, _, number = name.rpartition("/")
        value = metrics.graders[grader].to_dict().get(number) if grader in metrics.graders else None
    return float(value) if isinstance(value, int | float) else None


def _golden(current: ScoredRun, sample: str) -> Check:
    passes = current.passes.get(OVERALL, {}).get(sample)
    if sample not in current.samples:
        return Check(f"golden {sample}", False, f"golden sample {sample} is not in this run")
    if passes is None:
        return Check(f"golden {sample}", False, f"golden sample {sample} has no verdict in this run")
    failed = passes.count(0.0)
    message = (
        f"golden sample {sample} passes"
        if not failed
        else f"golden sample {sample} fails {failed} of {len(passes)} trials"
    )
    return Check(f"golden {sample}", not failed, message)


def _regressions(current: ScoredRun, baseline: ScoredRun, allowed: float) -> list[Check]:
    names = shared_names(current, baseline)
    checks = [_fallen(name, current, baseline, allowed) for name in names]
    changed = changed_graders(baseline, current)
    for name in metric_names(baseline):
        if name in changed:
            differences = ", ".join(changed[name])
            message = f"{name} is not the same grader as in the baseline ({differences}): it cannot be compared"
            checks.append(Check(name, False, message))
        elif name not in names and name != OVERALL:
            checks.append(Check(name, False, f"{name} is in the baseline and not in this run"))
    if not checks:
        checks.append(Check("metrics", False, "the two runs have no metric in common: there is nothing to compare"))
    if current.metrics.coverage < 1:  # errors were accepted: what is missing could hide what has become worse
        checks.append(_fallen("coverage", current, baseline, allowed))
    return checks


def _fallen(name: str, current: ScoredRun, baseline: ScoredRun, allowed: float) -> Check:
    now, before = metric_value(current.metrics, name), metric_value(baseline.metrics, name)
    if now is None or before is None:
        return Check(name, False, f"{name} is {_shown(now)}; it was {_shown(before)}")
    drop = (before - now) / before * 100 if before else 0.0
    message = f"{name} {before:.4g} → {now:.4g}" + (f", {drop:.1f} % lower" if drop > 0 else "")
    return Check(name, drop <= allowed + 1e-9, f"{message} (allowed: {allowed:g} %)")


def _samples(current: ScoredRun, baseline: ScoredRun, rules: Rules) -> list[Check]:
    checks = []
    new = sorted(current.samples - baseline.samples)
    if new and rules.new == "must-pass":
        failing = [sample for sample in new if 0.0 in current.passes.get(OVERALL, {}).get(sample, [0.0])]
        message = f"{len(failing):,} of {len(new):,} new samples do not pass" + _some(failing)
        checks.append(Check("new samples", not failing, message))
    removed = sorted(baseline.samples - current.samples)
    if removed and rules.removed != "ignore":
        are = "sample is" if len(removed) == 1 else "samples are"
        message = f"{len(removed):,} baseline {are} missing from this run" + _some(removed)
        checks.append(Check("removed samples", rules.removed == "warn", message, warning=rules.removed == "warn"))
    return checks


def _some(samples: list[str]) -> str:
    return f": {', '.join(samples[:5])}{' …' if len(samples) > 5 else ''}" if samples else ""


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
