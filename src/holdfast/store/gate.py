"""`gate.json`: whether a finished run met the conditions under `gate` of its eval file.

It is a separate file because it depends on more than the run: conditions may change after the run is finished, and a
baseline is another run. `holdfast eval` rewrites it each time, without running anything.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from holdfast.store.records import SCHEMA_VERSION

Verdict = Literal["worse", "not worse", "cannot tell"]


class Check(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A check of a gate."""

    what: str
    """the metric, or the subject of another check"""
    passed: bool
    """true if the condition is met"""
    warning: bool
    """true if it is met, and worth a look all the same"""
    message: str
    """the result in words"""
    metric: str | None = None
    """only for metrics: the name"""
    value: float | None = None
    """value in this run; against a baseline, over the samples that both runs have"""
    minimum: float | None = None
    """only for a minimum: the least value that is accepted"""
    before: float | None = None
    """only against a baseline, like all that follow: value in the baseline"""
    verdict: Verdict | None = None
    """`worse`, `not worse` or `cannot tell`"""
    samples: int | None = None
    """number of samples that both runs have"""
    fell: int | None = None
    """number of samples whose score is lower than in the baseline"""
    rose: int | None = None
    """number of samples whose score is higher"""
    difference: float | None = None
    """value minus baseline"""
    low: float | None = None
    """lower bound of the difference, at the gate's confidence"""
    high: float | None = None
    """upper bound, after Holm's correction"""
    p_value: float | None = None
    """probability of a difference this low if the system did not change"""
    adjusted: float | None = None
    """this probability after Holm's correction over all metrics"""
    detectable: float | None = None
    """the smallest loss that this number of samples shows as `worse` four times out of five"""
    rows_for_margin: int | None = None
    """number of samples that would show a loss as large as the margin"""

    @property
    def mark(self) -> str:
        """`ok`, `warn` or `FAIL`, as wide as the widest of them."""
        return "FAIL" if not self.passed else "warn" if self.warning else "ok  "


class GateOutcome(Struct, frozen=True, kw_only=True):
    """The outcome of a run's gate: the content of `gate.json`."""

    schema_version: str = field(name="schemaVersion", default=SCHEMA_VERSION)
    """version of the file, MAJOR.MINOR"""
    passed: bool
    """true if all checks passed"""
    baseline: str | None
    """the run that this one was compared with, as the eval file names it; null without one"""
    checks: list[Check]
    """the checks, described below"""

    @property
    def missed(self) -> tuple[str, ...]:
        """The conditions that are not met, in words."""
        return tuple(check.message for check in self.checks if not check.passed)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Conditions that are met, and worth a look all the same."""
        return tuple(check.message for check in self.checks if check.passed and check.warning)
