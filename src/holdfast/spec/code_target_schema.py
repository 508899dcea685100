"""Models of targets that are code on this machine: functions, programs and installed agents."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from holdfast.spec.agent_schema import ToolBlock
from holdfast.spec.schema import BaseUrl, Block, FunctionName
from holdfast.spec.target_schema import SESSION, TargetBlock


class StateBlock(Block):
    """Functions that save an agent's own state after each turn, and restore it after a crash."""

    save: FunctionName
    """Function called after each turn with `context`. It returns the state as JSON."""
    restore: FunctionName
    """Function called with `state` and `context` before a turn, when the previous turn failed or ran in another
    process."""


class PythonTarget(TargetBlock):
    """A Python function, `file.py:function`, relative to the eval file."""

    python: FunctionName
    """Function, class or object to call, as `file.py:name` relative to the eval file, or as `package.module:name`."""
    params: dict[str, Any] = {}
    """Values passed to the function as `context.params`."""
    version: str | None = None
    """Change this when the function answers differently for a reason its source does not show."""
    base_url: BaseUrl | None = None
    """Where `context.model` and `context.base_url` send requests: a URL or a list of URLs. Default: that of the model's
    provider; for requests to `context.base_url`, the provider whose API they use."""
    api_key_env: str | None = None
    """Environment variable that holds the API key. Default: that of the provider, such as `OPENAI_API_KEY`."""
    ignore: list[str] = []
    """Fields of requests to `context.base_url` that differ on every start, such as `metadata` or `input[].id`. A
    recorded call is found without them."""
    tools: list[ToolBlock] = []
    """Tools that `context.tool` can call by name."""
    state: StateBlock | None = None
    """Functions that save and restore the agent's own memory between turns."""

    multi_call: ClassVar[bool] = True
    works_alone: ClassVar[bool] = True

    @property
    def takes_files(self) -> bool:
        """True: `context.read` returns their content."""
        return True

    @property
    def label(self) -> str:
        """The file's name and the function, however the path is spelled."""
        return Path(self.python).name.removeprefix(SESSION)


class CommandTarget(TargetBlock):
    """A program; its standard output is the answer."""

    command: list[str] = Field(min_length=1)
    """Program and arguments. Each is a template with `prompt` and the row's fields."""
    stdin: str | None = None
    """Template of the text the program reads from standard input. Default: nothing."""
    env: str | None = None
    """Expression over the row that returns further environment variables, as a mapping of names to texts."""
    working_directory: str | None = None
    """Template of the folder in the workspace to start in. Default: the workspace itself."""
    path: list[str] = []
    """Folders of the workspace to search for programs first."""
    version: str | None = None
    """Change this when the program answers differently for a reason its files do not show."""
    proxy: bool = True
    """Set `OPENAI_BASE_URL`, `ANTHROPIC_BASE_URL` and `GOOGLE_GEMINI_BASE_URL` for the program, so that its model calls
    are recorded, counted and replayed."""
    base_url: BaseUrl | None = None
    """Where the proxy sends the program's model calls: a URL or a list of URLs. Default: the provider whose API the
    program uses, at `$OPENAI_BASE_URL`, `$ANTHROPIC_BASE_URL` or `$GOOGLE_GEMINI_BASE_URL` where they are set."""
    api_key_env: str | None = None
    """Environment variable that holds the API key. The proxy sends it; the program needs none. Default:
    `OPENAI_API_KEY`, `ANTHROPIC_API_KEY` or `GEMINI_API_KEY`, by the API."""
    ignore: list[str] = []
    """Fields of the program's requests that differ on every start, such as `metadata` or `input[].id`. A recorded call
    is found without them."""

    templates: ClassVar[tuple[str, ...]] = ("command", "stdin", "working_directory")
    expressions: ClassVar[tuple[str, ...]] = ("env",)
    sees_row: ClassVar[bool] = False
    multi_call: ClassVar[bool] = True
    works_alone: ClassVar[bool] = True
    has_exit_code: ClassVar[bool] = True

    @property
    def reports_cost(self) -> bool:
        """True if the program's model calls go through the proxy."""
        return self.proxy

    @property
    def counts_calls(self) -> bool:
        """True if the program's model calls go through the proxy."""
        return self.proxy

    @property
    def command_line(self) -> tuple[str, ...]:
        """The program and its arguments."""
        return tuple(self.command)

    @property
    def label(self) -> str:
        """The program's name."""
        return Path(self.command[0]).name


class AgentTarget(TargetBlock):
    """An agent that is installed as a program: Claude Code, or Codex."""

    agent: Literal["claude-code", "codex"]
    """The agent: `claude-code` or `codex`. It runs in the trial's workspace, without asking for permissions."""
    model: str = Field(min_length=1)
    """Name of the model, as the agent knows it."""
    args: list[str] = []
    """Further arguments of the program. Each is a template with `prompt` and the row's fields."""
    program: str | None = None
    """The program, as a path relative to the eval file, or as a name on the PATH. Default: `claude` or `codex`."""
    version: str | None = None
    """The version of the agent, which is part of the key. Another one that is installed is refused. Default: the one
    that is installed."""
    base_url: BaseUrl | None = None
    """Where the agent's model calls are sent: a URL or a list of URLs. Default: `$ANTHROPIC_BASE_URL` or
    `$OPENAI_BASE_URL`, else the provider."""
    api_key_env: str | None = None
    """Environment variable that holds the API key. Default: `ANTHROPIC_API_KEY` or `OPENAI_API_KEY`."""
    ignore: list[str] = []
    """Fields of the agent's requests that differ on every start, beside those that are known to."""

    templates: ClassVar[tuple[str, ...]] = ("args",)
    sees_row: ClassVar[bool] = False
    multi_call: ClassVar[bool] = True
    works_alone: ClassVar[bool] = True
    has_exit_code: ClassVar[bool] = True

    @property
    def label(self) -> str:
        """The agent and its model."""
        return f"{self.agent}-{self.model}"
