"""`holdfast compare`: its statistics against scipy and numpy, and what the command says."""

from __future__ import annotations

import html
import itertools
import json
import random
import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.pages.environment import environment
from holdfast.report.compare import ScoredRun, compare_metric, compare_scores, read_scores
from holdfast.report.run_view import RunView
from holdfast.report.stats import (
    LEAST_P,
    LEVEL,
    gaps,
    holm,
    mcnemar,
    mcnemar_less,
    p_text,
    paired_difference,
    sign_flip,
)
from holdfast.store.rundir import RunDir
from tests.support.lazy import LazyModule
from tests.support.patterns import CORRECT, POINTS, answered, finished_run, module_run
from tests.support.running import lines
from tests.support.specs import command

if TYPE_CHECKING:
    from pathlib import Path

np = LazyModule("numpy")
stats = LazyModule("scipy.stats")

# Statistics


@pytest.mark.parametrize(("first", "second"), [*itertools.product([0, 1, 2, 5, 9, 40], repeat=2)])
def test_mcnemar_is_scipys_exact_binomial_test(first: int, second: int) -> None:
    expected = stats.binomtest(first, first + second, 0.5).pvalue if first + second else 1.0
    assert mcnemar(first, second) == pytest.approx(expected, abs=1e-12)


def test_mcnemar_holds_for_very_many_samples() -> None:
    assert mcnemar(2_000, 2_200) == pytest.approx(stats.binomtest(2_000, 4_200, 0.5).pvalue, rel=1e-9)


def permuted(differences: list[float]) -> float:
    """Return scipy's p-value over all combinations of signs."""
    result = stats.permutation_test(
        (np.array(differences),), np.mean, permutation_type="samples", n_resamples=np.inf, vectorized=True
    )
    return float(result.pvalue)


@pytest.mark.parametrize("seed", range(12))
def test_sign_flip_is_scipys_permutation_test(seed: int) -> None:
    chance = random.Random(seed)
    differences = [round(chance.uniform(-1, 1.5), chance.choice([0, 1, 6])) for _ in range(2 + seed)]
    assert sign_flip(differences) == pytest.approx(permuted(differences), abs=1e-12)


def signed_sums(sizes: list[int]) -> dict[int, int]:
    """Return how many combinations of signs give each sum."""
    sums = Counter({0: 1})
    for size in sizes:
        sums = Counter(
            {total: sums[total - size] + sums[total + size] for total in {t + s * size for t in sums for s in (1, -1)}}
        )
    return sums


@pytest.mark.parametrize(("steps", "count"), [(1, 15), (1, 300), (2, 40), (4, 120), (10, 60), (12, 30)])
@pytest.mark.parametrize("shift", [0.0, 0.25])
def test_sign_flip_is_exact_for_scores_that_come_in_steps(steps: int, count: int, shift: float) -> None:
    chance = random.Random(steps * count)
    units = [round(steps * max(-1.0, min(1.0, chance.gauss(shift, 0.5)))) for _ in range(count)]
    differences = [unit / steps for unit in units]
    sums, observed = signed_sums(units), sum(units)
    two_sided = sum(ways for total, ways in sums.items() if abs(total) >= abs(observed))
    lower = sum(ways for total, ways in sums.items() if total <= observed)
    assert sign_flip(differences) == pytest.approx(two_sided / 2**count, abs=1e-11)
    assert sign_flip(differences, less=True) == pytest.approx(lower / 2**count, abs=1e-11)
    opposite = sign_flip([-gap for gap in differences], less=True)
    equal = sums[observed] / 2**count
    assert sign_flip(differences, less=True) + opposite == pytest.approx(1 + equal, abs=1e-11)


@pytest.mark.parametrize("seed", range(4))
def test_sign_flip_of_other_scores_is_close_and_the_same_every_time(seed: int) -> None:
    chance = random.Random(seed)
    differences = [chance.gauss(0.3, 1) ** (1 + 2 * (seed % 2)) for _ in range(17)]
    assert sign_flip(differences) == pytest.approx(permuted(differences), rel=0.03)
    assert sign_flip(differences) == sign_flip(differences)
    small = [gap * 1e-5 for gap in differences]
    assert sign_flip(small) == pytest.approx(sign_flip(differences), rel=1e-6), "the scale makes no difference"


def test_sign_flip_has_the_normal_limit() -> None:
    chance = random.Random(5)
    differences = [chance.gauss(0.02, 1) for _ in range(6_000)]
    z = sum(differences) / np.sqrt(np.square(differences).sum())
    assert sign_flip(differences) == pytest.approx(2 * stats.norm.sf(abs(z)), rel=0.01)


def test_a_p_value_is_never_0_and_one_at_the_limit_is_shown_as_a_bound() -> None:
    for differences in ([1.0] * 2_000, [0.3, 0.31, 0.7] * 700, [-0.001] * 10_000):
        assert sign_flip(differences) == LEAST_P
    assert mcnemar(0, 3_000) == mcnemar_less(0, 3_000) == LEAST_P
    row = compare_metric("m", {f"{n}": [1.0] for n in range(99)}, {f"{n}": [0.5] for n in range(99)})
    assert row is not None and p_text(row.p_value, row.p_value) == "< 1e-12"


def test_tests_of_very_many_samples_take_no_draws() -> None:
    """A million flips, and a hundred thousand scores: enumerating or drawing would not end."""
    assert 0.8 < mcnemar(499_900, 500_100) < 0.9
    chance = random.Random(1)
    assert sign_flip([chance.gauss(0.01, 0.5) for _ in range(100_000)]) < 1e-6


def test_no_difference_at_all_is_no_evidence() -> None:
    assert sign_flip([]) == sign_flip([0.0] * 30) == mcnemar(0, 0) == 1.0


@pytest.mark.parametrize(
    ("p_values", "expected"),
    [
        ([], []),
        ([0.03], [0.03]),
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),  # 3 · 0.01; 2 · 0.03; 1 · 0.04, but not below the one before
        ([0.04, 0.01, 0.03, 0.005], [0.06, 0.03, 0.06, 0.02]),
        ([0.6, 0.7], [1.0, 1.0]),
    ],
)
def test_holm_steps_down(p_values: list[float], expected: list[float]) -> None:
    assert holm(p_values) == pytest.approx(expected)


def test_the_paired_interval_is_numpys_with_trials_averaged_first() -> None:
    chance = random.Random(1)
    first = {f"s{number}": [chance.random() for _ in range(3)] for number in range(25)}
    second = {f"s{number}": [chance.random() for _ in range(2)] for number in range(5, 30)}
    difference = paired_difference(first, second)
    shared = [f"s{number}" for number in range(5, 25)]
    differences = np.array([np.mean(first[sample]) - np.mean(second[sample]) for sample in shared])
    low, high = stats.t.interval(0.95, 19, differences.mean(), stats.sem(differences))
    assert difference is not None
    assert difference.samples == 20 and gaps(first, second).keys() == set(shared)
    assert (difference.mean, difference.low, difference.high) == pytest.approx((differences.mean(), low, high))
    power = stats.norm.ppf(0.975) + stats.norm.ppf(0.8)
    assert difference.detectable == pytest.approx(power * stats.sem(differences))
    corrected = difference.corrected(sign_flip(list(differences)), 3)
    ends = stats.t.interval(1 - 0.05 / 3, 19, differences.mean(), stats.sem(differences))
    assert (corrected.low, corrected.high) == pytest.approx(ends)
    power = stats.norm.ppf(1 - 0.025 / 3) + stats.norm.ppf(0.8)
    assert corrected.detectable == pytest.approx(power * stats.sem(differences))


def test_an_interval_ends_where_scores_do() -> None:
    difference = paired_difference({"a": [1.0], "b": [1.0]}, {"a": [0.0], "b": [0.5]})
    assert difference is not None and (difference.low, difference.high) == (-1.0, 1.0)


def test_differences_without_spread_have_no_interval_and_nothing_shared_has_no_difference() -> None:
    difference = paired_difference({"a": [1.0], "b": [1.0]}, {"a": [0.0], "b": [0.0]})
    assert difference is not None and difference.mean == 1.0
    assert difference.low is difference.high is difference.detectable is None
    assert paired_difference({"a": [1.0]}, {"b": [1.0]}) is None


# The command


strong = module_run("strong", answered(18, 2))
"""20 samples, 18 right"""
weak = module_run("weak", answered(8, 12))
"""a run over the samples of `strong` with 8 right answers"""
near = module_run("near", answered(15, 1) | {f"new{number}": "no" for number in range(6)})
"""samples s0 to s15 and 6 others: of the shared ones, 15 right"""


scores = st.sampled_from([0.0, 1.0]) | st.sampled_from([0.0, 0.3, 0.5, 1.0]) | st.floats(0, 1)
pairs = st.lists(
    st.tuples(st.lists(scores, min_size=1, max_size=2), scores, st.integers(0, 3)), min_size=1, max_size=40
)


def ends(text: str) -> tuple[float, ...]:
    """Return the ends of an interval as a reader sees them."""
    return tuple(float(end) for end in re.findall(r"[+-][\d.]+(?:e-\d+)?", text))


@given(pairs, st.booleans(), st.sampled_from([1, 1, 3, 20]))
@settings(max_examples=300)
def test_an_interval_never_contradicts_its_verdict(strong: Path, rows: Any, clustered: bool, lift: int) -> None:
    """In the terminal, as JSON, and on pages: 0 is outside exactly if the first is called higher or lower."""
    run = read_scores(RunView(RunDir(strong)))
    groups = {f"s{number}": f"{group}" for number, (_, _, group) in enumerate(rows)}

    def scored(side: int) -> ScoredRun:
        values = {name: row[side] if side == 0 else [row[side] / lift] for name, row in zip(groups, rows, strict=True)}
        keys = {name: [name] for name in groups}
        clusters = {name: group for name, group in groups.items() if group != "3"} if clustered else {}
        by = {"group": groups}
        return replace(run, scores={"correct": values}, passes={"correct": values}, keys=keys, by=by, clusters=clusters)

    comparison = compare_scores(scored(0), scored(1))
    (breakdown,) = comparison.by
    together = [row for listed in breakdown.values.values() for row in listed]
    shown_on_pages: Any = environment().get_template("comparison.html").module
    for row, comparisons in [*((row, 1) for row in comparison.metrics), *((row, len(together)) for row in together)]:
        assert row.comparisons == comparisons and row.adjusted == min(1.0, row.p_value * comparisons)
        differs = row.verdict in ("higher", "lower")
        assert differs == (row.adjusted < LEVEL)
        page = str(shown_on_pages.difference(row))
        assert row.interval in page and (row.p_text in html.unescape(page))
        if row.low is None or row.high is None:
            assert not differs and row.difference == 0
            continue
        assert row.low <= row.difference <= row.high
        for low, high in ((row.low, row.high), ends(row.interval)):
            assert (low > 0 or high < 0) == differs
            assert (low > 0) == (row.verdict == "higher")


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: Any, capsys: Any) -> Any:
    return lambda *arguments: command(monkeypatch, capsys, tmp_path, "compare", *arguments)


def keys_of(run: Path) -> dict[str, str]:
    return {output["sample"]: output["key"] for output in lines(run / "outputs.jsonl")}


def test_a_clear_difference_is_reported_with_its_test_and_its_flips(compare: Any, strong: Path, weak: Path) -> None:
    ended = compare(strong, weak, "--json")
    assert ended.code == 0
    (comparison,) = json.loads(ended.out)
    (row,) = comparison["metrics"]
    assert (row["metric"], row["first"], row["second"], row["samples"]) == ("correct", 0.9, 0.4, 20)
    differences = np.array([0.0] * 8 + [1.0] * 10 + [0.0] * 2)
    low, high = stats.t.interval(0.95, 19, 0.5, stats.sem(differences))
    assert (row["difference"], row["low"], row["high"]) == pytest.approx((0.5, low, high))
    assert row["test"] == "McNemar, exact"
    assert row["p_value"] == row["adjusted"] == pytest.approx(stats.binomtest(0, 10).pvalue)
    assert row["verdict"] == "higher"
    ours, theirs = keys_of(strong), keys_of(weak)
    assert comparison["flips"] == [
        {"sample": sample, "metric": "correct", "gained": True, "keys": [ours[sample], theirs[sample]]}
        for sample in [f"s{number}" for number in range(8, 18)]
    ]
    assert comparison["only_first"] == comparison["only_second"] == []


def test_graders_are_compared_only_where_they_are_the_same_grader(compare: Any, tmp_path: Path) -> None:
    answers = {f"s{number}": str(number) for number in range(6)}
    rows = {sample: {"expected": 3} for sample in answers}

    def run(name: str, tolerance: float, **keys: Any) -> Path:
        graders = [{"type": "number", "name": "near", "tolerance": tolerance}, {"type": "number", "name": "exact"}]
        return finished_run(tmp_path / name, answers, rows=rows, graders=graders, **keys)

    strict, loose = run("strict", 0.5), run("loose", 100)
    (comparison,) = json.loads(compare(loose, strict, "--json").out)
    assert [row["metric"] for row in comparison["metrics"]] == ["exact"], (
        "neither the changed grader nor passing all of them"
    )
    assert comparison["not_compared"] == ["near"]
    assert comparison["differences"] == ["grader `near` (tolerance 100.0 → 0.5)"]
    shown = compare(loose, strict).out
    assert "the runs differ in: grader `near` (tolerance 100.0 → 0.5)" in shown
    assert "near: not compared, because it is not the same grader in both runs" in shown


def test_a_row_that_is_read_in_another_way_does_not_make_another_grader(compare: Any, tmp_path: Path) -> None:
    few = finished_run(tmp_path / "few", answered(3, 1))
    more = finished_run(tmp_path / "more", answered(3, 1) | {"x": "yes"}, rows={"x": {"expected": ["yes", "Yes"]}})
    (comparison,) = json.loads(compare(few, more, "--json").out)
    assert comparison["not_compared"] == [] and [row["metric"] for row in comparison["metrics"]] == ["correct"]


def test_differences_between_two_runs_are_named(compare: Any, strong: Path, tmp_path: Path) -> None:
    other = finished_run(tmp_path / "other", answered(18, 2), prompt="{{ id }}!", system="Be brief.")
    (comparison,) = json.loads(compare(strong, other, "--json").out)
    assert comparison["differences"] == ["prompt changed", "system added"]
    assert compare(strong, strong).out.count("the runs differ") == 0


def test_another_threshold_is_named_and_passing_is_not_compared(compare: Any, tmp_path: Path) -> None:
    answers = {f"s{number}": f"0.{number}" for number in range(8)}
    low, high = (
        finished_run(tmp_path / name, answers, graders=[{**POINTS[0], "threshold": limit}])
        for name, limit in (("low", 0.2), ("high", 0.6))
    )
    (comparison,) = json.loads(compare(low, high, "--json").out)
    assert comparison["differences"] == ["threshold of `points` 0.2 → 0.6"]
    assert comparison["flips"] == [] and comparison["metrics"][0]["difference"] == 0.0


def test_runs_whose_only_grader_differs_are_refused(compare: Any, strong: Path, tmp_path: Path) -> None:
    other = finished_run(tmp_path / "other", answered(18, 2), graders=[{**CORRECT[0], "ignore_case": True}])
    ended = compare(strong, other)
    assert ended.code == 2 and "`correct` differs: ignore_case (default) → True" in ended.err
    assert "holdfast grade RUN EVAL" in ended.err


def test_a_difference_by_chance_is_called_no_evidence(compare: Any, strong: Path, near: Path) -> None:
    ended = compare(strong, near)
    assert ended.code == 0
    assert "no evidence of a difference" in ended.out
    assert "4 samples are only in the first run and are left out" in ended.out
    assert "6 samples are only in the second run and are left out" in ended.out
    assert "correct: 1 sample passed only in the first run, 0 only in the second" in ended.out
    assert "  s15  correct: only in the first\n" in ended.out
    assert "with 16 samples, a real difference of" in ended.out


def test_the_first_run_is_compared_with_each_of_the_others(compare: Any, strong: Path, weak: Path, near: Path) -> None:
    comparisons = json.loads(compare(strong, weak, near, "--json").out)
    assert [(pair["first"], pair["second"]) for pair in comparisons] == [
        (str(strong), str(weak)),
        (str(strong), str(near)),
    ]
    shown = compare(strong, weak, near).out
    assert shown.count("first:  ") == shown.count("second: ") == 2


def test_several_metrics_are_corrected_and_scores_are_flipped_by_sample(compare: Any, tmp_path: Path) -> None:
    chance = random.Random(2)
    answers = [
        {f"s{number}": [f"{chance.uniform(low, 1):.2f}" for _ in range(2)] for number in range(8)} for low in (0.5, 0)
    ]
    graders = [*POINTS, {"type": "text", "name": "even", "regex_match": ["[02468]$"]}]
    first, second = (
        finished_run(tmp_path / name, texts_by_sample, trials=2, graders=graders)
        for name, texts_by_sample in zip(("one", "two"), answers, strict=True)
    )
    (comparison,) = json.loads(compare(first, second, "--json").out)
    rows = {row["metric"]: row for row in comparison["metrics"]}
    assert set(rows) == {"points", "even", "passed"}
    means = [
        np.array([np.mean([float(text) for text in texts]) for texts in texts_by_sample.values()])
        for texts_by_sample in answers
    ]
    assert rows["points"]["test"] == "sign-flip permutation"
    assert rows["points"]["p_value"] == pytest.approx(permuted(list(means[0] - means[1])))
    assert rows["points"]["difference"] == pytest.approx((means[0] - means[1]).mean())
    assert rows["even"]["test"] == "sign-flip permutation"  # two trials of a sample are not two samples
    for row in rows.values():
        assert row["adjusted"] == pytest.approx(min(1.0, 3 * row["p_value"])) and row["comparisons"] == 3
    assert "corrected for 3 comparisons (Bonferroni)" in compare(first, second).out


def test_runs_that_cannot_be_compared_are_refused(compare: Any, strong: Path, tmp_path: Path) -> None:
    alone = compare(strong)
    assert alone.code == 2 and "at least two runs" in alone.err
    assert compare().code == 2
    missing = compare(strong, "ffffff")
    assert missing.code == 2 and "no run 'ffffff'" in missing.err

    other = finished_run(tmp_path / "other", {"x": "yes", "y": "no"})
    apart = compare(strong, other)
    assert apart.code == 2 and "have no sample in common" in apart.err

    for name, graders in (("renamed", [{"type": "exact", "name": "right"}]), ("none", [])):
        unlike = compare(strong, finished_run(tmp_path / name, answered(3, 1), graders=graders))
        assert unlike.code == 2 and "have no metric in common" in unlike.err

    ungraded = finished_run(tmp_path / "ungraded", answered(3, 1), flags=("--skip-graders",))
    for runs in ((strong, ungraded), (ungraded, strong)):
        unfinished = compare(*runs)
        assert unfinished.code == 2 and "is not finished" in unfinished.err and unfinished.out == ""


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("results.json", '{"trials": ['),
        ("results.json", '{"schemaVersion": "1.0", "run": "r", "eval": "e", "trials": [{"sample": "s0"}]}'),
        ("metrics.json", '{"schemaVersion": "1.0", "metrics": {"correct": {"score": "high"}}}'),
    ],
)
def test_damaged_results_are_named_with_the_command_that_repairs_them(
    compare: Any, strong: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, name: str, content: str
) -> None:
    run = finished_run(tmp_path / "torn", answered(3, 1), graders=CORRECT)
    (run / name).write_text(content)
    ended = compare(strong, run)
    assert ended.code == 2 and f"{run / name}: cannot be read" in ended.err
    assert f"holdfast repair {run}" in ended.err
    repaired = command(monkeypatch, capsys, tmp_path, "repair", str(run))
    assert repaired.code == 0 and f"{run / name}: cannot be read" in repaired.out
    assert not (run / "metrics.json").exists(), "the next `holdfast eval` writes it again"
