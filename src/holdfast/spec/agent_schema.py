"""Models of what agents work with: tools and workspaces."""

import re
from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from holdfast.spec.schema import Block, FunctionName, Size, Strings

MAX_RESULT: Final = 65_536
"""bytes of a tool's result by default"""


class McpBlock(Block):
    """A server of tools: a program that is started, or a URL."""

    command: list[str] = []
    """Program and arguments of a server on standard input and output. It is started in the trial's workspace, else
    in the eval file's folder."""
    url: str | None = Field(default=None, pattern=r"^(https?://|\$\{\w+\})")
    """Address of a server over HTTP. May name environment variables as `${NAME}`."""
    env: dict[str, str] = {}
    """Environment variables for the program. Values may name environment variables as `${NAME}`."""
    headers: dict[str, str] = {}
    """HTTP headers for the URL. Values may name environment variables as `${NAME}`."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if bool(self.command) == (self.url is not None):
            raise ValueError("must be either a `command` or a `url`")
        for name, value in self.env.items():
            if re.search(r"KEY|TOKEN|SECRET|PASSWORD", name.upper()) and "${" not in value:
                raise ValueError(f"keys are not written into files: {name}: ${{{name}}} takes it from the environment")
        return self


class ScriptedResponse(Block):
    """A response of a scripted tool to the calls that match. Without any `match` key it matches every call."""

    match: dict[str, Any] = {}
    """Match calls with exactly these arguments."""
    match_regex: dict[str, str] = {}
    """Match calls by a pattern (RE2) for each named argument. A value that is not text is matched as JSON."""
    match_schema: dict[str, Any] = {}
    """Match calls whose arguments fit this JSON Schema."""
    result: Any = None
    """Result to return. A value that is not text is returned as JSON."""
    error: str | None = None
    """Error to return instead of a result."""


class ScriptedTool(Block):
    """A tool that answers from a script: the first response that matches a call."""

    name: str = Field(min_length=1)
    """Name of the tool, as the model sees it."""
    description: str = ""
    """Description of the tool, as the model sees it."""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    """JSON Schema of the arguments, as the model sees it. Default: no arguments."""
    responses: list[ScriptedResponse] = Field(min_length=1)
    """Responses to choose from. The first one that matches a call is used; a call that matches none gets an error."""


class ToolBlock(Block):
    """Something a model may call: a Python function, a scripted tool, or the tools of an MCP server."""

    python: FunctionName | None = None
    """Function to call, as `file.py:function` or `package.module:function`. Its signature and docstring describe it
    to the model."""
    mcp: McpBlock | None = None
    """MCP server whose tools the model may call. Needs `pip install mcp`."""
    scripted: ScriptedTool | None = None
    """Tool that answers from a script instead of running code."""
    only: list[str] = []
    """Names of the MCP server's tools to offer. Default: all."""
    per: Literal["trial", "run"] = "trial"
    """Lifetime of an MCP server: one for each `trial`, or one that the whole `run` shares."""
    replay: Literal["record", "never", "again"] = "record"
    """How a call is handled after a crash. `record`: a finished call is answered from the record, and one that was cut
    off is made again. `never`, for side effects: the same, but a call that was cut off is not made again. `again`:
    calls run again to restore the tool's state."""
    on_cut_off: Literal["stop", "error_result", "restart"] | None = None
    """With `replay: never`, what happens if a call was cut off: the trial is uncertain and waits for
    `holdfast resume --settle` (`stop`, the default), the model gets an error as the result (`error_result`), or the
    trial begins again (`restart`)."""
    max_result: int = Field(default=MAX_RESULT, ge=256)
    """Maximum size of a result in bytes. Of a longer result the model gets the beginning and the end, with a mark that
    says how much is left out; no more is stored."""
    version: str | None = None
    """Change this when the tool answers differently from now on."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if [self.python, self.mcp, self.scripted].count(None) != 2:
            raise ValueError("must be either a `python` function, an `mcp` server or a `scripted` tool")
        if self.only and self.mcp is None:
            raise ValueError("`only` picks among the tools of an mcp server")
        if self.on_cut_off is not None and self.replay != "never":
            raise ValueError("`on_cut_off` is for tools with `replay: never`")
        return self


class WorkspaceBlock(Block):
    """A folder for each trial. Agents and tools work in it, graders look at it, and it is kept after each turn."""

    folder: str | None = None
    """Folder to copy into each trial's workspace, relative to the eval file."""
    files: str | None = None
    """Expression over the row that returns further files, as a mapping of paths to contents: a text, `{base64: …}`,
    or `{text: …, executable: true}`."""
    ignore: Strings = []
    """Files and folders that are not kept, as globs: a name such as `node_modules` or `*.log` at any depth, or a path
    from the top of the workspace such as `build/cache`. Graders do not see them."""
    max_size: Size = 5_000_000_000
    """Maximum size of the files that are kept, such as `500MB`. Of a larger workspace the largest files are left out,
    and the output names them. Default: `5GB`."""
