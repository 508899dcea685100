"""Perplexity: whole texts, divided where they are longer than the model's context, as lm-eval divides them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.targets.likelihood import rolling_windows
from tests.support.lazy import LazyModule
from tests.support.lm_eval_runs import evaluate_with_lm_eval
from tests.support.running import holdfast, lines, run_dir, server

if TYPE_CHECKING:
    from pathlib import Path

lm_eval = LazyModule("lm_eval.utils")

MAX_LENGTH = 64
"""tokens that the model takes; the longest of the texts has several times as many"""


@pytest.mark.parametrize("limit", [2, 3, 7, 10, 64])
@pytest.mark.parametrize("length", [0, 1, 2, 5, 6, 7, 12, 13, 50])
def test_windows_are_lm_evals(length: int, limit: int) -> None:
    ids = list(range(100, 100 + length))
    theirs = map(lm_eval.make_disjoint_window, lm_eval.get_rolling_token_windows(ids, 1, limit - 1, 1))
    ours = [(window.ids[: window.start], window.ids[window.start :]) for window in rolling_windows(ids, 1, limit)]
    assert ours == list(theirs)


def test_without_a_known_maximum_a_text_is_one_window() -> None:
    (window,) = rolling_windows([5, 6, 7], 1, None)
    assert (window.ids, window.start) == ([1, 5, 6, 7], 1)


def test_wikitext_has_lm_evals_likelihoods_and_perplexities(
    tmp_path: Path, shared: Path, shared_settings: dict[str, str]
) -> None:
    with server(max_model_len=MAX_LENGTH) as provider:
        theirs: dict[str, Any] = evaluate_with_lm_eval(
            shared, provider.base_url, [["wikitext", None, None]], max_length=MAX_LENGTH
        )["wikitext"]
        holdfast(
            *("eval", "wikitext", "-m", "m", f"target.base_url={provider.base_url}"),
            cwd=tmp_path,
            env=shared_settings,
        )
    run = run_dir(tmp_path, "wikitext")
    outputs = {line["sample"]: line for line in lines(run / "outputs.jsonl") if "sample" in line}
    samples = theirs["samples"]["wikitext"]
    assert len(samples) == len(outputs) == 6
    for sample in samples:
        output = outputs[f"wikitext/{sample['doc_id']}"]
        (likelihood,) = output["messages"][-1]["likelihoods"]
        assert likelihood["logprob"] == float(sample["resps"][0][0])
    assert max(output["usage"]["requests"] for output in outputs.values()) > 2
    ours = json.loads((run / "metrics.json").read_text())["benchmark"]["results"]["wikitext"]
    names = ("word_perplexity,none", "byte_perplexity,none", "bits_per_byte,none")
    assert [ours[name] for name in names] == [theirs["results"]["wikitext"][name] for name in names]
