"""Scripted tools: each call is answered by the first response in the eval file that fits its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError, Problem
from holdfast.targets.tools import Tool, as_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.spec.target_schema import ScriptedResponse, ScriptedTool
    from holdfast.targets.tools import ToolContext


def scripted_tool(block: ScriptedTool, where: str) -> Tool:
    """Return a tool that answers from its responses; a call that fits none gets an error as its result."""
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
        import jsonschema_rs  # few tools are told apart by schemas

        try:
            valid = jsonschema_rs.validator_for(response.match_schema, retriever=_no_retrieval).is_valid
        except ValueError as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError([Problem(where, f"match_schema is not a JSON Schema: {reason}")]) from error

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
    import re2  # type: ignore[import-untyped]  # few tools are told apart by patterns

    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(source, options)
    except re2.error as error:
        message = f"match_regex: {source!r} is not a regular expression of RE2: {error}"
        raise ConfigError([Problem(where, message)]) from error


def _no_retrieval(uri: str) -> dict[str, Any] | bool:
    raise ValueError(f"{uri} is not fetched; put what it refers to under $defs")
