"""A run in numbers: the funnel counts every trial at every checkpoint, and plots leave nothing out."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.report.overview import Overview, changes_since, run_overview
from holdfast.report.run_view import RunView
from holdfast.report.stats import make_histogram, score_histogram, wilson
from holdfast.report.timeline import trial_timeline
from holdfast.report.trial_counts import TrialsTally, count_trial
from holdfast.store.catalog import find_runs
from holdfast.store.metrics import Metrics
from holdfast.store.rundir import RunDir
from tests.support.lab import Lab, rows
from tests.support.running import Server, holdfast, module_server
from tests.support.showcase import agent_run, long_run

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.store.rundir import Manifest

provider = module_server(fail={"500": 0.1}, fail_first=1)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return agent_run(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory, provider: Server) -> Path:
    """Conversations of six turns with a checkpoint after every second, in two trials."""
    return long_run(tmp_path_factory.mktemp("talks"), provider.base_url, turns=8, every=2)


def overview(run: Path) -> Overview:
    view = RunView(RunDir(run))
    tally = TrialsTally(view)
    for trial in view.everything():
        count_trial(tally, view.places, trial)
    return run_overview(view, tally)


class TestFunnel:
    def test_the_funnel_counts_the_bands_of_all_trials(self, talks: Path) -> None:
        view = RunView(RunDir(talks))
        bands: Counter[tuple[int, str]] = Counter()
        ended: Counter[int] = Counter()
        for trial in view.trials():
            for turn in trial_timeline(view, trial).turns:
                if turn.checkpoint is not None:
                    bands[turn.number, turn.checkpoint.state] += 1
                    ended[turn.number] += turn.checkpoint.ended_here
        funnel = overview(talks).funnel or []
        assert [step.turn for step in funnel] == [2, 4, 6, 8]
        for step in funnel:
            assert step.trials == 48
            counts = {
                "passed": step.passed,
                "failed": step.failed,
                "error": step.error,
                "not_reached": step.not_reached,
            }
            assert counts == {state: bands[step.turn, state] for state in counts}
            assert step.ended_here == ended[step.turn]
            assert step.reached == step.passed + step.failed + step.error
        assert [(step.failed, step.ended_here, step.not_reached) for step in funnel] == [
            (0, 0, 0),
            (12, 12, 0),
            (12, 0, 12),
            (12, 12, 12),
        ]

    def test_the_pass_rate_is_of_those_that_came_so_far(self, agent: Path) -> None:
        first, second = overview(agent).funnel or []
        assert (first.reached, first.passed, first.failed, first.ended_here, first.not_reached) == (3, 2, 1, 1, 0)
        assert (second.reached, second.passed, second.failed, second.ended_here, second.not_reached) == (2, 1, 1, 0, 1)
        assert (first.share, second.share) == (2 / 3, 1 / 2)
        assert (second.low, second.high) == wilson(1 / 2, 2)
        assert (first.names, first.stops, second.stops) == (["knows"], True, False)

    def test_a_run_without_checkpoints_has_none(self, tmp_path: Path, provider: Server) -> None:
        assert overview(Lab(tmp_path, provider).eval().run).funnel == []


class TestNumbers:
    def test_numbers_of_a_finished_run_are_the_reported_ones(self, talks: Path) -> None:
        metrics = Metrics.from_dict(json.loads((talks / "metrics.json").read_text()))
        page = overview(talks)
        assert page.overall == metrics.overall and page.by == metrics.by
        assert {row.name: row.metrics for row in page.graders} == metrics.graders
        assert page.rows[-1][0] == "overall" and page.passes == [1, 2]
        assert (page.tokens, page.cost, page.coverage) == (metrics.usage.tokens, metrics.usage.cost, 1.0)
        assert page.statuses == {"passed": 24, "failed": 24}

    def test_numbers_so_far_equal_a_report_of_the_same_verdicts(self, talks: Path, tmp_path: Path) -> None:
        copy = tmp_path / "run"
        shutil.copytree(talks, copy, ignore=shutil.ignore_patterns("metrics.json", "results.json"))
        finished, so_far = overview(talks), overview(copy)
        assert so_far.finished is None and so_far.overall == finished.overall
        for ours, theirs in zip(so_far.graders, finished.graders, strict=True):
            assert msgspec.structs.replace(ours.metrics, rows=None) == theirs.metrics
        assert (so_far.tokens, so_far.passed, so_far.outputs) == (finished.tokens, finished.passed, finished.outputs)
        assert so_far.cost == pytest.approx(finished.cost)

    def test_trials_without_an_output_are_counted_as_missing(self, agent: Path) -> None:
        page = overview(agent)
        assert page.statuses == {"passed": 1, "failed": 2, "error": 1}
        assert (page.outputs, page.graded, page.total, page.coverage) == (3, 3, 4, 0.75)

    def test_without_counting_there_is_what_the_report_has(self, talks: Path) -> None:
        page = run_overview(RunView(RunDir(talks)), None)
        assert not page.counted and page.overall == overview(talks).overall and page.histograms is None

    def test_an_overview_is_read_back_from_its_json(self, agent: Path, talks: Path) -> None:
        for run in (agent, talks):
            page = overview(run)
            assert msgspec.json.decode(msgspec.json.encode(page), type=Overview) == page


class TestActivity:
    def test_every_output_and_every_failed_attempt_is_in_a_bin(self, talks: Path) -> None:
        activity = overview(talks).activity
        assert activity is not None and len(activity.bins) <= 60
        assert sum(each.outputs for each in activity.bins) == 48
        errors = (talks / "errors.jsonl").read_text().splitlines()
        assert errors and sum(sum(each.errors.values()) for each in activity.bins) == len(errors)
        assert activity.kinds == ["server"]


def manifests(lab: Lab) -> list[Manifest]:
    return [manifest for run in find_runs(lab.runs) if (manifest := run.read_manifest()) is not None]


class TestChanges:
    def test_the_nearest_earlier_run_of_the_eval_is_named_with_what_changed(
        self, tmp_path: Path, provider: Server
    ) -> None:
        lab = Lab(tmp_path, provider, rows=rows(2))
        first = RunView(RunDir(lab.eval().run))
        assert changes_since(first, manifests(lab)) is None
        lab.spec["prompt"] = "Well: {{ question }}"
        lab.spec["graders"].append({"type": "text", "name": "more", "contains": "question"})
        second = RunView(RunDir(lab.eval().run))
        changes = changes_since(second, manifests(lab))
        assert changes is not None and changes.run == first.manifest.id
        assert changes.changes == ["prompt changed", "grader `more` added"]
        lab.rows.append(rows(1, start=2)[0])
        lab.write()
        holdfast("eval", "e.yaml", cwd=tmp_path)
        newest = max(map(RunView, find_runs(lab.runs)), key=lambda run: run.manifest.dataset.count)
        changes = changes_since(newest, manifests(lab))
        assert changes is not None and changes.run == second.manifest.id
        assert changes.changes == ["other rows (2 → 3)"]


@example([57646075.72577229], False)
@given(st.lists(st.floats(0, 1e9) | st.integers(0, 10**9).map(float), min_size=1), st.booleans())
def test_any_values_fall_into_at_most_sixty_bins_each_once(values: list[float], whole: bool) -> None:
    histogram = make_histogram("x", "tokens", [float(round(v)) for v in values] if whole else values, whole=whole)
    assert histogram is not None and len(histogram.bins) <= 60
    assert sum(each.count for each in histogram.bins) == len(values)
    assert all(first.high == second.low for first, second in pairwise(histogram.bins))


@given(st.lists(st.floats(0, 1), min_size=1))
def test_any_scores_fall_into_tenths(scores: list[float]) -> None:
    histogram = score_histogram("x", scores)
    assert histogram is not None and sum(each.count for each in histogram.bins) == len(scores)
    for number, each in enumerate(histogram.bins):
        last = number == 9
        assert each.count == sum(number / 10 <= score < (number + 1) / 10 or (last and score == 1) for score in scores)


def test_no_values_have_no_distribution() -> None:
    assert make_histogram("x", "seconds", []) is None and score_histogram("x", []) is None
