"""`holdfast view`: see runs in the browser."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import click

from holdfast.apps.cli.errors import show_note, show_warning
from holdfast.apps.cli.flags import complete_runs, runs_dir_option, runs_directory
from holdfast.apps.cli.subjects import fetch_runs
from holdfast.apps.cluster.remote.registry import InvocationRegistry
from holdfast.apps.view.guard import AccessRules, read_key, write_private
from holdfast.apps.view.server import is_loopback, listen, listen_on_socket, names_of, serve
from holdfast.apps.view.site import Site, archive_stamp
from holdfast.display.terminal import echo
from holdfast.errors import HoldfastError, UsageError
from holdfast.store.catalog import find_runs
from holdfast.store.home import home_directory
from holdfast.store.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Mapping

_PORT = 4653
_FOLLOW_SECONDS = 10.0
"""seconds between two looks at an unfinished run on a cluster"""


@click.command("view")
@click.argument("runs", nargs=-1, metavar="[RUN]…", shell_complete=complete_runs)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=_PORT,
    metavar="N",
    help=f"Port to listen on, or the next free one [default: {_PORT}].",
)
@click.option(
    "--socket",
    "socket_path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PATH",
    help="Listen on a Unix socket that only you may open, instead of a port.",
)
@click.option("--no-open", is_flag=True, help="Do not open the browser.")
@click.option("--host", default="127.0.0.1", metavar="ADDR", help="Address to listen on [default: 127.0.0.1].")
@click.option("--allow-network", is_flag=True, help="With --host, let other machines connect, unencrypted.")
@runs_dir_option
def command(
    runs: tuple[str, ...],
    port: int,
    socket_path: Path | None,
    no_open: bool,
    host: str,
    allow_network: bool,
    runs_dir: Path | None,
) -> int:
    """See runs in the browser: all of them, one RUN (path or id), or several RUNs compared.

    RUN may also be an invocation or HOST:PATH: its runs are copied from the cluster, and followed until they are
    finished.

    The server only reads, and follows runs that are being written. It answers only on this machine, and only with
    the key in the address that it prints. Ctrl-C ends it.
    """
    if not is_loopback(host) and not allow_network:
        raise UsageError(
            f"--host {host} would let other machines connect: whoever sees the traffic sees the key and all runs",
            remedy="Leave --host out and forward the port with ssh -L, or give --allow-network as well.",
        )
    root = runs_directory(runs_dir)
    named = _named_runs(runs, root)
    if not named and not _has_something(root):
        raise UsageError(
            f"no runs in {root}",
            remedy="Give the directory that holds the runs as --runs-dir, or begin a run with `holdfast eval`.",
        )
    home = home_directory()
    key = read_key(home)
    if socket_path is not None:
        listener = listen_on_socket(socket_path)
        rules = AccessRules(key)
    else:
        listener = listen(host, port)
        if (bound := listener.getsockname()[1]) != port:
            show_note(f"port {port} is in use; this is {bound}")
        names = frozenset() if is_loopback(host) else names_of(host)
        rules = AccessRules(key, AccessRules.names | names, bound, any_address=host in ("0.0.0.0", "::"))  # noqa: S104 - compared
    if any(_is_unfinished_copy(run, home) for run in named.values()):
        threading.Thread(target=_follow_copies, args=(runs, root, named, home), daemon=True).start()
    page = f"/compare/{'/'.join(named)}" if len(named) > 1 else f"/run/{next(iter(named))}" if named else "/"

    def ready() -> None:
        address = _address(rules, host, page)
        echo(f"Showing {', '.join(str(run.path) for run in named.values()) or root} at\n  {address}")
        for line in _forwarding(rules, socket_path, os.environ):
            echo(line)
        if socket_path is None and not no_open and _can_open(os.environ):
            _open_browser(address, home)

    try:
        asyncio.run(serve(Site(root, home, named), rules, listener, ready))
    finally:
        if socket_path is not None:
            socket_path.unlink(missing_ok=True)
    sys.stdout.flush()
    os._exit(0)  # a thread may still be reading a large run, or waiting for a cluster; nothing would be lost


def _named_runs(names: tuple[str, ...], root: Path) -> dict[str, RunDir]:
    named: dict[str, RunDir] = {}
    for name, path in [(each, path) for each in names for path in fetch_runs(each, root)]:
        rundir = RunDir(path)
        manifest = rundir.read_manifest()
        if manifest is None:
            raise UsageError(f"{rundir.path} is not a run directory: it has no manifest.json")
        run = manifest.id + archive_stamp(rundir)
        if run in named:
            raise UsageError(f"{name} is named twice, or is a copy: its id is {run}, as of {named[run].path}")
        named[run] = rundir
    return named


def _is_unfinished_copy(rundir: RunDir, home: Path) -> bool:
    return rundir.path.is_relative_to(home) and not rundir.finished


def _follow_copies(names: tuple[str, ...], root: Path, named: Mapping[str, RunDir], home: Path) -> None:
    """Bring copies of runs on clusters up to date until they are finished. A fetch may be cut off at any moment."""
    last = ""
    while any(_is_unfinished_copy(run, home) for run in named.values()):
        time.sleep(_FOLLOW_SECONDS)
        try:
            for name in names:
                fetch_runs(name, root)
            last = ""
        except HoldfastError as error:  # the cluster cannot be reached; its jobs go on, and so does the viewer
            if error.message != last:
                show_warning(error.message)
            last = error.message


def _has_something(root: Path) -> bool:
    return any(True for _ in find_runs(root)) or bool(InvocationRegistry().all())


def _address(rules: AccessRules, host: str, page: str) -> str:
    name = "127.0.0.1" if host in ("0.0.0.0", "::", "localhost") else f"[{host}]" if ":" in host else host  # noqa: S104
    query = urlencode({"key": rules.key} | ({"to": page} if page != "/" else {}), safe="/")
    return f"http://{name}:{rules.port or _PORT}/open?{query}"


def _forwarding(rules: AccessRules, socket_path: Path | None, variables: Mapping[str, str]) -> list[str]:
    """Return the command that makes the address work on the user's own machine, if that is another one."""
    connection = variables.get("SSH_CONNECTION", "").split()
    if not connection and socket_path is None:
        return []
    server, ssh_port = connection[2:4] if len(connection) == 4 else (os.uname().nodename, "22")
    here = str(socket_path.absolute()) if socket_path is not None else f"127.0.0.1:{rules.port}"
    port = ["-p", ssh_port] if ssh_port != "22" else []
    user = variables.get("USER") or variables.get("LOGNAME")
    command = ["ssh", "-N", *port, "-L", f"{rules.port or _PORT}:{here}", f"{user}@{server}" if user else server]
    return ["Run this on your own machine first:", f"  {shlex.join(command)}"]


def _can_open(variables: Mapping[str, str]) -> bool:
    """Return True if a browser opens on the user's own screen, and not as text in this terminal."""
    if variables.get("SSH_CONNECTION"):
        return False
    return sys.platform == "darwin" or any(variables.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))


def _open_browser(address: str, home: Path) -> None:
    """Open the address through a file: other users can see the arguments of a browser, and the key would be in them."""
    import webbrowser
    from html import escape

    path = home / "view.html"
    link = escape(address, quote=True)
    write_private(
        path,
        '<!doctype html><meta charset="utf-8"><title>Holdfast</title>'
        f'<meta http-equiv="refresh" content="0;url={link}"><p><a href="{link}">Open Holdfast</a></p>\n',
    )
    # Some browsers return only when they are closed.
    threading.Thread(target=webbrowser.open, args=(path.absolute().as_uri(),), daemon=True).start()
