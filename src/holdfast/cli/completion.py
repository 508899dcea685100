"""Shell completion of files, runs and profiles; `eval "$(_HOLDFAST_COMPLETE=bash_source holdfast)"` switches it on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import click
    from click.shell_completion import CompletionItem

_OFFERED: Final = 500
"""samples that are offered at once"""


def complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Leave paths to the shell, which knows best."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the ids of runs, with eval and target as help; where none fits, paths."""
    from click.shell_completion import CompletionItem

    from holdfast.cli.runs import runs_directory
    from holdfast.store.catalog import find_runs

    items = []
    for run in find_runs(runs_directory(ctx.params.get("runs_dir"))):
        target, _, number = run.path.name.rpartition("-")
        if number.startswith(incomplete):
            items.append(CompletionItem(number, help=f"{run.path.parent.name} · {target}"))
    return items or complete_files(ctx, param, incomplete)


def complete_samples(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Offer the ids of the samples of the run that was named before."""
    from itertools import islice

    from holdfast.cli.runs import find_run, runs_directory
    from holdfast.errors import HoldfastError
    from holdfast.report.run_view import RunView
    from holdfast.report.selection import sample_ids
    from holdfast.store.rundir import RunDir

    try:
        view = RunView(RunDir(find_run(ctx.params.get("run") or "", runs_directory(ctx.params.get("runs_dir")))))
        matches = (sample for sample in sample_ids(view) if sample.startswith(incomplete))
        return list(islice(matches, _OFFERED))
    except (HoldfastError, OSError):
        return []  # there is no such run, which the command itself will say


def complete_profiles(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Offer the profiles of the nearest env.toml."""
    import tomllib

    for folder in (Path.cwd(), *Path.cwd().parents):
        try:
            tables = tomllib.loads((folder / "env.toml").read_text())
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return []
        names = [name for name, table in tables.items() if isinstance(table, dict) and name != "wandb"]
        return [name for name in names if name.startswith(incomplete)]
    return []
