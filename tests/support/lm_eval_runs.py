"""Results of lm-eval itself, from a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from holdfast.benchmarks.names import OVERLAY
from tests.support.forking import OFFLINE, Forked, start_warm_process
from tests.support.running import ROOT, environment

if TYPE_CHECKING:
    from pathlib import Path


def evaluate_with_lm_eval(place: Path, base_url: str, tasks: list[Any], **options: Any) -> Any:
    """Evaluate `tasks` on the data under `place`/hub; see `lm_eval_oracle` for the tasks and the options."""
    request = {"base_url": base_url, "hub": str(place / "hub"), "tasks": tasks, "limit": None, "include": str(OVERLAY)}
    start_warm_process()  # whose folder holds what lm-eval's packages make of data
    process = Forked(
        [sys.executable, "-m", "tests.support.lm_eval_oracle"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(**OFFLINE),
    )
    with process:
        results, errors = process.communicate(json.dumps({**request, **options}))
    assert process.returncode == 0, errors[-3000:]
    return json.loads(results)
