"""Options that several commands share, with their types and completion, and `.env` files.

`eval "$(_HOLDFAST_COMPLETE=bash_source holdfast)"` switches completion on.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec.structs import replace

from holdfast.apps.cli.env_file import find_env_file, take_env_file
from holdfast.apps.cli.errors import command_line, show_note, show_warning
from holdfast.apps.cli.runs import runs_directory
from holdfast.engine.options import Options
from holdfast.errors import UsageError
from holdfast.spec.document import parse_duration
from holdfast.spec.plugins import load_reference
from holdfast.store.catalog import find_runs
from holdfast.store.claims import RunPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.shell_completion import CompletionItem

    from holdfast.spec.load import Override

_EXPORTERS: Final = "holdfast.spec.eval_schema:EXPORTERS"
"""the registry of exporters, whose schemas are imported only if an exporter is named"""
_ENV_FILE: Final = "holdfast.env_file"


class Positive(click.ParamType[int]):
    """A whole number from 1. Unlike `click.IntRange`, adds nothing to the help text, which has the default."""

    name = "positive"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse a number and check that it is at least 1."""
        return click.IntRange(1).convert(value, param, ctx)


class Duration(click.ParamType[float]):
    """A number of seconds, such as `90s`, `5m` or `2h`."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse a duration."""
        try:
            return float(parse_duration(value))
        except ValueError:
            return self.fail(f"{value!r} is not a duration such as 90s, 5m or 2h", param, ctx)


class ExporterName(click.ParamType[str]):
    """The name of an exporter, built in or of an installed package."""

    name = "exporter"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the name."""
        exporters = load_reference(_EXPORTERS)
        if value not in exporters:
            self.fail(exporters.unknown(str(value)), param, ctx)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Offer all exporters."""
        from click.shell_completion import CompletionItem

        exporters = load_reference(_EXPORTERS)
        names = (*exporters, *exporters.plugins)
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


class Concurrency(click.ParamType["int | str"]):
    """A number of requests in flight, or `auto`."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Parse a positive number or `auto`."""
        if value == "auto":
            return "auto"
        if str(value).isdigit() and int(value) > 0:
            return int(value)
        return self.fail(f"{value!r} is neither a number above 0 nor auto", param, ctx)


class EvalFlags(RunPolicy, frozen=True, kw_only=True):
    """The options of `holdfast eval`. A field has the name of its flag, unless another flag is noted."""

    named: str | None
    """--config"""
    run: str | None
    batch: str | None
    force_squash: bool
    models: tuple[str, ...]
    """--model"""
    trials: int | None
    ids: tuple[str, ...]
    """--task"""
    tags: tuple[str, ...]
    limit: int | None
    concurrency: int | str | None
    baseline_model: str | None
    export: tuple[str, ...]
    workers: int | None
    max_cost: float | None
    token_budget: int | None
    max_time: float | None
    runs_dir: Path | None
    wait: bool
    no_wait: bool
    dry_run: bool
    json: bool
    display: str | None

    def overrides(self) -> list[Override]:
        """Return the flags that stand for keys of the eval file."""
        keys: dict[tuple[str, ...], Any] = {
            ("target", "model"): next(iter(self.models), None),
            ("trials",): self.trials,
            ("dataset", "ids"): list(self.ids) or None,
            ("dataset", "tags"): list(self.tags) or None,
            ("dataset", "limit"): self.limit,
            ("limits", "concurrency"): self.concurrency,
            ("limits", "max_cost"): self.max_cost,
            ("limits", "token_budget"): self.token_budget,
            ("limits", "max_time"): self.max_time,
            ("baseline", "model"): self.baseline_model,
        }
        return [(path, value) for path, value in keys.items() if value is not None]

    def suite_overrides(self) -> list[Override]:
        """Return the flags that stand for keys of every eval file of a suite, which has its own targets and budgets."""
        return replace(self, models=(), max_cost=None, token_budget=None, max_time=None).overrides()

    def options(self) -> Options:
        """Return the flags that say how to run, which are in no key."""
        return Options(
            runs_dir=runs_directory(self.runs_dir),
            wait=lock_timeout(wait=self.wait),
            wait_for_batches=not self.no_wait,
            command=command_line(),
            **self.policy,
        )


def lock_timeout(*, wait: bool) -> float:
    """Return the seconds to wait for a run that another process holds; -1 for as long as it takes."""
    text = os.environ.get("HOLDFAST_LOCK_TIMEOUT")
    if not text:
        return -1 if wait else 0
    try:
        return max(0.0, float(parse_duration(text)))
    except ValueError:
        raise UsageError(f"invalid HOLDFAST_LOCK_TIMEOUT {text!r}: expected seconds") from None


def env_file_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for `.env` files to a command."""
    named = click.option(
        "--env-file",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        metavar="FILE",
        expose_value=False,
        callback=_keep,
        help="Take variables that are not set from this file [default: the project's .env].",
    )
    none = click.option("--no-env-file", is_flag=True, expose_value=False, callback=_keep, help="Read no .env file.")
    return named(none(command))


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value:
        ctx.meta[_ENV_FILE] = value


def load_env_file(*folders: Path) -> None:
    """Set the unset variables of a `.env` file: the file that an option names, or the nearest one to `folders`.

    A note names the variables, without their values.
    """
    context = click.get_current_context(silent=True)
    choice = None if context is None else context.meta.get(_ENV_FILE)
    if choice is True:
        return
    path = choice or next((path for folder in folders if (path := find_env_file(folder)) is not None), None)
    if path is None:
        return
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    variables, refusals = take_env_file(shown, os.environ)
    os.environ.update(variables)
    for refusal in refusals:
        show_warning(refusal)
    if variables:
        show_note(f"{', '.join(sorted(variables))} from {shown}")


def complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Leave the completion of paths to the shell."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the ids of runs, with eval and target as help; paths if no id matches."""
    from click.shell_completion import CompletionItem

    items = []
    for run in find_runs(runs_directory(ctx.params.get("runs_dir"))):
        target, _, number = run.path.name.rpartition("-")
        if number.startswith(incomplete):
            items.append(CompletionItem(number, help=f"{run.path.parent.name} · {target}"))
    return items or complete_files(ctx, param, incomplete)


def complete_profiles(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Offer the profiles of the nearest env.toml."""
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
