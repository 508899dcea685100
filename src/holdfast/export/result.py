"""A run as `holdfast.evaluate` returns it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.data.dataset import Dataset
from holdfast.errors import HoldfastError
from holdfast.report.run_view import RunView
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.store.metrics import Metrics


@dataclass(frozen=True, repr=False)
class Run:
    """A run as it is on disk after `evaluate`."""

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
        """One entry per trial, in the dataset's order: what `results.json` has, with row, prompt and feedback.

        `row` holds the sample's fields and `prompt` the first message to the target; each of `grades` has `status`,
        `score` and `feedback`. Raises FileNotFoundError while the run is not finished.
        """
        entries: list[dict[str, Any]] = msgspec.json.decode((self.path / "results.json").read_bytes())["trials"]
        view = RunView(RunDir(self.path))
        trials = {trial.output.key: trial for trial in view.trials()}
        rows: dict[str, dict[str, Any]] = {}
        with suppress(HoldfastError):  # the dataset may be gone
            rows = {sample.id: dict(sample.fields) for sample in Dataset(view.spec)}
        for entry in entries:
            trial = trials.get(entry["key"])
            entry["row"] = rows.get(entry["sample"], {})
            entry["prompt"] = None if trial is None else _prompt(trial.output.messages)
            for grade in [] if trial is None else trial.grades:
                if grade.grader in entry["grades"]:
                    entry["grades"][grade.grader]["feedback"] = grade.feedback
        return entries

    def outputs(self) -> Iterator[dict[str, Any]]:
        """The transcripts, in the order in which they finished."""
        for ref in RunDir(self.path).load(mend=False).outputs.values():
            yield msgspec.json.decode(ref.line.read())

    def __repr__(self) -> str:
        if self.metrics is None:
            why = (self.reason or "not graded").partition("\n")[0]
            return f"<Run {self.path}, not finished: {why}>"
        return f"<Run {_summary(self.metrics)}, {self.path}>"

    def _repr_html_(self) -> str:
        """What a notebook shows for a run: its numbers by grader."""
        if self.metrics is None:
            return f"<p>{escape(repr(self))}</p>"
        rows = "".join(
            "<tr>"
            + "".join(
                f"<td>{cell}</td>"
                for cell in (
                    escape(name),
                    _number(values.score),
                    f"{_number(values.low)} – {_number(values.high)}",
                    values.passed,
                    values.n,
                )
            )
            + "</tr>"
            for name, values in [*self.metrics.graders.items(), ("overall", self.metrics.overall)]
            if values is not None
        )
        head = "".join(f"<th>{title}</th>" for title in ("grader", "score", "95 % interval", "passed", "graded"))
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" if rows else ""
        return f"<p>{escape(_summary(self.metrics))}</p>{table}<p><code>{escape(str(self.path))}</code></p>"


def _summary(metrics: Metrics) -> str:
    parts = [f"{metrics.eval} · {metrics.target}"]
    if metrics.score is not None and (overall := metrics.overall) is not None:
        parts.append(f"score {metrics.score:.3f}")
        parts.append(f"{overall.passed} of {overall.passed + overall.failed} passed")
    parts.append(f"coverage {metrics.coverage:.1%}")
    return ", ".join(parts)


def _prompt(messages: list[dict[str, Any]]) -> Any:
    return next((message.get("content") for message in messages if message.get("role") == "user"), None)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
