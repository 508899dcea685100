"""Command-line options that several verbs share, typed.

What needs pydantic is imported where a value is read: help texts and refusals do without.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec.structs import replace

from holdfast.cli.runs import command_line, runs_directory
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from click.shell_completion import CompletionItem

    from holdfast.engine.options import Options
    from holdfast.spec.overrides import Override


class Positive(click.ParamType[int]):
    """A whole number from 1. Unlike `click.IntRange`, it adds nothing to the help text, which has the default."""

    name = "positive"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse a number and check that it is at least 1."""
        return click.IntRange(1).convert(value, param, ctx)


class Duration(click.ParamType[float]):
    """A number of seconds, such as `90s`, `5m` or `2h`."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse a duration."""
        from holdfast.spec.schema import parse_duration

        try:
            return float(parse_duration(value))
        except ValueError:
            return self.fail(f"{value!r} is not a duration such as 90s, 5m or 2h", param, ctx)


class ExporterName(click.ParamType[str]):
    """The name of an exporter, built in or of an installed package."""

    name = "exporter"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the name."""
        from holdfast.spec.exports import EXPORTERS

        if value not in EXPORTERS:
            self.fail(EXPORTERS.unknown(str(value)), param, ctx)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Offer all exporters."""
        from click.shell_completion import CompletionItem

        from holdfast.spec.exports import EXPORTERS

        names = (*EXPORTERS, *EXPORTERS.plugins)
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


class EvalFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `holdfast eval`, each under the name of its flag unless it says otherwise."""

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
    fresh: bool
    retry_failed: bool
    accept_errors: bool
    accept_drift: bool
    baseline_model: str | None
    log_samples: bool
    output_path: Path | None
    export: tuple[str, ...]
    workers: int | None
    skip_graders: bool
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
        """Return the flags that stand for keys of every eval file of a suite, whose targets and budgets are its own."""
        return replace(self, models=(), max_cost=None, token_budget=None, max_time=None).overrides()

    def options(self) -> Options:
        """Return the flags that say how to run, which are in no key."""
        from holdfast.engine.options import Options

        return Options(
            runs_dir=runs_directory(self.runs_dir),
            fresh=self.fresh,
            retry_failed=self.retry_failed,
            accept_errors=self.accept_errors,
            skip_graders=self.skip_graders,
            accept_drift=self.accept_drift,
            wait=lock_timeout(wait=self.wait),
            wait_for_batches=not self.no_wait,
            log_samples=self.log_samples,
            output_path=self.output_path,
            command=command_line(),
        )


def lock_timeout(*, wait: bool) -> float:
    """Return the seconds to wait for a run that another process holds; -1 for as long as it takes."""
    text = os.environ.get("HOLDFAST_LOCK_TIMEOUT")
    if not text:
        return -1 if wait else 0
    from holdfast.spec.schema import parse_duration

    try:
        return max(0.0, float(parse_duration(text)))
    except ValueError:
        raise UsageError(f"invalid HOLDFAST_LOCK_TIMEOUT {text!r}: expected seconds") from None
