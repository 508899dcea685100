"""Restrictions on a process, set by the process itself: namespaces, read-only mounts, Landlock, limits.

`keeper` imports this file. Run as a script, it prints the restrictions that this machine allows, as JSON. It imports
little and needs no other file, so that `doctor` can send it to another machine:

    python -I -S confine.py probe FOLDER
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import struct
import sys
from contextlib import suppress

TYPE_CHECKING = False  # `typing` takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_NEW_MOUNTS, _NEW_USER, _NEW_PIDS, _NEW_NET = 0x20000, 0x10000000, 0x20000000, 0x40000000
_DROP_FROM_BOUNDING_SET, _NO_NEW_PRIVILEGES = 24, 38
"""options of prctl"""
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXEC, _BIND, _RECURSIVE = 1, 2, 4, 8, 1 << 12, 1 << 14
_PRIVATE, _SLAVE = 1 << 18, 1 << 19
"""flags of mount"""
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
"""since Linux 5.12"""
_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
"""writing, removing and creating files of every kind"""
_CAP_DAC_OVERRIDE = 1
"""reading and writing files whatever their modes"""

libc = ctypes.CDLL(None, use_errno=True)


class NotAllowed(Exception):
    """This machine does not allow a restriction."""


class NoNamespaces(NotAllowed):
    """No namespace can be created, and no namespace was entered."""


def probe(folder: str) -> dict[str, Any]:
    """Try in child processes which restrictions this machine allows. `folder` stands for the workspace."""

    def close_mounts() -> None:
        enter_namespaces(read_only=True)
        mount_read_only(folder)

    abi = landlock_abi()
    read_only = works(close_mounts)
    has_landlock = abi >= 1 and works(lambda: landlock("/", tcp=False))
    network = "namespace" if works(lambda: enter_namespaces(network=True)) else "tcp" if abi >= 4 else "open"
    # Read-only mounts do not stop root from writing to a disk's device.
    writes = has_landlock or (read_only and os.geteuid() != 0)
    return {"writes": writes, "read_only": read_only, "processes": works(start_in_namespace), "network": network}


def start_in_namespace(*, own_proc: bool = False) -> None:
    """Start a process in a PID namespace; raise NotAllowed if the namespace, or its own /proc, is not allowed."""
    enter_namespaces(processes=True)
    if not works(lambda: mount_proc(required=own_proc)):
        raise NotAllowed("no process can be started")


def works(attempt: Callable[[], None]) -> bool:
    """Return True if a call succeeds in a child process."""
    child = os.fork()
    if child == 0:
        try:
            attempt()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def limit(spec: dict[str, Any]) -> None:
    """Limit processor time, file sizes, memory and core files of this process and its children."""
    seconds = int(spec["seconds"]) + 1
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: seconds, resource.RLIMIT_FSIZE: spec["file_bytes"]}
    if sys.platform.startswith("linux"):
        limits[resource.RLIMIT_DATA] = spec["memory_bytes"]
    for what, most in limits.items():
        _, hard = resource.getrlimit(what)
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (allowed, allowed))


def enter_namespaces(*, network: bool = False, read_only: bool = False, processes: bool = False) -> None:
    """Enter new namespaces: a network with nothing but a loopback, private mounts, and PIDs for children.

    Root needs no user namespace for this. Other users get one in which they keep their uid and gid.
    """
    kinds = (_NEW_NET if network else 0) | (_NEW_PIDS if processes else 0)
    kinds |= _NEW_MOUNTS if read_only or processes else 0
    if kinds == 0:
        return
    user, group = os.getuid(), os.getgid()
    if libc.unshare(kinds) != 0:
        if libc.unshare(_NEW_USER | kinds) != 0:
            raise NoNamespaces(f"no namespaces: {_reason()}")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 - pathlib takes longer to import
                file.write(text)
    # As a slave, the namespace still receives later mounts of the system, such as home folders on demand.
    apart = _PRIVATE if read_only else _SLAVE
    if kinds & _NEW_MOUNTS and libc.mount(None, b"/", None, _RECURSIVE | apart, None) != 0:
        raise NotAllowed(f"mounts cannot be made private: {_reason()}")
    if network:
        handle = libc.socket(2, 2, 0)  # AF_INET, SOCK_DGRAM; the module `socket` takes long to import
        with suppress(OSError):
            fcntl.ioctl(handle, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))  # its own loopback, up and running
        os.close(handle)


def mount_read_only(workspace: str) -> None:
    """Make everything but the workspace read-only: Landlock does not cover modes, owners, times and attributes."""
    place = os.fsencode(workspace)
    closed, opened = struct.pack("4Q", _READ_ONLY, 0, 0, 0), struct.pack("4Q", 0, _READ_ONLY, 0, 0)  # to set, to clear

    def change(path: bytes, flags: int, attributes: bytes) -> bool:
        size = ctypes.c_size_t(len(attributes))
        return bool(libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path, flags, attributes, size) == 0)

    if not (
        change(b"/", _AT_RECURSIVE, closed)
        and libc.mount(place, place, None, _BIND | _RECURSIVE, None) == 0
        and change(place, 0, opened)
    ):
        raise NotAllowed(f"no read-only mounts: {_reason()}")
    os.chdir(workspace)  # the current folder is still below the new mount, and read-only


def mount_proc(*, read_only: bool = False, required: bool = False) -> None:
    """Show only the namespace's processes in /proc. Many containers forbid this, and /proc stays unchanged."""
    flags = _NO_SUID | _NO_DEVICES | _NO_EXEC | (_READ_ONLY if read_only else 0)
    if libc.mount(b"proc", b"/proc", b"proc", flags, None) != 0 and required:
        raise NotAllowed(f"no /proc: {_reason()}")


def drop_capabilities() -> None:
    """Drop root's capabilities for this process and its children, except CAP_DAC_OVERRIDE.

    CAP_DAC_OVERRIDE allows access to files whatever their modes, within the limits of Landlock. With other
    capabilities, a program could read the run's environment, for example.
    """
    if not sys.platform.startswith("linux"):
        return
    for capability in range(64):
        if capability != _CAP_DAC_OVERRIDE and libc.prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0) != 0:
            break  # past the last capability of this kernel
    kept = 1 << _CAP_DAC_OVERRIDE
    if libc.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", kept, kept, 0, 0, 0, 0)) != 0:
        raise NotAllowed(f"capabilities cannot be dropped: {_reason()}")


def landlock_abi() -> int:
    """Return this kernel's version of Landlock; 0 without Landlock."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, int(libc.syscall(_CREATE, None, ctypes.c_size_t(0), 1)))


def landlock(workspace: str | None, *, tcp: bool) -> None:
    """Restrict writes to the workspace with Landlock; with `tcp`, forbid connections too."""
    abi = landlock_abi()
    changes = _CHANGES | (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)
    ruled = struct.pack("QQQ", changes if workspace else 0, 0b11 if tcp and abi >= 4 else 0, 0b11 if abi >= 6 else 0)
    ruled = ruled[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = libc.syscall(_CREATE, ruled, ctypes.c_size_t(len(ruled)), 0)
    if rules < 0:
        raise NotAllowed(f"no Landlock: {_reason()}")
    if workspace:
        sink = changes & (_WRITE_FILE | _TRUNCATE)
        for place, rights in ((workspace, changes), ("/dev/null", sink), ("/dev/zero", sink)):
            handle = os.open(place, os.O_PATH | os.O_CLOEXEC)
            if libc.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", rights, handle), 0) != 0:
                raise NotAllowed(f"no Landlock rule for {place}: {_reason()}")
            os.close(handle)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0 or libc.syscall(_RESTRICT, rules, 0) != 0:
        raise NotAllowed(f"Landlock refused: {_reason()}")
    os.close(rules)


def _reason() -> str:
    return os.strerror(ctypes.get_errno())


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe(sys.argv[2])))
