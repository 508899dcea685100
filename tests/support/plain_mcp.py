"""An MCP server over standard input and output in a few lines: it starts at once, while the SDK's takes a second.

Tests copy it next to the server that they write, and use it like the SDK's `MCPServer`.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Function = Callable[..., str]


class MCPServer:
    """A server whose tools are functions that take texts and return one."""

    def __init__(self, name: str, **_: Any) -> None:
        self._name = name
        self._tools: dict[str, Function] = {}
        self.meta: dict[str, Any] = {}
        """`_meta` of the call that is being answered"""

    def tool(self) -> Callable[[Function], Function]:
        """Decorate a function that is a tool."""
        return lambda function: self._tools.setdefault(function.__name__, function)

    def run(self) -> None:
        """Answer requests until the client closes the connection."""
        for line in sys.stdin:
            request = json.loads(line)
            if "id" in request:
                answer = {"jsonrpc": "2.0", "id": request["id"], **self._answer(request)}
                sys.stdout.write(json.dumps(answer) + "\n")
                sys.stdout.flush()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        parameters = request.get("params", {})
        match request["method"]:
            case "initialize":
                about = {"name": self._name, "version": "1"}
                version = parameters["protocolVersion"]
                return {"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}}
            case "tools/list":
                return {"result": {"tools": [_describe(function) for function in self._tools.values()]}}
            case "tools/call":
                self.meta = parameters.get("_meta", {})
                return {"result": self._call(parameters["name"], parameters["arguments"])}
            case "ping":
                return {"result": {}}
            case method:
                return {"error": {"code": -32601, "message": f"no method {method}"}}

    def _call(self, name: str, arguments: dict[str, str]) -> dict[str, Any]:
        try:
            text, failed = self._tools[name](**arguments), False
        except ValueError:
            text, failed = f"Error executing tool {name}", True
        return {"content": [{"type": "text", "text": text}], "isError": failed}


def _describe(function: Function) -> dict[str, Any]:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    properties = {name: {"type": "string"} for name in names}
    schema = {"type": "object", "properties": properties, "required": list(names)}
    return {"name": function.__name__, "description": function.__doc__, "inputSchema": schema}
