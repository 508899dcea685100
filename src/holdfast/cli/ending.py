"""Show a command that runs an eval, from its first line to its last, and export the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.cli.errors import show_warning
from holdfast.cli.runs import command_line, run_name
from holdfast.display.choice import make_display
from holdfast.display.terminal import echo
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.display.types import Display
    from holdfast.engine.options import Options
    from holdfast.plan.identity import RunIdentity
    from holdfast.report.outcome import Outcome
    from holdfast.spec.eval import Eval


def run_and_report(
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

        print_outcome(outcome, command_line(), again, run_name(outcome.rundir))
        after(outcome)
    except HoldfastError as error:
        from holdfast.display.types import Result

        display.result(Result(exit_code=error.exit_code, reason="failed", message=str(error)))
        raise
    display.result(outcome.result)
    return outcome


def run_locally(
    spec: Eval, options: Options, workers: int | None, display: Display, identity: RunIdentity | None = None
) -> Outcome:
    """Run an eval on this machine: in this process, or in so many workers."""
    if workers:
        from holdfast.engine.local_workers import run_workers

        return run_workers(spec, options, workers, display)
    from holdfast.engine.session import run_eval

    return run_eval(spec, options, display, identity=identity)


def export_results(outcome: Outcome, spec: Eval, options: Options, exports: tuple[str, ...] = ()) -> None:
    """Export a run as its eval file, the options and `exports`, names of formats, ask for."""
    from holdfast.export.after_run import export_after_run

    export_after_run(
        outcome.rundir,
        spec,
        echo,
        show_warning,
        log_samples=options.log_samples,
        output_path=options.output_path,
        exports=exports if outcome.exit_code <= 5 else (),
    )
