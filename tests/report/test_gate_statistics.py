"""The statistics of a gate: against scipy, and on simulated systems that did and did not change."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.report.compare import ScoredRun, read_scores
from holdfast.report.gate import Rules, check_gate, measure_loss
from holdfast.report.run_view import RunView
from holdfast.store.rundir import RunDir
from tests.support.lazy import LazyModule
from tests.support.patterns import finished_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.store.metrics import Check

np = LazyModule("numpy")
stats = LazyModule("scipy.stats")
GRADERS = [f"g{number}" for number in range(5)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ScoredRun:
    """A run whose scores tests replace."""
    graders = [{"type": "text", "name": name, "contains": "yes"} for name in GRADERS]
    return read_scores(
        RunView(RunDir(finished_run(tmp_path_factory.mktemp("gate") / "run", {"a": "yes"}, graders=graders)))
    )


def scored(run: ScoredRun, scores: dict[str, Sequence[Any]], clusters: Sequence[int] = ()) -> ScoredRun:
    """Return the run with other scores: by grader, one for each sample, or a list for its trials."""
    by_sample = {
        name: {f"s{n}": score if isinstance(score, list) else [float(score)] for n, score in enumerate(values)}
        for name, values in scores.items()
    }
    samples = {sample: [sample] for values in by_sample.values() for sample in values}
    groups = {f"s{n}": f"{cluster}" for n, cluster in enumerate(clusters)}
    answers = {sample: [hash(run.path)] for sample in samples}
    return replace(run, scores=by_sample, passes=by_sample, keys=samples, answers=answers, clusters=groups)


def flipped(gained: int, lost: int, count: int) -> tuple[list[float], list[float]]:
    """Return scores of two runs: so many samples pass only in the first, so many only in the second."""
    rest = count - gained - lost
    return [1.0] * gained + [0.0] * lost + [1.0] * rest, [0.0] * gained + [1.0] * lost + [1.0] * rest


def verdicts(
    run: ScoredRun, pairs: Mapping[str, tuple[Sequence[Any], Sequence[Any]]], **rules: Any
) -> dict[str, Check]:
    """Gate a run with the first scores of each grader against one with the second."""
    current = scored(run, {name: pair[0] for name, pair in pairs.items()})
    baseline = replace(scored(run, {name: pair[1] for name, pair in pairs.items()}), path="baseline")
    baseline = replace(baseline, answers={sample: [0] for sample in baseline.keys})
    return {check.what: check for check in check_gate(current, baseline, Rules(**rules)) if check.verdict is not None}


def test_the_numbers_of_a_gate_are_these(run: ScoredRun) -> None:
    pair = {"g0": flipped(10, 20, 300)}
    check = verdicts(run, pair)["g0"]
    assert (check.low, check.high) == pytest.approx((-0.06391, -0.00232), abs=5e-6)
    assert check.p_value == check.adjusted == pytest.approx(0.049369, abs=5e-7)
    assert check.detectable == pytest.approx(0.0464, abs=5e-5) and check.rows_for_margin == 1616
    assert (check.verdict, check.samples, check.fell, check.rose) == ("worse", 300, 20, 10)
    assert verdicts(run, pair, max_drop=0.07)["g0"].verdict == "not worse"


def test_three_metrics_in_words(run: ScoredRun) -> None:
    needed = "300 samples show a loss of 4.7 points at best; 2 points need 1,630"
    shown = verdicts(run, {"g0": flipped(10, 24, 300), "g1": flipped(13, 17, 300), "g2": flipped(4, 2, 300)})
    assert [check.message for name, check in shown.items() if name in ("g0", "g1", "g2")] == [
        "g0 worse: 0.967 → 0.920, −4.7 points (−7.9 – −1.4), p 0.0365 (Holm)",
        "g1 cannot tell: 0.957 → 0.943, −1.3 points (−4.4 – +1.8); " + needed,
        "g2 not worse: 0.987 → 0.993, a loss of more than 2 points is excluded",
    ]


@pytest.mark.parametrize(("count", "verdict"), [(300, "not worse"), (100, "cannot tell"), (1, "cannot tell")])
def test_samples_that_happen_not_to_differ_exclude_a_loss_only_if_they_are_many(
    run: ScoredRun, count: int, verdict: str
) -> None:
    assert verdicts(run, {"g0": flipped(0, 0, count)})["g0"].verdict == verdict


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["pass", "graded", "trials", "clusters"])
def test_bounds_and_tests_are_scipys(run: ScoredRun, kind: str, seed: int) -> None:
    chance = np.random.default_rng(seed)
    count = int(chance.integers(5, 13))
    trials = 3 if kind == "trials" else 1
    digits = 2 if kind == "graded" else 0
    ours, theirs = (np.round(chance.random((count, trials)) * 1.4 - low, digits).clip(0, 1) for low in (0.5, 0.2))
    clusters = [number // 2 for number in range(count)] if kind == "clusters" else []
    current, baseline = (scored(run, {"g0": side.tolist()}, clusters) for side in (ours, theirs))
    confidence = 0.9
    loss = measure_loss("g0", current, baseline, confidence)
    assert loss is not None
    gaps = ours.mean(axis=1) - theirs.mean(axis=1)
    groups = np.array(clusters or range(count))
    sums = np.array([gaps[groups == group].sum() for group in np.unique(groups)])
    sizes = np.array([(groups == group).sum() for group in np.unique(groups)])
    all_sums, all_sizes = np.append(sums, [1, -1]), np.append(sizes, [1, 1])
    mean, parts = all_sums.sum() / all_sizes.sum(), len(all_sums)
    error = math.sqrt(((all_sums - all_sizes * mean) ** 2).sum() * parts / (parts - 1)) / all_sizes.sum()
    half = stats.t.ppf(confidence, len(sums) - 1) * error
    assert (loss.low, loss.high) == pytest.approx((max(-1, mean - half), min(1, mean + half)), rel=1e-9)
    assert loss.difference == pytest.approx(gaps.mean())
    if kind == "pass":
        expected = stats.binom.cdf((gaps > 0).sum(), (gaps != 0).sum(), 0.5)
    else:
        expected = stats.permutation_test(
            (sums,), np.sum, permutation_type="samples", n_resamples=np.inf, alternative="less", vectorized=True
        ).pvalue
    assert loss.p_value == pytest.approx(expected, abs=1e-9)


def simulate(
    run: ScoredRun, seed: int, gates: int, graders: int, loss: float, rows: int = 300, flips: float = 0.1
) -> float:
    """Return the share of red gates over systems that flip so many samples, and lose so much in each metric."""
    chance = np.random.default_rng(seed)
    gained, lost = (flips - loss) / 2, (flips + loss) / 2
    red = 0
    for _ in range(gates):
        counts = chance.multinomial(rows, [gained, lost, 1 - flips], size=graders)
        pairs = {name: flipped(int(up), int(down), rows) for name, (up, down, _) in zip(GRADERS, counts, strict=False)}
        red += any(check.verdict == "worse" for check in verdicts(run, pairs).values())
    return red / gates


def test_a_system_that_did_not_change_is_red_in_at_most_5_percent_of_gates(run: ScoredRun) -> None:
    assert simulate(run, seed=1, gates=400, graders=1, loss=0.0) <= 0.05
    assert simulate(run, seed=2, gates=200, graders=5, loss=0.0) <= 0.05


def test_a_loss_of_5_points_on_300_samples_is_found_in_at_least_80_percent_of_gates(run: ScoredRun) -> None:
    assert simulate(run, seed=3, gates=400, graders=1, loss=0.05) >= 0.8


@pytest.mark.parametrize("seed", range(40))
def test_the_upper_bound_never_contradicts_the_verdict(run: ScoredRun, seed: int) -> None:
    chance = np.random.default_rng(seed)
    count, scale = int(chance.integers(2, 60)), float(chance.choice([0.02, 0.3, 1.0]))
    graded = {
        name: ((0.5 - scale * chance.random(count) * 0.4).tolist(), [0.5] * count) for name in GRADERS[: 1 + seed % 5]
    }
    moved = {"g4": flipped(int(chance.integers(0, 5)), int(chance.integers(0, 12)), 40)} if seed % 2 else {}
    for check in verdicts(run, graded | moved, max_drop=0.001).values():
        assert check.low is not None and check.high is not None and check.adjusted is not None
        assert check.low <= (check.difference or 0.0) <= check.high
        assert (check.high < 0) == (check.adjusted <= 0.05)
