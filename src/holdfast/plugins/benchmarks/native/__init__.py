"""Benchmarks that Holdfast defines itself, without lm-eval: one file `NAME.yaml` each.

A definition is an eval document without a model, in a variant for each API that it can be asked through. `load` adds
the data (the user's copy, the hub at a pinned commit, or a sample that Holdfast carries) and `metadata.benchmark`.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast import UsageError
from holdfast.plugins.benchmarks.cache import local_dataset, mirror_folder
from holdfast.spec.document import read_document

if TYPE_CHECKING:
    from collections.abc import Mapping

_FOLDER: Final = Path(__file__).parent
SAMPLES: Final = _FOLDER.parent / "samples"
_SAMPLE: Final = "-sample"
_APIS: Final = ("completions", "chat")
_ROWS: Final = {".jsonl", ".json", ".csv", ".parquet"}


def names() -> list[str]:
    """List the benchmarks that are defined here."""
    defined = {path.stem for path in _FOLDER.glob("*.yaml")}
    samples = {f"{path.stem}{_SAMPLE}" for path in SAMPLES.glob("*.jsonl")}
    return sorted(defined | samples)


def load(name: str, options: Mapping[str, Any], folder: Path | None = None) -> dict[str, Any] | None:
    """Return the eval document of a benchmark, without a model; None for a name that is not defined here.

    `options` are the keys of the block `benchmark`; paths are relative to `folder`, the eval file's.
    """
    if name not in names():
        return None
    definition = _read(name if (_FOLDER / f"{name}.yaml").exists() else name.removesuffix(_SAMPLE))
    is_sample = name.endswith(_SAMPLE)
    api = _choose_api(name, definition, options.get("chat"))
    common, variant = definition.get("document", {}), definition[api]
    shots = definition.get("shots", [])
    count = _count_shots(name, len(shots) or definition.get("num_fewshot", 0), options.get("num_fewshot"), bool(shots))
    document: dict[str, Any] = {"name": name, **common, **variant}
    # As expressions, since Jinja changes line ends of a template's own text.
    examples = "".join(f"{{{{ {json.dumps(shot)} }}}}" for shot in shots[:count])
    document["prompt"] = examples + document["prompt"]
    document["target"] = {**({} if api == "chat" else {"api": api}), **document["target"]}
    facts = dict(definition["dataset"])
    if is_sample:
        source: dict[str, Any] = {"path": str(SAMPLES / f"{name.removesuffix(_SAMPLE)}.jsonl")}
    else:
        _require_package(name, definition.get("needs"))
        facts["revision"] = options.get("revision") or facts.get("revision")
        source = _source(name, facts, mirror_folder(options.get("data"), folder or Path()))
    tasks = definition.get("tasks", [name.removesuffix(_SAMPLE)])
    several = {"limit_by": "task"} if len(tasks) > 1 else {}
    document["dataset"] = {**source, **common.get("dataset", {}), **several}
    if several:
        document["by"] = ["task"]
    document["metadata"] = {"benchmark": _describe(name, definition, facts, tasks, count, is_sample=is_sample)}
    return document


@cache
def _read(name: str) -> dict[str, Any]:
    return read_document(_FOLDER / f"{name}.yaml").data


def _choose_api(name: str, definition: Mapping[str, Any], chat: bool | None) -> str:
    available = [api for api in definition if api in _APIS]
    if chat is None:
        return available[0]
    api = "chat" if chat else "completions"
    if api not in available:
        raise UsageError(
            f"the benchmark {name} is not defined for the {api} API",
            remedy=f"Set benchmark.chat={str(not chat).lower()}, or leave it out.",
        )
    return api


def _count_shots(name: str, default: int, requested: int | None, is_variable: bool) -> int:
    if requested is None or requested == default or (is_variable and requested < default):
        return default if requested is None else requested
    allowed = f"0 to {default}" if is_variable else str(default)
    raise UsageError(
        f"benchmark.num_fewshot={requested}: the benchmark {name} has {allowed} examples",
        remedy="Leave benchmark.num_fewshot out.",
    )


def _require_package(name: str, package: str | None) -> None:
    if package is not None and find_spec(package) is None:
        raise UsageError(f"the benchmark {name} needs the package {package}", remedy=f"pip install {package}")


def _source(name: str, facts: Mapping[str, Any], copy: Path | None) -> dict[str, Any]:
    """Return the place of the rows: the user's copy, else the hub."""
    hub, subset, split = facts["path"], facts.get("name"), facts["split"]
    if copy is None:
        keys = {"path": f"hf://{hub}", "subset": subset, "split": split, "revision": facts["revision"]}
        return {key: value for key, value in keys.items() if value is not None}
    if copy.is_file():
        return {"path": str(copy)}
    dataset = local_dataset(copy, hub) if copy.is_dir() else None
    files = [] if dataset is None else _files(dataset / subset if subset and (dataset / subset).is_dir() else dataset)
    chosen = [path for path in files if split in path.name] or files
    if not chosen or (len(chosen) > 1 and chosen == files):
        raise UsageError(
            f"{copy}: no rows of the split {split!r} of {hub}, for the benchmark {name}",
            remedy="Set benchmark.data to the file with the rows, or to a folder in the hub's layout.",
        )
    return {"path": [str(path) for path in chosen]}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not _ROWS.isdisjoint(path.suffixes))


def _describe(
    name: str, definition: Mapping[str, Any], facts: Mapping[str, Any], tasks: list[str], shots: int, *, is_sample: bool
) -> dict[str, Any]:
    """Return `metadata.benchmark`."""
    plain = {"filter": "none", "aggregation": "mean", "higher_is_better": True}
    task = definition["task"]
    metrics = [{**plain, **metric} for metric in task["metrics"]]
    size = {} if is_sample else {"n_original": task["n_original"]}
    return {
        "name": name,
        "provider": "native",
        "provider_version": definition["version"],
        "num_fewshot": shots,
        "dataset": [{"path": facts["path"], "name": facts.get("name"), "revision": facts.get("revision")}],
        "license": facts["license"],
        "primary": definition.get("primary", metrics[0]["metric"]),
        "tasks": {
            each: {"version": definition["version"], "n_shot": shots, **size, "metrics": metrics} for each in tasks
        },
        "groups": {group: {"tasks": tasks, **keys} for group, keys in definition.get("groups", {}).items()},
    }
