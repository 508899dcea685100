"""Tools a model may call: Python functions, scripted responses, and what MCP servers offer.

A tool that fails does not fail the trial: the error goes back to the model as the tool's result. A tool that is gone,
such as a server that crashed, is an error of the attempt, which is retried. The traceback of a Python function is
recorded with the result; the model does not see it.
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from holdfast.errors import AttemptError, ConfigError, Fault, Problem
from holdfast.functions import Function, describe_error, function_source, load_function, user_traceback
from holdfast.spec.fingerprint import command_files
from holdfast.spec.plugins import load_reference
from holdfast.spec.redact import redact, shown_url
from holdfast.spec.regex import compile_re2
from holdfast.spec.schema import compile_json_schema
from holdfast.spec.target_schema import MAX_RESULT
from holdfast.targets.types import PROCESS, Home, ToolFailure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from holdfast.spec.eval import Eval
    from holdfast.spec.target_schema import ScriptedResponse, ScriptedTool, ToolBlock
    from holdfast.store.records import OnCutOff
    from holdfast.targets.types import Calls, Message, PastCall, ReplayPolicy, Turn

_MCP_SERVER = "holdfast.targets.mcp:McpServer"
_LONGEST_MARK = 80
"""bytes of the note about what is left out"""
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
_GOOGLE = re.compile(r"^\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.+(?:\n(?!\s+\w+\s*(?:\([^)]*\))?:)\s+.+)*)", re.MULTILINE)
_SPHINX = re.compile(r"^\s*:param\s+(?:\w+\s+)?(\w+):\s*(.+)", re.MULTILINE)


@dataclass(frozen=True)
class ToolContext:
    """The trial that a tool is called in, for functions with a parameter `context`."""

    sample: dict[str, Any]
    trial: int
    turn: int
    workspace: Path | None
    """the trial's folder, if the eval has a workspace"""
    call_id: str
    """the same whenever this call of this trial is made, even after a crash: a key for idempotent requests"""


@dataclass(frozen=True)
class Tool:
    """Something that can be called by name."""

    name: str
    description: str
    parameters: dict[str, Any]
    """a JSON Schema"""
    replay: ReplayPolicy
    run: Callable[[dict[str, Any], ToolContext], Awaitable[str | ToolFailure]]
    home: object = PROCESS
    """the object that holds the state which calls build"""
    on_cut_off: OnCutOff = "stop"
    """with `replay: never`"""
    max_result: int = MAX_RESULT
    """bytes"""

    def definition(self) -> dict[str, Any]:
        """Return the tool definition that is sent to the model."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ToolServer(Protocol):
    """A server that offers tools, for the length of a run."""

    async def open(self) -> None:
        """Check that the server can be reached; keep it open if all trials share it."""
        ...

    async def close(self) -> None:
        """Close a server that all trials share."""
        ...

    async def tools(self, calls: Calls) -> list[Tool]:
        """Return the tools that a trial can call."""
        ...


class Toolbox:
    """The tools of a target."""

    def __init__(self, blocks: Sequence[ToolBlock], spec: Eval) -> None:
        self._functions: list[Tool] = []
        self._servers: list[ToolServer] = []
        for number, block in enumerate(blocks):
            where = spec.document.where(("target", "tools", number))
            if block.python is not None:
                function = load_function(block.python, spec.folder, where, spec.functions)
                tool = function_tool(function, block.replay, where)
            elif block.scripted is not None:
                tool = scripted_tool(block.scripted, where)
            else:
                server: ToolServer = load_reference(_MCP_SERVER)(block, spec.folder, where, f"tools[{number}]")
                self._servers.append(server)
                continue
            self._functions.append(with_rules(tool, block))
        names = [tool.name for tool in self._functions]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError([Problem(spec.document.where(("target", "tools")), f"two tools called {name!r}")])

    async def __aenter__(self) -> Self:
        try:
            for server in self._servers:
                await server.open()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            await server.close()

    async def of(self, calls: Calls) -> dict[str, Tool]:
        """Return the tools that a trial can call, by name; starts the trial's own servers if needed."""
        tools = {tool.name: tool for tool in self._functions}
        for server in self._servers:
            for tool in await server.tools(calls):
                if tool.name in tools:
                    raise Fault("rejected", f"two tools called {tool.name!r}", remedy="Pick with `only`.")
                tools[tool.name] = tool
        return tools

    async def restore(self, tools: dict[str, Tool], turn: Turn) -> None:
        """Rebuild lost state by repeating earlier calls of the trial."""
        assert turn.calls is not None

        async def find(past: PastCall) -> Home | None:
            return find_home(tools, past, turn)

        await turn.calls.restore(find)

    @staticmethod
    async def answer(tools: dict[str, Tool], call: Any, turn: Turn) -> Message:
        """Return the message that answers a model's tool call."""
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise AttemptError("bad_reply", f"not a tool call: {call!r:.200}")
        text = function.get("arguments")
        try:
            arguments = msgspec.json.decode(text or "{}") if isinstance(text, str | None) else text
        except msgspec.DecodeError:
            arguments = text  # which is reported to the model
        result = await use(tools, function["name"], arguments, turn)
        return {"role": "tool", "tool_call_id": str(call.get("id") or ""), "name": function["name"], "content": result}


def with_rules(tool: Tool, block: ToolBlock) -> Tool:
    """Return a tool with the rules that its block has for all tools."""
    return replace(tool, replay=block.replay, on_cut_off=block.on_cut_off or "stop", max_result=block.max_result)


async def use(tools: dict[str, Tool], name: str, arguments: Any, turn: Turn) -> str:
    """Call a tool and record the call; an exception of the tool becomes its result."""
    assert turn.calls is not None
    tool = tools.get(name)
    run = functools.partial(_run, tools, name, arguments, turn, turn.number)
    if tool is None:
        return str(await turn.calls.tool(name, arguments, run, "record"))
    result = await turn.calls.tool(name, arguments, run, tool.replay, tool.home, on_cut_off=tool.on_cut_off)
    return str(result)


async def _run(
    tools: dict[str, Tool], name: str, arguments: Any, turn: Turn, number: int, call_id: str
) -> str | ToolFailure:
    assert turn.calls is not None
    tool = tools.get(name)
    if tool is None:
        return f"Error: there is no tool called {name!r}; there are: {', '.join(tools)}"
    if not isinstance(arguments, dict):
        return f"Error: the arguments are not a JSON object: {arguments!r:.200}"
    context = ToolContext(dict(turn.sample.fields), turn.trial, number, turn.calls.workspace, call_id)
    try:
        result = await tool.run(arguments, context)
    except (AttemptError, Fault):
        raise
    except Exception as error:  # raised by the tool: the model sees the error, and may do better
        result = _as_error(error)
    if isinstance(result, ToolFailure):
        return ToolFailure(limit_text(result.message, tool.max_result), result.traceback)
    return limit_text(result, tool.max_result)


def limit_text(text: str, most: int) -> str:
    """Limit a text to `most` bytes: a longer text keeps its beginning and its end, and a note of what is left out."""
    if len(text) <= most // 4:  # no character has more than four bytes
        return text
    data = text.encode(errors="replace")
    if len(data) <= most:
        return text
    half = (most - _LONGEST_MARK) // 2
    start, end = data[:half].decode(errors="ignore"), data[-half:].decode(errors="ignore")
    left_out = len(data) - len(start.encode()) - len(end.encode())
    return f"{start}\n[… {left_out:,} of {len(data):,} bytes left out …]\n{end}"


def _as_error(error: Exception) -> str:
    return as_text(f"Error: {redact(describe_error(error))}")


def find_home(tools: dict[str, Tool], past: PastCall, turn: Turn) -> Home | None:
    """Return the home of a past call of one of the tools; None unless the tool has `replay: again`."""
    tool = tools.get(past.name)
    if tool is None or tool.replay != "again":
        return None
    rerun = functools.partial(_run, tools, past.name, past.arguments, turn, past.turn, past.call_id)
    return Home(tool.home, rerun)


def function_tool(function: Callable[..., Any], replay: ReplayPolicy, where: str) -> Tool:
    """Make a tool of a Python function, described by its signature and docstring."""
    name = getattr(function, "__name__", type(function).__name__)
    parameters = inspect.signature(function).parameters
    description, documented = _parse_docstring(inspect.getdoc(function) or "")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError([Problem(where, f"the types of {name!r} cannot be read: {error}")]) from error
    fields: dict[str, Any] = {}
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise ConfigError([Problem(where, f"{name!r} takes {parameter}: tools are called with names")])
        if parameter.name == "context" or parameter.kind is parameter.VAR_KEYWORD:
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        about = Field(default, alias=parameter.name, description=documented.get(parameter.name))
        # Under names of its own: pydantic has rules for names such as `schema` and `_x`.
        fields[f"p{len(fields)}"] = (hints.get(parameter.name, Any), about)
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        schema = model.model_json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError, NameError) as error:
        message = f"{name!r} has a parameter that has no JSON Schema: {error}"
        raise ConfigError([Problem(where, message)]) from error
    schema = {key: value for key, value in schema.items() if key not in ("title", "additionalProperties")}
    called = Function(function, (*(about.alias for _, about in fields.values()), "context"), where)

    async def run(arguments: dict[str, Any], context: ToolContext) -> str | ToolFailure:
        try:
            values = _validate(model, arguments)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            return f"Error: wrong arguments: {wrong}"
        try:
            return as_text(await called({**values, "context": context}))
        except (AttemptError, Fault):
            raise
        except Exception as error:
            return ToolFailure(_as_error(error), as_text(user_traceback(error)))

    return Tool(name, description, {"properties": {}, **schema}, replay, run)


def _validate(model: type[BaseModel], arguments: dict[str, Any]) -> dict[str, Any]:
    checked = model.model_validate(arguments)
    return {str(model.model_fields[name].alias): getattr(checked, name) for name in checked.model_fields_set}


def as_text(result: Any) -> str:
    """Return a tool's result as a model reads it."""
    if isinstance(result, str):
        return result.encode("utf-8", "replace").decode()  # names of files may hold lone surrogates
    if result is None:
        return ""
    try:
        return msgspec.json.encode(result).decode()
    except (TypeError, ValueError):
        return as_text(str(result))


def _parse_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Return the description in a docstring, and the parameters' descriptions by name."""
    about = {match[1]: " ".join(match[2].split()) for match in _SPHINX.finditer(doc)}
    section = re.search(r"^(?:Args|Arguments|Parameters):\s*\n((?:[ \t]+.*\n?|\n)+)", doc, re.MULTILINE)
    if section is not None:
        about |= {match[1]: " ".join(match[2].split()) for match in _GOOGLE.finditer(section[1])}
    cut = min([match.start() for match in (_SECTION.search(doc), _SPHINX.search(doc)) if match] or [len(doc)])
    return doc[:cut].strip(), about


def tools_identity(blocks: Sequence[ToolBlock], spec: Eval) -> list[dict[str, Any]]:
    """Return everything of the tools that can change an answer."""
    return [_tool_identity(block, spec, number) for number, block in enumerate(blocks)]


def _tool_identity(block: ToolBlock, spec: Eval, number: int) -> dict[str, Any]:
    version: dict[str, Any] = {} if block.version is None else {"version": block.version}
    version["max_result"] = block.max_result
    if block.python is not None:
        where = spec.document.where(("target", "tools", number, "python"))
        name, source = function_source(block.python, spec.folder, where, spec.functions)
        return {"function": name, "source": source, **version}
    if block.scripted is not None:
        return {"scripted": block.scripted.model_dump(), **version}
    assert block.mcp is not None
    behind = command_files(spec.folder, block.mcp.command)
    server: dict[str, Any] = {"command": block.mcp.command, "env": block.mcp.env, "files": behind}
    if block.mcp.url is not None:
        server = {"url": shown_url(block.mcp.url)}
    return {"mcp": server, "only": block.only, **version}


def scripted_tool(block: ScriptedTool, where: str) -> Tool:
    """Return a tool that answers from its responses; a call that fits no response gets an error as its result."""
    responses = [(_matching(response, where), response) for response in block.responses]

    async def run(arguments: dict[str, Any], _: ToolContext) -> str:
        for fits, response in responses:
            if fits(arguments):
                if response.error is not None:
                    return f"Error: {response.error}"
                return as_text(response.result)
        return f"Error: no response of the scripted tool {block.name!r} fits these arguments"

    return Tool(block.name, block.description, block.parameters, "record", run)


def _matching(response: ScriptedResponse, where: str) -> Callable[[dict[str, Any]], bool]:
    """Return a test of a call's arguments: whether the response is for the call."""
    patterns = {name: _pattern(pattern, where) for name, pattern in response.match_regex.items()}
    valid: Callable[[Any], bool] = lambda _: True  # noqa: E731 - the alternative is a method
    if response.match_schema:
        try:
            valid = compile_json_schema(response.match_schema).is_valid
        except ValueError as error:
            raise ConfigError([Problem(where, f"match_schema is {error}")]) from error

    def fits(arguments: dict[str, Any]) -> bool:
        return (
            (not response.match or response.match == arguments)
            and all(
                name in arguments and pattern.search(as_text(arguments[name])) for name, pattern in patterns.items()
            )
            and valid(arguments)
        )

    return fits


def _pattern(source: str, where: str) -> Any:
    """Compile a pattern that is matched in linear time."""
    try:
        return compile_re2(source)
    except ValueError as error:
        message = f"match_regex: {source!r} is not a regular expression of RE2: {error}"
        raise ConfigError([Problem(where, message)]) from error
