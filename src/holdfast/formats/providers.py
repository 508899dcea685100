"""Tasks by name: benchmarks, and eval files that installed packages provide.

A provider is an entry point of the group `holdfast.tasks`. It takes a name and returns the path of an eval file, or
None. It may list its tasks with `names()`.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

from holdfast.benchmarks.cache import cache_folder, write_atomically
from holdfast.benchmarks.compile import INSTALL
from holdfast.benchmarks.index import installed_version, read_index
from holdfast.benchmarks.names import LM_EVAL, find_in_lm_eval, find_listed, known_names, table
from holdfast.errors import UsageError
from holdfast.spec.document import Document, read_document
from holdfast.spec.schema import SCHEMA_VERSION
from holdfast.spec.validation import suggest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ENTRY_POINTS: Final = "holdfast.tasks"
_FILES: Final = (".yaml", ".yml", ".json")


class TaskProvider(Protocol):
    """Knows tasks by name."""

    def __call__(self, name: str) -> Path | None:
        """Return the eval file of a task, or None."""


def installed_providers() -> list[TaskProvider]:
    """Load the providers of installed packages."""
    return [cast("TaskProvider", entry.load()) for entry in entry_points(group=ENTRY_POINTS)]


def find_task(name: str, providers: Iterable[TaskProvider]) -> Path | None:
    """Return the eval file of a task from the first provider that knows it."""
    return next((path for provider in providers if (path := provider(name)) is not None), None)


def task_names(providers: Sequence[TaskProvider]) -> list[str]:
    """List the tasks of providers that list them."""
    return [task for provider in providers for task in getattr(provider, "names", lambda: ())()]


def unknown_task(name: str, providers: Sequence[TaskProvider] = ()) -> UsageError:
    """Return the error for a name that nothing here knows: the harness it needs, or the closest names."""
    bare = name.removeprefix(LM_EVAL)
    if not bare:
        return UsageError("the name of the task is empty", remedy="`holdfast tasks ls` lists names.")
    if bare != name:
        return _unknown_in_lm_eval(name, bare)
    if (harnesses := table().harnesses.get(name)) is not None:
        return UsageError(
            f"{name} is a benchmark of {' and of '.join(harnesses)}, which Holdfast does not have",
            remedy=f"`holdfast tasks ls` lists the benchmarks that it has{suggest(name, known_names())}.",
        )
    message = f"no eval file {name!r}, and no task of that name"
    close = suggest(name, [*known_names(every=True), *task_names(providers)])
    if installed_version() is None:
        return UsageError(f"{message}{close}", remedy=f"The tasks of lm-eval need its package: {INSTALL}")
    return UsageError(f"{message}{close}", remedy="Give the path of an eval file; `holdfast tasks ls` lists names.")


def _unknown_in_lm_eval(name: str, bare: str) -> UsageError:
    """Return the error for a name with lm-eval's settings. Close names have those settings, too."""
    index = read_index()
    if index is None:
        return UsageError(f"{name} needs lm-eval, which is not installed", remedy=INSTALL)
    close = suggest(name, [f"{LM_EVAL}{each}" for each in get_close_matches(bare, index.names())])
    return UsageError(f"lm-eval has no task {bare!r}{close}", remedy="`holdfast tasks ls --all GLOB` lists its tasks.")


def may_be_name(text: str) -> bool:
    """Return True unless a text can only be the path of a file."""
    path = Path(text)
    return text.startswith(LM_EVAL) or not (path.suffix in _FILES or path.name != text)


def resolve_eval(text: str) -> Document:
    """Return the eval file that a user names: a path, a benchmark, or a task of an installed package."""
    path = Path(text)
    if path.exists() or not may_be_name(text):
        return read_document(path)
    if find_listed(text) is not None:
        return named_benchmark(text)
    providers = installed_providers()
    if (task := find_task(text, providers)) is not None:
        return read_document(task)
    if find_in_lm_eval(text) is not None:
        return named_benchmark(text)
    raise unknown_task(text, providers)


def find_file(name: str, providers: Sequence[TaskProvider]) -> Path | None:
    """Return the eval file of a task by name. Benchmarks get one in the cache, in a folder of its own."""
    if find_listed(name) is None:
        if (task := find_task(name, providers)) is not None:
            return task
        if find_in_lm_eval(name) is None:
            return None
    file = cache_folder() / "evals" / name / f"{Path(name).name}.yaml"
    write_atomically(file, f'schemaVersion: "{SCHEMA_VERSION}"\nbenchmark: {{name: {name}}}\n'.encode())
    return file


def named_benchmark(name: str) -> Document:
    """Return the eval that a name alone stands for, which is in no file."""
    return Document({"benchmark": {"name": name}})
