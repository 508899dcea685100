"""Run the user's programs before and after a run and its trials. They are in no key.

A failing `before_run` stops the run. A failing `before_task` is an error of its trial, which stays pending; if the
first ones all fail, the run stops. Hooks that run afterwards find the results on disk, so they can only warn.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.containment.program import running
from holdfast.errors import AttemptError, Fault
from holdfast.spec.redact import redact
from holdfast.spec.trial_limits import time_beside_target
from holdfast.targets.command import for_environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from holdfast.plan.plan import PendingTrial
    from holdfast.spec.eval import Eval
    from holdfast.spec.eval_schema import HookBlock, HooksBlock

_SHOWN: Final = 400
_KEPT: Final = 8000


class _Failure(NamedTuple):
    """The failure of a hook."""

    message: str
    output: str = ""
    """the end of its output"""

    def __str__(self) -> str:
        return self.message


class Hooks:
    """The hooks of an eval."""

    def __init__(self, block: HooksBlock, spec: Eval, warn: Callable[[str], None]) -> None:
        self._block = block
        self._folder = spec.folder
        self._seconds = time_beside_target(spec)[1]
        self._warn = warn

    async def before_run(self) -> None:
        """Run the hooks before a run; raise Fault if a required one fails."""
        for hook in self._block.before_run:
            if (failure := await self._failure(hook, {})) is not None:
                if hook.error_on_fail:
                    raise Fault(
                        "refused",
                        f"hooks.before_run: {failure}",
                        remedy="Nothing was started. Fix the hook, then run the same command again.",
                    )
                self._warn(f"hooks.before_run: {failure}")

    async def after_run(self) -> None:
        """Run the hooks after a run, however the run ended."""
        for hook in self._block.after_run:
            if (failure := await self._failure(hook, {})) is not None:
                self._warn(f"hooks.after_run: {failure}")

    async def before_task(self, pending: PendingTrial) -> None:
        """Run the hooks before a trial; raise AttemptError if a required one fails."""
        for hook in self._block.before_task:
            if (failure := await self._failure(hook, _environment(pending))) is not None:
                if hook.error_on_fail:
                    remedy = "Fix the hook, then run the same command again: it resumes from here."
                    error = AttemptError("agent", f"hooks.before_task: {failure}", remedy=remedy, retry=False)
                    if "Traceback (most recent call last)" in failure.output:
                        error.traceback = failure.output
                    raise error
                self._warn(f"hooks.before_task of {pending.sample.id}: {failure}")

    async def after_task(self, pending: PendingTrial) -> None:
        """Run the hooks after a trial, however the trial ended."""
        for hook in self._block.after_task:
            if (failure := await self._failure(hook, _environment(pending))) is not None:
                self._warn(f"hooks.after_task of {pending.sample.id}: {failure}")

    async def _failure(self, hook: HookBlock, environment: dict[str, str]) -> _Failure | None:
        """Run a hook; return its failure, if it failed."""
        name, folder = hook.arguments[0], self._folder / hook.working_directory
        try:
            async with asyncio.timeout(self._seconds):
                code, output = await self._run(hook.arguments, folder, environment)
        except TimeoutError:
            return _Failure(f"{name} did not end within {self._seconds:g} s")
        except OSError as error:
            return _Failure(f"{name} cannot be run in {folder}: {error.strerror or error}")
        if code in hook.exit_codes:
            return None
        output = redact(output)
        return _Failure(f"{name} ended with {code}" + (f": {output[-_SHOWN:]}" if output else ""), output)

    async def _run(self, arguments: list[str], folder: Path, environment: dict[str, str]) -> tuple[int | str, str]:
        variables = {**os.environ, **environment}
        async with running(arguments, folder=folder, environment=variables, merged=True) as program:
            code = await program.wait()
        output = program.out[-_KEPT:].decode("utf-8", "replace").strip()
        return "an unknown code: the process that watches over it was killed" if code is None else code, output


def _environment(pending: PendingTrial) -> dict[str, str]:
    return {"HOLDFAST_SAMPLE": for_environment(pending.sample.id), "HOLDFAST_TRIAL": str(pending.trial)}
