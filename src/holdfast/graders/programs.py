"""Graders that run code in the sandbox: a user's program, or assertions."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self

import msgspec
from pydantic import Field, model_validator

from holdfast.errors import AttemptError
from holdfast.graders.expected import expected_value, share
from holdfast.graders.sandbox import Confined, check_failure, restored_workspace, run_in
from holdfast.graders.tool_calls import NOT_SEEN, calls_of
from holdfast.graders.types import Verdict
from holdfast.spec.fingerprint import check_program, command_files, named_file
from holdfast.spec.grader_schema import Measure, OnTimeout, TextBlock
from holdfast.spec.schema import Names, Seconds
from holdfast.spec.template import is_template

if TYPE_CHECKING:
    from holdfast.graders.sandbox import ProgramResult
    from holdfast.graders.types import Case
    from holdfast.spec.eval import Origin

_TOOL_CALLS: Final = re.compile(r"\btool_calls\b")


class ProgramGrader(TextBlock):
    """Runs a program whose exit code is the verdict."""

    type: Literal["program"]
    command: str = Field(min_length=1)
    """Program to run: a file in the eval file's folder, or a program on the `PATH`."""
    args: tuple[str, ...] = ()
    """Arguments, as templates over the row; a list gives several arguments. An argument that names a file in the eval
    file's folder stands for that file."""
    timeout: Seconds = 30
    """Time limit of the program."""
    on_timeout: OnTimeout = "fail"
    """The result of a timeout: a failed check with score 0 (`fail`), or an `error` that the next command retries."""
    network: bool = False
    """Allow access to the network."""

    templates: ClassVar[tuple[str, ...]] = ("args",)
    instead: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"command": "the program is part of the key; its `args` take values of the row"}
    )
    runs_code: ClassVar[bool] = True

    @property
    def program(self) -> tuple[str, ...]:
        """The program and its arguments."""
        return (self.command, *self.args)


class Program(Confined):
    """Scores 1 if the program exits with code 0, else 0."""

    schema = ProgramGrader
    block: ProgramGrader

    def __init__(self, block: ProgramGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._folder = origin.folder
        if origin.spec.workspace is None or "/" not in block.command:  # otherwise the agent may create the program
            check_program(block.command, origin.folder, origin.where())

    @classmethod
    def identity(cls, block: ProgramGrader, origin: Origin) -> dict[str, Any]:
        """Add the contents of the files that the command names."""
        return {**block.identity(), "files": command_files(origin.folder, (block.command, *block.args))}

    async def judge(self, case: Case) -> Verdict:
        """Run the program with the output on standard input; its standard output is the feedback."""
        block = self.block
        arguments = [self._resolve(block.command)]
        for written in block.args:
            arguments += self._arguments(written, case)
        if any("\0" in argument for argument in arguments):
            raise AttemptError("grader", "an argument holds a NUL character", retry=False)
        async with restored_workspace(case) as sandbox:
            ran = await run_in(sandbox, arguments, case.text(block), block.timeout, network=block.network)
        if ran.killed is not None:
            return check_failure(case, _killed(ran, block.on_timeout))
        feedback = ran.out.strip() or ("" if ran.code == 0 else ran.err.strip()[-1000:])
        details = {"exit_code": ran.code, "stderr": ran.err.strip()[-1000:], "isolation": ran.isolation}
        return check_failure(case, Verdict(float(ran.code == 0), feedback or f"exit code {ran.code}", details))

    def _resolve(self, argument: str) -> str:
        """Return the full path of a file in the eval's folder, so that no trial can replace it."""
        path = named_file(self._folder, argument)
        return argument if path is None else str(path.resolve())

    def _arguments(self, written: str, case: Case) -> list[str]:
        """Render an argument; a list gives several. A template never names a file, which would be in no key."""
        if not is_template(written):
            return [self._resolve(written)]
        value = expected_value(written, case.sample.fields)
        values = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(each, str | int | float) for each in values):
            raise AttemptError("grader", f"{written!r} gives {value!r:.80} for this row, not a text", retry=False)
        return [str(each) for each in values]


class CodeGrader(TextBlock):
    """Evaluates expressions that must be true."""

    type: Literal["code"]
    assertions: Names = Field(min_length=1)
    """Expressions that must be true, each of which is one check."""
    language: Literal["python", "javascript"] = "python"
    """Language of the expressions. `javascript` needs `node`."""
    timeout: Seconds = 30
    """Time limit for all assertions together."""
    on_timeout: OnTimeout = "fail"
    """The result of a timeout: a failed check with score 0 (`fail`), or an `error` that the next command retries."""

    templates: ClassVar[tuple[str, ...]] = ()
    instead: ClassVar[Mapping[str, str]] = MappingProxyType({"assertions": "write sample['FIELD']"})

    @property
    def measures(self) -> tuple[Measure, ...]:
        """The time, if an assertion uses it. It is hidden from other assertions."""
        return ("seconds",) if any("duration_ms" in assertion for assertion in self.assertions) else ()

    @model_validator(mode="after")
    def _are_expressions(self) -> Self:
        if self.language == "python":
            for assertion in self.assertions:
                try:
                    compile(assertion.strip(), "assertion", "eval")
                except (SyntaxError, ValueError) as error:
                    raise ValueError(f"not a Python expression: {assertion!r} ({error})") from error
        return self


class Code(Confined):
    """Scores the share of assertions that are true."""

    schema = CodeGrader
    block: CodeGrader

    def __init__(self, block: CodeGrader, origin: Origin) -> None:
        super().__init__(block, origin)
        self._command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("assertions.py"))]
        if block.language == "javascript":
            self._command.append("javascript")
            if shutil.which("node") is None:
                raise origin.error("needs node, which is not on the PATH")

    async def judge(self, case: Case) -> Verdict:
        """Evaluate the assertions in child processes. If these end early or give no results, the output has failed."""
        if calls_of(case.output) is None and any(_TOOL_CALLS.search(text) for text in self.block.assertions):
            return NOT_SEEN
        names = _names(case, case.text(self.block), timed="seconds" in self.block.measures)
        question = {"assertions": self.block.assertions, "names": names}
        async with restored_workspace(case) as sandbox:
            ran = await run_in(sandbox, self._command, msgspec.json.encode(question).decode(), self.block.timeout)
        ready, _, answer = ran.out.partition("\n")
        if ready != "ready":
            how = ran.killed or f"exit code {ran.code}"
            message = f"the assertions could not be evaluated: {how}: {ran.err[-400:].strip()}"
            raise AttemptError("grader", message, retry=False)
        if ran.killed is not None:
            return check_failure(case, _killed(ran, self.block.on_timeout))
        results: list[tuple[bool, str]] = []
        with suppress(msgspec.MsgspecError):
            results = msgspec.json.decode(answer, type=list[tuple[bool, str]])
        if len(results) != len(self.block.assertions):
            reason = f"exit code {ran.code} before all assertions were evaluated"
            return check_failure(case, Verdict(0.0, reason, {"exit_code": ran.code, "isolation": ran.isolation}))
        failures = [
            f"{assertion.strip()} ({error})" if error else f"not true: {assertion.strip()}"
            for assertion, (holds, error) in zip(self.block.assertions, results, strict=True)
            if not holds
        ]
        return check_failure(case, share(len(results), failures, {"isolation": ran.isolation}))


def _killed(ran: ProgramResult, on_timeout: str) -> Verdict:
    """Return the verdict on a program that was killed: the output made it loop or crash."""
    assert ran.killed is not None
    if ran.timed_out and on_timeout == "error":
        raise AttemptError("timeout", ran.killed, retry=False)
    ended = {"exit_code": None, "killed": ran.killed, "stderr": ran.err.strip()[-1000:], "isolation": ran.isolation}
    return Verdict(0.0, ran.killed, ended)


def _names(case: Case, text: str, *, timed: bool) -> dict[str, Any]:
    """Return the names that assertions can use; the duration only if it is part of the key."""
    output = case.output
    calls = calls_of(output)
    return {
        "output": text,
        "sample": dict(case.sample.fields),
        "messages": case.messages,
        "transcript": case.messages,
        "tool_calls": [
            {"name": call.name, "arguments": call.arguments if call.raw is None else call.raw, "result": call.result}
            for call in calls or ()
        ],
        "errors": [],
        "outcome": {},
        **({"duration_ms": output.timing.seconds * 1000} if timed else {}),
    }
