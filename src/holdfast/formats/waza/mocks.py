"""`mcp_mocks`: waza's scripted MCP servers, as scripted tools of the target."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from holdfast.formats.waza.findings import at

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.formats.waza.findings import WazaFindings
    from holdfast.spec.document import Document, Location

_TOOL: Final = ("description", "input_schema", "responses")
_RESPONSE: Final = ("match", "match_schema", "match_regex", "return", "error")


def mocked_tools(findings: WazaFindings, document: Document) -> list[dict[str, Any]]:
    """Return the tools of all mocked servers, each named as agents see it: `server-tool`."""
    listed = document.data.get("mcp_mocks") or []
    if not isinstance(listed, list):
        findings.wrong(document, ("mcp_mocks",), "must be a list of {name: …, tools: …}")
        return []
    tools: list[dict[str, Any]] = []
    servers: set[str] = set()
    for number in range(len(listed)):
        place: Location = ("mcp_mocks", number)
        server = str(at(document, place).get("name") or "").strip()
        findings.keys(document, place, ("name", "fixtures", "tools"))
        if not server:
            findings.wrong(document, (*place, "name"), "is missing")
        elif server in servers:
            findings.wrong(document, (*place, "name"), f"duplicate server name {server!r}")
        servers.add(server)
        blocks = {**_fixtures(findings, document, place), **findings.block(document, place, "tools")}
        if not blocks:
            findings.wrong(document, place, "has no tools: give `tools`, or `fixtures` with a folder of .json files")
        for name, tool in blocks.items():
            scripted = _tool(findings, document, (*place, "tools", name), f"{server}-{name}", tool)
            tools += [] if scripted is None else [scripted]
    return tools


def _tool(findings: WazaFindings, document: Document, place: Location, name: str, tool: Any) -> dict[str, Any] | None:
    responses = tool.get("responses") if isinstance(tool, dict) else None
    if not isinstance(responses, list) or not responses or not all(isinstance(part, dict) for part in responses):
        findings.wrong(document, place, "needs `responses`, a list of {match: …, return: …}")
        return None
    unknown = [key for part in (tool, *responses) for key in part if key not in (*_TOOL, *_RESPONSE)]
    if unknown:
        findings.wrong(document, place, f"not supported in a mocked tool: {', '.join(sorted(set(unknown)))}")
        return None
    scripted: dict[str, Any] = {"name": name, "responses": [_response(part) for part in responses]}
    if tool.get("description"):
        scripted["description"] = str(tool["description"])
    if isinstance(tool.get("input_schema"), dict):
        scripted["parameters"] = tool["input_schema"]
    return {"scripted": scripted}


def _response(block: dict[str, Any]) -> dict[str, Any]:
    """Translate a response; the results of waza's mocks are always JSON, even texts."""
    conditions = {key: block[key] for key in ("match", "match_schema", "match_regex") if block.get(key)}
    if block.get("error"):
        return {**conditions, "error": str(block["error"])}
    return {
        **conditions,
        "result": json.dumps(block.get("return"), ensure_ascii=False, sort_keys=True, separators=(",", ":")),
    }


def _fixtures(findings: WazaFindings, document: Document, place: Location) -> dict[str, Any]:
    """Return the tools of a folder of .json files: one tool in each, or several under `tools`."""
    name = at(document, place).get("fixtures")
    if not name:
        return {}
    folder = findings.find(str(name))
    if folder is None or not folder.is_dir():
        findings.wrong(document, (*place, "fixtures"), findings.nowhere(str(name)))
        return {}
    tools: dict[str, Any] = {}
    for path in sorted(folder.rglob("*.json")):
        if any(part.startswith(".") for part in path.relative_to(folder).parts[:-1]):
            continue
        data = _decode(findings, document, (*place, "fixtures"), path)
        several = data.get("tools") if isinstance(data, dict) else None
        tools |= several if isinstance(several, dict) and several else {path.stem: data}
    return tools


def _decode(findings: WazaFindings, document: Document, place: Location, path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        findings.wrong(document, place, f"{path} cannot be read: {error}")
        return None
