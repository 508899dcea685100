"""Trials are counted from columns as they are counted one by one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from holdfast.apps.view.columns import open_columns
from holdfast.apps.view.counting import Counting, count_rows, count_run
from holdfast.apps.view.site import Site
from holdfast.report.overview import Overview, run_overview
from holdfast.report.run_view import RunView
from holdfast.report.trial_counts import TrialsTally, count_trial
from holdfast.store.rundir import RunDir
from tests.apps.view.journals import JournaledRun, whole_trial
from tests.support.lab import Lab, rows
from tests.support.running import PATIENCE, Server, module_server, wait_for
from tests.support.showcase import agent_run, long_run

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.apps.view.columns import Columns
    from holdfast.report.trial_counts import TrialNumbers

provider = module_server()


def from_trials(run: Path) -> Overview:
    view = RunView(RunDir(run))
    tally = TrialsTally(view)
    for trial in view.everything():
        count_trial(tally, view.places, trial)
    return run_overview(view, tally)


def from_columns(run: Path) -> Overview:
    view = RunView(RunDir(run))
    return run_overview(view, count_rows(view, open_columns(RunDir(run))))


@pytest.mark.parametrize("trials", [1, 2])
def test_a_finished_run_with_checkpoints(tmp_path: Path, provider: Server, trials: int) -> None:
    run = long_run(tmp_path, provider.base_url, turns=6, every=1, trials=trials)
    counted = from_columns(run)
    assert counted == from_trials(run)
    assert any(step.ended_here and step.not_reached for step in counted.funnel or [])


def test_a_run_with_graders_for_some_rows_and_copied_outputs(tmp_path: Path, provider: Server) -> None:
    some = {"type": "text", "name": "some", "contains": "4", "where": "id in ('s0', 's4')"}
    lab = Lab(tmp_path, provider, rows=rows(6), spec={"checkpoints": [{"after_turn": 1, "graders": [some]}]})
    lab.eval()
    lab.rows += rows(2, start=6)
    run = lab.eval().run
    counted = from_columns(run)
    assert counted == from_trials(run)
    (step,) = counted.funnel or []
    assert (step.trials, step.passed, step.failed) == (2, 1, 1)
    assert counted.activity is not None and sum(each.outputs for each in counted.activity.bins) == 2


def test_an_unfinished_run(tmp_path: Path) -> None:
    run = agent_run(tmp_path)
    counted, expected = from_columns(run), from_trials(run)
    assert (counted.funnel, counted.graders, counted.overall) == (expected.funnel, expected.graders, expected.overall)
    assert (counted.histograms, counted.activity) == (expected.histograms, expected.activity)
    assert sum((counted.statuses or {}).values()) == 4


def test_a_large_run_is_counted_by_a_helper_process(
    tmp_path: Path, provider: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_INDEX_BYTES", "1")
    run = RunDir(Lab(tmp_path, provider, rows=rows(6)).eval().run)
    view, expected = RunView(run), from_trials(run.path)
    monkeypatch.setattr("holdfast.apps.view.counting._MANY", 0)
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.apps.view.counting.count_rows", None)  # the helper process has its own
        assert count_run(view, open_columns(run)) == expected
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert count_run(view, open_columns(run)) == expected  # in this process


def test_a_run_is_counted_while_trials_end_in_other_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = JournaledRun(tmp_path)
    for event in (*whole_trial(0, 1), *whole_trial(0, 2)):
        run.append(event)
    columns, add = open_columns(run.rundir), TrialsTally.add

    def add_and_go_on(tally: TrialsTally, trial: TrialNumbers) -> None:
        add(tally, trial)
        for event in whole_trial(2, 1, score=0.0):
            run.append(event)
        columns.refresh()

    monkeypatch.setattr(TrialsTally, "add", add_and_go_on)
    assert count_rows(columns.view, columns).statuses == {"passed": 2, "failed": 1}


def test_a_page_does_not_wait_for_the_count_of_a_large_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = JournaledRun(tmp_path)
    for event in whole_trial(0, 1):
        run.append(event)
    run.report()
    monkeypatch.setattr("holdfast.apps.view.counting._MANY", 0)
    monkeypatch.setattr("holdfast.apps.view.counting._PATIENCE", PATIENCE)
    go, count = threading.Event(), count_run

    def count_slowly(view: RunView, columns: Columns) -> Overview:
        assert go.wait(PATIENCE)
        return count(view, columns)

    monkeypatch.setattr("holdfast.apps.view.counting.count_run", count_slowly)
    site = Site(tmp_path / "none", tmp_path / "home", {"run": run.rundir})
    counting, view = Counting(site), site.run("run")
    try:
        first = counting.overview("run", view)
        assert (first.outputs, first.counted) == (1, False)
    finally:
        go.set()
    wait_for(lambda: counting.overview("run", view).counted, "the count")
    site.close()
