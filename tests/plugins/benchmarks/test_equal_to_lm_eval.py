"""Benchmarks are asked and graded as lm-eval does it: the same prompts, likelihoods and numbers, to the last digit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.lm_eval_runs import assert_equal_to_lm_eval, evaluate_with_lm_eval
from tests.support.running import holdfast, run_dir, server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.sharing import FillOnce

GREEDY = {"temperature": 0.0, "top_p": 1e-05}
NEMO = {"temperature": 1e-07, "top_p": 0.9999999}
BENCHMARKS = {
    "winogrande": ("winogrande", 5, None),
    "lm-eval/arc_challenge": ("arc_challenge", 25, None),
    "gsm8k": ("gsm8k", None, NEMO),
    "mmlu_logits": ("mmlu", 5, None),
    "adlr_mmlu": ("mmlu_str", 5, GREEDY),
}
"""names of ours, one of each form of request and of groups, and lm-eval's task, examples and parameters for each"""
LIMIT = 2
"""documents of each subtask that are evaluated"""


@pytest.fixture(scope="module")
def provider() -> Iterator[Any]:
    with server() as running:
        yield running


@pytest.fixture(scope="module")
def oracle(shared: Path, provider: Any, fill_once: FillOnce) -> Any:
    """lm-eval's own results."""
    tasks = {task: [task, shots, options] for task, shots, options in BENCHMARKS.values()}

    def evaluate_all(folder: Path) -> None:
        results = evaluate_with_lm_eval(shared, provider.base_url, list(tasks.values()), limit=LIMIT)
        (folder / "results.json").write_text(json.dumps(results))

    return json.loads((fill_once("lm-eval", evaluate_all) / "results.json").read_text())


def evaluate(name: str, place: Path, settings: dict[str, str], provider: Any) -> Path:
    """Evaluate a benchmark with Holdfast, and return the run directory."""
    shots = [f"benchmark.num_fewshot={BENCHMARKS[name][1]}"] if name.startswith("lm-eval/") else []
    holdfast(
        *("eval", name, "-m", "m", f"target.base_url={provider.base_url}", "--limit", str(LIMIT), *shots),
        cwd=place,
        env=settings,
    )
    return run_dir(place, name.removeprefix("lm-eval/"))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_prompt_likelihood_and_number_is_lm_evals(
    name: str, shared: Path, shared_settings: dict[str, str], provider: Any, oracle: dict[str, Any]
) -> None:
    run = evaluate(name, shared, shared_settings, provider)
    assert_equal_to_lm_eval(run, oracle[BENCHMARKS[name][0]], limit=LIMIT)
