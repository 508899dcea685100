"""Tasks by name: eval files that installed packages provide through entry points of the group `holdfast.tasks`.

A provider takes a name and returns the path of an eval file, or None. It may list its tasks with `names()`.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

from holdfast.errors import UsageError
from holdfast.spec.validation import suggest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ENTRY_POINTS: Final = "holdfast.tasks"


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


def suggest_task(name: str, providers: Sequence[TaskProvider]) -> str:
    """Return the closest names for a message, or why there are none."""
    if not providers:
        return "; and no package that provides tasks is installed"
    names = [task for provider in providers for task in getattr(provider, "names", lambda: ())()]
    return suggest(name, names)


def resolve_eval(text: str) -> str:
    """Return the eval file that a user names: a path as it is, else the file of an installed task."""
    path = Path(text)
    if path.exists() or path.suffix or path.name != text:
        return text
    providers = installed_providers()
    if (task := find_task(text, providers)) is None:
        raise UsageError(
            f"no eval file {text!r}, and no task of that name{suggest_task(text, providers)}",
            remedy="Give the path of an eval file, or install a package that provides the task.",
        )
    return str(task)
