"""`holdfast work`: join a run that is divided among workers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING

import click

from holdfast.apps.cli.errors import command_line
from holdfast.apps.cli.flags import Concurrency, display_option, lock_timeout, no_wait_option
from holdfast.apps.cli.running import export_results
from holdfast.display.displays import make_display
from holdfast.display.terminal import echo, echo_json
from holdfast.engine.attached import Ended, follow_input
from holdfast.engine.session import Options
from holdfast.engine.signals import Signals
from holdfast.engine.worker import new_worker_id, run_worker, shared_eval
from holdfast.errors import Exit, Fault, Interrupted, UsageError
from holdfast.report.table import print_outcome
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from holdfast.engine.admission import Reason


@click.command("work")
@click.argument("run", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--worker",
    metavar="ID",
    help="Name of this worker; the same name continues its work [default: host and process id].",
)
@click.option(
    "--concurrency",
    type=Concurrency(),
    help="Maximum number of requests in flight, or auto [default: as in the eval].",
)
@click.option("--base-url", metavar="URL", multiple=True, help="URL of the model server as seen from here. Repeatable.")
@click.option(
    "--wait", is_flag=True, help="Wait if another process needs the run to itself, instead of exiting with code 4."
)
@no_wait_option
@click.option("--attached", is_flag=True, hidden=True, help="Stop when standard input ends; report the reason as JSON.")
@display_option
def command(
    run: Path,
    worker: str | None,
    concurrency: int | str | None,
    base_url: tuple[str, ...],
    wait: bool,
    no_wait: bool,
    attached: bool,
    display: str | None,
) -> int:
    """Join the run in the directory RUN, which `holdfast eval --workers` has started, as one more worker.

    Any number of workers can join at any time, on any machine that sees the directory. When all trials are done, one
    worker writes the report and exits like `holdfast eval`. The others wait for the report (and write it if that
    worker dies) and exit with 0, or with 3 if there is no report.
    """
    options = Options(wait=lock_timeout(wait=wait), wait_for_batches=not no_wait, runs_dir=run.resolve().parent.parent)
    if attached:
        follow_input(options)
    rundir, worker = RunDir(run.resolve()), worker or new_worker_id()
    shared = None
    with suppress(UsageError):  # `run_worker` raises it too, unless the run is finished
        shared = shared_eval(rundir)
    try:
        outcome = run_worker(rundir, worker, options, make_display(display), concurrency, base_url)
    except Fault as fault:
        if not attached:
            raise
        _report_ending(fault)  # for the process that started the workers, which reports it once
        return fault.exit_code
    except KeyboardInterrupt:
        if not attached:
            raise
        return 128 + (Signals.received() or SIGINT)  # that process says how to resume
    if attached:
        _report_ending(outcome.reason)
    elif outcome.finisher is not None:
        ending = "exited without writing the report; see its log, then run this command again"
        if outcome.exit_code == Exit.FINISHED:
            ending = "wrote the report" if rundir.finished else "left the outputs without grades, as requested"
        echo(f"{worker}: no work left; {outcome.finisher} {ending}")
    else:
        interrupted = isinstance(outcome.reason, Interrupted)
        print_outcome(outcome, command_line() if shared is None or interrupted else shared[1].command)
        if shared is not None and not outcome.already:
            spec, claim_round, _ = shared
            export_results(outcome, spec, claim_round)
    return outcome.exit_code


def _report_ending(reason: Reason | None) -> None:
    import msgspec

    echo_json(msgspec.json.encode(Ended.of(reason)))
