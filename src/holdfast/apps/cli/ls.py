"""`holdfast ls`: list runs, and how commands choose among them."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

import click

from holdfast.apps.cli.flags import Positive, runs_dir_option, runs_directory
from holdfast.display.format import dollars, interval_text
from holdfast.display.grid import Column, make_console, print_list
from holdfast.display.terminal import echo, echo_json, printable
from holdfast.errors import UsageError
from holdfast.spec.document import parse_duration
from holdfast.store.catalog import list_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.store.catalog import RunSummary

_STATUS_COLOURS: Final = {
    "running": "cyan",
    "unfinished": "yellow",
    "finished": "green",
    "gate failed": "red",
    "foreign": "yellow",
    "damaged": "red",
}
_SPARE: Final = {"size": 7, "dataset": 6, "cost": 5, "interval": 4, "progress": 3, "done": 3, "target": 2, "age": 1}
"""columns that a narrow terminal leaves out, the highest first"""


def run_filters(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose runs."""
    options = [
        click.option("--model", metavar="TEXT", help="Only runs whose target contains this text."),
        click.option("--dataset", metavar="TEXT", help="Only runs whose dataset contains this text."),
        click.option(
            "--status",
            type=click.Choice(list(_STATUS_COLOURS), case_sensitive=False),
            help="Only runs with this status.",
        ),
        click.option(
            "--older-than",
            metavar="AGE",
            help="Only runs last written longer ago than this, such as 90s, 5m, 2h or 7d.",
        ),
        click.option("--archived", is_flag=True, help="Only runs that --fresh archived."),
        runs_dir_option,
    ]
    for option in reversed(options):
        function = option(function)
    return function


@click.command("ls")
@click.argument("name", required=False, metavar="[EVAL]")
@click.option("-n", "limit", type=Positive(), metavar="N", help="Only the N newest runs [default: all].")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@run_filters
def command(name: str | None, limit: int | None, as_json: bool, **options: Any) -> int:
    """List the runs, the newest first; with EVAL, only runs of evals whose name contains this text.

    The list is tab-separated if the output is not a terminal.
    """
    runs = [run for run in select_runs(options) if _contains(run.name, name)][:limit]
    titles = ("id", "name", "target", "status", "done", "score", "interval", "cost", "dataset", "size", "age")
    return show_runs(runs, titles, as_json=as_json, empty=f"no runs in {runs_directory(options['runs_dir'])}")


def show_runs(
    runs: Sequence[RunSummary], titles: Sequence[str], *, as_json: bool = False, empty: str = "no runs"
) -> int:
    """Print runs: as a table that fits the terminal, tab-separated in a pipe, or as JSON."""
    if as_json:
        import msgspec

        echo_json(msgspec.json.encode(runs))
        return 0
    cells = _cells(runs, titles)
    if not sys.stdout.isatty():
        echo("\n".join(["\t".join(row) for row in (titles, *cells)]))
        return 0

    words = ("status", "id")
    columns = [
        Column(title, title in ("name", "target", "dataset"), _SPARE.get(title, 0), title in words) for title in titles
    ]
    console = make_console()
    if cells:
        print_list(console, columns, cells, _STATUS_COLOURS)
    else:
        console.print(empty)
    return 0


def _cells(runs: Sequence[RunSummary], titles: Sequence[str]) -> list[list[str]]:
    """Return the cells of a table of runs, a list for each run."""
    special: dict[str, Callable[[RunSummary], str]] = {
        "done": lambda run: run.progress,
        "score": lambda run: run.score_text,
        "interval": lambda run: "-" if run.low is None else interval_text(run.low, run.high),
        "cost": lambda run: "-" if run.cost is None else dollars(run.cost),
        "size": lambda run: run.size_text,
    }
    columns = [
        list(map(special[title], runs))
        if title in special
        else [printable(str(getattr(run, title)), keep="") for run in runs]
        for title in titles
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def select_runs(options: dict[str, Any]) -> list[RunSummary]:
    """List the runs that the options of `run_filters` choose, the most recently written first."""
    for name in ("model", "dataset", "older_than"):
        if options[name] is not None and not options[name].strip():
            option = "--" + name.replace("_", "-")
            raise UsageError(
                f"{option} is empty, which would choose every run", remedy="Give a value, or leave it out."
            )
    root = runs_directory(options["runs_dir"])
    if not root.is_dir() and (options["runs_dir"] is not None or "HOLDFAST_RUNS_DIR" in os.environ):
        raise UsageError(f"{root} is not a directory", remedy="Give the directory that holds the runs as --runs-dir.")
    older = None if options["older_than"] is None else _age(options["older_than"])
    return [
        run
        for run in list_runs(root, archived=options["archived"])
        if _contains(run.target, options["model"])
        and _contains(run.dataset, options["dataset"])
        and (options["status"] is None or run.status == options["status"].lower())
        and (older is None or run.age_seconds > older)
    ]


def _contains(text: str, part: str | None) -> bool:
    return part is None or part.casefold() in text.casefold()


def _age(text: str) -> float:
    try:
        days = text.strip().lower().removesuffix("d") if text.strip().lower().endswith("d") else None
        return float(days) * 86400 if days is not None else float(parse_duration(text))
    except ValueError:
        raise UsageError(f"--older-than: {text!r} is not an age such as 90s, 5m, 2h or 7d") from None
