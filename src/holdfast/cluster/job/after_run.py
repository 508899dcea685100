"""Export a finished run. Each export runs in its own process; a failed export is reported but does not fail the run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cluster.job.context import say
from holdfast.cluster.remote.executor import job_command
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from holdfast.cluster.job.context import JobContext
    from holdfast.cluster.remote.invocation import Prepared


def export_run(job: JobContext, prepared: Prepared) -> list[str]:
    """Export a run to the configuration's destinations, and write the copies that eval file and command ask for.

    Returns the failures, and what was only written to disk.
    """
    failures: list[str | None] = []
    """of each export, None if it worked"""
    for destination in job.task.export:
        if destination == "local":  # where the run is already
            continue
        settings = _settings(destination, job.task.export_config.get(destination, {}))
        export = ["holdfast", "export", prepared.run_dir, "--to", destination, "--if-changed", *settings]
        failures.append(_run(job, [job.task.python, "-m", *export], f"to {destination}"))
    if prepared.copies:
        command = [*job_command(job.task, job.place, "copy"), "--run-dir", prepared.run_dir]
        failures.append(_run(job, command, "as the eval file and the command ask for"))
    if not failures:
        return []
    from holdfast.export.registry import offline_exports

    offline = offline_exports(RunDir(Path(prepared.run_dir)))
    for sentence in offline:
        say(sentence)
    return [*(failure for failure in failures if failure), *offline]


def _settings(destination: str, values: dict[str, Any]) -> list[str]:
    """Return the settings of a destination as `holdfast export` takes them, without those of other tools."""
    from holdfast.spec.exports import EXPORTERS, export_schema

    fields = export_schema(destination).model_fields if destination in EXPORTERS else {}
    return [f"{key}={json.dumps(value)}" for key, value in values.items() if key in fields and value is not None]


def _run(job: JobContext, command: list[str], what: str) -> str | None:
    """Run an export; return its failure, if it failed."""
    log = Path(job.place.logs) / "export.log"
    with log.open("ab") as output:
        process = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=job.env(job.task.export_env),
            check=False,
        )
    if process.returncode == 0:
        say(f"export {what}: done")
        return None
    failure = f"export {what} failed with exit code {process.returncode}; see {log}"
    say(failure)
    return failure
