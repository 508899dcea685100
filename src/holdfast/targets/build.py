"""The target of an eval: what identifies it, and how it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from holdfast.spec.eval import Origin, code_sees_row
from holdfast.spec.named_inputs import TARGET, named_inputs, with_named_inputs
from holdfast.spec.target_schema import TARGETS
from holdfast.spec.template import normal_expression, normal_form

if TYPE_CHECKING:
    from holdfast.spec.eval import Eval
    from holdfast.targets.types import Target


def build_target(spec: Eval) -> Target:
    """Build the target, ready to be opened."""
    target = target_class(spec).build(spec.target, _origin(spec))
    if TARGETS.is_builtin(spec.target.kind):
        return target
    from holdfast.targets.guard import GuardedTarget

    return GuardedTarget(target, _origin(spec))


def target_identity(spec: Eval) -> dict[str, Any]:
    """Return everything of the target that can change an answer."""
    kind = target_class(spec)
    block = spec.target
    identity = {"kind": block.kind, **kind.identity(block, _origin(spec))}
    identity |= {name: normal_form(identity[name]) for name in block.templates if name in identity}
    identity |= {name: normal_expression(identity[name]) for name in block.expressions if name in identity}
    if not TARGETS.is_builtin(block.kind):
        from holdfast.functions.loading import module_source

        identity["source"] = module_source(kind.__module__, spec.folder)
    return with_named_inputs(identity, named_inputs(spec, TARGET, runs_code=_runs_code(spec)))


def _runs_code(spec: Eval) -> bool:
    """Return True if outputs may depend on code of the user: on more than the texts of the eval and its rows."""
    tools = any(tool.scripted is None for tool in getattr(spec.target, "tools", ()))
    player = spec.responder is not None and spec.responder.python is not None
    return tools or player or spec.hooks is not None or spec.target.kind not in ("model", "http")


def target_sees_row(spec: Eval) -> bool:
    """Return True if answers may depend on the row by more than what the eval file takes from it for the target."""
    return code_sees_row(spec) or target_class(spec).sees_row(spec.target, _origin(spec))


def target_class(spec: Eval) -> type[Target]:
    """Return the class of the target's kind."""
    return cast("type[Target]", TARGETS.load(spec.target.kind))


def _origin(spec: Eval) -> Origin:
    return Origin(spec, ("target",))
