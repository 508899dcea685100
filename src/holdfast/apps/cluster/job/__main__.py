"""Run a job: `python -m holdfast.apps.cluster.job TASK_DIR --role main|worker`. It needs only its task's folder."""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

from holdfast.apps.cluster.job.context import JobContext, say
from holdfast.apps.cluster.job.main import run_main
from holdfast.apps.cluster.job.worker import run_worker
from holdfast.errors import HoldfastError
from holdfast.store.home import apply_umask


def main() -> int:
    """Run the role that the arguments name, and return the exit code."""
    parser = argparse.ArgumentParser(prog="holdfast.apps.cluster.job")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--role", choices=["main", "worker"], required=True)
    parser.add_argument("--index", type=int)
    options = parser.parse_args()
    try:
        apply_umask()
        job = JobContext.detect(options.folder, options.role, options.index)
        job.handle_signals()
        job.redirect_output()
        return run_worker(job) if options.role == "worker" else run_main(job)
    except HoldfastError as error:
        say(str(error))
        return error.exit_code


if __name__ == "__main__":
    gc.set_threshold(100_000, 50, 1000)  # as in every command: starting makes much and drops little
    code = main()
    gc.freeze()
    sys.exit(code)
