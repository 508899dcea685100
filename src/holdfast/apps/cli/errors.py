"""Messages of commands on standard error: `error: …` for each problem, then `hint: …`; `warning: …`; `note: …`."""

from __future__ import annotations

import shlex
import sys

import click

from holdfast.display.terminal import echo
from holdfast.errors import ConfigError, HoldfastError, UsageError, with_hint


def show_error(error: HoldfastError | OSError | str) -> None:
    """Print an error on standard error, each of its problems on its own line, and then what to do about it."""
    message, hint = (error.message, error.remedy) if isinstance(error, HoldfastError) else (str(error), None)
    problems = error.problems if isinstance(error, ConfigError) else (message,)
    echo(with_hint("\n".join(f"error: {problem}" for problem in problems), hint), err=True)


def show_usage_error(error: click.ClickException) -> None:
    """Print an error in a command line: the usage of the command, the error, and the command for help."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = None
    if context is not None:
        echo(context.get_usage(), err=True)
        what = "commands" if isinstance(context.command, click.Group) else "options"
        hint = f"{context.command_path} --help lists all {what}."
    show_error(UsageError(error.format_message(), remedy=hint))


def show_warning(message: str) -> None:
    """Print a failure that does not end the command."""
    echo(f"warning: {message}", err=True)


def show_note(message: str) -> None:
    """Print information that is not part of a command's output."""
    echo(f"note: {message}", err=True)


def command_line() -> str:
    """Return the command that resumes this one: without --fresh, which would start from scratch.

    Decisions of --settle are left out as well: they are on disk, and would count again if the call was cut off again.
    """
    words = ["holdfast"]
    rest = iter(sys.argv[1:])
    for word in rest:
        if word == "--settle":
            next(rest, None)
        elif word not in ("--fresh", "--force", "--again") and not word.startswith("--settle="):
            words.append(word)
    return shlex.join(words)
