"""Benchmarks by name: what `names.toml` knows of them, and the names of lm-eval."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from holdfast.benchmarks import native
from holdfast.benchmarks.cache import entries_of
from holdfast.benchmarks.index import overlay_index, read_index

LM_EVAL: Final = "lm-eval/"
"""what stands before a name that means lm-eval's own settings"""
_NEMO_PARAMS: Final = {"temperature": 1e-7, "top_p": 0.9999999}
"""parameters of NeMo's requests, unless a benchmark has its own"""


class Benchmark(msgspec.Struct, frozen=True):
    """A benchmark and the settings of its name."""

    name: str
    task: str
    """of lm-eval or of the overlay, or the name of a native benchmark"""
    shots: int | None = None
    """None: the task's own number of examples"""
    api: Literal["chat", "completions"] | None = "completions"
    """None: as the definition prefers"""
    primary: str | None = None
    """the metric that is the score, as `METRIC` or `METRIC,FILTER`; None: the task's first"""
    params: dict[str, Any] = {}
    """parameters of requests, over those of the task"""
    provider: Literal["lm-eval", "native"] = "lm-eval"
    listed: bool = True
    """False for a task of lm-eval that is not in the table"""

    @property
    def origin(self) -> str:
        """Whose settings the name stands for."""
        if self.provider == "native":
            return "Holdfast"
        return "NeMo Evaluator" if self.listed else "lm-eval"


class About(msgspec.Struct, frozen=True):
    """A short description of a task, or of a family of names."""

    measures: str
    metric: str | None = None
    """the metric that is the score"""


class DatasetFacts(msgspec.Struct, frozen=True):
    """A dataset of the Hugging Face hub."""

    revision: str | None = None
    license: str | None = None


class Table(msgspec.Struct, frozen=True):
    """The content of `names.toml`."""

    benchmarks: dict[str, Benchmark]
    datasets: dict[str, DatasetFacts]
    harnesses: dict[str, list[str]]
    """names that need another harness, with the harnesses that have them"""
    about: dict[str, About]
    """by task, or by a glob that a family of names matches"""

    def family(self, name: str) -> str | None:
        """Return the glob of the family that a name belongs to, the most specific one."""
        return max((glob for glob in self.about if "*" in glob and fnmatchcase(name, glob)), key=len, default=None)

    def about_name(self, benchmark: Benchmark) -> About | None:
        """Return what is known of a benchmark."""
        about = self.about.get(benchmark.task.removesuffix("-sample"))
        if about is None and (family := self.family(benchmark.name)) is not None:
            about = self.about[family]
        return about


@cache
def table() -> Table:
    """Read the table."""
    data = tomllib.loads(Path(__file__).with_name("names.toml").read_text())
    rows = {**data["benchmarks"], **{name: {} for name in data["unchanged"]}}
    benchmarks = {name: Benchmark(name, name, api=None, provider="native") for name in native.names()}
    benchmarks |= {
        name: Benchmark(
            name,
            row.get("native") or row.get("task", name),
            shots=row.get("shots"),
            api=row.get("api", "completions"),
            primary=row.get("primary"),
            params={**_NEMO_PARAMS, **row.get("params", {})},
            provider="native" if "native" in row else "lm-eval",
        )
        for name, row in rows.items()
    }
    harnesses: dict[str, list[str]] = {}
    for harness, names in data["harnesses"].items():
        for name in names:
            harnesses.setdefault(name, []).append(harness)
    datasets = {name: DatasetFacts(**facts) for name, facts in data["datasets"].items()}
    about = {task: About(**facts) for task, facts in data["about"].items()}
    return Table(benchmarks, datasets, harnesses, about)


def find_listed(name: str) -> Benchmark | None:
    """Return a benchmark of the table."""
    return table().benchmarks.get(name)


def find_in_lm_eval(name: str) -> Benchmark | None:
    """Return a task, group or tag of lm-eval, with lm-eval's settings. `lm-eval/NAME` means the same.

    Without lm-eval, its names are those of compiled benchmarks.
    """
    bare = name.removeprefix(LM_EVAL)
    index = read_index()
    benchmark = Benchmark(bare, bare, listed=False)
    if bare in overlay_index() or (index is not None and bare in index):
        return benchmark
    if index is None and any(
        entry.request["task"] == bare and entry.request["params"] == benchmark.params for entry in entries_of(bare)
    ):
        return benchmark
    return None


def known_names(*, every: bool = False) -> list[str]:
    """List the names of the table; with `every`, those of lm-eval too."""
    names = set(table().benchmarks)
    if every:
        index = read_index()
        names.update(overlay_index().names(), index.names() if index is not None else ())
    return sorted(names)
