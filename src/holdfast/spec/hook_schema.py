"""Models of programs that run around a run and around its trials."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from holdfast.spec.schema import Block


class HookBlock(Block):
    """A program to run before or after a run or a trial."""

    command: str | Annotated[list[str], Field(min_length=1)]
    """Program and arguments, as a list or as a text that is split at blanks. No shell is involved."""
    working_directory: str = "."
    """Folder to start in, relative to the eval file."""
    exit_codes: list[int] = [0]
    """Exit codes that count as success."""
    error_on_fail: bool = False
    """Let a failing `before_run` stop the run, and a failing `before_task` fail the trial. Otherwise failures are
    only reported."""

    @property
    def arguments(self) -> list[str]:
        """The program and its arguments."""
        return self.command.split() if isinstance(self.command, str) else list(self.command)

    @model_validator(mode="after")
    def _some_program(self) -> Self:
        if not self.arguments:
            raise ValueError("a hook's command is empty")
        return self


class HooksBlock(Block):
    """Programs around a run and around its trials. Never part of a key."""

    before_run: list[HookBlock] = []
    """Programs to run when a process starts generating."""
    after_run: list[HookBlock] = []
    """Programs to run when that process has finished generating."""
    before_task: list[HookBlock] = []
    """Programs to run before each trial."""
    after_task: list[HookBlock] = []
    """Programs to run after each trial, also after a failed one."""

    @property
    def present(self) -> bool:
        """True if there is a program to run."""
        return bool(self.before_run or self.after_run or self.before_task or self.after_task)
