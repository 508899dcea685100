"""Files of lm-eval: ours equal those that lm-eval writes of the same answers, and lm-eval's can be evaluated."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.data.columns import Panel
from holdfast.plugins.lm_eval import _document
from holdfast.report.run_view import GradedTrial
from tests.support.lab import Lab, rows
from tests.support.running import Server, environment, holdfast, lines, metrics, module_server, run_dir
from tests.support.specs import output_of, write_rows

if TYPE_CHECKING:
    from pathlib import Path

provider = module_server()

DOCS = [
    {"question": f"q{number} ü", "answer": f"q{number} ü" if number % 3 else f"Q: q{number} ü"} for number in range(7)
]
TASK = {
    "task": "echoes",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "Q: {{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16},
    "filter_list": [
        {
            "name": "strict",
            "filter": [{"function": "regex", "regex_pattern": "Q: (.*)"}, {"function": "take_first"}],
        },
        {"name": "whole", "filter": [{"function": "take_first"}]},
    ],
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    "metadata": {"version": 2.0},
}
EVALUATE = """
import sys

from lm_eval import simple_evaluate
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager

tracker = EvaluationTracker(output_path="written")
model = {"model": "test-model", "base_url": sys.argv[1] + "/completions", "tokenizer_backend": None}
results = simple_evaluate(
    model="local-completions",
    model_args={**model, "tokenized_requests": False, "num_concurrent": 2},
    tasks=["echoes"],
    task_manager=TaskManager(include_path="tasks", include_defaults=False),
    log_samples=True,
    evaluation_tracker=tracker,
)
samples = results.pop("samples")
tracker.save_results_aggregated(results=results, samples=samples)
for task, listed in samples.items():
    tracker.save_results_samples(task_name=task, samples=listed)
"""
GRADERS = """
def strict(output, sample):
    extracted = output.removeprefix("Q: ")
    return {"score": float(extracted == sample["expected"]), "details": {"extracted": extracted}}
"""


@dataclass(frozen=True)
class Files:
    """The results and samples in a folder."""

    results: dict[str, Any]
    samples: list[dict[str, Any]]
    names: list[str]


def read_files(folder: Path) -> Files:
    (results,), (samples,) = (list(folder.glob(f"*/{kind}_*")) for kind in ("results", "samples"))
    return Files(json.loads(results.read_text()), lines(samples), [results.parent.name, results.name, samples.name])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lm-eval")


@pytest.fixture(scope="module")
def theirs(place: Path, provider: Server) -> Files:
    """Files that lm-eval writes for a task that the server answers with the prompt."""
    data = write_rows(place / "docs.jsonl", DOCS)
    task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(data)}}}
    write_rows(place / "tasks" / "echoes.yaml", [task])  # JSON is YAML
    (place / "evaluate.py").write_text(EVALUATE)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(place / "cache")}
    subprocess.run(
        [sys.executable, "evaluate.py", provider.base_url],
        cwd=place,
        env=environment(**offline),
        check=True,
        capture_output=True,
    )
    return read_files(place / "written")


@pytest.fixture(scope="module")
def ours(place: Path, provider: Server) -> Files:
    """Files that Holdfast exports for that task."""
    folder = place / "ours"
    folder.mkdir()
    (folder / "graders.py").write_text(GRADERS)
    write_rows(
        folder / "rows.jsonl",
        [
            {
                "id": f"echoes/{number}",
                "task": "echoes",
                "doc": doc,
                "context": f"Q: {doc['question']}",
                "generation": {"stop": ["\n\n"], "max_tokens": 16},
                "expected": doc["answer"],
            }
            for number, doc in enumerate(DOCS)
        ],
    )
    metric = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
    listed = [{**metric, "filter": name, "grader": f"exact_match,{name}"} for name in ("strict", "whole")]
    task = {"version": 2.0, "n_shot": 0, "n_original": len(DOCS), "metrics": listed}
    benchmark = {
        "name": "echoes",
        "provider": "lm-eval",
        "provider_version": "0.4.13",
        "seed": 1234,
        "tasks": {"echoes": task},
        "groups": {},
    }
    spec = {
        "schemaVersion": "1.0",
        "name": "echoes",
        "metadata": {"benchmark": benchmark},
        "dataset": {"path": "rows.jsonl"},
        "target": {"model": "test-model", "base_url": provider.base_url, "api": "completions"},
        "prompt": "{{ context }}",
        "graders": [
            {"type": "python", "name": "exact_match,strict", "function": "graders.py:strict"},
            {"type": "exact", "name": "exact_match,whole", "weight": 0},
        ],
    }
    (folder / "e.yaml").write_text(json.dumps(spec))
    holdfast("eval", "e.yaml", cwd=folder)
    holdfast("export", run_dir(folder, "echoes"), "--to", "lm-eval", "-o", "files", cwd=folder)
    return read_files(folder / "files")


class TestBenchmarks:
    def test_samples_are_those_of_lm_eval_field_by_field(self, theirs: Files, ours: Files) -> None:
        arguments = {"until": ["\n\n"], "max_gen_toks": 16}
        assert theirs.samples[0]["arguments"]["gen_args_0"]["arg_1"].items() >= arguments.items()
        for sample in theirs.samples:  # defaults of lm-eval that change no request
            sample["arguments"]["gen_args_0"]["arg_1"] = arguments
        assert ours.samples == theirs.samples
        assert [list(sample) for sample in ours.samples] == [list(sample) for sample in theirs.samples]

    def test_results_are_those_of_lm_eval(self, theirs: Files, ours: Files) -> None:
        numbers = ["results", "group_subtasks", "versions", "n-shot", "higher_is_better", "n-samples", "task_hashes"]
        model = ["model_source", "model_name", "model_name_sanitized", "lm_eval_version", "system_instruction"]
        for name in numbers + model:
            assert ours.results[name] == theirs.results[name], name
        assert ours.results["config"]["fewshot_seed"] == 1234
        for name in ("task", "num_fewshot", "metric_list", "output_type", "repeats"):
            assert ours.results["configs"]["echoes"][name] == theirs.results["configs"]["echoes"][name], name

    def test_no_field_is_missing_that_does_not_describe_lm_evals_machine(self, theirs: Files, ours: Files) -> None:
        machine = {"git_hash", "upper_git_hash", "pretty_env_info", "transformers_version"}
        assert theirs.results.keys() - ours.results.keys() == machine

    def test_names_of_files_are_read_by_lm_eval(self, theirs: Files, ours: Files) -> None:
        from lm_eval.utils import get_file_datetime, get_file_task_name

        for files in (theirs, ours):
            folder, results, samples = files.names
            assert folder == "test-model"
            assert get_file_task_name(samples) == "echoes"
            assert get_file_datetime(results).removesuffix(".json") == get_file_datetime(samples)

    def test_datasets_reads_the_samples(self, place: Path, ours: Files) -> None:
        import datasets

        (path,) = (place / "ours" / "files").glob("*/samples_*")
        table = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(place / "cache"))
        assert table.num_rows == len(ours.samples)


def test_samples_of_lm_eval_can_be_evaluated(theirs: Files, place: Path, provider: Server) -> None:
    spec = {
        "schemaVersion": "1.0",
        "name": "again",
        "dataset": {"path": "written/*/samples_echoes_*.jsonl", "where": 'filter == "whole"', "id": "doc_id"},
        "target": {"model": "test-model", "base_url": provider.base_url},
        "prompt": "{{ arguments.gen_args_0.arg_0 }}",
        "graders": [{"type": "exact", "expected": "{{ target }}"}],
        "by": "filter",
    }
    (place / "again.yaml").write_text(json.dumps(spec))
    holdfast("eval", "again.yaml", cwd=place)
    report = metrics(run_dir(place, "again"))
    assert report["score"] == theirs.results["results"]["echoes"]["exact_match,whole"]
    assert (report["samples"], list(report["by"]["filter"])) == (len(DOCS), ["whole"])


class TestAnyEval:
    @pytest.fixture
    def lab(self, tmp_path: Path, provider: Server) -> Lab:
        lab = Lab(tmp_path, provider, rows=rows(4))
        lab.spec["graders"].append({"type": "text", "name": "filter", "contains": "question"})
        return lab

    def export(self, lab: Lab, run: Path) -> Files:
        holdfast("export", run, "--to", "lm-eval", cwd=lab.folder)
        return read_files(run / "export" / "lm-eval")

    def test_an_eval_is_one_task_whose_metrics_are_the_graders(self, lab: Lab) -> None:
        lab.spec |= {"name": "my/eval", "trials": 2, "metadata": {"version": 3}, "system": "Be brief."}
        lab.spec["target"]["params"] = {"max_tokens": 9, "temperature": 0}
        run = lab.eval().run
        files = self.export(lab, run)
        result = files.results["results"]["my/eval"]
        assert (result["correct,none"], result["filter-2,none"], result["sample_len"]) == (0.5, 1.0, 4)
        assert files.results["versions"] == {"my/eval": 3}
        assert files.results["system_instruction"] == "Be brief."
        assert files.names[2].startswith("samples_my__eval_")
        first = files.samples[0]
        assert (first["doc"], first["target"]) == (lab.rows[0], "question 0")
        assert first["resps"] == [["question 0", "question 0"]], "trials are repeats"
        assert first["arguments"]["gen_args_0"]["arg_1"] == {"max_gen_toks": 9, "temperature": 0}
        assert json.loads(first["arguments"]["gen_args_0"]["arg_0"])[0] == {"role": "system", "content": "Be brief."}
        assert [sample["doc_id"] for sample in files.samples] == [0, 1, 2, 3]

    def test_a_second_export_replaces_the_first(self, lab: Lab) -> None:
        run = lab.eval().run
        before = self.export(lab, run)
        lab.spec["graders"][0]["weight"] = 2
        lab.eval()
        assert self.export(lab, run).names == before.names

    def test_an_unfinished_run_has_samples_and_no_results(self, lab: Lab) -> None:
        lab.eval("limits.concurrency=1", "--token-budget", "4", check=3)
        (run,) = lab.runs.glob("e/*-????????")
        holdfast("export", run, "--to", "lm-eval", "-o", "files", cwd=lab.folder)
        (path,) = (lab.folder / "files").glob("*/*")
        assert path.name.startswith("samples_") and 0 < len(lines(path)) < 4


def test_likelihoods_are_requests_with_log_likelihood_and_greedy_flag() -> None:
    likelihoods = [{"logprob": -1.5, "greedy": False, "tokens": 2}, {"logprob": -0.25, "greedy": True, "tokens": 1}]
    messages = [
        {"role": "user", "content": "The sky is"},
        {"role": "assistant", "content": " blue", "likelihoods": likelihoods},
    ]
    fields = {"doc": {"q": 1}, "continuations": [" green", {"context": "Skies are", "text": " blue"}], "gold": 1}
    trial = GradedTrial(fields, output_of(" blue", messages=messages), [], "passed", 1.0, Panel(()))
    document = _document([trial], 3, {})
    assert document == {
        "doc_id": 3,
        "doc": {"q": 1},
        "target": "1",
        "arguments": {
            "gen_args_0": {"arg_0": "The sky is", "arg_1": " green"},
            "gen_args_1": {"arg_0": "Skies are", "arg_1": " blue"},
        },
        "resps": [[["-1.5", "False"]], [["-0.25", "True"]]],
    }
