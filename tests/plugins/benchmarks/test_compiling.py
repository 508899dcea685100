"""Compiled benchmarks: the same rows at every start, used again until the data changes, and sent to clusters."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.apps.cli.suite import suite_of
from holdfast.apps.cluster.remote.bundle import collect, load_sent, send_bundles
from holdfast.apps.cluster.remote.transport import Here
from holdfast.data.dataset import Dataset
from holdfast.data.readers import Layout, read_rows
from holdfast.errors import ConfigError, UsageError
from holdfast.plan.identity import identify
from holdfast.plugins.benchmarks import names as index
from holdfast.plugins.benchmarks.cache import cache_folder
from holdfast.plugins.benchmarks.compile import compile_benchmark
from holdfast.plugins.benchmarks.compiler import CompileRequest, explain
from holdfast.plugins.benchmarks.format import find_benchmark, named_benchmark
from holdfast.plugins.benchmarks.names import find_listed
from holdfast.spec.document import read_document
from holdfast.spec.eval_schema import BenchmarkBlock
from holdfast.spec.formats import find_file, load_any
from holdfast.spec.suite import load_suite
from tests.support.running import holdfast, metrics, run_dir, server
from tests.support.specs import command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.plugins.benchmarks.cache import Compiled

MODEL: list[tuple[tuple[str, ...], Any]] = [(("target", "model"), "m"), (("target", "base_url"), "http://127.0.0.1:9")]


@pytest.fixture
def place(shared: Path, shared_settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a mirror and a cache, which the environment names."""
    for name, value in shared_settings.items():
        monkeypatch.setenv(name, value)
    return shared


def compiled(name: str, *, chat: bool = False, **keys: Any) -> Compiled:
    block = BenchmarkBlock(name=name, **keys)
    return compile_benchmark(find_benchmark(block), block, Path.cwd(), chat=chat)


@pytest.fixture
def forget_lm_eval(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A function after which lm-eval seems not to be installed."""

    def forget() -> None:
        monkeypatch.setattr(index, "version", lambda _: (_ for _ in ()).throw(PackageNotFoundError()))
        index.read_index.cache_clear()

    yield forget
    index.read_index.cache_clear()


def rows(benchmark: Compiled) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(cache_folder() / benchmark.rows, Layout())]


@pytest.mark.usefixtures("place")
def test_two_starts_make_the_same_rows_and_another_seed_makes_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiled("winogrande")
    contents = rows(first)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    assert compiled("winogrande").rows == first.rows
    assert compiled("winogrande", seed=7).rows != first.rows
    assert [row["id"] for row in contents] == [f"winogrande/{number}" for number in range(9)]


def test_rows_are_used_again_until_the_data_changes_also_without_lm_eval(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(place / "hub/allenai", tmp_path / "hub/allenai")
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "hub"))
    first = compiled("openbookqa")
    with monkeypatch.context() as patched:
        patched.setattr(index, "version", lambda _: (_ for _ in ()).throw(PackageNotFoundError()))
        assert compiled("openbookqa") == first
        with pytest.raises(UsageError, match="compiling the benchmark openbookqa needs lm-eval"):
            compiled("openbookqa", num_fewshot=1)
    file = tmp_path / "hub/allenai/openbookqa/main/test.jsonl"
    file.write_text(file.read_text().replace("that is wet", "that is dry", 1))
    before, changed = rows(first), rows(compiled("openbookqa"))
    assert [row["id"] for row, old in zip(changed, before, strict=True) if row != old] == ["openbookqa/0"]


@pytest.mark.usefixtures("place")
def test_a_benchmark_fetched_from_a_folder_runs_without_the_folder_and_lm_eval(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    forget_lm_eval: Callable[[], None],
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HOLDFAST_DATA")
    data = tmp_path / "data"
    (data / "allenai").mkdir(parents=True)
    (data / "allenai/openbookqa").symlink_to(place / "hub/allenai/openbookqa")
    fetch = ("tasks", "fetch", "lm-eval/openbookqa", "--data", data)
    fetched = command(monkeypatch, capsys, tmp_path, *fetch)
    assert (fetched.code, fetched.out.count("rows in")) == (0, 1)
    assert "note: compiling lm-eval/openbookqa …" in fetched.err
    assert "compiling" not in command(monkeypatch, capsys, tmp_path, *fetch).err
    shutil.rmtree(data)
    forget_lm_eval()
    for name in ("lm-eval/openbookqa", "suite"):
        asked = ("lm-eval/openbookqa",) if name != "suite" else ("lm-eval/openbookqa", "-m", "other")
        ended = command(monkeypatch, capsys, tmp_path, "eval", *asked, "-m", "m", "--dry-run")
        assert ended.code == 0, ended.err
        assert ended.err.count(f"openbookqa was compiled from the data in {data}") == 1
        assert "compiling" not in ended.err


@pytest.mark.usefixtures("place")
def test_a_chat_has_its_examples_as_turns() -> None:
    row = rows(compiled("gsm8k", chat=True, num_fewshot=2))[0]
    assert [message["role"] for message in row["history"]] == ["user", "assistant"] * 2
    assert row["context"].startswith("Question: A kettle costs $1250.")
    with pytest.raises(UsageError, match="winogrande asks for likelihoods, which chat APIs do not return"):
        compiled("winogrande", chat=True)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("lm-eval/humaneval", "runs code that the model wrote", "Holdfast's own benchmarks for code"),
        ("piqa", "has no dataset baber/piqa", "Copy it to"),
    ],
)
def test_a_benchmark_that_cannot_be_compiled_is_refused_with_the_reason(name: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        compiled(name)
    assert hint in str(caught.value.remedy)


@pytest.mark.usefixtures("place")
def test_more_examples_than_the_split_has_are_refused() -> None:
    with pytest.raises(UsageError, match=r"winogrande is asked with 500 examples, and the split has only [0-9]+ ex"):
        compiled("winogrande", num_fewshot=500)


def test_the_folder_of_another_dataset_is_refused(place: Path) -> None:
    folder = place / "hub/allenai/openbookqa"
    with pytest.raises(UsageError, match=f"{folder} is not the dataset Rowan/hellaswag") as caught:
        compiled("hellaswag", data=str(folder))
    assert "Name the folder of Rowan/hellaswag" in str(caught.value.remedy)


def test_a_package_that_a_task_lacks_is_named() -> None:
    request = CompileRequest("a", None, 1, False, {}, None, None, {})
    error = ValueError("cannot load utils.process_docs")
    error.__cause__ = ModuleNotFoundError("No module named 'sympy.core'", name="sympy.core")
    refusal = explain("load", "a", error, request, [])
    assert (str(refusal), refusal.remedy) == ("a needs the package sympy, which is not installed", "pip install sympy")


def test_a_revision_of_local_data_has_no_effect_and_a_note_says_so(place: Path) -> None:
    spec = load_any(named_benchmark("winogrande"), [*MODEL, (("benchmark", "revision"), "main")])
    assert f"benchmark.revision has no effect on the data in {place / 'hub'}" in spec.notices


@pytest.mark.usefixtures("place")
def test_a_dry_run_shows_how_many_tasks_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = command(monkeypatch, capsys, tmp_path, "eval", "adlr_mmlu", "-m", "m", "--limit", "1", "--dry-run").out
    assert "tasks: 57 tasks\n" in shown
    assert len(shown.splitlines()) < 120


@pytest.mark.usefixtures("place")
def test_notes_for_programs_are_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    index.read_index.cache_clear()
    named = ("lm-eval/openbookqa", "-m", "m", "target.base_url=http://127.0.0.1:9", "limits.retries=0", "--limit", "1")
    ended = command(monkeypatch, capsys, tmp_path, "eval", *named, "--display", "json")
    assert "note: " not in ended.err
    events = [json.loads(line) for line in ended.err.splitlines() if line.startswith("{")]
    notes = [event["message"] for event in events if event["event"] == "notice"]
    assert "compiling lm-eval/openbookqa …" in notes
    assert any("reading the names of lm-eval" in note for note in notes)


@pytest.mark.usefixtures("place")
def test_a_suite_has_both_settings_of_a_benchmark_and_shows_each_note_once() -> None:
    cells = load_suite(suite_of(["winogrande", "lm-eval/winogrande"], ["m", "other"]), MODEL[1:])
    assert [cell.eval for cell in cells] == ["winogrande"] * 2 + ["lm-eval/winogrande"] * 2
    notices = [notice for cell in cells for notice in cell.spec.notices]
    assert len(notices) == len(set(notices)) == 2


@pytest.mark.usefixtures("place")
def test_fetch_takes_globs_over_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetched = command(monkeypatch, capsys, tmp_path, "tasks", "fetch", "openbook*", "mmlu-sam*", "mmlu-sample")
    assert [line.partition(":")[0] for line in fetched.out.splitlines()] == ["openbookqa", "mmlu-sample"]
    assert "error: no benchmark matches 'x*'" in command(monkeypatch, capsys, tmp_path, "tasks", "fetch", "x*").err


def test_a_limit_holds_for_each_subtask_and_grows_without_repeats(
    shared_settings: dict[str, str], tmp_path: Path
) -> None:
    with server() as provider:
        arguments = ("eval", "adlr_mmlu", "-m", "m", f"target.base_url={provider.base_url}", "--limit")
        holdfast(*arguments, "1", cwd=tmp_path, env=shared_settings)
        assert provider.requests == 57
        again = holdfast(*arguments, "2", cwd=tmp_path, env=shared_settings)
        assert provider.requests == 114
        assert "57 reused, 57 to run" in again.stderr


def test_an_eval_file_keeps_its_own_keys_and_adds_graders_of_lm_eval(
    shared_settings: dict[str, str], tmp_path: Path
) -> None:
    graders = [
        {
            "type": "lm_eval",
            "name": f"theirs-{name}",
            "task": "gsm8k",
            "metric": "exact_match",
            "filter": name,
            "weight": 0,
        }
        for name in ("strict-match", "flexible-extract")
    ]
    file = tmp_path / "eval.yaml"
    keys = {"schemaVersion": "1.0", "name": "mine", "benchmark": {"name": "gsm8k"}, "graders": graders}
    with server(answer="They cost 2500. #### 2,500") as provider:
        file.write_text(json.dumps({**keys, "target": {"model": "m", "base_url": provider.base_url}}))
        holdfast("eval", file, cwd=tmp_path, env=shared_settings)
    numbers = metrics(run_dir(tmp_path, "mine"))["metrics"]
    for name in ("strict-match", "flexible-extract"):
        assert numbers[f"theirs-{name}"]["score"] == numbers[f"exact_match,{name}"]["score"] == 1 / 8


@pytest.mark.usefixtures("place")
def test_a_file_selects_rows_of_its_benchmark(tmp_path: Path) -> None:
    file = tmp_path / "eval.yaml"
    file.write_text("benchmark: winogrande\ndataset: {limit: 2, offset: 1}\n")
    spec = load_any(read_document(file), [*MODEL, (("dataset",), {"limit": 3})])
    assert [sample.id for sample in Dataset(spec)] == [f"winogrande/{number}" for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("line", "overrides", "message"),
    [
        ("prompt: hi", [], "eval.yaml:2: prompt: `prompt` cannot be combined with `benchmark`"),
        ("samples: [{q: 1}]", [], "eval.yaml:2: samples: `samples` cannot be combined with `benchmark`"),
        ("dataset: {path: a.jsonl}", [], "eval.yaml:2: dataset.path: `dataset.path` cannot be combined with"),
        ("dataset: a.jsonl", [], "eval.yaml:2: dataset.path: `dataset.path` cannot be combined with"),
        ("trials: 1", [(("prompt",), "hi")], "prompt: `prompt` cannot be combined with `benchmark`"),
        ("trials: 1", [(("dataset",), {"path": "a"})], "dataset.path: `dataset.path` cannot be combined with"),
    ],
)
def test_keys_that_a_benchmark_sets_are_refused_in_its_eval_file(
    tmp_path: Path, line: str, overrides: list[Any], message: str
) -> None:
    file = tmp_path / "eval.yaml"
    file.write_text(f"benchmark: winogrande\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load_any(read_document(file), [*MODEL, *overrides])
    assert message in str(caught.value)


def test_a_compiled_benchmark_travels_with_its_rows_and_is_the_same_run_on_a_cluster(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = load_any(named_benchmark("winogrande"), MODEL)
    file = find_file("winogrande", [])
    assert file is not None and file.stem == "winogrande", "it is the name of the task on a cluster"
    spec = load_any(read_document(file), MODEL)
    bundle = collect(spec, file, translated=True)
    sent = tmp_path / "cluster" / send_bundles([bundle], Here(pauses=()), str(tmp_path / "cluster"))[0]
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "empty"))
    monkeypatch.setattr(index, "version", lambda _: (_ for _ in ()).throw(PackageNotFoundError()))
    there = load_sent(sent / bundle.eval_file, bundle.overrides(spec, str(sent)))
    assert there.dataset is not None
    assert Path(there.dataset.path[0]).is_relative_to(sent)
    assert identify(there).id == identify(here).id
    assert find_listed("winogrande") is not None
