"""Agents that are installed as programs, and how each is run: its command, its environment, and what differs each time.

An agent starts with an empty configuration folder of its own, so that neither the user's settings nor earlier trials
change what it does. After a crash it is started again in the restored workspace and repeats its requests; those that
are on record are answered from there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from holdfast.errors import ConfigError, Fault, Problem
from holdfast.spec.fingerprint import check_program, learn
from holdfast.spec.target_schema import AgentTarget, CommandTarget
from holdfast.targets.command import Command
from holdfast.targets.matching import Volatile
from holdfast.targets.types import Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.spec.eval import Origin
    from holdfast.targets.types import Reply, Turn


class Recipe(NamedTuple):
    """How an agent is run. It reads the prompt from standard input and prints its answer."""

    program: str
    package: str
    """of npm"""
    arguments: tuple[str, ...]
    home: str
    """the environment variable with its configuration folder"""
    environment: dict[str, str]
    model_option: str
    volatile: tuple[Volatile, ...]
    """beside what its API declares"""
    files: Callable[[str], dict[str, str]] = lambda url: {}  # noqa: ARG005 - most agents need none
    """files of its configuration folder, given the trial's base URL"""


def _codex_files(url: str) -> dict[str, str]:
    provider = {"name": "holdfast", "base_url": url, "env_key": "OPENAI_API_KEY", "wire_api": "responses"}
    settings = "".join(f"{name} = {json.dumps(value)}\n" for name, value in provider.items())
    # The built-in provider heeds no $OPENAI_BASE_URL, and its name cannot be given to another one.
    return {"config.toml": f'model_provider = "holdfast"\n\n[model_providers.holdfast]\n{settings}'}


_DATE: Final = re.compile(r"Today's date is [\d-]+|<current_date>[^<]*</current_date>")
_EXECUTION: Final = re.compile(r"(?m)^(?:Chunk ID|Wall time): .*$")

RECIPES: Final = {
    "claude-code": Recipe(
        program="claude",
        package="@anthropic-ai/claude-code",
        arguments=("--print", "--output-format", "text", "--dangerously-skip-permissions"),
        home="CLAUDE_CONFIG_DIR",
        environment={
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",  # else it refuses to skip permissions as root
        },
        model_option="--model",
        volatile=(Volatile("messages[].content", _DATE), Volatile("messages[].content[].text", _DATE)),
    ),
    "codex": Recipe(
        program="codex",
        package="@openai/codex",
        arguments=("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--ephemeral"),
        home="CODEX_HOME",
        environment={},
        model_option="--model",
        volatile=(
            Volatile("input[].content[].text", _DATE),
            Volatile("input[].output", _EXECUTION),
            Volatile("input[].output[].text", _EXECUTION),
        ),
        files=_codex_files,
    ),
}


class AgentProgram(Target):
    """Runs the agent's program once per trial, in the trial's workspace."""

    schema = AgentTarget
    block: AgentTarget

    def __init__(self, block: AgentTarget, origin: Origin) -> None:
        super().__init__(block, origin)
        where = origin.where("agent")
        if origin.spec.workspace is None:
            message = f"{block.agent} needs a workspace, since it changes the files of the folder in which it runs"
            raise ConfigError([Problem(where, message)], remedy="Write `workspace: {}` in the eval file.")
        self._recipe = recipe = RECIPES[block.agent]
        installed = _installed(block, origin)
        if block.version not in (None, installed):
            message = f"target.version is {block.version}, but {installed} is installed"
            remedy = f"npm install --global {recipe.package}@{block.version}, or change target.version."
            raise ConfigError([Problem(origin.where("version"), message)], remedy=remedy)
        command = CommandTarget(
            command=[_program(block), *recipe.arguments, recipe.model_option, block.model, *block.args],
            stdin="{{ prompt }}",
            base_url=block.base_url,
            api_key_env=block.api_key_env,
            ignore=block.ignore,
        )
        self._command = Command(command, origin, recipe.volatile)

    @classmethod
    def identity(cls, block: AgentTarget, origin: Origin) -> dict[str, Any]:
        """Return the agent with its version, the model, and the arguments."""
        version = block.version or _installed(block, origin)  # None in a plan, if it is not known yet
        return {"agent": block.agent, "version": version, "model": block.model, "args": block.args}

    async def __aenter__(self) -> Self:
        await self._command.__aenter__()
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._command.__aexit__(*details)

    @property
    def final_notices(self) -> list[str]:
        """What the agent's requests were charged for and no price is known of."""
        return self._command.final_notices

    async def reply(self, turn: Turn) -> Reply:
        """Run the agent to its end, with a configuration folder that is new and has the same name after a crash."""
        if turn.number > 1:
            raise Fault(
                "rejected",
                f"{self.block.agent} answers one prompt per trial",
                remedy="Remove follow_ups and responder, or write the agent as target.command.",
            )
        assert turn.calls is not None and turn.calls.workspace is not None
        home = turn.calls.workspace.with_name(f"{turn.calls.workspace.name}-home")
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(mode=0o700)
        try:
            for name, text in self._recipe.files(self._command.base_url(turn.calls)).items():
                (home / name).write_text(text)
            return await self._command.run(turn, {**self._recipe.environment, self._recipe.home: str(home)})
        finally:
            shutil.rmtree(home, ignore_errors=True)


def _program(block: AgentTarget) -> str:
    return block.program or RECIPES[block.agent].program


def _installed(block: AgentTarget, origin: Origin) -> str | None:
    """Return the version of the installed program; None in a plan, which starts no program, if no run has asked yet."""
    program, where = _program(block), origin.where("agent")
    try:
        check_program(program, origin.folder, where)
    except ConfigError as error:
        remedy = f"npm install --global {RECIPES[block.agent].package}, or name the program as target.program."
        raise ConfigError(error.problems, remedy=remedy) from error
    path = str(origin.folder / program) if "/" in program else shutil.which(program) or program

    def ask() -> str:
        version = _version_of(path)
        if version is None:
            raise ConfigError([Problem(where, f"{program} --version prints no version")])
        return version

    look = Path(path).stat()
    about = ["version", os.path.realpath(path), look.st_ino, look.st_size, look.st_mtime_ns]
    unknown = f"{where}: the version of {program} is unknown until it runs, and all trials count as not done"
    return learn(about, str, ask, unknown)


@cache
def _version_of(program: str) -> str | None:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    match = re.search(r"\d+\.\d+\.\d+[\w.+-]*", done.stdout)
    return match[0] if match else None
