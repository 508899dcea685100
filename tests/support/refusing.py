"""Runs a module on a system that refuses namespaces, as most containers do: a real filter of system calls sees to it.

python -m tests.support.refusing MODULE [ARGUMENT …]
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import runpy
import struct
import sys

UNSHARE = {"x86_64": 272, "aarch64": 97}.get(platform.machine())


def refuse_namespaces() -> None:
    """Let unshare(2) fail with EPERM from now on, in this process and those it starts."""
    assert UNSHARE is not None
    load, equal, answer = 0x20, 0x15, 0x06  # of the number of the call; skip none or one; of the filter
    allowed, refused = 0x7FFF0000, 0x00050000 | errno.EPERM
    rules = [(load, 0, 0, 0), (equal, 0, 1, UNSHARE), (answer, 0, 0, refused), (answer, 0, 0, allowed)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp, filtering = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(seccomp, filtering, program, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    refuse_namespaces()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
