"""Extension points: built-in kinds, and the kinds that installed packages add with entry points.

A package adds a grader, for example, with an entry point in its `pyproject.toml`:

    [project.entry-points."holdfast.graders"]
    politeness = "some_package.graders:Politeness"

Built-in names are found without looking at installed packages. The module of a kind is imported only when an eval names
the kind.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from importlib.metadata import EntryPoint


def load_reference(reference: str) -> Any:
    """Import the object that `module:attribute` names."""
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)


class Registry:
    """The kinds of one extension point, by name."""

    def __init__(self, group: str, noun: str, builtin: Mapping[str, str]) -> None:
        """Take the entry-point group, a noun for messages, and `module:attribute` of each built-in kind."""
        self._group = group
        self._noun = noun
        self._builtin = builtin
        self._loaded: dict[str, Any] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._builtin or name in self.plugins

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the built-in kinds."""
        return iter(self._builtin)

    @property
    def plugins(self) -> dict[str, EntryPoint]:
        """The entry points of installed packages by name."""
        from importlib.metadata import entry_points

        return {entry.name: entry for entry in entry_points(group=self._group) if entry.name not in self._builtin}

    def load(self, name: str) -> Any:
        """Import a kind; raises ValueError, worded for users, if it is unknown or its package cannot be imported."""
        if name not in self._loaded:
            self._loaded[name] = self._import(name)
        return self._loaded[name]

    def is_builtin(self, name: str) -> bool:
        """Return True for a built-in kind, False for a plug-in's."""
        return name in self._builtin

    def _import(self, name: str) -> Any:
        if (reference := self._builtin.get(name)) is not None:
            return load_reference(reference)
        if (entry := self.plugins.get(name)) is None:
            raise ValueError(self.unknown(name))
        try:
            return entry.load()
        except Exception as error:  # other people's packages may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"the {self._noun} {name!r} of {_distribution(entry)} cannot be imported from {entry.value}: {reason}"
            ) from error

    def unknown(self, name: str) -> str:
        """Describe an unknown kind, with the closest match and all known kinds."""
        from holdfast.spec.validation import suggest  # imports pydantic, which jobs on a cluster do not load

        return f"unknown {self._noun} {name!r}{suggest(name, [*self, *self.plugins])}; {self.describe()}"

    def describe(self) -> str:
        """List all names for a message: built-in kinds, then plug-ins with their packages."""
        listed = f"one of {', '.join(self)}"
        plugins = [f"{name} ({_distribution(entry)})" for name, entry in sorted(self.plugins.items())]
        return f"{listed}; from plug-ins: {', '.join(plugins)}" if plugins else f"{listed}; no plug-ins are installed"


def _distribution(entry: EntryPoint) -> str:
    return "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
