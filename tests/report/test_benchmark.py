"""Numbers of benchmarks: equal to lm-eval's, digit for digit, whatever order the trials finished in."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.report import benchmark as ours
from holdfast.spec.eval import BenchmarkTasks, benchmark_tasks
from tests.support.lazy import LazyModule
from tests.support.running import holdfast as run_command
from tests.support.running import metrics

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from holdfast.store.metrics import BenchmarkMetrics

theirs = LazyModule("lm_eval.api.metrics")

scores = st.lists(st.floats(0, 1), min_size=2, max_size=200)
logprobs = st.lists(st.floats(-500, 0), min_size=1, max_size=100)
pairs = st.lists(st.tuples(st.floats(-5000, 0), st.integers(1, 4000)), min_size=1, max_size=100)


class TestArithmetic:
    @given(scores)
    def test_means_and_their_standard_errors(self, values: list[float]) -> None:
        assert ours.mean(values) == theirs.mean(values)
        assert ours.mean_stderr(values) == theirs.mean_stderr(values)
        assert ours.median(values) == theirs.median(values)

    @given(logprobs)
    def test_perplexity(self, values: list[float]) -> None:
        assert ours.perplexity(values) == theirs.perplexity(values)

    @given(pairs)
    def test_perplexities_by_length(self, values: list[tuple[float, int]]) -> None:
        try:
            expected = theirs.weighted_perplexity(values)
        except OverflowError:
            with pytest.raises(OverflowError):
                ours.weighted_perplexity(values)
        else:
            assert ours.weighted_perplexity(values) == expected
        assert ours.bits_per_byte(values) == theirs.bits_per_byte(values)

    @given(st.lists(st.tuples(st.floats(0, 0.5), st.integers(2, 2000)), min_size=1, max_size=60))
    def test_standard_errors_of_groups(self, members: list[tuple[float, int]]) -> None:
        stderrs, sizes = [stderr for stderr, _ in members], [size for _, size in members]
        assert ours.pooled_stderr(stderrs, sizes) == theirs.pooled_sample_stderr(stderrs, sizes)
        assert ours.unweighted_stderr(stderrs) == theirs.unweighted_mean_stderr(stderrs)


def lm_eval_results(tasks: BenchmarkTasks, values: Mapping[tuple[str, str], list[Any]]) -> dict[str, Any]:
    """Give the same values to lm-eval's own code: its groups, aggregations, and what it makes of them."""
    from lm_eval.api.group import Group
    from lm_eval.api.registry import AGGREGATION_REGISTRY
    from lm_eval.api.task import Task
    from lm_eval.config.group import AggMetricConfig
    from lm_eval.evaluator_utils import _process_results

    class Stub(Task):
        """A task without data, which knows what lm-eval asks when documents are scored."""

        def __init__(self, name: str) -> None:
            self.name, self.task = name, tasks.tasks[name]
            self.VERSION = self.task.version

        task_name = property(lambda self: self.name)
        eval_docs = property(lambda self: range(self.task.n_original))

        def aggregation(self) -> Any:
            return {metric.metric: AGGREGATION_REGISTRY[metric.aggregation] for metric in self.task.metrics}

        def higher_is_better(self) -> Any:
            return {metric.metric: metric.higher_is_better for metric in self.task.metrics}

        def dump_config(self) -> Any:
            alias = {"task_alias": self.task.alias} if self.task.alias else {}
            return {"num_fewshot": self.task.n_shot, **alias}

    Stub.__abstractmethods__ = frozenset()
    stubs = {name: Stub(name) for name in tasks.tasks}
    groups = {
        name: Group(
            name,
            group.alias,
            [
                AggMetricConfig(
                    each.metric,
                    None if each.filter is None else [each.filter],
                    weight_by_size=each.weight_by_size,
                )
                for each in group.metrics
            ],
            {"version": group.version} if group.version is not None else None,
        )
        for name, group in tasks.groups.items()
    }
    for name, group in tasks.groups.items():
        for member in group.tasks:
            groups[name].add(groups.get(member) or stubs[member])
    accumulated = {
        name: {
            "task": stub,
            "raw_metrics": {
                (metric.metric, metric.filter): values[name, metric.key] for metric in tasks.tasks[name].metrics
            },
            "logged_samples": [],
        }
        for name, stub in stubs.items()
    }
    results = _process_results(accumulated, groups, bootstrap_iters=1)._to_eval_results()
    del results["configs"]
    return json.loads(json.dumps(results, default=float))


def as_json(numbers: BenchmarkMetrics) -> dict[str, Any]:
    import msgspec

    return json.loads(msgspec.json.encode(numbers))


MEAN = [{"metric": "acc", "grader": "acc"}, {"metric": "acc_norm", "grader": "acc_norm"}]
GROUPED = {
    "tasks": {
        "algebra": {"version": 1.0, "n_shot": 5, "n_original": 100, "metrics": MEAN, "alias": "Algebra"},
        "botany": {"version": 1.0, "n_shot": 5, "n_original": 100, "metrics": MEAN},
        "carving": {"version": 2, "n_shot": 3, "n_original": 50, "metrics": MEAN[:1]},
    },
    "groups": {
        "science": {
            "tasks": ["algebra", "botany"],
            "metrics": [{"metric": "acc", "filter": "none"}, {"metric": "acc_norm", "weight_by_size": False}],
            "version": 2,
            "alias": "Science",
        },
        "all": {"tasks": ["science", "carving"], "metrics": [{"metric": "acc", "filter": "none"}]},
        "listed": {"tasks": ["algebra"]},
    },
}


def tasks_of(block: dict[str, Any]) -> BenchmarkTasks:
    tasks = benchmark_tasks({"metadata": {"benchmark": block}})
    assert tasks is not None
    return tasks


@given(st.data())
def test_tasks_and_nested_groups_are_lm_evals(data: st.DataObject) -> None:
    tasks = tasks_of(GROUPED)
    values = {}
    for name, task in tasks.tasks.items():
        size = data.draw(st.integers(2, 30))
        for metric in task.metrics:
            values[name, metric.key] = data.draw(st.lists(st.floats(0, 1), min_size=size, max_size=size))
    computed = as_json(ours.benchmark_metrics(tasks, values))
    expected = lm_eval_results(tasks, values)
    assert computed == expected
    assert [list(entry) for entry in computed["results"].values()] == [
        list(entry) for entry in expected["results"].values()
    ]


def test_a_single_document_has_no_standard_error_as_in_lm_eval() -> None:
    tasks = tasks_of({"tasks": {"one": {"metrics": MEAN[:1], "n_original": 1}}, "groups": {}})
    values: dict[tuple[str, str], list[Any]] = {("one", "acc,none"): [1.0]}
    computed = as_json(ours.benchmark_metrics(tasks, values))
    assert computed["results"]["one"]["acc_stderr,none"] == "N/A"
    assert computed["results"] == lm_eval_results(tasks, values)["results"]


def test_members_that_differ_give_the_group_no_shots_and_no_direction() -> None:
    up = {"metric": "acc", "grader": "acc"}
    down = {**up, "higher_is_better": False}
    block = {
        "tasks": {
            "a": {"n_shot": 0, "metrics": [up], "n_original": 2},
            "b": {"n_shot": 1, "metrics": [down], "n_original": 2},
        },
        "groups": {"g": {"tasks": ["a", "b"], "metrics": [{"metric": "acc"}]}},
    }
    tasks = tasks_of(block)
    values: dict[tuple[str, str], list[Any]] = {("a", "acc,none"): [1.0, 0.0], ("b", "acc,none"): [1.0, 1.0]}
    computed = as_json(ours.benchmark_metrics(tasks, values))
    assert computed == lm_eval_results(tasks, values)
    assert computed["higher_is_better"]["g"] == {"acc": None} and "g" not in computed["n-shot"]


def test_tasks_without_rows_are_left_out() -> None:
    tasks = tasks_of(GROUPED)
    computed = ours.benchmark_metrics(tasks, {("algebra", "acc,none"): [1.0, 0.0]})
    assert list(computed.results) == ["algebra", "science", "all", "listed"]
    assert computed.results["all"]["acc,none"] == 0.5 and computed.n_samples == {
        "algebra": {"original": 100, "effective": 2}
    }


@pytest.mark.parametrize("metadata", [None, "mmlu", {"benchmark": "mmlu"}, {"benchmark": {"tasks": ["a"]}}, {"x": 1}])
def test_metadata_of_users_is_theirs(metadata: Any) -> None:
    assert benchmark_tasks({"metadata": metadata}) is None


# Runs

AGENT = """
def reply(sample):
    return sample["answer"]

def acc(output):
    return output == "right"

def acc_norm(output):
    return 0.1 * len(output)

def word_perplexity(output):
    return {"score": 1.0, "details": {"value": [-1.5 * len(output), len(output) + 1]}}
"""
GRADERS = ("acc", "acc_norm")


def benchmark_run(folder: Path, *arguments: str, block: Any = GROUPED, reverse: bool = False, **keys: Any) -> Path:
    """A finished run of rows of three tasks."""
    folder.mkdir(parents=True)
    (folder / "agent.py").write_text(AGENT)
    samples = [
        {"id": f"{task}/{number}", "task": task, "answer": ("right", "wrong", "odd one")[(number + size) % 3]}
        for task, size in (("algebra", 7), ("botany", 4), ("carving", 5))
        for number in range(size)
    ]
    spec = {
        "schemaVersion": "1.0",
        "name": "e",
        "metadata": {"benchmark": block},
        "samples": samples[::-1] if reverse else samples,
        "target": {"python": "agent.py:reply"},
        "prompt": "{{ id }}",
        "graders": [
            {"type": "python", "name": name, "function": f"agent.py:{name}", "weight": int(name == "acc")}
            for name in keys.pop("graders", GRADERS)
        ],
        "by": "task",
        **keys,
    }
    (folder / "e.yaml").write_text(json.dumps(spec))
    run_command("eval", "e.yaml", *arguments, cwd=folder)
    (run,) = [path for path in (folder / "runs" / "e").iterdir() if (path / "manifest.json").exists()]
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return benchmark_run(tmp_path_factory.mktemp("benchmark") / "run")


def test_a_run_has_the_numbers_that_lm_eval_makes_of_its_scores(run: Path) -> None:
    values: dict[tuple[str, str], list[Any]] = {}
    for trial in json.loads((run / "results.json").read_text())["trials"]:
        task = trial["by"]["task"]
        for grader in GRADERS if task != "carving" else GRADERS[:1]:
            values.setdefault((task, f"{grader},none"), []).append(trial["grades"][grader]["score"])
    assert metrics(run)["benchmark"] == lm_eval_results(tasks_of(GROUPED), values)


def test_workers_and_other_orders_of_execution_change_no_digit(run: Path, tmp_path: Path) -> None:
    workers = benchmark_run(tmp_path / "workers", "--workers", "2")
    alone = benchmark_run(tmp_path / "alone", "limits.concurrency=1")
    assert json.dumps(metrics(run)) == json.dumps(metrics(workers)) == json.dumps(metrics(alone))


def test_a_shuffled_dataset_keeps_each_task_together(run: Path, tmp_path: Path) -> None:
    backwards = metrics(benchmark_run(tmp_path / "backwards", reverse=True))["benchmark"]
    straight = metrics(run)["benchmark"]
    assert backwards.keys() == straight.keys()
    assert backwards["results"]["all"]["acc,none"] == straight["results"]["all"]["acc,none"]
    assert backwards["n-samples"] == straight["n-samples"]


def test_changed_groups_only_rewrite_the_report(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    finished = benchmark_run(folder)
    lines = (finished / "grades.jsonl").read_bytes()
    spec = json.loads((folder / "e.yaml").read_text())
    del spec["metadata"]["benchmark"]["groups"]["all"]
    (folder / "e.yaml").write_text(json.dumps(spec))
    run_command("eval", "e.yaml", cwd=folder)
    assert list(metrics(finished)["benchmark"]["groups"]) == ["science"]
    assert (finished / "grades.jsonl").read_bytes() == lines


def test_metrics_of_values_come_from_the_details_of_verdicts(tmp_path: Path) -> None:
    metric = {"metric": "word_perplexity", "grader": "word_perplexity", "aggregation": "weighted_perplexity"}
    unknown = {"metric": "f1", "grader": "word_perplexity", "aggregation": "f1"}
    tasks = {name: {"metrics": [metric, unknown], "n_original": 9} for name in ("algebra", "botany", "carving")}
    finished = benchmark_run(tmp_path / "run", block={"tasks": tasks}, graders=["word_perplexity"])
    report = metrics(finished)
    answers = [len(("right", "wrong", "odd one")[(number + 4) % 3]) for number in range(4)]
    expected = math.exp(sum(1.5 * length for length in answers) / sum(length + 1 for length in answers))
    assert report["benchmark"]["results"]["botany"] == {
        "name": "botany",
        "alias": "botany",
        "sample_len": 4,
        "word_perplexity,none": expected,
        "word_perplexity_stderr,none": "N/A",
    }
    assert "not computed here, and left out: lm-eval's f1" in report["notices"]


def test_the_table_has_members_below_their_group_with_both_errors(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    benchmark_run(folder)
    shown = run_command("eval", "e.yaml", cwd=folder).stdout
    table = shown[shown.index("as lm-eval reports it") :]
    accuracies = [
        [cell.strip("\n").rstrip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if " acc " in line
    ]
    assert [cells[0] for cells in accuracies[:4]] == [" all", "   Science", "     Algebra", "     botany"]
    numbers = metrics(next((folder / "runs" / "e").glob("*-????????")))["benchmark"]["results"]["all"]
    assert accuracies[0][3:5] == [f" {numbers['acc,none']:.4f}", f"   {numbers['acc_stderr,none']:.4f}"]
    assert all("–" in cells[5] for cells in accuracies), "intervals of tasks and of groups"
    assert "by task" not in shown, "the table of the benchmark has its tasks"
