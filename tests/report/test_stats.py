"""The numbers, against scipy, numpy and brute force."""

from __future__ import annotations

import itertools
import math
import random
from array import array
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast.report.stats import Z95, ExactSum, estimate, pass_all_k, pass_at_k, quantile, quantile_of, t95, wilson
from holdfast.report.tally import Tally
from holdfast.report.trials import UsageTally
from holdfast.store.records import Usage
from tests.support.lazy import LazyModule

numpy = LazyModule("numpy")
stats = LazyModule("scipy.stats")

counts = st.integers(1, 400).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total)))
clusters = st.lists(st.lists(st.floats(0, 1), max_size=5), min_size=1, max_size=20).filter(any)


def test_the_quantile_is_that_of_a_95_percent_interval() -> None:
    assert pytest.approx(stats.norm.ppf(0.975), abs=1e-12) == Z95


@given(counts)
def test_wilson_is_scipys(passes_and_total: Any) -> None:
    passes, total = passes_and_total
    expected = stats.binomtest(passes, total).proportion_ci(0.95, method="wilson")
    assert wilson(passes / total, total) == pytest.approx((expected.low, expected.high), abs=1e-12)


@given(st.floats(0, 1), st.floats(1, 1e6))
def test_wilson_holds_its_proportion_and_stays_inside(share: Any, count: Any) -> None:
    low, high = wilson(share, count)
    assert 0 <= low <= share <= high <= 1
    assert low < high


@given(counts)
def test_single_trials_give_wilsons_interval_over_the_samples(passes_and_total: Any) -> None:
    passes, total = passes_and_total
    sums = [1.0] * passes + [0.0] * (total - passes)
    mean, low, high, _, method = estimate(sums, [1] * total, proportion=True)
    expected = stats.binomtest(passes, total).proportion_ci(0.95, method="wilson")
    assert mean == passes / total and method == "wilson"
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-12)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=40))
def test_the_standard_error_without_clusters_is_scipys(scores: Any) -> None:
    result = estimate(scores, [1] * len(scores), proportion=False)
    assert result.mean == pytest.approx(numpy.mean(scores))
    assert result.stderr == pytest.approx(stats.sem(scores), abs=1e-9)


@pytest.mark.parametrize("freedom", [*range(1, 120), 1_000, 1_000_000])
def test_students_quantile_is_scipys(freedom: Any) -> None:
    assert t95(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-7)


@given(st.lists(st.floats(0.2, 0.8), min_size=2, max_size=40))
def test_scores_that_are_no_proportion_get_students_interval(scores: Any) -> None:
    assume(stats.sem(scores) > 1e-9)
    result = estimate(scores, [1] * len(scores), proportion=False)
    low, high = stats.t.interval(0.95, len(scores) - 1, numpy.mean(scores), stats.sem(scores))
    assert result.low == pytest.approx(max(0, low), rel=1e-6, abs=1e-9)
    assert result.high == pytest.approx(min(1, high), rel=1e-6, abs=1e-9)
    assert result.method == "t"


def test_trials_that_all_agree_count_as_one_and_independent_ones_as_many() -> None:
    alike = estimate([5.0, 0.0] * 20, [5] * 40, proportion=True)
    once = estimate([1.0, 0.0] * 20, [1] * 40, proportion=True)
    assert alike.high - alike.low == pytest.approx(once.high - once.low, rel=0.05)
    draw = random.Random(1)
    apart = estimate([float(sum(draw.random() < 0.5 for _ in range(5))) for _ in range(40)], [5] * 40, proportion=True)
    assert apart.high - apart.low < 0.7 * (alike.high - alike.low)


@given(clusters, st.booleans())
def test_every_interval_holds_its_mean_and_stays_inside(scores: Any, proportion: Any) -> None:
    if proportion:
        scores = [[float(score > 0.5) for score in cluster] for cluster in scores]
    result = estimate([math.fsum(c) for c in scores], [len(c) for c in scores], proportion=proportion)
    if result.low is None:
        assert result.method == "none" and sum(map(bool, scores)) == 1 and not proportion
    else:
        assert 0 <= result.low <= result.mean + 1e-12 and result.mean - 1e-12 <= result.high <= 1


@pytest.mark.parametrize("passes", [0, 3])
def test_no_spread_is_not_taken_for_certainty(passes: int) -> None:
    result = estimate([float(passes)] * 4, [3] * 4, proportion=True)
    assert result.high - result.low > 0.3


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_all_draws_of_k_that_hold_a_pass(drawn: Any) -> None:
    trials, passes, k = drawn
    outcomes = [True] * passes + [False] * (trials - passes)
    draws = list(itertools.combinations(outcomes, k))
    assert pass_at_k(trials, passes, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@given(st.lists(st.booleans(), min_size=1, max_size=8).flatmap(lambda d: st.tuples(st.just(d), st.integers(1, len(d)))))
def test_pass_all_k_is_the_share_of_all_draws_of_k_that_hold_nothing_else(drawn: Any) -> None:
    trials, k = drawn
    draws = list(itertools.combinations(trials, k))
    assert pass_all_k(len(trials), sum(trials), k) == pytest.approx(sum(map(all, draws)) / len(draws))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_quantiles_are_numpys(values: Any, share: Any) -> None:
    assert quantile(sorted(values), share) == pytest.approx(numpy.quantile(values, share), rel=1e-9, abs=1e-6)


class TestTally:
    def test_errors_are_counted_and_never_scored(self) -> None:
        tally = Tally(2)
        tally.add([("passed", 1.0), ("error", None)])
        tally.add([("failed", 0.0), ("skipped", None)])
        numbers = tally.summary()
        assert (numbers.score, numbers.n) == (0.5, 2)
        assert (numbers.passed, numbers.failed, numbers.errors, numbers.skipped) == (1, 1, 1, 1)

    def test_with_nothing_graded_there_is_no_number(self) -> None:
        tally = Tally(1)
        tally.add([("error", None)])
        numbers = tally.summary()
        assert (numbers.score, numbers.low, numbers.stderr, numbers.n, numbers.errors) == (None, None, None, 0, 1)

    def test_pass_at_k_is_there_for_every_k_up_to_the_trials(self) -> None:
        tally = Tally(3)
        tally.add([("passed", 1.0), ("failed", 0.0), ("failed", 0.0)])
        tally.add([("failed", 0.0)] * 3)
        numbers = tally.summary()
        assert numbers.pass_at == pytest.approx({1: 1 / 6, 2: 1 / 3, 3: 1 / 2})

    def test_a_sample_with_fewer_graded_trials_counts_only_for_the_ks_it_has(self) -> None:
        tally = Tally(2)
        tally.add([("passed", 1.0)])
        tally.add([("failed", 0.0), ("failed", 0.0)])
        numbers = tally.summary()
        assert numbers.pass_at == {1: 0.5, 2: 0.0}

    @given(
        st.lists(
            st.lists(st.sampled_from([("passed", 1.0), ("failed", 0.0), ("error", None)]), min_size=2, max_size=2),
            min_size=1,
        )
    )
    def test_scores_of_nought_and_one_get_wilson_and_others_do_not(self, samples: Any) -> None:
        tally = Tally(2)
        for verdicts in samples:
            tally.add(verdicts)
        numbers = tally.summary()
        assert numbers.n == sum(score is not None for verdicts in samples for _, score in verdicts)
        assert numbers.interval.startswith("wilson") == (numbers.n > 0)
        tally.add([("passed", 0.75), ("failed", 0.25)])
        assert not tally.summary().interval.startswith("wilson") or tally.summary().stderr == 0


class TestUsageTally:
    def test_an_unknown_usage_makes_the_sum_unknown_and_zero_does_not(self) -> None:
        tally = UsageTally()
        tally.add(Usage(10, 5, 1, 0.0))
        tally.add(Usage(1, 1, 1, 0.25))
        assert tally.summary() == Usage(11, 6, 2, 0.25)
        tally.add(Usage(None, 3, 1, None))
        assert tally.summary() == Usage(None, None, 3, None)


class TestManyNumbers:
    """In less memory than a sorted list takes, and with the same result."""

    numbers = st.floats(0, 1e6, allow_subnormal=False) | st.sampled_from([0.0, 0.1, 1.0, 3e5])
    scores = st.sampled_from([0.0, 1.0, 0.3, 0.7, None])

    @given(st.lists(numbers, min_size=1, max_size=60), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
    def test_a_quantile_needs_no_sorted_copy(self, values: list[float], share: float) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("holdfast.report.stats._BINS", 8)  # fewer than most of these lists have values
            assert quantile_of(array("d", values), share) == quantile(sorted(values), share)

    @given(st.lists(st.floats(-1e9, 1e9), max_size=60))
    def test_a_sum_is_rounded_once(self, values: list[float]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("holdfast.report.stats._PARTS", 5)
            total = ExactSum()
            for value in values:
                total.add(value)
            assert total.value == math.fsum(values)

    @given(st.lists(st.lists(scores, min_size=1, max_size=2), max_size=30), st.sampled_from([0, 2]))
    def test_counted_scores_give_the_numbers_of_listed_ones(self, rows: Any, most: int) -> None:
        def summary(limit: int) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("holdfast.report.tally._MOST_MEANS", limit)
                verdicts = Tally(2)
                for row in rows:
                    verdicts.add([("passed" if score else "failed", score) for score in row])
                return verdicts.summary()

        assert summary(1 << 12) == summary(most)
