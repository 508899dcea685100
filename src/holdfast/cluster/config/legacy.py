"""Keys that configurations for earlier launchers have elsewhere, moved to their place of today."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.cluster.config.provenance import Tree
from holdfast.spec.document import dotted

if TYPE_CHECKING:
    from collections.abc import Sequence

Move = tuple[tuple[str, ...], tuple[str, ...]]
MOVED: tuple[Move, ...] = ((("execution", "auto_export", "configs"), ("export",)),)
"""in a configuration"""
MOVED_IN_TASKS: tuple[Move, ...] = (
    (("config", "target"), ("target",)),
    (("config", "params", "max_tokens"), ("config", "params", "max_new_tokens")),
)
"""in the nemo_evaluator_config of a task"""


def in_newer_words(values: Tree, moves: Sequence[Move], notices: list[str]) -> Tree:
    """The same with nothing in an older place, and a word about each that was; what stands in the newer goes before."""
    for old, new in moves:
        value = values.get(*old)
        if value is None:
            continue
        notices.append(f"{values.where(old)}: is of the older dialect: write {dotted(new)}")
        moved = Tree()
        if isinstance(value, dict):
            moved = values.below(old).at(new)
        else:
            moved.put(new, value, values.origin(old))
        values.remove(old)
        values = values.over(moved)
    return values
