"""Which fields of a row the target sees, and which a grader sees.

A field that only graders read is in no key of an output: a corrected label is graded again, and calls nobody. Templates
and expressions name their fields, and have no other way to a row. Code that gets the whole row may read any field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.spec.load_graders import templates_in
from holdfast.spec.schema import FILE_KINDS
from holdfast.spec.template import expression, template

if TYPE_CHECKING:
    from holdfast.spec.grader_schema import GraderBlock
    from holdfast.spec.load import Eval


def fields_of_target(spec: Eval) -> frozenset[str] | None:
    """Return the fields of a row that can change an output; None if the target may see all of them.

    The messages of an eval whose rows have files are left out: their contents are digested as they are sent.
    """
    if spec.target.sees_row or code_sees_row(spec):
        return None
    with_files = spec.messages_from is not None or any(
        location[-1] in FILE_KINDS for block in spec.messages for location, _ in block.templated()
    )
    names: set[str] = set()
    for each in spec.templates():
        if each.grader is None and not (with_files and each.location[0] == "messages"):
            compiled = each.compile()
            if compiled.takes_row:
                return None
            names |= compiled.names - each.variables
    for location, formula in spec.expressions():
        if location[0] not in ("graders", "checkpoints") and location != ("messages",):
            asked = expression(formula)
            if asked.takes_row:
                return None
            names |= asked.names
    return frozenset(names)


def code_sees_row(spec: Eval) -> bool:
    """Return True if other code of the user gets the row: tools, the simulated user, hooks before a trial."""
    tools = [tool.python for tool in getattr(spec.target, "tools", ())]
    user = None if spec.responder is None else spec.responder.python
    return any(tools) or user is not None or (spec.hooks is not None and bool(spec.hooks.before_task))


def fields_of_grader(block: GraderBlock) -> frozenset[str] | None:
    """Return the fields of a row that can change a grader's verdict; None if it may see all of them."""
    if block.sees_row:
        return None
    compiled = [template(source) for _, source, _ in templates_in(block)]
    return None if any(each.takes_row for each in compiled) else frozenset().union(*(each.names for each in compiled))
