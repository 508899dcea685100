"""`holdfast view`: see runs in the browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from holdfast.cli.completion import complete_runs
from holdfast.cli.runs import find_run, runs_dir_option, runs_directory

if TYPE_CHECKING:
    from pathlib import Path


@click.command("view")
@click.argument("runs", nargs=-1, metavar="[RUN]…", shell_complete=complete_runs)
@click.option("--port", type=click.IntRange(1, 65535), default=4653, metavar="N", help="Port [default: 4653].")
@runs_dir_option
def command(runs: tuple[str, ...], port: int, runs_dir: Path | None) -> int:
    """See runs in the browser."""
    from aiohttp import web

    from holdfast.store.home import home_directory
    from holdfast.view.server import application
    from holdfast.view.site import Site

    root = runs_directory(runs_dir)
    site = Site(root, home_directory(), [find_run(run, root) for run in runs])
    web.run_app(application(site), host="127.0.0.1", port=port)
    return 0
