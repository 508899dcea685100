"""A run that has ended handed on, each way in a process of its own: a failure is told, and is none of the run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cluster.job.node import say

if TYPE_CHECKING:
    from holdfast.cluster.job.node import NodeJob
    from holdfast.cluster.remote.invocation import Prepared


def hand_on(job: NodeJob, prepared: Prepared) -> None:
    """Export a run to where the configuration says, and make the copies that the eval file and the command ask for."""
    for destination in job.task.export:
        if destination == "local":  # where the run is already
            continue
        words = _words(destination, job.task.export_config.get(destination, {}))
        command = ["holdfast", "export", prepared.run_dir, "--to", destination, "--if-changed", *words]
        _run(job, command, f"to {destination}")
    if prepared.copies:
        words = ["holdfast.cluster.job.node", job.place.path, "--role", "copy", "--run-dir", prepared.run_dir]
        _run(job, words, "as the eval file and the command ask for")


def _words(destination: str, settings: dict[str, Any]) -> list[str]:
    """Settings of a destination as `holdfast export` takes them; those that only other tools know are left out."""
    from holdfast.spec.load_exports import EXPORTERS, export_schema

    known = export_schema(destination).model_fields if destination in EXPORTERS else {}
    return [f"{key}={json.dumps(value)}" for key, value in settings.items() if key in known and value is not None]


def _run(job: NodeJob, words: list[str], what: str) -> None:
    log = Path(job.place.logs) / "export.log"
    with log.open("ab") as out:
        done = subprocess.run(
            [job.task.python, "-m", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=job.env(job.task.export_env),
            check=False,
        )
    how = "done" if done.returncode == 0 else f"failed with exit code {done.returncode}; see {log}"
    say(f"export {what}: {how}")
