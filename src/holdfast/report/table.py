"""What a person sees at the end of a command."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.display.format import dollars, duration, share
from holdfast.errors import BudgetReached, Fault, Interrupted
from holdfast.graders.build import grader_places
from holdfast.plan.changes import counted
from holdfast.report.idle import without_rows
from holdfast.report.preview import preview
from holdfast.spec.secrets import without_secrets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.engine.run import Outcome
    from holdfast.engine.setup import Identified
    from holdfast.plan.plan import Plan
    from holdfast.store.rundir import RunDir


def _console() -> Console:
    # Names and paths are the users': square brackets and colons in them mean themselves.
    return Console(
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=not sys.stdout.isatty(),
        width=None if sys.stdout.isatty() else 120,
    )


def print_outcome(outcome: Outcome, command: str, anew: str = "Start anew with --fresh.") -> None:
    """The numbers of a finished run; of an unfinished one, what is left and how to go on."""
    console = _console()
    if outcome.metrics is not None:
        if outcome.already:
            console.print(f"This run is already finished; nothing was run. {anew}")
            if outcome.metrics["coverage"] < 1:
                console.print("Some of its trials have errors, which were accepted: --retry-failed takes them up.")
        _print_metrics(console, outcome.metrics)
        for missed in outcome.missed_gates:
            console.print(Text(f"gate not met: {missed}", style="bold red"))
    else:
        _print_unfinished(console, outcome, command)
    console.print(f"run: {outcome.rundir.path}", soft_wrap=True)


def _print_metrics(console: Console, metrics: dict[str, Any], *, so_far: bool = False) -> None:
    title = f"{metrics['eval']} · {metrics['target']}{' · incomplete' if so_far else ''}"
    if metrics["metrics"]:
        table = Table(title=title, title_justify="left", title_style="bold")
        # What looks at no row is said below the table; where verdicts are missing, errors are among them.
        rows = {name: values for name, values in metrics["metrics"].items() if values.get("rows") != 0}
        kinds = ("not_reached", "missing" if so_far else "errors")
        extra = [key for key in kinds if any(values.get(key) for values in rows.values())]
        ks = sorted({1, metrics["trials"] // 2 or 1, metrics["trials"]}) if metrics["trials"] > 1 else []
        more = [key.replace("_", " ") for key in extra]
        for column in ("grader", "score", "95 % interval", "passed", "graded", *more, *(f"pass@{k}" for k in ks)):
            table.add_column(column, justify="left" if column == "grader" else "right")
        if len(rows) > 1:
            rows["overall"] = metrics["overall"]
        for name, values in rows.items():
            known = values["low"] is not None
            table.add_row(
                name,
                share(values["score"]),
                f"{values['low']:.3f} – {values['high']:.3f}" if known else "–",
                f"{values['passed']:,}",
                f"{values['n']:,}",
                *(f"{values.get(key) or 0:,}" for key in extra),
                *(share(values.get(f"pass@{k}")) for k in ks),
            )
        console.print(table)
    else:
        console.print(Text(title, style="bold"))
    usage, judges = metrics["usage"], metrics["judge_usage"]
    costs = [part["cost"] for part in (usage, judges)]
    counts = [part[key] for part in (usage, judges) for key in ("input_tokens", "output_tokens")]
    facts = [
        f"coverage {metrics['coverage']:.1%} of {counted(metrics['total'], 'trial')}",
        "tokens unknown" if None in counts else f"{sum(counts):,} tokens",
        "cost unknown" if None in costs else dollars(sum(costs)),
        duration(metrics["timing"]["seconds"]),
    ]
    console.print(" · ".join(facts))
    for notice in metrics.get("notices", ()):
        console.print(Text(f"note: {notice}", style="yellow"), soft_wrap=True)


def print_side_by_side(first: Outcome, second: Outcome) -> None:
    """Two finished runs of one eval, grader by grader, with the paired difference. They are never averaged."""
    from holdfast.report.compare import read_finished
    from holdfast.report.paired import paired_difference

    assert first.metrics is not None and second.metrics is not None
    ours, theirs = (read_finished(outcome.rundir).scores for outcome in (first, second))
    names = [outcome.metrics["target"] for outcome in (first, second) if outcome.metrics]
    table = Table(title="side by side", title_justify="left", title_style="bold")
    for column in ("grader", names[0], f"{names[1]} (baseline)", "difference", "95 % interval", "samples"):
        table.add_column(column, justify="left" if column == "grader" else "right")
    for grader in first.metrics["metrics"]:
        gap = paired_difference(ours.get(grader, {}), theirs.get(grader, {}))
        if gap is None:
            continue
        known = gap.low is not None and gap.high is not None
        table.add_row(
            grader,
            share(first.metrics["metrics"][grader]["score"]),
            share(second.metrics["metrics"][grader]["score"]),
            f"{gap.mean:+.3f}",
            f"{gap.low:+.3f} – {gap.high:+.3f}" if known else "–",
            f"{gap.samples:,}",
        )
    _console().print(table)


def _print_unfinished(console: Console, outcome: Outcome, command: str) -> None:
    left, reason = outcome.plan, outcome.reason
    if outcome.so_far is not None:
        _print_metrics(console, outcome.so_far, so_far=True)
        console.print(_missing(outcome.so_far), soft_wrap=True)
    if isinstance(reason, Fault):
        console.print(Text(f"stopped: {reason}", style="bold red"))
    elif isinstance(reason, BudgetReached):
        console.print(Text(f"{reason.message}. {reason.remedy}", style="bold yellow"))
    elif isinstance(reason, Interrupted):
        console.print(Text("interrupted; everything that finished is on disk", style="bold yellow"))
    done = left.total - left.to_run
    ungraded = f", {left.to_grade:,} of them without all their grades" if left.to_grade else ""
    console.print(f"{done:,} of {left.total:,} trials have an output{ungraded}")
    if outcome.skipped_graders and left.to_run == 0:
        console.print("Graders were skipped: the same command without --skip-graders grades these outputs.")
        return
    if outcome.grade_only and left.to_run:
        lack = "trial has" if left.to_run == 1 else "trials have"
        console.print(f"{left.to_run:,} {lack} no output yet; `holdfast eval` runs them. Grading never does.")
        if reason is None and not left.to_grade:
            return
    if reason is None:
        own, *workers = outcome.rundir.journals("errors")
        errors = own if own.exists() or not workers else outcome.rundir.workers / "*" / own.name
        pending = left.to_grade + (0 if outcome.grade_only else left.to_run)
        said = "trial has errors and stays pending" if pending == 1 else "trials have errors and stay pending"
        console.print(f"{pending:,} {said}; why: {errors}", soft_wrap=True)
        console.print("Go on (only they are tried again), or add --accept-errors to finish without them:")
    else:
        console.print("Go on with:")
    console.print(f"  {command}", soft_wrap=True)


def _missing(so_far: dict[str, Any]) -> Text:
    """Whose verdicts the numbers of an unfinished run are without, the most first."""
    counts = {name: values["missing"] for name, values in so_far["metrics"].items() if values["missing"]}
    most = sorted(counts, key=lambda name: -counts[name])
    named = ", ".join(f"{counts[name]:,} of `{name}`" for name in most[:5])
    more = f" and some of {counted(len(most) - 5, 'other grader')}" if len(most) > 5 else ""
    what = f"grades are missing ({named}{more})" if named else "trials are missing"
    said = f"incomplete: {what}; these numbers are over the grades there are"
    return Text(said, style="bold yellow")


def print_compiled(planned: Sequence[tuple[Identified, RunDir, Plan]], *, as_json: bool) -> None:
    """The eval as it was understood, and what a run would do: the eval's own, then its baseline's if it has one."""
    if as_json:
        said, *beside = [_as_json(*each) for each in planned]
        sys.stdout.write(msgspec.json.encode({**said, **({"baseline": beside[0]} if beside else {})}).decode() + "\n")
        return
    from io import StringIO

    from ruamel.yaml import YAML

    yaml, text = YAML(), StringIO()
    yaml.dump(without_secrets(planned[0][0].spec.document.data), text)
    console = _console()
    console.print(text.getvalue().rstrip(), markup=False, soft_wrap=True)
    console.print()
    for (_, rundir, plan), what in zip(planned, ("run", "baseline"), strict=False):
        console.print(f"{what}: {rundir.path}{' (finished)' if rundir.finished else ''}", soft_wrap=True)
        console.print(str(plan), soft_wrap=True)
    for notice in _notices(planned[0][0]):
        console.print(Text(f"note: {notice}", style="yellow"), soft_wrap=True)


def _notices(found: Identified) -> list[str]:
    return without_rows(found.spec, grader_places(found.spec), found.survey.panels)


def _as_json(found: Identified, rundir: RunDir, plan: Plan) -> dict[str, Any]:
    return {
        "run": str(rundir.path),
        "already_finished": rundir.finished,
        **{name: getattr(plan, name) for name in ("total", "finished", "reused", "to_grade", "to_run")},
        "lenders": dict(plan.lenders),
        "reasons": plan.reasons,
        "notices": _notices(found),
        "preview": preview(found, plan).as_dict(),
        "eval": without_secrets(found.spec.document.data),
    }
