"""Eval files that name a benchmark: `benchmark: {name: hellaswag}` stands for data, prompt and graders.

The other keys of such a file are kept: `target`, `limits`, `gate`, `graders` beside the benchmark's, and so on.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

from holdfast.benchmarks.compile import compile_benchmark, make_document
from holdfast.benchmarks.names import LM_EVAL, Benchmark, find_in_lm_eval, find_listed
from holdfast.errors import ConfigError, Problem, UsageError
from holdfast.formats import Format, folder_of
from holdfast.formats.providers import unknown_task
from holdfast.spec.document import Document
from holdfast.spec.overrides import apply_override
from holdfast.spec.schema import BenchmarkBlock
from holdfast.spec.validation import validate_block

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.spec.overrides import Override

_MERGED: Final = ("target", "metadata", "dataset")
"""blocks whose keys are laid over the benchmark's"""


class BenchmarkFile(Format):
    """Eval files with a block `benchmark`."""

    def recognizes(self, data: Mapping[str, Any]) -> bool:
        return "benchmark" in data

    def translate(self, document: Document, overrides: Sequence[Override]) -> tuple[Document, list[Override]]:
        block = read_block(document, [item for item in overrides if item[0][0] == "benchmark"])
        remaining = [item for item in overrides if item[0][0] != "benchmark"]
        benchmark = find_benchmark(block)
        own = {key: value for key, value in document.data.items() if key != "benchmark"}
        target = dict(own.get("target") or {})
        for key, value in remaining:
            if key[0] == "target" and len(key) == 2:
                target[key[1]] = value
        if not target.keys() & {"model", "python", "command", "http", "nat"}:
            raise UsageError(
                f"name the model to measure with {benchmark.name}",
                remedy=f"holdfast eval {block.name} -m MODEL, or `target: {{model: MODEL}}` in the eval file.",
            )
        chat = wants_chat(benchmark, block, target.get("api"))
        compiled = compile_benchmark(benchmark, block, folder_of(document), chat=chat, report=show_progress)
        show_progress("")
        data = make_document(benchmark, block, compiled, chat=chat)
        for key in _MERGED:
            if isinstance(own.get(key), dict):
                data[key] = {**data[key], **own.pop(key)}
        data["graders"] = [*data["graders"], *own.pop("graders", [])]
        notices = [*document.notices, *describe_settings(benchmark, block, compiled.document["tasks"])]
        notices += compiled.notices
        # The lines of the file are those of its own keys.
        return replace(document, data={**data, **own}, notices=tuple(notices)), remaining


def show_progress(text: str) -> None:
    """Show on a terminal what is being compiled; an empty text clears the line."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text and f'compiling: {text}'}")
        sys.stderr.flush()


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
    return replace(benchmark, task=block.task, primary=None)


def wants_chat(benchmark: Benchmark, block: BenchmarkBlock, api: str | None) -> bool:
    """Return True if questions are asked as conversations."""
    if block.chat is not None:
        return block.chat
    return (api or benchmark.api) == "chat"


def describe_settings(benchmark: Benchmark, block: BenchmarkBlock, tasks: Mapping[str, Any]) -> list[str]:
    """Return a notice of the settings that a name stands for, where the file sets none."""
    if block.num_fewshot is not None:
        return []
    shots = sorted({task["n_shot"] for task in tasks.values()})
    examples = f"{' or '.join(map(str, shots))} {'example' if shots == [1] else 'examples'}"
    if benchmark.listed:
        settings = f"{benchmark.name} is asked as in NeMo Evaluator: {examples}"
        return [f"{settings}; {LM_EVAL}{benchmark.task} stands for lm-eval's settings"]
    return [f"{benchmark.name} is asked with lm-eval's settings: {examples}"]
