"""Benchmarks by name: the table `names.toml`, and an index of lm-eval's tasks.

lm-eval's own index parses 14,000 YAML files at every start. This one reads only the names out of them, once for each
version of lm-eval, and does not import it.
"""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from holdfast.display.terminal import note
from holdfast.plugins.benchmarks import native
from holdfast.plugins.benchmarks.cache import cache_folder, entries_of, write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LM_EVAL: Final = "lm-eval/"
"""prefix of names with lm-eval's own settings"""
_NEMO_PARAMS: Final = {"temperature": 1e-7, "top_p": 0.9999999}
"""parameters of NeMo's requests, unless a benchmark has its own"""
OVERLAY: Final = Path(__file__).with_name("overlay")
"""definitions of NVIDIA's tasks for lm-eval that need no code"""

_KEY: Final = re.compile(
    r"""^["']?(task|group|tag|class|include)["']?[ \t]*:[ \t]*(.*?)[ \t]*(?:#.*)?$""", re.MULTILINE
)
_FOLLOWING_ITEM: Final = re.compile(r"""\n[ \t]*-[ \t]*["']?([^"'\n#:]+?)["']?[ \t]*(?:#.*)?(?=\n|\Z)""")


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
    """parameters of requests; they override the task's"""
    provider: Literal["lm-eval", "native"] = "lm-eval"
    listed: bool = True
    """False for a task of lm-eval that is not in the table"""

    @property
    def origin(self) -> str:
        """The tool whose settings the name stands for."""
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
        """Return the most specific glob of the families that a name belongs to."""
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

    Without lm-eval, only compiled benchmarks have names.
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
    """List the names of the table; with `every`, lm-eval's names too."""
    names = set(table().benchmarks)
    if every:
        index = read_index()
        names.update(overlay_index().names(), index.names() if index is not None else ())
    return sorted(names)


class TaskIndex(msgspec.Struct, frozen=True):
    """Tasks and groups by name, with the paths of their files relative to lm-eval's folder of tasks."""

    version: str
    tasks: dict[str, str]
    groups: dict[str, str]
    tags: dict[str, list[str]]
    """the tasks of each tag"""

    def __contains__(self, name: str) -> bool:
        return name in self.tasks or name in self.groups or name in self.tags

    def names(self) -> list[str]:
        """List all names in their order."""
        return sorted({*self.tasks, *self.groups, *self.tags})

    def files(self, name: str) -> list[str]:
        """Return the files that define a name; a tag's tasks may have several."""
        if name in self.groups:
            return [self.groups[name]]
        if name in self.tasks:
            return [self.tasks[name]]
        return [self.tasks[task] for task in self.tags.get(name, ())]


def installed_version() -> str | None:
    """Return the version of lm-eval, or None if it is not installed."""
    try:
        return version("lm-eval")
    except PackageNotFoundError:
        return None


def tasks_folder() -> Path:
    """Return the folder of lm-eval's tasks, without importing lm-eval."""
    spec = find_spec("lm_eval")
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / "tasks"


@cache
def read_index() -> TaskIndex | None:
    """Return the index of the installed lm-eval, or None if it is not installed."""
    current = installed_version()
    if current is None:
        return None
    file = cache_folder() / f"lm-eval-{current}.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=TaskIndex)
    except (OSError, msgspec.DecodeError):
        note(f"reading the names of lm-eval {current}'s tasks, once …")
        index = scan(tasks_folder(), current)
        write_atomically(file, msgspec.json.encode(index))
        return index


@cache
def overlay_index() -> TaskIndex:
    """Return the index of the overlay."""
    return scan(OVERLAY, "overlay")


def scan(folder: Path, version: str) -> TaskIndex:
    """Read the names in all YAML files of a folder; the first file of a name counts, in lm-eval's order."""
    tasks: dict[str, str] = {}
    groups: dict[str, str] = {}
    tags: dict[str, list[str]] = {}
    included: dict[Path, dict[str, list[str]]] = {}
    for path in sorted(folder.rglob("*.yaml"), key=Path.as_posix):
        keys = _keys(path, included)
        name = path.as_posix().removeprefix(f"{folder.as_posix()}/")
        group, task = keys.get("group"), keys.get("task")
        if group and "class" not in keys:
            groups.setdefault(group[0], name)
        elif task and task[0] not in tasks:
            tasks[task[0]] = name
            for tag in keys.get("tag", ()):
                tags.setdefault(tag, []).append(task[0])
    return TaskIndex(version, tasks, groups, {tag: sorted(names) for tag, names in tags.items()})


def _keys(path: Path, included: dict[Path, dict[str, list[str]]], depth: int = 0) -> dict[str, list[str]]:
    """Return the values of the keys that name a task, starting with included files.

    `included` caches the keys of included files, since thousands of files include the same few.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # an include of a file that is not there: lm-eval leaves such a task out, too
        return {}
    own = {match[1]: list(_values(match, text)) for match in _KEY.finditer(text)}
    inherited: dict[str, list[str]] = {}
    for include in own.pop("include", []) if depth < 5 else []:
        file = path.parent / include
        if file not in included:
            included[file] = _keys(file, included, depth + 1)
        inherited |= included[file]
    return {**inherited, **own}


def _values(match: re.Match[str], text: str) -> Iterator[str]:
    """Yield the value of a key: a text, a list in brackets, or the list on the lines after it."""
    value = match[2]
    if value.startswith("["):
        yield from (part.strip(" \"'") for part in value.strip("[]").split(",") if part.strip())
    elif value:
        yield value.strip("\"'")
    else:
        position = match.end()
        while (item := _FOLLOWING_ITEM.match(text, position)) is not None:
            yield item[1].strip()
            position = item.end()


def folders(name: str, children: Iterable[str]) -> list[Path]:
    """Return the folders that lm-eval has to read for a name and the names of a group's children."""
    places: dict[Path, None] = {}
    for root, index in ((tasks_folder(), read_index()), (OVERLAY, overlay_index())):
        if index is None:
            continue
        for each in (name, *children):
            places |= dict.fromkeys((root / file).parent for file in index.files(each))
    return list(places)
