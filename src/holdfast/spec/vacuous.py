"""Warns about checks that can hardly fail. They may be intended, so they are not rejected."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.spec.load import Eval


def vacuous_checks(spec: Eval) -> Iterator[str]:
    """Yield a notice for every check that passes, or fails, whatever the answer is."""
    for location, block in spec.placed_graders():
        for warning in block.idle_checks():
            yield f"{spec.document.where(location)}: {warning}"
    if spec.graders and all(block.weight == 0 for block in spec.graders):
        where = spec.document.where(("graders",))
        yield f"{where}: every grader has weight 0, so trials have no overall score and none passes"
