"""Suites: several evals and several targets, from a suite file or from the command line.

A suite file is a YAML file with the key `suite`. `read_suite` checks everything that can be checked without the eval
files, and `load_suite` loads each eval, of any format, with each target.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
from pydantic import Field

from holdfast.errors import ConfigError, Problem, suggest
from holdfast.spec.document import Document, Location
from holdfast.spec.eval import Eval
from holdfast.spec.formats import (
    find_file,
    installed_providers,
    is_configuration,
    is_qualified,
    is_suite,
    load_any,
    may_be_name,
    read_eval,
    unknown_task,
)
from holdfast.spec.load import Override, baseline_of, eval_version, with_export_folder
from holdfast.spec.schema import SCHEMA_VERSION, Block, Names, Seconds, validate_block
from holdfast.spec.target_schema import TARGETS, target_kind
from holdfast.store.files import slug


class SuiteEval(Block):
    """One of `evals`."""

    eval: str = Field(min_length=1)
    """Path of an eval file, relative to the suite file, or the name of a task."""
    name: str | None = Field(default=None, min_length=1)
    """Name of the eval in tables. Default: the `name` in the eval file."""
    overrides: dict[str, Any] = {}
    """Keys of the eval file to override, such as `{trials: 3, limits.concurrency: 8}`."""


class SuiteLimits(Block):
    """Budgets of a whole suite. Never part of a key."""

    max_cost: float | None = Field(default=None, gt=0)
    """Budget of all runs together in US dollars. Once it is spent, no more trials start."""
    token_budget: int | None = Field(default=None, gt=0)
    """Budget of all runs together in tokens."""
    max_time: Seconds | None = None
    """Time budget of all runs together."""


class AverageBlock(Block):
    """How scores of several evals are averaged."""

    over: Names = Field(min_length=1)
    """Names of the evals to average. A target that lacks one of them has no average."""
    metric: str | None = None
    """Grader whose score is averaged. Default: the score of each eval."""
    weights: dict[str, float] = {}
    """Weights by name of the eval. Default: 1 for each."""


class SuiteFields(Block):
    """The top of a suite file."""

    schemaVersion: str = SCHEMA_VERSION  # noqa: N815 - as in all our files
    """Version of the file format, MAJOR.MINOR in quotes: see [versions](versions.md)."""
    suite: str = Field(min_length=1, max_length=120)
    """Name of the suite."""
    evals: list[str | dict[str, Any]] = Field(min_length=1)
    """Evals to run: each the path of an eval file, the name of a task, or a [mapping](#evals)."""
    targets: list[str | dict[str, Any]] = []
    """Targets to evaluate: each the name of a model, or a [mapping](#targets). Default: the target of each eval
    file."""
    overrides: dict[str, Any] = {}
    """Keys to override in all eval files, such as `{dataset.limit: 100}`. Overrides of a single eval take
    precedence."""
    limits: SuiteLimits = SuiteLimits()
    """Budgets of the whole suite: see [`limits`](#limits)."""
    average: AverageBlock | None = None
    """Average of scores to show below the table: see [`average`](#average). Default: none."""


class SuiteTarget(msgspec.Struct, frozen=True):
    """A target of a suite."""

    label: str
    """its name in tables"""
    keys: dict[str, Any]
    """keys of the target's block, which override each eval file's"""
    location: Location | None = None
    """in the suite file"""

    def overrides(self, written: Any) -> list[Override]:
        """Return the overrides for an eval file whose target is `written`, and replaced if it is of another kind."""
        kind = target_kind(self.keys)
        if kind is not None and isinstance(written, dict) and target_kind(written) not in (kind, None):
            return [(("target",), self.keys)]
        return [(("target", key), value) for key, value in self.keys.items()]


class Suite(msgspec.Struct, frozen=True):
    """Several evals and targets to run with one command."""

    name: str
    evals: tuple[SuiteEval, ...]
    targets: tuple[SuiteTarget, ...] = ()
    """empty: the target of each eval file"""
    limits: SuiteLimits = msgspec.field(default_factory=SuiteLimits)
    overrides: dict[str, Any] = {}
    average: AverageBlock | None = None
    document: Document | None = None
    """None: the suite comes from the command line"""

    def where(self, location: Location) -> str:
        """Return `file:line: key`; empty for a suite from the command line."""
        return "" if self.document is None else self.document.where(location)

    @property
    def folder(self) -> Path:
        """The base of relative paths."""
        return Path() if self.document is None or self.document.path is None else self.document.path.parent


class Cell(msgspec.Struct, frozen=True):
    """One eval and one target of a suite: an ordinary run."""

    eval: str
    """name of the row in tables"""
    target: str
    """name of the column in tables"""
    spec: Eval

    @property
    def name(self) -> str:
        """Both names."""
        return f"{self.eval} · {self.target}"


def model_target(name: str) -> SuiteTarget:
    """Return the target that the name of a model stands for."""
    return SuiteTarget(name, {"model": name})


def dotted_overrides(overrides: dict[str, Any]) -> list[Override]:
    """Return the overrides of a mapping with keys such as `limits.concurrency`."""
    return [(tuple(key.split(".")), value) for key, value in overrides.items()]


def read_suite(document: Document) -> Suite:
    """Check a suite file as a whole; raise ConfigError with all problems."""
    newer = eval_version(document)
    problems: list[Problem] = []
    top = cast("SuiteFields | None", validate_block(SuiteFields, document.data, (), document, problems))
    if top is None:
        raise ConfigError(problems, remedy=newer)
    evals = []
    for number, entry in enumerate(top.evals):
        data = {"eval": entry} if isinstance(entry, str) else entry
        block = cast("SuiteEval | None", validate_block(SuiteEval, data, ("evals", number), document, problems))
        evals += [] if block is None else [block]
    targets: list[SuiteTarget] = []
    for number, item in enumerate(top.targets):
        target = _read_target(item, ("targets", number), document, problems)
        if target is not None and any(target.label == other.label for other in targets):
            message = f"a second target called {target.label!r}; give each its own `label`"
            problems.append(Problem(document.where(("targets", number)), message))
        targets += [] if target is None else [target]
    if top.average is not None:
        problems += [
            Problem(document.where(("average", "weights", name)), f"is not in `over`{suggest(name, top.average.over)}")
            for name in top.average.weights
            if name not in top.average.over
        ]
        problems += [
            Problem(document.where(("average", "weights", name)), f"a weight is a number above 0, not {weight}")
            for name, weight in top.average.weights.items()
            if not weight > 0
        ]
    if problems:
        raise ConfigError(problems, remedy=newer)
    return Suite(top.suite, tuple(evals), tuple(targets), top.limits, top.overrides, top.average, document)


def _read_target(
    data: str | dict[str, Any], location: Location, document: Document, problems: list[Problem]
) -> SuiteTarget | None:
    if isinstance(data, str):
        return SuiteTarget(data, {"model": data}, location)
    keys = {key: value for key, value in data.items() if key != "label"}
    label = data.get("label", keys.get("model"))
    if not isinstance(label, str) or not label:
        message = "needs a `label`, the name of the target in tables" if label is None else "`label` should be text"
        problems.append(Problem(document.where(location), message))
        return None
    if len([kind for kind in (*TARGETS, "type") if kind in keys]) > 1:
        message = f"a target is one of {', '.join(TARGETS)}, or `type: NAME` of a plug-in"
        problems.append(Problem(document.where(location), message))
        return None
    return SuiteTarget(label, keys, location)


def load_suite(suite: Suite, overrides: Sequence[Override] = ()) -> list[Cell]:
    """Load every eval with every target; raise ConfigError with the problems of all of them.

    `overrides` come from the command line and win over all others.
    """
    cells: list[Cell] = []
    problems: list[Problem] = []
    rows: dict[str, list[str]] = {}
    """graders by eval"""
    for number, (path, entry) in enumerate(zip(find_evals(suite), suite.evals, strict=True)):
        try:
            document = _read_eval(path)
            specs = [_load(suite, number, document, target, overrides) for target in suite.targets or (None,)]
        except ConfigError as error:
            problems += error.problems
            continue
        row = entry.name or (entry.eval if is_qualified(entry.eval) else specs[0].name)
        if row in rows:
            message = f"a second eval called {row!r}; give each its own `name` in a suite file"
            problems.append(Problem(suite.where(("evals", number)), message))
        rows[row] = [grader.name for grader in specs[0].graders]
        labels = [target.label for target in suite.targets] or [specs[0].target.label]
        cells += [Cell(row, label, spec) for label, spec in zip(labels, specs, strict=True)]
    if not problems:
        problems += _average_problems(suite, rows)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return _with_each_notice_once(cells)


def _with_each_notice_once(cells: Sequence[Cell]) -> list[Cell]:
    """Leave each notice to the first cell that has it."""
    seen: set[str] = set()
    changed = []
    for cell in cells:
        notices = tuple(notice for notice in cell.spec.notices if notice not in seen)
        seen.update(notices)
        spec = msgspec.structs.replace(cell.spec, notices=notices)
        changed.append(msgspec.structs.replace(cell, spec=spec))
    return changed


def _average_problems(suite: Suite, rows: dict[str, list[str]]) -> Iterator[Problem]:
    """Yield the problems of the average, given the graders of each eval by name."""
    if (average := suite.average) is None:
        return
    for number, name in enumerate(average.over):
        if name not in rows:
            message = f"there is no eval {name!r}{suggest(name, rows)}; there are {', '.join(rows)}"
            yield Problem(suite.where(("average", "over", number)), message)
        elif average.metric is not None and average.metric not in rows[name]:
            message = f"the eval {name!r} has no grader {average.metric!r}{suggest(average.metric, rows[name])}"
            yield Problem(suite.where(("average", "metric")), message)


def find_evals(suite: Suite) -> list[Path]:
    """Return the files of a suite's evals."""
    paths, problems = [], []
    for number, entry in enumerate(suite.evals):
        path = suite.folder / entry.eval
        if not path.exists() and may_be_name(entry.eval):
            providers = installed_providers()
            named = find_file(entry.eval, providers)
            if named is None:
                error = unknown_task(entry.eval, providers)
                if suite.document is None:
                    raise error
                problems.append(Problem(suite.where(("evals", number)), error.message))
                continue
            path = named
        if not path.exists():
            problems.append(Problem(suite.where(("evals", number)), f"no such file: {path}"))
        paths.append(path)
    if problems:
        raise ConfigError(problems)
    return paths


def _read_eval(path: Path) -> Document:
    document = read_eval(path)
    if is_suite(document.data) or is_configuration(document.data):
        what = "a suite" if is_suite(document.data) else "a configuration for clusters"
        raise ConfigError([Problem(str(path), f"is {what}, and a suite is made of eval files")])
    return document


def _load(
    suite: Suite, number: int, document: Document, target: SuiteTarget | None, overrides: Sequence[Override]
) -> Eval:
    written = document.data.get("target")
    layers: list[tuple[Location, list[Override]]] = [
        (("overrides",), dotted_overrides(suite.overrides)),
        (("evals", number, "overrides"), dotted_overrides(suite.evals[number].overrides)),
        ((), [] if target is None else target.overrides(written)),
    ]
    if suite.document is not None:  # problems with these values are problems of the suite file
        origins = dict(document.elsewhere)
        for base, layer in layers:
            for key, _ in layer:
                place: Location = (*base, ".".join(key))
                if target is not None and not base:
                    place = (*(target.location or ()), *key[1:])
                origins[key] = (suite.document, place)
        document = replace(document, elsewhere=origins)
    spec = load_any(document, [*(override for _, layer in layers for override in layer), *overrides])
    if baseline_of(spec) is not None:
        message = "a suite has no baselines: name both targets in the suite, or add the override baseline=null"
        raise ConfigError([Problem(spec.document.where(("baseline",)), message)])
    return with_export_folder(spec, slug(target.label)) if target is not None and len(suite.targets) > 1 else spec
