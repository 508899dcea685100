"""The answer equals the expected one as mathematics. Needs the extra `math`."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from holdfast.errors import AttemptError
from holdfast.graders.checks import expected_texts
from holdfast.graders.types import Verdict

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from holdfast.graders.types import Case
    from holdfast.spec.grader_fields import MathGrader

_WORKER: Final = [sys.executable, "-P", str(Path(__file__).with_name("mathematics_worker.py"))]
_LONGEST: Final = 1 << 24


class Mathematics:
    """Asks a worker process, one comparison at a time; one that takes too long costs the worker its life."""

    def __init__(self, block: MathGrader, fingerprint: str) -> None:
        self.block = block
        self.fingerprint = fingerprint
        self._worker: Process | None = None
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def judge(self, case: Case) -> Verdict:
        """1 when equal, else 0."""
        expected = expected_texts(self.block.expected, case.sample.fields)
        found, problem = None, None
        for text in expected:
            async with self._turn:
                answer = await self._ask({"expected": text, "answer": case.said(self.block)})
            if answer.get("equal"):
                return Verdict(1.0, "", {"found": answer["found"]})
            problem = problem or answer.get("error")
            found = found or answer.get("found")
        if problem is not None:
            raise AttemptError("grader", problem, retry=False)
        if found is None:
            return Verdict(0.0, "no mathematics found in the answer", {"found": None})
        wanted = " or ".join(text.strip()[:200] for text in expected[:5])
        return Verdict(0.0, f"found {found}, expected {wanted}", {"found": found})

    async def _ask(self, asked: dict[str, str]) -> dict[str, Any]:
        try:
            worker = self._worker or await self._start()
            assert worker.stdin is not None and worker.stdout is not None
            async with asyncio.timeout(self.block.timeout):
                worker.stdin.write(msgspec.json.encode(asked) + b"\n")
                await worker.stdin.drain()
                line = await worker.stdout.readline()
            return dict(msgspec.json.decode(line))
        except TimeoutError:
            await self._stop()
            raise AttemptError("timeout", f"no comparison within {self.block.timeout:g} s", retry=False) from None
        except (OSError, RuntimeError, msgspec.DecodeError) as error:
            await self._stop()
            raise AttemptError("grader", "the process that compares answers has died") from error
        except BaseException:
            await self._stop()  # told to stop in the middle: its next line would answer another question
            raise

    async def _start(self) -> Process:
        self._worker = await asyncio.create_subprocess_exec(
            *_WORKER,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_LONGEST,
        )
        assert self._worker.stdout is not None
        await self._worker.stdout.readline()  # it says that it is ready; only then the time begins to count
        return self._worker

    async def _stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            with suppress(ProcessLookupError):
                worker.kill()
            await worker.wait()
