"""Evals as users name them: files and folders of any format, and tasks by name.

Two kinds of plug-ins take part. A `Format` reads the evals of another tool. A task provider finds an eval by its name.
Neither is loaded for a YAML or JSON file in Holdfast's own format.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import msgspec

from holdfast.errors import ConfigError, UsageError, suggest
from holdfast.spec.document import Document, read_document
from holdfast.spec.load import apply_overrides
from holdfast.spec.plugins import Registry
from holdfast.spec.schema import SCHEMA_VERSION
from holdfast.store.files import make_directory, replacing
from holdfast.store.home import home_directory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from holdfast.spec.eval import Eval
    from holdfast.spec.load import Override

FORMATS: Final = Registry("holdfast.formats", "format")
"""Formats of other tools' evals."""
TASKS: Final = Registry("holdfast.tasks", "task provider")
"""Providers of evals by name."""

_CONFIGURATION: Final = ("defaults", "execution", "deployment", "evaluation", "services", "benchmarks")
"""keys that only configurations for clusters have"""
_OURS: Final = ("dataset", "samples", "prompt", "messages")
"""keys that eval files of other formats never have"""
_EVAL: Final = (*_OURS, "graders", "responder", "checkpoints")
"""keys that only eval files have"""
_FILES: Final = (".yaml", ".yml", ".json")


class Format:
    """A format of another tool's evals. A subclass recognizes contents, or claims paths, or both."""

    def claims(self, path: Path) -> bool:
        """Return True for a folder, or a file that is not a YAML or JSON mapping, that this format reads."""
        return False

    def read(self, path: Path) -> Document:
        """Read a claimed file or folder.

        The document may be an eval with our own keys, or anything that `recognizes` accepts, which is then translated.
        """
        raise NotImplementedError

    def recognizes(self, data: Mapping[str, Any]) -> bool:
        """Return True if a file's content has this format. It has none of our keys for data and prompts."""
        return False

    def translate(self, document: Document, overrides: Sequence[Override]) -> tuple[Document, list[Override]]:
        """Return the eval as a document with our keys, and the overrides that are still to be applied to it."""
        raise NotImplementedError


def read_eval(path: Path) -> Document:
    """Read an eval file, or whatever file or folder a format claims."""
    if path.is_file() and path.suffix in _FILES:
        try:
            return read_document(path)
        except ConfigError:
            if (reader := find_reader(path)) is None:
                raise
            return reader.read(path)
    reader = find_reader(path) if path.exists() else None
    return read_document(path) if reader is None else reader.read(path)


def find_reader(path: Path) -> Format | None:
    """Return the format that claims a file or folder."""
    return next((each for _, each in _formats() if each.claims(path)), None)


def find_format(data: Mapping[str, Any]) -> tuple[str, Format] | None:
    """Return the name and format of another tool's eval file; None for one of ours, and for other files."""
    if is_configuration(data):
        return None
    if "benchmark" not in data and not data.keys().isdisjoint(_OURS):  # a benchmark refuses these keys by name
        return None
    return next(((name, each) for name, each in _formats() if each.recognizes(data)), None)


def _formats() -> Iterator[tuple[str, Format]]:
    """Yield the formats: built-in ones first, so that installed packages are rarely searched."""
    yield from ((name, _load_format(name)) for name in FORMATS)
    yield from ((name, _load_format(name)) for name in FORMATS.plugins)


@cache
def _load_format(name: str) -> Format:
    chosen = _load(FORMATS, name)
    if not (isinstance(chosen, type) and issubclass(chosen, Format)):
        raise UsageError(f"the format {name!r} is not a subclass of holdfast.Format")
    return chosen()


def _load(registry: Registry, name: str) -> Any:
    try:
        return registry.load(name)
    except ValueError as error:
        raise UsageError(str(error)) from error


def is_configuration(data: Mapping[str, Any]) -> bool:
    """Return True for the content of a configuration for a cluster."""
    return not data.keys().isdisjoint(_CONFIGURATION)


def is_suite(data: Mapping[str, Any]) -> bool:
    """Return True for the content of a suite file."""
    return "suite" in data


def is_eval(data: Mapping[str, Any]) -> bool:
    """Return True for the content of an eval file, in any format that `holdfast eval` reads."""
    return not is_configuration(data) and (not data.keys().isdisjoint(_EVAL) or find_format(data) is not None)


def load_any(document: Document, overrides: Sequence[Override] = ()) -> Eval:
    """Load an eval file of any format, with overrides from the command line."""
    ours, remaining = to_native(document, overrides)
    return apply_overrides(ours, remaining, folder_of(document))


def folder_of(document: Document) -> Path:
    """Return the base of relative paths: the eval's folder, or the current one for an eval without a file."""
    if document.path is None:
        return Path.cwd()
    path = document.path.resolve()
    return path if path.is_dir() else path.parent


def to_native(document: Document, overrides: Sequence[Override] = ()) -> tuple[Document, list[Override]]:
    """Return an eval of any format as a document with our keys, and the overrides that are still to be applied."""
    if (foreign := find_format(document.data)) is not None:
        return foreign[1].translate(document, overrides)
    return document, list(overrides)


class TaskProvider(Protocol):
    """Finds evals by name.

    Optional attributes: `names()` lists the tasks; `explain(name, message)` returns a better error for an unknown name,
    or None; `is_last`, if True, lets all other providers answer first.
    """

    def __call__(self, name: str) -> Path | Document | None:
        """Return a task's eval file, or its content, or None."""


def installed_providers() -> list[TaskProvider]:
    """Load the providers of installed packages."""
    return [cast("TaskProvider", _load(TASKS, name)) for name in TASKS.plugins]


def _providers(installed: Sequence[TaskProvider] | None) -> Iterator[TaskProvider]:
    """Yield all providers in the order in which they are asked; None: look up the installed ones when needed."""
    builtin: list[TaskProvider] = [_load(TASKS, name) for name in TASKS]
    yield from (each for each in builtin if not _is_last(each))
    yield from installed_providers() if installed is None else installed
    yield from filter(_is_last, builtin)


def _is_last(provider: TaskProvider) -> bool:
    return bool(getattr(provider, "is_last", False))


def find_task(name: str, installed: Sequence[TaskProvider] | None = None) -> Path | Document | None:
    """Return a task from the first provider that has it. `installed` saves looking up the installed ones."""
    return next((task for provider in _providers(installed) if (task := provider(name)) is not None), None)


def task_names(providers: Sequence[TaskProvider]) -> list[str]:
    """List the tasks of providers that list them."""
    return [task for provider in providers for task in getattr(provider, "names", lambda: ())()]


def unknown_task(name: str, installed: Sequence[TaskProvider] | None = None) -> UsageError:
    """Return the error for a name that no provider has, with the closest names."""
    listing = "`holdfast tasks ls` lists names."
    if not name or name.endswith("/"):
        return UsageError("the name of the task is empty", remedy=listing)
    providers = list(_providers(installed))
    message = f"no eval file {name!r}, and no task of that name{suggest(name, task_names(providers))}"
    explanations = (getattr(each, "explain", lambda *_: None)(name, message) for each in providers)
    default = UsageError(message, remedy=f"Give the path of an eval file; {listing}")
    return next((error for error in explanations if error is not None), default)


def is_qualified(text: str) -> bool:
    """Return True for `PROVIDER/NAME` with a built-in provider."""
    return "/" in text and text.partition("/")[0] in list(TASKS)


def may_be_name(text: str) -> bool:
    """Return True unless a text can only be the path of a file."""
    path = Path(text)
    return is_qualified(text) or not (path.suffix in _FILES or path.name != text)


def resolve_eval(text: str) -> Document:
    """Return the eval that a user names: a file, a folder, or a task."""
    path = Path(text)
    if path.exists() or not may_be_name(text):
        return read_eval(path)
    if (task := find_task(text)) is None:
        raise unknown_task(text)
    return task if isinstance(task, Document) else read_eval(task)


def find_file(name: str, installed: Sequence[TaskProvider] | None = None) -> Path | None:
    """Return a task's eval file. A task that has no file gets one in `$HOLDFAST_HOME/evals`, in its own folder."""
    task = find_task(name, installed)
    if not isinstance(task, Document):
        return task
    if task.path is not None:
        return task.path
    file = home_directory() / "evals" / name / f"{Path(name).name}.yaml"
    make_directory(file.parent)
    with replacing(file) as writer:
        for key, value in {"schemaVersion": SCHEMA_VERSION, **task.data}.items():
            writer.write(f"{key}: ".encode() + msgspec.json.encode(value) + b"\n")
    return file
