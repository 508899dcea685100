"""Requirements of an eval and its tasks on the target: tools, a working directory, an environment.

Each is passed to the kinds of target that can use it. For the others it is rejected, or a notice says that it has no
effect.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from holdfast.formats.waza.commands import FOLDER, mock_commands
from holdfast.formats.waza.mocks import mocked_tools

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.formats.waza.findings import WazaFindings
    from holdfast.formats.waza.tasks import WazaTask
    from holdfast.spec.document import Document

_SECRET: Final = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)


def target_fields(findings: WazaFindings, document: Document, tasks: Sequence[WazaTask], kind: str) -> dict[str, Any]:
    """Return the fields of the target; values that differ between tasks are put into the rows."""
    fields: dict[str, Any] = {}
    if document.data.get("mcp_mocks") and (tools := _tools(findings, document, kind)):
        fields["tools"] = tools
    if _mocks_commands(findings, document, tasks, kind):
        for task in tasks:
            mock_commands(findings, document, task)
        fields["path"] = [FOLDER]
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
