"""Warns about checks that can hardly fail. They may be intended, so they are not rejected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from holdfast.spec.regex import compile_regex
from holdfast.spec.slow import Slow
from holdfast.spec.template import pattern_example

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.spec.grader_schema import GraderBlock
    from holdfast.spec.load import Eval
    from holdfast.spec.text_grader_schema import TextGrader
    from holdfast.spec.tool_grader_schema import ToolConstraintGrader

_ANSWERS: Final = ("", " ", "x", "\n", "A sentence, with the number 1.\nAnd another line.")
"""a pattern that matches all of these matches every answer"""
_TOOLS: Final = ("b", "read_file", "server-tool", "Z9")


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
    if block.type == "text":
        yield from _of_text(cast("TextGrader", block))
    if block.type == "tool_constraint":
        for name in cast("ToolConstraintGrader", block).allow_only:
            if not isinstance(name, str) and _is_everywhere(name.pattern, _TOOLS):
                yield f"the pattern {name.pattern!r} is found in every name, so {block.name!r} allows all tools"


def _of_text(block: TextGrader) -> Iterator[str]:
    for patterns, outcome in ((block.regex_match, "always holds"), (block.regex_not_match, "never holds")):
        for pattern in patterns:
            if _is_everywhere(pattern, _ANSWERS):
                yield f"the pattern {pattern!r} is found in every answer, so the check of {block.name!r} {outcome}"
    for field in block.alternatives:
        if any(part.isspace() for part in getattr(block, field)):
            yield f"{field} of {block.name!r} looks for white space, which nearly every answer contains"


def _is_everywhere(pattern: str, texts: Sequence[str]) -> bool:
    example = pattern_example(pattern)  # the row's values may be anything
    if example is None:
        return False
    try:
        return all(compile_regex(example).search(text) for text in texts)
    except (ValueError, Slow):  # of another dialect, or one that could take long
        return False
