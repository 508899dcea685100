"""The target of an eval, read by the schema of its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from holdfast.errors import Problem
from holdfast.spec.plugins import Registry
from holdfast.spec.target_schema import TargetBlock
from holdfast.spec.validation import suggest, validate_block

if TYPE_CHECKING:
    from holdfast.spec.document import Document

TARGETS = Registry(
    "holdfast.targets",
    "target type",
    {
        "model": "holdfast.targets.model:Model",
        "python": "holdfast.targets.python:PythonFunction",
        "http": "holdfast.targets.http:HttpWorkflow",
        "command": "holdfast.targets.command:Command",
        "agent": "holdfast.targets.agents:AgentProgram",
    },
)
"""Every kind of target: a class that owns its schema. Built-in kinds are named by a key, plug-ins by `type`."""


def read_target(data: Any, document: Document, problems: list[Problem], key: str = "target") -> TargetBlock | None:
    """Read a target's block; adds to `problems` what is wrong with it."""
    if not isinstance(data, dict):
        return None  # the schema of the whole file reports it
    kind = target_kind(data)
    if kind is None:
        named = [name for name in (*TARGETS, "type") if name in data]
        suggestions = filter(None, (suggest(str(name), TARGETS) for name in data))
        end = f", not {' and '.join(named)}" if named else next(suggestions, "")
        message = f"needs exactly one of {', '.join(TARGETS)}, or `type: NAME` of a plug-in{end}"
        problems.append(Problem(document.where((key,)), message))
        return None
    try:
        schema = _schema(kind)
    except ValueError as error:
        problems.append(Problem(document.where((key, "type")), str(error)))
        return None
    fields = {name: value for name, value in data.items() if name != "type"}
    block = cast("TargetBlock | None", validate_block(schema, fields, (key,), document, problems))
    return None if block is None else block.with_kind(kind)


def target_kind(data: dict[str, Any]) -> str | None:
    """Return the kind that a target's block names; None where it names none, or several."""
    kinds = [kind for kind in TARGETS if kind in data]
    if "agent" in kinds:
        kinds = [kind for kind in kinds if kind != "model"]  # which is a key of agents too
    if "type" in data:
        return None if kinds else str(data["type"])
    return kinds[0] if len(kinds) == 1 else None


def _schema(kind: str) -> type[TargetBlock]:
    schema = getattr(TARGETS.load(kind), "schema", None)
    if not (isinstance(schema, type) and issubclass(schema, TargetBlock)):
        message = f"the class of the target type {kind!r} has no `schema` that is a holdfast.TargetBlock"
        raise ValueError(message)  # noqa: TRY004 - users see it as a wrong value in their file
    return schema
