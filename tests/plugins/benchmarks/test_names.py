"""Names of benchmarks: the table, lm-eval's tasks, tasks of packages, and names that are unknown here."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.errors import UsageError
from holdfast.plugins.benchmarks import names as index
from holdfast.plugins.benchmarks.names import (
    OVERLAY,
    find_in_lm_eval,
    find_listed,
    known_names,
    overlay_index,
    read_index,
    scan,
    table,
    tasks_folder,
)
from holdfast.spec.formats import load_any, read_eval, resolve_eval
from tests.support.specs import command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FIVE = ("adlr_mmlu", "adlr_arc_challenge_llama_25_shot", "adlr_winogrande_5_shot", "hellaswag", "openbookqa")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that keeps the names of lm-eval's tasks once they have been read."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def read_names_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOLDFAST_HOME", str(home))
    monkeypatch.delenv("HOLDFAST_DATA", raising=False)
    read_index.cache_clear()
    yield
    read_index.cache_clear()


@pytest.fixture
def no_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(index, "version", missing)


def test_the_table_has_all_421_names_of_nemo_evaluator() -> None:
    names = {*table().benchmarks, *table().harnesses}
    assert len(table().harnesses) + len(table().benchmarks) > 400
    assert {*FIVE, "wikitext", "gsm8k", "mmlu", "ns_mmlu", "ruler-1m-chat", "tau2_bench_retail", "garak"} <= names


@pytest.mark.parametrize(
    ("name", "task", "shots", "params"),
    [
        ("adlr_mmlu", "mmlu_str", 5, {"temperature": 0.0, "top_p": 1e-05}),
        ("adlr_arc_challenge_llama_25_shot", "adlr_arc_challenge_llama", 25, {"temperature": 1.0, "top_p": 1.0}),
        ("adlr_winogrande_5_shot", "winogrande", 5, {"temperature": 1.0, "top_p": 1.0}),
        ("hellaswag", "hellaswag", 10, {"temperature": 1e-07, "top_p": 0.9999999}),
        ("openbookqa", "openbookqa", None, {"temperature": 1e-07, "top_p": 0.9999999}),
    ],
)
def test_nemos_names_have_nemos_settings(name: str, task: str, shots: int | None, params: dict[str, float]) -> None:
    benchmark = find_listed(name)
    assert benchmark is not None
    assert (benchmark.task, benchmark.shots, benchmark.params) == (task, shots, params)


def test_lm_evals_names_have_lm_evals_settings() -> None:
    benchmark = find_in_lm_eval("lm-eval/hellaswag")
    assert benchmark is not None
    assert (benchmark.name, benchmark.shots, benchmark.params, benchmark.listed) == ("hellaswag", None, {}, False)
    assert len(known_names(every=True)) > 14_000


def test_every_task_of_the_table_exists() -> None:
    index = read_index()
    assert index is not None
    missing = [
        benchmark.name
        for benchmark in table().benchmarks.values()
        if benchmark.provider == "lm-eval" and benchmark.task not in index and benchmark.task not in overlay_index()
    ]
    assert missing == []


def test_the_index_reads_names_as_lm_eval_does() -> None:
    from lm_eval.tasks import TaskManager

    folders = [tasks_folder() / name for name in ("mmlu", "arc", "truthfulqa", "leaderboard", "glue")]
    for folder in [*folders, OVERLAY]:
        manager = TaskManager(include_defaults=False, include_path=str(folder))
        names = scan(folder, "")
        assert names.names() == manager.all_tasks
        assert {name: names.files(name) for name in manager.all_groups} == {
            name: [manager.task_index[name].yaml_path.relative_to(folder).as_posix()] for name in manager.all_groups
        }
        assert {tag: set(names.tags[tag]) for tag in manager.all_tags} == {
            tag: manager.task_index[tag].tags for tag in manager.all_tags
        }


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("helaswag", r"no eval file 'helaswag', and no task of that name \(did you mean 'hellaswag'\?\)"),
        ("lm-eval/helaswag", r"lm-eval has no task 'helaswag' \(did you mean 'lm-eval/hellaswag'\?\)"),
        ("simpleqa", "simpleqa is a benchmark of simple_evals, which Holdfast does not have"),
        ("adlr_race", "adlr_race is a benchmark of nvidia-lm-eval, which Holdfast does not have"),
    ],
)
def test_unknown_names_say_what_is_close_or_what_they_need(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve_eval(name)


@pytest.mark.parametrize("arguments", [("eval", "", "-m", "m"), ("tasks", "show", "")])
def test_an_empty_name_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    ended = command(monkeypatch, capsys, tmp_path, *arguments)
    assert ended.code == 2
    assert " is empty\n" in ended.err


def test_a_benchmark_needs_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = command(monkeypatch, capsys, tmp_path, "eval", "hellaswag")
    assert ended.code == 2
    assert "error: name the model to measure with hellaswag" in ended.err
    assert "hint: holdfast eval hellaswag -m MODEL" in ended.err


@pytest.mark.parametrize(
    ("target", "has_params"),
    [
        ({"mock": "waza"}, False),
        ({"agent": "claude-code", "model": "m"}, False),
        ({"command": ["cat"]}, False),
        ({"python": "agent.py:reply"}, True),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_a_benchmark_measures_any_kind_of_target(tmp_path: Path, target: dict[str, Any], has_params: bool) -> None:
    (tmp_path / "agent.py").write_text("def reply(context):\n    return 'The answer is 7.'\n")
    path = tmp_path / "eval.yaml"
    path.write_text(json.dumps({"schemaVersion": "1.0", "benchmark": "gsm8k-sample", "target": target}))
    spec = load_any(read_eval(path))
    kept = spec.target.model_dump(exclude_unset=True)
    assert {key: kept[key] for key in target} == target and ("params" in kept) is has_params
    noted = any("gsm8k-sample sets `params`, which the target" in notice for notice in spec.notices)
    assert noted is not has_params


@pytest.mark.usefixtures("no_lm_eval")
class TestWithoutLmEval:
    def test_names_are_listed_and_shown(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        listed = json.loads(command(monkeypatch, capsys, tmp_path, "tasks", "ls", "adlr_*", "--json").out)
        assert {row["name"] for row in listed} >= set(FIVE[:3])
        assert {row["metric"] for row in listed} >= {"exact_match", "acc"} and all(row["measures"] for row in listed)
        shown = command(monkeypatch, capsys, tmp_path, "tasks", "show", "hellaswag").out
        assert "hellaswag: task hellaswag, as in NeMo Evaluator\nexamples   10\n" in shown
        assert 'needs lm-eval: pip install "holdfast-evals[lm-eval]"' in shown

    def test_a_list_of_everything_has_one_line_for_a_family(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        names = [line.split("  ")[0] for line in command(monkeypatch, capsys, tmp_path, "tasks", "ls").out.splitlines()]
        assert {"hellaswag", "global_mmlu_full_* (42)", "mmlu_prox_* (10)"} <= set(names)
        assert not any(name.startswith("global_mmlu_full_") and "*" not in name for name in names)
        found = command(monkeypatch, capsys, tmp_path, "tasks", "ls", "global_mmlu_full_*").out
        assert len(found.splitlines()) == 42 and "MMLU in other languages, all questions" in found

    def test_lists_say_that_it_is_missing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert "is not installed" in command(monkeypatch, capsys, tmp_path, "tasks", "ls", "--all", "arc*").err

    def test_settings_of_lm_eval_are_not_replaced_by_others_without_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ended = command(monkeypatch, capsys, tmp_path, "eval", "lm-eval/hellaswag", "-m", "m")
        assert (ended.code, "did you mean" in ended.err) == (2, False)
        assert "error: lm-eval/hellaswag needs lm-eval, which is not installed" in ended.err

    def test_compiling_names_the_package(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ended = command(monkeypatch, capsys, tmp_path, "eval", "hellaswag", "-m", "m")
        assert ended.code == 2
        assert "compiling the benchmark hellaswag needs lm-eval" in ended.err

    def test_samples_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shown = command(monkeypatch, capsys, tmp_path, "eval", "mmlu-sample", "-m", "m", "--limit", "1", "--dry-run")
        assert "4 samples" in shown.out  # one of each subject
