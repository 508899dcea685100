"""Run small programs one file operation at a time, in every order that switches between them a few times.

    for schedule in every_order(monkeypatch, module, switches=2):
        schedule.run(first=…, second=…)

Each program is a thread that stops before every operation: calls of `module.os`, and the methods of a `Stepped` path.
One that sleeps goes on when nobody else can: a pause is long, compared with an operation.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import PosixPath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    import pytest

_CALLS = ("open", "read", "write", "pwrite")
_here = threading.local()


class _Program:
    """A thread that waits for its turn before each operation."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self.name = name
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.asleep = self.ended = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(act,), daemon=True)
        self._thread.start()
        self._stopped.acquire()

    def _run(self, act: Callable[[], None]) -> None:
        _here.program = self
        try:
            self.stop()
            act()
        except BaseException as error:
            self.error = error
        self.ended = True
        self._stopped.release()

    def stop(self, *, asleep: bool = False) -> None:
        """Wait for the next turn; called by the thread."""
        self.asleep = asleep
        self._stopped.release()
        self._go.acquire()
        self.asleep = False

    def step(self) -> None:
        """Let the thread make one operation."""
        self._go.release()
        self._stopped.acquire()


def _pause(*, asleep: bool = False) -> None:
    program = getattr(_here, "program", None)
    if program is not None:
        program.stop(asleep=asleep)


class Stepped(PosixPath):
    """A path whose changes are steps."""

    def rename(self, target: Any) -> Any:
        _pause()
        return super().rename(target)

    def unlink(self, missing_ok: bool = False) -> None:
        _pause()
        super().unlink(missing_ok)


class Schedule:
    """One order of steps: which program to switch to, by the number of the step."""

    def __init__(self, switches: dict[int, int]) -> None:
        self._switches = switches
        self.choices: list[int] = []
        """of each step, how many programs could have made it"""

    def run(self, **acts: Callable[[], None]) -> None:
        """Run programs to their end."""
        programs = [_Program(name, act) for name, act in acts.items()]
        current = programs[0]
        while running := [program for program in programs if not program.ended]:
            ready = [program for program in running if not program.asleep] or running
            first = ready.index(current) if current in ready else 0
            current = ready[(first + self._switches.get(len(self.choices), 0)) % len(ready)]
            self.choices.append(len(ready))
            current.step()
        for program in programs:
            if program.error is not None:
                raise program.error


def every_order(monkeypatch: pytest.MonkeyPatch, module: ModuleType, switches: int) -> Iterator[Schedule]:
    """Yield schedules with up to so many switches, other than those at the end of a program."""

    def stepping(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any) -> Any:
            _pause()
            return call(*arguments)

        return step

    rest = {name: getattr(os, name) for name in dir(os) if not name.startswith("__")}
    calls = {name: stepping(getattr(os, name)) for name in _CALLS}
    monkeypatch.setattr(module, "os", SimpleNamespace(**rest | calls))
    clock = {name: getattr(time, name) for name in ("time", "monotonic", "monotonic_ns", "localtime", "strftime")}
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda _: _pause(asleep=True), **clock))
    monkeypatch.setattr(module, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    waiting: list[dict[int, int]] = [{}]
    while waiting:
        chosen = waiting.pop()
        schedule = Schedule(chosen)
        yield schedule
        if len(chosen) < switches:
            later = range(max(chosen, default=-1) + 1, len(schedule.choices))
            waiting += [{**chosen, step: by} for step in later for by in range(1, schedule.choices[step])]
