"""Tools of MCP servers, through the official client.

A server is a program that talks over its standard input and output, or a URL. It lives as long as a trial, or as
long as the run. Each has a task of its own that holds the connection open, so that any other task may use it.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.containment.program import contained
from holdfast.errors import AttemptError, Fault
from holdfast.spec.fingerprint import check_program, is_file
from holdfast.spec.redact import bare_url, fill_variables
from holdfast.targets.tools import Tool, with_rules

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from holdfast.spec.target_schema import ToolBlock
    from holdfast.targets.tools import ToolContext
    from holdfast.targets.types import Calls

CALL_ID: Final = "holdfast/call_id"
"""field of a call's `_meta` that has the id of the call"""
_OPEN_SECONDS: Final = 60.0
_SHOWN: Final = 400


def mcp_client() -> Any:
    """Import the official package; raise Fault where it is missing."""
    try:
        import mcp
        import mcp.client.stdio
        import mcp.client.streamable_http
    except ImportError as error:
        raise Fault(
            "rejected", f"tools of MCP servers need the package mcp: {error}", remedy="pip install mcp"
        ) from error
    logging.getLogger("mcp").setLevel(logging.CRITICAL)  # errors come as exceptions
    return mcp


class McpServer:
    """An MCP server of `target.tools`."""

    def __init__(self, block: ToolBlock, folder: Path, where: str, name: str) -> None:
        assert block.mcp is not None
        self._block = block
        self._mcp = block.mcp
        self._folder = folder
        self._name = name
        self._env = {key: fill_variables(value, f"{where}: env") for key, value in block.mcp.env.items()}
        self._headers = {key: fill_variables(value, f"{where}: headers") for key, value in block.mcp.headers.items()}
        self._url = None if block.mcp.url is None else fill_variables(block.mcp.url, f"{where}: url")
        if self._url is None:
            check_program(block.mcp.command[0], folder, where, path_variable=self._env.get("PATH"))
        self._shared: Connection | None = None
        self._opening = asyncio.Lock()

    @property
    def label(self) -> str:
        """The server's name in messages."""
        return bare_url(self._mcp.url) if self._mcp.url is not None else " ".join(self._mcp.command)

    async def open(self) -> None:
        """Check that the server can be reached before a trial needs it; a shared connection stays open."""
        try:
            connection = await self._connect(None)
        except AttemptError as error:
            raise Fault(
                "refused", error.message, remedy="Start the server by hand to see what is wrong with it."
            ) from error
        if self._block.per == "run":
            self._shared = connection
        else:
            await connection.close()

    async def close(self) -> None:
        """Close a shared connection."""
        shared, self._shared = self._shared, None
        if shared is not None:
            await shared.close()

    async def tools(self, calls: Calls) -> list[Tool]:
        """Return the tools that the server offers to a trial."""
        if self._block.per == "trial":

            async def connect() -> Connection:
                return await self._connect(calls.workspace)

            connection: Connection = await calls.resource(self._name, connect)
        else:
            async with self._opening:
                if self._shared is None or not self._shared.alive:
                    await self.close()
                    self._shared = await self._connect(None)
            connection = self._shared
        return [self._tool(connection, offered) for offered in connection.offered if self._is_selected(offered.name)]

    def _is_selected(self, name: str) -> bool:
        return not self._block.only or name in self._block.only

    def _tool(self, connection: Connection, offered: Any) -> Tool:
        async def run(arguments: dict[str, Any], context: ToolContext) -> str:
            return _as_text(await connection.call(offered.name, arguments, {CALL_ID: context.call_id}))

        schema = dict(offered.input_schema)
        tool = Tool(offered.name, offered.description or "", schema, self._block.replay, run, home=connection)
        return with_rules(tool, self._block)

    async def _connect(self, workspace: Path | None) -> Connection:
        connection = Connection(self.label)
        await connection.open(self._client(workspace, connection))
        names = {tool.name for tool in connection.offered}
        if missing := set(self._block.only) - names:
            await connection.close()
            message = f"MCP server {self.label} has no tool called {', '.join(sorted(missing))}"
            raise Fault("rejected", message, remedy=f"Pick with `only` among {', '.join(sorted(names))}.")
        return connection

    def _client(self, workspace: Path | None, connection: Connection) -> AbstractAsyncContextManager[Any]:
        mcp = mcp_client()
        if self._url is not None:
            return _with_headers(self._url, self._headers) if self._headers else mcp.Client(self._url)
        command = [str(self._folder / word) if is_file(self._folder / word) else word for word in self._mcp.command]
        environment = dict(self._env)
        if workspace is not None:
            environment["HOLDFAST_WORKSPACE"] = str(workspace)
        program, *arguments = contained(command)
        parameters = mcp.client.stdio.StdioServerParameters(
            command=program, args=arguments, env=environment, cwd=workspace or self._folder
        )
        return mcp.Client(mcp.client.stdio.stdio_client(parameters, errlog=connection.stderr))  # type: ignore[no-any-return]


@asynccontextmanager
async def _with_headers(url: str, headers: dict[str, str]) -> AsyncIterator[Any]:
    """Connect a client that sends the user's headers."""
    import httpx2

    mcp = mcp_client()
    transport = mcp.client.streamable_http.streamable_http_client
    async with (
        httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(30, read=300)) as http,
        mcp.Client(transport(url, http_client=http)) as client,
    ):
        yield client


class Connection:
    """A connection to a server; `alive` until either side closes it."""

    def __init__(self, label: str) -> None:
        self._label = label
        self.stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        """of a server that is a program"""
        self.offered: list[Any] = []
        self.alive = False
        self._client: Any = None
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self, client: AbstractAsyncContextManager[Any]) -> None:
        """Connect, and list the tools."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(client, ready))
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                await ready
        except TimeoutError:
            await self.close()
            raise self._gone(f"did not answer within {_OPEN_SECONDS:.0f} s") from None
        except BaseException:
            await self.close()
            raise

    async def _hold(self, client: AbstractAsyncContextManager[Any], ready: asyncio.Future[None]) -> None:
        try:
            async with client as self._client:
                cursor: str | None = None
                while True:
                    page = await self._client.list_tools(cursor=cursor)
                    self.offered += page.tools
                    cursor = page.next_cursor
                    if not cursor:
                        break
                self.alive = True
                if not ready.done():
                    ready.set_result(None)
                await self._over.wait()
        except Exception as error:  # of the server, or of the connection
            if not ready.done():
                ready.set_exception(self._gone(_why(error)))
        finally:
            self.alive = False
            if not ready.done():
                ready.set_exception(self._gone("ended before it answered"))

    async def call(self, name: str, arguments: dict[str, Any], meta: dict[str, Any]) -> Any:
        """Call a tool, with `meta` as the request's `_meta`; raise AttemptError where the server is gone."""
        if self._task is None or not self.alive:
            raise self._gone("is gone")
        call = asyncio.ensure_future(self._client.call_tool(name, arguments, meta=meta))
        try:
            await asyncio.wait({call, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not call.done():
                call.cancel()
                await asyncio.wait({call})
        if call.cancelled():
            raise self._gone("ended during a call")
        error = call.exception()
        if error is None or _is_answer(error):
            return error or call.result()  # a call that the server refuses is reported to the model
        self.alive = False
        raise self._gone(_why(error)) from error

    async def close(self) -> None:
        """Close the connection; a program that does not exit is killed."""
        self._over.set()
        self.alive = False
        if self._task is not None:
            ended, _ = await asyncio.wait({self._task}, timeout=10)
            if not ended:
                self._task.cancel()
                await asyncio.wait({self._task}, timeout=5)
        self.stderr.close()

    def _gone(self, what: str) -> AttemptError:
        stderr = ""
        with suppress(ValueError, OSError):
            self.stderr.seek(0)
            stderr = self.stderr.read()[-_SHOWN:].strip()
        return AttemptError("agent", f"MCP server {self._label}: {what}" + (f"; stderr: {stderr}" if stderr else ""))


def _is_answer(error: BaseException) -> bool:
    """Tell the server's answer to a call from the end of the connection."""
    from mcp.shared.exceptions import MCPError

    closed = -32000  # the client's code for a closed connection
    return isinstance(error, MCPError) and getattr(error.error, "code", closed) != closed


def _why(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _as_text(result: Any) -> str:
    """Return a tool's result as a model reads it."""
    if isinstance(result, Exception):
        return f"Error: {result}"
    text = "\n".join(
        block.text if block.type == "text" else msgspec.json.encode(block.model_dump(mode="json")).decode()
        for block in result.content
    )
    if not text and result.structured_content is not None:
        text = msgspec.json.encode(result.structured_content).decode()
    return f"Error: {text}" if result.is_error else text
