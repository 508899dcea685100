"""Errors of commands, as they are printed: `error: …` for each problem, then `hint: …`."""

from __future__ import annotations

import click

from holdfast.errors import ConfigError, HoldfastError


def show_error(error: HoldfastError | OSError | str) -> None:
    """Print an error on standard error, each of its problems on its own line, and then what to do about it."""
    for problem in error.problems if isinstance(error, ConfigError) else (_message(error),):
        click.echo(f"error: {problem}", err=True)
    if isinstance(error, HoldfastError) and error.remedy is not None:
        click.echo(f"hint: {error.remedy}", err=True)


def _message(error: HoldfastError | OSError | str) -> str:
    return error.message if isinstance(error, HoldfastError) else str(error)
