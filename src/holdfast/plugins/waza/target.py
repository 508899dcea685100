"""Requirements of an eval and its tasks on the target: tools, mocks, a working directory, an environment.

Each is passed to the kinds of target that can use it. For the others it is rejected, or a notice says that it has no
effect.
"""

from __future__ import annotations

import base64
import json
import re
from typing import TYPE_CHECKING, Any, Final

from holdfast.plugins.waza.files import is_below
from holdfast.plugins.waza.findings import at
from holdfast.plugins.waza.graders import TranslatedGrader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from holdfast import Document
    from holdfast.plugins.waza.findings import WazaFindings
    from holdfast.plugins.waza.tasks import WazaTask
    from holdfast.spec.document import Location

_SECRET: Final = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_MOCKS_FOLDER: Final = ".command-mocks"

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_COMMAND_RESPONSE: Final = ("args", "args_regex", "environment", "workdir", "stdout", "stderr", "exit_code", "fixture")

_PROGRAM: Final = """\
#!/usr/bin/env python3
import base64, json, os, re, sys

name, responses = json.loads(%s)
args, place = sys.argv[1:], os.environ["HOLDFAST_WORKSPACE"]


def fits(response):
    if "args" in response:
        same = response["args"] == args
    else:
        patterns = response["args_regex"]
        same = len(patterns) == len(args) and all(map(re.fullmatch, patterns, args))
    return (
        same
        and all(os.environ.get(key) == value for key, value in response["environment"].items())
        and response["workdir"] in (None, os.path.relpath(os.getcwd(), place))
    )


found = next((number for number, response in enumerate(responses) if fits(response)), -1)
answer = responses[found] if found >= 0 else {
    "stdout": "", "stderr": f"command mock: no response of {name} fits these arguments\\n", "exit_code": 127
}
with open(os.path.join(place, "%s", "calls.jsonl"), "a") as file:
    file.write(json.dumps({"command": name, "response": found, "exit_code": answer["exit_code"]}) + "\\n")
sys.stdout.buffer.write(base64.b64decode(answer["stdout"]))
sys.stdout.flush()
sys.stderr.write(answer["stderr"])
sys.exit(answer["exit_code"])
"""

_COUNT: Final = """\
import json, os, sys
path = ".command-mocks/calls.jsonl"
calls = [json.loads(line) for line in open(path)] if os.path.exists(path) else []
count = sum(call["command"] == sys.argv[1] for call in calls)
print(f"{sys.argv[1]} was called {count} times, {sys.argv[2]} were expected")
sys.exit(count != int(sys.argv[2]))
"""
_TOOL_KEYS: Final = ("description", "input_schema", "responses")
_TOOL_RESPONSE: Final = ("match", "match_schema", "match_regex", "return", "error")


def target_fields(findings: WazaFindings, document: Document, tasks: Sequence[WazaTask], kind: str) -> dict[str, Any]:
    """Return the fields of the target; values that differ between tasks are put into the rows."""
    fields: dict[str, Any] = {}
    if document.data.get("mcp_mocks") and (tools := _tools(findings, document, kind)):
        fields["tools"] = tools
    if _mocks_commands(findings, document, tasks, kind):
        for task in tasks:
            mock_commands(findings, document, task)
        fields["path"] = [_MOCKS_FOLDER]
    if any(task.workdir for task in tasks) and _starts_in_workdir(findings, tasks, kind):
        for task in tasks:
            task.row["workdir"] = task.workdir
        fields |= {"working_directory": "{{ workdir }}"} if kind == "command" else {}
    if any(task.environment for task in tasks) and _has_environment(findings, tasks, kind):
        for task in tasks:
            task.row["environment"] = task.environment
        fields |= {"env": "environment"} if kind == "command" else {}
    return fields


def _tools(findings: WazaFindings, document: Document, kind: str) -> list[dict[str, Any]]:
    tools = mocked_tools(findings, document)
    match kind:
        case "model" | "python":
            return tools
        case "mock":
            findings.notice(document, ("mcp_mocks",), "the mock executor calls no tools, here as in waza")
        case "command" | "http":
            message = f"not supported with target.{kind}, which brings its own tools; use target.model or target.python"
            findings.wrong(document, ("mcp_mocks",), message)
    return []


def _mocks_commands(findings: WazaFindings, document: Document, tasks: Sequence[WazaTask], kind: str) -> bool:
    sources = [source for source in (document, *(task.document for task in tasks)) if source.data.get("command_mocks")]
    if not sources or kind in ("command", ""):
        return kind == "command" and bool(sources)
    runs_none = "the mock executor runs no commands, here as in waza" if kind == "mock" else f"target.{kind} runs none"
    findings.wrong(sources[0], ("command_mocks",), f"not supported: {runs_none}; use target.command")
    return False


def _starts_in_workdir(findings: WazaFindings, tasks: Sequence[WazaTask], kind: str) -> bool:
    first = next(task for task in tasks if task.workdir)
    match kind:
        case "model":
            findings.notice(first.document, ("inputs", "workdir"), "a model has no working directory")
        case "python":
            findings.notice(
                first.document, ("inputs", "workdir"), "is the row's field `workdir`, for the function to use"
            )
        case "http":
            findings.wrong(
                first.document, ("inputs", "workdir"), "not supported: a workflow behind HTTP has no workspace"
            )
    return kind in ("command", "python")


def _has_environment(findings: WazaFindings, tasks: Sequence[WazaTask], kind: str) -> bool:
    if kind not in ("command", "python"):
        first = next(task for task in tasks if task.environment)
        message = "has no effect: the mock executor, models and workflows behind HTTP start no program"
        findings.notice(first.document, ("inputs", "environment"), message)
        return False
    for task in tasks:
        for name in task.environment:
            if _SECRET.search(name):
                message = "keys are not written into files: leave it out, and set it where `holdfast eval` is started"
                findings.wrong(task.document, ("inputs", "environment", name), message)
        if kind == "python" and task.environment:
            message = "is the row's field `environment`, for the function to use"
            findings.notice(task.document, ("inputs", "environment"), message)
    return True


def mock_commands(findings: WazaFindings, document: Document, task: WazaTask) -> None:
    """Put the mocked programs of a task into its workspace; the task's mocks replace the eval's."""
    source = task.document if task.document.data.get("command_mocks") is not None else document
    for place, block in findings.blocks(source, ("command_mocks",), "{name: …, responses: …}"):
        findings.keys(source, place, ("name", "responses", "expect_calls"))
        name, expected = str(block.get("name") or ""), block.get("expect_calls")
        responses = list(_responses(findings, source, place))
        if not _NAME.fullmatch(name) or name in ("env", "python3"):
            findings.wrong(source, (*place, "name"), "names a program, and not env or python3, which run the mocks")
        elif f"{_MOCKS_FOLDER}/{name}" in task.checkout:
            findings.wrong(source, (*place, "name"), f"duplicate program name {name!r}")
        elif not responses:
            findings.wrong(source, place, "needs `responses`, a list of {args: …, stdout: …}")
        else:
            script = _PROGRAM % (repr(json.dumps([name, responses])), _MOCKS_FOLDER)
            task.checkout[f"{_MOCKS_FOLDER}/{name}"] = {"text": script, "executable": True}
        if expected is not None and findings.is_number(expected, source, (*place, "expect_calls"), 0):
            fields = {"type": "program", "name": f"command_mock/{name}", "command": "python3"}
            task.graders.append(
                TranslatedGrader({**fields, "args": ["-c", _COUNT, name, str(expected)]}, source, place, {})
            )


def _responses(findings: WazaFindings, source: Document, mock: Location) -> Iterator[dict[str, Any]]:
    for place, block in findings.blocks(source, (*mock, "responses"), "{args: …, stdout: …}"):
        findings.keys(source, place, _COMMAND_RESPONSE)
        kinds = [kind for kind in ("args", "args_regex") if block.get(kind) is not None]
        workdir, code = block.get("workdir"), block.get("exit_code") or 0
        if len(kinds) != 1:
            findings.wrong(source, place, "needs either args or args_regex")
            continue
        if not findings.is_number(code, source, (*place, "exit_code"), 0, 255):
            continue
        if workdir is not None and not is_below(str(workdir)):
            findings.wrong(source, (*place, "workdir"), "names a folder of the workspace, without `..`")
            continue
        stdout = block.get("stdout")
        data: bytes | None = b"" if stdout is None else str(stdout).encode()
        if stdout is not None and not isinstance(stdout, str):
            data = json.dumps(stdout, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
        if block.get("fixture"):
            data = findings.read(source, (*place, "fixture"), str(block["fixture"]))
        yield {
            kinds[0]: findings.texts(source, (*place, kinds[0])),
            "environment": findings.block(source, place, "environment"),
            "workdir": None if workdir is None else str(workdir),
            "stdout": base64.b64encode(data or b"").decode(),
            "stderr": str(block.get("stderr") or ""),
            "exit_code": code,
        }


def mocked_tools(findings: WazaFindings, document: Document) -> list[dict[str, Any]]:
    """Return the tools of all mocked servers, each named as agents see it: `server-tool`."""
    tools: list[dict[str, Any]] = []
    servers: set[str] = set()
    for place, block in findings.blocks(document, ("mcp_mocks",), "{name: …, tools: …}"):
        server = str(block.get("name") or "").strip()
        findings.keys(document, place, ("name", "fixtures", "tools"))
        if not server:
            findings.wrong(document, (*place, "name"), "is missing")
        elif server in servers:
            findings.wrong(document, (*place, "name"), f"duplicate server name {server!r}")
        servers.add(server)
        blocks = {**_tool_fixtures(findings, document, place), **findings.block(document, place, "tools")}
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
    unknown = [key for part in (tool, *responses) for key in part if key not in (*_TOOL_KEYS, *_TOOL_RESPONSE)]
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


def _tool_fixtures(findings: WazaFindings, document: Document, place: Location) -> dict[str, Any]:
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
