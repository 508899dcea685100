"""Sums and quantiles of many numbers equal those from a sorted list, in less memory."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.report import stats, tally
from holdfast.report.stats import ExactSum, quantile, quantile_of
from holdfast.report.tally import Tally

numbers = st.floats(0, 1e6, allow_subnormal=False) | st.sampled_from([0.0, 0.1, 1.0, 3e5])


@given(st.lists(numbers, min_size=1, max_size=60), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_a_quantile_needs_no_sorted_copy(values: list[float], share: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "_BINS", 8)  # fewer than most of these lists have values
        assert quantile_of(array("d", values), share) == quantile(sorted(values), share)


@given(st.lists(st.floats(-1e9, 1e9), max_size=60))
def test_a_sum_is_rounded_once(values: list[float]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "_PARTS", 5)
        total = ExactSum()
        for value in values:
            total.add(value)
        assert total.value == math.fsum(values)


scores = st.sampled_from([0.0, 1.0, 0.3, 0.7, None])
samples = st.lists(st.lists(scores, min_size=1, max_size=2), max_size=30)


@given(samples, st.sampled_from([0, 2]))
def test_counted_scores_give_the_numbers_of_listed_ones(rows: Any, most: int) -> None:
    def summary(limit: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tally, "_MOST_MEANS", limit)
            verdicts = Tally(2)
            for row in rows:
                verdicts.add([("passed" if score else "failed", score) for score in row])
            return verdicts.summary()

    assert summary(1 << 12) == summary(most)
