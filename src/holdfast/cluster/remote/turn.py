"""Let one process at a time submit the jobs of an invocation.

The turn is a directory, `submitting`, in that of the invocation: of several processes that create it, on whatever
machines, one succeeds. A process that is killed leaves it behind. The next one takes it over at once on the same
machine, and elsewhere when it has watched it for as long as a submission may take.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from holdfast.cluster.remote.ledger import DOUBT_SECONDS
from holdfast.errors import ClusterError, HoldfastError
from holdfast.store.processes import is_running, start_token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.cluster.remote.transport import Transport

_POLL_SECONDS: Final = 1.0
_TAKEN: Final = 45
_TAKE: Final = f"""
take() {{ mkdir -- "$1" && echo "$2" >"$1/by"; }}
take "$@" 2>/dev/null && exit
# It may have been given back meanwhile; if it cannot be created, the second try says why.
test -d "$1" || {{ take "$@" && exit; }}
test -d "$1" || exit 1
cat -- "$1/by" 2>/dev/null; exit {_TAKEN}
"""
# Only what was seen is taken away: another process may have been faster.
_TAKE_AWAY: Final = """
test "$(cat -- "$1/by" 2>/dev/null)" = "$2" || exit 0
mv -- "$1" "$1.$3" && rm -rf -- "$1.$3"
"""


@contextmanager
def hold_turn(transport: Transport, directory: str, say: Callable[[str], None]) -> Iterator[None]:
    """Wait until no other process submits jobs of an invocation, and keep others from doing so."""
    path = f"{directory.rstrip('/')}/submitting"
    pid = os.getpid()
    note = f"{os.uname().nodename} {pid} {start_token(pid)} {secrets.token_hex(4)}"
    seen, since = None, 0.0
    while (holder := _take(transport, path, note)) is not None:
        now = time.monotonic()
        if holder != seen:
            seen, since = holder, now
            say(f"another process is submitting its jobs ({_describe(holder)}); waiting for it")
        if _is_dead(holder) or now - since > DOUBT_SECONDS:
            transport.run(["sh", "-c", _TAKE_AWAY, "sh", path, holder, secrets.token_hex(4)])
        else:
            time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        with suppress(HoldfastError):
            transport.run(["sh", "-c", _TAKE_AWAY, "sh", path, note, secrets.token_hex(4)])


def _take(transport: Transport, path: str, note: str) -> str | None:
    """Try to take the turn; return the note of the process that has it."""
    taken = transport.run(["sh", "-c", _TAKE, "sh", path, note])
    if taken.code == 0:
        return None
    if taken.code != _TAKEN:
        raise ClusterError(f"{transport.host}: {path}: {taken.stderr.strip() or 'cannot be created'}")
    holder = taken.text.strip()
    return None if holder == note else holder  # the answer to the first try may have been lost


def _is_dead(note: str) -> bool:
    host, pid, start = (*note.split(" "), "", "", "")[:3]
    return host == os.uname().nodename and pid.isdigit() and not is_running(int(pid), start)


def _describe(note: str) -> str:
    host, pid = (*note.split(" "), "", "")[:2]
    return f"process {pid} on {host}" if pid else "unknown"
