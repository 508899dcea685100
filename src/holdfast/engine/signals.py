"""Handle Ctrl-C and SIGTERM: finish requests in flight, abandon them, or exit at once.

The first Ctrl-C asks to finish, the second to stop, and the third exits. SIGTERM asks to stop at once, because its
sender soon kills. SIGUSR2, by which a batch system announces the time limit, asks to finish, and otherwise counts as
SIGTERM. If nothing can be in flight, the first signal asks to stop. A signal that arrives before the last one was
heeded exits, because the process is busy.

Python runs handlers in the main thread, between two bytecodes. If the main thread is inside C code, or another thread
holds the interpreter's lock, only the kernel can end the process: `harden` makes each signal reset itself to its
default action on arrival, which the handler undoes if it runs.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, Final, Literal, Self

if TYPE_CHECKING:
    from collections.abc import Callable

NUMBERS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)

_MASK_BYTES: Final = {"linux": 128, "darwin": 4}
"""by platform: the size of a signal mask, which precedes the flags in `struct sigaction`"""
_RESET: Final = {"linux": 0x80000000, "darwin": 0x4}
"""by platform: SA_RESETHAND"""


class Signals:
    """Handlers of the signals that stop a process, in force from `install` or inside a `with`."""

    current: Signals | None = None
    """those in force"""
    hard = False

    def __init__(
        self,
        stop: Callable[[int], None],
        finish: Callable[[int], None] | None = None,
        heeded: Callable[[], bool] = lambda: True,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `finish`, then `stop`, with SIGINT or SIGTERM, then `leave`, after which the process ends.

        `heeded` returns True once what `finish` asked for has begun.
        """
        self._stop = stop
        self._finish = finish
        self._heeded = heeded
        self._leave = leave
        self._asked: Literal["finish", "stop"] | None = None
        """what the last signal asked for"""
        self._number: int | None = None
        """that signal, as SIGINT or SIGTERM"""
        self._outer: Signals | None = None
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Handle signals from now on. Does nothing outside the main thread, as Python requires."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._outer, Signals.current = Signals.current, self
        if self._outer is not None:
            self._asked, self._number = self._outer._asked, self._outer._number
        for number in NUMBERS:
            self._before[number] = signal.getsignal(number)
            self._arm(number)

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._before:
            return
        Signals.current = self._outer
        for number, handler in self._before.items():
            signal.signal(number, handler)
            if self._outer is not None:
                if self._asked is not None:
                    self._outer._asked, self._outer._number = "stop", self._number
                self._outer._arm(number)

    @classmethod
    def harden(cls) -> None:
        """Let the second of two signals end this process even if no Python code runs."""
        cls.hard = True
        if cls.current is not None:
            for number in NUMBERS:
                cls.current._arm(number)

    @classmethod
    def received(cls) -> int | None:
        """Return the signal that has asked this process to finish or to stop, as SIGINT or SIGTERM."""
        return None if cls.current is None else cls.current._number

    def _arm(self, number: int) -> None:
        signal.signal(number, self._handle)
        if self.hard:
            _reset_on_arrival(number)

    def _handle(self, number: int, _: object) -> None:
        counts_as = signal.SIGTERM if number == signal.SIGUSR2 else number
        if self._asked == "stop" or (self._asked == "finish" and not self._heeded()):
            self._leave()
            if sys.stderr is not None and sys.stderr.isatty():
                os.write(2, b"\x1b[?25h\n")  # the cursor, which the display hides
            os._exit(128 + counts_as)
        gently = self._finish is not None and self._asked is None and number != signal.SIGTERM
        self._asked, self._number = "finish" if gently else "stop", counts_as
        self._arm(number)
        (self._finish if gently and self._finish is not None else self._stop)(counts_as)


def _reset_on_arrival(number: int) -> None:
    """Add SA_RESETHAND to a signal's flags, for which Python has no function."""
    if sys.platform not in _RESET:
        return
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    pointer = ctypes.sizeof(ctypes.c_void_p)
    action = ctypes.create_string_buffer(256)
    if libc.sigaction(number, None, action) != 0:
        return
    flags = ctypes.c_uint.from_buffer(action, pointer + _MASK_BYTES[sys.platform])
    flags.value |= _RESET[sys.platform]
    libc.sigaction(number, action, None)


def describe_stopping(requests: int, hint: str = "") -> str:
    """Describe the requests in flight that a stopping run waits for; `hint` says how to abandon them."""
    return f"stopping; {requests:,} request{'s' * (requests != 1)} in flight{hint}"


def read_stopping(message: str) -> int | None:
    """Return the number of requests in such a message; None for any other message."""
    match = re.match(r"stopping; ([\d,]+) requests? in flight", message)
    return None if match is None else int(match[1].replace(",", ""))
