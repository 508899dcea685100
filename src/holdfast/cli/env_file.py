"""`.env` files for commands that ask models: read, never above the environment, and mentioned."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from holdfast.cli.errors import show_note, show_warning

if TYPE_CHECKING:
    from collections.abc import Callable

_CHOICE: Final = "holdfast.env_file"


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
        ctx.meta[_CHOICE] = value


def load_env_file(*folders: Path) -> None:
    """Set the variables of a `.env` file that are not set: of the one that an option names, else of the nearest one.

    `folders` are where the search starts, one after the other. One line names the variables, without their values.
    """
    context = click.get_current_context(silent=True)
    choice = None if context is None else context.meta.get(_CHOICE)
    if choice is True:
        return
    from holdfast.spec.env_file import find_env_file, take_env_file

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
