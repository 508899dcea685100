"""Compile a benchmark into an ordinary eval: a rows file in the cache, and a document that names it.

A compiled benchmark is reused while its data and the version of lm-eval stay the same. Running, resuming and
grading need neither lm-eval nor the data.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast import UsageError
from holdfast.canonical import digest, digest_bytes
from holdfast.data.readers import hub_commit
from holdfast.errors import DataError
from holdfast.plugins.benchmarks.cache import (
    MIRROR,
    Compiled,
    Source,
    cache_folder,
    entries_of,
    entry_file,
    mirror_folder,
    read_entry,
    stamp,
    write_atomically,
)
from holdfast.plugins.benchmarks.names import OVERLAY, installed_version, table
from holdfast.store.files import make_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from holdfast.plugins.benchmarks.names import Benchmark
    from holdfast.spec.eval_schema import BenchmarkBlock

INSTALL: Final = 'pip install "holdfast-evals[lm-eval]"'


def compile_benchmark(
    benchmark: Benchmark,
    block: BenchmarkBlock,
    folder: Path,
    *,
    chat: bool,
    report: Callable[[str], None] = lambda _: None,
    newest: bool = False,
) -> Compiled:
    """Return the compiled benchmark, from the cache unless its data changed.

    `report` is called with each step of the compiler. With `newest`, data without a pinned commit is compared with the
    hub.
    """
    request = _request(benchmark, block, folder, chat=chat)
    file = entry_file(benchmark.name, request)
    if (cached := _cached(benchmark.name, request, file)) is not None and not (newest and _is_outdated(cached)):
        return cached
    if installed_version() is None:
        raise UsageError(f"compiling the benchmark {benchmark.name} needs lm-eval", remedy=INSTALL)
    make_directory(file.parent)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".compiling-") as place:
        rows = Path(place) / "rows"
        report("starting lm-eval")
        result = _run_compiler(benchmark.name, request, rows, report)
        name = f"{file.stem.rpartition('-')[0]}-{result['rows']}.jsonl.zst"
        rows.replace(file.parent / name)
    sources = msgspec.convert(result.pop("sources"), list[Source])
    compiled = Compiled(
        request,
        name,
        result.pop("count"),
        installed_version() or "",
        result,
        sources,
        {folder: stamp(Path(folder)) for folder in dict.fromkeys(source.folder for source in sources) if folder},
        result.pop("notices"),
    )
    write_atomically(file, msgspec.json.encode(compiled))
    return compiled


def _request(benchmark: Benchmark, block: BenchmarkBlock, folder: Path, *, chat: bool) -> dict[str, Any]:
    """Return everything that the rows depend on, apart from lm-eval's version and the data."""
    mirror = mirror_folder(block.data, folder)
    if mirror is not None and not mirror.is_dir():
        raise UsageError(
            f"{mirror}: no such folder of datasets",
            remedy=f"Set benchmark.data or {MIRROR} to a folder in the hub's layout: FOLDER/OWNER/NAME.",
        )
    pins = {name: facts.revision for name, facts in table().datasets.items() if facts.revision is not None}
    return {
        "task": benchmark.task,
        "shots": benchmark.shots if block.num_fewshot is None else block.num_fewshot,
        "seed": block.seed,
        "chat": chat,
        "params": benchmark.params,
        "mirror": None if mirror is None else str(mirror),
        "revision": block.revision,
        "revisions": pins,
        "overlay": _overlay_digest(),
    }


def _overlay_digest() -> str:
    files = sorted(path for path in OVERLAY.rglob("*") if path.is_file())
    return digest([[path.name, digest_bytes(path.read_bytes())] for path in files])[7:23]


def _cached(name: str, request: Mapping[str, Any], file: Path) -> Compiled | None:
    """Return what was compiled for a request; if it names no data, from any mirror."""
    exact = read_entry(file)
    if exact is not None and _is_current(exact):
        return exact
    if request["mirror"] is not None or request["revision"] is not None:
        return None
    for entry in entries_of(name):
        mirror = entry.request["mirror"]
        if mirror is not None and {**entry.request, "mirror": None} == request and _is_current(entry, gone=True):
            notice = f"{name} was compiled from the data in {mirror}"
            return msgspec.structs.replace(entry, notices=[*entry.notices, notice])
    return None


def _is_outdated(compiled: Compiled) -> bool:
    """Return True if the hub has newer data of a dataset without a pinned commit."""
    fixed = compiled.request["revisions"]
    unpinned = {
        source.path: source.revision
        for source in compiled.sources
        if source.revision is not None and source.path not in fixed
    }
    try:
        return any(hub_commit(path, compiled.request["revision"]) != commit for path, commit in unpinned.items())
    except DataError:  # without the hub, the rows are the newest there are
        return False


def _is_current(compiled: Compiled, *, gone: bool = False) -> bool:
    """Return True if the rows were made with the same local data and the installed lm-eval, if any.

    With `gone`, the data may have been removed since.
    """
    if installed_version() not in (None, compiled.provider_version):
        return False
    return all(
        stamp(Path(folder)) == files or (gone and not Path(folder).exists())
        for folder, files in compiled.stamps.items()
    )


def _run_compiler(name: str, request: Mapping[str, Any], rows: Path, report: Callable[[str], None]) -> dict[str, Any]:
    question = {"request": {key: value for key, value in request.items() if key != "overlay"}, "out": str(rows)}
    environ = {**os.environ, "TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    if request["mirror"] is not None:
        environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "holdfast.plugins.benchmarks.compiler"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environ,
            text=True,
        )
        answer: dict[str, Any] = {}
        with process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.close()
            for line in process.stdout:
                answer = json.loads(line)
                if "progress" in answer:
                    report(answer["progress"])
        if "result" in answer:
            return dict(answer["result"])
        if "error" in answer:
            raise UsageError(f"cannot compile the benchmark {name}: {answer['error']}", remedy=answer["remedy"])
        errors.seek(0)
        last = next((line.strip() for line in reversed(errors.read().splitlines()) if line.strip()), "no message")
    is_full = os.strerror(errno.ENOSPC) in last
    remedy = f"Free some disk space for {rows.parent.parent}, or set HOLDFAST_HOME to a folder elsewhere."
    raise UsageError(f"cannot compile the benchmark {name}: {last[:400]}", remedy=remedy if is_full else None)


def make_document(benchmark: Benchmark, block: BenchmarkBlock, compiled: Compiled, *, chat: bool) -> dict[str, Any]:
    """Return the eval document of a compiled benchmark, without a model."""
    result = compiled.document
    several = len(result["tasks"]) > 1
    target: dict[str, Any] = {} if chat else {"api": "completions"}
    if result["params"]:
        target["params"] = result["params"]
    if result["params_vary"]:
        target["params_from"] = "generation"
    primary = _primary(benchmark, result)
    graders = [{**grader, "weight": int(grader["name"] in primary)} for grader in result["graders"]]
    for grader in graders:
        if grader["type"] == "lm_eval":
            grader["version"] = compiled.provider_version
    facts = table().datasets
    licenses = {facts[source.path].license for source in compiled.sources if source.path in facts}
    datasets = [{"path": each.path, "name": each.name, "revision": each.revision} for each in compiled.sources]
    return {
        "name": benchmark.name,
        "metadata": {
            "benchmark": {
                "name": benchmark.name,
                "provider": "lm-eval",
                "provider_version": compiled.provider_version,
                "task": benchmark.task,
                "seed": block.seed,
                "num_fewshot": compiled.request["shots"],
                "dataset": datasets,
                "license": " and ".join(sorted(name for name in licenses if name)) or None,
                "primary": benchmark.primary or _first_metric(result),
                "tasks": result["tasks"],
                "groups": result["groups"],
            }
        },
        "dataset": {"path": str(cache_folder() / compiled.rows), **({"limit_by": "task"} if several else {})},
        "prompt": "{{ context }}",
        **({"history": "history"} if chat else {}),
        **({"continuations": "continuations"} if result["kind"] == "likelihood" else {}),
        "target": target,
        "graders": graders,
        **({"by": ["task"]} if several else {}),
    }


def _first_metric(result: dict[str, Any]) -> str:
    metric = next(iter(result["tasks"].values()))["metrics"][0]
    return str(metric["grader"] or metric["metric"])


def _primary(benchmark: Benchmark, result: dict[str, Any]) -> set[str]:
    """Return the graders whose scores are the benchmark's score: the primary metric's in each task."""
    primary = benchmark.primary or _first_metric(result)
    chosen: set[str] = set()
    for task in result["tasks"].values():
        graded = [metric for metric in task["metrics"] if metric["grader"] is not None]
        names = [
            metric["grader"]
            for metric in graded
            if primary in (metric["metric"], f"{metric['metric']},{metric['filter']}", metric["grader"])
        ]
        chosen.update(names[:1] or [metric["grader"] for metric in graded[:1]])
    return chosen
