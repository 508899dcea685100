"""Run evals for a command: find what the arguments name, run it with a display, print how it ended, and export it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.apps.cli.errors import command_line, show_note, show_warning
from holdfast.apps.cli.flags import load_env_file, lock_timeout, run_name, runs_directory
from holdfast.display.displays import Result, make_display
from holdfast.display.terminal import echo, notes_to
from holdfast.engine.run import run_eval
from holdfast.engine.session import Options, preview_run
from holdfast.engine.user_code import unseen_code
from holdfast.errors import COMPLETE, HoldfastError, UsageError
from holdfast.report.table import print_outcome
from holdfast.spec.fingerprint import running_nothing
from holdfast.spec.formats import find_reader, is_configuration, is_eval, is_suite, load_any, resolve_eval
from holdfast.spec.load import baseline_of, parse_override
from holdfast.spec.plugins import load_reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.apps.cli.eval import EvalFlags
    from holdfast.display.displays import Display
    from holdfast.plan.identity import RunIdentity
    from holdfast.report.outcome import Outcome
    from holdfast.spec.document import Document
    from holdfast.spec.eval import Eval
    from holdfast.store.rundir import RunPolicy

_ELSEWHERE: Final = {
    "suite": "holdfast.apps.cli.suite:suite_command",
    "launch": "holdfast.apps.cli.launch:launch_command",
    "configuration": "holdfast.apps.cluster.config.compose:find_config",
    "workers": "holdfast.engine.local_workers:run_workers",
    "plan": "holdfast.report.preview:print_compiled",
    "exports": "holdfast.report.exports:export_after_run",
    "side by side": "holdfast.report.suite:print_side_by_side",
}
"""what most evals do without"""


def run_evals(arguments: tuple[str, ...], flags: EvalFlags) -> int:
    """Run the evals that the arguments of `holdfast eval` name, and return the exit code."""
    with ExitStack() as stack:
        if flags.dry_run:
            stack.enter_context(running_nothing())
        if flags.display == "json":
            stack.enter_context(notes_to(make_display("json").notice))
        return _eval(arguments, flags)


def _eval(arguments: tuple[str, ...], flags: EvalFlags) -> int:
    """Run one eval, or several as a suite."""
    files = map(Path, (flags.named, *arguments) if flags.named is not None else arguments)
    load_env_file(*(file if file.is_dir() else file.parent for file in files if file.exists()), Path())
    if flags.named is not None:
        return _eval_one(flags.named, arguments, flags)
    evals = [argument for argument in arguments if not _is_override(argument)]
    overrides = tuple(argument for argument in arguments if _is_override(argument))
    if len(evals) > 1:
        return _eval_suite([_find_eval(each) for each in evals], overrides, flags)
    return _eval_one(_find_eval(next(iter(evals), None)), overrides, flags)


def _is_override(argument: str) -> bool:
    """Return True for an override, which may be `~KEY` of a cluster configuration, and False for an eval."""
    return ("=" in argument or argument.startswith("~")) and not Path(argument).exists()


def _eval_one(config: str, overrides: tuple[str, ...], flags: EvalFlags) -> int:
    """Run what one argument names: an eval, a suite file, or a cluster configuration."""
    if flags.run or flags.batch:
        return _launch(config, overrides, flags)
    if flags.named is not None:
        config = str(load_reference(_ELSEWHERE["configuration"])(config, Path(), os.environ))
    document = resolve_eval(config)
    if is_suite(document.data):
        return _eval_suite(document, overrides, flags)
    if is_configuration(document.data) or (flags.named is not None and not is_eval(document.data)):
        return _launch(config, overrides, flags)
    if len(flags.models) > 1:
        return _eval_suite([config], overrides, flags)
    if flags.force_squash:
        raise UsageError("--force-squash is for configurations of clusters, with --run or --batch")
    spec = load_any(document, [*flags.overrides(), *map(parse_override, overrides)])  # KEY=VALUE has the last word
    baseline = baseline_of(spec)
    if flags.dry_run:
        for message in spec.notices:
            show_note(message)
        return _dry_run([spec, *([baseline] if baseline else [])], flags)

    outcome = _run(spec, flags)
    if baseline is None or outcome.interrupted:
        return outcome.exit_code
    baseline_outcome = _run(baseline, flags)
    if outcome.metrics is not None and baseline_outcome.metrics is not None:
        load_reference(_ELSEWHERE["side by side"])(outcome, baseline_outcome)
    return outcome.exit_code if baseline_outcome.exit_code in COMPLETE else baseline_outcome.exit_code


_EVAL_FILES: Final = ("eval.yaml", "eval.yml", "holdfast.yaml")
_DATA: Final = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".json")


def _find_eval(config: str | None) -> str:
    """Return the eval file, given its path, its folder or nothing."""
    if config == "":
        raise UsageError("the name of the eval is empty", remedy="Name an eval file or a task.")
    folder = Path(config or ".")
    if folder.is_dir():
        here = [folder / name for name in _EVAL_FILES if (folder / name).is_file()]
        if here:
            return str(here[0])
        if config is not None and find_reader(folder) is not None:
            return config
        others = sorted(path.name for path in folder.glob("*.y*ml"))
        hint = f"Name one of its files: {', '.join(others[:5])}." if others else "`holdfast init` writes an eval file."
        if config is None:
            raise UsageError("name an eval file: there is no eval.yaml here", remedy=hint)
        raise UsageError(f"{config} is a folder without an eval.yaml", remedy=hint)
    assert config is not None
    if folder.suffix.lower() in _DATA and folder.is_file():
        raise UsageError(
            f"{config} is a dataset, not an eval file",
            remedy=f"Write an eval file with `dataset: {{path: {config}}}`; `holdfast init` writes one to start from.",
        )
    return config


def _eval_suite(suite: Document | list[str], overrides: tuple[str, ...], flags: EvalFlags) -> int:
    """Run a suite file, or the suite that several evals or models stand for."""
    command = _ELSEWHERE["launch" if flags.run or flags.batch else "suite"]
    return int(load_reference(command)(suite, overrides, flags))


def _launch(config: str, overrides: tuple[str, ...], flags: EvalFlags) -> int:
    return int(load_reference(_ELSEWHERE["launch"])(config, overrides, flags))


def options_of(flags: EvalFlags) -> Options:
    """Return the flags that say how to run, which are in no key."""
    return Options(
        runs_dir=runs_directory(flags.runs_dir),
        wait=lock_timeout(wait=flags.wait),
        wait_for_batches=not flags.no_wait,
        command=command_line(),
        **flags.policy,
    )


def _run(spec: Eval, flags: EvalFlags) -> Outcome:
    options = options_of(flags)
    run = partial(run_locally, spec, options, flags.workers)
    return run_and_report(run, flags.display, lambda outcome: export_results(outcome, spec, options, flags.export))


def _dry_run(specs: list[Eval], flags: EvalFlags) -> int:
    """Print the compiled eval and the plan, its baseline's too, without writing anything."""
    for message in dict.fromkeys(message for spec in specs for message in unseen_code(spec)):
        show_note(message)
    options = options_of(flags)
    load_reference(_ELSEWHERE["plan"])([preview_run(spec, options) for spec in specs], as_json=flags.json)
    return 0


def run_and_report(
    run: Callable[[Display], Outcome],
    display_name: str | None,
    after: Callable[[Outcome], None],
    again: str = "Use --fresh to start from scratch.",
) -> Outcome:
    """Run with a display, print how the run ended, and export it; the display gets the result last.

    `after` exports the run. `again` is the hint for a run that is already finished.
    """
    display = make_display(display_name)
    try:
        outcome = run(display)
        print_outcome(outcome, command_line(), again, run_name(outcome.rundir))
        after(outcome)
    except HoldfastError as error:
        display.result(Result(exit_code=error.exit_code, reason="failed", message=str(error)))
        raise
    display.result(outcome.result)
    return outcome


def run_locally(
    spec: Eval, options: Options, workers: int | None, display: Display, identity: RunIdentity | None = None
) -> Outcome:
    """Run an eval on this machine, in this process or in `workers` processes."""
    if workers:
        outcome: Outcome = load_reference(_ELSEWHERE["workers"])(spec, options, workers, display)
        return outcome
    return run_eval(spec, options, display, identity=identity)


def export_results(outcome: Outcome, spec: Eval, policy: RunPolicy, exports: tuple[str, ...] = ()) -> None:
    """Export a run as its eval file and the command ask for; `exports` are names of formats."""
    if policy.log_samples or policy.output_path or exports or spec.exports or spec.live_exports:
        load_reference(_ELSEWHERE["exports"])(
            outcome.rundir,
            spec,
            echo,
            show_warning,
            log_samples=policy.log_samples,
            output_path=Path(policy.output_path) if policy.output_path else None,
            exports=() if outcome.interrupted else exports,
        )
