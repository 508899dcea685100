"""`holdfast tasks`: benchmarks by name."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from holdfast.errors import HoldfastError, UsageError

if TYPE_CHECKING:
    from holdfast.benchmarks.cache import Compiled
    from holdfast.benchmarks.names import Benchmark
    from holdfast.spec.schema import BenchmarkBlock


@click.group("tasks", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """List benchmarks, show how one is asked, and prepare them for machines without internet."""


@command.command("ls")
@click.argument("glob", default="*")
@click.option("--all", "every", is_flag=True, help="Also list all tasks, groups and tags of lm-eval.")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def list_tasks(glob: str, every: bool, as_json: bool) -> int:
    """List the benchmarks that GLOB matches [default: all of the table].

    \b
    holdfast tasks ls 'mmlu*'
    holdfast tasks ls --all '*winogrande*'
    """
    from holdfast.benchmarks.index import installed_version
    from holdfast.benchmarks.names import find_in_lm_eval, find_listed, known_names
    from holdfast.formats.providers import installed_providers, task_names

    provided = {name: "package" for name in task_names(installed_providers())}
    rows = []
    for name in sorted({*known_names(every=every), *provided}):
        if not fnmatchcase(name, glob):
            continue
        if (benchmark := find_listed(name)) is None and name in provided:
            rows.append({"name": name, "from": "an installed package"})
        elif (benchmark := benchmark or find_in_lm_eval(name)) is not None:
            rows.append(_summary(benchmark))
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return 0
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        details = [str(row["from"])]
        if row.get("shots") is not None:
            details.append(f"{row['shots']} examples")
        details += [str(row[key]) for key in ("api", "primary") if row.get(key)]
        click.echo(f"{row['name']:<{width}}  {', '.join(details)}")
    if not rows:
        click.echo(f"no benchmark matches {glob!r}", err=True)
    if not every:
        more = "--all lists lm-eval's tasks" if installed_version() else "lm-eval, which adds its tasks, is not installed"
        click.echo(f"{len(rows):,} benchmarks; {more}", err=True)
    return 0


def _summary(benchmark: Benchmark) -> dict[str, Any]:
    return {
        "name": benchmark.name,
        "from": "NeMo Evaluator" if benchmark.listed else "lm-eval",
        "task": benchmark.task,
        "shots": benchmark.shots,
        "api": benchmark.api if benchmark.listed else None,
        "primary": benchmark.primary,
    }


class _Form(NamedTuple):
    """A benchmark with the options of a command."""

    benchmark: Benchmark
    block: BenchmarkBlock
    chat: bool


def _find(name: str, data: str | None) -> _Form:
    from holdfast.formats.benchmark import find_benchmark, wants_chat
    from holdfast.spec.schema import BenchmarkBlock

    block = BenchmarkBlock(name=name, data=data)
    benchmark = find_benchmark(block)
    return _Form(benchmark, block, wants_chat(benchmark, block, None))


def _compile(form: _Form, *, again: bool = False) -> Compiled:
    from holdfast.benchmarks.compile import compile_benchmark
    from holdfast.formats.benchmark import show_progress

    try:
        return compile_benchmark(
            form.benchmark, form.block, Path.cwd(), chat=form.chat, report=show_progress, again=again
        )
    finally:
        show_progress("")


_data_option = click.option(
    "--data",
    metavar="FOLDER",
    help="Take datasets from this folder, in the layout of the Hugging Face hub [default: $HOLDFAST_DATA, else the hub].",
)


@command.command("show")
@click.argument("name")
@_data_option
@click.option("--json", "as_json", is_flag=True, help="Print the description as JSON.")
def show_task(name: str, data: str | None, as_json: bool) -> int:
    """Show how the benchmark NAME is asked and graded, its data, and its first prompt.

    Without lm-eval, or without the data, it shows what is known and what is missing.
    """
    form = _find(name, data)
    described: dict[str, Any] = _summary(form.benchmark) | {"params": form.benchmark.params}
    try:
        compiled = _compile(form)
    except UsageError as error:
        described["missing"] = f"{error.message}{f': {error.remedy}' if error.remedy else ''}"
    else:
        described |= _describe(form, compiled)
    if as_json:
        click.echo(json.dumps(described, indent=2, ensure_ascii=False))
        return 0
    for line in _lines(described):
        click.echo(line)
    return 0


def _describe(form: _Form, compiled: Compiled) -> dict[str, Any]:
    from holdfast.benchmarks.cache import cache_folder
    from holdfast.benchmarks.compile import make_document
    from holdfast.data.readers import Layout, read_rows

    document = make_document(form.benchmark, form.block, compiled, chat=form.chat)
    about = document["metadata"]["benchmark"]
    rows = cache_folder() / compiled.rows
    first = next(row for _, row in read_rows(rows, Layout()))
    needs = "likelihoods of given text (completions with echo)" if "continuations" in document else None
    return {
        "shots": sorted({task["n_shot"] for task in about["tasks"].values()}),
        "tasks": list(about["tasks"]),
        "groups": list(about["groups"]),
        "rows": compiled.count,
        "metrics": [grader["name"] for grader in document["graders"]],
        "primary": about["primary"],
        "params": document["target"].get("params", {}),
        "dataset": about["dataset"],
        "license": about["license"],
        "needs": needs or f"{document['target']['api']} API",
        "lm_eval": compiled.provider_version,
        "file": str(rows),
        "first": {key: first[key] for key in ("history", "context", "continuations", "gold", "expected") if key in first},
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
    lines.append(f"file       {described['file']} (lm-eval {described['lm_eval']})")
    first = described["first"]
    lines += ["", *(f"[{message['role']}] {message['content']}" for message in first.get("history", []))]
    lines.append(first["context"])
    right = first.get("gold", [])
    for number, each in enumerate(first.get("continuations", [])):
        text = each if isinstance(each, str) else f"{each['context'].removeprefix(first['context'])} …{each['text']}"
        lines.append(f"  {'→' if number in (right if isinstance(right, list) else [right]) else ' '} {text}")
    if "expected" in first:
        lines.append(f"  → {first['expected']}")
    return lines


@command.command("fetch")
@click.argument("names", nargs=-1, required=True, metavar="NAME…")
@_data_option
def fetch_tasks(names: tuple[str, ...], data: str | None) -> int:
    """Compile benchmarks into this user's cache, so that they run without internet and without lm-eval.

    Data that no commit is pinned for is taken anew.
    """
    from holdfast.benchmarks.cache import cache_folder

    failed = 0
    for name in names:
        try:
            compiled = _compile(_find(name, data), again=True)
        except HoldfastError as error:
            click.echo(f"{name}: {error.message}{f' ({error.remedy})' if error.remedy else ''}", err=True)
            failed += 1
            continue
        click.echo(f"{name}: {compiled.count:,} rows in {cache_folder() / compiled.rows}")
    return 2 if failed else 0
