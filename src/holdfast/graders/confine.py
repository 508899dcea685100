"""Run as a script: confine this process, then become the program. It imports little, so that it starts fast.

    python -I -S confine.py SPEC PROGRAM [ARGUMENT …]      SPEC: JSON, see `main`
    python -I -S confine.py probe FOLDER                   prints what this machine allows, as JSON

If something cannot be confined as SPEC says, the program is not started: the script ends with code 125, and the pipe
`starting` says why. With a PID namespace there are three processes, and the program does not replace the first:

    outside          waits for init, then ends the way the program did; kills init on SIGTERM
    └─ init          process 1 of the namespace; reaps orphans, and is killed by the kernel when `outside` dies. When
       │             init has ended, the kernel kills every process of the namespace, whatever its session
       └─ program    the leader of a session of its own
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import signal
import struct
import sys
from contextlib import suppress

TYPE_CHECKING = False  # `typing` takes long to import
if TYPE_CHECKING:
    from typing import Any, NoReturn

_NEW_MOUNTS, _NEW_USER, _NEW_PIDS, _NEW_NET = 0x20000, 0x10000000, 0x20000000, 0x40000000
_PARENT_DEATH_SIGNAL, _DUMPABLE, _DROP_FROM_BOUNDING_SET, _NO_NEW_PRIVILEGES = 1, 4, 24, 38
"""options of prctl"""
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXEC, _BIND, _RECURSIVE, _PRIVATE = 1, 2, 4, 8, 1 << 12, 1 << 14, 1 << 18
"""flags of mount"""
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
"""since Linux 5.12"""
_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
"""writing, removing, and making files of every kind"""


_CAP_DAC_OVERRIDE = 1
"""read and write files whatever their modes"""


class _Failed(Exception):
    pass


def main() -> NoReturn:
    """Confine as SPEC says: the fields of `sandbox.Isolation`, the workspace, the limits.

    `starting` is a pipe that the program does not inherit. It gets `begins` just before the program starts; anything
    after that, or instead, is the reason why the program could not be started.
    """
    if sys.argv[1] == "probe":
        sys.stdout.write(json.dumps(probe(sys.argv[2])))
        sys.exit(0)
    spec = json.loads(sys.argv[1])
    starting = spec["starting"]
    try:
        os.set_inheritable(starting, False)
        _limit(spec)
        network = spec["network"] == "namespace"
        _enter_namespaces(network=network, read_only=spec["read_only"], processes=spec["processes"])
        if spec["read_only"]:
            _mount_read_only(spec["workspace"])
        if sys.platform.startswith("linux"):
            _libc().prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)  # the kernel ends it when the run is killed
        if spec["processes"]:
            _fork_into_namespace(starting)
        if spec["network"] == "tcp" or (spec["writes"] and _landlock_abi() > 0):
            _landlock(spec["workspace"] if spec["writes"] else None, tcp=spec["network"] == "tcp")
        if os.geteuid() == 0:
            _drop_capabilities()
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)  # what Python, or `nohup`, ignores, the program would ignore too
        os.write(starting, b"begins")
        os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - this is what it is for
    except (OSError, ValueError, _Failed) as error:
        os.write(starting, str(error).encode(errors="surrogateescape"))
        sys.exit(125)


def probe(folder: str) -> dict[str, Any]:
    """Find out what this machine allows by trying it in children. `folder` stands for the workspace."""

    def mount_read_only() -> None:
        _enter_namespaces(read_only=True)
        _mount_read_only(folder)

    def fork_into_namespace() -> None:
        _enter_namespaces(processes=True)
        if not _works(_mount_proc):
            raise _Failed("no process can be started")

    abi = _landlock_abi()
    read_only = _works(mount_read_only)
    landlock = abi >= 1 and _works(lambda: _landlock("/", tcp=False))
    network = "namespace" if _works(lambda: _enter_namespaces(network=True)) else "tcp" if abi >= 4 else "open"
    # Read-only mounts do not keep root from writing to a disk's device.
    writes = landlock or (read_only and os.geteuid() != 0)
    return {"writes": writes, "read_only": read_only, "processes": _works(fork_into_namespace), "network": network}


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


def _enter_namespaces(*, network: bool = False, read_only: bool = False, processes: bool = False) -> None:
    """Enter new namespaces: a network with nothing but a loopback, mounts that nobody else sees, PIDs for children.

    Root needs no user namespace for them. Others get one in which they keep their uid and gid.
    """
    kinds = (_NEW_NET if network else 0) | (_NEW_PIDS if processes else 0)
    kinds |= _NEW_MOUNTS if read_only or processes else 0
    if kinds == 0:
        return
    libc, user, group = _libc(), os.getuid(), os.getgid()
    if libc.unshare(kinds) != 0:
        if libc.unshare(_NEW_USER | kinds) != 0:
            raise _Failed(f"no namespaces: {_reason()}")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 - pathlib takes longer to import
                file.write(text)
    if kinds & _NEW_MOUNTS and libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None) != 0:
        raise _Failed(f"mounts cannot be made private: {_reason()}")
    if network:
        handle = libc.socket(2, 2, 0)  # AF_INET, SOCK_DGRAM; the module `socket` takes long to import
        with suppress(OSError):
            fcntl.ioctl(handle, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))  # its own loopback, up and running
        os.close(handle)


def _mount_read_only(workspace: str) -> None:
    """Make all but the workspace read-only, since Landlock does not cover modes, owners, times and attributes."""
    libc, place = _libc(), os.fsencode(workspace)
    closed, opened = struct.pack("4Q", _READ_ONLY, 0, 0, 0), struct.pack("4Q", 0, _READ_ONLY, 0, 0)  # to set, to clear

    def change(path: bytes, flags: int, attributes: bytes) -> bool:
        size = ctypes.c_size_t(len(attributes))
        return bool(libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path, flags, attributes, size) == 0)

    if not (
        change(b"/", _AT_RECURSIVE, closed)
        and libc.mount(place, place, None, _BIND | _RECURSIVE, None) == 0
        and change(place, 0, opened)
    ):
        raise _Failed(f"no read-only mounts: {_reason()}")
    os.chdir(workspace)  # the current folder is still the one below the new mount, and read-only


def _fork_into_namespace(starting: int) -> None:
    """Fork init, which forks the program's process, and return in the latter only."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would not run while `outside` waits
    waited_for = (signal.SIGTERM, signal.SIGCHLD)
    signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    reading, writing = os.pipe()
    init = os.fork()
    if init != 0:
        os.close(starting)
        os.close(writing)
        _wait_outside(init, reading, waited_for)
    os.close(reading)
    _libc().prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.write(writing, b" ")  # fails if the parent died before it could be watched
    _mount_proc()
    program = os.fork()
    if program != 0:
        os.close(starting)
        ended = 0
        while ended != program:
            ended, status = os.wait()
        os.write(writing, str(status).encode())
        os._exit(0)
    os.setsid()  # a program that signals its process group reaches neither init nor `outside`
    signal.pthread_sigmask(signal.SIG_UNBLOCK, waited_for)


def _wait_outside(init: int, reading: int, waited_for: tuple[signal.Signals, ...]) -> NoReturn:
    """Wait until the namespace is empty, and end the way the program did."""
    stopped = signal.sigwait(waited_for) == signal.SIGTERM
    if stopped:
        os.kill(init, signal.SIGKILL)
    _, status = os.waitpid(init, 0)  # returns when every process of the namespace has ended
    status = signal.SIGTERM if stopped else int(os.read(reading, 64).strip() or status)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    _libc().prctl(_DUMPABLE, 0, 0, 0, 0)  # the crash was the program's: no second report to the system
    with suppress(OSError, ValueError):
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, waited_for)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def _mount_proc() -> None:
    """Show only the namespace's processes in /proc, if allowed: in most containers it is not, and /proc stays."""
    _libc().mount(b"proc", b"/proc", b"proc", _READ_ONLY | _NO_SUID | _NO_DEVICES | _NO_EXEC, None)


def _drop_capabilities() -> None:
    """Drop root's capabilities, for this process and those it starts, except CAP_DAC_OVERRIDE.

    That one allows access to files whatever their modes, within the limits of Landlock. With the others a program could
    read the environment of the run, for example.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = _libc()
    for capability in range(64):
        if capability != _CAP_DAC_OVERRIDE and libc.prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0) != 0:
            break  # past the last one this kernel knows
    kept = 1 << _CAP_DAC_OVERRIDE
    if libc.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", kept, kept, 0, 0, 0, 0)) != 0:
        raise _Failed(f"capabilities cannot be dropped: {_reason()}")


def _landlock_abi() -> int:
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, int(_libc().syscall(_CREATE, None, ctypes.c_size_t(0), 1)))


def _landlock(workspace: str | None, *, tcp: bool) -> None:
    """Restrict writes to the workspace with Landlock; with `tcp`, forbid connections too."""
    libc, abi = _libc(), _landlock_abi()
    changes = _CHANGES | (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)
    ruled = struct.pack("QQQ", changes if workspace else 0, 0b11 if tcp and abi >= 4 else 0, 0b11 if abi >= 6 else 0)
    ruled = ruled[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = libc.syscall(_CREATE, ruled, ctypes.c_size_t(len(ruled)), 0)
    if rules < 0:
        raise _Failed(f"no Landlock: {_reason()}")
    if workspace:
        sink = changes & (_WRITE_FILE | _TRUNCATE)
        for place, rights in ((workspace, changes), ("/dev/null", sink), ("/dev/zero", sink)):
            handle = os.open(place, os.O_PATH | os.O_CLOEXEC)
            if libc.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", rights, handle), 0) != 0:
                raise _Failed(f"no Landlock rule for {place}: {_reason()}")
            os.close(handle)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0 or libc.syscall(_RESTRICT, rules, 0) != 0:
        raise _Failed(f"Landlock refused: {_reason()}")
    os.close(rules)


def _reason() -> str:
    return os.strerror(ctypes.get_errno())


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


if __name__ == "__main__":
    main()
