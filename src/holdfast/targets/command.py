"""Runs a program as the target: its standard output is the answer."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Self

from holdfast.containment.program import running
from holdfast.errors import AttemptError, Fault, ProgramExited
from holdfast.spec.fingerprint import check_program, command_files, is_file
from holdfast.spec.target_schema import CommandTarget
from holdfast.spec.template import RENDER_ERRORS, expression, template
from holdfast.targets.asking import REPLY_BYTES
from holdfast.targets.types import Reply, Target

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from holdfast.spec.eval import Origin
    from holdfast.targets.matching import Volatile
    from holdfast.targets.proxy import Proxy
    from holdfast.targets.types import Calls, Turn

_SHOWN = 400


def for_environment(text: str) -> str:
    """Return a text as an environment variable can hold it: ids of rows may hold any character."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()


class Command(Target):
    """Runs the program once per turn, in the workspace, else in the eval's folder. All its processes end with it.

    Its environment has an OPENAI_BASE_URL that is this trial's, and those of other providers, so that its model calls
    are recorded.
    """

    schema = CommandTarget
    block: CommandTarget

    def __init__(self, block: CommandTarget, origin: Origin, volatile: Sequence[Volatile] = ()) -> None:
        super().__init__(block, origin)
        spec = origin.spec
        self._folder = spec.folder
        self._proxy: Proxy | None = None
        word, where = block.command[0], origin.where("command")
        # A program in the workspace may come from the row or the agent; one with a template depends on the row.
        if "{{" not in word and (spec.workspace is None or "/" not in word):
            check_program(word, spec.folder, where, by_name=spec.workspace is not None)
        if block.proxy:
            from holdfast.targets.proxy import Proxy

            self._proxy = Proxy(block, spec.prices, volatile)

    @classmethod
    def identity(cls, block: CommandTarget, origin: Origin) -> dict[str, Any]:
        """Return the command, its input and environment, and the contents of the files that the command names."""
        identity = block.model_dump(include={"command", "stdin", "version"})
        later = {"env", "working_directory", "path"}  # not in keys from before these existed
        identity |= block.model_dump(include=later, exclude_defaults=True)
        return {**identity, "files": command_files(origin.folder, block.command)}

    async def __aenter__(self) -> Self:
        if self._proxy is not None:
            await self._proxy.__aenter__()
        return self

    async def __aexit__(self, *details: object) -> None:
        if self._proxy is not None:
            await self._proxy.__aexit__(*details)

    @property
    def final_notices(self) -> list[str]:
        """What the program's requests were charged for and no price is known of."""
        return [] if self._proxy is None else self._proxy.final_notices

    def base_url(self, calls: Calls) -> str:
        """Return the base URL of a trial at the proxy."""
        assert self._proxy is not None
        return self._proxy.base_url(calls)

    async def reply(self, turn: Turn) -> Reply:
        """Run the program to its end."""
        return await self.run(turn, {})

    async def run(self, turn: Turn, variables: Mapping[str, str]) -> Reply:
        """Run the program to its end, with further environment variables."""
        calls = turn.calls
        if calls is None:
            return await self._run(turn, None, dict(os.environ))
        environment = {
            **os.environ,
            **variables,
            "HOLDFAST_SAMPLE": for_environment(turn.sample.id),
            "HOLDFAST_TURN": str(turn.number),
        }
        if turn.deadline is not None:
            environment["HOLDFAST_DEADLINE"] = str(int(turn.deadline))
        if calls.workspace is not None:
            environment["HOLDFAST_WORKSPACE"] = str(calls.workspace)
            if folders := [str(calls.workspace / folder) for folder in self.block.path]:
                environment["PATH"] = os.pathsep.join([*folders, environment.get("PATH", os.defpath)])
        if self._proxy is None:
            return await self._run(turn, calls.workspace, environment)
        environment |= self._proxy.variables(calls)
        self._proxy.admit(calls)
        try:
            return await self._run(turn, calls.workspace, environment)
        finally:
            self._proxy.dismiss(calls)

    def _environment(self, fields: dict[str, Any]) -> dict[str, str]:
        """Return the variables that the row adds to the program's environment."""
        if self.block.env is None:
            return {}
        added = expression(self.block.env)(fields)
        if not isinstance(added, dict) or not all(isinstance(value, str) for value in added.values()):
            raise TypeError(f"target.env gives {added!r:.80}, not a map of names to texts")
        return {str(name): for_environment(value) for name, value in added.items()}

    def _place(self, workspace: Path | None, fields: dict[str, Any]) -> Path:
        """Return the folder in which the program starts."""
        start = workspace or self._folder
        name = template(self.block.working_directory or "").render(fields)
        place = start / name
        if not place.resolve().is_relative_to(start.resolve()):
            raise ValueError(f"target.working_directory: {name!r} is outside the workspace")
        if not place.is_dir():
            raise AttemptError(
                "agent", f"target.working_directory: there is no folder {name!r} in the workspace", retry=False
            )
        return place

    async def _run(self, turn: Turn, workspace: Path | None, environment: dict[str, str]) -> Reply:
        fields = {**turn.sample.fields, "prompt": turn.prompt, "messages": turn.messages, "trial": turn.trial}
        try:
            arguments = [template(argument).render(fields) for argument in self.block.command]
            if workspace is not None:
                # Only words of the eval file name files of its folder: text that comes from a row does not.
                arguments = [
                    str(self._folder / word) if word == written and is_file(self._folder / word) else word
                    for written, word in zip(self.block.command, arguments, strict=True)
                ]
            stdin = None if self.block.stdin is None else template(self.block.stdin).render(fields)
            environment |= self._environment(fields)
            place = self._place(workspace, fields)
        except RENDER_ERRORS as error:
            raise AttemptError("bad_request", f"cannot render target.command: {error}", retry=False) from error
        if any("\0" in argument for argument in arguments):  # the rest would be cut off silently
            raise AttemptError("agent", "an argument of target.command holds a NUL character", retry=False)
        program, text = None, None if stdin is None else stdin.encode()
        try:
            async with running(
                arguments, folder=place, environment=environment, stdin=text, most_bytes=REPLY_BYTES.get()
            ) as program:
                code = await program.wait()
        except (FileNotFoundError, PermissionError) as error:
            raise Fault(
                "refused",
                f"{arguments[0]} cannot be run: {error.strerror}",
                remedy=f"target.command runs in {place}; check the path and that it is executable.",
            ) from error
        except OSError as error:
            raise AttemptError("agent", f"{arguments[0]} cannot be run: {error}", retry=False) from error
        except asyncio.CancelledError as cancelled:
            if program is not None:
                if turn.calls is not None:
                    turn.calls.text_so_far = _answer(program.out)
                if end := _end(program.out, program.err):
                    cancelled.add_note(f"{arguments[0]} had printed: {end}")  # for the message of a time-out
            raise
        if program.printed_too_much:
            message = f"{arguments[0]} printed more than {REPLY_BYTES.get():,} bytes (limits.reply_bytes)"
            raise AttemptError("bad_reply", message, retry=False)
        if code is None:
            raise AttemptError("agent", f"the process that watches over {arguments[0]} was killed")
        if code != 0:
            message = f"{arguments[0]} ended with {code}: {_end(program.out, program.err)}"
            if ended_by_itself(code):
                raise ProgramExited(message, code, _answer(program.out))
            raise AttemptError("agent", message)
        return Reply(text=_answer(program.out))


def ended_by_itself(code: int) -> bool:
    """Return True for an exit code that a program chose, False for one that says it was killed, or never started.

    A negative code is a signal. Shells say 128 + N after signal N, and 126 or 127 if they could not start a program.
    """
    return 0 < code <= 125 or code == 128 or code > 192


def _answer(out: bytearray) -> str:
    return out.decode("utf-8", "replace").strip("\n")


def _end(out: bytearray, err: bytearray) -> str:
    """Return the end of a program's standard error, or of its standard output where that is empty."""
    stream = err if err.strip() else out
    return stream[-_SHOWN:].decode("utf-8", "replace").strip()
