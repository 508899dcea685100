"""Extension points: kinds of the core, kinds of built-in plug-ins, and kinds that installed packages add.

A package adds a grader, for example, with an entry point in its `pyproject.toml`:

    [project.entry-points."holdfast.graders"]
    politeness = "some_package.graders:Politeness"

Built-in plug-ins are named in `BUILT_IN`, in the same form. Their names, like the core's, are found without looking at
installed packages. A kind's module is imported only when an eval names the kind.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from importlib.metadata import EntryPoint

BUILT_IN: Final[Mapping[str, Mapping[str, str]]] = {
    "holdfast.formats": {
        "benchmark": "holdfast.plugins.benchmarks.format:BenchmarkFile",
        "waza": "holdfast.plugins.waza.read:Waza",
        "nat": "holdfast.plugins.nat.read:Nat",
    },
    "holdfast.tasks": {
        "benchmarks": "holdfast.plugins.benchmarks.format:listed_benchmarks",
        "lm-eval": "holdfast.plugins.benchmarks.format:lm_eval_tasks",
    },
    "holdfast.targets": {
        "nat": "holdfast.plugins.nat.components:NatWorkflow",
        "mock": "holdfast.plugins.waza.mock:Mock",
    },
    "holdfast.graders": {"nat": "holdfast.plugins.nat.components:NatEvaluator"},
    "holdfast.exporters": {
        "csv": "holdfast.plugins.exporters.tables:write_csv",
        "parquet": "holdfast.plugins.exporters.tables:write_parquet",
        "junit": "holdfast.plugins.exporters.junit:write_junit",
        "html": "holdfast.plugins.exporters.html:write_html",
        "wandb": "holdfast.plugins.exporters.wandb:Wandb",
        "mlflow": "holdfast.plugins.exporters.mlflow:Mlflow",
        "nat": "holdfast.plugins.nat.export:write_nat",
        "flexeval": "holdfast.plugins.flexeval:write_flexeval",
        "waza": "holdfast.plugins.waza.export:write_waza",
        "lm-eval": "holdfast.plugins.lm_eval:write_lm_eval",
    },
    "holdfast.live_exporters": {"nat": "holdfast.plugins.nat.mirror:NatMirror"},
    "holdfast.step_readers": {"intermediate_data": "holdfast.plugins.nat.steps:StreamedSteps"},
    "holdfast.grading_processes": {"lm_eval": "holdfast.plugins.benchmarks.grading:start"},
}
"""The built-in plug-ins by entry-point group and name: the only place where the core names them.

They are not entry points of this distribution, because looking through all installed packages for those takes about
50 ms. The last three groups are not open to other packages.
"""


def load_reference(reference: str) -> Any:
    """Import the object that `module:attribute` names; raise UsageError if Holdfast is installed without the module."""
    module, _, attribute = reference.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"{module} is missing: this Holdfast was installed without it", remedy="pip install holdfast-evals"
        ) from error


class Registry:
    """The kinds of one extension point, by name."""

    def __init__(self, group: str, noun: str, core: Mapping[str, str] | None = None) -> None:
        """Take the entry-point group, a noun for messages, and `module:attribute` of each kind of the core."""
        self._group = group
        self._noun = noun
        self._builtin = {**(core or {}), **BUILT_IN.get(group, {})}
        self._loaded: dict[str, Any] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._builtin or name in self.plugins

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the kinds that are not from installed packages."""
        return iter(self._builtin)

    @property
    def plugins(self) -> dict[str, EntryPoint]:
        """The entry points of installed packages by name."""
        from importlib.metadata import entry_points

        return {entry.name: entry for entry in entry_points(group=self._group) if entry.name not in self._builtin}

    def load(self, name: str) -> Any:
        """Import a kind; raise ValueError, worded for users, if it is unknown or its package cannot be imported."""
        if name not in self._loaded:
            self._loaded[name] = self._import(name)
        return self._loaded[name]

    def is_builtin(self, name: str) -> bool:
        """Return True for a built-in kind, False for a plug-in's."""
        return name in self._builtin

    def _import(self, name: str) -> Any:
        if (reference := self._builtin.get(name)) is not None:
            try:
                return load_reference(reference)
            except UsageError as error:
                raise ValueError(f"the {self._noun} {name!r} cannot be used: {error}") from error
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
        from holdfast.errors import suggest

        return f"unknown {self._noun} {name!r}{suggest(name, [*self, *self.plugins])}; {self.describe()}"

    def describe(self) -> str:
        """List all names for a message: the built-in ones, and plug-ins' with their packages."""
        listed = f"one of {', '.join(self)}"
        plugins = [f"{name} ({_distribution(entry)})" for name, entry in sorted(self.plugins.items())]
        return f"{listed}; from plug-ins: {', '.join(plugins)}" if plugins else f"{listed}; no plug-ins are installed"


def _distribution(entry: EntryPoint) -> str:
    return "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
