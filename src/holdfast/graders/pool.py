"""Worker processes for questions that could take forever: a process that takes too long is killed.

`worker` is the other end. A question and an answer are one line of JSON each; before the answer, the worker may name
the stages that it reaches.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import AttemptError
from holdfast.targets.build import usable_cores

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from holdfast.spec.regex import Request

_LONGEST_ANSWER: Final = 1 << 20


class NoAnswer(Exception):
    """A process took too long to answer a question, or died."""

    def __init__(self, cause: str, stage: str | None, *, late: bool) -> None:
        super().__init__(cause)
        self.stage = stage
        """the last stage that the process named"""
        self.late = late
        """the process was killed after the time limit"""


class Pool:
    """Processes that run a `worker`. They start when first needed, and answer one question at a time.

    `reference` names the worker's function as `module:function`. There may be at least two processes, so that one slow
    answer does not delay all others.
    """

    def __init__(self, reference: str | None = None, *, size: int | None = None) -> None:
        arguments = [] if reference is None else [reference]
        self._command = [sys.executable, "-P", "-m", "holdfast.graders.worker", *arguments]
        self._places = asyncio.Semaphore(size or max(2, min(4, int(usable_cores()))))
        self._idle: list[Process] = []

    async def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer, or raise NoAnswer. The time limit does not include waiting for a process."""
        async with self._places:
            self._idle = [process for process in self._idle if process.returncode is None]
            process = self._idle.pop() if self._idle else await self._start()
            stages: list[str] = []
            try:
                async with asyncio.timeout(seconds):
                    answer = await _answer(process, question, stages)
            except TimeoutError:
                await _kill(process)
                raise NoAnswer(f"no answer within {seconds:g} s", *stages[-1:] or (None,), late=True) from None
            except (OSError, RuntimeError, ValueError) as error:
                await _kill(process)
                raise NoAnswer("the process has died", *stages[-1:] or (None,), late=False) from error
            except BaseException:
                await _kill(process)  # its next line would answer another question
                raise
            self._idle.append(process)
            return answer

    async def do(self, request: Request) -> Any:
        """Return the answer to a request, or raise AttemptError if it takes too long."""
        kind = type(request)
        question = {"request": f"{kind.__module__}:{kind.__name__}", "values": request._asdict()}
        try:
            return (await self.ask(question, request.seconds))["answer"]
        except NoAnswer as error:
            if error.late:
                raise AttemptError("timeout", request.too_slow, retry=False) from None
            raise AttemptError("grader", f"{kind.__name__}: {error}", retry=False) from error

    async def close(self) -> None:
        """Stop all idle processes; cancelling a question stops its process."""
        while self._idle:
            await _kill(self._idle.pop())

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_LONGEST_ANSWER,
        )
        try:
            assert process.stdout is not None
            await process.stdout.readline()  # "ready": the time limit does not include starting
        except BaseException:
            await _kill(process)
            raise
        return process


async def _answer(process: Process, question: dict[str, Any], stages: list[str]) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(question).encode() + b"\n")
    await process.stdin.drain()
    while True:
        line = json.loads(await process.stdout.readline())
        if isinstance(line, dict):
            return line
        stages.append(line)


async def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
