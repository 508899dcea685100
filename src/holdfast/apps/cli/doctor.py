"""`holdfast doctor`: whether a profile works."""

from __future__ import annotations

import os
from pathlib import Path

import click

from holdfast.apps.cli.flags import complete_profiles
from holdfast.apps.cluster.remote.doctor import diagnose
from holdfast.display.terminal import echo, echo_json
from holdfast.errors import Exit


@click.command("doctor")
@click.argument("profile", shell_complete=complete_profiles)
@click.option("--no-job", is_flag=True, help="Skip the checks that need a job on a compute node.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(profile: str, no_job: bool, as_json: bool) -> int:
    """Check that PROFILE of env.toml works, with one line per check and a hint where one fails.

    The exit code is 0 if nothing failed, else 1. No files are left on the cluster.
    """
    checks = []
    for check in diagnose(profile, Path.cwd(), os.environ, job=not no_job):
        checks.append(check)
        if not as_json:
            echo(str(check))
    if as_json:
        import msgspec

        echo_json(msgspec.json.format(msgspec.json.encode(checks)))
    return Exit.GATE_FAILED if any(check.state == "failed" for check in checks) else Exit.FINISHED
