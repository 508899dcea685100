"""Benchmarks without lm-eval: their definitions, the samples in the wheel, and runs of both."""

from __future__ import annotations

import ast
import json
from collections import Counter
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.errors import UsageError
from holdfast.plugins.benchmarks.native import SAMPLES, load, names
from holdfast.spec.load import load_eval
from holdfast.spec.template import template
from tests.support.judges import judges
from tests.support.running import holdfast, lines, metrics, run_dir
from tests.support.specs import grade, write_rows

if TYPE_CHECKING:
    from pathlib import Path

DIGESTS = {
    "gsm8k": "5a3bc3bb238a26ed861cbece7f99fca18e1eba6a954297cc6b7ec512badc4099",
    "humaneval": "6d377103aca8ec38611cd8e66b32e89f9ce7b58c3f3395eae7813214b6812952",
    "ifeval": "c37c894d354d02a505a6e904932cdf8e0b8e444ec40c347fdea04948c322c0db",
    "mmlu": "cc418f7af533ad395f5f7fc60c2e5e76050a086435b19c02589b1869ee84a8c8",
    "winogrande": "f1b8dc5721bbb53255f887303bffc88ba0d1e51e1093964e280b9a0696b5ca1a",
}
PROBLEMS = lines(SAMPLES / "humaneval.jsonl")
TESTS = load("humaneval-sample", {})["graders"][0]
CHAT_TESTS = load("humaneval-sample", {"chat": True})["graders"][0]
MBPP_ROW: dict[str, Any] = {
    "task_id": 11,
    "text": "Write a function to double a number.",
    "test_setup_code": "ONE = 1",
    "test_list": ["assert double(2) == 4", "assert double(0) == 0", "assert double(ONE) == 2"],
}


def write_benchmark(folder: Path, name: str, options: dict[str, Any], target: dict[str, Any], **keys: Any) -> Path:
    """Write a benchmark as an eval file, with a target."""
    document = load(name, options, folder)
    document |= {"schemaVersion": "1.0", "target": {**document["target"], **target}, **keys}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(document))
    return path


def test_every_name_loads_as_an_eval(tmp_path: Path) -> None:
    copy = write_rows(tmp_path / "rows.jsonl", [{"id": "1"}])
    for name in names():
        options = {} if name.endswith("-sample") else {"data": str(copy)}
        try:
            spec = load_eval(write_benchmark(tmp_path, name, options, {"model": "m", "base_url": "http://127.0.0.1:1"}))
        except UsageError as error:
            assert name == "ifeval" and "needs the package langdetect" in str(error)
            continue
        described = load(name, options)["metadata"]["benchmark"]
        assert (described["name"], described["provider"]) == (name, "native")
        graders = {grader.name for _, grader in spec.placed_graders()}
        assert {metric["grader"] for task in described["tasks"].values() for metric in task["metrics"]} <= graders
    assert load("hellaswag", {}) is None


@pytest.mark.parametrize("name", DIGESTS)
def test_a_sample_is_what_it_was(name: str) -> None:
    content = (SAMPLES / f"{name}.jsonl").read_bytes()
    assert sha256(content).hexdigest() == DIGESTS[name]
    assert 10 <= len(content.splitlines()) <= 20
    assert f"`{name}.jsonl`" in (SAMPLES / "NOTICE.md").read_text(), "with its licence"


def test_without_a_copy_rows_come_from_a_pinned_commit_of_the_hub() -> None:
    assert load("humaneval", {})["dataset"] == {
        "path": "hf://openai/openai_humaneval",
        "split": "test",
        "revision": "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        "id": "task_id",
    }
    assert load("humaneval", {"revision": "main"})["dataset"]["revision"] == "main"
    assert load("mbpp", {})["dataset"]["subset"] == "full"


@pytest.mark.parametrize("layout", ["google-research-datasets/mbpp/full/test.jsonl", "test-00000.jsonl", "mbpp.jsonl"])
def test_a_copy_may_be_a_mirror_a_folder_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    file = write_rows(tmp_path / "copy" / layout, [MBPP_ROW])
    if layout != "mbpp.jsonl":
        write_rows(file.with_name("train.jsonl"), [{}])
    assert load("mbpp", {"data": "copy"}, tmp_path)["dataset"]["path"] == [str(file)]
    assert load("mbpp", {"data": str(file)}, tmp_path)["dataset"]["path"] == str(file)
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "copy"))
    assert load("mbpp", {})["dataset"]["path"] == [str(file)]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mbpp", {"data": "nowhere"}, "no rows of the split 'test' of google-research-datasets/mbpp"),
        ("mt_bench", {"chat": False}, "mt_bench is not defined for the completions API"),
        ("humaneval", {"num_fewshot": 3}, "humaneval has 0 examples"),
        ("mbpp", {"num_fewshot": 4}, "mbpp has 0 to 3 examples"),
    ],
)
def test_options_that_a_benchmark_lacks_are_refused(
    tmp_path: Path, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        load(name, options, tmp_path)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem["task_id"])
def test_right_programs_pass_and_wrong_ones_fail_in_the_sandbox(tmp_path: Path, problem: dict[str, Any]) -> None:
    solution = problem["canonical_solution"]
    assert grade(tmp_path, TESTS, solution, **problem).score == 1
    assert grade(tmp_path, TESTS, "    return None\n", **problem).score == 0
    block = f"Here it is:\n```python\n{problem['prompt']}{solution}```\nIt is correct."
    assert grade(tmp_path, CHAT_TESTS, block, **problem).score == 1


@pytest.mark.parametrize(
    "code", ["    exit(0)", "    import os; os._exit(0)", "    raise SystemExit", "    while True: pass", "  return ("]
)
def test_a_program_cannot_leave_before_its_tests(tmp_path: Path, code: str) -> None:
    verdict = grade(tmp_path, {**TESTS, "timeout": 1}, code, **PROBLEMS[0])
    assert verdict.score == 0


def test_mbpp_runs_the_tests_of_its_row(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [MBPP_ROW, {**MBPP_ROW, "task_id": 2}])
    document = load("mbpp", {"data": "rows.jsonl"}, tmp_path)
    (tests,) = document["graders"]
    assert grade(tmp_path, tests, "def double(n):\r\n  return 2 * n", **MBPP_ROW).score == 1
    assert grade(tmp_path, tests, "def double(n):\r\n  return n", **MBPP_ROW).score == 0
    (tests,) = load("mbpp", {"chat": True})["graders"]
    assert grade(tmp_path, tests, "```py\ndef double(n): return 2 * n\n```\nand\n```\n1 +\n```", **MBPP_ROW).score == 1


@pytest.mark.parametrize("shots", [0, 2, 3])
def test_mbpp_is_asked_with_up_to_three_examples_as_by_lm_eval(shots: int) -> None:
    """Of lm-eval only the list of examples is run: its module loads a metric from the hub."""
    source = (files("lm_eval") / "tasks" / "mbpp" / "utils.py").read_text()
    (function,) = [node for node in ast.parse(source).body if getattr(node, "name", "") == "list_fewshot_samples"]
    names: dict[str, Any] = {}
    exec(compile(ast.Module([function], []), "utils.py", "exec"), names)
    expected = ""
    for row in [*names["list_fewshot_samples"]()[:shots], MBPP_ROW]:
        tests = "\n".join(row["test_list"])
        expected += f"You are an expert Python programmer, and here is your task: {row['text']} "
        expected += f"Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"
        expected += f"{row['code']}\n[DONE]\n\n" if "code" in row else ""
    assert template(load("mbpp", {"num_fewshot": shots})["prompt"]).render(MBPP_ROW) == expected


def test_pass_at_k_is_over_trials(tmp_path: Path) -> None:
    """The server solves every problem in one of two trials."""
    asked: Counter[str] = Counter()

    def answer(body: dict[str, Any]) -> str:
        question = body["messages"][-1]["content"]
        (problem,) = [each for each in PROBLEMS if each["prompt"].strip() in question]
        asked[problem["task_id"]] += 1
        solution = problem["canonical_solution"] if asked[problem["task_id"]] == 1 else "    pass\n"
        return f"```python\n{problem['prompt']}{solution}```"

    with judges(answer) as server:
        target = {"model": "m", "base_url": server.base_url}
        eval_file = write_benchmark(tmp_path, "humaneval-sample", {"chat": True}, target, trials=2)
        holdfast("eval", eval_file, "--limit", "4", cwd=tmp_path)
    report = metrics(run_dir(tmp_path, "humaneval-sample"))
    numbers, results = report["metrics"]["tests"], report["benchmark"]["results"]["humaneval"]
    assert (numbers["pass@1"], numbers["pass@2"]) == (0.5, 1.0)
    assert (results["pass@1,create_test"], results["pass@2,create_test"]) == (0.5, 1.0)
    assert report["benchmark"]["higher_is_better"]["humaneval"] == {"pass@1": True, "pass@2": True}


def test_mt_bench_asks_two_turns_and_judges_each_from_one_to_ten(tmp_path: Path) -> None:
    judged = []

    def answer(body: dict[str, Any]) -> str:
        messages = body["messages"]
        if messages[0]["role"] != "system":
            return f"reply {len(messages)}"
        judged.append(messages[-1]["content"])
        assert "a number from 1 to 10" in messages[0]["content"]
        return json.dumps({"reason": "so so", "score": 10 if "only the assistant's second reply" in judged[-1] else 1})

    rows = [
        {"question_id": 101, "category": "math", "turns": ["One plus one?", "Double it."], "reference": ["2", "4"]},
        {"prompt_id": 81, "category": "writing", "prompt": ["Write.", "Write more."], "reference": []},
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    with judges(answer) as server:
        target = {"model": "m", "base_url": server.base_url}
        eval_file = write_benchmark(tmp_path, "mt_bench", {"data": "rows.jsonl"}, target)
        holdfast("eval", eval_file, cwd=tmp_path)
    numbers = metrics(run_dir(tmp_path, "mt_bench"))
    assert [numbers["metrics"][turn]["score"] for turn in ("turn_1", "turn_2")] == [0, 1]
    assert numbers["score"] == 0.5
    assert sorted("find its mistakes" in text for text in judged) == [False, False, True, True]
    assert all("reply 1" in text and "reply 3" in text for text in judged)


def test_ifeval_counts_prompts_and_instructions(tmp_path: Path) -> None:
    with judges(lambda _: '"A reply without the mark in question"') as server:
        target = {"model": "m", "base_url": server.base_url}
        eval_file = write_benchmark(tmp_path, "ifeval-sample", {}, target)
        holdfast("eval", eval_file, cwd=tmp_path)
    summary = metrics(run_dir(tmp_path, "ifeval-sample"))
    numbers = summary["metrics"]
    (results,) = summary["benchmark"]["results"].values()
    strict = numbers["prompt_level_strict_acc"]
    followed = {
        "punctuation:no_comma": 3,
        "change_case:capital_word_frequency": 2,
        "startend:quotation": 1,
        "keywords:forbidden_words": 1,
        "keywords:letter_frequency": 1,
        "length_constraints:number_sentences": 1,
        "detectable_format:json_format": 1,  # a text in quotes is JSON
    }
    total = sum(len(row["instruction_id_list"]) for row in lines(SAMPLES / "ifeval.jsonl"))
    assert strict["instruction_level"] == sum(followed.values()) / total
    assert strict["score"] == 4 / 14
    assert results["prompt_level_strict_acc,none"] == strict["score"]
    assert results["inst_level_strict_acc,none"] == strict["instruction_level"]
    assert results["inst_level_loose_acc,none"] == numbers["prompt_level_loose_acc"]["instruction_level"]
    assert numbers["prompt_level_loose_acc"]["weight"] == 0


def test_mmlu_runs_on_the_embedded_model_without_hub_or_lm_eval(tmp_path: Path) -> None:
    rows = ["mmlu_philosophy/0"]
    eval_file = write_benchmark(tmp_path, "mmlu-sample", {}, {"model": "local/smollm2-135m"})
    holdfast("eval", eval_file, f"dataset.ids={json.dumps(rows)}", cwd=tmp_path, env={"HF_HUB_OFFLINE": "1"})
    run = run_dir(tmp_path, "mmlu-sample")
    outputs = {record["sample"]: record for record in lines(run / "outputs.jsonl") if "sample" in record}
    assert sorted(outputs) == rows
    for record in outputs.values():
        likelihoods = record["messages"][-1]["likelihoods"]
        assert len(likelihoods) == 4
        best = max(range(4), key=lambda place: likelihoods[place]["logprob"])
        assert record["output"] == [" A", " B", " C", " D"][best]
    assert metrics(run)["metrics"]["acc"]["n"] == 1
