"""Columns of a run that is not finished, from its journals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.data.panels import Conditions
from holdfast.view.facts import LastFailures, output_facts, set_failure, set_output, set_verdicts
from holdfast.view.table import CODES, TrialTable, key_bytes

if TYPE_CHECKING:
    from holdfast.report.run_view import RunView


def read_everything(view: RunView) -> TrialTable:
    """Return the columns of any run, in the order of `RunView.everything`."""
    table = TrialTable(view.graders)
    conditions = Conditions(view.spec)
    root = view.rundir.path
    failures = LastFailures()
    failures.read(view.rundir.journals("errors"))
    for sample, trial, key, ref, _ in view.rows():
        raw_key = key_bytes(key)
        if ref is None:
            assert sample is not None
            row, failure = table.append(sample.id, trial, raw_key), failures.of_target.get(key)
        else:
            facts = output_facts.decode(ref.line.read())
            row = table.append(facts.sample, facts.trial, raw_key)
            set_output(table, row, facts, ref.line, str(ref.line.path.relative_to(root)))
            panel = None if sample is None or not sample.fields else conditions.panel_for(sample.fields)
            failure = failures.of_graders.get(key)
            set_verdicts(table, row, view.judge(key, ref, panel)[1], failure)
            if table["status"][row] != CODES["error"]:
                failure = None
        set_failure(table, row, failure, "" if failure is None else str(failure.path.relative_to(root)))
    return table
