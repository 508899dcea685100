"""Run a part of a job: `python -m holdfast.cluster.job TASK_DIR --role main|worker`.

A job works from its task's folder alone. The roles `evaluate` and `copy` are child processes of the main job, so that
users' code cannot take the job down.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

from holdfast.cluster.job.context import JobContext, say
from holdfast.errors import HoldfastError
from holdfast.store.home import apply_umask


def main(arguments: list[str] | None = None) -> int:
    """Run the role that the arguments name, and return the exit code."""
    parser = argparse.ArgumentParser(prog="holdfast.cluster.job")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--role", choices=["main", "worker", "evaluate", "copy"], required=True)
    parser.add_argument("--index", type=int)
    parser.add_argument("--base-url", action="append", default=[])
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--run-dir", type=Path)
    options = parser.parse_args(arguments)
    try:
        apply_umask()
        if options.role == "evaluate":
            from holdfast.cluster.job.evaluate import evaluate_task

            return evaluate_task(options.folder, options.base_url, first=options.first, prepared_run=options.run_dir)
        if options.role == "copy":
            from holdfast.cluster.job.evaluate import copy_task

            return copy_task(options.folder, options.run_dir)
        job = JobContext.detect(options.folder, options.role, options.index)
        job.handle_signals()
        job.redirect_output()
        if options.role == "worker":
            from holdfast.cluster.job.worker import run_worker

            return run_worker(job)
        from holdfast.cluster.job.main import run_main

        return run_main(job)
    except HoldfastError as error:
        say(str(error))
        return error.exit_code


if __name__ == "__main__":
    gc.set_threshold(100_000, 50, 1000)  # as in every command: starting makes much and drops little
    code = main()
    gc.freeze()
    sys.exit(code)
