"""Programs of the user's around a run and around its trials. What they do is in no key.

Only what comes before can fail something: a trial whose `before_task` fails is an error and stays pending, and when the
first all fail so the run stops; a failing `before_run` stops it at once. What comes after finds the results on disk,
and its failure is said and no more.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.errors import AttemptError, Fault
from holdfast.spec.redact import redact
from holdfast.targets.command import die_with_parent, for_environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from holdfast.plan.plan import PendingTrial
    from holdfast.spec.load import Eval
    from holdfast.spec.schema import HookBlock

_SHOWN: Final = 400
_KEPT: Final = 8000


class _Failure(NamedTuple):
    """What went wrong with a hook."""

    message: str
    output: str = ""
    """the end of what it wrote"""

    def __str__(self) -> str:
        return self.message


class Hooks:
    """The hooks of an eval."""

    @classmethod
    def of(cls, spec: Eval, notice: Callable[[str], None]) -> Hooks | None:
        """None where the eval has none: then a trial has nothing to do with them."""
        block = spec.hooks
        some = block.before_run or block.after_run or block.before_task or block.after_task
        return cls(spec, notice) if some else None

    def __init__(self, spec: Eval, notice: Callable[[str], None]) -> None:
        self._block = spec.hooks
        self._folder = spec.folder
        self._seconds = spec.limits.trial_timeout
        self._notice = notice
        self._in_child = die_with_parent()

    async def before_run(self) -> None:
        """Raises Fault where one fails that must not."""
        for hook in self._block.before_run:
            if (failure := await self._failure(hook, {})) is not None:
                if hook.error_on_fail:
                    raise Fault(
                        "refused",
                        f"hooks.before_run: {failure}",
                        remedy="Nothing was started. Fix the hook, then run the same command again.",
                    )
                self._notice(f"hooks.before_run: {failure}")

    async def after_run(self) -> None:
        """Whatever became of the run."""
        for hook in self._block.after_run:
            if (failure := await self._failure(hook, {})) is not None:
                self._notice(f"hooks.after_run: {failure}")

    async def before_task(self, pending: PendingTrial) -> None:
        """Raises AttemptError where one fails that must not."""
        for hook in self._block.before_task:
            if (failure := await self._failure(hook, _told(pending))) is not None:
                if hook.error_on_fail:
                    remedy = "Fix the hook, then run the same command again: it resumes from here."
                    error = AttemptError("agent", f"hooks.before_task: {failure}", remedy=remedy, retry=False)
                    if "Traceback (most recent call last)" in failure.output:
                        error.traceback = failure.output
                    raise error
                self._notice(f"hooks.before_task of {pending.sample.id}: {failure}")

    async def after_task(self, pending: PendingTrial) -> None:
        """Whatever became of the trial."""
        for hook in self._block.after_task:
            if (failure := await self._failure(hook, _told(pending))) is not None:
                self._notice(f"hooks.after_task of {pending.sample.id}: {failure}")

    async def _failure(self, hook: HookBlock, told: dict[str, str]) -> _Failure | None:
        """Run a hook to its end; what went wrong, in words."""
        name, place = hook.arguments[0], self._folder / hook.working_directory
        try:
            async with asyncio.timeout(self._seconds):
                code, said = await self._run(hook.arguments, place, told)
        except TimeoutError:
            return _Failure(f"{name} did not end within {self._seconds:g} s")
        except OSError as error:
            return _Failure(f"{name} cannot be run in {place}: {error.strerror or error}")
        if code in hook.exit_codes:
            return None
        said = redact(said)
        return _Failure(f"{name} ended with {code}" + (f": {said[-_SHOWN:]}" if said else ""), said)

    async def _run(self, arguments: list[str], place: Path, told: dict[str, str]) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            *arguments,
            cwd=place,
            env={**os.environ, **told},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=self._in_child,
        )
        try:
            out, _ = await process.communicate()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whatever it started goes with it
        assert process.returncode is not None
        return process.returncode, out[-_KEPT:].decode("utf-8", "replace").strip()


def _told(pending: PendingTrial) -> dict[str, str]:
    return {"HOLDFAST_SAMPLE": for_environment(pending.sample.id), "HOLDFAST_TRIAL": str(pending.trial)}
