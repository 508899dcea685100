"""Warns about checks that can hardly fail. They may be intended, so they are not rejected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from holdfast.spec.regex import compile_regex
from holdfast.spec.slow import Slow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.spec.grader_schema import GraderBlock
    from holdfast.spec.load import Eval
    from holdfast.spec.text_grader_schema import TextGrader

_ANSWERS: Final = ("", " ", "x", "\n", "A sentence, with the number 1.\nAnd another line.")
"""a pattern that matches all of these matches every answer"""


def vacuous_checks(spec: Eval) -> Iterator[str]:
    """Yield a notice for every check that passes, or fails, whatever the answer is."""
    for location, block in spec.placed_graders():
        for warning in _of_grader(block):
            yield f"{spec.document.where(location)}: {warning}"
    if spec.graders and all(block.weight == 0 for block in spec.graders):
        where = spec.document.where(("graders",))
        yield f"{where}: every grader has weight 0, so trials have no overall score and none passes"


def _of_grader(block: GraderBlock) -> Iterator[str]:
    if block.threshold == 0:
        yield f"threshold: 0 is met by every score, so {block.name!r} passes every output"
    if block.type != "text":
        return
    text = cast("TextGrader", block)
    for patterns, outcome in ((text.regex_match, "always holds"), (text.regex_not_match, "never holds")):
        for pattern in patterns:
            if _is_everywhere(pattern):
                yield f"the pattern {pattern!r} is found in every answer, so the check of {block.name!r} {outcome}"
    for field in block.templates:
        if any(part.isspace() for part in getattr(block, field)):
            yield f"{field} of {block.name!r} looks for white space, which nearly every answer contains"


def _is_everywhere(pattern: str) -> bool:
    try:
        return all(compile_regex(pattern).search(answer) for answer in _ANSWERS)
    except (ValueError, Slow):  # of another dialect, or one that could take long
        return False
