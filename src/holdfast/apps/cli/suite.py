"""`holdfast eval` with several evals, several models, or a suite file: plan, run and show all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from holdfast.apps.cli.errors import command_line, show_note
from holdfast.apps.cli.running import export_results, options_of, run_locally
from holdfast.display.displays import Result, make_display
from holdfast.engine.session import preview_run
from holdfast.engine.suite import run_suite
from holdfast.engine.user_code import unseen_code
from holdfast.errors import COMPLETE, HoldfastError, UsageError
from holdfast.report.suite import print_cell, print_ending, print_plan, print_suite
from holdfast.spec.document import Document
from holdfast.spec.load import parse_override
from holdfast.spec.suite import Suite, SuiteEval, load_suite, model_target, read_suite

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.apps.cli.eval import EvalFlags
    from holdfast.engine.suite import CellOutcome, SuiteOutcome
    from holdfast.plan.identity import RunIdentity
    from holdfast.report.outcome import Outcome
    from holdfast.spec.suite import Cell


def suite_of(evals: Iterable[str], models: Sequence[str]) -> Suite:
    """Return the suite that evals and models on the command line stand for."""
    return with_models(Suite("suite", tuple(SuiteEval(eval=each) for each in evals)), models)


def with_models(suite: Suite, models: Sequence[str]) -> Suite:
    """Return the suite with the models of the command line, if there are any, instead of its targets."""
    if repeated := [model for number, model in enumerate(models) if model in models[:number]]:
        raise UsageError(f"-m {repeated[0]} is given twice")
    return replace(suite, targets=tuple(map(model_target, models))) if models else suite


def _read(source: Document | list[str], models: Sequence[str]) -> Suite:
    """Return the suite of a file, or the suite that several evals or models stand for."""
    return with_models(read_suite(source), models) if isinstance(source, Document) else suite_of(source, models)


def suite_command(source: Document | list[str], overrides: tuple[str, ...], flags: EvalFlags) -> int:
    """Run a suite, or resume it; with --dry-run, show its plan."""
    _refuse(flags)
    suite = _read(source, flags.models)
    cells = load_suite(suite, [*flags.suite_overrides(), *map(parse_override, overrides)])
    if flags.dry_run:
        return _dry_run(suite, cells, flags)
    budgets = {"max_cost": flags.max_cost, "token_budget": flags.token_budget, "max_time": flags.max_time}
    limits = suite.limits.model_copy(update={name: limit for name, limit in budgets.items() if limit is not None})
    options, display = options_of(flags), make_display(flags.display)

    def run(cell: Cell, identity: RunIdentity) -> Outcome:
        return run_locally(identity.spec, options, flags.workers, display, identity)

    def after(number: int, ended: CellOutcome) -> None:
        cell, outcome = ended.cell, ended.outcome
        print_cell(f"{number + 1}/{len(cells)}", cell, outcome, ended.error)
        if outcome is not None:
            export_results(outcome, cell.spec, options, flags.export)

    try:
        outcome = run_suite(cells, limits, options, display, run, after)
        _print(suite, cells, outcome)
    except HoldfastError as error:
        display.result(Result(exit_code=error.exit_code, reason="failed", message=str(error)))
        raise
    display.result(outcome.result)
    return outcome.exit_code


def _refuse(flags: EvalFlags) -> None:
    if flags.baseline_model is not None:
        raise UsageError(
            "--baseline-model is for one eval and one model", remedy="Name each model of a suite with its own -m."
        )
    if flags.force_squash:
        raise UsageError("--force-squash is for configurations of clusters, with --run or --batch")


def _print(suite: Suite, cells: Sequence[Cell], suite_outcome: SuiteOutcome) -> None:
    places = [(cell.eval, cell.target) for cell in cells]
    outcomes = {
        (ended.cell.eval, ended.cell.target): ended.outcome
        for ended in suite_outcome.cells
        if ended.outcome is not None
    }
    print_suite(suite.name, places, outcomes, suite.average)
    finished = sum(ended.exit_code in COMPLETE for ended in suite_outcome.cells)
    print_ending(len(cells) - finished, suite_outcome.reason, command_line())


def _dry_run(suite: Suite, cells: Sequence[Cell], flags: EvalFlags) -> int:
    """Print the plan of all cells, without writing anything."""
    specs = [cell.spec for cell in cells]
    for message in dict.fromkeys(message for spec in specs for message in (*spec.notices, *unseen_code(spec))):
        show_note(message)
    options = options_of(flags)
    print_plan(suite.name, [(cell, *preview_run(cell.spec, options)) for cell in cells], as_json=flags.json)
    return 0
