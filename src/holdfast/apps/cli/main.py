"""`holdfast`: finds the verb, runs it, and turns errors into messages and exit codes."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from typing import Final

import click

from holdfast.apps.cli.errors import command_line, show_error, show_usage_error
from holdfast.display.terminal import echo
from holdfast.engine.signals import Signals
from holdfast.errors import Exit, HoldfastError, UsageError
from holdfast.spec.plugins import load_reference
from holdfast.versions import __version__

_VERBS: Final = {
    "eval": "Run an eval, or resume it.",
    "ls": "List runs, the newest first.",
    "show": "Show a run, its failures, or one conversation.",
    "tasks": "List benchmarks, show how they are asked, and fetch them.",
    "grade": "Grade the outputs of a run again, or with other graders.",
    "view": "See runs in the browser.",
    "compare": "Compare runs on the same samples, with paired statistics.",
    "batches": "List the batches of a run.",
    "gate": "Check a finished run against minimum scores, a baseline and golden samples.",
    "export": "Export a run in the format of another tool.",
    "cache": "List and remove stored runs.",
    "init": "Write a small working eval to start from.",
    "repair": "Verify a run directory and repair it.",
    "status": "Show the status of an invocation (a cluster launch) or a run.",
    "logs": "Show or follow the logs of an invocation or a run.",
    "kill": "Stop an invocation or a run.",
    "resume": "Resume an invocation or a run, from its id or path.",
    "doctor": "Check that a profile of env.toml works.",
    "clean": "Remove what no run on a cluster needs.",
    "work": "Join a run as a worker.",
}
_VARIABLES: Final = {
    "HOLDFAST_UMASK": "holdfast.store.home:apply_umask",
    "HOLDFAST_PROCESS_ISOLATION": "holdfast.containment.program:requested_kind",
}
"""variables that are checked and applied before the command"""
_UNREADABLE: Final = "holdfast.store.files:UNREADABLE"
_SYNONYMS: Final = {"evaluate": "eval"}
"""names of verbs in other launchers, not listed by --help"""
_RESUMABLE: Final = ("eval", "evaluate", "grade", "resume", "work")
_REPAIR: Final = "`holdfast repair --dry-run RUN` names it, and `holdfast repair RUN` sets it aside."


class _Verbs(click.Group):
    """Imports a verb's module only when it is used, to start fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = _SYNONYMS.get(cmd_name, cmd_name)
        if verb not in _VERBS:
            return None
        command: click.Command = load_reference(f"holdfast.apps.cli.{verb}:command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_VERBS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib  # here, because it would be a tenth of `holdfast --version`

            close = difflib.get_close_matches(args[0], list(_VERBS), n=1)
            if close:
                raise click.UsageError(f"{error.message} Did you mean {close[0]!r}?", ctx) from error
            raise


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, message="holdfast %(version)s")
def holdfast() -> None:
    """Evaluate language models and agents, and never lose ground.

    To resume a run after any interruption, run the same command again.
    """
    Signals.harden()


class _Terminated(KeyboardInterrupt):
    """Handle SIGTERM while no run does: while it waits for another process, or reads and writes its files."""


def _stop(number: int) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else _Terminated


def _is_resumable() -> bool:
    """Return True for a command that asks models, and resumes after an interruption; others start over."""
    return any(word in _RESUMABLE for word in sys.argv[1:2]) or "--judge" in sys.argv


def main() -> None:
    """Run the command line."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: the next file or connection would get its number
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123 - pathlib is not imported here
    for stream in (sys.stdout, sys.stderr):  # a terminal without dashes gets question marks, not a traceback
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
    Signals(_stop).install()
    try:
        for variable, reference in _VARIABLES.items():
            if variable in os.environ:
                load_reference(reference)()
        code = holdfast.main(standalone_mode=False)
    except HoldfastError as error:
        show_error(error)
        code = error.exit_code
    except click.ClickException as error:
        show_usage_error(error)
        code = Exit.USAGE
    except (click.Abort, KeyboardInterrupt) as stopped:
        resume = f"; everything that finished is on disk. Resume with:\n  {command_line()}"
        echo(f"interrupted{resume if _is_resumable() else ''}", err=True)
        terminated = isinstance(stopped.__cause__ or stopped, _Terminated)
        code = Exit.TERMINATED if terminated else Exit.INTERRUPTED
    except BrokenPipeError:
        code = Exit.BROKEN_PIPE
        sys.stderr.close()
    except OSError as error:
        show_error(error)
        code = Exit.UNFINISHED
    except Exception as error:  # never exit code 1, which means that a gate is not met
        if isinstance(error, load_reference(_UNREADABLE)) and not _is_resumable():
            # Readers name the file and line of damage; this is for records that Holdfast would never write.
            show_error(UsageError(f"a record of the run cannot be read: {error}", remedy=_REPAIR))
        else:
            import traceback

            echo(traceback.format_exc(), err=True, nl=False)
            show_error("this is a bug in Holdfast, please report it; everything that finished is on disk")
        code = Exit.UNFINISHED
    gc.freeze()  # the process ends anyway, and a last garbage collection would take as long as the start
    sys.exit(code)
