"""How a command that runs an eval is shown, from its first line to its last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.cli.runs import command_line
from holdfast.display.choice import make_display
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.display.types import Display
    from holdfast.report.outcome import Outcome


def run_shown(
    run: Callable[[Display], Outcome],
    wanted: str | None,
    after: Callable[[Outcome], None],
    again: str = "Use --fresh to start from scratch.",
) -> Outcome:
    """Run with the display that is wanted, print how it ended, and report that to a program which follows.

    `after` hands the results on to other tools, before the last event.
    """
    display = make_display(wanted)
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
