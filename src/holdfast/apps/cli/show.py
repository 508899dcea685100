"""`holdfast show`: a run, its failures, or one conversation, in the terminal."""

from __future__ import annotations

import shlex
import sys
from itertools import islice
from typing import TYPE_CHECKING, Final

import click

from holdfast.apps.cli.flags import Positive, complete_runs, find_run, run_name, runs_dir_option, runs_directory
from holdfast.apps.cli.subjects import open_run
from holdfast.display.grid import make_console, print_paged
from holdfast.display.terminal import echo_json, printable
from holdfast.errors import HoldfastError, UsageError
from holdfast.plan.changes import format_count
from holdfast.report.run_view import RunView
from holdfast.report.timeline import trial_timeline
from holdfast.report.transcript import (
    Chosen,
    Criteria,
    Writer,
    draw_failure,
    draw_run,
    draw_timeline,
    find_graders,
    find_sample,
    sample_ids,
)
from holdfast.store.catalog import summarize_run
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from rich.console import RenderableType

    from holdfast.report.timeline import Timeline

_SHOWN = 5
"""failures in the summary of a run"""
_OFFERED_SAMPLES: Final = 500
"""for completion, at once"""


def _complete_samples(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Offer the ids of the samples of the run that was named before."""
    try:
        view = RunView(RunDir(find_run(ctx.params.get("run") or "", runs_directory(ctx.params.get("runs_dir")))))
        matches = (sample for sample in sample_ids(view) if sample.startswith(incomplete))
        return list(islice(matches, _OFFERED_SAMPLES))
    except (HoldfastError, OSError):
        return []  # there is no such run, which the command itself will say


@click.command("show")
@click.argument("run", shell_complete=complete_runs)
@click.argument("sample", required=False, metavar="[SAMPLE[/TRIAL]]", shell_complete=_complete_samples)
@click.option("--failed", is_flag=True, help="Show all trials that failed.")
@click.option("--errors", is_flag=True, help="Show all trials that have errors or are uncertain.")
@click.option(
    "--answer",
    type=click.Choice(["whole", "cut", "filtered", "refused", "empty", "paused", "limited", "exited"]),
    help="Show all trials with an answer of this class.",
)
@click.option("--grader", metavar="NAME", help="Only trials that this grader failed, or could not grade.")
@click.option("-n", "limit", type=Positive(), metavar="N", help="Only the first N trials [default: all].")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with the whole conversations.")
@runs_dir_option
def command(
    run: str,
    sample: str | None,
    failed: bool,
    errors: bool,
    answer: str | None,
    grader: str | None,
    limit: int | None,
    as_json: bool,
    runs_dir: Path | None,
) -> int:
    """Show RUN: its numbers and what failed. With SAMPLE, show the conversation, with its checkpoints and verdicts.

    RUN is a path, an id, an invocation or HOST:PATH. SAMPLE is the id of a sample or the beginning of it; /TRIAL
    chooses one of several trials.

    \b
    holdfast show 17ff --failed
    holdfast show 17ff q42

    On a terminal, long output goes through $PAGER.
    """
    view = open_run(run, runs_directory(runs_dir))
    if sample is not None:
        if failed or errors or answer or grader or limit:
            raise UsageError(
                "--failed, --errors, --answer, --grader and -n are for a whole run", remedy="Leave out the sample."
            )
        timelines = list(_timelines(view, sample))
        return _print_json(timelines) if as_json else _print_timelines(timelines)
    options = (("failed", failed), ("error", errors), ("uncertain", errors))
    statuses = tuple(status for status, chosen in options if chosen)
    graders = find_graders(view, grader) if grader is not None else ()
    every = ("passed", "failed", "skipped", "error", "ungraded") if answer and not graders else Criteria.statuses
    chosen = Chosen(view, Criteria(statuses or every, graders, answer))
    everything = bool(statuses or graders or answer)
    if as_json:
        return _print_run_json(view, chosen, limit)
    print_paged(_draw_run(view, chosen, limit or (None if everything else _SHOWN), whole=not everything))
    return 0


def _timelines(view: RunView, name: str) -> Iterator[Timeline]:
    """Yield all trials of a sample, or the named one."""
    sample, number = find_sample(view, name)
    for each in range(1, view.manifest.trials + 1) if number is None else (number,):
        if (trial := view.trial(sample, each)) is not None:
            yield trial_timeline(view, trial)


def _print_timelines(timelines: Iterable[Timeline]) -> int:
    from rich.text import Text

    def pieces() -> Iterator[RenderableType]:
        write = Writer(terminal=sys.stdout.isatty())
        for number, timeline in enumerate(timelines):
            yield from [Text()] if number else []
            yield from draw_timeline(timeline, write)

    print_paged(pieces())
    return 0


def _draw_run(view: RunView, chosen: Chosen, most: int | None, *, whole: bool) -> Iterator[RenderableType]:
    """Draw the wanted trials; for the `whole` run, draw its numbers and only the first few trials."""
    from rich.text import Text

    write = Writer(terminal=sys.stdout.isatty())
    name = run_name(view.rundir)
    if whole:
        yield from draw_run(view, chosen, make_console().width)
    else:
        manifest = view.manifest
        counted = f"{len(chosen):,} of {format_count(chosen.counts.total(), 'trial')}"
        yield Text(printable(f"{counted} · {manifest.name} · {manifest.target} · {manifest.id}", ""), "bold")
    last = None
    for trial in chosen.trials(most):
        last = trial_timeline(view, trial, contents=False)
        yield from draw_failure(last, write, lines=2 if whole else 10)
    if (more := 0 if most is None else len(chosen) - most) > 0:
        all_of_them = f": holdfast show {name} {'--failed' if chosen.counts['failed'] else '--errors'}" if whole else ""
        yield Text(f"\n… and {format_count(more, 'trial')} more{all_of_them}")
    if last is not None:
        yield Text(f"a whole conversation: holdfast show {name} {shlex.quote(printable(last.sample, ''))}")


def _print_run_json(view: RunView, chosen: Chosen, most: int | None) -> int:
    """Print the run with the wanted trials, as they are read."""
    import msgspec

    metrics = None if view.metrics is None else view.metrics.to_dict()
    gate = view.rundir.read_gate()
    head = {"run": summarize_run(view.rundir), "counts": dict(chosen.counts), "metrics": metrics, "gate": gate}
    echo_json(msgspec.json.encode(head)[:-1] + b',"trials":[', nl=False)
    for number, trial in enumerate(chosen.trials(most)):
        echo_json((b",\n" if number else b"\n") + msgspec.json.encode(trial_timeline(view, trial)), nl=False)
    echo_json("\n]}")
    return 0


def _print_json(timelines: list[Timeline]) -> int:
    import msgspec

    echo_json(msgspec.json.encode(timelines))
    return 0
