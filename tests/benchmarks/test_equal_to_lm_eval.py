"""Benchmarks are asked and graded as lm-eval does it: the same prompts, likelihoods and numbers, to the last digit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.data.readers import Layout, read_rows
from tests.support.hub import write_hub
from tests.support.lm_eval_runs import evaluate_with_lm_eval
from tests.support.running import holdfast, lines, run_dir, server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.sharing import FillOnce

GREEDY = {"temperature": 0.0, "top_p": 1e-05}
NEMO = {"temperature": 1e-07, "top_p": 0.9999999}
BENCHMARKS = {
    "openbookqa": ("openbookqa", None, None),
    "hellaswag": ("hellaswag", 10, None),
    "winogrande": ("winogrande", 5, None),
    "lm-eval/arc_challenge": ("arc_challenge", 25, None),
    "gsm8k": ("gsm8k", None, NEMO),
    "mmlu_logits": ("mmlu", 5, None),
    "adlr_mmlu": ("mmlu_str", 5, GREEDY),
    "adlr_arc_challenge_llama_25_shot": ("adlr_arc_challenge_llama", 25, None),
    "adlr_winogrande_5_shot": ("winogrande", 5, None),
}
"""names of ours, and lm-eval's task, examples and parameters for each"""
LIMIT = 2
"""documents of each subtask that are evaluated"""


@pytest.fixture(scope="module")
def provider() -> Iterator[Any]:
    with server() as running:
        yield running


@pytest.fixture(scope="module")
def place(fill_once: FillOnce) -> Path:
    return fill_once("benchmarks", lambda folder: write_hub(folder / "hub"))


@pytest.fixture(scope="module")
def oracle(place: Path, provider: Any, fill_once: FillOnce) -> Any:
    """lm-eval's own results."""
    tasks = {task: [task, shots, options] for task, shots, options in BENCHMARKS.values()}

    def evaluate_all(folder: Path) -> None:
        results = evaluate_with_lm_eval(place, provider.base_url, list(tasks.values()), limit=LIMIT)
        (folder / "results.json").write_text(json.dumps(results))

    return json.loads((fill_once("lm-eval", evaluate_all) / "results.json").read_text())


def evaluate(name: str, place: Path, provider: Any) -> Path:
    """Evaluate a benchmark with Holdfast, and return the run directory."""
    shots = [f"benchmark.num_fewshot={BENCHMARKS[name][1]}"] if name.startswith("lm-eval/") else []
    holdfast(
        *("eval", name, "-m", "m", f"target.base_url={provider.base_url}", "--limit", str(LIMIT), *shots),
        cwd=place,
        env={
            "HOLDFAST_HOME": str(place / "home"),
            "HOLDFAST_DATA": str(place / "hub"),
            "HF_DATASETS_CACHE": str(place / "hf"),
        },
    )
    return run_dir(place, name.removeprefix("lm-eval/"))


def compiled_rows(run: Path) -> dict[str, dict[str, Any]]:
    [path] = json.loads((run / "manifest.json").read_text())["dataset"]["source"]
    from pathlib import Path

    return {row["id"]: row for _, row in read_rows(Path(path), Layout())}


def arguments(row: dict[str, Any], params: dict[str, Any]) -> list[list[Any]]:
    """The requests of a row, as lm-eval lists their arguments."""
    if "continuations" not in row:
        return [[row["context"], params]]
    pairs = [
        {"context": row["context"], "text": each} if isinstance(each, str) else each for each in row["continuations"]
    ]
    return [[pair["context"], pair["text"]] for pair in pairs]


def generation(options: dict[str, Any]) -> dict[str, Any]:
    """lm-eval's options of a generation as parameters of a request."""
    sent = {key: value for key, value in options.items() if key not in ("until", "do_sample", "max_gen_toks")}
    return {**sent, "stop": options["until"], "max_tokens": options.get("max_gen_toks", 256), "seed": 1234}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_prompt_likelihood_and_number_is_lm_evals(
    name: str, place: Path, provider: Any, oracle: dict[str, Any]
) -> None:
    run = evaluate(name, place, provider)
    rows, manifest = compiled_rows(run), json.loads((run / "manifest.json").read_text())["eval"]
    outputs = {line["sample"]: line for line in lines(run / "outputs.jsonl") if "sample" in line}
    trials = {line["sample"]: line for line in json.loads((run / "results.json").read_text())["trials"]}
    theirs = oracle[BENCHMARKS[name][0]]
    tasks = manifest["metadata"]["benchmark"]["tasks"]
    assert set(tasks) == set(theirs["samples"])
    assert len(trials) == LIMIT * len(tasks)
    compared = 0
    for task, samples in theirs["samples"].items():
        for sample in samples:
            identifier = f"{task}/{sample['doc_id']}"
            asked = list(sample["arguments"].values()) if isinstance(sample["arguments"], dict) else sample["arguments"]
            asked = [list(each.values()) if isinstance(each, dict) else list(each) for each in asked]
            message = outputs[identifier]["messages"][-1]
            if "continuations" in rows[identifier]:
                assert arguments(rows[identifier], {}) == asked
                ours = [[each["logprob"], each["greedy"]] for each in message["likelihoods"]]
                responses = [response[0] for response in sample["resps"]]
                assert [[float(value), greedy in (True, "True")] for value, greedy in responses] == ours
            else:
                params = {**manifest["target"]["params"]}
                assert arguments(rows[identifier], params) == [[asked[0][0], generation(asked[0][1])]]
                assert message["content"] == sample["resps"][0][0]
            for metric in tasks[task]["metrics"]:
                if metric["filter"] == sample["filter"]:
                    assert trials[identifier]["grades"][metric["grader"]]["score"] == sample[metric["metric"]]
                    compared += 1
    assert compared >= len(trials)
    groups = manifest["metadata"]["benchmark"]["groups"]
    assert set(groups) | set(tasks) == set(theirs["results"])
    numbers = json.loads((run / "metrics.json").read_text())["benchmark"]["results"]
    for task, values in theirs["results"].items():
        reported = {key: value for key, value in values.items() if isinstance(value, float)}
        assert reported and reported == {key: numbers[task].get(key) for key in reported}
