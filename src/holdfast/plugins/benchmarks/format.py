"""Benchmarks as plug-ins: a format of eval files, and providers of tasks by name.

In an eval file, `benchmark: {name: hellaswag}` stands for data, prompt and graders. The file's other keys are kept;
its `graders` are added to the benchmark's. A benchmark's name on its own stands for such a file.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from holdfast import ConfigError, Document, Format, Problem, UsageError
from holdfast.display.terminal import note, show_step
from holdfast.errors import suggest
from holdfast.plugins.benchmarks.cache import mirror_folder
from holdfast.plugins.benchmarks.compile import INSTALL, compile_benchmark, make_document
from holdfast.plugins.benchmarks.names import (
    LM_EVAL,
    Benchmark,
    find_in_lm_eval,
    find_listed,
    installed_version,
    known_names,
    overlay_index,
    read_index,
    table,
)
from holdfast.plugins.benchmarks.native import load
from holdfast.spec.eval_schema import BenchmarkBlock
from holdfast.spec.formats import folder_of, unknown_task
from holdfast.spec.load import apply_override
from holdfast.spec.providers import provider_of
from holdfast.spec.schema import as_dataset, validate_block
from holdfast.spec.target_schema import TARGETS, schema_of, target_kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from holdfast import Override
    from holdfast.plugins.benchmarks.cache import Compiled

_MERGED: Final = ("target", "metadata", "dataset")
"""blocks whose keys are laid over the benchmark's"""
_BROUGHT: Final = ("samples", "prompt", "continuations", "history")
"""keys that a benchmark brings itself"""
_NEEDS_COMPLETIONS: Final = ("asks for likelihoods", "not defined for the chat API", "begins the reply itself")
"""what is wrong with a benchmark that cannot be asked as a conversation"""
_SELECTIONS: Final = ("limit", "limit_by", "offset", "shuffle", "where", "ids", "tags")
"""keys of `dataset` that select among the benchmark's rows"""


class BenchmarkFile(Format):
    """Eval files with a block `benchmark`."""

    def recognizes(self, data: Mapping[str, Any]) -> bool:
        return "benchmark" in data

    def translate(self, document: Document, overrides: Sequence[Override]) -> tuple[Document, list[Override]]:
        block = read_block(document, [item for item in overrides if item[0][0] == "benchmark"])
        remaining = [item for each in overrides if each[0][0] != "benchmark" for item in _split_dataset(each)]
        written = [((key,), value) for key, value in document.data.items()]
        keys = [key for item in (*written, *remaining) for key, _ in _split_dataset(item)]
        if problems := [Problem(document.where(key), message) for key in keys if (message := _refusal(key))]:
            raise ConfigError(problems)
        benchmark = find_benchmark(block)
        own = {key: value for key, value in document.data.items() if key != "benchmark"}
        target = dict(own.get("target") or {})
        for key, value in remaining:
            if key[0] == "target" and len(key) == 2:
                target[key[1]] = value
        if not target.keys() & {*TARGETS, "type"}:
            raise UsageError(
                f"name the model to measure with {benchmark.name}",
                remedy=f"holdfast eval {block.name} -m MODEL, or `target: {{model: MODEL}}` in the eval file.",
            )
        data, notices = benchmark_document(benchmark, block, target, folder_of(document))
        left_out = _unknown_keys(target, data["target"])
        data["target"] = {key: value for key, value in data["target"].items() if key not in left_out}
        if "params" in left_out:
            notices.append(f"{benchmark.name} sets `params`, which the target {target_kind(target)!r} does not have")
        for name in _MERGED:
            if isinstance(own.get(name), dict):
                data[name] = {**data[name], **own.pop(name)}
        data["graders"] = [*data["graders"], *own.pop("graders", [])]
        return replace(document, data={**data, **own}, notices=(*document.notices, *notices)), remaining


def _unknown_keys(target: dict[str, Any], settings: Mapping[str, Any]) -> set[str]:
    """Return the benchmark's settings that the target's kind does not have. They are written for models."""
    try:
        known = schema_of(str(target_kind(target))).model_fields
    except ValueError:  # refused when the target is validated, with its line
        return set()
    return settings.keys() - known.keys()


def _split_dataset(override: Override) -> list[Override]:
    """Split an override of the whole `dataset` into overrides of its keys, which keep the benchmark's other keys."""
    key, value = override
    if key == ("dataset",) and isinstance(block := as_dataset(value), dict):
        return [(("dataset", name), each) for name, each in block.items()]
    return [override]


def _refusal(key: tuple[str, ...]) -> str | None:
    """Return why a key cannot be combined with `benchmark`."""
    if key[0] in _BROUGHT:
        return f"`{key[0]}` cannot be combined with `benchmark`"
    if key[0] == "dataset" and len(key) > 1 and key[1] not in _SELECTIONS:
        return f"`dataset.{key[1]}` cannot be combined with `benchmark`; {', '.join(_SELECTIONS)} can"
    return None


def benchmark_document(
    benchmark: Benchmark, block: BenchmarkBlock, target: Mapping[str, Any], folder: Path
) -> tuple[dict[str, Any], list[str]]:
    """Return the eval document of a benchmark, without a model, and notices of its settings.

    `target` is the block of the eval, `folder` the base of relative paths.
    """
    chat = wants_chat(benchmark, block, target)
    try:
        if benchmark.provider == "native":
            data = load(benchmark.task, {**block.model_dump(exclude_unset=True), "chat": chat}, folder)
            assert data is not None
            return {**data, "name": benchmark.name}, []
        compiled = compile_shown(benchmark, block, folder, chat=bool(chat))
    except UsageError as error:
        if not _lacks_completions(target) or not any(words in error.message for words in _NEEDS_COMPLETIONS):
            raise
        raise UsageError(
            f"{benchmark.name} needs plain completions, which {target['model']} does not have",
            remedy="Name a server that has them as base_url, such as vLLM, or choose a benchmark for chat models.",
        ) from error
    data = make_document(benchmark, block, compiled, chat=bool(chat))
    settings = describe_settings(benchmark, block, compiled.document["tasks"])
    if chat and block.chat is None and benchmark.api == "completions" and _lacks_completions(target):
        settings.append(f"{benchmark.name} is asked as a conversation: {target['model']} has no plain completions")
    mirror = mirror_folder(block.data, folder)
    if block.revision is not None and mirror is not None:
        settings.append(f"benchmark.revision has no effect on the data in {mirror}")
    return data, [*settings, *compiled.notices]


def compile_shown(
    benchmark: Benchmark, block: BenchmarkBlock, folder: Path, *, chat: bool, newest: bool = False
) -> Compiled:
    """Compile a benchmark, with a note that this takes a while, and the current step on a terminal."""
    started = False

    def show(text: str) -> None:
        nonlocal started
        if not started:
            note(f"compiling {block.name} …")
            started = True
        show_step(f"compiling: {text}")

    try:
        return compile_benchmark(benchmark, block, folder, chat=chat, report=show, newest=newest)
    finally:
        if started:
            show_step("")


def read_block(document: Document, overrides: Sequence[Override] = ()) -> BenchmarkBlock:
    """Return the block of a file, with overrides from the command line."""
    written = document.data["benchmark"]
    data: dict[str, Any] = {"benchmark": {"name": written} if isinstance(written, str) else dict(written or {})}
    for key, value in overrides:
        apply_override(data, key, value)
    problems: list[Problem] = []
    block = validate_block(BenchmarkBlock, data["benchmark"], ("benchmark",), document, problems)
    if problems:
        raise ConfigError(problems)
    return cast("BenchmarkBlock", block)


def find_benchmark(block: BenchmarkBlock) -> Benchmark:
    """Return the benchmark that a block names; UsageError for an unknown one."""
    benchmark = find_listed(block.name) or find_in_lm_eval(block.name)
    if benchmark is None:
        raise unknown_task(block.name)
    if block.task is None or block.task == benchmark.task:
        return benchmark
    if find_in_lm_eval(block.task) is None:
        raise unknown_task(block.task)
    return msgspec.structs.replace(benchmark, task=block.task, primary=None, provider="lm-eval")


def wants_chat(benchmark: Benchmark, block: BenchmarkBlock, target: Mapping[str, Any]) -> bool | None:
    """Return True if questions are asked as conversations; None if the definition decides."""
    if block.chat is not None:
        return block.chat
    if target.get("api") is None and _lacks_completions(target):
        return True
    chosen = target.get("api") or benchmark.api
    return None if chosen is None else chosen != "completions"


def _lacks_completions(target: Mapping[str, Any]) -> bool:
    """Return True for a model whose provider does not complete plain texts."""
    model = target.get("model")
    return isinstance(model, str) and not provider_of(model, target.get("base_url"))[0].completions


def describe_settings(benchmark: Benchmark, block: BenchmarkBlock, tasks: Mapping[str, Any]) -> list[str]:
    """Return a notice of the settings that a name stands for, unless the file sets them."""
    if block.num_fewshot is not None:
        return []
    shots = sorted({task["n_shot"] for task in tasks.values()})
    examples = f"{' or '.join(map(str, shots))} {'example' if shots == [1] else 'examples'}"
    if benchmark.listed:
        settings = f"{benchmark.name} is asked as in NeMo Evaluator: {examples}"
        return [f"{settings}; {LM_EVAL}{benchmark.task} stands for lm-eval's settings"]
    return [f"{benchmark.name} is asked with lm-eval's settings: {examples}"]


def named_benchmark(name: str) -> Document:
    """Return the eval that a benchmark's name stands for, which is in no file."""
    return Document({"benchmark": {"name": name}})


class _ListedBenchmarks:
    """Provides the benchmarks of `names.toml`."""

    def __call__(self, name: str) -> Document | None:
        return None if find_listed(name) is None else named_benchmark(name)

    def names(self) -> list[str]:
        return known_names()

    def explain(self, name: str, message: str) -> UsageError | None:
        """Name the harness that a benchmark needs."""
        if (harnesses := table().harnesses.get(name)) is None:
            return None
        return UsageError(
            f"{name} is a benchmark of {' and of '.join(harnesses)}, which Holdfast does not have",
            remedy=f"`holdfast tasks ls` lists the benchmarks that it has{suggest(name, known_names())}.",
        )


class _LmEvalTasks:
    """Provides lm-eval's tasks, groups and tags."""

    is_last = True  # thousands of names, and reading them for the first time takes a while

    def __call__(self, name: str) -> Document | None:
        return None if find_in_lm_eval(name) is None else named_benchmark(name)

    def names(self) -> list[str]:
        index = read_index()
        return [*overlay_index().names(), *(index.names() if index is not None else ())]

    def explain(self, name: str, message: str) -> UsageError | None:
        """Report that lm-eval is not installed, or has no such task; suggest names with the same prefix."""
        bare = name.removeprefix(LM_EVAL)
        if bare == name:
            remedy = f"The tasks of lm-eval need its package: {INSTALL}"
            return UsageError(message, remedy=remedy) if installed_version() is None else None
        if (index := read_index()) is None:
            return UsageError(f"{name} needs lm-eval, which is not installed", remedy=INSTALL)
        close = suggest(name, [f"{LM_EVAL}{each}" for each in get_close_matches(bare, index.names())])
        return UsageError(
            f"lm-eval has no task {bare!r}{close}", remedy="`holdfast tasks ls --all GLOB` lists its tasks."
        )


listed_benchmarks: Final = _ListedBenchmarks()
lm_eval_tasks: Final = _LmEvalTasks()
