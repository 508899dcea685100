"""Compiled benchmarks: the same rows at every start, used again until the data changes, and sent to clusters."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.benchmarks import index
from holdfast.benchmarks.cache import cache_folder
from holdfast.benchmarks.compile import compile_benchmark
from holdfast.benchmarks.names import find_listed
from holdfast.cluster.remote.bundle import collect, load_sent
from holdfast.cluster.remote.transport import Here
from holdfast.data.readers import Layout, read_rows
from holdfast.errors import UsageError
from holdfast.formats import load_any
from holdfast.formats.benchmark import find_benchmark
from holdfast.formats.providers import find_file, named_benchmark
from holdfast.plan.identity import identify
from holdfast.spec.document import read_document
from holdfast.spec.schema import BenchmarkBlock
from tests.support.hub import write_hub
from tests.support.running import holdfast, metrics, run_dir, server

if TYPE_CHECKING:
    from holdfast.benchmarks.cache import Compiled

MODEL: list[tuple[tuple[str, ...], Any]] = [(("target", "model"), "m"), (("target", "base_url"), "http://127.0.0.1:9")]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiling")
    write_hub(folder / "hub")
    return folder


@pytest.fixture
def place(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a mirror and a cache, which the environment names."""
    for name, value in settings(shared).items():
        monkeypatch.setenv(name, value)
    return shared


def settings(place: Path) -> dict[str, str]:
    return {
        "HOLDFAST_HOME": str(place / "home"),
        "HOLDFAST_DATA": str(place / "hub"),
        "HF_DATASETS_CACHE": str(place / "hf"),
    }


def compiled(name: str, *, again: bool = False, chat: bool = False, **keys: Any) -> Compiled:
    block = BenchmarkBlock(name=name, **keys)
    return compile_benchmark(find_benchmark(block), block, Path.cwd(), chat=chat, again=again)


def rows(benchmark: Compiled) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(cache_folder() / benchmark.rows, Layout())]


@pytest.mark.usefixtures("place")
def test_two_starts_make_the_same_rows_and_another_seed_makes_others() -> None:
    first = compiled("winogrande")
    assert compiled("winogrande", again=True).rows == first.rows
    assert compiled("winogrande", seed=7).rows != first.rows
    assert [row["id"] for row in rows(first)] == [f"winogrande/{number}" for number in range(9)]


def test_rows_are_used_again_until_the_data_changes_also_without_lm_eval(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiled("openbookqa")
    with monkeypatch.context() as patched:
        patched.setattr(index, "version", lambda _: (_ for _ in ()).throw(PackageNotFoundError()))
        assert compiled("openbookqa") == first
        with pytest.raises(UsageError, match="compiling the benchmark openbookqa needs lm-eval"):
            compiled("openbookqa", num_fewshot=1)
    file = place / "hub/allenai/openbookqa/main/test.jsonl"
    text = file.read_text()
    try:
        file.write_text(text.replace("that is wet", "that is dry", 1))
        changed = rows(compiled("openbookqa"))
    finally:
        file.write_text(text)
    before = rows(first)
    assert [row["id"] for row, old in zip(changed, before, strict=True) if row != old] == ["openbookqa/0"]


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
def test_what_cannot_be_compiled_says_why(name: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        compiled(name)
    assert hint in str(caught.value.remedy)


def test_a_limit_holds_for_each_subtask_and_grows_without_repeats(place: Path, tmp_path: Path) -> None:
    with server() as provider:
        command = ("eval", "adlr_mmlu", "-m", "m", f"target.base_url={provider.base_url}", "--limit")
        holdfast(*command, "1", cwd=tmp_path, env=settings(place))
        assert provider.requests == 57
        again = holdfast(*command, "2", cwd=tmp_path, env=settings(place))
        assert provider.requests == 114
        assert "57 reused, 57 to run" in again.stderr


def test_an_eval_file_keeps_its_own_keys_and_adds_graders_of_lm_eval(place: Path, tmp_path: Path) -> None:
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
    keys = {"schemaVersion": "1.3", "name": "mine", "benchmark": {"name": "gsm8k"}, "graders": graders}
    with server(answer="They cost 2500. #### 2,500") as provider:
        file.write_text(json.dumps({**keys, "target": {"model": "m", "base_url": provider.base_url}}))
        holdfast("eval", file, cwd=tmp_path, env=settings(place))
    numbers = metrics(run_dir(tmp_path, "mine"))["metrics"]
    for name in ("strict-match", "flexible-extract"):
        assert numbers[f"theirs-{name}"]["score"] == numbers[f"exact_match,{name}"]["score"] == 1 / 8


def test_a_compiled_benchmark_travels_with_its_rows_and_is_the_same_run_on_a_cluster(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = load_any(named_benchmark("winogrande"), MODEL)
    file = find_file("winogrande", [])
    assert file is not None and file.stem == "winogrande", "it is the name of the task on a cluster"
    spec = load_any(read_document(file), MODEL)
    bundle = collect(spec, file, translated=True)
    sent = tmp_path / "cluster" / bundle.send(Here(pauses=()), str(tmp_path / "cluster"))
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "empty"))
    monkeypatch.setattr(index, "version", lambda _: (_ for _ in ()).throw(PackageNotFoundError()))
    there = load_sent(sent / bundle.eval_file, bundle.overrides(spec, str(sent)))
    assert there.dataset is not None
    assert Path(there.dataset.path[0]).is_relative_to(sent)
    assert identify(there).id == identify(here).id
    assert find_listed("winogrande") is not None
