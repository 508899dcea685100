"""The runs of a suite: each of its evals, in any format, with each of its targets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from holdfast.benchmarks.names import LM_EVAL
from holdfast.errors import ConfigError, Problem
from holdfast.formats import is_configuration, is_suite, load_any
from holdfast.formats.providers import find_file, installed_providers, may_be_name, unknown_task
from holdfast.spec.document import read_document
from holdfast.spec.load import baseline_of, target_name, with_export_folder
from holdfast.spec.suite import Cell, dotted_overrides
from holdfast.spec.validation import suggest
from holdfast.store.durable import slug

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from holdfast.spec.document import Document, Location
    from holdfast.spec.eval import Eval
    from holdfast.spec.overrides import Override
    from holdfast.spec.suite import Suite, SuiteTarget


def load_suite(suite: Suite, overrides: Sequence[Override] = ()) -> list[Cell]:
    """Load every eval with every target; raise ConfigError with the problems of all of them.

    `overrides` are those of the command line, which win over all others.
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
        row = entry.name or (entry.eval if entry.eval.startswith(LM_EVAL) else specs[0].name)
        if row in rows:
            message = f"a second eval called {row!r}; give each its own `name` in a suite file"
            problems.append(Problem(suite.where(("evals", number)), message))
        rows[row] = [grader.name for grader in specs[0].graders]
        labels = [target.label for target in suite.targets] or [target_name(specs[0].target)]
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
    """Yield what is wrong with the average, where the names of the evals and their graders are known."""
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
        if not path.is_file() and may_be_name(entry.eval):
            providers = installed_providers()
            named = find_file(entry.eval, providers)
            if named is None:
                error = unknown_task(entry.eval, providers)
                if suite.document is None:
                    raise error
                problems.append(Problem(suite.where(("evals", number)), error.message))
                continue
            path = named
        if not path.is_file():
            problems.append(Problem(suite.where(("evals", number)), f"no such file: {path}"))
        paths.append(path)
    if problems:
        raise ConfigError(problems)
    return paths


def _read_eval(path: Path) -> Document:
    document = read_document(path)
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
