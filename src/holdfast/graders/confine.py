"""Run as a script: shut this process in, then become the program. It uses nothing of ours, and starts in no time.

    python -I -S confine.py SPEC PROGRAM [ARGUMENT …]      SPEC: JSON, see `main`
    python -I -S confine.py probe                          prints what can be shut on this machine, as JSON

Whatever cannot be done as told ends it with code 125 and a line on standard error that begins with SPEC's `mark`; the
program is then not started.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
from contextlib import suppress
from typing import Any, NoReturn

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
"""writing, removing, and making files of every kind"""


_FILES_OF_ALL = 1
"""CAP_DAC_OVERRIDE"""


class _Failed(Exception):
    pass


def main() -> NoReturn:
    """Do what SPEC says: `workspace`, `writes`, `network` (open, namespace or tcp), and the limits.

    `starting` is a pipe: `begins` is written to it before the program does, and it is closed then.
    """
    if sys.argv[1] == "probe":
        sys.stdout.write(json.dumps(probe()))
        sys.exit(0)
    spec = json.loads(sys.argv[1])
    try:
        os.set_inheritable(spec["starting"], False)
        if sys.platform.startswith("linux"):
            _libc().prctl(1, signal.SIGKILL)  # the kernel ends it when the run is killed
        _limit(spec)
        if spec["network"] == "namespace":
            _leave_the_network()
        if spec["writes"] or spec["network"] == "tcp":
            _landlock(spec["workspace"] if spec["writes"] else None, tcp=spec["network"] == "tcp")
        if os.geteuid() == 0:
            _drop_powers()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and what it becomes would too
            signal.signal(number, signal.SIG_DFL)
        os.write(spec["starting"], b"begins")
        os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - this is what it is for
    except (OSError, ValueError, _Failed) as error:
        sys.stderr.write(f"{spec['mark']}{error}\n")
        sys.exit(125)


def probe() -> dict[str, Any]:
    """What can be shut here: tried in children of this process, not guessed."""
    abi = _landlock_abi()
    network = "namespace" if _works(_leave_the_network) else "tcp" if abi >= 4 else "open"
    return {"writes": abi >= 1 and _works(lambda: _landlock("/", tcp=False)), "network": network}


def _works(attempt: Any) -> bool:
    child = os.fork()
    if child == 0:
        try:
            attempt()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _limit(spec: dict[str, Any]) -> None:
    seconds = int(spec["seconds"]) + 1
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: seconds, resource.RLIMIT_FSIZE: spec["file_bytes"]}
    if sys.platform.startswith("linux"):
        limits[resource.RLIMIT_DATA] = spec["memory_bytes"]
    for what, most in limits.items():
        _, hard = resource.getrlimit(what)
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (allowed, allowed))


def _leave_the_network() -> None:
    """A network of its own, in which there is only itself."""
    libc, user, group = _libc(), os.getuid(), os.getgid()
    if libc.unshare(_NEW_NET) != 0:
        if libc.unshare(_NEW_USER | _NEW_NET) != 0:
            raise _Failed(f"no network namespace: {os.strerror(ctypes.get_errno())}")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 - pathlib takes longer to import
                file.write(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket, suppress(OSError):
        fcntl.ioctl(probe_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))  # its own loopback, up and running


def _drop_powers() -> None:
    """Root's powers over other processes and the system: not its own any more, nor of what it starts.

    What stays is reading and writing files whatever their modes, which Landlock bounds. With the others a program
    could, for one, read the environment of the run.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = _libc()
    for power in range(64):
        if power != _FILES_OF_ALL and libc.prctl(24, power, 0, 0, 0) != 0:
            break  # past the last one this kernel knows
    kept = 1 << _FILES_OF_ALL
    if libc.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", kept, kept, 0, 0, 0, 0)) != 0:
        raise _Failed(f"root's powers cannot be dropped: {os.strerror(ctypes.get_errno())}")


def _landlock_abi() -> int:
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, int(_libc().syscall(_CREATE, None, ctypes.c_size_t(0), 1)))


def _landlock(workspace: str | None, *, tcp: bool) -> None:
    """From here on: no change to any file outside the workspace; with `tcp`, no connection either."""
    libc, abi = _libc(), _landlock_abi()
    changes = _CHANGES | (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)
    ruled = struct.pack("QQQ", changes if workspace else 0, 0b11 if tcp and abi >= 4 else 0, 0b11 if abi >= 6 else 0)
    ruled = ruled[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = libc.syscall(_CREATE, ruled, ctypes.c_size_t(len(ruled)), 0)
    if rules < 0:
        raise _Failed(f"no Landlock: {os.strerror(ctypes.get_errno())}")
    if workspace:
        sink = changes & (_WRITE_FILE | _TRUNCATE)
        for place, rights in ((workspace, changes), ("/dev/null", sink), ("/dev/zero", sink)):
            handle = os.open(place, os.O_PATH | os.O_CLOEXEC)
            if libc.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", rights, handle), 0) != 0:
                raise _Failed(f"no Landlock rule for {place}: {os.strerror(ctypes.get_errno())}")
            os.close(handle)
    if libc.prctl(38, 1, 0, 0, 0) != 0 or libc.syscall(_RESTRICT, rules, 0) != 0:
        raise _Failed(f"Landlock refused: {os.strerror(ctypes.get_errno())}")
    os.close(rules)


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


if __name__ == "__main__":
    main()
