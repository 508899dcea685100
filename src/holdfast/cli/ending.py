"""Show a command that runs an eval, from its first line to its last, and export the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from holdfast.cli.export import export_after, export_also
from holdfast.cli.runs import command_line
from holdfast.display.choice import make_display
from holdfast.errors import HoldfastError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.display.types import Display
    from holdfast.engine.options import Options
    from holdfast.report.outcome import Outcome
    from holdfast.spec.load import Eval


def run_shown(
    run: Callable[[Display], Outcome],
    display_name: str | None,
    after: Callable[[Outcome], None],
    again: str = "Use --fresh to start from scratch.",
) -> Outcome:
    """Run with a display, print how the run ended, and export it; a program that follows gets the result last.

    `after` exports the run. `again` is what a user may type for a run that is finished already.
    """
    display = make_display(display_name)
    try:
        outcome = run(display)

        from holdfast.report.table import print_outcome  # after the run: starting it needs no rich

        print_outcome(outcome, command_line(), again)
        after(outcome)
    except HoldfastError as error:
        from holdfast.display.types import Result

        display.result(Result(exit_code=error.exit_code, reason="failed", message=str(error)))
        raise
    display.result(outcome.result)
    return outcome


def export_results(outcome: Outcome, spec: Eval, options: Options, exports: tuple[str, ...] = ()) -> None:
    """Export a run as its eval file, the options and `exports`, names of formats, ask for."""
    if spec.output.nat and outcome.metrics is not None:
        from holdfast.export.after_run import write_nat_copy

        for path in write_nat_copy(outcome.rundir, spec, lambda text: click.echo(f"warning: {text}", err=True)):
            click.echo(f"wrote {path}")
    if options.log_samples or options.output_path:
        from holdfast.export.after_run import write_copies

        try:
            for path in write_copies(outcome.rundir, log_samples=options.log_samples, output_path=options.output_path):
                click.echo(f"wrote {path}")
        except OSError as error:
            remedy = f"The run in {outcome.rundir.path} is complete: choose another folder and run the same command."
            raise UsageError(f"cannot write the copies for other tools: {error}", remedy=remedy) from error
    if outcome.metrics is not None:
        export_after(outcome.rundir, spec)
    if exports and outcome.exit_code <= 4:
        export_also(outcome.rundir, exports)
