"""`holdfast clean`: remove what no run on a cluster needs."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast.apps.cli.flags import complete_profiles
from holdfast.apps.cluster.config.profiles import load_profile
from holdfast.apps.cluster.remote.transport import connect
from holdfast.apps.cluster.watch.cleanup import find_unneeded, remove, remove_invocation
from holdfast.apps.cluster.watch.find import Subject, find
from holdfast.apps.cluster.watch.status import read_files
from holdfast.display.format import byte_count
from holdfast.display.terminal import echo
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.apps.cluster.remote.transport import Transport


@click.command("clean")
@click.argument("what", metavar="PROFILE|ID", shell_complete=complete_profiles)
@click.option("--dry-run", "-d", is_flag=True, help="Show what would be removed, and remove nothing.")
def command(what: str, dry_run: bool) -> int:
    """Remove what no run needs from the remote_job_dir of PROFILE, or of an invocation that is over.

    These are sent files, environments and images that no unfinished invocation names and nothing has used for a day,
    and the secrets of finished invocations. With ID, the scripts, logs and secrets of that invocation are removed too,
    and its id is forgotten. Runs stay.
    """
    if "/" in what or (re.fullmatch(r"[0-9a-f]{1,16}", what) and not _is_profile(what)):
        subject = find(what)
        if not isinstance(subject, Subject) or subject.task is not None:
            raise UsageError(
                f"{what} is not an invocation", remedy="Name a profile of env.toml, or an invocation's id."
            )
        transport = subject.transport
        base = read_files(transport, subject.directory).invocation.base if dry_run else remove_invocation(subject)
        echo(f"{'would remove' if dry_run else 'removed'} {subject.directory}")
    else:
        transport, base = _connect(what)
    entries = find_unneeded(transport, base)
    if not dry_run:
        remove(transport, base, entries)
    sizes: Counter[str] = Counter()
    for entry in entries:
        sizes[str(Path(entry.path).parent) if "secrets.env" not in entry.path else "secrets"] += entry.kilobytes
        if dry_run:
            echo(f"would remove {base}/{entry.path}  {byte_count(entry.kilobytes * 1024)}")
    for kind, kilobytes in sizes.items():
        if not dry_run:
            echo(f"removed {byte_count(kilobytes * 1024)} of {kind}")
    if not entries:
        echo(f"{base}: nothing that no run needs")
    return 0


def _is_profile(name: str) -> bool:
    try:
        load_profile(name, Path.cwd(), os.environ)
    except UsageError:
        return False
    return True


def _connect(name: str) -> tuple[Transport, str]:
    """Return the transport to a profile's cluster, and the absolute path of its remote_job_dir."""
    profile = load_profile(name, Path.cwd(), os.environ)
    fields = profile.fields
    host = fields.host if fields.tunnel != "local" and fields.executor != "local" else None
    transport = connect(host, fields.user, fields.identity)
    folder = fields.remote_job_dir or str(Path.cwd() / ".holdfast")
    script = 'case "$1" in "~"|"~/"*) set -- "$HOME${1#\\~}";; esac; cd -- "$1" 2>/dev/null && pwd || printf %s "$1"'
    return transport, transport.check(["sh", "-c", script, "sh", folder]).text.strip()
