"""The target of an eval: what identifies it, and how it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from holdfast.spec.load_targets import TARGETS
from holdfast.spec.origin import Origin

if TYPE_CHECKING:
    from holdfast.spec.load import Eval
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
    identity = {"kind": spec.target.kind, **kind.identity(spec.target, _origin(spec))}
    if not TARGETS.is_builtin(spec.target.kind):
        from holdfast.functions.loading import module_source

        identity["source"] = module_source(kind.__module__, spec.folder)
    return identity


def target_class(spec: Eval) -> type[Target]:
    """Return the class of the target's kind."""
    return cast("type[Target]", TARGETS.load(spec.target.kind))


def _origin(spec: Eval) -> Origin:
    return Origin(spec, ("target",))
