"""A run as a JUnit report, which CI systems read: a test suite per run, a test case per trial.

A failed trial is a failure with the graders' feedback, a trial without a verdict is an error, and a trial that no
grader applies to is skipped. Each condition of the run's gate is a test case, too.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape, quoteattr

from holdfast import GradedTrial
from holdfast.store.files import Spool, replacing

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast import Pending, RunView
    from holdfast.store.metrics import Check

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""characters that XML cannot hold, not even as references"""

_COUNTED = {"failed": "failures", "error": "errors", "skipped": "skipped"}


def write_junit(view: RunView, folder: Path) -> list[Path]:
    """Write `junit.xml`."""
    path = folder / "junit.xml"
    manifest = view.manifest
    classname = f"{manifest.name}.{manifest.target}"
    counts: Counter[str] = Counter()
    seconds = 0.0
    gate = view.rundir.read_gate()
    with Spool() as cases, replacing(path) as file:
        for check in gate.checks if gate is not None else ():
            cases.write(_gate_case(check, f"{classname}.gate").encode())
            counts["passed" if check.passed else "failures"] += 1
        for trial in view.everything():
            status, text, took = _case(trial, classname, several=manifest.trials > 1)
            cases.write(text.encode())
            counts[_COUNTED.get(status, "passed")] += 1
            seconds += took
        numbers: dict[str, Any] = {"tests": counts.total(), "failures": counts["failures"], "errors": counts["errors"]}
        numbers |= {"skipped": counts["skipped"], "time": f"{seconds:.3f}"}
        suite = {"name": f"{manifest.name} · {manifest.target}", **numbers, "timestamp": manifest.created.rstrip("Z")}
        file.write(
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f"<testsuites{_attributes({'name': 'holdfast', **numbers})}>\n"
            f"<testsuite{_attributes(suite)}>\n{_properties(view)}".encode()
        )
        cases.seek(0)
        shutil.copyfileobj(cases, file)
        file.write(b"</testsuite>\n</testsuites>\n")
    return [path]


def _case(trial: GradedTrial | Pending, classname: str, *, several: bool) -> tuple[str, str, float]:
    """Return a trial's status, its test case, and its duration."""
    if not isinstance(trial, GradedTrial):
        case = {"classname": classname, "name": _name(trial.sample, trial.trial, several=several)}
        message = trial.error or "not run yet"
        return "error", f"<testcase{_attributes(case)}>{_element('error', message, '')}</testcase>\n", 0.0
    output = trial.output
    inside = ""
    if trial.status in ("failed", "error"):
        to_blame = [grade for grade in trial.grades if grade.status == trial.status]
        reasons = [f"{grade.grader}: {grade.feedback or grade.status}" for grade in to_blame]
        kind = "failure" if trial.status == "failed" else "error"
        inside = _element(kind, reasons[0] if reasons else "not graded yet", "\n".join(reasons))
    elif trial.status == "skipped":
        inside = _element("skipped", "no grader gave it a score", "")
    inside += f"<system-out>{_text(output.output)}</system-out>"
    case = {
        "classname": classname,
        "name": _name(output.sample, output.trial, several=several),
        "time": f"{output.timing.seconds:.3f}",
    }
    return trial.status, f"<testcase{_attributes(case)}>{inside}</testcase>\n", output.timing.seconds


def _gate_case(check: Check, classname: str) -> str:
    case = {"classname": classname, "name": check.what}
    inside = f"<system-out>{_text(check.message)}</system-out>"
    if not check.passed:
        inside = _element("failure", f"gate failed: {check.message}", "")
    return f"<testcase{_attributes(case)}>{inside}</testcase>\n"


def _name(sample: str, trial: int, *, several: bool) -> str:
    return f"{sample} [trial {trial}]" if several else sample


def _properties(view: RunView) -> str:
    metrics = view.metrics
    properties: dict[str, Any] = {"run": view.manifest.id, "finished": str(metrics is not None).lower()}
    if metrics is not None:
        properties |= {**metrics.shares, **{f"answers.{name}": n for name, n in metrics.to_dict()["answers"].items()}}
        for name, values in metrics.graders.items():
            properties |= {f"{name}.{key}": getattr(values, key) for key in ("score", "low", "high")}
        for field, value, name, values in metrics.value_scores():
            place = f"by.{field}.{value}.{name}"
            properties |= {f"{place}.{key}": getattr(values, key) for key in ("score", "low", "high")}
    if (gate := view.rundir.read_gate()) is not None:
        properties["gate"] = "passed" if gate.passed else "failed"
    lines = (
        f"<property{_attributes({'name': name, 'value': value})}/>\n"
        for name, value in properties.items()
        if value is not None
    )
    return f"<properties>\n{''.join(lines)}</properties>\n"


def _element(name: str, message: str, text: str) -> str:
    return f"<{name}{_attributes({'message': message})}>{_text(text)}</{name}>"


def _attributes(values: dict[str, Any]) -> str:
    return "".join(f" {name}={quoteattr(_allowed(str(value)))}" for name, value in values.items())


def _text(value: str) -> str:
    return escape(_allowed(value), {"\r": "&#13;"})  # a bare one would be read as a newline


def _allowed(value: str) -> str:
    """Replace characters that XML cannot hold by escapes that can be seen."""
    return _NO_XML.sub(lambda match: f"\\x{ord(match[0]):02x}", value)
