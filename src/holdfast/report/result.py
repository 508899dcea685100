"""Runs in Python: read back, shown in notebooks, compared and gated."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.data.dataset import Dataset
from holdfast.display.format import html_table, html_text
from holdfast.errors import Exit, HoldfastError, UsageError
from holdfast.report.compare import compare_scores, read_scores
from holdfast.report.gate import Rules, gate_run, margin_of
from holdfast.report.run_view import RunView
from holdfast.report.tables import columns, rows
from holdfast.store.files import read_file
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from holdfast.report.compare import Comparison
    from holdfast.report.gate import GateResult, NewPolicy, RemovedPolicy
    from holdfast.spec.eval_schema import Inconclusive
    from holdfast.store.metrics import Metrics


@dataclass(frozen=True, repr=False)
class Run:
    """A run as it is on disk. In a notebook it displays as a table."""

    path: Path
    """the run directory"""
    finished: bool
    metrics: Metrics | None
    """the numbers of `metrics.json`; None when the run is not finished"""
    exit_code: int
    """what the command would have returned: 0 finished, 1 gate not met, 3 not finished"""
    reason: str | None
    """why it is not finished"""

    @property
    def score(self) -> float | None:
        """The weighted mean over all graders."""
        return None if self.metrics is None else self.metrics.score

    def results(self) -> list[dict[str, Any]]:
        """Return an entry per trial in the dataset's order: what `results.json` has, with row, prompt and feedback.

        `row` holds the sample's fields and `prompt` the first message to the target after any `history`; each of
        `grades` has `status`, `score` and `feedback`. Raises FileNotFoundError while the run is not finished.
        """
        report = read_file(self.path / "results.json", sys.maxsize)
        entries: list[dict[str, Any]] = msgspec.json.decode(report)["trials"]
        view = self.view()
        trials = {trial.output.key: trial for trial in view.trials()}
        rows: dict[str, dict[str, Any]] = {}
        with suppress(HoldfastError):  # the dataset may be gone
            rows = {sample.id: dict(sample.fields) for sample in Dataset(view.spec)}
        for entry in entries:
            trial = trials.get(entry["key"])
            entry["row"] = rows.get(entry["sample"], {})
            entry["prompt"] = None if trial is None else trial.output.prompt
            for grade in [] if trial is None else trial.grades:
                if grade.grader in entry["grades"]:
                    entry["grades"][grade.grader]["feedback"] = grade.feedback
        return entries

    def outputs(self) -> Iterator[dict[str, Any]]:
        """The transcripts, in the order in which they finished."""
        outputs = RunDir(self.path).load(repair=False).all_outputs()
        for line in sorted(ref.line for _, ref in outputs):
            yield msgspec.json.decode(line.read())

    def __repr__(self) -> str:
        if self.metrics is None:
            why = (self.reason or "not graded").partition("\n")[0]
            return f"<Run {self.path}, not finished: {why}>"
        return f"<Run {_summary(self.metrics)}, {self.path}>"

    def _repr_html_(self) -> str:
        """Return the numbers by grader as a table, for notebooks."""
        if self.metrics is None:
            return html_text(repr(self))
        cells = [
            (
                name,
                _number(values.score),
                f"{_number(values.low)} – {_number(values.high)}",
                values.passed,
                values.n,
            )
            for name, values in [*self.metrics.graders.items(), ("overall", self.metrics.overall)]
            if values is not None
        ]
        titles = ("grader", "score", "95 % interval", "passed", "graded")
        table = html_table(titles, cells) if cells else ""
        notices = "".join(html_text(f"note: {notice}") for notice in self.metrics.notices)
        return f"{html_text(_summary(self.metrics))}{table}{notices}{html_text(str(self.path))}"

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row per trial and the columns of `holdfast export --to csv`."""
        view = self.view()
        return _import("pandas").DataFrame(list(rows(view, typed=True)), columns=columns(view))

    def to_polars(self) -> Any:
        """Return a polars DataFrame with a row per trial and the columns of `holdfast export --to csv`."""
        view = self.view()
        options = {"schema": columns(view), "infer_schema_length": None, "strict": False}
        return _import("polars").DataFrame(list(rows(view, typed=True)), **options)

    def view(self) -> RunView:
        """Return the run as exporters read it: rows, trials and verdicts, one after another."""
        return RunView(RunDir(self.path))


def load_run(path: str | Path) -> Run:
    """Read a run, finished or not, from its directory."""
    view = RunView(RunDir(Path(path)))
    metrics = view.metrics
    if metrics is None:
        reason = f"resume it with `{shlex.join(['holdfast', 'resume', str(path)])}`"
        return Run(Path(path), finished=False, metrics=None, exit_code=Exit.UNFINISHED, reason=reason)
    gate = view.rundir.read_gate()
    code = Exit.FINISHED if gate is None or gate.passed else Exit.GATE_FAILED
    return Run(Path(path), finished=True, metrics=metrics, exit_code=code, reason=None)


def compare(first: Run | str | Path, second: Run | str | Path) -> Comparison:
    """Compare two finished runs on the samples they share, with paired statistics, as `holdfast compare` does."""
    return compare_scores(read_scores(_view(first)), read_scores(_view(second)))


def gate(
    run: Run | str | Path,
    baseline: Run | str | Path | None = None,
    *,
    minima: Mapping[str, float] | None = None,
    max_drop: float | str | None = None,
    confidence: float = 0.95,
    inconclusive: Inconclusive = "pass",
    max_regression_pct: float | None = None,
    golden: Collection[str] = (),
    golden_rows: bool = True,
    new: NewPolicy = "ignore",
    removed: RemovedPolicy = "warn",
) -> GateResult:
    """Check a finished run against minimum values, a baseline and samples that must pass, as `holdfast gate` does.

    `max_drop` is how far a metric may fall below the baseline, as in `"2pt"`, the default, or 0.02.
    `max_regression_pct` is the allowed loss in percent of the baseline's value instead, without a test.
    `minima` maps metrics, such as `score`, `passed`, a grader's name or `NAME/pass@3`, to values from 0 to 1.
    `golden` are ids of samples that must pass, with `golden_rows` also samples whose row has `golden: true`.
    The result is true if all checks passed.
    """
    margin = margin_of(max_drop, max_regression_pct)
    rules = Rules(margin, confidence, inconclusive, max_regression_pct, golden, minima, new, removed)
    return gate_run(_view(run), None if baseline is None else _view(baseline), rules, golden_rows=golden_rows)


def _view(run: Run | str | Path) -> RunView:
    return run.view() if isinstance(run, Run) else RunView(RunDir(Path(run)))


def _import(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise UsageError(f"{package} is not installed", remedy=f"pip install {package}") from None


def _summary(metrics: Metrics) -> str:
    parts = [f"{metrics.eval} · {metrics.target}"]
    if metrics.score is not None and (overall := metrics.overall) is not None:
        parts.append(f"score {metrics.score:.3f}")
        parts.append(f"{overall.passed} of {overall.passed + overall.failed} passed")
    parts.append(f"coverage {metrics.coverage:.1%}")
    return ", ".join(parts)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
