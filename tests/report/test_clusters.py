"""Samples that belong together: intervals and comparisons over clusters, and what they are part of."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.errors import ConfigError
from holdfast.report.stats import cluster_parts, gaps, paired_difference
from holdfast.report.tally import Tally
from tests.support.lazy import LazyModule
from tests.support.running import lines
from tests.support.specs import command, who

if TYPE_CHECKING:
    from pathlib import Path

numpy = LazyModule("numpy")
members = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.3, 1.0])), min_size=2, max_size=30)


def tallied(rows: list[tuple[int, float]], *, clustered: bool) -> Any:
    tally = Tally(1)
    for cluster, score in rows:
        tally.add([("passed" if score >= 0.5 else "failed", score)], cluster if clustered else None)
    return tally.summary()


@given(members)
def test_the_standard_error_is_that_of_the_sandwich_estimator(rows: list[tuple[int, float]]) -> None:
    summary, plain = tallied(rows, clustered=True), tallied(rows, clustered=False)
    assert summary.score == pytest.approx(plain.score) and summary.n == plain.n
    clusters = sorted({cluster for cluster, _ in rows})
    if len(clusters) < 2:
        assert summary.stderr is None
        return
    groups = numpy.array([clusters.index(cluster) for cluster, _ in rows])
    residuals = numpy.array([score for _, score in rows]) - summary.score
    meat = sum(residuals[groups == group].sum() ** 2 for group in range(len(clusters)))
    expected = math.sqrt(len(clusters) / (len(clusters) - 1) * meat) / len(rows)
    assert summary.stderr == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=2, max_size=20))
def test_clusters_of_one_sample_change_nothing(scores: list[float]) -> None:
    rows = list(enumerate(scores))
    assert tallied(rows, clustered=True) == tallied(rows, clustered=False)


@given(members)
def test_a_paired_difference_over_clusters_of_one_is_the_plain_one(rows: list[tuple[int, float]]) -> None:
    first = {str(number): [score] for number, (_, score) in enumerate(rows)}
    second = {str(number): [0.5] for number in range(len(rows))}
    plain = paired_difference(first, second)
    alone = paired_difference(first, second, clusters={name: name for name in first})
    assert plain is not None and alone is not None
    assert alone.stderr == pytest.approx(plain.stderr) and alone.mean == plain.mean
    clusters = {str(number): str(cluster) for number, (cluster, _) in enumerate(rows)}
    sums, sizes = zip(*cluster_parts(gaps(first, second), clusters), strict=True)
    assert sum(sums) == pytest.approx(sum(gaps(first, second).values())) and sum(sizes) == len(first)


def answer(question: str) -> str:
    return "yes" if question.startswith("good") else "no"


def other_answer(question: str) -> str:
    return "yes"


ROWS = [
    {"id": f"{article}-{number}", "question": f"{kind} {number}", "article": article}
    for article, kind in enumerate(["good", "good", "bad", "good", "bad"])
    for number in range(4)
]


def run(folder: Path, target: Any = answer, **keys: Any) -> Any:
    return holdfast.evaluate(
        name="articles",
        samples=ROWS,
        prompt="{{ question }}",
        target=target,
        graders=[{"type": "exact", "expected": "yes"}],
        runs_dir=folder / "runs",
        **keys,
    )


def test_a_finished_run_gets_another_report_and_nothing_runs_again(tmp_path: Path) -> None:
    plain = run(tmp_path)
    before = plain.metrics.overall
    clustered = run(tmp_path, cluster="article")
    assert clustered.path == plain.path and len(lines(clustered.path / "outputs.jsonl")) == 20
    after = clustered.metrics.overall
    assert after.score == before.score == 0.6
    assert after.high - after.low > 1.5 * (before.high - before.low), "four questions about one article say one thing"
    assert json.loads((clustered.path / "metrics.json").read_text())["cluster"] == "article"
    assert run(tmp_path).metrics.overall == before


def test_a_comparison_flips_whole_clusters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = run(tmp_path, cluster="article"), run(tmp_path, other_answer, cluster="article")
    ended = command(monkeypatch, capsys, tmp_path, "compare", other.path, one.path, "--json")
    [compared] = json.loads(ended.out)
    [row] = [row for row in compared["metrics"] if row["metric"] == "exact"]
    assert row["test"] == "sign-flip permutation of clusters"
    assert row["p_value"] == 0.5, "two of five articles differ, so half of their sign patterns are as extreme"


def test_a_field_that_no_row_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cluster: no sample has a field 'artcle'"):
        who(tmp_path, cluster="artcle")


def test_the_cluster_field_is_part_of_no_key(tmp_path: Path) -> None:
    assert who(tmp_path).id == who(tmp_path, cluster="question").id


def test_pass_all_k_is_in_metrics_and_can_be_gated(tmp_path: Path) -> None:
    def second_time_lucky(context: holdfast.Context) -> str:
        return "yes" if context.trial == 2 else "no"

    tried = run(tmp_path, second_time_lucky, trials=2, gate={"exact/pass^2": 0.5})
    metrics = tried.metrics.graders["exact"]
    assert metrics.pass_at == {1: 0.5, 2: 1.0} and metrics.pass_all == {2: 0.0}
    assert tried.exit_code == 1
    assert json.loads((tried.path / "metrics.json").read_text())["metrics"]["exact"]["pass^2"] == 0.0
