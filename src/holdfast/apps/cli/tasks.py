"""`holdfast tasks`: benchmarks by name."""

from __future__ import annotations

import json
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.apps.cli.errors import show_note
from holdfast.data.dataset import Dataset
from holdfast.display.terminal import echo, echo_json
from holdfast.errors import Exit, HoldfastError, UsageError
from holdfast.plugins.benchmarks.cache import cache_folder
from holdfast.plugins.benchmarks.compile import INSTALL
from holdfast.plugins.benchmarks.format import benchmark_document, compile_shown, find_benchmark, wants_chat
from holdfast.plugins.benchmarks.names import find_in_lm_eval, find_listed, installed_version, known_names, table
from holdfast.report.preview import continuation_lines
from holdfast.spec.document import Document
from holdfast.spec.eval_schema import BenchmarkBlock
from holdfast.spec.formats import installed_providers, task_names, unknown_task
from holdfast.spec.load import build_eval
from holdfast.spec.template import Template
from holdfast.targets.types import Continuation

if TYPE_CHECKING:
    from holdfast.plugins.benchmarks.names import Benchmark


@click.group("tasks", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """List benchmarks, show how one is asked, and prepare them for machines without internet."""


@command.command("ls")
@click.argument("glob", default="*")
@click.option("--all", "every", is_flag=True, help="Also list all tasks, groups and tags of lm-eval.")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def list_tasks(glob: str, every: bool, as_json: bool) -> int:
    """List the benchmarks that GLOB matches [default: all of the table], with the metric that is the score.

    \b
    holdfast tasks ls 'mmlu*'
    holdfast tasks ls --all '*winogrande*'
    """
    provided = task_names(installed_providers())
    rows = []
    for name in sorted({*known_names(every=every), *provided}):
        if not fnmatchcase(name, glob):
            continue
        if (benchmark := find_listed(name)) is None and name in provided:
            rows.append({"name": name, "from": "an installed package"})
        elif (benchmark := benchmark or find_in_lm_eval(name)) is not None:
            rows.append(_summary(benchmark))
    if as_json:
        echo_json(json.dumps(rows, indent=2))
        return 0
    cells = [_cells(row) for row in (_with_families(rows) if glob == "*" and not every else rows)]
    widths = [max((len(row[column]) for row in cells), default=0) for column in range(2)]
    for name, metric, details in cells:
        echo(f"{name:<{widths[0]}}  {metric:<{widths[1]}}  {details}".rstrip())
    if not rows:
        echo(f"no benchmark matches {glob!r}", err=True)
    if installed_version() is None:
        echo(f"{len(rows):,} benchmarks; lm-eval, which adds its tasks, is not installed: {INSTALL}", err=True)
    elif not every:
        echo(f"{len(rows):,} benchmarks; --all lists lm-eval's tasks", err=True)
    return 0


def _with_families(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with one row for each family, such as the translations of MMLU."""
    families = Counter(table().family(row["name"]) for row in rows)
    shown: dict[str, dict[str, Any]] = {}
    for row in rows:
        family = table().family(row["name"])
        if family is None:
            shown[row["name"]] = row
        else:
            shown.setdefault(family, {**row, "name": f"{family} ({families[family]})", "api": None})
    return list(shown.values())


def _cells(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return the name, the metric and the other cells of a benchmark in the list."""
    details = [row["measures"]] if row.get("measures") else []
    if row.get("shots") is not None:
        details.append(f"{row['shots']} examples")
    details += ["chat"] if row.get("api") == "chat" else []
    return row["name"], row.get("metric") or "", " · ".join([*details, str(row["from"])])


def _summary(benchmark: Benchmark) -> dict[str, Any]:
    about = table().about_name(benchmark) if benchmark.listed else None
    return {
        "name": benchmark.name,
        "from": benchmark.origin,
        "task": benchmark.task,
        "shots": benchmark.shots,
        "api": benchmark.api if benchmark.listed else None,
        "primary": benchmark.primary,
        "metric": benchmark.primary or (about and about.metric),
        "measures": about and about.measures,
    }


def _find(name: str, data: str | None) -> tuple[Benchmark, BenchmarkBlock]:
    if not name:
        raise unknown_task(name)
    block = BenchmarkBlock(name=name, data=data)
    return find_benchmark(block), block


_data_option = click.option(
    "--data",
    metavar="FOLDER",
    help="Take datasets from this folder, in the layout of the hub [default: $HOLDFAST_DATA, else the hub].",
)


@command.command("show")
@click.argument("name")
@_data_option
@click.option("--json", "as_json", is_flag=True, help="Print the description as JSON.")
def show_task(name: str, data: str | None, as_json: bool) -> int:
    """Show how the benchmark NAME is asked and graded, its data, and its first prompt.

    Without lm-eval, or without the data, it shows what is known and what is missing.
    """
    benchmark, block = _find(name, data)
    described: dict[str, Any] = _summary(benchmark) | {"params": benchmark.params}
    try:
        document, _ = benchmark_document(benchmark, block, {}, Path.cwd())
        described |= _describe(document)
    except UsageError as error:
        described["missing"] = f"{error.message}{f': {error.remedy}' if error.remedy else ''}"
    if as_json:
        echo_json(json.dumps(described, indent=2, ensure_ascii=False))
        return 0
    for line in _lines(described):
        echo(line)
    return 0


def _describe(document: dict[str, Any]) -> dict[str, Any]:
    about = document["metadata"]["benchmark"]
    target = {**document["target"], "model": "any"}
    spec = build_eval(Document({**document, "target": target}), Path.cwd())
    samples = list(Dataset(spec))
    first = samples[0].fields
    shown = {key: first[key] for key in ("history", "continuations", "gold", "expected") if key in first}
    likelihoods = "continuations" in document
    return {
        "shots": sorted({task["n_shot"] for task in about["tasks"].values()}),
        "tasks": list(about["tasks"]),
        "groups": list(about["groups"]),
        "rows": len(samples),
        "metrics": [grader.name for grader in spec.graders],
        "primary": about["primary"],
        "api": document["target"]["api"],
        "params": document["target"].get("params", {}),
        "dataset": about["dataset"],
        "license": about["license"],
        "needs": "likelihoods of given text (completions with echo)"
        if likelihoods
        else f"{document['target']['api']} API",
        "provider": f"{about['provider']} {about['provider_version']}",
        "first": {"context": Template(spec.prompt or "").render(first), **shown},
    }


def _lines(described: dict[str, Any]) -> list[str]:
    lines = [f"{described['name']}: task {described['task']}, as in {described['from']}"]
    if "missing" in described:
        shots = described["shots"]
        lines.append(f"examples   {'as the task defines' if shots is None else shots}")
        return [*lines, f"missing    {described['missing']}"]
    datasets = {(each["path"], each["revision"]): None for each in described["dataset"]}
    tasks = described["tasks"]
    lines += [
        f"rows       {described['rows']:,}" + (f" of {len(tasks)} tasks" if len(tasks) > 1 else ""),
        f"examples   {' or '.join(map(str, described['shots']))}",
        f"metrics    {', '.join(described['metrics'])}; the score is {described['primary']}",
        *(f"dataset    {path} at {revision or 'a local copy'}" for path, revision in datasets),
        f"license    {described['license'] or 'unknown'}",
        f"needs      {described['needs']}",
    ]
    if described["params"]:
        lines.append(f"params     {json.dumps(described['params'], ensure_ascii=False)}")
    lines.append(f"defined by {described['provider']}")
    first = described["first"]
    lines += ["", *(f"[{message['role']}] {message['content']}" for message in first.get("history", []))]
    lines.append(first["context"])
    right = first.get("gold", [])
    continuations = [
        Continuation(each) if isinstance(each, str) else Continuation(**each) for each in first.get("continuations", [])
    ]
    lines += continuation_lines(first["context"], continuations, right if isinstance(right, list) else [right])
    if "expected" in first:
        lines.append(f"  → {first['expected']}")
    return lines


def _matching(name: str) -> list[str]:
    """Return the benchmarks of the table that a glob matches, or the name that is not a glob."""
    if not any(character in name for character in "*?["):
        return [name]
    if not (matching := [each for each in known_names() if fnmatchcase(each, name)]):
        raise UsageError(f"no benchmark matches {name!r}", remedy="`holdfast tasks ls` lists names.")
    return matching


@command.command("fetch")
@click.argument("names", nargs=-1, required=True, metavar="NAME…")
@_data_option
def fetch_tasks(names: tuple[str, ...], data: str | None) -> int:
    """Compile benchmarks into this user's cache, so that they run without internet and without lm-eval.

    NAME may be a glob over the names of `tasks ls`, such as 'arc*'.
    What is there already is compiled again only if its data has changed, also on the hub.
    """
    failed = 0
    for name in dict.fromkeys(match for each in names for match in _matching(each)):
        try:
            benchmark, block = _find(name, data)
            if benchmark.provider == "native":
                echo(f"{name}: defined by Holdfast, with nothing to compile")
                continue
            chat = bool(wants_chat(benchmark, block, {}))
            compiled = compile_shown(benchmark, block, Path.cwd(), chat=chat, newest=True)
        except HoldfastError as error:
            echo(f"{name}: {error.message}{f' ({error.remedy})' if error.remedy else ''}", err=True)
            failed += 1
            continue
        echo(f"{name}: {compiled.count:,} rows in {cache_folder() / compiled.rows}")
        for notice in compiled.notices:
            show_note(notice)
    return Exit.USAGE if failed else Exit.FINISHED
