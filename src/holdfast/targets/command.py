"""A program as the target: its standard output is the answer."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from holdfast.errors import AttemptError, Fault
from holdfast.spec.template import RENDER_ERRORS, template
from holdfast.targets.types import Reply

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from holdfast.spec.fields import CommandTarget
    from holdfast.targets.types import Turn

_SHOWN = 400


def _die_with_parent() -> Callable[[], None] | None:
    """On Linux the kernel ends the program when we are killed; elsewhere it runs on to its own end."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(1, signal.SIGKILL)


class Command:
    """Runs the program once per turn, in a process group of its own, from the eval file's folder."""

    def __init__(self, block: CommandTarget, folder: Path) -> None:
        self._block = block
        self._folder = folder
        self._in_child = _die_with_parent()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def reply(self, turn: Turn) -> Reply:
        """Run it to its end."""
        fields = {**turn.sample.fields, "prompt": turn.prompt, "messages": turn.messages, "trial": turn.trial}
        try:
            arguments = [template(argument).render(fields) for argument in self._block.command]
            given = None if self._block.stdin is None else template(self._block.stdin).render(fields)
        except RENDER_ERRORS as error:
            raise AttemptError("bad_request", f"cannot render target.command: {error}", retry=False) from error
        if any("\0" in argument for argument in arguments):  # what follows it would be left out without a word
            raise AttemptError("agent", "an argument of target.command holds a NUL character", retry=False)
        try:
            process = await asyncio.create_subprocess_exec(
                *arguments,
                cwd=self._folder,
                stdin=asyncio.subprocess.DEVNULL if given is None else asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                preexec_fn=self._in_child,
            )
        except (FileNotFoundError, PermissionError) as error:
            raise Fault(
                "refused",
                f"{arguments[0]} cannot be run: {error.strerror}",
                remedy=f"target.command is run from {self._folder}; check the path and that it is executable.",
            ) from error
        except OSError as error:
            raise AttemptError("agent", f"{arguments[0]} cannot be run: {error}", retry=False) from error
        try:
            if given is not None and process.stdin is not None:
                # A program may end, or close its input, without having read it. uvloop says that with a RuntimeError.
                with suppress(BrokenPipeError, ConnectionResetError, RuntimeError):
                    process.stdin.write(given.encode())
                    process.stdin.close()
            out, err = await process.communicate()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whatever it started goes with it
        if process.returncode != 0:
            said = err[-_SHOWN:].decode("utf-8", "replace").strip()
            raise AttemptError("agent", f"{arguments[0]} ended with {process.returncode}: {said}")
        return Reply(text=out.decode("utf-8", "replace").strip("\n"))
