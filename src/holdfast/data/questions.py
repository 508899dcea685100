"""Refuse an eval that asks the target the same for every row, before anybody pays for it.

Most such evals have a prompt in which a field is spelled as another tool spells it: `{question}`. What rows ask is
compared until two of them differ, which is at the second row of nearly every dataset.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import ConfigError, Problem
from holdfast.spec.template import RENDER_ERRORS, Template, expression

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from holdfast.data.readers import Row
    from holdfast.spec.eval import Eval

_BRACED: Final = re.compile(r"\$\{\s*(\w+)\s*\}|(?<![\w\\{}])\{\s*(\w+)\s*\}(?!\})|%\((\w+)\)s")
"""fields as other tools spell them: `${x}`, `{x}`, `%(x)s`; but not `\\boxed{x}`"""
_LIKE_FIELDS: Final = re.compile(rf"{_BRACED.pattern}|\$(\w+)|<(\w+)>|\[\[?\s*(\w+)\s*\]\]?")
"""the same, and spellings that are often something else: `$x`, `<x>`, `[x]`"""
_PLACEHOLDERS: Final[Row] = {"prompt": "", "messages": [], "trial": 1}
"""variables of a target's templates beside the row's fields"""


class Questions:
    """Compares what rows ask the target, up to the first row that asks something else."""

    def __init__(self, spec: Eval) -> None:
        self._document = spec.document
        self._key = "messages" if spec.prompt is None else "prompt"
        self._asked: list[Callable[[Row], Any]] = []
        self._sources: list[str] = []
        self.names: set[str] = set()
        """fields that the conversation or the target uses"""
        for each in spec.templates():
            if each.grader is None:
                compiled = Template(each.source)
                self._sources.append(each.source)
                self.names |= (compiled.names | ({"row"} if compiled.takes_row else set())) - each.variables
                placeholders = {name: _PLACEHOLDERS[name] for name in each.variables}
                self._asked.append(partial(_render, compiled, placeholders))
        for location, formula in spec.expressions():
            # `stop_when` ends a conversation; it asks nothing.
            if location[0] not in ("graders", "checkpoints") and location != ("responder", "stop_when"):
                evaluate = expression(formula)
                self.names |= evaluate.names
                self._asked.append(evaluate)
        self.differ = False
        """two rows ask something else"""
        self._first: list[Any] | None = None

    def look(self, fields: Row) -> None:
        """Compare the next row."""
        if not self.names or self.differ:
            return
        try:
            asked = [ask(fields) for ask in self._asked]
        except RENDER_ERRORS:
            self.differ = True  # what is wrong with the row is said elsewhere
            return
        if self._first is None:
            self._first = asked
        self.differ = asked != self._first

    def problem(self, count: int, fields: Collection[str]) -> ConfigError | None:
        """Return the error of a dataset whose rows all ask the same; None if they differ, or there is one only."""
        if self.differ or count < 2:
            return None
        spellings = (_find(_LIKE_FIELDS, source, set(fields) - self.names) for source in self._sources)
        likely = next(filter(None, spellings), None)
        if self.names:
            message = f"is the same for all {count:,} rows, although it uses {', '.join(sorted(self.names))}"
        else:
            message = f"uses no field of the rows, so it is the same for all {count:,} of them"
        if likely is not None:
            spelled, name = likely
            message += f"; {spelled!r} looks like a field"
            remedy = f"Write {{{{ {name} }}}} for the field."
        else:
            named = ", ".join(sorted(fields))
            remedy = f"Write fields as {{{{ NAME }}}}; the rows have: {named}."
        remedy += f" For many answers to one prompt: one row and `trials: {count}`, or `same_prompt: true`."
        return ConfigError([Problem(self._document.where((self._key,)), message)], remedy=remedy)


def _render(compiled: Template, placeholders: Row, fields: Row) -> str:
    return compiled.render({**fields, **placeholders} if placeholders else fields)


def misspelled_fields(spec: Eval, fields: Collection[str]) -> Iterator[str]:
    """Yield a notice for each text that has a field of the rows as other tools spell it, and so as it is written."""
    for each in spec.templates():
        if not _BRACED.search(each.source):
            continue
        if (spelled := _find(_BRACED, each.source, set(fields) - each.compile().names)) is not None:
            text, name = spelled
            where = spec.document.where(each.location)
            yield f"{where}: {text!r} stands there as it is written; the row's field is written {{{{ {name} }}}}"


def _find(spellings: re.Pattern[str], source: str, fields: Collection[str]) -> tuple[str, str] | None:
    """Return the first part of a text that looks like a field of the rows, and the field's name."""
    for match in spellings.finditer(source):
        name = match[match.lastindex or 0]
        if name in fields:
            return match[0], name
    return None
